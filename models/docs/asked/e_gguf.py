"""
Attention matrices of a GGUF model
==================================

Asked of llama.cpp: `issue 9122 <https://github.com/ggml-org/llama.cpp/issues/9122>`_.
"""

import selfattn_models as models

model = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
steps = model.steps("the sea was calm")
[layer.weights.shape for layer in steps.layers]  # (heads, queries, keys)

# %%
# One array for each layer, (heads, queries, keys). ``selfattn_models.pages.explorer(model, "the sea was calm")``
# shows them on a page.
