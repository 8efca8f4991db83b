# %% [markdown]
# # 1. Two banks: self-attention from first principles
#
# You have read *Self-Attention from First Principles*, by Henry Dashwood. It gives five words four numbers each, puts
# one of them, *bank*, into a sentence about a river and into a sentence about money, and asks for a layer that
# notices the difference.
#
# This notebook does the same with `selfattn`, and computes every tensor that the tutorial prints. Then it takes one
# step further: **what the scale $1/\sqrt{d_k}$ is for**. The tutorial uses it without saying why.

# %% [markdown]
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The same *bank* goes in twice. The thickness of a ribbon is an attention weight. Point at *bank* in both sentences:
# which words does it attend to, and how does its output differ? The tour asks you first, and then shows the answer.

# %%
from selfattn.views import tutorial_page

tutorial_page(1)

# %% [markdown]
# ## The tutorial's lines, on this package
#
# `selfattn.tape` has PyTorch's names, over NumPy: the tutorial's program runs, and prints what the tutorial prints,
# when its import is changed ([From scratch](../docs/guide/from_scratch.md)). Here its class, on the river sentence. The
# rest of the notebook computes with arrays, where every step can be seen.

# %%
import selfattn.tape as torch

torch.set_printoptions(precision=3, sci_mode=False)


class SelfAttention(torch.nn.Module):
    def __init__(self, d_in, d_out):
        super().__init__()
        self.W_query = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_key = torch.nn.Parameter(torch.rand(d_in, d_out))
        self.W_value = torch.nn.Parameter(torch.rand(d_in, d_out))

    def forward(self, x):
        queries, keys, values = x @ self.W_query, x @ self.W_key, x @ self.W_value
        scores = queries @ keys.T / keys.shape[-1] ** 0.5
        return torch.softmax(scores, dim=-1) @ values


torch.manual_seed(0)
river = torch.tensor([[1.2, 0.0, 0.0, 0.3], [0.8, 0.8, 0.2, 0.0], [0.9, 0.0, 0.0, 0.9]])  # stream, bank, mud
print(SelfAttention(4, 3)(river))

# %% [markdown]
# ## From words to numbers
#
# How are these ribbons made? Step by step: the vocabulary is a table with one row per word. Look at the columns:
# *stream* and *mud* are large in the first, *money* and *loan* in the second. *bank* has 0.8 in both: by itself it
# does not say which bank it is.

# %%
import numpy as np

import selfattn as sa

np.set_printoptions(precision=3, suppress=True)
vocabulary = {
    "stream": [1.2, 0.0, 0.0, 0.3],
    "mud": [0.9, 0.0, 0.0, 0.9],
    "money": [0.0, 1.4, 0.0, 0.1],
    "loan": [0.0, 1.1, 0.0, 0.6],
    "bank": [0.8, 0.8, 0.2, 0.0],
}
sentences = {"river": ["stream", "bank", "mud"], "finance": ["money", "bank", "loan"]}
BANK = 1  # its place in both


def show(arrays):
    """Print an array for each sentence."""
    for name, array in arrays.items():
        print(f"{name}:\n{array}")


x = {name: np.array([vocabulary[token] for token in tokens]) for name, tokens in sentences.items()}
show(x)

# %% [markdown]
# ## A linear layer cannot tell them apart
#
# `x @ W` computes every row by itself. The row of *bank* is the same in both sentences, so the output is the same,
# whatever `W` holds. No amount of training helps: the information from the neighbours never arrives.

# %%
W = np.array([[1.0, 0.2, 0.0], [0.1, 1.1, 0.0], [0.5, 0.5, 1.0], [0.0, 0.3, 0.8]])
linear = {name: x[name] @ W for name in sentences}
show(linear)
print("\nbank by the river:", linear["river"][BANK], "  bank with money:", linear["finance"][BANK])

# %% [markdown]
# ## Scores: every word with every word
#
# The product `x @ x.T` holds the dot product of each pair of words. Row *i* belongs to the word that looks (the
# *query*), column *j* to the word that is looked at (the *key*). Words that share large columns get large scores.
#
# `sa.attention_steps` computes attention and keeps every intermediate result under a name. Here query, key and value
# are all the raw embeddings, and `scale=1.0` leaves the scores as they are.

# %%
raw = {name: sa.attention_steps(x[name], x[name], x[name], scale=1.0) for name in sentences}
show({name: raw[name].scores for name in sentences})
print("\n", raw["river"], sep="")

# %% [markdown]
# ## Attention on the raw embeddings
#
# A softmax turns each row of scores into weights that are positive and add up to 1; the output of a word is the mean of
# all words with these weights. Now the output of *bank* depends on its neighbours, and differs between the sentences:

# %%
outputs = {name: sa.scaled_dot_product_attention(x[name], x[name], x[name], scale=1.0) for name in sentences}
show(outputs)
print("\nbank by the river:", outputs["river"][BANK], "  bank with money:", outputs["finance"][BANK])

# %% [markdown]
# These are the numbers of the page at the top, in its tab *Words as they are*. Point at one there (or move there with
# the arrow keys): the page shows the sum in full. Click on a matrix to open its stage, change an input, and see what
# moves.
#
# *Something to find:* go to the row of *bank* in the weights. Which word does it attend to most, in each sentence? Is
# the largest weight on *bank* itself? Where in the scores can you see why?
#
# ## Projections: query, key and value
#
# With raw embeddings one row has three roles. Three matrices give each role its own numbers: `W_query` and
# `W_key` map four columns to two ($d_k = 2$), `W_value` to three ($d_v = 3$). The widths of query and key must agree,
# since they are multiplied; the width of the values is free, and becomes the width of the output.
#
# The scores are divided by $\sqrt{d_k}$, which is the default of `scaled_dot_product_attention`.

# %%
from selfattn.steps.layers import layer_steps

W_query = np.array([[1.0, 0.0], [0.0, 1.0], [0.2, 0.2], [0.0, 0.0]])
W_key = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.1, 0.1]])
W_value = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.5]])

projected = {name: layer_steps(x[name], W_query, W_key, W_value) for name in sentences}
show({name: projected[name].output for name in sentences})

# %% [markdown]
# The same from the one function call that you would write in a program: project, then attend.

# %%
for name in sentences:
    output = sa.scaled_dot_product_attention(x[name] @ W_query, x[name] @ W_key, x[name] @ W_value)
    print(f"{name}:\n{output}")

# %% [markdown]
# ## The class, with the tutorial's random weights
#
# `nn.SelfAttention(d_in, d_out)` holds three matrices drawn from [0, 1). The tutorial draws them with PyTorch and
# `manual_seed(0)`; `sa.torch_rng(0)` yields the same stream without PyTorch, so that even the output of a random layer
# comes out as printed.

# %%
from selfattn import nn

layer = nn.SelfAttention(4, 3, rng=sa.torch_rng(0))
show({name: layer(x[name]) for name in sentences})

# %% [markdown]
# Are all these the tutorial's numbers? `selfattn.tutorials` has what it prints, and compares:

# %%
from selfattn import tutorials

for each in tutorials.first_principles().comparisons:
    print(f"{each.name:40} {'as printed' if each.agrees else 'differs'}")

# %% [markdown]
# ---
# # One step further: what does the scale do?
#
# Nothing in the argument so far needed $1/\sqrt{d_k}$. The reason becomes visible when vectors get wider.
#
# ## 1. Scores grow with the width
#
# A score is a sum of $d_k$ products. If the entries of query and key are independent with mean 0 and variance 1, each
# product has variance 1, and the sum has variance $d_k$: typical scores have the size $\sqrt{d_k}$. Divided by
# $\sqrt{d_k}$ their size is 1 at every width. Compare the two columns, and the softmax of the unscaled scores: with
# eight keys, equal weights are 0.125.

# %%
rng = np.random.default_rng(0)
print(" d_k   size of scores   scaled   largest weight, unscaled   scaled")
for d_k in (1, 4, 16, 64, 256, 1024):
    query, key = rng.standard_normal((2, 200, 8, d_k))  # 200 little sentences of 8 tokens
    value = np.eye(8)  # the output is then the weights
    scores = query @ key.swapaxes(-1, -2)
    largest = [sa.scaled_dot_product_attention(query, key, value, scale=scale).max(-1).mean() for scale in (1.0, None)]
    print(f"{d_k:4}   {scores.std():14.2f}   {scores.std() / d_k**0.5:6.2f}   {largest[0]:24.3f}   {largest[1]:6.3f}")

# %% [markdown]
# Without the scale, a wide layer starts its training with nearly every token attending to one single token, chosen
# by chance.
#
# ## 2. One knob from "all alike" to "winner takes all"
#
# The scale is a knob. At 0 every score is 0 and the weights are even: the output is the plain mean, and the
# scores do not matter. The larger it gets, the larger the weight of the largest score, until only that key is left.
# For *bank* in the river sentence, with the projections from above:

# %%
query, key, value = x["river"] @ W_query, x["river"] @ W_key, x["river"] @ W_value
print("          weights of bank on              output of bank")
print("scale     " + "  ".join(f"{t:>6}" for t in sentences["river"]))
for scale in (0.0, 0.5, 1 / np.sqrt(2), 2.0, 5.0, 20.0, 100.0):
    steps = sa.attention_steps(query, key, value, scale=scale)
    weights = "  ".join(f"{w:6.3f}" for w in steps.weights[BANK])
    print(f"{scale:7.3f}   {weights}     {steps.output[BANK]}")

# %% [markdown]
# *Your turn:* at scale 100, *bank* looks only at itself. Could it be made to look mostly at *mud*? Not as long as both
# numbers of its query are positive. Try other signs in `W_query`, on the page at the end.
#
# ## 3. A hard choice does not learn
#
# Why not simply leave the scores large? Because of the gradient. Where one weight is nearly 1 and the others nearly 0,
# the softmax is flat: a small change of the query changes nothing, so its gradient is nearly zero, and training has
# no direction to follow. `scaled_dot_product_attention_vjp` returns the output together with the function that
# computes the gradients:

# %%
print("scale     largest weight   size of the gradient of bank's query")
for scale in (0.0, 0.5, 1 / np.sqrt(2), 2.0, 5.0, 20.0, 100.0):
    output, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, scale=scale)
    only_bank = np.zeros_like(output)
    only_bank[BANK, 0] = 1.0  # how does the first number of bank's output depend on ...
    gradient = pullback(only_bank).query[BANK]  # ... bank's query?
    largest = sa.attention_steps(query, key, value, scale=scale).weights[BANK].max()
    print(f"{scale:7.3f}   {largest:14.3f}   {np.linalg.norm(gradient):.6f}")

# %% [markdown]
# The gradient is small at both ends: at 0 because the query has no effect, at 100 because the choice is made and a
# slightly different query would make the same one. In between lies the range in which a layer can learn. These
# hand-made scores are small, so a scale of 5 gives a larger gradient than $1/\sqrt 2$. The point of $1/\sqrt{d_k}$ is
# not that it is the best number. It is that the width of the layer no longer decides at which end training begins.
#
# Here is the projected attention with all steps; move the scale on the page, and watch the weights of *bank*.

# %%
from selfattn.views import steps_page

steps_page(projected["river"], sentences["river"])

# %% [markdown]
# **To take away**
#
# - A linear layer never sees the neighbours; attention is a mean over them, with weights made from the words
# themselves.
# - Query and key decide *which* words are attended to, the value decides *what* they contribute. Only query and key
# must have one width.
# - The scale keeps the softmax in the range where it can learn. It is not a matter of taste: wide layers need it.
#
# Next: [notebook 2](2_sentence_embeddings.ipynb) trains a small model, and shows what its *bank* attends to.
