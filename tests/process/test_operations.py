"""Every operation of the catalogue.

Bits do not depend on threads; memory may fail; nothing stays, of good calls and bad ones.
"""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from core_operations import ALL
from inputs import random_inputs
from leaks import assert_nothing_stays, assert_repeated_work_does_not_grow
from operations import OPERATIONS, ROW_OPERATIONS, Draw, drawn, encoder, made, rows, same
from processes import SUPPORT, assert_allocations_may_fail

import selfattn as sa


class Large(Draw):
    """Draws arrays that are large enough for several threads."""

    def size(self, choices):
        return max(choices)


PREPARED = {name: each.prepare for name, each in OPERATIONS.items() if not each.random}
PREPARED |= {
    f"{name} of large arrays {n}": lambda name=name, n=n: rows(Large(n), name)
    for name in ROW_OPERATIONS
    for n in range(5)
}
PREPARED |= {f"drawn {n}": lambda n=n: drawn(Draw(n, 3)) for n in range(40)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PREPARED)
def test_bits_do_not_depend_on_threads(name, threads_restored):
    sa.set_num_threads(1)
    expected = PREPARED[name]()[0]()
    for threads in (2, 7):
        sa.set_num_threads(threads)
        assert same(PREPARED[name]()[0](), expected), threads


def test_allocations_fail(tmp_path):
    """The allocations are drawn anew each time; tests/support/memory_fails.py tries all."""
    assert_allocations_may_fail(tmp_path, SUPPORT / "memory_fails.py")


@pytest.fixture(scope="module", autouse=True)
def _traced():
    yield
    tracemalloc.stop()
    gc.unfreeze()


# One thread is enough: what a call does not free does not depend on the number of threads.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, each in ALL.items() if each.threads == 1 and not each.long])
def test_nothing_stays(name, one_thread):
    assert_nothing_stays(*ALL[name].prepare())


def test_a_pullback_frees_what_it_holds():
    arrays = random_inputs((2, 3, 8), 70)
    references = [weakref.ref(x) for x in arrays]
    out, pullback = sa.scaled_dot_product_attention_vjp(*arrays)
    references.append(weakref.ref(out))
    pullback(out)
    arrays = out = None
    assert all(reference() is not None for reference in references)
    del pullback
    assert all(reference() is None for reference in references)


def steps_of_an_encoder():
    model, x = made(encoder, True), np.ones((16, 40, 32), np.float32)

    def call():
        y, pullback = model.vjp(x)
        pullback(y)

    return call


def large_calls():
    arrays = random_inputs((2, 300, 128), 5000)
    return lambda: sa.scaled_dot_product_attention(*arrays, is_causal=True)


@pytest.mark.parametrize(("make", "times"), [(steps_of_an_encoder, 50), (large_calls, 30)])
def test_repeated_work_does_not_grow(make, times):
    assert_repeated_work_does_not_grow(make(), times)
