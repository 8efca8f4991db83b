"""Benchmarks, which are not in the package: ``python -m benchmarks attention --help``, in a clone of the repository.

`peers` runs a library in a process, `table` prints what all took; `attention`, `layers`, `models` and `search` are the
programs.
"""
