"""The training objective of a sentence-embedding model: embeddings of similar sentences move together, others apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_input
from selfattn._docs import copy_doc
from selfattn.functional._products import widened
from selfattn.nn.embedding_model import EmbeddingModel, Sentence, as_batch
from selfattn.nn.module import Gradients, Module, Pullback

Sentences: TypeAlias = Sentence | Sequence[Sentence]


class ProxyTask(Module):
    """The confidence of a model that one sentence is similar to another, and that a third is not.

    confidence = log σ(main · similar) + log σ(−main · non_similar), of the sentences' embeddings; at most 0.

    Parameters
    ----------
    model : EmbeddingModel
        The task has its parameters, under the same names.

    Notes
    -----
    The loss is −confidence: ``confidence, pullback = task.vjp(main, similar, non_similar)`` and
    ``grads = pullback(-1.0)``. Three lists of n sentences have n confidences; their mean is the loss with
    ``grads = pullback(-1 / n)``. The model computes all sentences in one pass.

    log σ(x) is computed as min(x, 0) − log(1 + exp(−abs(x))), which is finite, and exact up to rounding, for every
    finite x.

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

    def _all_parameters(self, prefix: str = "") -> list[tuple[str, Array]]:
        return self.model._all_parameters(prefix)

    def execute(self, main: Sentences, similar: Sentences, non_similar: Sentences) -> Any:
        """Compute the confidence.

        Parameters
        ----------
        main, similar, non_similar : str, sequence of int, or lists of n such
            As for :meth:`EmbeddingModel.forward`.

        Returns
        -------
        floating, or ndarray of shape (n,)
            Of the model's dtype.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`EmbeddingModel.forward`, or the lists differ in length.
        """
        batch, sentences = _all_of(main, similar, non_similar)
        rows = self.model(sentences)
        confidences = _core._proxy_confidences(_triplets(rows))[0].astype(rows.dtype, copy=False)
        return confidences if batch else confidences[0]

    forward = execute

    def check(self, triplets: Iterable[Sequence[Any]]) -> None:
        """Check, before training changes anything, that the model can take every sentence of the triplets.

        Parameters
        ----------
        triplets : iterable of (main, similar, non_similar)

        Raises
        ------
        TypeError, ValueError
            As for :meth:`execute`; the message says which triplet.
        """
        seen: set[str] = set()
        for number, triplet in enumerate(triplets):
            for sentence in triplet:
                if isinstance(sentence, str):
                    if sentence in seen:
                        continue
                    seen.add(sentence)
                try:
                    self.model.tokens(sentence)
                except (TypeError, ValueError) as error:
                    kind = TypeError if isinstance(error, TypeError) else ValueError
                    raise kind(f"triplets[{number}]: {error}") from error

    @copy_doc(execute)
    def vjp(self, main: Sentences, similar: Sentences, non_similar: Sentences) -> tuple[Any, Pullback]:
        """Compute the confidence and its pullback, ``d_confidence -> grads``.

        For n triplets, ``d_confidence`` is (n,), or a number for all of them: −1/n for the mean loss.
        """
        batch, sentences = _all_of(main, similar, non_similar)
        rows, model_pullback = self.model.vjp(sentences)
        y = _triplets(rows)
        confidences, slopes = _core._proxy_confidences(y)
        every = confidences.astype(rows.dtype, copy=False)
        confidence = every if batch else every[0]

        def pullback(d_confidence: npt.ArrayLike) -> Gradients:
            d = as_input(d_confidence, y.dtype, "d_confidence")
            if d.shape not in ((), confidence.shape):
                raise ValueError(f"d_confidence must have shape {confidence.shape} or (), not {d.shape}")
            d_products = (slopes * d).astype(y.dtype, copy=False)
            grads: Gradients = model_pullback(_core._proxy_gradients(y, d_products).reshape(rows.shape))
            return grads

        return confidence, pullback


def _triplets(rows: Array) -> Array:
    """View the embeddings (3·n, d) of n main, n similar and n non-similar sentences as (3, n, d)."""
    return widened(rows).reshape(3, -1, rows.shape[-1])


def _all_of(*kinds: Sentences) -> tuple[bool, list[Any]]:
    """Return whether lists were given, and one list: the main, then the similar, then the non-similar sentences."""
    read = [as_batch(kind) for kind in kinds]
    alone, given = zip(*read, strict=True)
    if len(set(alone)) > 1:
        raise TypeError("main, similar and non_similar must be three sentences or three lists of sentences")
    lengths = list(map(len, given))
    if len(set(lengths)) > 1:
        named = ", ".join(map(str, lengths))
        raise ValueError(f"main, similar and non_similar must have the same length, not {named}")
    return not alone[0], [sentence for sentences in given for sentence in sentences]
