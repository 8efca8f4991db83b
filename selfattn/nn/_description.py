"""What TransformerEncoderLayers say to the core: parameters as it reads them, and the parameter of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from selfattn._check import Array, one_of, seed_from_rng
from selfattn.engine import transformer
from selfattn.engine.weights import Compact, is_compact
from selfattn.functional._products import plain
from selfattn.nn.layers import Dropout, Linear
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.rows import LayerNorm, RMSNorm

ACTIVATIONS = ("relu", "gelu")


class Description:
    """Describes layers to the core.

    It remembers which parameter each of the core's arrays comes from, for the gradients.
    """

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        # Keys are ids of arrays that the core reads; values are the array and its parameter.
        self.origins: dict[int, tuple[Array, Array]] = {}

    def array(self, parameter: Any) -> Any:
        """Return a parameter as the core reads it; 16-bit floats become float32."""
        if parameter is None or isinstance(parameter, Compact):
            return parameter
        taken = plain(parameter, self.dtype)
        self.origins[id(taken)] = taken, parameter
        return taken

    def projection(self, weight: Any, bias: Array | None) -> transformer.Projection:
        """Describe a product."""
        return transformer.Projection(self.array(weight), self.array(bias))

    def norm(self, norm: Any) -> transformer.Norm:
        """Describe a LayerNorm or RMSNorm with a weight."""
        if isinstance(norm, RMSNorm):
            eps = np.finfo(self.dtype).eps if norm.eps is None else norm.eps
            return transformer.Norm(self.array(norm.weight), None, float(eps), "rms")
        return transformer.Norm(self.array(norm.weight), self.array(norm.bias), float(norm.eps))

    def layer(self, layer: Any, is_causal: bool) -> transformer.Layer:
        """Describe a layer."""
        attention, linear1, linear2 = layer.self_attn, layer.linear1, layer.linear2
        # The core takes rounded query, key and value separately.
        inputs: list[tuple[Any, Array | None]] = [(attention.in_proj_weight, attention.in_proj_bias)]
        if is_compact(inputs[0][0]):
            inputs = attention._projections()
        query, *others = [self.projection(weight, bias) for weight, bias in inputs]
        key, value = others or (None, None)
        return transformer.Layer(
            attention.num_heads,
            query,
            key,
            value,
            output=self.projection(attention.out_proj._operand("weight"), attention.out_proj.bias),
            attention_norm=self.norm(layer.norm1),
            up=self.projection(linear1._operand("weight"), linear1.bias),
            down=self.projection(linear2._operand("weight"), linear2.bias),
            feed_forward_norm=self.norm(layer.norm2),
            norm_first=bool(layer.norm_first),
            activation="relu" if layer.activation == "relu" else "gelu",
            causal=is_causal,
        )

    def compute(
        self,
        keep: bool,
        model: transformer.Transformer,
        inputs: Array,
        cu_seqlens: Array,
        call: transformer.Call,
        *,
        wants_rows: bool = True,
    ) -> tuple[Array, Any]:
        """Compute the rows of a model and, with ``keep``, ``dy -> (dx, pairs (parameter, gradient))``.

        ``dx`` is None if it is not wanted.
        """
        if not keep:
            return transformer.forward(model, inputs, cu_seqlens, call), None
        rows, core_back = transformer.vjp(model, inputs, cu_seqlens, call, wants_rows=wants_rows)

        def back(dy: Array) -> tuple[Any, list[tuple[Array, Array]]]:
            dx, grads, _ = core_back(dy)
            taken = zip(transformer.arrays(model), grads, strict=True)
            return dx, [(self.origins[id(array)][1], grad) for array, grad in taken]

        return rows, back


def dropouts(layers: Iterable[Any]) -> tuple[transformer.Dropout, ...]:
    """Return the dropout of layers in their current mode, each with a new seed; nothing if no layer drops."""
    found = []
    for layer in layers:
        attention = layer.self_attn
        after = (own.p if own.training else 0.0 for own in (layer.dropout1, layer.dropout, layer.dropout2))
        drops = [float(p) for p in (attention.dropout if attention.training else 0.0, *after)]
        seed = seed_from_rng(attention.rng) if any(drops) else 0
        found.append(transformer.Dropout._make([*drops, seed]))
    return tuple(found) if any(any(own[:-1]) for own in found) else ()


def check_layer(layer: Any) -> None:
    """Refuse a layer with submodules that the core cannot compute."""
    kinds = {
        "self_attn": MultiheadAttention,
        "norm1": LayerNorm,
        "linear1": Linear,
        "linear2": Linear,
        "norm2": LayerNorm,
        "dropout": Dropout,
        "dropout1": Dropout,
        "dropout2": Dropout,
    }
    why = "the core computes the layer as a whole; for other modules, compose a layer of your own"
    for name, kind in kinds.items():
        if (found := type(getattr(layer, name))) is not kind:
            wanted = f"a {kind.__name__}, not {found.__name__}"
            raise TypeError(f"{name} of a TransformerEncoderLayer must be {wanted}: {why}")
    for name, lacks, wanted in (
        ("norm1", layer.norm1.weight is None, "a weight"),
        ("norm2", layer.norm2.weight is None, "a weight"),
        ("self_attn", layer.self_attn.in_proj_weight is None, "keys and values as wide as its queries"),
    ):
        if lacks:
            raise ValueError(f"{name} of a TransformerEncoderLayer must have {wanted}: {why}")
    one_of("activation", layer.activation, ACTIVATIONS)
