"""What sentence-transformers does after the transformer: pooling, dense layers, normalising; and prompts.

Reads the files that its versions 2 to 6 write, in both spellings of their keys. A key that is not known and would
change an embedding is an error that names it. The files are kept as they were read, so that saving writes the same
ones again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from selfattn import nn
from selfattn.engine import SIMILARITIES, Array, disk
from selfattn_models._folder import Config, read_weights
from selfattn_models._tokenizer_class import TOKENIZER_CONFIG

MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"  # for every architecture; old versions have other names
OLD_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Arguments for Transformers, in old and new spelling.
ARGUMENTS = (
    "model_args",
    "tokenizer_args",
    "config_args",
    "model_kwargs",
    "processor_kwargs",
    "config_kwargs",
)
# In the order in which the old spelling concatenates several.
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
IN_CORE = {"mean": "mean", "cls": "first", "lasttoken": "last"}
MODES = ("mean", "cls", "max", "lasttoken")
ACTIVATIONS = ("Identity", "Tanh")
MODALITIES = [{"method": "forward", "method_output_name": name} for name in ("last_hidden_state", "logits")]
DENSE_WEIGHTS, DENSE_PICKLE = "model.safetensors", "pytorch_model.bin"


class Dense:
    """``activation(x @ weight.T + bias)``."""

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        self.linear = linear
        self.activation = activation

    def __call__(self, x: Array) -> Array:
        y: Array = self.linear(x)
        return np.tanh(y) if self.activation == "Tanh" else y


def normalized(x: Array) -> Array:
    """Scale rows to length 1; rows of zeros stay."""
    lengths = np.sqrt(np.square(x, dtype=np.float64).sum(-1, keepdims=True))
    y: Array = (x / np.maximum(lengths, 1e-12)).astype(x.dtype)
    return y


@dataclass
class Pipeline:
    """What is done to a text before the transformer, and to its rows after it."""

    modes: tuple[str, ...] = ("mean",)
    include_prompt: bool = True
    after: list[tuple[str, Dense | None]] = field(default_factory=list)  # paths; None normalises
    longest: int | None = None  # max_seq_length
    lowercase: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    truncate_dim: int | None = None
    similarity: str = "cosine"
    kept: dict[str, bytes] = field(default_factory=dict)  # small files, by their path in the folder

    @property
    def core_pooling(self) -> str | None:
        """The core's name of a pooling that it does; None of another one."""
        return IN_CORE.get(self.modes[0]) if len(self.modes) == 1 else None

    def width(self, d: int, truncate_dim: int | None = None) -> int:
        """Return the width of an embedding, for the width d of the transformer."""
        d *= len(self.modes)
        for _, dense in self.after:
            d = d if dense is None else dense.linear.out_features
        return min(d, truncate_dim or self.truncate_dim or d)

    def prompt(self, given: str | None) -> str:
        """Return the text to put before each sentence, for a prompt or the name of one."""
        if given is None:
            return "" if self.default_prompt_name is None else self.prompts[self.default_prompt_name]
        if not isinstance(given, str):
            raise TypeError(f"prompt must be a str, not {type(given).__name__}")
        return self.prompts.get(given, given)

    @property
    def document_prompt(self) -> str:
        """The text before each text that is searched, under the first of the names that sentence-transformers knows."""
        names = ("document", "passage", "corpus")
        return next((self.prompts[name] for name in names if name in self.prompts), "")

    def named(self, name: str) -> str:
        """Return what :meth:`prompt` takes for the prompt of a name.

        ``query`` and ``document`` are empty if the folder has none.
        """
        if name in self.prompts:
            return name
        if name in ("query", "document"):
            return ""
        raise ValueError(f"prompt_name {name!r} is none of the folder's prompts, {sorted(self.prompts)}")

    def keep_length(self, length: int) -> None:
        """Have a saved folder say how long a text may be.

        The file of sentence-transformers says it, or that of the tokenizer if there is none.
        """
        file, key = TOKENIZER_CONFIG, "model_max_length"
        if MODULES in self.kept:
            file, key = TRANSFORMER_CONFIG, "max_seq_length"
        self.kept[file] = disk.to_json(json.loads(self.kept.get(file, b"{}")) | {key: length})

    def finish(self, y: Array, normalize: bool | None, truncate_dim: int | None = None) -> Array:
        """Compute embeddings of pooled rows, with the folder's dense layers and normalising."""
        for _, dense in self.after:
            if dense is not None:
                y = dense(y)
            elif normalize is not False:
                y = normalized(y)
        y = y[:, : truncate_dim or self.truncate_dim]
        return normalized(y) if normalize else y


def pool(rows: Array, cu_seqlens: Array, modes: Sequence[str], skipped: Sequence[int] | None = None) -> Array:
    """Pool the rows of each sequence without the first rows, which are a prompt's; several modes are concatenated."""
    parts = []
    skipped = [0] * (len(cu_seqlens) - 1) if skipped is None else skipped
    for start, stop, skip in zip(cu_seqlens[:-1], cu_seqlens[1:], skipped, strict=True):
        own = rows[start + skip : stop]
        found = {"cls": own[0], "lasttoken": own[-1]}
        if "mean" in modes:
            found["mean"] = own.mean(axis=0, dtype=np.float64).astype(rows.dtype)
        if "max" in modes:
            found["max"] = own.max(axis=0)
        parts.append(np.concatenate([found[mode] for mode in modes]))
    return np.stack(parts)


# -------------------------------------------------------------------------------------------------------- reading


def read_pipeline(folder: Path, classifies: bool = False) -> tuple[Pipeline, Path]:
    """Read the files of sentence-transformers in a folder.

    Return also the transformer's folder: the same, or one inside.

    A folder without ``modules.json`` gets the mean, whatever the other files say, as in sentence-transformers. A
    model that classifies need not pool.
    """
    pipeline = Pipeline()
    modules = folder / MODULES
    if not os.path.lexists(modules):
        return pipeline, folder
    transformer = _read_modules(pipeline, folder, modules, classifies)
    for name in (TRANSFORMER_CONFIG, *OLD_TRANSFORMER_CONFIGS):
        if disk.read_object(transformer / name, required=False):
            _read_transformer(pipeline, _settings(pipeline, transformer, name, to=TRANSFORMER_CONFIG))
            break
    if os.path.lexists(folder / SENTENCE_CONFIG):
        _read_sentence_config(pipeline, _settings(pipeline, folder, SENTENCE_CONFIG))
    return pipeline, transformer


def transformer_folder(folder: Path) -> Path:
    """Return where the transformer of a folder is: in the folder itself, or where its ``modules.json`` says."""
    path = folder / MODULES
    return _inside(folder, path, _modules(path)[0]) if os.path.lexists(path) else folder


def pools(folder: Path) -> bool:
    """Tell whether a folder says how to pool; then it makes embeddings, even if the model could classify."""
    path = folder / MODULES
    return os.path.lexists(path) and any(_kind(module) == "Pooling" for module in _modules(path))


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = disk.read_json(path)
    if not isinstance(modules, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in modules
    ):
        raise ValueError(f"{path} must be a list of modules with type and path")
    if not modules or _kind(modules[0]) != "Transformer":
        raise ValueError(f"{path} must begin with a Transformer, not {[each['type'] for each in modules]}")
    for module in modules:
        config = Config(module, str(path), MODULES, MODULES)
        config.read |= {"path", "type"}
        config.finish()
    return modules


def _kind(module: dict[str, Any]) -> str:
    name: str = module["type"]
    own = name.startswith("sentence_transformers.")
    return name.rpartition(".")[2] if own else name


def _inside(folder: Path, path: Path, module: dict[str, Any]) -> Path:
    relative = PurePosixPath(module["path"])
    if relative.is_absolute() or ".." in relative.parts:
        raise ValueError(f"{path} names {module['path']!r}, which is not inside the folder")
    return folder / relative


def _read_modules(pipeline: Pipeline, folder: Path, path: Path, classifies: bool) -> Path:
    modules = _modules(path)
    pooled = False
    for module in modules[1:]:
        kind, place = _kind(module), _inside(folder, path, module)
        known = kind in ("Pooling", "Dense", "Normalize", "Dropout")
        if not known or (kind == "Pooling") == pooled:
            what = "is out of order" if known or kind == "Transformer" else "is not supported"
            expected = "expected are Transformer, Pooling, then Dense and Normalize"
            raise ValueError(f"{path}: {module['type']} {what}; {expected}")
        pooled = True
        name = str(PurePosixPath(module["path"]) / "config.json")
        dense = None
        if kind in ("Pooling", "Dense") or os.path.lexists(place / "config.json"):
            config = _settings(pipeline, folder, name, kind=kind)
            dense = _read_dense(place, config) if kind == "Dense" else None
            if kind == "Pooling":
                _read_pooling(pipeline, config)
            config.finish()
        if kind in ("Dense", "Normalize"):  # Dropout does nothing to embeddings
            pipeline.after.append((module["path"], dense))
    if not pooled and not classifies:
        raise ValueError(f"{path} has no Pooling")
    written = [{**module, "path": ""} if n == 0 else module for n, module in enumerate(modules)]
    pipeline.kept[MODULES] = disk.to_json(written)
    return _inside(folder, path, modules[0])


def _read_pooling(pipeline: Pipeline, config: Config) -> None:
    old = [mode for key, mode in OLD_MODES.items() if config.raw(key)]
    given = config.raw("pooling_mode")
    if given is None:
        given = old or ["mean"]
    modes = tuple(given) if isinstance(given, list) else (given,)
    for mode in modes or ("",):
        if mode not in MODES:
            raise config.error(f"pooling mode {mode!r} is not supported; supported are {', '.join(MODES)}")
    pipeline.modes, pipeline.include_prompt = modes, bool(config.raw("include_prompt", True))


def _read_dense(folder: Path, config: Config) -> Dense:
    activation = str(config.raw("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or kind not in ACTIVATIONS:
        known = f"{' and '.join(ACTIVATIONS)} of torch.nn"
        raise config.error(f"activation_function {activation!r} is not supported; supported are {known}")
    sizes = config.raw("out_features"), config.raw("in_features")
    expected = {"linear.weight": sizes} | ({"linear.bias": sizes[:1]} if config.raw("bias", True) else {})
    config.finish()
    if not os.path.lexists(folder / DENSE_WEIGHTS) and (folder / DENSE_PICKLE).exists():
        what = f"its weights as a pickle, {DENSE_PICKLE}, which can run code and is not read"
        way = "SentenceTransformer(folder).save(other) of sentence-transformers writes model.safetensors"
        raise ValueError(f"{folder} has {what}; {way}")
    weights = read_weights(folder)
    found = {name: array.shape for name, array in weights.items()}
    if found != expected:
        raise ValueError(f"{folder / DENSE_WEIGHTS} has {found}, and config.json says {expected}")
    linear = nn.Linear(found["linear.weight"][1], found["linear.weight"][0], "linear.bias" in found, rng=0)
    linear.load_state_dict({name[7:]: array.astype(np.float32) for name, array in weights.items()})
    return Dense(linear, kind)


def _read_transformer(pipeline: Pipeline, config: Config) -> None:
    pipeline.longest = config.size_or("max_seq_length", None)
    pipeline.lowercase = bool(config.raw("do_lower_case"))
    for kind, way in config.object("modality_config").items():
        if kind == "message" or (kind == "text" and way not in MODALITIES):
            raise config.error(f"modality_config of {kind}, {way!r:.80}, is not supported")
    for group in ARGUMENTS:
        config.inner(group, config.object(group), "arguments of sentence_bert_config.json").finish()
    config.finish()


def _read_sentence_config(pipeline: Pipeline, config: Config) -> None:
    prompts = config.object("prompts")
    if not all(isinstance(text, str | None) for text in prompts.values()):
        raise config.error(f"prompts must be texts by name, not {prompts!r:.80}")
    name = config.raw("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise config.error(f"default_prompt_name {name!r} is none of the prompts, {sorted(prompts)}")
    pipeline.truncate_dim = config.size_or("truncate_dim", None)
    pipeline.prompts = {key: text or "" for key, text in prompts.items()}
    pipeline.default_prompt_name = name
    pipeline.similarity = config.raw("similarity_fn_name") or "cosine"
    if pipeline.similarity not in SIMILARITIES:
        what = f"similarity_fn_name {pipeline.similarity!r} is not supported"
        raise config.error(f"{what}; supported are {', '.join(SIMILARITIES)}")
    config.finish()


def change_settings(pipeline: Pipeline, where: str, settings: dict[str, Any]) -> None:
    """Change what config_sentence_transformers.json says, also for the folder that the model is saved in."""
    values = json.loads(pipeline.kept.get(SENTENCE_CONFIG, b"{}")) | settings
    changed = replace(pipeline, kept=pipeline.kept | {SENTENCE_CONFIG: disk.to_json(values)})
    _read_sentence_config(changed, Config(values, where, SENTENCE_CONFIG, SENTENCE_CONFIG))
    vars(pipeline).update(vars(changed))


def _settings(pipeline: Pipeline, folder: Path, name: str, to: str | None = None, kind: str = "") -> Config:
    """Read a small JSON file, with the rows of its name or of the kind of a module, and keep it for saving."""
    values = disk.read_object(folder / name)
    pipeline.kept[to or name] = disk.to_json(values)
    return Config(values, str(folder / name), kind or to or name, name)


def pipeline_files(pipeline: Pipeline) -> dict[str, bytes]:
    """Return the files of a pipeline, by their path in a folder whose transformer is in itself."""
    found = dict(pipeline.kept)
    for path, dense in pipeline.after:
        if dense is not None:
            arrays = {f"linear.{name}": array for name, array in dense.linear.state_dict().items()}
            found[f"{path}/{DENSE_WEIGHTS}"] = disk.to_safetensors(arrays)
    return found
