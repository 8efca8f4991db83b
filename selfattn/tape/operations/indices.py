"""Parts of a tensor: indices that read and write, pieces of an axis, numbers at given places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.functional._gradients import sum_to_shape
from selfattn.tape.operations.casts import clone
from selfattn.tape.operations.table import (
    composite,
    explained,
    operation,
    share,
    write,
)
from selfattn.tape.tensors import (
    Node,
    Tensor,
    as_tensor_array,
    check_writable,
    edge_of,
    mode,
    set_history,
    values_of,
    wrap,
)

BASIC = (int, slice, type(None), type(...))


def _one_index(key: Any) -> tuple[Any, bool]:
    """Return the index of one axis, and whether it gives a view."""
    if isinstance(key, slice):
        if key.step is not None and key.step.__index__() < 1:
            raise ValueError("step must be greater than zero")
        return key, True
    if isinstance(key, BASIC) and not isinstance(key, bool):
        return key, True
    if isinstance(key, np.integer):
        return int(key), True
    if isinstance(key, Tensor):
        array = key._array
        if array.ndim == 0 and array.dtype.kind in "iu":
            return int(array), True
        return (array.astype(bool) if array.dtype == np.uint8 else array), False
    if isinstance(key, list | range):
        array = np.asarray([values_of(each) for each in key])
        return (array if array.size else array.astype(np.int64)), False
    return key, False


def index_of(key: Any) -> tuple[Any, bool]:
    """Return an index for NumPy, and whether it gives a view."""
    basic, found = True, []
    for each in key if isinstance(key, tuple) else (key,):
        one, is_basic = _one_index(each)
        found.append(one)
        basic = basic and is_basic
    if not any(each is Ellipsis for each in found) and basic:
        found.append(...)  # the result is an array, also without axes
    return tuple(found), basic


@operation("", view=True, label="Slice")
def _take_view(input: Array, index: Any) -> Any:
    shape = input.shape

    def back(dy: Array) -> Array:
        dx = np.zeros(shape, dy.dtype)
        dx[index] = dy
        return dx

    return (lambda x: x[index]), (back,)


@operation("", label="Index", keeps=("-",))
def _take(input: Array, index: Any) -> Any:
    shape = input.shape
    return input[index], (lambda dy: added_at(shape, index, dy),)


def added_at(shape: tuple[int, ...], index: Any, dy: Array) -> Array:
    """Return zeros in a shape with dy added at an index, in which places may occur several times."""
    dx = np.zeros(shape, dy.dtype)
    first = index[0] if isinstance(index, tuple) and len(index) == 1 else None
    if isinstance(first, np.ndarray) and first.dtype.kind in "iu":
        rows = first.reshape(-1) % max(shape[0], 1)
        if rows.size:  # sums over runs of equal rows are several times as fast as adding row by row
            order = np.argsort(rows, kind="stable")
            ordered = rows[order]
            starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
            dx[ordered[starts]] = np.add.reduceat(dy.reshape(rows.size, *shape[1:])[order], starts, axis=0)
    elif all(not isinstance(each, np.ndarray) or each.dtype == bool for each in index):
        dx[index] = dy
    else:
        np.add.at(dx, index, dy)
    return dx


@composite("")
def getitem(input: Tensor, key: Any) -> Tensor:
    """Return the part of a tensor at an index: a view, or a copy where the index has tensors or lists."""
    if isinstance(key, int) and not isinstance(key, bool):
        if input._array.ndim == 0:
            raise IndexError("invalid index of a 0-dim tensor. Use `tensor.item()` to convert it to a number")
        return _take_view(input, (key, ...))
    index, basic = index_of(key)
    if basic:
        return _take_view(input, index)
    whole, index = _integers_first(index, input._array.ndim)
    return _take(input if whole is None else _take_view(input, whole), index)


def _integers_first(index: tuple[Any, ...], ndim: int) -> tuple[Any, Any]:
    """Split an index of integers beside arrays: PyTorch takes the integers first, where NumPy makes them arrays.

    The first part is None without integers.
    """
    if not any(each.__class__ is int for each in index):
        return None, index
    axes = [
        each.ndim if isinstance(each, np.ndarray) and each.dtype == bool else int(each is not None)
        for each in index
    ]
    rest = ndim - sum(n for each, n in zip(index, axes, strict=True) if each is not Ellipsis)
    first: list[Any] = []
    for each, n in zip(index, axes, strict=True):
        if each.__class__ is int:
            first.append(each)
        else:
            first += [slice(None)] * (rest if each is Ellipsis else n)
    return (*first, ...), tuple(each for each in index if each.__class__ is not int)


@composite("")
def setitem(input: Tensor, key: Any, value: Any) -> None:
    """Write into the part of a tensor at an index."""
    check_writable(input)
    index, basic = index_of(key)
    if not basic:
        whole, index = _integers_first(index, input._array.ndim)
        if whole is not None:
            setitem(_take_view(input, whole), index, value)
            return
    x = input._array
    source = as_tensor_array(value) if isinstance(value, Tensor | np.ndarray) else value
    before = edge_of(input) if mode.enabled else None
    try:
        x[index] = source
    except (ValueError, IndexError, TypeError) as error:
        raise explained(_take, [x], error) from None
    input._versions[0] += 1
    if not mode.enabled:
        return
    of_value = edge_of(value) if isinstance(value, Tensor) else None
    if before is None and of_value is None:
        return

    def rest(dy: Array) -> Array:
        kept = np.array(dy)
        kept[index] = 0
        return kept

    def part(dy: Array) -> Array:
        return sum_to_shape(dy[index], np.shape(source)).astype(source.dtype)

    backs = None if before is None else rest, None if of_value is None else part
    set_history(input, Node("CopySlices", (before, of_value), backs, None if basic else ()))


class Pieces:
    """Gradients of some pieces of a tensor, which add up to the gradient of the whole."""

    def __init__(self, found: dict[int, Array]) -> None:
        self.found = found

    def __add__(self, other: Pieces) -> Pieces:
        return Pieces(self.found | other.found)  # each piece has one node, which adds up its own gradients


def pieces(x: Tensor, starts: Sequence[int], dim: int, whole: bool = True) -> tuple[Tensor, ...]:
    """Return views of a tensor that begin at some places of an axis, or without ``whole`` its single slices.

    One node gathers their gradients, so that n pieces do not need n arrays in the size of the tensor.
    """
    array, shape = x._array, x._array.shape
    dim %= array.ndim
    ends = [*starts[1:], shape[dim]]
    noted = mode.enabled and (edge := edge_of(x)) is not None

    def gathered(found: Pieces) -> Array:
        first = next(iter(found.found.values()))
        dx = np.empty(shape, first.dtype)
        for n, (a, b) in enumerate(zip(starts, ends, strict=True)):
            gradient = found.found.get(n)
            place = (slice(None),) * dim + (slice(a, b),)
            dx[place] = 0 if gradient is None else gradient if whole else np.expand_dims(gradient, dim)
        return dx

    node = Node("Split" if whole else "Unbind", (edge,), (gathered,)) if noted else None
    made = []
    for n, (a, b) in enumerate(zip(starts, ends, strict=True)):
        index = (slice(None),) * dim + (slice(a, b) if whole else a,)

        def take(base: Array, index: Any = (*index, ...)) -> Array:
            return base[index]

        out = wrap(take(array))
        share(out, x, take)
        if node is not None:
            out._node = Node(node.label, (node,), (lambda dy, n=n: Pieces({n: dy}),))
        made.append(out)
    return tuple(made)


@composite("tm")
def split(input: Tensor, split_size_or_sections: Any, dim: int = 0) -> tuple[Tensor, ...]:
    """Return pieces of an axis: of one size, the last perhaps smaller, or of the sizes in a list."""
    n, sizes = input._array.shape[dim], split_size_or_sections
    if isinstance(sizes, int):
        if sizes < 1:
            raise RuntimeError(f"split expects a positive split size, not {sizes}")
        return pieces(input, list(range(0, n, sizes)) or [0], dim)
    if sum(sizes) != n:
        raise RuntimeError(
            f"split_with_sizes expects split_sizes to sum exactly to {n} (input tensor's size at dimension {dim}), "
            f"but got split_sizes={list(sizes)}"
        )
    return pieces(input, [0, *np.cumsum(sizes).tolist()[:-1]], dim)


@composite("tm")
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Return about so many pieces of an axis, of one size but for the last."""
    if chunks < 1:
        raise RuntimeError(f"chunk expects `chunks` to be greater than 0, got: {chunks}")
    return split(input, max(-(-input._array.shape[dim] // chunks), 1), dim)


@composite("tm")
def unbind(input: Tensor, dim: int = 0) -> tuple[Tensor, ...]:
    """Return the slices of an axis."""
    if input._array.ndim == 0:
        raise IndexError("a tensor without axes has no slices")
    return pieces(input, list(range(input._array.shape[dim])), dim, whole=False)


@composite("tm")
def narrow(input: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a piece of an axis."""
    return _take_view(input, (slice(None),) * (dim % input.ndim) + (slice(start, start + length),))


@composite("tm")
def select(input: Tensor, dim: int, index: int) -> Tensor:
    """Return one slice of an axis."""
    return _take_view(input, (*(slice(None),) * (dim % input.ndim), index, ...))


def _integers(index: Any, name: str) -> Array:
    array = as_tensor_array(index)
    if array.dtype.kind not in "iu":
        raise IndexError(f"{name} must hold integers, not {array.dtype}")
    return array


def _at_least_one_axis(x: Array) -> Array:
    """Return an array; a number as an array of one element, as PyTorch treats it where an axis is named."""
    return x if x.ndim else x.reshape(1)


@operation("tm", keeps=("-",))
def index_select(input: Array, dim: int, index: Any) -> Any:
    """Return the slices of an axis at some places."""
    places, x = _integers(index, "index").reshape(-1), _at_least_one_axis(input)
    axis, shape = dim % x.ndim, input.shape
    moved = np.moveaxis(x, axis, 0).shape

    def back(dy: Array) -> Array:
        dx = added_at(moved, (places,), np.moveaxis(_at_least_one_axis(dy), axis, 0))
        return np.moveaxis(dx, 0, axis).reshape(shape)

    y = np.take(x, places, axis)
    return (y if input.ndim else y.reshape(())), (back,)


def _places(index: Array, dim: int) -> tuple[Array, ...]:
    """Return an index of arrays: ``index`` along one axis, and each element's own place along the others."""
    grid = list(np.ogrid[tuple(map(slice, index.shape))])
    grid[dim % index.ndim] = index
    return tuple(grid)


@operation("tm", keeps=("-",))
def gather(input: Array, dim: int, index: Any) -> Any:
    """Return the number at an index of each slice along an axis."""
    given = _integers(index, "index")
    if given.size == 0:
        return np.zeros(given.shape, input.dtype), (lambda dy: np.zeros_like(input, dy.dtype),)
    x, at = _at_least_one_axis(input), _places(_at_least_one_axis(given), dim)

    shape, wide = input.shape, x.shape

    def back(dy: Array) -> Array:
        dx = np.zeros(wide, dy.dtype)
        np.add.at(dx, at, _at_least_one_axis(dy))
        return dx.reshape(shape)

    return x[at].reshape(given.shape), (back,)


@operation("", 2, label="Scatter", keeps=("-", "-"))
def _scatter(input: Array, src: Any, dim: int, index: Array) -> Any:
    x = _at_least_one_axis(input)
    at = _places(_at_least_one_axis(index), dim)
    part: Any = tuple(map(slice, _at_least_one_axis(index).shape))
    y = x.copy()
    y[at] = _at_least_one_axis(src)[part] if isinstance(src, np.ndarray) else src

    def of_input(dy: Array) -> Array:
        dx = np.array(_at_least_one_axis(dy))
        dx[at] = 0
        return dx.reshape(input.shape)

    def of_source(dy: Array) -> Array:
        dx = np.zeros(_at_least_one_axis(src).shape, dy.dtype)
        dx[part] = _at_least_one_axis(dy)[at]
        return dx.reshape(src.shape)

    return y.reshape(input.shape), (of_input, of_source)


@composite("tm")
def scatter(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Tensor:
    """Write numbers at an index of each slice along an axis."""
    source = src if value is None else value
    places = _integers(index, "index")
    return clone(input) if places.size == 0 else _scatter(input, source, dim, places)


@composite("m")
def scatter_(input: Tensor, dim: int, index: Tensor, src: Any = None, *, value: Any = None) -> Tensor:
    """Write numbers at an index of each slice along an axis of this tensor."""
    check_writable(input)
    return write(input, scatter(input, dim, index, src, value=value))


@operation("", 2)
def _scatter_add(input: Array, src: Array, dim: int, index: Array) -> Any:
    place: list[Any] = list(np.ogrid[tuple(map(slice, index.shape))])
    place[dim % input.ndim] = index
    part, y, shape = tuple(map(slice, index.shape)), input.copy(), src.shape
    np.add.at(y, tuple(place), src[part])

    def of_src(dy: Array) -> Array:
        dx = np.zeros(shape, dy.dtype)
        dx[part] = dy[tuple(place)]
        return dx

    return y, (lambda dy: dy, of_src)


@composite("tmi")
def scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """Add numbers at an index of each slice along an axis; a place may occur several times."""
    return _scatter_add(input, src, dim, _integers(index, "index"))


@operation("", 2, label="IndexFill", keeps=("-", "-"))
def _index_fill(input: Array, value: Any, dim: int, index: Array) -> Any:
    x = _at_least_one_axis(input)
    place: Any = (*(slice(None),) * (dim % x.ndim), index)
    y = x.copy()
    y[place] = value

    def of_input(dy: Array) -> Array:
        dx = np.array(_at_least_one_axis(dy))
        dx[place] = 0
        return dx.reshape(input.shape)

    return y.reshape(input.shape), (of_input, lambda dy: np.sum(_at_least_one_axis(dy)[place]))


@composite("tm")
def index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Fill the slices of an axis at some places with a number."""
    return _index_fill(input, value, dim, np.unique(_integers(index, "index")))


@composite("m")
def index_fill_(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Fill the slices of an axis of this tensor at some places with a number."""
    check_writable(input)
    return write(input, index_fill(input, dim, index, value))


@operation("", 2, keeps=("", "-"))
def _index_add(input: Array, source: Array, dim: int, index: Any) -> Any:
    place: Any = (*(slice(None),) * (dim % input.ndim), _integers(index, "index"))
    y = input.copy()
    np.add.at(y, place, source)
    return y, (lambda dy: dy, lambda dy: dy[place])


@composite("tm")
def index_add(input: Tensor, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    """Add the slices of another tensor to those of an axis at some places, which may occur several times."""
    return _index_add(input, source if alpha == 1 else source * alpha, dim, index)


@composite("m")
def index_add_(input: Tensor, dim: int, index: Any, source: Any, *, alpha: float = 1) -> Tensor:
    """Write the result of :func:`index_add` into the tensor, and return the tensor."""
    return write(input, index_add(input, dim, index, source, alpha=alpha))


@composite("tm")
def nonzero(input: Tensor, *, as_tuple: bool = False) -> Any:
    """Return where the numbers are not 0: a row for each, or a tensor for each axis."""
    found = np.argwhere(input._array)
    return tuple(map(wrap, _at_least_one_axis(input._array).nonzero())) if as_tuple else wrap(found)


@operation("tm")
def flip(input: Array, dims: Any) -> Any:
    """Reverse the order along axes."""
    return np.flip(input, dims).copy(), (lambda dy: np.flip(dy, dims),)


@operation("tm")
def roll(input: Array, shifts: Any, dims: Any = None) -> Any:
    """Move the numbers along axes; those at the end come first."""
    back = -shifts if isinstance(shifts, int) else tuple(-n for n in shifts)
    return np.roll(input, shifts, dims), (lambda dy: np.roll(dy, back, dims),)
