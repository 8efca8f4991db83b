"""Other ways to rank: words by BM25, a cross-encoder; and texts that are nearly the same."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import Array, import_extra, quoted
from selfattn_models._encoders import encoder
from selfattn_models.search._models import normalized
from selfattn_models.search._store import Generation

RANKS = 60  # what is added to a rank before its reciprocal is taken: Cormack et al., 2009
MOST_NEAR = 100_000  # texts that are compared with each other
BLOCK = 2048  # texts that are compared with as many at once
Found: TypeAlias = Sequence[tuple[int, float]]  # rows and their scores


class Words:
    """BM25 of the texts of some records, by the library ``bm25s``."""

    def __init__(self, records: Array, texts: list[str]) -> None:
        self._records = records
        words = _words(texts)
        self._ranking = import_extra("bm25s").BM25()
        self._has_words = any(words)
        if self._has_words:
            self._ranking.index(words, show_progress=False)

    def best(self, query: str, k: int, keep: Array | None) -> list[int]:
        """Return the records that share a word with a query, the best k of those to keep, the best first."""
        (words,) = _words([query])
        if not words or not self._has_words:
            return []
        scores = self._ranking.get_scores(words)
        scores = scores if keep is None else np.where(keep[self._records], scores, 0)
        best = np.argsort(-scores, kind="stable")[:k]
        found: list[int] = self._records[best[scores[best] > 0]].tolist()
        return found


def _words(texts: list[str]) -> list[list[str]]:
    options = {"stopwords": None, "show_progress": False, "return_ids": False}
    found: list[list[str]] = import_extra("bm25s").tokenize(texts, token_pattern=r"\w+", **options)
    return found


def joined(now: Generation, found: Found, by_words: Sequence[int], k: int) -> list[tuple[int, float]]:
    """Join two rankings by the sums of their reciprocal ranks; return the best k rows with these sums."""
    rows = {now.row(row)[0]: row for row, _ in found}
    sums: dict[int, float] = {}
    for ranking in (list(rows), by_words):
        for rank, record in enumerate(ranking, 1):
            sums[record] = sums.get(record, 0) + 1 / (RANKS + rank)
    best = sorted(sums.items(), key=lambda each: (-each[1], each[0]))[:k]
    first = now.rows_of(np.array([record for record, _ in best], int))[0].tolist()
    return [(rows.get(record, row), score) for (record, score), row in zip(best, first, strict=True)]


def reranked(now: Generation, query: str, found: Found, given: Any, k: int) -> list[tuple[int, float]]:
    """Return the best k rows by a cross-encoder's scores for a query and what was embedded."""
    model = encoder(given) if isinstance(given, str | os.PathLike) else given
    if not callable(getattr(model, "rank", None)):
        what = "a cross-encoder, which has rank(), or its folder"
        raise TypeError(f"rerank must be {what}, not {quoted(given)}")
    ranked = model.rank(query, [now.passage(row) for row, _ in found]) if found else []
    try:
        return [(found[each["corpus_id"]][0], float(each["score"])) for each in ranked][:k]
    except (TypeError, LookupError):
        what = 'must return {"corpus_id": n, "score": x} for each text, the best first'
        raise TypeError(f"rank() of {type(model).__name__} {what}") from None


def near(now: Generation, threshold: float, done: Callable[[int], Any]) -> list[list[int]]:
    """Return groups of records.

    Each record is as similar as ``threshold`` to another of its group, by the cosine, or has its text.
    """
    live = now.live()
    hashes, counts = np.unique(now.records["text_hash"][live], return_counts=True)
    first: dict[bytes, int] = {}
    roots = np.arange(len(now.records))  # the first record of each one's group
    for n in live[np.isin(now.records["text_hash"][live], hashes[counts > 1])].tolist():
        roots[n] = first.setdefault(now.raw(n).text, n)
    if threshold < 1:
        _join_near(now, live, threshold, roots, done)
    groups: dict[int, list[int]] = {}
    for n, root in zip(live.tolist(), roots[live].tolist(), strict=True):
        groups.setdefault(root, []).append(n)
    return [group for group in groups.values() if len(group) > 1]


def _join_near(
    now: Generation, live: Array, threshold: float, roots: Array, done: Callable[[int], Any]
) -> None:
    """Join the groups of records that are near, of those with one row."""
    first, end = now.rows_of(live)
    whole = end == first + 1
    records, n = live[whole], int(whole.sum())
    x = normalized(now.vectors[first[whole][:MOST_NEAR]], "cosine")
    if n > MOST_NEAR:
        began = time.perf_counter()
        np.matmul(x[:BLOCK], x.T)
        minutes = (time.perf_counter() - began) * n * n / 2 / (BLOCK * MOST_NEAR) / 60
        what = f"{MOST_NEAR} texts are compared at most; {n} would take some {minutes:.0f} minutes here"
        raise ValueError(f"{what}; threshold=1.0 finds equal texts among any number")
    for begin in range(0, n, BLOCK):
        for other in range(begin, n, BLOCK):
            pairs = np.argwhere(x[begin : begin + BLOCK] @ x[other : other + BLOCK].T >= threshold)
            of_groups = np.unique(roots[records[pairs + np.array([begin, other])]], axis=0)
            for pair in of_groups[of_groups[:, 0] != of_groups[:, 1]].tolist():
                one, two = sorted(roots[pair].tolist())  # earlier pairs may have joined them to others
                roots[roots == two] = one
        done(min(BLOCK, n - begin))
