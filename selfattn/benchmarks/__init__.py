"""selfattn timed against its peers: every contestant in a process of its own, interleaved in one run.

The path of a run: `cases` says what is computed, `engines` how each library does it, `worker` runs one
library behind a pipe, `measure` interleaves the workers, `report` turns the results into tables, `app` is the
command line. `embedding`, steps of the embedding model, and `long`, long sequences, stand apart: each has a command
of its own.
"""
