"""Real models, loaded from a folder as Transformers and sentence-transformers write it."""
