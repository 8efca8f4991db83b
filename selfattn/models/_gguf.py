"""GGUF files, as llama.cpp writes them, as language models: header and tensors, names and sizes, tokenizer.

The header is read here and not by the package ``gguf``, whose reader makes an array of every token and trusts every number. That
package only expands the kinds of quants that the core does not know. The format is described in
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn import _disk
from selfattn._check import Array, quoted, warn
from selfattn._extras import import_extra
from selfattn.engine.weights import QUANTS, Quants, to_float32
from selfattn.models._folder import FULL, SLIDING, Config
from selfattn.models._generation import checked_settings
from selfattn.models._table import GPT2_ALIASES, FolderWarning, rows
from selfattn.models._tokenizer_class import QWEN2, sentencepiece_decoder
from selfattn.models.gemma3 import Gemma3ForCausalLM
from selfattn.models.gpt2 import GPT2LMHeadModel
from selfattn.models.llama import LlamaForCausalLM
from selfattn.models.phi3 import Phi3ForCausalLM
from selfattn.models.qwen3 import Qwen3ForCausalLM
from selfattn.models.smollm3 import SmolLM3ForCausalLM

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT, MOST_ALIGNMENT = 32, 2**20
MOST_DIMENSIONS, MOST_ELEMENTS = 4, 2**42
LEAST_ENTRY, LEAST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8  # bytes of an entry and of a tensor in the header
# Kinds of tensors: name, numbers that share scales, and their bytes.
KINDS = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18),
}  # fmt: skip
FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


class Tensor(NamedTuple):
    """Where a tensor is in the file."""

    kind: str
    shape: tuple[int, ...]  # the last axis is contiguous
    begin: int
    size: int


def begins_as_gguf(path: Path) -> bool:
    """Tell whether a file is GGUF, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


class GGUF:
    """A file: ``metadata`` (numbers, texts and lists of these, by name) and ``tensors``. A ValueError says what is damaged where."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.stat().st_size < 24:
            raise ValueError(f"{path} is no GGUF file: it has {path.stat().st_size} bytes")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.data = np.memmap(path, np.uint8, "c")
        self._at, self._size = 0, len(self._bytes)
        if self._take(4) != MAGIC:
            raise self._error("it does not begin with GGUF")
        if (version := self._number("I")) not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little")) in (*VERSIONS, 1)
            what = "is written for big-endian machines" if swapped else f"has version {version}"
            raise self._error(f"it {what}; supported are little-endian files of the versions 2 and 3")
        tensors, entries = self._number("Q"), self._number("Q")
        left = self._size - self._at
        if entries > left // LEAST_ENTRY or tensors > left // LEAST_TENSOR:
            raise self._error(f"it claims to have {entries} entries and {tensors} tensors in {left} bytes")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            name = self._text("a name")
            if name in self.metadata:
                raise self._error(f"it has the entry {name!r} twice")
            self.metadata[name] = self._value(name, self._number("I"))
        self.tensors = self._read_tensors(tensors)

    def _error(self, what: str) -> ValueError:
        return ValueError(f"{self.path} cannot be read as GGUF: {what} (byte {self._at})")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise self._error(f"expected {count} bytes, and the file ends after {self._size - self._at}")
        found = self._bytes[self._at : end]
        self._at = end
        return found

    def _number(self, form: str) -> Any:
        return struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))[0]

    def _text(self, what: str) -> str:
        found = self._take(self._number("Q"))
        try:
            return found.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from None

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(name)
        if kind in SCALARS:
            return self._number(SCALARS[kind])
        if kind != ARRAY:
            raise self._error(f"{name} is of the type {kind}, which is not known")
        inner, count = self._number("I"), self._number("Q")
        if inner != STRING and inner not in SCALARS:
            raise self._error(f"{name} is an array of the type {inner}, which is not supported")
        size = 8 if inner == STRING else struct.calcsize("<" + SCALARS[inner])
        if count > (self._size - self._at) // size:
            raise self._error(f"{name} has {count} elements, more than the file has bytes for")
        if inner == STRING:
            return self._texts(name, count)
        return np.frombuffer(self._take(count * size), np.dtype("<" + SCALARS[inner])).tolist()

    def _texts(self, name: str, count: int) -> list[str]:
        """Read many texts, such as the tokens, faster than one by one."""
        found, at, content, unpack = [], self._at, self._bytes, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + unpack(content, at)[0]
                if at > self._size:
                    raise struct.error
                found.append(content[begin:at].decode())
        except struct.error:
            raise self._error(f"text {len(found)} of {name} goes beyond the end of the file") from None
        except UnicodeDecodeError as error:
            raise self._error(f"text {len(found)} of {name} is not UTF-8: {error}") from None
        self._at = at
        return found

    def _read_tensors(self, count: int) -> dict[str, Tensor]:
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MOST_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(f"general.alignment must be a power of two from 8 on, not {alignment!r}")
        found: dict[str, Tensor] = {}
        for _ in range(count):
            name = self._text("the name of a tensor")
            if name in found:
                raise self._error(f"it has the tensor {name!r} twice")
            found[name] = self._read_tensor(name, alignment)
        begin = -(-self._at // alignment) * alignment
        found = {name: tensor._replace(begin=begin + tensor.begin) for name, tensor in found.items()}
        before, end = "", begin
        for name, tensor in sorted(found.items(), key=lambda item: item[1].begin):
            if tensor.begin < end:
                raise self._error(f"the tensors {before!r} and {name!r} overlap")
            before, end = name, tensor.begin + tensor.size
            if end > self._size:
                where = f"ends at byte {end}, and the file has {self._size}"
                raise self._error(f"the tensor {name!r} {where}: it is cut off or damaged")
        return found

    def _read_tensor(self, name: str, alignment: int) -> Tensor:
        dimensions = self._number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._error(f"the tensor {name!r} has {dimensions} dimensions, not 1 to {MOST_DIMENSIONS}")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if not 0 < math.prod(shape) <= MOST_ELEMENTS:
            raise self._error(f"the tensor {name!r} has the shape {shape}")
        if kind not in KINDS:
            newer = "it may be newer than this version, or the file is damaged"
            raise self._error(f"the tensor {name!r} is of the kind {kind}, which has no name here: {newer}")
        label, numbers, size = KINDS[kind]
        if shape[-1] % numbers:
            raise self._error(f"the tensor {name!r} has rows of {shape[-1]} numbers, in blocks of {numbers}")
        if offset % alignment:
            where = f"the offset {offset}, not a multiple of {alignment}"
            raise self._error(f"the tensor {name!r} is at {where}")
        return Tensor(label, shape, offset, math.prod(shape) // numbers * size)

    def raw(self, name: str) -> Array:
        """Return the bytes of a tensor, (rows, bytes of a row), a view of the mapped file."""
        tensor = self.tensors[name]
        rows = math.prod(tensor.shape[:-1])
        return np.asarray(self.data[tensor.begin : tensor.begin + tensor.size]).reshape(rows, -1)

    def quants(self, name: str) -> Quants | None:
        """Return a matrix as it is stored, or None where the core cannot multiply by its kind."""
        tensor = self.tensors[name]
        if len(tensor.shape) != 2 or tensor.kind not in QUANTS or tensor.kind == "F32":
            return None
        return Quants(self.raw(name), tensor.kind, (tensor.shape[0], tensor.shape[1]))

    def array(self, name: str) -> Array:
        """Return a tensor as float32, a view of a file in float32; raise ImportError if its kind needs the package ``gguf``."""
        tensor = self.tensors[name]
        if tensor.kind in FLOATS:
            found = self.raw(name).reshape(-1).view(FLOATS[tensor.kind]).reshape(tensor.shape)
            return to_float32(found, None) if tensor.kind == "BF16" else found.astype(np.float32, copy=False)
        if tensor.kind in QUANTS:
            raw = self.raw(name)
            return Quants(raw, tensor.kind, (len(raw), tensor.shape[-1]))[:].reshape(tensor.shape)
        gguf = import_extra("gguf", "gguf")
        try:
            found = gguf.quants.dequantize(self.raw(name), gguf.GGMLQuantizationType[tensor.kind])
        except (NotImplementedError, KeyError):
            known = f"{', '.join(FLOATS)}, {', '.join(QUANTS)} and what the package gguf expands"
            what = f"the tensor {name!r} is of the kind {tensor.kind}"
            raise ValueError(f"{self.path}: {what}; supported are {known}") from None
        return np.ascontiguousarray(found, np.float32).reshape(tensor.shape)


def kinds(path: Path) -> dict[str, tuple[int, int, str]]:
    """Return, for each kind of a file's tensors: how many there are, their bytes, and how the core computes with them."""
    found: dict[str, tuple[int, int, str]] = {}
    for tensor in GGUF(path).tensors.values():
        count, size, _ = found.get(tensor.kind, (0, 0, ""))
        how = "multiplied as stored" if tensor.kind in QUANTS else "expanded to float32, four bytes a number"
        found[tensor.kind] = count + 1, size + tensor.size, how
    return found


# ---------------------------------------------------------------------------------------- names and sizes of a model

LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
GEMMA3_NAMES = LLAMA_NAMES | HEAD_NORMS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
PHI3_NAMES = LLAMA_NAMES | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GPT2_NAMES = {
    "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
    "output": "lm_head", "attn_norm": "ln_1", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip
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


class Entries(Config):
    """The entries of a file's header whose names begin with a prefix."""

    off = (*Config.off, "", "none")

    def __init__(self, file: GGUF, prefix: str) -> None:
        own = prefix + "."
        values = {key.removeprefix(own): value for key, value in file.metadata.items() if key.startswith(own)}
        kind = "tokenizer.ggml" if prefix == "tokenizer.ggml" else "architecture"
        super().__init__(values, f"{file.path}: {prefix}", rows(f"GGUF: {kind}"), file.path.name, own)
        self.prefix = prefix

    def _get(self, name: str, default: Any) -> Any:
        value = super()._get(name, default)
        # A list has a number for each layer, all the same.
        by_layer = isinstance(value, list) and self.prefix in ARCHITECTURES
        return value[0] if by_layer and len(set(map(repr, value))) == 1 else value


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
    Config(others, str(path), rows("GGUF"), path.name).finish()
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
        "model_type": entries.prefix, "vocab_size": table.shape[0], "hidden_size": d, "num_hidden_layers": entries.size("block_count"),
        "num_attention_heads": heads, "max_position_embeddings": longest, "tie_word_embeddings": "output.weight" not in file.tensors,
    }  # fmt: skip
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
    """Return what the configuration of a Gemma 3 has beyond that of a Llama; without windows all layers see everything."""
    layers, window = config["num_hidden_layers"], entries.size_or("attention.sliding_window", None)
    near = {"rope_theta": entries.number("rope.freq_base_swa", 10000.0)}
    scalar = config["head_dim"]
    if layers == LAYERS_OF_27B:  # as llama.cpp tells this one, whose scale is another, from the others
        scalar = config["hidden_size"] // config["num_attention_heads"]
    every = entries.size("attention.sliding_window_pattern", 6)
    return {
        "model_type": "gemma3_text", "query_pre_attn_scalar": scalar, "sliding_window": window, "sliding_window_pattern": every,
        "rope_parameters": {FULL: config["rope_parameters"], SLIDING: near}, "layer_types": None if window else [FULL] * layers,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------- the tokenizer

# There are two kinds: byte-level BPE ("gpt2"), whose pre-tokenizer has a name of llama.cpp's, and SentencePiece's BPE ("llama"),
# whose merges follow from the scores of its tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
WHOLE = (CONTROL, UNKNOWN, USER_DEFINED)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before BPE: by a pattern of words, at each digit ("digits") and by GPT-2's pattern, or by GPT-2's pattern alone.
PRE = {
    "gpt-2": None, "gpt2": None, "mpt": None, "olmo": None, "jais": None, "phi-2": None, "roberta-bpe": None,
    "smollm": "digits", "starcoder": "digits", "refact": "digits", "command-r": "digits", "codeshell": "digits",
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "dbrx": LLAMA3, "smaug-bpe": LLAMA3, "falcon3": LLAMA3,
    "qwen2": QWEN2, "stablelm2": QWEN2, "deepseek-r1-qwen": QWEN2, "megrez": QWEN2, "tekken": TEKKEN,
}  # fmt: skip
# The models of these normalise texts to NFC, but no key of a GGUF file says so.
NFC = ("qwen2", "megrez", "mpt", "olmo", "command-r")
# Old files do not name a pre-tokenizer; the first models of the architecture had these.
UNNAMED = {"qwen2": "qwen2", "qwen3": "qwen2", "gpt2": "gpt-2", "llama": "gpt-2"}
# As in Llama 3, a word that is a token needs no merges, and a text begins with the bos token unless the file says no.
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
BOS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3")
# Normal tokens that look like these are special: old converters wrote no types, or called such tokens normal.
MARK = re.compile(r"<\|.*\|>|<｜.*｜>|<(start|end)_of_\w+>|\[/?INST\]", re.DOTALL)
ENDS_OF_TURN = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>", "<|end_of_turn|>",
    "<end_of_turn>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
HASHES = 0x9E3779B97F4A7C15  # odd, so that it has an inverse
NAMES = {
    "bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token", "seperator": "sep_token",
    "cls": "cls_token", "mask": "mask_token",
}  # fmt: skip
ENDS = ("eos", "eot", "eom")
# Names in general.sampling, and Transformers' names.
SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class Vocabulary(Entries):
    """The entries of the tokenizer: its tokens, and their ids."""

    def __init__(self, file: GGUF) -> None:
        super().__init__(file, "tokenizer.ggml")
        self.tokens = self.list_of("tokens", str)
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.types = self.list_of("token_type", int) or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.error(f"there are {len(self.types)} types for {len(self.tokens)} tokens")
        self.architecture = file.metadata["general.architecture"]

    def list_of(self, name: str, kind: type) -> list[Any]:
        """Read a list, which may be missing."""
        found = self.raw(name, [])
        if not isinstance(found, list) or not {*map(type, found)} <= {kind}:
            raise self.error(f"{name} must be a list of {kind.__name__}, not {quoted(found)}")
        return found

    def special(self, name: str) -> int | None:
        """Read the id of a special token, if there is one."""
        found = self.raw(f"{name}_token_id")
        if found is None or (name not in ENDS and name != "bos" and found == 2**32 - 1):
            return None
        if type(found) is not int or not 0 <= found < max(len(self.tokens), 1):
            raise self.error(f"{name}_token_id must be one of {len(self.tokens)} tokens, not {found!r:.80}")
        return found if self.tokens else None


def attach_tokenizer(model: Any, file: GGUF) -> None:
    """Give a model the tokenizer of a file, if it has one, its chat template, and the tokens that end its answers."""
    entries = Vocabulary(file)
    kind, tokens = entries.raw("model"), entries.tokens
    if len(tokens) > model.vocab_size:
        raise entries.error(f"there are {len(tokens)} tokens, and a table of {model.vocab_size} rows")
    special = {name: entries.special(name) for name in {*NAMES, *ENDS}}
    found = {name: n for name, n in special.items() if n is not None}
    model.special_tokens = {NAMES[name]: tokens[n] for name, n in found.items() if name in NAMES}
    controls = {n for name, n in found.items() if name in (*ENDS, "bos")}
    controls |= {n for n, token in enumerate(tokens) if token[:1] in "<[" and MARK.fullmatch(token)}
    types = [CONTROL if own == NORMAL and n in controls else own for n, own in enumerate(entries.types)]
    turns = [n for n in map(entries.ids.get, ENDS_OF_TURN) if n is not None and types[n] == CONTROL]
    if kind == "llama" and "eos" not in found and len(tokens) > 2:
        turns.append(2)  # </s>, as llama.cpp and Transformers take it
    model.stop_ids = frozenset([*turns, *(n for name, n in found.items() if name in ENDS)])
    template = file.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"{file.path}: tokenizer.chat_template must be a text, not {quoted(template)}")
    model.chat_template, model._folder = template, file.path
    if kind in (None, "none", "no_vocab"):
        return
    make = {"gpt2": _byte_level, "llama": _sentencepiece}.get(str(kind))
    if make is None:
        raise entries.error(f"tokenizers of kind {kind!r:.80} are not supported; gpt2 and llama are")
    library = import_extra("tokenizers", "models")
    if len(entries.ids) < len(tokens):
        twice = next(token for n, token in enumerate(tokens) if entries.ids[token] != n)
        raise entries.error(f"it has the token {quoted(twice)} twice")
    what = f"{entries.where}: no tokenizer can be made of its tokens and merges"
    with _disk.library_errors(what, ValueError, ImportError, Warning):
        tokenizer = make(library, entries)
    # These are found whole in a text; decoding leaves out the special ones.
    whole = [(token, own) for token, own in zip(tokens, types, strict=True) if token and own in WHOLE]
    added = [library.AddedToken(token, special=own != USER_DEFINED, normalized=False) for token, own in whole]
    tokenizer.add_tokens(added)
    begins = entries.raw("pre") in BOS_FIRST or kind == "llama"  # converters name a pre-tokenizer, too
    wanted = {"bos": entries.flag("add_bos_token", begins), "eos": entries.flag("add_eos_token", False)}
    first, last = ([tokens[found[x]]] if wanted[x] and x in found else [] for x in wanted)
    if first or last:
        second = [*(f"{each}:1" for each in first), "$B:1", *(f"{each}:1" for each in last)]
        one, marks = [*first, "$A", *last], [(token, entries.ids[token]) for token in {*first, *last}]
        tokenizer.post_processor = library.processors.TemplateProcessing(one, one + second, marks)
    model.tokenizer = tokenizer
    entries.finish()


def _byte_level(library: Any, entries: Vocabulary) -> Any:
    pre = entries.raw("pre", "default")
    if pre == "default":
        usual = UNNAMED.get(entries.architecture, "gpt-2")
        pre = "llama-bpe" if "<|begin_of_text|>" in entries.ids else usual
        older = "the file is older than their names"
        what = f"{entries.where}.pre names no pre-tokenizer: {older}, and texts are cut as by {pre}"
        warn(FolderWarning(what))
    if not isinstance(pre, str) or pre not in PRE:
        known = ", ".join(PRE)
        raise entries.error(f"the pre-tokenizer {pre!r:.80} is not supported; supported are {known}")
    merges = [tuple(merge.split(" ")) for merge in entries.list_of("merges", str)]
    for merge in merges:
        if len(merge) != 2:
            raise entries.error(f"a merge must be two tokens and a space, not {' '.join(merge)!r:.80}")
    model = library.models.BPE(entries.ids, merges, ignore_merges=pre in WHOLE_WORDS_FIRST)
    tokenizer = library.Tokenizer(model)
    steps, pattern = library.pre_tokenizers, PRE[pre]
    cuts = [steps.ByteLevel(add_prefix_space=False, use_regex=pattern in (None, "digits"))]
    if pattern == "digits":
        cuts.insert(0, steps.Digits(individual_digits=True))
    elif pattern is not None:
        cuts.insert(0, steps.Split(library.Regex(pattern), "isolated"))
    tokenizer.pre_tokenizer = steps.Sequence(cuts) if pattern else cuts[0]
    if pre in NFC:
        tokenizer.normalizer = library.normalizers.NFC()
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def _sentencepiece(library: Any, entries: Vocabulary) -> Any:
    """Make the tokenizer that Transformers makes of SentencePiece's BPE (Kudo and Richardson, 2018)."""
    scores, tokens, ids = entries.list_of("scores", float), entries.tokens, entries.ids
    if len(scores) != len(tokens):
        raise entries.error(f"there are {len(scores)} scores for {len(tokens)} tokens")
    kinds = np.isin(entries.types, (NORMAL, USER_DEFINED, UNUSED))
    order = np.argsort(-np.array(scores), kind="stable")  # equal scores in order
    merges = _merges(tokens, order[kinds[order]])
    place = entries.special("unknown")
    unknown = None if place is None else tokens[place]
    model = library.models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = library.Tokenizer(model)
    prefix = entries.flag("add_space_prefix", True)
    before = [library.normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = library.normalizers.Sequence([*before, library.normalizers.Replace(" ", "▁")])
    tokenizer.decoder = sentencepiece_decoder(library, prefix)
    return tokenizer


def _merges(tokens: list[str], order: Array) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make a token of some: these in order, pairs of one by the id of their first token.

    Texts are compared by a hash, the sum of (code + 1) · HASHES^(place + 1) modulo 2^64; the library refuses a pair that makes no token.
    """
    lengths = np.fromiter(map(len, tokens), np.int64, len(tokens))
    ends = np.cumsum(lengths)
    codes = np.frombuffer("".join(tokens).encode("utf-32-le"), np.uint32) + np.uint64(1)
    up, down = (np.full(len(codes) + 1, n, np.uint64).cumprod() for n in (HASHES, pow(HASHES, -1, 2**64)))
    sums = np.append(np.uint64(0), np.cumsum(codes * up[:-1]))
    cuts = np.maximum(lengths[order] - 1, 0)
    place = np.repeat(np.arange(len(order)), cuts)
    begin, end = (ends - lengths)[order][place], ends[order][place]
    cut = begin + 1 + np.arange(len(place)) - (np.cumsum(cuts) - cuts)[place]
    texts = (ends - lengths, ends), (begin, cut), (cut, end)
    whole, *parts = ((sums[b] - sums[a]) * down[a] for a, b in texts)
    by_hash = np.argsort(whole)
    ids = [by_hash[np.searchsorted(whole[by_hash], part) % len(tokens)] for part in parts]
    good = np.logical_and(*(whole[n] == part for n, part in zip(ids, parts, strict=True)))
    sort = np.argsort((place * len(tokens) + ids[0])[good], kind="stable")
    first, second = (map(tokens.__getitem__, n[good][sort].tolist()) for n in ids)
    return list(zip(first, second, strict=True))
