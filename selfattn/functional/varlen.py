"""Attention over ragged batches: packed sequences of any lengths, in the C core, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn.functional._gradients import (
    apart,
    as_gradient,
    check_names,
    gradient_dtype,
    round_into,
    rounded,
    row_shares,
    settle_dropout,
)
from selfattn.random import TorchGenerator
from selfattn.reference.attention_vjp import AttentionGradients, sum_to_shape

__all__ = ["varlen_attention", "varlen_attention_vjp"]

Array: TypeAlias = npt.NDArray[Any]


def varlen_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    attn_mask: Sequence[npt.ArrayLike | None] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    rng: int | np.random.Generator | TorchGenerator | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> Any:
    """Compute attention over n sequences of any lengths, packed one behind the other; each sees itself alone.

    Nothing is padded: the work is that of the sequences. The tasks of all of them are shared among the threads,
    the costliest first. Every sequence's result has the bits that :func:`scaled_dot_product_attention` gives for
    it alone, without dropout.

    Parameters
    ----------
    query : array_like, shape (total_q, H, E)
        The queries of all sequences: rows, heads, width.
    key : array_like, shape (total_k, H, E)
    value : array_like, shape (total_k, H, Ev)
        With `enable_gqa` they may have fewer heads.
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (n + 1,)
        Offsets from 0 to total_q and total_k, never falling. Sequence s has the queries from
        ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1] - 1``, and the keys likewise; either may be none.
    attn_mask : list of (array_like or None), optional
        One for each sequence, since their shapes differ: each broadcastable to (H, L, S) of its sequence,
        boolean (True = attend) or float (added to the scaled scores).
    dropout_p : float, default 0.0
    is_causal : bool, default False
    scale : float, optional
    enable_gqa : bool, default False
    causal : {None, 'upper_left', 'lower_right'}, optional
    window : (left, right), optional
    softcap : float, optional
        As in :func:`scaled_dot_product_attention`, for each sequence: ``causal='lower_right'`` puts the last
        query of a sequence on its last key.
    alibi_slopes, sinks : array_like, optional
        (H,), or (n, H) where sequences differ.
    rng : int or numpy.random.Generator, optional
        Seed of dropout. Its counter is that of a batch: row and key count within the sequence, and head h of
        sequence s is head s · H + h.
    return_lse : bool, default False
        Append the log-sum-exp.
    out : ndarray, optional
        Where to put the output: exact shape and dtype, writable, without overlap with an input. Returned.
    num_threads : int, optional
        Threads of this call, at most. The bits of the result do not depend on it.

    Returns
    -------
    out : ndarray, shape (total_q, H, Ev)
        The promoted dtype of the inputs. Queries of a sequence without keys get 0.
    lse : ndarray, shape (H, total_q)
        Only with `return_lse`: float64 for float64, else float32.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention`; offsets that do not begin with 0, that fall, or that do not
        end with the number of rows: they are checked before anything is read.
    KeyboardInterrupt
        Ctrl-C during the call, in Python's main thread. What ``out`` holds is then undefined.

    Notes
    -----
    The arguments are those of FlashAttention's ``flash_attn_varlen_func``; the lengths of the longest
    sequences, which that takes besides, are not needed. That always counts from the lower-right
    diagonal: its ``causal=True`` is ``causal='lower_right'`` here.

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
        query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, attn_mask=attn_mask,
        dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, rng=rng,
        return_lse=return_lse, out=out, num_threads=num_threads,
    )  # fmt: skip


def varlen_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    attn_mask: Sequence[npt.ArrayLike | None] | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Literal["upper_left", "lower_right"] | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    rng: int | np.random.Generator | TorchGenerator | None = None,
    return_lse: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
) -> tuple[Any, Callable[..., AttentionGradients]]:
    """Compute attention over packed sequences, and return with it the function that pulls gradients back.

    Parameters
    ----------
    query : array_like, shape (total_q, H, E)
    key : array_like, shape (total_k, H, E)
    value : array_like, shape (total_k, H, Ev)
    cu_seqlens_q, cu_seqlens_k : array_like of int, shape (n + 1,)
    attn_mask, dropout_p, is_causal, scale, enable_gqa, causal, window, softcap, alibi_slopes, sinks
        See :func:`varlen_attention`.
    rng : int or numpy.random.Generator, optional
        The seed of dropout. The pullback drops the same weights.
    return_lse : bool, default False
        Return ``(out, lse)`` in place of ``out``; the pullback then takes the gradient of both.
    out, num_threads
        See :func:`varlen_attention`. ``num_threads`` counts for the pullback as well.
    wrt : sequence of str, default ("query", "key", "value")
        What to differentiate with respect to: also "attn_mask" (float masks), "alibi_slopes", "sinks".
        Gradients that are left out are not computed.

    Returns
    -------
    out : ndarray, shape (total_q, H, Ev), or (out, lse)
    pullback : callable
        ``pullback(grad_out)`` returns :class:`AttentionGradients`, a named tuple; with ``return_lse`` it is
        ``pullback(grad_out, grad_lse)``, of shapes (total_q, H, Ev) and (H, total_q). Each gradient has the
        shape and dtype of its input (float64 for integers); that of ``attn_mask`` is a list. It may be called
        again. It holds references to the arguments and to ``out`` (of 16 bits to one in float32), which must not
        change until then, and copies of the offsets and of what :func:`scaled_dot_product_attention_vjp` copies.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`varlen_attention`; a ``wrt`` that names what has no gradient; in the pullback, a ``grad_out``
        or ``grad_lse`` of another shape than its result, or float64 where that has fewer bits.
    KeyboardInterrupt
        As :func:`scaled_dot_product_attention_vjp`.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4. The derivation is in docs/theory/backward.md.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 8, 2, 4))
    >>> out, pullback = sa.varlen_attention_vjp(q, k, v, [0, 3, 8], [0, 3, 8])
    >>> grads = pullback(np.ones_like(out))
    >>> grads.query.shape
    (8, 2, 4)
    >>> np.allclose(grads.value[:3].sum(axis=0), 3)  # three rows of weights with sum 1
    True
    """
    names = check_names(wrt)
    given = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sinks": sinks}
    for name in names:
        if name in given and given[name] is None:
            raise ValueError(f"wrt names {name}, which was not given")
    if "attn_mask" in names and isinstance(attn_mask, Sequence):
        for s, mask in enumerate(attn_mask):
            if mask is not None and np.asarray(mask).dtype == np.bool_:
                raise ValueError(f"wrt names attn_mask, but attn_mask[{s}] is boolean and has no gradient")
    dropout_p, rng = settle_dropout(dropout_p, rng)
    q, k, v = (x if isinstance(x, np.ndarray) else np.asarray(x) for x in (query, key, value))
    k, v = (apart(x, slice(1, 2)) for x in (k, v))
    options: dict[str, Any] = given | {
        "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa,
        "causal": causal, "window": window, "softcap": softcap, "rng": rng, "num_threads": num_threads,
    }  # fmt: skip
    output, statistics, unrounded, *lse = _core._varlen_forward(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, return_lse=return_lse, out=out,
        unrounded=True, **options,
    )  # fmt: skip
    if unrounded is not output:
        round_into(output, unrounded, num_threads)
    dtype = output.dtype  # the pullback holds the other one alone
    offsets_q, offsets_k = (np.asarray(x).copy() for x in (cu_seqlens_q, cu_seqlens_k))

    @np.errstate(all="ignore")
    def pullback(grad_out: npt.ArrayLike | None, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        """Pull the gradient of the output (and of the log-sum-exp) back to the inputs that wrt names."""
        if grad_lse is not None and not return_lse:
            raise TypeError("grad_lse was given, but the log-sum-exp was not returned: use return_lse=True")
        if grad_out is None and grad_lse is not None:
            grad_out = np.zeros_like(unrounded, dtype)
        grad_out = as_gradient("grad_out", grad_out, dtype)
        grad_lse = None if grad_lse is None else as_gradient("grad_lse", grad_lse, statistics.dtype)
        found = _core._varlen_backward(
            q, k, v, cu_seqlens_q=offsets_q, cu_seqlens_k=offsets_k, out=unrounded, grad_out=grad_out,
            statistics=statistics, grad_lse=grad_lse,
            wrt=sum(1 << n for n, name in enumerate(AttentionGradients._fields) if name in names), **options,
        )  # fmt: skip
        *arrays, masks, slopes, logits = found
        fitted: dict[str, Any] = {
            name: None if raw is None else rounded(raw, gradient_dtype(x), num_threads)
            for name, raw, x in zip(("query", "key", "value"), arrays, (q, k, v), strict=True)
        }
        if masks is not None and attn_mask is not None:
            fitted["attn_mask"] = [
                None if raw is None else raw.astype(gradient_dtype(np.asarray(mask)), copy=False)
                for raw, mask in zip(masks, attn_mask, strict=True)
            ]
        for name, shares in (("alibi_slopes", slopes), ("sinks", logits)):
            if shares is not None:
                fitted[name] = _sum_shares(name, shares, offsets_q, np.asarray(given[name]))
        return AttentionGradients(**fitted)

    return ((output, lse[0]) if return_lse else output), pullback


def _sum_shares(name: str, raw: Array, offsets: Array, given: Array) -> Array:
    """Sum each row's share (total_q, H) over the rows of a sequence, then to the shape that was given."""
    shares = row_shares(name, raw)
    sums = [shares[a:b].sum(axis=0) for a, b in pairwise(offsets)]
    each = np.array(sums).reshape(len(offsets) - 1, shares.shape[1])
    return sum_to_shape(each, given.shape).astype(gradient_dtype(given))
