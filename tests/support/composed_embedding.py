"""The embedding model composed of the package's other functions, sentence by sentence: the oracle of the C core's.

Owns nothing but arithmetic on plain arrays; names, tokens and checks are the model's. Sentences stand one after the
other without padding: sentence n has the ids ``ids[cu_seqlens[n]:cu_seqlens[n + 1]]``, at least one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import selfattn as sa
from selfattn.nn._arrays import Array, merge_heads, rows, split_heads, widened
from selfattn.nn.linear import linear, linear_backward


class Block(NamedTuple):
    """A `SelfAttentionBlock` of width d.

    Attributes
    ----------
    parameters : sequence of eight ndarrays
        Weight (d, d) and bias (d,) of query, key and value; weight and bias (d,) of the LayerNorm.
    num_heads : int
    eps : float
        Of the LayerNorm.
    """

    parameters: Sequence[Array]
    num_heads: int
    eps: float

    def project(self, x: Array) -> list[Array]:
        """Compute query, key and value."""
        return [linear(x, *self.parameters[at : at + 2]) for at in (0, 2, 4)]

    def split(self, projected: Sequence[Array], part: slice) -> list[Array]:
        """Take the tokens of one sentence from query, key and value, and split them into heads."""
        return [split_heads(array[part], self.num_heads) for array in projected]


def embed(ids: Array, cu_seqlens: Array, table: Array, positions: Array, blocks: Sequence[Block]) -> Array:
    """Compute the embeddings of n sentences.

    Parameters
    ----------
    ids : ndarray of intp, shape (t,)
        Rows of the table, which the caller has checked.
    cu_seqlens : ndarray of intp, shape (n + 1,)
        Where sentences start, and t at the end.
    table : ndarray, shape (vocab_size, d)
    positions : ndarray, shape (max_seq_len, d)
    blocks : sequence of Block

    Returns
    -------
    ndarray, shape (n, d)
    """
    x = table[ids] + positions[_places(cu_seqlens)]
    for block in map(Block._make, blocks):
        projected = block.project(x)
        attended = np.empty_like(projected[2])
        for part in _sentences(cu_seqlens):
            q, k, v = block.split(projected, part)
            attended[part] = merge_heads(sa.scaled_dot_product_attention(q, k, v))
        weight, bias = block.parameters[6:]
        x = sa.layer_norm(x + attended, x.shape[-1], weight, bias, block.eps)
    return _means(x, cu_seqlens)


def embed_vjp(
    ids: Array, cu_seqlens: Array, table: Array, positions: Array, blocks: Sequence[Block]
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """Compute the embeddings of n sentences as `embed` does, and their pullback.

    Returns
    -------
    y : ndarray, shape (n, d)
    pullback : callable
        ``dy (n, d) -> [d_table, d_parameter, …]``: the gradients of the table, then of the
        parameters of each block.
    """
    x = table[ids] + positions[_places(cu_seqlens)]
    block_pullbacks = []
    for block in map(Block._make, blocks):
        x, block_pullback = _block_vjp(x, cu_seqlens, block)
        block_pullbacks.append(block_pullback)

    def pullback(dy: Array) -> list[Array]:
        # y = sum of the rows / length
        lengths = np.diff(cu_seqlens)
        dx = np.repeat(dy / lengths[:, None].astype(dy.dtype), lengths, axis=0)
        grads: list[Array] = []
        for block_pullback in reversed(block_pullbacks):
            dx, block_grads = block_pullback(dx)
            grads = block_grads + grads
        # x = table[ids] + positions
        d_table = np.zeros_like(widened(table))
        np.add.at(d_table, ids, rows(widened(dx)))
        return [d_table.astype(table.dtype, copy=False), *grads]

    return _means(x, cu_seqlens), pullback


def _block_vjp(
    x: Array, cu_seqlens: Array, block: Block
) -> tuple[Array, Callable[[Array], tuple[Array, list[Array]]]]:
    """Compute ``LayerNorm(x + attention(query(x), key(x), value(x)))`` within each sentence, and its pullback."""
    projected = block.project(x)
    attended, attention_pullbacks = np.empty_like(projected[2]), []
    for part in _sentences(cu_seqlens):
        q, k, v = block.split(projected, part)
        out, attention_pullback = sa.scaled_dot_product_attention_vjp(q, k, v)
        attended[part] = merge_heads(out)
        attention_pullbacks.append(attention_pullback)
    weight, bias = block.parameters[6:]
    y, norm_pullback = sa.layer_norm_vjp(x + attended, x.shape[-1], weight, bias, block.eps)

    def pullback(dy: Array) -> tuple[Array, list[Array]]:
        d_sum, d_ln_weight, d_ln_bias = norm_pullback(dy)
        d_projected = [np.empty_like(array) for array in projected]
        for part, attention_pullback in zip(_sentences(cu_seqlens), attention_pullbacks, strict=True):
            d_heads: Any = attention_pullback(split_heads(d_sum[part], block.num_heads))[:3]
            for target, d in zip(d_projected, d_heads, strict=True):
                target[part] = merge_heads(d)
        dx, grads = d_sum.copy(), []
        for weight, d in zip(block.parameters[:6:2], d_projected, strict=True):
            part_dx, d_weight, d_bias = linear_backward(d, x, weight)
            dx += part_dx
            grads += [d_weight, d_bias]
        return dx, [*grads, d_ln_weight, d_ln_bias]  # type: ignore[list-item] # both were given

    return y, pullback


def _sentences(cu_seqlens: Array) -> Iterator[slice]:
    bounds = cu_seqlens.tolist()
    return (slice(start, stop) for start, stop in itertools.pairwise(bounds))


def _places(cu_seqlens: Array) -> Array:
    """Count each sentence's tokens from 0."""
    places: Array = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return places


def _means(x: Array, cu_seqlens: Array) -> Array:
    """Average the rows of each sentence, with sums in float64."""
    sums = np.add.reduceat(x.astype(np.float64, copy=False), cu_seqlens[:-1], axis=0)
    means: Array = (sums / np.diff(cu_seqlens)[:, None]).astype(x.dtype, copy=False)
    return means
