"""
Masks, windows, documents
=========================

Who may attend to whom. Six patterns of 16 tokens, and the weights that equal scores get.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa

L = 16
q = k = v = np.zeros((L, 8))  # equal scores: a row's weights show what is open
documents = [0] * 5 + [1] * 8 + [2] * 3
every_third = np.abs(np.subtract.outer(range(L), range(L))) % 3 == 0

patterns = {
    "causal": {"is_causal": True},
    "a window of 4": {"is_causal": True, "window": (3, None)},
    "documents": {"block_mask": sa.BlockMask.from_documents(documents)},
    "a prefix of 6, then causal": {"block_mask": sa.BlockMask.prefix_lm(6)},
    "a mask of your own": {"attn_mask": every_third},
    "ALiBi: near is more": {"alibi_slopes": [0.4]},
}

figure, axes = plt.subplots(2, 3, figsize=(9, 6.4), layout="constrained")
for ax, (name, options) in zip(axes.flat, patterns.items()):
    out, weights = sa.scaled_dot_product_attention(q[None], k[None], v[None], return_weights=True, **options)
    ax.imshow(weights[0], cmap="Blues", vmin=0, vmax=0.3)
    ax.set(title=name, xticks=[], yticks=[])
figure.supxlabel("keys")
figure.supylabel("queries")

# %%
# Closed blocks of a block mask, and what a window closes, take no time. Patterns combine: windows in documents, for
# example, are ``block_mask=…, window=(3, 0)``.
