"""What is added to an index: embeddings of what is new, and arguments that are checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn._check import Array, check_rows, quoted
from selfattn.models._tokenizer import check_unicode
from selfattn.search._models import Model
from selfattn.search._store import Generation, Raw, Writer, hash64
from selfattn.search._windows import windows

BATCH = 512  # texts that are embedded between two movements of the bar
MOST_FIELDS = 1000
Windows: TypeAlias = tuple[
    list[tuple[int, int]], Array
]  # where a text's windows begin and end, and their embeddings


def append(
    writer: Writer, model: Model, texts: Sequence[str], ids: Sequence[Any], metadata: Sequence[bytes], done: Callable[[int], Any]
) -> None:  # fmt: skip
    """Append texts without those that are there as they are; those that they replace are deleted."""
    now = writer.now
    every = [
        Raw(id_json(name), text.encode(), more) for name, text, more in zip(ids, texts, metadata, strict=True)
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
        raise ValueError(
            f"the metadata have {len(fields)} different fields; an index takes {MOST_FIELDS} at most"
        )
    writer.append(
        raws, [hashes[raw.text] for raw in raws], [parts[raw.text][0] for raw in raws], vectors,
        sorted(old[raw.id] for raw in raws if raw.id in old), fields=fields, width=vectors.shape[1],
        next_id=max([now.next_id, *(name + 1 for name in ids if isinstance(name, int))]),
    )  # fmt: skip


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


def checked_ids(ids: Any, count: int) -> list[str | int]:
    """Return ids as a list; an error if one is no str or int, or is there twice."""
    if isinstance(ids, str):
        raise TypeError(f"ids must be a sequence of str or int, not {quoted(ids)}")
    check_rows("ids", ids, 'one column, such as df["id"]')
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if len(listed) != count:
        raise ValueError(f"there are {len(listed)} ids for {count} texts")
    seen: dict[Any, int] = {}
    for n, name in enumerate(listed):
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise TypeError(f"id {n} must be a str or an int, not {quoted(name)}")
        check_unicode(str(name), n, "id")
        if (before := seen.setdefault(name, n)) != n:
            raise ValueError(f"ids {before} and {n} are both {quoted(name)}")
    return listed


def checked_metadata(metadata: Any, count: int) -> list[bytes]:
    """Return metadata as they are stored, in JSON."""
    if metadata is None:
        return [b"{}"] * count
    check_rows("metadata", metadata, 'df.to_dict("records")')
    listed = list(metadata)
    if len(listed) != count:
        raise ValueError(f"there are {len(listed)} metadata for {count} texts")
    for n, fields in enumerate(listed):
        if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
            raise TypeError(f"metadata {n} must be a mapping of names to values, not {quoted(fields)}")
        for name, value in fields.items():
            try:
                _json({name: value})
            except (TypeError, ValueError, RecursionError) as error:
                what = f"metadata {n}: {name!r} is {quoted(value)}, which JSON does not have; None stands for what is missing"
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
        if wrong := [each for each in found[name] if not isinstance(each, str | int | float | None)]:
            what = "a text, a number, True, False, None or a list of such"
            raise TypeError(f"where: {name!r} must be {what}, not {quoted(wrong[0])}")
    return found
