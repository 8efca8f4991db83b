"""GGUF files, as llama.cpp writes them, as language models: names of tensors, sizes and settings.

What a file holds is read in `_gguf_file`, its tokenizer in `_gguf_tokenizer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from selfattn.engine import Array, warn
from selfattn.engine.weights import Quants
from selfattn_models._folder import FULL, SLIDING, Config
from selfattn_models._generation import checked_settings
from selfattn_models._gguf_file import GGUF, Entries
from selfattn_models._gguf_tokenizer import attach_tokenizer
from selfattn_models._known_settings import GPT2_ALIASES, FolderWarning
from selfattn_models.gemma3 import Gemma3ForCausalLM
from selfattn_models.gpt2 import GPT2LMHeadModel
from selfattn_models.llama import LlamaForCausalLM
from selfattn_models.phi3 import Phi3ForCausalLM
from selfattn_models.qwen3 import Qwen3ForCausalLM
from selfattn_models.smollm3 import SmolLM3ForCausalLM

LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA3_NAMES = (
    LLAMA_NAMES
    | HEAD_NORMS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
PHI3_NAMES = LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
ARCHITECTURES: dict[str, tuple[Any, dict[str, str], str]] = {  # class, names, where the layers are
    "llama": (LlamaForCausalLM, LLAMA_NAMES, "model.layers."),
    "qwen2": (LlamaForCausalLM, LLAMA_NAMES, "model.layers."),
    "qwen3": (Qwen3ForCausalLM, LLAMA_NAMES | HEAD_NORMS, "model.layers."),
    "gemma3": (Gemma3ForCausalLM, GEMMA3_NAMES, "model.layers."),
    "smollm3": (SmolLM3ForCausalLM, LLAMA_NAMES, "model.layers."),
    "phi3": (Phi3ForCausalLM, PHI3_NAMES, "model.layers."),
    "gpt2": (GPT2LMHeadModel, GPT2_NAMES, "transformer.h."),
}
PERMUTED = ("llama", "smollm3")  # rows of q and k as llama.cpp rotates them: pairs are neighbours
ENCODERS = "encoders are loaded from the folder that such a file was made from, not from GGUF"
LAYERS_OF_27B = 62
FACTORS = "rope_freqs.weight"  # divide the frequencies of rotary positions
LONGROPE = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
# Names in general.sampling, and Transformers' names.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def load_gguf(path: Path, dtype: str | None) -> Any:
    """Load a language model from a GGUF file; without a dtype its weights stay as stored: quants or float32."""
    file = GGUF(path)
    _check_whole(file)
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known, encodes = ", ".join(ARCHITECTURES), "bert" in str(architecture) or "embed" in str(architecture)
        hint = f"; {ENCODERS}" if encodes else ""
        raise ValueError(f"{path} has the architecture {architecture!r:.80}; supported are {known}{hint}")
    if (pooling := file.metadata.get(f"{architecture}.pooling_type", 0)) != 0:
        raise ValueError(f"{path} is an encoder, of pooling_type {pooling!r:.80}; {ENCODERS}")
    kind, names, layers = ARCHITECTURES[architecture]
    entries = Entries(file, architecture)
    config = _config(entries, file)
    entries.finish()
    angles = {FACTORS, *_longrope(file).values()}
    renamed = {name: _renamed(file, name, names, layers) for name in file.tensors if name not in angles}
    as_stored = dtype is None and any(file.quants(name) is not None for name in renamed)
    arrays = {new: _tensor(file, old, as_stored) for old, new in renamed.items()}
    permuted = architecture in PERMUTED
    if permuted and not as_stored:
        arrays = {name: _unpermuted(name, array, config) for name, array in arrays.items()}
    for name, array in arrays.items():
        if name.endswith(kind.transposed) and isinstance(array, np.ndarray):  # folders hold the transpose
            arrays[name] = array.T
    if kind.norm_offset:  # which llama.cpp's converter has added
        for name in [name for name in arrays if name.endswith("norm.weight")]:
            arrays[name] = arrays[name] - np.float32(kind.norm_offset)
    model = kind(config, arrays, where=str(path), dtype=dtype)
    model.interleaved = permuted and as_stored
    with ThreadPoolExecutor(1) as pool:  # the core copies quants while Python makes the tokenizer
        try:
            copied = [pool.submit(model._decoder, 1)]
        except RuntimeError:  # no more threads can be started: what multiplies quants first copies them
            copied = []
        attach_tokenizer(model, file)
    for each in copied:
        each.result()
    model.generation_config = _sampling(file)
    own = (f"{architecture}.", "tokenizer.ggml.", "general.")
    others = {name: value for name, value in file.metadata.items() if not name.startswith(own)}
    Config(others, str(path), "GGUF", path.name).finish()
    return model


def _sampling(file: GGUF) -> dict[str, Any]:
    """Read how a file says that tokens are drawn; llama.cpp's penalties and other samplers are not done here."""
    said = Entries(file, "general.sampling").values
    found = {own: said.pop(name) for name, own in SAMPLING.items() if name in said}
    undone = [f"general.sampling.{name}={value!r:.80}" for name, value in said.items() if value not in (0, 1)]
    if undone:
        warn(FolderWarning(f"{file.path}: {', '.join(undone)} is not done here"))
    if not found:
        return {}
    found["top_k"] = max(found.get("top_k", 0), 0)  # 0 and less are all tokens
    return checked_settings(found | {"do_sample": found.get("temperature", 1) > 0}, str(file.path))


def _check_whole(file: GGUF) -> None:
    """Refuse a file that is one of several, or holds something other than a model."""
    count, number = file.metadata.get("split.count", 0), file.metadata.get("split.no", 0)
    if count not in (0, 1):
        how = "join them: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        place = number + 1 if type(number) is int else number
        raise ValueError(f"{file.path} is part {place!r:.20} of {count!r:.20} of a split model; {how}")
    held = file.metadata.get("general.type", "model")
    if held != "model":
        merge = "; merge it into its model first: llama-export-lora" if held == "adapter" else ""
        raise ValueError(f"{file.path} holds {held!r:.80}, as its general.type says, and no model{merge}")
    if not file.tensors:
        raise ValueError(f"{file.path} has no tensors: it is a vocabulary, or a part of another file")


def _longrope(file: GGUF) -> dict[str, str]:
    """Return the tensors of longrope's factors, of which a file has both or none."""
    return LONGROPE if set(LONGROPE.values()) <= file.tensors.keys() else {}


def _renamed(file: GGUF, name: str, names: Mapping[str, str], layers: str) -> str:
    """Return Transformers' name of a tensor."""
    stem, _, end = name.rpartition(".")
    found = LAYER.fullmatch(stem)
    own = stem if found is None else found[2]
    if own not in names:
        tensor, architecture = file.tensors[name], file.metadata["general.architecture"]
        what = f"the tensor {name!r}, {tensor.kind} of shape {tensor.shape}"
        raise ValueError(f"{file.path} has {what}, which {architecture} does not have here")
    return f"{names[own]}.{end}" if found is None else f"{layers}{int(found[1])}.{names[own]}.{end}"


def _tensor(file: GGUF, name: str, as_stored: bool) -> Any:
    """Return a tensor: a matrix as quants if it is to be as stored, else as float32."""
    if not as_stored or len(file.tensors[name].shape) != 2 or name.startswith("position_embd"):
        return file.array(name)
    quants = file.quants(name)
    if quants is None:  # a layer cannot mix quants and plain arrays
        array = file.array(name)
        quants = Quants(array.view(np.uint8), "F32", (array.shape[0], array.shape[1]))
    return quants


def _unpermuted(name: str, array: Array, config: Mapping[str, Any]) -> Array:
    """Order the rows of q and k as Transformers does: the first elements of all pairs of a head, then the second."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None or len(array) % (2 * config[heads]):
        return array
    pairs = array.reshape(config[heads], -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _config(entries: Entries, file: GGUF) -> dict[str, Any]:
    """Return a file's sizes and settings by Transformers' names."""
    heads, d, longest = map(entries.size, ("attention.head_count", "embedding_length", "context_length"))
    table = file.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise ValueError(f"{file.path} has no matrix token_embd.weight")
    config: dict[str, Any] = {
        "model_type": entries.prefix,
        "vocab_size": table.shape[0],
        "hidden_size": d,
        "num_hidden_layers": entries.size("block_count"),
        "num_attention_heads": heads,
        "max_position_embeddings": longest,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if entries.prefix == "gpt2":
        config = {GPT2_ALIASES.get(name, name): value for name, value in config.items()}
        wide, eps = entries.size("feed_forward_length", 4 * d), entries.number("attention.layer_norm_epsilon")
        return config | {"n_inner": wide, "layer_norm_epsilon": eps, "activation_function": "gelu_new"}
    width = entries.size("attention.key_length", d // heads)
    if entries.size("attention.value_length", width) != width:
        raise entries.error("keys and values of different widths are not supported")
    rotated = entries.size("rope.dimension_count", width)
    if rotated != width and entries.prefix != "phi3":
        raise entries.error("rotary positions of a part of each head are not supported")
    windows = entries.prefix in ("gemma3", "phi3")
    if not windows and entries.size("attention.sliding_window", longest) < longest:
        raise entries.error("sliding windows are not supported in GGUF files")
    eps = float(np.float32(entries.number("attention.layer_norm_rms_epsilon")).astype(str))
    config |= {"num_key_value_heads": entries.size("attention.head_count_kv", heads), "head_dim": width}
    config |= {"intermediate_size": entries.size("feed_forward_length"), "rms_norm_eps": eps}
    config["rope_parameters"] = rope = _rope(entries, file, longest)
    if entries.prefix == "phi3":
        config["original_max_position_embeddings"] = entries.size(
            "rope.scaling.original_context_length", longest
        )
        config["sliding_window"] = entries.size("attention.sliding_window", 0, least=0) or None
        if rotated != width:  # a factor whose product, as an int, is that number
            rope["partial_rotary_factor"] = math.nextafter(rotated / width, 1)
    if entries.prefix == "gemma3":
        config |= _gemma3(entries, config)
    if entries.prefix in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if entries.prefix in ("llama", "smollm3"):
        config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    return config


def _rope(entries: Entries, file: GGUF, longest: int) -> dict[str, Any]:
    """Return how a file scales rotary positions."""
    rope: dict[str, Any] = {"rope_theta": entries.number("rope.freq_base", 10000.0)}
    scaling = entries.raw("rope.scaling.type", "none")
    factor = entries.raw("rope.scaling.factor")  # read_rope checks it
    before = entries.size("rope.scaling.original_context_length", longest)
    attention = entries.number("rope.scaling.attn_factor", 1.0)
    long = _longrope(file)
    scaling = "none" if long and scaling == "longrope" else scaling
    if scaling not in ("none", "linear", "yarn") or (attention != 1 and not long):
        raise entries.error(f"rope.scaling.type {scaling!r} with attn_factor {attention} is not supported")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": factor}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = before
        for name in ("beta_fast", "beta_slow"):
            if f"rope.scaling.yarn_{name}" in entries.values:
                rope[name] = entries.number(f"rope.scaling.yarn_{name}")
    if FACTORS in file.tensors:
        if scaling != "none":
            raise entries.error(f"{FACTORS} with rope.scaling.type {scaling!r} is not supported")
        factors = file.array(FACTORS).reshape(-1).tolist()
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        rope |= {"attention_factor": 1.0, "original_max_position_embeddings": longest}
    if long:
        rope |= {name: file.array(tensor).reshape(-1).tolist() for name, tensor in long.items()}
        rope |= {"rope_type": "longrope", "attention_factor": attention}
        rope["original_max_position_embeddings"] = before
    return rope


def _gemma3(entries: Entries, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the configuration of a Gemma 3 has beyond that of a Llama.

    Without windows all layers see everything.
    """
    layers, window = config["num_hidden_layers"], entries.size_or("attention.sliding_window", None)
    near = {"rope_theta": entries.number("rope.freq_base_swa", 10000.0)}
    scalar = config["head_dim"]
    if layers == LAYERS_OF_27B:  # as llama.cpp tells this one, whose scale is another, from the others
        scalar = config["hidden_size"] // config["num_attention_heads"]
    every = entries.size("attention.sliding_window_pattern", 6)
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window,
        "sliding_window_pattern": every,
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: near},
        "layer_types": None if window else [FULL] * layers,
    }
