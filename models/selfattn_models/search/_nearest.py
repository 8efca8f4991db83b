"""The best rows of an index for some queries: products in the core, distances in NumPy."""

from __future__ import annotations

import numpy as np

from selfattn.engine import Array, search_rows, similarities
from selfattn_models.search._store import Reader, Snapshot

BLOCK = 2**14  # rows whose distances are in memory at once
TINY = 1e-15
INT8_CANDIDATES = 4  # how many times k int8 finds, for the exact embeddings to choose from


def nearest(now: Snapshot, queries: Array, k: int, keep: Array | None) -> tuple[Array, Array]:
    """Return the scores and the numbers of the best k of the rows to keep, the best first.

    Each is of shape (queries, at most k).
    """
    if now.metric in ("euclidean", "manhattan"):
        now.check("vectors", keep)
        return _by_distance(now, queries, k, keep)
    # By a power of two, which changes no bit, so that products with tiny queries are not zeros.
    scale = np.exp2(np.frexp(np.abs(queries).max(axis=1, keepdims=True))[1].astype(float))
    queries = (queries / scale).astype(np.float32)
    if now.codes is None:
        now.check("vectors", keep)
        scores, found = search_rows(queries, now.vectors, k, keep=keep)
        return scores * scale, found
    now.check("codes", keep)
    _, found = search_rows(queries, now.codes, INT8_CANDIDATES * k, scales=now.arrays["scales"], keep=keep)
    found.sort(axis=1)  # of equal scores the first row wins
    now.check("vectors", found.ravel())
    best = (search_rows(one[None], now.vectors[of], k) for one, of in zip(queries, found, strict=True))
    scores, places = (np.concatenate(each) for each in zip(*best, strict=True))
    return scores * scale, np.take_along_axis(found, places, 1)


def _by_distance(now: Snapshot, queries: Array, k: int, keep: Array | None) -> tuple[Array, Array]:
    tiny = np.abs(queries).max(initial=0) < TINY  # squares of such numbers are zeros in float32
    queries = queries.astype(np.float64) if tiny else queries
    best, found = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for first in range(0, now.rows, BLOCK):
        rows = np.arange(first, min(first + BLOCK, now.rows))
        rows = rows if keep is None else rows[keep[rows]]
        scores = np.hstack([best, similarities(now.metric, queries, now.vectors[rows])])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(np.hstack([found, np.tile(rows, (len(queries), 1))]), order, 1)
        best = np.take_along_axis(scores, order, 1)
    return best, found


def best_texts(reader: Reader, queries: Array, k: int, keep: Array | None) -> list[list[tuple[int, float]]]:
    """Return the best row, and its score, of each of the best k texts, for each query."""
    owner = reader.now.owner
    wanted = k if owner is None else 2 * k
    while True:
        scores, rows = nearest(reader.now, queries, wanted, keep)
        best = []
        for found in map(zip, rows.tolist(), scores.tolist()):
            texts: dict[int, tuple[int, float]] = {}
            for row, score in found:
                texts.setdefault(row if owner is None else int(owner[row]), (row, score))
            best.append(list(texts.values())[:k])
        if rows.shape[1] < wanted or all(len(each) == k for each in best):
            return best
        wanted *= 4
