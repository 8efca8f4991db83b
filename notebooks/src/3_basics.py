# %% [markdown]
# # 3. "sky is blue", slowly, and what heads are
#
# You have read *Self Attention - Basics*, a notebook that takes three tokens with two numbers each through every stage
# of one attention and prints all of them. Here each number is computed again. Then one step further: **heads**. What
# changes when the same columns are split between two attentions?
#
# *To run it:* `jupyter lab notebooks` in the folder of the clone ([what it needs](README.md)); Shift+Enter
# runs a cell.
#
# ## What to see
#
# The thickness of a ribbon is an attention weight. Point at *is* and at *blue*: what do their ribbons have in common?
# The tour asks you first, and then shows the answer.

# %%
from selfattn.views import tutorial_page

tutorial_page(3)

# %% [markdown]
# ## The tutorial's lines, on this package
#
# `selfattn.tape` has PyTorch's names, over NumPy: the tutorial's lines run, and print what the tutorial prints, when
# the imports are changed ([From scratch](../docs/guide/from_scratch.md)). The rest of the notebook computes with
# arrays, where every step can be seen.

# %%
import math

import selfattn.tape as torch
import selfattn.tape.nn.functional as F

embedded = torch.tensor([[-1.072, -0.5001], [-0.002, -0.4311], [-0.002, -0.4311]])
WQ = torch.tensor([[-0.0271, -0.384], [-0.394, -0.661]], requires_grad=True)
WK = torch.tensor([[-0.4109, 0.5777], [-0.1162, -0.1661]], requires_grad=True)
WV = torch.tensor([[-0.2045, 0.121], [-0.1712, -0.4462]], requires_grad=True)
Q, K, V = embedded @ WQ, embedded @ WK, embedded @ WV
attn_logits = Q @ K.T
scaled_attention_logits = attn_logits / math.sqrt(Q.size()[-1])
attention_weights = F.softmax(scaled_attention_logits, dim=-1)
output = attention_weights @ V
print(attn_logits, scaled_attention_logits, attention_weights, output, sep="\n")
output[0].square().sum().backward()
print("the gradient of WV:", WV.grad)

# %% [markdown]
# ## The sentence
#
# A tokenizer has turned the words into the ids 1, 2, 3; an embedding table has one row for each id. Something is odd
# about this table: *is* and *blue* have the same row. Keep that in mind: it will show at every stage.

# %%
import numpy as np

np.set_printoptions(precision=4, suppress=True)
tokens = ["sky", "is", "blue"]
ids = np.array([1, 2, 3])
table = np.array([[0.0, 0.0], [-1.072, -0.5001], [-0.002, -0.4311], [-0.002, -0.4311]])  # row 0 is not used
x = table[ids]
x

# %% [markdown]
# ## Three projections
#
# `W.T` appears nowhere: a row of `x` times a column of `WQ` is one number of `Q`. For *sky* and the first column that
# is $-1.072 \cdot -0.0271 + -0.5001 \cdot -0.394 = 0.0291 + 0.1970 = 0.2261$.

# %%
WQ = np.array([[-0.0271, -0.384], [-0.394, -0.661]])
WK = np.array([[-0.4109, 0.5777], [-0.1162, -0.1661]])
WV = np.array([[-0.2045, 0.121], [-0.1712, -0.4462]])

Q, K, V = x @ WQ, x @ WK, x @ WV
print(Q, K, V, sep="\n\n")

# %% [markdown]
# ## Logits, scale, softmax, sum
#
# `layer_steps` does the projections and everything after them, and keeps each stage under a name.

# %%
from selfattn.steps.layers import layer_steps

steps = layer_steps(x, WQ, WK, WV)
print("scores\n", steps.scores)
print("scaled scores\n", steps.scaled_scores)
print("weights\n", steps.weights, "and the sums of their rows", steps.weights.sum(axis=-1))
print("output\n", steps.output)

# %% [markdown]
# Are these the tutorial's numbers? `selfattn.tutorials` has what it prints, and compares:

# %%
from selfattn import tutorials

for each in tutorials.basics_notebook().comparisons:
    print(f"{each.name:24} {'as printed' if each.agrees else 'differs'}")

# %% [markdown]
# The tutorial computes the output in two ways. In `selfattn` there are three; all give the same:
#
# - the weights times the values, as one product of matrices,
# - for every pair (query, key) its weighted value, `steps.weighted_values`, then the sum over the keys,
# - one call of the function, which never builds the matrix of weights at all.

# %%
import selfattn as sa

ways = steps.weights @ V, steps.weighted_values.sum(axis=-2), sa.scaled_dot_product_attention(Q, K, V)
print(*ways, sep="\n\n")

# %% [markdown]
# This page shows every number and its sources, and lets you change numbers:

# %%
from selfattn.views import steps_page

steps_page(steps, tokens)

# %% [markdown]
# ### Twins
#
# Rows 2 and 3 agree in every stage. Attention knows a token by its row alone: equal rows have the same query and get
# the same output, at any position. Reverse the sentence, and the outputs are reversed too, digit by digit:

# %%
turned = layer_steps(x[::-1], WQ, WK, WV)
print("sky is blue:\n", steps.output)
print("blue is sky:\n", turned.output)

# %% [markdown]
# So attention on its own does not know word order. That is why models add something to the rows that differs from place
# to place, such as the sines and cosines in [notebook 2](2_sentence_embeddings.ipynb).
#
# ### The gradient
#
# In the tutorial `WQ`, `WK` and `WV` *take gradients*. What would that gradient be? Suppose that we want the output of
# *sky* to be (0, 0), and measure the loss as half its squared length. `scaled_dot_product_attention_vjp` gives the
# output and a function for the gradients; the three projections are plain products, whose gradients are one line each.

# %%
def loss_and_gradients(WQ, WK, WV):
    output, pullback = sa.scaled_dot_product_attention_vjp(x @ WQ, x @ WK, x @ WV)
    d_output = np.zeros_like(output)
    d_output[0] = output[0]  # the derivative of half the squared length of row 0
    d = pullback(d_output)
    return 0.5 * np.sum(output[0] ** 2), {"WQ": x.T @ d.query, "WK": x.T @ d.key, "WV": x.T @ d.value}


loss, gradients = loss_and_gradients(WQ, WK, WV)
for name, gradient in gradients.items():
    print(name, gradient.round(5).tolist())

# %% [markdown]
# Never believe a gradient untested: change one number by a millionth, and see how the loss changes.

# %%
tiny = 1e-6
nudge = np.array([[0.0, 0.0], [0.0, tiny]])  # the last number of a matrix
for name in ("WQ", "WK", "WV"):
    matrices = {"WQ": WQ, "WK": WK, "WV": WV}
    up, _ = loss_and_gradients(**matrices | {name: matrices[name] + nudge})
    down, _ = loss_and_gradients(**matrices | {name: matrices[name] - nudge})
    print(f"{name}[1, 1]: by the pullback {gradients[name][1, 1]:9.6f}, by nudging {(up - down) / (2 * tiny):9.6f}")

# %% [markdown]
# The gradients of `WQ` and `WK` are small compared with that of `WV`: with nearly equal weights over nearly equal
# values, the weights matter little, and the values much.
#
# ---
# # One step further: heads
#
# One softmax per token means one set of weights per token. But *sky* may need two different things at once.
#
# **Heads** are several attentions side by side. The columns of Q, K and V are split between them; each head computes
# its own scores and its own softmax on its own columns; the outputs are put side by side again. Here each of two heads
# gets one single column.

# %%
by_hand = []
for h in range(2):
    q, k, v = Q[:, [h]], K[:, [h]], V[:, [h]]  # one column each, so d_k is now 1 and the scale 1/sqrt(1)
    by_hand.append(sa.scaled_dot_product_attention(q, k, v))
by_hand = np.concatenate(by_hand, axis=1)

two = layer_steps(x, WQ, WK, WV, num_heads=2)
print("by hand:\n", by_hand)
print("layer_steps:\n", two.result)
print(two)

# %% [markdown]
# Note the shapes: up to `output` there is an axis for the heads in front, and `concatenated` puts them side by side.
# The matrices are the same as before, no parameter has been added. And yet the weights of *sky* are different:

# %%
print("                 ", "  ".join(f"{t:>6}" for t in tokens))
print("one head, sky:   ", "  ".join(f"{w:6.3f}" for w in steps.weights[0]))
for h in range(2):
    print(f"head {h} of 2, sky:", "  ".join(f"{w:6.3f}" for w in two.weights[h, 0]))

# %% [markdown]
# The weights of the two heads differ: by its first column *sky* attends more to itself, by the second more to the
# others. In the one head both columns were added up before the softmax, $q_1 k_1 + q_2 k_2$, and the larger product
# decided.
#
# The page shows both heads at every stage:

# %%
steps_page(two, tokens)

# %% [markdown]
# ### What one head cannot do
#
# Here is a task for which two heads are needed. Every token is a 1 in some column. Token *here* needs both the value of
# token *a* and the value of token *b*, with weight 1 each. One softmax can only give half of the one and half of the
# other. Each of two heads takes one.

# %%
names = ["here", "a", "b", "c"]
strong = 20.0
query = np.zeros((4, 4))
key = np.zeros((4, 4))
query[0, 0] = query[0, 2] = strong  # column 0 matches a, column 2 matches b
key[1, 0] = key[2, 2] = 1.0  # a has a 1 in column 0, b in column 2
value = np.array([[0, 0, 0, 0], [5, 0, 5, 0], [0, 7, 0, 7], [9, 9, 9, 9]], dtype=float)

one = sa.scaled_dot_product_attention(query, key, value)[0]


def split(t):
    """(length, 4) to (2 heads, length, 2)"""
    return t.reshape(4, 2, 2).swapaxes(0, 1)


heads, weights = sa.scaled_dot_product_attention(split(query), split(key), split(value), return_weights=True)
print("one head, width 4:           ", one)
print("two heads of width 2:        ", np.concatenate(heads[:, 0]))
print("weights of head 0 and head 1:", weights[0, 0].round(2), weights[1, 0].round(2))

# %% [markdown]
# The price is width: a head of 2 columns distinguishes fewer tokens than one of 4. That is the trade in every model
# with several heads, and nothing is gained or lost in the number of parameters.
#
# *Your turn:*
#
# - On the last page, edit `W_query` so that both heads of *sky* attend to the same token.
# - Give *is* and *blue* different rows. At which stage do the twins begin to differ?
#
# Next: [notebook 4](4_illustrated.ipynb) does an example with whole numbers by hand, and tries other ways to score.
