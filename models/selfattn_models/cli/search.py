"""The command ``selfattn index``, and what ``search`` and ``evaluate`` do with an index; `search` computes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfattn.cli import streams
from selfattn.cli.parser import EXIT_CODES, Command, Parser, UsageError
from selfattn_models.cli.corpus import FORMATS, read_corpus, rows_of
from selfattn_models.search import Index
from selfattn_models.search._adding import BATCH
from selfattn_models.search._evaluate import evaluate
from selfattn_models.search._store import DATABASE

INDEX_EPILOG = f"""\
The command may be interrupted. Run again it goes on, or takes over what has changed: it embeds new texts alone, and
removes those that went.

examples:
  selfattn index all-MiniLM-L6-v2 book.txt --out book.index        a text in each line
  selfattn index all-MiniLM-L6-v2 tickets.csv --column subject --out tickets.index    all other columns are metadata
  selfattn index tickets.index tickets.csv --column subject     again: an index knows its model
  selfattn search tickets.index "the printer burns" --where status=open
  selfattn evaluate tickets.index                  is it better than BM25?
  selfattn map tickets.index --colour status --open
{EXIT_CODES}"""


def is_index(path: Path) -> bool:
    """Tell whether a folder is an index, and not a model's."""
    return (
        any(os.path.lexists(path / name) for name in (DATABASE, "manifest.json"))
        and not (path / "config.json").exists()
    )


def _add_index(parser: Parser) -> None:
    add, forms = parser.add_argument, ("text", *FORMATS.values())
    folder = (
        "the folder of a model, as for selfattn embed; or an index, which has its own, and is changed itself"
    )
    add("model", metavar="MODEL", type=Path, help=folder)
    corpus = "a UTF-8 file: .csv or .tsv with a heading, .jsonl, or a text in each line; - is standard input"
    add("corpus", metavar="CORPUS", help=corpus)
    add("--out", metavar="DIR", type=streams.folder, help="the folder of the index")
    add_model(parser)
    add("--format", choices=forms, help="by default as the file is named, else text")
    add("--column", metavar="NAME", default="", help="of the texts (text, or the only one)")
    add("--id", metavar="NAME", default="", help="column of the ids (id; else numbers of lines or rows)")
    add(
        "--number",
        metavar="NAME",
        action="append",
        default=[],
        help="a column of numbers, for --where; again: another",
    )
    stored = "of the stored embeddings; int8 is for more than a million texts (float32)"
    add("--dtype", choices=("float32", "int8"), help=stored)


def _index(options: argparse.Namespace) -> int:
    out, model, dtype = streams.results(), options.model, options.dtype
    own = is_index(model)
    if own != (options.out is None) or (options.own_model and not own):
        raise UsageError("expected MODEL CORPUS --out DIR, or INDEX CORPUS, which may have a --model")
    place, model = (model, options.own_model) if own else (options.out, model)
    records = read_corpus(options.corpus, options.format, options.column, options.id, options.number)
    index: Any = Index.open(place, model) if (begun := is_index(place)) else None
    if begun and dtype not in (None, index.dtype):
        raise ValueError(f"{place} is an index of {index.dtype}, not {dtype}; --out names another folder")
    index = index if begun else Index.create(place, model, dtype or "float32")
    index._record()  # the model may have moved
    before = {each.id: tuple(each[1:4]) for each in index._entries()}
    known, gone = {text for _, text, _ in before.values()}, before.keys() - {each[0] for each in records}
    changed = [each for each in records if before.get(each[0]) != each]
    n = len({text for _, text, _ in changed} - known)
    work = f"{n:,} to embed, {len(changed):,} to write, {len(gone):,} to remove"
    streams.tell(f"{len(records):,} texts: {work}")
    try:
        if changed:  # a text that has moved is still found where it was
            ids, texts, metadata = map(list, zip(*changed, strict=True))
            index.add(texts, ids, metadata, progress=n > BATCH)
        index.delete(list(gone))
        if index._seen.rows > 2 * len(index._seen.live()):
            index.vacuum()
    except KeyboardInterrupt:
        streams.tell(f"\nstopped: {place} holds {len(index):,} texts; the same command goes on")
        raise
    print(f'{place}: {len(index):,} texts, {n:,} embedded; try: selfattn search {place} "..."', file=out)
    return 0


def add_model(parser: Parser) -> None:
    """Add ``--model``, of an index."""
    what = "the folder of the index's model, if that has moved"
    parser.add_argument("--model", metavar="DIR", dest="own_model", type=Path, help=what)


def add_selection(parser: Parser) -> None:
    """Add the options of a search of an index."""
    add = parser.add_argument_group("of an index, from selfattn index").add_argument
    where = (
        "only texts with this value, or !=, <, <=, >, >=; again: another value of the field, or another field"
    )
    add("--where", metavar="FIELD=VALUE", action="append", default=[], type=streams.sentence, help=where)
    add("--hybrid", action="store_true", help="join this ranking and that of BM25")
    add_model(parser)
    add("--rerank", metavar="MODEL", type=Path, help="a cross-encoder's folder; it sorts the best again")


def check_options(options: argparse.Namespace, *of_others: str) -> None:
    """Refuse options of an index where there is none, and for an index those of others."""
    index = is_index(options.model)
    for name in of_others if index else ("where", "hybrid", "rerank", "own_model"):
        if getattr(options, name) not in (None, False, [], "lines"):
            own, others = "a model, and not for an index, which has its own", "an index, from selfattn index"
            raise UsageError(
                f"--{name.removeprefix('own_').replace('_', '-')} is for {own if index else others}"
            )


def selection(options: argparse.Namespace) -> dict[str, Any]:
    """Return options of ``Index.search``; a value is a text, and also the number or the word that it is in JSON."""
    found = {name: getattr(options, name) for name in ("hybrid", "rerank") if getattr(options, name)}
    for given in options.where:
        parts = re.fullmatch("(.*?)(!=|<=|>=|<|>|=)(.*)", given, re.DOTALL)
        if not parts:
            raise ValueError(f"--where must be FIELD=VALUE, not {given!r:.80}")
        name, operator, value = parts.groups()
        values: list[Any] = [value]
        if value in ("true", "false", "null") or value[-1:].isdigit():
            with contextlib.suppress(ValueError):  # such as A4
                values.append(json.loads(value))
        conditions = found.setdefault("where", {}).setdefault(name, [])
        equal = dict(conditions).get("==") if operator == "=" else None
        if equal is not None:
            equal += values
        elif operator in ("=", "!="):
            conditions.append(("==" if operator == "=" else "!=", values))
        else:
            conditions.append((operator, values[-1]))
    return found


def search_index(options: argparse.Namespace, queries: Sequence[str]) -> int:
    """Run ``selfattn search`` on an index."""
    if not all(map(str.strip, queries)):
        raise UsageError("a query is empty")
    found: Any = Index.open(options.model, options.own_model).search(queries, options.k, **selection(options))
    if options.where and not any(found):
        streams.tell(f"selfattn search: no text has {' and '.join(options.where)}")
    for query, hits in zip(queries, found, strict=True):
        if len(queries) > 1 and not options.json:
            print(f"{query}:")
        for hit in hits:
            fields = {"query": query, "score": round(hit.score, 6), "id": hit.id, "text": hit.text}
            more = {"metadata": hit.metadata} | ({"span": hit.span} if hit.span else {})
            window = hit.text[slice(*hit.span)] if hit.span else hit.text
            line = f"{hit.score:.3f}\t{hit.id}\t{' '.join(window.split())}"
            print(json.dumps(fields | more) if options.json else line)
    return 0


def evaluate_index(options: argparse.Namespace) -> int:
    """Run ``selfattn evaluate`` on an index."""
    out, index, pairs = streams.results(), Index.open(options.model, options.own_model), None
    if options.text is not None:
        pairs, ids = [], {str(name): name for name in index.ids}
        for _, place, row in rows_of(options.text):
            if not isinstance(row.get("query"), str) or str(row.get("id")) not in ids:
                needed = "'query', a text, and 'id', that of a text of the index"
                raise ValueError(f"{place}: expected {needed}, not {json.dumps(row):.80}")
            pairs.append((row["query"], ids[str(row["id"])]))
    found = evaluate(index, pairs, progress=True, **selection(options))
    if options.json:
        print(json.dumps(found), file=out)
        return 0
    lines = [" " * 14 + "".join(f"{of:>11}" for of in found["measures"]["index"])]
    for name, means in found["measures"].items():
        lines.append(f"{name:14}" + "".join(f"{mean:11.3f}" for mean in means.values()))
    print(found["task"], *lines, found["verdict"], sep="\n", file=out)
    return 0


INDEX = Command("Embed texts once, for selfattn search.", INDEX_EPILOG, _add_index, _index)
