"""The arguments of attention in one form: which pairs of a query and a key are allowed, heads, dropout's draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn.reference.arrays import Array, convert
from selfattn.reference.dropout import dropout_keep_mask, seed_of


@dataclass(frozen=True)
class Call:
    """The arguments of a call of :func:`scaled_dot_product_attention`, as :func:`attention_call` returns them.

    Leading dims ``...`` are broadcast and the same for all; arrays of floats are in the precision of the computation.
    """

    query: Array  # (..., L, E)
    key: Array  # (..., S, E)
    value: Array  # (..., S, Ev)
    scale: float
    softcap: float | None
    alibi_slopes: Array | None  # (...,)
    bias: Array | None  # (..., L, S), the float mask or the bias
    offset_bias: Array | None  # (..., L + S - 1), by j - i + L - 1
    allowed: Array  # (..., L, S), bool: all masks combined
    sinks: Array | None  # (...,)
    keep: Array | None  # (..., L, S), bool: weights not dropped
    dropout_p: float
    offset: int  # query i has the position of key i + offset
    result_dtype: np.dtype[Any]


def attention_call(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: str | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    block_mask: Any = None,
    bias: npt.ArrayLike | None = None,
    offset_bias: npt.ArrayLike | None = None,
    rng: Any = None,
    compute_dtype: npt.DTypeLike | None = None,
    first_head: int = 0,
) -> Call:
    """Return the arguments of :func:`scaled_dot_product_attention` in one form.

    Query i has the position p = i + ``offset``. It may attend to key j if ``j <= p`` (causal), ``p - left <= j <= p +
    right`` (``window``) and ``j < key_length``, and if the masks allow the pair.
    """
    (q, k, v), result_dtype = convert(compute_dtype, query, key, value)
    if enable_gqa:  # each key head serves consecutive query heads
        k, v = (np.repeat(x, q.shape[-3] // max(x.shape[-3], 1), axis=-3) for x in (k, v))
    lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (np.copy(np.broadcast_to(x, lead + x.shape[-2:])) for x in (q, k, v))
    n_queries, n_keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    offset = n_keys - n_queries if causal == "lower_right" else 0
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)

    allowed = np.ones((*lead, n_queries, n_keys), np.bool_)
    if is_causal or causal:
        allowed &= j <= i
    left, right = (None, None) if window is None else window
    if left is not None:
        allowed &= i - j <= left
    if right is not None:
        allowed &= j - i <= right
    if key_lengths is not None:
        allowed &= j < per_head(key_lengths, lead)[..., None, None]
    if block_mask is not None:
        allowed &= block_mask.to_dense(n_queries, n_keys)
    added = None  # bias, beside which the mask is boolean, or the float mask
    for given in (attn_mask, bias):
        if given is not None:
            mask = np.broadcast_to(given, allowed.shape)
            if mask.dtype != np.bool_:
                added, mask = finite_as_finite(mask, q.dtype), mask != -np.inf
            allowed &= mask
    by_offset = None
    if offset_bias is not None:
        numbers = np.asarray(offset_bias)
        by_offset = finite_as_finite(np.broadcast_to(numbers, (*lead, numbers.shape[-1])), q.dtype)
        allowed &= of_pairs(by_offset, n_queries, n_keys) != -np.inf

    keep = None
    if dropout_p > 0:
        keep = dropout_keep_mask(seed_of(rng), float(dropout_p), lead, n_queries, n_keys, first_head)
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0
    return Call(
        query=q,
        key=k,
        value=v,
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        alibi_slopes=None if alibi_slopes is None else per_head(alibi_slopes, lead).astype(q.dtype),
        bias=added,
        offset_bias=by_offset,
        allowed=allowed,
        sinks=None if sinks is None else per_head(sinks, lead).astype(q.dtype),
        keep=keep,
        dropout_p=float(dropout_p),
        offset=offset,
        result_dtype=result_dtype,
    )


def per_head(x: npt.ArrayLike, lead: tuple[int, ...]) -> Array:
    """Return a number for each head, of the shape of the leading dims; without any, (1,) means () too."""
    return np.broadcast_to(x, lead or np.shape(x)).reshape(lead)


def of_pairs(by_offset: Array, n_queries: int, n_keys: int) -> Array:
    """Give each pair of a query i and a key j its number in (..., L + S - 1), that at j - i + L - 1."""
    pairs: Array = by_offset[..., np.arange(n_keys) - np.arange(n_queries)[:, None] + n_queries - 1]
    return pairs


def finite_as_finite(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert a float mask or a bias; its finite values stay finite."""
    converted, limit = x.astype(dtype), np.finfo(dtype).max
    return np.where(np.isfinite(x), np.clip(converted, -limit, limit), converted)
