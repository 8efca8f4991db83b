"""Attention over arrays in chunks: tiles of a chunk of queries and a chunk of keys, merged in a tree of fixed order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, Unpack

import numpy as np

from selfattn import _core
from selfattn._check import Array, seed_from_rng
from selfattn._extras import import_extra
from selfattn.functional._gradients import WRT, AttentionGradients, apart, check_wrt, gradient_dtype
from selfattn.functional._options import AttentionOptions, takes
from selfattn.functional.attention import HEADS, attention_backward
from selfattn.functional.merge import merge_attention
from selfattn.interop.dask._workers import on_worker, task

dask: Any = import_extra("dask", "dask")
da: Any = import_extra("dask.array", "dask")

_AT_ONCE = 4  # partial results that a task merges
_GRADS = "grad_out", "grad_lse"
_PER_HEAD = ("alibi_slopes", "sinks", "key_lengths")


@takes(AttentionOptions)
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
    """Compute attention over Dask's arrays: :func:`selfattn.scaled_dot_product_attention` for queries and keys in chunks.

    Each chunk of queries meets each chunk of keys in a task of its own, unless the causal rule, the window, the key lengths or the
    block mask close all pairs of the two: then neither is sent. Partial results are merged by their log-sum-exp, four at a time,
    in the order of the keys.

    Parameters
    ----------
    query, key, value : dask.array.Array
        With the same number of dims. Axes before the length are cut as those of ``query``; the last axis is one chunk. A
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
        As selfattn's function, before anything is computed; lengths, slopes and sinks that are Dask's arrays: they are small.

    Notes
    -----
    The result has the same bits on any scheduler, and for any number of workers and threads. It depends on the chunks of the keys,
    by rounding: sums are merged in another order. Dropout drops what the function drops, since it counts absolute positions; keys
    are then cut at multiples of four, and axes that would break the count of heads into chunks of 1.

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


@takes(AttentionOptions)
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
    query, key, value, attn_mask, return_lse : as :func:`scaled_dot_product_attention` takes them
    wrt : sequence of str, default ("query", "key", "value")
        The inputs to differentiate with respect to; no others.

    Returns
    -------
    out : dask.array.Array, or (out, lse)
    pullback : callable
        ``pullback(grad_out)``, with ``return_lse`` ``pullback(grad_out, grad_lse)``, returns gradients in the chunks of the inputs.

    Raises
    ------
    TypeError, ValueError
        As :func:`scaled_dot_product_attention`.

    Notes
    -----
    A tile of the backward pass needs the merged output and log-sum-exp of its queries. What it adds to the gradients is summed
    in a tree of fixed order.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4.

    Examples
    --------
    >>> import dask.array as da
    >>> from selfattn.interop.dask import scaled_dot_product_attention_vjp
    >>> q = k = v = da.ones((6, 4), chunks=(2, 4))
    >>> out, pullback = scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    >>> round(pullback(da.ones_like(out)).value.sum().compute().item(), 9)
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


class _Span(NamedTuple):
    """A chunk along an axis: its number, its first index and the one after its last."""

    n: int
    begin: int
    end: int


_Place: TypeAlias = tuple[_Span, ...]  # a span for each leading axis


def _spans(chunks: Sequence[int]) -> list[_Span]:
    ends = [0, *itertools.accumulate(chunks)]
    return [_Span(n, *ends[n : n + 2]) for n in range(len(chunks))]


def _cut(chunks: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Return chunks that end at multiples of a number, or at the end."""
    ends = {min(-(-span.end // multiple) * multiple, sum(chunks)) for span in _spans(chunks)}
    return tuple(np.diff(sorted({0, *ends})).tolist()) or (0,)


def _here(x: Array, spans: Sequence[_Span]) -> Array:
    """Slice an array whose axes broadcast to those of ``spans``, the last ones with the last ones."""
    axes = zip(x.shape, spans[len(spans) - x.ndim :], strict=True)
    return x[tuple(slice(None) if n == 1 else slice(span.begin, span.end) for n, span in axes)]


def _index(numblocks: Sequence[int], spans: Sequence[_Span | None]) -> tuple[int, ...]:
    """Return the index of the block at spans of the last axes; an axis of one block has no other, nor has None."""
    axes = zip(numblocks, spans[len(spans) - len(numblocks) :], strict=True)
    return tuple(0 if n == 1 or span is None else span.n for n, span in axes)


def _assembled(blocks: dict[tuple[int, ...], Any], chunks: Any, dtype: np.dtype[Any]) -> Any:
    """Return the array of blocks, which are Delayed objects, in their chunks; zeros where there is none."""
    found = np.empty([len(sizes) for sizes in chunks], object)
    for index in np.ndindex(found.shape):
        shape = tuple(sizes[n] for sizes, n in zip(chunks, index, strict=True))
        block = blocks.get(index)
        found[index] = da.zeros(shape, dtype=dtype) if block is None else da.from_delayed(block, shape, dtype)
    return da.block(found.tolist())


def _tree(combine: Callable[[list[Any]], Any], parts: list[Any]) -> Any:
    """Combine parts, `_AT_ONCE` neighbours in a task, until one is left."""
    while len(parts) > 1:
        parts = [combine(parts[n : n + _AT_ONCE]) for n in range(0, len(parts), _AT_ONCE)]
    return parts[0]


class _Tiles:
    """A call: its arrays, cut so that a tile needs one block of each, and its tasks."""

    def __init__(self, arrays: tuple[Any, ...], attn_mask: Any, options: dict[str, Any]) -> None:
        for name, x in zip(WRT, arrays, strict=True):
            if not isinstance(x, da.Array):
                raise TypeError(f"{name} must be a dask.array.Array, got {type(x).__name__}; use from_array")
            if np.isnan(x.shape).any():
                raise ValueError(f"{name} has chunks of unknown sizes: call {name}.compute_chunk_sizes()")
        query, key, value = self.given = arrays
        if not 2 <= query.ndim == key.ndim == value.ndim or key.shape[-2] != value.shape[-2]:
            raise ValueError(
                "query must have shape (..., L, E), key (..., S, E) and value (..., S, Ev), with one number of dims; "
                f"got {query.shape}, {key.shape} and {value.shape}"
            )
        self.lead, self.lengths = query.shape[:-2], (query.shape[-2], key.shape[-2])
        self.options = options
        self._check()
        self._cut_arrays(attn_mask)

    def _check(self) -> None:
        """Let the core check shapes, dtypes and options on arrays of length 0, and settle what depends on lengths."""
        options, (L, S) = self.options, self.lengths
        for name in _PER_HEAD:
            if isinstance(options.get(name), da.Array):
                raise TypeError(f"{name} must be an array, not Dask's: give {name}.compute()")
            if options.get(name) is not None:
                options[name] = np.asarray(options[name])
        self.block_mask, lengths = options.pop("block_mask", None), options.get("key_lengths")
        if self.block_mask is not None:
            self.block_mask._tables(self.lead, L, S)
            self.to_workers = dask.delayed(self.block_mask)
        empty: Any = [np.empty((*x.shape[:-2], 0, x.shape[-1]), x.dtype) for x in self.given]
        least = {} if lengths is None else {"key_lengths": lengths * 0}
        out, lse = _core.scaled_dot_product_attention(*empty, **options | least, return_lse=True)
        if lengths is not None and not ((lengths >= 0) & (lengths <= S)).all():
            raise ValueError(f"key_lengths must be between 0 and S = {S}, got {lengths}")
        if out.shape[:-2] != self.lead:
            raise ValueError(f"query needs the leading dims of the result, {out.shape[:-2]}, got {self.lead}")
        self.dtype, self.wide = out.dtype, lse.dtype
        options["rng"] = seed_from_rng(options.get("rng"), options["dropout_p"] > 0)
        causal = options.pop("causal", None)
        options["is_causal"] = bool(options["is_causal"]) or causal is not None
        self.offset = S - L if causal == "lower_right" else 0
        grouped = options.get("enable_gqa") and 0 not in self.lead
        self.group = self.lead[-1] // self.given[1].shape[-3] if grouped else 1

    def _cut_arrays(self, attn_mask: Any) -> None:
        query, key, _ = self.given
        lead, drops, n = list(query.chunks[:-2]), self.options["dropout_p"] > 0, len(self.lead)
        if lead:
            lead[-1] = _cut(lead[-1], self.group)
        if drops:  # the heads of a chunk must follow one another, as dropout counts them
            broken = max((axis for axis, chunks in enumerate(lead) if len(chunks) > 1), default=0)
            lead[:broken] = [(1,) * length for length in self.lead[:broken]]
        self.chunks = [*lead, query.chunks[-2], _cut(key.chunks[-2], 4 if drops else 1)]
        *heads, self.queries, self.keys = map(_spans, self.chunks)
        self.places = list(itertools.product(*heads))
        self.arrays = [
            self._fitted(x, [*range(n), axis, None])
            for x, axis in zip(self.given, (n, n + 1, n + 1), strict=True)
        ]
        self.blocks = [x.to_delayed() for x in self.arrays]
        self.masks, whole = None, (*self.lead, *self.lengths)
        if attn_mask is not None:
            mask = da.asarray(attn_mask)
            pairs = zip(mask.shape[::-1], whole[::-1], strict=False)
            if mask.ndim > n + 2 or any(own not in (1, length) for own, length in pairs):
                raise ValueError(f"attn_mask must broadcast to (..., L, S) = {whole}, got shape {mask.shape}")
            if mask.dtype.kind not in "bf" and mask.dtype.name != "bfloat16":
                raise TypeError(f"attn_mask must be boolean (True = attend) or float, got {mask.dtype}")
            self.masks = self._fitted(mask, range(n + 2 - mask.ndim, n + 2)).to_delayed()

    def _fitted(self, x: Any, axes: Iterable[int | None]) -> Any:
        """Cut an array whose axes are those of (..., L, S), or None; an axis of length 1 stays, key heads are fewer."""
        cut = []
        for length, axis in zip(x.shape, axes, strict=True):
            sizes = (length,) if axis is None or length == 1 else self.chunks[axis]
            cut.append(sizes if sum(sizes) == length else tuple(size // self.group for size in sizes))
        return x.rechunk(tuple(cut))

    def _opens(self, at: _Place, rows: _Span, keys: _Span) -> bool:
        """Return whether some pair of a tile may be open."""
        left, right = self.options.get("window") or (None, None)
        lengths = self.options.get("key_lengths")
        first, last = rows.begin + self.offset, rows.end - 1 + self.offset
        least = 0 if left is None else first - left
        most = [keys.end] if right is None else [last + right]
        most += [last] if self.options["is_causal"] else []
        most += [] if lengths is None else [int(_here(lengths, at).max(initial=0)) - 1]
        if keys.begin > min(most) or keys.end <= least:
            return False
        return self.block_mask is None or self.block_mask._opens(rows[1:], keys[1:], self.lengths)

    def _met(self, at: _Place, rows: _Span) -> list[_Span]:
        """Return the chunks of keys that a chunk of queries meets; if all are closed, one of them, which gives zeros."""
        return [keys for keys in self.keys if self._opens(at, rows, keys)] or self.keys[:1]

    def _tile(
        self, at: _Place, rows: _Span, keys: _Span, first: bool
    ) -> tuple[list[tuple[int, ...]], tuple[Any, ...]]:
        """Return what a tile's task takes: query, key, value, mask, the block mask with the tile's place, options."""
        options = dict(self.options)
        for name in _PER_HEAD:
            if options.get(name) is not None:
                options[name] = _here(options[name], at)
        if options.get("key_lengths") is not None:
            options["key_lengths"] = np.clip(options["key_lengths"] - keys.begin, 0, keys.end - keys.begin)
        if not first:
            options["sinks"] = None  # they are as one key, of the first tile
        drops = options["dropout_p"] > 0 and 0 not in self.lead
        head = np.ravel_multi_index([span.begin for span in at], self.lead).item() if drops and at else 0
        places = (head, rows.begin, keys.begin) if drops else (0, 0, 0)
        options["place"] = (rows.begin + self.offset - keys.begin, *places)
        spans = ([*at, rows, None], [*at, keys, None], [*at, keys, None])
        where = [_index(x.shape, span) for x, span in zip(self.blocks, spans, strict=True)]
        blocks = [x[index] for x, index in zip(self.blocks, where, strict=True)]
        mask = None if self.masks is None else self.masks[_index(self.masks.shape, [*at, rows, keys])]
        pairs = None if self.block_mask is None else (self.to_workers, [*at, rows, keys], self.lengths)
        return where, (*blocks, mask, pairs, options)

    def forward(self) -> tuple[Any, Any]:
        """Return the output and the log-sum-exp."""
        self.merged = {}
        for at, rows in itertools.product(self.places, self.queries):
            met = self._met(at, rows)
            parts = [task(attend, *self._tile(at, rows, keys, keys is met[0])[1]) for keys in met]
            self.merged[(*(span.n for span in at), rows.n)] = _tree(functools.partial(task, merge), parts)
        chunks, merged = self.chunks[:-1], self.merged.items()
        outs = {(*index, 0): result[0].astype(self.dtype, copy=False) for index, result in merged}
        lses = {index: result[1] for index, result in merged}
        wide = [*chunks, (self.given[2].shape[-1],)]
        return _assembled(outs, wide, self.dtype), _assembled(lses, chunks, self.wide)

    def backward(self, names: tuple[str, ...], *grads: Any) -> AttentionGradients:
        """Return the gradients that ``names`` lists, from those of the output and of the log-sum-exp."""
        rows_chunks, width = self.chunks[:-1], (self.given[2].shape[-1],)
        blocks = [
            None if grad is None else _gradient(name, grad, chunks)
            for name, grad, chunks in zip(_GRADS, grads, ([*rows_chunks, width], rows_chunks), strict=True)
        ]
        shares: dict[str, dict[tuple[int, ...], list[Any]]] = {name: {} for name in names}
        for at, rows in itertools.product(self.places, self.queries):
            index = (*(span.n for span in at), rows.n)
            given = [x if x is None else x[(*index, 0)[: x.ndim]] for x in blocks]
            met = self._met(at, rows)
            for keys in met:
                where, tile = self._tile(at, rows, keys, keys is met[0])
                found = task(pull_back, names, self.merged[index], *given, *tile, results=len(names))
                for name, share in zip(names, found, strict=True):
                    shares[name].setdefault(where[WRT.index(name)], []).append(share)
        gradients, add = {}, dask.delayed(sum, pure=True)
        for name, x in zip(WRT, self.arrays, strict=True):
            dtype = gradient_dtype(np.empty(0, x.dtype))
            sums = {
                index: _tree(add, parts).astype(dtype, copy=False)
                for index, parts in shares.get(name, {}).items()
            }
            gradients[name] = _assembled(sums, x.chunks, dtype) if name in names else None
        return AttentionGradients(**gradients)


def _gradient(name: str, grad: Any, chunks: Sequence[Sequence[int]]) -> Array:
    """Return the blocks of the gradient of a result."""
    grad, shape = da.asarray(grad), tuple(map(sum, chunks))
    if grad.shape != shape:
        raise ValueError(f"{name} must have shape {shape}, got {grad.shape}")
    blocks: Array = grad.rechunk(tuple(map(tuple, chunks))).to_delayed()
    return blocks


# --------------------------------------------------------------------------------------------------- on workers


def _options(mask: Array | None, pairs: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the core's options, with what the block mask opens as a mask."""
    if pairs is not None:
        block_mask, (*at, rows, keys), lengths = pairs
        whole = block_mask._tile(np.arange(*rows[1:]), np.arange(*keys[1:]), lengths)
        opened = _here(whole, [*at, *(_Span(0, 0, n) for n in whole.shape[-2:])])
        if mask is None or mask.dtype == bool:
            mask = opened if mask is None else mask & opened
        else:
            mask = np.where(opened, mask, mask.dtype.type(-np.inf))
    return options | {"attn_mask": mask}


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
    names: tuple[str, ...], merged: tuple[Array, Array], grad_out: Array | None, grad_lse: Array | None,
    q: Array, k: Array, v: Array, *others: Any,
) -> tuple[Array, ...]:  # fmt: skip
    """Return what a tile adds to the gradients: its weights are exp(score - lse), with the merged lse of its rows."""
    out, lse = merged
    closed = lse == -np.inf
    top = np.where(closed, 0, lse) / np.log(2)
    statistics = np.stack([top, ~closed], axis=-1).astype(out.dtype)
    q, k, v = (x.astype(out.dtype, copy=False) for x in (q, k, v))  # what is summed has no 16 bits
    grad_out = np.zeros_like(out) if grad_out is None else grad_out.astype(out.dtype, copy=False)
    found = attention_backward(
        q, apart(k, HEADS), apart(v, HEADS), names=names, grad_out=grad_out, grad_lse=grad_lse, out=out,
        statistics=statistics, **_options(*others),
    )  # fmt: skip
    return tuple(getattr(found, name) for name in names)
