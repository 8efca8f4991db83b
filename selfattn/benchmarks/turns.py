"""Libraries in processes of their own that take turns, round by round: only one computes at a time.

`Turns` is the parent, with a `Worker` for each process; each process runs `work`. Requests and answers are pickled. This file knows
no library and no case: a function that opens a library returns a function from a case to its spellings.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._timing import sample_times, wait_until_quiet

Array = npt.NDArray[Any]
Result = dict[str, Any]


class Spelling(NamedTuple):
    """A statement, the names in it, and a function from its value to the array that is compared."""

    statement: str
    names: Mapping[str, Any]
    to_array: Callable[[Any], Array] = np.asarray


Prepare = Callable[[Any], list[Spelling]]
Open = Callable[[str, int], Prepare]  # takes an engine and its number of threads; is pickled


@dataclass(frozen=True)
class Contestant:
    """A library and the case that it computes."""

    name: str
    engine: str
    case: Any  # facts() is saved
    yardstick: bool = False  # its result is not compared
    threads: int = 0  # 0: those of the run


@dataclass(frozen=True)
class Row:
    """One line of a table: selfattn is the first contestant, and the others are compared with it."""

    suite: str
    label: str
    contestants: tuple[Contestant, ...]
    limit: str = "flops"  # or "bytes", or "" for calls too small for one
    tolerance: float = 1e-4
    distance: Callable[[Array, Array], float] = lambda result, own: float(np.max(np.abs(result - own)))
    count: tuple[float, str] | None = None  # the work of a call for its rate, such as (64, "tokens")


class Library:
    """The state of a worker: a library, opened at its first use, and the cases of the last row."""

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.spell: Prepare | None = None
        self.prepared: dict[int, tuple[Result, list[Spelling]]] = {}

    def prepare(self, number: int, case: Any, opened: Open) -> Result:
        """Make the inputs, and return each spelling's result."""
        self.spell = self.spell or opened(self.engine, self.threads)
        spellings = self.spell(case)
        self.prepared[number] = (case.facts(), spellings)
        results = (s.to_array(eval(s.statement, {**s.names})) for s in spellings)
        return {"samples": [np.asarray(result, np.float64).ravel() for result in results]}

    def run(self, number: int, seconds: float, limit: str) -> Result:
        """Time every spelling of a prepared case; if it has a limit, measure that before and after."""
        facts, spellings = self.prepared[number]
        limits, times = [], {}
        for spelling in spellings:
            limits += self._measure(limit, facts)
            times[spelling.statement] = sample_times(spelling.statement, {**spelling.names}, seconds)
            limits += self._measure(limit, facts)
            wait_until_quiet()
        return {"times": times, "limits": limits}

    def _measure(self, limit: str, facts: Result) -> list[float]:
        """Measure the operations per second of multiply-adds in registers, or the bytes per second of reading memory."""
        if limit == "flops":
            return [float(_core._fma_peak(facts["limit_dtype"], self.threads, 20))]
        return [float(_core._read_bandwidth(facts["key_value_bytes"], self.threads, 20))] if limit else []


def work() -> None:
    """Answer requests on this process's standard streams until there are no more."""
    library, answers = Library(sys.argv[1], int(sys.argv[2])), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print
    if hasattr(os, "sched_setaffinity"):  # some libraries use every CPU they see
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: library.threads])
    with suppress(EOFError):
        while True:
            what, given = pickle.load(sys.stdin.buffer)
            try:
                answer = getattr(library, what)(**given)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            wait_until_quiet()  # spinning threads would slow the next library
            pickle.dump(answer, answers)
            answers.flush()


class Worker:
    """The parent's end of a worker."""

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.stderr = engine, tempfile.TemporaryFile()  # noqa: SIM115
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # the parent's import path
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import work; work()", engine, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**os.environ, "PYTHONPATH": path, **counts},
        )

    def ask(self, what: str, **given: Any) -> Result:
        """Call a method of the worker's library, and return its answer."""
        assert self.process.stdin and self.process.stdout
        try:
            pickle.dump((what, given), self.process.stdin)
            self.process.stdin.flush()
            answer: Result = pickle.load(self.process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            code = self.process.wait()
            self.stderr.seek(0)
            words = self.stderr.read().decode(errors="replace")[-2000:]
            raise ChildProcessError(f"the {self.engine} worker ended with code {code}\n{words}") from None
        return answer

    def close(self) -> None:
        """End the process at once."""
        self.process.kill()
        with suppress(BrokenPipeError), self.stderr, self.process:
            pass


class Turns(ExitStack):
    """All workers of a run: each starts at its first use, and ends with the block."""

    def __init__(self, opened: Open, threads: int, rounds: int, seconds: float) -> None:
        super().__init__()
        self.opened, self.threads, self.rounds, self.seconds = opened, threads, rounds, seconds
        self.workers: dict[tuple[str, int], Worker] = {}

    def worker(self, contestant: Contestant) -> Worker:
        """Return the process of an engine with its threads, started if necessary."""
        key = contestant.engine, contestant.threads or self.threads
        if key not in self.workers:
            self.workers[key] = Worker(*key)
            self.callback(self.workers[key].close)
        return self.workers[key]

    def measure(self, row: Row) -> Result:
        """Measure one row; the order of the contestants rotates by one from round to round."""
        results: list[Result] = []
        for i, each in enumerate(row.contestants):
            answer = self.worker(each).ask("prepare", number=i, case=each.case, opened=self.opened)
            facts = {"name": each.name, "engine": each.engine, **each.case.facts()}
            results.append({**facts, "times": {}, "limits": [], **answer})
        compare(row, results)
        runners = [i for i, result in enumerate(results) if result.pop("samples", None)]
        for n in range(self.rounds):
            turn = n % max(1, len(runners))
            for i in runners[turn:] + runners[:turn]:
                each = row.contestants[i]
                limit = row.limit if each.engine.startswith("selfattn") else ""
                answer = self.worker(each).ask("run", number=i, seconds=self.seconds, limit=limit)
                if "error" in answer:
                    raise ChildProcessError(f"{each.name}, {row.label}: {answer['error']}")
                for statement, times in answer["times"].items():
                    results[i]["times"].setdefault(statement, []).append(times)
                results[i]["limits"] += answer["limits"]
        found = {"suite": row.suite, "label": row.label, "limit": row.limit, "contestants": results}
        return found | ({"count": row.count} if row.count else {})


def compare(row: Row, results: list[Result]) -> None:
    """Add "difference", from selfattn's own result, and "agrees" to each contestant's result."""
    for contestant, result in zip(row.contestants, results, strict=True):
        if not contestant.yardstick and "samples" in result and "samples" in results[0]:
            own, found = results[0]["samples"][0], result["samples"]
            distances = [row.distance(x, own) if x.shape == own.shape else np.inf for x in found]
            result["difference"] = max(distances)
            result["agrees"] = bool(result["difference"] <= row.tolerance)
