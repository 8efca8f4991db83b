"""What arguments of functions may be: plain arrays, their dtypes, and seeds.

The C core checks what it is given itself. This is for the functions that work in NumPy, and for the layers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def as_array(name: str, x: npt.ArrayLike) -> Array:
    """Convert lists and the like; refuse the subclasses of ndarray that would mean something else by it."""
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name} is a {type(x).__name__}; pass a plain array")
    try:
        return np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{name} cannot become an array: {error}") from None


def is_float(dtype: np.dtype[Any]) -> bool:
    """Tell the four dtypes that selfattn computes with."""
    return dtype.char in "efd" or dtype.name == "bfloat16"


def float_dtype(name: str, array: Array) -> np.dtype[Any]:
    """Give the floating-point dtype that an input counts as; integers count as float64."""
    if array.dtype.kind in "iu":
        return np.dtype(np.float64)
    if is_float(array.dtype):
        return array.dtype.newbyteorder("=")
    raise TypeError(f"{name} has dtype {array.dtype}; float16, bfloat16, float32, float64 or integers work")


def promoted(found: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Promote as NumPy does; float16 and bfloat16, which it does not promote, meet in float32."""
    kinds = set(found)
    if {dtype.name for dtype in kinds} >= {"float16", "bfloat16"}:
        kinds = {dtype for dtype in kinds if dtype.itemsize > 2} | {np.dtype(np.float32)}
    return np.result_type(*kinds)


def compute_dtype(*arrays: Array | None) -> np.dtype[Any]:
    """Choose the dtype to compute in: float64 if an array is or counts as that, else float32."""
    wide = any(float_dtype("x", array) == np.float64 for array in arrays if array is not None)
    return np.dtype(np.float64 if wide else np.float32)


def as_integers(name: str, x: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Take an array of integers that int64 holds."""
    array = as_array(name, x)
    empty_list = array.size == 0 and array.dtype == np.float64
    if array.dtype.kind not in "iu" and not empty_list:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has a number beyond 2**63 - 1: {array.max()}")
    return array.astype(np.int64)


def check_number(name: str, value: Any) -> float:
    """Take a real number of any kind (NumPy's, a Decimal, a Fraction, an array of no dimensions) as a float."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    wrong = isinstance(value, bool | str | bytes) or kind in "bcOSTUmM" or getattr(value, "ndim", 0) != 0
    try:
        number = None if wrong else float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float: {value!r:.80}") from None
    except (TypeError, ValueError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a real number, not {value!r:.80}")
    return number


def check_size(name: str, value: Any, least: int = 1) -> int:
    """Check an argument that counts something."""
    try:
        size = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, not {size}")
    return size


def seed_from_rng(rng: Any) -> int:
    """Turn ``rng`` into the 64-bit seed of dropout: an int modulo 2**64, or one uint64 of a generator.

    Anything with the ``integers`` method of :class:`numpy.random.Generator` is a generator; None is fresh entropy.
    """
    if rng is None:
        rng = np.random.default_rng()
    if hasattr(rng, "integers"):
        return int(rng.integers(0, 2**64, dtype=np.uint64))
    if isinstance(rng, bool | np.bool_) or not hasattr(rng, "__index__"):
        raise TypeError(f"rng must be an int, a numpy.random.Generator or None, not {type(rng).__name__}")
    if operator.index(rng) < 0:
        raise ValueError(f"rng must not be negative, not {rng}")
    return operator.index(rng) % 2**64
