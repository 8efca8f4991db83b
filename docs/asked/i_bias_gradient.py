"""
The gradient of an attention bias
=================================

Asked of xFormers: `issue 783 <https://github.com/facebookresearch/xformers/issues/783>`_. A learnt bias, such as that
of relative positions, needs the gradient of the mask.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
bias = np.zeros((8, 100, 100), np.float32)  # one for each head, for all of a batch
out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, bias, wrt=("query", "key", "value", "attn_mask"))
dq, dk, dv, d_bias = pullback(np.ones_like(out))
assert d_bias.shape == bias.shape

# %%
# ``wrt`` may also name ``alibi_slopes`` and ``sinks``.
