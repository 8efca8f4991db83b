"""BERTopic's backend for a folder, without PyTorch.

>>> from selfattn_models.interop.bertopic import Embedder
>>> embedder = Embedder("all-MiniLM-L6-v2")  # doctest: +SKIP
>>> embedder.embed(["a storm at sea", "the sea was calm"]).shape  # doctest: +SKIP
(2, 384)
"""

from __future__ import annotations

from typing import Any

from selfattn.engine import Array, import_extra
from selfattn_models._encoders import as_encoder

__all__ = ["Embedder"]

_Base: Any = import_extra("bertopic.backend", package="bertopic").BaseEmbedder


class Embedder(_Base):  # type: ignore[misc]
    """The embedding model of a ``BERTopic(embedding_model=…)``: of documents, and of words.

    Parameters
    ----------
    embedding_model : path or model
        A folder, or what ``models.load`` returned.
    **keywords
        Keywords of the model's ``encode``, such as ``prompt``.
    """

    def __init__(self, embedding_model: Any, **keywords: Any) -> None:
        super().__init__(as_encoder(embedding_model))
        self.keywords = keywords

    def embed(self, documents: Any, verbose: bool = False) -> Array:
        """Compute the embeddings of documents or words, (n, d)."""
        y: Array = self.embedding_model.encode(documents, **{"progress": verbose, **self.keywords})
        return y
