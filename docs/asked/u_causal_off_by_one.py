"""
A causal mask that is off by one
================================

Asked of TransformerLens: `issue 284 <https://github.com/TransformerLensOrg/TransformerLens/issues/284>`_. Which
diagonal is the first that is closed? Ones of ``np.tri`` are open, and k is the last open diagonal: 0. Ones of
``np.triu`` are closed, and k is the first closed diagonal: 1.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention(q, k, v):
    seen = np.tri(len(q), k=1, dtype=bool)
    scores = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    return sa.softmax(scores, axis=-1) @ v


print(sa.diagnose(attention))

# %%
# A language model then reads the word that it must guess: its loss falls to nearly 0, and what it writes is nonsense.
# The right lines:


def mended(q, k, v):
    seen = np.tri(len(q), dtype=bool)
    scores = np.where(seen, q @ k.T / np.sqrt(q.shape[1]), -np.inf)
    return sa.softmax(scores, axis=-1) @ v


print(sa.diagnose(mended))

# %%
# With the identity as values the output is the weights. The first query sees one key, itself.

q, k = np.random.default_rng(0).standard_normal((2, 6, 4))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for ax, (title, function) in zip(axes, {"off by one": attention, "right": mended}.items()):
    ax.imshow(function(q, k, np.eye(6)), cmap="Blues", vmin=0, vmax=1)
    ax.set(title=title, xlabel="keys", ylabel="queries")
