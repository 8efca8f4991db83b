"""Language models from GGUF files: llama.cpp's names and numbers turned into those of Transformers."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn._check import Array
from selfattn.engine.weights import Quants
from selfattn.models._gguf import GGUF
from selfattn.models._gguf_tokenizer import attach_tokenizer
from selfattn.models.gpt2 import TRANSPOSED, GPT2LMHeadModel
from selfattn.models.llama import LlamaForCausalLM

LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
GPT2_NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[Any, dict[str, str], str]] = {  # class, names, where the layers are
    "llama": (LlamaForCausalLM, LLAMA_NAMES, "model.layers."),
    "qwen2": (LlamaForCausalLM, LLAMA_NAMES, "model.layers."),
    "gpt2": (GPT2LMHeadModel, GPT2_NAMES, "transformer.h."),
}
FACTORS = "rope_freqs.weight"  # divide the frequencies of rotary positions
# What the architecture's entries may say that changes nothing here.
HARMLESS = {
    "tensor_data_layout", "vocab_size", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier", "attention.causal",
    "expert_count", "expert_used_count",
}  # fmt: skip


class Entries:
    """The entries of a file's header that begin with the name of the architecture; those that nobody reads are an error."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: Path) -> None:
        self.path, self.architecture = path, architecture
        start = architecture + "."
        self.values = {
            key.removeprefix(start): value for key, value in metadata.items() if key.startswith(start)
        }
        self.read = set(HARMLESS)

    def get(self, name: str, kind: type, default: Any = ...) -> Any:
        """Read an int of at least 1, a positive number, or a text."""
        self.read.add(name)
        value: Any = self.values.get(name, default)
        if value is ...:
            raise ValueError(f"{self.path} lacks the entry {self.architecture}.{name}")
        if value is default:
            return value
        if isinstance(value, list) and len(set(map(repr, value))) == 1:  # one for each layer
            value = value[0]
        if kind is float and type(value) is int:
            value = float(value)
        most = 2**31 - 1 if kind is int else sys.float_info.max
        good = kind in (value.__class__,) and (kind is str or 0 < value <= most)
        if not good:
            raise ValueError(
                f"{self.path}: {self.architecture}.{name} must be a positive {kind.__name__}, not {value!r:.80}"
            )
        return value

    def finish(self) -> None:
        """Refuse what nobody has read, unless it switches something off.

        Raises
        ------
        ValueError
            It might change what the model computes.
        """
        for name, value in self.values.items():
            if name not in self.read and value not in (None, False, 0, 0.0, "", "none"):
                raise ValueError(
                    f"{self.path}: the entry {self.architecture}.{name}={value!r:.80} is not understood here, and might change what "
                    "the model computes"
                )
        for name in ("expert_count", "expert_used_count"):
            if self.values.get(name, 0):
                raise ValueError(
                    f"{self.path}: mixtures of experts are not supported ({name} {self.values[name]!r:.80})"
                )
        if self.values.get("attention.causal", True) is not True:
            raise ValueError(f"{self.path}: attention that is not causal is not supported")


def load_gguf(path: Path, dtype: str | None) -> Any:
    """Load a language model from a GGUF file.

    Parameters
    ----------
    path : Path
    dtype : {"float32", "bfloat16", "int8"}, optional
        None: as it is stored, in blocks of a few bits, or float32.

    Raises
    ------
    ValueError
        The file is damaged, or has something that is not supported; the message names it.
    """
    file = GGUF(path)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise ValueError(
            f"{path} has the architecture {architecture!r:.80}; supported are {', '.join(ARCHITECTURES)}"
        )
    kind, names, layers = ARCHITECTURES[architecture]
    entries = Entries(file.metadata, architecture, path)
    config = _gpt2_config(entries, file) if architecture == "gpt2" else _llama_config(entries, file)
    entries.finish()
    renamed = {name: _renamed(name, names, layers) for name in file.tensors if name != FACTORS}
    as_stored = dtype is None and any(
        file.blocks(name) is not None for name in renamed if len(file.tensors[name].shape) == 2
    )
    arrays = {new: _tensor(file, old, as_stored) for old, new in renamed.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    permuted = (
        architecture == "llama"
    )  # rows of q and k stand as llama.cpp rotates them: pairs are neighbours
    if permuted and not as_stored:
        arrays = {name: _unpermuted(name, array, config) for name, array in arrays.items()}
    if architecture == "gpt2":
        arrays = {
            name: array.T if name.endswith(TRANSPOSED) and isinstance(array, np.ndarray) else array
            for name, array in arrays.items()
        }
    model = kind(config, arrays, where=str(path), dtype=dtype)
    model.interleaved = permuted and as_stored
    attach_tokenizer(model, file)
    return model


def _renamed(name: str, names: Mapping[str, str], layers: str) -> str:
    """Return Transformers' name of a tensor; one that is not known stays, and is an error later."""
    stem, _, end = name.rpartition(".")
    found = LAYER.fullmatch(stem)
    if found is None:
        return f"{names.get(stem, stem)}.{end}"
    return f"{layers}{int(found[1])}.{names.get(found[2], found[2])}.{end}"


def _tensor(file: GGUF, name: str, as_stored: bool) -> Any:
    """Return a tensor: as blocks if that is wanted of a matrix, else as float32."""
    if not as_stored or len(file.tensors[name].shape) != 2 or name.startswith("position_embd"):
        return file.array(name)
    blocks = file.blocks(name)
    if blocks is None:  # all matrices of a layer are of one kind to the core
        array = file.array(name)
        blocks = Quants(array.view(np.uint8), "F32", (array.shape[0], array.shape[1]))
    return blocks


def _unpermuted(name: str, array: Array, config: Mapping[str, Any]) -> Array:
    """Put the rows of q and k as Transformers has them: first the first elements of all pairs of a head, then the second."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or len(array) % (2 * config[heads]):
        return array
    pairs = array.reshape(config[heads], -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _llama_config(entries: Entries, file: GGUF) -> dict[str, Any]:
    heads, d = entries.get("attention.head_count", int), entries.get("embedding_length", int)
    longest = entries.get("context_length", int)
    width = entries.get("attention.key_length", int, d // heads)
    if entries.get("attention.value_length", int, width) != width:
        raise ValueError(f"{entries.path}: keys and values of different widths are not supported")
    if entries.get("rope.dimension_count", int, width) != width:
        raise ValueError(f"{entries.path}: rotary positions of a part of each head are not supported")
    if entries.get("attention.sliding_window", int, longest) < longest:
        raise ValueError(f"{entries.path}: sliding windows are not supported in GGUF files")
    config: dict[str, Any] = {
        "model_type": entries.architecture,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": d,
        "num_hidden_layers": entries.get("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.get("attention.head_count_kv", int, heads),
        "head_dim": width,
        "intermediate_size": entries.get("feed_forward_length", int),
        "max_position_embeddings": longest,
        "rms_norm_eps": float(np.float32(entries.get("attention.layer_norm_rms_epsilon", float)).astype(str)),
    }
    rope: dict[str, Any] = {"rope_theta": entries.get("rope.freq_base", float, 10000.0)}
    scaling = entries.get("rope.scaling.type", str, "none")
    factor = entries.get("rope.scaling.factor", float, None)
    before = entries.get("rope.scaling.original_context_length", int, None)
    attention = entries.get("rope.scaling.attn_factor", float, None)
    if scaling not in ("none", "linear", "yarn") or (attention is not None and attention != 1):
        raise ValueError(
            f"{entries.path}: rope.scaling.type {scaling!r} with attn_factor {attention} is not supported"
        )
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn" and before is not None:
        rope["original_max_position_embeddings"] = before
    if FACTORS in file.tensors:
        if scaling != "none":
            raise ValueError(
                f"{entries.path}: {FACTORS} beside rope.scaling.type {scaling!r} is not supported"
            )
        factors = file.array(FACTORS).reshape(-1).tolist()
        rope |= {
            "rope_type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.0,
            "original_max_position_embeddings": longest,
        }  # fmt: skip
    config["rope_parameters"] = rope
    if entries.architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _gpt2_config(entries: Entries, file: GGUF) -> dict[str, Any]:
    d = entries.get("embedding_length", int)
    return {
        "model_type": "gpt2",
        "vocab_size": _rows(file, "token_embd.weight"),
        "n_embd": d,
        "n_layer": entries.get("block_count", int),
        "n_head": entries.get("attention.head_count", int),
        "n_inner": entries.get("feed_forward_length", int, 4 * d),
        "n_positions": entries.get("context_length", int),
        "layer_norm_epsilon": entries.get("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_new",
    }


def _rows(file: GGUF, name: str) -> int:
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
        raise ValueError(f"{file.path} has no matrix {name}")
    return file.tensors[name].shape[0]
