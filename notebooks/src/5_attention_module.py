# %% [markdown]
# # 5. The attention module, masks, and rows without keys
#
# You have read *Self-Attention*, about a `ScaledDotProductAttention` module for sentences such as "Hello I love you",
# in which *love* should attend to *I* and *you* more than to *Hello*. It takes tensors of shape (batch, n_heads, len,
# d), a mask of zeros and ones and a dropout module, and returns the weighted values together with the weights.
#
# The tutorial prints no tensors, so ours come with its five lines, written in plain NumPy. Then
# one step further: **masks**. What do they do to a row, what happens in a row where *everything* is masked, and why do
# three well-known ways to mask give three different results there?
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight. Which words does *love* attend to, and what changes when the last
# word is masked? The tour asks you first, and then shows the answer.

# %%
from selfattn.views import tutorial_page

tutorial_page(5)

# %% [markdown]
# ## The tutorial's lines, on this package
#
# `selfattn.tape` has PyTorch's names, over NumPy: the tutorial's module runs when the imports are changed ([From
# scratch](../docs/guide/from_scratch.md)). The rest of the notebook computes with arrays, where every step can be seen.

# %%
import math

import selfattn.tape as torch
import selfattn.tape.nn as nn
import selfattn.tape.nn.functional as F


class ScaledDotProductAttention(nn.Module):
    def forward(self, query, key, value, mask=None, dropout=None):
        scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(key.size(-1))
        if mask is not None:
            scores = scores.masked_fill(mask.eq(0), -1e9)
        weights = F.softmax(scores, dim=-1)
        if dropout is not None:
            weights = dropout(weights)
        return torch.matmul(weights, value), weights


torch.manual_seed(0)
x = torch.randn(1, 1, 4, 3)  # (batch, n_heads, len, d)
values, weights = ScaledDotProductAttention()(x, x, x, mask=torch.tensor([1, 1, 1, 0]).view(1, 1, 1, 4))
print(weights)

# %% [markdown]
# ## "Hello I love you"
#
# Real models learn their queries and keys; ours are made by hand, with three columns that mean *person*, *feeling* and
# *greeting*. The query says what a word attends to: *love* attends to persons. The key says what it is. The values only
# number the words, so that an output can be read: 10 per cent of word 2 adds 0.1 to column 2.
#
# (The text calls $d_k$ "the number of words in a sentence". It is the width of a key: 3 here, with 4 words.)

# %%
import numpy as np

np.set_printoptions(precision=3, suppress=True)
tokens = ["Hello", "I", "love", "you"]
query = np.array([[0.0, 0.0, 1.0],  # Hello: another greeting?
                  [0.0, 2.0, 0.0],  # I: what do I feel?
                  [3.0, 0.5, 0.0],  # love: who, and whom?
                  [1.0, 2.0, 0.0]])  # you
key = np.array([[0.5, 0.0, 2.0],
                [2.0, 0.0, 0.0],
                [0.0, 2.0, 0.0],
                [2.0, 0.5, 0.0]])
value = np.eye(4)

# %% [markdown]
# The module of the tutorial in a few lines of NumPy, and `nn.ScaledDotProductAttention`, which does the same:

# %%
from selfattn import nn


def softmax(scores):
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def plain_attention(query, key, value, mask=None):
    """Attention: where the mask is 0, the score becomes -1e9."""
    scores = query @ key.swapaxes(-2, -1) / np.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    weights = softmax(scores)
    return weights @ value, weights


def batched(t):
    """(len, d) to (batch, n_heads, len, d) with one sentence and one head"""
    return t[None, None]


attention = nn.ScaledDotProductAttention()
values, weights = attention(batched(query), batched(key), batched(value))
print("shapes:", values.shape, weights.shape)
print("love looks at    ", dict(zip(tokens, weights[0, 0, 2].round(3).tolist(), strict=True)))
print("by the plain lines", plain_attention(query, key, value)[1][2])

# %% [markdown]
# ## A batch with padding
#
# Sentences of a batch have to have one length, so shorter ones are filled up with padding, to which no word must
# attend. The mask has shape (batch, 1, 1, len), a 1 for each token and a 0 for padding, and is stretched over heads
# and queries. Two heads now: the queries of the second one have their columns in another order, so that it attends to
# other things.

# %%
heads = np.stack([query, np.roll(query, 1, axis=1)])  # (n_heads, len, d)
batch_query = np.stack([heads, heads])  # (batch, n_heads, len, d)
batch_key, batch_value = (np.broadcast_to(t, (2, 2, *t.shape)) for t in (key, value))
mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]]).reshape(2, 1, 1, 4)  # the second sentence has three tokens

values, weights = attention(batch_query, batch_key, batch_value, mask)
print("sentence 2, head 1: the last column is the padding")
print(weights[1, 0])
print("by the plain lines")
print(plain_attention(batch_query, batch_key, batch_value, mask)[1][1, 0])

# %% [markdown]
# The weights on the padding are exactly 0, and each row adds up to 1 without it: the other weights have grown in
# proportion. That is why the mask acts *before* the softmax. If we set weights to 0 after it, the rows would add up to
# less than 1.
#
# On the page, cells of the mask can be opened and closed:

# %%
import selfattn as sa
from selfattn.views import steps_page

open_pairs = np.array([1, 1, 1, 0], dtype=bool)  # the functional API takes True for "may look"
steps = sa.attention_steps(query, key, value, open_pairs)
steps_page(steps, ["Hello", "I", "love", "(padding)"])

# %% [markdown]
# ## Dropout, passed per call
#
# While training, some weights are set to 0 at random and the others divided by $1 - p$. A row no longer adds up to 1;
# on average over many draws it does. The module returns the weights after dropout, as they were used.

# %%
dropout = nn.Dropout(0.25, rng=0)
inputs = [batched(t) for t in (query, key, value)]
print("one draw:          ", attention(*inputs, dropout=dropout)[1][0, 0, 2])
print("another:           ", attention(*inputs, dropout=dropout)[1][0, 0, 2])
draws = np.mean([attention(*inputs, dropout=dropout)[1][0, 0, 2] for _ in range(2000)], axis=0)
print("mean of 2000 draws:", draws.round(2))
print("without dropout:   ", attention(*inputs)[1][0, 0, 2].round(2))
dropout.eval()
print("after eval():      ", attention(*inputs, dropout=dropout)[1][0, 0, 2])

# %% [markdown]
# ---
# # One step further: masks, and rows without keys
#
# ## Which pairs are open
#
# A mask says for each pair of query (row) and key (column) whether the query may attend to the key. The common ones
# have names and arguments of their own. A `#` is an open pair:

# %%
def show(title, **options):
    steps = sa.attention_steps(np.zeros((6, 1)), np.zeros((6, 1)), np.zeros((6, 1)), **options)
    rows = ["".join("#" if s > -np.inf else "." for s in row) for row in steps.masked_scores]
    return [f"{title:14}", *(f"{row:14}" for row in rows)]


pictures = [
    show("all"),
    show("key_lengths=4", key_lengths=4),
    show("is_causal", is_causal=True),
    show("window=(1, 1)", window=(1, 1)),
    show("both", is_causal=True, window=(2, None)),
]
for lines in zip(*pictures, strict=True):
    print("  ".join(lines))

# %% [markdown]
# *Causal* is what a model needs that predicts the next word: no word may attend to a later one. A *window* limits
# the work of long texts. They combine: a pair is open if all of them allow it.
#
# ## Dead rows
#
# Combine a causal mask with padding *in front*, as it is done when texts are generated in batches. The first row may
# attend to the first token only, and that one is padding. The row has no key. What should its output be?

# %%
padding_in_front = np.array([False, True, True, True])
causal = np.tril(np.ones((4, 4), dtype=bool))
allowed = padding_in_front & causal
print(allowed.astype(int), "<- row 0 is closed everywhere")

scores = query @ key.T / np.sqrt(3)
with np.errstate(invalid="ignore"):  # NumPy would warn about what we are about to see
    with_infinity = softmax(np.where(allowed, scores, -np.inf))
with_1e9 = attention(batched(query), batched(key), batched(value), allowed[None, None].astype(int))[1][0, 0]
functional = sa.scaled_dot_product_attention(query, key, value, allowed, return_weights=True)[1]

ways = (("-inf, plain lines", with_infinity), ("-1e9, the module", with_1e9), ("selfattn, a mask", functional))
for name, found in ways:
    print(f"\n{name}: weights of rows 0 and 1")
    print(found[:2])

# %% [markdown]
# Three answers to row 0:
#
# 1. **NaN.** The plain softmax divides $e^{-\infty} = 0$ by a sum of 0. And it spreads: one NaN in a batch, and after
#    the next layer or the next step of training there is little else.
# 2. **Uniform.** With −1e9 in all places all scores are equal, so each token gets 1/4: the row attends equally to all
#    tokens that are closed to it, later ones and padding included. No error, no NaN, and a leak.
# 3. **Zeros.** No key, so no output: `sa.scaled_dot_product_attention` gives weights 0, output 0,
#    and gradients 0. This is the result that makes sense: the row contributes nothing.
#
# `nn.ScaledDotProductAttention` does the second because the tutorial does, so that its numbers are reproduced. Masks
# that are arrays of booleans, and all the named ones above, do the third.
#
# ### −1e9 is not minus infinity
#
# It is a number, and how large it is depends on the type. In float16, which ends at 65504, it becomes −inf, and the
# uniform row becomes NaN:

# %%
with np.errstate(over="ignore", invalid="ignore"):
    half = np.full(4, -1e9).astype(np.float16)
    print("-1e9 in float16:", half, " softmax:", softmax(half))
halves = [t.astype(np.float16) for t in inputs]
print("the module, in float16:", attention(*halves, np.zeros((1, 1, 1, 4), int))[1][0, 0, 0])

# %% [markdown]
# (The module computes 16-bit numbers in float32 and so gives the uniform row there, too.)
#
# ## What is masked must not matter
#
# Padding is memory that holds anything. Suppose that it holds a NaN. Its weight is 0, so it should not matter; but
# $0 \cdot \mathrm{NaN} = \mathrm{NaN}$, and the plain lines spread it to every row:

# %%
dirty_key, dirty_value = key.copy(), value.copy()
dirty_key[3] = dirty_value[3] = np.nan  # the padding
with np.errstate(invalid="ignore"):
    plain = plain_attention(query, dirty_key, dirty_value, open_pairs)[0]
ours = sa.scaled_dot_product_attention(query, dirty_key, dirty_value, open_pairs)
print("plain lines:")
print(plain)
print("selfattn:")
print(ours)

# %% [markdown]
# A closed pair takes no part in any product, forward or backward. A NaN in an open pair stays visible, as it should:
# it is a mistake to be found. A page shows it as NaN:

# %%
broken = value.copy()
broken[1, 0] = np.nan
steps_page(sa.attention_steps(query, key, broken, is_causal=True), tokens)

# %% [markdown]
# Row *Hello* attends only to itself and stays clean; *I* and every later row attend to *I*, and the first column is
# NaN.
#
# *Your turn:*
#
# - On the first page, close all cells of one row of the mask. What happens to the row, and to the other rows?
# - A float mask is added to the scores: `np.log(2)` on a pair doubles its weight before the row is normalised. Build
# one
#   that makes *love* attend to *you* twice as much as to *I*.
# - Under `is_causal=True`, does the output of the first word ever depend on the last word? The gradient shows it:
#   `sa.scaled_dot_product_attention_vjp`.
#
# This was the last of the five tutorials. Four notebooks continue from here:
#
# - [6. A GPT in 40 lines](6_gpt.ipynb): train it, let it write, look inside
# - [7. A classifier](7_classifier.ipynb) that shows what it attends to
# - [8. What is this head for?](../models/notebooks/8_heads.ipynb), in a real model
# - [9. Grade your own attention](9_grade_your_own.ipynb): which step of it is wrong
