"""A language model as the core runs it: causal layers, a cache of their keys and values, and a head.

`nn.GPT` and the language models of `selfattn.models` share it. Sequences differ in length and are packed, without padding. The
bits of a token depend on the tokens before it and on nothing else: not on other sequences, nor on later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_integers
from selfattn.engine import transformer
from selfattn.engine.transformer import Ids, check_ids, pack, vectors
from selfattn.engine.weights import Rounded, Weight, float_type, multiply
from selfattn.functional._products import linear_backward

LEAST_CAPACITY = 64  # tokens
EXPANDED = 4096  # rows of a rounded head that are expanded at once


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

    ``model`` has a table, causal layers with the same number and width of heads, and a final norm; it has no pooling. ``head`` is
    (vocabulary, d); a tied one is the table. Arrays are not copied: a change of them takes effect at the next call.

    Ids are vectors of integers. A sequence that is empty, or with the tokens in the cache longer than ``max_seq_len``, is a
    ValueError that leaves the cache unchanged.

    A call in which each sequence has a past and one new token is decoding, unless ``prompt`` is true. Other calls compute prompts: of
    a prompt that enters in several calls, rows have the same bits as in one. In decoding, sums are added in another order.
    """

    def __init__(
        self,
        model: transformer.Transformer,
        head: Weight,
        head_bias: Array | None = None,
        *,
        max_seq_len: int,
    ) -> None:
        assert model.pooling is None
        assert model.table is not None
        self.model, self.max_seq_len = model, max_seq_len
        self.vocab_size: int = head.shape[0]
        self.d_model: int = head.shape[1]
        self.dtype = float_type(head)
        self._head = head.packed if isinstance(head, Rounded) else head
        self._head_bias = head_bias
        self._core_model = transformer.as_core(model)
        self._core_last = transformer.as_core(model._replace(pooling="last"))

    def new_cache(self, sequences: int) -> DecoderCache:
        """Return an empty cache for that number of sequences."""
        layers = self.model.layers
        heads, width = 1, 1
        if layers:
            heads = layers[0].num_key_heads or layers[0].num_heads
            rows = layers[0].num_heads + (2 * heads if layers[0].key is None else 0)
            width = layers[0].query.weight.shape[0] // rows
        return DecoderCache(len(layers), sequences, heads, width, self.max_seq_len, self.dtype)

    def hidden(
        self, ids: Sequence[npt.ArrayLike], cache: DecoderCache | None = None, *, prompt: bool = False
    ) -> list[Array]:
        """Compute the rows (L_i, d) that enter the head. With a cache, the tokens are appended to it."""
        rows, cu_seqlens = self._run(self._core_model, ids, cache, prompt)
        return np.split(rows, cu_seqlens[1:-1])

    def next_logits(
        self, ids: Sequence[npt.ArrayLike], cache: DecoderCache, *, prompt: bool = False
    ) -> Array:
        """Append tokens, and compute the logits of the next token, (sequences, vocabulary)."""
        before = cache.lengths
        try:
            return self.head(self._run(self._core_last, ids, cache, prompt)[0], decoding=True)
        except BaseException:  # no memory for the logits: remove the tokens
            cache.lengths = before
            raise

    def logits(self, ids: npt.ArrayLike) -> Array:
        """Compute the logits of the next id after each id of a sequence, (L, vocabulary)."""
        return self.head(self._run(self._core_model, [ids], None)[0])

    def head(self, rows: Array, *, decoding: bool = False) -> Array:
        """Multiply rows (n, d) by the head; ``decoding`` as in :func:`selfattn.engine.weights.multiply`."""
        y: Array = _core._linear_forward(rows, self._head, self._head_bias, decoding)
        return y

    def _run(
        self, core: tuple[object, object, object], ids: Sequence[npt.ArrayLike], cache: DecoderCache | None,
        prompt: bool = False,
    ) -> tuple[Array, Ids]:  # fmt: skip
        packed, cu_seqlens = self._packed(ids, cache)
        if cache is None:
            return _core._transformer_forward(packed, cu_seqlens, core, False), cu_seqlens
        lengths = cache.lengths + np.diff(cu_seqlens)
        cache.reserve(int(lengths.max(initial=0)))
        rows: Array = _core._transformer_forward(
            packed, cu_seqlens, core, False, (cache.keys, cache.values, cache.lengths), prompt
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


def head_vjp(head: Weight, rows: Array) -> tuple[Array, Callable[[Array], tuple[Array, Array | None]]]:
    """Compute logits of rows, and from their gradient those of the rows and of the head.

    A rounded head has no gradient. Of it, only rows whose logits have a gradient are expanded to float32, some at a time.
    """

    def back(dy: Array) -> tuple[Array, Array | None]:
        if not isinstance(head, Rounded):
            return linear_backward(dy, rows, head)[:2]
        used, d_rows = np.flatnonzero(dy.any(axis=0)), np.zeros_like(rows)
        for begin in range(0, len(used), EXPANDED):
            some = used[begin : begin + EXPANDED]
            d_rows += dy[:, some] @ head[some]
        return d_rows, None

    return multiply(rows, head, None), back
