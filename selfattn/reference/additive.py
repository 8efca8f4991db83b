"""Additive attention in plain NumPy: Bahdanau's score in place of the dot product. See :mod:`selfattn.reference`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._gradient_tuples import AdditiveGradients
from selfattn.reference.arrays import Array, convert, like
from selfattn.reference.attention import AttentionValues, attend, weighted_sum
from selfattn.reference.call import attention_call


def additive_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    w_query: npt.ArrayLike,
    w_key: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    compute_dtype: npt.DTypeLike | None = None,
    **masks: Any,
) -> Any:
    """Compute attention whose score is ``v @ tanh(w_query.T @ query[i] + w_key.T @ key[j])``.

    ``masks`` are ``attn_mask``, ``is_causal``, ``causal``, ``window`` and ``key_lengths`` of
    :func:`~selfattn.reference.scaled_dot_product_attention`.

    References
    ----------
    Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and translate", 2015,
    section 3.1 and appendix A.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.array([[1.0], [2.0]]), np.array([[1.0]])
    >>> additive_attention(x, x, x, w, w, v=[5.0]).round(3)
    array([[1.539],
           [1.505]])
    """
    arrays, result = convert(compute_dtype, query, key, value, w_query, w_key, v)
    found, *_ = _forward(arrays, masks)
    results = [found.output.astype(result), *([found.lse] if return_lse else [])]
    results += [found.weights.astype(result)] if return_weights else []
    return results[0] if len(results) == 1 else tuple(results)


def additive_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    w_query: npt.ArrayLike,
    w_key: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    compute_dtype: npt.DTypeLike | None = None,
    **masks: Any,
) -> tuple[Array, Callable[[npt.ArrayLike], AdditiveGradients]]:
    """Compute additive attention, and a function that pulls a gradient of its output back to its inputs.

    With P the weights, T the tangents ``tanh(Q_i + K_j)`` of the projected queries and keys, and dX the
    gradient with respect to X::

        dS_ij = P_ij * (dP_ij - delta_i)                 # as in attention_vjp.py
        dv    = sum_ij dS_ij * T_ij
        dQ_i  = sum_j dS_ij * v * (1 - T_ij**2)          dK_j = sum_i the same
        dw_query = query.T @ dQ                          dquery = dQ @ w_query.T

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.array([[1.0], [2.0]]), np.array([[1.0]])
    >>> out, pullback = additive_attention_vjp(x, x, x, w, w, v=[5.0])
    >>> pullback(np.ones_like(out)).value.sum().round(6)  # two rows of weights with sum 1
    np.float64(2.0)
    """
    given = query, key, value, w_query, w_key, v
    arrays, result = convert(compute_dtype, *given)
    q, k, values, w_q, w_k, w_v = arrays
    found, tangents, allowed = _forward(arrays, masks)
    out, weights = found.output, found.weights

    @np.errstate(all="ignore")
    def pullback(grad_out: npt.ArrayLike) -> AdditiveGradients:
        d_out = np.asarray(grad_out, out.dtype)
        d_weights = np.where(allowed, d_out @ np.swapaxes(values, -1, -2), 0)
        delta = (out * d_out).sum(axis=-1, keepdims=True)
        d_scores = np.where(allowed, weights * (d_weights - delta), 0)[..., None]
        open_tangents = np.where(d_scores == 0, 0, tangents)
        d_sum = d_scores * w_v * (1 - open_tangents**2)
        d_q, d_k = d_sum.sum(axis=-2), d_sum.sum(axis=-3)
        used = d_scores[..., 0] != 0  # rows without a gradient may have any values
        used_q = np.where(used.any(axis=-1)[..., None], q, 0)
        used_k = np.where(used.any(axis=-2)[..., None], k, 0)
        d_value = weighted_sum(weights.swapaxes(-1, -2), d_out, allowed.swapaxes(-1, -2))
        d_w_query, d_w_key = used_q[..., None] * d_q[..., None, :], used_k[..., None] * d_k[..., None, :]
        gradients = d_q @ w_q.T, d_k @ w_k.T, d_value, d_w_query, d_w_key, d_scores * open_tangents
        return AdditiveGradients(
            *(like(x, dx, compute_dtype) for x, dx in zip(given, gradients, strict=True))
        )

    return out.astype(result), pullback


def additive_scores(query: Array, key: Array, v: Array) -> tuple[Array, Array]:
    """Return the scores of projected queries and keys, and tangents.

    Queries are (..., L, A), keys (..., S, A), scores (..., L, S) and tangents (..., L, S, A).
    """
    tangents = np.tanh(query[..., :, None, :] + key[..., None, :, :])
    return tangents @ v, tangents


@np.errstate(all="ignore")
def _forward(arrays: list[Array], masks: dict[str, Any]) -> tuple[AttentionValues, Array, Array]:
    """Return the results of attention, the tangents, and which pairs are allowed."""
    q, k, value, w_q, w_k, w_v = arrays
    scores, tangents = additive_scores(q @ w_q, k @ w_k, w_v)
    call = attention_call(q[..., :0], k[..., :0], value, **masks, scale=1.0, compute_dtype=value.dtype)
    return attend(call, scores), tangents, call.allowed
