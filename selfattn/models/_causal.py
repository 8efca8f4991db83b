"""Language models: logits, hidden states and steps; generation, chats and perplexity; and the files of a folder about text.

Settings of a call win over those of the folder's ``generation_config.json``, or of its ``config.json`` where it has no such file.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import compress, count
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import numpy as np

from selfattn import _disk
from selfattn._check import Array, check_size, quoted, warn
from selfattn._docs import repeats
from selfattn.engine import transformer
from selfattn.engine.decoder import Continued, Decoder, Past, head_vjp
from selfattn.engine.sampling import DRAWING, Sampling, generate, sampling
from selfattn.engine.weights import BITS, QUANTS, Weight, no_gradients
from selfattn.functional import log_softmax
from selfattn.models import _tokenizer
from selfattn.models._answers import PartialAnswer, Stops, collected, stops_of, streamed
from selfattn.models._chat import rendered
from selfattn.models._conversation import Conversation, answers
from selfattn.models._folder import Config, read_settings
from selfattn.models._pretrained import Parameters, Pretrained, add
from selfattn.models._table import NOT_DONE, SETTINGS, FolderWarning
from selfattn.models._tokenizer_class import SPECIAL_TOKENS, SPECIAL_TOKENS_MAP
from selfattn.nn.module import Pullback, checked_pullback
from selfattn.text import TextStream, spelled, without_pads

LEAST = 256  # positions that are made ready
# The digits of 8 bits to which rows of prompts are rounded, where weights are quants.
PRECISIONS = {"float32": 0, "int16": 2, "int8": 1}
ROWS = 256  # the most rows of logits at once, where they are only summed up

CACHES = {"float16": np.dtype(np.float16), "bfloat16": BITS}  # of 16 bits, as the core takes them
GENERATION_CONFIG, TEMPLATE = "generation_config.json", "chat_template.jinja"
# What other programs call arguments of `generate`.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens", "n_predict": "max_new_tokens", "seed": "rng", "stop_strings": "stop",
    "do_sample": 'temperature, or sampling="folder"', "eos_token_id": "stop", "top_logprobs": "logprobs", "n_probs": "logprobs",
    "min_tokens": "min_new_tokens", "max_completion_tokens": "max_new_tokens", "repeat_penalty": "repetition_penalty",
}  # fmt: skip


def check_precision(precision: str) -> None:
    """Refuse a name that is not in PRECISIONS."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {quoted(precision)}"
        )


class AnswerInterrupted(UserWarning):
    """Ctrl-C has ended an answer between two tokens."""


class CausalModel(Pretrained):
    """A language model. Subclasses name its parameters and make the core's settings.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The context: the longest sequence, prompt and answer together.
    tied : bool
        The head is the table.
    tokenizer : tokenizers.Tokenizer or None
    chat_template : str or None
        The Jinja2 template that turns a chat into a text.
    special_tokens : dict of str to str
        Variables of the template, such as ``bos_token``.
    stop_ids : frozenset of int
        Tokens that end an answer.
    precision : {"float32", "int16", "int8"}
        The numbers to which rows of prompts are rounded where they multiply quants; see :func:`selfattn.models.load`.
    generation_config : dict
        The folder's settings of generation, by Transformers' names: the defaults of :meth:`generate` and :meth:`chat`.
    """

    heads: ClassVar[tuple[str, ...]] = (
        "lm_head.", "score.", "classifier.", "qa_outputs.", "multiple_choice_head.",
    )  # fmt: skip
    word_table: ClassVar[str]
    vocab_size: int
    max_positions: int
    tied: bool
    tokenizer: Any = None
    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    stop_ids: frozenset[int] = frozenset()
    generation_config: Mapping[str, Any] = MappingProxyType({})
    kept: Mapping[str, bytes] = MappingProxyType({})  # small files of the folder
    precision: str = "float32"
    _folder: Path | None = None
    # chat_template, stop_ids and generation_config, as the folder has them.
    _as_read: tuple[Any, ...] = (None, frozenset(), {})
    _cache_dtype: str | None = None
    _warned = False  # True after the warning that the folder's settings would draw

    # --------------------------------------------------------------------------------------------------- the core

    def set_precision(self, precision: str) -> None:
        """Set the numbers to which rows of prompts are rounded; :func:`selfattn.models.load` says more.

        Raises
        ------
        ValueError
            The name is another one, or the model has no quants.
        """
        check_precision(precision)
        if precision != "float32" and not any(QUANTS[weight.kind][0] > 1 for weight in self.blocks.values()):
            raise ValueError(
                f"precision={precision!r} is for weights in quants; the weights of this model are {self.dtype}"
            )
        self.precision = precision
        self._prepared.pop("decoder", None)

    def _head(self, p: Parameters) -> Weight:
        name = self.word_table if self.tied else "lm_head.weight"
        return p.weight(name, self.vocab_size, self.hidden_size)

    def _decoder(self, length: int) -> Decoder:
        """Return a decoder of sequences of this length, made once for all lengths up to a power of two."""
        ready = self._prepared.get("decoder")
        if ready is None or ready.max_seq_len < length:
            longest = min(max(LEAST, 1 << (length - 1).bit_length()), self.max_positions)
            settings, parameters = self._built(longest)
            settings = settings._replace(digits=PRECISIONS[self.precision])
            ready = Decoder(settings, self._head(parameters), max_seq_len=longest)
            self._prepared["decoder"] = ready
        ready.cache_dtype = CACHES.get(self.cache_dtype, ready.dtype)
        return ready

    @property
    def cache_dtype(self) -> str:
        """How keys and values are kept while tokens are generated: "float32", or rounded to "float16" or "bfloat16".

        16 bits halve the memory and the time in which a token reads its past. All else is computed as before. Float16 has three more
        bits than bfloat16, and ends at 65504: keys and values beyond it become infinite. A model of float64 keeps float64.
        """
        return self._cache_dtype or ("float64" if self.dtype == "float64" else "float32")

    @cache_dtype.setter
    def cache_dtype(self, name: str) -> None:
        names = ["float64"] if self.dtype == "float64" else ["float32", *CACHES]
        if name not in names:
            raise ValueError(f"cache_dtype must be {' or '.join(names)}, not {quoted(name)}")
        self._cache_dtype = name

    # ------------------------------------------------------------------------------------------------------- calls

    def forward(self, text: str | Sequence[int]) -> Array:
        """Compute logits, as :meth:`logits` does."""
        return self.logits(text)

    def logits(self, text: str | Sequence[int]) -> Array:
        """Compute the logits of the token after each token.

        Parameters
        ----------
        text : str or sequence of int
            A text, or its ids. The tokenizer may put a special token first; :meth:`tokens` shows it.

        Returns
        -------
        ndarray of float32, shape (L, vocab_size)
            Row i is for the token after token i. Of float64 parameters, float64.

        Raises
        ------
        TypeError, ValueError
            Neither text nor ids; no tokens, or more than ``max_positions``; ids beyond the vocabulary.
        """
        ids = self._ids(text)
        return self._decoder(len(ids)).logits(ids)

    def vjp(self, text: str | Sequence[int] | Array) -> tuple[Array, Pullback]:
        """Compute logits, and their pullback: from their gradient to those of the parameters or, for rows, of the rows too.

        Parameters
        ----------
        text : str, sequence of int, or ndarray of the model's float dtype, shape (L, d)
            A text, its ids, or rows in place of what enters the first layer, ``hidden_states(text)[0]``.

        Returns
        -------
        logits : ndarray, shape (L, vocab_size)
            As of :meth:`logits`; of bfloat16 weights, without rounding what they multiply.
        pullback : callable
            ``dy -> grads``, by the names of :meth:`parameters`; of bfloat16 weights, float32. For rows, ``dy -> (dx, grads)``. Weights of
            int8 and of a GGUF file have no gradients: for rows ``grads`` is then empty, and their layers are expanded one at a time.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`logits`; rows of another dtype or shape; a text or ids, where weights have no gradients.

        Examples
        --------
        Which tokens of a text speak for the likeliest next one (gradient × input):

        >>> import numpy as np
        >>> from selfattn import models
        >>> config = {"vocab_size": 50, "n_embd": 8, "n_head": 2, "n_layer": 1}
        >>> model = models.GPT2LMHeadModel(config, rng=0)
        >>> rows = model.hidden_states([3, 1, 4])[0]
        >>> logits, pullback = model.vjp(rows)
        >>> dy = np.zeros_like(logits)
        >>> dy[-1, logits[-1].argmax()] = 1
        >>> dx, grads = pullback(dy)
        >>> (dx * rows).sum(axis=1).shape
        (3,)
        """
        given = isinstance(text, np.ndarray) and text.dtype.kind == "f"
        inputs = self._checked_rows(cast(Array, text)) if given else self._ids(text)
        settings, parameters = self._built(len(inputs))
        if given:
            settings = transformer.without_table(settings)
        trains = self.dtype in ("float32", "float64", "bfloat16")
        if not trains and not given:
            raise no_gradients(self.dtype)
        rounded = transformer.arrays(settings)  # the origins of gradients
        inner = transformer.expanded(settings) if trains else settings
        ends = np.array([0, len(inputs)])
        rows, back = transformer.vjp(inner, inputs, ends, wants_parameters=trains)
        head = self._head(parameters)
        logits, head_back = head_vjp(np.asarray(head) if trains else head, rows)

        def backward(dy: Array) -> Any:
            d_rows, d_head = head_back(dy)
            dx, grads, _ = back(d_rows)
            own = [(head, d_head), *zip(rounded, grads, strict=True)] if trains else []
            found = parameters.gradients(*zip(*own, strict=True)) if own else {}
            if settings.positions is not None:
                d_positions = np.zeros_like(settings.positions)
                d_positions[: len(dx)] = dx
                add(found, parameters.origins[id(settings.positions)][1], d_positions)
            return (dx, self._named(found)) if given else self._named(found)

        return logits, checked_pullback(self, logits, self.arrays.values(), backward)

    def _checked_rows(self, rows: Array) -> Array:
        """Check rows (L, d) that were given in place of a text."""
        wanted = np.dtype("float64" if self.dtype == "float64" else "float32")
        if rows.dtype != wanted:
            raise TypeError(f"rows must be {wanted}, as the model computes, not {rows.dtype}")
        if rows.ndim != 2 or rows.shape[1] != self.hidden_size or not 0 < len(rows) <= self.max_positions:
            most = f"(L, {self.hidden_size}) with L in 1...{self.max_positions}"
            raise ValueError(f"rows must have shape {most}, not {rows.shape}")
        return np.ascontiguousarray(rows)

    def _one(self, text: str | Sequence[int]) -> tuple[transformer.Transformer, Array, list[str] | None]:
        ids = self._ids(text)
        return self._built(len(ids))[0], ids, None if self.tokenizer is None else spelled(self.tokenizer, ids)

    # -------------------------------------------------------------------------------------------------------- ids

    def _encoded(self, text: str, number: int = 0, special: bool = True) -> Array:
        """Return the ids of a text."""
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        _tokenizer.check_unicode(text, number, "text")
        with _disk.library_errors(f"the tokenizer cannot take text {number}"):
            encoding = self.tokenizer.encode(text, add_special_tokens=special)
        if encoding.overflowing:
            on = f"text {number} was cut: the truncation of the model's tokenizer has been switched on"
            warn(f"{on}; model.tokenizer.no_truncation() switches it off")
        return np.array(without_pads(self.tokenizer, encoding, encoding.ids), np.int64)

    def _ids(self, text: Any, number: int = 0, any_length: bool = False) -> Array:
        """Return the ids of a text, or check those that are given; of any length, or at most as many as the model takes."""
        if not isinstance(text, str):
            longest = None if any_length else self.max_positions
            return np.array(_tokenizer.checked_ids(text, number, self.vocab_size, longest, "text"), np.int64)
        ids = self._encoded(text, number)
        if any_length:
            return ids
        if not ids.size:
            raise ValueError(f"text {number}, {quoted(text)}, has no tokens")
        if ids.size > self.max_positions:
            most = self.max_positions
            raise ValueError(f"text {number} has {ids.size} tokens; this model takes {most} at most")
        return ids

    def tokens(self, text: str | Sequence[int]) -> list[str]:
        """Return the pieces of a text, as strings, special ones included.

        Parameters
        ----------
        text : str or sequence of int

        Returns
        -------
        list of str
            As the tokenizer writes them: a byte-level one has Ġ for a space.
        """
        ids = self._ids(text, any_length=True)
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids.tolist()]

    # ------------------------------------------------------------------------------------------------- generation

    def generate(
        self, prompt: Any, max_new_tokens: int | None = None, *, temperature: float | None = None, top_k: int | None = None,
        top_p: float | None = None, min_p: float | None = None, repetition_penalty: float | None = None,
        presence_penalty: float | None = None, frequency_penalty: float | None = None,
        logit_bias: Mapping[int | str, float] | None = None, stop: str | Sequence[str] | None = None, rng: Any = None,
        stream: bool = False, details: bool = False, logprobs: int | None = None, sampling: str | None = None, **more: Any,
    ) -> Any:  # fmt: skip
        """Continue a prompt, or each of many at once.

        Parameters
        ----------
        prompt : str, sequence of int, or list of such
            Texts or ids, of any lengths.
        max_new_tokens : int, optional
            By default as many as the folder says, or 100.
        temperature : float, optional
            0, the default, takes the most probable token each time. Else logits are divided by it, and a token is drawn.
        top_k : int, optional
            Draw only from the k most probable tokens.
        top_p : float, optional
            Draw only from the most probable tokens that together have this probability.
        min_p : float, optional
            Draw only from tokens that have at least this share of the most probable token's probability.
        repetition_penalty : float, optional
            Above 1, tokens that occur already, also in the prompt, become less probable. By default what the folder says, or 1.
        presence_penalty, frequency_penalty : float, default 0
            From -2 to 2, as OpenAI defines them: taken from the logit of each token that is new already, once and as often as it came.
        logit_bias : dict of int or str to float, optional
            What is added to the logits of tokens, by id or as :meth:`tokens` writes them; -inf forbids a token. Also of sequences of
            tokens, and by Transformers' name: ``sequence_bias``.
        stop : str or sequence of str, optional
            An answer ends before the first of these texts, which may have special tokens. By default what the folder says.
        rng : int, sequence of int, or Generator, optional
            The seed. Prompt i of several has rng + i, or element i of a sequence.
        stream : bool, default False
        details : bool, default False
            Also tell why an answer ended, and how many tokens it took.
        logprobs : int, optional
            With ``details``, tell log p of each new token, and of so many likeliest tokens at its place.
        sampling : {"folder"}, optional
            Draw as the folder says: its ``do_sample``, ``temperature``, ``top_k`` and so on, unless the call has others.
        **more
            Other settings of Transformers' ``GenerationConfig`` about lengths, penalties, and tokens that are forbidden, forced or
            drawn, such as ``min_new_tokens`` or ``bad_words_ids``, in its order. By default what the folder says.

        Returns
        -------
        str, or list of str
            The new text, without special tokens; the model's own end of text ends it. For a prompt of ids an ndarray of ids,
            the one that ended it included. The tokens of a prompt do not depend on the other prompts.
        iterator
            If ``stream``: of pieces of that text, whole characters; of ids for a prompt of ids. For a list of prompts, of lists
            with a piece for each, which may be empty: a str, or a list of ids.
        Answer
            If ``details``, in place of a str or an ndarray; after the last piece of an iterator, one, or a list with one for each.

        Raises
        ------
        TypeError, ValueError
            A prompt is empty or beyond the context, an argument is out of its range, or the model's logits are NaN.

        Warns
        -----
        UserWarning
            The context was full, or Ctrl-C was pressed: the answer ends there, between two tokens. The folder says that tokens
            are to be drawn, and the call does not say whether: once a model. A prompt begins with the bos token twice.

        Examples
        --------
        ::

            model = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
            print(model.generate("The capital of France is", 5))
            for piece in model.generate("Once upon a time", temperature=0.8, rng=0, stream=True):
                print(piece, end="", flush=True)
        """
        given = _tokenizer.Given(prompt)
        prompts = list(given.sentences)
        if not prompts:
            raise ValueError("there are no prompts")
        ids = [self._ids(each, n) for n, each in enumerate(prompts)]
        texts = [isinstance(each, str) for each in prompts]
        for n in compress(count(), texts):
            self._check_begin(ids[n], f"text {n}")
        more |= {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
            "repetition_penalty": repetition_penalty, "presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias, "stop": stop, "rng": rng, "details": details, "logprobs": logprobs,
        }  # fmt: skip
        how = self._how("generate", 100, sampling, more)
        pieces = self._answers(ids, texts, how, self.stop_ids, ids)
        return streamed(pieces, given.alone) if stream else collected(pieces, given.alone)

    def chat(
        self, messages: Any, max_new_tokens: int | None = None, *, stream: bool = False, sampling: str | None = None, **how: Any
    ) -> Any:  # fmt: skip
        """Answer the last message of a chat.

        Parameters
        ----------
        messages : str, or list of dict; or list of such lists
            ``{"role": "user", "content": "…"}`` and so on, as the model's template takes them; a str is a single message of the user.
            A content may be a list of parts, ``{"type": "text", "text": "…"}``, which become lines. A list of lists is several chats,
            which are answered together.
        max_new_tokens : int, optional
            By default as many as the folder says, or 512.
        stream : bool, default False
        sampling : {"folder"}, optional
        **how
            ``temperature``, ``logit_bias``, ``stop``, ``rng``, ``details`` and more, as for :meth:`generate`.

        Returns
        -------
        str, Answer, or iterator
            The answer, which ends where the template ends a turn, too. To continue, append its text as
            ``{"role": "assistant", "content": answer}``, and the next message; :meth:`conversation` does so, and computes only what is
            new. For several chats a list of answers, or an iterator of lists with a piece for each, which may be empty.

        Raises
        ------
        TypeError, ValueError
            There are no messages, a role is not known, the model has no chat template, or the template refuses them or takes too
            long; or as for :meth:`generate`.
        ImportError
            Jinja2 is not installed: ``pip install 'selfattn[models]'``.

        Warns
        -----
        UserWarning
            The chat leaves less than a quarter of the context for an answer that may be so long: its oldest turns are left out, but
            not the messages before them, such as a system message. Or as for :meth:`generate`.

        Notes
        -----
        The template comes with the model, and so is not trusted: it runs in Jinja2's sandbox, in a bounded number of steps.

        Examples
        --------
        ::

            model.chat("What is the capital of France? Answer in one sentence.")
        """
        several = (
            isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        )
        pieces = self._chat_answers(messages if several else [messages], max_new_tokens, sampling, how)
        return streamed(pieces, not several) if stream else collected(pieces, not several)

    def _chat_answers(
        self,
        chats: Sequence[Any],
        max_new_tokens: int | None,
        sampling: str | None,
        how: dict[str, Any],
        pasts: Sequence[Past] | None = None,
    ) -> Iterator[list[Any]]:
        """Return an iterator of what is new of each chat's answer at each step."""
        how = self._how("chat", 512, sampling, how | {"max_new_tokens": max_new_tokens})
        room = min(check_size("max_new_tokens", how["max_new_tokens"]), self.max_positions // 4)
        most = self.max_positions - max(room - 1, 0)  # the last token needs no place
        ids = [self._fitting(chat, most) for chat in chats]
        for n, own in enumerate(ids):
            self._check_begin(own, f"chat {n}" if len(ids) > 1 else "the chat")
        ends = self.stop_ids | self._ends_of_turns()
        return self._answers(ids, [True] * len(ids), how, ends, [[]] * len(ids), pasts)

    def conversation(self, system: str | None = None) -> Conversation:
        """Begin a conversation, which keeps the keys and values of its tokens from one answer to the next.

        Parameters
        ----------
        system : str, optional
            The system message, before all others.

        Returns
        -------
        Conversation
            ``conversation.ask("…")`` answers a message.
        """
        return Conversation(self, [] if system is None else [{"role": "system", "content": system}])

    def ask(
        self,
        conversations: Sequence[Conversation],
        messages: Sequence[str | Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        sampling: str | None = None,
        **how: Any,
    ) -> Any:
        """Answer a message in each of several conversations, together.

        Parameters
        ----------
        conversations : sequence of Conversation
            Each is one of this model's, and none is there twice.
        messages : sequence of str or dict
            One for each, as of :meth:`Conversation.ask`.
        max_new_tokens, stream, sampling, **how
            As for :meth:`chat`. Conversation i has rng + i, or element i of a sequence.

        Returns
        -------
        list of str, or iterator of lists
            The answers, each as alone; or pieces of them.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            The numbers differ, a conversation is another model's, is given twice, or has an answer that has not ended; or as for
            :meth:`chat`. All messages are then as before.
        """
        pieces = answers(self, conversations, messages, max_new_tokens, sampling, how)
        return streamed(pieces, False) if stream else collected(pieces, False)

    def _fitting(self, messages: Any, most: int) -> Array:
        """Return the ids of a chat, without its oldest turns if there are more than ``most``."""
        ids = self._encoded(self.chat_prompt(messages), special=False)
        if ids.size <= most:
            return ids
        chat = [{"role": "user"}] if isinstance(messages, str) else messages
        turns = [n for n, message in enumerate(chat) if message["role"] == "user"]

        def without(turn: int) -> Array:
            kept = [*messages[: turns[0]], *messages[turns[turn] :]]
            return self._encoded(self.chat_prompt(kept), special=False)

        first = 0
        if len(turns) > 1:  # the last turn stays
            first = 1 + bisect_left(range(1, len(turns) - 1), True, key=lambda n: without(n).size <= most)
        kept = without(first) if first else ids
        if kept.size > self.max_positions:
            limit = f"{self.max_positions} at most, the answer included"
            raise ValueError(f"the chat has {kept.size} tokens; this model takes {limit}")
        if first:
            what = f"the chat has {ids.size} tokens, and the context {self.max_positions}"
            warn(f"{what}: its oldest {turns[first] - turns[0]} messages are left out")
        return kept

    def _ends_of_turns(self) -> set[int]:
        """Return the special token that the template writes after what the model says, which may not be among `stop_ids`."""
        assert self.chat_template is not None
        said = "selfattn"
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        try:
            text = rendered(self.chat_template, chat, self.special_tokens, answer=False)
        except ValueError:  # the template has other rules
            return set()
        after = self._encoded(text.rpartition(said)[2].lstrip() if said in text else "", special=False)
        added = self.tokenizer.get_added_tokens_decoder()
        return {n for n in after[:1].tolist() if n in added}

    def _check_begin(self, ids: Array, what: str) -> None:
        """Warn of a text whose bos token comes twice."""
        bos = self.special_tokens.get("bos_token")
        if bos is not None and ids.size > 1 and ids[0] == ids[1] == self.tokenizer.token_to_id(bos):
            why = "the tokenizer, or the chat template, may put one before the text that is given"
            warn(f"{what} begins with {bos} twice; {why}: leave one out")

    @repeats(chat)
    def chat_prompt(self, messages: Any) -> str:
        """Return the text that :meth:`chat` continues.

        Returns
        -------
        str
            The messages in the form of the model's template, with the beginning of an answer.
        """
        if self.chat_template is None:
            trained = "such as one in the form that the model was trained with"
            raise ValueError(f"this model has no chat template; generate() continues any text, {trained}")
        return rendered(self.chat_template, messages, self.special_tokens)

    def _how(self, call: str, most: int, sampling: str | None, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a call, and those of the folder where it has none."""
        names = {*Sampling._fields, "max_new_tokens", "max_length", "stop", "rng", "details", "logprobs"}
        for name in set(given) - names:
            near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, names, 1)
            hint = f"; its name here is {near[0]}" if near else ""
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
        if sampling not in (None, "folder"):
            raise ValueError(f"sampling must be 'folder' or None, not {quoted(sampling)}")
        given = {name: value for name, value in given.items() if value is not None}
        said = {name: value for name, value in self.generation_config.items() if value is not None}
        draws = said.pop("do_sample", False)
        drawing = {name: said.pop(name) for name in DRAWING if name in said}
        if sampling == "folder" and (draws or "temperature" in given):
            drawing = {"temperature": 1.0, "top_k": 50} | drawing | given  # Transformers' defaults
            if drawing["temperature"] != 0:
                said |= {name: x for name, x in drawing.items() if name != "top_k" or x != 0}
        elif draws and "temperature" not in given and not self._warned:
            as_said = ", ".join(f"{name}={value}" for name, value in drawing.items()) or "temperature=1.0"
            so = "this takes the most probable token each time, as temperature=0 says"
            how = 'sampling="folder" (--sampling folder) draws so'
            warn(f"the model's settings would draw tokens with {as_said}; {so}; {how}")
            self._warned = True
        own = {"stop": said.pop("stop_strings", None), "details": False, "logprobs": None}
        found = {"max_new_tokens": most} | own | said | given
        if not isinstance(found["details"], bool):
            raise TypeError(f"details must be True or False, not {quoted(found['details'])}")
        top, biases = found["logprobs"], found.get("logit_bias")
        if top is not None and not (found["details"] and check_size("logprobs", top, 0) <= self.vocab_size):
            raise ValueError(f"logprobs needs details=True, and at most {self.vocab_size} tokens, not {top}")
        if isinstance(biases, Mapping):
            found["logit_bias"] = self._by_id(biases)
        if "max_new_tokens" in given or ("max_new_tokens" in said and "max_length" not in given):
            found.pop("max_length", None)
        return found

    def _answers(
        self, ids: list[Array], texts: list[bool], how: dict[str, Any], ends: Iterable[int], before: Sequence[Any],
        pasts: Sequence[Past] | None = None,
    ) -> Iterator[list[Any]]:  # fmt: skip
        """Return an iterator of the new str or list of ids of each prompt at each step; arguments are checked at the call.

        ``ends`` are the ids that end an answer, ``before`` the ids that the text of an answer continues, ``pasts`` what is known of
        each sequence.
        """
        details, top, stop = (how.pop(name) for name in ("details", "logprobs", "stop"))
        if stops_of(stop) and self.tokenizer is None:
            raise ValueError(f"stop needs text: {_tokenizer.missing(self._folder)}")
        new, whole = (check_size(name, how.get(name, 1)) for name in ("max_new_tokens", "max_length"))
        longest = whole if "max_length" in how else max(map(len, ids)) + new
        decoder = self._decoder(min(longest, self.max_positions))
        stops, stop_ids = Stops.of(stop, self.tokenizer), frozenset(ends)
        answers = []
        for own, text, given in zip(ids, texts, before, strict=True):
            wants_text = text or stops.given or (details and self.tokenizer is not None)
            stream = TextStream(self.tokenizer, given) if wants_text else None
            most = min(whole - len(own) if "max_length" in how else new, self.max_positions - len(own) + 1)
            answers.append(PartialAnswer(stream, text, stops, most, top))

        def ended(i: int, new: int, logits: Array) -> bool:
            return answers[i].add(new, new in stop_ids, logits)

        continued = None if pasts is None else Continued(decoder, pasts)
        how |= {"context": self.max_positions, "ends": ended, "stop_ids": stop_ids}
        steps = generate(continued or decoder, ids, **how)

        def pieces() -> Iterator[list[Any]]:
            done = 0
            try:
                for done, _ in enumerate(steps, 1):  # noqa: B007
                    yield [answer.new() for answer in answers]
            except KeyboardInterrupt:
                warn(AnswerInterrupted(f"interrupted after {done} new tokens; the answer ends there"))
            finally:
                if continued is not None:
                    continued.finish()
            for answer in answers:
                answer.finish()
            yield [answer.new() for answer in answers]
            if details:
                yield [answer.whole(len(own)) for answer, own in zip(answers, ids, strict=True)]

        return pieces()

    def _by_id(self, biases: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return ``logit_bias=`` of a call with ids in place of tokens."""
        found: dict[Any, Any] = {}
        for token, bias in biases.items():
            n = (self.tokenizer and self.tokenizer.token_to_id(token)) if isinstance(token, str) else token
            if n is None:
                as_text = f"as a text it is {self.tokens(token)}"
                raise ValueError(f"logit_bias has {quoted(token)}, which is no token; {as_text}")
            if check_size("a token of logit_bias", n, 0) >= self.vocab_size or n in found:
                of = "once" if n in found else f"below {self.vocab_size}"
                raise ValueError(f"logit_bias must have each token {of}, not {n}")
            found[n] = bias
        return found

    # -------------------------------------------------------------------------------------------------- evaluation

    def perplexity(self, text: str | Sequence[int], *, window: int | None = None, stride: int | None = None) -> float:  # fmt: skip
        """Compute the perplexity of a text: e to the mean of −log p over its tokens but the first.

        Parameters
        ----------
        text : str or sequence of int
            Of any length from two tokens on.
        window : int, optional
            How many tokens the model sees at once, by default its context.
        stride : int, optional
            How many tokens of a longer text each further window adds, by default half a window. Each token is predicted once,
            from at least ``window - stride`` tokens before it.

        Returns
        -------
        float
            Its logarithm is the mean negative log-likelihood of a token, in nats. Infinite where a token has probability 0.

        Raises
        ------
        ValueError
            The text has fewer than two tokens, or window or stride do not fit.
        """
        return float(self.evaluate(text, window=window, stride=stride)["perplexity"])

    @repeats(perplexity)
    def evaluate(
        self, text: str | Sequence[int], *, window: int | None = None, stride: int | None = None, most_tokens: int | None = None
    ) -> dict[str, Any]:  # fmt: skip
        """Compute how well the model predicts a text.

        Parameters
        ----------
        most_tokens : int, optional
            Use only this many, the first ones.

        Returns
        -------
        dict
            ``perplexity``; ``mean_nll``, the mean negative log-likelihood of a token in nats; ``tokens``, how many were predicted.
        """
        ids = self._ids(text, any_length=True)
        if most_tokens is not None:
            ids = ids[: check_size("most_tokens", most_tokens, 2)]
        if ids.size < 2:
            raise ValueError(f"perplexity needs at least two tokens; the text has {ids.size}")
        context = self.max_positions
        most = context if window is None else check_size("window", window, 2)
        if most > context:
            raise ValueError(f"window must be at most the context of {context} tokens, not {window}")
        step = max(1, most // 2) if stride is None else check_size("stride", stride)
        if step >= most:
            raise ValueError(f"stride must be below the window of {most}, not {stride}")
        total, done = 0.0, 1  # the first token is not predicted
        while done < ids.size:
            end = min(ids.size, most if done == 1 else done + step)
            begin = max(0, end - most)
            total += float(self._surprise(ids[begin:end], done - begin).sum())
            done = end
        mean = total / (ids.size - 1)
        perplexity = math.inf if mean > 709 else math.exp(mean)  # beyond float64
        return {"perplexity": perplexity, "mean_nll": mean, "tokens": int(ids.size - 1)}

    def _surprise(self, ids: Array, first: int) -> Array:
        """Return −log p of each token from a first one on, given the tokens before it, float64."""
        decoder = self._decoder(len(ids))
        rows = decoder.hidden([ids])[0][first - 1 : -1]
        found = np.empty(len(rows))
        for begin in range(0, len(rows), ROWS):
            logits = decoder.head(np.ascontiguousarray(rows[begin : begin + ROWS])).astype(np.float64)
            places = np.arange(len(logits))
            found[begin : begin + ROWS] = -log_softmax(logits)[places, ids[first + begin + places]]
        return found


# ------------------------------------------------------------------------------------------------------------ a folder


def attach(model: CausalModel, folder: Path) -> None:
    """Give a language model the tokenizer of a folder, its chat template, and the tokens that end its answers."""
    tokenizer, config = _tokenizer.load_tokenizer(folder)
    names = (_tokenizer.TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, TEMPLATE)
    model.kept = {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    model._folder, model.tokenizer = folder, tokenizer
    if tokenizer is not None:
        _tokenizer.check_vocabulary(tokenizer, model.vocab_size, folder)
    model.special_tokens = {n: x for n in SPECIAL_TOKENS if isinstance(x := config.get(n), str)}
    model.chat_template = _template(folder, config)
    generation = _generation(model, folder)
    given = generation.pop("eos_token_id", None)
    said = given is not None or not (folder / GENERATION_CONFIG).exists()
    given = model.config.get("eos_token_id") if given is None else given
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(n) is int for n in ids):
        raise ValueError(f"{folder}: eos_token_id must be an int or a list of them, not {given!r}")
    if given is None and tokenizer is not None and "eos_token" in model.special_tokens:
        ids = [tokenizer.token_to_id(model.special_tokens["eos_token"])]
    model.stop_ids = frozenset(ids) - {None}
    if model.stop_ids and not said:
        ends = ", ".join(map(str, sorted(model.stop_ids)))
        what = f"has no eos_token_id; answers end at {ends}, as other files of the folder say"
        warn(FolderWarning(f"{folder / GENERATION_CONFIG} {what}"))
    model.generation_config = generation
    model._as_read = model.chat_template, model.stop_ids, dict(generation)


def _generation(model: CausalModel, folder: Path) -> dict[str, Any]:
    """Read the settings of generation, with ``eos_token_id``: from their own file or, if there is none, from ``config.json``."""
    path = folder / GENERATION_CONFIG
    read = read_settings(path) if path.exists() else Config(model.config, str(folder / "config.json"))
    found = {name: read.raw(name) for name in (*SETTINGS, "eos_token_id")}
    undone = [f"{n}={x!r:.80}" for n, off in NOT_DONE.items() if (x := read.values.get(n)) not in (None, off)]
    if undone:
        warn(FolderWarning(f"{read.where}: {', '.join(undone)} is not done here"))
    if path.exists():
        read.finish()
    return checked_settings(found, read.where)


def checked_settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of generation that are not None; a ValueError says which one is wrong, and where it was found."""
    said = {name: value for name, value in given.items() if value is not None}
    own = {n: said[n] for n in Sampling._fields if n in said and (n != "top_k" or said[n] != 0)}
    try:
        if not isinstance(said.get("do_sample", False), bool):
            raise TypeError(f"do_sample must be true or false, not {quoted(said['do_sample'])}")
        sampling(**own | {"temperature": own.get("temperature") or 1.0})
        stops_of(said.get("stop_strings"))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None
    return said


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        try:
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / TEMPLATE} is not UTF-8: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{folder}: chat_template must be a text, not {quoted(found)}")
    return found


def text_files(model: CausalModel) -> dict[str, bytes]:
    """Return the files of generation, tokenizer and template by name: those that were read, with changes, or new ones."""
    found = dict(model.kept)
    if not found:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
        found[_tokenizer.TOKENIZER_CONFIG] = _disk.to_json(settings)
    template, stop_ids, generation = model._as_read
    if model.stop_ids != stop_ids or model.generation_config != generation:
        before = json.loads(found.get(GENERATION_CONFIG, b"{}"))
        other = {name: value for name, value in before.items() if name not in SETTINGS}
        new = model.stop_ids != stop_ids or "eos_token_id" not in other
        ends = {"eos_token_id": sorted(model.stop_ids)} if new else {}
        found[GENERATION_CONFIG] = _disk.to_json(other | dict(model.generation_config) | ends)
    if model.tokenizer is None:
        return {name: content for name, content in found.items() if name == GENERATION_CONFIG}
    if model.chat_template is not None and model.chat_template != template:
        found[TEMPLATE] = model.chat_template.encode()
    elif model.chat_template is None and template is not None:
        found.pop(TEMPLATE, None)
        settings = json.loads(found.get(_tokenizer.TOKENIZER_CONFIG, b"{}"))
        settings.pop("chat_template", None)
        found[_tokenizer.TOKENIZER_CONFIG] = _disk.to_json(settings)
    return found | {_tokenizer.TOKENIZER: _tokenizer.without_cutting(model.tokenizer).encode()}
