"""Attention over packed sequences of different lengths, in the C core, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array
from selfattn._gradient_tuples import check_wrt
from selfattn.functional._options import VarlenOptions, accept_options
from selfattn.functional.attention import NAMES, WRT, Pullback, attention_vjp, check_float_mask


@accept_options(VarlenOptions)
def varlen_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    attn_mask: Sequence[npt.ArrayLike | None] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Unpack[VarlenOptions],
) -> Any:
    """Compute attention over n packed sequences of any lengths, each of which attends only to itself.

    There is no padding. The threads share the tasks of all sequences, the costliest first. Without dropout, every
    sequence's result has the bits that :func:`scaled_dot_product_attention` gives for it alone.

    Parameters
    ----------
    query : array_like, shape (total_q, H, E)
        The queries of all sequences: rows, heads, width.
    key : array_like, shape (total_k, H, E)
    value : array_like, shape (total_k, H, Ev)
        With `enable_gqa` they may have fewer heads.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (n + 1,)
        Offsets from 0 to total_q and total_k, which must not decrease. Sequence s has the queries from
        ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1] - 1``, and the same for keys; it may have no queries or no keys.
    attn_mask : list of (array_like or None), optional
        One for each sequence, since their shapes differ: each broadcastable to (H, L, S) of its sequence,
        boolean (True = attend) or float (added to the scaled scores).
    return_lse : bool, default False
        Append the log-sum-exp.
    out : ndarray, optional
        The array for the output: exact shape and dtype, writable, without overlap with an input. It is returned.

    Returns
    -------
    out : ndarray, shape (total_q, H, Ev)
        The promoted dtype of the inputs. Queries of a sequence without keys get 0.
    lse : ndarray, shape (H, total_q)
        With `return_lse`: float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError, MemoryError, KeyboardInterrupt
        As :func:`scaled_dot_product_attention`; offsets that do not begin with 0, that decrease, or that do not
        end with the number of rows.

    Notes
    -----
    The options hold within each sequence: ``causal='lower_right'`` puts its last query on its last key.
    ``alibi_slopes`` and ``sinks`` may have shape (n, H), where sequences differ. Dropout counts as in a
    batch: rows and keys within the sequence, and head h of sequence s is head s · H + h.

    The arguments are those of FlashAttention's ``flash_attn_varlen_func``, without the lengths of the longest
    sequences. Its ``causal=True`` is ``causal='lower_right'`` here.

    References
    ----------
    T. Dao, "FlashAttention-2", 2023, section 3.3 on sharing the work, and the ``flash-attn`` package.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> rng = np.random.default_rng(0)
    >>> offsets = np.array([0, 3, 3, 8])  # three sequences: 3 rows, none, 5 rows
    >>> q, k, v = rng.standard_normal((3, 8, 2, 4))  # 8 rows, 2 heads
    >>> out = sa.varlen_attention(q, k, v, offsets, offsets, is_causal=True)
    >>> last = [x[3:8].swapaxes(0, 1) for x in (q, k, v)]  # (2, 5, 4)
    >>> alone = sa.scaled_dot_product_attention(*last, is_causal=True)
    >>> np.array_equal(out[3:8].swapaxes(0, 1), alone)
    True
    """
    return _core._varlen_attention(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        attn_mask=attn_mask,
        return_lse=return_lse,
        out=out,
        **options,
    )


@accept_options(VarlenOptions, varlen_attention)
def varlen_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    attn_mask: Sequence[npt.ArrayLike | None] | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    wrt: Sequence[str] = WRT,
    **options: Unpack[VarlenOptions],
) -> tuple[Any, Pullback]:
    """Compute attention over packed sequences, and a function that pulls gradients back through it.

    Parameters
    ----------
    return_lse, wrt
        See :func:`scaled_dot_product_attention_vjp`.

    Returns
    -------
    out : ndarray, shape (total_q, H, Ev), or (out, lse)
    pullback : callable
        As that of :func:`scaled_dot_product_attention_vjp`; it takes gradients of the shapes (total_q, H, Ev)
        and (H, total_q), and the gradient of ``attn_mask`` is a list. The pullback copies the offsets; the other
        arguments, and ``out``, must not change until its last call.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4. The derivation is in docs/theory/backward.md.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 2, 4))
    >>> out, pullback = sa.varlen_attention_vjp(q, k, v, [0, 3, 8], [0, 3, 8])
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dq.shape
    (8, 2, 4)
    >>> np.allclose(dv[:3].sum(axis=0), 3)  # three rows of weights with sum 1
    True
    """
    names = check_wrt(wrt, NAMES[:-2])  # biases are for dense calls
    if "attn_mask" in names and isinstance(attn_mask, Sequence):
        for s, mask in enumerate(attn_mask):
            check_float_mask(f"attn_mask[{s}]", mask)
    offsets = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    given = {"attn_mask": attn_mask, "dropout_p": 0.0, **offsets, **options}
    return attention_vjp((query, key, value), names, return_lse=return_lse, out=out, **given)
