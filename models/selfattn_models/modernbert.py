"""ModernBERT: rotary positions, windows in two layers of three, gated GELU, norms first, no biases.

Warner et al., 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn.engine.rope import plain_rope
from selfattn.engine.transformer import Norm, Transformer
from selfattn_models._folder import FULL, MOST_LAYERS, SLIDING, Config
from selfattn_models._pretrained import Parameters
from selfattn_models._text_encoder import TextEncoder


class ModernBertModel(TextEncoder):
    """ModernBERT's encoder, under the names of ``transformers.ModernBertModel``. See :func:`selfattn_models.load`."""

    kinds: ClassVar[dict[str, str]] = {"modernbert": "ModernBert"}
    prefix = "model."
    has_fixed_settings = False
    word_table = "embeddings.tok_embeddings.weight"
    layer_name = "layers."
    fields: ClassVar[dict[str, str]] = {
        "attention_norm": "attn_norm",
        "query": "attn.Wqkv",
        "key": "attn.Wqkv",
        "value": "attn.Wqkv",
        "output": "attn.Wo",
        "feed_forward_norm": "mlp_norm",
        "gate": "mlp.Wi",
        "up": "mlp.Wi",
        "down": "mlp.Wo",
    }

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
        outer = set() if self.biases["attention"] else {"query", "key", "value", "output"}
        self.unbiased = outer | (set() if self.biases["mlp"] else {"gate", "up", "down"})
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

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            table=p.weight(self.word_table, self.vocab_size, self.hidden_size),
            embedding_norm=self._norm(p, "embeddings.norm", self.hidden_size),
            layers=self._layers(p, longest),
            final_norm=self._norm(p, "final_norm", self.hidden_size),
        )

    def _norm(self, p: Parameters, name: str, width: int) -> Norm:
        return p.norm(name, width, self.eps, self.biases["norm"])

    def _fields(self, n: int) -> dict[str, str]:  # the embedding's norm takes the place of the first
        return {field: name for field, name in self.fields.items() if n > 0 or field != "attention_norm"}

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        kind, rotary = self.layer_types[n], None
        if longest:
            rope = plain_rope(self.hidden_size // self.num_heads, self.theta[kind])
            rotary = rope.rotary(longest, dtype)
        window = (None, None) if kind == FULL else (self.window, self.window)
        return {"norm_first": True, "window": window, "rotary": rotary}
