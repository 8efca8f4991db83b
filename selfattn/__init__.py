"""Exact self-attention for NumPy arrays, in C.

>>> import numpy as np
>>> import selfattn as sa
>>> q = k = v = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> sa.scaled_dot_product_attention(q, k, v, is_causal=True).shape
(2, 8, 128, 64)

`selfattn.reference` has the same functions in plain NumPy lines: read it to see what they compute. It and the other
modules (``nn``, ``optim``, ``training``, ``files``, ``text``, ``layer_steps``, ``views``) are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from selfattn._core import get_isa, get_num_threads, set_num_threads
from selfattn.config import show_config
from selfattn.functional import (
    AdditiveGradients,
    AttentionGradients,
    BlockMask,
    KVCache,
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
    additive_attention,
    additive_attention_vjp,
    apply_rotary_emb,
    apply_rotary_emb_vjp,
    check_vjp,
    gelu,
    gelu_vjp,
    layer_norm,
    layer_norm_vjp,
    log_softmax,
    log_softmax_vjp,
    merge_attention,
    merge_attention_vjp,
    rms_norm,
    rms_norm_vjp,
    scaled_dot_product_attention,
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_forward,
    scaled_dot_product_attention_vjp,
    softmax,
    softmax_vjp,
    varlen_attention,
    varlen_attention_vjp,
)
from selfattn.random import torch_rng
from selfattn.steps import AttentionSteps, attention_steps

__version__ = "0.1.0"

_MODULES = ("files", "layer_steps", "nn", "optim", "reference", "text", "training", "views")

__all__ = [
    "AdditiveGradients",
    "AttentionGradients",
    "AttentionSteps",
    "BlockMask",
    "KVCache",
    "LayerNormGradients",
    "MergeGradients",
    "RMSNormGradients",
    "RotaryGradients",
    "additive_attention",
    "additive_attention_vjp",
    "apply_rotary_emb",
    "apply_rotary_emb_vjp",
    "attention_steps",
    "check_vjp",
    "gelu",
    "gelu_vjp",
    "get_isa",
    "get_num_threads",
    "layer_norm",
    "layer_norm_vjp",
    "log_softmax",
    "log_softmax_vjp",
    "merge_attention",
    "merge_attention_vjp",
    "rms_norm",
    "rms_norm_vjp",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_forward",
    "scaled_dot_product_attention_vjp",
    "set_num_threads",
    "show_config",
    "softmax",
    "softmax_vjp",
    "torch_rng",
    "varlen_attention",
    "varlen_attention_vjp",
]


if TYPE_CHECKING:
    from selfattn import files, layer_steps, nn, optim, reference, text, training, views  # noqa: F401
else:

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"selfattn.{name}")
        raise AttributeError(f"module 'selfattn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
