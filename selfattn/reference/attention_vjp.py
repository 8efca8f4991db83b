"""The gradients of attention in plain NumPy: every line of the forward pass, differentiated.

Shape letters, precision, NaN: see :mod:`selfattn.reference`. The derivation is in docs/theory/backward.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._gradient_tuples import AttentionGradients
from selfattn.reference.arrays import Array, like
from selfattn.reference.attention import attend, distances, dot_products, drop_weights, weighted_sum
from selfattn.reference.call import attention_call


@np.errstate(all="ignore")
def scaled_dot_product_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    **options: Any,
) -> tuple[Any, Callable[..., AttentionGradients]]:
    """Compute attention, and a function that pulls gradients of its output back to its inputs.

    With P the weights, all matrices per head, and dX the gradient with respect to X::

        delta = sum(O * dO, axis=-1) - dlse        # (..., L)
        dV    = dropped(P).T @ dO
        dP    = kept(dO @ V.T)                     # 0 where dropped, times 1 / (1 - p) elsewhere
        dS    = P * (dP - delta)                   # 0 for a forbidden pair
        dmask = dbias = dS    doffset_bias = sums of dS along the diagonals
        dslope = -sum(dS * distance)    dsink = -exp(sink - lse) * delta
        dS    = dS * (1 - (s / c)**2)              # the derivative of softcap, s the capped scores
        dQ    = scale * dS @ K                     dK = scale * dS.T @ Q

    and at the end a sum over broadcast axes.

    The pullback takes ``(grad_out, grad_lse=None)`` and returns the gradients of all given arguments that have one, in
    the order of the arguments.

    References
    ----------
    Dao et al., "FlashAttention", 2022, appendix B.2.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> out, pullback = scaled_dot_product_attention_vjp(x, x, x)
    >>> dq, dk, dv = pullback(np.ones((2, 2)))
    >>> dv.sum()  # the weights of each of 2 rows sum to 1, in 2 columns
    np.float64(4.0)
    """
    call = attention_call(query, key, value, attn_mask, dropout_p, is_causal, **options)
    capped, _, weights, lse, dropped, output = attend(call, dot_products(call.query, call.key))
    compute = output.dtype
    zero = compute.type(0)

    @np.errstate(all="ignore")
    def pullback(grad_out: npt.ArrayLike, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        alive = (lse != -np.inf)[..., None]
        d_out = np.where(alive, np.asarray(grad_out, compute), zero)
        meets = alive & (output != 0)  # the output of a row with only a sink is 0, and 0 · NaN would be NaN
        delta = np.where(meets, output * d_out, zero).sum(axis=-1)
        if grad_lse is not None:
            delta = delta - np.where(alive[..., 0], np.asarray(grad_lse, compute), zero)

        allowed_t = call.allowed.swapaxes(-1, -2)
        d_value = weighted_sum(dropped.swapaxes(-1, -2), d_out, allowed_t)
        d_weights = drop_weights(
            np.where(call.allowed, d_out @ call.value.swapaxes(-1, -2), zero), call.keep, call.dropout_p
        )
        d_scores = np.where(call.allowed, weights * (d_weights - delta[..., None]), zero)

        found = {"attn_mask": d_scores, "bias": d_scores, "offset_bias": sum_by_offset(d_scores)}
        found["alibi_slopes"] = -(d_scores * distances(call)).sum(axis=(-2, -1))
        if call.sinks is not None:
            share = np.where(alive[..., 0], np.exp(call.sinks[..., None] - lse), zero)
            found["sinks"] = -(share * delta).sum(axis=-1)
        if call.softcap is not None:
            gain = 1 - (capped / compute.type(call.softcap)) ** 2
            d_scores = np.where(call.allowed, d_scores * gain, zero)
        factor = compute.type(call.scale)
        d_query = factor * weighted_sum(d_scores, call.key, call.allowed)
        d_key = factor * weighted_sum(d_scores.swapaxes(-1, -2), call.query, allowed_t)
        found |= {"query": d_query, "key": d_key, "value": d_value}
        return like_inputs(found, query=query, key=key, value=value, attn_mask=attn_mask, **options)

    out = output.astype(call.result_dtype, order="C")
    return ((out, lse) if return_lse else out), pullback


def sum_by_offset(pairs: Array) -> Array:
    """Sum (..., L, S) along its diagonals: (..., L + S - 1), the transpose of `of_pairs`; empty if L or S is 0."""
    *lead, n_queries, n_keys = pairs.shape
    sums = np.zeros((*lead, n_queries + n_keys - 1 if n_queries and n_keys else 0), pairs.dtype)
    for i in range(n_queries):
        start = n_queries - 1 - i
        sums[..., start : start + n_keys] += pairs[..., i, :]
    return sums


def like_inputs(found: dict[str, Array], **inputs: Any) -> AttentionGradients:
    """Return the gradients of the inputs that are given, in their shapes and dtypes."""
    gradients = {}
    for name in AttentionGradients._fields:
        x = inputs.get(name)
        if x is None or np.asarray(x).dtype == np.bool_:
            continue
        dx = found[name]
        if inputs.get("enable_gqa") and name in ("key", "value"):  # query heads share a key head
            *lead, heads, rows, width = dx.shape
            shared = np.shape(x)[-3]
            dx = dx.reshape(*lead, shared, heads // max(shared, 1), rows, width).sum(axis=-3)
        gradients[name] = like(x, dx, inputs.get("compute_dtype"))
    return AttentionGradients(**gradients)
