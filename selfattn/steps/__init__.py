"""Every intermediate value of attention, to look at.

`records` has what steps are, one hierarchy; `attention` computes those of one call, `layers` of attention layers and
sentence-embedding models, `transformer` of transformers. `changes` says what is different in them, and `arguments`
checks what `selfattn.reference` computes with.
"""

from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.steps.changes import Change

__all__ = ["AttentionSteps", "Change", "attention_steps"]
