"""The products of decoding with weights in the blocks of a GGUF file: bytes of weights a second, beside a loop that only reads."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

import selfattn
from selfattn import _core, config
from selfattn.cli import streams
from selfattn.cli.parser import Parser
from selfattn.engine.weights import QUANTS, Quants, multiply

KINDS = tuple(kind for kind, (numbers, _) in QUANTS.items() if numbers > 1)


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench weights") -> int:
    """Run the benchmark and return its exit code."""
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--kinds", default=",".join(KINDS), metavar="A,B", help="any of these (the default: all)")
    add("--columns", type=int, default=1536, metavar="N", help="of a weight, a multiple of 256")
    add("--megabytes", type=int, default=96, metavar="N", help="of weights: more than the caches hold")
    add("--rows", type=int, default=1, metavar="N", help="sequences that decode at a time")
    add("--rounds", type=int, default=15, metavar="N", help="of which the fastest counts")
    add("--threads", type=int, default=config.usable_cpus(), metavar="N")
    streams.add_json(add, "the figures")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(KINDS):
        parser.error(f"no blocks of kind {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if options.columns < 1 or options.columns % 256:
        parser.error(f"columns must be a multiple of 256, not {options.columns}")
    if min(options.megabytes, options.rows, options.rounds, options.threads) < 1:
        parser.error("megabytes, rows, rounds and threads must be at least 1")
    streams.check(options.json)
    with streams.table_beside(options.json):
        _run(kinds, options)
    return 0


def _run(kinds: Sequence[str], options: argparse.Namespace) -> None:
    selfattn.set_num_threads(options.threads)
    print(
        f"{_core.get_isa()}, {options.threads} threads, {options.rows} x {options.columns} times {options.megabytes} MB"
    )
    print(f"{'kind':8}{'reading':>14}{'product':>14}{'times':>8}")
    found = {}
    for kind in kinds:
        blocks = drawn(kind, options.columns, options.megabytes << 20)
        x = np.random.default_rng(0).standard_normal((options.rows, options.columns)).astype(np.float32)
        best, reading = np.inf, 0.0
        for _ in range(options.rounds):  # in turns
            reading = max(reading, _core._read_bandwidth(blocks.nbytes, options.threads, 5))
            start = time.perf_counter()
            multiply(x, blocks, None, steps=True)
            best = min(best, time.perf_counter() - start)
        product = blocks.nbytes / best
        found[kind] = {"reading": reading, "product": product}
        print(f"{kind:8}{reading / 1e9:9.1f} GB/s{product / 1e9:9.1f} GB/s{reading / product:8.2f}")
    if options.json:
        streams.write(options.json, json.dumps(found, indent=1).encode())


def drawn(kind: str, columns: int, size: int) -> Quants:
    """Return weights of any bits, in so many bytes or a few less; scales are zeros."""
    numbers, block = QUANTS[kind]
    row = columns // numbers * block
    out = max(1, size // row)
    raw = np.resize(
        np.random.default_rng(0).integers(0, 256, 7919, np.uint8), (out, columns // numbers, block)
    )
    for at in (0, 208):
        raw[..., at : at + 4] = 0
    return Quants(raw.reshape(out, row), kind, (out, columns))
