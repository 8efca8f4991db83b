"""
Why scores are divided by √d
============================

A product of two random vectors of width d has a variance of d. Without the scale, softmax takes one key and nothing
of the others, and then nearly no gradient is left to learn from.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa

rng = np.random.default_rng(0)
widths = 2 ** np.arange(1, 11)
largest, gradients = {"√d": [], "1": []}, {"√d": [], "1": []}
for d in widths:
    q, k, v = rng.standard_normal((3, 1, 64, d))
    for name, scale in (("√d", None), ("1", 1.0)):  # None is 1 / √d
        _, weights = sa.scaled_dot_product_attention(q, k, v, scale=scale, return_weights=True)
        largest[name].append(weights.max(axis=-1).mean())
        _, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, scale=scale)
        size = np.abs(pullback(np.ones((1, 64, d)) / d).query).mean()
        gradients[name].append(size * (d**0.5 if scale is None else 1))  # of a score, whatever the scale

figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
for ax, (title, found) in zip(axes, {"largest weight of a row": largest, "gradient": gradients}.items()):
    for name, line in found.items():
        ax.plot(widths, line, marker="o", label=f"scores / {name}")
    ax.set(title=title, xscale="log", xlabel="width d of a head")
    ax.legend()
axes[1].set_yscale("log")
