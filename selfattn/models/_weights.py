"""The weights of pretrained models: safetensors files, mapped into memory and not copied where their layout allows it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn._check import Array, as_array
from selfattn._disk import read_json
from selfattn._extras import import_extra
from selfattn.engine.weights import (
    BITS,
    INT8,
    SCALE,
    good_bits,
    good_scale,
    groups_of,
    is_compact,
    to_float32,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8}


def read_weights(folder: Path, keep_bfloat16: bool = False) -> dict[str, Array]:
    """Return all arrays of floats and of int8 of a folder's ``model.safetensors``, or of its shards.

    16-bit numbers become float32, but bfloat16, if it is to be kept, its bits. All others are mapped: reading them brings in pages of the file, writing to them makes
    copies of pages, and the file stays as it is.

    Raises
    ------
    FileNotFoundError
        There are no weights, or only pickled ones.
    ValueError
        A file is cut off or damaged, or the shards do not fit their index.
    """
    if (folder / WEIGHTS).is_file():
        return _map(folder / WEIGHTS, keep_bfloat16)
    if (folder / INDEX).is_file():
        return _map_shards(folder, keep_bfloat16)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        raise FileNotFoundError(
            f"{folder} has no {WEIGHTS}, only {pickled[0]}, a pickle, which can run any code when it is loaded. Convert it where "
            "you trust it: transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)"
        )
    raise FileNotFoundError(f"{folder} has no {WEIGHTS}; expected a folder that save_pretrained wrote")


def _map_shards(folder: Path, keep_bfloat16: bool) -> dict[str, Array]:
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
        arrays |= {
            key: array for key, array in _map(folder / name, keep_bfloat16).items() if places.get(key) == name
        }
    missing = [key for key in places if key not in arrays and not key.endswith("position_ids")]
    if missing:
        raise ValueError(f"{folder / INDEX} names {missing[0]!r}, which {places[missing[0]]} does not hold")
    return arrays


def _map(path: Path, keep_bfloat16: bool) -> dict[str, Array]:
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
        try:
            array = flat.view(dtype).reshape(entry["shape"])
        except ValueError as error:  # no elements, but a shape that NumPy cannot count
            raise ValueError(f"{path}: {name} has shape {entry['shape']}: {error}") from None
        if entry["dtype"] == "F16":
            array = array.astype(np.float32)
        elif entry["dtype"] == "BF16" and not keep_bfloat16:
            array = to_float32(array, None)
        arrays[name] = array
    return arrays


def fit(
    arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], optional: set[str], ignored: tuple[str, ...],
    prefix: str, where: str,
) -> dict[str, Array]:  # fmt: skip
    """Return the arrays of these names and shapes, in that order, or say all that differs.

    Behind a matrix of int8 stand its scales, of its name and ``_scale``. All floats are of one dtype:
    float32, or if nothing is rounded and some are float64.

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
    shapes, named = dict(shapes), dict[str, Array]()
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name} must be an ndarray, not {type(array).__name__}")
        as_array(name, array)  # no masked one
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        suffix = SCALE if new.endswith(".weight" + SCALE) else ""
        new = new.removesuffix(suffix)
        if new not in shapes:
            new = new.removeprefix(prefix) if new.startswith(prefix) else prefix + new
        named[new + suffix if new in shapes else name] = (
            to_float32(array, None) if suffix and array.dtype == BITS else array
        )
    for name in [name for name in shapes if name in named and named[name].dtype == INT8]:
        shapes[name + SCALE] = (*shapes[name][:-1], groups_of(shapes[name][-1]))
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
        elif named[name].dtype == INT8 and len(shape) != 2:
            wrong.append(f"{name} is int8, which only matrices may be")
        elif name.endswith(SCALE) and not good_scale(named[name]):
            wrong.append(f"{name} must hold finite numbers, none negative")
        elif named[name].dtype == BITS and not good_bits(named[name]):
            wrong.append(f"{name} holds NaN or an infinity")
    if wrong:
        more = f"\n  and {len(wrong) - 20} more" if len(wrong) > 20 else ""
        raise ValueError(
            f"the weights of {where} do not fit its configuration:\n  " + "\n  ".join(wrong[:20]) + more
        )
    found = {name: named[name] for name in shapes if name in named}
    widest = np.dtype(np.float32)
    if not any(map(is_compact, found.values())):
        widest = np.result_type(widest, *(array.dtype for array in found.values()))
    return {
        name: np.require(array, array.dtype if is_compact(array) else widest, ["C", "A"])
        for name, array in found.items()
    }


def check_size(shapes: Mapping[str, tuple[int, ...]], most: int, where: str) -> None:
    """Refuse sizes that no machine has, before anything is drawn."""
    elements = sum(math.prod(shape) for shape in shapes.values())
    if elements > most:
        raise ValueError(f"{where} describes a model of {elements} parameters")
