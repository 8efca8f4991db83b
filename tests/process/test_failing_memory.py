"""Memory that fails: allocations of the core in every operation, drawn anew each time. tests/support/memory_fails.py tries all."""

import platform
import shlex
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
def test_allocations_fail(tmp_path):
    shim = tmp_path / "failing_malloc.so"
    command = f"gcc -O1 -shared -fPIC -Wall -Werror {SUPPORT / 'failing_malloc.c'} -o {shim} -ldl"
    subprocess.run(shlex.split(command), check=True)
    environment = {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
    done = finish(start([sys.executable, SUPPORT / "memory_fails.py"], environment))
    assert done.returncode == 0, done.stdout + done.stderr
