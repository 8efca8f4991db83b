"""Writes the vectors that the core's tests replay: python vectors FOLDER [OPERATION …].

A file has the cases of one operation; FOLDER/quick those that sanitizers and emulators run too, FOLDER/rest the others.
Expected values come from `selfattn.reference` in float64, in which nothing of the
core takes part; where it has no such operation, from lines of NumPy here, next to which their source is named.

A case is text and bytes, little-endian::

    case OPERATION NAME TOLERANCE COARSE
    number NAME VALUE
    array NAME ROLE DTYPE SWAPPED FIRST BYTES AXES shape… strides…      the bytes of an input follow
    expect COUNT BYTES SIZES      COUNT floats of BYTES bytes follow, and SIZES times as many bfloat16

A result may be off by TOLERANCE times the eps of the type
that computes, times a number's first size, and by COARSE times the eps to which the instruction set rounds products of
bfloat16, times its second size; with TOLERANCE 0 it is exact. Sizes are sums of the magnitudes of what was added,
weighted by the roundings that each has gone through (Higham, "Accuracy and Stability", section 3.1); a size of infinity
says that a result may be anything. The rounding to 16 bits is the runner's to add.
"""

import sys
from pathlib import Path

from attention import attention
from products import leaf, linear, matmul, quants, rounding, table
from rows import rows, update, varlen
from transformer import transformer

OPERATIONS = [transformer, attention, varlen, rows, update, matmul, linear, rounding, leaf, table, quants]


def main():
    """Write the files."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    parts = folder / "rest", folder / "quick"
    for part in parts:
        part.mkdir(parents=True, exist_ok=True)
    for operation in OPERATIONS:
        name = operation.__name__
        if not names or name in names:
            with (parts[0] / name).open("wb") as rest, (parts[1] / name).open("wb") as quick:
                operation((rest, quick))


if __name__ == "__main__":
    main()
