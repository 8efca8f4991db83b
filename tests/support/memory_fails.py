"""A script: makes allocations of each operation fail. `tests/process/test_operations.py` starts it.

It runs with failing_malloc.c preloaded. An operation either succeeds with the same result or raises MemoryError; then
the user's arrays and objects are unchanged, and nothing stays allocated. Operations are those of the catalogue
(`core_operations.py`); together they must call every function of the extension. `model_memory_fails.py`, among the
tests of models, tries those of pretrained models.

Usage: memory_fails.py [--all] [--seed N] [OPERATION ...]. In a tenth of the operations, which are drawn, a drawn
allocation fails; with --all every allocation of every operation fails, one at a time:

    gcc -O1 -shared -fPIC tests/support/failing_malloc.c -o failing.so -ldl
    LD_PRELOAD=$PWD/failing.so PYTHONMALLOC=malloc PYTHONPATH=$PWD python tests/support/memory_fails.py --all

Under AddressSanitizer (`SELFATTN_SANITIZE=address,undefined`) libasan.so and libubsan.so follow in LD_PRELOAD,
failing.so needs -ftls-model=initial-exec -Wl,-z,now, and ASAN_OPTIONS
detect_leaks=0:allocator_may_return_null=1:verify_asan_link_order=0.
"""

import argparse
import copy
import ctypes
import gc
import os
import random
import sys
import time

import numpy as np
from core_operations import ALL
from operations import same

import selfattn as sa
from selfattn import _core

shim = ctypes.CDLL(None)
shim.fail_at.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_int]
shim.allocations.restype = shim.live_blocks.restype = ctypes.c_long

MOST, NEVER = 20000, 2**60  # more than any operation allocates
DRAWN, FEW = 1, 6  # in each way DRAWN allocations fail; all of them if the operation has at most FEW


def empty_caches():
    """Take the memory that NumPy and Python keep for small objects, so that the call must allocate. Hold the result."""
    gc.collect()
    kept = [np.empty(n, np.uint8) for n in range(1, 1024) for _ in range(7)]
    return kept, [np.empty((0,) * ndim, np.uint8) for ndim in range(1, 8) for _ in range(8)]


class Attempt:
    """A call with the n-th allocation failing: what it returned or raised, and how many allocations there were."""

    def __init__(self, operation, n, for_good, core):
        self.call, self.state = operation.prepare()
        sa.set_num_threads(operation.threads)
        _core._keep_arena(False)  # memory from an earlier call would replace a failing allocation
        self.arrays = [x for x in self.state if isinstance(x, np.ndarray)]
        self.before = copy.deepcopy(self.arrays)
        self.result = self.raised = None
        held = empty_caches()
        assert shim.fail_at(n, for_good, core), "the extension or the interpreter was not found"
        switch = os.getppid  # see failing_malloc.c
        try:
            switch()
            self.result = self.call()
        except BaseException as error:
            self.raised = error
        finally:
            switch()
        self.seen = shim.allocations()
        del held
        if self.raised is not None:
            self.raised.__traceback__ = self.raised.__context__ = None

    def check(self, where, core, expected):
        if self.raised is None:
            assert same(self.result, expected), f"{where}: another result"
            return
        # NumPy sometimes fails without setting an exception, which is a SystemError. So does CPython 3.11, without
        # memory for the frame of a Python function that the core calls.
        frame = not self.raised.args or "without setting an exception" in str(self.raised)
        allowed = MemoryError if core and not frame else (MemoryError, SystemError)
        assert isinstance(self.raised, allowed), f"{where}: {self.raised!r}"
        assert same(self.arrays, self.before), f"{where}: an array changed"
        for check in self.state:
            if callable(check):
                check()


def growth(operation, n, for_good, core, times):
    """Return how many blocks several attempts leave."""
    gc.collect()
    before = shim.live_blocks()
    for _ in range(times):
        Attempt(operation, n, for_good, core)
    gc.collect()
    return shim.live_blocks() - before


def stays(operation, n, for_good, core):
    """Let allocation n fail many more times; return how many blocks each failure leaves, beyond successful calls
    before and after.

    Caches fill more and more slowly; a leak shows every time.
    """
    for times in (2, 6, 20, 40):
        if growth(operation, n, for_good, core, times) < 0.6 * times:
            return 0
        before = growth(operation, NEVER, False, core, times)
        grew = growth(operation, n, for_good, core, times)
        grew -= (before + growth(operation, NEVER, False, core, times)) / 2
        if grew < 0.6 * times:
            return 0
    return grew / times


def fail(name, operation, n, for_good, core, expected):
    """Let allocation n fail, and check for leaks. Return whether the call needed n allocations."""
    where = f"{name}, allocation {n}{' and all later ones' if for_good else ''}{'' if core else ', also of NumPy'}"
    gc.collect()
    live = shim.live_blocks()
    attempt = Attempt(operation, n, for_good, core)
    attempt.check(where, core, expected)
    reached = attempt.raised is not None or attempt.seen >= n
    del attempt
    gc.collect()
    if core and shim.live_blocks() > live:
        grew = stays(operation, n, for_good, core)
        assert grew == 0, f"{where}: {grew:.1f} blocks stay"
    return reached


def check(name, operation, draws):
    """Let each allocation fail in turn, or drawn ones; return how many there are."""
    ways = [(True, False), (True, True)] + [(False, False)] * operation.in_place  # also Python's and NumPy's
    for _ in range(2):  # caches fill
        attempt = Attempt(operation, NEVER, False, True)
        if attempt.raised is not None:
            raise attempt.raised
        expected, count = copy.deepcopy(attempt.result), attempt.seen
        del attempt
    if draws is None:  # fill the caches, else most failures look like a leak at first
        settled = any(growth(operation, NEVER, False, True, 20) <= 20 for _ in range(100))
        assert settled, f"{name}: each call keeps a block, without a failure"
    for core, for_good in ways:
        if draws is None:
            ended = not all(fail(name, operation, n, for_good, core, expected) for n in range(1, MOST))
            assert ended, "no end"
            continue
        most = count if core else Attempt(operation, NEVER, False, core).seen
        for n in sorted(draws.sample(range(1, most + 1), most if most <= FEW else DRAWN)):
            fail(name, operation, n, for_good, core, expected)
    return count


def called(operation):
    """Return the names of the extension's functions that an operation calls."""
    names = set()

    def note(_frame, event, function):
        if event == "c_call" and getattr(_core, function.__name__, None) is function:
            names.add(function.__name__)

    call, _ = operation.prepare()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def main(catalogue, every):
    """Try a catalogue of operations; ``every``: together they must call every function of the extension."""
    catalogue = {name: each for name, each in catalogue.items() if not each.random}
    parser = argparse.ArgumentParser()
    parser.add_argument("operations", nargs="*", default=list(catalogue))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    draws = None if arguments.all else random.Random(arguments.seed)
    sa.set_num_threads(1)
    # These are called while selfattn is imported, and what they are given is kept until the process ends.
    at_import = {"_describe", "_record", "_limit_threads"}
    functions = {name for name, value in vars(_core).items() if callable(value)} - at_import
    failed = total = 0
    gc.collect()
    gc.freeze()
    for name in arguments.operations:
        print(name, end=" ... ", flush=True)
        begin = time.perf_counter()
        try:
            functions -= called(catalogue[name])
            if draws is not None and arguments.operations == list(catalogue) and draws.random() < 9 / 10:
                print("not drawn")
                continue
            count = check(name, catalogue[name], draws)
            total += count
            print(f"{count} allocations, {time.perf_counter() - begin:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print("FAILED", type(error).__name__, str(error)[:400], flush=True)
    print(total, "allocations")
    if every and functions and arguments.operations == list(catalogue):
        failed += 1
        print("no operation calls", ", ".join(sorted(functions)))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(ALL, every=True)
