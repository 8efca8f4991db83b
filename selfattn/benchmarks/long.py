"""Long sequences: time for each pair of tokens, forward and backward, and memory, from 4,096 to 131,072 tokens.

Run ``python -m selfattn.benchmarks.long --json long.json`` (``--help`` for more; all lengths take some ten minutes on
two cores), and ``python docs/figures/long.py long.json`` for the figure. Each length has a process of its own, so
that the peak of its memory is its own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import config

from . import memory

HEADS, WIDTH, WINDOW = 4, 64, 256
LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"is_causal": True, "window": (WINDOW - 1, 0)},
}


def measure(kind: str, length: int, threads: int, seconds: float) -> dict[str, Any]:
    """Time the two halves of a call of this kind, least of as many as fit into the seconds, after one for memory."""
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
    cells = [
        f"{result[half]:8.3g} s {result[half] / pairs * 1e12:7.3g} ps" for half in ("forward", "backward")
    ]
    needed = result["memory"]
    cells.append("" if needed is None else f"{needed / 2**20:6.0f} MiB")
    return "  ".join([f"{result['kind']:8s}{result['length']:8d}", *cells])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m selfattn.benchmarks.long", description=__doc__)
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help="default: %(default)s")
    parser.add_argument(
        "--lengths", default=",".join(map(str, LENGTHS)), metavar="N,N", help="default: %(default)s"
    )
    parser.add_argument("--threads", type=int, default=config.usable_cpus(), metavar="N")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="T", help="to spend on a short case")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the results")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if not all(text.isdecimal() and int(text) > 0 for text in options.lengths.split(",")):
        parser.error(f"--lengths takes positive integers with commas between them, not {options.lengths!r}")
    if options.threads < 1 or not options.seconds >= 0:
        parser.error("threads must be at least 1, seconds at least 0")
    facts = config.show_config("dicts")
    run = {
        "config": facts,
        "threads": options.threads,
        "heads": HEADS,
        "width": WIDTH,
        "window": WINDOW,
        "rows": [],
    }
    print(f"{facts['cpu']}, {facts['isa']}, {options.threads} threads; H={HEADS}, D={WIDTH}, float32")
    print("kind      length  forward, each pair     backward, each pair   memory beyond inputs and gradients")
    try:
        for length in map(int, options.lengths.split(",")):
            for kind in kinds:
                run["rows"].append(in_a_process(measure, kind, length, options.threads, options.seconds))
                print(line(run["rows"][-1]), flush=True)
    finally:  # keep what was measured
        if options.json:
            options.json.write_text(json.dumps(run, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
