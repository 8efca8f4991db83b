"""What `selfattn.steps.tutorials` has, under its public path."""

from selfattn.steps.tutorials import TUTORIALS, Comparison, Tutorial, compute_all, load

__all__ = ["TUTORIALS", "Comparison", "Tutorial", "compute_all", "load"]
