"""Language models that write: generation, chats, and conversations whose keys and values are kept.

Settings of a call win over those of the folder's ``generation_config.json``, or of its ``config.json`` where it has
no such file.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, count
from types import MappingProxyType
from typing import Any, Unpack

from selfattn.engine import Array, check_size, checksum, copy_doc, quoted, warn
from selfattn.engine.decoder import Prefix, PrefixDecoder
from selfattn.engine.sampling import generate
from selfattn.text import TextStream
from selfattn_models import _tokenizer
from selfattn_models._chat import TemplateProcess, rendered
from selfattn_models._generation import (
    Answer,
    AnswerInterrupted,
    GenerationSettings,
    PartialAnswer,
    Stops,
    answer_stream,
    settings_of,
    stops_of,
    takes_settings,
    whole_answers,
)
from selfattn_models._language_model import LanguageModel
from selfattn_models._tokenizer import Sentences


class CausalModel(LanguageModel):
    """A language model that writes, also in conversations.

    Attributes
    ----------
    chat_template : str or None
        The Jinja2 template that turns a chat into a text.
    special_tokens : dict of str to str
        Variables of the template, such as ``bos_token``.
    stop_ids : frozenset of int
        Tokens that end an answer.
    """

    chat_template: str | None = None
    special_tokens: Mapping[str, str] = MappingProxyType({})
    stop_ids: frozenset[int] = frozenset()
    kept: Mapping[str, bytes] = MappingProxyType({})  # small files of the folder
    # chat_template, stop_ids and generation_config, as the folder has them.
    _as_read: tuple[Any, ...] = (None, frozenset(), {})

    @cached_property
    def _templates(self) -> TemplateProcess:
        """The process of chat templates, which ends with the model."""
        return TemplateProcess()

    def _expect_chats(self) -> None:
        """Start the process of chat templates, while the model is loaded: the first chat need not wait for it."""
        if self.chat_template is not None:
            with contextlib.suppress(ImportError, OSError):  # the first chat raises it
                self._templates.start()

    @takes_settings
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        **how: Unpack[GenerationSettings],
    ) -> Any:
        """Continue a prompt, or each of many at once.

        Parameters
        ----------
        prompt : str, sequence of int, or list of such
            Texts or ids, of any lengths.
        max_new_tokens : int, optional
            By default as many as the folder says, or 100.
        stream : bool, default False

        Returns
        -------
        str, or list of str
            The new text, without special tokens; the model's own end of text ends it. For a prompt of ids an ndarray
            of ids, the one that ended it included. The tokens of a prompt do not depend on the other prompts.
        iterator
            If ``stream``: of pieces of that text, whole characters; of ids for a prompt of ids. For a list of
            prompts, of lists with a piece for each, which may be empty: a str, or a list of ids.
        Answer
            If ``details``, in place of a str or an ndarray; after the last piece of an iterator, one, or a list with
            one for each.

        Raises
        ------
        TypeError, ValueError
            A prompt is empty or beyond the context, an argument is out of its range, or the model's logits are NaN.

        Warns
        -----
        UserWarning
            The context was full, or Ctrl-C was pressed: the answer ends there, between two tokens. The folder says
            that tokens are to be drawn, and the call does not say whether: once a model. A prompt begins with the bos
            token twice.

        Examples
        --------
        ::

            model = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
            print(model.generate("The capital of France is", 5))
            for piece in model.generate("Once upon a time", temperature=0.8, rng=0, stream=True):
                print(piece, end="", flush=True)
        """
        given = Sentences(prompt, "prompt")
        prompts = list(given.sentences)
        if not prompts:
            raise ValueError("there are no prompts")
        ids = [self._ids(each, n) for n, each in enumerate(prompts)]
        texts = [isinstance(each, str) for each in prompts]
        for n in compress(count(), texts):
            self._check_begin(ids[n], f"text {n}")
        settings = settings_of(self, "generate", 100, {**how, "max_new_tokens": max_new_tokens})
        pieces = self._answers(ids, texts, settings, self.stop_ids, ids)
        return answer_stream(pieces, given.alone) if stream else whole_answers(pieces, given.alone)

    @takes_settings
    def chat(
        self,
        messages: Any,
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **how: Unpack[GenerationSettings],
    ) -> Any:
        """Answer the last message of a chat.

        Parameters
        ----------
        messages : str, or list of dict; or list of such lists
            ``{"role": "user", "content": "…"}`` and so on, as the model's template takes them; a str is a single
            message of the user. A content may be a list of parts, ``{"type": "text", "text": "…"}``, which become
            lines if the template does not take them itself. A message that calls tools need have none. A list of lists
            is several chats, which are answered together.
        max_new_tokens : int, optional
            By default as many as the folder says, or 512.
        stream : bool, default False
        chat_template_kwargs : dict, optional
            Further variables of the template, such as ``{"tools": […], "enable_thinking": False}``.

        Returns
        -------
        str, Answer, or iterator
            The answer, which ends where the template ends a turn, too. To continue, append its text as
            ``{"role": "assistant", "content": answer}``, and the next message; :meth:`conversation` does so, and
            computes only what is new. For several chats a list of answers, or an iterator of lists with a piece for
            each, which may be empty.

        Raises
        ------
        TypeError, ValueError
            There are no messages, a role is not known, the model has no chat template, or the template refuses them
            or takes too long; or as for :meth:`generate`.
        ImportError
            Jinja2 is not installed.

        Warns
        -----
        UserWarning
            The chat leaves less than a quarter of the context for an answer that may be so long: its oldest turns are
            left out, but not the messages before them, such as a system message. Or as for :meth:`generate`.

        Notes
        -----
        The template comes with the model, and so is not trusted: it runs in Jinja2's sandbox, in a process of its
        own, which ends after two seconds of one text or at 512 MiB.

        Examples
        --------
        ::

            model.chat("What is the capital of France? Answer in one sentence.")
        """
        several = (
            isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
        )
        chats = messages if several else [messages]
        settings = {**how, "max_new_tokens": max_new_tokens}
        pieces = self._chat_answers(chats, settings, [chat_template_kwargs] * len(chats))
        return answer_stream(pieces, not several) if stream else whole_answers(pieces, not several)

    def conversation(
        self, system: str | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> Conversation:
        """Begin a conversation, which keeps the keys and values of its tokens from one answer to the next.

        Parameters
        ----------
        system : str, optional
            The system message, before all others.
        chat_template_kwargs : dict, optional
            As of :meth:`chat`, for all answers.

        Returns
        -------
        Conversation
            ``conversation.ask("…")`` answers a message.
        """
        messages = [] if system is None else [{"role": "system", "content": system}]
        return Conversation(self, messages, chat_template_kwargs)

    @copy_doc(chat)
    @takes_settings
    def ask(
        self,
        conversations: Sequence[Conversation],
        messages: Sequence[str | Mapping[str, Any]],
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        **how: Unpack[GenerationSettings],
    ) -> Any:
        """Answer a message in each of several conversations, together.

        Parameters
        ----------
        conversations : sequence of Conversation
            Each is one of this model's, and none is there twice.
        messages : sequence of str or dict
            One for each, as of :meth:`Conversation.ask`.

        Returns
        -------
        list of str, or iterator of lists
            The answers, each as alone; or pieces of them.

        Raises
        ------
        TypeError, ValueError, RuntimeError
            The numbers differ, a conversation is another model's, is given twice, or has an answer that has not
            ended; or as for :meth:`chat`. All messages are then as before.
        """
        pieces = answers(self, conversations, messages, {**how, "max_new_tokens": max_new_tokens})
        return answer_stream(pieces, False) if stream else whole_answers(pieces, False)

    def _chat_answers(
        self,
        chats: Sequence[Any],
        how: dict[str, Any],
        variables: Sequence[Mapping[str, Any] | None],
        prefixes: Sequence[Prefix] | None = None,
    ) -> Iterator[list[Any]]:
        """Return an iterator of what is new of each chat's answer at each step."""
        how = settings_of(self, "chat" if prefixes is None else "ask", 512, how)
        room = min(check_size("max_new_tokens", how["max_new_tokens"]), self.max_positions // 4)
        most = self.max_positions - max(room - 1, 0)  # the last token needs no place
        ids = [self._fitting(chat, most, more) for chat, more in zip(chats, variables, strict=True)]
        for n, own in enumerate(ids):
            self._check_begin(own, f"chat {n}" if len(ids) > 1 else "the chat")
        stop_ids = self.stop_ids | self._turn_end_ids()
        return self._answers(ids, [True] * len(ids), how, stop_ids, [[]] * len(ids), prefixes)

    def _fitting(self, messages: Any, most: int, variables: Mapping[str, Any] | None) -> Array:
        """Return the ids of a chat, without its oldest turns if there are more than ``most``."""
        more = () if variables is None else (variables,)
        ids = self._encoded(self.chat_prompt(messages, *more), special=False)
        if ids.size <= most:
            return ids
        chat = [{"role": "user"}] if isinstance(messages, str) else messages
        turns = [n for n, message in enumerate(chat) if message["role"] == "user"]

        def without(turn: int) -> Array:
            kept = [*messages[: turns[0]], *messages[turns[turn] :]]
            return self._encoded(self.chat_prompt(kept, *more), special=False)

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

    def _turn_end_ids(self) -> set[int]:
        """Return the special token that the template writes after what the model says.

        It may not be among `stop_ids`.
        """
        assert self.chat_template is not None
        said = "selfattn"
        chat = [{"role": "user", "content": said}, {"role": "assistant", "content": said}]
        try:
            text = rendered(self.chat_template, chat, self.special_tokens, False, self._templates)
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

    @copy_doc(chat)
    def chat_prompt(self, messages: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
        """Return the text that :meth:`chat` continues.

        Returns
        -------
        str
            The messages in the form of the model's template, with the beginning of an answer.
        """
        if self.chat_template is None:
            trained = "such as one in the form that the model was trained with"
            raise ValueError(f"this model has no chat template; generate() continues any text, {trained}")
        own = self.special_tokens
        return rendered(self.chat_template, messages, own, process=self._templates, more=chat_template_kwargs)

    def _answers(
        self,
        ids: list[Array],
        texts: list[bool],
        how: dict[str, Any],
        stop_ids: Iterable[int],
        before: Sequence[Any],
        prefixes: Sequence[Prefix] | None = None,
    ) -> Iterator[list[Any]]:
        """Return an iterator of the new str or list of ids of each prompt at each step.

        Arguments are checked at the call.

        ``stop_ids`` end an answer, ``before`` are the ids that the text of an answer continues, ``prefixes`` what is
        known of each sequence.
        """
        details, top, stop = (how.pop(name) for name in ("details", "logprobs", "stop"))
        if stops_of(stop) and self.tokenizer is None:
            raise ValueError(f"stop needs text: {_tokenizer.missing_message(self._folder)}")
        new, whole = (check_size(name, how.get(name, 1)) for name in ("max_new_tokens", "max_length"))
        longest = whole if "max_length" in how else max(map(len, ids)) + new
        decoder = self._decoder(min(longest, self.max_positions))
        stops, stop_ids = Stops.of(stop, self.tokenizer), frozenset(stop_ids)
        answers = []
        for own, text, given in zip(ids, texts, before, strict=True):
            wants_text = text or stops.given or (details and self.tokenizer is not None)
            stream = TextStream(self.tokenizer, given) if wants_text else None
            most = min(whole - len(own) if "max_length" in how else new, self.max_positions - len(own) + 1)
            answers.append(PartialAnswer(stream, text, stops, most, top))

        def stops_at(i: int, new: int, logits: Array) -> bool:
            return answers[i].add(new, new in stop_ids, logits)

        prefix_decoder = None if prefixes is None else PrefixDecoder(decoder, prefixes)
        how |= {"context": self.max_positions, "stop_when": stops_at, "stop_ids": stop_ids}
        steps = generate(prefix_decoder or decoder, ids, **how)

        def pieces() -> Iterator[list[Any]]:
            done = 0
            try:
                for done, _ in enumerate(steps, 1):  # noqa: B007
                    yield [answer.new() for answer in answers]
            except KeyboardInterrupt:
                warn(AnswerInterrupted(f"interrupted after {done} new tokens; the answer ends there"))
            finally:
                if prefix_decoder is not None:
                    prefix_decoder.finish()
            for answer in answers:
                answer.finish()
            yield [answer.new() for answer in answers]
            if details:
                yield [answer.whole(len(own)) for answer, own in zip(answers, ids, strict=True)]

        return pieces()


class Conversation:
    """A chat that goes on: :meth:`CausalModel.conversation` makes it, :meth:`ask` continues it.

    The keys and values of its tokens stay in memory. An answer computes only the tokens after the longest beginning
    that the messages have in common with those of the answer before: usually the new message. Where the template
    writes earlier messages in another way than before, or the oldest ones are left out, what follows is computed
    anew. So it is after a change of the model's weights.

    Attributes
    ----------
    messages : list of dict
        All messages so far. They may be changed between two calls.

    Notes
    -----
    Keys and values of earlier answers have been computed as these were generated. :meth:`CausalModel.chat` computes
    the same tokens as a part of the prompt, where sums are added in another order: logits are off by 2e-5 in
    SmolLM2-135M's Q4_1, where their standard deviation is 3.4. So an answer may, rarely, not be that of ``chat``. The
    same calls one after the other give the same answers, alone and with other conversations.

    Examples
    --------
    ::

        conversation = model.conversation("You answer in one sentence.")
        conversation.ask("What is the capital of France?")
        conversation.ask("And of Italy?")
    """

    def __init__(
        self,
        model: CausalModel,
        messages: list[dict[str, Any]],
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.messages, self.chat_template_kwargs = model, messages, chat_template_kwargs
        self._prefix = Prefix()
        self._weights: tuple[object, int] | None = None  # those by which it has been computed
        self._is_answering = False  # True while an answer is generated

    @property
    def cached_tokens(self) -> int:
        """The number of tokens whose keys and values are in memory."""
        return len(self._prefix.ids)

    @property
    def cached_bytes(self) -> int:
        """The bytes of these keys and values, unused room included."""
        return 0 if self._prefix.cache is None else self._prefix.cache.bytes

    def _check_idle(self, messages: list[Any] | None = None) -> None:
        """Refuse a call while another one is answered, or that began before another one changed the messages."""
        if self._is_answering:
            raise RuntimeError(
                "an answer of this conversation has not ended: iterate to its end, or close() it"
            )
        if messages not in (None, self.messages):
            raise RuntimeError(
                "the messages of this conversation have changed since this answer was asked for"
            )

    @takes_settings
    def ask(
        self,
        message: str | Mapping[str, Any],
        max_new_tokens: int | None = None,
        *,
        stream: bool = False,
        **how: Unpack[GenerationSettings],
    ) -> Any:
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
            The answer. If ``stream``, the conversation goes on after the iterator's end; after ``close()`` with the
            pieces so far.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`CausalModel.chat`. The messages are then as before.
        RuntimeError
            An answer is being generated, or its iterator has not ended.
        """
        pieces = answers(self.model, [self], [message], {**how, "max_new_tokens": max_new_tokens})
        return answer_stream(pieces, True) if stream else whole_answers(pieces, True)


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
            each._prefix, each._weights = Prefix(), weights
    variables = [each.chat_template_kwargs for each in conversations]
    pieces = model._chat_answers(chats, how, variables, [each._prefix for each in conversations])
    return _kept(pieces, conversations, chats)


def _kept(
    pieces: Iterator[list[Any]], conversations: Sequence[Conversation], chats: list[list[Any]]
) -> Iterator[list[Any]]:
    """Pass on pieces of answers, and add messages and answers to conversations at the end, unless there is an error."""
    for each, chat in zip(conversations, chats, strict=True):
        each._check_idle(chat[:-1])
    found = [""] * len(chats)
    for each in conversations:
        each._is_answering = True
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
            each._is_answering = False


def state_of(model: CausalModel) -> tuple[object, int]:
    """Return what differs after any change of a model's weights."""
    mark = model._prepared.setdefault("weights", object())  # `_prepared` is emptied when an array is replaced
    return mark, checksum(tuple(x for x in model.arrays.values() if x.flags.writeable))
