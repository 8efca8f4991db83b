"""What all tests share: `support` is on the path, and has their fixtures and settings."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))  # importlib mode does not find its modules
sys.path.append(str(Path(__file__).parents[1]))  # benchmarks

import before_tests  # noqa: F401 before NumPy is loaded
from fixtures import *  # noqa: F403
