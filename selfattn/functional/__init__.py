"""Functions of arrays and their gradients: ``y, pullback = f_vjp(x)``, then ``dx = pullback(dy)``.

The classes named ``…Gradients`` are the named tuples that pullbacks return; where a function takes ``wrt``, the tuple
has just the names in it. `check_vjp` compares a pullback with finite differences.
"""

from selfattn._gradient_tuples import (
    AdditiveGradients,
    AttentionGradients,
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
)
from selfattn.functional._options import scaled_dot_product_attention
from selfattn.functional.additive import additive_attention, additive_attention_vjp
from selfattn.functional.attention import scaled_dot_product_attention_vjp
from selfattn.functional.block_mask import BlockMask
from selfattn.functional.checks import check_vjp
from selfattn.functional.kv_cache import KVCache
from selfattn.functional.merge import merge_attention, merge_attention_vjp
from selfattn.functional.position_bias import relative_position_bias, relative_position_bias_vjp
from selfattn.functional.rowops import (
    apply_rotary_emb,
    apply_rotary_emb_vjp,
    gelu,
    gelu_vjp,
    layer_norm,
    layer_norm_vjp,
    log_softmax,
    log_softmax_vjp,
    rms_norm,
    rms_norm_vjp,
    softmax,
    softmax_vjp,
)
from selfattn.functional.tangents import scaled_dot_product_attention_hvp, scaled_dot_product_attention_jvp
from selfattn.functional.varlen import varlen_attention, varlen_attention_vjp

__all__ = [
    "AdditiveGradients",
    "AttentionGradients",
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
    "check_vjp",
    "gelu",
    "gelu_vjp",
    "layer_norm",
    "layer_norm_vjp",
    "log_softmax",
    "log_softmax_vjp",
    "merge_attention",
    "merge_attention_vjp",
    "relative_position_bias",
    "relative_position_bias_vjp",
    "rms_norm",
    "rms_norm_vjp",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_hvp",
    "scaled_dot_product_attention_jvp",
    "scaled_dot_product_attention_vjp",
    "softmax",
    "softmax_vjp",
    "varlen_attention",
    "varlen_attention_vjp",
]
