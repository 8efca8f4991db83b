"""Times of calls with a block mask or a window, divided by their open operations, and of the same calls without ("dense")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import selfattn as sa
from selfattn.benchmarks import attention
from selfattn.benchmarks.app import listed, new_parser
from selfattn.benchmarks.attention import BACKWARD, one_array
from selfattn.benchmarks.turns import Contestant, Prepare, Row, Spelling
from selfattn.cli.parser import count

from . import shared


@dataclass(frozen=True)
class Case(attention.Case):
    """A call with blocks of length n: documents, a prefix, or a window."""

    blocks: str = ""  # "" for the dense call
    block_length: int = 0  # the length of a document, the prefix or the window

    @property
    def label(self) -> str:
        """The name of the case in a table."""
        shape = f"{self.blocks} of {self.block_length} in {self.length} x {self.width}"
        return ", ".join(filter(None, [self.gradients, shape]))

    @property
    def open_share(self) -> float:
        """The share of open pairs."""
        own, n = np.arange(1, self.length + 1), self.block_length
        blocks: dict[str, Any] = {
            "documents": n,
            "prefix": np.maximum(own, n),
            "window": np.minimum(own, n + 1),
        }
        return float(np.mean(blocks.get(self.blocks, self.keys))) / self.keys

    def facts(self) -> dict[str, Any]:
        """Return the properties of the case that are saved; only operations of open pairs count."""
        found = super().facts()
        return {**found, "flops": found["flops"] * self.open_share}

    def options(self) -> dict[str, Any]:
        """Return the call's options for the blocks."""
        n = self.block_length
        if self.blocks == "documents":
            return {"block_mask": sa.BlockMask.from_documents(np.arange(self.length) // n)}
        if self.blocks == "prefix":
            return {"block_mask": sa.BlockMask.prefix_lm(n)}
        return {"window": (n, 0)} if self.blocks else {}


def open_engine(engine: str, threads: int) -> Prepare:
    """Open selfattn in a worker."""
    sa.set_num_threads(threads)

    def prepare(case: Case) -> list[Spelling]:
        query, key, value = case.inputs().values()
        if case.gradients:
            _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **case.options())
            return [shared.called(partial(pullback, case.grad_out()), one_array)]
        return [shared.called(partial(sa.scaled_dot_product_attention, query, key, value, **case.options()))]

    return prepare


def cases_of(lengths: Sequence[int], widths: Sequence[int], window: int | None) -> list[Case]:
    """Return the cases; the one with a window has one head, so that it can be long."""
    cases = [
        Case(*shape, blocks=blocks, block_length=shape[0] // part, gradients=kind)
        for kind, shape in product(("", BACKWARD), product(lengths, widths))
        for blocks, part in (("documents", 8), ("prefix", 4))
    ]
    if window:
        cases.append(Case(window, 64, heads=1, blocks="window", block_length=min(256, window)))
    return cases


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", {})
    add = parser.add_argument
    add("--lengths", type=listed(count), metavar="N,N", help="default: 4096, and 32768 with a window")
    add("--dims", type=listed(count), default=[64], metavar="N,N", help="widths of a head (64)")
    options = parser.parse_args(arguments)
    window = None if options.quick else max(options.lengths or [32768])
    rows = []
    for case in cases_of(options.lengths or [4096], options.dims, window):
        dense = Case(case.length, case.width, heads=case.heads, gradients=case.gradients)
        other = Contestant("dense", "selfattn", dense, yardstick=True)
        rows.append(Row("blocks", case.label, (Contestant("selfattn", "selfattn", case), other)))
    return shared.run(prog, options, rows, open_engine, {}, "H=8, with a window 1; float32")
