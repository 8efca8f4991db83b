"""
dK without a transpose
======================

Asked of AiDotNet: `issue 49 <https://github.com/ooples/AiDotNet.Tensors/issues/49>`_, whose dQ, dK and dV were wrong.
The scores are Q Kᵀ: row j of dK gathers column j of dS, from all queries that see key j.
"""

import matplotlib.pyplot as plt
import numpy as np

import selfattn as sa


def attention_vjp(q, k, v, grad_out):
    scale = q.shape[1] ** -0.5
    P = sa.softmax(q @ k.T * scale)
    dP = grad_out @ v.T
    dS = P * (dP - (dP * P).sum(axis=1, keepdims=True))
    return dS @ k * scale, dS @ q * scale, P.T @ grad_out


print(sa.diagnose_vjp(attention_vjp))

# %%
# As many keys as queries hide it: with another number of keys NumPy refuses the product. The right lines:


def mended_vjp(q, k, v, grad_out):
    scale = q.shape[1] ** -0.5
    P = sa.softmax(q @ k.T * scale)
    dP = grad_out @ v.T
    dS = P * (dP - (dP * P).sum(axis=1, keepdims=True))
    return dS @ k * scale, dS.T @ q * scale, P.T @ grad_out


print(sa.diagnose_vjp(mended_vjp))

# %%
# A loss of query 0 alone. It sees every key, so every key must get a gradient:

q, k, v, grad_out = np.random.default_rng(0).standard_normal((4, 6, 4))
grad_out[1:] = 0
figure, axes = plt.subplots(1, 2, figsize=(7, 4), layout="constrained")
for ax, (title, function) in zip(axes, {"dS Q": attention_vjp, "dSᵀ Q": mended_vjp}.items()):
    ax.imshow(function(q, k, v, grad_out)[1], cmap="RdBu", vmin=-0.3, vmax=0.3)
    ax.set(title=title, xlabel="columns of dK", ylabel="keys")
