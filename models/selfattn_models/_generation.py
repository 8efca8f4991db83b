"""A call of generation: its settings, those of the folder where it has none, and the answers, as their tokens come.

An answer is a text up to a stop, or ids; whole, or piece by piece. `selfattn.engine.sampling` chooses the tokens;
`_causal.py` has the calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain
from typing import Any, Literal, NamedTuple, TypedDict, TypeVar

import numpy as np

from selfattn.engine import Array, check_size, copy_doc, quoted, warn
from selfattn.engine.sampling import DRAWING, Sampling, log_probabilities, sampling
from selfattn.text import TextStream
from selfattn_models._known_settings import REMOVED
from selfattn_models._language_model import LanguageModel

Function = TypeVar("Function", bound=Callable[..., Any])

# What other programs call the settings.
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "seed": "rng",
    "stop_strings": "stop",
    "do_sample": 'temperature, or sampling="folder"',
    "eos_token_id": "stop",
    "top_logprobs": "logprobs",
    "n_probs": "logprobs",
    "min_tokens": "min_new_tokens",
    "min_length": "min_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "repeat_penalty": "repetition_penalty",
}


class GenerationSettings(TypedDict, total=False):
    """The settings of generation, with those of :class:`Sampling`.

    Those that are not given, or are None, are as the folder says.

    Parameters
    ----------
    sampling : {"folder"}, optional
        Draw as the folder says: its ``do_sample``, ``temperature``, ``top_k`` and so on, unless the call has others.
    rng : int, sequence of int, or Generator, optional
        The seed. Prompt, chat or conversation i of several has rng + i, or element i of a sequence.
    logit_bias : dict of int or str to float, optional
        What is added to the logits of tokens, by id or as ``model.tokens`` writes them; -inf forbids a token.
    stop : str or sequence of str, optional
        An answer ends before the first of these texts, which may have special tokens. By default what the folder says.
    details : bool, default False
        Also tell why an answer ended, and how many tokens it took.
    logprobs : int, optional
        With ``details``, also tell log p of each new token, and of this many of the likeliest tokens at its place.
    min_new_tokens, max_length : int, optional
        As in Transformers' ``GenerationConfig``. By default what the folder says.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    sampling: Literal["folder"] | None
    rng: Any
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int | str, float] | None
    stop: str | Sequence[str] | None
    details: bool | None
    logprobs: int | None
    min_new_tokens: int | None
    max_length: int | None


def takes_settings(function: Function) -> Function:
    """Show in a function's signature and docstring the settings that it takes as ``**how``."""
    signature, keyword = inspect.signature(function), inspect.Parameter.KEYWORD_ONLY
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    types = GenerationSettings.__annotations__.items()
    shown = [
        inspect.Parameter(name, keyword, default=None, annotation=getattr(kind, "__forward_arg__", kind))
        for name, kind in types
    ]
    function.__signature__ = signature.replace(parameters=[*own, *shown])  # type: ignore[attr-defined]
    return copy_doc(GenerationSettings)(copy_doc(Sampling)(function))


def settings_of(model: LanguageModel, call: str, most: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a call, and those of the folder where it has none.

    ``most`` is the default of new tokens.
    """
    names = {*GenerationSettings.__annotations__, "max_new_tokens"}
    for name in set(given) - names:
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, names, 1)
        hint = f"; its name here is {near[0]}" if near else ""
        raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")
    given = {name: value for name, value in given.items() if value is not None}
    like = given.pop("sampling", None)
    if like not in (None, "folder"):
        raise ValueError(f"sampling must be 'folder' or None, not {quoted(like)}")
    said = {name: value for name, value in model.generation_config.items() if value is not None}
    removed = [name for name in REMOVED if name in said]
    if like == "folder" and removed:
        so = f"del model.generation_config[{removed[0]!r}] draws without it"
        raise ValueError(f"the folder sets {', '.join(removed)}, which is not supported; {so}")
    said = {name: value for name, value in said.items() if name not in removed}
    draws = said.pop("do_sample", False)
    drawing = {name: said.pop(name) for name in DRAWING if name in said}
    if like == "folder" and (draws or "temperature" in given):
        drawing = {"temperature": 1.0, "top_k": 50} | drawing | given  # Transformers' defaults
        if drawing["temperature"] != 0:
            said |= {name: x for name, x in drawing.items() if name != "top_k" or x != 0}
    elif draws and "temperature" not in given and not model._warned:
        as_said = ", ".join(f"{name}={value}" for name, value in drawing.items()) or "temperature=1.0"
        so = "this takes the most probable token each time, as temperature=0 says"
        how = 'sampling="folder" (--sampling folder) draws so'
        warn(f"the model's settings would draw tokens with {as_said}; {so}; {how}")
        model._warned = True
    own = {"stop": said.pop("stop_strings", None), "details": False, "logprobs": None}
    found = {"max_new_tokens": most} | own | said | given
    if not isinstance(found["details"], bool):
        raise TypeError(f"details must be True or False, not {quoted(found['details'])}")
    top, biases = found["logprobs"], found.get("logit_bias")
    if top is not None and not (found["details"] and check_size("logprobs", top, 0) <= model.vocab_size):
        raise ValueError(f"logprobs needs details=True, and at most {model.vocab_size} tokens, not {top}")
    if isinstance(biases, Mapping):
        found["logit_bias"] = _by_id(model, biases)
    if "max_new_tokens" in given or ("max_new_tokens" in said and "max_length" not in given):
        found.pop("max_length", None)
    return found


def _by_id(model: LanguageModel, biases: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return ``logit_bias=`` of a call with ids in place of tokens."""
    found: dict[Any, Any] = {}
    for token, bias in biases.items():
        n = (model.tokenizer and model.tokenizer.token_to_id(token)) if isinstance(token, str) else token
        if n is None:
            as_text = f"as a text it is {model.tokens(token)}"
            raise ValueError(f"logit_bias has {quoted(token)}, which is no token; {as_text}")
        if check_size("a token of logit_bias", n, 0) >= model.vocab_size or n in found:
            of = "once" if n in found else f"below {model.vocab_size}"
            raise ValueError(f"logit_bias must have each token {of}, not {n}")
        found[n] = bias
    return found


def checked_settings(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of generation that are not None.

    A ValueError says which one is wrong, and where it was found.
    """
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


# ------------------------------------------------------------------------------------------------------------- answers


class AnswerInterrupted(UserWarning):
    """Ctrl-C has ended an answer between two tokens."""


class Answer(NamedTuple):
    """An answer with details, by OpenAI's and vLLM's names.

    :meth:`LlamaForCausalLM.generate` returns it with ``details=True``.

    Attributes
    ----------
    text : str or None
        Without special tokens, up to the stop. None if the model has no tokenizer.
    token_ids : ndarray of int64, shape (completion_tokens,)
        All new ids, those that ended it included.
    finish_reason : {"stop", "length", "abort"}
        A stop or an id of ``stop_ids`` came; there were as many new tokens as asked for, or the context was full;
        Ctrl-C was pressed.
    stop_reason : str, int or None
    prompt_tokens : int
        Of a chat, with what its template adds, without turns that were left out.
    completion_tokens : int
    logprobs : ndarray of float64, shape (completion_tokens,), or None
        The logarithm of each new token's probability: log-softmax of the model's logits, before temperature,
        penalties and biases.
    top_token_ids : ndarray of int64, shape (completion_tokens, n), or None
        The n likeliest tokens at each place, the likeliest first, of which none need be the new one.
    top_logprobs : ndarray of float64, shape (completion_tokens, n), or None
    """

    text: str | None
    token_ids: Array
    finish_reason: str
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    logprobs: Array | None
    top_token_ids: Array | None
    top_logprobs: Array | None

    def to_dict(self) -> dict[str, Any]:
        """Return a dict of texts, numbers and lists, which JSON takes; it has no infinity, so None stands there."""

        def plain(x: Any) -> Any:
            return np.where(np.isfinite(x), x, np.array(None)).tolist() if isinstance(x, np.ndarray) else x

        return {name: plain(x) for name, x in self._asdict().items()}


class Stops(NamedTuple):
    """Texts that end an answer: as given, and as searched.

    A searched text has a letter that no text has in place of each special token.
    """

    given: tuple[str, ...]
    searched: tuple[str, ...]
    letters: Mapping[int, str]  # by the ids of special tokens that are in stops

    @classmethod
    def of(cls, stop: Any, tokenizer: Any) -> Stops:
        """Check ``stop=`` of a call; letters are halves of surrogate pairs."""
        given = searched = stops_of(stop)
        added = tokenizer.get_added_tokens_decoder() if given else {}
        special = {n: each.content for n, each in added.items() if each.special}
        used = {n: content for n, content in special.items() if any(content in stop for stop in given)}
        letters = {n: chr(0xD800 + place) for place, n in enumerate(used)}
        for n, content in sorted(used.items(), key=lambda item: -len(item[1])):
            searched = tuple(stop.replace(content, letters[n]) for stop in searched)
        return cls(given, searched, letters)


class PartialAnswer:
    """An answer to which tokens are added: a text up to a stop, or ids; at most ``most`` tokens.

    ``stream`` turns ids into text, if text is wanted; ``top`` is for how many tokens at each place log p is wanted,
    or None.
    """

    def __init__(self, stream: TextStream | None, is_text: bool, stops: Stops, most: int, top: int | None):
        self.stream, self.is_text, self.stops, self.most, self.top = stream, is_text, stops, most, top
        self.ids: list[int] = []
        self.log_p: list[tuple[float, Array, Array]] = []
        self.found = ""  # the text so far, with letters
        self.given = 0  # how much of the text, or of the ids, has been taken
        self.stopped = False
        self.stop_reason: str | int | None = None

    def add(self, new: int, last: bool, logits: Array) -> bool:
        """Append an id, which may be the last, with the logits that it was chosen from.

        Return whether the answer ends.
        """
        self.ids.append(new)
        if self.top is not None:
            self.log_p.append(log_probabilities(logits, new, self.top))
        if last:
            self.stop_reason = new
        elif self.stream is not None:
            letter = self.stops.letters.get(new)
            self._append(self.stream.add(new) if letter is None else self.stream.finish() + letter)
        return last or self.stopped

    def _append(self, piece: str) -> None:
        before = len(self.found)
        self.found += piece
        stops = self.stops.searched
        places = [(self.found.find(stop, max(0, before - len(stop) + 1)), n) for n, stop in enumerate(stops)]
        places = [each for each in places if each[0] >= 0]
        if places:
            place, n = min(places)
            self.found, self.stopped, self.stop_reason = self.found[:place], True, self.stops.given[n]

    def finish(self) -> None:
        """Take the text that was held back: the answer ends."""
        if self.stream is not None and not self.stopped:
            self._append(self.stream.finish())
        self.stopped = True

    def new(self) -> str | list[int]:
        """Return the text since the last call, without an end that may become a stop; or the ids."""
        safe = len(self.found if self.is_text else self.ids)
        if self.is_text and not self.stopped:
            safe -= max((_overlap(self.found, stop) for stop in self.stops.searched), default=0)
        begin, self.given = self.given, max(self.given, safe)
        return self._shown(self.found[begin:safe]) if self.is_text else self.ids[begin:safe]

    def _shown(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self.stops.letters.values())))

    def whole(self, prompt_tokens: int) -> Answer:
        """Return what is told about the answer, which has ended."""
        full, text = len(self.ids) >= self.most, None if self.stream is None else self._shown(self.found)
        reason = "stop" if self.stop_reason is not None else "length" if full else "abort"
        told: list[Any] = [None] * 3
        if self.top is not None:
            rows = np.array(self.log_p, [("p", "f8"), ("ids", "i8", (self.top,)), ("top", "f8", (self.top,))])
            told = [rows[name].copy() for name in ("p", "ids", "top")]
        ids = np.array(self.ids, np.int64)
        return Answer(text, ids, reason, self.stop_reason, prompt_tokens, len(ids), *told)


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def stops_of(stop: Any) -> tuple[str, ...]:
    """Check ``stop=`` of a call, one text or several."""
    one = isinstance(stop, str) or not isinstance(stop, Iterable)
    found = () if stop is None else (stop,) if one else tuple(stop)
    for each in found:
        if not isinstance(each, str):
            raise TypeError(f"stop must be a str or a sequence of str, not {stop!r}")
        if not each:
            raise ValueError("stop must not be empty: it is in every text")
    return found


def whole_answers(pieces: Iterator[list[Any]], alone: bool) -> Any:
    """Return the whole answers: a text, an array of ids, or an :class:`Answer`."""
    steps = list(pieces)  # CPython 3.11 leaks memory if an iterator raises while it is unpacked
    results = steps[-1]
    if not isinstance(results[0], Answer):
        results = [
            "".join(parts) if isinstance(parts[0], str) else np.array([*chain(*parts)], np.int64)
            for parts in zip(*steps, strict=True)
        ]
    return results[0] if alone else results


def answer_stream(pieces: Iterator[list[Any]], alone: bool) -> Iterator[Any]:
    """Yield what is new, unless it is empty."""
    for step in pieces:  # the last may have Answers
        if alone and isinstance(step[0], list):
            yield from step[0]
        elif any(step):
            yield step[0] if alone else step
