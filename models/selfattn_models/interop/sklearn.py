"""Embeddings of texts for scikit-learn: a transformer for pipelines, searches of parameters and columns of tables.

>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from selfattn_models.interop.sklearn import SentenceEncoder
>>> classifier = make_pipeline(SentenceEncoder("all-MiniLM-L6-v2"), LogisticRegression())
>>> classifier.fit(["a storm at sea", "tea with milk"], ["weather", "food"])  # doctest: +SKIP
"""

from __future__ import annotations

import os
from typing import Any, Self

from selfattn.engine import Array, import_extra
from selfattn_models._encoders import column, encoder

import_extra("sklearn.base", package="scikit-learn")
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin  # noqa: E402


class SentenceEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Compute the embedding of each text, with a pretrained encoder; it learns nothing.

    A process loads a folder once for all of its encoders, and maps the weights, which processes share. A copy or a
    pickle has only the parameters.

    Parameters
    ----------
    model : path
        A folder, as :func:`selfattn_models.load` takes it, and ``dtype``.
    prompt, normalize, batch_size : optional
        As the model's ``encode`` takes them.
    dtype : {"float32", "bfloat16", "int8"}, optional
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        prompt: str | None = None,
        normalize: bool | None = None,
        batch_size: int | None = None,
        dtype: str | None = None,
    ) -> None:
        self.model = model
        self.prompt = prompt
        self.normalize = normalize
        self.batch_size = batch_size
        self.dtype = dtype

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the parameters and the texts, which are given as to :meth:`transform`."""
        self._encoded(column(X)[:1])
        return self

    def transform(self, X: Any) -> Array:
        """Return embeddings, (n, d), of a list, a 1-D array, a Series, or a table or array of one column."""
        return self._encoded(column(X))

    def _encoded(self, texts: list[str]) -> Array:
        model = encoder(self.model, self.dtype)
        options = {name: getattr(self, name) for name in ("prompt", "normalize", "batch_size")}
        found: Array = model.encode(texts, **{name: x for name, x in options.items() if x is not None})
        return found

    @property
    def _n_features_out(self) -> int:
        """The width, for get_feature_names_out."""
        return int(self._encoded([]).shape[1])

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.string = tags.input_tags.one_d_array = True
        tags.input_tags.two_d_array = tags.requires_fit = False
        tags.transformer_tags.preserves_dtype = []
        return tags
