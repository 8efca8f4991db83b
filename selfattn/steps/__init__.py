"""Every intermediate value of attention, to look at.

`attention` has those of one call, `layers` those of layers and models, and `tutorials` the numbers of five published tutorials.
"""

from selfattn.steps.attention import AttentionSteps, attention_steps

__all__ = ["AttentionSteps", "attention_steps"]
