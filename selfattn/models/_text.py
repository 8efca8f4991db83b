"""Texts for models, any number of them: in chunks that are tokenised together, and groups that are computed together."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np

from selfattn._check import quoted
from selfattn._extras import progress_bar

P = TypeVar("P")
Q = TypeVar("Q")

# Texts that are tokenised at once; few at first, so that the core soon has work.
FIRST_CHUNK, CHUNK = 256, 2048
MOST_CHARACTERS = 2**18  # of them together
TOKENS = 16_384  # in a call of the core, or one text


class Chunk(NamedTuple):
    """Texts that go through the tokenizer together, and the number of the first."""

    sentences: list[Any]
    first: int


class Ready(NamedTuple):
    """A chunk in ids."""

    ids: list[Sequence[int]]
    types: list[Sequence[int]] | None
    skipped: list[int] | None  # tokens of a prompt that are not pooled
    cut: int


class Cut:
    """Counts texts that were cut, to say so once a call."""

    def __init__(self) -> None:
        self.cut, self.texts = 0, 0
        self.limit: int | None = None

    def add(self, cut: int, texts: int, limit: int | None) -> None:
        """Count the texts of a chunk."""
        self.cut, self.texts, self.limit = self.cut + cut, self.texts + texts, limit

    def tell(self, depth: int = 3) -> None:
        """Say it where the model was called."""
        if self.cut:
            what = "the text was" if self.texts == 1 else f"{self.cut} of {self.texts} texts were"
            warnings.warn(
                f"{what} longer than {self.limit} tokens, the most that the model takes, and cut there",
                stacklevel=depth,
            )


def is_pair(sentence: Any) -> bool:
    """Tell a pair of texts."""
    return (
        isinstance(sentence, tuple | list)
        and len(sentence) == 2
        and all(isinstance(each, str) for each in sentence)
    )


def one_or_many(sentences: Any) -> tuple[bool, Iterable[Any], int | None]:
    """Tell one sentence from many: whether it is one, an iterable, and how many there are, if that is known."""
    if isinstance(sentences, str):
        return True, [sentences], 1
    if isinstance(sentences, np.ndarray) and sentences.ndim == 0 and isinstance(sentences.item(), str):
        return True, [sentences.item()], 1
    if isinstance(sentences, bytes | bytearray | memoryview) or not isinstance(sentences, Iterable):
        raise TypeError(f"sentences must be a str or an iterable of str, not {quoted(sentences)}")
    try:
        total: int | None = len(sentences)  # type: ignore[arg-type]
    except TypeError:
        total = None
    rest = iter(sentences)
    first = list(itertools.islice(rest, 1))
    if first and hasattr(first[0], "__index__") and not getattr(first[0], "ndim", 0):
        return True, [[*first, *rest] if total is None else sentences], 1
    return False, itertools.chain(first, rest), total


def chunks(sentences: Iterable[Any]) -> Iterator[Chunk]:
    """Cut an iterable into chunks that are not too large to be tokenised at once."""
    rest, first, most = iter(sentences), 0, FIRST_CHUNK
    while True:
        chunk: list[Any] = []
        characters = 0
        for sentence in rest:
            chunk.append(sentence)
            characters += len(sentence) if isinstance(sentence, str) else 0
            if len(chunk) == most or characters >= MOST_CHARACTERS:
                break
        if not chunk:
            return
        yield Chunk(chunk, first)
        first, most = first + len(chunk), CHUNK


def ahead(chunks: Iterator[P], function: Callable[[P], Q]) -> Iterator[Q]:
    """Map a function that lets go of the GIL, one result ahead, in a thread; chunks are read in the caller's."""
    chunk, following = next(chunks, None), next(chunks, None)
    if chunk is None:
        return
    if following is None:
        yield function(chunk)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(function, chunk)
        except RuntimeError:  # no more threads are to be had
            yield from map(function, itertools.chain([chunk, following], chunks))
            return
        while following is not None:
            coming = pool.submit(function, following)
            yield waiting.result()
            waiting, following = coming, next(chunks, None)
        yield waiting.result()


def groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Sort sentences by length, the longest first, and group them by their tokens."""
    group: list[int] = []
    tokens = 0
    for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and (tokens + lengths[n] > TOKENS or len(group) == most):
            yield group
            group, tokens = [], 0
        group.append(n)
        tokens += lengths[n]
    if group:
        yield group


@contextmanager
def bar(progress: bool, total: int | None, name: str) -> Iterator[Callable[[int], Any]]:
    """Show a bar, if there is to be one; gives what moves it."""
    if not progress:
        yield lambda count: None
        return
    with progress_bar(extra="models", total=total, desc=name, unit=" sentences", dynamic_ncols=True) as shown:
        yield shown.update
