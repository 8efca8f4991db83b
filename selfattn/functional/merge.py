"""Merging the parts of a split call of attention, in NumPy; its gradients are in `rowops`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array, float_dtype, promoted

__all__ = ["merge_attention"]

Array: TypeAlias = npt.NDArray[Any]


@np.errstate(all="ignore")
def merge_attention(outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike]) -> tuple[Array, Array]:
    """Put attention over several parts of the keys together, as if there had been one call over all of them.

    Attention over a part of the keys is a weighted mean, and ``exp(lse)`` the sum of its weights before
    they were normalised. So the whole is the mean of the parts' outputs, weighted by ``exp(lse)``::

        lse = log(exp(lse_1) + exp(lse_2) + ...)
        out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2 + ...

    with the largest lse taken off before exp, which keeps it from overflowing. The parts may come from
    different calls, processes or machines, in any order, and merged parts may be merged again. With
    ``sinks``, give them to one part only.

    Parameters
    ----------
    outs : sequence of array_like, each of shape (..., L, Ev)
        At least one. float16, bfloat16, float32, float64 or integers (which count as float64).
    lses : sequence of array_like, each of shape (..., L)
        The natural log-sum-exp of each part, from ``return_lse=True``. -inf marks a row that attended to
        nothing in this part; whatever its output holds is left out.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        In the dtype to which ``outs`` promote. Zeros where the lse of every part is -inf.
    lse : ndarray, shape (..., L)
        float64 if ``out`` is float64, else float32; it can be merged further. -inf where that of every part
        is.

    Raises
    ------
    ValueError
        No part at all, not as many ``lses`` as ``outs``, or shapes that differ.
    TypeError
        A dtype other than those above, masked arrays or matrices.

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2; Dao et al.,
    "FlashAttention", 2022, section 3.1.

    Examples
    --------
    Two parts of equal weight, exp(0) and exp(0), give their mean:

    >>> out, lse = merge_attention([[[1.0, 2.0]], [[3.0, 4.0]]], [[0.0], [0.0]])
    >>> out
    array([[2., 3.]])
    >>> lse.round(4)
    array([0.6931])
    """
    out_arrays, lse_arrays = as_parts("outs", outs), as_parts("lses", lses)
    if not out_arrays:
        raise ValueError("outs is empty; at least one part is needed")
    if len(out_arrays) != len(lse_arrays):
        raise ValueError(f"there are {len(out_arrays)} outs but {len(lse_arrays)} lses")
    shape = out_arrays[0].shape
    if len(shape) < 2:
        raise ValueError(f"outs[0] must have at least 2 dims, (..., L, Ev), not shape {shape}")
    for n, (out, lse) in enumerate(zip(out_arrays, lse_arrays, strict=True)):
        if out.shape != shape:
            raise ValueError(f"outs[{n}] has shape {out.shape}, unlike outs[0] with {shape}")
        if lse.shape != shape[:-1]:
            raise ValueError(f"lses[{n}] has shape {lse.shape}; outs {shape} needs (..., L) = {shape[:-1]}")

    result = promoted(float_dtype(f"outs[{n}]", out) for n, out in enumerate(out_arrays))
    wide = [float_dtype(f"lses[{n}]", lse) for n, lse in enumerate(lse_arrays)]
    compute = np.dtype(np.float64 if np.float64 in (result, *wide) else np.float32)
    lse_dtype = np.dtype(np.float64 if result == np.float64 else np.float32)

    zero = compute.type(0)
    wide_lses = [lse.astype(compute) for lse in lse_arrays]
    top = np.full(shape[:-1], -np.inf, compute)
    for part in wide_lses:
        top = np.maximum(top, part)
    top = np.where(top == -np.inf, zero, top)  # -inf - -inf would be NaN
    total = np.zeros(shape[:-1], compute)
    for part in wide_lses:
        total += np.exp(part - top)
    merged = np.zeros(shape, compute)
    for out, part in zip(out_arrays, wide_lses, strict=True):
        share = np.exp(part - top) / total
        merged += np.where((part == -np.inf)[..., None], zero, share[..., None] * out.astype(compute))
    return merged.astype(result), (np.log(total) + top).astype(lse_dtype)


def as_parts(name: str, arrays: Sequence[npt.ArrayLike]) -> list[Array]:
    """Convert a sequence of array_like to arrays."""
    if not isinstance(arrays, Iterable):
        raise TypeError(f"{name} must be a sequence of arrays, got {type(arrays).__name__}")
    return [as_array(f"{name}[{n}]", array) for n, array in enumerate(arrays)]
