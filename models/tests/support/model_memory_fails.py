"""A script: makes allocations of each operation of pretrained models fail.

See `memory_fails.py` among the core's tests: its usage is the same.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

from memory_fails import main
from model_operations import ALL

if __name__ == "__main__":
    main(ALL, every=False)
