"""A language model as the core runs it: causal layers, a cache of their keys and values, and a head.

`nn.GPT` and the language models of `selfattn_models` share it. Sequences differ in length and are packed, without
padding. The bits of a token depend on the tokens before it and on nothing else: not on other sequences, nor on later
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_integers
from selfattn.engine import transformer
from selfattn.engine.transformer import Ids, check_ids, pack, vectors
from selfattn.engine.weights import Rounded, Weight, copy_quants, float_type, multiply
from selfattn.functional._products import linear_backward

LEAST_CAPACITY = 64  # tokens
EXPANDED = 4096  # rows of a rounded head that are expanded at once
# Tokens with which several prompts begin, so that computing them once pays for another call of the core.
LEAST_SHARED = 32


class DecoderCache:
    """The keys and values of all layers, for sequences of different ``lengths``.

    Arrays, (layers, sequences, key_heads, capacity, width), grow by doubling, up to ``most`` tokens of a sequence.
    """

    def __init__(
        self, layers: int, sequences: int, key_heads: int, width: int, most: int, dtype: np.dtype[np.generic]
    ) -> None:
        self.most = most
        self.lengths: npt.NDArray[np.int64] = np.zeros(sequences, np.int64)
        self.keys: Array = np.empty((layers, sequences, key_heads, 0, width), dtype)
        self.values: Array = np.empty_like(self.keys)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def bytes(self) -> int:
        """The bytes of the arrays, unused room included."""
        return self.keys.nbytes + self.values.nbytes

    def keep(self, indices: npt.ArrayLike) -> None:
        """Keep only these sequences, in this order; a sequence may be kept twice."""
        chosen = as_integers("indices", indices)
        if chosen.ndim != 1 or (chosen.size and not 0 <= chosen.min() <= chosen.max() < len(self)):
            raise ValueError(f"indices must be those of {len(self)} sequences, not {indices!r}")
        if not np.array_equal(chosen, np.arange(len(self))):
            self._move(chosen, self.keys.shape[3])

    def reserve(self, most: int) -> None:
        """Make room for ``most`` tokens of every sequence."""
        capacity = self.keys.shape[3]
        if most > capacity:
            room = min(max(most, 2 * capacity, LEAST_CAPACITY), self.most)
            self._move(np.arange(len(self)), room)

    def copy(self, to: int, other: DecoderCache, sequence: int, length: int) -> None:
        """Make sequence ``to``, which has room, the first tokens of a sequence of another cache."""
        self.keys[:, to, :, :length] = other.keys[:, sequence, :, :length]
        self.values[:, to, :, :length] = other.values[:, sequence, :, :length]
        self.lengths[to] = length

    def _move(self, chosen: Ids, capacity: int) -> None:
        """Copy the chosen sequences to arrays with room for `capacity` tokens per sequence."""
        lengths = self.lengths[chosen]
        used = int(lengths.max(initial=0))
        moved = []
        for array in (self.keys, self.values):
            new = np.empty((len(array), len(chosen), array.shape[2], capacity, array.shape[4]), array.dtype)
            for to, sequence in enumerate(chosen):
                new[:, to, :, :used] = array[:, sequence, :, :used]
            moved.append(new)
        self.lengths, (self.keys, self.values) = lengths, moved  # all of them, or none if memory runs out


class Decoder:
    """A language model: it takes ids, and returns the logits of the next id.

    ``model`` has a table, causal layers with the same number and width of heads, and a final norm; it has no pooling.
    ``head`` is (vocabulary, d); a tied one is the table. Arrays are not copied: a change of them takes effect at the
    next call.

    Ids are vectors of integers. A sequence that is empty, or with the tokens in the cache longer than
    ``max_seq_len``, is a ValueError that leaves the cache unchanged.

    A call in which each sequence has a past and one new token is decoding, unless ``prompt`` is true. Other calls
    compute prompts: of a prompt that enters in several calls, rows have the same bits as in one. In decoding, sums
    are added in another order.
    """

    def __init__(
        self, model: transformer.Transformer, head: Weight, *, max_seq_len: int, prompt_precision: int = 0
    ) -> None:
        assert model.table is not None
        self.model, self.max_seq_len = model, max_seq_len
        self.vocab_size: int = head.shape[0]
        self.d_model: int = head.shape[1]
        self.dtype = float_type(head)
        self.cache_dtype = self.dtype  # or float16, or BITS for bfloat16: keys and values are rounded
        copy_quants([head, *transformer.arrays(model)[1:]])
        self._head = head.packed if isinstance(head, Rounded) else head
        self._every_row = transformer.Call(prompt_precision=prompt_precision)
        self._last_row = self._every_row._replace(pooling="last")

    def new_cache(self, sequences: int) -> DecoderCache:
        """Return an empty cache for that number of sequences."""
        layers = self.model.layers
        heads, width = 1, 1
        if layers:
            heads = layers[0].num_key_heads or layers[0].num_heads
            rows = layers[0].num_heads + (2 * heads if layers[0].key is None else 0)
            width = layers[0].query.weight.shape[0] // rows
        return DecoderCache(len(layers), sequences, heads, width, self.max_seq_len, self.cache_dtype)

    def hidden(
        self, ids: Sequence[npt.ArrayLike], cache: DecoderCache | None = None, *, prompt: bool = False
    ) -> list[Array]:
        """Compute the rows (L_i, d) that enter the head. With a cache, the tokens are appended to it."""
        rows, cu_seqlens = self._run(self._every_row, ids, cache, prompt)
        return np.split(rows, cu_seqlens[1:-1])

    def next_logits(
        self, ids: Sequence[npt.ArrayLike], cache: DecoderCache, *, prompt: bool = False
    ) -> Array:
        """Append tokens, and compute the logits of the next token, (sequences, vocabulary).

        Where several prompts begin with the same LEAST_SHARED tokens or more, these are computed once.
        """
        before = cache.lengths
        try:
            if len(ids) > 1 and not before.any():
                ids, prompt = self._begin(ids, cache), True
            return self.head(self._run(self._last_row, ids, cache, prompt)[0], decoding=True)
        except BaseException:  # no memory for the logits: remove the tokens
            cache.lengths = before
            raise

    def _begin(self, ids: Sequence[npt.ArrayLike], cache: DecoderCache) -> Sequence[npt.ArrayLike]:
        """Append to an empty cache what several prompts begin with; return the other tokens of each."""
        self._packed(ids, cache)  # checks all of them
        given = vectors("ids", ids)
        runs = shared_beginnings(given)
        if not runs:
            return given
        once = self.new_cache(len(runs))
        self._run(self._last_row, [given[run[0]][:length] for run, length in runs], once, True)
        cache.reserve(max(map(len, given)))
        cache.lengths = cache.lengths.copy()
        for n, (run, length) in enumerate(runs):
            for sequence in run:
                cache.copy(sequence, once, n, length)
        return [own[length:] for own, length in zip(given, cache.lengths, strict=True)]

    def logits(self, ids: npt.ArrayLike) -> Array:
        """Compute the logits of the next id after each id of a sequence, (L, vocabulary)."""
        return self.head(self._run(self._every_row, [ids], None)[0])

    def head(self, rows: Array, *, decoding: bool = False) -> Array:
        """Multiply rows (n, d) by the head; ``decoding`` as in :func:`selfattn.engine.weights.multiply`."""
        y: Array = _core._linear_forward(rows, self._head, None, decoding, self._every_row.prompt_precision)
        return y

    def _run(
        self,
        call: transformer.Call,
        ids: Sequence[npt.ArrayLike],
        cache: DecoderCache | None,
        prompt: bool = False,
    ) -> tuple[Array, Ids]:
        packed, cu_seqlens = self._packed(ids, cache)
        if cache is None:
            return transformer.forward(self.model, packed, cu_seqlens, call), cu_seqlens
        lengths = cache.lengths + np.diff(cu_seqlens)
        cache.reserve(int(lengths.max(initial=0)))
        rows: Array = _core._transformer_forward(
            self.model, packed, cu_seqlens, call, False, (cache.keys, cache.values, cache.lengths), prompt
        )
        cache.lengths = lengths
        return rows, cu_seqlens

    def _packed(self, ids: Sequence[npt.ArrayLike], cache: DecoderCache | None) -> tuple[Ids, Ids]:
        """Check the ids of sequences, and pack them."""
        given = vectors("ids", ids)
        if cache is not None and len(given) != len(cache):
            raise ValueError(f"the cache has {len(cache)} sequences, and there are ids of {len(given)}")
        for n, own in enumerate(given):
            past = 0 if cache is None else int(cache.lengths[n])
            if not len(own):
                raise ValueError(f"sequence {n} is empty; it must have at least one id")
            if past + len(own) > self.max_seq_len:
                of_which = f", {past} of them in the cache" if past else ""
                raise ValueError(
                    f"sequence {n} would have {past + len(own)} tokens{of_which}; max_seq_len is {self.max_seq_len}"
                )
            check_ids(own, self.vocab_size, f"sequence {n} has")
        return pack(given)


def common_length(a: Ids, b: Ids) -> int:
    """Return with how many ids both begin."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if differ.size else n


def shared_beginnings(ids: Sequence[Ids]) -> list[tuple[list[int], int]]:
    """Return which sequences begin with the same ids, and with how many; of each sequence one id at least is left."""
    order = sorted(range(len(ids)), key=lambda n: ids[n].tolist())
    runs: list[tuple[list[int], int]] = []
    for n in order:
        run, length = runs[-1] if runs else ([], 0)
        own = min(length, common_length(ids[run[-1]], ids[n]), len(ids[n]) - 1) if run else 0
        if own >= LEAST_SHARED and len(run) * own >= (len(run) - 1) * length:  # another one saves tokens
            runs[-1] = [*run, n], own
        else:
            runs.append(([n], len(ids[n]) - 1))
    return [run for run in runs if len(run[0]) > 1]


class Prefix:
    """A sequence whose keys and values are kept from one call of generation to the next."""

    def __init__(self) -> None:
        self.ids: Ids = np.zeros(0, np.int64)  # of the tokens in the cache
        self.cache: DecoderCache | None = None
        self.angles: list[Array | None] = []  # by which the keys of each layer are rotated

    def usable_length(self, ids: Ids, decoder: Decoder) -> int:
        """Return how many tokens a prompt need not compute again; it computes one at least."""
        n = min(common_length(self.ids, ids), len(ids) - 1)
        if n <= 0 or self.cache is None or self.cache.keys.dtype != decoder.cache_dtype:
            return 0
        pairs = zip(self.angles, angles_of(decoder), strict=True)
        same = all(
            a is b or (a is not None and b is not None and np.array_equal(a[:n], b[:n])) for a, b in pairs
        )
        return n if same else 0


def angles_of(decoder: Decoder) -> list[Array | None]:
    """Return the cosines of the rotary embedding of each layer."""
    return [None if layer.rotary is None else layer.rotary.cos for layer in decoder.model.layers]


class PrefixDecoder:
    """A decoder and its cache, for one call of generation.

    Of each prompt, it computes what follows its beginning in a prefix.

    ``finish`` gives the tokens that have entered to the prefixes.
    """

    def __init__(self, decoder: Decoder, prefixes: Sequence[Prefix]) -> None:
        self.decoder, self.running = decoder, list(prefixes)
        self.ids: list[Ids] = []  # of the sequences that are running
        self.cache: DecoderCache | None = None

    def new_cache(self, sequences: int) -> PrefixDecoder:
        """Return itself, whose ``keep`` generation calls."""
        assert sequences == len(self.running)
        return self

    def next_logits(self, ids: Sequence[Ids], cache: PrefixDecoder) -> Array:
        """Append tokens, prompts first, and compute the logits of the next token."""
        if self.cache is not None:
            logits = self.decoder.next_logits(ids, self.cache)
            self.ids = [np.append(own, new) for own, new in zip(self.ids, ids, strict=True)]
            return logits
        begun = self._begin(ids)
        self.ids = [own[:n] for own, n in zip(ids, begun.lengths, strict=True)]
        rest = [own[n:] for own, n in zip(ids, begun.lengths, strict=True)]
        self.cache = begun
        logits = self.decoder.next_logits(rest, self.cache, prompt=True)
        self.ids = list(ids)
        return logits

    def _begin(self, ids: Sequence[Ids]) -> DecoderCache:
        """Return a cache with the beginnings of prompts that are in prefixes, from which they are taken."""
        lengths = [
            prefix.usable_length(own, self.decoder) for prefix, own in zip(self.running, ids, strict=True)
        ]
        caches = [prefix.cache for prefix in self.running]
        for prefix in self.running:
            prefix.ids, prefix.cache = prefix.ids[:0], None
        if len(caches) == 1 and caches[0] is not None and lengths[0]:
            caches[0].most, caches[0].lengths = self.decoder.max_seq_len, np.array(lengths)
            return caches[0]
        cache = self.decoder.new_cache(len(ids))
        if any(lengths):
            cache.reserve(max(map(len, ids)))
        for n, (own, length) in enumerate(zip(caches, lengths, strict=True)):
            if own is not None and length:
                cache.copy(n, own, 0, length)
        return cache

    def keep(self, indices: Sequence[int]) -> None:
        """Keep only these sequences; give the others to their prefixes."""
        assert self.cache is not None
        left = set(range(len(self.running))) - set(indices)
        self._give(left)
        self.cache.keep(indices)
        self.running, self.ids = [self.running[n] for n in indices], [self.ids[n] for n in indices]

    def finish(self) -> None:
        """Give all sequences to their prefixes: the call has ended."""
        if self.cache is not None:
            self._give(range(len(self.running)))
        self.running = []

    def _give(self, sequences: Iterable[int]) -> None:
        assert self.cache is not None
        for n in sequences:
            prefix, cache = self.running[n], copy(self.cache)
            cache.keep([n])
            prefix.ids, prefix.cache = self.ids[n][: cache.lengths[0]], cache
            prefix.angles = angles_of(self.decoder)


def head_vjp(head: Weight, rows: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array | None]]]:
    """Compute logits of rows, and from their gradient those of the rows and of the head.

    A rounded head has no gradient. Of it, only rows whose logits have a gradient are expanded to float32, some at a
    time.
    """

    def back(dy: Array) -> tuple[Array, Array | None]:
        if not isinstance(head, Rounded):
            d_rows, d_head = linear_backward(dy, rows, head, with_bias=False)
            return d_rows, d_head
        used, d_rows = np.flatnonzero(dy.any(axis=0)), np.zeros_like(rows)
        for begin in range(0, len(used), EXPANDED):
            some = used[begin : begin + EXPANDED]
            d_rows += dy[:, some] @ head[some]
        return d_rows, None

    return multiply(rows, head, None), back
