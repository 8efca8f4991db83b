"""Shares of the machine's limit: each job's least time, and how much of it the limit that binds the job would take.

The limit of products and attention is the CPU's multiply-adds of their type; that of norms, activations and weights that are read
for one token is the bytes that they read and write, at the rate of a loop that only reads so many. "packing" is the time of a call
that does not grow with its tokens: panels of the weights, and Python's work for the call. It is twice the time of 14 tokens less that
of 28, its limit reading the weights once. "waiting" is a call after 20 ms of rest, its limit the same call without the rest. "gain"
is the time on one thread divided by that on all. "team" is the least time of a team's call that does nothing, while the job was
measured: it doubles if the system moves a virtual machine's CPUs to cores that share no cache, where all threads wait longer.

--encoder FOLDER and --gguf FILE add pretrained models, tokenising included.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import _core
from selfattn._timing import sample_times
from selfattn.benchmarks.app import listed, new_parser, one_of
from selfattn.cli import streams

from . import encoder, generation, layers, shared

PARTS = ("products", "attention", "norms", "activations", "packing", "waiting", "layers", "models")
REST = 0.02  # seconds, after which threads sleep
ROWS = 1024


@dataclass(frozen=True)
class Job:
    """A call and the work that bounds its time: operations of a type, or bytes."""

    part: str
    label: str
    call: Callable[[], Any]
    work: float
    limit: str  # "float32" or "int8" operations, "bytes", or "itself" for a call after a rest
    double: Callable[[], Any] | None = None  # the same with twice as many tokens

    def seconds(self, threads: int, duration: float) -> float:
        """Return the least time of a batch of calls."""
        sa.set_num_threads(threads)
        if self.limit == "itself":
            return min(_after_rest(self.call) for _ in range(max(3, round(duration / REST))))
        least = _least(self.call, duration)
        return least if self.double is None else 2 * least - _least(self.double, duration)

    def bound(self, threads: int, duration: float) -> float:
        """Return the time of the work at the machine's rate, measured now."""
        if self.limit == "itself":
            sa.set_num_threads(threads)
            return _least(self.call, duration)
        if self.limit == "bytes":
            return self.work / float(_core._read_bandwidth(int(self.work), threads, 10))
        return self.work / float(_core._fma_peak(self.limit, threads, 10))


def team_call(threads: int) -> float:
    """Return the seconds that a call of a team takes at least; a thread reads one line of the cache."""
    size = 64 * threads
    return size / float(_core._read_bandwidth(size, threads, 3))


def _least(call: Callable[[], Any], duration: float) -> float:
    return min(sample_times("call()", {"call": call}, seconds=duration))


def _after_rest(call: Callable[[], Any]) -> float:
    time.sleep(REST)
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _drawn(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _layer(
    kind: str, width: int, tokens: int, batch: int = 1, out: int = 0
) -> tuple[Callable[[], Any], float]:
    case = layers.Case(kind, width, tokens, batch, out)
    call: Callable[[], Any] = layers.ENGINES["selfattn"](case, sa.get_num_threads())[0].names["call"]
    return call, case.flops


def jobs_of(parts: Sequence[str], quick: bool) -> Iterator[Job]:
    """Yield the jobs with drawn numbers; with ``quick`` those of the narrowest layers."""
    widths = (64,) if quick else (64, 128, 384)
    if "products" in parts:
        for width in widths:
            for rows in (26, ROWS):
                call, flops = _layer("linear", width, rows, out=4 * width)
                yield Job("products", f"linear {width}x{4 * width}, {rows} rows", call, flops, "float32")
    if "attention" in parts:
        for length in (64,) if quick else (64, 512):
            q = _drawn(8, length, 32)
            back = sa.scaled_dot_product_attention_vjp(q, q, q)[1]
            pairs = 8.0 * length**2 * 32
            forward = partial(sa.scaled_dot_product_attention, q, q, q)
            yield Job("attention", f"attention 8 x {length} x 32", forward, 4 * pairs, "float32")
            label = f"attention backward, 8 x {length} x 32"
            yield Job("attention", label, partial(back, q), 10 * pairs, "float32")
    rowwise: dict[str, Callable[..., Any]] = {"norms": sa.layer_norm, "activations": sa.gelu}
    for part, f in rowwise.items():
        for width in widths if part in parts else ():
            x = _drawn(ROWS, width)
            given = (x, width) if part == "norms" else (x,)
            label = f"{f.__name__} {ROWS} x {width}"
            yield Job(part, label, partial(f, *given), 2 * x.nbytes, "bytes")
    if "packing" in parts:
        for width in widths:
            (call, _), (double, _) = (_layer("forward", width, n) for n in (14, 28))
            weights = 4 * layers.LAYERS * 12 * width**2
            yield Job("packing", f"packing, forward d={width}", call, weights, "bytes", double)
    if "waiting" in parts:
        call = partial(sa.scaled_dot_product_attention, *[_drawn(8, 64, 32)] * 3)
        yield Job("waiting", "after a rest, attention 8 x 64 x 32", call, 0, "itself")
    for kind in ("forward", "eval") if "layers" in parts else ():
        for width in widths:
            call, flops = _layer(kind, width, 64, 16)
            name = "training step" if kind == "eval" else kind
            yield Job("layers", f"{name} d={width}, 16 x 64", call, flops, "float32")


def _pretrained(options: argparse.Namespace) -> Iterator[Job]:
    """Yield the jobs of the folder and of the file that the options name."""
    for dtype in ("float32", "int8") if options.encoder else ():
        source = encoder.Source(options.encoder, Path(), dtype)
        encode = encoder.LIBRARIES["selfattn"].load(source, options.threads)
        for case in encoder.cases_of(options.encoder, options.corpus, ("mixed", "one"), 0.2, dtype):
            call = partial(encode, list(case.texts), 0)
            yield Job("models", f"{dtype}, {case.label}", call, case.flops, dtype)
    if options.gguf:
        file = generation.Source(options.gguf, Path())
        model = generation.LIBRARIES["selfattn"].load(file, options.threads)
        size, operations = generation.work_of_a_token(options.gguf)

        def anew(compute: Callable[..., Any], *given: Any) -> None:
            model.keep(0)
            compute(*given)

        prompt = partial(anew, model.add, list(range(100, 612)))
        yield Job("models", "prompt of 512 tokens", prompt, 512.0 * operations, "int8")
        answer = partial(anew, model.write, [100], 32)
        yield Job("models", "answer of 32 tokens", answer, 32.0 * size, "bytes")


def _measure(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """Measure a job on one thread and on all, in turns."""
    duration = (0.02 if options.quick else 0.05) if options.seconds is None else options.seconds
    counts = sorted({1, options.threads})
    rounds = range(options.rounds or (3 if options.quick else 7))
    turns = [
        [(job.seconds(n, duration), job.bound(n, duration), team_call(n)) for n in counts] for _ in rounds
    ]
    best = {
        n: [min(each) for each in zip(*found, strict=True)]
        for n, found in zip(counts, zip(*turns, strict=True), strict=True)
    }
    times = {n: least[:2] for n, least in best.items()}
    team = best[counts[-1]][2]
    return {"part": job.part, "job": job.label, "limit": job.limit, "seconds_and_limit": times, "team": team}


def _line(found: dict[str, Any]) -> str:
    times = list(found["seconds_and_limit"].values())
    cells = "".join(f"{1e3 * s:11.3f} ms{100 * limit / s:5.0f} %" for s, limit in times)
    end = f"{times[0][0] / times[-1][0]:7.2f}{1e6 * found['team']:7.2f} us"
    return f"{found['part']:12}{found['job']:38}{found['limit']:9}{cells}{end}"


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", {})
    add, parts = parser.add_argument, listed(one_of("part", PARTS))
    add("--parts", type=parts, default=PARTS, metavar="A,B", help=f"any of {', '.join(PARTS)}; default: all")
    add("--encoder", type=Path, metavar="FOLDER", help="a pretrained sentence encoder, of BERT's shape")
    add("--gguf", type=Path, metavar="FILE", help="a language model")
    add("--corpus", type=Path, default=shared.find_corpus(), metavar="FILE", help="texts for the encoder")
    options = parser.parse_args(arguments)
    if options.encoder:
        shared.check_corpus(parser, options.corpus)
    if options.gguf and not options.gguf.is_file():
        parser.error(f"there is no file {options.gguf}")
    streams.check(options.json)
    found: list[dict[str, Any]] = []
    with streams.table_beside(options.json):
        cpu = sa.show_config("dicts")["cpu"]
        print(f"{cpu}, {_core.get_isa()}; 1 thread and {options.threads}: least time, share of the limit")
        print(
            f"{'part':12}{'job':38}{'limit':9}{'1 thread':>13}{'share':>8}{'all':>13}{'share':>8}{'gain':>7}{'team':>10}"
        )
        pretrained = _pretrained(options) if "models" in options.parts else ()
        for job in chain(jobs_of(options.parts, options.quick), pretrained):
            found.append(_measure(job, options))
            print(_line(found[-1]), flush=True)
    if options.json:
        streams.write(options.json, json.dumps({"cpu": cpu, "rows": found}, indent=1).encode())
    return 0
