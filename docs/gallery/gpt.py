"""
The heads of a GPT
==================

A GPT of 159,000 parameters is in the package, trained on letters of the World English Bible. What do its twelve heads
look at?
"""

import matplotlib.pyplot as plt
import numpy as np

from selfattn import views

model, alphabet = views.page_gpt()
prompt = "in the beginning god "
ids = [alphabet.index(letter) for letter in prompt]
written = model.generate(np.array(ids), 40)
print("".join(alphabet[n] for n in written))

# %%
# The attention of a layer returns its weights, (heads, queries, keys). Rows are letters, from top to bottom; their
# weights add up to 1.

x = model.token_embedding(ids) + model.position_embedding(np.arange(len(ids)))
later = ~np.tri(len(ids), dtype=bool)  # True: closed, as in PyTorch
figure, axes = plt.subplots(3, 4, figsize=(9, 7), layout="constrained")
for layer, row in zip(model.layers, axes):
    n = layer.norm1(x)
    _, heads = layer.self_attn(n, n, n, attn_mask=later, average_attn_weights=False)
    x = layer(x, is_causal=True)
    for weights, ax in zip(heads, row):
        ax.imshow(weights, cmap="Blues", vmin=0, vmax=1)
        ax.set(xticks=range(len(prompt)), yticks=range(len(prompt)), xticklabels=prompt, yticklabels=prompt)
        ax.tick_params(labelsize=5, length=0)
figure.suptitle("3 layers of 4 heads")

# %%
# ``views.gpt_page(prompt=prompt)`` is a page that runs this model: type, switch a head off, and see the text change.
