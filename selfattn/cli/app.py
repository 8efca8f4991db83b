"""The command ``selfattn``: five tutorials and a timing, facts about this installation; and what runs every other command.

Parses arguments and prints; `tutorials`, `config` and `_timing` compute. Each of the other commands is in the file that
`_COMMANDS` names; ``bench`` is in `selfattn.benchmarks.app`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import _timing, config, tutorials
from selfattn._check import Array
from selfattn.cli import streams
from selfattn.cli.parser import Command, Parser, UsageError

_EPILOG = """\
examples:
  selfattn                      check that it computes what five tutorials print, and time it
  selfattn --verbose            every tensor of the tutorials, printed and computed
  selfattn train book.txt --out model       learn sentence embeddings from a text
  selfattn train gpt book.txt --out gpt     train a small GPT on a text
  selfattn search model book.txt "a storm"  the lines that are most similar to a query
  selfattn index model tickets.csv --out tickets.index    embed 20,000 texts once; selfattn search tickets.index "a storm"
  selfattn generate model.gguf "Once upon a time"    continue a text with a language model; chat talks with it
  selfattn explore all-MiniLM-L6-v2 "the bank of the river" --open    what every head does with a text
  selfattn info                 version, CPU, instruction set, threads
  selfattn steps 3 --open       every number of every step, on a page in the browser
  selfattn pages class --open   all pages and a start page, for a web server or a USB stick
  selfattn bench --quick        a short benchmark against the peers that are installed
  selfattn bench --help         the options of the benchmark
  SELFATTN_ISA=avx2 selfattn    the same on another instruction set

exit codes:
  0  every tensor agrees      1  some tensor does not      2  wrong usage
  130  interrupted            141  the output was closed by its reader
"""
# Each command's file in this folder, and its line in the help.
_COMMANDS = {
    "steps": ("pages", "write a page that shows every step of attention"),
    "explore": ("pages", "write a page of what a model's heads do with a text"),
    "pages": ("pages", "write all pages and a start page, for a class"),
    "train": ("train", "train a sentence-embedding model on a text; train gpt: a small GPT"),
    "embed": ("models", "turn sentences into vectors"),
    "index": ("search", "embed texts once, for selfattn search"),
    "search": (
        "models",
        "print the texts of an index, or the lines of a text, that are most similar to a query",
    ),
    "map": ("pages", "write a page that shows the texts of an index as points"),
    "generate": ("language", "continue a text with a language model"),
    "chat": ("language", "talk with a language model"),
    "evaluate": ("language", "compute the perplexity of a text, or the quality of an index"),
    "bench": ("", "time selfattn against the peers that are installed"),
}


class Style:
    """Marks and colours: colours on a terminal unless NO_COLOR is set, ASCII where the encoding lacks the marks."""

    def __init__(self, color: str = "auto") -> None:
        plain = os.environ.get("TERM") == "dumb" or os.environ.get("NO_COLOR")
        auto = color == "auto" and streams.is_terminal(sys.stdout) and not plain
        self.colored = color == "always" or auto
        try:
            "✓✗—×".encode(getattr(sys.stdout, "encoding", None) or "ascii")
            self.yes, self.no, self.dash, self.times = "✓ agrees", "✗ differs", "—", "×"
        except (UnicodeEncodeError, LookupError):
            self.yes, self.no, self.dash, self.times = "agrees", "DIFFERS", "-", "x"

    def paint(self, text: str, code: str) -> str:
        """Put an ANSI code around the text where colours are on."""
        return f"\x1b[{code}m{text}\x1b[0m" if self.colored else text

    def bold(self, text: str) -> str:
        """Make a heading of the text."""
        return self.paint(text, "1")

    def dim(self, text: str) -> str:
        """Make the text fainter."""
        return self.paint(text, "2")

    def verdict(self, agrees: bool) -> str:
        """Say whether something agrees."""
        return self.paint(self.yes, "32") if agrees else self.paint(self.no, "1;31")


def _format_rows(array: Array, style: str) -> list[str]:
    """Write an array row by row, columns aligned, with an empty row between matrices."""
    array = np.atleast_2d(array)
    text = np.array([format(float(x) + 0.0, style) for x in array.ravel()], dtype=object).reshape(array.shape)
    width = max(map(len, text.ravel()), default=0)
    rows: list[str] = []
    for matrix in text.reshape(-1, *array.shape[-2:]):
        rows += [""] if rows else []
        rows += ["  ".join(f"{x:>{width}}" for x in row) for row in matrix]
    return rows


def _comparison_lines(comparison: tutorials.Comparison, style: Style) -> Iterator[str]:
    expected = [comparison.source, *_format_rows(comparison.expected, comparison.style)]
    computed = ["computed", *_format_rows(comparison.computed, comparison.style)]
    yield f"  {style.bold(comparison.name)}  {style.verdict(comparison.agrees)}"
    width = max(map(len, expected))
    for i, (left, right) in enumerate(zip_longest(expected, computed, fillvalue="")):
        line = f"    {left:<{width}}    {right}".rstrip()
        yield style.dim(line) if i == 0 else line
    if not comparison.agrees:
        yield f"    {comparison.difference}"


def _show_tutorials(computed: Sequence[tutorials.Tutorial], style: Style) -> None:
    """Print every tensor of the tutorials next to the computed one."""
    for tutorial in computed:
        print(f"\n{style.bold(f'{tutorial.number}. {tutorial.title}')} ({tutorial.precision})")
        for comparison in tutorial.comparisons:
            print(*_comparison_lines(comparison, style), sep="\n")
        for slip in tutorial.errata:
            print(style.dim(f"  known slip in the text: {slip}"))


def _verdict(computed: Sequence[tutorials.Tutorial], style: Style) -> bool:
    """Print whether the tensors agree, and the first that does not."""
    several = [(tutorial, each) for tutorial in computed for each in tutorial.comparisons]
    differing = [(tutorial, each) for tutorial, each in several if not each.agrees]
    agreeing = len(several) - len(differing)
    print(
        f"{style.verdict(not differing)}  selfattn {sa.__version__} computes {agreeing} of {len(several)} tensors "
        f"as {len(computed)} tutorials print them"
    )
    if differing:
        tutorial, comparison = differing[0]
        more = f"; and {len(differing) - 1} more, see --verbose" if len(differing) > 1 else ""
        print(f"  tutorial {tutorial.number}, {comparison.name}: {comparison.difference}{more}")
    return not differing


@dataclass
class _Timing:
    """Times of one forward pass of real size, in seconds, and the largest difference of the results."""

    times: dict[str, list[float]]
    difference: float

    SHAPE = (1, 8, 1024, 64)  # sequences, heads, tokens, width
    ROUNDS = 5

    @property
    def agrees(self) -> bool:
        """Whether the results are equal up to rounding: outputs are averages of numbers of size 1."""
        return self.difference < 1e-5

    @property
    def ratio(self) -> float:
        """How many times as long NumPy takes."""
        return min(self.times["NumPy"]) / min(self.times["selfattn"])


def _measure() -> _Timing:
    """Time selfattn and NumPy in turn."""
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal(_Timing.SHAPE, dtype=np.float32) for _ in range(3))
    functions: dict[str, Callable[..., Any]] = {
        "selfattn": sa.scaled_dot_product_attention,
        "NumPy": _timing.numpy_attention,
    }
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(_Timing.ROUNDS):
        for name, function in functions.items():
            names = {"attention": function, "q": query, "k": key, "v": value}
            _timing.wait_until_quiet()
            times[name] += _timing.sample_times("attention(q, k, v)", names, seconds=0.05)
    ours, theirs = (function(query, key, value) for function in functions.values())
    return _Timing(times, float(np.max(np.abs(ours - theirs))))


def _on_what() -> str:
    threads = sa.get_num_threads()
    return f"{sa.get_isa()}, {threads} thread{'s' * (threads != 1)}"


def _show_timing(timing: _Timing, style: Style) -> None:
    """Print the measured times."""
    batch, heads, length, width = timing.SHAPE
    print(
        f"\n{style.bold('One forward pass')} ({batch} sequence, {heads} heads, {length} tokens, width {width}, "
        f"float32; best of {timing.ROUNDS} rounds in turn)"
    )
    flops = _timing.attention_flops(batch, heads, length, length, width)
    details = {"selfattn": _on_what(), "NumPy": f"five lines, NumPy {np.__version__}"}
    for name, samples in timing.times.items():
        best = min(samples)
        print(
            f"  {name:<8}  {best * 1e3:8.2f} ms  (median {median(samples) * 1e3:.2f} ms)"
            f"  {flops / best / 1e9:6.0f} GFLOP/s  {details[name]}"
        )


def _demonstrate(options: argparse.Namespace) -> int:
    """Print in at most five lines whether all is well; with ``--verbose`` also why."""
    streams.results()
    style = Style(options.color)
    computed = tutorials.compute_all()
    agrees, timing = _verdict(computed, style), None
    if not options.no_timing:
        sys.stdout.flush()
        timing = _measure()
        _, heads, length, _ = timing.SHAPE
        print(
            f"{style.verdict(timing.agrees)}  {timing.ratio:.1f} {style.times} as fast as five lines of NumPy on "
            f"{heads} heads of {length} tokens ({_on_what()}); largest difference of the results {timing.difference:.1e}"
        )
        agrees = agrees and timing.agrees
    if options.verbose:
        _show_tutorials(computed, style)
        if timing is not None:
            _show_timing(timing, style)
    else:
        more = "selfattn steps 3 --open every step of attention; selfattn --help everything else"
        print(f"--verbose shows every tensor; {more}")
    return 0 if agrees else 1


def _parser() -> Parser:
    parser = Parser(
        prog="selfattn",
        description="Compute the attention of five tutorials, compare it with the tensors that they print, and time a\n"
        "forward pass of real size against NumPy. --verbose prints all tensors and times.",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"selfattn {sa.__version__}")
    every = "print every tensor, expected and computed, and all times"
    parser.add_argument("--verbose", action="store_true", help=every)
    parser.add_argument("--no-timing", action="store_true", help="leave out the timing against NumPy")
    colours = "colours; 'auto' (the default) means on a terminal, unless NO_COLOR is set"
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=colours)
    commands = parser.add_subparsers(dest="command", metavar=f"{{{','.join([*_COMMANDS, 'info'])}}}")
    for name, (_, what) in _COMMANDS.items():  # only for the help: they have their own parsers
        commands.add_parser(name, add_help=False, help=what)
    facts = "print version, CPU, instruction set, threads, NumPy and compiler"
    info = commands.add_parser("info", help=facts)
    kinds = "a file of a language model: print the kinds of its weights, and how they are computed"
    info.add_argument("file", metavar="FILE.gguf", type=Path, nargs="?", help=kinds)
    info.add_argument("--json", action="store_true", help="print the same as JSON")
    return parser


def _print_facts(options: argparse.Namespace) -> int:
    """Print facts about this installation, or the kinds of weights in a GGUF file."""
    if options.file is None:
        facts = config.show_config("dicts")
        text = json.dumps(facts, indent=2) if options.json else config.format_config(facts)
    else:
        from selfattn.models._gguf import kinds

        try:
            found = kinds(options.file)
        except (OSError, ValueError) as error:
            return streams.fail("selfattn info", error)
        rows = {kind: dict(zip(("tensors", "bytes", "how"), row, strict=True)) for kind, row in found.items()}
        lines = [
            f"{kind:8}{n:6} tensors {size / 1e6:10.1f} MB  {how}" for kind, (n, size, how) in found.items()
        ]
        text = json.dumps(rows, indent=2) if options.json else "\n".join(lines)
    print(text, file=streams.results())
    return 0


def _run(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["bench"]:
        from selfattn.benchmarks.app import main as bench

        return bench(arguments[1:])
    if arguments[:2] == ["train", "gpt"]:
        return _run_command("train_gpt", "train gpt", arguments[2:])
    if arguments and arguments[0] in _COMMANDS:
        return _run_command(_COMMANDS[arguments[0]][0], arguments[0], arguments[1:])
    options = _parser().parse_args(arguments)
    if options.command == "info":
        return _print_facts(options)
    return _demonstrate(options)


def _run_command(file: str, name: str, arguments: Sequence[str]) -> int:
    """Run a command of a file of this folder; an error or a warning is a line on standard error."""
    command: Command = import_module(f"selfattn.cli.{file}").COMMANDS[name]
    parser = Parser(prog=f"selfattn {name}", description=command.description, epilog=command.epilog)
    command.add(parser)
    options = parser.parse_args(arguments)
    options.warned = []

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        options.warned.append(category)
        streams.tell(f"{parser.prog}: {message}")

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = show
            return command.run(options)
    except UsageError as error:
        parser.error(str(error))
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        return streams.fail(parser.prog, error)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    streams.prepare()
    with _ended_by_signals():
        return _main(list(sys.argv[1:] if arguments is None else arguments))


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Make the signals of a closed terminal or a time limit exceptions, so that half-written files are removed."""

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main(arguments: list[str]) -> int:
    try:
        try:
            code = _run(arguments)
        except SystemExit as stop:  # after --help, --version or an error
            code = stop.code if isinstance(stop.code, int) else 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        streams.abandon(sys.stdout)
        return 141
    except (OSError, MemoryError) as error:  # standard output may be on a full disk
        streams.abandon(sys.stdout)
        return streams.fail("selfattn", error)
    except KeyboardInterrupt:
        return 130
    finally:
        streams.abandon(sys.stderr)
