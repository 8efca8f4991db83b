"""The numbers of the embedding model: packed token ids to one vector per sentence, and gradients back.

Owns nothing but arithmetic on plain arrays, which is one call of the C core each way; names, tokens and messages are the
model's. Sentences stand one after the other without padding: sentence n has the ids
``ids[cu_seqlens[n]:cu_seqlens[n + 1]]``, at least one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from selfattn import _core
from selfattn.nn._arrays import Array, widened


class Block(NamedTuple):
    """A `SelfAttentionBlock` of width d.

    Attributes
    ----------
    parameters : list of eight ndarrays
        Weight (d, d) and bias (d,) of query, key and value; weight and bias (d,) of the LayerNorm.
    num_heads : int
    eps : float
        Of the LayerNorm.
    """

    parameters: list[Array]
    num_heads: int
    eps: float


def embed(ids: Array, cu_seqlens: Array, table: Array, positions: Array, blocks: Sequence[Block]) -> Array:
    """Compute the embeddings of n sentences.

    Parameters
    ----------
    ids : ndarray of intp, shape (t,)
        Rows of the table.
    cu_seqlens : ndarray of intp, shape (n + 1,)
        Where sentences start, and t at the end.
    table : ndarray, shape (vocab_size, d)
        This and all other arrays have one dtype. 16 bits are computed in float32.
    positions : ndarray, shape (max_seq_len, d)
    blocks : sequence of Block

    Returns
    -------
    ndarray, shape (n, d)
    """
    arrays = _computed_in(table, positions, blocks)
    y: Array = _core._embedding_forward(ids, cu_seqlens, *arrays, False)
    return y.astype(table.dtype, copy=False)


def embed_vjp(
    ids: Array, cu_seqlens: Array, table: Array, positions: Array, blocks: Sequence[Block]
) -> tuple[Array, Callable[[Array], list[Array]]]:
    """Compute the embeddings of n sentences as `embed` does, and their pullback.

    Returns
    -------
    y : ndarray, shape (n, d)
    pullback : callable
        ``dy (n, d) -> [d_table, d_parameter, …]``: the gradients of the table, then of the
        parameters of each block, in their dtype. It reads the parameters again: they must not have changed.
    """
    dtype = table.dtype
    y, saved = _core._embedding_forward(ids, cu_seqlens, *_computed_in(table, positions, blocks), True)

    def pullback(dy: Array) -> list[Array]:
        grads = _core._embedding_backward(saved, np.ascontiguousarray(widened(dy)))
        if dtype.itemsize == 2:
            grads = [grad.astype(dtype) for grad in grads]
        return grads

    return y.astype(table.dtype, copy=False), pullback


def _computed_in(
    table: Array, positions: Array, blocks: Sequence[Block]
) -> tuple[Array, Array, Sequence[Block]]:
    """See 16-bit parameters as float32; others are taken as they are."""
    if table.dtype.itemsize > 2:
        return table, positions, blocks
    wide = [block._replace(parameters=[widened(array) for array in block.parameters]) for block in blocks]
    return widened(table), widened(positions), wide
