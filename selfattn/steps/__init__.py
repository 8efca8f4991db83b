"""Every intermediate value of attention, to look at.

`attention` has those of one call, `layers` those of layers of attention and models of sentences, `transformer` those of
transformers.
"""

from selfattn.steps.attention import AttentionSteps, attention_steps

__all__ = ["AttentionSteps", "attention_steps"]
