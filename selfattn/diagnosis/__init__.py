"""Which step of one's own attention is wrong.

`calls` finds out how a function is called, `formula` has attention as a table of steps, `rules` the known faults: a
name, a sentence, and how the fault changes formulas. `search` compares the numbers, and `verdict` says what was found.
"""

from selfattn.diagnosis.verdict import diagnose, diagnose_vjp

__all__ = ["diagnose", "diagnose_vjp"]
