"""Targets of `fuzzing_models` that are language models' files: their configurations, settings, and GGUF."""

import functools
import json
import tempfile
from pathlib import Path

from architectures import LANGUAGE
from gguf_files import byte_level, sentencepiece, write
from hostile import SENTENCE, closest, contents, dumps, put_parts, reads, use
from language_folders import SPECIAL, TEMPLATE, make_tokenizer

import selfattn_models as models
from selfattn_models import loading

COMMON = {
    "vocab_size": 300,
    "eos_token_id": [1, 2],
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
OF_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
NAMED = {
    name: config
    | (
        OF_GPT2 | {"vocab_size": 300}
        if family == "GPT2"
        else COMMON | {"architectures": [f"{family}ForCausalLM"]}
    )
    | {"model_type": name.split()[0]}
    for name, (family, config) in LANGUAGE.items()
}
FAR = {"original_max_position_embeddings": 32}
LANGUAGE_CONFIGS = [
    *NAMED.values(),
    *(
        NAMED["llama"]
        | {"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "rope_scaling": scaling}
        for scaling in (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | FAR,
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32.0} | FAR,
            {"type": "longrope", "short_factor": [1.0, 2.0, 1.0], "long_factor": [1.0, 2.0, 1.0]} | FAR,
        )
    ),
    NAMED["llama"]
    | {"hidden_act": "silu", "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
]
SPEAKS = {
    "eos_token": "<|end|>",
    "chat_template": TEMPLATE,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "truncation_side": "right",
}


@functools.cache
def speaking(n=0):
    """The files of a small language model, by their path."""
    config = LANGUAGE_CONFIGS[n]
    with tempfile.TemporaryDirectory() as name:
        models.save(loading.MODELS[config["model_type"]](config, rng=0), name)
        found = contents(Path(name))
    return found | {
        "tokenizer.json": make_tokenizer().to_str().encode(),
        "tokenizer_config.json": dumps(SPEAKS),
        "special_tokens_map.json": dumps({"bos_token": {"content": "<|user|>", "lstrip": False}}),
        "generation_config.json": dumps({"eos_token_id": [256], "temperature": 0.6, "do_sample": True}),
    }


def use_language_model(folder, name=""):
    """Load a language model and compute with it; results of random numbers are not checked."""
    model, again = models.load(folder / name), folder / "again"
    use(model.tokens, SENTENCE)
    use(model.logits, [0, 1, 2])
    use(lambda: model.generate(SENTENCE, 4, sampling="folder", rng=0))
    use(lambda: model.generate([[1], [2, 3]], 4, temperature=0.7, stop=None, rng=0))
    if model.chat_template is not None:
        use(model.chat_prompt, SENTENCE)
    use(models.save, model, again)
    if again.exists():
        models.load(again)


read_language_config = reads(
    "config.json",
    use_language_model,
    lambda content: speaking(closest(content, LANGUAGE_CONFIGS, "attention_bias")),
)


# A folder's settings in one: {path: content}.
SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def some_settings():
    one = {name: json.loads(speaking()[name]) for name in SETTINGS}
    named = [{"name": "default", "template": TEMPLATE}, {"name": "tools", "template": "{{ tools }}"}]
    return [
        dumps(one),
        dumps(one | {"generation_config.json": {"eos_token_id": 2}}),
        dumps(one | {"tokenizer_config.json": SPEAKS | {"chat_template": named, "bos_token": "<|user|>"}}),
    ]


def read_settings(folder, content):
    put_parts(folder, speaking(), SETTINGS, content)
    use_language_model(folder)


@functools.cache
def some_gguf():
    """Small files of several architectures and kinds, with SentencePiece's or bytes' tokens."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    scores = {piece: -float(n) for n, piece in enumerate(["▁", "t", "h", "e", "he", "the", "▁the", "sea"])}
    ids = {"unknown_token_id": 0, "eos_token_id": 2}
    pieces = sentencepiece(scores, **ids, add_space_prefix=True, add_eos_token=False)
    letters = byte_level(SPECIAL, "<|user|>", TEMPLATE, "smollm")
    common = {"rope.dimension_count": 8, "vocab_size": 300}
    yarn = common | {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    found = []
    for name, kinds, entries, more in (
        ("llama", ["Q8_0"], pieces, common),
        ("qwen2 with windows", ["F32", "F16", "BF16"], letters, yarn),
        ("gpt2", ["Q4_0"], letters, {}),
        ("smollm3", ["Q5_1"], pieces, common),
        ("phi3", ["Q5_0", "Q8_0"], letters, common | {"rope.dimension_count": 6}),
    ):
        config = NAMED[name] | ({"n_embd": 32, "n_head": 4, "n_layer": 1} if name == "gpt2" else sizes)
        state = loading.MODELS[config["model_type"]](config, rng=0).state_dict()
        kind = {name: kinds[n % len(kinds)] for n, name in enumerate(state)}
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "a.gguf", config, state, kind, entries, more)
            found.append((Path(folder) / "a.gguf").read_bytes())
    return found


def read_gguf(folder):
    use_language_model(folder, "x.gguf")
    models.load(folder / "x.gguf", dtype="float32")
