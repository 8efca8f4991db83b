"""The command ``selfattn bench``; and the options, the table and the saving of every benchmark."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from selfattn import config
from selfattn.cli import streams
from selfattn.cli.parser import Parser, count, rate

from . import report
from .attention import ENGINES, PEERS, SUITES, Choice, open_engine, rows_of
from .turns import Open, Result, Row, Turns

_EPILOG = """\
suites:
  summary  a few rows of each (the default)     decode   one query against many keys, 32 heads on 8
  forward  plain attention                      small    calls of a few numbers
  causal   is_causal=True                       strided  (B, L, H, D) in memory against contiguous
  mask     float and boolean masks              isa      the other instruction sets of this CPU
  float64  in double precision                  backward gradients, with and without the forward call
  16bit    bfloat16 and float16, and gradients  all      all but the summary

For ragged batches, block masks, layers and models: python -m benchmarks --help, in a clone of the repository.

examples:
  selfattn bench --quick
  selfattn bench --suite forward,causal --lengths 512,1024 --dims 64 --peers torch,onnxruntime
  selfattn bench --suite all --json results.json
  selfattn bench --load results.json --markdown

exit codes:
  0  done      1  results differ, a worker failed, or a file is wrong      2  wrong usage
"""


def listed(take: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return the argparse type of values separated by commas; ``take`` is the type of one value."""
    return lambda text: [take(each.strip()) for each in text.split(",") if each.strip()] or [take("")]


def one_of(what: str, known: Collection[str], lacking: Collection[str] = ()) -> Callable[[str], str]:
    """Return the argparse type of a name; ``lacking`` names the peers that are not installed."""

    def take(name: str) -> str:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no {what} {name!r}; there are {', '.join(known)}")
        if name in lacking:
            install = "pip install 'selfattn[bench]' installs all peers"
            raise argparse.ArgumentTypeError(f"{name} is not installed; {install}")
        return name

    return take


def new_parser(prog: str, description: str, peers: Mapping[str, Iterable[str]], epilog: str = "") -> Parser:
    """Return a parser with the options of every benchmark; ``peers`` has the modules that each peer needs."""
    lacking = [name for name, modules in peers.items() if not all(map(find_spec, modules))]
    parser = Parser(prog=prog, description=description, epilog=epilog)
    add, names = parser.add_argument, listed(one_of("peer", [*peers, "none"], lacking))
    installed = [name for name in peers if name not in lacking]
    any_of = f"any of {', '.join(peers)}, or none; default: all installed"

    def take(text: str) -> list[str]:
        return [name for name in names(text) if name != "none"]

    add("--peers", type=take, default=installed, metavar="A,B", help=any_of)
    cpus = config.usable_cpus()
    add("--threads", type=count, default=cpus, metavar="N", help="of each library; default: all CPUs")
    add("--rounds", type=count, metavar="N", help="rounds; default 7, with --quick 3")
    add("--seconds", type=rate, metavar="T", help="time of a batch; default 0.1, with --quick 0.03")
    add("--quick", action="store_true", help="fewer and shorter rounds, and fewer shapes")
    saved = "save all raw results; - prints them instead of the table"
    add("--json", metavar="FILE", type=streams.target, help=saved)
    add("--markdown", action="store_true", help="print a Markdown table, as in docs/guide/benchmarks.md")
    parser.set_defaults(lacking=lacking)
    return parser


def measure(options: Any, rows: list[Row], opened: Open, packages: dict[str, str], **more: Any) -> Result:
    """Measure rows with the options of :func:`new_parser`, print the table, save and return results and ``more``."""
    rounds = options.rounds or (3 if options.quick else 7)
    seconds = options.seconds if options.seconds is not None else 0.03 if options.quick else 0.1
    facts = config.show_config("dicts")
    run = {
        "config": facts,
        "versions": {"selfattn": facts["selfattn"], **{n: metadata.version(p) for n, p in packages.items()}},
        "settings": {"threads": options.threads, "rounds": rounds, "seconds": seconds},
        **more,
        "rows": [],
    }
    planned = [(row.label, [each.name for each in row.contestants]) for row in rows]
    streams.check(options.json)
    try:
        with streams.table_beside(options.json), Turns(opened, options.threads, rounds, seconds) as turns:
            _print_table(run, map(turns.measure, rows), planned, options.markdown)
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(run).encode())
    return run


def _print_table(run: Result, results: Iterable[Any], planned: Any, markdown: bool) -> None:
    """Print the preamble and a line for each result as it comes; append the results to ``run["rows"]``."""
    gathered = (run["rows"].append(row) or row for row in results)
    print(report.preamble(run), end="\n\n")
    for line in report.table(planned, gathered, markdown):
        print(line, flush=True)
    print("", *filter(None, [report.limits_line(run["rows"]), *report.problems(run["rows"])]), sep="\n")


def _load(file: str, markdown: bool) -> Result:
    content, table = streams.read(file), io.StringIO()
    try:
        run: Result = json.loads(content)
        rows, run["rows"] = run["rows"], []
        planned = [(row["label"], [each["name"] for each in row["contestants"]]) for row in rows]
        with contextlib.redirect_stdout(table):  # shown completely, or not at all
            _print_table(run, rows, planned, markdown)
        report.is_sound(run["rows"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"{type(error).__name__} {error}"
        raise ValueError(f"{file} holds no results of this benchmark: {why}") from None
    print(table.getvalue(), end="", file=streams.results())
    return run


def exit_code(prog: str, command: Callable[[], Result]) -> int:
    """Run a benchmark and return its exit code; print errors."""
    try:
        return 0 if report.is_sound(command()["rows"]) else 1
    except BrokenPipeError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        return streams.fail(prog, error)


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench") -> int:
    """Run the benchmark of attention and return its exit code."""
    description = "Time selfattn against other libraries, in turns, each in a process of its own, and\n"
    description += "measure the limits of the machine in the same rounds."
    parser = new_parser(prog, description, PEERS, _EPILOG)
    add, suites = parser.add_argument, listed(one_of("suite", ["summary", *SUITES, "all"]))
    add("--suite", type=suites, default=["summary"], metavar="A,B", help="suites to run, see below")
    lengths = "lengths (of keys for decode) instead of the suite's"
    add("--lengths", type=listed(count), metavar="N,N", help=lengths)
    add("--dims", type=listed(count), metavar="N,N", help="widths of a head instead of the suite's")
    add("--full", action="store_true", help="every shape of the backward suite")
    add("--load", metavar="FILE", help="show saved results instead of measuring; - is standard input")
    options = parser.parse_args(arguments)
    if options.load is not None and options.json:
        parser.error("--json saves what is measured, and --load measures nothing")

    def run() -> Result:
        if options.load is not None:
            return _load(options.load, options.markdown)
        facts = config.show_config("dicts")
        isas = [isa for isa in facts["available_isas"] if isa != facts["isa"]]
        asked = (options.peers, options.lengths, options.dims, isas, options.quick, options.full)
        packages = {name: ENGINES[name].packages[0] for name in options.peers}
        return measure(options, rows_of(options.suite, Choice(*asked)), open_engine, packages)

    return exit_code(prog, run)
