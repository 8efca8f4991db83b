"""The model of an index: what embeds its texts and its queries, and how it is known again."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import nn
from selfattn.engine import SIMILARITIES, Array, as_array, quoted, unit_rows
from selfattn_models._encoders import as_encoder, digest_of, encoder, state_of, with_settings
from selfattn_models._pretrained import Pretrained
from selfattn_models._text_encoder import TextEncoder
from selfattn_models.search._store import DATABASE, Reader, Snapshot

NEAR = 0.01  # how far a text's embedding may be from the one that is stored, relative to its length
GIVE = "Index.open(path, model=…) takes it from another place, and so does --model"


class Model:
    """An encoder of texts: one that ``models.load`` returns, or any object with ``encode``, or a function.

    It has the methods and attributes of what was given; ``encode_document`` and ``encode_query`` always exist.
    """

    def __init__(self, given: Any, name: str | None = None) -> None:
        inner = getattr(given, "model", None)  # of interop's class
        given = inner if isinstance(inner, TextEncoder) else given
        self.given = given
        self.name = name or getattr(given, "__qualname__", type(given).__qualname__)
        self._pipeline = given.pipeline if isinstance(given, TextEncoder) else None
        named = self._pipeline.similarity if self._pipeline else getattr(given, "similarity_fn_name", None)
        self.similarity: str = named if named in SIMILARITIES else "cosine"
        self._document, self._query = (_method(given, f"encode_{kind}") for kind in ("document", "query"))

    @property
    def prompt(self) -> str:
        """The text that is put before each document."""
        return self._pipeline.document_prompt if self._pipeline else ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "given":
            raise AttributeError(name)
        return getattr(self.given, name)

    def encode_document(self, texts: Sequence[str]) -> Array:
        """Compute embeddings of texts that are searched, (n, d) in float32."""
        return self._rows(self._document, texts)

    def encode_query(self, texts: Sequence[str]) -> Array:
        """Compute embeddings of queries, (n, d) in float32."""
        return self._rows(self._query, texts)

    def _rows(self, function: Callable[[list[str]], Any], texts: Sequence[str]) -> Array:
        return checked_rows(f"{self.name} must return", function(list(texts)), texts)

    def rows_for(self, now: Snapshot, rows: Array) -> Array:
        """Return embeddings as an index holds them; an error if it has others of another width."""
        return as_stored(f"{self.name} makes", now, rows)

    def check(self, reader: Reader) -> None:
        """Refuse a model that makes another embedding of some text than the one that an index holds."""
        some = "INDEXED BY hashes WHERE hash > x'' AND id IS NOT NULL LIMIT 1"  # not one whose embedding was given
        for (row,) in reader.db.execute(f"SELECT row FROM texts {some}"):
            reader.now.check("vectors", np.array([row]))
            text, stored = reader.passage(row), reader.now.vectors[row]
            made = self.rows_for(reader.now, self.encode_document([text]))[0]
            if np.linalg.norm(made - stored) > NEAR * max(float(np.linalg.norm(stored)), 1e-12):
                what = f"than the one that made {reader.folder}: it embeds {quoted(text)} otherwise"
                raise ValueError(f"{self.name} is another model {what}")


def checked_rows(what: str, given: Any, texts: Any) -> Array:
    """Return embeddings of some texts in float32; an error if they are none."""
    found = as_array("embeddings", given)
    if found.ndim != 2 or len(found) != len(texts) or not found.shape[1] or found.dtype.kind != "f":
        kind = f"{found.dtype} of shape {found.shape}"
        raise ValueError(f"{what} {len(texts)} rows of floats, not {kind}")
    with np.errstate(over="ignore"):
        rows = np.ascontiguousarray(found, np.float32)
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise ValueError(
            f"{what} finite embeddings; it is not finite, of {quoted(texts[int(np.argmin(finite))])}"
        )
    return rows


def as_stored(what: str, now: Snapshot, rows: Array) -> Array:
    """Return embeddings as an index holds them; an error if it has others of another width."""
    if now.width and rows.shape[1] != now.width:
        raise ValueError(f"{what} embeddings of width {rows.shape[1]}; the index has {now.width}")
    return normalized(rows, now.metric)


def normalized(rows: Array, metric: str) -> Array:
    """Return embeddings as an index holds them: for the cosine of length 1, in float32."""
    return np.ascontiguousarray(unit_rows(rows) if metric == "cosine" else rows, np.float32)


def _method(given: Any, name: str) -> Callable[[list[str]], Any]:
    """Return a method, or ``encode``, or a function itself."""
    if not callable(method := getattr(given, name, getattr(given, "encode", given))):
        what = "a folder, a model of models.load, or a function of a list of texts"
        raise TypeError(f"model must be {what}, not {quoted(given)}")
    return method  # type: ignore[no-any-return]


def model_of(given: Any, place: Path) -> tuple[Model, dict[str, Any]]:
    """Return a model, and what the index in a folder says of it."""
    if isinstance(given, str | os.PathLike):
        folder = Path(given).absolute()
        return Model(encoder(folder), str(folder)), of_folder(folder, place)
    model = Model(as_encoder(given) if isinstance(given, Pretrained | nn.EmbeddingModel) else given)
    source: Path | None = getattr(model.given, "_folder", None)
    if isinstance(model.given, TextEncoder) and source is not None and source.is_dir():
        pipeline = model.given.pipeline
        own: dict[str, Any] = {"dtype": model.given.dtype, "prompts": dict(pipeline.prompts)}
        own |= {"truncate_dim": pipeline.truncate_dim}
        if model.given.tokenizer is not None:
            own["max_seq_length"] = model.given.max_seq_length
        return model, of_folder(source.absolute(), place) | own
    return model, {"name": model.name, "folder": None}


def of_folder(folder: Path, place: Path) -> dict[str, Any]:
    """Return what tells whether a model's folder is the same: where it is, and its files' sizes, times and digest."""
    return _places(folder, place) | {"state": list(map(list, state_of(folder))), "digest": digest_of(folder)}


def _places(folder: Path, place: Path) -> dict[str, Any]:
    return {"name": str(folder), "folder": str(folder), "relative": os.path.relpath(folder, place)}


def model_of_index(place: Path, entry: Any, given: Any) -> tuple[Callable[[], Model], dict[str, Any]]:
    """Return what loads the model of an index that is opened, and what the index will say of it.

    An error if the folder is not there, or is another one; ``given`` is a folder or a model in its place.
    """
    where = place / DATABASE
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: model must be an object")
    made, near, dtype, prompts, *sizes = (
        entry.get(name)
        for name in ("folder", "relative", "dtype", "prompts", "truncate_dim", "max_seq_length")
    )
    if (
        not isinstance(made, str | None)
        or not isinstance(near, str | None)
        or not isinstance(prompts, dict | None)
    ):
        raise ValueError(f"{where}: the model's folders must be texts, and its prompts an object")
    if given is not None and not isinstance(given, str | os.PathLike):
        model, changed = model_of(given, place)
        return lambda: model, changed if changed["folder"] else dict(entry)
    if given is None and made is None:
        name = entry.get("name")
        raise ValueError(f"{name} made this index, and is not a folder: Index.open(path, model=…) takes it")
    given_or_made = [made, place / near if near else made] if given is None else [given]
    folders = [Path(os.path.abspath(each)) for each in given_or_made if each is not None]
    folder = next((each for each in folders if each.is_dir()), folders[0])
    if not folder.is_dir():
        what = f"the model that made this index has moved; {GIVE}" if given is None else "not a folder"
        raise FileNotFoundError(errno.ENOENT, what, str(folder))
    entry = entry | _places(folder, place)
    if list(map(list, state_of(folder))) != entry.get("state"):
        now = of_folder(folder, place)
        if made is not None and now["digest"] != entry.get("digest"):
            what = f"has changed since it made this index; {GIVE}"
            what = what if given is None else f"is another model than the one that made this index, {made}"
            raise ValueError(f"{folder} {what}")
        entry = entry | now

    def load() -> Model:
        loaded = encoder(folder, dtype)
        if prompts or any(sizes):
            loaded = with_settings(loaded, str(where), prompts, truncate_dim=sizes[0])
            if sizes[1] and sizes[1] != loaded.max_seq_length:
                loaded.tokenizer = copy.deepcopy(loaded.tokenizer)  # others have it too
                loaded.max_seq_length = sizes[1]
        return Model(loaded, str(folder))

    return load, entry
