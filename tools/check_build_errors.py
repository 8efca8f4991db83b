#!/usr/bin/env python3
"""Checks that a build that cannot succeed says in its last line what is missing.

python tools/check_build_errors.py

Runs ``setup.py build_ext`` of this checkout with compilers that lack something: scripts that refuse what includes a
header or asks for a builtin. The Python that runs this has what a build requires. Nothing is built.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A compiler that fails as if it did not find a header.
LACKING = """#!/bin/sh
case "$*" in *--version*) echo "gcc (Debian) 9.4.0"; exit 0 ;; esac
for last in "$@"; do
    case $last in *.c)
        if grep -q '{header}' "$last"; then echo "fatal error: {header}: No such file" >&2; exit 1; fi ;;
    esac
done
exec {compiler} "$@"
"""


def last_line(compiler: str, path: str) -> str:
    """Run a build that must fail, and return the last line that it prints."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "setup.py", "-q", "build_ext", "-b", directory, "-t", directory]
        environment = os.environ | {"CC": compiler, "PATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        raise SystemExit(f"a build with {compiler} and PATH={path} succeeded")
    return done.stderr.strip().rpartition("\n")[2]


def main() -> None:
    """Try a build without each requirement."""
    compiler, path = os.environ.get("CC", "cc"), os.environ["PATH"]
    with tempfile.TemporaryDirectory() as directory:
        cases = {"no C compiler 'cc'": ("cc", directory)}
        scripts = {
            "no headers of the C library": LACKING.format(header="stdlib.h", compiler=compiler),
            "is too old (gcc (Debian) 9.4.0)": LACKING.format(header="__has_builtin", compiler=compiler),
            "no headers of Python": LACKING.format(header="Python.h", compiler=compiler),
        }
        for number, (said, script) in enumerate(scripts.items()):
            file = Path(directory, f"cc{number}")
            file.write_text(script, encoding="utf-8")
            file.chmod(0o755)
            cases[said] = (str(file), path)
        for said, (cc, where) in cases.items():
            line = last_line(cc, where)
            print(line)
            if not line.startswith("selfattn cannot be built: ") or said not in line:
                raise SystemExit(f"expected a line with {said!r}")


if __name__ == "__main__":
    main()
