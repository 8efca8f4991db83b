"""The command ``selfattn``: five tutorials and a timing, facts about this installation.

This module also runs every other command.

Parses arguments and prints; `tutorials` and `config` compute. Each of the other commands is in the file that
`_COMMANDS` names. Other packages add commands: see `plugins`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import config, tutorials
from selfattn._check import Array
from selfattn.cli import streams
from selfattn.cli.parser import Command, Parser, UsageError
from selfattn.cli.plugins import IN_MODELS, load_plugin, plugins

_EPILOG = """\
{plugins}
examples:
  selfattn                      check that it computes what tutorials print, and time it
  selfattn --verbose            every tensor of the tutorials, printed and computed
  selfattn steps 3 --open       every number of every step, on a page in the browser
  selfattn pages class --open   all pages and a start page, for a web server or a USB stick
  selfattn train book.txt --out model       learn sentence embeddings from a text
  selfattn info                 version, CPU, instruction set, threads
  SELFATTN_ISA=avx2 selfattn    the same on another instruction set

exit codes:
  0  every tensor agrees      1  some tensor does not      2  wrong usage
  130  interrupted            141  the output was closed by its reader
"""
# Each command's file in this folder, and its line in the help.
_COMMANDS = {
    "steps": ("pages", "write a page that shows every step of attention"),
    "pages": ("pages", "write all pages and a start page, for a class"),
    "diagnose": ("diagnose", "name the step of your own attention that is wrong"),
    "train": ("train", "train a sentence-embedding model on a text"),
}


# Plugins that are no commands: commands of this package use them for an option.
_OF_OTHERS = ("train.from", "info.file", "pages.model")


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
        for note in tutorial.errata:
            print(style.dim(f"  note on the text: {note}"))


def _verdict(computed: Sequence[tutorials.Tutorial], style: Style) -> bool:
    """Print whether the tensors agree, and the first that does not."""
    several = [(tutorial, each) for tutorial in computed for each in tutorial.comparisons]
    differing = [(tutorial, each) for tutorial, each in several if not each.agrees]
    counts = []
    for source in (tutorials.PRINTED, tutorials.REFERENCE):
        agree = [each.agrees for _, each in several if each.source == source]
        counts.append(f"{sum(agree)} of {len(agree)}")
    print(
        f"{style.verdict(not differing)}  selfattn {sa.__version__}: {counts[0]} tensors are as tutorials 1, 3 and 4 "
        f"print them, and {counts[1]} others as sa.reference computes them"
    )
    if differing:
        tutorial, comparison = differing[0]
        more = f"; and {len(differing) - 1} more, see --verbose" if len(differing) > 1 else ""
        print(f"  tutorial {tutorial.number}, {comparison.name}: {comparison.difference}{more}")
    return not differing


def numpy_attention(query: Array, key: Array, value: Array) -> Array:
    """Compute attention in plain NumPy, which allocates several arrays (…, L, S)."""
    scores = query @ np.swapaxes(key, -1, -2) * query.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    output: Array = weights / weights.sum(axis=-1, keepdims=True) @ value
    return output


_SHAPE, _TURNS = (1, 8, 1024, 64), 5  # sequences, heads, tokens, width


def _measure() -> tuple[dict[str, list[float]], float]:
    """Time selfattn and NumPy in turn; return the seconds of single calls, and the results' largest difference."""
    arrays = np.random.default_rng(0).standard_normal((3, *_SHAPE), dtype=np.float32)
    functions = {"selfattn": sa.scaled_dot_product_attention, "NumPy": numpy_attention}
    times: dict[str, list[float]] = {name: [] for name in functions}
    results: dict[str, Array] = {}
    for name, function in [*functions.items()] * _TURNS:
        time.sleep(0.02)  # threads of the other one may spin for as long
        results[name] = function(*arrays)  # wakes the threads
        for _ in range(2):
            begin = time.perf_counter()
            function(*arrays)
            times[name].append(time.perf_counter() - begin)
    return times, float(np.max(np.abs(results["selfattn"] - results["NumPy"])))


def _on_what() -> str:
    threads = sa.get_num_threads()
    return f"{sa.get_isa()}, {threads} thread{'s' * (threads != 1)}"


def _show_timing(times: dict[str, list[float]], style: Style) -> None:
    """Print the measured times."""
    shape = "{} sequence, {} heads, {} tokens, width {}".format(*_SHAPE)
    print(f"\n{style.bold('One forward pass')} ({shape}, float32; {_TURNS} rounds in turn)")
    details = {"selfattn": _on_what(), "NumPy": f"five lines, NumPy {np.__version__}"}
    flops = 4 * math.prod(_SHAPE) * _SHAPE[2]  # of two products
    for name, seconds in times.items():
        best, middle = min(seconds), median(seconds)
        speed = f"{1e3 * best:8.2f} ms  (median {1e3 * middle:.2f} ms)  {flops / best / 1e9:6.0f} GFLOP/s"
        print(f"  {name:<8}  {speed}  {details[name]}")


def _name_here() -> str:
    """Return what to type for this command: its name, or Python's if the environment of that name is not activated."""
    found, own = shutil.which("selfattn"), Path(sys.executable).with_name("selfattn")
    if found and own.exists() and own.samefile(found):
        return "selfattn"
    return f"{shlex.quote(sys.orig_argv[0])} -m selfattn"


def _demonstrate(options: argparse.Namespace) -> int:
    """Print in at most five lines whether all is well; with ``--verbose`` also why."""
    streams.results()
    style = Style(options.color)
    computed = tutorials.compute_all()
    agrees, times = _verdict(computed, style), None
    if not options.no_timing:
        sys.stdout.flush()
        times, difference = _measure()
        same = difference < 1e-5  # rounding: outputs are averages of numbers of size 1
        print(
            f"{style.verdict(same)}  {min(times['NumPy']) / min(times['selfattn']):.1f} {style.times} as fast as five "
            f"lines of NumPy on {_SHAPE[1]} heads of {_SHAPE[2]} tokens ({_on_what()}); largest difference of the "
            f"results {difference:.1e}"
        )
        agrees = agrees and same
    if options.verbose:
        _show_tutorials(computed, style)
        if times is not None:
            _show_timing(times, style)
    else:
        here = _name_here()
        more = f"{here} steps 3 --open opens a page with every step; {here} --help lists all commands"
        print(f"--verbose shows every tensor; {more}")
    return 0 if agrees else 1


def _plugin_lines() -> str:
    """Return the help's part on commands of other packages.

    It has a line for each, or says where those of selfattn-models are to be had.
    """
    found = {name: each for name, each in plugins().items() if name not in _OF_OTHERS}
    if not found:
        return (
            "with the package selfattn-models (pip install selfattn-models; in a clone: pip install ./models):\n"
            f"  {', '.join(map(_spelled, IN_MODELS))}\n"
        )
    lines = ["commands of other packages:"]
    for name, each in sorted(found.items()):
        try:
            first = re.split(r"[:.]", each.load().description)[0].replace("\n", " ")
        except Exception as error:  # of the other package: the help shows this one's commands all the same
            first = f"cannot be loaded: {error}"
        lines.append(f"  {_spelled(name):16}{first[:1].lower()}{first[1:]}")
    return "\n".join(lines) + "\n"


def _spelled(name: str) -> str:
    return name.replace(".", " ")


class _Help(argparse.Action):
    """``--help``: only then other packages' commands are loaded, for their lines."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.epilog = _EPILOG.format(plugins=_plugin_lines())
        parser.print_help()
        parser.exit()


def _parser() -> Parser:
    parser = Parser(
        prog="selfattn",
        description="Compute the attention of five tutorials, compare it with the tensors that they print, and with\n"
        "selfattn's own reference where they print none; time a forward pass of real size against NumPy.\n"
        "--verbose prints all tensors and times.",
        add_help=False,
    )
    what = "show this help message and exit"
    parser.add_argument("-h", "--help", action=_Help, nargs=0, help=what)
    parser.add_argument("--version", action="version", version=f"selfattn {sa.__version__}")
    every = "print every tensor, expected and computed, and all times"
    parser.add_argument("--verbose", action="store_true", help=every)
    parser.add_argument("--no-timing", action="store_true", help="leave out the timing against NumPy")
    colours = "colours; 'auto' (the default) means on a terminal, unless NO_COLOR is set"
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto", help=colours)
    commands = parser.add_subparsers(dest="command", title="commands of selfattn", metavar="COMMAND")
    for name, (_, what) in _COMMANDS.items():  # only for the help: they have their own parsers
        commands.add_parser(name, add_help=False, help=what)
    facts = "print version, CPU, instruction set, threads, NumPy and compiler"
    info = commands.add_parser("info", help=facts)
    kinds = "a file of a language model: print the kinds of its weights, and how they are computed"
    info.add_argument("file", metavar="FILE.gguf", type=Path, nargs="?", help=kinds)
    info.add_argument("--json", action="store_true", help="print the same as JSON")
    for name in dict.fromkeys([*plugins(), *IN_MODELS]):  # without a line, but for hints at slips
        if "." not in name and name not in _COMMANDS:
            commands.add_parser(name, add_help=False)
    return parser


def _print_facts(options: argparse.Namespace) -> int:
    """Print facts about this installation, or the kinds of weights in a GGUF file."""
    if options.file is not None:
        try:
            return int(load_plugin("info.file", "selfattn info FILE.gguf").run(options))
        except (OSError, ValueError, ImportError) as error:
            return streams.fail("selfattn info", error)
    facts = config.show_config("dicts")
    text = json.dumps(facts, indent=2) if options.json else config.format_config(facts)
    print(text, file=streams.results())
    return 0


def _run(arguments: Sequence[str]) -> int:
    first = arguments[0] if arguments else ""
    if list(arguments[:2]) == ["train", "gpt"]:
        return _run_plugin("train.gpt", arguments[2:])
    if first in _COMMANDS:
        command = import_module(f"selfattn.cli.{_COMMANDS[first][0]}").COMMANDS[first]
        return _run_command(command, first, arguments[1:])
    if "." not in first and (first in IN_MODELS or first in plugins()):
        return _run_plugin(first, arguments[1:])
    options = _parser().parse_args(arguments)
    if options.command == "info":
        return _print_facts(options)
    with streams.with_colours():
        return _demonstrate(options)


def _run_plugin(name: str, arguments: Sequence[str]) -> int:
    """Run a command of another package."""
    spelled = _spelled(name)
    try:
        command = load_plugin(name, f"selfattn {spelled}")
    except ImportError as error:
        return streams.fail("selfattn", error)
    return _run_command(command, spelled, arguments)


def _run_command(command: Command, name: str, arguments: Sequence[str]) -> int:
    """Run a command; an error or a warning is a line on standard error."""
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
    with streams.made_visible(), _ended_by_signals():
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
