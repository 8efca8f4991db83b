"""
A filter before the top k
=========================

Asked of txtai: `issue 915 <https://github.com/neuml/txtai/issues/915>`_, and of LangChain's FAISS:
`issue 28413 <https://github.com/langchain-ai/langchain/issues/28413>`_. A filter after the search may leave nothing.
"""

import tempfile

from selfattn_models import search

index = search.Index.create(tempfile.mkdtemp(), "all-MiniLM-L6-v2")
fields = [{"restaurant": 1}] * 100 + [{"restaurant": 2}]
index.add(["the old ship"] * 101, metadata=fields)
(hit,) = index.search("a ship", k=1, where={"restaurant": 2})
hit.metadata

# %%
# Only texts that pass the filter are compared: :doc:`/models/docs/guide/search`.
