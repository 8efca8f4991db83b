"""
Sentence embeddings without PyTorch
===================================

Asked of sentence-transformers: `issue 3018 <https://github.com/huggingface/sentence-transformers/issues/3018>`_.
``pip install 'selfattn[models]'`` brings NumPy, tokenizers, safetensors and tqdm.
"""

import sys

from selfattn.interop.sentence_transformers import SentenceTransformer

model = SentenceTransformer("all-MiniLM-L6-v2")
vectors = model.encode(["the sea was calm", "old stones"])
assert "torch" not in sys.modules
vectors.shape

# %%
# :doc:`/docs/guide/coming_from/sentence_transformers` says what differs.
