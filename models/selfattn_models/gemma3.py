"""Gemma 3, text alone: norms before and after attention and network, and of heads; windows in five layers of six.

Gemma team, "Gemma 3 Technical Report", 2025. Folders hold the weights of norms less 1.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from selfattn.engine.decoder import Decoder
from selfattn.engine.rope import NEW, OLD, read_rope
from selfattn.engine.transformer import Transformer
from selfattn.engine.weights import to_float32, to_kind
from selfattn_models._folder import FULL, SLIDING, Config
from selfattn_models._pretrained import Parameters
from selfattn_models.llama import LlamaForCausalLM, LlamaLayers, LlamaModel


class Gemma3Layers(LlamaLayers):
    """What the folder of a Gemma 3 says beyond a Llama's."""

    kinds: ClassVar[dict[str, str]] = {"gemma3_text": "Gemma3"}
    usual: ClassVar[dict[str, tuple[int, int | None, int | None]]] = {"gemma3_text": (131072, 4, 256)}
    usual_activation = "hidden_activation", "gelu_pytorch_tanh"
    usually_tied = True
    norm_offset = 1.0
    fields: ClassVar[dict[str, str]] = LlamaLayers.fields | {
        "attention_post_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_post_norm": "post_feedforward_layernorm",
        "query_norm": "self_attn.q_norm",
        "key_norm": "self_attn.k_norm",
    }

    def _read(self, config: Config) -> None:
        super()._read(config)
        self.scale = config.number("query_pre_attn_scalar", 256) ** -0.5
        self.table_factor = _root(self.hidden_size, config.raw("dtype") or config.raw("torch_dtype"))

    def _read_windows(self, config: Config, kind: str) -> None:
        every = config.size("sliding_window_pattern", 6)
        usual = [SLIDING if (n + 1) % every else FULL for n in range(self.num_layers)]
        self._take_windows(
            config, config.raw("layer_types") or usual, config.size_or("sliding_window", None, 4096)
        )

    def _read_rope(self, config: Config) -> None:
        """Read the angles of both kinds of layers, in Transformers' old and new spelling."""
        given, scaling = config.raw(NEW) or {}, config.raw(OLD) or {}
        if not isinstance(given, dict) or set(given) - {FULL, SLIDING} or not isinstance(scaling, dict):
            what = f"{NEW} must have {FULL} and {SLIDING} alone, and {OLD} be an object"
            raise config.error(f"{what}; they are {given!r:.80} and {scaling!r:.80}")
        self.ropes = {}
        thetas = {FULL: ("rope_theta", 1e6, scaling), SLIDING: ("rope_local_base_freq", 10000.0, {})}
        for kind, (name, usual, more) in thetas.items():
            theta, own = config.number(name, usual), given.get(kind) or {}
            if not isinstance(own, dict):
                raise config.error(f"{NEW} of {kind} must be an object, not {own!r:.80}")
            own = {"rope_theta": theta} | own | more
            own.pop("truncate", None)  # Transformers does not look for it here
            inner = config.inner(f"{NEW} of {kind}", {NEW: own})
            self.ropes[kind] = read_rope(inner, self.head_width, self.max_positions)

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return super()._settings(p, longest)._replace(table_factor=self.table_factor)

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        self.rope = self.ropes[FULL if self.windows[n] is None else SLIDING]
        return super()._options(n, longest, dtype) | {"scale": self.scale}


class Gemma3ForCausalLM(Gemma3Layers, LlamaForCausalLM):
    """A language model under the names of ``transformers.Gemma3ForCausalLM``. See :func:`selfattn_models.load`."""

    def _decoder(self, length: int) -> Decoder:
        """Return a decoder, a new one after norms have changed: it holds copies of them, plus 1."""
        norms = b"".join(array.tobytes() for array in self.arrays.values() if array.ndim == 1)
        if self._prepared.get("norms") != norms:
            self._prepared = {"norms": norms}
        return super()._decoder(length)


class Gemma3TextModel(Gemma3Layers, LlamaModel):
    """A decoder that makes embeddings, as EmbeddingGemma does, under the names of ``transformers.Gemma3TextModel``.

    With ``use_bidirectional_attention`` a token sees those after it too, and a layer with a window half of it on each
    side.
    """

    suffix = "TextModel"

    def _read(self, config: Config) -> None:
        super()._read(config)
        key = "use_bidirectional_attention"
        if config.raw(key) is not None and config.flag(key, False):
            # Transformers makes the window w // 2 + 1 tokens before it counts sides as LlamaModel does.
            self.sides = [None if w is None else w // 2 + 1 - self.causal for w in self.windows]
            self.causal = False


def _root(d: int, dtype: Any) -> float:
    """Return √d as a float of a folder's dtype: Transformers multiplies the rows of the table by that."""
    root = np.full((1, 1), math.sqrt(d), np.float32)
    if dtype == "bfloat16":
        root = to_float32(*to_kind("√d", root, dtype))
    return float((root.astype(np.float16) if dtype == "float16" else root)[0, 0])
