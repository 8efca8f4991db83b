"""Long texts in windows of sentences, each as long as the model takes."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from selfattn import nn
from selfattn.text import sentence_gaps
from selfattn_models._text_encoder import TextEncoder

Count: TypeAlias = Callable[[Sequence[str]], list[int]]  # the tokens of each text
_PARAGRAPHS, _WORDS = re.compile(r"\n\s*\n"), re.compile(r"\s+")


def windows(texts: Sequence[str], model: Any) -> list[list[tuple[int, int]]]:
    """Return where the windows of each text begin and end.

    A text that the model takes whole has one, of its whole length.
    """
    count, most = _counter(model)
    long = [n for n, text in enumerate(texts) if len(text.encode()) > most]  # a token has a byte or more
    sizes = dict(zip(long, count([texts[n] for n in long]), strict=True)) if long else {}
    cut = {n: _cut(texts[n], count, most) for n, size in sizes.items() if size > most}
    return [cut.get(n, [(0, len(text))]) for n, text in enumerate(texts)]


def _counter(model: Any) -> tuple[Count, float]:
    """Return what counts tokens, and how many of a text the model takes, special ones and the prompt not counted."""
    if isinstance(model.given, TextEncoder) and (tokenizer := model.given.tokenizer) is not None:
        special = tokenizer.num_special_tokens_to_add(False)

        def count(texts: Sequence[str]) -> list[int]:
            encodings = tokenizer.encode_batch_fast(list(texts))
            parts = [[e, *e.overflowing] for e in encodings]
            return [sum(len(part.ids) - special for part in each) for each in parts]

        before = count([model.prompt])[0] if model.prompt else 0
        return count, max(1, model.given.max_seq_length - special - before)
    if isinstance(model.given, nn.EmbeddingModel):
        return (lambda texts: [len(model.given._tokenize(text)) for text in texts]), model.given.max_seq_len
    return (lambda texts: [0] * len(texts)), float("inf")


def _cut(text: str, count: Count, most: float) -> list[tuple[int, int]]:
    """Cut a text after as many sentences as the model takes.

    A longer sentence is cut between words, a longer word anywhere.
    """
    paragraphs = _pieces(text, (0, len(text)), _PARAGRAPHS)
    pieces = [each for span in paragraphs for each in _between(span, sentence_gaps(text, *span))]
    for pattern in (_WORDS, None):
        sizes = count([text[begin:end] for begin, end in pieces])
        parts = [
            _pieces(text, each, pattern) if n > most else [each]
            for each, n in zip(pieces, sizes, strict=True)
        ]
        pieces = [*itertools.chain(*parts)]
    # With the white space before each, which are tokens, or a part of the word.
    words = [text[begin:end] for begin, end in itertools.pairwise([0, *(end for _, end in pieces)])]
    totals = [0, *itertools.accumulate(count(words))]
    found, first = [], 0
    while first < len(pieces):
        end = max(first + 1, bisect.bisect_right(totals, totals[first] + most) - 1)
        found.append((pieces[first][0], pieces[end - 1][1]))
        first = end
    return found or [(0, len(text))]


def _pieces(text: str, span: tuple[int, int], pattern: re.Pattern[str] | None) -> list[tuple[int, int]]:
    """Split a part of a text at what a pattern matches, which is left out; None splits it into characters."""
    begin, end = span
    if pattern is None:
        return [(n, n + 1) for n in range(begin, end)]
    return _between(span, (gap.span() for gap in pattern.finditer(text, begin, end)))


def _between(span: tuple[int, int], gaps: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what is between gaps in a part of a text."""
    cuts = [span[0], *(cut for gap in gaps for cut in gap), span[1]]
    return [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True) if b > a]
