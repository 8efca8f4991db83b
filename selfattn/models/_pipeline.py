"""What becomes of a text around an encoder: tokenizer, pooling, Dense, Normalize, prompts; sentence-transformers' files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from selfattn._extras import import_extra
from selfattn.files import read_json, to_safetensors
from selfattn.models._weights import read_weights
from selfattn.nn._arrays import Array
from selfattn.nn.linear import linear

# A pooling's mode by its name in old files; in new ones it is a value of "pooling_mode".
MODES = {
    "pooling_mode_cls_token": "cls", "pooling_mode_max_tokens": "max", "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}  # fmt: skip
SUPPORTED = ("cls", "max", "mean", "mean_sqrt_len_tokens", "lasttoken")
CORE = {"cls": "first", "mean": "mean", "mean_sqrt_len_tokens": "mean", "lasttoken": "last"}


@dataclass
class Dense:
    """A linear layer behind the pooling, and perhaps tanh."""

    weight: Array
    bias: Array | None
    tanh: bool

    def __call__(self, x: Array) -> Array:
        """Apply it to rows."""
        y = linear(x, self.weight, self.bias)
        return np.tanh(y) if self.tanh else y


@dataclass
class Pipeline:
    """The steps around an encoder, as a sentence-transformers folder has them.

    Attributes
    ----------
    modes : tuple of str
        Poolings, whose results stand side by side.
    steps : list of Dense or "normalize"
        What follows, in order.
    max_tokens : int or None
    lower : bool
        Texts are lowered first.
    prompts : dict of str to str
    default_prompt : str or None
        A name.
    include_prompt : bool
        Whether the tokens of a prompt take part in the pooling.
    """

    modes: tuple[str, ...] = ("mean",)
    steps: list[Any] = field(default_factory=list)
    max_tokens: int | None = None
    lower: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    include_prompt: bool = True

    @property
    def core_pooling(self) -> str | None:
        """The pooling that the core can do alone, or None."""
        return CORE.get(self.modes[0]) if len(self.modes) == 1 else None

    def finish(self, pooled: Array, lengths: Array, normalize: bool | None) -> Array:
        """Turn the rows of :attr:`core_pooling`, or of :meth:`pool`, into embeddings."""
        if self.modes == ("mean_sqrt_len_tokens",):
            pooled = pooled * np.sqrt(lengths.astype(pooled.dtype))[:, None]
        for step in self.steps:
            if step != "normalize":
                pooled = step(pooled)
            elif normalize is None:
                pooled = normalized(pooled)
        return normalized(pooled) if normalize else pooled

    def pool(self, rows: Array, cu_seqlens: Array, skip: int) -> Array:
        """Pool each sequence's rows from its `skip`-th on in all modes."""
        found = []
        for start, end in zip(cu_seqlens[:-1] + skip, cu_seqlens[1:], strict=True):
            x = rows[start:end]
            found.append(np.concatenate([_pooled(x, mode) for mode in self.modes]))
        return np.array(found, rows.dtype).reshape(len(found), len(self.modes) * rows.shape[1])


def _pooled(x: Array, mode: str) -> Array:
    if mode in ("cls", "lasttoken"):
        row: Array = x[0 if mode == "cls" else -1]
        return row
    if mode == "max":
        return np.asarray(x.max(axis=0))
    total = x.sum(axis=0, dtype=np.float64)
    return np.asarray(total / (len(x) if mode == "mean" else np.sqrt(len(x)))).astype(x.dtype)


def normalized(x: Array) -> Array:
    """Divide rows by their length; rows of zeros stay."""
    length = np.sqrt(np.square(x, dtype=np.float64).sum(axis=1, keepdims=True))
    return np.asarray(x / np.maximum(length, 1e-12)).astype(x.dtype)


# ------------------------------------------------------------------------------------------------------------ read


def find_modules(folder: Path) -> tuple[Path, list[tuple[str, Path]] | None]:
    """Return the folder of the transformer, and the other modules' kinds and folders; None without ``modules.json``."""
    if not (folder / "modules.json").is_file():
        return folder, None
    modules = read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(m, dict) and isinstance(m.get("type"), str) for m in modules):
        raise ValueError(f"{folder / 'modules.json'} must be a list of modules with a type")
    found = []
    for module in modules:
        path = folder / str(module.get("path", ""))
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{folder / 'modules.json'} names {module['path']!r}, which is not in that folder")
        found.append((module["type"].rpartition(".")[2], path))
    if not found or found[0][0] != "Transformer":
        raise ValueError(f"{folder / 'modules.json'} must begin with a Transformer, not {found[0][0] if found else 'nothing'}")
    return found[0][1], found[1:]


def read_pipeline(folder: Path, transformer: Path, modules: list[tuple[str, Path]] | None) -> Pipeline:
    """Read sentence-transformers' files; without ``modules.json`` the mean of the rows is taken, as there."""
    pipeline = Pipeline()
    own = _settings(transformer / "sentence_bert_config.json")
    pipeline.max_tokens = own.get("max_seq_length")
    pipeline.lower = bool(own.get("do_lower_case", False))
    tokens = _settings(transformer / "tokenizer_config.json").get("model_max_length")
    if pipeline.max_tokens is None and isinstance(tokens, int) and tokens < 2**31:
        pipeline.max_tokens = tokens
    prompts = _settings(folder / "config_sentence_transformers.json")
    pipeline.prompts = {name: text for name, text in (prompts.get("prompts") or {}).items() if isinstance(text, str)}
    pipeline.default_prompt = prompts.get("default_prompt_name")
    for kind, path in modules or []:
        if kind == "Pooling":
            pipeline.modes, pipeline.include_prompt = _read_pooling(path / "config.json")
        elif kind == "Normalize":
            pipeline.steps.append("normalize")
        elif kind == "Dense":
            pipeline.steps.append(_read_dense(path))
        elif kind != "Dropout":  # of training
            raise ValueError(f"{folder / 'modules.json'} has a module {kind}, which is not supported; Pooling, Dense and Normalize are")
    return pipeline


def _settings(path: Path) -> dict[str, Any]:
    found = read_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold names and values")
    return found


def _read_pooling(path: Path) -> tuple[tuple[str, ...], bool]:
    config = read_json(path)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = (named,)
    elif isinstance(named, list):
        modes = tuple(named)
    else:
        modes = tuple(mode for key, mode in MODES.items() if config.get(key))
    for mode in modes:
        if mode not in SUPPORTED:
            raise ValueError(f"{path}: pooling {mode!r} is not supported; {', '.join(SUPPORTED)} are")
    if not modes:
        raise ValueError(f"{path} chooses no pooling")
    return modes, bool(config.get("include_prompt", True))


def _read_dense(folder: Path) -> Dense:
    config = read_json(folder / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ("Identity", "Tanh"):
        raise ValueError(f"{folder / 'config.json'}: activation {activation} is not supported; Identity and Tanh are")
    arrays = read_weights(folder)
    weight, bias = arrays.get("linear.weight"), arrays.get("linear.bias")
    if weight is None or weight.shape != (config.get("out_features"), config.get("in_features")):
        raise ValueError(
            f"{folder}: linear.weight must have shape ({config.get('out_features')}, {config.get('in_features')}), not "
            f"{None if weight is None else weight.shape}"
        )
    return Dense(weight, bias, activation == "Tanh")


def read_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Read ``tokenizer.json``, without its padding and truncation, or None if there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizers = import_extra("tokenizers", "models")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer of Hugging Face's: {error}") from None
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(
            f"{path} has {tokenizer.get_vocab_size()} tokens, and the model {vocab_size}: they do not belong together"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# ------------------------------------------------------------------------------------------------------------ write


def pipeline_files(pipeline: Pipeline, width: int) -> dict[str, bytes]:
    """Return the files of a sentence-transformers folder beside the transformer's, by path in it."""
    package = "sentence_transformers.models."
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    files: dict[str, bytes] = {}
    out = width * len(pipeline.modes)
    for n, step in enumerate(pipeline.steps, 2):
        kind = "Normalize" if step == "normalize" else "Dense"
        modules.append((f"{n}_{kind}", kind))
        if kind == "Dense":
            activation = "torch.nn.modules.activation.Tanh" if step.tanh else "torch.nn.modules.linear.Identity"
            sizes = {"in_features": step.weight.shape[1], "out_features": step.weight.shape[0], "bias": step.bias is not None}
            files[f"{n}_Dense/config.json"] = _json(sizes | {"activation_function": activation})
            arrays = {"linear.weight": step.weight} | ({} if step.bias is None else {"linear.bias": step.bias})
            files[f"{n}_Dense/model.safetensors"] = to_safetensors(arrays)
        else:
            files[f"{n}_Normalize/.keep"] = b""
    pooling = {key: mode in pipeline.modes for key, mode in MODES.items()}
    pooling |= {"word_embedding_dimension": width, "include_prompt": pipeline.include_prompt}
    files["1_Pooling/config.json"] = _json(pooling)
    files["sentence_bert_config.json"] = _json({"max_seq_length": pipeline.max_tokens, "do_lower_case": pipeline.lower})
    files["config_sentence_transformers.json"] = _json(
        {"prompts": pipeline.prompts, "default_prompt_name": pipeline.default_prompt, "similarity_fn_name": "cosine"}
    )
    named = [{"idx": n, "name": str(n), "path": path, "type": package + kind} for n, (path, kind) in enumerate(modules)]
    files["modules.json"] = _json(named)
    del out
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def prompt_of(pipeline: Pipeline, prompt: str | None) -> str:
    """Return the text that goes before each sentence: a prompt by its name, or the text itself; None: the default."""
    prompts: Mapping[str, str] = pipeline.prompts
    if prompt is None:
        if pipeline.default_prompt is None:
            return ""
        if pipeline.default_prompt not in prompts:
            raise ValueError(f"the default prompt {pipeline.default_prompt!r} is not one of {sorted(prompts)}")
        return prompts[pipeline.default_prompt]
    return prompts.get(prompt, prompt)
