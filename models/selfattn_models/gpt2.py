"""GPT-2: learned positions, LayerNorm first, biases everywhere; and a GPT of one's own as GPT-2.

Radford et al., 2019.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from selfattn.engine import Array, import_extra
from selfattn.engine.transformer import Transformer
from selfattn.engine.weights import is_compact
from selfattn.nn.gpt import GPT
from selfattn_models._causal import CausalModel
from selfattn_models._folder import Config
from selfattn_models._pretrained import Parameters

OWN_NAMES = {  # the names of arrays of nn.GPT, and below of its layers
    "token_embedding.weight": "wte.weight",
    "position_embedding.weight": "wpe.weight",
    "norm.weight": "ln_f.weight",
    "norm.bias": "ln_f.bias",
}
OWN_LAYER_NAMES = {
    "self_attn.in_proj_": "attn.c_attn.",
    "self_attn.out_proj.": "attn.c_proj.",
    "linear1.": "mlp.c_fc.",
    "linear2.": "mlp.c_proj.",
    "norm1.": "ln_1.",
    "norm2.": "ln_2.",
}


class GPT2LMHeadModel(CausalModel):
    """A language model under the names of ``transformers.GPT2LMHeadModel``. See :func:`selfattn_models.load`."""

    kinds: ClassVar[dict[str, str]] = {"gpt2": "GPT2"}
    suffix = "LMHeadModel"
    prefix = "transformer."
    buffers = (".attn.bias", ".attn.masked_bias")  # the causal mask
    transposed = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
    word_table = "transformer.wte.weight"
    layer_name = "transformer.h."
    fields: ClassVar[dict[str, str]] = {
        "attention_norm": "ln_1",
        "feed_forward_norm": "ln_2",
        "query": "attn.c_attn",
        "key": "attn.c_attn",
        "value": "attn.c_attn",
        "output": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size", 50257)
        self.hidden_size = config.size("n_embd", 768)
        self.num_layers = config.size("n_layer", 12, least=0)
        self.num_heads = config.size("n_head", 12)
        self.wide = config.size_or("n_inner", 4 * self.hidden_size)
        self.activation = config.activation("activation_function", "gelu_new")
        self.max_positions = config.size("n_positions", 1024)
        self.eps = config.number("layer_norm_epsilon", 1e-5)
        self.tied = config.flag("tie_word_embeddings", True)
        self.scaled = config.flag("scale_attn_weights", True)
        self.scaled_by_layer = config.flag("scale_attn_by_inverse_layer_idx", False)
        config.check_multiple("n_embd", self.hidden_size, "n_head", self.num_heads)

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            table=p.weight(self.word_table, self.vocab_size, self.hidden_size),
            positions=p.array("transformer.wpe.weight", self.max_positions, self.hidden_size),
            layers=self._layers(p, longest),
            final_norm=self._norm(p, "transformer.ln_f", self.hidden_size),
        )

    def _options(self, n: int, longest: int, dtype: Any) -> dict[str, Any]:
        scale = (self.hidden_size // self.num_heads) ** -0.5 if self.scaled else 1.0
        scale = scale / (n + 1) if self.scaled_by_layer else scale
        return {"norm_first": True, "causal": True, "scale": scale}


def as_gpt2(gpt: GPT, tokenizer: Any = None) -> GPT2LMHeadModel:
    """Return a GPT-2 that computes what a GPT computes, with copies of its parameters and a tokenizer.

    The GPT must have learned positions, norms first, and biases, as GPT-2 does; else a ValueError.
    """
    state = gpt.state_dict()
    has = {
        'positions="learned"': gpt.positions == "learned",
        "norm_first=True": gpt.norm is not None,
        "bias=True": any(name.endswith("bias") for name in state),
        "weights of floats, not rounded ones": not any(map(is_compact, state.values())),
    }
    if lacks := [name for name, found in has.items() if not found]:
        raise ValueError(f"this GPT is no GPT-2, which Transformers has: it lacks {', '.join(lacks)}")
    assert gpt.norm is not None
    state = {name: np.asarray(array, np.float32) for name, array in state.items()}
    layers: list[Any] = list(gpt.layers)
    first = layers[0] if layers else None
    wide = 4 * gpt.d_model if first is None else first.linear1.out_features
    config = {
        "model_type": "gpt2",
        "vocab_size": gpt.vocab_size,
        "n_embd": gpt.d_model,
        "n_layer": len(layers),
        "n_head": gpt.num_heads,
        "n_positions": gpt.max_seq_len,
        "n_inner": wide,
        "activation_function": "gelu" if first is None else first.activation,
        "layer_norm_epsilon": gpt.norm.eps,
        "tie_word_embeddings": gpt.head.weight is gpt.token_embedding.weight,
        "bos_token_id": None,
        "eos_token_id": None,
        **dict.fromkeys(("attn_pdrop", "resid_pdrop"), 0.0 if first is None else first.dropout.p),
        "embd_pdrop": 0.0,
    }
    names = _names(len(layers), bool(config["tie_word_embeddings"]))
    model = GPT2LMHeadModel(config, {new: _turned(old, state[old]) for old, new in names.items()})
    model.tokenizer = tokenizer
    return model


def as_gpt(model: GPT2LMHeadModel) -> GPT:
    """Return a GPT that computes what a GPT-2 computes, with copies of its parameters as float32.

    This is the inverse of :func:`as_gpt2`.
    """
    config, state = model.config, model.state_dict()
    if not model.scaled or model.scaled_by_layer or model.dtype not in ("float32", "float64"):
        raise ValueError("only a GPT-2 with the usual scale of scores and weights of float32 is a GPT")
    names = _names(model.num_layers, model.tied)
    gpt = GPT(
        model.vocab_size,
        model.hidden_size,
        model.num_layers,
        model.num_heads,
        model.max_positions,
        dim_feedforward=config.get("n_inner"),
        activation=model.activation,
        tie_word_embeddings=model.tied,
        layer_norm_eps=model.eps,
        rng=0,
    )
    own = {old: np.float32(_turned(old, state[new])) for old, new in names.items()}
    gpt.load_state_dict(own)
    return gpt


def _names(layers: int, tied: bool) -> dict[str, str]:
    """Return the names of a GPT's parameters, each with GPT-2's."""
    names = {old: f"transformer.{new}" for old, new in OWN_NAMES.items()}
    for n in range(layers):
        for old, new in OWN_LAYER_NAMES.items():
            for kind in ("weight", "bias"):
                names[f"layers.{n}.{old}{kind}"] = f"transformer.h.{n}.{new}{kind}"
    return names | ({} if tied else {"head.weight": "lm_head.weight"})


def _turned(name: str, array: Array) -> Array:
    """Transpose the matrices of layers, which GPT-2 has as (in, out)."""
    return array.T if name.startswith("layers.") and array.ndim == 2 else array


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer of single characters, each once; other characters become U+FFFD, the id 0."""
    library = import_extra("tokenizers")
    unknown = "\ufffd"
    known = [unknown, *(character for character in characters if character != unknown)]
    vocabulary = {character: n for n, character in enumerate(known)}
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.decoder = library.decoders.Fuse()
    return tokenizer
