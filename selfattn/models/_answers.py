"""Answers of language models, as their tokens come: a text up to a stop, or ids; whole, or piece by piece.

`selfattn.engine.sampling` chooses the tokens; `_causal.py` checks a call and starts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from selfattn._check import Array
from selfattn.engine.sampling import log_probabilities
from selfattn.text import TextStream


class AnswerInterrupted(UserWarning):
    """Ctrl-C has ended an answer between two tokens."""


class Answer(NamedTuple):
    """An answer with details, by OpenAI's and vLLM's names: what :meth:`LlamaForCausalLM.generate` returns with ``details=True``.

    Attributes
    ----------
    text : str or None
        Without special tokens, up to the stop. None if the model has no tokenizer.
    token_ids : ndarray of int64, shape (completion_tokens,)
        All new ids, those that ended it included.
    finish_reason : {"stop", "length", "abort"}
        A stop or an id of ``stop_ids`` came; there were as many new tokens as asked for, or the context was full; Ctrl-C was pressed.
    stop_reason : str, int or None
    prompt_tokens : int
        Of a chat, with what its template adds, without turns that were left out.
    completion_tokens : int
    logprobs : ndarray of float64, shape (completion_tokens,), or None
        The logarithm of each new token's probability: log-softmax of the model's logits, before temperature, penalties and biases.
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


class Stops(NamedTuple):
    """Texts that end an answer: as given, and as searched, with a letter that no text has in place of each special token."""

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

    ``stream`` turns ids into text, if text is wanted; ``top`` is for how many tokens at each place log p is wanted, or None.
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
        """Append an id, which may be the last, with the logits that it was chosen from; return whether the answer ends."""
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


def collected(pieces: Iterator[list[Any]], alone: bool) -> Any:
    """Return the whole answers: a text, an array of ids, or an :class:`Answer`."""
    steps = list(pieces)  # CPython 3.11 leaks memory if an iterator raises while it is spread
    results = steps[-1]
    if not isinstance(results[0], Answer):
        results = [
            "".join(parts) if isinstance(parts[0], str) else np.array([*chain(*parts)], np.int64)
            for parts in zip(*steps, strict=True)
        ]
    return results[0] if alone else results


def streamed(pieces: Iterator[list[Any]], alone: bool) -> Iterator[Any]:
    """Yield what is new, unless it is empty."""
    for step in pieces:  # the last may have Answers
        if alone and isinstance(step[0], list):
            yield from step[0]
        elif any(step):
            yield step[0] if alone else step
