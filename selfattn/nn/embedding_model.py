"""The sentence-embedding model: tokens, positions, blocks of self-attention, mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.nn import _embedding_compute, init
from selfattn.nn._arrays import Array, Gradients, Pullback, Unchanged, as_gradient, check_size
from selfattn.nn.containers import ModuleList
from selfattn.nn.embedding import Embedding
from selfattn.nn.module import Module
from selfattn.nn.positions import SinusoidalPositions
from selfattn.nn.self_attention import SelfAttentionBlock
from selfattn.text import as_tokenizer

Sentence: TypeAlias = str | Sequence[int] | npt.NDArray[np.integer[Any]]

PARAMETERS = tuple(
    f"{layer}.{kind}" for layer in ("query", "key", "value", "ln") for kind in ("weight", "bias")
)


class EmbeddingModel(Module):
    """Turn a sentence into a vector: the mean over its tokens after some blocks of self-attention.

    Each token's row of a table, plus sinusoidal positions, goes through ``num_layers`` blocks
    ``LayerNorm(x + attention(x))``; the mean of what comes out is the embedding of the sentence.

    Parameters
    ----------
    tokenizer : object
        What makes ids of a sentence: something with SentencePiece's ``encode(sentence, out_type=int)``, a
        ``tokenizers.Tokenizer`` of Hugging Face, or a callable ``str -> list of int``.
    vocab_size : int
        How many ids there are: 0 … vocab_size − 1.
    embedding_dim : int
        The width d of everything, even.
    max_seq_len : int
        Of a longer sentence only the first so many tokens count.
    num_layers : int, default 1
        With 0 the mean of rows and positions is taken as it is.
    num_heads : int, default 1
        The heads of every block; it has to divide ``embedding_dim``.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        Where the weights come from: the table, then block by block query, key, value, each weight and then bias.

    Attributes
    ----------
    embedding_layer : Embedding
        The table, (vocab_size, embedding_dim), drawn from N(0, 1).
    attention_layers : ModuleList of SelfAttentionBlock
    positions : SinusoidalPositions
        No parameter.

    See Also
    --------
    ProxyTask : what it is trained with.
    SelfAttentionBlock

    Notes
    -----
    ``y, pullback = model.vjp(sentence)`` and ``grads = pullback(dy)``: sentences have no gradient. In place of a
    string every method takes the ids themselves, as a list or array of integers.

    The gradient of ``key.bias`` is zero: it adds the same number to all scores of a query, which softmax does not
    see. What comes out is rounding noise, which Adam turns into steps of full size; so after training that one
    parameter differs from run to run of different libraries, without effect on the embeddings.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1, 3.2 and 3.5; Devlin et al., "BERT", 2019, for
    encoders that read both ways.

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
        self.vocab_size = check_size("vocab_size", vocab_size)
        self.embedding_dim = check_size("embedding_dim", embedding_dim)
        self.max_seq_len = check_size("max_seq_len", max_seq_len)
        self.num_layers = check_size("num_layers", num_layers, 0)
        self.num_heads = check_size("num_heads", num_heads)
        if embedding_dim % 2:
            raise ValueError(
                f"embedding_dim must be even, as sines and cosines come in pairs, not {embedding_dim}"
            )
        if embedding_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embedding_dim; {num_heads} does not divide {embedding_dim}"
            )
        self.tokenizer = tokenizer
        self._tokenize = as_tokenizer(tokenizer)
        generator = init.as_generator(rng)
        self.embedding_layer = Embedding(vocab_size, embedding_dim, dtype=dtype, rng=generator)
        self.positions = SinusoidalPositions(embedding_dim, max_seq_len, dtype=dtype)
        self.attention_layers = ModuleList(
            SelfAttentionBlock(embedding_dim, num_heads, dtype=dtype, rng=generator)
            for _ in range(num_layers)
        )

    def forward(self, sentence: Sentence) -> Array:
        """Compute the embedding of a sentence.

        Parameters
        ----------
        sentence : str or sequence of int
            Text for the tokenizer, or ids. What is beyond ``max_seq_len`` tokens is left out.

        Returns
        -------
        ndarray, shape (embedding_dim,)

        Raises
        ------
        TypeError
            It is neither, or the tokenizer returned something else than integers.
        ValueError
            The sentence has no tokens, or one that is not in 0 … vocab_size − 1.
        """
        ids, cu_seqlens = self.pack([sentence])
        embedding: Array = _embedding_compute.embed(ids, cu_seqlens, *self._arrays())[0]
        return embedding

    def vjp(self, sentence: Sentence) -> tuple[Array, Pullback]:
        """Compute the embedding of a sentence and its pullback, ``dy -> grads``."""
        y, packed_pullback = self.packed_vjp([sentence])
        return y[0], lambda dy: packed_pullback(as_gradient(dy, y[0])[None])

    def packed_vjp(self, sentences: Sequence[Sentence]) -> tuple[Array, Pullback]:
        """Compute the embeddings of n sentences in one go, (n, embedding_dim), and their pullback, ``dy -> grads``."""
        ids, cu_seqlens = self.pack(sentences)
        table, positions, blocks = self._arrays()
        y, compute_pullback = _embedding_compute.embed_vjp(ids, cu_seqlens, table, positions, blocks)
        unchanged = Unchanged("EmbeddingModel", table, *(x for block in blocks for x in block.parameters))

        def pullback(dy: npt.ArrayLike) -> Gradients:
            dy = as_gradient(dy, y)
            unchanged.check()
            return self._named(compute_pullback(dy))

        return y, pullback

    def pack(self, sentences: Sequence[Sentence]) -> tuple[Array, Array]:
        """Put the ids of sentences one after the other.

        Returns
        -------
        ids : ndarray of int, shape (t,)
        cu_seqlens : ndarray of int, shape (len(sentences) + 1,)
            Where each sentence starts, and t at the end.
        """
        parts = [self.tokens(sentence) for sentence in sentences]
        cu_seqlens = np.zeros(len(parts) + 1, np.intp)
        np.cumsum([len(part) for part in parts], out=cu_seqlens[1:])
        return np.concatenate(parts), cu_seqlens

    def tokens(self, sentence: Sentence) -> npt.NDArray[np.intp]:
        """Return the ids of a sentence, at most ``max_seq_len``, after a check of what the tokenizer returned."""
        ids: Any = self._tokenize(sentence) if isinstance(sentence, str) else sentence
        try:
            array = np.asarray(ids[: self.max_seq_len])
        except TypeError:
            raise TypeError(f"expected a sentence or a sequence of ids, not {_quoted(ids)}") from None
        if array.size == 0:
            raise ValueError(f"the sentence {_quoted(sentence)} has no tokens")
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise TypeError(f"ids must be a sequence of integers, not {_quoted(ids)}, of {_quoted(sentence)}")
        if array.min() < 0 or array.max() >= self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)]
            raise ValueError(
                f"ids must be in 0...{self.vocab_size - 1}, as vocab_size is {self.vocab_size}, "
                f"not {wrong[0]}, of {_quoted(sentence)}"
            )
        return array.astype(np.intp, copy=False)

    def _arrays(self) -> tuple[Array, Array, list[_embedding_compute.Block]]:
        blocks = []
        block: Any
        for block in self.attention_layers:
            layers = (block.query, block.key, block.value, block.ln)
            parameters = [array for layer in layers for array in (layer.weight, layer.bias)]
            blocks.append(_embedding_compute.Block(parameters, block.num_heads, block.ln.eps))
        return self.embedding_layer.weight, self.positions.table, blocks

    def _named(self, gradients: list[Array]) -> Gradients:
        names = [f"{n}.{name}" for n in range(len(self.attention_layers)) for name in PARAMETERS]
        layers = dict(zip(names, gradients[1:], strict=True))
        parts = {"embedding_layer": {"weight": gradients[0]}, "attention_layers": layers}
        return self.gather_gradients(parts)


def _quoted(value: Any) -> str:
    """Quote what was given, a long thing only in part."""
    text = repr(value[:50] if isinstance(value, str | list | tuple) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
