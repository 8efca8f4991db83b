"""Attention without parameters as a module, as tutorials write it: the mask and dropout are arguments of the call."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn._check import FLOATS, Array, as_array, as_input, check_gradient, layer_dtype
from selfattn._docs import copy_doc
from selfattn.functional import scaled_dot_product_attention
from selfattn.functional._gradients import sum_to_shape
from selfattn.functional._products import widened
from selfattn.nn._attention import BIASES, PROJECTIONS, weighted_sum
from selfattn.nn.module import Gradients, Module, Pullback, run

Inputs = tuple[Array, Array, Array]


class Masks(NamedTuple):
    """What a call closes or adds to scores, as given."""

    mask: npt.ArrayLike | None
    attn_mask: npt.ArrayLike | None
    key_lengths: npt.ArrayLike | None
    bias: npt.ArrayLike | None
    offset_bias: npt.ArrayLike | None


class ScaledDotProductAttention(Module):
    """softmax(Q·Kᵀ / √d_k)·V, and the weights.

    A score that the mask closes is replaced by −1e9 before the softmax. In a row with an open key, this makes
    its weight 0. In a row without open keys all scores are −1e9, and the weights are *uniform*, where those of
    :func:`selfattn.scaled_dot_product_attention` are 0. float16 and bfloat16 are computed in float32, so this also
    holds for them, although −1e9 is −inf in float16.

    Parameters
    ----------
    dtype : dtype, default float32
        The dtype of lists and integers; arrays of floats keep their own.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1.

    Examples
    --------
    Four words; the last is padding:

    >>> import numpy as np
    >>> from selfattn import nn
    >>> attention = nn.ScaledDotProductAttention()
    >>> q = k = v = np.eye(4, dtype=np.float32).reshape(1, 1, 4, 4)  # (batch, n_heads, len, d)
    >>> values, weights = attention(q, k, v, mask=[[[[1, 1, 1, 0]]]])
    >>> weights[0, 0, 0].round(3)
    array([0.452, 0.274, 0.274, 0.   ], dtype=float32)

    The caller gives the dropout, a module:

    >>> values, weights = attention(q, k, v, dropout=nn.Dropout(0.5, rng=0))
    >>> float(weights[0, 0, 0].min())
    0.0
    """

    def __init__(self, *, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = layer_dtype(dtype)

    def forward(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike,
        value: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        dropout: Callable[[Array], Array] | None = None,
        *,
        attn_mask: npt.ArrayLike | None = None,
        key_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        offset_bias: npt.ArrayLike | None = None,
    ) -> tuple[Array, Array]:
        """Attend.

        Parameters
        ----------
        query : array_like, shape (..., L, d_k)
            The leading dims are usually (batch, n_heads).
        key, value : array_like, shape (..., S, d_k) and (..., S, d_v)
        mask : array_like of int or bool, optional
            Broadcastable to (..., L, S), such as (batch, 1, 1, S): zeros are closed.
        dropout : callable, optional
            Applied to the weights: a module such as :class:`Dropout`, for :meth:`vjp` one with a ``vjp``.
        attn_mask, key_lengths, bias, offset_bias : array_like, optional
            As in :func:`selfattn.scaled_dot_product_attention`; uniform rows have no weight for pairs that these close.

        Returns
        -------
        values : ndarray, shape (..., L, d_v)
        weights : ndarray, shape (..., L, S)
            After dropout.
        """
        if dropout is not None and not callable(dropout):
            raise TypeError(f"dropout must be a module such as nn.Dropout(0.1), not {dropout!r}")
        return self._run(
            False, (query, key, value), Masks(mask, attn_mask, key_lengths, bias, offset_bias), dropout
        )[0]

    @copy_doc(forward)
    def vjp(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike,
        value: npt.ArrayLike,
        mask: npt.ArrayLike | None = None,
        dropout: Module | None = None,
        *,
        attn_mask: npt.ArrayLike | None = None,
        key_lengths: npt.ArrayLike | None = None,
        bias: npt.ArrayLike | None = None,
        offset_bias: npt.ArrayLike | None = None,
    ) -> tuple[tuple[Array, Array], Pullback]:
        """Compute ``(values, weights)`` and the pullback ``(d_values, d_weights=None) -> ((dq, dk, dv), {})``.

        With P the weights and D those after dropout::

            dD = d_values @ V.T + d_weights        dV = D.T @ d_values
            dP = dropout's pullback of dD
            dS = P * (dP - sum(P * dP))            # 0 where the mask put -1e9
            dQ = dS @ K / √d_k                     dK = dS.T @ Q / √d_k

        Parameters
        ----------
        dropout : Module, optional
            One with a ``vjp``.

        Returns
        -------
        result : tuple
            ``(values, weights)``, what :meth:`forward` returns.
        pullback : callable
            ``(dq, dk, dv), {} = pullback(d_values, d_weights=None)``, as :class:`Module` says; gradients are summed
            over broadcast axes. Those of ``bias`` and ``offset_bias``, if they are given, follow dv. Without
            ``d_weights``, the weights were not used.
        """
        if dropout is not None and not hasattr(dropout, "vjp"):
            raise TypeError(f"dropout must be a module with a vjp, such as nn.Dropout(0.1), not {dropout!r}")
        return self._run(
            True, (query, key, value), Masks(mask, attn_mask, key_lengths, bias, offset_bias), dropout
        )

    def _run(
        self, keep: bool, given: tuple[npt.ArrayLike, ...], masks: Masks, dropout: Any
    ) -> tuple[tuple[Array, Array], Any]:
        inputs = self._inputs(given)
        values, weights, pairs = _attend(inputs, masks)
        dropped, dropout_pullback = weights, None
        if dropout is None and not keep:
            return (values, weights), None
        scored, open_pairs = pairs or _pairs(inputs, masks)
        if dropout is not None:
            found, dropout_pullback = run(dropout, keep, weights)
            dropped = _as_dropped(found, weights)
            values = _weighted_values(dropped, inputs[2], open_pairs, values)
        q, k, v = (widened(x) for x in inputs)

        @np.errstate(invalid="ignore", over="ignore")
        def pullback(
            d_values: npt.ArrayLike, d_weights: npt.ArrayLike | None = None
        ) -> tuple[tuple[Array, ...], Gradients]:
            d_out = widened(check_gradient(d_values, values, "d_values"))
            d_dropped = d_out @ v.swapaxes(-1, -2)
            if d_weights is not None:
                d_dropped = d_dropped + check_gradient(d_weights, dropped, "d_weights")
            d_p = d_dropped
            if dropout_pullback is not None:
                d_p = widened(dropout_pullback(d_dropped.astype(dropped.dtype, copy=False))[0])
            root = math.sqrt(q.shape[-1] or 1)
            d_added = _scores_gradient(widened(weights), d_p, scored, open_pairs)
            d_scores = d_added / root
            dq = weighted_sum(d_scores, k, scored)
            dk = weighted_sum(d_scores.swapaxes(-1, -2), q, scored.swapaxes(-1, -2))
            dv = weighted_sum(widened(dropped).swapaxes(-1, -2), d_out, open_pairs.swapaxes(-1, -2))
            found = [*zip((dq, dk, dv), inputs, strict=True)]
            if masks.bias is not None:
                found.append((d_added, as_array("bias", masks.bias)))
            if masks.offset_bias is not None:
                found.append((_by_offset(d_added), as_array("offset_bias", masks.offset_bias)))
            return tuple(sum_to_shape(d, x.shape).astype(x.dtype, copy=False) for d, x in found), {}

        # The caller may change the weights, which the pullback reads.
        return (values, dropped.copy() if keep else dropped), pullback

    def _inputs(self, given: tuple[npt.ArrayLike, ...]) -> Inputs:
        q, k, v = (as_input(x, self.dtype, name) for x, name in zip(given, PROJECTIONS, strict=True))
        if min(q.ndim, k.ndim, v.ndim) < 2:
            raise ValueError(
                f"query, key and value need at least 2 dims, not shapes {q.shape}, {k.shape} and {v.shape}"
            )
        return q, k, v


def _attend(inputs: Inputs, masks: Masks) -> tuple[Array, Array, tuple[Array, Array] | None]:
    """Return values, weights before dropout, and with a mask the result of `_pairs`."""
    (q, k, v), (mask, attn_mask, key_lengths, *added) = inputs, masks
    biases: dict[str, Any] = dict(zip(BIASES, added, strict=True))
    values: Array
    weights: Array
    if mask is None:
        values, weights = scaled_dot_product_attention(
            q, k, v, attn_mask, key_lengths=key_lengths, return_weights=True, **biases
        )
        return values, weights, None
    scored, open_pairs = _pairs(inputs, masks)
    both = scored
    if attn_mask is not None and as_array("attn_mask", attn_mask).dtype != np.bool_:
        both = np.where(scored, attn_mask, -np.inf)
    values, weights = scaled_dot_product_attention(q, k, v, both, return_weights=True, **biases)
    uniform = ~scored.any(axis=-1, keepdims=True)
    if uniform.any():
        # At width 0 all scores are equal.
        alike = scaled_dot_product_attention(q[..., :0], k[..., :0], v, open_pairs, return_weights=True)
        values, weights = (np.where(uniform, a, x) for a, x in zip(alike, (values, weights), strict=True))
    return values, weights, (scored, open_pairs)


def _pairs(inputs: Inputs, masks: Masks) -> tuple[Array, Array]:
    """Return which pairs have the score of their query and key, and which have a weight, both (..., L, S).

    They differ in rows without open keys, where all scores are −1e9.
    """
    mask, attn_mask, key_lengths, *added = masks
    biases: dict[str, Any] = {
        name: None if x is None else np.where(as_array(name, x) == -np.inf, -np.inf, 0)
        for name, x in zip(BIASES, added, strict=True)
    }
    finite = attn_mask
    if attn_mask is not None and (given := as_array("attn_mask", attn_mask)).dtype.name in FLOATS:
        finite = given != -np.inf
    # At width 0 all scores are 0, so every open pair has a weight.
    q, k, v = (np.empty((*x.shape[:-1], 0), np.float32) for x in inputs)
    _, weights = scaled_dot_product_attention(
        q, k, v, finite, key_lengths=key_lengths, return_weights=True, **biases
    )
    exist = weights > 0
    if mask is None:
        return exist, exist
    scored = exist & _kept(mask, exist.shape)
    return scored, np.where(scored.any(axis=-1, keepdims=True), scored, exist)


def _by_offset(pairs: Array) -> Array:
    """Sum (..., L, S) along its diagonals, (..., L + S - 1); empty if L or S is 0."""
    *lead, n_queries, n_keys = pairs.shape
    sums = np.zeros((*lead, n_queries + n_keys - 1 if n_queries and n_keys else 0), pairs.dtype)
    for i, row in enumerate(np.moveaxis(pairs, -2, 0)[::-1]):
        sums[..., i : i + n_keys] += row
    return sums


def _kept(mask: npt.ArrayLike, pairs: tuple[int, ...]) -> Array:
    """Return the mask as booleans: True where the mask is not zero."""
    array = as_array("mask", mask)
    if array.dtype.kind not in "iub":
        raise TypeError(
            f"mask must hold integers or booleans, whose zeros are closed, not {array.dtype} of type "
            f"{type(mask).__name__}; floats that are added to the scores are attn_mask="
        )
    try:
        return np.broadcast_to(array != 0, pairs)
    except ValueError:
        raise ValueError(f"mask {array.shape} does not broadcast to (..., L, S) = {pairs}") from None


def _as_dropped(dropped: Any, weights: Array) -> Array:
    """Check the weights that the caller's dropout returned."""
    if not isinstance(dropped, np.ndarray) or dropped.shape != weights.shape:
        got = getattr(dropped, "shape", type(dropped).__name__)
        raise ValueError(f"dropout must return weights of shape {weights.shape}, not {got}")
    return dropped.astype(weights.dtype, copy=False)


def _weighted_values(dropped: Array, value: Array, open_pairs: Array, like: Array) -> Array:
    """Compute ``dropped @ value``, in the dtype of ``like``; a closed pair contributes nothing."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = weighted_sum(widened(dropped), widened(value), open_pairs)
    return values.astype(like.dtype, copy=False)


def _scores_gradient(weights: Array, d_weights: Array, scored: Array, open_pairs: Array) -> Array:
    """Differentiate the softmax: ``P * (dP - sum(P * dP))``, zero where the score is −1e9."""
    zero = weights.dtype.type(0)
    delta = np.where(open_pairs, weights * d_weights, zero).sum(axis=-1, keepdims=True)
    d_scores: Array = np.where(scored, weights * (d_weights - delta), zero)
    return d_scores
