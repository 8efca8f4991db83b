"""
How fast is it on my CPU?
=========================

This script compares a call with five lines of NumPy, and prints what it has run on. It takes a few seconds.
In a clone, ``python -m benchmarks attention`` compares more, with every library that is installed.
"""

from time import perf_counter

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def numpy_attention(q, k, v):
    """Compute the same in five lines."""
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1], dtype=q.dtype)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def milliseconds(function, *arrays):
    """Return the least time of five calls, after one that does not count."""
    function(*arrays)
    times = []
    for _ in range(5):
        begin = perf_counter()
        function(*arrays)
        times.append(perf_counter() - begin)
    return 1000 * min(times)


lengths = [64, 128, 256, 512, 1024]
found = {"selfattn": [], "NumPy": []}
for length in lengths:
    arrays = np.random.default_rng(0).standard_normal((3, 8, length, 64), dtype=np.float32)
    found["selfattn"].append(milliseconds(sa.scaled_dot_product_attention, *arrays))
    found["NumPy"].append(milliseconds(numpy_attention, *arrays))
print(sa.get_isa(), "with", sa.get_num_threads(), "threads:")
for length, ours, theirs in zip(lengths, *found.values()):
    print(f"{length:5} tokens, 8 heads of 64: {ours:6.2f} ms, NumPy {theirs:6.2f} ms")

figure, ax = plt.subplots(figsize=(7, 4), layout="constrained")
for name, times in found.items():
    ax.plot(lengths, times, marker="o", label=name)
ax.set(
    xscale="log", yscale="log", xlabel="tokens", ylabel="milliseconds", xticks=lengths, xticklabels=lengths
)
ax.minorticks_off()
ax.legend()

# %%
# These are the times of the machine that built this page. Those measured with care, with date and CPU, are under
# *Benchmarks*.
