"""A GPT of one's own, :class:`selfattn.nn.GPT`, as Transformers' GPT-2, so that it can be saved, loaded and given texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from selfattn._extras import import_extra
from selfattn.models.gpt2 import GPT2LMHeadModel
from selfattn.nn.gpt import GPT

# Names within a layer, there and here; the weights of products are transposed in GPT-2.
PRODUCTS = {
    "self_attn.in_proj_": "attn.c_attn.", "self_attn.out_proj.": "attn.c_proj.", "linear1.": "mlp.c_fc.",
    "linear2.": "mlp.c_proj.",
}  # fmt: skip
NORMS = {"norm1.": "ln_1.", "norm2.": "ln_2."}


def as_gpt2(gpt: GPT, tokenizer: Any = None) -> GPT2LMHeadModel:
    """Return a GPT as a GPT-2 that computes the same.

    Parameters
    ----------
    gpt : nn.GPT
        With learned positions, the norms first, and biases: what GPT-2 has.
    tokenizer : tokenizers.Tokenizer, optional
        The new model's.

    Returns
    -------
    GPT2LMHeadModel
        Its parameters are copies.

    Raises
    ------
    ValueError
        The model has something that GPT-2 has not.
    """
    state = {name: np.asarray(array, np.float32) for name, array in gpt.state_dict().items()}
    if gpt.positions != "learned" or gpt.norm is None or "norm.bias" not in state:
        raise ValueError("only a GPT with learned positions, norm_first and biases is a GPT-2")
    layers: list[Any] = list(gpt.layers)
    first = layers[0] if layers else None
    wide = 4 * gpt.d_model if first is None else first.linear1.out_features
    config = {
        "model_type": "gpt2", "vocab_size": gpt.vocab_size, "n_embd": gpt.d_model, "n_layer": len(layers),
        "n_head": gpt.num_heads, "n_positions": gpt.max_seq_len, "n_inner": wide,
        "activation_function": "gelu" if first is None else first.activation, "layer_norm_epsilon": gpt.norm.eps,
        "tie_word_embeddings": gpt.head.weight is gpt.token_embedding.weight, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    arrays = {
        "transformer.wte.weight": state["token_embedding.weight"],
        "transformer.wpe.weight": state["position_embedding.weight"],
        "transformer.ln_f.weight": state["norm.weight"],
        "transformer.ln_f.bias": state["norm.bias"],
    }
    if not config["tie_word_embeddings"]:
        arrays["lm_head.weight"] = state["head.weight"]
    for n in range(len(layers)):
        for old, new in (PRODUCTS | NORMS).items():
            for kind in ("weight", "bias"):
                array = state[f"layers.{n}.{old}{kind}"]
                arrays[f"transformer.h.{n}.{new}{kind}"] = array.T if array.ndim == 2 else array
    model = GPT2LMHeadModel(config, arrays)
    model.tokenizer = tokenizer
    return model


def character_tokenizer(characters: str) -> Any:
    """Return a tokenizer of single characters, each once; another one becomes U+FFFD, the id 0.

    Raises
    ------
    ImportError
        ``tokenizers`` is not installed: ``pip install 'selfattn[models]'``.
    """
    library = import_extra("tokenizers", "models")
    unknown = "\ufffd"
    known = [unknown, *(character for character in characters if character != unknown)]
    vocabulary = {character: n for n, character in enumerate(known)}
    tokenizer = library.Tokenizer(library.models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.decoder = library.decoders.Fuse()
    return tokenizer
