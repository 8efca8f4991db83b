"""The task that a sentence-embedding model learns from: similar sentences near, others far."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from selfattn.nn._arrays import Array, Gradients, Pullback
from selfattn.nn.embedding_model import EmbeddingModel, Sentence
from selfattn.nn.module import Module


class ProxyTask(Module):
    """How sure a model is that one sentence is similar to another, and a third is not.

    confidence = log σ(main · similar) + log σ(−main · non_similar), of the sentences' embeddings; at most 0.

    Parameters
    ----------
    model : EmbeddingModel
        Its parameters, under its names, are those of the task.

    See Also
    --------
    EmbeddingModel

    Notes
    -----
    The loss is −confidence: ``confidence, pullback = task.vjp(main, similar, non_similar)`` and
    ``grads = pullback(-1.0)``. log σ(x) is computed as min(x, 0) − log(1 + exp(−abs(x))), which is finite and exact to
    rounding for every finite x.

    References
    ----------
    Mikolov et al., "Distributed Representations of Words and Phrases and their Compositionality", 2013, equation 4,
    with one negative sample.

    Examples
    --------
    >>> from selfattn import nn, optim
    >>> words = "tom chase jerry likes cheese harry killed voldemort".split()
    >>> def tokenize(sentence):
    ...     return [words.index(word) for word in sentence.split()]
    >>> task = nn.ProxyTask(nn.EmbeddingModel(tokenize, len(words), 8, max_seq_len=8, rng=0))
    >>> triplet = "tom chase jerry", "jerry likes cheese", "harry killed voldemort"
    >>> before = task.execute(*triplet)
    >>> optimizer = optim.Adam(task.parameters(), lr=0.01)
    >>> for _ in range(10):
    ...     confidence, pullback = task.vjp(*triplet)
    ...     optimizer.step(pullback(-1.0))
    >>> bool(task.execute(*triplet) > before)
    True
    """

    def __init__(self, model: EmbeddingModel) -> None:
        if not isinstance(model, EmbeddingModel):
            raise TypeError(f"model must be an EmbeddingModel, not {type(model).__name__}")
        self.model = model

    def _all_parameters(self, prefix: str = "") -> Iterator[tuple[str, Array]]:
        return self.model._all_parameters(prefix)

    def forward(self, main: Sentence, similar: Sentence, non_similar: Sentence) -> Any:
        """Compute the confidence; :meth:`execute` is another name for it."""
        return self.execute(main, similar, non_similar)

    def execute(self, main: Sentence, similar: Sentence, non_similar: Sentence) -> Any:
        """Compute the confidence.

        Parameters
        ----------
        main, similar, non_similar : str or sequence of int
            As for :meth:`EmbeddingModel.forward`.

        Returns
        -------
        floating
            A number of the model's dtype.
        """
        return _confidence(*(self.model(sentence) for sentence in (main, similar, non_similar)))

    def vjp(self, main: Sentence, similar: Sentence, non_similar: Sentence) -> tuple[Any, Pullback]:
        """Compute the confidence and its pullback, ``d_confidence -> grads``, keyed like ``model.parameters()``."""
        y, model_pullback = self.model.packed_vjp([main, similar, non_similar])
        confidence = _confidence(*y)

        def pullback(d_confidence: float) -> Gradients:
            a, b, c = y
            # d log σ(x) / dx = σ(−x)
            d_similar = d_confidence * _sigmoid(-(a @ b))
            d_other = -d_confidence * _sigmoid(a @ c)
            dy = np.stack([d_similar * b + d_other * c, d_similar * a, d_other * a])
            grads: Gradients = model_pullback(dy.astype(y.dtype))
            return grads

        return confidence, pullback


def _confidence(main: Array, similar: Array, non_similar: Array) -> Any:
    return _log_sigmoid(main @ similar) + _log_sigmoid(-(main @ non_similar))


def _log_sigmoid(x: Any) -> Any:
    return np.minimum(x, 0) - np.log1p(np.exp(-np.abs(x)))


def _sigmoid(x: Any) -> Any:
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, 1) / (1 + e)
