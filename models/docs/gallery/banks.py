"""
What a model attends to
=======================

A small trained model has two heads. In a sentence about money, which head of *bank* finds the word that matters?
"""

from selfattn import tutorials
from selfattn.views import plot_attention
from selfattn_models.pages import explorer

model = tutorials.embedding_model("two_heads")
words = "the bank and the money".split()
steps = model.steps(" ".join(words))
weights = steps.blocks[0].weights  # (heads, queries, keys)
weights.shape

# %%
# One head as a picture:

image = plot_attention(weights[0], words, title="head 0")

# %%
# All heads on a page: point at a word, choose a head. With ``model = selfattn_models.load("all-MiniLM-L6-v2")``,
# ``explorer(model, "a sentence")`` shows the 72 heads of a real model.

explorer(steps, words, word="bank")
