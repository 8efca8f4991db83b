"""What `selfattn.steps.tutorials` has, under its public path."""

from selfattn.steps.tutorials import (
    TUTORIALS,
    Comparison,
    Tutorial,
    attention_module,
    basics_notebook,
    compute_all,
    first_principles,
    illustrated,
    load,
    sentence_embeddings,
)

__all__ = [
    "TUTORIALS",
    "Comparison",
    "Tutorial",
    "attention_module",
    "basics_notebook",
    "compute_all",
    "first_principles",
    "illustrated",
    "load",
    "sentence_embeddings",
]
