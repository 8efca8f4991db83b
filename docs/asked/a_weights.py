"""
Attention weights from scaled_dot_product_attention
====================================================

Asked of PyTorch: `issue 119811 <https://github.com/pytorch/pytorch/issues/119811>`_. Its fused kernels return the
output alone.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 2, 8, 100, 64), dtype=np.float32)
out, weights = sa.scaled_dot_product_attention(q, k, v, is_causal=True, return_weights=True)
assert weights.shape == (2, 8, 100, 100)
assert np.allclose(weights @ v, out, atol=1e-5)

# %%
# Tensors of PyTorch: ``selfattn.interop.torch.scaled_dot_product_attention(q, k, v, return_weights=True)``.
