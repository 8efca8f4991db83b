"""Ctrl-C and other signals in the midst of a call: it stops, leaks nothing, and the next call is right."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import selfattn as sa

if not hasattr(signal, "setitimer"):
    pytest.skip("interval timers are POSIX", allow_module_level=True)


class InterruptedCallError(Exception):
    """What the handler raises: not KeyboardInterrupt, which would stop the test run should it escape."""


@contextmanager
def alarm_after(seconds: float, handler: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def interrupt() -> None:
    raise InterruptedCallError


def inputs(heads: int, length: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((3, heads, length, 64), dtype=np.float32))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forward_call_stops_in_the_middle(threads: int) -> None:
    q, k, v = inputs(8, 8192)
    out = np.full_like(q, np.nan)
    with pytest.raises(InterruptedCallError), alarm_after(0.1, interrupt):
        sa.scaled_dot_product_attention(q, k, v, out=out, num_threads=threads)
    assert np.isnan(out).any()  # a call that had gone on to its end would have written everything


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("which", ["forward", "backward"])
def test_signals_are_handled_during_a_call_and_not_after_it(which: str, threads: int) -> None:
    q, k, v = inputs(4, 8192)
    out, statistics = sa.scaled_dot_product_attention_forward(q, k, v, window=(0, 0))
    handled: list[float] = []
    start = time.monotonic()
    with alarm_after(0.05, lambda: handled.append(time.monotonic())):
        if which == "forward":
            sa.scaled_dot_product_attention(q, k, v, num_threads=threads)
        else:
            sa.scaled_dot_product_attention_backward(out, out, statistics, q, k, v, num_threads=threads)
        end = time.monotonic()
    assert handled[0] - start < 0.9 * (end - start)
    with pytest.raises(InterruptedCallError), alarm_after(0.05, interrupt):
        if which == "forward":
            sa.scaled_dot_product_attention(q, k, v, num_threads=threads)
        else:
            sa.scaled_dot_product_attention_backward(out, out, statistics, q, k, v, num_threads=threads)


def test_a_hundred_interrupts_at_random_moments_leak_nothing_and_leave_the_next_call_right() -> None:
    rng = random.Random(0)
    q, k, v = inputs(2, 4096)
    expected = sa.scaled_dot_product_attention(q, k, v)
    caught = 0
    references = [sys.getrefcount(x) for x in (q, k, v)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(100):
            try:
                with alarm_after(rng.uniform(1e-4, 0.12), interrupt):
                    while True:
                        sa.scaled_dot_product_attention(q, k, v)
            except InterruptedCallError:
                caught += 1
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert caught == 100
    assert [sys.getrefcount(x) for x in (q, k, v)] == references
    assert (
        after - before < q.nbytes
    )  # one lost output or scratch would be as large; NumPy reports its arrays here
    np.testing.assert_array_equal(sa.scaled_dot_product_attention(q, k, v), expected)


def test_a_handler_that_returns_lets_the_call_go_on() -> None:
    q, k, v = inputs(8, 4096)
    expected = sa.scaled_dot_product_attention(q, k, v)
    seen = []

    def look() -> None:  # a handler may compute as well, and start programs
        seen.append(sa.softmax(np.zeros(4), -1))
        seen.append(sa.scaled_dot_product_attention(q[:1, :256], k[:1, :256], v[:1, :256], num_threads=2))
        seen.append(
            subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout
        )

    with alarm_after(0.01, look):
        result = expected
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            result = sa.scaled_dot_product_attention(q, k, v)
    assert seen[-1].strip() == b"1"
    np.testing.assert_array_equal(result, expected)


def test_a_handler_may_fork_in_the_midst_of_a_call() -> None:
    """The fork must not wait for the region that it happens in."""
    script = textwrap.dedent("""
        import os, signal
        import numpy as np, selfattn as sa

        handled = []
        def handler(*_):
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
        print(handled[0], (found == expected).all())
    """)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == "7 True\n"


def test_a_call_in_another_thread_is_left_alone() -> None:
    q, k, v = inputs(8, 4096)
    expected = sa.scaled_dot_product_attention(q, k, v)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(sa.scaled_dot_product_attention(q, k, v)))
    with pytest.raises(InterruptedCallError), alarm_after(0.05, interrupt):
        thread.start()
        time.sleep(60)
    thread.join()
    np.testing.assert_array_equal(results[0], expected)


def test_ctrl_c_ends_a_script_with_keyboard_interrupt() -> None:
    script = textwrap.dedent("""
        import numpy as np, selfattn as sa
        x = np.ones((8, 131072, 64), np.float32)
        print("ready", flush=True)
        sa.scaled_dot_product_attention(x, x, x)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    assert process.returncode == -signal.SIGINT
