"""Every operation of the catalogue: bits do not depend on threads; memory may fail; nothing stays, of good calls and bad ones."""

import gc
import platform
import shlex
import shutil
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest
from core_operations import ALL
from inputs import random_inputs
from leaks import assert_nothing_stays
from operations import OPERATIONS, ROW_OPERATIONS, Draw, drawn, encoder, made, model_of, rows, same
from processes import finish, start

import selfattn as sa
from benchmarks import memory


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


SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or shutil.which("gcc") is None, reason="needs glibc and GCC"
)
def test_allocations_fail(tmp_path):
    """The allocations are drawn anew each time; tests/support/memory_fails.py tries all."""
    pytest.importorskip("ml_dtypes")
    shim = tmp_path / "failing_malloc.so"
    command = f"gcc -O1 -shared -fPIC -Wall -Werror {SUPPORT / 'failing_malloc.c'} -o {shim} -ldl"
    subprocess.run(shlex.split(command), check=True)
    environment = {"LD_PRELOAD": str(shim), "PYTHONMALLOC": "malloc"}
    done = finish(start([sys.executable, SUPPORT / "memory_fails.py"], environment))
    assert done.returncode == 0, done.stdout + done.stderr


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
