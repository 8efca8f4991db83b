"""Attention with its gradients; the forward and backward halves are for callers that manage memory themselves.

The C core computes both halves. Code that packed attention shares is in `_gradients`; the checks of ``gradients=`` are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array
from selfattn._gradients import AttentionGradients, check_wrt
from selfattn.functional._gradients import (
    WRT,
    Pullback,
    apart,
    as_gradient,
    attention_vjp,
    check_float_mask,
    gradient_dtype,
    take_gradients,
)
from selfattn.functional._options import AttentionOptions, takes

HEADS = slice(None, -2)

_OVERLAP_WORK = 10_000  # the core requires the same of `out`


@takes(AttentionOptions)
def scaled_dot_product_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    wrt: Sequence[str] = WRT,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Pullback]:
    """Compute attention, and return with it the function that pulls gradients back through it.

    The backward pass recomputes the weights tile by tile from two numbers a row, so forward and backward
    take memory linear in L and S. The gradients have the same bits for any number of threads.

    Parameters
    ----------
    return_lse : bool, default False
        Return ``(out, lse)`` in place of ``out``; the pullback then takes the gradient of both.
    return_weights : bool, default False
        Refused: the weights have no gradient here.
    wrt : sequence of str, default ("query", "key", "value")
        The inputs to differentiate with respect to: also "attn_mask" (a float mask), "alibi_slopes", "sinks". Other
        gradients are not computed.

    Returns
    -------
    out : ndarray, shape (..., L, Ev), or (out, lse)
    pullback : callable
        ``pullback(grad_out)`` returns :class:`AttentionGradients`, a named tuple; with ``return_lse`` it is
        ``pullback(grad_out, grad_lse)``, of shapes (..., L, Ev) and (..., L). Each gradient has the shape and
        dtype of its input (float64 for integers), summed over broadcast axes. It may be called again. It
        holds references to the arguments and to ``out``: changing them in place makes later gradients wrong, but never
        unsafe. The notes say which arguments it copies. An ``out`` of 16 bits is held in float32, before rounding.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention`; a name in ``wrt`` that has no gradient; in the pullback,
        a ``grad_out`` or ``grad_lse`` of another shape than its result, or float64 where the result has fewer bits.
    KeyboardInterrupt
        Ctrl-C, in Python's main thread, during the call, which leaves ``out`` undefined, or in the pullback,
        which may be called again.

    Notes
    -----
    The options also hold for the pullback, which drops the same weights. In ``pullback(None, grad_lse)`` None means zeros.

    Two kinds of inputs are copied: lists and other queries, keys and values that NumPy converts; and keys and values
    that are repeated along a leading axis by a view (as of ``numpy.broadcast_to``), since each repetition has a gradient
    of its own.

    The gradients of a row without keys, of a masked key and of a masked query are zeros, whatever values these have.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4 and appendix B.2. The derivation in this package's
    notation is docs/theory/backward.md.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    >>> grads = pullback(np.ones_like(out))
    >>> grads.key.shape, grads.attn_mask is None
    ((2, 5, 4), True)
    >>> np.allclose(grads.value.sum(axis=1), 5)  # five rows of weights with sum 1
    True
    """
    names = check_wrt(wrt, AttentionGradients._fields)
    if return_weights:
        raise TypeError("return_weights has no gradient; call scaled_dot_product_attention for the weights")
    if "attn_mask" in names:
        check_float_mask("attn_mask", attn_mask)
    arguments = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
    return attention_vjp(
        _core._attention_forward, attention_backward, (query, key, value), HEADS, arguments, names=names, return_lse=return_lse, out=out
    )  # fmt: skip


@takes(AttentionOptions)
def scaled_dot_product_attention_forward(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> tuple[Array, ...]:
    """Compute attention and keep what the backward pass needs: the forward half of the vjp.

    It is for callers that manage memory themselves; :func:`scaled_dot_product_attention_vjp` does so for others.

    Parameters
    ----------
    out : ndarray, optional
        As :func:`scaled_dot_product_attention`. In place of 16 bits it may be float32: then it is not rounded, and gradients
        from it take less time and are more exact, as those of the vjp are.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
    statistics : ndarray, shape (..., L, 2)
        For each row the maximum of its scores, in log2 units (or less, by at most 8), and one over the sum of
        its exponentials; float64 for float64, else float32.
    lse, weights
        With ``return_lse`` and ``return_weights``.

    Notes
    -----
    Dropout needs an int as ``rng``: the backward call must be given the same.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> x = np.eye(3)
    >>> out, statistics = sa.functional.scaled_dot_product_attention_forward(x, x, x)
    >>> grads = sa.functional.scaled_dot_product_attention_backward(np.ones_like(out), out, statistics, x, x, x)
    >>> grads.query.shape
    (3, 3)
    """
    results: tuple[Array, ...] = _core._attention_forward(
        query, key, value, attn_mask, dropout_p, is_causal, return_lse=return_lse, return_weights=return_weights, out=out,
        **options,
    )  # fmt: skip
    return results


@takes(AttentionOptions)
def scaled_dot_product_attention_backward(
    grad_out: npt.ArrayLike | None,
    out: Array,
    statistics: Array,
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    grad_lse: npt.ArrayLike | None = None,
    wrt: Sequence[str] = WRT,
    gradients: AttentionGradients | None = None,
    **options: Unpack[AttentionOptions],
) -> AttentionGradients:
    """Compute the gradients of attention from what the forward half returned.

    Parameters
    ----------
    grad_out : array_like, shape (..., L, Ev)
        The gradient with respect to ``out``.
    out : ndarray, shape (..., L, Ev)
    statistics : ndarray, shape (..., L, 2)
        As :func:`scaled_dot_product_attention_forward` returned them.
    query, key, value : as in the forward call, like all parameters to ``num_threads``
    grad_lse : array_like, shape (..., L), optional
        The gradient with respect to the log-sum-exp.
    wrt : sequence of str
        See :func:`scaled_dot_product_attention_vjp`.
    gradients : AttentionGradients, optional
        Arrays to write the gradients to: exact shapes and dtypes, writable, without overlap with an input
        or with one another; None for those that should be new. The core writes C-contiguous float32, or in float64
        float64, in place; gradients with other strides, 16 bits or a broadcast shape, and those of slopes and sinks, are
        copied.

    Returns
    -------
    AttentionGradients

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention_vjp`.
    KeyboardInterrupt
        Ctrl-C during the call, in Python's main thread. The arrays of ``gradients`` are then undefined.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> x = np.eye(3, dtype=np.float32)
    >>> out, statistics = sa.functional.scaled_dot_product_attention_forward(x, x, x)
    >>> mine = sa.functional.AttentionGradients(query=np.empty_like(x), key=None, value=None)
    >>> grads = sa.functional.scaled_dot_product_attention_backward(
    ...     np.ones_like(out), out, statistics, x, x, x, wrt=("query",), gradients=mine)
    >>> grads.query is mine.query
    True
    """
    names = check_wrt(wrt, AttentionGradients._fields)
    for name, kept in (("out", out), ("statistics", statistics)):
        if not isinstance(kept, np.ndarray):
            raise TypeError(
                f"{name} must be the array that the forward call returned, got {type(kept).__name__}"
            )
    q, k, v = map(as_array, WRT, (query, key, value))
    grad_out = as_gradient("grad_out", grad_out, out.dtype)
    arguments = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
    if gradients is not None:
        given = {"query": q, "key": k, "value": v, "grad_out": grad_out, "out": out, "statistics": statistics,
                 "grad_lse": grad_lse, **arguments}  # fmt: skip
        _check_gradients(gradients, names, given)
    found = attention_backward(
        q, apart(k, HEADS), apart(v, HEADS), names=names, grad_out=grad_out, grad_lse=grad_lse, out=out,
        statistics=statistics, gradients=gradients, **arguments,
    )  # fmt: skip
    if gradients is None:
        return found
    for target, gradient in zip(gradients, found, strict=True):
        if target is not None and target is not gradient:
            np.copyto(target, gradient)
    pairs = zip(gradients, found, strict=True)
    return AttentionGradients(*[new if mine is None else mine for mine, new in pairs])


def attention_backward(*arrays: Array, **arguments: Any) -> AttentionGradients:
    """Compute gradients from the results of the core's forward half, without checks."""
    return take_gradients(
        _core._attention_backward, *arrays, row_sums=lambda rows: rows.sum(axis=-1), **arguments
    )


def _check_gradients(gradients: AttentionGradients, names: tuple[str, ...], given: dict[str, Any]) -> None:
    """Check that the arrays to write to overlap neither one another nor an array that the call reads."""
    if not isinstance(gradients, AttentionGradients):
        raise TypeError(f"gradients must be an AttentionGradients, got {type(gradients).__name__}")
    readers = {name: as_array(name, x) for name, x in given.items() if hasattr(x, "__dlpack__")}
    for name, target in gradients._asdict().items():
        if target is None:
            continue
        if name not in names or given.get(name) is None:
            raise ValueError(f"gradients has an array for {name}, which wrt does not name")
        _check_target(f"gradients.{name}", target, as_array(name, given[name]))
        for other, x in readers.items():
            _check_overlap(f"gradients.{name}", target, other, x)
        readers[f"gradients.{name}"] = target


def _check_target(name: str, target: Array, given: Array) -> None:
    dtype = gradient_dtype(given)
    if not isinstance(target, np.ndarray) or isinstance(target, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name} must be a plain array of shape {given.shape} and dtype {dtype}, "
                        f"got {type(target).__name__}")  # fmt: skip
    if (target.shape, target.dtype) != (given.shape, dtype):
        raise ValueError(f"{name} must be an array of shape {given.shape} and dtype {dtype}, "
                         f"got {target.dtype} of shape {target.shape}")  # fmt: skip
    if not target.flags.writeable:
        raise ValueError(f"{name} is read-only")
    reach = target.itemsize  # each stride must exceed the extent of all axes with smaller strides
    axes = zip(map(abs, target.strides), target.shape, strict=True)
    for stride, n in sorted(axis for axis in axes if axis[1] > 1):
        if stride < reach and target.size > 0:
            raise ValueError(f"{name} overlaps itself in memory: several of its elements are one")
        reach += (n - 1) * stride


def _check_overlap(name: str, target: Array, other_name: str, other: Array) -> None:
    try:
        shared = np.shares_memory(target, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type] # NumPy's stub has 0, -1
    except np.exceptions.TooHardError:
        raise ValueError(f"cannot tell whether {name} overlaps {other_name}: their strides are too intricate; "
                         f"pass a plain {name}") from None  # fmt: skip
    if shared:
        raise ValueError(f"{name} overlaps {other_name} in memory")
