"""What a command is; its parser, which suggests what a slip may have meant; options and numbers of several commands."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

from selfattn.cli import streams

EXIT_CODES = """
exit codes:
  0  done      1  a file or a number is wrong; the message says which and why      2  wrong usage
  130  interrupted      141  the output was closed by its reader
"""
_CHOICE = re.compile(r"argument (?P<name>.*?): invalid choice: '(?P<given>[^']*)'")
_UNKNOWN, _MISSING = "unrecognized arguments: ", "the following arguments are required: "


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that keeps the layout of its texts, and suggests names for misspelt ones.

    Examples
    --------
    >>> parser = Parser(prog="selfattn search")
    >>> _ = parser.add_argument("--split", choices=("lines", "sentences"))
    >>> parser.hint("argument --split: invalid choice: 'line' (choose from ...)")
    "; did you mean 'lines'?"
    """

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)
        self._given: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments, and remember them for :meth:`hint`."""
        self._given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print; the standard library says nothing when the help cannot be written."""
        if file is not None and file is sys.stdout:
            print(message, end="", file=streams.results())
        else:
            with contextlib.suppress(OSError):  # as newer Pythons do
                super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit."""
        super().error(message + self.hint(message))

    def hint(self, message: str) -> str:
        """Return what to add to a message: the nearest options or choices, or nothing."""
        choice = _CHOICE.search(message)
        found: list[str] = []
        if choice:
            named = {
                "/".join(each.option_strings) or each.metavar or each.dest: each for each in self._actions
            }
            choices = [str(each) for each in named[choice["name"]].choices or ()]
            found = get_close_matches(choice["given"].lower(), choices, n=1)
        elif message.startswith((_UNKNOWN, _MISSING)):  # a missing one may have been misspelled
            options = self._known()
            given = self._given[: self._given.index("--")] if "--" in self._given else self._given
            for name in (each.partition("=")[0] for each in given if each.startswith("--")):
                if not any(option.startswith(name) for option in options):
                    found += get_close_matches(name.lower(), options, n=1)
        if not found:
            return ""
        return f"; did you mean {' or '.join(repr(each) for each in dict.fromkeys(found))}?"

    def _known(self) -> list[str]:
        """Return the names of the options, also of the command that was given."""
        known: list[str] = []
        for action in self._actions:
            known += action.option_strings
            for name, parser in action.choices.items() if isinstance(action.choices, dict) else ():
                if name in self._given:
                    known += parser._known()
        return known


class UsageError(Exception):
    """Arguments that do not fit each other: the usage and the message are printed, and the exit code is 2."""


class Command(NamedTuple):
    """A command as `app` runs it: ``add`` adds its arguments, ``run`` returns its exit code.

    The options that ``run`` takes have a list ``warned``, which gets the category of each warning.
    """

    description: str
    epilog: str
    add: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def add_dtype(parser: Parser, of: str = "") -> None:
    """Add ``--dtype``."""
    what = f"round the weights{of} to this; default: as they are stored"
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "int8"), help=what)


def add_numbers(group: argparse._ArgumentGroup, options: Mapping[str, tuple[Any, float, str]]) -> None:
    """Add options that take a number: its type, its default, and its help, to which the default is added."""
    for name, (take, default, what) in options.items():
        metavar = "X" if take is rate else "N"
        group.add_argument(name, type=take, default=default, metavar=metavar, help=f"{what} ({default})")


def checked_seed(seed: int) -> int:
    """Return a seed that is not negative."""
    if seed < 0:
        raise ValueError(f"--seed must not be negative, not {seed}")
    return seed


def count(text: str) -> int:
    """Take a whole number of at least 1."""
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r:.80}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def rate(text: str) -> float:
    """Take a finite number of at least 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r:.80}") from None
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be at least 0 and finite, not {text}")
    return number
