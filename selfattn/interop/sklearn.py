"""Embeddings of texts for scikit-learn: a transformer for pipelines, searches of parameters and columns of tables.

>>> from sklearn.linear_model import LogisticRegression
>>> from sklearn.pipeline import make_pipeline
>>> from selfattn.interop.sklearn import SentenceEncoder
>>> classifier = make_pipeline(SentenceEncoder("all-MiniLM-L6-v2"), LogisticRegression())
>>> classifier.fit(["a storm at sea", "tea with milk"], ["weather", "food"])  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from selfattn import models
from selfattn._check import Array, quoted
from selfattn._extras import import_extra

import_extra("sklearn.base", "sklearn")
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin  # noqa: E402


class SentenceEncoder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Compute the embedding of each text, with a pretrained encoder; it learns nothing.

    A process loads a folder once for all of its encoders, and maps the weights, which processes share. A copy or a pickle has
    only the parameters.

    Parameters
    ----------
    model : path
        A folder, as :func:`selfattn.models.load` takes it, and ``dtype``.
    prompt, normalize, batch_size : optional
        As the model's ``encode`` takes them.
    dtype : {"float32", "bfloat16", "int8"}, optional
    """

    def __init__(
        self, model: str | os.PathLike[str], *, prompt: str | None = None, normalize: bool | None = None,
        batch_size: int | None = None, dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        self.prompt = prompt
        self.normalize = normalize
        self.batch_size = batch_size
        self.dtype = dtype

    def fit(self, X: Any, y: Any = None) -> Self:
        """Check the parameters and the texts, which are given as to :meth:`transform`."""
        self._encoded(_texts(X)[:1])
        return self

    def transform(self, X: Any) -> Array:
        """Return embeddings, (n, d), of a list, a one-dimensional array, a Series, or a table or array of one column."""
        return self._encoded(_texts(X))

    def _encoded(self, texts: list[str]) -> Array:
        folder = Path(self.model).absolute()
        stats = [(str(file), file.stat()) for file in sorted(folder.rglob("*"))]
        model = _loaded(
            folder, self.dtype, tuple((name, each.st_size, each.st_mtime_ns) for name, each in stats)
        )
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


@functools.lru_cache(maxsize=4)
def _loaded(folder: Path, dtype: str | None, state: tuple[Any, ...]) -> Any:
    """Load a model; a change of its files, which changes ``state``, loads it again."""
    model = models.load(folder, dtype)
    if not hasattr(model, "encode"):
        raise TypeError(f"{folder} has a {type(model).__name__}, which computes no embeddings of texts")
    return model


def _texts(X: Any) -> list[str]:
    """Return texts as a list: of a list, a one-dimensional array, a Series, or one column."""
    if isinstance(X, str):
        raise ValueError(f"texts must be a list or a column of texts, not one text, {quoted(X)}")
    given = X.to_numpy() if hasattr(X, "to_numpy") else X if isinstance(X, np.ndarray) else list(X)
    array = np.asarray(given, dtype=object)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(
            f"texts must be one column, not of shape {array.shape}; a ColumnTransformer selects one"
        )
    for n, text in enumerate(array):
        if not isinstance(text, str):
            raise ValueError(f"text {n} is {text!r:.80}, not a str; fill missing texts, for example with ''")
    return array.tolist()  # type: ignore[no-any-return]
