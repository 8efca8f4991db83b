"""Interleaving: the workers take turns, round by round, and nobody computes while another is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from .cases import Contestant, Row

Result = dict[str, Any]

# Results are averages of numbers of size 1.
_AGREEMENT = {"float32": 1e-4, "float64": 1e-10, "float16": 4e-3, "bfloat16": 3e-2}


class WorkerError(RuntimeError):
    """A worker's process ended on its own."""


class Worker:
    """The parent's side of a worker process."""

    def __init__(self, engine: str, threads: int, environment: dict[str, str]) -> None:
        self.engine = engine
        self.stderr = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        number = str(threads)
        counts = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), number)
        # The worker imports from the same places.
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", f"{__package__}.worker", engine, number],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": path, **counts, **environment},
        )

    def ask(self, **request: Any) -> Result:
        """Send a request and wait for its answer."""
        assert self.process.stdin and self.process.stdout
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            self.stderr.seek(0)
            last_words = self.stderr.read()[-2000:]
            raise WorkerError(
                f"the {self.engine} worker ended with code {self.process.returncode}\n{last_words}"
            )
        answer: Result = json.loads(line)
        return answer

    def close(self) -> None:
        """End the process; it holds nothing worth waiting for."""
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.stderr):
            try:
                if stream:
                    stream.close()
            except BrokenPipeError:
                pass


class Bench:
    """All workers of a run, started when first needed."""

    def __init__(self, threads: int, rounds: int, seconds: float) -> None:
        self.threads, self.rounds, self.seconds = threads, rounds, seconds
        self.workers: dict[tuple[str, str], Worker] = {}

    def __enter__(self) -> Bench:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers.values():
            worker.close()

    def worker(self, contestant: Contestant) -> Worker:
        """Return the process of an engine in an environment; start it when it is the first time."""
        name = (contestant.engine, json.dumps(contestant.environment, sort_keys=True))
        if name not in self.workers:
            self.workers[name] = Worker(contestant.engine, self.threads, contestant.environment)
        return self.workers[name]

    def measure(self, row: Row) -> Result:
        """Measure one row; the order of the contestants moves on by one from round to round."""
        results = [_empty_result(contestant) for contestant in row.contestants]
        for i, contestant in enumerate(row.contestants):
            answer = self.worker(contestant).ask(do="prepare", id=i, case=contestant.case.to_dict())
            results[i].update(answer)
        runners = [i for i, result in enumerate(results) if "samples" in result]
        for n in range(self.rounds):
            turn = n % max(1, len(runners))
            for i in runners[turn:] + runners[:turn]:
                contestant = row.contestants[i]
                limit = row.limit if contestant.engine == "selfattn" else ""
                answer = self.worker(contestant).ask(do="run", id=i, seconds=self.seconds, limit=limit)
                if "error" in answer:
                    raise WorkerError(f"{contestant.name}, {row.label}: {answer['error']}")
                for statement, times in answer["times"].items():
                    results[i]["times"].setdefault(statement, []).append(times)
                results[i]["limits"] += answer["limits"]
        for contestant in row.contestants:
            self.worker(contestant).ask(do="forget")
        compare([r for r, c in zip(results, row.contestants, strict=True) if not c.yardstick])
        for result in results:
            result.pop("samples", None)
        return {"suite": row.suite, "label": row.label, "limit": row.limit, "contestants": results}

    def measure_all(self, rows: Sequence[Row]) -> Iterator[Result]:
        """Measure row by row."""
        for row in rows:
            yield self.measure(row)


def _empty_result(contestant: Contestant) -> Result:
    return {
        "name": contestant.name,
        "engine": contestant.engine,
        "environment": contestant.environment,
        "case": contestant.case.to_dict(),
        "limit_dtype": contestant.case.limit_dtype,
        "flops": contestant.case.flops,
        "key_value_bytes": contestant.case.key_value_bytes,
        "times": {},
        "limits": [],
    }


def compare(results: list[Result]) -> None:
    """Note, under "difference" and "agrees", how far each contestant's result is from selfattn's own."""
    own = next(iter(results[0].get("samples", {}).values()), None)
    for result in results:
        samples = result.get("samples")
        if samples is None or own is None:
            continue
        difference = max(
            float(np.max(np.abs(np.subtract(sample, own)))) if len(sample) == len(own) else np.inf
            for sample in samples.values()
        )
        result["difference"] = difference
        result["agrees"] = bool(difference <= _AGREEMENT[result["case"]["dtype"]])
