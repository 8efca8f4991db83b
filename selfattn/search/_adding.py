"""What is added to an index: checked arguments, embeddings of what is new, and the bytes of both."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from selfattn._check import Array, check_rows, quoted
from selfattn.models._tokenizer import check_unicode
from selfattn.search._models import Model, normalized
from selfattn.search._nearest import quantized
from selfattn.search._store import DELETED, ROW, TAG, Generation, Raw, Writer, hash64, table_of, tags_of
from selfattn.search._windows import windows

BATCH = 512  # texts that are embedded between two movements of the bar
MOST_FIELDS = 1000


def append(
    writer: Writer, model: Model, texts: Sequence[str], ids: Sequence[Any], metadata: Sequence[bytes], done: Callable[[int], Any]
) -> None:  # fmt: skip
    """Append texts without those that are there as they are; those that they replace are deleted."""
    now, first = writer.now, len(writer.now.records)
    every = [
        Raw(id_json(name), text.encode(), more) for name, text, more in zip(ids, texts, metadata, strict=True)
    ]
    old = now.find("id", {raw.id: hash64(raw.id) for raw in every})
    raws = [raw for raw in every if raw.id not in old or now.raw(old[raw.id]) != raw]
    if not raws:
        done(len(texts))
        return
    prompt = model.prompt.encode() + b"\0"
    hashes = {raw.text: hash64(prompt + raw.text) for raw in raws}
    known = now.find("text", hashes, deleted=True)
    fresh = [text for text in hashes if text not in known]
    rows = _embedded(now, model, fresh, done) | {text: _copied(now, n) for text, n in known.items()}
    done(len(texts) - len(fresh))
    parts = [rows[raw.text] for raw in raws]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    arrays["rows"]["record"] = np.repeat(
        np.arange(first, first + len(raws)), [len(part["rows"]) for part in parts]
    )
    arrays |= table_of(raws, [(hash64(raw.id), hashes[raw.text]) for raw in raws])
    fields = [json.loads(raw.metadata) for raw in raws]
    arrays["tags"] = np.array(list(tags_of(fields, first)), TAG)
    arrays["deleted"] = np.array(sorted(old[raw.id] for raw in raws if raw.id in old), DELETED)
    names = sorted({*now.fields, *(name for each in fields for name in each)})
    if len(names) > MOST_FIELDS:
        raise ValueError(
            f"the metadata have {len(names)} different fields; an index takes {MOST_FIELDS} at most"
        )
    numbers = [name + 1 for name in ids if isinstance(name, int)]
    writer.append(
        arrays, fields=names, next_id=max([now.next_id, *numbers]), width=arrays["vectors"].shape[1]
    )


def _embedded(
    now: Generation, model: Model, texts: Sequence[bytes], done: Callable[[int], Any]
) -> dict[bytes, dict[str, Array]]:
    """Embed texts, and return what the files hold of the rows of each."""
    found = {}
    for n in range(0, len(texts), BATCH):
        some = [text.decode() for text in texts[n : n + BATCH]]
        spans = windows(some, model)
        parts = [text[begin:end] for text, each in zip(some, spans, strict=True) for begin, end in each]
        vectors = normalized(model.encode_document(parts), now.metric)
        if now.width and vectors.shape[1] != now.width:
            raise ValueError(
                f"{model.name} makes embeddings of width {vectors.shape[1]}; the index has {now.width}"
            )
        arrays = {"vectors": vectors}
        if now.dtype == "int8":
            arrays["codes"], arrays["scales"] = quantized(vectors)
        flat = [span for each in spans for span in each]
        arrays["rows"] = np.array(
            [(0, *span, zlib.crc32(v.data)) for span, v in zip(flat, vectors, strict=True)], ROW
        )
        first = 0
        for text, each in zip(texts[n : n + BATCH], spans, strict=True):
            end = first + len(each)
            found[text] = {name: array[first:end] for name, array in arrays.items()}
            first = end
        done(len(some))
    return found


def _copied(now: Generation, record: int) -> dict[str, Array]:
    """Return what the files hold of the rows of a record."""
    rows = now.rows_of(record)
    for n in range(rows.start, rows.stop):
        now.row(n)  # an error if it is damaged
    return {name: getattr(now, name)[rows] for name in (*now.of_rows, "rows")}


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
    seen: dict[bytes, int] = {}
    for n, name in enumerate(listed):
        if not isinstance(name, str | int) or isinstance(name, bool):
            raise TypeError(f"id {n} must be a str or an int, not {quoted(name)}")
        check_unicode(str(name), n, "id")
        if (before := seen.setdefault(id_json(name), n)) != n:
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
    return [_metadata_json(n, each) for n, each in enumerate(listed)]


def _metadata_json(n: int, fields: Any) -> bytes:
    if not isinstance(fields, Mapping) or not all(isinstance(name, str) for name in fields):
        raise TypeError(f"metadata {n} must be a mapping of names to values, not {quoted(fields)}")
    for name, value in fields.items():
        try:
            json.dumps({name: value}, ensure_ascii=False, allow_nan=False, default=_plain).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise type(error)(
                f"metadata {n}: {name!r} is {quoted(value)}, which JSON does not have"
            ) from None
    return json.dumps(dict(fields), ensure_ascii=False, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy's as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(type(value).__name__)


def checked_where(where: Any, fields: Collection[str]) -> dict[str, list[Any]]:
    """Return the values of each field to select by."""
    if where is None:
        return {}
    if not isinstance(where, Mapping):
        raise TypeError(f"where must be a mapping of fields to values, not {quoted(where)}")
    found = {}
    for name, value in where.items():
        if name not in fields:
            known = ", ".join(map(repr, fields)) or "none at all"
            raise ValueError(f"no text has the field {name!r}; the fields are {known:.400}")
        values = value.tolist() if isinstance(value, np.ndarray) else value
        values = list(values) if isinstance(values, list | tuple | set | frozenset) else [values]
        found[name] = [each.item() if isinstance(each, np.generic) else each for each in values]
        for each in found[name]:
            if not isinstance(each, str | int | float | None):
                raise TypeError(
                    f"where: {name!r} must be a text, a number, True, False, None or a list of such, not {quoted(each)}"
                )
    return found
