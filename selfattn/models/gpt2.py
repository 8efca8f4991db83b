"""GPT-2: learned positions, LayerNorm first, biases everywhere. Radford et al., 2019."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from selfattn._check import Array
from selfattn.engine.transformer import Layer, Transformer
from selfattn.models._causal import CausalModel
from selfattn.models._config import Config
from selfattn.models._pretrained import Parameters, Shapes
from selfattn.models._pretrained import norm as norm_shapes

# Transformers keeps these transposed, (in, out). Here they are held as (out, in), and shown transposed.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


class GPT2LMHeadModel(CausalModel):
    """A language model under the names of ``transformers.GPT2LMHeadModel``. See :func:`selfattn.models.load`."""

    kinds: ClassVar[dict[str, str]] = {"gpt2": "GPT2"}
    suffix = "LMHeadModel"
    prefix = "transformer."
    buffers = (".attn.bias", ".attn.masked_bias")  # the causal mask
    word_table = "transformer.wte.weight"

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size", 50257)
        self.hidden_size = config.size("n_embd", 768)
        self.num_layers = config.size("n_layer", 12, least=0)
        self.num_heads = config.size("n_head", 12)
        inner = config.raw("n_inner")
        self.wide = 4 * self.hidden_size if inner is None else config.size("n_inner")
        self.activation = config.activation("activation_function", "gelu_new")
        self.max_positions = config.size("n_positions", 1024)
        self.eps = config.number("layer_norm_epsilon", 1e-5)
        self.tied = config.flag("tie_word_embeddings", True)
        self.scaled = config.flag("scale_attn_weights", True)
        self.scaled_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
        config.only("add_cross_attention", False)
        for name in (
            "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "reorder_and_upcast_attn", "summary_type", "summary_use_proj",
            "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        ):  # fmt: skip
            config.raw(name)  # of training, of another head, and the order of a product
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{config.where}: n_embd {self.hidden_size} must be a multiple of n_head {self.num_heads}"
            )

    def _shapes(self) -> tuple[Shapes, set[str]]:
        d, wide = self.hidden_size, self.wide
        shapes: Shapes = {
            self.word_table: (self.vocab_size, d),
            "transformer.wpe.weight": (self.max_positions, d),
        }
        for n in range(self.num_layers):
            name = f"transformer.h.{n}."
            shapes |= norm_shapes(f"{name}ln_1", d) | norm_shapes(f"{name}ln_2", d)
            for part, into, out in (
                ("attn.c_attn", d, 3 * d),
                ("attn.c_proj", d, d),
                ("mlp.c_fc", d, wide),
                ("mlp.c_proj", wide, d),
            ):
                shapes |= {f"{name}{part}.weight": (into, out), f"{name}{part}.bias": (out,)}
        shapes |= norm_shapes("transformer.ln_f", d)
        return shapes | ({} if self.tied else {"lm_head.weight": (self.vocab_size, d)}), set()

    def _taken(self, name: str, array: Array) -> Array:
        if not name.endswith(TRANSPOSED):
            return array
        if array.dtype == np.int8:
            raise ValueError(
                f"{name} is int8; GPT-2's weights are rounded to it when they are loaded, not before"
            )
        return np.ascontiguousarray(array.T)

    def _taken_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape[::-1] if name.endswith(TRANSPOSED) else shape

    def _shown(self, name: str, array: Array) -> Array:
        # Of int8 the scales belong to rows of what is held.
        return array.T if name.endswith(TRANSPOSED) and array.dtype != np.int8 else array

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            tuple(self._layer(p, n) for n in range(self.num_layers)),
            table=p.weight(self.word_table),
            positions=p.array("transformer.wpe.weight"),
            final_norm=p.norm("transformer.ln_f", self.eps),
        )

    def _layer(self, p: Parameters, n: int) -> Layer:
        name, d = f"transformer.h.{n}.", self.hidden_size
        query, key, value = (
            p.projection(f"{name}attn.c_attn", slice(d * part, d * (part + 1))) for part in range(3)
        )
        scale = (d // self.num_heads) ** -0.5 if self.scaled else 1.0
        return Layer(
            self.num_heads,
            query,
            key,
            value,
            output=p.projection(f"{name}attn.c_proj"),
            attention_norm=p.norm(f"{name}ln_1", self.eps),
            up=p.projection(f"{name}mlp.c_fc"),
            down=p.projection(f"{name}mlp.c_proj"),
            feed_forward_norm=p.norm(f"{name}ln_2", self.eps),
            norm_first=True,
            activation=self.activation,
            causal=True,
            scale=scale / (n + 1) if self.scaled_by_layer else scale,
        )
