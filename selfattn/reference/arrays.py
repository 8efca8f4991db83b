"""The dtypes of a computation and of its result, and gradients in the form of their inputs."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


def float_dtype(*arrays: Array) -> np.dtype[Any]:
    """Return NumPy's common dtype, where integers count as float64.

    float16 with bfloat16, for which NumPy has none, gives float32.
    """
    found = {np.dtype(np.float64) if x.dtype.kind in "iu" else x.dtype for x in arrays}
    if {dtype.name for dtype in found} >= {"float16", "bfloat16"}:
        found = {dtype for dtype in found if dtype.itemsize > 2} | {np.dtype(np.float32)}
    return np.result_type(*found)


def convert(
    compute_dtype: npt.DTypeLike | None, *given: npt.ArrayLike | None
) -> tuple[list[Array], np.dtype[Any]]:
    """Return copies of arrays in the precision of the computation, and the dtype of the result; None stays None.

    The precision is float64 for a result of float64, else float32; ``compute_dtype`` is that of both, if there is one.
    """
    arrays: list[Any] = [None if x is None else np.asarray(x) for x in given]
    result = float_dtype(*(x for x in arrays if x is not None))
    compute = np.dtype(np.float64 if result == np.float64 else np.float32)
    if compute_dtype is not None:
        compute = result = np.dtype(compute_dtype)
    arrays = [None if x is None else x.astype(compute) for x in arrays]
    return arrays, result


def sum_to_shape(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast: the transpose of broadcasting."""
    gradient = gradient.reshape((1,) * (len(shape) - gradient.ndim) + gradient.shape)  # (1,) may mean ()
    extra = tuple(range(gradient.ndim - len(shape)))
    gradient = gradient.sum(axis=extra) if extra else gradient
    axes = tuple(axis for axis in range(gradient.ndim) if shape[axis] == 1 != gradient.shape[axis])
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient.reshape(shape)


def like(x: npt.ArrayLike, dx: Array, compute_dtype: npt.DTypeLike | None) -> Array:
    """Return a gradient in the shape and dtype of its input, or in the ``compute_dtype`` if there is one."""
    given = np.asarray(x)
    summed = sum_to_shape(dx, given.shape)
    return summed if compute_dtype is not None else summed.astype(float_dtype(given), order="C")
