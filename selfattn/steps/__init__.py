"""Every intermediate value of attention, to look at.

`attention` has the steps of one call, `layers` of attention layers and sentence-embedding models, `transformer` of
transformers.
"""

from selfattn.steps.attention import AttentionSteps, attention_steps

__all__ = ["AttentionSteps", "attention_steps"]
