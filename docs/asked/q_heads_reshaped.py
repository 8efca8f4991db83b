"""
Heads that are reshaped and not transposed
==========================================

Asked of pytorch-seq2seq: `issue 148 <https://github.com/bentrevett/pytorch-seq2seq/issues/148>`_, and of the annotated
transformer: `issue 118 <https://github.com/harvardnlp/annotated-transformer/issues/118>`_. Can one reshape to (batch,
heads, length, width) at once?
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def split(x, num_heads):
    B, L, C = x.shape
    return x.reshape(B, num_heads, L, C // num_heads)


def attention(x, wq, wk, wv, num_heads):
    q, k, v = (split(x @ w, num_heads) for w in (wq, wk, wv))
    weights = sa.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(x.shape)


print(sa.diagnose(attention))

# %%
# All shapes are right. But memory has the numbers of a word next to each other, so a reshape alone gives the first head
# the first words, whole. A causal mask then lets words see later ones. The right lines:

wrong = split


def split(x, num_heads):
    B, L, C = x.shape
    return x.reshape(B, L, num_heads, C // num_heads).swapaxes(1, 2)


print(sa.diagnose(attention))

# %%
# Six words of four numbers each, for two heads. The colour of a number is its word.

words = np.repeat(np.arange(6), 4).reshape(1, 6, 4)
figure, axes = plt.subplots(1, 4, figsize=(8, 3.4), layout="constrained", sharey=True)
heads = [*wrong(words, 2)[0], *split(words, 2)[0]]
for ax, rows, title in zip(axes, heads, ("reshape, head 0", "head 1", "and transpose, head 0", "head 1")):
    ax.imshow(rows, cmap="viridis", vmin=0, vmax=5)
    ax.set(title=title, xticks=[], yticks=range(6))
axes[0].set_ylabel("rows of a head")
