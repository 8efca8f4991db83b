"""Texts to index with their ids and metadata, from lines of text, tables and lines of JSON."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from selfattn.cli import streams
from selfattn.engine import import_extra
from selfattn.text import is_quoted, read_text

FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".json": "json", ".parquet": "parquet"}
# Id, text and metadata; without an id of its own the number of its line, or of its row below the heading.
Record: TypeAlias = tuple[str | int, str, dict[str, Any]]


def read_corpus(
    file: str, form: str | None = None, column: str = "", key: str = "", numbers: Sequence[str] = ()
) -> list[Record]:
    """Read the records of a file, or of standard input for ``-``, without those that have no text.

    Texts are in ``column``, by default ``text`` or the only one; ids in ``key``, by default ``id`` if there is one.
    Other columns are metadata, those of ``numbers`` as numbers.
    A column that is missing, a text or id of another type, and an id that occurs twice
    are ValueErrors.
    """
    found: dict[str | int, tuple[Record, str]] = {}
    empty = 0
    for number, place, row in rows_of(file, form):
        of_text = column or (next(iter(row)) if len(row) == 1 else "text")
        of_id = key or ("id" if "id" in row and of_text != "id" else "")
        if of_id == of_text:
            raise ValueError(f"--column and --id are both {of_id!r}")
        for name, option, kinds in ((of_text, "--column", str), (of_id, "--id", str | int)):
            if name and (not isinstance(row.get(name), kinds) or isinstance(row[name], bool)):
                what = f"{json.dumps(row[name]):.60} as {name!r}" if name in row else f"no column {name!r}"
                among = f"its columns are {', '.join(row)}, and {option} chooses one"
                raise ValueError(f"{place} has {what}; {among}")
        text, own = row.pop(of_text), row.pop(of_id) if of_id else number
        if own in found:
            raise ValueError(f"{place} has the id {own!r:.80}, and so has {found[own][1]}")
        for name in numbers:
            try:
                row[name] = json.loads(row[name]) if isinstance(row[name], str) else row[name]
                if not math.isfinite(row[name]):
                    raise ValueError
            except (KeyError, TypeError, ValueError):
                what = (
                    f"{row[name]!r:.60} as {name!r}, which --number needs"
                    if name in row
                    else f"no column {name!r}"
                )
                raise ValueError(f"{place} has {what}") from None
        empty += not text.strip()
        if text.strip():
            found[own] = (own, text, row), place
    if empty:
        streams.tell(f"left out, as they have no text: {empty:,} rows")
    if not found:
        raise ValueError(f"{streams.source(file)} holds no text")
    return [record for record, _ in found.values()]


def rows_of(file: str, form: str | None = None) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number, the place and the columns of each record.

    The form is by default that of the file's name, else text.
    """
    source = streams.source(file)
    form = form or FORMATS.get(Path(file).suffix.lower(), "text")
    if form in ("json", "parquet"):
        yield from ((n, f"{source}, row {n}", record) for n, record in enumerate(_records(source, form), 1))
        return
    text = read_text(source)
    if form in ("csv", "tsv"):
        yield from _table(str(source), text, "\t" if form == "tsv" else ",")
        return
    for number, line in enumerate(text.split("\n"), 1):
        place, row = f"{source}, line {number}", line.strip()
        try:
            row = json.loads(row) if row and form == "jsonl" else row
        except ValueError as error:
            raise ValueError(f"{place} is not JSON: {error}") from None
        if not isinstance(row, str | dict):
            raise ValueError(f"{place}: expected an object or a text, not {line.strip():.60}")
        if row:
            yield number, place, {"text": row} if isinstance(row, str) else row


def _records(source: Any, form: str) -> list[dict[str, Any]]:
    """Read a table that is no text of lines."""
    if form == "parquet":
        rows = (
            import_extra("pyarrow.parquet", package="selfattn-models[parquet]").read_table(source).to_pylist()
        )
    else:
        rows = json.loads(read_text(source))
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        what = 'a list of objects, as to_json(orient="records") writes it; with lines=True too it is .jsonl'
        raise ValueError(f"{source}: expected {what}")
    return rows


def _table(source: str, text: str, delimiter: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    csv.field_size_limit(sys.maxsize)
    plain = delimiter == "\t" and not is_quoted(text)
    given = io.StringIO(text, newline="")
    lines, names = (
        csv.reader(
            given, delimiter=delimiter, strict=True, quoting=csv.QUOTE_NONE if plain else csv.QUOTE_MINIMAL
        ),
        list[str](),
    )
    try:
        for number, row in enumerate(filter(None, lines)):
            place, names = f"{source}, line {lines.line_num}", names or row
            if len(names) == 1 and {";", "\t"} & {*names[0]}:
                what = f"one column, {names[0]!r:.80}; expected columns with {delimiter!r} between"
                raise ValueError(f"{place} has {what}")
            if len(row) != len({*names}):
                what = f"{len(row)} columns for {len({*names})} different names in the heading"
                raise ValueError(f"{place} has {what}")
            if number:
                yield number, place, dict(zip(names, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"{source}, line {lines.line_num}: {error}") from None
