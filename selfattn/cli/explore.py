"""The command ``selfattn explore``: a page of what every head of a model does with a text."""

from __future__ import annotations

import argparse
import os
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from selfattn import models, views
from selfattn.cli import streams
from selfattn.cli.parser import Parser
from selfattn.training.triplets import read_text

EPILOG = """\
examples:
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --open
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --compare "She went to the bank for a loan."
  selfattn explore cross-encoder "how tall is it" --second "it is 300 m high"    a pair of sentences
  selfattn explore SmolLM2-135M "The capital of France is" --new-tokens 12       what it expects, step by step

exit codes:
  0  written      1  something is wrong with the model or the text; the message says what      2  wrong usage
"""


def _parser() -> Parser:
    parser = Parser(
        prog="selfattn explore",
        description="Write a page that shows what every head of a model does with a text: one HTML file that needs\n"
        "no network.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=Path,
        help="the folder or .gguf file of a model, or what selfattn train made",
    )
    for name, metavar, what in (
        ("text", "TEXT", "what the model reads; - is standard input"),
        ("--second", "TEXT", "the second sentence of a pair"),
        ("--compare", "TEXT", "another text, shown beside the first"),
        ("--word", "TOKEN", "the token that is chosen at first"),
    ):
        parser.add_argument(name, metavar=metavar, type=streams.sentence, help=what)
    parser.add_argument(
        "--new-tokens", metavar="N", type=int, default=0, help="a language model adds so many (0)"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=streams.target,
        help="where to write; - is standard output; default: explorer.html",
    )
    parser.add_argument("--open", action="store_true", help="show the page in a browser")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.open and options.out == streams.DASH:
        parser.error("--open needs a file; --out - writes none")
    try:
        return _write(_page(options), options)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, ImportError, ArithmeticError, MemoryError, RuntimeError) as error:
        return streams.fail("selfattn explore", error)


def _page(options: argparse.Namespace) -> views.Explorer:
    streams.check(options.out)
    streams.check_not_of(options.model, options.out)
    text = options.text
    if text == streams.DASH:
        text = read_text(streams.source(text)).strip()
    model = models.load(options.model)
    return views.explorer(
        model,
        text if options.second is None else (text, options.second),
        compare=options.compare,
        word=options.word,
        new_tokens=options.new_tokens,
    )


def _write(page: views.Explorer, options: argparse.Namespace) -> int:
    if options.out == streams.DASH:
        streams.write(streams.DASH, page.html.encode())
        return 0
    path = Path(options.out or "explorer.html")
    if (
        options.out is None
        and os.path.lexists(path)
        and not (path.is_file() and b"sa-explorer" in path.read_bytes())
    ):
        raise FileExistsError(f"{path} is there, and no explorer; --out says where to write")
    print(page.save(path))
    if options.open and not webbrowser.open(path.resolve().as_uri()):
        streams.tell(f"selfattn explore: there is no browser; open {path} yourself")
    return 0
