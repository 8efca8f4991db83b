"""
Learnt attention sinks, with their gradient
===========================================

Asked of FlashAttention: `issue 603 <https://github.com/Dao-AILab/flash-attention/issues/603>`_. A sink is a score
that only the denominator of the softmax contains.
"""

import numpy as np

import selfattn as sa

q, k, v = np.random.default_rng(0).standard_normal((3, 8, 100, 64), dtype=np.float32)
sinks = np.linspace(-1, 1, 8, dtype=np.float32)  # one for each head
options = {"is_causal": True, "window": (31, None), "sinks": sinks}
out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, wrt=("sinks",), **options)
pullback(np.ones_like(out)).sinks.round(2)

# %%
# One gradient for each head.
