"""What the pullbacks of several operations share: broadcasting's transpose, and the dtypes of gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, float_dtype


def sum_to_shape(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast: the transpose of broadcasting."""
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    axes = tuple(axis for axis, n in enumerate(gradient.shape) if n != 1 and shape[axis] == 1)
    return (gradient.sum(axis=axes, keepdims=True) if axes else gradient).reshape(shape)


def gradient_array(name: str, x: npt.ArrayLike | None, dtype: np.dtype[Any]) -> Array:
    """Convert lists and numbers to ``dtype``; numbers beyond its range become inf, without a warning.

    Arrays are kept.
    """
    if isinstance(x, np.ndarray):
        return x
    if x is None:
        raise TypeError(f"{name} must be an array, not None")
    array = as_array(name, x)
    if not isinstance(x, list | tuple | float | int):  # has a dtype, as PyTorch tensors do
        return array
    float_dtype(name, array)
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def as_fitting_gradient(
    name: str, x: npt.ArrayLike | None, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """Return the gradient of a result of ``shape`` and ``dtype``; lists and numbers get this dtype.

    float64, and integers, which count as float64, are refused where the result has fewer bits.
    """
    found = as_array(name, gradient_array(name, x, dtype))
    if found.shape != shape:
        raise ValueError(f"{name} has shape {found.shape}; the result that it is the gradient of has {shape}")
    if float_dtype(name, found) == np.float64 != dtype:
        raise TypeError(
            f"{name} has dtype {found.dtype.name}, but the result has {dtype}: it would be narrowed"
        )
    return found


def gradient_dtype(x: Array) -> np.dtype[Any]:
    """Return the dtype of the gradient of x: the dtype of x, or float64 for integers."""
    return np.dtype(np.float64) if x.dtype.kind in "iu" else x.dtype.newbyteorder("=")


def like(x: Array, dx: Array) -> Array:
    """Return a gradient in the dtype of its input; integers count as float64."""
    return dx.astype(gradient_dtype(x), order="C", copy=False)


def to_dtype(x: Array, dtype: np.dtype[Any], num_threads: int | None) -> Array:
    """Round x to the dtype of a gradient, if it has another; numbers beyond its range become inf, without a warning."""
    x = np.asarray(x)  # NumPy's sum over all axes is a scalar
    if x.dtype != np.float32 or dtype.itemsize != 2 or not x.flags.c_contiguous:
        return x.astype(dtype, copy=False)
    narrow = np.empty(x.shape, dtype)
    _core._narrow(x, narrow, num_threads or 0)
    return narrow
