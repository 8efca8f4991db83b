"""
The backward pass of block masks, on a CPU
==========================================

Asked of PyTorch: `issue 148752 <https://github.com/pytorch/pytorch/issues/148752>`_. FlexAttention has no backward
pass on a CPU.
"""

import numpy as np

import selfattn as sa

documents = np.repeat([0, 1, 2], [300, 500, 224])
mask = sa.BlockMask.from_documents(documents) & sa.BlockMask.prefix_lm(128)
q, k, v = np.random.default_rng(0).standard_normal((3, 8, 1024, 64), dtype=np.float32)
out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, block_mask=mask)
gradients = pullback(np.ones_like(out))
assert gradients.query.shape == q.shape

# %%
# :doc:`/gallery/documents` draws such gradients. Not supported: a mask that is a function of two indices.
