"""
Mask padding
============

Sentences of different lengths in one batch are filled up with padding. Nobody should attend to it. Two ways close it:
the number of tokens of each sentence, or a boolean mask that is True for tokens.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa
from selfattn.views import plot_attention

lengths = np.array([3, 5])  # of two sentences, in a batch of 5 tokens
tokens = [["my", "river", "bank", "PAD", "PAD"], ["she", "went", "to", "the", "bank"]]
q, k, v = np.random.default_rng(0).standard_normal(
    (3, 2, 1, 5, 8), dtype=np.float32
)  # (batch, heads, tokens, width)
k[0, :, 3:] = v[0, :, 3:] = np.nan  # padding may hold anything

# %%
# The lengths take no memory, and padding takes no time:

out, weights = sa.scaled_dot_product_attention(q, k, v, key_lengths=lengths[:, None], return_weights=True)

# %%
# A padding mask of (batch, tokens), as tokenizers return it, gets two dimensions of size 1, for heads and queries:

mask = np.arange(5) < lengths[:, None]
same = sa.scaled_dot_product_attention(q, k, v, mask[:, None, None, :])
assert np.array_equal(out, same)
assert np.isfinite(out).all()  # NaN in padding has no effect

# %%
# The columns of padding are empty. Its rows are computed too; leave them out of what follows, such as a mean or a loss.

figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for n, ax in enumerate(axes):
    plot_attention(weights[n, 0], tokens[n], ax, title=f"{lengths[n]} tokens", vmax=1, colorbar=False)

# %%
# If the lengths differ much, :func:`selfattn.functional.varlen_attention` takes sentences one after the other,
# without any padding.
