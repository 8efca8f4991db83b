"""A script: Python threads that call pretrained models at once.

See `races.py` among the core's tests: its usage is the same.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "tests" / "support"))

from model_operations import ALL
from operations import KINDS
from races import main

FIRST = ["BertModel", "ModernBertModel"]
FIRST += [f"{name} of {kind}" for name in ("BertModel", "LlamaForCausalLM") for kind in KINDS]

if __name__ == "__main__":
    main(ALL, FIRST)
