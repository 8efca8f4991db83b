"""Llama and its like (Mistral, Qwen2, SmolLM): RMSNorm first, rotary positions, grouped heads, a gated network.

Touvron et al., "LLaMA", 2023; Jiang et al., "Mistral 7B", 2023; Qwen team, "Qwen2", 2024.
"""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn.engine.rope import read_rope
from selfattn.engine.transformer import Norm, Transformer
from selfattn_models._causal import CausalModel
from selfattn_models._folder import FULL, MOST_LAYERS, SLIDING, Config
from selfattn_models._pretrained import Parameters, Pretrained
from selfattn_models._text_encoder import TextEncoder


class LlamaLayers(Pretrained):
    """What the folder of a Llama says, and the core's settings made of it.

    It is the base of Llama's language model and of its encoder.
    """

    kinds: ClassVar[dict[str, str]] = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}
    # What Transformers takes where config.json lacks a key: max_position_embeddings, num_key_value_heads, head_dim.
    usual: ClassVar[dict[str, tuple[int, int | None, int | None]]] = {
        "llama": (2048, None, None),
        "mistral": (131072, 8, None),
        "qwen2": (32768, None, None),
    }
    prefix = "model."
    buffers = (".rotary_emb.inv_freq",)
    word_table = "model.embed_tokens.weight"
    layer_name = "model.layers."
    usual_activation = "hidden_act", "silu"  # the key, and what it is by default
    usually_tied, usual_theta, usual_eps = False, 10000.0, 1e-6
    interleaved = False  # True: a head's rotary pairs are neighbours, as in GGUF's llama
    vocab_size: int
    max_positions: int
    fields: ClassVar[dict[str, str]] = {
        "attention_norm": "input_layernorm",
        "feed_forward_norm": "post_attention_layernorm",
        "query": "self_attn.q_proj",
        "key": "self_attn.k_proj",
        "value": "self_attn.v_proj",
        "output": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }

    def _read(self, config: Config) -> None:
        kind = self.config["model_type"]
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("hidden_size")
        self.num_layers = config.size("num_hidden_layers", least=0, most=MOST_LAYERS)
        self.num_heads = config.size("num_attention_heads")
        longest, key_heads, width = self.usual[kind]
        self.num_key_heads = config.size_or("num_key_value_heads", self.num_heads, key_heads)
        self.head_width = config.size_or("head_dim", max(1, self.hidden_size // self.num_heads), width)
        self.wide = config.size("intermediate_size")
        self.activation = config.activation(*self.usual_activation)
        self.max_positions = config.size("max_position_embeddings", longest)
        self.eps = config.number("rms_norm_eps", self.usual_eps)
        self.tied = config.flag("tie_word_embeddings", self.usually_tied)
        attention = kind not in ("mistral", "phi3", "qwen2") and config.flag("attention_bias", False)
        inner = kind in ("llama", "smollm3") and config.flag("mlp_bias", False)
        biased = {"query", "key", "value"} if attention or kind == "qwen2" else set()
        biased |= ({"output"} if attention else set()) | ({"gate", "up", "down"} if inner else set())
        self.unbiased = self.fields.keys() - biased
        self.attention_widths = self.num_heads * self.head_width, self.num_key_heads * self.head_width
        self._read_windows(config, kind)
        self._read_rope(config)
        heads = ("num_attention_heads", self.num_heads)
        if config.raw("head_dim", width) is None:
            config.check_multiple("hidden_size", self.hidden_size, *heads)
        config.check_multiple(*heads, "num_key_value_heads", self.num_key_heads)

    def _read_rope(self, config: Config) -> None:
        self.rope = read_rope(config, self.head_width, self.max_positions, self.usual_theta)

    def _read_windows(self, config: Config, kind: str) -> None:
        """Read how many tokens each layer attends to, the query's own included; None is all."""
        size, first = None, 0
        qwen = kind.startswith("qwen")
        if kind != "llama":
            size = config.size_or("sliding_window", None, 4096)
        if qwen:
            size = size if config.flag("use_sliding_window", False) else None
            first = config.size("max_window_layers", 28, least=0)
        usual = [FULL if size is None or n < first else SLIDING for n in range(self.num_layers)]
        kinds = config.raw("layer_types") or usual
        if not qwen and kinds != usual:
            raise config.error(f"layer_types {kinds!r} is not supported for {kind}")
        self._take_windows(config, kinds, size)

    def _take_windows(self, config: Config, kinds: Any, size: int | None) -> None:
        good = isinstance(kinds, list) and len(kinds) == self.num_layers
        good = good and all(kind in (FULL, SLIDING) for kind in kinds)
        if not good or (SLIDING in kinds and size is None):
            what = f"{FULL} or {SLIDING}, with a sliding_window,"
            raise config.error(f"layer_types must name {what} for each layer, not {kinds!r}")
        self.windows: list[int | None] = [size if kind == SLIDING else None for kind in kinds]

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            table=p.weight(self.word_table, self.vocab_size, self.hidden_size),
            layers=self._layers(p, longest),
            final_norm=self._norm(p, "model.norm", self.hidden_size),
        )

    def _norm(self, p: Parameters, name: str, width: int) -> Norm:
        return p.norm(name, width, self.eps, bias=False, offset=self.norm_offset)._replace(kind="rms")

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        window = self.windows[n]
        return {
            "num_key_heads": self.num_key_heads,
            "norm_first": True,
            "causal": True,
            "window": (None if window is None else window - 1, None),
            "rotary": self.rope.rotary(longest, dtype, self.interleaved),
        }


class LlamaForCausalLM(LlamaLayers, CausalModel):
    """A language model under the names of ``transformers.LlamaForCausalLM``. See :func:`selfattn_models.load`.

    ``MistralForCausalLM`` and ``Qwen2ForCausalLM`` of Transformers have the same names: ``model_type`` tells them
    apart.
    """

    suffix = "ForCausalLM"


class LlamaModel(LlamaLayers, TextEncoder):
    """A decoder that makes embeddings, under the names of ``transformers.LlamaModel``.

    See :func:`selfattn_models.load`.

    ``MistralModel`` and ``Qwen2Model`` of Transformers have the same names: ``model_type`` tells them apart. A token
    sees those before it, and those after it too if ``is_causal`` is false.

    Examples
    --------
    >>> import selfattn_models as models
    >>> config = {
    ...     "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...     "intermediate_size": 16,
    ... }
    >>> models.LlamaModel(config, rng=0).encode([[1, 2, 3], [4, 5]]).shape
    (2, 8)
    """

    heads = CausalModel.heads
    has_fixed_settings = False  # tables of angles are as long as a call needs them

    def _read(self, config: Config) -> None:
        super()._read(config)
        # How many keys a query sees on each side in a layer with a window of w tokens: in Transformers w − 1 if it
        # sees only those before it, and w if it also sees those after it.
        self.causal = config.flag("is_causal", True)
        self.sides = [None if w is None else w - self.causal for w in self.windows]

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        found, side = super()._options(n, longest, dtype), self.sides[n]
        return found if self.causal else found | {"causal": False, "window": (side, side)}

    def _name(self, name: str) -> str:
        return name.removeprefix(self.prefix)
