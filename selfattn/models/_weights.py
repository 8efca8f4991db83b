"""The weights of pretrained models: safetensors files, mapped into memory and not copied where their layout allows it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn._extras import import_extra
from selfattn.files import read_json
from selfattn.nn._arrays import Array

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def read_weights(folder: Path) -> dict[str, Array]:
    """Return all floating-point arrays of a folder's ``model.safetensors``, or of its shards.

    16-bit numbers become float32. All others are mapped: reading them brings in pages of the file, writing to them makes
    copies of pages, and the file stays as it is.

    Raises
    ------
    FileNotFoundError
        There are no weights, or only pickled ones.
    ValueError
        A file is cut off or damaged, or the shards do not fit their index.
    """
    if (folder / WEIGHTS).is_file():
        return _map(folder / WEIGHTS)
    if (folder / INDEX).is_file():
        return _map_shards(folder)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}, only {pickled[0]}, a pickle, which can run any code when it is loaded. Convert it where "
            "you trust it: transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)"
        )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS}; expected a folder that save_pretrained wrote")


def _map_shards(folder: Path) -> dict[str, Array]:
    index = read_json(folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names to files")
    arrays: dict[str, Array] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of that folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} lacks {name}, which {INDEX} names")
        arrays |= {key: array for key, array in _map(folder / name).items() if places.get(key) == name}
    missing = [key for key in places if key not in arrays and not key.endswith("position_ids")]
    if missing:
        raise ValueError(f"{folder / INDEX} names {missing[0]!r}, which {places[missing[0]]} does not hold")
    return arrays


def _map(path: Path) -> dict[str, Array]:
    safetensors = import_extra("safetensors", "models")
    try:
        with safetensors.safe_open(path, "np") as file:  # checks the header: sizes, overlaps, holes
            names = set(file.keys())
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut off, damaged or no safetensors file: {error}") from None
    with path.open("rb") as opened:
        begin = int.from_bytes(opened.read(8), "little")
        header: dict[str, Any] = json.loads(opened.read(begin))
    begin += 8
    if path.stat().st_size == begin:
        return {}
    data = np.memmap(path, np.uint8, "c")
    arrays = {}
    for name in names:
        entry = header[name]
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:  # position_ids, for example
            continue
        start, end = (begin + offset for offset in entry["data_offsets"])
        flat = np.asarray(data[start:end])  # between two words, perhaps; `fit` copies that
        arrays[name] = _widened(flat.view(dtype), entry["dtype"]).reshape(entry["shape"])
    return arrays


def _widened(array: Array, kind: str) -> Array:
    if kind == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32) if kind == "F16" else array


def fit(
    arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], optional: set[str], ignored: tuple[str, ...],
    prefix: str, where: str,
) -> dict[str, Array]:  # fmt: skip
    """Return the arrays of these names and shapes, in that order, or say all that differs.

    Parameters
    ----------
    arrays : mapping
        What the file holds. A name may have the prefix, or lack it.
    shapes : mapping
    optional : set of str
        What need not be there.
    ignored : tuple of str
        What the names of arrays that are left out begin with: heads for other tasks.
    prefix : str
        Of the bare model within one with a head, such as ``"bert."``.
    where : str
        For the message.
    """
    named: dict[str, Array] = {}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be an ndarray, not {type(array).__name__}")
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        if new not in shapes:
            new = new.removeprefix(prefix) if new.startswith(prefix) else prefix + new
        named[new if new in shapes else name] = array
    wrong = [
        f"unexpected: {name} {array.shape}"
        for name, array in named.items()
        if name not in shapes and not name.removeprefix(prefix).startswith(ignored)
    ]
    for name, shape in shapes.items():
        if name not in named:
            wrong += [] if name in optional else [f"missing: {name} {shape}"]
        elif named[name].shape != shape:
            wrong.append(f"{name} has shape {named[name].shape}, the configuration says {shape}")
    if wrong:
        more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(
            f"the weights of {where} do not fit its configuration:\n  " + "\n  ".join(wrong[:20]) + more
        )
    found = {name: named[name] for name in shapes if name in named}
    widest = np.result_type(np.float32, *(array.dtype for array in found.values()))
    return {name: np.require(array, widest, ["C", "A"]) for name, array in found.items()}


def check_size(shapes: Mapping[str, tuple[int, ...]], most: int, where: str) -> None:
    """Refuse sizes that no machine has, before anything is drawn."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    if elements > most:
        raise ValueError(f"{where} describes a model of {elements} parameters")
