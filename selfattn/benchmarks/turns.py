"""Workers that take turns: each a library with its threads in a process of its own, timed round by round.

`layers` and `encoder` say what is timed. Ratios are paired, round by round, and their median counts: what slows the
machine for a while slows both of a pair.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from selfattn import config
from selfattn._timing import wait_until_quiet

from .measure import WorkerError

_THREAD_COUNTS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Prepared(NamedTuple):
    """What a library times for a case, and its result, by which the libraries are compared."""

    call: Callable[[], Any]
    result: Any


Prepare = Callable[[Any], Prepared]
Distance = Callable[[Any, Any], float]  # of two results of the same shape
Open = Callable[[str, int], Prepare]  # engine, threads


class Contestant(NamedTuple):
    """A library and how many threads it has."""

    engine: str
    threads: int


def greatest(result: Any, expected: Any) -> float:
    """Return the greatest difference of two results."""
    return float(np.max(np.abs(result - expected)))


def time_of(call: Callable[[], Any], seconds: float) -> float:
    """Return the median time of calls made for so many seconds, at least one."""
    times: list[float] = []
    while not times or sum(times) < seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times)


def work(pipe: Connection, opened: Open, engine: str, threads: int, dtype: str) -> None:
    """Answer ``("prepare", case)`` with the result or an error, and ``("run", seconds)`` with a time and the peak."""
    if hasattr(os, "sched_setaffinity"):  # some libraries take every CPU they see
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    prepare: Prepare | None = None
    prepared: Prepared | None = None
    answer: dict[str, Any]
    while (request := pipe.recv()) is not None:
        what, value = request
        try:
            if what == "prepare":
                prepared = None  # frees what the last case needed
                prepare = prepare or opened(engine, threads)
                prepared = prepare(value)
                answer = {"result": np.asarray(prepared.result)}
            else:
                assert prepared is not None
                prepared.call()  # warm up
                answer = {"time": time_of(prepared.call, value), "peak": fma_peak(threads, dtype)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        wait_until_quiet()  # spinning threads would slow the next one
        pipe.send(answer)


def fma_peak(threads: int, dtype: str = "float32") -> float:
    """Measure the operations per second of multiply-adds in registers, of int8 and bfloat16 from the L1 cache."""
    from selfattn import _core

    return float(_core._fma_peak(dtype, threads, 20))


class Measured(NamedTuple):
    """The times of each contestant, one for each round; what it could not do; peaks by number of threads; results."""

    times: dict[Contestant, list[float]]
    errors: dict[Contestant, str]
    peaks: dict[int, float]
    results: dict[Contestant, Any]

    def ratio(self, slower: Contestant, faster: Contestant) -> float | None:
        """Return the median of ``slower``'s times by ``faster``'s, round by round."""
        pairs = zip(self.times.get(slower, []), self.times.get(faster, []), strict=False)
        return median([a / b for a, b in pairs] or [0.0]) or None

    def best_peer(self, own: Contestant) -> Contestant | None:
        """Return the peer with as many threads as ``own`` that is the fastest by its median."""
        peers = [c for c in self.times if c.threads == own.threads and c.engine != own.engine]
        return min(peers, key=lambda c: median(self.times[c]), default=None)

    def as_rows(self) -> list[dict[str, Any]]:
        """Return what JSON can hold."""
        return [{**c._asdict(), "times": times} for c, times in self.times.items()] + [
            {**c._asdict(), "error": error} for c, error in self.errors.items()
        ]


class Turns:
    """The workers of all contestants, and their pipes."""

    def __init__(self, opened: Open, contestants: Sequence[Contestant], dtype: str = "float32") -> None:
        context = multiprocessing.get_context("spawn")
        self.pipes: dict[Contestant, Connection] = {}
        self.processes = []
        before = {name: os.environ.get(name) for name in _THREAD_COUNTS}
        try:
            for contestant in contestants:
                os.environ.update(dict.fromkeys(_THREAD_COUNTS, str(contestant.threads)))
                ours, theirs = context.Pipe()
                process = context.Process(target=work, args=(theirs, opened, *contestant, dtype), daemon=True)
                process.start()
                theirs.close()
                self.pipes[contestant] = ours
                self.processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value

    def __enter__(self) -> Turns:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes.values():
            with suppress(OSError):
                pipe.close()

    def ask(self, contestant: Contestant, *request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        pipe = self.pipes[contestant]
        try:
            pipe.send(request)
            answer: dict[str, Any] = pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"the {contestant.engine} worker ended on its own") from error
        return answer

    def measure(
        self, case: Any, rounds: int, seconds: float, tolerance: float, distance: Distance = greatest
    ) -> Measured:
        """Let all take turns; whose result differs from the first's by more than ``tolerance`` is told so."""
        measured = Measured({}, {}, {}, {})
        expected = None
        for contestant in self.pipes:
            answer = self.ask(contestant, "prepare", case)
            if "error" in answer:
                measured.errors[contestant] = answer["error"]
                continue
            result = answer["result"]
            expected = result if expected is None else expected
            difference = distance(result, expected) if result.shape == expected.shape else np.inf
            if not difference <= tolerance:
                measured.errors[contestant] = f"differs from the first library by {difference:.2g}"
            else:
                measured.times[contestant] = []
                measured.results[contestant] = result
        runners = list(measured.times)
        for n in range(rounds):
            turn = n % max(1, len(runners))
            for contestant in runners[turn:] + runners[:turn]:
                answer = self.ask(contestant, "run", seconds)
                if "error" in answer:
                    raise WorkerError(f"{contestant.engine}, {case}: {answer['error']}")
                measured.times[contestant].append(answer["time"])
                known = measured.peaks.get(contestant.threads, 0.0)
                measured.peaks[contestant.threads] = max(known, answer["peak"])
        return measured


def versions_of(peers: Sequence[str]) -> dict[str, str]:
    """Return the versions of selfattn and of its peers, by the names of their packages."""
    return {"selfattn": config.show_config("dicts")["selfattn"], **{p: metadata.version(p) for p in peers}}


def preamble(versions: dict[str, str], rounds: int, seconds: float) -> str:
    """Name the machine, the versions and the rules of the run."""
    facts = config.show_config("dicts")
    names = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{facts['cpu']}, {facts['system']}; ISA {facts['isa']}; {config.usable_cpus()} CPUs usable\n{names}\n"
        f"{rounds} rounds of {seconds:g} s, interleaved, each library in its own process; medians, of ratios paired "
        "round by round"
    )
