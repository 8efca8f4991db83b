"""What the benchmarks of this folder share, on top of `selfattn.benchmarks`: cases, spellings, the run of a table."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from selfattn.benchmarks import app
from selfattn.benchmarks.turns import Array, Contestant, Open, Result, Row, Spelling
from selfattn.cli import streams


@dataclass(frozen=True)
class Case:
    """What is timed; the fields of its classes describe it."""

    @property
    def flops(self) -> float:
        """Floating-point operations that count; 1 where they are not counted."""
        return 1.0

    def facts(self) -> dict[str, Any]:
        """Return what is saved of the case."""
        return {"case": asdict(self), "limit_dtype": "float32", "flops": self.flops, "key_value_bytes": 0}


def called(call: Callable[[], Any], to_array: Callable[[Any], Array] = np.asarray) -> Spelling:
    """Return the spelling of a function without arguments."""
    return Spelling("call()", {"call": call}, to_array)


def contestants(case: Any, options: argparse.Namespace, one_thread: bool = False) -> tuple[Contestant, ...]:
    """Name selfattn and its peers, all with one case; and selfattn on one thread, if asked for and more are used."""
    found = [Contestant(name, name, case) for name in ("selfattn", *options.peers)]
    if one_thread and options.threads > 1:
        found.append(Contestant("1 thread", "selfattn", case, threads=1))
    return tuple(found)


def sizes_of(form: str, multiple: int) -> Callable[[str], tuple[int, ...]]:
    """Return how a size such as 64x128x8 is taken; its first number, a width, is a multiple."""

    def take(text: str) -> tuple[int, ...]:
        numbers = text.split("x")
        size = tuple(int(n) for n in numbers if n.isdecimal())
        if (
            len(size) != len(numbers)
            or len(size) != form.count("x") + 1
            or min(size) < 1
            or size[0] % multiple
        ):
            raise argparse.ArgumentTypeError(f"must be {form}, widths multiples of {multiple}, not {text!r}")
        return size

    return take


def run(
    prog: str,
    options: argparse.Namespace,
    rows: Sequence[Row],
    opened: Open,
    packages: dict[str, str],
    about: str,
    after: Callable[[Result], None] = lambda found: None,
    **more: Any,
) -> int:
    """Measure rows, print the table and what ``after`` prints of the results, save them; return the exit code."""
    lacking = f"\nnot installed: {', '.join(options.lacking)}" if options.lacking else ""

    def measure() -> Result:
        found = app.measure(options, list(rows), opened, packages, about=about + lacking, **more)
        with streams.table_beside(options.json):
            after(found)
        return found

    return app.exit_code(prog, measure)
