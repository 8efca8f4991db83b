"""Long sequences: time for each pair of tokens, forward and backward, and memory, from 4,096 to 131,072 tokens.

``python docs/figures/long.py long.json`` draws the figure of the file that --json saves. All lengths take about ten minutes on two
cores. Each runs in a new process, so that its peak of memory is its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import config
from selfattn.benchmarks.app import listed, new_parser, one_of
from selfattn.cli import streams
from selfattn.cli.parser import count

from . import memory

HEADS, WIDTH, WINDOW = 4, 64, 256
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (WINDOW - 1, 0)},
}


def measure(kind: str, length: int, threads: int, seconds: float) -> dict[str, Any]:
    """Measure the memory of one call, then return the least time of forward and of backward in ``seconds`` of calls."""
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.standard_normal((4, HEADS, length, WIDTH), dtype=np.float32)
    options = {**KINDS[kind], "num_threads": threads}
    times: dict[str, list[float]] = {"forward": [], "backward": []}

    def both() -> sa.AttentionGradients:
        start = time.perf_counter()
        _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **options)
        middle = time.perf_counter()
        gradients = pullback(grad_out)
        times["forward"].append(middle - start)
        times["backward"].append(time.perf_counter() - middle)
        return gradients

    peak, gradients = memory.peak_beyond(both) if memory.AVAILABLE else (None, both())
    returned = sum(gradient.nbytes for gradient in gradients if gradient is not None)
    while sum(times["forward"] + times["backward"]) < seconds:
        both()
    return {
        "kind": kind,
        "length": length,
        **{half: min(each) for half, each in times.items()},
        "calls": len(times["forward"]),
        "memory": None if peak is None else peak - returned,
    }


def in_a_process(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Call it in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def line(result: dict[str, Any]) -> str:
    """Write a result as a line of the table."""
    pairs = HEADS * result["length"] ** 2
    times = [result[half] for half in ("forward", "backward")]
    cells = [f"{seconds:8.3g} s {seconds / pairs * 1e12:7.3g} ps" for seconds in times]
    needed = result["memory"]
    cells.append("" if needed is None else f"{needed / 2**20:6.0f} MiB")
    return "  ".join([f"{result['kind']:8s}{result['length']:8d}", *cells])


def main(arguments: Sequence[str], prog: str = "python -m benchmarks long") -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", {})
    add, kinds = parser.add_argument, listed(one_of("kind", KINDS))
    add("--kinds", type=kinds, default=list(KINDS), metavar="A,B", help=f"of {', '.join(KINDS)}")
    add("--lengths", type=listed(count), default=LENGTHS, metavar="N,N", help="default: %(default)s")
    options = parser.parse_args(arguments)
    facts, threads = config.show_config("dicts"), options.threads
    seconds = options.seconds if options.seconds is not None else 0.0 if options.quick else 2.0
    settings = {"threads": threads, "heads": HEADS, "width": WIDTH, "window": WINDOW}
    run: dict[str, Any] = {"config": facts, **settings, "rows": []}
    streams.check(options.json)
    try:
        with streams.table_beside(options.json):
            print(f"{facts['cpu']}, {facts['isa']}, {threads} threads; H={HEADS}, D={WIDTH}, float32")
            print("kind      length  forward, each pair     backward, each pair   ", end="")
            print("memory beyond inputs and gradients")
            for length in options.lengths[: 1 if options.quick else None]:
                for kind in options.kinds:
                    run["rows"].append(in_a_process(measure, kind, length, threads, seconds))
                    print(line(run["rows"][-1]), flush=True)
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(run, indent=1).encode())
    return 0
