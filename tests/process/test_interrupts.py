"""Ctrl-C and other signals during a call: it stops, leaks nothing, and the next call is right."""

import functools
import gc
import json
import random
import signal
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from instruction_sets import using
from processes import PYTHON, TO_THE_SYSTEM, finish, run_script, start

import selfattn as sa
from benchmarks import memory
from benchmarks.memory import status
from selfattn import nn
from selfattn.functional.attention import WRT, attention_backward, attention_forward

if not hasattr(signal, "setitimer"):
    pytest.skip("interval timers are POSIX", allow_module_level=True)


class InterruptedCallError(Exception):
    """The handler raises this, not KeyboardInterrupt, which would stop the test run if it escaped."""


@contextmanager
def alarm_after(seconds, handler):
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt():
    raise InterruptedCallError


def inputs(heads, length):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((3, heads, length, 64), dtype=np.float32))


def timed(call):
    """Return what a call returns, and how long it takes."""
    start = time.monotonic()
    found = call()
    return found, time.monotonic() - start


def long_enough(make, size=1):
    """Return what ``make`` makes of the first size, of each twice the one before, whose call takes 0.25 s.

    A call that does not stop is noticed then: one that does stops within 0.05 s, on any CPU.
    """
    while True:
        made = make(size)
        if timed(made[0])[1] > 0.25:
            return made
        size *= 2


def assert_handled_during(call):
    """Check that a signal is handled during a call, after a few checks for signals, or within 0.2 s."""
    handled = []
    start = time.monotonic()
    with alarm_after(0.05, lambda: handled.append(time.monotonic())):
        call()
        end = time.monotonic()
    assert handled[0] - start < 0.9 * (end - start)


@pytest.mark.parametrize(("which", "threads"), [("forward", 2), ("backward", 1)])
def test_signals_are_handled_during_a_call_and_not_after_it(which, threads):
    def make(heads):
        arrays = inputs(heads, 2048)
        if which == "backward":
            return backward_alone(*arrays, threads)
        return [functools.partial(sa.scaled_dot_product_attention, *arrays, num_threads=threads)]

    assert_handled_during(long_enough(make)[0])


def backward_alone(q, k, v, threads):
    """A backward pass over all pairs, after a forward pass that takes no time, and the arrays that it reads."""
    out, statistics, _ = attention_forward(q, k, v, window=(0, 0))
    given = {"grad_out": out, "out": out, "statistics": statistics, "num_threads": threads}
    return functools.partial(attention_backward, q, k, v, names=WRT, **given), [q, k, v, out, statistics]


def long_layer(kind):
    """A call of a layer that takes 0.25 s or more."""

    def make(n):
        if kind == "sentences":
            model = nn.EmbeddingModel(lambda _: [1] * 100, 10, 128, max_seq_len=100, num_layers=4, rng=0)
            return [lambda: model.encode(["a"] * 50 * n, batch_size=50 * n)]
        layer = nn.Linear(2048, 2048, rng=0)
        x = np.random.default_rng(0).standard_normal((256 * n, 2048), dtype=np.float32)
        if "layers" in kind:
            layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, rng=0), 4)
            x = x.reshape(-1, 256, 512)[:n]
        if "gradients" in kind:
            y, pullback = layer.vjp(x)
            return [lambda: pullback(y)]
        return [lambda: layer(x)]

    return long_enough(make)[0]


@pytest.mark.parametrize(
    "kind", ["product", "gradients of a product", "layers", "gradients of layers", "sentences"]
)
def test_layers_stop_in_the_middle_and_are_right_the_next_time(kind):
    call = long_layer(kind)
    expected, whole = timed(call)
    start = time.monotonic()
    with pytest.raises(InterruptedCallError), alarm_after(whole / 20, interrupt):
        call()
    assert time.monotonic() - start < whole / 2 + 0.1  # the call checks for signals every 50 ms
    np.testing.assert_equal(call(), expected)


def test_a_handler_computes_amid_a_call():
    """The threads of the handler's call and of the interrupted call do not disturb each other."""
    layers, (q, k, v) = long_layer("layers"), inputs(4, 500)
    outer, inner = layers(), sa.scaled_dot_product_attention(q, k, v)
    found = []
    with alarm_after(0.05, lambda: found.append(sa.scaled_dot_product_attention(q, k, v, num_threads=4))):
        np.testing.assert_array_equal(layers(), outer)
    np.testing.assert_array_equal(found, [inner])


def test_a_block_of_few_rows_and_very_many_keys_looks_for_signals():
    """The call has one task. It sums delta over the keys, as the output has 16 bits; the sinks' gradient needs only
    delta.

    The kernels are the generic ones, as with a matrix unit delta is computed from the output.
    """
    rng = np.random.default_rng(0)
    q = rng.standard_normal((64, 64)).astype(np.float16)
    keys = np.broadcast_to(rng.standard_normal(64).astype(np.float16), (1 << 19, 64))
    sinks = np.zeros((), np.float32)
    with using("generic"):
        out, statistics, _ = attention_forward(q, keys[:5], keys[:5], sinks=sinks)
        given = {"grad_out": out, "out": out, "statistics": statistics, "sinks": sinks}
        assert_handled_during(lambda: attention_backward(q, keys, keys, names=("sinks",), **given))


def long_call(kind, heads):
    """Return a call of this kind that takes longer with more heads, and its inputs."""
    if kind == "cache":
        return call_of_a_cache(heads, threads=2)
    if kind == "shared mask":
        return call_with_a_shared_mask(heads, threads=2)
    q, k, v = arrays = inputs(heads, 4096)
    if kind == "forward":
        return lambda: sa.scaled_dot_product_attention(q, k, v, num_threads=1), [*arrays]
    if kind == "backward":
        return backward_alone(q, k, v, threads=1)
    packed = [np.ascontiguousarray(x.swapaxes(0, 1)) for x in arrays]
    at = np.array([0, 100, 1000, 1000, 4096])
    if kind == "varlen":
        return lambda: sa.varlen_attention(*packed, at, at, num_threads=1), [*packed, at]
    if kind == "varlen backward":
        out, pullback = sa.varlen_attention_vjp(*packed, at, at, num_threads=1)
        return lambda: pullback(out), [*packed, at, out]
    rows, weights = q[:, :1024, :32], np.eye(32, dtype=np.float32)
    given = (rows, rows, rows, weights, weights, weights[0])
    return lambda: sa.additive_attention_vjp(*given, num_threads=1)[1](rows), [q, weights]


def call_of_a_cache(heads, threads):
    """Append 2048 tokens to two sequences and attend to them; lengths are set back after that, or after an
    interrupt."""
    q, k, v = (x.reshape(2, -1, 4096, 64) for x in inputs(2 * heads, 4096))
    cache = sa.KVCache(2, heads, 64)
    cache.append(k[:, :, :2048], v[:, :, :2048], lengths=[2048, 1500])
    new = [x[:, :, 2048:] for x in (q, k, v)]

    def call():
        try:
            out = cache.attend(*new, num_threads=threads)
        except (KeyboardInterrupt, InterruptedCallError):
            assert cache.lengths.tolist() == [2048, 1500]
            raise
        assert cache.lengths.tolist() == [4096, 3548]
        cache.truncate([2048, 1500])
        return out

    return call, new


def call_with_a_shared_mask(heads, threads):
    """All gradients of heads that follow one another through the rows of their mask
    (csrc/drivers/attention_backward.c).

    They do if their keys, values and both gradients have 8 MB or more and there are more than 8 blocks of 64 rows and
    fewer than 2048 keys. A thread that stops must not leave another waiting for rows that no thread computes.
    """
    q, *others = inputs(16 * heads, 1024)
    k, v = (x[:, :1000] for x in others)
    mask = np.linspace(-1, 1, 1024 * 1000, dtype=np.float32).reshape(1024, 1000)
    wrt = ("query", "key", "value", "attn_mask")
    out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, mask, wrt=wrt, num_threads=threads)
    return lambda: pullback(out), [q, k, v, mask, out]


KINDS = ("forward", "backward", "varlen", "varlen backward", "additive", "cache", "shared mask")
TIMES, FIRST = 10, 3


def interrupt_many_times(kind):
    """In a process of its own, stop a long call at random moments, and measure the memory that remains."""
    call, arrays = long_enough(functools.partial(long_call, kind))
    rng = random.Random(kind)
    signal.signal(signal.SIGALRM, signal.default_int_handler)  # what Ctrl-C does
    waited = []

    def interrupted():
        start = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 0.06))
            call()
        except KeyboardInterrupt:
            waited.append(time.monotonic() - start)
            return True
        signal.setitimer(signal.ITIMER_REAL, 0)
        return False

    expected, whole = timed(call)
    caught = [interrupted() for _ in range(FIRST)]  # caches fill
    gc.collect()
    references, size = [sys.getrefcount(x) for x in arrays], status("VmRSS")
    caught += [interrupted() for _ in range(TIMES - FIRST)]
    gc.collect()
    found = call()
    same = [np.array_equal(x, y) for x, y in zip(flat(found), flat(expected), strict=True)]
    del found
    return {
        "caught": sum(caught),
        "in the middle": sum(t < whole for t in waited),
        "references": np.subtract([sys.getrefcount(x) for x in arrays], references).tolist(),
        "bytes": status("VmRSS") - size,
        "same": all(same),
    }


def flat(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


@pytest.mark.skipif(not memory.AVAILABLE, reason="the size of a process is read as on Linux")
def test_interrupts_at_random_moments_leak_nothing_and_leave_the_next_call_right():
    """All kinds run at once: most of the time they wait for the next check for signals, twenty times a second."""
    processes = {kind: start([*PYTHON, __file__, kind], TO_THE_SYSTEM) for kind in KINDS}
    found = {kind: json.loads(finish(process).stdout) for kind, process in processes.items()}
    for kind, result in found.items():
        assert result["caught"] == TIMES, kind
        assert result["in the middle"] > 0.9 * TIMES, kind
        assert not any(result["references"]), kind
        # losing an output (some MiB) each time would be many times that, scratch memory (300 kB) twice as much
        assert result["bytes"] < 3 * 2**20, kind
        assert result["same"], kind


def test_a_handler_may_fork_in_the_midst_of_a_call():
    """The fork must not wait for the parallel region that it interrupts, and a later fork not for a nested region."""
    script = """
        import os, signal
        import numpy as np, selfattn as sa

        handled = []
        def handler(*_):
            sa.scaled_dot_product_attention(x[:, :256], x[:, :256], x[:, :256], num_threads=2)
            fork()

        def fork():
            child = os.fork()
            if child == 0:
                os._exit(7)
            handled.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        signal.signal(signal.SIGALRM, handler)
        x = np.random.default_rng(0).standard_normal((8, 4096, 64), dtype=np.float32)
        expected = sa.scaled_dot_product_attention(x, x, x, num_threads=2)
        while not handled:
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            found = sa.scaled_dot_product_attention(x, x, x, num_threads=2)
        fork()
        print(handled[0], handled[-1], (found == expected).all())
    """
    assert run_script(script) == "7 7 True"


def test_a_call_in_another_thread_is_not_stopped():
    q, k, v = inputs(8, 4096)
    expected = sa.scaled_dot_product_attention(q, k, v)
    results = []
    thread = threading.Thread(target=lambda: results.append(sa.scaled_dot_product_attention(q, k, v)))
    thread.start()
    with pytest.raises(InterruptedCallError), alarm_after(0.01, interrupt):
        for _ in range(6000):  # a signal just before a sleep does not wake it
            time.sleep(0.01)
    thread.join()
    np.testing.assert_array_equal(results[0], expected)


if __name__ == "__main__":
    print(json.dumps(interrupt_many_times(sys.argv[1])))


def test_ctrl_c_during_the_import():
    """Ctrl-C at any moment is a KeyboardInterrupt, and the import can be repeated."""
    script = """
    import signal, sys
    delay = float(sys.argv[1])
    signal.setitimer(signal.ITIMER_REAL, delay)
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    stopped = 0
    while True:
        try:
            import selfattn
            signal.setitimer(signal.ITIMER_REAL, 0)
            break
        except KeyboardInterrupt:
            stopped += 1
    import numpy
    assert selfattn.softmax(numpy.zeros(2)).tolist() == [0.5, 0.5]
    print(stopped)
    """
    stopped = [run_script(script, str(delay)) for delay in (0.02, 0.04, 0.06, 0.08, 0.1, 0.12)]
    assert "1" in stopped


def test_ctrl_c_in_the_import_of_numpy_by_the_core():
    """NumPy's import_array() would turn Ctrl-C into an ImportError."""
    script = """
    import importlib.abc, importlib.util, sys

    class Interrupting(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "numpy":
                sys.meta_path.remove(self)
                raise KeyboardInterrupt

    sys.meta_path.insert(0, Interrupting())
    try:
        import selfattn
    except KeyboardInterrupt:
        print("stopped")
    import selfattn
    """
    assert run_script(script) == "stopped"
