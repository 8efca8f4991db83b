"""Attention in plain NumPy: the definition, line by line.

Shape letters, precision, NaN: see :mod:`selfattn.reference`; `call.py` defines which pairs masks allow.

References
----------
Vaswani et al., "Attention Is All You Need", 2017, equation 1. ALiBi: Press et al., "Train Short, Test Long", 2022,
section 3. Grouped queries: Ainslie et al., "GQA", 2023, section 2.2. Soft-capping: Gemma Team, "Gemma 2", 2024,
section 2. Sinks: Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2024, equation 2 gives the
idea (a one in the denominator); here its logarithm is learned per head, as in OpenAI's gpt-oss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn.reference.arrays import Array, convert
from selfattn.reference.call import Call, attention_call, of_pairs


@np.errstate(all="ignore")
def scaled_dot_product_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> Any:
    """Compute for every query a weighted mean of the values; those of similar keys have large weights.

    ::

        scores  = scale * query @ key.T    # soft-capped; + ALiBi, mask, biases; -inf where a pair is forbidden
        weights = softmax(scores)          # a sink adds to the denominator; dropout comes after it
        output  = weights @ value

    Two options exist only here: ``compute_dtype`` (see the top of the package), and ``first_head``, the number of the
    first head in dropout (see :func:`dropout_keep_mask`).

    Examples
    --------
    The query fits the first key better, so the result is nearer to the first value:

    >>> import numpy as np
    >>> query, key = np.array([[1.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 2.0]])
    >>> value = np.array([[10.0], [20.0]])
    >>> out, weights = scaled_dot_product_attention(query, key, value, return_weights=True)
    >>> weights.round(3), out.round(3)
    (array([[0.804, 0.196]]), array([[11.956]]))
    >>> scaled_dot_product_attention(query, key, value, attn_mask=[[False, True]])
    array([[20.]])
    """
    call = attention_call(query, key, value, attn_mask, dropout_p, is_causal, **options)
    found = attend(call, dot_products(call.query, call.key))
    results = [found.output.astype(call.result_dtype, order="C")]
    if return_lse:
        results.append(found.lse)
    if return_weights:
        results.append(found.dropped_weights.astype(call.result_dtype, order="C"))
    return results[0] if len(results) == 1 else tuple(results)


class AttentionValues(NamedTuple):
    """The results of :func:`attend`, in their order."""

    scaled_scores: Array  # (..., L, S), soft-capped too
    masked_scores: Array  # (..., L, S)
    weights: Array  # (..., L, S)
    lse: Array  # (..., L)
    dropped_weights: Array  # (..., L, S)
    output: Array  # (..., L, Ev)


def attend(call: Call, scores: Array) -> AttentionValues:
    """Compute attention from the products of queries and keys, (..., L, S), or from other scores."""
    scaled = scaled_scores(scores, call.scale, call.softcap)
    masked = masked_scores(scaled, call)
    weights, lse = attention_weights(masked, call.allowed, call.sinks)
    dropped = drop_weights(weights, call.keep, call.dropout_p)
    output = weighted_sum(dropped, call.value, call.allowed)
    return AttentionValues(scaled, masked, weights, lse, dropped, output)


def dot_products(query: Array, key: Array) -> Array:
    """Multiply every query by every key: (..., L, E) and (..., S, E) give (..., L, S)."""
    scores: Array = query @ key.swapaxes(-1, -2)
    return scores


def scaled_scores(scores: Array, scale: float, softcap: float | None) -> Array:
    """Multiply the scores (..., L, S) by ``scale``, then bound them softly to ±``softcap``.

    Without the scale, scores grow like sqrt(E) for random queries and keys, and the softmax saturates.
    """
    scores = scores * scores.dtype.type(scale)
    if softcap is not None:
        cap = scores.dtype.type(softcap)
        scores = cap * np.tanh(scores / cap)
    return scores


def masked_scores(scores: Array, call: Call) -> Array:
    """Add ALiBi's distances, the float mask or the bias, and that by offset; then forbid pairs.

    A forbidden score is replaced by -inf, not added to it: NaN + -inf would still be NaN.
    """
    if call.alibi_slopes is not None:
        scores = scores - call.alibi_slopes[..., None, None] * distances(call)
    if call.bias is not None:
        scores = scores + call.bias
    if call.offset_bias is not None:
        scores = scores + of_pairs(call.offset_bias, *scores.shape[-2:])
    return np.where(call.allowed, scores, scores.dtype.type(-np.inf))


def distances(call: Call) -> Array:
    """Return ``|i + offset - j|``, (L, S): query i has the position of key i + ``offset``."""
    n_queries, n_keys = call.allowed.shape[-2:]
    i, j = np.arange(n_queries)[:, None] + call.offset, np.arange(n_keys)
    return np.asarray(np.abs(i - j), call.query.dtype)


def attention_weights(scores: Array, allowed: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Take the softmax over the keys: weights (..., L, S), and the log of their denominators, lse (..., L).

    ``exp(score) / sum(exp(score))``, after the maximum is subtracted from the scores, which only avoids overflow.
    ``sinks`` (...,) add ``exp(sink)`` to the denominator. If no key is allowed (or all allowed scores are -inf) and
    there is no sink, the denominator is 0: then weights are 0 and lse is -inf. A NaN score makes the weights of its
    row NaN, but those of forbidden keys stay 0.
    """
    sink = scores.dtype.type(-np.inf) if sinks is None else sinks[..., None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(top == -np.inf, scores.dtype.type(0), top)  # -inf - -inf would be NaN
    exps = np.where(allowed, np.exp(scores - top), scores.dtype.type(0))
    total = exps.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    weights = np.where(allowed & (total != 0), exps / total, scores.dtype.type(0))
    return weights, (np.log(total) + top)[..., 0]


def drop_weights(weights: Array, keep: Array | None, dropout_p: float) -> Array:
    """Set the weights to zero where ``keep`` is False and divide the others by 1 - ``dropout_p``.

    So their expected sum stays the same (Srivastava et al., "Dropout", 2014, section 10). ``keep`` is None
    when there is no dropout. A dropped weight is weight · 0: NaN stays NaN.
    """
    if keep is None:
        return weights
    kept: Array = weights / weights.dtype.type(1.0 - dropout_p)
    dropped: Array = weights * weights.dtype.type(0)
    return np.where(keep, kept, dropped)


def weighted_sum(weights: Array, value: Array, allowed: Array) -> Array:
    """Add up ``weights @ value``, (..., L, Ev); a pair that is not ``allowed`` contributes nothing at all.

    Its weight is 0, but 0 · NaN is NaN. So NaN and infinite values are replaced by 0, and then added key by key for the
    queries that may see them.
    """
    finite = np.isfinite(value)
    output: Array = weights @ np.where(finite, value, value.dtype.type(0))
    rest = np.where(finite, value.dtype.type(0), value)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
        term = weights[..., :, j, None] * rest[..., None, j, :]
        output += np.where(allowed[..., :, j, None], term, value.dtype.type(0))
    return output


def weighted_values(weights: Array, value: Array, allowed: Array) -> Array:
    """Return the terms of :func:`weighted_sum`, not yet added up over the keys: shape (..., L, S, Ev)."""
    terms = weights[..., :, :, None] * value[..., None, :, :]
    return np.where(allowed[..., None], terms, value.dtype.type(0))


@np.errstate(all="ignore")
def merge_attention(
    outs: Sequence[npt.ArrayLike],
    lses: Sequence[npt.ArrayLike],
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Merge attention over several parts of the keys into the result of one call over all of them.

    With ``lse = log(sum_n exp(lse_n))`` the result is ``sum_n exp(lse_n - lse) * out_n``.

    A part whose lse is -inf has no keys; its output is ignored.

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2; Dao et al.,
    "FlashAttention", 2022, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.ones((1, 2)), np.array([[3.0, 1], [0, 1], [2, 2]]), np.array([[1.0], [2], [4]])
    >>> parts = [scaled_dot_product_attention(query, key[s], value[s], return_lse=True)
    ...          for s in (slice(0, 2), slice(2, 3))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> np.allclose(out, scaled_dot_product_attention(query, key, value))
    True
    """
    arrays, result = convert(compute_dtype, *outs)
    out_n = np.stack(arrays)
    lse_n = np.stack([np.asarray(lse, out_n.dtype) for lse in lses])
    top = lse_n.max(axis=0)
    top = np.where(top == -np.inf, lse_n.dtype.type(0), top)
    parts = np.exp(lse_n - top)
    total = parts.sum(axis=0)
    share = np.where(total == 0, lse_n.dtype.type(0), parts / total)[..., None]
    terms = np.where(lse_n[..., None] == -np.inf, lse_n.dtype.type(0), share * out_n)
    return terms.sum(axis=0).astype(result), np.log(total) + top
