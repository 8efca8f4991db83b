"""The best rows of an index for some queries: products in the core, distances in NumPy."""

from __future__ import annotations

import numpy as np

from selfattn.engine import Array, search_rows, similarities
from selfattn_models.search._store import Generation

BLOCK = 2**14  # rows whose distances are in memory at once
INT8_CANDIDATES = 4  # how many times k int8 finds, for the exact embeddings to choose from


def nearest(index: Generation, queries: Array, k: int, keep: Array | None) -> tuple[Array, Array]:
    """Return the scores and the numbers of the best k of the rows to keep, the best first.

    Each is of shape (queries, at most k).
    """
    if index.metric in ("euclidean", "manhattan"):
        return _by_distance(index, queries, k, keep)
    if index.codes is None:
        return search_rows(queries, index.vectors, k, keep=keep)
    _, found = search_rows(queries, index.codes, INT8_CANDIDATES * k, scales=index.scales, keep=keep)
    found.sort(axis=1)  # of equal scores the first row wins
    best = (search_rows(one[None], index.vectors[of], k) for one, of in zip(queries, found, strict=True))
    scores, places = (np.concatenate(each) for each in zip(*best, strict=True))
    return scores, np.take_along_axis(found, places, 1)


def _by_distance(index: Generation, queries: Array, k: int, keep: Array | None) -> tuple[Array, Array]:
    best, found = np.empty((len(queries), 0), np.float32), np.empty((len(queries), 0), np.int64)
    for first in range(0, len(index.rows), BLOCK):
        rows = np.arange(first, min(first + BLOCK, len(index.rows)))
        rows = rows if keep is None else rows[keep[rows]]
        scores = np.hstack([best, similarities(index.metric, queries, index.vectors[rows])])
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        found = np.take_along_axis(np.hstack([found, np.tile(rows, (len(queries), 1))]), order, 1)
        best = np.take_along_axis(scores, order, 1)
    return best, found


def best_records(
    index: Generation, queries: Array, k: int, keep: Array | None
) -> list[list[tuple[int, float]]]:
    """Return the best row, and its score, of each of the best k records, for each query."""
    wanted = 2 * k if index.has_windows else k
    while True:
        scores, rows = nearest(index, queries, wanted, keep)
        best = []
        for found in map(zip, rows.tolist(), scores.tolist()):
            records: dict[int, tuple[int, float]] = {}
            for row, score in found:
                records.setdefault(index.row(row)[0], (row, score))
            best.append(list(records.values())[:k])
        if rows.shape[1] < wanted or all(len(each) == k for each in best):
            return best
        wanted *= 4
