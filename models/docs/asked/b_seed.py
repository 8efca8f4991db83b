"""
The same seed, the same text, in any company
============================================

Asked of vLLM: `issue 17524 <https://github.com/vllm-project/vllm/issues/17524>`_. The order of a batch changes what a
seed draws.
"""

import selfattn_models as models

model = models.load("SmolLM2-135M-Instruct.Q4_1.gguf")
alone = model.generate("the sea", 8, temperature=0.8, rng=7)
together = model.generate(["a ship", "the sea", "dark water"], 8, temperature=0.8, rng=[1, 7, 3])
assert together[1] == alone

# %%
# The i-th of several prompts has the seed ``rng[i]``; :doc:`/models/docs/guide/language_models` says what else is
# the same.
