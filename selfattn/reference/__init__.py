"""Attention and the other operations of selfattn in plain NumPy. Read `attention.py` first.

This package is written to be easy to read and check, not to be fast: the C core of selfattn is tested against
these functions, and :mod:`selfattn.steps` shows their intermediate results. They import nothing but NumPy.

At its heart attention is four lines::

    scores  = query @ key.T * scale                   # how well does each query fit each key?
    scores  = where(allowed, scores, -inf)            # masks
    weights = softmax(scores)                         # each row: positive, with sum 1
    output  = weights @ value                         # each row: a weighted mean of the values

:func:`scaled_dot_product_attention` is those lines with every option; each line is a small function after it in
`attention.py`, differentiated in `attention_vjp.py` and once more in `attention_jvp.py`. `rows.py` has the other
operations of a Transformer, each about as long as its formula, `rows_vjp.py` their gradients, `dropout.py` the random
numbers of dropout, `additive.py` Bahdanau's score, `varlen.py` packed sequences, `transformer.py` whole layers over
them. `call.py` says which pairs a call of attention allows.

Shape letters: ``...`` are leading (batch and head) dims, H the heads, L the queries, S the keys, E the
width of a query and of a key, Ev the width of a value.

Arguments and results of a function are those of the function of that name in :mod:`selfattn`, except for
``compute_dtype``, which is only here, and ``out`` and ``num_threads``, which are only there. Attention always has
all its gradients, without ``wrt``. The docstrings here say what a function computes. Arguments are not checked: what
does not fit is an error of NumPy's, or has no meaning; the core and :func:`selfattn.attention_steps` say what is wrong.

**Precision.** The dtype of results is the promoted dtype of the inputs; integers count as float64. The computation is
in float64 for float64, else in float32. Every function takes ``compute_dtype``: with ``np.float64`` the inputs are
converted first, and the result stays float64, for comparison with results in fewer bits.

**NaN and infinities** in attended values follow arithmetic, without warnings. Masked values have no effect.
"""

from selfattn._gradient_tuples import (
    AdditiveGradients,
    AttentionGradients,
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
)
from selfattn.reference.additive import additive_attention, additive_attention_vjp
from selfattn.reference.attention import merge_attention, scaled_dot_product_attention
from selfattn.reference.attention_jvp import (
    scaled_dot_product_attention_hvp,
    scaled_dot_product_attention_jvp,
)
from selfattn.reference.attention_vjp import scaled_dot_product_attention_vjp
from selfattn.reference.dropout import dropout_keep_mask, philox4x32
from selfattn.reference.rows import apply_rotary_emb, gelu, layer_norm, log_softmax, rms_norm, softmax
from selfattn.reference.rows_vjp import (
    apply_rotary_emb_vjp,
    gelu_vjp,
    layer_norm_vjp,
    log_softmax_vjp,
    merge_attention_vjp,
    rms_norm_vjp,
    softmax_vjp,
)
from selfattn.reference.transformer import transformer, transformer_vjp
from selfattn.reference.varlen import varlen_attention, varlen_attention_vjp

__all__ = [
    "AdditiveGradients",
    "AttentionGradients",
    "LayerNormGradients",
    "MergeGradients",
    "RMSNormGradients",
    "RotaryGradients",
    "additive_attention",
    "additive_attention_vjp",
    "apply_rotary_emb",
    "apply_rotary_emb_vjp",
    "dropout_keep_mask",
    "gelu",
    "gelu_vjp",
    "layer_norm",
    "layer_norm_vjp",
    "log_softmax",
    "log_softmax_vjp",
    "merge_attention",
    "merge_attention_vjp",
    "philox4x32",
    "rms_norm",
    "rms_norm_vjp",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_hvp",
    "scaled_dot_product_attention_jvp",
    "scaled_dot_product_attention_vjp",
    "softmax",
    "softmax_vjp",
    "transformer",
    "transformer_vjp",
    "varlen_attention",
    "varlen_attention_vjp",
]
