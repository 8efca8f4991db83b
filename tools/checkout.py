"""The checkout, and copies of it for tools that build outside it."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WASM = "selfattn/views/data/selfattn.wasm"  # the core for live pages, which setup.py writes where Clang can build it


def copy_to(folder: Path) -> None:
    """Copy the files that git tracks, with uncommitted changes."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
