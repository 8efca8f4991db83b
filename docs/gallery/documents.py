"""
Gradients of a block mask
=========================

Three documents, packed into one sequence, must not learn from each other. The gradient of a loss in the second
document is zero in all others, and the closed blocks take no time, forward and backward.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa

lengths = (40, 70, 50)
documents = np.repeat([0, 1, 2], lengths)
mask = sa.BlockMask.from_documents(documents)
q, k, v = np.random.default_rng(0).standard_normal((3, 1, sum(lengths), 16))

out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, block_mask=mask, is_causal=True)
grad_out = np.zeros_like(out)
grad_out[:, documents == 1] = 1  # the loss: a sum over the second document
gradients = pullback(grad_out)
assert not gradients.key[:, documents != 1].any()

# %%
# The same from a dense mask of all pairs:

_, slow = sa.scaled_dot_product_attention_vjp(q, k, v, mask.to_dense(160, 160), is_causal=True)
assert np.allclose(gradients.key, slow(grad_out).key, atol=1e-12)

# %%
# Keys that more tokens see get more of the gradient; a document begins where it is largest.

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(1, 1.6))
axes[0].imshow(mask.to_dense(160, 160) & np.tri(160, dtype=bool), cmap="Blues")
axes[0].set(title="open pairs", xlabel="keys", ylabel="queries")
axes[1].plot(np.abs(gradients.value).mean(axis=(0, 2)), label="values")
axes[1].plot(np.abs(gradients.key).mean(axis=(0, 2)), label="keys")
axes[1].set(title="size of the gradient", xlabel="token")
axes[1].legend()
