"""
The log-sum-exp, with its gradient
==================================

Asked of FlashAttention: `issue 1137 <https://github.com/Dao-AILab/flash-attention/issues/1137>`_. A loss that holds
scores small needs it, and so does attention whose keys are on several machines.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64))
(out, lse), pullback = sa.scaled_dot_product_attention_vjp(q, k, v, return_lse=True)
gradients = pullback(np.zeros_like(out), 2 * lse / lse.size)  # of a loss that is the mean of lse squared
assert gradients.query.any()

# %%
# :doc:`/gallery/shards` merges the results of two machines by it.
