"""Memory that fails: each allocation of the core, in each operation, in turn. What is tried is in tests/support/memory_fails.py."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import finish, start

pytest.importorskip("ml_dtypes")
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which("gcc") is None, reason="needs glibc and GCC"
)
def test_each_allocation_fails_in_turn(tmp_path):
    shim = tmp_path / "failing_malloc.so"
    subprocess.run(
        [
            "gcc",
            "-O1",
            "-shared",
            "-fPIC",
            "-Wall",
            "-Werror",
            SUPPORT / "failing_malloc.c",
            "-o",
            shim,
            "-ldl",
        ],
        check=True,
    )
    done = finish(
        start(
            [sys.executable, SUPPORT / "memory_fails.py"], {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
        )
    )
    assert done.returncode == 0, done.stdout + done.stderr
