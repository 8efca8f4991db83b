"""What all tests share: `support` here and that of the core's tests are on the path, with fixtures and settings."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent / "support"), str(ROOT / "tests" / "support")]
sys.path.append(str(ROOT))  # benchmarks, after the packages that are installed

import before_tests  # noqa: E402, F401 before NumPy is loaded
from fixtures import *  # noqa: E402, F403
