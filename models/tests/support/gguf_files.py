"""GGUF files of tiny models, which the package gguf writes from Transformers' weights, as llama.cpp's converter
does."""

import numpy as np
import pytest

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_NAMES = LLAMA_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
CONV1D = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


def gguf_name(name, gemma=False):
    stem, _, end = name.rpartition(".")
    names = GPT2_NAMES if name.startswith("transformer.") else GEMMA3_NAMES if gemma else LLAMA_NAMES
    if stem in names or stem == "lm_head":
        return f"{names.get(stem, 'output')}.{end}"
    _, _, number, part = stem.split(".", 3)
    return f"blk.{number}.{names[part]}.{end}"


def permuted(array, heads):
    """The converter's order of the rows of q and k: a pair's two elements become neighbours."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def random_blocks(kind, rows, columns):
    """Blocks of 256 numbers with random bits, for the package gguf cannot make such; their float16 factors are 2e-4."""
    import gguf
    from blocks import HALVES

    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, columns // numbers, size), np.uint8)
    for place in HALVES[kind.name]:
        blocks[..., place : place + 2] = np.array([2e-4], np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def write(path, config, state, kind="F32", entries=None, more=None, tensors=None):
    """Write a file. ``entries`` and, of its architecture, ``more`` have entries by name, None to leave one out.

    Matrices become blocks of a kind, or of kinds by name, if their rows allow it; returns the numbers in them, under
    Transformers' names. ``tensors`` replaces or adds tensors.
    """
    gguf = pytest.importorskip("gguf")
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    own = {"context_length": config.get("max_position_embeddings", config.get("n_positions"))}
    if arch == "gpt2":
        own |= {
            "embedding_length": config["n_embd"],
            "block_count": config["n_layer"],
            "attention.head_count": config["n_head"],
            "feed_forward_length": 4 * config["n_embd"],
            "attention.layer_norm_epsilon": 1e-5,
        }
    else:
        own |= {
            "embedding_length": config["hidden_size"],
            "block_count": config["num_hidden_layers"],
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": config["num_key_value_heads"],
            "feed_forward_length": config["intermediate_size"],
            "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-6),
            "rope.freq_base": 10000.0,
        }
    named = {f"{arch}.{name}": value for name, value in (own | (more or {})).items()}
    for name, value in (named | (entries or {})).items():
        if value is not None:
            of = gguf.GGUFValueType
            writer.add_key_value(
                name, value, of.UINT32 if type(value) is int and value >= 0 else of.get_type(value)
            )
    meant = {}
    for name, array in state.items():
        stored = np.ascontiguousarray(array.T) if name.endswith(CONV1D) and arch == "gpt2" else array
        stored = stored + 1 if arch == "gemma3" and array.ndim == 1 else stored
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if arch in ("llama", "smollm3") and heads:
            stored = permuted(stored, config[heads])
        used = kind[name] if isinstance(kind, dict) else kind
        rows = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[used]][0]
        if stored.ndim == 2 and "wpe" not in name and stored.shape[1] % rows == 0 and used != "F32":
            quant = gguf.GGMLQuantizationType[used]
            blocks = (
                random_blocks(quant, *stored.shape) if rows == 256 else gguf.quants.quantize(stored, quant)
            )
            writer.add_tensor(gguf_name(name, arch == "gemma3"), blocks, raw_dtype=quant)
            stored = gguf.quants.dequantize(blocks, quant)
        else:
            writer.add_tensor(gguf_name(name, arch == "gemma3"), stored)
        if arch in ("llama", "smollm3") and heads:  # undo the converter's order
            pairs = stored.reshape(config[heads], -1, 2, *stored.shape[1:])
            stored = pairs.swapaxes(1, 2).reshape(stored.shape)
        stored = stored - 1 if arch == "gemma3" and array.ndim == 1 else stored
        meant[name] = stored.T if name.endswith(CONV1D) and arch == "gpt2" else stored
    for name, array in (tensors or {}).items():
        stored, quant = array if isinstance(array, tuple) else (array, None)
        writer.add_tensor(name, stored, raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def of_tokenizer(**values):
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level(special, bos=None, template=None, pre="gpt-2"):
    """Return the entries of the tokenizer of `language_folders`."""
    from language_folders import MERGES, make_tokenizer

    made = make_tokenizer()
    tokens = [made.id_to_token(n) for n in range(made.get_vocab_size())]
    types = [3 if token in special else 1 for token in tokens]
    found = of_tokenizer(model="gpt2", pre=pre, tokens=tokens, token_type=types, merges=MERGES)
    found |= of_tokenizer(eos_token_id=made.token_to_id("<|end|>"))
    if bos is not None:
        found |= of_tokenizer(bos_token_id=made.token_to_id(bos), add_bos_token=True)
    return found | {"tokenizer.chat_template": template}


SPELLED = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]


def sentencepiece(scores, **more):
    """Return the entries of a tokenizer of `SPELLED` and these pieces, as SentencePiece's in llama.cpp."""
    types = [2, 3, 3] + [6] * 256 + [1] * len(scores)
    scored = [-9.0] * len(SPELLED) + list(scores.values())
    return of_tokenizer(
        model="llama", tokens=[*SPELLED, *scores], scores=scored, token_type=types, bos_token_id=1, **more
    )
