"""Functions of arrays: the core's own, their gradients, and what is made of them."""

from selfattn.functional.merge import merge_attention

__all__ = ["merge_attention"]
