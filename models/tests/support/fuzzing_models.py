"""Targets of `fuzzing`, among the core's tests, that are files of pretrained models and of search.

`fuzzing_language.py` has what language models need.
"""

import contextlib
import functools
import json
import tempfile
from pathlib import Path

import fuzzing_language as language
import text_folders
from fuzzing import SENTENCES, Target, known_of
from hostile import (
    SENTENCE,
    change_bytes,
    change_json,
    change_safetensors,
    closest,
    contents,
    dumps,
    put,
    put_parts,
    reads,
    use,
)
from hostile_gguf import change_gguf
from killed_writers import embed

import selfattn_models as models
from selfattn_models import loading, search

VOCABULARY = text_folders.VOCABULARY
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE = SIZES | {"intermediate_size": 12}
TEXT = WIDE | {"vocab_size": len(VOCABULARY), "max_position_embeddings": 20}
BERT = TEXT | {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "torch_dtype": "float32",
}
IMAGES = {"image_size": 8, "patch_size": 4}
CONFIGS = [
    BERT | {"type_vocab_size": 2, "position_embedding_type": "absolute", "is_decoder": False},
    BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
    BERT | {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1},
    BERT | {"model_type": "mpnet", "architectures": ["MPNetModel"], "relative_attention_num_buckets": 32},
    {
        "model_type": "distilbert",
        "vocab_size": len(VOCABULARY),
        "dim": 16,
        "n_layers": 1,
        "n_heads": 2,
        "hidden_dim": 12,
        "max_position_embeddings": 20,
        "activation": "gelu",
        "sinusoidal_pos_embds": False,
    },
    TEXT
    | {
        "model_type": "modernbert",
        "architectures": ["ModernBertModel"],
        "num_hidden_layers": 2,
        "norm_eps": 1e-5,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "hidden_activation": "gelu",
    }
    | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias"), False),
    WIDE | IMAGES | {"model_type": "vit", "num_channels": 3, "qkv_bias": True, "hidden_act": "gelu"},
    SIZES
    | IMAGES
    | {"model_type": "dinov2", "mlp_ratio": 2, "layerscale_value": 1.0, "use_swiglu_ffn": False},
    TEXT
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3TextModel"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 24,
        "head_dim": 8,
        "sliding_window": 5,
        "sliding_window_pattern": 2,
        "use_bidirectional_attention": True,
        "is_causal": True,
    },
]


@functools.cache
def saved(n=0, kind=""):
    """The files of a small model, by their path."""
    config = CONFIGS[n]
    bare = loading.EMBEDDERS if "TextModel" in str(config) else loading.MODELS
    table = loading.CLASSIFIERS if "SequenceClassification" in str(config) else bare
    model = table[config["model_type"]](config, rng=0)
    if kind:
        model.quantize(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.save(model, folder)
        if hasattr(model, "encode"):
            (folder / "tokenizer.json").write_text(text_folders.make_tokenizer().to_str())
            text_folders.write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
        return contents(folder)


TOKENIZER_CONFIG = {
    "do_lower_case": True,
    "model_max_length": 18,
    "strip_accents": None,
    "tokenize_chinese_chars": True,
    "truncation_side": "right",
    "cls_token": "[CLS]",
    "tokenizer_class": "BertTokenizer",
}


def use_model(folder):
    """Load a model and compute with it; results of random numbers are not checked."""
    model = models.load(folder)
    if isinstance(
        model, models.Gemma3ForCausalLM
    ):  # no architectures say that it is an encoder; language models have targets
        return
    if not isinstance(model, models.ViTModel):
        use(model.tokens, SENTENCE)
        classifies = "Classification" in type(model).__name__
        use(model.predict if classifies else model.encode, [SENTENCE, ""])
    use(models.save, model, folder / "again")
    if (folder / "again").exists():
        models.load(folder / "again")


def around_index(content):
    found = dict(saved())
    found["a.safetensors"] = found.pop("model.safetensors")
    return found


def an_index():
    content = saved()["model.safetensors"]
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    names = [name for name in header if name != "__metadata__"]
    return [dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")})]


def tokenizers_of_all_kinds():
    import tokenizers
    from tokenizers import models as kinds

    level = tokenizers.Tokenizer(kinds.WordLevel(VOCABULARY, unk_token="[UNK]"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pieces = tokenizers.Tokenizer(kinds.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁sea", -2.0)], 0, False))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    pairs = tokenizers.Tokenizer(kinds.BPE({"t": 0, "h": 1, "th": 2, "e": 3}, [("t", "h")]))
    pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    return [each.to_str().encode() for each in (text_folders.make_tokenizer(), level, pieces, pairs)]


# A folder's small files in one: {path: content}.
PIPELINE = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "3_Normalize/config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@functools.cache
def piped():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(folder, saved())
        text_folders.add_pipeline(
            folder, text_folders.old_pooling("mean"), dense=text_folders.random_dense(8), normalize=True
        )
        text_folders.write_json(folder / "3_Normalize" / "config.json", {})
        text_folders.write_json(folder / "special_tokens_map.json", {"cls_token": "[CLS]"})
        sentence = {
            "prompts": {"query": "query: "},
            "default_prompt_name": "query",
            "similarity_fn_name": "cosine",
            "truncate_dim": 4,
        }
        text_folders.write_json(folder / "config_sentence_transformers.json", sentence)
        return contents(folder)


def a_pipeline():
    one = {name: json.loads(piped()[name]) for name in PIPELINE}
    return [dumps(one), dumps(one | {"1_Pooling/config.json": {"pooling_mode": ["cls", "max"]}})]


def read_pipeline(folder, content):
    put_parts(folder, piped(), PIPELINE, content)
    use_model(folder)


# A file of an index after a line with its name.
@functools.cache
def searched(dtype):
    with tempfile.TemporaryDirectory() as name:
        index = search.Index.create(name, embed, dtype)
        index.add(SENTENCES, metadata=[{"n": n, "of": ["text", {}]} for n in range(3)])
        index.add(SENTENCES[:1], ids=["é"], metadata=[{"n": None}])
        index.delete(1)
        return contents(Path(name))


def some_index_files():
    names = [(dtype, name) for dtype in ("float32", "int8") for name in searched(dtype)]
    return [f"{dtype} {name}\n".encode() + searched(dtype)[name] for dtype, name in names]


def change_index(content, draw):
    head, content = content.split(b"\n", 1)
    return head + b"\n" + change_bytes(content, draw)


def read_index(folder, content):
    head, _, content = content.partition(b"\n")
    dtype, _, name = head.decode(errors="replace").partition(" ")
    known = searched("int8" if dtype == "int8" else "float32")
    put(folder, known | ({name: content} if name in known else {}))
    with contextlib.suppress(FileNotFoundError):
        use(search.Index.open, folder)
    index = search.Index.open(folder, embed)
    index.search(SENTENCE)
    use(index.search, [SENTENCE, "a"], 2, {"n": [0, None]})
    use(index.add, [*SENTENCES, "new"])
    use(index.duplicates, 0.5)
    use(index.delete, 0)
    use(index.vacuum)
    assert len(index.ids) == len(index.texts) == len(index.vectors)


TARGETS = {
    "weights": Target(
        lambda: [saved()["model.safetensors"], saved(kind="int8")["model.safetensors"]],
        reads(
            "model.safetensors", use_model, lambda content: saved(kind="int8" if b'"I8"' in content else "")
        ),
        change_safetensors,
    ),
    "index": Target(an_index, reads("model.safetensors.index.json", use_model, around_index), change_json),
    "config": Target(
        lambda: [dumps(config) for config in CONFIGS],
        reads("config.json", use_model, lambda content: saved(closest(content, CONFIGS, "architectures"))),
        change_json,
    ),
    "pipeline": Target(a_pipeline, read_pipeline, change_json),
    "tokenizer": Target(
        tokenizers_of_all_kinds,
        reads(
            "tokenizer.json",
            use_model,
            lambda content: (
                saved() | {"tokenizer_config.json": dumps({"tokenizer_class": "PreTrainedTokenizerFast"})}
            ),
        ),
        change_json,
    ),
    "gguf": Target(language.some_gguf, reads("x.gguf", language.read_gguf), change_gguf),
    "language_config": Target(
        lambda: [dumps(config) for config in language.LANGUAGE_CONFIGS],
        language.read_language_config,
        change_json,
    ),
    "language_settings": Target(language.some_settings, language.read_settings, change_json),
    "search": Target(some_index_files, read_index, change_index),
}


def known(name):
    """Return the valid contents of a target and the contents in its corpus."""
    return known_of(TARGETS[name], CORPUS / name)
