"""What is added to an index: embeddings of what is new, and arguments that are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import Array, check_rows, if_missing, quoted
from selfattn_models._tokenizer import check_unicode
from selfattn_models.search._models import Model
from selfattn_models.search._store import MOST, Generation, Raw, Writer, hash64
from selfattn_models.search._windows import windows

BATCH = 512  # texts that are embedded between two movements of the bar
MOST_FIELDS = 1000
# Where a text's windows begin and end, and their embeddings.
Windows: TypeAlias = tuple[list[tuple[int, int]], Array]


def append(
    writer: Writer,
    model: Model,
    texts: Sequence[str],
    ids: Sequence[Any],
    metadata: Sequence[bytes],
    done: Callable[[int], Any],
) -> None:
    """Append texts without those that are there as they are; those that they replace are deleted."""
    now = writer.now
    every = [
        Raw(id_json(each[0]), each[1].encode(), each[2]) for each in zip(ids, texts, metadata, strict=True)
    ]
    old = now.find("id", {raw.id: hash64(raw.id) for raw in every})
    raws = [raw for raw in every if raw.id not in old or now.raw(old[raw.id]) != raw]
    prompt = model.prompt.encode() + b"\0"  # other prompts make other embeddings
    hashes = {raw.text: hash64(prompt + raw.text) for raw in raws}
    known = now.find("text", hashes, deleted=True)
    fresh = [text for text in hashes if text not in known]
    done(len(texts) - len(fresh))
    if not raws:
        return
    parts = {text: now.spans(n) for text, n in known.items()} | _embedded(now, model, fresh, done)
    vectors = np.concatenate([parts[raw.text][1] for raw in raws])
    fields = sorted({*now.fields, *(name for raw in raws for name in json.loads(raw.metadata))})
    if len(fields) > MOST_FIELDS:
        what = f"{len(fields)} different fields; an index takes {MOST_FIELDS} at most"
        raise ValueError(f"the metadata have {what}")
    writer.append(
        raws,
        [hashes[raw.text] for raw in raws],
        [parts[raw.text][0] for raw in raws],
        vectors,
        sorted(old[raw.id] for raw in raws if raw.id in old),
        fields=fields,
        width=vectors.shape[1],
        next_id=max([now.next_id, *(name + 1 for name in ids if isinstance(name, int))]),
    )


def _embedded(
    now: Generation, model: Model, texts: Sequence[bytes], done: Callable[[int], Any]
) -> dict[bytes, Windows]:
    found: dict[bytes, Windows] = {}
    for n in range(0, len(texts), BATCH):
        some = [text.decode() for text in texts[n : n + BATCH]]
        spans = windows(some, model)
        parts = [text[begin:end] for text, each in zip(some, spans, strict=True) for begin, end in each]
        vectors = model.rows_for(now, model.encode_document(parts))
        ends = np.cumsum([len(each) for each in spans])[:-1]
        rows = zip(spans, np.split(vectors, ends), strict=True)
        found |= dict(zip(texts[n : n + BATCH], rows, strict=True))
        done(len(some))
    return found


# ----------------------------------------------------------------------------------------------------- arguments


def id_json(name: str | int) -> bytes:
    """Return an id as it is stored: 1 and ``"1"`` are two."""
    return json.dumps(name, ensure_ascii=False).encode()


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
        if isinstance(name, int) and name >= MOST:
            raise ValueError(f"id {n} is {quoted(name)}; a number must be below 2**62, and a text may be any")
        check_unicode(str(name), n, "id")
        if (before := seen.setdefault(name, n)) != n:
            raise ValueError(f"ids {before} and {n} are both {quoted(name)}")
    return listed


def checked_metadata(metadata: Any, count: int) -> list[bytes]:
    """Return metadata as they are stored, in JSON."""
    if metadata is None:
        return [b"{}"] * count
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


def _json(fields: Mapping[str, Any]) -> bytes:
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError

    return json.dumps(dict(fields), ensure_ascii=False, allow_nan=False, default=plain).encode()


def checked_where(where: Any, fields: Collection[str]) -> dict[str, list[Any]]:
    """Return the values of each field to select by."""
    if not isinstance(where, Mapping | None):
        raise TypeError(f"where must be a mapping of fields to values, not {quoted(where)}")
    found = {}
    for name, value in (where or {}).items():
        if name not in fields:
            known = ", ".join(map(repr, fields)) or "none at all"
            raise ValueError(f"no text has the field {name!r}; the fields are {known:.400}")
        given = value.tolist() if hasattr(value, "tolist") else value  # of NumPy and pandas
        listed = given if isinstance(given, list | tuple | set | frozenset) else [given]
        found[name] = [each.item() if isinstance(each, np.generic) else each for each in listed]
        for each in found[name]:
            if each is not None and (not isinstance(each, str | int | float) or if_missing(each)):
                what = "a text, a number, True, False, None or a list of such"
                raise TypeError(f"where: {name!r} must be {what}, not {quoted(each)}")
    return found


def checked_pairs(pairs: Any, of: str) -> list[tuple[str, Any]]:
    """Return pairs as a list; an error if one is none."""
    rows = _listed("pairs", pairs, of, 'df[["query", "id"]].to_numpy()', None)
    for n, pair in enumerate(rows):
        if isinstance(pair, str | bytes) or getattr(pair, "__len__", int)() != 2:
            raise ValueError(f"pair {n} must be {of}, not {quoted(pair)}")
    return [(query, answer) for query, answer in rows]
