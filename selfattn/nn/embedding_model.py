"""The sentence-embedding model: tokens, positions, layers of self-attention, mean.

Owns names, tokens and messages. One call of the C core computes all layers, and one their gradients.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, check_divisor, check_rows, check_size, if_missing, quoted
from selfattn._docs import copy_doc
from selfattn._extras import progress_bar
from selfattn.engine import transformer
from selfattn.engine.transformer import Layer, Norm, Projection, Transformer, check_ids, pack
from selfattn.functional._products import plain, widened, widest
from selfattn.nn import init
from selfattn.nn.containers import ModuleList
from selfattn.nn.layers import Embedding
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback, named_gradients
from selfattn.nn.positions import SinusoidalPositions
from selfattn.nn.self_attention import SelfAttentionBlock
from selfattn.text import as_tokenizer, spelled

if TYPE_CHECKING:
    from selfattn.steps.layers import ModelSteps

MEAN = transformer.Call(pooling="mean")
Sentence: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]


class EmbeddingModel(Module):
    """Computes a vector for a sentence: the mean of its tokens' rows after some layers of self-attention.

    Each token's row of a table, plus sinusoidal positions, goes through ``num_layers`` layers
    ``LayerNorm(x + attention(x))``; the mean of their output is the embedding of the sentence.

    Parameters
    ----------
    tokenizer : object
        An object with SentencePiece's ``encode(sentence, out_type=int)``, a ``tokenizers.Tokenizer`` of Hugging Face,
        or a callable ``str -> list of int``.
    vocab_size : int
        The number of ids: 0 … vocab_size − 1.
    embedding_dim : int
        The width d of embeddings and layers, even.
    max_seq_len : int
        Tokens of a sentence after this number are ignored.
    num_layers : int, default 1
        With 0 the embedding is the mean of rows and positions.
    num_heads : int, default 1
        The heads of every layer; it has to divide ``embedding_dim``.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights: the table, then layer by layer query, key, value, each weight and then bias.

    Attributes
    ----------
    embedding_layer : Embedding
        The table, (vocab_size, embedding_dim), drawn from N(0, 1).
    attention_layers : ModuleList of SelfAttentionBlock
    positions : SinusoidalPositions
        They are not a parameter.

    See Also
    --------
    ProxyTask : its training objective.
    SelfAttentionBlock

    Notes
    -----
    ``y, pullback = model.vjp(sentence)`` and ``grads = pullback(dy)``: sentences have no gradient. In place of a
    string every method takes the ids, as a list or array of integers.

    A sentence has the same embedding, to the bit, alone or in a list, and with any number of threads.

    The exact gradient of ``key.bias`` is zero, since it adds the same number to all scores of a query. The computed
    one is rounding noise, and Adam's steps along it have full size: after training, this parameter differs between
    libraries, without effect on the embeddings.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1, 3.2 and 3.5; Devlin et al., "BERT", 2019, for
    encoders that see both directions.

    Examples
    --------
    >>> from selfattn import nn
    >>> vocabulary = {"tom": 0, "chase": 1, "jerry": 2}
    >>> def tokenize(sentence):
    ...     return [vocabulary[word] for word in sentence.split()]
    >>> model = nn.EmbeddingModel(tokenize, 3, 4, max_seq_len=8, num_heads=2, rng=0)
    >>> y, pullback = model.vjp("tom chase jerry")
    >>> y.shape
    (4,)
    >>> list(pullback(y))[:3]
    ['embedding_layer.weight', 'attention_layers.0.query.weight', 'attention_layers.0.query.bias']
    """

    _floats_alone = True
    # The arrays and numbers that a description was made of, and the description.
    _kept: tuple[list[Any], list[Any], Transformer] | None = None

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        embedding_dim: int,
        *,
        max_seq_len: int,
        num_layers: int = 1,
        num_heads: int = 1,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.vocab_size = vocab_size = check_size("vocab_size", vocab_size)
        self.embedding_dim = embedding_dim = check_size("embedding_dim", embedding_dim)
        self.max_seq_len = max_seq_len = check_size("max_seq_len", max_seq_len)
        self.num_layers = num_layers = check_size("num_layers", num_layers, 0)
        if embedding_dim % 2:
            raise ValueError(
                f"embedding_dim must be even, as sines and cosines come in pairs, not {embedding_dim}"
            )
        self.num_heads = num_heads = check_divisor("num_heads", num_heads, "embedding_dim", embedding_dim)
        self.tokenizer = tokenizer
        self._tokenize = as_tokenizer(tokenizer)
        generator = init.as_generator(rng)
        self.embedding_layer = Embedding(vocab_size, embedding_dim, dtype=dtype, rng=generator)
        self.positions = SinusoidalPositions(embedding_dim, max_seq_len, dtype=dtype)
        self.attention_layers = ModuleList(
            SelfAttentionBlock(embedding_dim, num_heads, dtype=dtype, rng=generator)
            for _ in range(num_layers)
        )

    def forward(self, sentence: Sentence | Sequence[Sentence]) -> Array:
        """Compute the embedding of a sentence, or of each of a list of them.

        Parameters
        ----------
        sentence : str, sequence of int, or an iterable of such
            Text for the tokenizer, or ids. Tokens after ``max_seq_len`` are ignored.

        Returns
        -------
        ndarray, shape (embedding_dim,) or (n, embedding_dim)

        Raises
        ------
        TypeError
            It is neither, or the tokenizer did not return integers.
        ValueError
            A sentence has no tokens, or one that is not in 0 … vocab_size − 1.
        """
        alone, given = as_batch(sentence)
        ids, cu_seqlens = self.pack(given)
        y = self._embed(ids, cu_seqlens, self._model())
        return y[0] if alone else y

    @copy_doc(forward)
    def vjp(self, sentence: Sentence | Sequence[Sentence]) -> tuple[Array, Pullback]:
        """Compute what :meth:`forward` does, and its pullback, ``dy -> grads``, which are summed over sentences."""
        alone, given = as_batch(sentence)
        ids, cu_seqlens = self.pack(given)
        # Not by transformer.vjp, which looks for rounded weights: the parameters are floats alone.
        computed, saved = _core._transformer_forward(self._model(), ids, cu_seqlens, MEAN, True)
        dtype = self._dtype
        rows = computed.astype(dtype, copy=False)
        y = rows[0] if alone else rows
        of_layers = [x for layer in self.attention_layers for x in _parameters(layer)]
        parameters, names = [self.embedding_layer.weight, *of_layers], _names(len(self.attention_layers))

        def backward(dy: Array) -> Gradients:
            wide = np.ascontiguousarray(widened(dy.reshape(rows.shape)))
            grads, _, _ = _core._transformer_backward(saved, wide, False, False)
            if len(set(map(id, parameters))) < len(parameters):  # some parameters are shared
                return named_gradients(self.parameters(), zip(parameters, grads, strict=True))
            return {name: g.astype(dtype, copy=False) for name, g in zip(names, grads, strict=True)}

        return y, checked_pullback(self, y, of_layers, backward)  # the backward pass does not read the table

    def encode(self, sentences: Iterable[Sentence], batch_size: int = 1024, progress: bool = False) -> Array:
        """Compute the embeddings of many sentences.

        Parameters
        ----------
        sentences : iterable of str or of sequences of int
        batch_size : int, default 1024
            The number of sentences in a call of the core. They are packed, not padded, so their order does not change
            the time.
        progress : bool, default False
            Show a progress bar; needs ``tqdm``.

        Returns
        -------
        ndarray, shape (n, embedding_dim)

        Raises
        ------
        TypeError, ValueError
            As for :meth:`forward`; the message says which sentence.
        ImportError
            ``tqdm`` is not installed: ``pip install 'selfattn[text]'``.

        Examples
        --------
        >>> from selfattn import nn
        >>> model = nn.EmbeddingModel(lambda sentence: [len(sentence)], 10, 4, max_seq_len=8, rng=0)
        >>> model.encode(["tom", "chase", "jerry"]).shape
        (3, 4)
        """
        check_rows("sentences", sentences)
        if isinstance(sentences, str) or not isinstance(sentences, Iterable):
            raise TypeError(f"sentences must be a list of sentences, not {quoted(sentences)}")
        batch_size = check_size("batch_size", batch_size)
        given: Any = sentences if isinstance(sentences, list | tuple | np.ndarray) else list(sentences)
        y = np.empty((len(given), self.embedding_dim), self._dtype)
        starts: Iterable[int] = range(0, len(given), batch_size)
        if progress:
            starts = progress_bar(starts, extra="text", desc="encode", unit=" batches")
        model = self._model()
        for start in starts:
            ids, cu_seqlens = self.pack(given[start : start + batch_size], first=start)
            y[start : start + batch_size] = self._embed(ids, cu_seqlens, model)
        return y

    def steps(self, sentence: Sentence) -> ModelSteps:
        """Compute the embedding of one sentence with every intermediate result.

        Parameters
        ----------
        sentence : str or sequence of int
            As for :meth:`forward`.

        Returns
        -------
        selfattn.steps.layers.ModelSteps
            Embeddings, positions, the steps of each layer, and the mean. NumPy computes them; they equal those of
            :meth:`forward` up to rounding.

        Examples
        --------
        >>> from selfattn import nn
        >>> model = nn.EmbeddingModel(lambda sentence: [len(sentence)], 10, 4, max_seq_len=8, rng=0)
        >>> model.steps("tom").blocks[0].weights
        array([[1.]], dtype=float32)
        """
        from selfattn.steps.layers import model_steps  # in NumPy; imported when needed

        ids = self.tokens(sentence)
        embeddings = self.embedding_layer.weight[ids]
        positions = self.positions.table[: len(embeddings)].copy()
        x, steps = embeddings + positions, []
        layer: Any
        for layer in self.attention_layers:
            steps.append(layer.steps(x))
            x = steps[-1].result
        return model_steps(embeddings, positions, steps, self._pieces(sentence, ids))

    def _pieces(self, sentence: Sentence, ids: npt.NDArray[np.intp]) -> list[str] | None:
        """Return the word or piece of each id of a sentence, or None if the tokenizer does not know them."""
        if hasattr(self.tokenizer, "get_added_tokens_decoder"):  # tokenizers
            return spelled(self.tokenizer, ids)
        if callable(piece := getattr(self.tokenizer, "id_to_piece", None)):  # SentencePiece
            return [str(piece(int(n))).replace("▁", " ") for n in ids]
        words = sentence.split() if isinstance(sentence, str) else []
        return words if len(words) == len(ids) else None

    def pack(self, sentences: Sequence[Sentence], first: int = 0) -> tuple[Array, Array]:
        """Concatenate the ids of sentences.

        Parameters
        ----------
        sentences : sequence of str or of sequences of int
        first : int, default 0
            The number of the first sentence in messages.

        Returns
        -------
        ids : ndarray of int, shape (t,)
        cu_seqlens : ndarray of int, shape (len(sentences) + 1,)
            The first id of each sentence, and t at the end.
        """
        given = [
            self._tokenize(sentence) if isinstance(sentence, str) else sentence for sentence in sentences
        ]
        lists: list[Any] = [ids[: self.max_seq_len] if type(ids) is list else None for ids in given]
        packed = _core._pack_ids(lists, self.vocab_size)
        if packed is not None:
            return packed
        named = enumerate(zip(given, sentences, strict=True), first)
        several = first or len(given) > 1
        checked = [self._checked(ids, own, f"sentence {n}, " if several else "") for n, (ids, own) in named]
        return pack(checked)

    def tokens(self, sentence: Sentence) -> npt.NDArray[np.intp]:
        """Return the ids of a sentence; ids from the tokenizer are checked.

        Parameters
        ----------
        sentence : str or sequence of int, as for :meth:`forward`, with its errors

        Returns
        -------
        ndarray of intp, shape (t,)
            At most the first ``max_seq_len``.
        """
        return self.pack([sentence])[0]

    def _checked(self, ids: Any, sentence: Sentence, name: str) -> npt.NDArray[np.intp]:
        """Check the ids of a sentence; ``name`` is its name in messages."""
        try:
            found = as_array("ids", _first(ids, self.max_seq_len))
            if found.dtype == object and found.size:
                found = np.array([operator.index(n) for n in found], np.int64)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError, RuntimeError):
            found = np.empty(0, object)  # not a sequence of numbers
        if found.ndim != 1 or (
            found.dtype.kind not in "iu" and not (found.size == 0 and found.dtype == float)
        ):
            what = "not " if ids is sentence else f"the tokenizer returned {quoted(ids)} for "
            raise TypeError(
                f"expected a str or a sequence of integers, {what}{name}{quoted(sentence)}{if_missing(sentence)}"
            )
        if found.size == 0:
            raise ValueError(f"{name}{quoted(sentence)} has no tokens")
        check_ids(found, self.vocab_size, f"as vocab_size is {self.vocab_size}; {name}{quoted(sentence)} has")
        return found.astype(np.intp, copy=False)

    def _model(self) -> Transformer:
        """Return what the core computes, which is kept while its arrays are the parameters themselves.

        Parameters of 16 bits, other byte orders or with gaps are copied.
        """
        every: Any = self.attention_layers
        table, positions = self.embedding_layer.weight, self.positions.table
        given = [table, positions, *(x for own in every for x in _parameters(own))]
        numbers = [(own.num_heads, own.ln.eps) for own in every]
        if self._kept is not None:
            arrays, of_arrays, model = self._kept
            if of_arrays == numbers and len(arrays) == len(given) and all(map(operator.is_, arrays, given)):
                return model
        dtype = widest(table)
        taken = [x if x is None else plain(x, dtype) for x in given]
        layers = tuple(
            _layer(*taken[2 + 8 * n : 10 + 8 * n], num_heads=num_heads, eps=float(eps))
            for n, (num_heads, eps) in enumerate(numbers)
        )
        model = Transformer(layers, table=taken[0], positions=taken[1])
        self._kept = (given, numbers, model) if all(map(operator.is_, taken, given)) else None
        return model

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept, which a copy makes again."""
        return {name: value for name, value in vars(self).items() if name != "_kept"}

    def _embed(self, ids: Array, cu_seqlens: Array, model: Transformer) -> Array:
        """Compute a row for each packed sentence."""
        return transformer.forward(model, ids, cu_seqlens, MEAN).astype(self._dtype, copy=False)

    @property
    def _dtype(self) -> np.dtype[Any]:
        return self.embedding_layer.weight.dtype.newbyteorder("=")


def _first(ids: Any, most: int) -> Any:
    """Return the first ids; a deque or another iterable that cannot be sliced becomes a list."""
    if isinstance(ids, np.ma.MaskedArray | str | bytes | Mapping):
        return None
    sliced = isinstance(ids, list | tuple) or hasattr(ids, "ndim") or not isinstance(ids, Iterable)
    return ids[:most] if sliced else list(itertools.islice(ids, most))


def _parameters(layer: Any) -> tuple[Any, ...]:
    """Return weight and bias of query, key, value and the norm of a layer."""
    query, key, value, ln = layer.query, layer.key, layer.value, layer.ln
    return query.weight, query.bias, key.weight, key.bias, value.weight, value.bias, ln.weight, ln.bias


def _layer(*parameters: Any, num_heads: int, eps: float) -> Layer:
    """Describe a layer of attention and a norm, from the arrays of :func:`_parameters`."""
    query, key, value, norm = zip(parameters[::2], parameters[1::2], strict=True)
    of_norm = Norm(*norm, eps=eps)
    return Layer(num_heads, Projection(*query), Projection(*key), Projection(*value), attention_norm=of_norm)


@functools.cache
def _names(num_layers: int) -> list[str]:
    """Return the names of a model's parameters, in the order of :func:`_parameters`."""
    kinds = [f"{own}.{kind}" for own in ("query", "key", "value", "ln") for kind in ("weight", "bias")]
    return [
        "embedding_layer.weight",
        *(f"attention_layers.{n}.{name}" for n in range(num_layers) for name in kinds),
    ]


def as_batch(sentences: Any) -> tuple[bool, Sequence[Any]]:
    """Return whether there is one sentence (a text or a list of ids), and the list of sentences."""
    if isinstance(sentences, str):
        return True, [sentences]
    check_rows("sentences", sentences)
    ndim = getattr(sentences, "ndim", None)  # arrays, tensors, series
    if ndim == 0 and isinstance(sentences, np.ndarray) and sentences.dtype.kind in "OTU":
        return True, [sentences.item()]
    if ndim is None and not isinstance(sentences, list | Sequence):  # the check of list is fast
        if not isinstance(sentences, Iterable):
            return True, [sentences]
        sentences = list(sentences)  # a generator, a view of a dict
    if ndim is None and not sentences:
        return True, [sentences]
    if ndim is not None and (ndim != 1 or len(sentences) == 0):
        return (False, list(sentences)) if ndim > 1 else (True, [sentences])
    first = next(iter(sentences))
    if hasattr(first, "__index__") and not getattr(first, "ndim", 0):
        return True, [sentences]
    return False, sentences if isinstance(sentences, list) else list(sentences)
