"""Fresh Python processes with the tests' import path: scripts that may hang, and the command `selfattn`.

What may hang has a time limit, so that a hang is a failure and not the end of the run.
"""

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent
TIME_LIMIT = 240  # seconds: a script needs a few, unless it hangs
PYTHON = (sys.executable, "-P", "-W", "ignore")
COMMAND = (*PYTHON, "-m", "selfattn")
ENVIRONMENT = {
    # PYTHONUNBUFFERED would hide text that is unwritten at the end.
    **{name: x for name, x in os.environ.items() if name != "PYTHONUNBUFFERED"},
    "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    "PYTHONIOENCODING": "utf-8",
    "PYTHONFAULTHANDLER": "1",
}
if folder := ENVIRONMENT.get("SELFATTN_TEST_BYTECODE"):  # see before_tests.py
    ENVIRONMENT |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": folder}
# Freed arrays go back to the system at once, so that a call cannot use them unnoticed.
TO_THE_SYSTEM = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def start(arguments, environment=None, **options):
    """Start a program; a variable that is None in `environment` is taken out."""
    variables = {name: x for name, x in {**ENVIRONMENT, **(environment or {})}.items() if x is not None}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        [*map(str, arguments)], env=variables, start_new_session=True, **(pipes | options)
    )


def finish(process, given=None):
    """Wait for the end of a process, as `subprocess.run` does; its children die with it when it hangs."""
    try:
        output, errors = process.communicate(given, timeout=TIME_LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        pytest.fail(f"hangs: no end after {TIME_LIMIT} s. It printed {output!r}, {errors!r}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run_script(script, *arguments, prelude="", **environment):
    """Run a script that must end well; return what it printed."""
    script = prelude + textwrap.dedent(script)
    done = finish(start([*PYTHON, "-c", script, *arguments], environment))
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


def run_command(*arguments, given=None, environment=None, **options):
    """Run `python -m selfattn` with its output in pipes, and text on its standard input."""
    stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
    return finish(start([*COMMAND, *arguments], environment, stdin=stdin, **options), given)


def assert_allocations_may_fail(folder, script):
    """Run a script such as memory_fails.py with failing_malloc.c preloaded, compiled in a folder, or skip the test."""
    if platform.libc_ver()[0] != "glibc" or shutil.which("gcc") is None:
        pytest.skip("needs glibc and GCC")
    pytest.importorskip("ml_dtypes")
    shim = folder / "failing_malloc.so"
    command = f"gcc -O1 -shared -fPIC -Wall -Werror {SUPPORT / 'failing_malloc.c'} -o {shim} -ldl"
    subprocess.run(shlex.split(command), check=True)
    done = finish(start([sys.executable, script], {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}))
    assert done.returncode == 0, done.stdout + done.stderr
