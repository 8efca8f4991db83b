"""A bias by relative position from a table of buckets, as T5 has it, for attention's ``offset_bias``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, check_size, float_dtype, one_of
from selfattn._docs import copy_doc
from selfattn.functional._gradients import as_fitting_gradient, gradient_dtype

Causal = Literal["upper_left", "lower_right"] | None


def relative_position_bias(
    table: npt.ArrayLike, L: int, S: int, *, causal: Causal = None, max_distance: int = 128
) -> Array:
    """Look up the bias of every relative position of a query and a key, as T5 does.

    A row of the table belongs to a bucket of relative positions, key - query. Without `causal` half of the buckets are
    for keys after the query, as in an encoder; with it all are for keys up to the query. Of either half, or of all, the
    first half are one position each, and the others reach to `max_distance` on a scale of logarithms; the last takes
    all that are farther.

    Parameters
    ----------
    table : array_like, shape (num_buckets, H)
        A number for each bucket and head: Transformers' ``relative_attention_bias.weight``. At least 4 buckets, or 2
        with `causal`.
    L, S : int
        The numbers of queries and keys.
    causal : {None, 'upper_left', 'lower_right'}, optional
        As the call has it: T5's decoders are causal. With 'lower_right' query i has the position of key i + S - L.
    max_distance : int, default 128
        The distance from which on all positions share a bucket.

    Returns
    -------
    ndarray, shape (H, L + S - 1)
        For `offset_bias` of :func:`selfattn.scaled_dot_product_attention`; (H, 0) if L or S is 0. T5 has no scale:
        give the call ``scale=1.0``.

    Raises
    ------
    ValueError
        Another shape of the table or too few buckets, negative lengths, or a `max_distance` within the exact distances.
    TypeError
        A table of booleans or complex numbers.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020, section
    2.1. The buckets are those of ``T5Attention._relative_position_bucket`` in Transformers.

    Examples
    --------
    >>> import numpy as np
    >>> table = np.arange(8.0)[:, None]  # the number of the bucket, of one head
    >>> relative_position_bias(table, 4, 4)
    array([[2., 2., 1., 0., 5., 6., 6.]])
    >>> relative_position_bias(table, 4, 4, causal="upper_left")
    array([[3., 2., 1., 0., 0., 0., 0.]])
    """
    rows = _table(table)
    return np.ascontiguousarray(rows[_buckets(len(rows), L, S, causal, max_distance)].T)


@copy_doc(relative_position_bias)
def relative_position_bias_vjp(
    table: npt.ArrayLike, L: int, S: int, *, causal: Causal = None, max_distance: int = 128
) -> tuple[Array, Callable[[npt.ArrayLike], Array]]:
    """Look up the bias of every relative position, and a function that pulls its gradient back to the table.

    Returns
    -------
    pullback : callable
        ``d_table = pullback(d_bias)``, in the shape and dtype of `table` (float64 for integers): the gradients, (H, L +
        S - 1), of a bucket are summed in its row. 16 bits are summed in float32.

    Examples
    --------
    >>> import numpy as np
    >>> bias, pullback = relative_position_bias_vjp(np.zeros((8, 1)), 4, 4)
    >>> pullback(np.ones_like(bias)).ravel()  # how many relative positions have each bucket
    array([1., 1., 2., 0., 0., 1., 2., 0.])
    """
    rows = _table(table)
    buckets = _buckets(len(rows), L, S, causal, max_distance)
    bias = np.ascontiguousarray(rows[buckets].T)

    def pullback(d_bias: npt.ArrayLike) -> Array:
        d = as_fitting_gradient("d_bias", d_bias, bias.shape, bias.dtype)
        sums = np.zeros(rows.shape, np.float64 if d.dtype.itemsize > 4 else np.float32)
        np.add.at(sums, buckets, d.T)
        return sums.astype(gradient_dtype(rows), copy=False)

    return bias, pullback


def _table(table: npt.ArrayLike) -> Array:
    rows = as_array("table", table)
    if rows.ndim != 2:
        raise ValueError(f"table must have shape (num_buckets, H), not {rows.shape}")
    return rows.astype(float_dtype("table", rows), copy=False)


def _buckets(count: int, L: int, S: int, causal: Causal, max_distance: int) -> npt.NDArray[np.int64]:
    """Return the bucket of every relative position, in float32 as Transformers computes it."""
    n_queries, n_keys = check_size("L", L, 0), check_size("S", S, 0)
    if causal is not None:
        one_of("causal", causal, ("upper_left", "lower_right"))
    if n_queries == 0 or n_keys == 0:
        return np.zeros(0, np.int64)
    share = count if causal else count // 2
    exact = share // 2
    if exact < 1:
        raise ValueError(f"table needs at least {2 if causal else 4} buckets (rows), not {count}")
    if check_size("max_distance", max_distance) <= exact:
        raise ValueError(
            f"max_distance must exceed the {exact} exact distances of the table, not {max_distance}"
        )
    at = np.arange(1 - n_queries, n_keys) - (n_keys - n_queries if causal == "lower_right" else 0)
    distance = np.maximum(-at, 0) if causal else np.abs(at)
    ratio = np.log(np.maximum(distance, exact).astype(np.float32) / np.float32(exact))
    far = exact + (ratio / np.float32(math.log(max_distance / exact)) * np.float32(share - exact)).astype(
        np.int64
    )
    buckets = np.where(distance < exact, distance, np.minimum(far, share - 1))
    return buckets if causal else buckets + np.where(at > 0, share, 0)
