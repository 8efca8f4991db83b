"""
dS without its row term
=======================

Asked of libnd4j: `issue 440 <https://github.com/deeplearning4j/libnd4j/issues/440>`_. A weight depends on all scores of
its row, so the gradient of a score has a sum over the row, which is easily left out.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention_vjp(q, k, v, grad_out):
    scale = q.shape[1] ** -0.5
    P = sa.softmax(q @ k.T * scale)
    dP = grad_out @ v.T
    dS = P * dP
    return dS @ k * scale, dS.T @ q * scale, P.T @ grad_out


print(sa.diagnose_vjp(attention_vjp))

# %%
# dV is right, and dQ and dK are not. A query with one key shows it: its weight is 1 whatever the score, so the gradient
# of the score is 0. The right lines:


def mended_vjp(q, k, v, grad_out):
    scale = q.shape[1] ** -0.5
    P = sa.softmax(q @ k.T * scale)
    dP = grad_out @ v.T
    dS = P * (dP - (dP * P).sum(axis=1, keepdims=True))
    return dS @ k * scale, dS.T @ q * scale, P.T @ grad_out


print(sa.diagnose_vjp(mended_vjp))

# %%
# With the identity as keys, dQ is dS times the scale. A number that is added to all scores of a row changes no weight,
# so each row of dS must add up to 0:

q, v, grad_out = np.random.default_rng(0).standard_normal((3, 6, 6))
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for ax, (title, function) in zip(axes, {"without the row term": attention_vjp, "right": mended_vjp}.items()):
    rows = function(q, np.eye(6), v, grad_out)[0] * 6**0.5
    ax.imshow(rows, cmap="RdBu", vmin=-1, vmax=1)
    sums = [f"sum {abs(row.sum()):.2f}" for row in rows]
    ax.set(title=title, xlabel="keys", yticks=range(6), yticklabels=sums)
