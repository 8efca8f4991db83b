"""Keys and values that grow as a sequence is decoded.

This module owns the memory of both: appending, truncating, reordering. Attention over them is one call of the C core.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Unpack

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, as_integers, check_size, is_float
from selfattn._core import _cached_attention
from selfattn.functional._options import CacheOptions, accept_options


class KVCache:
    """The keys and values of sequences that are decoded token by token.

    ``cache.attend(query, key, value)`` appends the new keys and values in place and attends from the new
    queries to all keys of their sequence so far: each query has the position of its own key, and sees
    the keys up to it (the lower-right diagonal). The sequences of a batch may differ in length. The arrays
    double when they are full; all other appends copy only the new keys and values.

    Parameters
    ----------
    batch_size : int
        The number of sequences, at least 1.
    num_kv_heads : int
        The number of heads of keys and values. Queries may have a multiple of it (grouped-query attention).
    head_dim : int
        Width E of queries and keys.
    value_dim : int, optional
        Width Ev of the values; ``head_dim`` if not given.
    dtype : dtype, default float32
        float16, bfloat16 (of ``ml_dtypes``), float32 or float64.
    capacity : int, default 0
        The tokens of each sequence for which there is room from the start.

    Attributes
    ----------
    lengths : ndarray of int64, shape (batch_size,)
        The number of tokens of each sequence: a copy.
    key, value : ndarray, shapes (batch_size, num_kv_heads, S, E) and (…, S, Ev)
        Read-only views, S the longest of ``lengths``; values after a shorter sequence's end are undefined.
    capacity : int
        The tokens of each sequence for which there is room.
    nbytes : int
        The bytes of the arrays, unused room included.

    Raises
    ------
    TypeError
        A size that is no int, or another dtype.
    ValueError
        A size below its least: 1 for ``batch_size`` and ``num_kv_heads``, else 0.
    MemoryError
        There is no room for ``capacity`` tokens.

    See Also
    --------
    scaled_dot_product_attention : the options of ``attend``.

    References
    ----------
    Shazeer, "Fast Transformer Decoding: One Write-Head is All You Need", 2019; Pope et al., "Efficiently Scaling
    Transformer Inference", 2022.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 6, 8))
    >>> cache = sa.KVCache(1, 4, 8, dtype=np.float64)
    >>> prompt = cache.attend(q[:, :, :4], k[:, :, :4], v[:, :, :4])
    >>> tokens = [cache.attend(q[:, :, [t]], k[:, :, [t]], v[:, :, [t]]) for t in (4, 5)]
    >>> cache
    KVCache(batch_size=1, num_kv_heads=4, head_dim=8, value_dim=8, dtype=float64, lengths=[6])
    >>> at_once = sa.scaled_dot_product_attention(q, k, v, is_causal=True)
    >>> np.allclose(np.concatenate([prompt, *tokens], axis=2), at_once, rtol=1e-12)
    True
    """

    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        dtype: npt.DTypeLike = np.float32,
        capacity: int = 0,
    ) -> None:
        batch_size = check_size("batch_size", batch_size, 1)
        heads = check_size("num_kv_heads", num_kv_heads, 1)
        head_dim = check_size("head_dim", head_dim, 0)
        value_dim = head_dim if value_dim is None else check_size("value_dim", value_dim, 0)
        own = _float_dtype(dtype)
        capacity = check_size("capacity", capacity, 0)
        self._lengths: npt.NDArray[np.int64] = _aligned((batch_size,), np.dtype(np.int64))
        self._lengths[:] = 0
        self._key = _aligned((batch_size, heads, capacity, head_dim), own)
        self._value = _aligned((batch_size, heads, capacity, value_dim), own)

    def __copy__(self) -> KVCache:
        """Copy the arrays too, so that tokens of one cache do not overwrite tokens of the other."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        batch_size, heads, _, head_dim = self._key.shape
        return (
            f"KVCache(batch_size={batch_size}, num_kv_heads={heads}, head_dim={head_dim}, "
            f"value_dim={self._value.shape[-1]}, dtype={self._key.dtype}, lengths={self._lengths.tolist()})"
        )

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The number of tokens of each sequence."""
        return self._lengths.copy()

    @property
    def capacity(self) -> int:
        """The number of tokens for which each sequence has room."""
        return int(self._key.shape[2])

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values, unused room included."""
        return self._key.nbytes + self._value.nbytes

    @property
    def key(self) -> Array:
        """The keys up to the end of the longest sequence, read-only."""
        return self._view(self._key)

    @property
    def value(self) -> Array:
        """The values up to the end of the longest sequence, read-only."""
        return self._view(self._value)

    def _view(self, array: Array) -> Array:
        view = array[:, :, : self._lengths.max()]
        view.flags.writeable = False
        return view

    # ------------------------------------------------------------------------------------------ changing it

    def append(self, key: npt.ArrayLike, value: npt.ArrayLike, lengths: npt.ArrayLike | None = None) -> None:
        """Put new keys and values after those of each sequence.

        Parameters
        ----------
        key : array_like, shape (batch_size, num_kv_heads, n, E)
        value : array_like, shape (batch_size, num_kv_heads, n, Ev)
            In dtypes that the cache's dtype holds without loss; float64 also takes 64-bit integers, and holds those
            up to 2**53.
        lengths : array_like of int, shape (batch_size,) or (), optional
            Each sequence gets that number of the n tokens, the first ones; all if not given.

        Raises
        ------
        TypeError
            A dtype that would be narrowed, or ``lengths`` that are not integers.
        ValueError
            Shapes that don't fit, or ``lengths`` outside 0 … n.
        MemoryError
            The arrays cannot grow; the cache is unchanged.

        Examples
        --------
        >>> cache = KVCache(2, 1, 4)
        >>> key, value = np.ones((2, 2, 1, 3, 4), np.float32)  # up to 3 tokens for each of 2 sequences
        >>> cache.append(key, value, lengths=[3, 1])
        >>> cache.lengths
        array([3, 1])
        """
        keys, values = self._new("key", key, self._key), self._new("value", value, self._value)
        _bring_alike(key=keys, value=values)
        self._append(keys, values, self._counts(lengths, keys.shape[2]))

    def _append(self, keys: Array, values: Array, counts: npt.NDArray[np.int64]) -> None:
        ends = self._lengths + counts
        self._reserve(int(ends.max()))
        for mine, new in ((self._key, keys), (self._value, values)):
            if (self._lengths == self._lengths[0]).all() and (counts == counts[0]).all():
                mine[:, :, self._lengths[0] : ends[0]] = new[:, :, : counts[0]]
                continue
            for b, (start, end, count) in enumerate(zip(self._lengths, ends, counts, strict=True)):
                mine[b, :, start:end] = new[b, :, :count]
        self._lengths = ends

    def _reserve(self, tokens: int) -> None:
        """Double the room, so that appending n tokens one by one copies fewer than 2n tokens."""
        capacity = self.capacity
        if tokens <= capacity:
            return
        used, wanted = int(self._lengths.max()), max(tokens, 2 * capacity, 16)
        grown = []
        for old in (self._key, self._value):
            new = _aligned((*old.shape[:2], wanted, old.shape[3]), old.dtype)
            new[:, :, :used] = old[:, :, :used]
            grown.append(new)
        self._key, self._value = grown  # if memory runs out, both stay as they were

    def truncate(self, lengths: npt.ArrayLike) -> None:
        """Keep the first ``lengths`` tokens of each sequence, as when a drafted token is rejected; 0 empties the cache.

        Parameters
        ----------
        lengths : array_like of int, shape (batch_size,) or ()
            Each from 0 to the sequence's present length.

        Raises
        ------
        TypeError
            ``lengths`` are not integers.
        ValueError
            They have another shape, or are outside that range.

        Examples
        --------
        >>> cache = KVCache(2, 1, 4)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.truncate([4, 2])
        >>> cache.lengths
        array([4, 2])
        """
        self._lengths = self._integers("lengths", lengths, self._lengths, f"{self._lengths.tolist()}")

    def reorder(self, indices: npt.ArrayLike) -> None:
        """Replace the tokens of sequence b by those of sequence ``indices[b]``, as beam search does.

        Parameters
        ----------
        indices : array_like of int, shape (batch_size,) or ()

        Raises
        ------
        TypeError
            ``indices`` are not integers.
        ValueError
            They have another shape, or are outside 0 … batch_size − 1.
        MemoryError
            There is no room for the copies of the arrays; the cache is unchanged.

        Examples
        --------
        >>> cache = KVCache(3, 1, 1)
        >>> tokens = np.array([10, 20, 30], np.float32).reshape(3, 1, 1, 1)
        >>> cache.append(tokens, tokens)
        >>> cache.reorder([2, 2, 0])
        >>> cache.key.ravel()
        array([30., 30., 10.], dtype=float32)
        """
        last = len(self._lengths) - 1
        wanted = self._integers("indices", indices, last, f"{last}")
        key, value = (
            np.take(old, wanted, axis=0, out=_aligned(old.shape, old.dtype))
            for old in (self._key, self._value)
        )
        self._key, self._value, self._lengths = key, value, self._lengths[wanted]

    # ------------------------------------------------------------------------------------------- attending

    @accept_options(CacheOptions)
    def attend(
        self,
        query: npt.ArrayLike,
        key: npt.ArrayLike | None = None,
        value: npt.ArrayLike | None = None,
        *,
        lengths: npt.ArrayLike | None = None,
        attn_mask: npt.ArrayLike | None = None,
        return_lse: bool = False,
        **options: Unpack[CacheOptions],
    ) -> Any:
        """Append new keys and values, if given; then let the queries attend to all keys of their sequence.

        The queries are the last tokens of each sequence: query i of n sees the keys up to its own, the key
        n − 1 − i places before the last. If a sequence has fewer keys, the query sees none. The diagonal of
        ``window`` and ``alibi_slopes`` is a query's own key: ``window=(left, 0)`` is a sliding window.

        Parameters
        ----------
        query : array_like, shape (batch_size, num_heads, n, E)
            ``num_heads`` is a multiple of ``num_kv_heads``.
        key, value : array_like, shapes (batch_size, num_kv_heads, n, E) and (…, n, Ev), optional
            As for :meth:`append`; both or neither.
        lengths : array_like of int, shape (batch_size,) or (), optional
            The number of the n queries (and keys) of each sequence that are real, the first ones; the others are
            padding.
        attn_mask : array_like of bool or float, broadcastable to (batch_size, num_heads, n, S), optional
            S is the longest of the lengths, new tokens included. A key must be open in the mask as well.
        return_lse : bool, default False
            Also return the log-sum-exp.

        Returns
        -------
        out : ndarray, shape (batch_size, num_heads, n, Ev)
            Zeros where the query is padding, or sees no key.
        lse : ndarray, shape (batch_size, num_heads, n)
            With ``return_lse``; -inf where the query is padding, or sees neither key nor sink.

        Raises
        ------
        TypeError, ValueError, MemoryError, KeyboardInterrupt
            As :meth:`append` and :func:`selfattn.scaled_dot_product_attention`. Nothing is appended then.

        Examples
        --------
        One token, and then two; each sees the tokens before it and itself:

        >>> cache = KVCache(1, 1, 1)
        >>> zero = np.zeros((1, 1, 3, 1), np.float32)  # equal scores: weights are equal
        >>> value = np.array([3, 5, 7], np.float32).reshape(1, 1, 3, 1)
        >>> cache.attend(zero[:, :, :1], zero[:, :, :1], value[:, :, :1]).ravel()
        array([3.], dtype=float32)
        >>> cache.attend(zero[:, :, 1:], zero[:, :, 1:], value[:, :, 1:]).ravel()
        array([4., 5.], dtype=float32)
        """
        if (key is None) != (value is None):
            raise ValueError("key and value must be given together; one of them is missing")
        queries = self._queries(query)
        counts = self._counts(lengths, queries.shape[2])
        before = self._lengths
        try:
            if key is not None and value is not None:
                keys, values = self._new("key", key, self._key), self._new("value", value, self._value)
                _bring_alike(query=queries, key=keys, value=values)
                self._append(keys, values, counts)
            out, lse = _cached_attention(
                queries,
                self.key,
                self.value,
                attn_mask=attn_mask,
                causal="lower_right",
                enable_gqa=queries.shape[1] != self._key.shape[1],
                key_lengths=self._lengths[:, None],
                query_lengths=counts[:, None],
                return_lse=True,
                **options,
            )
            is_padding = np.arange(queries.shape[2]) >= counts[:, None]
            lse.swapaxes(1, 2)[is_padding] = -np.inf  # padding does not attend to sinks
        except BaseException:  # after wrong options or Ctrl-C, remove the tokens
            self._lengths = before
            raise
        return (out, lse) if return_lse else out

    # ------------------------------------------------------------------------------------------ arguments

    def _queries(self, query: npt.ArrayLike) -> Array:
        queries = as_array("query", query)
        batch_size, heads, _, width = self._key.shape
        fits = queries.ndim == 4 and queries.shape[0] == batch_size and queries.shape[3] == width
        if not fits or queries.shape[1] % heads or queries.shape[1] == 0:
            raise ValueError(
                f"query must have shape ({batch_size}, a multiple of {heads}, n, {width}), got {queries.shape}"
            )
        return queries

    def _new(self, name: str, given: npt.ArrayLike, mine: Array) -> Array:
        array = as_array(name, given)
        batch_size, heads, _, width = mine.shape
        if array.ndim != 4 or array.shape[:2] != (batch_size, heads) or array.shape[3] != width:
            raise ValueError(f"{name} must have shape ({batch_size}, {heads}, n, {width}), got {array.shape}")
        if not _holds(mine.dtype, array.dtype):
            raise TypeError(
                f"{name} is {array.dtype}, which a cache of {mine.dtype} does not hold without loss"
            )
        return array

    def _counts(self, lengths: npt.ArrayLike | None, most: int) -> npt.NDArray[np.int64]:
        if lengths is None:
            return np.full(len(self._lengths), most, np.int64)
        return self._integers("lengths", lengths, most, f"n = {most}")

    def _integers(self, name: str, given: npt.ArrayLike, most: Any, shown: str) -> npt.NDArray[np.int64]:
        """Check numbers from 0 to ``most``: one for each sequence, or one for all."""
        array, shape = as_integers(name, given), self._lengths.shape
        if array.shape not in (shape, ()):
            raise ValueError(f"{name} must have shape {shape} or (), got {array.shape}")
        numbers = np.broadcast_to(array, shape).copy()
        if ((numbers < 0) | (numbers > most)).any():
            raise ValueError(f"{name} must be between 0 and {shown}, got {numbers.tolist()}")
        return numbers


def _bring_alike(**arrays: Array) -> None:
    """Refuse keys and values that differ in their number of tokens."""
    if len({array.shape[2] for array in arrays.values()}) > 1:
        *others, last = (f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"{', '.join(others)} and {last} differ in how many tokens they bring")


def _float_dtype(given: npt.DTypeLike) -> np.dtype[Any]:
    try:
        own = None if given is None else np.dtype(given)  # np.dtype(None) is float64
    except (TypeError, ValueError, SyntaxError):
        own = None
    if own is None or not is_float(own):
        raise TypeError(f"dtype must be float16, bfloat16, float32 or float64, got {own or repr(given)}")
    if not own.isnative:
        raise TypeError(f"dtype must be in native byte order, got {own.str}")
    return own


def _holds(own: np.dtype[Any], given: np.dtype[Any]) -> bool:
    """Return whether NumPy promotes `given` and `own` to `own`; False for booleans."""
    try:
        return given.kind != "b" and np.result_type(given, own) == own
    except TypeError:  # NumPy cannot promote float16 with bfloat16
        return False


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return an uninitialised array that begins at a cache line; NumPy's arrays begin at a multiple of 16 bytes.

    Vectors that straddle two lines halve the rate at which keys and values come from the L2.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    try:
        room = np.empty(nbytes + 63, np.uint8)
        start = -room.ctypes.data % 64
        return np.asarray(room[start : start + nbytes].view(dtype).reshape(shape))
    except (ValueError, MemoryError):  # NumPy's messages lack shape and dtype
        raise MemoryError(f"cannot allocate {nbytes} bytes for {dtype} of shape {shape}") from None
