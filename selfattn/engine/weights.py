"""Weights of 8 and 16 bits and GGUF's quants: conversion to and from float32, and matrices for the core.

int8 has a scale for each group of 128 numbers of a row: ``weight = scale * values`` with values from −127 to 127,
rounded to the nearest. bfloat16 is held as its bits, in uint16, since NumPy has no such type. The core rounds
activations.

Quants are weights as a GGUF file stores them. To multiply many rows, such as a prompt's, the core expands some
weights of the file to float32 at a time, or rounds the rows to integers; to multiply a decoding step's rows or
integers, it reads a copy of the quants in another order, in large pages (``csrc/kernels/products/gemv.h``).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from selfattn import _core
from selfattn._check import Array
from selfattn.functional._products import FLOAT32, as_rows, linear, plain

KINDS = ("bfloat16", "int8")
SCALE = "_scale"  # follows the name of a weight
GROUP = 128  # numbers of a row that share a scale; the last group may have fewer

BLOCK = 2**16  # elements rounded at once: they fit in the cache
INT8, BITS = np.dtype(np.int8), np.dtype(np.uint16)
BITS_OF_INFINITY = 0x7F80


# Held while weights are packed. fork waits for it; otherwise the child inherits a lock that nobody releases.
_lock = threading.RLock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Rounded:
    """A matrix of weights, (out, in), in fewer bits. Indexing converts rows to float32, ``np.asarray`` all rows."""

    dtype = np.dtype(np.float32)
    kind: str
    shape: tuple[int, ...]

    _packed: Any = None

    @property
    def packed(self) -> Any:
        """The weights in the form that the core multiplies, made once, also if several threads ask."""
        if self._packed is None:
            with _lock:
                if self._packed is None:
                    self._packed = self._pack()
        return self._packed

    def _pack(self) -> Any:
        raise NotImplementedError

    @property
    def table(self) -> Any:
        """The weights in the form from which the core takes rows."""
        return self.packed

    def __getstate__(self) -> dict[str, Any]:
        """Leave out ``packed``, which a copy makes again."""
        return {name: value for name, value in vars(self).items() if name != "_packed"}

    def __getitem__(self, rows: Any) -> Array:
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self[:].astype(dtype or self.dtype, copy=False)


class Compact(Rounded):
    """Weights of 8 or 16 bits.

    ``values``, int8 or uint16, (out, in), are contiguous and must not change, since ``packed`` is a copy. int8 has a
    ``scale``, float32 (out, groups). ``source`` is the array of which the values are rows.
    """

    def __init__(self, values: Array, scale: Array | None = None, source: Array | None = None) -> None:
        self.values, self.scale, self.source = values, scale, source
        self.kind, self.shape = kind_of(values), values.shape

    def _pack(self) -> Any:
        if self.scale is None:
            return _core._bfloat16_panels(self.values)
        return _core._int8_panels(self.values, self.scale)

    @property
    def table(self) -> Any:
        """The weights in the form from which the core takes rows."""
        return self.values if self.scale is None else (self.values, self.scale)

    def __getitem__(self, rows: Any) -> Array:
        return to_float32(self.values[rows], None if self.scale is None else self.scale[rows])


# For each kind, by GGUF's name: the numbers in a group with common scales, and the bytes of a group.
QUANTS: dict[str, tuple[int, int]] = _core._quant_shapes()
LINE = 64  # bytes of a cache line


class Quants(Rounded):
    """Weights as a GGUF file stores them.

    ``raw``, contiguous uint8, (out, bytes of a row), may be part of a mapped file, from which rows are expanded;
    ``packed`` has a copy in another order as well. ``kind`` is one of GGUF's names in ``QUANTS``. ``shape`` is (out,
    in); in is a multiple of the numbers of a quant: 32 in Q4_0 to Q8_0 and IQ4_NL, 256 in Q2_K to Q6_K and IQ4_XS.

    Examples
    --------
    >>> import numpy as np
    >>> row = np.frombuffer(np.float16(0.5).tobytes() + bytes(range(32)), np.uint8)
    >>> Quants(row[None], "Q8_0", (1, 32))[0][:4]
    array([0. , 0.5, 1. , 1.5], dtype=float32)
    """

    def __init__(self, raw: Array, kind: str, shape: tuple[int, int]) -> None:
        if kind not in QUANTS:
            raise ValueError(f"kind must be one of {', '.join(QUANTS)}, not {kind!r}")
        numbers, size = QUANTS[kind]
        out, width = shape
        if width % numbers or width < 0:
            raise ValueError(f"rows of {kind} must have a multiple of {numbers} columns, not {width}")
        if not isinstance(raw, np.ndarray) or raw.dtype != np.uint8 or not raw.flags.c_contiguous:
            got = f"{raw.dtype} of shape {raw.shape}" if isinstance(raw, np.ndarray) else type(raw).__name__
            raise TypeError(f"raw must be a contiguous array of uint8, not {got}")
        if raw.shape != (out, width // numbers * size):
            raise ValueError(
                f"{kind} of shape {tuple(shape)} must be bytes of shape {(out, width // numbers * size)}, "
                f"not {raw.shape}"
            )
        self.raw, self.kind, self.shape = raw, kind, (int(out), int(width))

    def _pack(self) -> Any:
        copy_quants([self])
        return self._packed

    @property
    def table(self) -> Any:
        """The weights without a copy."""
        return _core._quants((self.raw, self.kind, self.shape[1]))[0]

    def take(self, rows: slice) -> Quants:
        """Return some rows, without a copy."""
        raw = self.raw[rows]
        return Quants(raw, self.kind, (len(raw), self.shape[1]))

    @property
    def nbytes(self) -> int:
        """The bytes of the stored weights."""
        return self.raw.nbytes

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Any) -> Array:
        picked = np.arange(self.shape[0])[rows]
        flat = np.ascontiguousarray(picked.reshape(-1), np.int64)
        y: Array = _core._expand_quants(self.table, flat)
        return y.reshape(*picked.shape, self.shape[1])


Weight: TypeAlias = Array | Rounded


def copy_quants(weights: Iterable[Weight | None]) -> None:
    """Make ``packed`` of quants, in one call of the core and in one array.

    The call leaves Python to other threads, and the one array has large pages.
    """
    with _lock:
        made = [weight for weight in weights if isinstance(weight, Quants) and weight._packed is None]
        sizes = [-(-weight.nbytes // LINE) * LINE * (QUANTS[weight.kind][0] > 1) for weight in made]
        room = np.empty(LINE + sum(sizes), np.uint8)
        ends = np.cumsum([-room.ctypes.data % LINE, *sizes])[1:].tolist()
        each = zip(made, sizes, ends, strict=True)
        found = [(x.raw, x.kind, x.shape[1], room[end - n : end] if n else None) for x, n, end in each]
        for weight, packed in zip(made, _core._quants(*found), strict=True):
            weight._packed = packed


def is_compact(array: Array) -> bool:
    """Return whether an array holds rounded weights."""
    return array.dtype in (INT8, BITS)


def float_type(weight: Weight) -> np.dtype[Any]:
    """Return the dtype of the rows that multiply a weight: float32 for a rounded weight, else the weight's dtype."""
    return Compact.dtype if isinstance(weight, Rounded) or is_compact(weight) else weight.dtype


def kind_of(array: Array) -> str:
    """Return the name of the number type of an array of weights."""
    return "bfloat16" if array.dtype == BITS else array.dtype.name


def check_kind(dtype: Any) -> None:
    """Refuse a dtype that weights cannot be rounded to, or that this CPU does not multiply.

    The first is a ValueError, the second a RuntimeError.
    """
    if dtype not in KINDS:
        raise ValueError(f"dtype must be {' or '.join(map(repr, KINDS))}, not {dtype!r}")
    if _core._compact_unit(dtype == "int8") is None:
        raise RuntimeError(
            f"{dtype} needs a CPU that multiplies it, an AMD with AVX512_BF16, or one with AMX; the "
            f"instruction set in use is {_core.get_isa()}. int8 runs everywhere"
        )


def no_gradients(kind: str) -> ValueError:
    """Return the error of a call for gradients of rounded weights."""
    return ValueError(f"weights of {kind} have no gradients; load or make the model as float32 to train it")


def refuse_gradients(weight: Array) -> None:
    """Raise the error that :func:`no_gradients` returns if the weight is rounded."""
    if is_compact(weight):
        raise no_gradients(kind_of(weight))


def to_kind(name: str, weight: Array, kind: str) -> tuple[Array, Array | None]:
    """Round float32 weights (out, in); return values, and for int8 scales (out, groups).

    NaN and inf are a ValueError.
    """
    values: Array
    if kind == "bfloat16":
        values = np.empty(weight.shape, BITS)
        _core._narrow(np.require(weight, np.float32, ["C", "A"]), values, 0)
        if not good_bits(values):
            raise ValueError(f"{name} holds NaN, an infinity, or what bfloat16 rounds to one")
        return values, None
    out, columns = weight.shape
    values, scale = np.empty(weight.shape, INT8), np.zeros((out, groups_of(columns)), np.float32)
    rows = max(1, BLOCK // max(1, columns))
    for begin in range(0, out, rows):
        some, own = weight[begin : begin + rows], scale[begin : begin + rows]
        for group in range(own.shape[1]):
            of_group = slice(group * GROUP, (group + 1) * GROUP)
            numbers, factor = some[:, of_group], own[:, group, None]
            with np.errstate(invalid="ignore"):  # NaN and infinities raise an error below
                np.abs(numbers).max(axis=1, keepdims=True, initial=0, out=factor)
                factor /= 127
                quotients = numbers / np.where(factor == 0, 1, factor)
                np.rint(quotients, out=quotients)
                np.clip(quotients, -127, 127, out=quotients)  # scales of subnormal numbers are inexact
                values[begin : begin + rows, of_group] = quotients
    if not np.isfinite(scale).all():
        raise ValueError(f"{name} holds NaN or an infinity")
    return values, scale


def groups_of(columns: int) -> int:
    """Return the number of groups of a row."""
    return -(-columns // GROUP)


def to_float32(values: Array, scale: Array | None) -> Array:
    """Return rounded weights (..., in) as float32; int8 has scales (..., groups)."""
    if scale is None:
        return (values.astype(np.uint32) << 16).view(np.float32)
    wide: Array = values * np.repeat(scale, GROUP, axis=-1)[..., : values.shape[-1]]
    return wide


def good_bits(values: Array) -> bool:
    """Return whether all numbers, given as bits of bfloat16, are finite."""
    return not ((values & BITS_OF_INFINITY) == BITS_OF_INFINITY).any()


def good_scale(scale: Array) -> bool:
    """Return whether all scales are finite and not negative, as rounding makes them."""
    return bool((np.isfinite(scale) & (scale >= 0)).all())


def multiply(
    x: Array, weight: Weight, bias: Array | None, *, decoding: bool = False, digits: int = 0
) -> Array:
    """Compute ``x @ weight.T + bias``, x (..., in); the weight may be Rounded if x is not float64.

    With ``decoding`` each row belongs to a sequence's new token, and the core reads Quants without expanding them.
    Other rows multiply Quants as integers of that many digits of 8 bits, or with 0 as float32. The bits of a row do
    not depend on the other rows.
    """
    if not isinstance(weight, Rounded):
        return linear(x, weight, bias)
    check_input(x, weight.kind)
    y: Array = _core._linear_forward(
        plain(as_rows(x), FLOAT32),
        weight.packed,
        None if bias is None else plain(bias, FLOAT32),
        decoding,
        digits,
    )
    return y.reshape(*x.shape[:-1], weight.shape[0]).astype(np.result_type(x, FLOAT32), copy=False)


def check_input(x: Array, kind: str) -> None:
    """Refuse float64, which would lose digits."""
    if x.dtype == np.float64:
        raise TypeError(
            f"the input is float64, and weights of {kind} multiply float32; give x.astype(np.float32)"
        )
