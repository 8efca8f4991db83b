"""A script: Python threads that call the package at once, on arrays of their own and on shared ones.

`tools/check_threads.sh` starts it under ThreadSanitizer, `tests/process/test_threads.py` without. `model_races.py`,
among the tests of models, calls pretrained models.

Everything must have the bits that one thread alone computes. With `planted` in place of a number of rounds, two threads
write into one array: the sanitizer must report that.
"""

import contextlib
import functools
import os
import random
import sys
import sysconfig
import threading
from collections import Counter

import numpy as np
import operations
from core_operations import ALL
from operations import same

import selfattn as sa
from selfattn import nn
from selfattn.optim.optimizers import Update

THREADS = 4
DRAWS = 500  # draws of each thread
RNG = np.random.default_rng(0)
ADAM = Update("adam", 0.1, 0.0, beta1=0.9, beta2=0.999, eps=1e-8)
FIRST = ["GPT draws", "fit", "RotaryEmbedding", "model 0"]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


failures = []


def at_once(*works):
    """Run each function in a thread; all begin together."""
    start = threading.Barrier(len(works))

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=[work]) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def compute(calls, expected, seed):
    """Return a function that makes all calls, in an order of its own."""

    def work():
        for name in random.Random(seed).sample(list(calls), len(calls)):
            got = calls[name]()
            assert same(got, expected[name]), f"{name} has other bits"
            del got

    return work


def settings(done):
    """Read and change settings of the whole process until the other threads have ended."""
    numbers = 0
    while not done.is_set():
        sa.set_num_threads((1, 2, 3, None)[numbers % 4])
        assert sa.get_num_threads() >= 1
        assert sa.get_isa() in sa.show_config("dicts")["available_isas"]
        numbers += 1
    sa.set_num_threads(None)


def prepared(catalogue):
    """Return calls by name, each with arrays of its own; these have the same numbers each time."""
    return {name: each.prepare()[0] for name, each in catalogue.items()}


def all_operations(catalogue, turn):
    """Run all operations in all threads: two threads share the arrays that they read; all share the modules."""
    expected = {name: call() for name, call in prepared(catalogue).items()}
    calls = [prepared(catalogue) for _ in range(THREADS)]
    calls[1] |= {name: call for name, call in calls[0].items() if not catalogue[name].in_place}
    done = threading.Event()
    setting = threading.Thread(target=settings, args=[done])
    setting.start()
    at_once(*(compute(own, expected, 10 * turn + n) for n, own in enumerate(calls)))
    done.set()
    setting.join()


def first_calls(catalogue, first):
    """An object's first call makes what later calls use again, such as angles: here all threads make that call at
    once."""
    for name in first:
        expected = catalogue[name].prepare()[0]()
        operations.made.cache_clear()
        call = catalogue[name].prepare()[0]
        at_once(*[compute({name: call}, {name: expected}, 0)] * THREADS)


def handed_over():
    """One thread makes a pullback, another calls and drops it; then a third thread may get its memory."""
    x, y = normal(3, 30, 32), normal(2, 3, 60, 16)
    module = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, rng=0)
    out, pullback = module.vjp(x)
    expected = pullback(out)
    made, lock = [], threading.Lock()

    def make():
        for _ in range(8):
            got = module.vjp(x)[1], sa.scaled_dot_product_attention_vjp(y, y, y)[1]
            with lock:
                made.append(got)

    def use():
        for _ in range(8):
            with lock:
                got = made.pop() if made else None
            if got is not None:
                assert same(got[0](out), expected)
                got[1](y)

    at_once(make, use, make, use)
    made.clear()


def generators():
    """All threads draw from one generator: each number is drawn once."""
    shared, drawn = sa.torch_rng(3), [[] for _ in range(THREADS)]
    at_once(*(functools.partial(draw, shared, own) for own in drawn))
    in_turn, together = sa.torch_rng(3), Counter(x for own in drawn for x in own)
    first = Counter(float(in_turn.standard_normal()) for _ in range(THREADS * DRAWS + 2 * THREADS))
    assert together.total() == THREADS * DRAWS
    assert together <= first, "a number was drawn twice"
    source, y = np.random.default_rng(0), normal(2, 3, 20, 16)
    at_once(*[lambda: sa.scaled_dot_product_attention(y, y, y, dropout_p=0.5, rng=source)] * THREADS)


def draw(generator, own):
    own.extend(float(generator.standard_normal()) for _ in range(DRAWS))


def lists_that_change():
    """The core reads lists that another thread makes longer and shorter: it takes the content of one moment, or
    refuses."""
    ids, done = [1] * 20, threading.Event()
    x = [normal(40, 60) for _ in range(4)]
    arrays = [[array.copy()] for array in x]

    def change():
        while not done.is_set():
            ids.extend([2] * 500)
            del ids[20:]
            for of_one, array in zip(arrays, x, strict=True):
                of_one.clear()
                of_one.append(array.copy())

    def read():
        try:
            for _ in range(300):
                packed = sa._core._pack_ids([ids], 50)
                assert packed is None or set(packed[0].tolist()) <= {1, 2}
                with contextlib.suppress(TypeError):  # the list may be empty at that moment
                    sa._core._update((ADAM, *arrays, None, [1], None))
        finally:
            done.set()

    at_once(change, read)


def forks():
    """One thread forks while others compute; the children compute too."""
    x = normal(2, 4, 100, 16)
    expected = sa.scaled_dot_product_attention(x, x, x, num_threads=1)

    def attend():
        for _ in range(10):
            assert same(sa.scaled_dot_product_attention(x, x, x, num_threads=2), expected)

    def fork():
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if same(sa.scaled_dot_product_attention(x, x, x, num_threads=1), expected) else 1)
            assert os.waitpid(pid, 0)[1] == 0, "a child failed"

    at_once(attend, fork, attend)


def planted():
    x, out = normal(4, 8, 100, 64), np.empty((4, 8, 100, 64), np.float32)

    def write():
        for _ in range(20):  # on a busy machine one thread might be done before the other begins
            sa.scaled_dot_product_attention(x, x, x, out=out, num_threads=1)

    at_once(write, write)


def main(catalogue, first, *parts):
    """Try operations of a catalogue, the first calls of some, and other parts, for some rounds; end the process."""
    catalogue = {
        name: each for name, each in catalogue.items() if not (each.random or each.alone or each.threads > 1)
    }
    sys.setswitchinterval(1e-5)  # seconds, so that threads with a GIL take turns often
    for turn in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        all_operations(catalogue, turn)
        first_calls(catalogue, first)
        for part in parts:
            part()
    gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    assert gil != bool(sysconfig.get_config_var("Py_GIL_DISABLED")), (
        "a free-threaded Python has a GIL: an extension asked for it"
    )
    where = f"{THREADS} threads, {sa.get_isa()}, {'with' if gil else 'without'} a GIL"
    print(f"{len(catalogue)} operations in {where}: {len(failures)} failures", flush=True)
    sys.exit(bool(failures))


if __name__ == "__main__":
    if sys.argv[1:] == ["planted"]:
        planted()
        sys.exit()
    main(ALL, FIRST, handed_over, generators, lists_that_change, forks)
