"""The commands ``selfattn explore`` and ``map``: a page of a model's heads, and of an index's texts as points."""

from __future__ import annotations

import argparse
from pathlib import Path

import selfattn_models as models
from selfattn.cli import streams
from selfattn.cli.pages import WHAT, add_out, check_out, written
from selfattn.cli.parser import EXIT_CODES, Command, Parser, count
from selfattn.text import read_text
from selfattn_models import pages
from selfattn_models.cli.search import add_model
from selfattn_models.search import Index

POINTS = 20_000  # of a map
EXPLORE_EPILOG = f"""\
examples:
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --open
  selfattn explore all-MiniLM-L6-v2 "He sat on the bank of the river." --compare "She went to the bank for a loan."
  selfattn explore cross-encoder "how tall is it" --second "it is 300 m high"    a pair of sentences
  selfattn explore SmolLM2-135M "The capital of France is" --new-tokens 12       what it expects, step by step
{EXIT_CODES}"""
MAP_EPILOG = f"""\
examples:
  selfattn map tickets.index --colour status --open
{EXIT_CODES}"""


def _add_explore(parser: Parser) -> None:
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


def _run_explore(options: argparse.Namespace) -> int:
    check_out(options)
    return written(
        "explore", _explorer(options), options, "explorer.html", b"sa-explorer", "an explorer page"
    )


def _explorer(options: argparse.Namespace) -> pages.Explorer:
    streams.check(options.out)
    streams.check_not_of(options.model, options.out)
    text = options.text
    if text == streams.DASH:
        text = read_text(streams.source(text)).strip()
    read = text if options.second is None else (text, options.second)
    more = {"compare": options.compare, "word": options.word, "new_tokens": options.new_tokens}
    return pages.explorer(models.load(options.model), read, lang=options.lang, **more)


def _add_map(parser: Parser) -> None:
    add = parser.add_argument
    add("index", metavar="INDEX", type=Path, help="the folder of an index, from selfattn index")
    add("--colour", "--color", metavar="FIELD", help="the field that has the colours at first")
    add("--most", metavar="N", type=count, default=POINTS, help=f"at most N texts, evenly spaced ({POINTS})")
    add_model(parser)
    add_out(parser, "map.html")


def _run_map(options: argparse.Namespace) -> int:
    check_out(options)
    streams.check(options.out)
    own = options.own_model
    index = Index.open(options.index, own) if own else Index(options.index.absolute())  # needs no model
    part = slice(None, None, max(1, -(-len(index) // options.most)))
    texts, metadata = index.texts[part], index.metadata[part]
    if len(texts) < len(index):
        shown = f"{len(texts):,} of {len(index):,} texts, evenly spaced"
        streams.tell(f"selfattn map: {shown}; --most N shows more")
    names = dict.fromkeys(name for each in metadata for name in each)
    fields = {name: [each.get(name) for each in metadata] for name in names}
    for name in [name for name, row in fields.items() if len({*map(str, row)}) == len(row)]:
        if name != options.colour:
            del fields[name]  # each value occurs once, so colours would say nothing
    named = {"colour": options.colour, "name": options.index.resolve().name, "lang": options.lang}
    page = pages.corpus_map(index.vectors[part], texts, fields, progress=len(texts) > 2000, **named)
    return written("map", page, options, "map.html", b"sa-corpus-map", "a map of selfattn's")


EXPLORE = Command(
    WHAT.format("what every head of a model does with a text"), EXPLORE_EPILOG, _add_explore, _run_explore
)
MAP = Command(WHAT.format("the texts of an index as points"), MAP_EPILOG, _add_map, _run_map)
