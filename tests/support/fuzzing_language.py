"""Targets of `fuzzing` that are language models' files: their configurations, settings, chat templates, and GGUF."""

import functools
import json
import tempfile
from pathlib import Path

from gguf_files import byte_level, sentencepiece, write
from hostile import SENTENCE, TEXTS, change_bytes, closest, contents, dumps, put, put_parts, reads, use
from language_folders import SPECIAL, TEMPLATE, make_tokenizer

from selfattn import models

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
LANGUAGE_CONFIGS = [
    LLAMA | {"rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False, "head_dim": 4, "pretraining_tp": 1},
    LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 32}},
    LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 32.0}},
    LLAMA | {"rope_scaling": {"type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1.0, 2.0],
                              "original_max_position_embeddings": 32}},
    LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8, "eos_token_id": [1, 2]},
    LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 8,
             "max_window_layers": 1, "tie_word_embeddings": False},
    {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 300, "n_embd": 16, "n_layer": 2, "n_head": 4,
     "n_positions": 64, "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
     "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "bos_token_id": 0, "eos_token_id": 0},
    {name: value for name, value in LLAMA.items() if name != "hidden_act"}
    | {"model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh", "head_dim": 4, "query_pre_attn_scalar": 256,
       "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}, "sliding_attention": {}},
       "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "rope_scaling": None, "torch_dtype": "bfloat16"},
    LLAMA | {"model_type": "smollm3", "no_rope_layer_interval": 2, "no_rope_layers": [1, 0], "use_sliding_window": False, "attention_bias": True},
    LLAMA | {"model_type": "phi3", "partial_rotary_factor": 0.5, "sliding_window": 8, "original_max_position_embeddings": 64,
             "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "tie_word_embeddings": False},
]  # fmt: skip
SPEAKS = {
    "eos_token": "<|end|>", "chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast",
    "truncation_side": "right",
}  # fmt: skip


@functools.cache
def speaking(n=0):
    """The files of a small language model, by their path."""
    config = LANGUAGE_CONFIGS[n]
    with tempfile.TemporaryDirectory() as name:
        models.save(models.MODELS[config["model_type"]](config, rng=0), name)
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
    "config.json", use_language_model, lambda content: speaking(closest(content, LANGUAGE_CONFIGS, "rope_scaling"))
)  # fmt: skip


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


# --------------------------------------------------------------------------------------------------- chat templates

TEMPLATES = [
    TEMPLATE,
    # Templates like those of ChatML, Llama 3, Mistral and Qwen.
    "{%- if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{% if loop.first and message.role == 'x' %}{% continue %}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>' + '\n'}}{% endfor %}",
    "{{- bos_token }}{%- set system_message = '' %}{%- set date = strftime_now('%d %b %Y') if strftime_now is defined else '' %}"
    "{%- for message in messages %}{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- if message['role'] == 'user' and loop.last and system_message %}{{ system_message ~ '\n' }}{%- endif %}"
    "{{- '[INST] ' + message['content'].strip() + ' [/INST]' }}{%- endfor %}{{ date }}",
    "{% macro show(value, depth=0) -%}{% if value is mapping %}{% for k, v in value | dictsort %}{{ k }}:{{ v | tojson(indent=2) }}"
    "{% endfor %}{% else %}{{ value | string | upper | replace('A', 'b') }}{% endif %}{%- endmacro %}"
    "{% set ns = namespace(n=0, found=[]) %}{% for m in messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns.n = ns.n + 1 %}{{ show(m) }}{{ '%s' }}{% endfor %}{{ ns.n * 3 }}{{ messages | map(attribute='content') | join(', ') }}"
    "{% if tools %}{{ tools | length }}{% elif not add_generation_prompt %}x{% endif %}"
    "{% for i in range(3) %}{% if i > 1 %}{% break %}{% endif %}{{ [i, 1.5, none, true][::-1][0] }}{% else %}none{% endfor %}{% filter lower %}X{% endfilter %}",
]  # fmt: skip
PIECES = [
    "{{", "}}", "{%", "%}", "{#", "#}", "-", "|", "~", "+", "*", "**", "%", "//", "in", "is", "not", "(", ")", "[", "]", "[0]", ".x", "''",
    "{{ messages }}", "{{ x }}", "{% for a in range(999999) %}x{% endfor %}", "{% for a in messages %}", "{% endfor %}",
    "{% set x = 'a' * 9999 %}", "{% set x = x + x %}", "{% set x = [x, x] %}", "{% set x %}ab{% endset %}", "{% if x %}", "{% endif %}",
    "{% macro m(a) %}{{ m(a) }}{% endmacro %}", "{{ m(1) }}", "{% call m(1) %}{% endcall %}", "{% include 'a' %}", "{% import 'a' as b %}",
    "{% extends 'a' %}", "{% block b %}", "{% endblock %}", "{{ self.b() }}", "{{ ''.__class__ }}", "{{ messages.append(1) }}",
    "| tojson", "| join('x' * 999)", "| center(9999)", "| indent(999)", "| wordwrap(1)", "| batch(2) | list", "| slice(3) | list",
    "| groupby('role')", "| sort", "| unique | list", "| map('upper') | list", "| sum", "| int", "| float", "| round(999)", "| reverse",
    "| default('x', true)", "| attr('__init__')", "| format(1)", "| filesizeformat", "| first", "| last", "| min", "| max", "| random",
    "| striptags", "| escape", "| safe", "| truncate(3)", "| title", "| xmlattr", "| urlencode", "| items | list", "| dictsort",
    "range(9)", "dict(a=1)", "namespace(a=1)", "loop.index", "loop(1)", "loop.cycle(1, 2)", "loop.changed(1)", "{% set ns.a = 1 %}",
    "9" * 400, "1e999", "strftime_now('%Y')", "raise_exception('x')", "'{0.a}'.format(1)", "'x'.join([1])", "'x'.zfill(9999)",
    "{% set a = namespace(b=[]) %}{% set a.b = [a] %}{{ a.b }}", "'a'.translate({97: 'b' * 999})", "{% filter indent(99) %}", "{% endfilter %}",
    "messages[0].content.encode().hex()", "{% with x = 1 %}", "{% endwith %}", "{% autoescape true %}", "{% do 1 %}", "{% debug %}",
    "{% trans %}", "'x'.splitlines()", "{% raw %}", "{% endraw %}", "x.expandtabs(9999)", "'a,b'.split(',')", "'ab'.replace('', 'x' * 99)",
]  # fmt: skip


def change_template(content, draw):
    """Put pieces of Jinja2 into a template, exchange or drop words, or change bytes."""
    if not draw.randrange(6):
        return change_bytes(content, draw)
    text = content.decode("utf-8", "replace")
    for _ in range(draw.choice([1, 1, 2, 3, 6])):
        what, at = draw.randrange(6), draw.randrange(len(text) + 1)
        if what < 3:
            piece = draw.choice(PIECES if draw.randrange(6) else TEXTS)
            inside = text.rfind("}", 0, at) < text.rfind("{", 0, at)
            piece = piece if inside or "{" in piece else f"{{{{ messages {piece} }}}}"
            text = text[:at] + piece + text[at:]
        elif what == 3:
            begin, end = sorted(draw.randrange(len(text) + 1) for _ in range(2))
            text = text[:at] + text[begin : min(end, begin + 200)] + text[at:]
        elif what == 4:
            text = text[:at] + text[at + draw.choice([1, 2, 5, 30]) :]
        else:
            words = ["messages", "message", "'role'", "'content'", "for", "if", "user", "set", "+"]
            for old in draw.sample(words, 2):
                new = draw.choice(["x", "loop", "messages", "1", "*", "range(9)", "''"])
                text = text.replace(old, new, 1)
    return text.encode("utf-8", "surrogatepass")[:20_000]


@functools.cache
def speaker():
    """A model that gets the templates."""
    with tempfile.TemporaryDirectory() as folder:
        put(Path(folder), speaking())
        return models.load(folder)


def read_template(folder, content):
    model = speaker()
    (folder / "chat_template.jinja").write_bytes(content)
    try:
        model.chat_template = models._text_files._template(folder, {})
    except ValueError as error:
        assert folder.name in str(error)
        return
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": SENTENCE}]
    for each in (SENTENCE, messages):
        found = []
        use(lambda chat: found.append(model.chat_prompt(chat)), each)  # noqa: B023 it is called here
        assert all(isinstance(text, str) and len(text) <= 20_000_000 for text in found)


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
    for config, kinds, entries, more in (
        (LLAMA | sizes, ["Q8_0"], pieces, common),
        (LANGUAGE_CONFIGS[6] | sizes, ["F32", "F16", "BF16"], letters, yarn),
        (LANGUAGE_CONFIGS[7] | {"n_embd": 32, "n_layer": 1}, ["Q4_0"], letters, {}),
        (LANGUAGE_CONFIGS[9] | sizes, ["Q5_1"], pieces, common),
        (LANGUAGE_CONFIGS[10] | sizes | {"rope_scaling": None}, ["Q5_0", "Q8_0"], letters, common | {"rope.dimension_count": 4}),
    ):  # fmt: skip
        state = models.MODELS[config["model_type"]](config, rng=0).state_dict()
        kind = {name: kinds[n % len(kinds)] for n, name in enumerate(state)}
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "a.gguf", config, state, kind, entries, more)
            found.append((Path(folder) / "a.gguf").read_bytes())
    return found


def read_gguf(folder):
    use_language_model(folder, "x.gguf")
    models.load(folder / "x.gguf", dtype="float32")
