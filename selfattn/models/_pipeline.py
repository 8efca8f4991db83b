"""What sentence-transformers does after the transformer: pooling, dense layers, normalising; and prompts.

Reads the files that its versions 2 to 6 write, in both spellings of their keys. What is not known and would change an
embedding is an error that names it. The files are kept as they were read, so that saving writes the same ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from selfattn import _disk, files, nn
from selfattn._check import Array

MODULES, SENTENCE_CONFIG = "modules.json", "config_sentence_transformers.json"
TRANSFORMER_CONFIG = "sentence_bert_config.json"  # for every architecture; old versions have others
OLD_TRANSFORMER_CONFIGS = tuple(
    f"sentence_{name}_config.json" for name in ("roberta", "distilbert", "camembert", "xlm-roberta")
)
# Arguments for Transformers, in old and new spelling, and what among them changes rounding or memory at most.
ARGUMENTS = (
    "model_args",
    "tokenizer_args",
    "config_args",
    "model_kwargs",
    "processor_kwargs",
    "config_kwargs",
)
TRANSFORMER_KEYS = {
    "max_seq_length", "do_lower_case", "transformer_task", "modality_config", "module_output_name", *ARGUMENTS,
    "attn_implementation", "dtype", "torch_dtype", "add_pooling_layer", "trust_remote_code", "unpad_inputs",
}  # fmt: skip
# In the order in which the old spelling puts several side by side.
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
FEATURES = ("module_input_name", "module_output_name")  # of a module after the pooling
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
    """What happens to a text before the transformer, and to its rows after it."""

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

    def width(self, d: int) -> int:
        """Return the width of an embedding, where that of the transformer is d."""
        d *= len(self.modes)
        for _, dense in self.after:
            d = d if dense is None else dense.linear.out_features
        return d if self.truncate_dim is None else min(d, self.truncate_dim)

    def prompt(self, given: str | None) -> str:
        """Return what to put before each text, for a prompt or the name of one."""
        if given is None:
            return "" if self.default_prompt_name is None else self.prompts[self.default_prompt_name]
        if not isinstance(given, str):
            raise TypeError(f"prompt must be a str, not {type(given).__name__}")
        return self.prompts.get(given, given)

    def finish(self, y: Array, normalize: bool | None) -> Array:
        """Compute embeddings of pooled rows: dense layers and normalising as the folder has them."""
        for _, dense in self.after:
            if dense is not None:
                y = dense(y)
            elif normalize is not False:
                y = normalized(y)
        if self.truncate_dim is not None:
            y = y[:, : self.truncate_dim]
        return normalized(y) if normalize else y


def pool(rows: Array, cu_seqlens: Array, modes: Sequence[str], skipped: Sequence[int]) -> Array:
    """Pool the rows of each sequence but its first few, which belong to a prompt; several modes stand side by side."""
    parts = []
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
    """Read the files of sentence-transformers in a folder; return also the folder of the transformer: itself, or one below.

    A folder of Transformers alone gets the mean, as sentence-transformers does it. A model that classifies need not pool.

    Raises
    ------
    ValueError
        There is something that would change embeddings and is not known: modules, ways of pooling, activations; or a
        file that is damaged. The message names it.
    """
    pipeline = Pipeline()
    modules = folder / MODULES
    transformer = _read_modules(pipeline, folder, modules, classifies) if modules.exists() else folder
    for name in (TRANSFORMER_CONFIG, *OLD_TRANSFORMER_CONFIGS):
        if (transformer / name).exists():
            config = _read_object(pipeline, transformer, name, to=TRANSFORMER_CONFIG)
            _read_transformer(pipeline, transformer / name, config)
            break
    path = folder / SENTENCE_CONFIG
    if path.exists():
        _read_sentence_config(pipeline, path, _read_object(pipeline, folder, SENTENCE_CONFIG))
        if classifies and pipeline.default_prompt_name is not None:
            raise ValueError(
                f"{path}: default_prompt_name {pipeline.default_prompt_name!r} is not supported for classifiers"
            )
    return pipeline, transformer


def transformer_folder(folder: Path) -> Path:
    """Return where the transformer of a folder is: in itself, or where its ``modules.json`` says."""
    path = folder / MODULES
    if not path.exists():
        return folder
    return _inside(folder, path, _modules(path)[0])


def pools(folder: Path) -> bool:
    """Tell whether a folder says how to pool, and so makes embeddings whatever the model could do besides."""
    path = folder / MODULES
    return path.exists() and any(_kind(module) == "Pooling" for module in _modules(path))


def _modules(path: Path) -> list[dict[str, Any]]:
    modules = _disk.read_json(path)
    if not isinstance(modules, list) or not all(
        isinstance(each, dict) and isinstance(each.get("type"), str) and isinstance(each.get("path"), str)
        for each in modules
    ):
        raise ValueError(f"{path} must be a list of modules with type and path")
    if not modules or _kind(modules[0]) != "Transformer":
        raise ValueError(f"{path} must begin with a Transformer, not {[each['type'] for each in modules]}")
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
        name, where = str(PurePosixPath(module["path"]) / "config.json"), place / "config.json"
        if kind == "Pooling" and not pooled:
            _read_pooling(pipeline, where, _read_object(pipeline, folder, name))
            pooled = True
        elif kind == "Normalize" and pooled:
            if where.exists():
                _check_features(where, _read_object(pipeline, folder, name))
            pipeline.after.append((module["path"], None))
        elif kind == "Dense" and pooled:
            pipeline.after.append((module["path"], _read_dense(place, _read_object(pipeline, folder, name))))
        elif kind != "Dropout":  # which does nothing to embeddings
            raise ValueError(
                f"{path}: {module['type']} {'cannot stand here' if kind in ('Transformer', 'Pooling', 'Normalize', 'Dense') else 'is not supported'}; "
                "expected are Transformer, Pooling, and then Dense and Normalize"
            )
    if not pooled and not classifies:
        raise ValueError(f"{path} has no Pooling")
    written = [{**module, "path": ""} if n == 0 else module for n, module in enumerate(modules)]
    pipeline.kept[MODULES] = _disk.to_json(written)
    return _inside(folder, path, modules[0])


def _read_pooling(pipeline: Pipeline, path: Path, config: dict[str, Any]) -> None:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in OLD_MODES.items() if config.get(key)] or ["mean"]
    modes = tuple(given) if isinstance(given, list) else (given,)
    for mode in modes:
        if mode not in MODES:
            raise ValueError(f"{path}: pooling mode {mode!r} is not supported; there are {', '.join(MODES)}")
    known = {"pooling_mode", "include_prompt", "embedding_dimension", "word_embedding_dimension", *OLD_MODES}
    unknown = set(config) - known
    if unknown or not modes:
        raise ValueError(f"{path}: pooling has {sorted(unknown)}, which are not known, and modes {modes}")
    pipeline.modes, pipeline.include_prompt = modes, bool(config.get("include_prompt", True))


def _check_features(path: Path, config: dict[str, Any]) -> None:
    for key in FEATURES:
        if config.get(key) not in (None, "sentence_embedding"):
            raise ValueError(
                f"{path}: {key} {config[key]!r} is not supported; it can be 'sentence_embedding'"
            )


def _read_dense(folder: Path, config: dict[str, Any]) -> Dense:
    path = folder / "config.json"
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    kind = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or kind not in ACTIVATIONS:
        raise ValueError(
            f"{path}: activation_function {activation!r} is not supported; there are {', '.join(ACTIVATIONS)} of torch.nn"
        )
    _check_features(path, config)
    if config.get("use_residual"):
        raise ValueError(f"{path}: use_residual True is not supported")
    unknown = set(config) - {
        "in_features",
        "out_features",
        "bias",
        "activation_function",
        "use_residual",
        *FEATURES,
    }
    if unknown:
        raise ValueError(f"{path}: {sorted(unknown)} are not known")
    if not (folder / DENSE_WEIGHTS).exists() and (folder / DENSE_PICKLE).exists():
        raise ValueError(
            f"{folder} has its weights as a pickle, {DENSE_PICKLE}, which can run code and is not read; "
            "SentenceTransformer(folder).save(other) of sentence-transformers writes model.safetensors"
        )
    weights = files.load_arrays(folder / DENSE_WEIGHTS)
    sizes = config.get("out_features"), config.get("in_features")
    expected = {"linear.weight": sizes} | ({"linear.bias": sizes[:1]} if config.get("bias", True) else {})
    found = {name: array.shape for name, array in weights.items()}
    if found != expected:
        raise ValueError(f"{folder / DENSE_WEIGHTS} has {found}, and config.json says {expected}")
    linear = nn.Linear(found["linear.weight"][1], found["linear.weight"][0], "linear.bias" in found, rng=0)
    linear.load_state_dict(
        {name.partition(".")[2]: array.astype(np.float32) for name, array in weights.items()}
    )
    return Dense(linear, kind)


def _read_transformer(pipeline: Pipeline, path: Path, config: dict[str, Any]) -> None:
    longest = config.get("max_seq_length")
    if longest is not None and (type(longest) is not int or longest < 1):
        raise ValueError(f"{path}: max_seq_length must be a whole number from 1 on, not {longest!r}")
    task = config.get("transformer_task", "feature-extraction")
    if task not in ("feature-extraction", "sequence-classification"):
        raise ValueError(f"{path}: transformer_task {task!r} is not supported")
    output = config.get("module_output_name", "token_embeddings")
    if output not in ("token_embeddings", "scores"):
        raise ValueError(f"{path}: module_output_name {output!r} is not supported")
    text = (config.get("modality_config") or {}).get("text", {})
    if text.get("method", "forward") != "forward" or text.get("method_output_name", "logits") not in (
        "last_hidden_state", "logits",
    ):  # fmt: skip
        raise ValueError(f"{path}: modality_config {text!r} is not supported")
    given = {name: value for group in ARGUMENTS for name, value in (config.get(group) or {}).items()}
    for name, value in {**config, **given}.items():
        if name not in TRANSFORMER_KEYS and value:
            raise ValueError(f"{path}: {name} {value!r} is not known, and might change embeddings")
    pipeline.longest, pipeline.lowercase = longest, bool(config.get("do_lower_case", False))


def _read_sentence_config(pipeline: Pipeline, path: Path, config: dict[str, Any]) -> None:
    prompts = config.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise ValueError(f"{path}: prompts must be texts by name, not {prompts!r:.80}")
    name = config.get("default_prompt_name")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise ValueError(f"{path}: default_prompt_name {name!r} is none of the prompts, {sorted(prompts)}")
    dim = config.get("truncate_dim")
    if dim is not None and (type(dim) is not int or dim < 1):
        raise ValueError(f"{path}: truncate_dim must be a whole number from 1 on, not {dim!r}")
    pipeline.prompts = {key: text or "" for key, text in prompts.items()}
    pipeline.default_prompt_name, pipeline.truncate_dim = name, dim
    pipeline.similarity = config.get("similarity_fn_name") or "cosine"


def _read_object(pipeline: Pipeline, folder: Path, name: str, to: str | None = None) -> dict[str, Any]:
    """Read a small JSON file, and keep it for saving."""
    config = _disk.read_object(folder / name)
    pipeline.kept[to or name] = _disk.to_json(config)
    return config


def pipeline_files(pipeline: Pipeline) -> dict[str, bytes]:
    """Return the files of a pipeline, by their path in a folder whose transformer is in itself."""
    found = dict(pipeline.kept)
    for path, dense in pipeline.after:
        if dense is not None:
            arrays = {f"linear.{name}": array for name, array in dense.linear.state_dict().items()}
            found[f"{path}/{DENSE_WEIGHTS}"] = _disk.to_safetensors(arrays)
    return found
