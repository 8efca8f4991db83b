"""Encoders of texts, as search and the doors to other libraries take them; and columns of texts."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import nn
from selfattn.engine import if_missing, quoted
from selfattn_models._pipeline import change_settings
from selfattn_models._text_encoder import TextEncoder

READ = (".json", ".safetensors", ".model")  # endings of the files that make a model


def load(folder: str | os.PathLike[str], dtype: str | None = None) -> Any:
    """Load a model. The files of all families are imported here, as a model that is given needs none."""
    from selfattn_models import loading

    return loading.load(folder, dtype)


def as_encoder(given: Any) -> Any:
    """Return an encoder of texts, given as a folder or as what ``models.load`` returned."""
    model = load(given) if isinstance(given, str | os.PathLike) else given
    if not isinstance(model, TextEncoder | nn.EmbeddingModel):
        raise TypeError(f"{given} is a {type(model).__name__}, which makes no embeddings of texts")
    return model


def with_settings(given: Any, where: str, prompts: Mapping[str, str] | None, **settings: Any) -> TextEncoder:
    """Return an encoder with settings of its own, and the same weights; ``prompts`` are added to those that it has.

    A setting that is None stays as it is; ``where`` is what an error names.
    """
    model = as_encoder(given)
    if not isinstance(model, TextEncoder):
        raise TypeError(f"{given} is selfattn's EmbeddingModel, which has no settings; models.load loads it")
    model = copy.copy(model)
    model.pipeline = copy.copy(model.pipeline)
    settings["prompts"] = model.pipeline.prompts | dict(prompts or {})
    change_settings(model.pipeline, where, {name: x for name, x in settings.items() if x is not None})
    return model


def encoder(folder: str | os.PathLike[str], dtype: str | None = None) -> Any:
    """Return the model of a folder; threads and callers of a process share it, until one of its files changes."""
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"model must be a folder, which each process loads, not a {type(folder).__name__}")
    folder = Path(folder).absolute()
    return _loaded(folder, dtype, state_of(folder))


def _files(folder: Path) -> list[Path]:
    every = sorted(path for path in folder.rglob("*") if path.suffix in READ and path.is_file())
    return [path for path in every if not any(part[0] == "." for part in path.relative_to(folder).parts)]


def state_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the names, sizes and times of the files that make a model."""
    stats = [(str(path.relative_to(folder)), path.stat()) for path in _files(folder)]
    return tuple((name, each.st_size, each.st_mtime_ns) for name, each in stats)


def digest_of(folder: Path) -> str:
    """Return a digest of the files that make a model, wherever they are."""
    return _digest(folder, state_of(folder))


@functools.lru_cache(maxsize=4)
def _digest(folder: Path, state: tuple[Any, ...]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for path in _files(folder):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, functools.partial(hashlib.blake2b, digest_size=16)).digest()
        total.update(os.fsencode(path.relative_to(folder)) + b"\0" + content)
    return total.hexdigest()


@functools.lru_cache(maxsize=4)
def _loaded(folder: Path, dtype: str | None, state: tuple[Any, ...]) -> Any:
    """Load a model; ``state`` is that of its files."""
    return as_encoder(load(folder, dtype))


def column(X: Any, one: str = "text", many: str = "texts") -> list[str]:
    """Return texts as a list: of a list, a one-dimensional array, a Series, or one column."""
    # Sets have no order, and iterators are read once.
    if isinstance(X, str | bytes | Mapping) or not hasattr(X, "__getitem__"):
        raise ValueError(f"{many} must be a list or a column of texts, not {quoted(X)}")
    given = X.to_numpy() if hasattr(X, "to_numpy") else X if isinstance(X, np.ndarray) else list(X)
    array = np.asarray(given, dtype=object)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(
            f"{many} must be one column, not of shape {array.shape}; a ColumnTransformer selects one"
        )
    for n, text in enumerate(array):
        if not isinstance(text, str):
            raise ValueError(f"{one} {n} is {quoted(text)}, not a str{if_missing(text)}")
    return array.tolist()  # type: ignore[no-any-return]
