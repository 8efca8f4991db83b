"""Additive attention (Bahdanau's score), tile by tile: the tangents of all pairs never exist at once.

NumPy computes the scores of a few rows here, masks included; the C core computes the softmax and the rest. The
gradients compute the tangents of each tile again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, compute_dtype, float_dtype, promoted
from selfattn._gradient_tuples import AdditiveGradients
from selfattn.functional._gradients import as_fitting_gradient, gradient_dtype, sum_to_shape
from selfattn.functional._options import AdditiveOptions, accept_options
from selfattn.functional._products import linear, linear_backward
from selfattn.functional.attention import scaled_dot_product_attention_vjp

# Elements in a tile of tangents and in a tile of scores; rows per tile.
TILE, SCORES, ROWS = 2**18, 2**21, 64


@accept_options(AdditiveOptions)
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
    num_threads: int | None = None,
    **options: Unpack[AdditiveOptions],
) -> Any:
    """Compute attention whose score is ``v @ tanh(w_query.T @ query[i] + w_key.T @ key[j])``.

    Queries and keys may differ in width: each is first projected to the A dimensions of a hidden layer. Memory
    grows with L + S, as tangents are computed tile by tile.

    Parameters
    ----------
    query : array_like, shape (..., L, Eq)
    key : array_like, shape (..., S, Ek)
    value : array_like, shape (..., S, Ev)
        Leading dimensions broadcast.
    w_query : array_like, shape (Eq, A)
    w_key : array_like, shape (Ek, A)
    v : array_like, shape (A,)
        The weights of the score, applied as ``query @ w_query``.
    return_lse, return_weights : bool, default False
        Append the log-sum-exp of each row (..., L), and the weights (..., L, S).
    num_threads : int, optional
        Threads of the C core; NumPy computes the scores.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        The dtype to which all six arrays promote; integers count as float64. A query without keys gets 0.
    lse : ndarray, shape (..., L)
    weights : ndarray, shape (..., L, S)
        With ``return_lse`` and ``return_weights``.

    Raises
    ------
    TypeError, ValueError
        As :func:`scaled_dot_product_attention`; weights whose shapes do not fit.

    Notes
    -----
    The tangents cost A times as much as a dot product, and NumPy computes them: for speed use
    :func:`scaled_dot_product_attention`.

    References
    ----------
    D. Bahdanau, K. Cho and Y. Bengio, "Neural machine translation by jointly learning to align and
    translate", 2015, section 3.1 and appendix A.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> x, w = np.array([[1.0], [2.0]]), np.array([[1.0]])
    >>> out, weights = sa.functional.additive_attention(x, x, x, w, w, v=[5.0], return_weights=True)
    >>> weights.round(3)
    array([[0.461, 0.539],
           [0.495, 0.505]])
    >>> bool(np.allclose(out, weights @ x))
    True
    """
    call = _Call((query, key, value, w_query, w_key, v), **options)
    out, lse, *weights = call.attend(return_weights, num_threads)
    results = (out, lse, *weights) if return_lse else (out, *weights)
    return results if len(results) > 1 else out


@accept_options(AdditiveOptions, additive_attention)
def additive_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    w_query: npt.ArrayLike,
    w_key: npt.ArrayLike,
    v: npt.ArrayLike,
    *,
    num_threads: int | None = None,
    **options: Unpack[AdditiveOptions],
) -> tuple[Array, Callable[[npt.ArrayLike], AdditiveGradients]]:
    """Compute additive attention, and a function that pulls gradients back through it.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
    pullback : callable
        ``pullback(grad_out)`` returns :class:`AdditiveGradients`, a named tuple with the gradient of each of
        the six arrays in its shape and dtype (float64 for integers). It may be called again; it holds the inputs
        and their projections.

    Raises
    ------
    TypeError, ValueError
        As :func:`additive_attention`; in the pullback, a ``grad_out`` of another shape, or float64 where the output
        has fewer bits.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> rng = np.random.default_rng(0)
    >>> x, w_query, w_key = rng.standard_normal((3, 4, 4))
    >>> out, pullback = sa.additive_attention_vjp(x, x, x, w_query, w_key, np.ones(4))
    >>> grads = pullback(np.ones_like(out))
    >>> grads.v.shape, bool(np.allclose(grads.value.sum(axis=0), 4))  # four rows of weights with sum 1
    ((4,), True)
    """
    call = _Call((query, key, value, w_query, w_key, v), **options)
    out, _ = call.attend(False, num_threads)
    shape = out.shape

    @np.errstate(all="ignore")
    def pullback(grad_out: npt.ArrayLike) -> AdditiveGradients:
        """Pull the gradient of the output back to the six arrays."""
        d_out = as_fitting_gradient("grad_out", grad_out, shape, call.result)
        hidden, width = call.v.size, call.value.shape[-1]
        d_query = np.zeros((*call.lead, call.length, hidden), call.compute)
        d_key = np.zeros((*call.lead, call.n_keys, hidden), call.compute)
        d_value = np.zeros((*call.lead, call.n_keys, width), call.compute)
        d_v = np.zeros(hidden, call.compute)
        query_is_used, key_is_used = (np.zeros(x.shape[:-1], np.bool_) for x in (d_query, d_key))
        for head, rows in call.blocks():
            _, pull = scaled_dot_product_attention_vjp(
                *call.arguments(head, rows), scale=1.0, wrt=("value", "attn_mask"), num_threads=num_threads
            )
            found = pull(d_out[head][rows].astype(call.compute))
            d_value[head] += found.value
            for keys, tangents in call.tiles(head, rows):
                d_scores = np.asarray(found.attn_mask)[:, keys]
                used = d_scores != 0
                tangents[~used] = 0  # a closed pair may hold any values
                query_is_used[head][rows] |= used.any(axis=1)
                key_is_used[head][keys] |= used.any(axis=0)
                d_v += np.tensordot(d_scores, tangents, 2)
                d_sum = np.square(tangents, out=tangents)
                np.subtract(1, d_sum, out=d_sum)
                d_sum *= d_scores[..., None]
                d_query[head][rows] += d_sum.sum(axis=1)
                d_key[head][keys] += d_sum.sum(axis=0)
        return call.gradients(d_query * call.v, d_key * call.v, d_value, d_v, query_is_used, key_is_used)

    return out, pullback


class _Call:
    """A checked call: projected arrays in the dtype of the computation, with broadcast leading dims."""

    @np.errstate(all="ignore")
    def __init__(
        self,
        arrays: tuple[npt.ArrayLike, ...],
        attn_mask: npt.ArrayLike | None = None,
        is_causal: bool = False,
        causal: str | None = None,
        key_lengths: npt.ArrayLike | None = None,
    ) -> None:
        names = AdditiveGradients._fields
        self.given = tuple(as_array(name, x) for name, x in zip(names, arrays, strict=True))
        self.result = promoted(float_dtype(name, x) for name, x in zip(names, self.given, strict=True))
        self.compute = compute_dtype(*self.given)
        _check_shapes(*self.given)
        options: dict[str, Any] = {"is_causal": is_causal, "causal": causal, "key_lengths": key_lengths}
        # The core checks the other arguments; at width 0 it computes little.
        q, k, values, *_ = (x[..., :0] for x in self.given)
        self.lead = lead = _core.scaled_dot_product_attention(q, k, values, attn_mask, **options).shape[:-2]
        q, k, values, w_q, w_k, self.v = (x.astype(self.compute, copy=False) for x in self.given)
        self.length, self.n_keys = length, n_keys = q.shape[-2], k.shape[-2]
        self.diagonal = None  # query i sees keys up to i + diagonal
        if is_causal or causal:
            self.diagonal = n_keys - length if causal == "lower_right" else 0
        # (..., L, A) and (..., S, A), projected; (..., S, Ev)
        self.query, self.key, self.value = (
            np.broadcast_to(x, lead + x.shape[-2:]) for x in (linear(q, w_q.T), linear(k, w_k.T), values)
        )
        # (..., L, S), a view; (...,)
        self.mask = None if attn_mask is None else np.broadcast_to(attn_mask, (*lead, length, n_keys))
        self.lengths: Array | None = None
        if key_lengths is not None:
            self.lengths = np.broadcast_to(key_lengths, lead or np.shape(key_lengths)).reshape(lead)

    def blocks(self) -> Iterator[tuple[tuple[int, ...], slice]]:
        """Yield a head and some of its rows: as many rows as have at most SCORES scores, but at least one."""
        step = max(1, min(ROWS, SCORES // max(self.n_keys, 1)))
        for head in np.ndindex(*self.lead):
            for first in range(0, self.length, step):
                yield head, slice(first, min(first + step, self.length))

    def tiles(self, head: tuple[int, ...], rows: slice) -> Iterator[tuple[slice, Array]]:
        """Yield some keys and the tangents of the rows with these keys, (rows, keys, A), as new arrays."""
        query = self.query[head][rows]
        step = max(1, TILE // max(query.size, 1))
        for first in range(0, self.n_keys, step):
            keys = slice(first, min(first + step, self.n_keys))
            tangents = query[:, None, :] + self.key[head][keys]
            yield keys, np.tanh(tangents, out=tangents)

    @np.errstate(all="ignore")
    def arguments(self, head: tuple[int, ...], rows: slice) -> tuple[Array, Array, Array, Array]:
        """Return query, key, value and float mask for a call of dot-product attention that has these rows' scores."""
        scores = np.empty((rows.stop - rows.start, self.n_keys), self.compute)
        for keys, tangents in self.tiles(head, rows):
            scores[:, keys] = linear(tangents, self.v[None])[..., 0]
        if self.mask is not None:
            mask = self.mask[head][rows]
            if mask.dtype == np.bool_:
                scores[~mask] = -np.inf
            else:
                most = np.finfo(self.compute).max  # finite values of a wider dtype stay finite
                scores += np.where(np.isfinite(mask), np.clip(mask, -most, most), mask).astype(self.compute)
                scores[mask == -np.inf] = -np.inf
        if self.diagonal is not None:
            last = np.arange(rows.start, rows.stop)[:, None] + self.diagonal
            scores[np.arange(self.n_keys) > last] = -np.inf
        if self.lengths is not None:
            scores[:, int(self.lengths[head]) :] = -np.inf
        value = self.value[head]
        nothing = np.empty((max(scores.shape), 0), self.compute)  # products of width 0 are 0
        return nothing[: scores.shape[0]], nothing[: self.n_keys], value, scores

    def attend(self, return_weights: bool, num_threads: int | None) -> list[Array]:
        """Return output and log-sum-exp, and with ``return_weights`` the weights."""
        out = np.empty((*self.lead, self.length, self.value.shape[-1]), self.result)
        results = [out, np.empty((*self.lead, self.length), self.compute)]
        if return_weights:
            results.append(np.empty((*self.lead, self.length, self.n_keys), self.result))
        for head, rows in self.blocks():
            found = _core.scaled_dot_product_attention(
                *self.arguments(head, rows),
                scale=1.0,
                return_lse=True,
                return_weights=return_weights,
                num_threads=num_threads,
            )
            for result, block in zip(results, found, strict=True):
                result[head][rows] = block
        return results

    def gradients(
        self,
        d_query: Array,
        d_key: Array,
        d_value: Array,
        d_v: Array,
        query_is_used: Array,
        key_is_used: Array,
    ) -> AdditiveGradients:
        """Return the gradients of the arguments from the projections' gradients.

        Rows without open pairs are ignored.
        """
        query, key, value, w_query, w_key, _ = self.given
        shapes = (*query.shape[:-1], self.v.size), (*key.shape[:-1], self.v.size)
        d_query, d_key = sum_to_shape(d_query, shapes[0]), sum_to_shape(d_key, shapes[1])

        def project_back(x: Array, w: Array, d_x: Array, is_used: Array) -> tuple[Array, Array]:
            used = sum_to_shape(is_used, x.shape[:-1])[..., None] > 0
            given = np.where(used, x.astype(self.compute, copy=False), 0)
            weight = w.astype(self.compute, copy=False).T
            d_given, d_weight = linear_backward(d_x, given, weight, with_bias=False)
            return d_given, d_weight.T

        dq, d_w_query = project_back(query, w_query, d_query, query_is_used)
        dk, d_w_key = project_back(key, w_key, d_key, key_is_used)
        found = dq, dk, sum_to_shape(d_value, value.shape), d_w_query, d_w_key, d_v
        pairs = zip(self.given, found, strict=True)
        return AdditiveGradients(*[gradient.astype(gradient_dtype(x), copy=False) for x, gradient in pairs])


def _check_shapes(query: Array, key: Array, value: Array, w_query: Array, w_key: Array, v: Array) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dimensions, (..., length, width), got shape {x.shape}"
            )
    if v.ndim != 1:
        raise ValueError(f"v must have shape (A,), got {v.shape}")
    for name, x, width in (("w_query", w_query, query.shape[-1]), ("w_key", w_key, key.shape[-1])):
        if x.shape != (width, v.size):
            raise ValueError(f"{name} must have shape (width, A) = {(width, v.size)}, got {x.shape}")
