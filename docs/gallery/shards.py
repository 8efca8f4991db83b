"""
Keys on two machines
====================

Too many keys for one machine are cut into shards. Each machine attends to its own keys and returns an output and a
log-sum-exp, from which the exact result follows. Here two threads take the place of machines; with Dask the same runs
on a cluster.
"""

from concurrent.futures import ThreadPoolExecutor

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa

rng = np.random.default_rng(0)
q = rng.standard_normal((8, 64, 32), dtype=np.float32)  # (heads, queries, width)
k, v = rng.standard_normal((2, 8, 3000, 32), dtype=np.float32)
k[:, :1000] *= 2  # the first machine has the keys with the larger scores


def machine(part):
    """Attend to a shard of the keys."""
    return sa.scaled_dot_product_attention(q, k[:, part], v[:, part], return_lse=True)


with ThreadPoolExecutor() as pool:
    outs, lses = zip(*pool.map(machine, [slice(0, 1000), slice(1000, 3000)]))
out, lse = sa.functional.merge_attention(outs, lses)
assert np.allclose(out, sa.scaled_dot_product_attention(q, k, v), atol=1e-6)

# %%
# How much of each query's weights is on the first machine:

share = np.exp(lses[0] - lse)
figure, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.hist(share.ravel(), bins=40)
ax.set(xlabel="share of the weights on the first machine", ylabel="queries of 8 heads", xlim=(0, 1))
