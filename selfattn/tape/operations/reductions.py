"""Operations along axes: sums and their kin, the largest and smallest numbers, order, counts."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from selfattn import _core
from selfattn._check import Array
from selfattn.tape.dtypes import as_dtype, dtype
from selfattn.tape.operations.table import TABLE, ValuesIndices, composite, operation, quiet
from selfattn.tape.tensors import Tensor, wrap

Dim: TypeAlias = int | tuple[int, ...] | list[int] | None


def axes_of(x: Array, dim: Dim) -> tuple[int, ...]:
    """Return the axes that are summed over: all of them for None or an empty tuple."""
    n = x.ndim
    if isinstance(dim, int) and -n <= dim < n:
        return (dim % n,)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(x.ndim))
    return np.lib.array_utils.normalize_axis_tuple(dim, max(x.ndim, 1))[: x.ndim or 0]


def spread(dy: Array, shape: tuple[int, ...], axes: tuple[int, ...], keepdim: bool) -> Array:
    """Return the gradient of a sum for each of its terms, which have a shape."""
    if not keepdim and axes and dy.ndim:
        dy = dy.reshape([1 if axis in axes else n for axis, n in enumerate(shape)])
    return np.broadcast_to(dy, shape)


def in_kind(x: Array, kind: dtype | None) -> Array:
    """Return an array in the dtype that an operation was given."""
    return x if kind is None else x.astype(as_dtype(kind).numpy)


def _counted(x: Array, axes: tuple[int, ...]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _numbered(name: str) -> Any:
    """Return the label of a sum's node: 0 at its end is of all numbers, 1 of axes."""
    return lambda input, dim=None, *args, **kwargs: f"{name}Backward{int(dim is not None)}"


@operation("tm", label=_numbered("Sum"))
def sum(input: Array, dim: Dim = None, keepdim: bool = False, *, dtype: dtype | None = None) -> Any:
    """Return the sum over one axis, several, or all."""
    axes, kind, shape = axes_of(input, dim), input.dtype, input.shape
    wide = in_kind(input, dtype)
    return wide.sum(axis=axes, keepdims=keepdim), (
        lambda dy: spread(dy.astype(kind, copy=False), shape, axes, keepdim),
    )


@operation("tm", label=_numbered("Mean"))
def mean(input: Array, dim: Dim = None, keepdim: bool = False, *, dtype: dtype | None = None) -> Any:
    """Return the mean over one axis, several, or all."""
    wide, kind, shape = in_kind(input, dtype), input.dtype, input.shape
    if wide.dtype.kind in "iub":
        raise RuntimeError(f"mean() is of floats, not of {wide.dtype}; convert the tensor by .float()")
    axes = axes_of(input, dim)
    share = kind.type(1 / n) if (n := _counted(input, axes)) else kind.type(np.nan)
    return wide.sum(axis=axes, keepdims=keepdim) * wide.dtype.type(share), (
        lambda dy: spread(dy.astype(kind, copy=False) * share, shape, axes, keepdim),
    )


@operation("tm", keeps=("0",))
@quiet
def var(
    input: Array,
    dim: Dim = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Any:
    """Return the variance over one axis, several, or all, with n − 1 in its denominator if it is unbiased."""
    if isinstance(dim, bool):  # unbiased, in the place of dim
        unbiased, dim = dim, None
    axes = axes_of(input, dim)
    n = _counted(input, axes)
    less = int(unbiased) if correction is None else correction
    far = input - input.mean(axis=axes, keepdims=True)
    scale = input.dtype.type(1 / max(n - less, 0) if n > less else np.nan)
    y = np.sum(far * far, axis=axes, keepdims=keepdim) * scale
    return y, (lambda dy: spread(dy, input.shape, axes, keepdim) * (2 * scale * far),)


@composite("tm")
def std(
    input: Tensor,
    dim: Dim = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: int | None = None,
) -> Any:
    """Return the square root of the variance."""
    return input.var(dim, unbiased, keepdim, correction=correction).sqrt()


@operation("tm", keeps=("0",))
def prod(input: Array, dim: int | None = None, keepdim: bool = False, *, dtype: dtype | None = None) -> Any:
    """Return the product over one axis, or all."""
    axes, wide = axes_of(input, dim), in_kind(input, dtype)

    def back(dy: Array) -> Array:
        flat = np.moveaxis(wide, axes, range(-len(axes), 0)).reshape(*_rest(wide, axes), -1)
        ones = np.ones_like(flat[..., :1])
        before = np.cumprod(np.concatenate([ones, flat[..., :-1]], -1), -1)
        after = np.cumprod(np.concatenate([ones, flat[..., :0:-1]], -1), -1)[..., ::-1]
        others = (before * after).reshape(np.moveaxis(wide, axes, range(-len(axes), 0)).shape)
        return np.moveaxis(others, range(-len(axes), 0), axes) * spread(dy, input.shape, axes, keepdim)

    return np.prod(wide, axis=axes, keepdims=keepdim), (back,)


def _rest(x: Array, axes: tuple[int, ...]) -> list[int]:
    return [n for axis, n in enumerate(x.shape) if axis not in axes]


@operation("tm")
def cumsum(input: Array, dim: int, *, dtype: dtype | None = None) -> Any:
    """Return the sums of the numbers up to each place of an axis."""
    kind = input.dtype
    if input.ndim == 0:
        return in_kind(input, dtype).copy(), (lambda dy: dy.astype(kind),)
    return np.cumsum(in_kind(input, dtype), axis=dim), (
        lambda dy: np.flip(np.cumsum(np.flip(dy, dim), axis=dim), dim).astype(kind, copy=False),
    )


@operation("tm", keeps=("0",), promotes="float")
@quiet
def logsumexp(input: Array, dim: Dim, keepdim: bool = False) -> Any:
    """Return log(sum(exp(input))), without overflow."""
    axes = axes_of(input, dim)
    most = np.max(input, axis=axes, keepdims=True)
    most = np.where(np.isfinite(most), most, input.dtype.type(0))
    raised = np.exp(input - most)
    total = raised.sum(axis=axes, keepdims=True)
    y = np.log(total) + most
    return (y if keepdim else y.reshape(_rest(input, axes))), (
        lambda dy: spread(dy, input.shape, axes, keepdim) * (raised / total),
    )


def _chosen(x: Array, index: Array, dim: int, keepdim: bool) -> Any:
    """Return the numbers at an index of each slice along an axis, the index, and the gradient."""
    if x.ndim == 0:
        return (x.copy(), np.zeros((), np.int64)), (lambda dy: dy,)
    at = np.expand_dims(index, dim)
    values = np.take_along_axis(x, at, dim)

    def back(dy: Array) -> Array:
        dx = np.zeros(x.shape, dy.dtype)
        np.put_along_axis(dx, at, dy if keepdim else np.expand_dims(dy, dim), dim)
        return dx

    if keepdim:
        return (values, at), (back,)
    return (values.squeeze(dim), index), (back,)


def _extreme(name: str, numpy: Any, arg: Any, of_two: str) -> None:
    """Add max or min: of all numbers, of an axis with the places, or of two tensors."""

    def along(input: Array, dim: int, keepdim: bool = False) -> Any:
        return _chosen(input, arg(input, axis=dim) if input.ndim else input, dim, keepdim)

    def whole(input: Array) -> Any:
        y = numpy(input)

        def back(dy: Array) -> Array:
            equal = input == y
            return equal * (dy / input.dtype.type(equal.sum()))

        return y, (back,)

    def several(input: Array, dim: Dim = None, keepdim: bool = False) -> Any:
        axes = axes_of(input, dim)
        y = numpy(input, axis=axes, keepdims=True)

        def back(dy: Array) -> Array:
            equal = input == y
            return equal * (
                spread(dy, input.shape, axes, keepdim)
                / equal.sum(axis=axes, keepdims=True).astype(input.dtype)
            )

        return (y if keepdim else y.reshape(_rest(input, axes))), (back,)

    along.__name__, whole.__name__, several.__name__ = f"{name}_along", f"{name}_whole", f"a{name}"
    several.__doc__ = f"Return the {name} over axes; equal numbers share the gradient."
    label = f"{name.capitalize()}Backward"
    of_axis = operation("", keeps=("0",), results=ValuesIndices, label=f"{label}0")(along)
    of_all = operation("", keeps=("0",), label=f"{label}1")(whole)
    operation("tm", keeps=("0",))(several)

    def either(input: Tensor, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        if isinstance(dim, Tensor) or other is not None:
            return TABLE[of_two](input, dim if other is None else other)
        return of_all(input) if dim is None else of_axis(input, dim, keepdim)

    either.__name__ = name
    either.__doc__ = f"Return the {name} of all numbers, of an axis with its places, or of each two numbers."
    composite("tm")(either)


_extreme("max", np.max, np.argmax, "maximum")
_extreme("min", np.min, np.argmin, "minimum")


def _argument(name: str, numpy: Any) -> None:
    def rule(input: Array, dim: int | None = None, keepdim: bool = False) -> Any:
        return numpy(input, axis=dim, keepdims=keepdim), None

    rule.__name__, rule.__doc__ = (
        name,
        f"Return the place of the {name[3:]} of all numbers, or along an axis.",
    )
    operation("tm")(rule)


_argument("argmax", np.argmax)
_argument("argmin", np.argmin)


@operation("tm", keeps=("0",), results=ValuesIndices)
def sort(input: Array, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return the numbers in order along an axis, and where they were."""
    return _in_order(input, dim, descending, None)


@operation("tm", keeps=("0",), results=ValuesIndices)
def topk(input: Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest or smallest numbers along an axis, and where they are."""
    if not 0 <= k <= (input.shape[dim] if input.ndim else 1):
        raise RuntimeError(f"selected index k out of range: k={k}, of the shape {list(input.shape)}")
    return _in_order(input, dim, largest, k)


def _in_order(x: Array, dim: int, descending: bool, k: int | None) -> Any:
    if x.ndim == 0:
        return (x.copy(), np.zeros((), np.int64)), (lambda dy: dy,)
    if descending:  # equal numbers stay in their order
        order = x.shape[dim] - 1 - np.flip(np.argsort(np.flip(x, dim), axis=dim, kind="stable"), dim)
    else:
        order = np.argsort(x, axis=dim, kind="stable")
    if k is not None:
        order = np.take(order, range(k), axis=dim)

    def back(dy: Array) -> Array:
        dx = np.zeros(x.shape, dy.dtype)
        np.put_along_axis(dx, order, dy, dim)
        return dx

    return (np.take_along_axis(x, order, dim), order), (back,)


@composite("tm")
def argsort(input: Tensor, dim: int = -1, descending: bool = False, stable: bool = False) -> Any:
    """Return where the numbers of an axis are in order."""
    return input.sort(dim, descending).indices


def _truth(name: str, numpy: Any) -> None:
    def rule(input: Array, dim: Dim = None, keepdim: bool = False) -> Any:
        return numpy(input, axis=axes_of(input, dim), keepdims=keepdim), None

    rule.__name__, rule.__doc__ = name, f"Return whether {name} of the numbers are true."
    operation("tm")(rule)


_truth("all", np.all)
_truth("any", np.any)
_truth("count_nonzero", np.count_nonzero)


@operation("tm")
def bincount(input: Array, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each integer from 0 on occurs."""
    return np.bincount(input, getattr(weights, "_array", weights), minlength), None


@composite("tm")
def unique(
    input: Tensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Return the numbers that occur, or the slices of an axis; with where, and how often."""
    options: dict[str, Any] = {"return_inverse": return_inverse, "return_counts": return_counts, "axis": dim}
    found: Any = np.unique(input._array, **options)
    return tuple(map(wrap, found)) if isinstance(found, tuple) else wrap(found)


@composite("tm")
def norm(input: Tensor, p: Any = "fro", dim: Dim = None, keepdim: bool = False) -> Any:
    """Return the p-norm over axes; "fro" is 2."""
    power = 2.0 if p in ("fro", None) else float(p)
    if abs(power) == math.inf:
        return getattr(input.abs(), "amax" if power > 0 else "amin")(dim, keepdim)
    if power == 0:
        return (input != 0).to(input.dtype).sum(dim, keepdim)
    if power == 2:
        return two_norm(input, dim, keepdim)
    return (input.abs() ** power).sum(dim, keepdim) ** (1 / power)


@operation("", keeps=("0",), label="LinalgVectorNorm")
@quiet
def two_norm(input: Array, dim: Dim = None, keepdim: bool = False) -> Any:
    """Return the root of the sum of squares over axes, whose gradient at 0 is 0."""
    axes = axes_of(input, dim)
    y = np.sqrt(np.sum(input * input, axis=axes, keepdims=True))
    unit = np.where(y == 0, 0, input / y).astype(input.dtype)
    return (y if keepdim else y.reshape(_rest(input, axes))), (
        lambda dy: spread(dy, input.shape, axes, keepdim) * unit,
    )


# ------------------------------------------------------------------------------------------------- softmax and its log


@operation("tmf", keeps=("0",))
def softmax(input: Array, dim: int = -1, _stacklevel: int = 3, dtype: dtype | None = None) -> Any:
    """Return exp(input) / sum(exp(input)) along an axis."""
    x, kind = in_kind(input, dtype), input.dtype
    if x.ndim == 0:
        return np.ones_like(x), (lambda dy: np.zeros_like(input),)
    if dtype is None:
        return _core.softmax(x, dim), (lambda dy: _core._softmax_backward(x, dy, dim),)
    return _core.softmax(x, dim), (lambda dy: _core._softmax_backward(x, dy, dim).astype(kind, copy=False),)


@operation("tmf", keeps=("0",))
def log_softmax(input: Array, dim: int = -1, _stacklevel: int = 3, dtype: dtype | None = None) -> Any:
    """Return the log of softmax, accurate where softmax underflows."""
    x, kind = in_kind(input, dtype), input.dtype
    if x.ndim == 0:
        return np.zeros_like(x), (lambda dy: np.zeros_like(input),)
    return _core.log_softmax(x, dim), (
        lambda dy: _core._log_softmax_backward(x, dy, dim).astype(kind, copy=False),
    )


@composite("f")
def softmin(input: Tensor, dim: int = -1, dtype: dtype | None = None) -> Any:
    """Return the softmax of −input."""
    return softmax(-input, dim, dtype=dtype)
