"""Benchmarks of layers and models, which are not in the package; they measure as ``selfattn bench`` does."""
