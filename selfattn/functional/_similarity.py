"""How similar embeddings are, by the four measures that a folder of sentence-transformers may name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, compute_dtype

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def similarities(kind: str, a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
    """Compute the similarity of each row of a with each row of b, (n, m); distances are negative."""
    x, y = _rows(kind, a, b)
    if kind in ("cosine", "dot"):
        product: Array = x @ y.T
        return product
    found = np.empty((len(x), len(y)), x.dtype)
    for n, row in enumerate(x):
        found[n] = -np.linalg.norm(y - row, _order(kind), axis=1)
    return found


def pairwise_similarities(kind: str, a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
    """Compute the similarity of each row of a with the same row of b, (n,); distances are negative."""
    x, y = _rows(kind, a, b)
    if len(x) != len(y):
        raise ValueError(f"a and b must have the same number of rows, not {len(x)} and {len(y)}")
    if kind in ("cosine", "dot"):
        product: Array = np.einsum("nd,nd->n", x, y)
        return product
    distances: Array = -np.linalg.norm(y - x, _order(kind), axis=1)
    return distances


def _order(kind: str) -> int:
    return 1 if kind == "manhattan" else 2


def _rows(kind: str, a: npt.ArrayLike, b: npt.ArrayLike) -> tuple[Array, Array]:
    """Return embeddings as rows of one dtype, for the cosine of length 1."""
    x, y = (np.atleast_2d(as_array(name, given)) for name, given in (("a", a), ("b", b)))
    if x.ndim > 2 or y.ndim > 2 or x.shape[1] != y.shape[1]:
        raise ValueError(f"a and b must be rows of one width, (n, d) and (m, d), not {x.shape} and {y.shape}")
    dtype = compute_dtype(x, y)
    x, y = (unit_rows(each) if kind == "cosine" else each for each in (x, y))
    return x.astype(dtype, copy=False), y.astype(dtype, copy=False)


def unit_rows(rows: Array) -> Array:
    """Scale rows to length 1, so that products are cosines; rows of zeros stay."""
    largest = np.abs(rows).max(-1, keepdims=True, initial=0).astype(np.float64)
    usual = (largest > 0) & (largest < np.inf)
    scaled = rows / np.where(usual, largest, 1)  # squares do not overflow
    lengths = np.sqrt(np.square(scaled).sum(-1, keepdims=True))
    unit: Array = np.divide(scaled, lengths, where=lengths != 0, out=np.zeros_like(scaled))
    return unit
