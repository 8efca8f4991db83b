"""LangChain's embeddings, of a folder, for its vector stores and retrievers, without PyTorch.

>>> from selfattn_models.interop.langchain import Embeddings
>>> embeddings = Embeddings("all-MiniLM-L6-v2")  # doctest: +SKIP
>>> len(embeddings.embed_query("a storm at sea"))  # doctest: +SKIP
384
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from selfattn.engine import import_extra
from selfattn_models._encoders import as_encoder, column

__all__ = ["Embeddings"]

Keywords: TypeAlias = Mapping[str, Any] | None
_Base: Any = import_extra("langchain_core.embeddings", package="langchain-core").Embeddings


class Embeddings(_Base):  # type: ignore[misc]
    """Embeddings of a folder's model: documents and queries get the folder's prompts for them.

    Parameters
    ----------
    model_name : path or model
        A folder, or what ``models.load`` returned.
    encode_kwargs, query_encode_kwargs : mapping, optional
        Keywords of ``encode_document`` and ``encode_query``, such as ``{"normalize_embeddings": True}``; the first
        are also those of queries if the second are None, as in LangChain's own.
    """

    def __init__(
        self, model_name: Any, encode_kwargs: Keywords = None, query_encode_kwargs: Keywords = None
    ) -> None:
        self.model = as_encoder(model_name)
        self.encode_kwargs = encode_kwargs or {}
        self.query_encode_kwargs = self.encode_kwargs if query_encode_kwargs is None else query_encode_kwargs

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the embeddings of documents."""
        return self._embed("encode_document", column(texts), self.encode_kwargs)

    def embed_query(self, text: str) -> list[float]:
        """Return the embedding of a query."""
        return self._embed("encode_query", [text], self.query_encode_kwargs)[0]

    def _embed(self, method: str, texts: list[str], keywords: Mapping[str, Any]) -> list[list[float]]:
        # A model that selfattn trained has one method for both.
        encode = getattr(self.model, method, self.model.encode)
        y: list[list[float]] = encode(texts, **keywords).tolist()
        return y
