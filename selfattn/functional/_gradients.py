"""What the functions with a pullback do alike: attention, packed or not, and in part row operations and merging."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn.random import TorchGenerator
from selfattn.reference.arguments import as_array, float_dtype
from selfattn.reference.attention_vjp import AttentionGradients
from selfattn.reference.dropout import seed_from_rng

Array: TypeAlias = npt.NDArray[Any]


def check_names(wrt: str | Any) -> tuple[str, ...]:
    """Return ``wrt`` as a tuple of names that have gradients."""
    if not isinstance(wrt, Iterable):
        raise TypeError(f"wrt must be a name or a sequence of names, got {type(wrt).__name__}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in AttentionGradients._fields:
            raise ValueError(f"wrt may name {', '.join(AttentionGradients._fields)}; it has {name!r}")
    return names


def settle_dropout(
    dropout_p: Any, rng: int | np.random.Generator | TorchGenerator | None
) -> tuple[Any, int | np.random.Generator | TorchGenerator | None]:
    """Give dropout as a number that cannot change, and with it a seed: forward and backward drop the same."""
    try:
        is_bool = isinstance(dropout_p, bool) or getattr(dropout_p, "dtype", None) == np.bool_
        number = dropout_p if is_bool or isinstance(dropout_p, str | bytes) else float(dropout_p)
    except (TypeError, ValueError, OverflowError):
        return dropout_p, rng  # the core says what is wrong with it
    drops = isinstance(number, float) and 0 < number <= 1
    return number, seed_from_rng(rng) if drops else rng


def apart(x: Array, axes: slice) -> Array:
    """Copy keys or values that are a broadcast view along one of the axes: each head has a gradient of its own.

    The core adds up over heads that share keys and values in memory; those of length 1 are meant so.
    """
    steps = x.strides[axes]
    if 0 not in steps:
        return x
    return x.copy() if any(n > 1 and step == 0 for n, step in zip(x.shape[axes], steps, strict=True)) else x


def rounded(x: Array, dtype: np.dtype[Any], num_threads: int | None) -> Array:
    """Round to the dtype of a gradient: x itself where it has that dtype. Beyond its range is inf, without a warning."""
    x = np.asarray(x)  # NumPy's sum of all elements is a number
    if x.dtype != np.float32 or dtype.itemsize != 2 or not x.flags.c_contiguous:
        return x.astype(dtype, copy=False)
    narrow = np.empty(x.shape, dtype)
    _core._narrow(x, narrow, num_threads or 0)
    return narrow


def round_into(out: Array, x: Array, num_threads: int | None) -> None:
    """Round float32, C-contiguous, to an array of 16 bits of any strides."""
    if out.flags.c_contiguous and out.flags.aligned:
        _core._narrow(x, out, num_threads or 0)
    else:
        out[...] = rounded(x, out.dtype, num_threads)


def row_shares(name: str, raw: Array) -> Array:
    """Give each row's share of the gradient of ALiBi's slopes or of sinks (docs/theory/backward.md), in float64."""
    rows = raw.astype(np.float64)
    shares: Array = rows[..., 0] if name == "sinks" else rows[..., 0] - rows[..., 1] * rows[..., 2]
    return shares


def as_gradient(name: str, x: npt.ArrayLike | None, dtype: np.dtype[Any]) -> Array:
    """Convert what is no array. Lists and numbers are taken in ``dtype``; beyond its range is inf, without a warning."""
    if isinstance(x, np.ndarray):
        return x
    if x is None:
        raise TypeError(f"{name} must be an array, not None")
    array = as_array(name, x)
    if not isinstance(x, list | tuple | float | int):  # it has a dtype of its own, such as a PyTorch tensor
        return array
    float_dtype(name, array)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def as_fitting_gradient(
    name: str, x: npt.ArrayLike | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return the gradient of a result of ``shape`` and ``dtype``, in ``dtype`` if it was no array.

    Refuses float64, and integers, which count as that, where the result has fewer bits.
    """
    found = as_array(name, as_gradient(name, x, dtype))
    if found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}; the result that it is the gradient of has {shape}")
    if float_dtype(name, found) == np.float64 != dtype:
        raise TypeError(
            f"{name} has dtype {found.dtype.name}, but the result has {dtype}: it would be narrowed"
        )
    return found


def gradient_dtype(x: Array) -> np.dtype[Any]:
    """Give the dtype of the gradient of x: its own, float64 for integers."""
    return np.dtype(np.float64) if x.dtype.kind in "iu" else x.dtype.newbyteorder("=")
