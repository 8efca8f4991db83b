# %% [markdown]
# # 4. Whole numbers, by hand, and other ways to score
#
# You have read *Illustrated: Self-Attention*, by Raimi Karim: three inputs of four whole numbers, three matrices of
# whole numbers, and arrows from each to each. With whole numbers every score can be checked by hand, and here is a
# page for that. The tutorial then rounds the weights by hand to keep the arithmetic easy. We do the same, and then
# look at what the rounding cost.
#
# One step further: the tutorial names **other score functions**. What do they do with these very inputs?
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight. Which input do all three attend to, and what is special about its
# key? The tour asks you first, and then shows the answer.

# %%
from selfattn.views import tutorial_page

tutorial_page(4)

# %% [markdown]
# ## The tutorial's lines, on this package
#
# `selfattn.tape` has PyTorch's names, over NumPy: the tutorial's lines run, and print what the tutorial prints, when
# the imports are changed ([From scratch](../docs/guide/from_scratch.md)). The rest of the notebook computes with
# arrays, where every step can be seen.

# %%
import selfattn.tape as torch
from selfattn.tape.nn.functional import softmax

x = torch.tensor([[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]], dtype=torch.float32)
w_key = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]], dtype=torch.float32)
w_query = torch.tensor([[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]], dtype=torch.float32)
w_value = torch.tensor([[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]], dtype=torch.float32)
keys, querys, values = x @ w_key, x @ w_query, x @ w_value
attn_scores = querys @ keys.T
print(attn_scores, softmax(attn_scores, dim=-1), sep="\n")

attn_scores_softmax = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]])  # by hand
weighted_values = values[:, None] * attn_scores_softmax.T[:, :, None]  # key first
outputs = weighted_values.sum(dim=0)
print(outputs)

# %% [markdown]
# ## Keys, queries, values

# %%
import numpy as np

np.set_printoptions(precision=4, suppress=True)
tokens = ["input 1", "input 2", "input 3"]
x = np.array([[1, 0, 1, 0], [0, 2, 0, 2], [1, 1, 1, 1]])
w_key = np.array([[0, 0, 1], [1, 1, 0], [0, 1, 0], [1, 1, 0]])
w_query = np.array([[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 1]])
w_value = np.array([[0, 2, 0], [0, 3, 0], [1, 0, 3], [1, 1, 0]])

keys, querys, values = x @ w_key, x @ w_query, x @ w_value
print("keys", keys, "queries", querys, "values", values, sep="\n")

# %% [markdown]
# (One figure of the text shows the key of input 1 as 1, 1, 0. The printed tensor, 0, 1, 1, is right: add rows 1 and 3
# of `w_key`, since input 1 is 1, 0, 1, 0.)
#
# ## Scores and softmax
#
# The tutorial scores by the plain dot product, so `scale=1.0`. Do the first row by hand before you look: the query of
# input 1 is 1, 0, 2.

# %%
from selfattn.steps.layers import layer_steps

steps = layer_steps(x, w_query, w_key, w_value, scale=1.0)
print("scores", steps.scores, "weights", steps.weights, sep="\n")

# %% [markdown]
# Scores of 4, 16, 12 and weights of 0.000006, 0.982, 0.018: a difference of 4 between two scores is a factor of
# $e^4 \approx 55$ between their weights.
#
# ## The hand-made weights, and a tensor for every pair
#
# For the rest the author replaces the weights by round numbers. They are not quite rounded (0.0634 would round to 0.1,
# and the first row to 0.1, 0.5, 0.5, which adds up to more than 1), so they count as an input. `with_weights`
# continues from given weights.
#
# `weighted_values` holds, for each query and each key, the value of that key times its weight. The tutorial puts the
# key first; `selfattn` has the query first, as in the scores; `swapaxes` turns one into the other.

# %%
by_hand = np.array([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]])
rounded = steps.with_weights(by_hand)
print("weighted values, for each key", rounded.weighted_values.swapaxes(0, 1), "output 1", rounded.output[0], sep="\n")

# %% [markdown]
# (A comment in the tutorial's code has −2.0000 as the first number of output 1. Its figure has 2.0, which is right:
# half of 2 plus half of 2.)
#
# Outputs 2 and 3 are left to the reader. Try before you run the next cell: the sums are short.

# %%
print("output 2:", rounded.output[1], " output 3:", rounded.output[2])

# %% [markdown]
# Are all these the tutorial's numbers? `selfattn.tutorials` has what it prints, and compares. What it leaves to its
# reader is compared with `selfattn.reference`, the definition of attention in plain NumPy:

# %%
from selfattn import tutorials

for each in tutorials.illustrated().comparisons:
    print(f"{each.name:38} {'as' if each.agrees else 'not as'} {each.source}")

# %% [markdown]
# ### What did the rounding cost?

# %%
print("with the weights as computed:")
print(steps.output)
print("with the weights made by hand:")
print(rounded.output)
print("difference:")
print(rounded.output - steps.output)

# %% [markdown]
# Nearly nothing in row 2, where the weights were close to 0 and 1 to begin with. Most in row 1: a small weight of 0.06
# on input 1 was set to 0, and the value of input 1 has a 2 in the middle where the others have 8 and 6.
#
# The whole computation, with the author's weights:

# %%
from selfattn.views import steps_page

steps_page(rounded, tokens)

# %% [markdown]
# ## An exercise sheet
#
# The same once more with blanks, and with the weights as computed. Fill them in with paper and pencil, then reveal
# them, or print the page: the answers are on a separate sheet.

# %%
steps_page(steps, tokens, exercise=True)

# %% [markdown]
# ---
# # One step further: other ways to score
#
# A score says how well a key fits a query. The dot product is one way to say it, and the tutorial names others. Only
# one matrix changes; softmax and weighted sum stay the same.
#
# | name | score of query $q$ and key $k$ | learned |
# | --- | --- | --- |
# | dot product | $q \cdot k$ | nothing |
# | scaled dot product | $q \cdot k / \sqrt{d_k}$ | nothing |
# | cosine | $q \cdot k / (\lVert q\rVert \lVert k\rVert)$ | nothing |
# | general | $q^\top W k$ | $W$ |
# | additive (concat) | $v \cdot \tanh(W_q q + W_k k)$ | $W_q$, $W_k$, $v$ |
#
# The first two are what `scaled_dot_product_attention` computes, with `scale=1.0` and by default. The next two are dot
# products as well, of other vectors: of $q$ and $k$ made to have length 1, and of $q$ and $Wk$. The additive score
# compares by a small network and is no dot product.

# %%
import selfattn as sa

q, k, v = (t.astype(float) for t in (querys, keys, values))
rng = np.random.default_rng(4)
W = rng.uniform(-0.5, 0.5, (3, 3))
W_q, W_k, direction = rng.uniform(-0.5, 0.5, (3, 3)), rng.uniform(-0.5, 0.5, (3, 3)), rng.uniform(-1, 1, 3)


def unit(rows):
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# (L, 1, 3) and (1, S, 3): every query with every key.
additive = np.tanh((q @ W_q)[:, None] + (k @ W_k)[None]) @ direction

scores = {
    "dot product": q @ k.T,
    "scaled dot product": q @ k.T / np.sqrt(3),
    "cosine": unit(q) @ unit(k).T,
    "general": q @ (k @ W).T,
    "additive": additive,
}
for name, s in scores.items():
    weights = sa.softmax(s, -1)
    print(f"{name:20} scores of input 2:", "".join(f"{number:8.3f}" for number in s[1]))
    print(f"{'':20}           weights:", "".join(f"{number:8.3f}" for number in weights[1]))
    print(f"{'':20}            output:", "".join(f"{number:8.3f}" for number in (weights @ v)[1]))

# %% [markdown]
# What to see:
#
# - **Dot product** and **scaled dot product** agree on the order of the keys and differ in how sure they are.
# - **Cosine** does not care how long a key is. Input 2 has the longest key, 4, 4, 0, and wins every dot product with
# it;
#   measured by the angle alone, input 3 fits better. In practice cosine scores are multiplied by a learned number,
# since
#   scores between −1 and 1 give a very even softmax.
# - **Additive** scores lie between $-\sum|v_i|$ and $\sum|v_i|$, however long the vectors are, so they need no scale.
# It
#   is the oldest of the five (Bahdanau, Cho and Bengio, 2014). The price is a tanh for every pair and column, where the
#   dot product is one multiplication of matrices.
#
# ## Length matters
#
# Make the key of input 3 three times as long, in the same direction. How does its weight change under each score?

# %%
longer = k.copy()
longer[2] *= 3
changed = {
    "dot product": q @ longer.T,
    "scaled dot product": q @ longer.T / np.sqrt(3),
    "cosine": unit(q) @ unit(longer).T,
    "general": q @ (longer @ W).T,
    "additive": np.tanh((q @ W_q)[:, None] + (longer @ W_k)[None]) @ direction,
}
print("weight of input 2 on input 3     before    after")
for name in scores:
    before, after = (sa.softmax(s, -1)[1, 2] for s in (scores[name], changed[name]))
    print(f"  {name:30} {before:6.3f}   {after:6.3f}")

# %% [markdown]
# With dot products, a long key has a large weight for every query of roughly its direction. That can be useful, since a
# model can make a token important by making its key long. It can also do harm.
#
# ## When the fan-in matters: initialisation
#
# The tutorial ends with a list of what a full module adds. One entry is the initialisation of the three matrices. Its
# job is the same as that of the scale: numbers should leave a layer about as large as they came in, or a few layers
# later they are all huge or all 0. `nn.init` has the usual ones:

# %%
from selfattn.nn import init

d = 256
x_wide = rng.standard_normal((100, d))
starts = {
    "normal, deviation 1": init.normal_(np.empty((d, d)), rng=0),
    "uniform in [0, 1)": init.uniform_(np.empty((d, d)), rng=0),
    "Xavier, uniform": init.xavier_uniform_(np.empty((d, d)), rng=0),
    "Xavier, normal": init.xavier_normal_(np.empty((d, d)), rng=0),
    "Kaiming, uniform": init.kaiming_uniform_(np.empty((d, d)), rng=0),
    "Kaiming, normal": init.kaiming_normal_(np.empty((d, d)), rng=0),
}
print("size of 256 columns of size 1 after one layer, and of the scaled scores")
for name, weight in starts.items():
    y = x_wide @ weight.T
    size = (y @ (x_wide @ weight).T / np.sqrt(d)).std()
    print(f"  {name:20} {y.std():9.2f} {size:12.2f}")

# %% [markdown]
# Xavier keeps the size at 1. Kaiming makes it $\sqrt 2$ times as large, because it is meant for layers followed by a
# ReLU, which throws half of it away; attention has none there. With the plain normal distribution the scores of a
# model this wide start in the hundreds, and every softmax with a single 1. Uniform in [0, 1), as the class of
# [notebook 1](1_first_principles.ipynb) does it, is worse still, since its numbers have a mean of 1/2 instead of 0.
# That is fine for three tokens on a page, but not for training a wide model.
#
# *Your turn:*
#
# - Find `w_query` such that input 1 attends most to itself. (The first page above computes again what you change.)
# - Change one number of `x` on the page. How many of the nine scores can move? Why can it never be all of them?
#
# Next: [notebook 5](5_attention_module.ipynb) hides tokens from each other.
