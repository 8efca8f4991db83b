"""Merging attention over parts of the keys, and its gradients, in NumPy.

This takes a few sums of arrays as large as the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, compute_dtype, float_dtype, promoted
from selfattn._docs import copy_doc
from selfattn._gradient_tuples import MergeGradients
from selfattn.functional._gradients import as_fitting_gradient, like


@np.errstate(all="ignore")
def merge_attention(outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike]) -> tuple[Array, Array]:
    """Merge attention over several parts of the keys into the result of one call over all of them.

    Attention over a part of the keys is a weighted mean, and ``exp(lse)`` is the sum of its weights before
    their normalisation. So the whole is the mean of the parts' outputs, weighted by ``exp(lse)``::

        lse = log(exp(lse_1) + exp(lse_2) + ...)
        out = exp(lse_1 - lse) * out_1 + exp(lse_2 - lse) * out_2 + ...

    The largest lse is subtracted before exp, so that exp cannot overflow. The parts may come from
    different calls, processes or machines, in any order, and merged parts may be merged again. Only one part may
    have ``sinks``.

    Parameters
    ----------
    outs : sequence of array_like, each of shape (..., L, Ev)
        At least one. float16, bfloat16, float32, float64 or integers (which count as float64).
    lses : sequence of array_like, each of shape (..., L)
        The natural log-sum-exp of each part, from ``return_lse=True``. -inf marks a row without keys in this part;
        its output is ignored.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        In the dtype to which ``outs`` promote. Zeros where the lse of every part is -inf.
    lse : ndarray, shape (..., L)
        float64 if ``out`` is float64, else float32; it can be merged further. -inf if every part has -inf.

    Raises
    ------
    ValueError
        No part at all, different numbers of ``lses`` and ``outs``, or shapes that differ.
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


@copy_doc(merge_attention)
def merge_attention_vjp(
    outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike]
) -> tuple[tuple[Array, Array], Callable[..., MergeGradients]]:
    """Merge the parts of attention, and return a function that pulls gradients back to them.

    ::

        lse     = log(sum(exp(lse_n)))
        share_n = exp(lse_n - lse)
        out     = sum(share_n * out_n)

        dout_n = share_n * dout
        dlse_n = share_n * (sum(dout * (out_n - out)) + dlse)        # the sum over Ev

    A part whose lse is -inf has no share: its gradients are 0 there, whatever its output holds. Without ``dlse`` the
    merged lse was not used; with ``dout=None`` the merged output was not.

    Returns
    -------
    result : tuple, (out, lse)
        As :func:`merge_attention` returns it.
    pullback : callable
        ``pullback(dout, dlse=None)`` returns :class:`MergeGradients` ``(outs, lses)``, two lists with one array for
        each part, in its shape and dtype (float64 for integers). It may be called again; until the last call the
        parts must not change.

    Examples
    --------
    >>> (out, lse), pullback = merge_attention_vjp([[[1.0]], [[3.0]]], [[0.0], [0.0]])
    >>> pullback([[1.0]])
    MergeGradients(outs=[array([[0.5]]), array([[0.5]])], lses=[array([-0.5]), array([0.5])])
    """
    parts, sums = as_parts("outs", outs), as_parts("lses", lses)
    result = merge_attention(parts, sums)
    compute = compute_dtype(*parts, *sums)
    dtype = result[0].dtype if compute == np.float32 else compute

    @np.errstate(all="ignore")
    def pullback(dout: npt.ArrayLike | None, dlse: npt.ArrayLike | None = None) -> MergeGradients:
        if dout is None and dlse is not None:
            dout = np.zeros(parts[0].shape, dtype)
        dout = as_fitting_gradient("dout", dout, parts[0].shape, dtype).astype(compute, copy=False)
        if dlse is not None:
            dlse = as_fitting_gradient("dlse", dlse, sums[0].shape, compute).astype(compute, copy=False)
        wide = [part.astype(compute, copy=False) for part in parts]
        wide_lses = [part_lse.astype(compute, copy=False) for part_lse in sums]
        out, lse = (merged.astype(compute, copy=False) for merged in merge_attention(wide, wide_lses))
        grads = MergeGradients([], [])
        for n, (part, part_lse) in enumerate(zip(wide, wide_lses, strict=True)):
            absent = part_lse == -np.inf
            share = np.where(absent, 0, np.exp(part_lse - lse))
            along = np.where(absent[..., None], 0, dout * (part - out)).sum(axis=-1)
            along = along if dlse is None else along + dlse
            grads.outs.append(like(parts[n], np.where(absent[..., None], 0, share[..., None] * dout)))
            grads.lses.append(like(sums[n], np.where(absent, 0, share * along)))
        return grads

    return result, pullback


def as_parts(name: str, arrays: Sequence[npt.ArrayLike]) -> list[Array]:
    """Convert each element of a sequence to an array."""
    if not isinstance(arrays, Iterable):
        raise TypeError(f"{name} must be a sequence of arrays, got {type(arrays).__name__}")
    return [as_array(f"{name}[{n}]", array) for n, array in enumerate(arrays)]
