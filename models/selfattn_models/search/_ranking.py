"""Other ways to rank: words by BM25, a cross-encoder; and texts that are nearly the same."""

from __future__ import annotations

import functools
import itertools
import math
import os
import re
import time
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import Array, import_extra, quoted
from selfattn_models._encoders import encoder
from selfattn_models.search._models import normalized
from selfattn_models.search._store import Reader, Snapshot

RANKS = 60  # what is added to a rank before its reciprocal is taken: Cormack et al., 2009
MOST_NEAR = 100_000  # texts that are compared with each other
BLOCK = 2048  # texts that are compared with as many at once
# Thai, Lao, Burmese, Khmer, Japanese, Chinese.
SPACELESS = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
SPACELESS += r"\U00020000-\U0003ffff"
Found: TypeAlias = Sequence[tuple[int, float]]  # rows and their scores


class Words:
    """BM25 of texts, which are named by their first rows, by the library ``bm25s``."""

    def __init__(self, rows: Array, texts: list[str]) -> None:
        self._rows = rows
        listed = [words(text) for text in texts]
        self._ranking = import_extra("bm25s").BM25()
        self._has_words = any(listed)
        if self._has_words:
            self._ranking.index(listed, show_progress=False)

    def best(self, query: str, k: int, keep: Array | None) -> list[int]:
        """Return the texts that share a word with a query, the best k of those to keep, the best first."""
        if not (listed := words(query)) or not self._has_words:
            return []
        scores = self._ranking.get_scores(listed)
        scores = scores if keep is None else np.where(keep[self._rows], scores, 0)
        best = np.argsort(-scores, kind="stable")[:k]
        found: list[int] = self._rows[best[scores[best] > 0]].tolist()
        return found


@functools.cache
def _patterns() -> tuple[re.Pattern[str], re.Pattern[str]]:
    r"""Return what finds words, or runs of scripts without spaces, and characters; \w has no marks, as vowel signs."""
    marks = "".join(chr(n) for n in range(0x20000) if unicodedata.category(chr(n))[0] == "M")
    words = rf"([{SPACELESS}]+)|[^\W{SPACELESS}](?:[^\W{SPACELESS}]|[{marks}])*"
    return re.compile(words), re.compile(rf".[{marks}]*")


def words(text: str) -> list[str]:
    """Return the words of a text in small letters; of scripts without spaces each two characters are one.

    >>> words("Cafe\u0301, 打印机")
    ['café', '打印', '印机']
    """
    found, (parts, characters) = list[str](), _patterns()
    for part in parts.finditer(unicodedata.normalize("NFC", text.casefold())):
        run = characters.findall(part[0]) if part[1] else ()
        found += map("".join, itertools.pairwise(run)) if len(run) > 1 else [part[0]]
    return found


def joined(
    reader: Reader, query: str, found: Found, by_words: Sequence[int], k: int
) -> list[tuple[int, float]]:
    """Join two rankings by the sums of their reciprocal ranks; return the best k rows with these sums.

    The row of a text is that of the ranking that has it first; by words this is the window with most of them.
    """
    owner = reader.now.owner
    rows = {row if owner is None else int(owner[row]): row for row, _ in found}
    ranks = [{first: rank for rank, first in enumerate(each, 1)} for each in (rows, by_words)]
    both = [(first, [of.get(first, math.inf) for of in ranks]) for first in {**ranks[0], **ranks[1]}]
    scored = [(sum(1 / (RANKS + rank) for rank in each), first, each) for first, each in both]
    best = sorted(scored, key=lambda each: (-each[0], each[1]))[:k]
    return [
        (rows[first] if rank <= of_words else _window(reader, query, first), score)
        for score, first, (rank, of_words) in best
    ]


def _window(reader: Reader, query: str, first: int) -> int:
    """Return the row of a text's window that has most words of a query."""
    if reader.now.owner is None:
        return first
    entry, wanted = reader.entry(first), {*words(query)}
    has = [len(wanted.intersection(words(entry.text[slice(*span)]))) for span in entry.spans or [(0, 0)]]
    return first + has.index(max(has))


def reranked(reader: Reader, query: str, found: Found, given: Any, k: int) -> list[tuple[int, float]]:
    """Return the best k rows by a cross-encoder's scores for a query and what was embedded."""
    model = encoder(given) if isinstance(given, str | os.PathLike) else given
    if not callable(getattr(model, "rank", None)):
        what = "a cross-encoder, which has rank(), or its folder"
        raise TypeError(f"rerank must be {what}, not {quoted(given)}")
    ranked = model.rank(query, [reader.passage(row) for row, _ in found]) if found else []
    try:
        return [(found[each["corpus_id"]][0], float(each["score"])) for each in ranked][:k]
    except (TypeError, LookupError):
        what = 'must return {"corpus_id": n, "score": x} for each text, the best first'
        raise TypeError(f"rank() of {type(model).__name__} {what}") from None


def near(reader: Reader, threshold: float, done: Callable[[int], Any]) -> list[list[int]]:
    """Return groups of texts by their first rows.

    Each text is as similar as ``threshold`` to another of its group, by the cosine, or is equal to it.
    """
    now, roots = reader.now, np.arange(reader.now.rows)
    live = now.live()
    equal = "SELECT row, min(row) OVER (PARTITION BY text) AS first FROM texts WHERE id IS NOT NULL"
    for row, first in reader.db.execute(f"SELECT row, first FROM ({equal}) WHERE row != first"):
        roots[row] = first
    if threshold < 1:
        _join_near(now, live, threshold, roots, done)
    groups: dict[int, list[int]] = {}
    for row, root in zip(live.tolist(), roots[live].tolist(), strict=True):
        groups.setdefault(root, []).append(row)
    return [group for group in groups.values() if len(group) > 1]


def _join_near(
    now: Snapshot, live: Array, threshold: float, roots: Array, done: Callable[[int], Any]
) -> None:
    """Join the groups of texts that are near."""
    n = len(live)
    x = normalized(now.means()[:MOST_NEAR], "cosine")
    if n > MOST_NEAR:
        began = time.perf_counter()
        np.matmul(x[:BLOCK], x.T)
        minutes = (time.perf_counter() - began) * n * n / 2 / (BLOCK * MOST_NEAR) / 60
        what = f"{MOST_NEAR} texts are compared at most; {n} would take some {minutes:.0f} minutes here"
        raise ValueError(f"{what}; threshold=1.0 finds equal texts among any number")
    for begin in range(0, n, BLOCK):
        for other in range(begin, n, BLOCK):
            pairs = np.argwhere(x[begin : begin + BLOCK] @ x[other : other + BLOCK].T >= threshold)
            of_groups = np.unique(roots[live[pairs + np.array([begin, other])]], axis=0)
            for pair in of_groups[of_groups[:, 0] != of_groups[:, 1]].tolist():
                one, two = sorted(roots[pair].tolist())  # earlier pairs may have joined them to others
                roots[roots == two] = one
        done(min(BLOCK, n - begin))
