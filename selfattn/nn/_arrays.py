"""What every layer does with arrays: take inputs and gradients in, split heads, notice changed parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn.functional._arguments import as_array, check_number

Array: TypeAlias = npt.NDArray[Any]
Gradients: TypeAlias = dict[str, Array]
Pullback: TypeAlias = Callable[..., Any]

FLOATS = ("float16", "bfloat16", "float32", "float64")


def float_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    """Check a layer's ``dtype=``; None, which NumPy takes for float64 and PyTorch for float32, is none."""
    kind = np.dtype(dtype)
    if dtype is None or kind.name not in FLOATS:
        raise TypeError(f"dtype must be one of {', '.join(FLOATS)}, not {dtype if dtype is None else kind}")
    return kind.newbyteorder("=")


def check_probability(name: str, p: Any) -> float:
    """Check a probability to drop something."""
    number = check_number(name, p)
    if not 0 <= number <= 1:
        raise ValueError(f"{name} must be between 0 and 1, not {p}")
    return number


def as_input(x: npt.ArrayLike, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Take an input as an array of floats: lists and integers in the layer's dtype, float arrays as they are."""
    if type(x) is np.ndarray and x.dtype == dtype:
        return x
    array = as_array(name, x)
    if array.dtype.kind in "iu" or (not isinstance(x, np.ndarray | np.generic) and array.dtype.kind == "f"):
        return array.astype(dtype)
    if array.dtype.name not in FLOATS:
        raise TypeError(f"{name} must hold floats or integers, not {array.dtype}")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_features(x: npt.ArrayLike, width: int, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Take an input (..., width)."""
    array = as_input(x, dtype, name)
    if array.ndim == 0 or array.shape[-1] != width:
        raise ValueError(f"{name} must have shape (..., {width}), not {array.shape}")
    return array


def as_sequence(x: npt.ArrayLike, width: int, dtype: np.dtype[Any], name: str = "x") -> Array:
    """Take an input (..., L, width)."""
    array = as_features(x, width, dtype, name)
    if array.ndim < 2:
        raise ValueError(f"{name} must have shape (..., L, {width}), not {array.shape}")
    return array


def as_gradient(dy: npt.ArrayLike, y: Array, name: str = "dy") -> Array:
    """Take the gradient of a result: its shape, and its dtype."""
    array = as_input(dy, y.dtype, name)
    if array.shape != y.shape:
        raise ValueError(f"{name} must have the shape of the result, {y.shape}, not {array.shape}")
    return array.astype(y.dtype, copy=False)


def rows(x: Array) -> Array:
    """See (..., d) as (n, d)."""
    return x.reshape(-1, x.shape[-1])


def widened(x: Array) -> Array:
    """See 16-bit floats as float32, which sums are accumulated in."""
    return x.astype(np.float32) if x.dtype.itemsize == 2 else x


def split_heads(x: Array, num_heads: int) -> Array:
    """See (..., L, h·d) as (..., h, L, d)."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).swapaxes(-2, -3)


def merge_heads(x: Array) -> Array:
    """Turn (..., h, L, d) into (..., L, h·d)."""
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def mask_for_heads(mask: npt.ArrayLike | None) -> Array | None:
    """Give a mask (..., L, S) that heads share the axis of the heads."""
    if mask is None:
        return None
    array = as_array("attn_mask", mask)
    return array[..., None, :, :] if array.ndim > 2 else array


def lengths_for_heads(key_lengths: npt.ArrayLike | None) -> Array | None:
    """Give key lengths, one per sequence, the axis of the heads."""
    return None if key_lengths is None else as_array("key_lengths", key_lengths)[..., None]


def checked_pullback(
    owner: Any,
    y: Array,
    parameters: Iterable[Array | None],
    backward: Callable[[Array], Any],
    name: str = "dy",
) -> Pullback:
    """Return a pullback that takes the gradient of y, sees that the parameters are what they were, and calls backward."""
    unchanged = Unchanged(type(owner).__name__, *parameters)

    def pullback(dy: npt.ArrayLike) -> Any:
        dy = as_gradient(dy, y, name)
        unchanged.check()
        return backward(dy)

    return pullback


class Unchanged:
    """Remembers what parameters hold; a pullback that needs the old values checks before it uses them.

    The optimiser writes into the arrays, so a gradient taken after a step would silently mix old activations with
    new weights. A checksum of their memory costs a fraction of the product that the weights take part in, and unlike
    a counter it also notices ``weight[...] = 0``.
    """

    def __init__(self, owner: str, *arrays: Array | None) -> None:
        self.owner = owner
        self.arrays = tuple(array for array in arrays if array is not None)
        self.before = _core._checksum(self.arrays)

    def check(self) -> None:
        """Raise when a parameter has changed.

        Raises
        ------
        RuntimeError
            The gradient that was asked for can no longer be had.
        """
        if _core._checksum(self.arrays) != self.before:
            raise RuntimeError(
                f"the parameters of {self.owner} have changed since vjp was called; call vjp again"
            )
