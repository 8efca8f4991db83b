"""Operations that move numbers: views, indices, joins, masks, types."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.functional._gradients import sum_to_shape
from selfattn.tape.dtypes import DTYPES, KINDS, as_dtype, device, dtype, result_dtype
from selfattn.tape.operations.table import (
    TABLE,
    as_operand,
    composite,
    explained,
    fit,
    operation,
    shape_of,
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

# --------------------------------------------------------------------------------------------------------------- views


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


# ------------------------------------------------------------------------------------------------------------- indices

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


# --------------------------------------------------------------------------------------------------------------- joins


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


# --------------------------------------------------------------------------------------------------------------- masks


@operation("tmi", 3, label="MaskedFill", keeps=("1", "", "1"))
def masked_fill(input: Array, mask: Array, value: Any) -> Any:
    """Fill a tensor with a number where the mask is True."""
    if mask.dtype != bool:
        if mask.dtype != np.uint8:
            raise RuntimeError(
                f"masked_fill_ only supports boolean masks, but got mask with dtype {mask.dtype}"
            )
        mask = mask.astype(bool)
    if np.ndim(value):
        raise RuntimeError(f"value must be a number or a tensor without axes, not of {np.ndim(value)} axes")
    if input.dtype.kind in "iub" and isinstance(value, float) and not value.is_integer():
        raise RuntimeError(f"value cannot be converted to type {input.dtype} without overflow")
    y, shape = np.where(mask, input.dtype.type(value), input), input.shape
    return y, (
        lambda dy: fit(np.where(mask, dy.dtype.type(0), dy), shape),
        None,
        lambda dy: np.sum(dy, where=mask),
    )


@operation("", 3, label="Where", keeps=("", "0", "0"))
def _where(condition: Array, input: Any, other: Any) -> Any:
    y, left, right = np.where(condition, input, other), shape_of(input), shape_of(other)
    return y, (
        None,
        lambda dy: fit(np.where(condition, dy, dy.dtype.type(0)), left),
        lambda dy: fit(np.where(condition, dy.dtype.type(0), dy), right),
    )


@composite("t")
def where(condition: Tensor, input: Any = None, other: Any = None) -> Any:
    """Return input where the condition is True, else other; without both, where it is True, as indices."""
    if input is None and other is None:
        return tuple(wrap(found) for found in np.nonzero(condition._array))
    x, y = (as_operand(_where, each) for each in (input, other))
    kind = result_dtype(x, y)
    x, y = (each.to(kind) if isinstance(each, Tensor) else kind.numpy.type(each) for each in (x, y))
    return _where(condition, x, y)


@composite("m")
def _where_method(input: Tensor, condition: Tensor, other: Any) -> Any:
    return where(condition, input, other)


TABLE["where"].method = TABLE.pop("where_method").function


@operation("", label="MaskedSelect", keeps=("-",))
def _masked_select(input: Array, where: Array) -> Any:
    shape = input.shape
    return input[where], (lambda dy: added_at(shape, (where,), dy),)


@composite("tm")
def masked_select(input: Tensor, mask: Tensor) -> Tensor:
    """Return the numbers where the mask is True."""
    shape = np.broadcast_shapes(input._array.shape, mask._array.shape)
    return _masked_select(_expand(input, shape), np.broadcast_to(mask._array, shape))


def _triangle(name: str, numpy: Callable[..., Array], words: str) -> None:
    def rule(input: Array, diagonal: int = 0) -> Any:
        return numpy(input, diagonal), (lambda dy: numpy(dy, diagonal),)

    rule.__name__, rule.__doc__ = name, f"Return a matrix with zeros {words} a diagonal."
    operation("tmi")(rule)


_triangle("tril", np.tril, "above")
_triangle("triu", np.triu, "below")


@operation("tm")
def diag(input: Array, diagonal: int = 0) -> Any:
    """Return the diagonal of a matrix, or a matrix with a vector as its diagonal."""
    if input.ndim == 1:
        return np.diag(input, diagonal), (lambda dy: np.diagonal(dy, diagonal),)
    shape = input.shape
    return np.diag(input, diagonal), (lambda dy: _on_diagonal(shape, dy, diagonal),)


def _on_diagonal(shape: tuple[int, ...], dy: Array, offset: int) -> Array:
    dx = np.zeros(shape, dy.dtype)
    rows = np.arange(len(dy)) + max(-offset, 0)
    dx[rows, rows + offset] = dy
    return dx


@operation("i", label="Fill")
def fill(input: Array, value: Any) -> Any:
    """Fill a tensor with a number."""
    return np.full_like(input, getattr(value, "_array", value)), (np.zeros_like,)


@composite("m")
def copy_(input: Tensor, src: Any, non_blocking: bool = False) -> Tensor:
    """Write another tensor's numbers into this one."""
    source = src if isinstance(src, Tensor) else wrap(as_tensor_array(src))
    found = source.to(input.dtype)
    if found._array.shape != input._array.shape:
        found = _expand(found, input._array.shape)
    return write(input, found)


# --------------------------------------------------------------------------------------------------------------- types


@operation("tm", label="Clone")
def clone(input: Array, *, memory_format: Any = None) -> Any:
    """Return a copy, through which gradients flow."""
    return input.copy(order="K"), (lambda dy: dy,)


@operation("", label="Clone")
def _dense(input: Array) -> Any:
    return np.ascontiguousarray(input), (lambda dy: dy,)


@composite("m")
def contiguous(input: Tensor, memory_format: Any = None) -> Tensor:
    """Return the tensor itself if its numbers follow each other in memory, else a copy."""
    return input if input._array.flags.c_contiguous else _dense(input)


@operation("", label="ToCopy")
def _cast(input: Array, kind: Any) -> Any:
    before = input.dtype
    with np.errstate(all="ignore"):
        y = input.astype(kind)
    backs = (lambda dy: dy.astype(before),) if kind.kind not in "iub" else None
    return y, backs


@composite("m")
def to(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the tensor in another dtype, or that of another tensor; the tensor itself if nothing changes."""
    kind = None
    for each in [*args, kwargs.get("dtype"), kwargs.get("device"), kwargs.get("other")]:
        if isinstance(each, dtype):
            kind = each
        elif isinstance(each, Tensor):
            kind = each.dtype
        elif isinstance(each, str | device):
            device(each)
    if kind is None or kind.numpy == input._array.dtype:
        return clone(input) if kwargs.get("copy") else input
    return _cast(input, kind.numpy)


@composite("m")
def _type(input: Tensor, dtype: Any = None) -> Any:
    """Return the tensor in another dtype, or without one the name of its kind of tensor."""
    if dtype is None:
        return next(f"torch.{name}" for name, kind in KINDS.items() if kind is input.dtype)
    return to(input, as_dtype(dtype))


@composite("m")
def type_as(input: Tensor, other: Tensor) -> Tensor:
    """Return the tensor in the dtype of another."""
    return to(input, other)


def _conversion(name: str, kind: str) -> None:
    def convert(input: Tensor, memory_format: Any = None) -> Tensor:
        return to(input, DTYPES[kind])

    convert.__name__, convert.__doc__ = name, f"Return the tensor in {kind}."
    composite("m")(convert)


for _name, _kind in {
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "bool": "bool",
}.items():
    _conversion(_name, _kind)
