"""Views: the same memory with other axes and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.functional._gradients import sum_to_shape
from selfattn.tape.dtypes import dtype
from selfattn.tape.operations.table import (
    composite,
    operation,
)
from selfattn.tape.tensors import (
    Tensor,
    wrap,
)


def sizes_of(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    """Return sizes that were given one by one, or as one sequence."""
    if len(sizes) == 1 and isinstance(sizes[0], list | tuple):
        sizes = tuple(sizes[0])
    return tuple([size.__index__() for size in sizes])


@operation("tm", view=True)
def transpose(input: Array, dim0: int, dim1: int) -> Any:
    """Swap two axes."""
    if input.ndim == 0 and {dim0, dim1} <= {0, -1}:
        return (lambda x: x[...]), (lambda dy: dy,)
    return (lambda x: x.swapaxes(dim0, dim1)), (lambda dy: dy.swapaxes(dim0, dim1),)


@operation("m", view=True, label="T")
def t(input: Array) -> Any:
    """Swap the axes of a matrix."""
    if input.ndim > 2:
        raise RuntimeError(f"t() is of at most 2 axes, not {input.ndim}")
    return (lambda x: x.T), (lambda dy: dy.T,)


@operation("", view=True, label="Permute")
def _permute(input: Array, dims: tuple[int, ...]) -> Any:
    if sorted(d % max(input.ndim, 1) for d in dims) != list(range(input.ndim)):
        raise RuntimeError(f"dims {dims} must name each of the {input.ndim} axes once")
    back = tuple(np.argsort([d % input.ndim for d in dims])) if dims else ()
    return (lambda x: x.transpose(dims)), (lambda dy: dy.transpose(back),)


@composite("tm")
def permute(input: Tensor, *dims: Any) -> Tensor:
    """Put the axes in another order."""
    return _permute(input, sizes_of(dims))


@composite("tm")
def movedim(input: Tensor, source: Any, destination: Any) -> Tensor:
    """Move axes to other places."""
    from_, to = ([each] if isinstance(each, int) else list(each) for each in (source, destination))
    from_, to = ([each % input.ndim for each in axes] for axes in (from_, to))
    rest = [axis for axis in range(input.ndim) if axis not in from_]
    for place, axis in sorted(zip(to, from_, strict=True)):
        rest.insert(place, axis)
    return _permute(input, tuple(rest))


def _filled(shape: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return sizes with a number in place of −1."""
    size = math.prod(shape)
    if -1 in sizes:
        known = -math.prod(sizes)
        if known > 0 and size % known == 0 and sizes.count(-1) == 1:
            sizes = tuple(size // known if n == -1 else n for n in sizes)
    if math.prod(sizes) != size or min(sizes, default=0) < 0:
        raise RuntimeError(f"shape '{list(sizes)}' is invalid for input of size {size}")
    return sizes


def _reshaped(x: Array, sizes: tuple[int, ...]) -> Any:
    """Return the rule's result for another shape."""
    shape = x.shape
    if -1 in sizes or math.prod(sizes) != x.size:
        sizes = _filled(shape, sizes)
    return (lambda x: x.reshape(sizes)), (lambda dy: dy.reshape(shape),)


def is_view(x: Array, move: Callable[[Array], Array]) -> bool:
    """Return whether a function gives a view of an array."""
    return x.flags.c_contiguous or np.may_share_memory(move(x), x)


@operation("", view=True, label="View")
def _view(input: Array, sizes: tuple[int, ...]) -> Any:
    found = _reshaped(input, sizes)
    if not is_view(input, found[0]) and input.size:
        raise RuntimeError(
            "view size is not compatible with input tensor's size and stride (at least one dimension spans across two "
            "contiguous subspaces). Use .reshape(...) instead."
        )
    return found


@operation(
    "", view=True, label=lambda x, sizes: "View" if is_view(x, lambda x: x.reshape(sizes)) else "UnsafeView"
)
def _reshape(input: Array, sizes: tuple[int, ...]) -> Any:
    return _reshaped(input, sizes)


@composite("m")
def view(input: Tensor, *shape: Any) -> Tensor:
    """Return the same memory in another shape, where that needs no copy, or read it as another dtype."""
    if len(shape) == 1 and isinstance(shape[0], dtype):
        return wrap(input._array.view(shape[0].numpy))
    return _view(input, sizes_of(shape))


@composite("tm")
def reshape(input: Tensor, *shape: Any) -> Tensor:
    """Return the numbers in another shape: a view where that is possible, else a copy."""
    return _reshape(input, sizes_of(shape))


@composite("m")
def view_as(input: Tensor, other: Tensor) -> Tensor:
    """Return the same memory in the shape of another tensor."""
    return _view(input, other._array.shape)


@composite("tm")
def flatten(input: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Make several axes one."""
    shape = input._array.shape or (1,)
    first, last = (d % len(shape) for d in (start_dim, end_dim))
    if first > last:
        raise RuntimeError("flatten() has invalid args: start_dim cannot come after end_dim")
    return _reshape(input, (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]))


@composite("tm")
def ravel(input: Tensor) -> Tensor:
    """Return all numbers on one axis."""
    return _reshape(input, (-1,))


@composite("tm")
def unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Make one axis several."""
    shape, d = input._array.shape, dim % input.ndim
    return _view(input, (*shape[:d], *_filled((shape[d],), tuple(sizes)), *shape[d + 1 :]))


@operation("tm", view=True)
def unsqueeze(input: Array, dim: int) -> Any:
    """Add an axis of size 1."""
    if not -input.ndim - 1 <= dim <= input.ndim:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-input.ndim - 1}, {input.ndim}], but got {dim})"
        )
    shape = input.shape
    return (lambda x: np.expand_dims(x, dim)), (lambda dy: dy.reshape(shape),)


@operation("tm", view=True)
def squeeze(input: Array, dim: Any = None) -> Any:
    """Remove axes of size 1: all, or those that are named."""
    shape = input.shape
    dims = range(input.ndim) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    axes = tuple(d % input.ndim for d in dims if shape[d] == 1) if input.ndim else ()
    return (lambda x: x.squeeze(axes) if axes else x[...]), (lambda dy: dy.reshape(shape),)


@operation("", view=True, label="Expand")
def _expand(input: Array, sizes: tuple[int, ...]) -> Any:
    new = len(sizes) - input.ndim
    if new < 0:
        raise RuntimeError(f"expand() needs at least {input.ndim} sizes, not {list(sizes)}")
    whole = tuple((input.shape[i - new] if i >= new else 1) if n == -1 else n for i, n in enumerate(sizes))
    shape = input.shape

    def repeated(x: Array) -> Array:
        y = np.broadcast_to(x, whole)
        return x.reshape(whole) if y.size == x.size else y  # new axes alone: a view that can be written to

    return repeated, (lambda dy: sum_to_shape(dy, shape),)


@composite("m")
def expand(input: Tensor, *sizes: Any) -> Tensor:
    """Repeat axes of size 1 without a copy; −1 keeps a size."""
    return _expand(input, sizes_of(sizes))


@composite("m")
def expand_as(input: Tensor, other: Tensor) -> Tensor:
    """Repeat axes of size 1 to the shape of another tensor."""
    return _expand(input, other._array.shape)


@composite("t")
def broadcast_to(input: Tensor, size: Sequence[int]) -> Tensor:
    """Repeat axes of size 1."""
    return _expand(input, tuple(size))


@operation("tm", view=True)
def diagonal(input: Array, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return the diagonal of two axes."""
    shape = input.shape

    def take(x: Array) -> Array:
        found = np.diagonal(x, offset, dim1, dim2)
        if x.flags.writeable:
            found.flags.writeable = True
        return found

    def back(dy: Array) -> Array:
        dx = np.zeros(shape, dy.dtype)
        take(dx)[...] = dy
        return dx

    return take, (back,)
