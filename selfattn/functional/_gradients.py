"""Gradients of attention, packed or not, in the shapes and dtypes of the inputs.

Each function checks its own arguments and names its own halves of the core; the steps that all share are here. Row operations
and merging use some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, float_dtype, seed_from_rng
from selfattn._gradients import AttentionGradients

WRT = ("query", "key", "value")


Pullback: TypeAlias = Callable[..., AttentionGradients]

_BITS = {name: 1 << n for n, name in enumerate(AttentionGradients._fields)}
_PER_HEAD = AttentionGradients._fields[4:]


def attention_vjp(
    forward: Callable[..., Any],
    backward: Callable[..., AttentionGradients],
    arrays: tuple[npt.ArrayLike, ...],
    heads: slice,
    options: dict[str, Any],
    *,
    names: tuple[str, ...],
    return_lse: bool,
    out: Array | None,
) -> tuple[Any, Pullback]:
    """Run the forward pass; return its result and its pullback.

    ``forward`` is the core's. ``backward(q, k, v, **options, names, grad_out, grad_lse, out, statistics)`` returns the
    gradients that ``names`` lists. Both halves take ``options``; this sets the seed of dropout in them. ``heads`` are the
    axes of the heads in ``arrays``, query, key and value.
    """
    for name in names:
        if name not in WRT and options.get(name) is None:
            raise ValueError(f"wrt names {name}, which was not given")
    q, k, v = map(as_array, WRT, arrays)
    k, v = apart(k, heads), apart(v, heads)
    options["dropout_p"], options["rng"] = _settled(options["dropout_p"], options.get("rng"))
    output, statistics, unrounded, *lse = forward(
        q, k, v, **options, return_lse=return_lse, out=out, unrounded=True
    )
    if unrounded is not output:
        round_into(output, unrounded, options.get("num_threads"))
    dtype = output.dtype  # the pullback must not hold `output`

    def pullback(grad_out: npt.ArrayLike | None, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        """Pull the gradient of the output (and of the log-sum-exp) back to the inputs named in ``wrt``."""
        if grad_lse is not None and not return_lse:
            raise TypeError("grad_lse was given, but the log-sum-exp was not returned: use return_lse=True")
        if grad_out is None and grad_lse is not None:
            grad_out = np.zeros_like(unrounded, dtype)
        grad_out = as_gradient("grad_out", grad_out, dtype)
        return backward(
            q, k, v, **options, names=names, grad_out=grad_out, grad_lse=grad_lse, out=unrounded, statistics=statistics
        )  # fmt: skip

    return ((output, lse[0]) if return_lse else output), pullback


def take_gradients(
    backward: Callable[..., Any],
    q: Array,
    k: Array,
    v: Array,
    *,
    names: tuple[str, ...],
    row_sums: Callable[[Array], Array],
    grad_lse: npt.ArrayLike | None,
    statistics: Array,
    **options: Any,
) -> AttentionGradients:
    """Run the core's backward pass, and sum the gradients to the shapes of the inputs.

    ``row_sums`` adds up the shares of rows in the gradient of the ALiBi slope, or of the sink, of their head.
    """
    grad_lse = None if grad_lse is None else as_gradient("grad_lse", grad_lse, statistics.dtype)
    bits = sum(_BITS[name] for name in set(names))
    raw = backward(q, k, v, **options, statistics=statistics, grad_lse=grad_lse, wrt=bits)
    found = dict(zip(AttentionGradients._fields, raw, strict=True))
    with np.errstate(all="ignore"):  # as in C, without NumPy's warnings
        for name in _PER_HEAD:
            if found[name] is not None:
                found[name] = np.asarray(row_sums(_row_shares(found[name])))
    given, threads = {"query": q, "key": k, "value": v, **options}, options.get("num_threads")
    return AttentionGradients(*[_fitted(each, given.get(name), threads) for name, each in found.items()])


def _fitted(raw: Any, given: Any, num_threads: int | None) -> Any:
    """Sum the core's gradient to the shape of the input, in the gradient's dtype."""
    if raw is None:
        return None
    if isinstance(raw, list | tuple):  # masks of packed sequences
        return [_fitted(*each, num_threads) for each in zip(raw, given, strict=True)]
    given = as_array("given", given)
    if raw.shape == given.shape and raw.dtype == given.dtype:
        return raw
    dtype = gradient_dtype(given)
    if raw.size == 0:  # without query heads, there may be any number of key heads
        return np.zeros(given.shape, dtype)
    with np.errstate(all="ignore"):
        return rounded(sum_to_shape(raw, given.shape), dtype, num_threads)


def _row_shares(raw: Array) -> Array:
    """Return each row's term in the gradient of numbers per head, x or x - y * z (docs/theory/backward.md), in float64."""
    rows = raw.astype(np.float64)
    shares: Array = rows[..., 0] if rows.shape[-1] == 1 else rows[..., 0] - rows[..., 1] * rows[..., 2]
    return shares


def sum_to_shape(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast: the transpose of broadcasting."""
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    axes = tuple(axis for axis, n in enumerate(gradient.shape) if n != 1 and shape[axis] == 1)
    return (gradient.sum(axis=axes, keepdims=True) if axes else gradient).reshape(shape)


# -------------------------------------------------------------------------------------------------- arguments


def check_float_mask(name: str, mask: npt.ArrayLike | None) -> None:
    """Refuse a boolean mask, which has no gradient."""
    if mask is not None and as_array(name, mask).dtype == np.bool_:
        raise ValueError(f"wrt names attn_mask, but {name} is boolean and has no gradient: pass a float mask")


def _settled(dropout_p: Any, rng: Any) -> tuple[Any, Any]:
    """Return dropout's probability as a float and, if it is not 0, a seed, so that both passes drop the same weights."""
    try:
        is_bool = isinstance(dropout_p, bool) or getattr(dropout_p, "dtype", None) == np.bool_
        number = dropout_p if is_bool or isinstance(dropout_p, str | bytes) else float(dropout_p)
    except (TypeError, ValueError, OverflowError):
        return dropout_p, rng  # the core raises
    drops = isinstance(number, float) and 0 < number <= 1
    return number, seed_from_rng(rng) if drops else rng


def apart(x: Array, axes: slice) -> Array:
    """Copy keys or values that are broadcast along one of the axes, so that each head has its own gradient.

    The core would add up the gradients of heads that share keys and values in memory, which is right only along axes of length 1.
    """
    steps = x.strides[axes]
    if 0 not in steps:
        return x
    return x.copy() if any(n > 1 and step == 0 for n, step in zip(x.shape[axes], steps, strict=True)) else x


def as_gradient(name: str, x: npt.ArrayLike | None, dtype: np.dtype[Any]) -> Array:
    """Convert lists and numbers to ``dtype``; numbers beyond its range become inf, without a warning. Arrays are kept."""
    if isinstance(x, np.ndarray):
        return x
    if x is None:
        raise TypeError(f"{name} must be an array, not None")
    array = as_array(name, x)
    if not isinstance(x, list | tuple | float | int):  # has a dtype, as PyTorch tensors do
        return array
    float_dtype(name, array)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def as_fitting_gradient(
    name: str, x: npt.ArrayLike | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return the gradient of a result of ``shape`` and ``dtype``; lists and numbers get this dtype.

    float64, and integers, which count as float64, are refused where the result has fewer bits.
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
    """Return the dtype of the gradient of x: the dtype of x, or float64 for integers."""
    return np.dtype(np.float64) if x.dtype.kind in "iu" else x.dtype.newbyteorder("=")


def like(x: Array, dx: Array) -> Array:
    """Return a gradient in the dtype of its input; integers count as float64."""
    return dx.astype(gradient_dtype(x), order="C", copy=False)


def rounded(x: Array, dtype: np.dtype[Any], num_threads: int | None) -> Array:
    """Round x to the dtype of a gradient, if it has another; numbers beyond its range become inf, without a warning."""
    x = np.asarray(x)  # NumPy's sum over all axes is a scalar
    if x.dtype != np.float32 or dtype.itemsize != 2 or not x.flags.c_contiguous:
        return x.astype(dtype, copy=False)
    narrow = np.empty(x.shape, dtype)
    _core._narrow(x, narrow, num_threads or 0)
    return narrow


def round_into(out: Array, x: Array, num_threads: int | None) -> None:
    """Round a C-contiguous float32 array into a 16-bit array of any strides."""
    if out.flags.c_contiguous and out.flags.aligned:
        _core._narrow(x, out, num_threads or 0)
    else:
        out[...] = rounded(x, out.dtype, num_threads)
