"""The command ``selfattn explore``: a page of what every head of a model does with a text."""

from __future__ import annotations

import argparse
from pathlib import Path

from selfattn import models, views
from selfattn.cli import streams
from selfattn.cli.pages import add_out, check_out, default_file, show
from selfattn.cli.parser import Command, Parser
from selfattn.training.triplets import read_text

EPILOG = """\
examples:
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --open
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --compare "She went to the bank for a loan."
  selfattn explore cross-encoder "how tall is it" --second "it is 300 m high"    a pair of sentences
  selfattn explore SmolLM2-135M "The capital of France is" --new-tokens 12       what it expects, step by step

exit codes:
  0  written      1  an error in the model or the text; the message says which      2  wrong usage
"""


def _add(parser: Parser) -> None:
    where = "the folder or .gguf file of a model, or what selfattn train made"
    parser.add_argument("model", metavar="MODEL", type=Path, help=where)
    for name, metavar, what in (
        ("text", "TEXT", "what the model reads; - is standard input"),
        ("--second", "TEXT", "the second sentence of a pair"),
        ("--compare", "TEXT", "another text, compared with the first"),
        ("--word", "TOKEN", "the token that is chosen at first"),
    ):
        parser.add_argument(name, metavar=metavar, type=streams.sentence, help=what)
    more = "how many tokens a language model adds (0)"
    parser.add_argument("--new-tokens", metavar="N", type=int, default=0, help=more)
    add_out(parser, "explorer.html")


def _run(options: argparse.Namespace) -> int:
    check_out(options)
    page, path = _page(options), None
    if options.out != streams.DASH:
        foreign = "not an explorer page; --out chooses another file"
        path = page.save(options.out or default_file("explorer.html", b"sa-explorer", foreign))
    show("explore", page, path, options.open)
    return 0


def _page(options: argparse.Namespace) -> views.Explorer:
    streams.check(options.out)
    streams.check_not_of(options.model, options.out)
    text = options.text
    if text == streams.DASH:
        text = read_text(streams.source(text)).strip()
    read = text if options.second is None else (text, options.second)
    more = {"compare": options.compare, "word": options.word, "new_tokens": options.new_tokens}
    return views.explorer(models.load(options.model), read, **more)


WHAT = "Write a page that shows what every head of a model does with a text: one HTML file that needs\nno network."
COMMANDS = {"explore": Command(WHAT, EPILOG, _add, _run)}
