"""What tests of commands share: streams that are minimal, closed or full, and checks of a command with any of them."""

import contextlib
import io
import os
import shlex
import sys

from processes import COMMAND, finish, start

ASCII_ONLY = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": None}


class Minimal:
    """A stream that has what `print` needs and no more."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


@contextlib.contextmanager
def gone(how):
    """A file on a full disk, or a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, open("/dev/full", "w") as full:
        yield full if how == "full" else unread


def written_without_descriptors(arguments, out):
    """Run a command without the descriptors 0 to 2, and write to 1 and 2 at its end; return what its file has."""
    script = f"""
import os, sys
from selfattn import cli
code = cli.main({[*arguments, "--out", str(out)]})
os.write(1, b"lost"), os.write(2, b"lost")
sys.exit(code)
"""
    done = finish(start([sys.executable, "-c", script], preexec_fn=lambda: [os.close(n) for n in (0, 1, 2)]))
    assert done.returncode == 0
    return out.read_text(encoding="utf-8")


def written_by_name(arguments, mode, cwd, path):
    """Run a command twice with standard output's names as its file; return what it wrote into the file of the shell.

    The result goes into the file that the shell has opened; a rename by root would replace the name itself.
    """
    before = os.readlink("/dev/stdout")
    path.write_text("begun\n")
    for name in ("/dev/stdout", "/dev/fd/1"):
        with path.open(mode) as out:
            done = finish(start([*COMMAND, *arguments, "--out", name], stdout=out, cwd=cwd))
        assert done.returncode == 0, done.stderr
    assert os.readlink("/dev/stdout") == before
    written = path.read_text()
    assert "/dev/" not in written.splitlines()[-1]
    return written


def assert_refused(run, command, message):
    """Run a command that must end with a message and print nothing: with exit code 1 if the system refuses, else 2."""
    out, error = run(*shlex.split(command), code=1 if "[Errno" in message else 2)
    assert out == ""
    assert message in error and (not message.endswith("\n") or error.endswith(message))
    assert "invalid" not in error.replace("invalid choice", "")
