"""Multi-head attention, as ``torch.nn.MultiheadAttention``."""

from __future__ import annotations

import math
from typing import Any

from selfattn import nn as layers
from selfattn.tape.dtypes import bool_
from selfattn.tape.generator import default_generator
from selfattn.tape.nn import functional
from selfattn.tape.nn.layers import Linear, dtype_of_layer
from selfattn.tape.nn.module import Module
from selfattn.tape.tensors import Parameter, Tensor, wrap

f: Any = functional


class MultiheadAttention(Module):
    """Attention of several heads with their projections.

    Parameters
    ----------
    embed_dim, num_heads : int
    dropout : float, default 0.0
        Of the weights.
    bias : bool, default True
    batch_first : bool, default False
        Whether inputs are (N, L, E) and not (L, N, E).

    Notes
    -----
    ``add_bias_kv``, ``add_zero_attn``, ``kdim`` and ``vdim`` are not here.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, *, batch_first: bool = False,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        made: Any = layers.MultiheadAttention(
            embed_dim, num_heads, bias=bias, dtype=dtype_of_layer(dtype), rng=default_generator()
        )
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.in_proj_weight = Parameter(wrap(made.in_proj_weight))
        self.register_parameter("in_proj_bias", Parameter(wrap(made.in_proj_bias)) if bias else None)
        self.out_proj = Linear.of_arrays(made.out_proj.weight, made.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from queries to keys; a True of a mask closes a pair, a number is added to its score."""
        batched, inputs = query.ndim == 3, (query, key, value)
        if not batched:
            inputs = tuple(x.unsqueeze(0) for x in inputs)
        elif not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        bias: Any = self.in_proj_bias
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        q, k, v = (
            f.linear(x, w, b).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, w, b in zip(inputs, self.in_proj_weight.chunk(3), biases, strict=True)
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = f.softmax(scores if mask is None else scores + mask, dim=-1)
            out = f.dropout(weights, p) @ v
        else:
            out = f.scaled_dot_product_attention(q, k, v, mask, p, is_causal and attn_mask is None)
        out = self.out_proj(out.transpose(1, 2).flatten(-2))
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights.mean(-3) if weights is not None and average_attn_weights else weights

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
        """Return the numbers that both masks add to the scores (N, H, L, S)."""
        found: Any = None
        for given, shape in ((attn_mask, None), (key_padding_mask, (q.shape[0], 1, 1, -1))):
            if given is None:
                continue
            mask: Any = given
            if mask.dtype is bool_:
                mask = q.new_zeros(mask.shape).masked_fill(mask, -math.inf)
            mask = mask.reshape(shape) if shape else mask
            if mask.ndim == 3:
                mask = mask.reshape(q.shape[0], -1, *mask.shape[1:])
            found = mask if found is None else found + mask
        return found
