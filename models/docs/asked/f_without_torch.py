"""
Sentence embeddings without PyTorch
===================================

Asked of sentence-transformers: `issue 3018 <https://github.com/huggingface/sentence-transformers/issues/3018>`_.
``pip install selfattn-models`` brings selfattn, NumPy, tokenizers, safetensors, Jinja2 and other small packages.
"""

import sys

from selfattn_models.interop.sentence_transformers import SentenceTransformer

model = SentenceTransformer("all-MiniLM-L6-v2")
vectors = model.encode(["the sea was calm", "old stones"])
assert "torch" not in sys.modules
vectors.shape

# %%
# :doc:`/models/docs/guide/coming_from/sentence_transformers` says what differs.
