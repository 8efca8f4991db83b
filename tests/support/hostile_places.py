"""Folders and files with code in them, and what must come of reading them: no code runs (SECURITY.md)."""

import json
import os
import stat
import tempfile
from pathlib import Path

from hostile import put
from processes import PYTHON, finish, start

MODULES = ("evil", "__init__", "sitecustomize", "tokenizers", "safetensors", "modeling_bert")


class Payload:
    """What unpickled makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch '{self.marker}'",)


def change_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_code(folder, marker, names=MODULES):
    """Write modules that make a file when they run."""
    for module in names:
        (folder / f"{module}.py").write_text(f"open({str(marker)!r}, 'w')\n")


def assert_no_code_runs(program, make_hostile, folder):
    """Read good and hostile folders and files by a program in a process of its own, and compare with what is expected.

    ``make_hostile(place, marker)`` makes them, one with code in it, "code of its own", and returns the expected result
    of each: a message's beginning, or an object.
    """
    marker, place = folder / "ran", folder / "place"
    place.mkdir()
    expected = make_hostile(place, marker)
    done = finish(start([*PYTHON, program, place], cwd=place / "code of its own"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [event.split()[0] for event in found.pop("control")[1]] == ["pickle.find_class", "compile", "exec"]
    assert found.keys() == expected.keys()
    for name, (came, events) in found.items():
        wanted = expected[name]
        assert came == wanted or (isinstance(wanted, str) and str(came).startswith(wanted)), (name, came)
        assert not events, (name, events)
    assert not marker.exists()


# ---------------------------------------------------------------------- things in the place of a file

THINGS = {
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a terabyte of holes": lambda path: (path.touch(), os.truncate(path, 2**40)),
}


def assert_refused(found, name, thing, use):
    """Write the files of a folder, put a thing in the place of one, and expect an error that names it."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        put(place, found)
        (place / name).unlink(missing_ok=True)
        THINGS[thing](place / name)
        try:
            use(place)
        except (ValueError, OSError, MemoryError) as error:
            assert Path(name).name in f"{error}{getattr(error, 'filename', '')}", (name, thing, error)
            assert "\n" not in str(error)
        else:
            raise AssertionError(f"{thing} in the place of {name} was read")
