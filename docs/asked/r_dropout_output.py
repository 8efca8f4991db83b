"""
Dropout after the product
=========================

Asked of min-decision-transformer: `issue 2 <https://github.com/nikhilbarhate99/min-decision-transformer/issues/2>`_.
Dropout of attention drops weights: a query does not see some keys. Is it the same after the product?
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa

rng = np.random.default_rng(0)


def dropout(x, p):
    return x * (rng.random(x.shape) >= p) / (1 - p)


def attention(q, k, v, dropout_p=0.0):
    weights = sa.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=-1)
    return dropout(weights @ v, dropout_p)


print(sa.diagnose(attention).faults)

# %%
# It is not: here numbers of the output become 0, each by itself. Without dropout both are the same, so a test of the
# trained model does not show it. The right lines:


def mended(q, k, v, dropout_p=0.0):
    weights = sa.softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), axis=-1)
    return dropout(weights, dropout_p) @ v


print(sa.diagnose(mended))

# %%
# The output for one text, with half of the numbers dropped:

q, k, v = np.random.default_rng(1).standard_normal((3, 6, 8))
figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
for ax, (title, function) in zip(axes, {"after the product": attention, "before it": mended}.items()):
    rng = np.random.default_rng(2)
    out = function(q, k, v, 0.5)
    ax.imshow(out, cmap="RdBu", vmin=-3, vmax=3)
    ax.set(title=f"{title}: {(out == 0).mean():.0%} are 0", xlabel="columns of the output", ylabel="queries")
