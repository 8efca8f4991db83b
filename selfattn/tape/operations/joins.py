"""Joins, repetitions and padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.tape.dtypes import result_dtype
from selfattn.tape.operations.indices import added_at
from selfattn.tape.operations.table import (
    composite,
    operation,
)
from selfattn.tape.operations.views import _expand, sizes_of
from selfattn.tape.tensors import (
    Tensor,
    as_tensor_array,
)


def _same_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    if (
        not isinstance(tensors, list | tuple)
        or not tensors
        or not all(isinstance(x, Tensor) for x in tensors)
    ):
        raise TypeError(f"a list or tuple of at least one tensor is needed, not {type(tensors).__name__}")
    if len({x._array.dtype for x in tensors}) == 1:
        return list(tensors)
    kind = result_dtype(*tensors)
    return [x.to(kind) for x in tensors]


@operation("", many=True)
def _cat(tensors: list[Array], dim: int) -> Any:
    y = np.concatenate(tensors, dim)
    ends = np.cumsum([x.shape[dim] for x in tensors]).tolist()
    axis = dim % y.ndim

    def of(n: int) -> Any:
        place = (slice(None),) * axis + (slice(ends[n - 1] if n else 0, ends[n]),)
        return lambda dy: dy[place]

    return y, tuple(of(n) for n in range(len(tensors)))


@composite("t")
def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors along an axis."""
    found = _same_dtype(tensors)
    filled = [x for x in found if x._array.shape != (0,)]  # which PyTorch leaves out
    return _cat(filled or found, dim)


@composite("t")
def hstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along their second axis, or vectors along their only one."""
    return cat(tensors, min(tensors[0].ndim - 1, 1))


@composite("t")
def vstack(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along their first axis, vectors as rows."""
    return cat([x.unsqueeze(0) if x.ndim == 1 else x for x in tensors])


@operation("", many=True)
def _stack(tensors: list[Array], dim: int) -> Any:
    y = np.stack(tensors, dim)
    axis = dim % y.ndim
    return y, tuple((lambda dy, n=n: np.moveaxis(dy, axis, 0)[n]) for n in range(len(tensors)))


@composite("t")
def stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis."""
    return _stack(_same_dtype(tensors), dim)


@operation("", label="Repeat")
def _repeat(input: Array, sizes: tuple[int, ...]) -> Any:
    before = input.shape
    new = len(sizes) - input.ndim
    if new < 0:
        raise RuntimeError(
            "Number of dimensions of repeat dims can not be smaller than number of dimensions of tensor"
        )
    shape = (1,) * new + input.shape
    apart = [n for pair in zip(sizes, shape, strict=True) for n in pair]
    return np.tile(input, sizes), (
        lambda dy: dy.reshape(apart).sum(axis=tuple(range(0, 2 * len(sizes), 2))).reshape(before),
    )


@composite("tm")
def tile(input: Tensor, *dims: Any) -> Tensor:
    """Repeat the whole tensor along the last axes, or along new ones before them."""
    sizes = sizes_of(dims)
    return _repeat(input, (1,) * (input.ndim - len(sizes)) + sizes)


@composite("m")
def repeat(input: Tensor, *sizes: Any) -> Tensor:
    """Repeat the whole tensor along axes."""
    return _repeat(input, sizes_of(sizes))


@operation("tm", keeps=("-",))
def repeat_interleave(input: Array, repeats: Any, dim: int | None = None, *, output_size: Any = None) -> Any:
    """Repeat each slice of an axis, or each number."""
    counts = as_tensor_array(repeats) if isinstance(repeats, Tensor) else repeats
    x = input.reshape(-1) if dim is None else input
    axis = 0 if dim is None else dim % x.ndim
    source = np.repeat(np.arange(x.shape[axis]), counts)
    moved, shape = np.moveaxis(x, axis, 0).shape, input.shape

    def back(dy: Array) -> Array:
        dx = added_at(moved, (source,), np.moveaxis(dy, axis, 0))
        return np.moveaxis(dx, 0, axis).reshape(shape)

    return np.take(x, source, axis), (back,)


@composite("t")
def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the coordinates of a grid."""
    found = list(tensors[0]) if len(tensors) == 1 and not isinstance(tensors[0], Tensor) else list(tensors)
    if indexing not in ("ij", "xy"):
        raise RuntimeError(f"indexing must be 'ij' or 'xy', not {indexing!r}")
    sizes = [x.numel() for x in found]
    order = [1, 0, *range(2, len(found))] if indexing == "xy" and len(found) > 1 else list(range(len(found)))
    shape = [sizes[i] for i in order]
    return tuple(
        _expand(x.reshape([-1 if i == n else 1 for i in order]), tuple(shape)) for n, x in enumerate(found)
    )


@operation("f", label="ConstantPadNd")
def pad(input: Array, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Add numbers before and after the last axes; pad has a pair for each, from the last axis on."""
    if mode != "constant":
        raise NotImplementedError(f"pad(): mode={mode!r} is not here; 'constant' is")
    pairs = [(pad[2 * n], pad[2 * n + 1]) for n in range(len(pad) // 2)][::-1]
    widths = [(0, 0)] * (input.ndim - len(pairs)) + pairs
    inner = tuple(slice(max(-a, 0), n - max(-b, 0)) for n, (a, b) in zip(input.shape, widths, strict=True))
    outer = [(max(a, 0), max(b, 0)) for a, b in widths]
    y, shape = np.pad(input[inner], outer, constant_values=0 if value is None else value), input.shape

    def back(dy: Array) -> Array:
        dx = np.zeros(shape, dy.dtype)
        dx[inner] = dy[tuple(slice(a, n - b) for n, (a, b) in zip(dy.shape, outer, strict=True))]
        return dx

    return y, (back,)
