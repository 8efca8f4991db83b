# %% [markdown]
# # 9. Grade your own attention
#
# You have written attention yourself, and its numbers are not those of the course. Which step is wrong? `sa.diagnose`
# calls your function with small inputs, finds out how it is called, and says which step differs, and why.
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# These are the steps of attention, with all their numbers. Which of them would change if the softmax were over the
# columns of the scores? If the scale were missing?

# %%
from selfattn.views import tutorial_page

tutorial_page(3)

# %% [markdown]
# Here are three implementations, each with one mistake that is often made. Before you run a cell that diagnoses one,
# read the code, and say what is wrong. Then mend it yourself, and run the cell again.

# %%
import numpy as np

import selfattn as sa

# %% [markdown]
# ## One sentence
#
# Queries, keys and values are (length, width). A mask says where a query may look: True is open.


# %%
def attention(q, k, v, mask=None):
    scores = q @ k.T / np.sqrt(q.shape[1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    weights = np.exp(scores - scores.max(axis=0))
    weights = weights / weights.sum(axis=0)
    return weights @ v


# %%
first = sa.diagnose(attention)
print(first)

# %% [markdown]
# The first line says how the function is called. Then comes the sentence, and the smallest input that shows it. In
# column 0 the weights add up to 1, and in row 0 they do not: the query in row 0 gets no weighted mean.
#
# `first.page()` shows every step of that input, with the wrong numbers next to the right ones. The mended lines:


# %%
def mended_attention(q, k, v, mask=None):
    scores = q @ k.T / np.sqrt(q.shape[1])
    if mask is not None:
        scores = np.where(mask, scores, -1e9)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = weights / weights.sum(axis=1, keepdims=True)
    return weights @ v


print(sa.diagnose(mended_attention))

# %% [markdown]
# ## Several heads
#
# A layer with its own weights. All shapes fit, and no error is raised. What is wrong?


# %%
class SelfAttention:
    def __init__(self, d_model, num_heads):
        rng = np.random.default_rng(0)
        self.num_heads = num_heads
        self.W_q, self.W_k, self.W_v, self.W_o = rng.standard_normal((4, d_model, d_model)) / np.sqrt(d_model)

    def split(self, y):
        batch, length, d_model = y.shape
        return y.reshape(batch, self.num_heads, length, d_model // self.num_heads)

    def forward(self, x):
        q, k, v = self.split(x @ self.W_q), self.split(x @ self.W_k), self.split(x @ self.W_v)
        weights = sa.softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]))
        return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ self.W_o


second = sa.diagnose(SelfAttention)
print(second)

# %% [markdown]
# Row-major order is the reason: (batch, length, d_model) has the numbers of a word next to each other, so the reshape
# gives a head whole words, and not a part of each word.


# %%
class MendedSelfAttention(SelfAttention):
    def split(self, y):
        batch, length, d_model = y.shape
        return y.reshape(batch, length, self.num_heads, d_model // self.num_heads).transpose(0, 2, 1, 3)


print(sa.diagnose(MendedSelfAttention))

# %% [markdown]
# ## The way back
#
# The gradients of `mended_attention` by hand. `sa.diagnose_vjp` takes the function that returns them.


# %%
def attention_vjp(q, k, v, grad_out):
    scale = 1 / np.sqrt(q.shape[1])
    P = sa.softmax(q @ k.T * scale)
    dV = P.T @ grad_out
    dP = grad_out @ v.T
    dS = P * dP
    return dS @ k * scale, dS.T @ q * scale, dV


third = sa.diagnose_vjp(attention_vjp)
print(third)

# %% [markdown]
# A weight cannot grow alone, since those of a row add up to 1: the softmax subtracts what the row as a whole gains.


# %%
def mended_vjp(q, k, v, grad_out):
    scale = 1 / np.sqrt(q.shape[1])
    P = sa.softmax(q @ k.T * scale)
    dV = P.T @ grad_out
    dP = grad_out @ v.T
    dS = P * (dP - (dP * P).sum(axis=1, keepdims=True))
    return dS @ k * scale, dS.T @ q * scale, dV


print(sa.diagnose_vjp(mended_vjp))

# %% [markdown]
# *Your turn:*
#
# - Diagnose your own. If the names of your parameters say too little, say what they mean with `arguments=`.
# - What does `diagnose` say if you divide by √d twice? If the causal mask leaves out the diagonal?
# - Make a mistake that it does not know: it says where the numbers first differ, and does not guess.
#
# [The guide](../docs/guide/diagnose.md) has the rest; `selfattn diagnose homework.py:attention` does the same on the
# command line.
