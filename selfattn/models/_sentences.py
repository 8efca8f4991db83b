"""Many sentences: any number of them, in chunks that are tokenised one ahead and computed in packed calls.

Texts that the tokenizer cuts are counted, for one warning a call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from selfattn._check import Array, check_rows, quoted, warn
from selfattn.engine.transformer import pack
from selfattn.models._tokenizer import Text, checked_ids, missing, tokenize
from selfattn.text import without_pads

P = TypeVar("P")
Q = TypeVar("Q")

# Texts that are tokenised at once; few at first, so that the core soon has work.
FIRST_CHUNK, CHUNK = 256, 2048
MOST_CHARACTERS = 2**18  # the most characters of these texts together
TOKENS = 16_384  # the most in a call of the core; a longer text has a call of its own


class Chunk(NamedTuple):
    """Sentences that go through the tokenizer together, and the number of the first."""

    sentences: list[Any]
    first: int


class Ready(NamedTuple):
    """A chunk in ids."""

    ids: list[Sequence[int]]
    types: list[Sequence[int]] | None  # which text of a pair each token belongs to; None: there are no pairs
    skipped: list[int] | None  # tokens of a prompt that are not pooled
    cut: int  # how many texts were cut


class Given:
    """The sentences of a call, one alone or an iterable; their number, if it is known; and how many of them were cut."""

    def __init__(self, sentences: Any, name: str = "sentences") -> None:
        self.cut, self.texts = 0, 0
        self.total: int | None = 1
        if isinstance(sentences, np.ndarray) and sentences.ndim == 0:
            sentences = sentences.item()
        self.alone, self.sentences = True, iter([sentences])
        if isinstance(sentences, str):
            return
        check_rows(name, sentences)
        if isinstance(sentences, bytes | bytearray | memoryview) or not isinstance(sentences, Iterable):
            raise TypeError(f"{name} must be a str or an iterable of str, not {quoted(sentences)}")
        try:
            total: int | None = len(sentences)  # type: ignore[arg-type]
        except TypeError:
            total = None
        rest = iter(sentences)
        first = list(itertools.islice(rest, 1))
        if first and hasattr(first[0], "__index__") and not getattr(first[0], "ndim", 0):  # ids
            self.sentences = iter([[*first, *rest] if total is None else sentences])
        else:
            self.alone, self.sentences, self.total = False, itertools.chain(first, rest), total

    def add(self, ready: Ready) -> None:
        """Count the texts of a chunk, and those that were cut."""
        self.cut, self.texts = self.cut + ready.cut, self.texts + len(ready.ids)

    def warn(self, tokenizer: Any) -> None:
        """Warn of texts that the tokenizer has cut, once a call, where the package was called."""
        if self.cut:
            what = "the text was" if self.texts == 1 else f"{self.cut} of {self.texts} texts were"
            limit = f"{tokenizer.truncation['max_length']} tokens, the most that the model takes"
            warn(f"{what} longer than {limit}, and cut there")


def is_pair(sentence: Any) -> bool:
    """Tell whether something is a pair of texts."""
    two = isinstance(sentence, tuple | list) and len(sentence) == 2
    return two and all(isinstance(each, str) for each in sentence)


def is_text_or_pair(sentence: Any) -> bool:
    """Tell whether something is for the tokenizer, not ids."""
    return isinstance(sentence, str) or is_pair(sentence)


def chunks(sentences: Iterable[Any]) -> Iterator[Chunk]:
    """Split an iterable into chunks that are not too large to be tokenised at once."""
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
    """Map a function that releases the GIL, one result ahead, in a thread; chunks are read in the caller's thread."""
    first = list(itertools.islice(chunks, 2))
    if len(first) < 2:
        yield from map(function, first)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(function, first[0])
        except RuntimeError:  # no more threads can be started
            yield from map(function, itertools.chain(first, chunks))
            return
        for chunk in itertools.chain(first[1:], chunks):
            coming = pool.submit(function, chunk)
            yield waiting.result()
            waiting = coming
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


class TextIds(NamedTuple):
    """What turns the sentences of a model into ids."""

    tokenizer: Any
    folder: Path | None
    vocab_size: int
    longest: int
    types: int  # how many texts a sequence has token types for; with 1 none are made

    def ready(self, chunk: Chunk, before: str = "", skip: int = 0, *, refuse_ids: bool = False) -> Ready:
        """Turn a chunk into ids, with a prompt ``before`` each text, and into types if some of them differ.

        ``skip`` tokens of each text are the prompt's, and are not pooled; ``refuse_ids`` if a prompt was asked for, which ids
        cannot have.
        """
        given, cut = chunk.sentences, 0
        ids: list[Any] = [None] * len(given)
        places = [n for n, each in enumerate(given) if is_text_or_pair(each)]
        of_texts: list[list[int]] = []
        if places:
            if self.tokenizer is None:
                raise ValueError(missing(self.folder))
            texts: list[Text] = [
                before + x if isinstance(x, str) else (before + x[0], x[1])
                for x in (given[n] for n in places)
            ]
            found, of_texts, cut = tokenize(self.tokenizer, texts, places, chunk.first, self.types > 1)
            for n, of_text in zip(places, found, strict=True):
                ids[n] = of_text
        for n, number in enumerate(range(chunk.first, chunk.first + len(ids))):
            if ids[n] is None:
                if refuse_ids:
                    raise TypeError(f"a prompt goes before text; sentence {number} is ids")
                ids[n] = checked_ids(given[n], number, self.vocab_size, self.longest)
        self._check(ids, chunk, skip)
        types: list[Sequence[int]] | None = None
        if any(map(any, of_texts)):
            types = [[0] * len(each) for each in ids]
            for n, of_text in zip(places, of_texts, strict=True):
                types[n] = of_text
            if (most := max(map(max, of_texts))) >= self.types:
                raise ValueError(f"the tokenizer made the token type {most}; type_vocab_size is {self.types}")
        skipped = [skip * is_text_or_pair(each) for each in given] if skip else None
        return Ready(ids, types, skipped, cut)

    def _check(self, ids: list[Sequence[int]], chunk: Chunk, skip: int) -> None:
        """Refuse ids that the tokenizer made and the model cannot take."""
        if min(map(len, ids), default=1) > skip and max(map(max, ids), default=0) < self.vocab_size:
            return
        for n, (own, given) in enumerate(zip(ids, chunk.sentences, strict=True), chunk.first):
            where = f"sentence {n}, {quoted(given)}"
            if not own:
                raise ValueError(f"{where}, has no tokens")
            if max(own) >= self.vocab_size:
                made = f"the tokenizer made the id {max(own)} of {where}; vocab_size is {self.vocab_size}"
                raise ValueError(f"{made}: the tokenizer belongs to another model")
            if isinstance(given, str) and len(own) <= skip:
                raise ValueError(f"the prompt is left out of pooling, and {where}, has no other tokens")

    def prompt_length(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text belong to the prompt before it."""
        if self.tokenizer is None:
            return 0
        encoding = self.tokenizer.encode(prompt)
        special = without_pads(self.tokenizer, encoding, encoding.special_tokens_mask)
        return len(special) - bool(special[-1:] == [1])


def computed(
    given: Given,
    prepare: Callable[[Chunk], Ready],
    compute: Callable[[Array, Array, Array | None, list[int] | None], Array],
    most: int,
    done: Callable[[int], Any],
) -> Iterator[Array]:
    """Yield the rows of the sentences, a chunk at a time, each computed in packed calls of ``most`` sentences at most.

    The next chunk is prepared meanwhile. ``compute`` takes ids, the bounds of the sequences, types and ``skipped`` of :class:`Ready`,
    ``done`` the number of sentences that were computed.
    """
    for ready in ahead(chunks(given.sentences), prepare):
        given.add(ready)
        y: Array | None = None
        for group in groups([len(ids) for ids in ready.ids], most):
            ids, cu_seqlens = pack([ready.ids[n] for n in group])
            types = None if ready.types is None else pack([ready.types[n] for n in group])[0]
            skipped = None if ready.skipped is None else [ready.skipped[n] for n in group]
            rows = compute(ids, cu_seqlens, types, skipped)
            if y is None:
                y = np.empty((len(ready.ids), *rows.shape[1:]), rows.dtype)
            y[group] = rows
            done(len(group))
        if y is not None:
            yield y
