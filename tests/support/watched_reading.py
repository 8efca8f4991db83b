"""A program that reads all below a path, and reports code that ran but is not from Python or a package.

python watched_reading.py PLACE: PLACE/good-* is read first, unwatched, so that every import is done; then the rest,
watched. Prints JSON: for each name what came of reading it, and the events. "control" is a pickle that is unpickled on
purpose. `watched_models.py`, among the tests of models, reads pretrained models too.
"""

import json
import pickle
import sys
from pathlib import Path

import numpy as np

import selfattn
from selfattn import cli, files

PLACES = sys.prefix, sys.base_prefix, selfattn.__path__[0], np.__path__[0]
KNOWN = tuple({str(Path(folder).resolve()) for folder in PLACES})
RUNS = {"pickle.find_class", "subprocess.Popen", "socket.connect"}
PROGRAMS = set()  # that may be started
RUNS |= {f"os.{name}" for name in ("system", "exec", "posix_spawn", "spawn", "fork")}
events = []
watching = []  # not empty while a file is read


def watch(event, arguments):
    if not watching:
        return
    if event == "subprocess.Popen" and PROGRAMS.intersection(arguments[1]):
        return
    if event in RUNS:
        events.append(f"{event} {arguments}")
    elif event == "exec":
        note(event, arguments[0].co_filename)
    elif event == "compile" and arguments[1] != "<unknown>":  # ast.parse compiles literals in NumPy's headers
        note(event, arguments[1])
    elif event == "import":
        note(event, arguments[1], nothing=None)
    elif event == "ctypes.dlopen":
        note(event, arguments[0])


def note(event, filename, nothing=""):
    """Compiling chat templates for Jinja2's sandbox is allowed."""
    name = filename.decode() if isinstance(filename, bytes) else filename
    if name is nothing or name == "<template>" or (name and name.startswith(("<frozen ", *KNOWN))):
        return
    events.append(f"{event} {name}")


def read(path):
    if path.suffix == ".npz":
        return f"exit code {cli.main(['steps', str(path), '--out', str(path.with_suffix('.html'))])}"
    if path.suffix == ".safetensors":
        return sorted(files.load_arrays(path))
    return type(files.load_model(path)).__name__


def outcome(read, path):
    events.clear()
    watching[:] = [path] * (path.stem.partition("-")[0] != "good")
    try:
        return read(path), list(events)
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}", list(events)
    finally:
        watching.clear()


def main(read):
    """Read everything with a function, which returns what came of a path."""
    place = Path(sys.argv[1])
    sys.addaudithook(watch)
    paths = sorted(place.iterdir(), key=lambda path: (path.stem[:4] != "good", path.stem))
    found = {path.stem: outcome(read, path) for path in paths}
    watching.append(place)
    pickle.loads(b"cbuiltins\nlen\n.")
    exec("pass")
    found["control"] = ("", list(events))
    print(json.dumps(found))


if __name__ == "__main__":
    main(read)
