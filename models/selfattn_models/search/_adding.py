"""What is added to an index: embeddings of what is new, and arguments that are checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import Array, check_rows, quoted, warn
from selfattn_models._tokenizer import check_unicode
from selfattn_models.search._models import Model, as_stored
from selfattn_models.search._store import MOST, Snapshot, reading, writing
from selfattn_models.search._windows import windows

BATCH = 512  # texts that are embedded and written at once
MOST_FIELDS = 1000
# Where a text's windows begin and end, and their embeddings.
Windows: TypeAlias = tuple[list[tuple[int, int]] | None, Array]


def add(
    folder: Path,
    seen: Snapshot | None,
    model: Model | None,
    entry: Mapping[str, Any],
    texts: Sequence[str],
    ids: Sequence[Any] | None,
    metadata: Sequence[str],
    vectors: Array | None,
    timeout: float,
) -> Sequence[Any]:
    """Add texts without those that are there as they are, and delete those that they replace; return their ids.

    Without a model ``vectors`` are their embeddings. Others may change the index while texts are embedded.
    """
    hashes: list[Any] = [None] * len(texts)
    parts: dict[Any, Windows] = {}
    named: dict[Any, str] = {}
    if model is not None:
        prefix = model.prompt.encode() + b"\0"  # other prompts make other embeddings
        hashes = [blake2b(prefix + text.encode(), digest_size=16).digest() for text in texts]
        named = dict(zip(hashes, texts, strict=True))
    while True:
        with reading(folder, seen, timeout) as reader:
            fresh = named.keys() - parts.keys() - reader.known([*named]).keys()
        parts |= _embedded(reader.now, model, {name: named[name] for name in named if name in fresh})
        with writing(folder, seen, timeout) as writer:
            known = {
                name: writer.spans(*each)
                for name, each in writer.known([*named.keys() - parts.keys()]).items()
            }
            if len(known) + len(parts) < len(named):
                continue  # a vacuum has removed a deleted text's embedding meanwhile
            found, first = known | parts, writer.now.next_id
            ids = range(first, first + len(texts)) if ids is None else ids
            gone, new, twins = [], [], list[Any]()
            for n, (name, text, fields) in enumerate(zip(ids, texts, metadata, strict=True)):
                old = writer.one("SELECT row, text, metadata FROM texts WHERE id = ?", name)
                if old is None or old[1:] != (text, fields) or vectors is not None:
                    new.append(n)
                    gone += [old[0]] if old else []
                    if old is None and writer.one("SELECT 1 FROM texts WHERE id = ?", _twin(name)):
                        twins.append(name)
            if new:
                of = [(None, vectors[n : n + 1]) if vectors is not None else found[hashes[n]] for n in new]
                rows = as_stored("expected", writer.now, np.concatenate([each[1] for each in of]))
                names = sorted({*writer.now.fields, *(name for n in new for name in json.loads(metadata[n]))})
                if len(names) > MOST_FIELDS:
                    what = f"{len(names)} different fields; an index takes {MOST_FIELDS} at most"
                    raise ValueError(f"the metadata have {what}")
                writer.change(
                    [(ids[n], texts[n], metadata[n], hashes[n]) for n in new],
                    [each[0] for each in of],
                    rows,
                    gone,
                    fields=json.dumps(names),
                    next_id=max([first, *(name + 1 for name in ids if isinstance(name, int))]),
                    model=json.dumps(entry),
                )
            if twins:
                what = f"{twins[0]!r} was added, and {_twin(twins[0])!r} is another text; types of ids matter"
                warn(f"{len(twins)} new ids are here as another type: {what}")
            return ids


def _twin(name: str | int) -> str | int:
    """Return the id of another type that looks the same, if there is one."""
    is_number = isinstance(name, str) and name.isascii() and name.isdecimal() and len(name) < 19
    return int(name) if is_number else str(name)


def _embedded(now: Snapshot, model: Model | None, texts: Mapping[bytes, str]) -> dict[bytes, Windows]:
    """Return the windows and the embeddings of some texts."""
    if model is None or not texts:
        return {}
    spans = windows(list(texts.values()), model)
    cut = [text[begin:end] for text, each in zip(texts.values(), spans, strict=True) for begin, end in each]
    vectors = model.rows_for(now, model.encode_document(cut))
    rows = np.split(vectors, np.cumsum([len(each) for each in spans])[:-1])
    whole = ([(0, len(text))] for text in texts.values())
    spans_or_none = (None if each == one else each for each, one in zip(spans, whole, strict=True))
    return dict(zip(texts, zip(spans_or_none, rows, strict=True), strict=True))


# ----------------------------------------------------------------------------------------------------- arguments


def _listed(name: str, given: Any, of: str, column: str, count: int | None) -> list[Any]:
    check_rows(name, given, column)
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be a sequence of {of}, not {quoted(given)}")
    listed = given.tolist() if hasattr(given, "tolist") else given  # of NumPy, pandas, Arrow
    rows = [each.item() if isinstance(each, np.generic) else each for each in listed]
    if count not in (None, len(rows)):
        raise ValueError(f"there are {len(rows)} {name} for {count} texts")
    return rows


def checked_ids(ids: Any, count: int | None = None) -> list[str | int]:
    """Return ids as a list; an error if one is no str or int, or is there twice."""
    listed, seen = _listed("ids", ids, "str or int", 'one column, such as df["id"]', count), dict[Any, int]()
    for n, name in enumerate(listed):
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise TypeError(f"id {n} must be a str or an int, not {quoted(name)}")
        if isinstance(name, int) and abs(name) >= MOST:
            raise ValueError(f"id {n} is {quoted(name)}; a number must be below 2**62, and a text may be any")
        check_unicode(str(name), n, "id")
        if (before := seen.setdefault(name, n)) != n:
            raise ValueError(f"ids {before} and {n} are both {quoted(name)}")
    return listed


def checked_metadata(metadata: Any, count: int) -> list[str]:
    """Return metadata as they are stored, in JSON."""
    if metadata is None:
        return ["{}"] * count
    listed = _listed("metadata", metadata, "mappings", 'df.to_dict("records")', count)
    for n, fields in enumerate(listed):
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise TypeError(f"metadata {n} must be a mapping of names to values, not {quoted(fields)}")
        for name, value in fields.items():
            try:
                written = _json({name: value})
                if isinstance(value, list | tuple | dict) and json.loads(written)[name] != value:
                    raise ValueError  # a tuple, or a key that is no text
            except (TypeError, ValueError, RecursionError) as error:
                what = (
                    f"metadata {n}: {name!r} is {quoted(value)}, which JSON does not have; None stands "
                    "for what is missing"
                )
                raise (TypeError if isinstance(error, TypeError) else ValueError)(what) from None
    return [_json(fields) for fields in listed]


def _json(fields: Mapping[str, Any]) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError

    written = json.dumps(dict(fields), ensure_ascii=False, allow_nan=False, default=plain)
    written.encode()  # refuses halves of surrogate pairs
    return written


def checked_pairs(pairs: Any, of: str) -> list[tuple[str, Any]]:
    """Return pairs as a list; an error if one is none."""
    rows = _listed("pairs", pairs, of, 'df[["query", "id"]].to_numpy()', None)
    for n, pair in enumerate(rows):
        if isinstance(pair, str | bytes) or getattr(pair, "__len__", int)() != 2:
            raise ValueError(f"pair {n} must be {of}, not {quoted(pair)}")
    return [(query, answer) for query, answer in rows]
