"""
NaN in padding, and rows without keys
=====================================

Asked of PyTorch: `issue 101967 <https://github.com/pytorch/pytorch/issues/101967>`_ and
`issue 103749 <https://github.com/pytorch/pytorch/issues/103749>`_. What is masked should not matter, and a row
without keys should not be NaN.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 8))
mask = np.tri(4, dtype=bool)
mask[2] = False  # a row without keys
before = sa.scaled_dot_product_attention(q, k, v, mask)
k[:, 3] = v[:, 3] = np.nan  # only the last query sees this key
after = sa.scaled_dot_product_attention(q, k, v, mask)
assert np.allclose(after[:, :3], before[:, :3])
assert not after[:, 2].any()

# %%
# What happens at other edges is in :doc:`/docs/guide/semantics`.
