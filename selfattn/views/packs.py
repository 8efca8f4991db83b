"""Packs: a model as one file that a page reads in one pass, and the core in WebAssembly takes as it is.

A pack has 8 bytes ``sa-pack1``; the length of the header, 8 bytes, little-endian; the header, which is JSON and ends
at a multiple of 64 bytes; then arrays, each at a multiple of 64 bytes. In the header's ``model`` an array is ``{"type":
"float32" or "int8", "shape": [...], "at": bytes after the header}``. ``live/pack.js`` reads it. The header::

    {"kind": "encoder" or "language", "name": "…", "model": what Kernel.transformer of live/kernel.js takes,
     "tokenizer": {"letters": [...]}, {"words": [...], "limit": n}, or the tables of selfattn_models.packs,
     of a language model "ends": ids that end a text, "most": tokens of a text}
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from selfattn._check import Array
from selfattn.engine.transformer import Layer, Norm, Projection, Transformer
from selfattn.engine.weights import Compact, Weight

if TYPE_CHECKING:
    from selfattn.nn.gpt import GPT

MARK = b"sa-pack1"
ALIGNED = 64  # bytes
TYPES = ("float32", "int8")
SUFFIX = ".sapack"
MOST_INSIDE = 4_000_000  # bytes of a pack that a page has inside; a page fetches a larger one
# Parameters of a layer, by their names in JavaScript.
PARAMETERS = {
    "query": "query",
    "key": "key",
    "value": "value",
    "output": "output",
    "attentionNorm": "attention_norm",
    "up": "up",
    "gate": "gate",
    "down": "down",
    "feedForwardNorm": "feed_forward_norm",
}
# Fields that pages do not compute with.
LEFT_OUT = (
    "table_factor",
    "position_bias",
    "query_norm",
    "key_norm",
    "attention_post_norm",
    "feed_forward_post_norm",
)


def pack_bytes(header: dict[str, Any]) -> bytes:
    """Return the pack of a header with arrays in its ``model``; one that is there several times is stored once."""
    stored: dict[int, tuple[Array, dict[str, Any]]] = {}
    parts: list[bytes] = []
    length = 0

    def place(value: Any) -> Any:
        nonlocal length
        if isinstance(value, dict):
            return {name: place(each) for name, each in value.items()}
        if isinstance(value, list):
            return [place(each) for each in value]
        if not isinstance(value, np.ndarray):
            return value
        if id(value) not in stored:
            if value.dtype.name not in TYPES:
                raise ValueError(f"a pack has arrays of {' and '.join(TYPES)}, not {value.dtype.name}")
            content = value.astype(value.dtype.newbyteorder("<"), "C", copy=False).tobytes()
            about = {"type": value.dtype.name, "shape": list(value.shape), "at": length}
            stored[id(value)] = value, about
            parts.append(content + bytes(-len(content) % ALIGNED))
            length += len(parts[-1])
        return stored[id(value)][1]

    written = json.dumps({**header, "model": place(header["model"])}, allow_nan=False).encode()
    written += b" " * (-(len(MARK) + 8 + len(written)) % ALIGNED)
    return b"".join((MARK, len(written).to_bytes(8, "little"), written, *parts))


def kind_of(pack: bytes) -> str:
    """Return the kind of model of a pack; what is no pack is a ValueError."""
    if not pack.startswith(MARK):
        raise ValueError(f"expected a pack, as selfattn_models.pack writes it, not {pack[:40]!r}")
    end = 16 + int.from_bytes(pack[8:16], "little")
    return str(json.loads(pack[16:end])["kind"])


def pack_data(name: str, pack: bytes) -> dict[str, Any]:
    """Return how a page's script gets a pack: deflated and in base64, or by the address of a file next to the page."""
    if len(pack) > MOST_INSIDE:
        return {"address": name + SUFFIX, "size": len(pack)}
    return {"pack": base64.b64encode(zlib.compress(pack, 9)).decode()}


def described(model: Transformer, head: Weight | None = None) -> dict[str, Any]:
    """Return a model as ``Kernel.transformer`` of ``live/kernel.js`` takes it.

    ``head`` is the weight that makes logits. A model that pages do not compute is a ValueError.
    """
    for part in (model, *model.layers):
        for name in LEFT_OUT:
            if getattr(part, name, None) is not None:
                raise ValueError(f"pages do not compute a model with a {name}")
    found: dict[str, Any] = {
        "table": None if model.table is None else _weight(model.table),
        "tokenTypeRow": model.token_type_row,
        "positions": model.positions,
        "embeddingNorm": _norm(model.embedding_norm),
        "finalNorm": _norm(model.final_norm),
        "layers": [_layer(layer) for layer in model.layers],
    }
    if model.table is not None:
        found["vocabulary"] = model.table.shape[0]
    if head is not None:
        found["output"] = "table" if head is model.table else {"weight": _weight(head), "bias": None}
    width = model.table if model.table is not None else model.layers[0].query.weight
    return {"d": width.shape[1], **{name: value for name, value in found.items() if value is not None}}


def _weight(weight: Weight) -> Any:
    if isinstance(weight, Compact) and weight.scale is not None:
        return {"values": weight.values, "scale": weight.scale}
    if not isinstance(weight, np.ndarray):
        raise ValueError(f"pages do not compute with weights of {weight.kind}")
    return weight


def _norm(norm: Norm | None) -> dict[str, Any] | None:
    if norm is None:
        return None
    return {"weight": norm.weight, "bias": norm.bias, "eps": norm.eps, "rms": norm.kind == "rms"}


def _layer(layer: Layer) -> dict[str, Any]:
    heads, key_heads = layer.num_heads, layer.num_key_heads or layer.num_heads
    if layer.key is None:  # query, key and value are in one matrix
        weight, bias = np.asarray(layer.query.weight), layer.query.bias
        cuts = np.cumsum([heads, key_heads]) * (len(weight) // (heads + 2 * key_heads))
        biases = [None] * 3 if bias is None else np.split(bias, cuts)
        query, key, value = map(Projection, np.split(weight, cuts), biases)
        layer = layer._replace(query=query, key=key, value=value)
    given = {name: getattr(layer, field) for name, field in PARAMETERS.items()}
    width = layer.query.weight.shape[0] // heads
    norms = layer.attention_norm, layer.feed_forward_norm
    rotary = layer.rotary
    return {
        "heads": heads,
        "keyHeads": key_heads,
        "width": width,
        "hidden": 0 if layer.up is None else layer.up.weight.shape[0],
        "eps": [0.0 if norm is None else norm.eps for norm in norms],
        "rms": [norm is not None and norm.kind == "rms" for norm in norms],
        "normFirst": layer.norm_first,
        "causal": layer.causal,
        "windowLeft": layer.window[0],
        "windowRight": layer.window[1],
        "scale": 1 / math.sqrt(width) if layer.scale is None else layer.scale,
        "softcap": layer.softcap,
        "activation": layer.activation,
        "weights": "int8" if isinstance(layer.query.weight, Compact) else "float32",
        "rotary": rotary
        and {
            "cos": rotary.cos,
            "sin": rotary.sin,
            "width": 2 * rotary.cos.shape[1],
            "interleaved": rotary.interleaved,
        },
        "parameters": {
            name: {"weight": _weight(one.weight), "bias": one.bias}
            for name, one in given.items()
            if one is not None
        },
    }


def gpt_pack(model: GPT, alphabet: Sequence[str], name: str = "") -> bytes:
    """Return the pack of an nn.GPT of float32 whose ids are letters, or other texts."""
    settings = model._model(model._description())
    tied = model.head.weight is model.token_embedding.weight
    return pack_bytes(
        {
            "kind": "language",
            "name": name,
            "model": described(settings, settings.table if tied else model.head._operand("weight")),
            "tokenizer": {"letters": list(alphabet)},
            "ends": [],
            "most": model.max_seq_len,
        }
    )
