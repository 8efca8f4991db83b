"""References and memory: every operation of the catalogue, good and bad, leaves everything as it was."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from core_operations import ALL
from inputs import random_inputs
from leaks import assert_nothing_stays
from operations import encoder, made, model_of

import selfattn as sa
from benchmarks import memory


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


def many_sentences():
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 40, length).tolist() for length in rng.integers(1, 65, 2000)]
    return lambda: made(model_of, "BertModel").encode(texts)


def large_calls():
    arrays = random_inputs((2, 300, 128), 5000)
    return lambda: sa.scaled_dot_product_attention(*arrays, is_causal=True)


@pytest.mark.skipif(not memory.AVAILABLE, reason="the size of a process is read as on Linux")
@pytest.mark.parametrize(
    ("make", "times"), [(steps_of_an_encoder, 50), (many_sentences, 3), (large_calls, 30)]
)
def test_repeated_work_does_not_grow(make, times):
    """The test measures resident memory, which shows leaks that tracemalloc does not see."""
    call = make()
    for _ in range(3):
        call()
    before = memory.status("VmRSS")
    for _ in range(times):
        call()
    assert memory.status("VmRSS") - before < 4 << 20
