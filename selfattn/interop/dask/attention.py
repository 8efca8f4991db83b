"""Attention over arrays in chunks: tiles of a chunk of queries and a chunk of keys, merged in a tree of fixed order."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np

from selfattn import _core
from selfattn._check import Array, seed_from_rng
from selfattn._extras import import_extra
from selfattn._gradient_tuples import AttentionGradients, check_wrt
from selfattn.functional._gradients import gradient_dtype, sum_to_shape
from selfattn.functional._options import AttentionOptions, accept_options
from selfattn.functional.attention import WRT, attention_backward
from selfattn.functional.block_mask import BlockMask
from selfattn.functional.merge import merge_attention
from selfattn.interop.dask.workers import on_worker, task, tree

dask: Any = import_extra("dask", "dask")
da: Any = import_extra("dask.array", "dask")
slices_from_chunks: Any = import_extra("dask.array.core", "dask").slices_from_chunks

_Index: TypeAlias = tuple[int, ...]  # of a block
_Place: TypeAlias = tuple[slice, ...]  # of a block, along the leading axes
_Chunks: TypeAlias = tuple[tuple[int, ...], ...]

_PER_HEAD = ("alibi_slopes", "sinks", "key_lengths")


@accept_options(AttentionOptions)
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Compute attention over Dask's arrays, with queries and keys in chunks.

    It is :func:`selfattn.scaled_dot_product_attention` for them.

    Each chunk of queries meets each chunk of keys in a task of its own, unless the causal rule, the window, the key
    lengths or the block mask close all pairs of the two: then neither is sent. Partial results are merged by their
    log-sum-exp, four at a time, in the order of the keys.

    Parameters
    ----------
    query, key, value : dask.array.Array
        Axes before the length are cut as those of ``query``, which has all of them; the last axis is one chunk. A
        worker holds a chunk of each, the tile's mask, and a result of the size of the query's chunk.
    attn_mask : dask.array.Array or array_like
    return_lse : bool, default False
        Return ``(out, lse)``.

    Returns
    -------
    out : dask.array.Array, shape (..., L, Ev)
        In the chunks of the queries.

    Raises
    ------
    TypeError, ValueError
        As selfattn's function, before anything is computed; lengths, slopes and sinks that are Dask's arrays: they
        are small.

    Notes
    -----
    The result has the same bits on any scheduler, and for any number of workers and threads. It depends on the chunks
    of the keys, by rounding: sums are merged in another order. Dropout drops what the function drops, since it counts
    absolute positions; keys are then cut at multiples of four, and axes that would break the count of heads into
    chunks of 1.

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2.

    Examples
    --------
    >>> import dask.array as da
    >>> from selfattn.interop.dask import scaled_dot_product_attention
    >>> q = k = v = da.random.default_rng(0).standard_normal((2, 1000, 64), chunks=(1, 250, 64))
    >>> out = scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> out.compute().shape, out.numblocks
    ((2, 1000, 64), (2, 4, 1))
    """
    given = {**options, "dropout_p": dropout_p, "is_causal": is_causal}
    out, lse = _Tiles((query, key, value), attn_mask, given).forward()
    return (out, lse) if return_lse else out


@accept_options(AttentionOptions, scaled_dot_product_attention)
def scaled_dot_product_attention_vjp(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    wrt: Sequence[str] = WRT,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Callable[..., AttentionGradients]]:
    """Compute attention over Dask's arrays, and return with it the function that pulls gradients back through it.

    Parameters
    ----------
    wrt : sequence of str, default ("query", "key", "value")
        The inputs to differentiate with respect to; no others.

    Returns
    -------
    out : dask.array.Array, or (out, lse)
    pullback : callable
        ``pullback(grad_out)``, with ``return_lse`` ``pullback(grad_out, grad_lse)``, returns gradients: arrays of Dask.

    Notes
    -----
    A tile of the backward pass needs the merged output and log-sum-exp of its queries. What it adds to the gradients
    is summed in a tree of fixed order.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4.

    Examples
    --------
    >>> import dask.array as da
    >>> from selfattn.interop.dask import scaled_dot_product_attention_vjp
    >>> q = k = v = da.ones((6, 4), chunks=(2, 4))
    >>> out, pullback = scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    >>> dq, dk, dv = pullback(da.ones_like(out))
    >>> round(dv.sum().compute().item(), 9)
    24.0
    """
    names = check_wrt(wrt, WRT)
    given = {**options, "dropout_p": dropout_p, "is_causal": is_causal}
    call = _Tiles((query, key, value), attn_mask, given)
    out, lse = call.forward()

    def pullback(grad_out: Any, grad_lse: Any = None) -> AttentionGradients:
        if grad_lse is not None and not return_lse:
            raise TypeError("grad_lse was given, but the log-sum-exp was not returned: use return_lse=True")
        return call.backward(names, grad_out, grad_lse)

    return ((out, lse) if return_lse else out), pullback


def _ended(chunks: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return chunks that end at multiples of a number, or at the end."""
    ends = np.minimum(-(-np.cumsum(chunks) // multiple) * multiple, sum(chunks))
    return tuple(np.diff(np.unique([0, *ends])).tolist()) or (0,)


def _expanded(x: Any, chunks: _Chunks) -> Any:
    """Cut an array, and broadcast it, to chunks of more axes."""
    own = [each if sum(each) == n else (n,) for n, each in zip(x.shape, chunks[-x.ndim :], strict=False)]
    return da.broadcast_to(x.rechunk(tuple(own)), tuple(map(sum, chunks)), chunks=chunks)


def _assembled(blocks: dict[_Index, Any], chunks: _Chunks, dtype: np.dtype[Any]) -> Any:
    """Return the array of blocks, which are Delayed objects, in their chunks; zeros where there is none."""
    found = np.empty([len(sizes) for sizes in chunks], object)
    for index, shape in zip(np.ndindex(found.shape), itertools.product(*chunks), strict=True):
        block = blocks.get(index)
        found[index] = da.zeros(shape, dtype=dtype) if block is None else da.from_delayed(block, shape, dtype)
    return da.block(found.tolist())


class _Tiles:
    """A call: its arrays, broadcast to the same heads and cut so that a tile has one block of each, and its tasks."""

    def __init__(self, arrays: tuple[Any, ...], attn_mask: Any, options: dict[str, Any]) -> None:
        for name, x in zip(WRT, arrays, strict=True):
            if not isinstance(x, da.Array):
                raise TypeError(f"{name} must be a dask.array.Array, got {type(x).__name__}; use from_array")
            if np.isnan(x.shape).any():
                raise ValueError(f"{name} has chunks of unknown sizes: call {name}.compute_chunk_sizes()")
        self.given, self.options = arrays, options
        mask = None if attn_mask is None else da.asarray(attn_mask)
        self._check(mask)
        self._cut(mask)

    def _check(self, mask: Any) -> None:
        """Let the core check a call without queries, on arrays without memory; settle what depends on lengths."""
        options = self.options
        for name in _PER_HEAD:
            if isinstance(options.get(name), da.Array):
                raise TypeError(f"{name} must be an array, not Dask's: give {name}.compute()")
        self.block_mask = options.pop("block_mask", None)
        q, k, v = (np.broadcast_to(np.zeros((), x.dtype), x.shape) for x in self.given)
        no_rows = q[..., :0, :] if q.ndim > 1 else q
        any_mask = None if mask is None else np.zeros((1, 1), mask.dtype)
        out, lse = _core.scaled_dot_product_attention(no_rows, k, v, any_mask, **options, return_lse=True)
        if (found := out.shape[:-2]) != q.shape[:-2]:
            raise ValueError(f"query needs the leading dims of the result, {found}, got {q.shape[:-2]}")
        self.lead, self.lengths = q.shape[:-2], (q.shape[-2], k.shape[-2])
        L, S = self.lengths
        if self.block_mask is not None:
            self.block_mask._tables(self.lead, L, S)
            self.to_workers = dask.delayed(self.block_mask)
        self.dtype, self.wide = out.dtype, lse.dtype
        options["rng"] = seed_from_rng(options.get("rng"), options["dropout_p"] > 0)
        causal = options.pop("causal", None)
        options["is_causal"] = bool(options["is_causal"]) or causal is not None
        self.offset = S - L if causal == "lower_right" else 0
        grouped = options.get("enable_gqa") and 0 not in self.lead
        self.group = self.lead[-1] // self.given[1].shape[-3] if grouped else 1
        given = {name: options.pop(name, None) for name in _PER_HEAD}
        self.per_head = {name: np.broadcast_to(x, self.lead) for name, x in given.items() if x is not None}

    def _cut(self, mask: Any) -> None:
        query, key, _ = self.given
        drops, axes = self.options["dropout_p"] > 0, list(query.chunks[:-2])
        axes[-1:] = [_ended(each, self.group) for each in axes[-1:]]
        if drops:  # the heads of a chunk must follow one another, as dropout counts them
            axes[:-1] = [(1,) * n or (0,) for n in self.lead[:-1]]
        rows, keys = query.chunks[-2], _ended(key.chunks[-2], 4 if drops else 1)
        of_keys = (*axes[:-1], *(tuple(n // self.group for n in each) for each in axes[-1:]), keys)
        self.chunks = (*axes, rows)
        self.keys: list[slice] = [span for (span,) in slices_from_chunks((keys,))]
        self.arrays = [
            _expanded(x, (*each, (x.shape[-1],)))
            for x, each in zip(self.given, (self.chunks, of_keys, of_keys), strict=True)
        ]
        self.blocks = [x.to_delayed()[..., 0] for x in self.arrays]
        self.masks = None
        if mask is not None:
            try:
                self.masks = _expanded(mask, (*self.chunks, keys)).to_delayed()
            except ValueError:
                whole = (*self.lead, *self.lengths)
                raise ValueError(
                    f"attn_mask must broadcast to (..., L, S) = {whole}, got shape {mask.shape}"
                ) from None

    def _opens(self, at: _Place, rows: slice, keys: slice) -> bool:
        """Return whether some pair of a tile may be open."""
        left, right = self.options.get("window") or (None, None)
        right = 0 if self.options["is_causal"] else right
        first, last = rows.start + self.offset, rows.stop - 1 + self.offset
        end = keys.stop
        if "key_lengths" in self.per_head:
            end = int(self.per_head["key_lengths"][at].max(initial=0))
        most = end - 1 if right is None else min(end - 1, last + right)
        if keys.start > most or (left is not None and keys.stop <= first - left):
            return False
        return self.block_mask is None or self.block_mask._opens(
            (rows.start, rows.stop), (keys.start, keys.stop), self.lengths
        )

    def _tiles(self) -> Iterator[tuple[_Index, dict[int, tuple[Any, ...]]]]:
        """Return the index of each block of queries, with what the tasks of its tiles take.

        What they take is by the number of the keys' block.
        """
        blocks = np.ndindex(self.blocks[0].shape)
        for index, (*lead, rows) in zip(blocks, slices_from_chunks(self.chunks), strict=True):
            at = tuple(lead)
            # If all are closed, one of them gives zeros.
            met = [n for n, keys in enumerate(self.keys) if self._opens(at, rows, keys)] or [0]
            yield index, {n: self._tile(index, n, at, rows, n == met[0]) for n in met}

    def _tile(self, index: _Index, n: int, at: _Place, rows: slice, first: bool) -> tuple[Any, ...]:
        """Return query, key, value, mask, the block mask with the tile's place, options."""
        keys, options = self.keys[n], self.options | {name: x[at] for name, x in self.per_head.items()}
        if "key_lengths" in options:
            options["key_lengths"] = np.clip(options["key_lengths"] - keys.start, 0, keys.stop - keys.start)
        if not first:
            options["sinks"] = None  # they are as one key, of the first tile
        head = sum(span.start * math.prod(self.lead[axis + 1 :]) for axis, span in enumerate(at))
        options["place"] = (rows.start + self.offset - keys.start, head, rows.start, keys.start)
        places = (index, (*index[:-1], n), (*index[:-1], n))
        blocks = [x[place] for x, place in zip(self.blocks, places, strict=True)]
        mask = None if self.masks is None else self.masks[(*index, n)]
        where = (*at, rows, keys), (*self.lead, *self.lengths)
        return *blocks, mask, None if self.block_mask is None else (self.to_workers, *where), options

    def forward(self) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp."""
        merge_parts = functools.partial(task, merge)
        self.merged = {
            index: tree(merge_parts, [task(attend, *tile) for tile in tiles.values()])
            for index, tiles in self._tiles()
        }
        outs = {(*index, 0): merged[0] for index, merged in self.merged.items()}
        lses = {index: merged[1] for index, merged in self.merged.items()}
        out = _assembled(outs, (*self.chunks, (self.given[2].shape[-1],)), self.wide)
        return out.astype(self.dtype), _assembled(lses, self.chunks, self.wide)

    def backward(self, names: tuple[str, ...], *grads: Any) -> AttentionGradients:
        """Return the gradients that ``names`` lists, from those of the output and of the log-sum-exp."""
        of_out = (*self.chunks, (self.given[2].shape[-1],))
        of_blocks = [
            None if grad is None else _gradient(name, grad, chunks)
            for name, grad, chunks in zip(("grad_out", "grad_lse"), grads, (of_out, self.chunks), strict=True)
        ]
        shares: dict[str, dict[_Index, list[Any]]] = {name: {} for name in names}
        for index, tiles in self._tiles():
            given = [x if x is None else x[(*index, 0)[: x.ndim]] for x in of_blocks]
            for n, tile in tiles.items():
                found = task(pull_back, names, self.merged[index], *given, *tile, results=len(names))
                for name, share in zip(names, found, strict=True):
                    place = (*index, 0) if name == "query" else (*index[:-1], n, 0)
                    shares[name].setdefault(place, []).append(share)
        gradients, add = {}, dask.delayed(sum, pure=True)
        for name, cut, given in zip(WRT, self.arrays, self.given, strict=True):
            if name in names:
                sums = {index: tree(add, parts) for index, parts in shares[name].items()}
                whole = sum_to_shape(_assembled(sums, cut.chunks, self.wide), given.shape)
                gradients[name] = whole.astype(gradient_dtype(np.empty(0, given.dtype)))
        return AttentionGradients(**{name: gradients[name] for name in names})


def _gradient(name: str, grad: Any, chunks: _Chunks) -> Array:
    """Return the blocks of the gradient of a result."""
    grad, shape = da.asarray(grad), tuple(map(sum, chunks))
    if grad.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {grad.shape}")
    blocks: Array = grad.rechunk(chunks).to_delayed()
    return blocks


# --------------------------------------------------------------------------------------------------- on workers


def _options(mask: Array | None, pairs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the core's options; the tile of a block mask becomes a block mask whose blocks are pairs."""
    block_mask = None
    if pairs is not None:
        whole, (*at, rows, keys), shape = pairs
        opened = whole._tile(np.arange(shape[-2])[rows], np.arange(shape[-1])[keys], shape[-2:])
        opened = np.broadcast_to(opened, (*shape[:-2], *opened.shape[-2:]))[tuple(at)]
        block_mask = BlockMask.from_blocks(opened, 1)
    return options | {"attn_mask": mask, "block_mask": block_mask}


@on_worker
def attend(q: Array, k: Array, v: Array, *others: Any) -> tuple[Array, Array]:
    """Return the output of a tile, before rounding, and its log-sum-exp."""
    _, _, out, lse = _core._attention_forward(q, k, v, **_options(*others), return_lse=True, unrounded=True)
    return out, lse


@on_worker
def merge(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Merge results of tiles."""
    return merge_attention(*zip(*parts, strict=True))


@on_worker
def pull_back(
    names: tuple[str, ...],
    merged: tuple[Array, Array],
    grad_out: Array | None,
    grad_lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    *others: Any,
) -> tuple[Array, ...]:
    """Return what a tile adds to the gradients: its weights are exp(score - lse), with the merged lse of its rows."""
    out, lse = merged
    closed = lse == -np.inf
    top = np.where(closed, 0, lse) / np.log(2)
    statistics = np.stack([top, ~closed], axis=-1).astype(out.dtype)
    q, k, v = (x.astype(out.dtype, copy=False) for x in (q, k, v))  # what is summed has no 16 bits
    grad_out = np.zeros_like(out) if grad_out is None else grad_out.astype(out.dtype, copy=False)
    return attention_backward(
        q,
        k,
        v,
        names=names,
        out=out,
        statistics=statistics,
        grad_out=grad_out,
        grad_lse=grad_lse,
        **_options(*others),
    )
