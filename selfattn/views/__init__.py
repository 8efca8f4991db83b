"""Attention made visible: heat maps of its weights.

Pure functions from steps to figures; what is computed is in :mod:`selfattn.steps`.
"""

from selfattn.views.plot import plot_attention

__all__ = ["plot_attention"]
