"""Exact self-attention for NumPy arrays, in C.

>>> import numpy as np
>>> import selfattn as sa
>>> q = k = v = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> sa.scaled_dot_product_attention(q, k, v, is_causal=True).shape
(2, 8, 128, 64)

`selfattn.reference` has the same functions in plain NumPy lines: read it to see what they compute. It and the other
modules (``nn``, ``optim``, ``training``, ``files``, ``text``, ``views``) are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from selfattn._interrupt import DelayedInterrupt

with DelayedInterrupt(raises=True):
    # In C, NumPy makes an ImportError of a KeyboardInterrupt, and it cannot be imported again.
    import_module("selfattn._core")

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
from selfattn.functional._gradients import AttentionGradients
from selfattn.functional.additive import AdditiveGradients, additive_attention, additive_attention_vjp
from selfattn.functional.attention import (
    scaled_dot_product_attention_backward,
    scaled_dot_product_attention_forward,
    scaled_dot_product_attention_vjp,
)
from selfattn.functional.block_mask import BlockMask
from selfattn.functional.checks import check_vjp
from selfattn.functional.kv_cache import KVCache
from selfattn.functional.merge import MergeGradients, merge_attention, merge_attention_vjp
from selfattn.functional.rowops import (
    LayerNormGradients,
    RMSNormGradients,
    RotaryGradients,
    apply_rotary_emb_vjp,
    gelu_vjp,
    layer_norm_vjp,
    log_softmax_vjp,
    rms_norm_vjp,
    softmax_vjp,
)
from selfattn.functional.varlen import varlen_attention, varlen_attention_vjp
from selfattn.random import torch_rng

__version__ = "0.1.0"

_STEPS = ("AttentionSteps", "attention_steps")
_MODULES = ("files", "nn", "optim", "reference", "text", "training", "views")

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
    from selfattn import files, nn, optim, reference, text, training, views  # noqa: F401
    from selfattn.steps import AttentionSteps, attention_steps
else:

    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"selfattn.{name}")
        if name in _STEPS:
            return getattr(import_module("selfattn.steps"), name)
        raise AttributeError(f"module 'selfattn' has no attribute {name!r}")


def _render(kind: str, steps: object) -> str | None:
    """Draw steps for a notebook. This is the one way up from `steps` to `views`, which is loaded when a notebook asks."""
    draw = getattr(import_module("selfattn.views"), f"notebook_{kind}")
    shown: str | None = draw(steps)
    return shown


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_STEPS})
