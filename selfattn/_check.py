"""Checks of arguments: plain arrays and their dtypes, sizes, numbers, seeds, settings by name.

They are for functions in NumPy and for the layers; the C core checks its own arguments.
"""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, MappingView, Set
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._extras import import_extra

Array: TypeAlias = npt.NDArray[Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")
ODD = (np.ma.MaskedArray, np.matrix)
HOST = (1, 3, 8, 11)  # DLPack's numbers of CPU, CUDA_HOST, METAL and ROCM_HOST, whose memory the CPU reads


def as_array(name: str, x: npt.ArrayLike) -> Array:
    """Convert lists to arrays, and arrays of other libraries, in their own memory if NumPy can read it.

    The core calls this for what is no plain array.

    Masked arrays and matrices, whose operators mean something else, are refused.
    """
    if type(x) is np.ndarray:
        return x
    if isinstance(x, np.ndarray):
        if isinstance(x, ODD):
            kind = type(x).__name__
            raise TypeError(f"{name} is a {kind}; pass a plain array; numpy.asarray({name}) has its data")
        return np.asarray(x)
    if hasattr(x, "__dlpack_device__"):
        torch = sys.modules.get("torch")
        is_tensor = isinstance(x, getattr(torch, "Tensor", ()))
        return _of_torch(name, x, torch) if is_tensor else _of_library(name, x)
    try:
        return np.asarray(x)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{name} cannot become an array: {error}") from None


def _of_torch(name: str, x: Any, torch: Any) -> Array:
    """Return PyTorch's tensor as an array; an error says what gives a tensor that NumPy can read."""
    try:
        if x.dtype is torch.bfloat16 and not x.requires_grad:  # which a view of integers would lose
            found = x.view(torch.int16).numpy().view(import_extra("ml_dtypes", None).bfloat16)
        else:
            found = x.numpy()
        return np.asarray(found)  # the methods of a derived class may return anything
    except (RuntimeError, TypeError) as error:
        ways = {
            ".detach()": x.requires_grad,
            ".cpu()": x.device.type != "cpu",
            ".to_padded_tensor(0.0)": x.is_nested,
            ".to_dense()": "sparse" in str(x.layout),
            ".resolve_neg()": x.is_neg(),
            ".dequantize()": x.is_quantized,
            ".float()": "float8" in str(x.dtype),
        }
        way = "".join(each for each, needed in ways.items() if needed)
        kind = TypeError if isinstance(error, TypeError) else RuntimeError
        what = f"; give {name}{way}" if way else f": {error}"
        raise kind(f"NumPy cannot read {name}, a tensor of {x.dtype}{what}") from None


def _of_library(name: str, x: Any) -> Array:
    """Return an array that offers DLPack as NumPy's; NumPy itself would copy some from a device without a word."""
    try:
        on_device = x.__dlpack_device__()[0] not in HOST
    except (BufferError, TypeError):  # of JAX: an array on several devices, or a deleted one
        on_device = any(device.platform != "cpu" for device in getattr(x, "devices", tuple)())
    if on_device:
        ways = f"jax.device_get({name}) of JAX or {name}.get() of CuPy"
        raise TypeError(f"{name} is not in the CPU's memory; give a copy that is, such as {ways}")
    dtype = getattr(x, "dtype", None)
    if isinstance(dtype, np.dtype) or "bfloat16" not in str(dtype):
        array = np.asarray(x)
        if array.dtype != object:
            return array
        with contextlib.suppress(BufferError, RuntimeError):  # of NumPy, if it has no such dtype
            return np.from_dlpack(x)
    bfloat16 = import_extra("ml_dtypes", None).bfloat16
    try:
        capsule = x.__dlpack__(max_version=(1, 0))
    except TypeError:  # before DLPack had versions
        capsule = x.__dlpack__()
    return _core._read_bfloat16(capsule).view(bfloat16)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether selfattn computes with arrays of this dtype."""
    return dtype.char in "efd" or dtype.name == "bfloat16"


def float_dtype(name: str, array: Array) -> np.dtype[Any]:
    """Return the dtype of an array of floats; integers count as float64."""
    if array.dtype.kind in "iu":
        return np.dtype(np.float64)
    if is_float(array.dtype):
        return array.dtype.newbyteorder("=")
    raise TypeError(f"{name} has dtype {array.dtype}; float16, bfloat16, float32, float64 or integers work")


def promoted(found: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return NumPy's common dtype; float16 with bfloat16, which NumPy refuses, gives float32."""
    kinds = set(found)
    if {dtype.name for dtype in kinds} >= {"float16", "bfloat16"}:
        kinds = {dtype for dtype in kinds if dtype.itemsize > 2} | {np.dtype(np.float32)}
    return np.result_type(*kinds)


def compute_dtype(*arrays: Array | None) -> np.dtype[Any]:
    """Return the dtype of the computation: float64 if an array is float64 or integers, else float32."""
    wide = any(float_dtype("x", array) == np.float64 for array in arrays if array is not None)
    return np.dtype(np.float64 if wide else np.float32)


def as_integers(name: str, x: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return integers as an array of int64."""
    array = as_array(name, x)
    empty_list = array.size == 0 and array.dtype == np.float64
    if array.dtype.kind not in "iu" and not empty_list:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    if array.dtype.kind == "u" and array.size and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} has a number beyond 2**63 - 1: {array.max()}")
    return array.astype(np.int64)


def check_number(name: str, value: Any) -> float:
    """Return a real number of any kind (NumPy's, a Decimal, a Fraction, an array of no dimensions) as a float."""
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
    """Check a size or another count."""
    try:
        size = None if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        size = None
    if size is None:
        raise TypeError(f"{name} must be an int, not {value!r}")
    if size < least:
        raise ValueError(f"{name} must be at least {least}, not {size}")
    return size


def one_of(name: str, given: Any, allowed: Iterable[str]) -> Any:
    """Check an option that is one of some words."""
    if given not in (words := tuple(allowed)):
        *first, last = (f'"{each}"' for each in words)
        raise ValueError(f"{name} must be {', '.join(first)} or {last}, not {quoted(given)}")
    return given


def check_divisor(name: str, value: Any, of: str, size: int) -> int:
    """Check a number that must divide a size, as the number of heads must divide the width."""
    number = check_size(name, value)
    if size % number:
        raise ValueError(f"{name} must divide {of}; {number} does not divide {size}")
    return number


def seed_from_rng(rng: Any, draws: bool = True) -> int:
    """Return the 64-bit seed of dropout: an int modulo 2**64, one uint64 of a generator, or fresh entropy for None.

    Without ``draws``, as without dropout, rng is only checked.
    """
    return _core._seed_from_rng(rng, draws)


def layer_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Check a layer's ``dtype=``; None, which is float64 in NumPy and float32 in PyTorch, is refused."""
    kind = np.dtype(dtype)
    if dtype is None or kind.name not in FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(FLOATS)}, not {dtype if dtype is None else kind}")
    return kind.newbyteorder("=")


def check_probability(name: str, p: Any) -> float:
    """Check a probability."""
    number = check_number(name, p)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")
    return number


def as_input(x: npt.ArrayLike, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Return an input as an array of floats: lists and integers get the layer's dtype, floats keep their own."""
    if type(x) is np.ndarray and x.dtype == dtype:
        return x
    array = as_array(name, x)
    listed = isinstance(x, list | tuple | float) and not isinstance(x, np.generic)
    if array.dtype.kind in "iu" or (listed and array.dtype.kind == "f"):
        return array.astype(dtype)
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} must hold floats or integers, not {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_features(x: npt.ArrayLike, width: int, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Return an input (..., width) as an array of floats."""
    array = as_input(x, dtype, name)
    if array.ndim == 0 or array.shape[-1] != width:
        raise ValueError(f"{name} must have shape (..., {width}), not {array.shape}")
    return array


def as_sequence(x: npt.ArrayLike, width: int, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Return an input (..., L, width) as an array of floats."""
    array = as_features(x, width, dtype, name)
    if array.ndim < 2:
        raise ValueError(f"{name} must have shape (..., L, {width}), not {array.shape}")
    return array


def check_gradient(dy: npt.ArrayLike, y: Array, name: str = "dy") -> Array:
    """Return the gradient of a result, which has its shape, in its dtype."""
    array = as_input(dy, y.dtype, name)
    if array.shape != y.shape:
        raise ValueError(f"{name} must have the shape of the result, {y.shape}, not {array.shape}")
    return array.astype(y.dtype, copy=False)


def warn(message: str | Warning) -> None:
    """Warn where the package was called: at the first frame outside it."""
    frame, level, own = sys._getframe(1), 2, ("selfattn", "selfattn_models", "contextlib")
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in own:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_warned: set[str] = set()


def warn_once(message: str) -> None:
    """Warn where the package was called, but only once in a process."""
    if message not in _warned:
        _warned.add(message)
        warn(message)


def quoted(value: Any) -> str:
    """Quote a value; a long one is cut."""
    long = isinstance(value, str | list | tuple) or (isinstance(value, np.ndarray) and value.ndim > 0)
    text = repr(value[:50] if long else value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_rows(name: str, given: Any, wanted: str = 'one column, such as df["text"]') -> None:
    """Refuse what is not gone through text by text: a mapping and a table give names, and a set has no order."""
    if isinstance(given, list | tuple):
        return
    way = ""
    if isinstance(given, Mapping):
        way = "whose keys would be read; its values are list(….values())"
    elif isinstance(given, Set) and not isinstance(given, MappingView):
        way = "which has no order; give a list"
    elif any(hasattr(given, each) for each in ("columns", "column_names")) or getattr(
        getattr(given, "dtype", None), "names", None
    ):
        way = f"a table, whose columns would be read; give {wanted}"
    if way:
        raise TypeError(f"{name} is a {type(given).__name__}, {way}")


def if_missing(value: Any) -> str:
    """Return what to do about a missing text of a table, for the end of a message; nothing for any other value."""
    missing = value is None or (not isinstance(value, str) and str(value) in ("nan", "<NA>", "NaT"))
    return '; a text is missing: fillna("") puts an empty one in its place' if missing else ""


class Entries:
    """Settings by name, as in a ``config.json``; :meth:`finish` refuses the settings that nothing has read."""

    off: Collection[Any] = (None, False, {}, [])  # values that switch a feature off

    def __init__(self, values: Mapping[str, Any], where: str = "the configuration") -> None:
        self.values, self.where, self.read = dict(values), where, set[str]()

    def error(self, what: str) -> ValueError:
        """Return an error that says where it was found."""
        return ValueError(f"{self.where}: {what}")

    def _get(self, name: str, default: Any) -> Any:
        self.read.add(name)
        value = self.values.get(name, default)
        if value is ...:
            raise ValueError(f"{self.where} lacks {name}")
        return value

    def size(self, name: str, default: Any = ..., least: int = 1, most: int = 2**31 - 1) -> int:
        """Read an int."""
        value = self._get(name, default)
        if type(value) is not int or not least <= value <= most:
            limit = "" if most == 2**31 - 1 else f" and at most {most}"
            raise self.error(f"{name} must be an int of at least {least}{limit}, not {value!r:.80}")
        return value

    def number(self, name: str, default: Any = ...) -> float:
        """Read a positive number."""
        value = self._get(name, default)
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value <= sys.float_info.max:
            raise self.error(f"{name} must be a positive number, not {value!r:.80}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Read a bool."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(f"{name} must be true or false, not {value!r}")
        return value

    def only(self, name: str, value: Any) -> None:
        """Read a key that supports only one value, its default."""
        found = self._get(name, value)
        if found != value:
            raise self.error(f"{name}={found!r} is not supported; only {value!r} is")

    def raw(self, name: str, default: Any = None) -> Any:
        """Read a key without a check."""
        return self._get(name, default)

    def inner(self, name: str, values: Mapping[str, Any]) -> Entries:
        """Return the settings in an object that is the value of a setting."""
        return Entries(values, f"{self.where}: {name}")

    def finish(self) -> None:
        """Refuse keys that nothing has read, unless their value switches a feature off: they might change results."""
        for name, value in self.values.items():
            if name not in self.read and value not in self.off:
                what = f"{name}={value!r} is not understood here"
                raise self.error(f"{what}, and might change what the model computes")
