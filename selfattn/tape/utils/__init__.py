"""Data sets and their batches, as ``torch.utils``."""

from selfattn.tape.utils import data

__all__ = ["data"]
