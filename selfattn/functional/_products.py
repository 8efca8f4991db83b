"""Matrix products by the core's kernels: the bits of a row depend neither on other rows nor on threads."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from selfattn import _core
from selfattn._check import Array

FLOAT32: np.dtype[Any] = np.dtype(np.float32)
FLOAT64: np.dtype[Any] = np.dtype(np.float64)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Compute ``x @ weight.T + bias``: x (..., I), weight (O, I), bias (O,) give (..., O)."""
    kind = widest(x, weight)
    rows = x if x.ndim == 2 else as_rows(x)
    y: Array = _core._linear_forward(
        plain(rows, kind), plain(weight, kind), None if bias is None else plain(bias, kind)
    )
    y = y if x.ndim == 2 else y.reshape(*x.shape[:-1], len(weight))
    return y if x.dtype is kind else y.astype(np.result_type(x, weight), copy=False)


def linear_backward(dy: Array, x: Array, weight: Array, with_bias: bool = True) -> tuple[Array, ...]:
    """Return ``dx = dy @ weight``, ``d_weight = dy.T @ x`` and ``d_bias = sum(dy)``, summed over all rows.

    Without a bias the result has no ``d_bias``.
    """
    kind = widest(dy, x, weight)
    dy_rows, rows = (dy, x) if x.ndim == 2 else (as_rows(dy), as_rows(x))
    dx, *of_parameters = _core._linear_backward(
        plain(dy_rows, kind), plain(rows, kind), plain(weight, kind), with_bias
    )
    dx = dx if x.ndim == 2 else dx.reshape(x.shape)
    if x.dtype is kind and weight.dtype is kind:
        return dx, *of_parameters
    of_parameters = [gradient.astype(weight.dtype, copy=False) for gradient in of_parameters]
    return dx.astype(x.dtype, copy=False), *of_parameters


def widest(*arrays: Array) -> np.dtype[Any]:
    """Return the dtype of a product of these arrays.

    It is float64 if one of them is float64 of any byte order, else float32.
    """
    for x in arrays:
        if x.dtype.char == "d":
            return FLOAT64
    return FLOAT32


def plain(x: Array, dtype: np.dtype[Any]) -> Array:
    """Return an array as the core reads it: native, aligned, without gaps; a copy only if that is needed."""
    flags = x.flags
    if x.dtype == dtype and flags.c_contiguous and flags.aligned:
        return x
    return np.require(x, dtype, ("C", "A"))


def as_rows(x: Array) -> Array:
    """View (..., d) as (n, d), also if d is 0."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def widened(x: Array) -> Array:
    """Convert 16-bit floats to float32, in which sums are accumulated."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x
