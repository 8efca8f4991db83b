"""Every intermediate value of attention, to look at.

`attention` has the steps of one call, `layers` of attention layers and sentence-embedding models, `transformer` of
transformers; `changes` says what is to be different in them.
"""

from selfattn.steps.attention import AttentionSteps, attention_steps
from selfattn.steps.changes import Change

__all__ = ["AttentionSteps", "Change", "attention_steps"]
