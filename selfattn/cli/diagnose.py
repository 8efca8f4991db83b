"""The command ``selfattn diagnose``: which step of one's own attention is wrong."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

from selfattn.cli import streams
from selfattn.cli.pages import PAGE, add_out, check_out, written
from selfattn.cli.parser import Command, Parser, UsageError
from selfattn.diagnosis import diagnose, diagnose_vjp
from selfattn.diagnosis.verdict import MEANINGS

EPILOG = """
examples:
  selfattn diagnose homework.py:attention
  selfattn diagnose homework.py:attention_vjp --open
  selfattn diagnose homework.py:MultiHeadAttention --mask open

exit codes:
  0  nothing differs      1  something differs, or the function cannot be called      2  wrong usage
"""


def _add(parser: Parser) -> None:
    what = "a Python file, which is run, and the name of a function or a class in it"
    parser.add_argument("function", metavar="FILE.py:NAME", help=what)
    backward = "it is a backward pass; the default for names that end with vjp, backward or grad"
    parser.add_argument("--vjp", action="store_true", help=backward)
    parser.add_argument("--layout", help="the order of axes, such as BHLE: texts, heads, tokens, width")
    parser.add_argument(
        "--mask", choices=MEANINGS, help="what True says of a key; additive: the mask is added"
    )
    add_out(parser, "no page")


def _load(source: str) -> Any:
    """Run a file, and return what a name in it is."""
    file, _, name = source.rpartition(":")
    path = Path(file)
    if not file or path.suffix != ".py":
        raise UsageError(f"{source!r} is not FILE.py:NAME, such as homework.py:attention")
    if not path.exists():
        raise FileNotFoundError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be run")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        names = [each for each, thing in vars(module).items() if callable(thing) and not each.startswith("_")]
        raise ValueError(f"{path} has no {name!r}; it has {', '.join(names) or 'no functions'}")
    return getattr(module, name)


def _run(options: argparse.Namespace) -> int:
    check_out(options)
    function = _load(options.function)
    backward = options.vjp or re.search(r"(vjp|backward|grad)$", options.function)
    verdict = (diagnose_vjp if backward else diagnose)(function, layout=options.layout, mask=options.mask)
    print(verdict, file=sys.stderr if options.out == streams.DASH else streams.results())
    if options.out or options.open:
        at = "" if backward else f"#stage={verdict.stage}&row=0"
        written("diagnose", verdict.page(options.lang), options, "diagnosis.html", *PAGE, at=at)
    return 0 if verdict.right else 1


COMMANDS = {
    "diagnose": Command("Name the step of your own attention that is wrong, and why.", EPILOG, _add, _run)
}
