"""Shared by the benchmarks of this folder, on top of `selfattn.benchmarks`: cases, spellings, options, the run of a table."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from selfattn.benchmarks import app
from selfattn.benchmarks.turns import Array, Contestant, Open, Result, Row, Spelling
from selfattn.cli import streams
from selfattn.cli.parser import Parser


@dataclass(frozen=True)
class Case:
    """A case, described by the fields of its class."""

    @property
    def flops(self) -> float:
        """The floating-point operations; 1 if they are not counted."""
        return 1.0

    def facts(self) -> dict[str, Any]:
        """Return the properties of the case that are saved."""
        return {"case": asdict(self), "limit_dtype": "float32", "flops": self.flops, "key_value_bytes": 0}


def called(call: Callable[[], Any], to_array: Callable[[Any], Array] = np.asarray) -> Spelling:
    """Return the spelling of a function without arguments."""
    return Spelling("call()", {"call": call}, to_array)


def contestants(case: Any, options: argparse.Namespace, one_thread: bool = False) -> tuple[Contestant, ...]:
    """Return selfattn and its peers for one case, and on request selfattn on one thread, if the run uses more."""
    found = [Contestant(name, name, case) for name in ("selfattn", *options.peers)]
    if one_thread and options.threads > 1:
        found.append(Contestant("1 thread", "selfattn", case, threads=1))
    return tuple(found)


def sizes_of(form: str, multiple: int) -> Callable[[str], tuple[int, ...]]:
    """Return the argparse type of a size such as 64x128x8, whose first number must be a multiple of ``multiple``."""

    def take(text: str) -> tuple[int, ...]:
        numbers = text.split("x")
        size = tuple(int(n) for n in numbers if n.isdecimal())
        complete = len(size) == len(numbers) == form.count("x") + 1
        if not complete or min(size) < 1 or size[0] % multiple:
            raise argparse.ArgumentTypeError(f"must be {form}, widths multiples of {multiple}, not {text!r}")
        return size

    return take


def find_corpus() -> Path | None:
    """Return gensim's sample of Australian news, if gensim is installed."""
    found = find_spec("gensim")
    if found is None or found.origin is None:
        return None
    return Path(found.origin).parent / "test" / "test_data" / "lee_background.cor"


def add_corpus(parser: Parser) -> None:
    """Add ``--corpus``."""
    text = "plain text; default: gensim's, if installed"
    parser.add_argument("--corpus", type=Path, default=find_corpus(), metavar="FILE", help=text)


def add_texts(parser: Parser, cases: Iterable[str]) -> None:
    """Add ``--corpus`` and ``--cases``."""
    add_corpus(parser)
    add, names = parser.add_argument, list(cases)
    take, any_of = app.listed(app.one_of("case", names)), f"any of {', '.join(names)}; default: all"
    add("--cases", type=take, default=names, metavar="A,B", help=any_of)


def check_corpus(parser: Parser, corpus: Path | None) -> None:
    """Refuse to run without a corpus."""
    if corpus is None or not corpus.is_file():
        parser.error("there is no corpus; --corpus FILE names a file of plain text")


def new_process(code: str, threads: int, *arguments: Any) -> subprocess.Popen[str]:
    """Run code in a new Python process with this one's import path, and read what it prints."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
    )


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
    """Measure rows, print the table, let ``after`` print about the results, save them; return the exit code."""
    lacking = f"\nnot installed: {', '.join(options.lacking)}" if options.lacking else ""

    def measure() -> Result:
        found = app.measure(options, list(rows), opened, packages, about=about + lacking, **more)
        with streams.table_beside(options.json):
            after(found)
        return found

    return app.exit_code(prog, measure)
