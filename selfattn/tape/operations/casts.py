"""Copies, dtypes and devices."""

from __future__ import annotations

from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.tape.dtypes import DTYPES, KINDS, as_dtype, device, dtype
from selfattn.tape.operations.table import (
    composite,
    operation,
)
from selfattn.tape.tensors import (
    Tensor,
)


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
