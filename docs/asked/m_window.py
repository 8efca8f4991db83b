"""
A window without a mask of all pairs
====================================

Asked of nanochat: `issue 825 <https://github.com/karpathy/nanochat/issues/825>`_, and of Transformers:
`issue 29777 <https://github.com/huggingface/transformers/issues/29777>`_. With a mask, memory does not shrink with
the window.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 16384, 64), dtype=np.float32)
out = sa.scaled_dot_product_attention(q, k, v, is_causal=True, window=(127, None))
assert np.allclose(
    out[:, 127:128], sa.scaled_dot_product_attention(q[:, 127:128], k[:, :128], v[:, :128]), atol=1e-5
)

# %%
# A boolean mask of the same window would have 268 million elements.
