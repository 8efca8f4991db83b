"""The benchmark's command line: chooses rows, runs them, prints a table as it grows, and saves everything."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from selfattn import config
from selfattn.cli import streams
from selfattn.cli.numbers import count, rate
from selfattn.cli.parser import Parser

from . import report
from .cases import SUITES, Choice, rows_of
from .engines import PEERS, is_installed, version
from .measure import Bench, WorkerError

COMMANDS = ("layers", "gpt", "encoder", "generation", "weights")  # modules with a command line of their own

_EPILOG = """\
suites:
  summary  a few rows of each (the default)     decode   one query against many keys, 32 heads on 8
  forward  plain attention                      small    calls of a few numbers
  causal   is_causal=True                       strided  (B, L, H, D) in memory against contiguous
  mask     float and boolean masks              isa      the other instruction sets of this CPU
  float64  in double precision                  backward gradients, with and without the forward call
  ragged   packed sequences of many lengths     blocks   block masks and a window
  16bit    bfloat16 and float16, and gradients  all      all but the summary

of whole models, each with a --help of its own:
  selfattn bench layers            TransformerEncoder and Linear, forward and backward
  selfattn bench gpt               a training step of a small GPT
  selfattn bench encoder FOLDER    a pretrained sentence encoder, texts in and embeddings out
  selfattn bench weights           products of decoding with 4-bit blocks, beside reading them
  selfattn bench generation FILE   a language model of a GGUF file, prompts and answers

examples:
  selfattn bench --quick
  selfattn bench --suite forward,causal --lengths 512,1024 --dims 64 --peers torch,onnxruntime
  selfattn bench --suite all --json results.json
  selfattn bench --load results.json --markdown

exit codes:
  0  done      1  results differ, a worker failed, or a file is wrong      2  wrong usage
"""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(name) for name in _names(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"positive integers with commas between them, not {text!r:.80}")
    return numbers


def _parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Time selfattn against other libraries, interleaved in one run, each in a\n"
        "process of its own, with the limits of the machine measured in the same rounds.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--suite", type=_names, default=["summary"], metavar="A,B", help="suites to run, see below")
    add(
        "--lengths",
        type=_numbers,
        metavar="N,N",
        help="lengths (for decode: numbers of keys) instead of the suite's",
    )
    add("--dims", type=_numbers, metavar="N,N", help="widths of a head instead of the suite's")
    add(
        "--peers",
        type=_names,
        metavar="A,B",
        help=f"any of {', '.join(PEERS)}, or none; default: all installed",
    )
    add(
        "--threads",
        type=count,
        metavar="N",
        help="threads for everybody; default: the CPUs of this process",
    )
    add("--rounds", type=count, metavar="N", help="rounds; default 7, with --quick 3")
    add("--seconds", type=rate, metavar="T", help="length of a batch; default 0.1, with --quick 0.03")
    add("--quick", action="store_true", help="fewer and shorter rounds, and fewer shapes")
    add("--full", action="store_true", help="every shape of the backward suite")
    streams.add_json(add, "all raw results")
    add("--load", metavar="FILE", help="show saved results instead of measuring; - is standard input")
    add("--markdown", action="store_true", help="print a Markdown table, as in docs/guide/benchmarks.md")
    return parser


def _check(parser: Parser, options: argparse.Namespace) -> None:
    for suite in options.suite or [""]:
        if suite not in SUITES and suite != "all":
            parser.error(f"no suite {suite!r}; there are {', '.join(SUITES)} and all")
    if options.peers is None:
        options.peers = [name for name in PEERS if is_installed(name)]
    if options.peers == ["none"]:
        options.peers = []
    for peer in options.peers:
        if peer not in PEERS:
            parser.error(f"no peer {peer!r}; there are {', '.join(PEERS)}, or none")
        if not is_installed(peer):
            parser.error(f"{peer} is not installed; pip install 'selfattn[bench]' installs all peers")
    options.rounds = options.rounds or (3 if options.quick else 7)
    if options.seconds is None:
        options.seconds = 0.03 if options.quick else 0.1
    options.threads = options.threads or config.usable_cpus()


def _print_table(
    run: dict[str, Any], results: Any, names: list[str], labels: list[str], markdown: bool
) -> None:
    """Print the preamble and a line for each result as it comes; the results gather in ``run["rows"]``."""
    table = report.Table(names, max(map(len, labels), default=0), markdown)
    print(report.preamble(run), end="\n\n")
    print(table.header(), flush=True)
    for row in results:
        print(table.row(row), flush=True)
        run["rows"].append(row)
    remarks = [report.limits_line(run["rows"]), *report.problems(run["rows"])]
    print("", *(remark for remark in remarks if remark), sep="\n")


def _load(file: str, markdown: bool) -> dict[str, Any]:
    content, table = streams.read(file), io.StringIO()
    try:
        run: dict[str, Any] = json.loads(content)
        rows, run["rows"] = run["rows"], []
        names = report.columns([[c["name"] for c in row["contestants"]] for row in rows])
        with contextlib.redirect_stdout(table):  # shown whole, or not at all
            _print_table(run, rows, names, [row["label"] for row in rows], markdown)
        report.is_sound(run["rows"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(
            f"{file} holds no results of this benchmark: {type(error).__name__} {error}"
        ) from None
    print(table.getvalue(), end="", file=streams.results())
    return run


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    facts = config.show_config("dicts")
    other_isas = [isa for isa in facts["available_isas"] if isa != facts["isa"]]
    rows = rows_of(
        options.suite,
        Choice(options.peers, options.lengths, options.dims, other_isas, options.quick, options.full),
    )
    run: dict[str, Any] = {
        "config": facts,
        "versions": {"selfattn": facts["selfattn"], **{peer: version(peer) for peer in options.peers}},
        "settings": {"threads": options.threads, "rounds": options.rounds, "seconds": options.seconds},
        "rows": [],
    }
    names = report.columns([[c.name for c in row.contestants] for row in rows])
    try:
        with (
            streams.table_beside(options.json),
            Bench(options.threads, options.rounds, options.seconds) as bench,
        ):
            _print_table(run, bench.measure_all(rows), names, [row.label for row in rows], options.markdown)
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(run).encode())
    return run


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench") -> int:
    """Run the benchmark and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] and arguments[0] in COMMANDS:
            module = import_module(f"{__package__}.{arguments[0]}")
            return int(module.main(arguments[1:], prog=f"{prog} {arguments[0]}"))
        parser = _parser(prog)
        options = parser.parse_args(arguments)
        if options.load is not None and options.json:
            parser.error("--json saves what is measured, and --load measures nothing")
        streams.check(options.json)
        if options.load is not None:
            run = _load(options.load, options.markdown)
        else:
            _check(parser, options)
            run = _measure(options)
    except WorkerError as failure:
        print(failure)
        return 1
    except BrokenPipeError:
        raise
    except (OSError, ValueError, MemoryError) as error:
        return streams.fail(prog, error)
    return 0 if report.is_sound(run["rows"]) else 1
