"""A conversation: messages, and the keys and values of their tokens, which stay from one answer to the next.

`selfattn.engine.decoder` keeps and finds tokens; `_causal.py` turns messages into ids, and generates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np

from selfattn import _core, _disk
from selfattn._check import Array, quoted
from selfattn.engine.decoder import Past, angles_of
from selfattn.engine.transformer import check_ids
from selfattn.engine.weights import kind_of
from selfattn.models._answers import Answer, collected, streamed
from selfattn.models._chat import checked_messages
from selfattn.models._generation import GenerationSettings, takes_settings

if TYPE_CHECKING:
    from selfattn.models._causal import CausalModel

FORMAT = "a conversation of selfattn, 1"


class Conversation:
    """A chat that goes on: :meth:`CausalModel.conversation` makes it, :meth:`ask` continues it.

    The keys and values of its tokens stay in memory. An answer computes only the tokens after the longest beginning that the messages
    have in common with those of the answer before: usually the new message. Where the template writes earlier messages in another way
    than before, or the oldest ones are left out, what follows is computed anew. So it is after a change of the model's weights.

    Attributes
    ----------
    messages : list of dict
        All messages so far. They may be changed between two calls.

    Notes
    -----
    Keys and values of earlier answers have been computed as these were generated. :meth:`CausalModel.chat` computes the same tokens
    as a part of the prompt, where sums are added in another order: logits are off by 2e-5 in SmolLM2-135M's Q4_1, where their standard
    deviation is 3.4. So an answer may, rarely, not be that of ``chat``. The same calls one after the other give the same answers, alone and with other conversations.

    Examples
    --------
    ::

        conversation = model.conversation("You answer in one sentence.")
        conversation.ask("What is the capital of France?")
        conversation.ask("And of Italy?")
    """

    def __init__(self, model: CausalModel, messages: list[dict[str, Any]]) -> None:
        self.model, self.messages = model, messages
        self._past = Past()
        self._weights: tuple[object, int] | None = None  # those by which it has been computed
        self._answers = False  # True while an answer is generated

    @property
    def cached_tokens(self) -> int:
        """The number of tokens whose keys and values are in memory."""
        return len(self._past.ids)

    @property
    def cached_bytes(self) -> int:
        """The bytes of these keys and values, unused room included."""
        return 0 if self._past.cache is None else self._past.cache.bytes

    def _check_idle(self, messages: list[Any] | None = None) -> None:
        """Refuse a call while another one is answered, or that began before another one changed the messages."""
        if self._answers:
            raise RuntimeError(
                "an answer of this conversation has not ended: iterate to its end, or close() it"
            )
        if messages not in (None, self.messages):
            raise RuntimeError(
                "the messages of this conversation have changed since this answer was asked for"
            )

    @takes_settings
    def ask(
        self, message: str | Mapping[str, Any], max_new_tokens: int | None = None, *, stream: bool = False,
        **how: Unpack[GenerationSettings],
    ) -> Any:  # fmt: skip
        """Answer a message; it and the answer become the last messages.

        Parameters
        ----------
        message : str or dict
            What the user says, or a message with another role, as of :meth:`CausalModel.chat`.
        max_new_tokens : int, optional
            By default as many as the folder says, or 512.
        stream : bool, default False

        Returns
        -------
        str, Answer, or iterator
            The answer. If ``stream``, the conversation goes on after the iterator's end; after ``close()`` with the pieces so far.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`CausalModel.chat`. The messages are then as before.
        RuntimeError
            An answer is being generated, or its iterator has not ended.
        """
        pieces = answers(self.model, [self], [message], {**how, "max_new_tokens": max_new_tokens})
        return streamed(pieces, True) if stream else collected(pieces, True)

    def save(self, path: _disk.PathLike) -> None:
        """Save messages, keys and values as a safetensors file, whole or not at all.

        Parameters
        ----------
        path : str or path

        Raises
        ------
        RuntimeError
            An answer has not ended.
        OSError, ImportError
            The file cannot be written; ``safetensors`` is missing: ``pip install 'selfattn[models]'``.
        """
        self._check_idle()
        past = self._past if self._weights == state_of(self.model) else Past()
        cache = past.cache or self.model._decoder(1).new_cache(1)
        kept = {name: getattr(cache, name)[:, 0, :, : len(past.ids)] for name in ("keys", "values")}
        arrays = {"ids": past.ids, **kept}
        said = {"format": FORMAT, "model": fingerprint(self.model), "messages": json.dumps(self.messages)}
        said |= {"positions": str(cache.most), "sha256": digest(arrays.values(), said["messages"])}
        _disk.write_file(Path(path), _disk.to_safetensors(arrays, said))

    @classmethod
    def load(cls, path: _disk.PathLike, model: CausalModel) -> Conversation:
        """Load a conversation that :meth:`save` has written, to go on with it.

        Parameters
        ----------
        path : str or path
        model : CausalModel
            The model that it was with: the same configuration, and weights of the same bits.

        Returns
        -------
        Conversation

        Raises
        ------
        ValueError
            The file is damaged, no conversation, or one with another model or ``cache_dtype``.
        OSError, ImportError
            The file cannot be read; ``safetensors`` is missing.
        """
        arrays, said = _disk.read_safetensors(Path(path))
        if said.get("format") != FORMAT or set(arrays) != {"ids", "keys", "values"}:
            raise ValueError(f"{path} is no conversation, such as conversation.save() writes")
        if said.get("model") != fingerprint(model):
            raise ValueError(f"{path} is a conversation with another model, or with other weights")
        if arrays["keys"].dtype != model._decoder(1).cache_dtype:
            own, kind = f"model.cache_dtype is {model.cache_dtype}", kind_of(arrays["keys"])
            raise ValueError(f"{path} has keys and values of {kind}; {own}")
        found, (ids, keys, values) = cls(model, []), (arrays[name] for name in ("ids", "keys", "values"))
        try:
            if said["sha256"] != digest((ids, keys, values), said["messages"]):
                raise ValueError("its checksum is another")
            messages = _disk.parse_json(Path(path), said["messages"].encode())
            found.messages = messages and checked_messages(messages, model.chat_template or "")
            decoder = model._decoder(min(int(said["positions"]), model.max_positions))
            past, cache = found._past, decoder.new_cache(1)
            if ids.ndim != 1 or ids.dtype != np.int64 or len(ids) > decoder.max_seq_len:
                raise ValueError(f"its ids are {ids.dtype} of shape {ids.shape}")
            check_ids(ids, model.vocab_size, "it has")
            past.ids = ids
            cache.reserve(len(ids))
            cache.keys[:, 0, :, : len(ids)], cache.values[:, 0, :, : len(ids)] = keys, values
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from None
        cache.lengths[:] = len(ids)
        past.cache, past.angles, found._weights = cache, angles_of(decoder), state_of(model)
        return found


def digest(arrays: Iterable[Array], text: str) -> str:
    """Return the SHA-256 of a text and of arrays' bytes."""
    found = hashlib.sha256(text.encode())
    for array in arrays:
        found.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return found.hexdigest()


def fingerprint(model: CausalModel) -> str:
    """Return a checksum of a model's configuration and weights."""
    weights = model.arrays | {name: quants.raw for name, quants in model.blocks.items()}
    told = [(name, str(weights[name].dtype), weights[name].shape) for name in sorted(weights)]
    text = json.dumps([model.config, told], sort_keys=True, default=str)
    return digest((weights[name] for name in sorted(weights)), text)


def answers(
    model: CausalModel,
    conversations: Sequence[Conversation],
    messages: Sequence[str | Mapping[str, Any]],
    how: dict[str, Any],
) -> Iterator[list[Any]]:
    """Return an iterator of what is new of each answer at each step."""
    if isinstance(messages, str):
        raise TypeError(f"messages must be a list with one for each conversation, not {quoted(messages)}")
    if len(conversations) != len(messages) or not conversations:
        what = f"{len(conversations)} conversations and {len(messages)} messages"
        raise ValueError(f"each conversation needs one message; there are {what}")
    for n, each in enumerate(conversations):
        if not isinstance(each, Conversation):
            raise TypeError(f"conversation {n} is {quoted(each)}; model.conversation() makes one")
        if each.model is not model:
            raise ValueError(f"conversation {n} is one of another model")
        if each in conversations[:n]:
            raise ValueError(f"conversation {n} is given twice")
        each._check_idle()
    asked = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    chats = [[*each.messages, one] for each, one in zip(conversations, asked, strict=True)]
    weights = state_of(model)
    for each in conversations:
        if each._weights != weights:
            each._past, each._weights = Past(), weights
    pieces = model._chat_answers(chats, how, [each._past for each in conversations])
    return _kept(pieces, conversations, chats)


def _kept(
    pieces: Iterator[list[Any]], conversations: Sequence[Conversation], chats: list[list[Any]]
) -> Iterator[list[Any]]:
    """Pass on pieces of answers, and add messages and answers to conversations at the end, unless there is an error."""
    for each, chat in zip(conversations, chats, strict=True):
        each._check_idle(chat[:-1])
    found = [""] * len(chats)
    for each in conversations:
        each._answers = True
    try:
        try:
            for step in pieces:
                if not isinstance(step[0], Answer):
                    found = [text + piece for text, piece in zip(found, step, strict=True)]
                yield step
        except GeneratorExit:
            pieces.close()  # type: ignore[attr-defined]
        for each, chat, text in zip(conversations, chats, found, strict=True):
            each.messages += [chat[-1], {"role": "assistant", "content": text}]
    finally:
        for each in conversations:
            each._answers = False


def state_of(model: CausalModel) -> tuple[object, int]:
    """Return what differs after any change of a model's weights."""
    mark = model._prepared.setdefault("weights", object())  # `_prepared` is emptied when an array is replaced
    return mark, _core._checksum(tuple(x for x in model.arrays.values() if x.flags.writeable))
