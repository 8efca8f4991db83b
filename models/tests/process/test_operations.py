"""Every operation of pretrained models.

Bits do not depend on threads; memory may fail; nothing stays, of good calls and bad ones.
"""

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from leaks import assert_nothing_stays, assert_repeated_work_does_not_grow
from model_operations import ALL, OPERATIONS, model_of
from operations import made, same
from processes import assert_allocations_may_fail

import selfattn as sa

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPERATIONS)
def test_bits_do_not_depend_on_threads(name, threads_restored):
    sa.set_num_threads(1)
    expected = OPERATIONS[name].prepare()[0]()
    for threads in (2, 7):
        sa.set_num_threads(threads)
        assert same(OPERATIONS[name].prepare()[0](), expected), threads


def test_allocations_fail(tmp_path):
    """The allocations are drawn anew each time; models/tests/support/model_memory_fails.py tries all."""
    assert_allocations_may_fail(tmp_path, SUPPORT / "model_memory_fails.py")


@pytest.fixture(scope="module", autouse=True)
def _traced():
    yield
    tracemalloc.stop()
    gc.unfreeze()


# One thread is enough: what a call does not free does not depend on the number of threads.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name, each in ALL.items() if not each.long])
def test_nothing_stays(name, one_thread):
    assert_nothing_stays(*ALL[name].prepare())


def many_sentences():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, length).tolist() for length in rng.integers(1, 65, 2000)]
    return lambda: made(model_of, "BertModel").encode(texts)


def test_repeated_work_does_not_grow():
    assert_repeated_work_does_not_grow(many_sentences(), 3)
