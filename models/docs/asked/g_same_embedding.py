"""
The same embedding, whatever the batch
======================================

Asked of sentence-transformers: `issue 2312 <https://github.com/huggingface/sentence-transformers/issues/2312>`_.
There the embedding of a text depends, in its last digits, on the texts around it.
"""

import numpy as np

import selfattn_models as models

model = models.load("all-MiniLM-L6-v2")
texts = ["the sea was calm", "a ship", "dark water near the old stones"]
alone = np.stack([model.encode(text) for text in texts])
assert np.array_equal(model.encode(texts), alone)
assert np.array_equal(model.encode(texts, batch_size=1), alone)

# %%
# The number of threads changes nothing either; another processor may.
