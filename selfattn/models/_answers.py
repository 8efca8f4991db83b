"""Answers of language models: ids as they come, as whole characters, up to a stop; and how they are given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np

UNFINISHED = "\ufffd"  # what a tokenizer makes of bytes that are no character, or not yet


class AnswerInterrupted(UserWarning):
    """Ctrl-C has ended an answer between two tokens."""


class Answer:
    """What is generated for one prompt: ids, and their text in whole characters up to a stop.

    Parameters
    ----------
    decode : callable or None
        Ids to text. None: no text is wanted.
    stops : tuple of str
    """

    def __init__(self, decode: Callable[[list[int]], str] | None, stops: tuple[str, ...]) -> None:
        self.decode, self.stops = decode, stops
        self.ids: list[int] = []
        self.spoken: list[int] = []  # without that which ends the answer
        self.found = ""  # the text so far
        self.given, self.given_ids = 0, 0  # how much of text and ids has been taken
        self.begin, self.end = (
            0,
            0,
        )  # spoken ids from begin are decoded again; those before end are in `found`
        self.stopped = False

    def add(self, new: int, last: bool) -> bool:
        """Append an id, the last one or not; tell whether the answer ends."""
        self.ids.append(new)
        if last or self.decode is None:
            return last
        self.spoken.append(new)
        text = self.decode(self.spoken[self.begin :])
        if not text.endswith(UNFINISHED):
            self._append(text)
        return self.stopped

    def _append(self, text: str) -> None:
        """Take the text of all spoken ids from begin on: of those to end it is known already."""
        assert self.decode is not None
        known = len(self.decode(self.spoken[self.begin : self.end]))
        before = len(self.found)
        self.found += text[known:]
        self.begin, self.end = self.end, len(self.spoken)
        places = [self.found.find(stop, max(0, before - len(stop) + 1)) for stop in self.stops]
        places = [place for place in places if place >= 0]
        if places:
            self.found, self.stopped = self.found[: min(places)], True

    def finish(self) -> None:
        """Take what was held back: there will be no more."""
        if self.decode is not None and not self.stopped:
            self._append(self.decode(self.spoken[self.begin :]))
        self.stopped = True

    def text(self) -> str:
        """Return the text since the last call, but what may become a stop."""
        safe = len(self.found)
        if not self.stopped:
            safe -= max((_overlap(self.found, stop) for stop in self.stops), default=0)
        piece = self.found[self.given : safe]
        self.given = max(self.given, safe)
        return piece

    def new_ids(self) -> list[int]:
        """Return the ids since the last call."""
        piece = self.ids[self.given_ids :]
        self.given_ids = len(self.ids)
        return piece


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


def collected(pieces: Iterator[list[Any]], alone: bool, texts: list[bool]) -> Any:
    """Return the whole answers: a text, or an array of ids."""
    steps = list(pieces)  # not spread itself: CPython 3.11 loses memory where an iterator raises there
    whole = [list(parts) for parts in zip(*steps, strict=True)]
    results = [
        "".join(parts) if text else np.array(list(chain.from_iterable(parts)), np.int64)
        for parts, text in zip(whole, texts, strict=True)
    ]
    return results[0] if alone else results


def streamed(pieces: Iterator[list[Any]], alone: bool, texts: list[bool]) -> Iterator[Any]:
    """Go through what is new, without what is empty."""
    for step in pieces:
        if not alone:
            if any(step):
                yield step
        elif not texts[0]:
            yield from step[0]
        elif step[0]:
            yield step[0]
