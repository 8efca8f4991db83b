"""How much memory a call takes, and whether it leaves references, objects or memory."""

import gc
import sys
import tracemalloc

import numpy as np
import pytest
from inputs import BFLOAT16

import selfattn as sa
from benchmarks import memory
from selfattn import _core

attend = sa.scaled_dot_product_attention
TIMES = 6
ALL_DTYPES = [np.dtype(kind) for kind in "?bhilqBHILQefd"] + [BFLOAT16]


def peak_memory(call):
    """The most that a call allocates, in bytes, beyond the memory to work in that the core keeps of such calls."""
    _core._keep_arena(False)  # memory kept from other calls might be used instead
    _core._keep_arena(True)
    for _ in range(3):
        call()
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def watched(arguments):
    """Return each object to which a call might keep a reference: arguments, their content, dtypes and small objects.

    But None: Python itself has ever other numbers of references to it.
    """
    inside = [x for argument in arguments if isinstance(argument, list | tuple) for x in argument]
    things = [*arguments, *inside, *ALL_DTYPES, np.float32, 3, 1.5, (), "query"]
    return list({id(x): x for x in things if x is not None}.values())


def counts(things):
    """The reference counts of things and the number of objects, in an array, which refers to none of them."""
    return np.array([*map(sys.getrefcount, things), len(gc.get_objects())])


def counts_changed(call, things):
    gc.collect()
    gc.disable()
    try:
        before = counts(things)
        for _ in range(TIMES):
            call()
        return int(np.abs(counts(things) - before).max())
    finally:
        gc.enable()


def memory_settles(call):
    """Return whether the memory in use stays the same in one of several rounds; caches may free older memory
    meanwhile."""
    if not tracemalloc.is_tracing():
        tracemalloc.start()
    before = -np.inf
    for _ in range(120):
        for _ in range(TIMES):
            call()
        gc.collect()  # this empties Python's own caches of tuples and other objects
        now, _ = tracemalloc.get_traced_memory()
        if now - before < 10 * TIMES:
            return True
        before = now
    return False


def fails(*arguments, function=attend, **options):
    """Call a function that must raise. (pytest.raises would keep more objects.)"""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError, OverflowError, MemoryError, ZeroDivisionError):
        return
    raise AssertionError("no error")


def assert_nothing_stays(call, arguments):
    """A leak grows with every call in every round; a cache or another thread keeps memory once."""
    for _ in range(4):  # caches fill
        call()
    things = watched(arguments)
    gc.collect()
    gc.freeze()  # existing objects need not be visited again, also by the next operation
    assert any(counts_changed(call, things) < 2 for _ in range(5)), "references or objects stay"
    assert memory_settles(call), "memory stays: the least object has 16 bytes"


def assert_repeated_work_does_not_grow(call, times):
    """Resident memory shows leaks that tracemalloc does not see."""
    if not memory.AVAILABLE:
        pytest.skip("the size of a process is read as on Linux")
    for _ in range(3):
        call()
    before = memory.status("VmRSS")
    for _ in range(times):
        call()
    assert memory.status("VmRSS") - before < 4 << 20
