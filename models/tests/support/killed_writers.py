"""Writers of an index that are killed: as at every step that reaches the disk, and at random moments while others read.

    python tests/support/killed_writers.py 100      a hundred times at random

Batches of texts come, are replaced and go as a whole: a reader that sees a part of one has seen half of a change.
"""

import functools
import itertools
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from selfattn_models import search
from selfattn_models.search import _store

SIZE = 5  # texts of a batch
TABLE = np.random.default_rng(0).standard_normal((256, 16))
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def embed(texts):
    return np.array([TABLE[list(text.encode())].sum(axis=0) for text in texts])


def operations(seed, n, batches=6):
    """The first of the operations that a seed draws, (kind, batch, version), and the batches' versions before and
    after each."""
    draw, todo, states = random.Random(seed), [], [{}]
    while len(todo) < n:
        kind, batch = draw.choice(["add", "add", "add", "delete", "vacuum"]), draw.randrange(batches)
        if kind == "delete" and batch not in states[-1]:
            continue
        others = {each: version for each, version in states[-1].items() if kind == "vacuum" or each != batch}
        todo.append((kind, batch, len(todo)))
        states.append(others | ({batch: len(todo) - 1} if kind == "add" else {}))
    return todo, states


def texts_of(batch, version):
    return [f"batch {batch} text {n} version {version}" for n in range(SIZE)]


def perform(index, kind, batch, version):
    ids = [f"{batch}.{n}" for n in range(SIZE)]
    if kind == "add":
        index.add(texts_of(batch, version), ids, [{"batch": batch, "version": version}] * SIZE)
    elif kind == "delete":
        index.delete(ids)
    else:
        index.vacuum()


def seen(index):
    """The version of each batch, by a search that finds all; an error for a batch that is not whole."""
    hits = sorted(index.search("batch", 1000), key=lambda hit: hit.id)
    found = {hit.metadata["batch"]: hit.metadata["version"] for hit in hits}
    whole = [
        (f"{batch}.{n}", text)
        for batch in sorted(found)
        for n, text in enumerate(texts_of(batch, found[batch]))
    ]
    assert [(hit.id, hit.text) for hit in hits] == whole
    return found


def start(folder, todo, prepare=lambda writes: None):
    """Start a process that performs operations, and writes a dot to a pipe after each; return its number and the
    pipe."""
    search.Index.create(folder, embed)
    reads, writes = os.pipe()
    if process := os.fork():
        os.close(writes)
        return process, reads
    try:
        prepare(writes)
        index = search.Index.open(folder, embed)
        for operation in todo:
            perform(index, *operation)
            os.write(writes, b".")
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def ended(process, reads):
    """Wait for a process; return how it ended, and what it wrote to the pipe."""
    _, status = os.waitpid(process, 0)
    with os.fdopen(reads, "rb") as pipe:
        return os.waitstatus_to_exitcode(status), pipe.read()


def check(folder, done, states):
    """Check an index whose writer has ended after some operations, and that it can be written to."""
    index = search.Index.open(folder, embed)
    found = seen(index)
    assert found in states[done : done + 2], (done, found)
    perform(index, "add", 99, 0)
    index.vacuum()
    assert seen(index) == found | {99: 0}
    assert len(list(folder.iterdir())) == 3  # the database, its sum, the vectors


def copy_at_each_step(folder, writes):
    """Let this process copy a folder before each step that reaches the disk, as a kill would leave it, half of a
    write included."""
    copies, copying, own_write = itertools.count(), [], _store.Writer._write

    def before(own, half=lambda copy, *given: None):
        def copied(*given, **options):
            if not copying:
                copying.append(True)
                copy = folder.with_name(str(next(copies)))
                shutil.copytree(folder, copy)
                half(copy, *given)
                os.write(writes, b"c")
                copying.clear()
            return own(*given, **options)

        return copied

    def half(copy, writer, name, number, at, array):
        with (copy / f"{name}-{number}").open("ab") as file:
            file.write(array.tobytes()[: array.nbytes // 2])

    class Connection(sqlite3.Connection):
        execute = before(sqlite3.Connection.execute)
        executemany = before(sqlite3.Connection.executemany)

    _store.sqlite3.connect = functools.partial(sqlite3.connect, factory=Connection)
    _store.Writer._write = before(own_write, half)
    for name in ("fsync", "unlink"):
        setattr(os, name, before(getattr(os, name)))


def at_every_step(seed=801):
    """Check what a writer that is killed would leave at each of its steps; return how many there are."""
    todo, states = operations(seed, 6, 2)
    expected = [("add", 0), ("add", 0), ("delete", 0), ("add", 1), ("vacuum", 0), ("add", 1)]
    assert [(kind, batch) for kind, batch, _ in todo] == expected, todo
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name, "index")
        code, steps = ended(*start(folder, todo, lambda writes: copy_at_each_step(folder, writes)))
        assert code == 0 and steps.count(b".") == len(todo)
        copies = [at for at, step in enumerate(steps) if step == ord("c")]
        for n, at in enumerate(copies):
            check(folder.with_name(str(n)), at - n, states)
        check(folder, len(todo), states)
    return len(copies)


def at_random(times):
    """Kill a writer after up to 0.3 s, again and again, while a reader checks what it sees."""
    for n in range(times):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name, "index")
            todo, states = operations(time.time_ns(), 2000)
            process, reads = start(folder, todo)
            index, end = search.Index.open(folder, embed), time.monotonic() + random.uniform(0.01, 0.3)
            while time.monotonic() < end:
                assert seen(index) in states
            os.kill(process, signal.SIGKILL)
            code, done = ended(process, reads)
            assert code == -signal.SIGKILL
            check(folder, len(done), states)
            print(f"{n}: killed after {len(done)} operations", flush=True)


if __name__ == "__main__":
    at_random(int(sys.argv[1]))
    print(at_every_step(), "steps")
