"""Classifiers and cross-encoders: encoders of texts with logits of the first token's last hidden state."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np

from selfattn.engine import Array, bar, check_size, copy_doc, quoted
from selfattn.engine import linear as multiply
from selfattn.functional import softmax
from selfattn.nn.module import Gradients
from selfattn_models._folder import Config
from selfattn_models._keywords import rename_arguments
from selfattn_models._pipeline import SENTENCE_CONFIG, Pipeline
from selfattn_models._pretrained import Pulled, Shapes, linear
from selfattn_models._text_encoder import TextEncoder, in_order
from selfattn_models._tokenizer import Sentences, is_pair

CLASSIFIER = "ForSequenceClassification"  # the end of the names of Transformers' classes


class TextClassifier(TextEncoder):
    """An encoder with two layers after it, which ``head`` names.

    Attributes
    ----------
    num_labels : int
        How many logits there are.
    """

    suffix = CLASSIFIER
    head: ClassVar[tuple[str, str, str]]
    num_labels: int

    def _read_head(self, config: Config) -> None:
        labels = config.raw("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise config.error(f"id2label must be names by number, not {labels!r:.80}")
        self.num_labels = config.size("num_labels", len(labels) if labels else 2)

    def _more_shapes(self) -> tuple[Shapes, bool]:
        first, _, second = self.head
        d = self.hidden_size
        return linear(first, d, d) | linear(second, self.num_labels, d), False

    def _name(self, name: str) -> str:
        return name if "classifier" in name else self.prefix + name

    def _logits(self, ids: Array, cu_seqlens: Array, types: Array | None = None) -> Array:
        """Compute (sequences, num_labels)."""
        return self._head_vjp(self._rows(ids, cu_seqlens, "first", types))[0]

    def _head_vjp(self, rows: Array) -> tuple[Array, Callable[[Array], tuple[Array, Gradients]]]:
        """Compute logits of the first tokens' rows.

        From their gradients come those of the rows and of the head's parameters.
        """
        (first, activation, second), arrays = self.head, self.arrays
        w, v = arrays[f"{first}.weight"], arrays[f"{second}.weight"]
        x = multiply(rows, w, arrays[f"{first}.bias"])
        active = np.tanh(x) if activation == "tanh" else np.maximum(x, 0)

        def pulled(dy: Array) -> tuple[Array, Gradients]:
            dx = dy @ v * (1 - active * active if activation == "tanh" else active > 0)
            of_weights = {f"{first}.weight": dx.T @ rows, f"{second}.weight": dy.T @ active}
            return dx @ w, of_weights | {f"{first}.bias": dx.sum(axis=0), f"{second}.bias": dy.sum(axis=0)}

        return multiply(active, v, arrays[f"{second}.bias"]), pulled

    def predict(
        self, sentences: Any, batch_size: int | None = None, progress: bool = False, **theirs: Any
    ) -> Array:
        """Compute the logits of a classifier or cross-encoder.

        Parameters
        ----------
        sentences : str, pair of str, or iterable of such
            A tuple of two texts is a pair. Ids may take the place of a text.
        batch_size, progress
            As for :meth:`encode`.
        **theirs
            Keywords of sentence-transformers: ``activation_fn``, a function of all logits, or ``"Sigmoid"``;
            ``apply_softmax`` over several labels; ``prompt``, before each first text; others as for :meth:`encode`.

        Returns
        -------
        ndarray of float32, shape (labels,) or (n, labels)
            Logits, not probabilities: of one label, sentence-transformers' CrossEncoder returns ``1 / (1 + exp(-x))``
            by default. The bits of each do not depend on the others.

        Raises
        ------
        TypeError
            The model has no classifier, or as for :meth:`encode`.
        ValueError
            As for :meth:`encode`.

        Examples
        --------
        ::

            reranker = models.load("ms-marco-MiniLM-L6-v2")
            scores = reranker.predict([("who wrote it?", passage) for passage in passages])[:, 0]
        """
        names = {"progress": progress, "prompt": None, "activation_fn": "Identity", "apply_softmax": False}
        ours = rename_arguments("predict", theirs, self.pipeline, **names)
        most = sys.maxsize if batch_size is None else check_size("batch_size", batch_size)
        given = _given(sentences)
        chunks = [np.empty((0, self.num_labels), np.float32)]
        with bar(ours["progress"], given.total, "predict") as done:
            for batch in self._token_batches(given, ours["prompt"]):
                parts: list[Array] = []
                order: list[int] = []
                for group in batch.groups(most):
                    parts.append(self._logits(*batch.pack(group)[:3]))
                    order += group
                    done(len(group))
                chunks.append(in_order(parts, order))
        given.warn(self.tokenizer)
        y = apply_activation(np.concatenate(chunks), ours["activation_fn"])
        y = softmax(y) if ours["apply_softmax"] and self.num_labels > 1 else y
        return y[0] if given.alone else y

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
        progress: bool = False,
        **theirs: Any,
    ) -> list[dict[str, Any]]:
        """Sort documents by the scores of a cross-encoder for them and a query, the best first.

        Parameters
        ----------
        query : str
        documents : iterable of str
        top_k : int, optional
            How many to return at most; by default all.
        return_documents : bool, default False
        batch_size, progress, **theirs
            As for :meth:`predict`. By default ``activation_fn`` is the folder's, as in sentence-transformers.

        Returns
        -------
        list of dict
            ``corpus_id``, a document's number, ``score``, and ``text`` if asked for.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`predict`; or the model has several labels.
        """
        if (labels := self.num_labels) != 1:
            raise ValueError(f"rank needs one label, and the model has {labels}; predict has a score of each")
        if isinstance(documents, str):
            raise TypeError(f"documents must be an iterable of str, not {quoted(documents)}")
        texts, most = list(documents), None if top_k is None else check_size("top_k", top_k)
        of_folder = folder_activation(self.config, self.pipeline, labels)
        theirs["activation_fn"] = theirs.get("activation_fn") or of_folder
        scores = self.predict([(query, text) for text in texts], batch_size, progress, **theirs)
        found = [{"corpus_id": n, "score": score} for n, score in enumerate(scores[:, 0].tolist())]
        found = sorted(found, key=lambda each: each["score"], reverse=True)[:most]
        return [each | {"text": texts[each["corpus_id"]]} for each in found] if return_documents else found

    def forward(self, sentences: Any) -> Array:
        """Compute logits, as :meth:`predict` does."""
        return self.predict(sentences)

    @copy_doc(TextEncoder.vjp)
    def vjp(self, sentences: Any) -> tuple[Array, Pulled]:
        """Compute logits and their pullback, ``dy -> grads``."""
        given = _given(sentences)
        ids, cu_seqlens, types, _ = self._whole(given, self.pipeline.prompt(None)).pack()
        rows, pulled = self._rows_vjp(ids, cu_seqlens, "first", types)
        y, head_pulled = self._head_vjp(rows)

        def backward(dy: Array) -> Gradients:
            d, of_head = head_pulled(dy.reshape(y.shape))
            return pulled(d) | of_head

        return self._with_pullback(y[0] if given.alone else y, backward)


def _given(sentences: Any) -> Sentences:
    """Return the sentences of a call, where a tuple of two texts is one pair."""
    pair = isinstance(sentences, tuple) and is_pair(sentences)
    given = Sentences([sentences] if pair else sentences)
    given.alone = given.alone or pair
    return given


def _sigmoid(x: Array) -> Array:
    y: Array = np.exp(-np.logaddexp(0, -x, dtype=x.dtype))  # 1 / (1 + exp(-x)) without overflow
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"Identity": lambda x: x, "Sigmoid": _sigmoid}


def folder_activation(config: Mapping[str, Any], pipeline: Pipeline, labels: int) -> str:
    """Return the name of the function that CrossEncoder applies to the logits of a folder by default."""
    settings = json.loads(pipeline.kept.get(SENTENCE_CONFIG, b"{}"))
    newer, older = config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function")
    of_model = newer.get("activation_fn") if isinstance(newer, dict) else older
    return str(settings.get("activation_fn") or of_model or ("Sigmoid" if labels == 1 else "Identity"))


def apply_activation(logits: Array, given: Any) -> Array:
    """Apply an activation to logits: a function of an array, or a name or module of PyTorch, if it is known here."""
    if isinstance(given, str) or type(given).__module__.startswith("torch."):
        name = given.rpartition(".")[2] if isinstance(given, str) else type(given).__name__
        if name not in ACTIVATIONS:
            known = f"supported are {', '.join(ACTIVATIONS)} and any function of a NumPy array"
            raise ValueError(f"activation_fn {name} is not supported; {known}")
        given = ACTIVATIONS[name]
    y: Array = np.asarray(given(logits))
    if y.shape != logits.shape:
        raise ValueError(f"activation_fn must keep the shape {logits.shape}; it returned {y.shape}")
    return y
