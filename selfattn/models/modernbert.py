"""ModernBERT: rotary positions, windows in two layers of three, gated GELU, norms first, no biases. Warner et al., 2024."""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn.engine.rope import plain_rope
from selfattn.engine.transformer import Layer, Transformer
from selfattn.models._folder import FULL, MOST_LAYERS, SLIDING, Config
from selfattn.models._pretrained import Parameters, Shapes
from selfattn.models._text_encoder import TextEncoder


class ModernBertModel(TextEncoder):
    """ModernBERT's encoder, under the names of ``transformers.ModernBertModel``. See :func:`selfattn.models.load`."""

    kinds: ClassVar[dict[str, str]] = {"modernbert": "ModernBert"}
    prefix = "model."
    has_fixed_settings = False
    word_table = "embeddings.tok_embeddings.weight"

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("hidden_size")
        self.num_layers = config.size("num_hidden_layers", least=0, most=MOST_LAYERS)
        self.num_heads = config.size("num_attention_heads")
        self.wide = config.size("intermediate_size")
        self.activation = config.activation("hidden_activation")
        self.max_positions = config.size("max_position_embeddings", 8192)
        self.eps = config.number("norm_eps", 1e-5)
        self.window = config.size("local_attention", 128) // 2
        self.biases = {name: config.flag(f"{name}_bias", False) for name in ("norm", "attention", "mlp")}
        self._read_layers(config)
        config.check_multiple("hidden_size", self.hidden_size, "2 * num_attention_heads", 2 * self.num_heads)

    def _read_layers(self, config: Config) -> None:
        """Read which layers have windows, and the angles of both kinds, in Transformers' old and new spelling."""
        every = config.size("global_attn_every_n_layers", 3)
        kinds = config.raw("layer_types") or [SLIDING if n % every else FULL for n in range(self.num_layers)]
        rope: Any = config.raw("rope_parameters") or {}
        theta = {FULL: config.number("global_rope_theta", 160000.0)}
        local = "local_rope_theta"
        theta[SLIDING] = theta[FULL] if config.raw(local, 10000.0) is None else config.number(local, 10000.0)
        if not isinstance(rope, dict) or set(rope) - {FULL, SLIDING}:
            raise config.error(f"rope_parameters must have {FULL} and {SLIDING} alone, not {rope!r}")
        for kind, default in list(theta.items()):
            own = rope.get(kind) or {}
            if own.get("rope_type", "default") != "default" or set(own) - {"rope_type", "rope_theta"}:
                raise config.error(f"rope_parameters {own!r} is not supported; only rope_type 'default' is")
            theta[kind] = config.inner(f"rope_parameters of {kind}", own).number("rope_theta", default)
        if len(kinds) != self.num_layers or set(kinds) - {FULL, SLIDING}:
            raise config.error(f"layer_types must name {FULL} or {SLIDING} for each layer, not {kinds!r}")
        config.only("rope_scaling", None)
        self.layer_types, self.theta = list(kinds), theta

    def _shapes(self) -> tuple[Shapes, set[str]]:
        d = self.hidden_size
        shapes: Shapes = {self.word_table: (self.vocab_size, d)} | self._shape("norm", "embeddings.norm", d)
        for n in range(self.num_layers):
            name = f"layers.{n}."
            if n > 0:  # the embedding's norm takes its place
                shapes |= self._shape("norm", f"{name}attn_norm", d)
            shapes |= self._shape("attention", f"{name}attn.Wqkv", 3 * d, d)
            shapes |= self._shape("attention", f"{name}attn.Wo", d, d)
            shapes |= self._shape("norm", f"{name}mlp_norm", d)
            shapes |= self._shape("mlp", f"{name}mlp.Wi", 2 * self.wide, d)
            shapes |= self._shape("mlp", f"{name}mlp.Wo", d, self.wide)
        return shapes | self._shape("norm", "final_norm", d), set()

    def _shape(self, kind: str, name: str, *shape: int) -> Shapes:
        return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if self.biases[kind] else {})

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            tuple(self._layer(p, n, longest) for n in range(self.num_layers)),
            table=p.weight(self.word_table),
            embedding_norm=p.norm("embeddings.norm", self.eps),
            final_norm=p.norm("final_norm", self.eps),
        )

    def _layer(self, p: Parameters, n: int, longest: int) -> Layer:
        name, kind = f"layers.{n}.", self.layer_types[n]
        d, dtype = self.hidden_size, self.arrays["embeddings.norm.weight"].dtype
        thirds = (slice(d * part, d * (part + 1)) for part in range(3))
        query, key, value = (p.projection(f"{name}attn.Wqkv", rows) for rows in thirds)
        return Layer(
            self.num_heads, query, key, value, output=p.projection(f"{name}attn.Wo"),
            attention_norm=p.norm(f"{name}attn_norm", self.eps) if n > 0 else None,
            gate=p.projection(f"{name}mlp.Wi", slice(0, self.wide)),
            up=p.projection(f"{name}mlp.Wi", slice(self.wide, 2 * self.wide)),
            down=p.projection(f"{name}mlp.Wo"), feed_forward_norm=p.norm(f"{name}mlp_norm", self.eps),
            norm_first=True, activation=self.activation,
            window=(None, None) if kind == FULL else (self.window, self.window),
            rotary=plain_rope(self.hidden_size // self.num_heads, self.theta[kind]).rotary(longest, dtype),
        )  # fmt: skip
