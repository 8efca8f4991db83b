"""Operations that call pretrained models, in the form of the core's catalogue (`operations.py` among the core's tests).

Only public names are used here, so that `tools/compare_builds.py` computes the same with an older package. `ALL` adds
calls that are refused; `model_memory_fails.py` and `model_races.py` try it.
"""

from operations import KINDS, made, operation, refused

import selfattn_models as models

CONFIG = {
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "intermediate_size": 96,
}
ENCODERS = {
    "BertModel": CONFIG,
    "RobertaModel": CONFIG | {"type_vocab_size": 1},
    "DistilBertModel": {
        "vocab_size": 300,
        "max_position_embeddings": 64,
        "n_layers": 1,
        "dim": 64,
        "n_heads": 2,
        "hidden_dim": 96,
    },
    "MPNetModel": CONFIG,
    "ModernBertModel": CONFIG | {"local_attention": 8},
    "BertForSequenceClassification": CONFIG | {"num_labels": 3},
}
CONFIGS = ENCODERS | {
    "LlamaForCausalLM": CONFIG | {"num_key_value_heads": 1},
    "GPT2LMHeadModel": {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "ViTModel": {
        "model_type": "vit",
        "image_size": 12,
        "patch_size": 4,
        "num_channels": 2,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "intermediate_size": 96,
    },
}


def model_of(name, kind=None):
    model = getattr(models, name)(CONFIGS[name], rng=0)
    return model if kind is None else model.quantize(kind)


def three_texts(d):
    return [d.ids(n).tolist() for n in (1, 49, 10)]


def pretrained(d, use, name, kind=None, given=three_texts):
    """Call a pretrained model with the given inputs."""
    model, x = made(model_of, name, kind), given(d)
    return lambda: use(model, x), [x, *model.parameters().values()]


def encode(model, ids):
    run = model.predict if "Classification" in type(model).__name__ else model.encode
    return run(ids), model.hidden_states(ids[1][:20])


def encode_vjp(model, ids):
    y, pullback = model.vjp(ids)
    return y, pullback(y)


def see(model, pixels):
    return model(pixels), model.hidden_states(pixels[0])


def answer(model, ids):
    return model.logits(ids), model.hidden_states(ids), model.generate(ids, 4)


def quantizing(d, kind):
    """A model that is rounded, and packed at its first use."""
    state, ids = made(model_of, "BertModel").state_dict(), three_texts(d)
    return lambda: models.BertModel(CONFIG, state).quantize(kind).encode(ids), [*state.values(), *ids]


OPERATIONS = {
    **{name: operation(pretrained, use=encode, name=name) for name in ENCODERS},
    **{
        f"{name} of {kind}": operation(pretrained, use=encode, name=name, kind=kind)
        for name in ("BertModel", "ModernBertModel")
        for kind in KINDS
    },
    **{
        f"gradients of {name}": operation(pretrained, use=encode_vjp, name=name)
        for name in ("BertModel", "ModernBertModel")
    },
    **{f"rounding to {kind}": operation(quantizing, kind=kind, long=True) for kind in KINDS},
    "pictures": operation(pretrained, use=see, name="ViTModel", given=lambda d: d.normal(3, 2, 12, 12)),
    "GPT2LMHeadModel": operation(pretrained, use=answer, name="GPT2LMHeadModel", given=lambda d: d.ids(40)),
    **{
        f"LlamaForCausalLM of {kind}": operation(
            pretrained, use=answer, name="LlamaForCausalLM", kind=kind, given=lambda d: d.ids(40)
        )
        for kind in [None, *KINDS]
    },
}


def wrong_texts(d):
    """Wrong calls of an encoder of texts and its pullback: ids, an array of another shape."""
    bert = made(model_of, "BertModel")
    y, pullback = bert.vjp([[1, 2], [3]])
    return [(bert.encode, ([[300]],)), (pullback, (y[:1],))]


ALL = OPERATIONS | {"refused: texts": operation(refused, calls=wrong_texts)}
