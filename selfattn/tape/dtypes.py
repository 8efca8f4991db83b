"""Dtypes, devices and sizes as PyTorch has them, and the dtype of an operation's result."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn._extras import import_extra


class dtype:  # noqa: N801 # PyTorch's name
    """The kind of numbers of a tensor, such as ``torch.float32``."""

    is_complex = False

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_floating_point = "float" in name
        self.itemsize = int(name.strip("bfloatuin") or 8) // 8
        # Of a bool, an int and a float, the kind of the highest rank is that of their sum.
        self.rank = 2 if self.is_floating_point else int(name != "bool")

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:  # one object for each dtype, also after a copy
        return DTYPES.__getitem__, (self.name,)

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's dtype."""
        if self.name == "bfloat16":
            return np.dtype(import_extra("ml_dtypes", None).bfloat16)
        return np.dtype(self.name)


float16, bfloat16, float32, float64 = map(dtype, ("float16", "bfloat16", "float32", "float64"))
int8, int16, int32, int64, uint8 = map(dtype, ("int8", "int16", "int32", "int64", "uint8"))
bool_ = dtype("bool")

DTYPES = {d.name: d for d in (float16, bfloat16, float32, float64, int8, int16, int32, int64, uint8, bool_)}
# The names of tensors of a dtype, as in `tensor.type("torch.FloatTensor")`.
KINDS = {
    "HalfTensor": float16,
    "BFloat16Tensor": bfloat16,
    "FloatTensor": float32,
    "DoubleTensor": float64,
    "CharTensor": int8,
    "ShortTensor": int16,
    "IntTensor": int32,
    "LongTensor": int64,
    "ByteTensor": uint8,
    "BoolTensor": bool_,
}
OF_PYTHON = {bool: bool_, int: int64, float: float64}

_of_numpy: dict[np.dtype[Any], dtype] = {}
_default = [float32]


def get_default_dtype() -> dtype:
    """Return the dtype of tensors that are made of Python's floats."""
    return _default[0]


def set_default_dtype(d: dtype) -> None:
    """Set the dtype of tensors that are made of Python's floats, float32 at first."""
    if not isinstance(d, dtype) or not d.is_floating_point:
        raise TypeError(f"only floating-point types are supported as the default type, not {d!r}")
    _default[0] = d


def dtype_of(array: Array) -> dtype:
    """Return the dtype of an array."""
    try:
        return DTYPES[array.dtype.name]
    except KeyError:
        raise TypeError(
            f"selfattn.tape has no tensors of {array.dtype}; it has {', '.join(DTYPES)}"
        ) from None


def as_dtype(given: Any) -> dtype:
    """Return a dtype that is given as one, as FloatTensor or its name, or as Python's float, int or bool."""
    given = getattr(given, "dtype", given) if isinstance(given, type) else given
    if isinstance(given, dtype):
        return given
    found = KINDS.get(given.rpartition(".")[2]) if isinstance(given, str) else OF_PYTHON.get(given)
    if found is None:
        raise TypeError(f"dtype must be one such as torch.float32, not {given!r}")
    return found


def widest(kinds: Iterable[dtype]) -> dtype:
    """Return the dtype of a result of tensors of these dtypes: the highest rank wins, then the most bits."""
    found = set(kinds)
    rank = max(kind.rank for kind in found)
    found = {kind for kind in found if kind.rank == rank}
    if found == {float16, bfloat16}:
        return float32
    if len(found) > 1 and rank == 2:
        return max(found, key=lambda kind: kind.itemsize)
    return DTYPES[np.result_type(*(kind.numpy for kind in found)).name] if len(found) > 1 else found.pop()


def result_dtype(*operands: Any) -> dtype:
    """Return the dtype of a result of tensors and numbers.

    A tensor without axes counts only if its kind has a higher rank than that of all tensors with axes; a number, only
    if its kind has a higher rank than that of all tensors.
    """
    groups: list[list[dtype]] = [[], [], []]
    for x in operands:
        array = getattr(x, "_array", None)
        if array is not None:
            groups[array.ndim == 0].append(dtype_of(array))
        else:
            kind = OF_PYTHON[type(x)] if type(x) in OF_PYTHON else dtype_of(np.asarray(x))
            groups[2].append(get_default_dtype() if kind.rank == 2 else kind)
    best: dtype | None = None
    for group in groups:
        if group and (best is None or widest(group).rank > best.rank):
            best = widest(group)
    if best is None:
        raise TypeError("an operation needs at least one tensor or number")
    return best


class Size(tuple[int, ...]):
    """The shape of a tensor: a tuple of ints."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"torch.Size({list(self)})"

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self)

    def __getitem__(self, index: Any) -> Any:
        found = tuple.__getitem__(self, index)
        return Size(found) if isinstance(index, slice) else found

    def __add__(self, other: Any) -> Size:
        return Size(tuple.__add__(self, tuple(other)))


class device:  # noqa: N801 # PyTorch's name
    """A device, of which there is one: the CPU."""

    def __init__(self, name: Any = "cpu", index: int | None = None) -> None:
        kind, _, number = str(name).partition(":")
        if kind != "cpu":
            raise RuntimeError(f"selfattn.tape computes on the CPU alone, not on {name!r}")
        self.type, self.index = kind, int(number) if number else index

    def __repr__(self) -> str:
        return f"device(type='{self.type}')"

    def __str__(self) -> str:
        return self.type

    def __eq__(self, other: object) -> bool:
        return isinstance(other, device)

    def __hash__(self) -> int:
        return hash(self.type)


class finfo:  # noqa: N801 # PyTorch's name
    """The limits of a dtype of floats."""

    def __init__(self, d: dtype | None = None) -> None:
        self.dtype = get_default_dtype() if d is None else as_dtype(d)
        if not self.dtype.is_floating_point:
            raise TypeError(f"finfo is of floats, not of {self.dtype}")
        found: Any = (
            import_extra("ml_dtypes", None).finfo("bfloat16")
            if self.dtype is bfloat16
            else np.finfo(self.dtype.numpy)
        )
        self.bits: int = found.bits
        self.eps, self.min, self.max = float(found.eps), float(found.min), float(found.max)
        self.tiny = self.smallest_normal = float(found.tiny)


class iinfo:  # noqa: N801 # PyTorch's name
    """The limits of a dtype of integers."""

    def __init__(self, d: dtype) -> None:
        found = np.iinfo(as_dtype(d).numpy)
        self.dtype, self.bits, self.min, self.max = as_dtype(d), found.bits, int(found.min), int(found.max)
