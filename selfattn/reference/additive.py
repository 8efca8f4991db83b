"""Additive attention in plain NumPy: Bahdanau's score in place of the dot product. See :mod:`selfattn.reference`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.reference.arguments import as_array, dtypes, prepare
from selfattn.reference.attention import attention_weights, masked_scores, weighted_sum
from selfattn.reference.attention_vjp import sum_to_shape

Array: TypeAlias = npt.NDArray[Any]


class AdditiveGradients(NamedTuple):
    """The gradients with respect to the arguments of these names, in their shapes and dtypes."""

    query: Array
    key: Array
    value: Array
    w_query: Array
    w_key: Array
    v: Array


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
    """Attention whose score is ``v @ tanh(w_query.T @ query[i] + w_key.T @ key[j])``.

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
    arrays = _arrays(query, key, value, w_query, w_key, v, compute_dtype)
    out, lse, weights, _ = _forward(arrays, masks)
    result = dtypes(compute_dtype, _named(query, key, value, w_query, w_key, v))[1]
    results = [out.astype(result), *([lse] if return_lse else [])]
    results += [weights.astype(result)] if return_weights else []
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
    """Additive attention, and the function that pulls a gradient of its output back to its inputs.

    With P the weights, T the tangents ``tanh(Q_i + K_j)`` of the projected queries and keys, and dX the
    gradient with respect to X::

        dS_ij = P_ij * (dP_ij - delta_i)                 # as in attention_vjp.py
        dv    = sum_ij dS_ij * T_ij
        dQ_i  = sum_j dS_ij * v * (1 - T_ij**2)          dK_j = sum_i the same
        dw_query = query.T @ dQ                          dquery = dQ @ w_query.T

    References
    ----------
    Bahdanau, Cho and Bengio, 2015, appendix A.1.2, differentiated.

    Examples
    --------
    >>> import numpy as np
    >>> x, w = np.array([[1.0], [2.0]]), np.array([[1.0]])
    >>> out, pullback = additive_attention_vjp(x, x, x, w, w, v=[5.0])
    >>> pullback(np.ones_like(out)).value.sum().round(6)  # two rows of weights with sum 1
    np.float64(2.0)
    """
    arrays = _arrays(query, key, value, w_query, w_key, v, compute_dtype)
    q, k, values, w_q, w_k, w_v = arrays
    out, _, weights, (tangents, allowed) = _forward(arrays, masks)
    given = _named(query, key, value, w_query, w_key, v)

    @np.errstate(all="ignore")
    def pullback(grad_out: npt.ArrayLike) -> AdditiveGradients:
        d_out = np.asarray(grad_out, out.dtype)
        d_weights = np.where(allowed, d_out @ np.swapaxes(values, -1, -2), 0)
        delta = (out * d_out).sum(axis=-1, keepdims=True)
        d_scores = np.where(allowed, weights * (d_weights - delta), 0)[..., None]
        open_tangents = np.where(d_scores == 0, 0, tangents)
        d_sum = d_scores * w_v * (1 - open_tangents**2)
        d_q, d_k = d_sum.sum(axis=-2), d_sum.sum(axis=-3)
        used = d_scores[..., 0] != 0  # other rows may hold anything
        used_q = np.where(used.any(axis=-1)[..., None], q, 0)
        used_k = np.where(used.any(axis=-2)[..., None], k, 0)
        found = (
            d_q @ w_q.T, d_k @ w_k.T, weighted_sum(weights.swapaxes(-1, -2), d_out, allowed.swapaxes(-1, -2)),
            used_q[..., None] * d_q[..., None, :], used_k[..., None] * d_k[..., None, :], d_scores * open_tangents,
        )  # fmt: skip
        fitted = []
        for x, gradient in zip(given.values(), found, strict=True):
            dtype = x.dtype if x.dtype.kind not in "iu" and compute_dtype is None else out.dtype
            fitted.append(sum_to_shape(gradient, x.shape).astype(dtype))
        return AdditiveGradients(*fitted)

    return out.astype(dtypes(compute_dtype, given)[1]), pullback


def _named(*arrays: npt.ArrayLike) -> dict[str, Array]:
    names = AdditiveGradients._fields
    return {name: as_array(name, x) for name, x in zip(names, arrays, strict=True)}


def _arrays(
    query: npt.ArrayLike, key: npt.ArrayLike, value: npt.ArrayLike,
    w_query: npt.ArrayLike, w_key: npt.ArrayLike, v: npt.ArrayLike, compute_dtype: npt.DTypeLike | None,
) -> list[Array]:  # fmt: skip
    named = _named(query, key, value, w_query, w_key, v)
    compute = dtypes(compute_dtype, named)[0]
    return [x.astype(compute) for x in named.values()]


@np.errstate(all="ignore")
def _forward(
    arrays: Sequence[Array], masks: dict[str, Any]
) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    q, k, value, w_q, w_k, w_v = arrays
    tangents = np.tanh((q @ w_q)[..., :, None, :] + (k @ w_k)[..., None, :, :])  # (..., L, S, A)
    options: dict[str, Any] = {"attn_mask": None, "is_causal": False, "dropout_p": 0.0} | masks
    call = prepare(q[..., :0], k[..., :0], value, **options, compute_dtype=value.dtype)
    scores = masked_scores(tangents @ w_v, call.allowed, call.bias, None, call.offset)
    weights, lse = attention_weights(scores, call.allowed)
    return weighted_sum(weights, call.value, call.allowed), lse, weights, (tangents, call.allowed)
