"""The folder of a pretrained model: its configuration and its weights.

What its files may say is in `_known_settings`. Weights are safetensors files, mapped into memory and not copied where
their layout allows it. The tokenizer's files are read in `_tokenizer`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np

from selfattn.engine import Array, Entries, as_array, disk, warn, weights
from selfattn_models._known_settings import FolderWarning, rows

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}

# Rounded weights, as the library compressed-tensors describes them. The keys change nothing here: the tensors show
# which of them are rounded.
QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
}
BY_GROUPS = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": weights.GROUP}
QUANTIZED_WEIGHTS = BY_GROUPS | {"symmetric": True, "dynamic": False}
QUANTIZED_INPUTS = BY_GROUPS | {"symmetric": False, "dynamic": True}
QUANTIZATION_KEYS = {
    "config_groups",
    "ignore",
    "version",
    "global_compression_ratio",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
}

MOST_LAYERS = 10_000  # the most layers of a model that lists something for each
FULL, SLIDING = "full_attention", "sliding_attention"  # kinds of layers

ADAPTER = "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8}
MOST_NAMED = 20  # differences in a message


# ------------------------------------------------------------------------------------------------- the configuration


# Settings that are not known, by file, of the folder that is being read.
_unknown: ContextVar[dict[str, set[str]] | None] = ContextVar("unknown settings", default=None)


@contextmanager
def one_warning(where: str) -> Iterator[None]:
    """Collect the settings that are not known, and warn of them at the end.

    Within another such block, the outer one warns.
    """
    if _unknown.get() is not None:
        yield
        return
    found: dict[str, set[str]] = {}
    token = _unknown.set(found)
    try:
        yield
    finally:
        _unknown.reset(token)
    if found:
        lists = {file: ", ".join(sorted(keys)) for file, keys in sorted(found.items())}
        named = "; ".join(x if where.endswith(file) else f"{file}: {x}" for file, x in lists.items())
        what = "settings that are not known here change nothing, and may change results elsewhere"
        warn(FolderWarning(f"{where}: {what}: {named}"))


class Config(Entries):
    """Settings of one file: the configuration of a model, or another one.

    ``known`` names the rows of :data:`_known_settings.TABLE` that say which other keys change nothing or are refused;
    ``file`` and ``before``, which comes before each key, name a setting that is not known.
    """

    off: Collection[Any] = (None,)

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "the configuration",
        known: str = "",
        file: str = "config.json",
        before: str = "",
    ) -> None:
        super().__init__(values, where)
        self.rows, self.file, self.before = rows(known), file, before
        for alias in self.rows.aliases.keys() & self.values.keys():
            name, value = self.rows.aliases[alias], self.values.pop(alias)
            if self.values.setdefault(name, value) != value:
                what = f"another name of {name}, which is {self.values[name]!r:.80}"
                raise self.error(f"{alias}={value!r:.80} is {what}")

    def inner(self, name: str, values: Mapping[str, Any], known: str = "") -> Config:
        """Return the settings of an object within."""
        return Config(values, f"{self.where}: {name}", known, self.file, f"{self.before}{name}.")

    def finish(self) -> None:
        """Refuse the keys that are refused, unless they are switched off, and collect those that are not known."""
        for name, value in self.values.items():
            if name in self.read or value in self.off:
                continue
            refused, known = self.rows.refused, self.rows.without_effect(name)
            if name in refused or ("*" in refused and not known):
                off = refused.get(name, refused.get("*"))
                off = off if isinstance(off, tuple) else (off,)
                if value not in off:
                    only = "a model without it" if off == (None,) else " or ".join(map(repr, off))
                    raise self.error(f"{name}={value!r:.80} is not supported; only {only} is")
            elif not known:
                with one_warning(self.where):
                    _unknown.get().setdefault(self.file, set()).add(self.before + name)  # type: ignore[union-attr]

    def activation(self, name: str, default: str = "gelu") -> Any:
        """Read the name of an activation."""
        value = self._get(name, default)
        if not isinstance(value, str) or value not in ACTIVATIONS:
            raise self.error(f"{name} must be one of {', '.join(ACTIVATIONS)}, not {value!r}")
        return ACTIVATIONS[value]

    def size_or(self, name: str, otherwise: Any, default: Any = None) -> Any:
        """Read an int, or another value in place of null."""
        return otherwise if self._get(name, default) is None else self.size(name, default)

    def object(self, name: str) -> dict[str, Any]:
        """Read an object, which may be missing."""
        value = self._get(name, None)
        if not isinstance(value, dict | None):
            raise self.error(f"{name} must be an object, not {value!r:.80}")
        return value or {}

    def check_multiple(self, name: str, size: int, of: str, divisor: int) -> None:
        """Refuse a size that is not a multiple of another one."""
        if size % divisor:
            raise self.error(f"{name} {size} must be a multiple of {of} {divisor}")


def read_settings(path: Path) -> Config:
    """Read a small JSON file of a folder, whose rows are those of its name; without the file it is empty."""
    return Config(disk.read_object(path, required=False), str(path), path.name, path.name)


def read_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json``."""
    path = folder / "config.json"
    adapter = disk.read_object(folder / ADAPTER, required=False)
    if adapter:
        base = f"{adapter.get('peft_type')} for {adapter.get('base_model_name_or_path')!r}"
        merge = "peft's AutoPeftModel.from_pretrained(folder).merge_and_unload().save_pretrained(other)"
        raise ValueError(f"{folder} holds an adapter, {base}, and not a model; merge them with {merge}")
    if not os.path.lexists(path):
        ways = [f"to load {file.name}, give the path of that file" for file in sorted(folder.glob("*.gguf"))]
        expected = "expected a folder that save_pretrained or sentence-transformers wrote"
        raise FileNotFoundError(f"{folder} has no config.json; {[*ways, expected][0]}")
    config = disk.read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path} does not describe a model: it has no model_type")
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"{path}: architectures must be a list of names, not {names!r}")
    return config


def quantization_config(tables: list[str], whole: list[str]) -> dict[str, Any]:
    """Describe int8 weights as compressed-tensors does: those of tables, and of all linear layers except ``whole``.

    A weight has a scale for each group of a row. The input of a linear layer is rounded to 8 bits, with a minimum and
    a step for each group of a token; rows of tables are not rounded.
    """
    linear = {"targets": ["Linear"], "weights": QUANTIZED_WEIGHTS, "input_activations": QUANTIZED_INPUTS}
    groups: dict[str, Any] = {"group_0": linear}
    if tables:
        groups["group_1"] = {"targets": tables, "weights": QUANTIZED_WEIGHTS, "input_activations": None}
    return QUANTIZATION | {"config_groups": groups, "ignore": whole}


def check_quantization(config: Config) -> None:
    """Refuse weights that are rounded in another way than :func:`quantization_config` says."""
    found = config.raw("quantization_config")
    if found is None:
        return
    where = f"{config.where}: quantization_config"
    method = found.get("quant_method") if isinstance(found, dict) else QUANTIZATION["quant_method"]
    if method != QUANTIZATION["quant_method"]:
        other = "are not supported; take the model in 16 or 32 bits, or a GGUF file of it"
        raise ValueError(f"{where}: weights that {method!r:.80} rounded (quant_method) {other}")
    _check(found, QUANTIZATION, where)
    groups = found.get("config_groups")
    _check(groups, {}, where + ".config_groups", groups)
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        _check(group, {}, at, ("targets", "weights", "input_activations", "format"))
        _check(group.get("weights"), QUANTIZED_WEIGHTS, at + ".weights")
        if group.get("input_activations") is not None or "Linear" in (group.get("targets") or ()):
            _check(group.get("input_activations"), QUANTIZED_INPUTS, at + ".input_activations")


def _check(
    found: Any, supported: Mapping[str, Any], where: str, known: Collection[str] = QUANTIZATION_KEYS
) -> None:
    """Refuse values other than these, and unknown keys, unless they switch something off."""
    if not isinstance(found, dict):
        raise ValueError(f"{where} must be an object, not {found!r}")
    for name, value in (dict.fromkeys(supported) | found).items():
        if name in supported and value != supported[name]:
            raise ValueError(f"{where}.{name}={value!r} is not supported; only {supported[name]!r} is")
        if name not in supported and name not in known and value not in (None, False, {}, []):
            raise ValueError(f"{where}.{name}={value!r} is not understood here")


# ------------------------------------------------------------------------------------------------------- the weights


def read_weights(folder: Path, keep_bfloat16: bool = False) -> dict[str, Array]:
    """Return all arrays of floats and of int8 of a folder's ``model.safetensors``, or of its shards.

    16-bit numbers become float32; bfloat16, if it is to be kept, stays as its bits. All other arrays are mapped:
    reading them loads pages of the file, writing to them copies pages, and the file stays as it is.
    """
    if os.path.lexists(folder / WEIGHTS):
        return _map(folder / WEIGHTS, keep_bfloat16)
    if os.path.lexists(folder / INDEX):
        return _map_shards(folder, keep_bfloat16)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    if pickled:
        what = f"{pickled[0]}, a pickle, which can run any code when it is loaded"
        way = "transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)"
        raise FileNotFoundError(f"{folder} has no {WEIGHTS}, only {what}. If you trust it, convert it: {way}")
    parts = [f"it has {path.name}, but no {INDEX}" for path in sorted(folder.glob("*.safetensors"))]
    expected = [*parts, "expected a folder that save_pretrained wrote"][0]
    raise FileNotFoundError(f"{folder} has no {WEIGHTS}; {expected}")


def _map_shards(folder: Path, keep_bfloat16: bool) -> dict[str, Array]:
    index = disk.read_json(folder / INDEX)
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from names to files")
    arrays: dict[str, Array] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of that folder")
        if not os.path.lexists(folder / name):
            raise FileNotFoundError(f"{folder} lacks {name}, which {INDEX} names")
        found = _map(folder / name, keep_bfloat16)
        arrays |= {key: array for key, array in found.items() if places.get(key) == name}
    missing = [key for key in places if key not in arrays and not key.endswith("position_ids")]
    if missing:
        raise ValueError(f"{folder / INDEX} names {missing[0]!r}, which {places[missing[0]]} does not hold")
    return arrays


def _map(path: Path, keep_bfloat16: bool) -> dict[str, Array]:
    header, begin = disk.safetensors_header(path, None)
    if path.stat().st_size == begin:
        return {}
    data = disk.mapped(path)
    arrays = {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = DTYPES.get(entry["dtype"])
        if entry["dtype"].startswith("F") and dtype is None:
            small = "floats of 8 bits or fewer, which are not supported; take the model in 16 or 32 bits"
            raise ValueError(f"{path}: {name} is stored in {entry['dtype']}, {small}")
        if dtype is None and (
            name.endswith(".weight") or (name.endswith(".bias") and len(entry["shape"]) == 1)
        ):
            such = "weights are floats of 16 to 64 bits, or int8 with scales"
            raise ValueError(f"{path}: {name} is stored in {entry['dtype']}; {such}")
        if dtype is None:  # position_ids, or the causal mask of GPT-2
            continue
        start, end = (begin + offset for offset in entry["data_offsets"])
        flat = np.asarray(data[start:end])  # if it is not aligned, `fit` copies it
        try:
            array = flat.view(dtype).reshape(entry["shape"])
        except ValueError as error:  # no elements, but a shape that NumPy cannot count
            raise ValueError(f"{path}: {name} has shape {entry['shape']}: {error}") from None
        with disk.fitting(path):
            if entry["dtype"] == "F16":
                array = array.astype(np.float32)
            elif entry["dtype"] == "BF16" and not keep_bfloat16:
                array = weights.to_float32(array, None)
        arrays[name] = array
    return arrays


def fit(
    arrays: Mapping[str, Array],
    shapes: Mapping[str, tuple[int, ...]],
    optional: set[str],
    ignored: tuple[str, ...],
    prefix: str,
    where: str,
) -> dict[str, Array]:
    """Return the arrays of these names and shapes, in that order; a ValueError lists all that differs.

    The scales of an int8 matrix follow it, under its name and ``_scale``. All floats have one dtype: float32, or
    float64 where some are and nothing is rounded. Those that are optional may be missing. Names may have or lack the
    prefix of the bare model within one with a head, such as ``"bert."``; arrays whose names begin with one of
    ``ignored``, heads for other tasks, are left out.
    """
    shapes, named = dict(shapes), dict[str, Array]()
    for name, given in arrays.items():
        if not hasattr(given, "__dlpack__"):
            raise TypeError(f"{name} must be an ndarray, not {type(given).__name__}")
        array = as_array(name, given)
        new = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        suffix = weights.SCALE if new.endswith(".weight" + weights.SCALE) else ""
        new = new.removesuffix(suffix)
        if new not in shapes:
            new = new.removeprefix(prefix) if new.startswith(prefix) else prefix + new
        widened = weights.to_float32(array, None) if suffix and array.dtype == weights.BITS else array
        named[new + suffix if new in shapes else name] = widened
    for name in [name for name in shapes if name in named and named[name].dtype == weights.INT8]:
        shapes[name + weights.SCALE] = (*shapes[name][:-1], weights.groups_of(shapes[name][-1]))
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
        elif named[name].dtype == weights.INT8 and len(shape) != 2:
            wrong.append(f"{name} is int8, which only matrices may be")
        elif name.endswith(weights.SCALE) and not weights.good_scale(named[name]):
            wrong.append(f"{name} must hold finite numbers, none negative")
        elif named[name].dtype == weights.BITS and not weights.good_bits(named[name]):
            wrong.append(f"{name} holds NaN or an infinity")
    if wrong:
        more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
        lines = "\n  ".join(wrong[:MOST_NAMED] + more)
        raise ValueError(f"the weights of {where} do not fit its configuration:\n  {lines}")
    found = {name: named[name] for name in shapes if name in named}
    widest = np.dtype(np.float32)
    if not any(map(weights.is_compact, found.values())):
        widest = np.result_type(widest, *(array.dtype for array in found.values()))
    return {
        name: np.require(array, array.dtype if weights.is_compact(array) else widest, ["C", "A"])
        for name, array in found.items()
    }
