"""Answers of language models, as their tokens come: a text up to a stop, or ids; whole, or piece by piece.

`selfattn.engine.sampling` chooses the tokens; `_causal.py` checks a call and starts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np

from selfattn.text import TextStream


class Answer:
    """What is generated for one prompt: a text up to a stop, or ids.

    ``before`` are the ids that the text continues; ``marks`` are letters that the text has in place of special tokens, which are
    in stops; they are not given out.
    """

    def __init__(
        self, tokenizer: Any, before: Any, is_text: bool, stops: tuple[str, ...], marks: Mapping[int, str]
    ) -> None:
        self.stream = TextStream(tokenizer, before) if is_text or stops else None
        self.is_text, self.stops, self.marks = is_text, stops, marks
        self.ids: list[int] = []
        self.found = ""  # the text so far
        self.given = 0  # how much of the text, or of the ids, has been taken
        self.stopped = False

    def add(self, new: int, last: bool) -> bool:
        """Append an id, which may be the last; return whether the answer ends."""
        self.ids.append(new)
        if last or self.stream is None:
            return last
        self._append(self.stream.finish() + self.marks[new] if new in self.marks else self.stream.add(new))
        return self.stopped

    def _append(self, piece: str) -> None:
        before = len(self.found)
        self.found += piece
        places = [self.found.find(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        places = [place for place in places if place >= 0]
        if places:
            self.found, self.stopped = self.found[: min(places)], True

    def finish(self) -> None:
        """Take the text that was held back: the answer ends."""
        if self.stream is not None and not self.stopped:
            self._append(self.stream.finish())
        self.stopped = True

    def new(self) -> str | list[int]:
        """Return the text since the last call, without an end that may become a stop; or the ids."""
        safe = len(self.found if self.is_text else self.ids)
        if self.is_text and not self.stopped:
            safe -= max((_overlap(self.found, stop) for stop in self.stops), default=0)
        begin, self.given = self.given, max(self.given, safe)
        if not self.is_text:
            return self.ids[begin:safe]
        return self.found[begin:safe].translate(dict.fromkeys(map(ord, self.marks.values())))


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
    """Return the whole answers: a text, or an array of ids."""
    steps = list(pieces)  # CPython 3.11 leaks memory if an iterator raises while it is spread
    results = [
        "".join(parts) if isinstance(parts[0], str) else np.array([*chain(*parts)], np.int64)
        for parts in zip(*steps, strict=True)
    ]
    return results[0] if alone else results


def streamed(pieces: Iterator[list[Any]], alone: bool) -> Iterator[Any]:
    """Yield what is new, unless it is empty."""
    for step in pieces:
        if alone and isinstance(step[0], list):
            yield from step[0]
        elif any(step):
            yield step[0] if alone else step
