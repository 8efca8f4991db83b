"""Benchmarks beside the package: what ``selfattn bench`` is too small for, measured as it measures."""
