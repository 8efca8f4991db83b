"""
A mask the wrong way round
==========================

Asked of LLMs-from-scratch: `issue 1061 <https://github.com/rasbt/LLMs-from-scratch/issues/1061>`_. True opens a key in
``scaled_dot_product_attention``, and closes it in ``nn.MultiheadAttention``. Which of the two has been written?
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, -1e9, scores)
    return sa.softmax(scores, axis=-1) @ v


print(sa.diagnose(attention, mask="open"))  # True is to open a key

# %%
# A causal mask then shows a model the words that it must guess, and its loss is too good. The right lines:


def mended(q, k, v, mask=None):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    return sa.softmax(scores, axis=-1) @ v


print(sa.diagnose(mended, mask="open"))

# %%
# With the identity as values the output is the weights. The last query sees no key, so its weights are all alike.

q, k = np.random.default_rng(0).standard_normal((2, 6, 4))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for ax, (title, function) in zip(axes, {"inverted": attention, "right": mended}.items()):
    ax.imshow(function(q, k, np.eye(6), np.tri(6, dtype=bool)), cmap="Blues", vmin=0, vmax=1)
    ax.set(title=title, xlabel="keys", ylabel="queries")
