"""
√d of the wrong axis
====================

Asked of vit-pytorch: `issue 65 <https://github.com/lucidrains/vit-pytorch/issues/65>`_, and of Karpathy's lecture:
`pull request 6 <https://github.com/karpathy/ng-video-lecture/pull/6>`_. The d of √d is the width of one head, which is
the number of products in a score. ``C`` is the width of all heads.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention(x, wq, wk, wv, num_heads):
    B, L, C = x.shape
    q, k, v = ((x @ w).reshape(B, L, num_heads, -1).swapaxes(1, 2) for w in (wq, wk, wv))
    weights = sa.softmax(q @ k.swapaxes(2, 3) / np.sqrt(C), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(B, L, C)


print(sa.diagnose(attention))

# %%
# No error is raised, and a model learns all the same, but its weights begin too even. Of arrays (batch, length, width)
# ``shape[1]`` is the length:

print(sa.diagnose(lambda q, k, v: sa.softmax(q @ k.swapaxes(1, 2) / np.sqrt(q.shape[1])) @ v).faults)

# %%
# The right lines take the last axis of the queries:


def mended(x, wq, wk, wv, num_heads):
    B, L, C = x.shape
    q, k, v = ((x @ w).reshape(B, L, num_heads, -1).swapaxes(1, 2) for w in (wq, wk, wv))
    weights = sa.softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1]), axis=-1)
    return (weights @ v).swapaxes(1, 2).reshape(B, L, C)


print(sa.diagnose(mended))

# %%
# The weights of one of eight heads, each of width 8:

q, k = np.random.default_rng(0).standard_normal((2, 6, 8))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for ax, d in zip(axes, (64, 8)):
    ax.imshow(sa.softmax(q @ k.T / np.sqrt(d)), cmap="Blues", vmin=0, vmax=1)
    ax.set(title=f"scores / √{d}", xlabel="keys", ylabel="queries")
