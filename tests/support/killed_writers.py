"""Writers of an index that are killed: at every step that reaches the disk, or at random moments while others read.

    python tests/support/killed_writers.py 100      a hundred times at random

Batches of texts come, are replaced and go as a whole, so a reader that sees a part of a batch has seen half of a change.
"""

import itertools
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from selfattn import search
from selfattn.search import _store

SIZE = 5  # texts of a batch
TABLE = np.random.default_rng(0).standard_normal((256, 16))


def embed(texts):
    return np.array([TABLE[list(text.encode())].sum(axis=0) for text in texts])


def operations(seed, batches=6):
    """Operations without end: (kind, batch, version)."""
    draw, there = random.Random(seed), set()
    for version in itertools.count():
        kind = draw.choice(["add", "add", "add", "delete", "vacuum"]) if version else "add"
        batch = draw.randrange(batches)
        if kind == "delete":
            if not there:
                continue
            batch = draw.choice(sorted(there))
            there.discard(batch)
        elif kind == "add":
            there.add(batch)
        yield kind, batch, version


def texts_of(batch, version):
    return [f"batch {batch} text {n} version {version}" for n in range(SIZE)]


def perform(index, operation):
    kind, batch, version = operation
    ids = [f"{batch}.{n}" for n in range(SIZE)]
    if kind == "add":
        index.add(texts_of(batch, version), ids, [{"batch": batch, "version": version}] * SIZE)
    elif kind == "delete":
        index.delete(ids)
    else:
        index.vacuum()


def states(done):
    """The version of each batch after each of some operations, and before all."""
    found = [{}]
    for kind, batch, version in done:
        now = dict(found[-1])
        if kind == "add":
            now[batch] = version
        elif kind == "delete":
            del now[batch]
        found.append(now)
    return found


def seen(index):
    """The version of each batch, by a search that finds all; an error for a batch that is not whole."""
    found = {}
    for hit in index.search("batch", 1000):
        found.setdefault(hit.metadata["batch"], []).append(hit)
    for batch, hits in found.items():
        version = hits[0].metadata["version"]
        assert sorted(hit.text for hit in hits) == texts_of(batch, version), hits
        assert sorted(hit.id for hit in hits) == [f"{batch}.{n}" for n in range(SIZE)], hits
    return {batch: hits[0].metadata["version"] for batch, hits in found.items()}


def in_child(function):
    """Call a function in a process of its own; return its number, and a pipe that the function writes to."""
    reads, writes = os.pipe()
    if (process := os.fork()) == 0:
        try:
            os.close(reads)
            function(writes)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.close(writes)
    return process, reads


def write(folder, todo, pipe):
    index = search.Index.open(folder, embed)
    for operation in todo:
        perform(index, operation)
        os.write(pipe, b".")


def lines_up(folder, todo, written):
    """Check an index whose writer has said that some operations are done, and that it can be written to."""
    allowed = states(todo)[written : written + 2]
    index = search.Index.open(folder, embed)
    found = seen(index)
    assert found in allowed, (found, allowed)
    perform(index, ("add", 99, 0))
    index.vacuum()
    assert seen(index) == found | {99: 0}
    assert len(list(folder.iterdir())) == 3  # the manifest, the lock, the data


def kill_at(point):
    """Let this process kill itself at its step ``point`` of those that reach the disk; return where the count is."""
    count = [0]

    def step():
        if count[0] == point:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1

    def before(owner, name):
        own = getattr(owner, name)

        def stopped(*given, **options):
            step()
            return own(*given, **options)

        setattr(owner, name, stopped)

    own_write = _store.Writer._write

    def half_first(writer, name, array):
        if count[0] == point:
            with (writer.now.data / name).open("ab") as file:
                content = array.tobytes()
                file.write(content[: len(content) // 2])
        step()
        own_write(writer, name, array)

    _store.Writer._write = half_first
    for name in ("fsync", "replace", "truncate", "unlink", "mkdir"):
        before(os, name)
    return count


def at_every_step(seed=21, n=5):
    """Kill a writer at each of its steps; return how many there are."""
    todo = list(itertools.islice(operations(seed, 3), n))
    assert [kind for kind, *_ in todo] == ["add", "delete", "add", "add", "vacuum"]  # the third add replaces
    for point in itertools.count():
        with tempfile.TemporaryDirectory(dir=_memory()) as name:
            folder = Path(name, "index")
            search.Index.create(folder, embed)

            def written(pipe, point=point, folder=folder):
                kill_at(point)
                write(folder, todo, pipe)

            process, reads = in_child(written)
            _, status = os.waitpid(process, 0)
            done = len(os.read(reads, 100))
            os.close(reads)
            if not os.WIFSIGNALED(status):
                assert os.waitstatus_to_exitcode(status) == 0 and done == n
                return point
            lines_up(folder, todo, done)


def at_random(times, seed=None):
    """Kill a writer after up to 0.1 s, again and again, while a reader checks what it sees."""
    draw = random.Random(seed)
    for n in range(times):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "index")
            search.Index.create(folder, embed)
            todo = list(itertools.islice(operations(draw.random()), 2000))
            process, reads = in_child(lambda pipe, todo=todo, folder=folder: write(folder, todo, pipe))
            known = states(todo)
            index, end, looked = (
                search.Index.open(folder, embed),
                time.monotonic() + draw.uniform(0.01, 0.3),
                0,
            )
            while time.monotonic() < end:
                assert seen(index) in known
                looked += 1
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            done = 0
            while more := os.read(reads, 4096):
                done += len(more)
            os.close(reads)
            lines_up(folder, todo, done)
            print(f"{n}: killed after {done} operations; {looked} looks", flush=True)


def _memory():
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    at_random(int(sys.argv[1]))
    print(at_every_step(), "steps")
