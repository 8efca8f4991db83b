"""Libraries that take turns, each in a process of its own, so that only one computes at a time.

Threads of a pool spin for a while after a call. In one process they would slow the next library down; here a process
answers when it is idle. This file knows no library: a program gives each as a function that prepares a case.
"""

from __future__ import annotations

import os
import time
import timeit
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import numpy.typing as npt

from benchmarks import memory
from selfattn import _core

Array = npt.NDArray[Any]
Result = dict[str, Any]


class Spelling(NamedTuple):
    """One way to call a library: a statement, its names, and a function from its value to the array to compare."""

    statement: str
    names: Mapping[str, Any]
    to_array: Callable[[Any], Array] = np.asarray


def calling(call, to_array=np.asarray):
    """Return the one spelling of a function without arguments."""
    return [Spelling("call()", {"call": call}, to_array)]


class Peer(NamedTuple):
    """A library and the case that it computes; ``prepare`` returns its spellings, of which the fastest counts.

    What a library does once, such as compiling or converting inputs, is done in ``prepare``, which is not timed.
    """

    prepare: Callable[[Any, int], list[Spelling]]  # of the case and the number of threads
    case: Any
    threads: int = 0  # 0: those of the run


def largest_difference(result, own):
    """Return the largest difference of two numbers."""
    return float(np.max(np.abs(result - own)))


@dataclass(frozen=True)
class Row:
    """A line of the table: selfattn is its first peer, and the others are compared with it."""

    label: str
    peers: dict[str, Peer]
    limit: str = ""  # multiply-adds of "float32", "float64" or "int8"; "bytes" that are read; "" for no limit
    work: float = 0.0  # operations or bytes
    count: tuple[float, str] | None = None  # the work of a call for its rate, such as (64, "tokens")
    tolerance: float = 1e-4
    distance: Callable[[Array, Array], float] = largest_difference
    fresh: bool = False  # new processes, of which the memory of the first call is measured
    shown: Callable[[dict[str, Array]], dict[str, float]] = (
        lambda results: {}
    )  # figures to print after the table


def wait_until_quiet(at_most=1.0):
    """Sleep until the threads of this process sleep too: some pools spin for a tenth of a second after a call."""
    deadline = time.monotonic() + at_most
    while time.monotonic() < deadline:
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(0.005)
        if time.process_time() - cpu < 0.2 * (time.monotonic() - wall):
            return


def sample_times(statement, names, seconds):
    """Return the times of single runs of a statement, sampled for about ``seconds`` after a warm-up of 10 ms.

    A sample is the mean over the runs of a millisecond, so that a call of 100 ns can be timed; a longer run is a
    sample. A warm-up that takes longer than ``seconds`` is the only sample.
    """
    timer, number, warm = timeit.Timer(statement, globals=dict(names)), 1, 0.0
    while True:
        elapsed = timer.timeit(number)
        warm += elapsed
        if elapsed < 1e-3:
            number *= 2
        elif warm >= 0.01:
            break
    samples = [elapsed / number] if elapsed >= seconds else []
    while sum(samples) * number < seconds:
        samples.append(timer.timeit(number) / number)
    return samples


# ------------------------------------------------------------------------------------- in a library's process

_spellings = []


def _begin(threads):
    os.dup2(2, 1)  # libraries may print
    if hasattr(os, "sched_setaffinity"):  # some libraries use every CPU they see
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _prepare(threads, peer, measured):
    """Return each spelling's result and, if it is ``measured``, the memory of the last call beyond its result."""
    _spellings[:] = peer.prepare(peer.case, threads)
    results, needed = [], None
    for spelling in _spellings:
        call = partial(eval, spelling.statement, {**spelling.names})
        if measured and memory.AVAILABLE:
            peak, value = memory.peak_beyond(call)
            parts = value if isinstance(value, tuple) else (value,)
            needed = peak - sum(getattr(part, "nbytes", 0) for part in parts)
        else:
            value = call()
        results.append(np.asarray(spelling.to_array(value), np.float64).ravel())
    wait_until_quiet()
    return results, needed


def _run(threads, seconds, limit, work):
    """Time every spelling; measure the limit before each: multiply-adds in registers, or bytes that a loop reads."""
    times, limits = {}, []
    for spelling in _spellings:
        if limit == "bytes":
            limits.append(_core._read_bandwidth(int(work), threads, 20))
        elif limit:
            limits.append(_core._fma_peak(limit, threads, 20))
        times[spelling.statement] = sample_times(spelling.statement, spelling.names, seconds)
        wait_until_quiet()
    return times, limits


# --------------------------------------------------------------------------------------------- in the parent


class Turns(ExitStack):
    """The processes of a run: each starts at its first use, and ends with the block."""

    def __init__(self, threads, rounds, seconds):
        super().__init__()
        self.threads, self.rounds, self.seconds = threads, rounds, seconds
        self.processes = {}

    def ask(self, name, peer, function, *arguments):
        """Call a function in the process of a library."""
        threads = peer.threads or self.threads
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        with mock.patch.dict(os.environ, counts):  # a new process reads them
            if name not in self.processes:
                pool = ProcessPoolExecutor(1, get_context("spawn"), _begin, (threads,))
                self.processes[name] = self.enter_context(pool)
            return self.processes[name].submit(function, threads, *arguments).result()

    def measure(self, row):
        """Measure a row; the order of the libraries rotates by one from round to round."""
        if row.fresh:
            self.end()
        found = {}
        samples = {}
        notes = []
        for name, peer in row.peers.items():
            found[name] = {"times": {}, "limits": [], "memory": None}
            try:
                samples[name], found[name]["memory"] = self.ask(name, peer, _prepare, peer, row.fresh)
            except Exception as error:  # of the library, or its process has died
                notes.append(f"error in {row.label}, {name}: {type(error).__name__}: {error}")
        own = next(iter(row.peers))
        differences = compare(row, samples, samples[own][0]) if own in samples else {}
        for name, difference in differences.items():
            found[name]["difference"] = difference
            if not difference <= row.tolerance:
                notes.append(f"! {row.label}: {name} differs from selfattn by {difference:.2g}")
        names = list(samples)
        for n in range(self.rounds if names else 0):
            turn = n % len(names)
            for name in names[turn:] + names[:turn]:
                limit = row.limit if name == own else ""
                times, limits = self.ask(name, row.peers[name], _run, self.seconds, limit, row.work)
                found[name]["limits"] += limits
                for statement, each in times.items():
                    found[name]["times"].setdefault(statement, []).append(each)
        if row.fresh:
            self.end()
        sound = own in samples and all(x <= row.tolerance for x in differences.values())
        facts = {name: getattr(row, name) for name in ("label", "limit", "work", "count")}
        return {**facts, "peers": found, "notes": notes, "sound": sound}

    def end(self):
        """End all processes."""
        self.close()
        self.processes.clear()


def compare(row, samples, own):
    """Return the largest difference of each peer's results from selfattn's own."""
    return {
        name: max(row.distance(x, own) if x.shape == own.shape else np.inf for x in results)
        for name, results in samples.items()
    }
