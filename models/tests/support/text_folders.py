"""Folders of tiny random models with tokenizers, made without a network, as Transformers and sentence-transformers
write them."""

import json

import numpy as np
import pytest
import tokenizers

import selfattn_models as models

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEXT = "the sea was calm a ship ##s sailed over dark water near old stones . query : é שלום 🙂"
WORDS = TEXT.split()
VOCABULARY = {word: n for n, word in enumerate(SPECIAL + WORDS)}
D = 16


def make_tokenizer(vocabulary=VOCABULARY):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(strip_accents=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def save_bert(folder, positions=24, kind="BertModel", **options):
    """A random BERT with its tokenizer, as Transformers writes them."""
    config = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": positions,
        "initializer_range": 0.3,
        "type_vocab_size": 2,
    }
    models.save(getattr(models, kind)(config | options, rng=0), folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    settings = {"tokenizer_class": "BertTokenizerFast", "model_max_length": 512, "strip_accents": False}
    write_json(folder / "tokenizer_config.json", settings | names)
    return folder


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def add_pipeline(folder, pooling, *, dense=None, normalize=False, sentence=None, transformer=None, new=False):
    """The files of sentence-transformers, as its versions 2 to 4 write them, or (``new``) 6.

    ``dense`` is (activation, weight, bias), or a list of such; ``sentence`` and ``transformer`` are the contents of
    their JSON files.
    """
    safetensors = pytest.importorskip("safetensors.numpy")
    at = {
        "Transformer": "base.modules.transformer.Transformer",
        "Pooling": "sentence_transformer.modules.pooling.Pooling",
        "Dense": "base.modules.dense.Dense",
        "Normalize": "base.modules.normalize.Normalize",
    }
    dense = dense if isinstance(dense, list) else [dense] if dense else []
    kinds = ["Transformer", "Pooling", *(["Dense"] * len(dense)), *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": n,
            "name": str(n),
            "path": f"{n}_{kind}" if n else "",
            "type": "sentence_transformers." + (at[kind] if new else f"models.{kind}"),
        }
        for n, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)
    lengths = transformer or {"max_seq_length": 16, "do_lower_case": False}
    write_json(folder / "sentence_bert_config.json", lengths)
    versions = sentence or {"__version__": {"sentence_transformers": "2.0.0"}}
    write_json(folder / "config_sentence_transformers.json", versions)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    for n, (activation, weight, bias) in enumerate(dense, 2):
        arrays = {"linear.weight": weight} | ({} if bias is None else {"linear.bias": bias})
        config = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": bias is not None}
        write_json(folder / f"{n}_Dense" / "config.json", config | {"activation_function": activation})
        safetensors.save_file(arrays, folder / f"{n}_Dense" / "model.safetensors")
    if normalize:
        (folder / f"{len(kinds) - 1}_Normalize").mkdir(exist_ok=True)
    return folder


def old_pooling(*modes, width=D, **more):
    """Pooling's config in the spelling of versions 2 to 5."""
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    chosen = {f"pooling_mode_{name}": mode in modes for mode, name in names.items()}
    return {"word_embedding_dimension": width} | chosen | more


def random_dense(out, width=D, activation="Tanh", bias=True):
    rng = np.random.default_rng(1)
    weight = (rng.standard_normal((out, width)) / 4).astype(np.float32)
    module = {"Tanh": "torch.nn.modules.activation.Tanh", "Identity": "torch.nn.modules.linear.Identity"}
    biases = rng.standard_normal(out).astype(np.float32) if bias else None
    return module.get(activation, activation), weight, biases


def with_drawn_parameters(model):
    """A model of Transformers with random parameters; parameters of norms are around 1."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            around = 1.0 if key.endswith("weight") and parameter.ndim == 1 else 0.0
            parameter.normal_(around, 0.3, generator=generator)
    return model.eval()
