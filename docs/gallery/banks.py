"""
What a model attends to
=======================

A small trained model has two heads. In a sentence about money, which head of *bank* finds the word that matters?
"""

from selfattn import tutorials
from selfattn.views import explorer, plot_attention

model = tutorials.embedding_model("two_heads")
words = "the bank and the money".split()
steps = model.steps(" ".join(words))
weights = steps.blocks[0].weights  # (heads, queries, keys)
weights.shape

# %%
# One head as a picture:

image = plot_attention(weights[0], words, title="head 1")

# %%
# All heads on a page: point at a word, choose a head. ``views.explorer(models.load("all-MiniLM-L6-v2"), "a sentence")`` shows the 72 heads
# of a real model.

explorer(steps, words, word="bank")
