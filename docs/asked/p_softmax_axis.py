"""
A softmax over the wrong axis
=============================

Asked of labml: `issue 282 <https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/282>`_.
Scores are (queries, keys), and each query shares out a weight of 1 among the keys: the sum is over the last axis.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores)
    weights = weights / weights.sum(axis=0)
    return weights @ v


print(sa.diagnose(attention))

# %%
# All shapes fit, but each column adds up to 1, and not each row: the outputs are no means any more.
# ``weights / weights.sum(axis=-1)`` without ``keepdims`` is as wrong: it divides column j by the sum of row j. The
# right lines:


def mended(q, k, v):
    scores = q @ k.T / np.sqrt(q.shape[1])
    weights = np.exp(scores)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights @ v


print(sa.diagnose(mended))

# %%
# With the identity as values the output is the weights, here with the sums of their rows:

q, k = np.random.default_rng(0).standard_normal((2, 6, 4))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for ax, (title, function) in zip(axes, {"over queries": attention, "over keys": mended}.items()):
    weights = function(q, k, np.eye(6))
    ax.imshow(weights, cmap="Blues", vmin=0, vmax=1)
    ax.set(
        title=title, xlabel="keys", yticks=range(6), yticklabels=[f"sum {row.sum():.2f}" for row in weights]
    )
