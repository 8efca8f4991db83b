"""Masks that need no array of all pairs: documents, a prefix, a pattern of blocks.

Owns their ids, lengths and patterns, and the tables of runs that the C core reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, as_integers, check_size, one_of

Lead: TypeAlias = tuple[int, ...]
Table: TypeAlias = tuple[Any, ...]  # read by csrc/python/block_mask.c

_MOST = 4  # equals SA_MAX_BLOCK_MASKS
_NO_LENGTH = 2**48  # longer than the core takes


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask:
    """A mask in far fewer numbers than pairs: which keys each query may attend to.

    It is the argument ``block_mask`` of :func:`selfattn.scaled_dot_product_attention` and of its vjp. The core never
    reads keys that the mask closes for a whole block of queries, so time is about proportional to the share of open
    pairs, and memory is linear in L and S. The mask means the same as the boolean array :meth:`to_dense`, and
    combines with all other arguments: a pair must be open in every one of them.

    :meth:`from_documents`, :meth:`prefix_lm` and :meth:`from_blocks` make masks, and ``&`` combines up to four of
    them: a pair is open if it is open in all. A mask copies its arguments and never changes.

    Attributes
    ----------
    shape : tuple
        The leading dims, which broadcast to those of the call, then L and S; None for a length that the call decides.
    open_share : float or None
        The fraction of pairs that are open, or None if it depends on the call.

    References
    ----------
    Dong et al., "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", 2024, section
    3.2. Prefix-LM: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text
    Transformer", 2020, figure 4.

    Examples
    --------
    Two documents, of three tokens and of two, in one sequence; each attends only to itself:

    >>> import numpy as np
    >>> import selfattn as sa
    >>> mask = sa.BlockMask.from_documents([0, 0, 0, 1, 1])
    >>> mask
    BlockMask(documents, shape=(5, 5), open_share=0.52)
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> out = sa.scaled_dot_product_attention(q, k, v, is_causal=True, block_mask=mask)
    >>> np.allclose(out[3:], sa.scaled_dot_product_attention(q[3:], k[3:], v[3:], is_causal=True))
    True
    """

    _parts: tuple[_Documents | _Prefix | _Blocks, ...]

    __array_ufunc__: ClassVar[None] = None  # array & mask is an error, not an array of masks

    def __post_init__(self) -> None:
        parts, kinds = self._parts, (_Documents, _Prefix, _Blocks)
        if not (isinstance(parts, tuple) and parts and all(isinstance(part, kinds) for part in parts)):
            raise TypeError("make a BlockMask with from_documents, prefix_lm or from_blocks")
        if len(self._parts) > _MOST:
            raise ValueError(f"at most {_MOST} block masks can be combined, got {len(self._parts)}")

    # -------------------------------------------------------------------------------------------- making one

    @classmethod
    def from_documents(cls, query_ids: npt.ArrayLike, key_ids: npt.ArrayLike | None = None) -> BlockMask:
        """Let a query attend to the keys that have the same id: documents packed into one sequence.

        Parameters
        ----------
        query_ids : array_like of int, shape (..., L)
            Any integers, in any order; runs of one id cost least. ``...`` broadcasts to the leading dims of
            the call: ids for each batch entry of (B, H, L, E) have shape (B, 1, L).
        key_ids : array_like of int, shape (..., S), optional
            ``query_ids`` if not given. A query with an id that no key has attends to nothing.

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError
            Ids that are not integers.
        ValueError
            Ids without an axis, leading dims that do not broadcast, or an id beyond 2**63 - 1.

        Examples
        --------
        >>> BlockMask.from_documents([7, 7, 9], [7, 9]).to_dense(3, 2)
        array([[ True, False],
               [ True, False],
               [False,  True]])
        """
        queries = _ids("query_ids", query_ids)
        keys = queries if key_ids is None else _ids("key_ids", key_ids)
        return cls((_Documents(queries, keys),))

    @classmethod
    def prefix_lm(cls, prefix_lengths: npt.ArrayLike, *, causal: str = "upper_left") -> BlockMask:
        """Open the first keys to all queries; other keys follow the causal rule.

        Parameters
        ----------
        prefix_lengths : array_like of int, broadcastable to the leading dims of the call
            Each from 0 to S; for a number for each batch entry of (B, H, L, E) the shape is (B, 1).
        causal : {"upper_left", "lower_right"}
            The causal rule's diagonal: j <= i, or j <= i + S - L. The call's own ``causal`` would also close the
            prefix.

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError
            Lengths that are not integers.
        ValueError
            A negative length, or another ``causal``. A length above S is an error of the call.

        Examples
        --------
        >>> BlockMask.prefix_lm(2).to_dense(4, 4).astype(int)
        array([[1, 1, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [1, 1, 1, 1]])
        """
        lengths = as_integers("prefix_lengths", prefix_lengths)
        if lengths.size and lengths.min() < 0:
            raise ValueError(f"prefix_lengths must be at least 0, got {lengths.min()}")
        return cls((_Prefix(lengths, one_of("causal", causal, ("upper_left", "lower_right"))),))

    @classmethod
    def from_blocks(cls, pattern: npt.ArrayLike, block_size: int | tuple[int, int]) -> BlockMask:
        """Open and close whole blocks of queries and keys.

        Parameters
        ----------
        pattern : array_like of bool, shape (..., ceil(L / block), ceil(S / block))
            True = open. ``...`` broadcasts to the leading dims of the call.
        block_size : int or (int, int)
            Rows and columns of a block: queries and keys. L and S may cut off the last ones. Multiples of 64 are
            fastest, since the core computes tiles of 64 keys and up to 64 queries.

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError
            A pattern that is not boolean, or sizes that are not integers.
        ValueError
            A pattern of fewer than two axes, or sizes below 1. The call refuses a pattern that does not fit L and S.

        Examples
        --------
        >>> BlockMask.from_blocks([[True, False], [True, True]], (2, 3)).to_dense(3, 5).astype(int)
        array([[1, 1, 1, 0, 0],
               [1, 1, 1, 0, 0],
               [1, 1, 1, 1, 1]])
        """
        array = as_array("pattern", pattern)
        if array.dtype != np.bool_:
            raise TypeError(f"pattern must be boolean, True = open, got {array.dtype}")
        if array.ndim < 2:
            raise ValueError(
                f"pattern must have at least 2 dims, (..., blocks of queries, blocks of keys), got {array.shape}"
            )
        return cls((_Blocks(array, _block_sizes(block_size)),))

    # ----------------------------------------------------------------------------------------------- using it

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The leading dims, L and S; L or S is None if the call decides it."""
        lengths = [
            next((p.lengths[n] for p in self._parts if p.lengths[n] is not None), None) for n in (0, 1)
        ]
        return (*np.broadcast_shapes(*(part.lead for part in self._parts)), *lengths)

    @property
    def open_share(self) -> float | None:
        """The fraction of pairs that are open, or None if it depends on the call."""
        return self._parts[0].open_share if len(self._parts) == 1 else None

    def __and__(self, other: BlockMask) -> BlockMask:
        """Combine two masks: a pair is open if it is open in both.

        Parameters
        ----------
        other : BlockMask

        Returns
        -------
        BlockMask

        Raises
        ------
        TypeError
            ``other`` is no BlockMask.
        ValueError
            Leading dims that do not broadcast, masks for different lengths, or more than four masks in all.

        Examples
        --------
        >>> documents = BlockMask.from_documents([0, 0, 0, 1])
        >>> (documents & BlockMask.prefix_lm(1)).to_dense(4, 4).astype(int)
        array([[1, 0, 0, 0],
               [1, 1, 0, 0],
               [1, 1, 1, 0],
               [0, 0, 0, 1]])
        """
        if not isinstance(other, BlockMask):
            kind = type(other).__name__
            raise TypeError(f"& takes two BlockMasks, got {kind}: give an array to the call, as attn_mask")
        try:
            np.broadcast_shapes(*(part.lead for part in self._parts + other._parts))
        except ValueError:
            raise ValueError(
                f"the leading dims of the masks do not broadcast: {self.shape[:-2]} and {other.shape[:-2]}"
            ) from None
        for axis, what in enumerate(("queries", "keys")):
            mine, theirs = self.shape[axis - 2], other.shape[axis - 2]
            if mine is not None and theirs is not None and mine != theirs:
                raise ValueError(f"no call fits both masks: one is for {mine} {what}, the other for {theirs}")
        both = BlockMask(self._parts + other._parts)
        n_queries, n_keys = both.shape[-2:]
        if n_queries is not None and n_keys is not None:
            for part in both._parts:
                part.check(n_queries, n_keys)
        return both

    def __repr__(self) -> str:
        kinds = " & ".join(part.kind for part in self._parts)
        share = "None" if self.open_share is None else f"{self.open_share:.4g}"
        return f"BlockMask({kinds}, shape={self.shape}, open_share={share})"

    def to_dense(self, n_queries: int, n_keys: int) -> npt.NDArray[np.bool_]:
        """Return the equivalent boolean ``attn_mask``, True = attend.

        Parameters
        ----------
        n_queries, n_keys : int
            L and S.

        Returns
        -------
        ndarray of bool, shape (..., L, S)

        Raises
        ------
        TypeError
            A length that is no int.
        ValueError
            Lengths below 0, or that the mask does not fit.

        Examples
        --------
        >>> BlockMask.from_documents([0, 0, 1]).to_dense(3, 3)
        array([[ True,  True, False],
               [ True,  True, False],
               [False, False,  True]])
        """
        n_queries, n_keys = check_size("n_queries", n_queries, 0), check_size("n_keys", n_keys, 0)
        return self._tile(np.arange(n_queries), np.arange(n_keys), (n_queries, n_keys))

    def _tile(self, i: Array, j: Array, lengths: tuple[int, int]) -> npt.NDArray[np.bool_]:
        """Return the mask of queries i and keys j of a call."""
        dense: npt.NDArray[np.bool_] = np.ones((len(i), len(j)), np.bool_)
        for part in self._parts:
            part.check(*lengths)
            dense = dense & part.dense(i[:, None], j, lengths)
        return dense

    def _opens(self, rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int]) -> bool:
        """Return whether some pair of a range of queries and a range of keys may be open."""
        return all(part.opens(rows, keys, lengths) for part in self._parts)

    def _tables(self, lead: Lead, n_queries: int, n_keys: int) -> tuple[Table, ...]:
        """Check that the mask fits a call, and return the core's tables."""
        for part in self._parts:
            part.check(n_queries, n_keys)
            try:
                fits = np.broadcast_shapes(part.lead, lead) == lead
            except ValueError:
                fits = False
            if not fits:
                raise ValueError(
                    f"block_mask ({part.kind}) must broadcast to the leading dims {lead} without enlarging them, "
                    f"but has leading dims {part.lead}; one mask for each batch entry of (B, H, L, E) has (B, 1)"
                )
        return tuple(part.table(n_queries, n_keys) for part in self._parts)


# ------------------------------------------------------------------------------------------------- the kinds


class _Runs(NamedTuple):
    """The open keys of each class of rows, as runs: see sa_block_mask in csrc/selfattn.h."""

    classes: Array  # (..., n)
    rows: int  # per class
    starts: Array  # (classes + 1,)
    runs: Array  # (runs, 2)
    share: float  # the share of open pairs


class _InRuns:
    """The base of the kinds whose open keys are runs."""

    def __init__(self, found: _Runs) -> None:
        self.found = found
        self.lead: Lead = found.classes.shape[:-1]
        self.open_share: float | None = found.share

    def table(self, n_queries: int, n_keys: int) -> Table:
        return tuple(self.found)


class _Documents(_InRuns):
    kind = "documents"

    def __init__(self, query_ids: Array, key_ids: Array) -> None:
        try:
            lead = np.broadcast_shapes(query_ids.shape[:-1], key_ids.shape[:-1])
        except ValueError:
            raise ValueError(
                f"the leading dims of query_ids {query_ids.shape} and key_ids {key_ids.shape} do not broadcast"
            ) from None
        super().__init__(_runs_of_documents(query_ids, key_ids, lead))
        self.query_ids, self.key_ids = _frozen(query_ids), _frozen(key_ids)
        self.lengths: tuple[int | None, int | None] = query_ids.shape[-1], key_ids.shape[-1]

    def check(self, n_queries: int, n_keys: int) -> None:
        if self.lengths != (n_queries, n_keys):
            raise ValueError(
                f"block_mask has ids for {self.lengths[0]} queries and {self.lengths[1]} keys; "
                f"here L = {n_queries} and S = {n_keys}"
            )

    def dense(self, i: Array, j: Array, lengths: tuple[int, int]) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = self.query_ids[..., i] == self.key_ids[..., None, j]
        return same

    def opens(self, rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int]) -> bool:
        return bool(np.isin(self.query_ids[..., slice(*rows)], self.key_ids[..., slice(*keys)]).any())


class _Prefix:
    kind = "prefix_lm"
    lengths: tuple[int | None, int | None] = (None, None)
    open_share: float | None = None

    def __init__(self, prefix: Array, causal: str) -> None:
        self.prefix, self.causal = _frozen(prefix), causal
        self.lead: Lead = prefix.shape

    def check(self, n_queries: int, n_keys: int) -> None:
        if self.prefix.size and self.prefix.max() > n_keys:
            raise ValueError(f"prefix lengths must be between 0 and S = {n_keys}, got {self.prefix.max()}")

    def _offset(self, n_queries: int, n_keys: int) -> int:
        return n_keys - n_queries if self.causal == "lower_right" else 0

    def dense(self, i: Array, j: Array, lengths: tuple[int, int]) -> npt.NDArray[np.bool_]:
        opened: npt.NDArray[np.bool_] = (j < self.prefix[..., None, None]) | (j <= i + self._offset(*lengths))
        return opened

    def opens(self, rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int]) -> bool:
        return keys[0] < max(int(self.prefix.max(initial=0)), rows[1] + self._offset(*lengths))

    def table(self, n_queries: int, n_keys: int) -> Table:
        prefix = float(self.prefix.mean()) / max(n_keys, 1) if self.prefix.size else 0.0
        share = (1 + prefix**2) / 2  # a square block
        return self.prefix, self._offset(n_queries, n_keys), share


class _Blocks(_InRuns):
    kind = "blocks"
    lengths: tuple[int | None, int | None] = (None, None)

    def __init__(self, pattern: Array, sizes: tuple[int, int]) -> None:
        if (pattern.shape[-1] - 1) * sizes[1] >= _NO_LENGTH:
            raise ValueError(f"{pattern.shape[-1]} blocks of {sizes[1]} keys are more keys than there can be")
        super().__init__(_runs_of_blocks(pattern, sizes))
        self.pattern, self.sizes = _frozen(pattern), sizes

    def check(self, n_queries: int, n_keys: int) -> None:
        needed = tuple(-(-n // size) for n, size in zip((n_queries, n_keys), self.sizes, strict=True))
        if self.pattern.shape[-2:] != needed:
            raise ValueError(
                f"block_mask has a pattern of {self.pattern.shape[-2:]} blocks of {self.sizes}; "
                f"L = {n_queries} and S = {n_keys} need {needed}"
            )

    def dense(self, i: Array, j: Array, lengths: tuple[int, int]) -> npt.NDArray[np.bool_]:
        opened: npt.NDArray[np.bool_] = self.pattern[..., i // self.sizes[0], j // self.sizes[1]]
        return opened

    def opens(self, rows: tuple[int, int], keys: tuple[int, int], lengths: tuple[int, int]) -> bool:
        (a, b), (c, d) = (
            (begin // n, -(-end // n)) for (begin, end), n in zip((rows, keys), self.sizes, strict=True)
        )
        return bool(self.pattern[..., a:b, c:d].any())


def _runs_of_documents(query_ids: Array, key_ids: Array, lead: Lead) -> _Runs:
    """Return a class for every id in every row of key_ids; class 0, without keys, is for ids that no key has."""
    n_keys = key_ids.shape[-1]
    queries = np.broadcast_to(query_ids, (*lead, query_ids.shape[-1]))
    keys = key_ids.reshape((1,) * (len(lead) + 1 - key_ids.ndim) + key_ids.shape)
    classes = np.zeros(queries.shape, np.int64)
    starts, runs, n_runs, n_classes = [np.zeros(2, np.int64)], [], 0, 1
    for index in np.ndindex(keys.shape[:-1]) if n_keys else ():
        ids = keys[index]
        lo = np.concatenate([[0], np.flatnonzero(ids[1:] != ids[:-1]) + 1])
        hi = np.concatenate([lo[1:], [n_keys]])
        order = np.argsort(ids[lo], kind="stable")  # keep the runs of an id in order
        known, first = np.unique(ids[lo][order], return_index=True)
        here = tuple(slice(None) if n == 1 else at for at, n in zip(index, keys.shape, strict=False))
        at = np.minimum(np.searchsorted(known, queries[here]), len(known) - 1)
        classes[here] = np.where(known[at] == queries[here], n_classes + at, 0)
        starts.append(n_runs + np.append(first[1:], len(lo)))
        runs.append(np.stack([lo, hi], axis=1)[order])
        n_runs, n_classes = n_runs + len(lo), n_classes + len(known)
    every_start = np.concatenate(starts)
    every_run = np.concatenate([np.zeros((0, 2), np.int64), *runs])
    ends = np.concatenate([[0], np.cumsum(every_run[:, 1] - every_run[:, 0])])
    n_open = np.diff(ends[every_start])
    share = float(n_open[classes].mean()) / n_keys if classes.size and n_keys else 0.0
    return _Runs(_frozen(classes), 1, _frozen(every_start), _frozen(every_run), share)


def _runs_of_blocks(pattern: Array, sizes: tuple[int, int]) -> _Runs:
    """Return a class for every row of blocks."""
    *lead, n_rows, n_columns = pattern.shape
    rows = pattern.reshape(math.prod((*lead, n_rows)), n_columns)
    closed = np.zeros((len(rows), 1), np.bool_)
    row, lo = np.nonzero(rows & ~np.hstack([closed, rows[:, :-1]]))
    hi = np.nonzero(rows & ~np.hstack([rows[:, 1:], closed]))[1] + 1
    starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(rows)))])
    runs = np.stack([lo, hi], axis=1) * sizes[1]
    classes = np.arange(len(rows)).reshape(*lead, n_rows)
    share = float(pattern.mean()) if pattern.size else 0.0
    return _Runs(_frozen(classes), sizes[0], _frozen(starts), _frozen(runs), share)


def _frozen(array: Array) -> Array:
    """Copy an array to memory that cannot be made writable."""
    array = np.asarray(array, np.bool_ if array.dtype == np.bool_ else np.int64)
    return np.ndarray(array.shape, array.dtype, array.tobytes())


def _ids(name: str, given: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array = as_integers(name, given)
    if array.ndim == 0:
        raise ValueError(f"{name} must have an id for each token, shape (..., length), got shape ()")
    return array


def _block_sizes(given: int | tuple[int, int]) -> tuple[int, int]:
    try:
        rows, columns = given if isinstance(given, tuple | list) else (given, given)
        sizes = (min(check_size("block_size", size), _NO_LENGTH) for size in (rows, columns))
        return tuple(sizes)  # type: ignore[return-value]
    except (TypeError, ValueError) as error:
        raise type(error)(f"block_size must be an int >= 1 or two of them, got {given!r}") from None
