"""Whether a call leaves references, objects or memory behind."""

import gc
import sys
import tracemalloc

import numpy as np
from inputs import BFLOAT16

import selfattn as sa

attend = sa.scaled_dot_product_attention
TIMES = 100
ALL_DTYPES = [np.dtype(kind) for kind in "?bhilqBHILQefd"] + [BFLOAT16]


def watched(arguments):
    """Everything a call might keep a reference to, once: the arguments, what they hold, dtypes and small objects."""
    inside = [x for argument in arguments if isinstance(argument, list | tuple) for x in argument]
    things = [*arguments, *inside, *ALL_DTYPES, np.float32, 3, 1.5, (), "query"]
    return list({id(x): x for x in things}.values())


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


def memory_kept(call, first):
    for _ in range(first - TIMES):
        call()
    tracemalloc.start()
    try:
        for _ in range(TIMES):  # what caches give back from before is not known to be theirs
            call()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(TIMES):
            call()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


def fails(*arguments, function=attend, **options):
    """Call a function that must raise. (pytest.raises would keep more than what is looked for.)"""
    try:
        function(*arguments, **options)
    except (TypeError, ValueError, OverflowError, MemoryError, ZeroDivisionError):
        return
    raise AssertionError("no error")


def assert_nothing_stays(call, arguments, first=TIMES):
    """A leak shows in every round, once a call; what a cache or another thread keeps, it keeps once: in ``first`` calls.

    Caches of texts, whose hashes differ from run to run, may take some rounds to fill.
    """
    for _ in range(20):  # caches fill
        call()
    things = watched(arguments)
    assert any(counts_changed(call, things) < TIMES // 5 for _ in range(3)), "references or objects stay"
    assert any(memory_kept(call, first) < 10 * TIMES for _ in range(10)), (
        "memory stays: the least object has 16 bytes"
    )
