"""Masks, triangles and diagonals, and writing over a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.tape.dtypes import result_dtype
from selfattn.tape.operations.indices import added_at
from selfattn.tape.operations.table import (
    TABLE,
    as_operand,
    composite,
    fit,
    operation,
    shape_of,
    write,
)
from selfattn.tape.operations.views import _expand
from selfattn.tape.tensors import (
    Tensor,
    as_tensor_array,
    wrap,
)


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
