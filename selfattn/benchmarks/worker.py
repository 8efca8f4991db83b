"""One library in a process of its own, run through a pipe: a request is a line of JSON, and so is its answer.

Requests, by their "do": `prepare` a case, `run` it for some seconds, `forget` all cases. An answer has the
key "error" when something went wrong. A batch of timings starts in a process that has slept and is warmed up;
its answer is sent when the library's threads sleep again, so that they never spin beside the next contestant.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from selfattn._timing import sample_times, wait_until_quiet

from .cases import Array, Case
from .engines import ENGINES
from .spelling import Spelling, UnsupportedError

Request = dict[str, Any]


def sample_of(array: Array, count: int = 512) -> list[float]:
    """Elements spread over the result, by which contestants are compared."""
    flat = np.asarray(array, np.float64).reshape(-1)
    chosen = flat[np.linspace(0, flat.size - 1, min(count, flat.size)).astype(int)]
    return [float(x) for x in chosen]


def measure_limit(kind: str, case: Case, threads: int) -> float:
    """Measure what bounds a case.

    That is the operations per second of multiply-adds in registers, or the bytes per second of a loop that
    only reads.
    """
    from selfattn import _core

    if kind == "flops":
        return float(_core._fma_peak(case.limit_dtype, threads, 20))
    return float(_core._read_bandwidth(case.key_value_bytes, threads, 20))


class Library:
    """The worker's side: an engine and the cases it has prepared."""

    def __init__(self, engine: str, threads: int) -> None:
        self.engine, self.threads = engine, threads
        self.prepared: dict[int, tuple[Case, list[Spelling]]] = {}

    def prepare(self, request: Request) -> Request:
        """Make the inputs, and answer with part of each spelling's result."""
        case = Case(**request["case"])
        try:
            spellings = ENGINES[self.engine].spell(case, case.inputs(), self.threads)
        except UnsupportedError as reason:
            return {"unsupported": str(reason)}
        self.prepared[request["id"]] = (case, spellings)
        return {
            "samples": {s.statement: sample_of(s.to_array(eval(s.statement, s.names))) for s in spellings}
        }

    def run(self, request: Request) -> Request:
        """Time every spelling of a prepared case, between two measurements of its limit if asked for."""
        case, spellings = self.prepared[request["id"]]
        limits = []
        times = {}
        for spelling in spellings:
            if request.get("limit"):
                limits.append(measure_limit(request["limit"], case, self.threads))
            times[spelling.statement] = sample_times(spelling.statement, spelling.names, request["seconds"])
            if request.get("limit"):
                limits.append(measure_limit(request["limit"], case, self.threads))
            wait_until_quiet()
        return {"times": times, "limits": limits}

    def forget(self, request: Request) -> Request:
        """Drop all cases and their memory."""
        self.prepared.clear()
        return {}


def serve(library: Library, requests: Any, answers: Any) -> None:
    """Answer requests until there are no more."""
    actions: dict[str, Callable[[Request], Request]] = {
        "prepare": library.prepare,
        "run": library.run,
        "forget": library.forget,
    }
    for line in requests:
        request = json.loads(line)
        try:
            answer = actions[request["do"]](request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    """Run as ``python -m …benchmarks.worker ENGINE THREADS``."""
    engine, threads = sys.argv[1], int(sys.argv[2])
    if hasattr(os, "sched_setaffinity"):  # some libraries take every CPU they see
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    # Libraries may print to stdout.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(Library(engine, threads), sys.stdin, answers)


if __name__ == "__main__":
    main()
