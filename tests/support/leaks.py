"""Whether a call leaves references, objects or memory behind."""

import gc
import sys
import tracemalloc

import numpy as np
from inputs import BFLOAT16

import selfattn as sa

attend = sa.scaled_dot_product_attention
TIMES = 200
ALL_DTYPES = [np.dtype(kind) for kind in "?bhilqBHILQefd"] + [BFLOAT16]


def watched(arguments):
    """Everything a call might keep a reference to: the arguments, what they hold, dtypes and small objects."""
    inside = [x for argument in arguments if isinstance(argument, list | tuple) for x in argument]
    return [
        *arguments,
        *inside,
        *ALL_DTYPES,
        *(np.dtype(x) for x in ("float32", "float64")),
        np.float32,
        3,
        1.5,
        (),
        "query",
    ]


def memory_kept(call):
    tracemalloc.start()
    try:
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
    except (TypeError, ValueError, MemoryError, ZeroDivisionError):
        return
    raise AssertionError("no error")


def assert_nothing_stays(call, arguments):
    for _ in range(20):  # caches fill
        call()
    things = watched(arguments)
    gc.collect()
    gc.disable()
    try:
        before = [sys.getrefcount(x) for x in things]
        objects = len(gc.get_objects())
        for _ in range(TIMES):
            call()
        after = [sys.getrefcount(x) for x in things]
        # a leak would show once a call; the loop itself may hold one or two
        assert max(abs(b - a) for a, b in zip(before, after, strict=True)) < TIMES // 10
        assert abs(len(gc.get_objects()) - objects) < TIMES // 10
    finally:
        gc.enable()
    more = min(memory_kept(call) for _ in range(3))  # what another thread or a cache keeps, it keeps once
    assert more < 10 * TIMES, f"{more} bytes more after {TIMES} calls"  # the least object has 16 bytes
