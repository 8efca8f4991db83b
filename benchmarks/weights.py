"""The products of decoding with the quants of a GGUF file: bytes of weights per second, compared with a loop that only reads."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence

import numpy as np

import selfattn
from selfattn import _core
from selfattn.benchmarks.app import listed, new_parser, one_of
from selfattn.cli import streams
from selfattn.cli.parser import count
from selfattn.engine.weights import QUANTS, Quants, multiply

KINDS = tuple(kind for kind, (numbers, _) in QUANTS.items() if numbers > 1)


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", {})
    add, kinds = parser.add_argument, listed(one_of("kind", KINDS))
    add("--kinds", type=kinds, default=KINDS, metavar="A,B", help=f"any of {', '.join(KINDS)}; default: all")
    add("--columns", type=count, default=1536, metavar="N", help="of a weight, a multiple of 256")
    add("--megabytes", type=count, default=96, metavar="N", help="of weights: more than fit into caches")
    add("--rows", type=count, default=1, metavar="N", help="sequences that decode at once")
    options = parser.parse_args(arguments)
    if options.columns % 256:
        parser.error(f"columns must be a multiple of 256, not {options.columns}")
    streams.check(options.json)
    with streams.table_beside(options.json):
        _run(options)
    return 0


def _run(options: argparse.Namespace) -> None:
    selfattn.set_num_threads(options.threads)
    shape = f"{options.rows} x {options.columns} times {options.megabytes} MB"
    print(f"{_core.get_isa()}, {options.threads} threads, {shape}")
    print(f"{'kind':8}{'reading':>14}{'product':>14}{'times':>8}")
    found = {}
    for kind in options.kinds:
        blocks = drawn(kind, options.columns, options.megabytes << 20)
        x = np.random.default_rng(0).standard_normal((options.rows, options.columns)).astype(np.float32)
        best, reading = np.inf, 0.0
        for _ in range(options.rounds or 15):  # in turns
            reading = max(reading, _core._read_bandwidth(blocks.nbytes, options.threads, 5))
            start = time.perf_counter()
            multiply(x, blocks, None, decoding=True)
            best = min(best, time.perf_counter() - start)
        product = blocks.nbytes / best
        found[kind] = {"reading": reading, "product": product}
        print(f"{kind:8}{reading / 1e9:9.1f} GB/s{product / 1e9:9.1f} GB/s{reading / product:8.2f}")
    if options.json:
        streams.write(options.json, json.dumps(found, indent=1).encode())


def drawn(kind: str, columns: int, size: int) -> Quants:
    """Return weights of random bits, in ``size`` bytes or a few less; scales are zeros."""
    numbers, block = QUANTS[kind]
    row = columns // numbers * block
    out = max(1, size // row)
    bits = np.random.default_rng(0).integers(0, 256, 7919, np.uint8)
    raw = np.resize(bits, (out, columns // numbers, block))
    for at in (0, 208):
        raw[..., at : at + 4] = 0
    return Quants(raw.reshape(out, row), kind, (out, columns))
