"""Exact self-attention for NumPy arrays, in C.

>>> import numpy as np
>>> import selfattn as sa
>>> q = k = v = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> sa.scaled_dot_product_attention(q, k, v, is_causal=True).shape
(2, 8, 128, 64)

`selfattn.reference` has the same functions in plain NumPy lines: read it to see what they compute.
"""

from selfattn._core import (
    apply_rotary_emb,
    gelu,
    get_isa,
    get_num_threads,
    layer_norm,
    log_softmax,
    rms_norm,
    scaled_dot_product_attention,
    set_num_threads,
    softmax,
)
from selfattn.config import show_config
from selfattn.functional import merge_attention
from selfattn.random import torch_rng
from selfattn.steps import AttentionSteps, attention_steps

__version__ = "0.1.0"

__all__ = [
    "AttentionSteps",
    "apply_rotary_emb",
    "attention_steps",
    "gelu",
    "get_isa",
    "get_num_threads",
    "layer_norm",
    "log_softmax",
    "merge_attention",
    "rms_norm",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
    "softmax",
    "torch_rng",
]
