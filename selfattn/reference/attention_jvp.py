"""Tangents of attention in plain NumPy: every line of the forward and of the backward pass, differentiated once more.

X' is the tangent of X: how X changes along given tangents of the inputs. Shape letters, precision, NaN: see
:mod:`selfattn.reference`. The derivation is in docs/theory/second_derivatives.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._gradient_tuples import AttentionGradients
from selfattn.reference.arrays import Array
from selfattn.reference.attention import (
    AttentionValues,
    attend,
    distances,
    dot_products,
    drop_weights,
    weighted_sum,
)
from selfattn.reference.attention_vjp import like_inputs, sum_by_offset
from selfattn.reference.call import Call, attention_call, of_pairs

Tangents = Sequence[npt.ArrayLike | None] | Mapping[str, npt.ArrayLike | None]


@np.errstate(all="ignore")
def scaled_dot_product_attention_jvp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    tangents: Tangents,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Compute attention, and how it changes along tangents of its inputs.

    With P the weights, all matrices per head::

        S'   = scale * (Q' @ K.T + Q @ K'.T)
        S'   = S' * (1 - (s / c)**2)               # the derivative of softcap, s the capped scores
        S'   = S' - slope' * distance + mask' + bias' + offset_bias'    # 0 for a forbidden pair
        lse' = sum(P * S', axis=-1) + exp(sink - lse) * sink'
        P'   = P * (S' - lse')
        O'   = dropped(P') @ V + dropped(P) @ V'

    The results are ``(out, out')``, with ``return_lse`` ``((out, lse), (out', lse'))``.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.zeros((1, 1)), np.array([[1.0], [-1.0]]), np.array([[10.0], [20.0]])
    >>> out, out_tangent = scaled_dot_product_attention_jvp(query, key, value, ([[1.0]], None, None))
    >>> out, out_tangent  # more of the first key: nearer to its value
    (array([[15.]]), array([[-5.]]))
    """
    inputs = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, **options}
    call = attention_call(**inputs, dropout_p=dropout_p, is_causal=is_causal)
    at = attend(call, dot_products(call.query, call.key))
    dot = attend_tangents(call, tangents_as_call(tangents, inputs, call), at)
    out, out_tangent = (x.output.astype(call.result_dtype, order="C") for x in (at, dot))
    return ((out, at.lse), (out_tangent, dot.lse)) if return_lse else (out, out_tangent)


def attend_tangents(call: Call, moved: Call, at: AttentionValues) -> AttentionValues:
    """Differentiate :func:`attend`, line by line, at its values and along the tangents ``moved``."""
    scaled = call.scale * (dot_products(moved.query, call.key) + dot_products(call.query, moved.key))
    if call.softcap is not None:
        scaled = scaled * (1 - (at.scaled_scores / call.softcap) ** 2)
    masked = scaled
    if moved.alibi_slopes is not None:
        masked = masked - moved.alibi_slopes[..., None, None] * distances(call)
    if moved.bias is not None:
        masked = masked + moved.bias
    if moved.offset_bias is not None:
        masked = masked + of_pairs(moved.offset_bias, *masked.shape[-2:])
    masked = np.where(call.allowed, masked, 0)

    lse = np.where(at.weights != 0, at.weights * masked, 0).sum(axis=-1)
    if moved.sinks is not None:
        lse = lse + sink_share(call, at) * moved.sinks[..., None]
    weights = np.where(call.allowed, at.weights * (masked - lse[..., None]), 0)
    dropped = drop_weights(weights, call.keep, call.dropout_p)
    output = weighted_sum(dropped, call.value, call.allowed)
    output = output + weighted_sum(at.dropped_weights, moved.value, call.allowed)
    return AttentionValues(scaled, masked, weights, lse, dropped, output)


@np.errstate(all="ignore")
def scaled_dot_product_attention_hvp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    grad_out: npt.ArrayLike,
    tangents: Tangents,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    grad_out_tangent: npt.ArrayLike | None = None,
    grad_lse: npt.ArrayLike | None = None,
    grad_lse_tangent: npt.ArrayLike | None = None,
    **options: Any,
) -> tuple[AttentionGradients, AttentionGradients]:
    """Compute the gradients of attention, and how they change along tangents of its inputs and of ``grad_out``.

    Each line of the vjp, and its tangent by the product rule::

        delta = sum(O * dO) - dlse         delta' = sum(O' * dO + O * dO') - dlse'
        dV = dropped(P).T @ dO             dV' = dropped(P').T @ dO + dropped(P).T @ dO'
        dP = kept(dO @ V.T)                dP' = kept(dO' @ V.T + dO @ V'.T)
        dS = P * (dP - delta)              dS' = P' * (dP - delta) + P * (dP' - delta')
        dsink = -share * delta             dsink' = -share * ((sink' - lse') * delta + delta')
        gain = 1 - (s / c)**2              gain' = -2 * s * s' / c**2
        dX = dS * gain                     dX' = dS' * gain + dS * gain'
        dQ = scale * dX @ K                dQ' = scale * (dX' @ K + dX @ K')
        dK = scale * dX.T @ Q              dK' = scale * (dX'.T @ Q + dX.T @ Q')

    where share is exp(sink - lse); the gradients of masks, biases and slopes are sums of dS, their tangents of dS'.

    Examples
    --------
    The tangents of all gradients are the product of a tangent with the Hessian, which is symmetric:

    >>> import numpy as np
    >>> q, k, v, u, w, d_out = np.random.default_rng(0).standard_normal((6, 3, 2))
    >>> _, along_u = scaled_dot_product_attention_hvp(q, k, v, d_out, (u, None, None))
    >>> _, along_w = scaled_dot_product_attention_hvp(q, k, v, d_out, (None, w, None))
    >>> np.allclose((along_u.key * w).sum(), (along_w.query * u).sum())
    True
    """
    inputs = {"query": query, "key": key, "value": value, "attn_mask": attn_mask, **options}
    call = attention_call(**inputs, dropout_p=dropout_p, is_causal=is_causal)
    moved = tangents_as_call(tangents, inputs, call)
    at = attend(call, dot_products(call.query, call.key))
    dot = attend_tangents(call, moved, at)
    d_out, d_out_dot = (of_rows(x, at.output, at) for x in (grad_out, grad_out_tangent))
    d_lse, d_lse_dot = (of_rows(x, at.lse, at) for x in (grad_lse, grad_lse_tangent))

    delta = row_dot(at.output, d_out) - d_lse
    delta_dot = row_dot(dot.output, d_out) + row_dot(at.output, d_out_dot) - d_lse_dot
    d_value = to_keys(at.dropped_weights, d_out, call)
    d_value_dot = to_keys(dot.dropped_weights, d_out, call) + to_keys(at.dropped_weights, d_out_dot, call)
    gap = kept(d_out, call.value, call) - delta[..., None]
    gap_dot = kept(d_out_dot, call.value, call) + kept(d_out, moved.value, call) - delta_dot[..., None]
    d_scores = np.where(call.allowed, at.weights * gap, 0)
    d_scores_dot = np.where(call.allowed, dot.weights * gap + at.weights * gap_dot, 0)

    found, found_dot = (
        {"value": d_v, "attn_mask": d_s, "bias": d_s, "offset_bias": sum_by_offset(d_s)}
        | {"alibi_slopes": -(d_s * distances(call)).sum(axis=(-2, -1))}
        for d_v, d_s in ((d_value, d_scores), (d_value_dot, d_scores_dot))
    )
    if call.sinks is not None and moved.sinks is not None:
        share, share_dot = sink_share(call, at), moved.sinks[..., None] - dot.lse
        found["sinks"] = -(share * delta).sum(axis=-1)
        found_dot["sinks"] = -(share * (share_dot * delta + delta_dot)).sum(axis=-1)
    if call.softcap is not None:
        gain = 1 - (at.scaled_scores / call.softcap) ** 2
        gain_dot = -2 * at.scaled_scores * dot.scaled_scores / call.softcap**2
        d_scores_dot = np.where(call.allowed, d_scores_dot * gain + d_scores * gain_dot, 0)
        d_scores = np.where(call.allowed, d_scores * gain, 0)
    d_scores, d_scores_dot = call.scale * d_scores, call.scale * d_scores_dot
    found["query"] = weighted_sum(d_scores, call.key, call.allowed)
    found_dot["query"] = weighted_sum(d_scores_dot, call.key, call.allowed)
    found_dot["query"] += weighted_sum(d_scores, moved.key, call.allowed)
    found["key"] = to_keys(d_scores, call.query, call)
    found_dot["key"] = to_keys(d_scores_dot, call.query, call) + to_keys(d_scores, moved.query, call)
    return like_inputs(found, **inputs), like_inputs(found_dot, **inputs)


def tangents_as_call(tangents: Tangents, inputs: dict[str, Any], call: Call) -> Call:
    """Return the tangents in the places of the inputs, broadcast as these; those that are not given are zeros."""
    names = AttentionGradients._fields
    given = tangents if isinstance(tangents, Mapping) else dict(zip(names, tangents, strict=False))
    moved: dict[str, Any] = {}
    for name in names:
        x = inputs.get(name)
        if x is not None and np.asarray(x).dtype != np.bool_:
            moved[name] = np.zeros(np.shape(x)) if given.get(name) is None else given[name]
    return attention_call(**moved, enable_gqa=inputs.get("enable_gqa", False), compute_dtype=call.query.dtype)


def sink_share(call: Call, at: AttentionValues) -> Array:
    """Return the weight of the sink of each row, (..., L); 0 for a row with nothing to attend to."""
    assert call.sinks is not None
    return np.where(at.lse != -np.inf, np.exp(call.sinks[..., None] - at.lse), 0)


def of_rows(x: npt.ArrayLike | None, like: Array, at: AttentionValues) -> Array:
    """Return the gradient of a result, or zeros; 0 for a row with nothing to attend to."""
    alive = (at.lse != -np.inf).reshape(at.lse.shape + (1,) * (like.ndim - at.lse.ndim))
    given = np.zeros_like(like) if x is None else np.asarray(x, like.dtype)
    return np.where(alive, given, 0)


def row_dot(out: Array, d_out: Array) -> Array:
    """Return ``sum(O * dO)`` of each row; where the output is 0, as with a sink alone, NaN in dO adds nothing."""
    return np.asarray(np.where(out != 0, out * d_out, 0).sum(axis=-1))


def kept(rows: Array, value: Array, call: Call) -> Array:
    """Return ``dropped(rows @ value.T)`` of the pairs that are allowed, else 0."""
    products = np.where(call.allowed, rows @ value.swapaxes(-1, -2), 0)
    return drop_weights(products, call.keep, call.dropout_p)


def to_keys(weights: Array, rows: Array, call: Call) -> Array:
    """Return ``weights.T @ rows``, (..., S, …): for each key a sum over the queries that see it."""
    return weighted_sum(weights.swapaxes(-1, -2), rows, call.allowed.swapaxes(-1, -2))
