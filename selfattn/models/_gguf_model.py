"""Language models from GGUF files: llama.cpp's names and numbers turned into those of Transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn._check import Array, Entries
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
    "tensor_data_layout", "vocab_size", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier",
    "expert_count", "expert_used_count",
}  # fmt: skip


class GGUFEntries(Entries):
    """The entries of a file's header that begin with the name of its architecture."""

    harmless = HARMLESS
    off = (*Entries.off, "", "none")

    def __init__(self, metadata: Mapping[str, Any], architecture: str, path: Path) -> None:
        own = architecture + "."
        values = {key.removeprefix(own): value for key, value in metadata.items() if key.startswith(own)}
        super().__init__(values, f"{path}: {architecture}")
        self.architecture = architecture

    def _get(self, name: str, default: Any) -> Any:
        value = super()._get(name, default)
        one = isinstance(value, list) and len(set(map(repr, value))) == 1  # one for each layer, all the same
        return value[0] if one else value

    def finish(self) -> None:
        """Refuse mixtures of experts, attention that is not causal, and what nobody has read."""
        for name in ("expert_count", "expert_used_count"):
            if self.values.get(name, 0):
                raise ValueError(
                    f"{self.where}: mixtures of experts are not supported ({name} {self.values[name]!r:.80})"
                )
        self.only("attention.causal", True)
        super().finish()


def load_gguf(path: Path, dtype: str | None) -> Any:
    """Load a language model from a GGUF file; without a dtype as it is stored, as quants or float32.

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
    entries = GGUFEntries(file.metadata, architecture, path)
    config = _gpt2_config(entries, file) if architecture == "gpt2" else _llama_config(entries, file)
    entries.finish()
    renamed = {name: _renamed(name, names, layers) for name in file.tensors if name != FACTORS}
    as_stored = dtype is None and any(file.quants(name) is not None for name in renamed)
    arrays = {new: _tensor(file, old, as_stored) for old, new in renamed.items()}
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    permuted = architecture == "llama"  # rows of q and k as llama.cpp rotates them: pairs are neighbours
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
    """Return a tensor: as quants if that is wanted of a matrix, else as float32."""
    if not as_stored or len(file.tensors[name].shape) != 2 or name.startswith("position_embd"):
        return file.array(name)
    quants = file.quants(name)
    if quants is None:  # a layer has no quants and plain arrays at once
        array = file.array(name)
        quants = Quants(array.view(np.uint8), "F32", (array.shape[0], array.shape[1]))
    return quants


def _unpermuted(name: str, array: Array, config: Mapping[str, Any]) -> Array:
    """Put the rows of q and k as Transformers has them: first the first elements of all pairs of a head, then the second."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or len(array) % (2 * config[heads]):
        return array
    pairs = array.reshape(config[heads], -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _llama_config(entries: GGUFEntries, file: GGUF) -> dict[str, Any]:
    heads, d = entries.size("attention.head_count"), entries.size("embedding_length")
    longest = entries.size("context_length")
    width = entries.size("attention.key_length", d // heads)
    if entries.size("attention.value_length", width) != width:
        raise ValueError(f"{entries.where}: keys and values of different widths are not supported")
    if entries.size("rope.dimension_count", width) != width:
        raise ValueError(f"{entries.where}: rotary positions of a part of each head are not supported")
    if entries.size("attention.sliding_window", longest) < longest:
        raise ValueError(f"{entries.where}: sliding windows are not supported in GGUF files")
    config: dict[str, Any] = {
        "model_type": entries.architecture,
        "vocab_size": _rows(file, "token_embd.weight"),
        "hidden_size": d,
        "num_hidden_layers": entries.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": entries.size("attention.head_count_kv", heads),
        "head_dim": width,
        "intermediate_size": entries.size("feed_forward_length"),
        "max_position_embeddings": longest,
        "rms_norm_eps": float(np.float32(entries.number("attention.layer_norm_rms_epsilon")).astype(str)),
    }
    rope: dict[str, Any] = {"rope_theta": entries.number("rope.freq_base", 10000.0)}
    scaling = entries.raw("rope.scaling.type", "none")
    factor = entries.raw("rope.scaling.factor")  # read_rope checks it
    before = entries.size("rope.scaling.original_context_length", longest)
    attention = entries.number("rope.scaling.attn_factor", 1.0)
    if scaling not in ("none", "linear", "yarn") or attention != 1:
        raise ValueError(
            f"{entries.where}: rope.scaling.type {scaling!r} with attn_factor {attention} is not supported"
        )
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = before
    if FACTORS in file.tensors:
        if scaling != "none":
            raise ValueError(
                f"{entries.where}: {FACTORS} beside rope.scaling.type {scaling!r} is not supported"
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


def _gpt2_config(entries: GGUFEntries, file: GGUF) -> dict[str, Any]:
    d = entries.size("embedding_length")
    return {
        "model_type": "gpt2",
        "vocab_size": _rows(file, "token_embd.weight"),
        "n_embd": d,
        "n_layer": entries.size("block_count"),
        "n_head": entries.size("attention.head_count"),
        "n_inner": entries.size("feed_forward_length", 4 * d),
        "n_positions": entries.size("context_length"),
        "layer_norm_epsilon": entries.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def _rows(file: GGUF, name: str) -> int:
    if name not in file.tensors or len(file.tensors[name].shape) != 2:
        raise ValueError(f"{file.path} has no matrix {name}")
    return file.tensors[name].shape[0]
