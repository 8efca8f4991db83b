"""Files with any content: the functions that read them, and the outcomes that are allowed.

A target is one way to read a file. What it reads works, or ends in an error of ours: a ValueError or an OSError whose message
names the file or its folder. Anything else is a finding: another exception, a crash, a hang, memory beyond a limit.

`tests/fuzz` tries some changes of each target; `tools/fuzz` runs for hours. `hostile.py` has the changes, `fuzzing_language.py`
the targets that are language models' files.
"""

import contextlib
import functools
import io
import json
import os
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fuzzing_language as language
import ml_dtypes  # noqa: F401 registers "bfloat16"
import numpy as np
import text_folders
from hostile import (
    SENTENCE,
    change_bytes,
    change_json,
    change_safetensors,
    change_tree,
    change_zip,
    closest,
    contents,
    dumps,
    put,
    put_parts,
    reads,
    use,
)  # fmt: skip
from hostile_gguf import change_gguf
from killed_writers import embed

from selfattn import _disk, files, models, nn, search, training
from selfattn.cli.app import main as command
from selfattn.text import WhitespaceTokenizer, train_sentencepiece

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk takes longer than what is tested
VOCABULARY = text_folders.VOCABULARY
CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


class Target(NamedTuple):
    """One way to read a file."""

    seeds: Callable[[], list[bytes]]  # valid contents
    read: Callable[[Path, bytes], None]  # reads a content in its own folder
    mutate: Callable[[bytes, random.Random], bytes]


def check(target, content):
    """Read a content. An error that selfattn does not raise on purpose passes through with its traceback."""
    with tempfile.TemporaryDirectory(prefix="fuzz", dir=IN_MEMORY) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        try:
            with np.errstate(all="ignore"):
                target.read(folder, content)
        except (ValueError, OSError) as error:
            ours = type(error) is ValueError or isinstance(error, OSError)
            if not ours or folder.name not in f"{error}{getattr(error, 'filename', '')}":
                raise


# ------------------------------------------------------------------------------------------------- pretrained models

BERT = {
    "model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 20, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "torch_dtype": "float32",
}  # fmt: skip
CONFIGS = [
    BERT | {"type_vocab_size": 2, "position_embedding_type": "absolute", "is_decoder": False},
    BERT | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "no", "1": "yes"}},
    BERT | {"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1},
    BERT | {"model_type": "mpnet", "architectures": ["MPNetModel"], "relative_attention_num_buckets": 32},
    {"model_type": "distilbert", "vocab_size": len(VOCABULARY), "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 12,
     "max_position_embeddings": 20, "activation": "gelu", "sinusoidal_pos_embds": False},
    {"model_type": "modernbert", "architectures": ["ModernBertModel"], "vocab_size": len(VOCABULARY), "hidden_size": 16,
     "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 20, "norm_eps": 1e-5,
     "global_attn_every_n_layers": 2, "local_attention": 8, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
     "hidden_activation": "gelu", "norm_bias": False, "attention_bias": False, "mlp_bias": False},
    {"model_type": "vit", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 12,
     "image_size": 8, "patch_size": 4, "num_channels": 3, "qkv_bias": True, "hidden_act": "gelu"},
    {"model_type": "dinov2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2, "image_size": 8,
     "patch_size": 4, "layerscale_value": 1.0, "use_swiglu_ffn": False},
    {"model_type": "gemma3_text", "architectures": ["Gemma3TextModel"], "vocab_size": len(VOCABULARY), "hidden_size": 16, "num_hidden_layers": 2,
     "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "head_dim": 8, "max_position_embeddings": 20, "sliding_window": 5,
     "sliding_window_pattern": 2, "use_bidirectional_attention": True, "is_causal": True},
]  # fmt: skip


@functools.cache
def saved(n=0, kind=""):
    """The files of a small model, by their path."""
    config = CONFIGS[n]
    bare = models.EMBEDDERS if "TextModel" in str(config) else models.MODELS
    table = models.CLASSIFIERS if "SequenceClassification" in str(config) else bare
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
    "do_lower_case": True, "model_max_length": 18, "strip_accents": None, "tokenize_chinese_chars": True, "truncation_side": "right",
    "cls_token": "[CLS]", "tokenizer_class": "BertTokenizer",
}  # fmt: skip


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
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json",
    "3_Normalize/config.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip


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
            "prompts": {"query": "query: "}, "default_prompt_name": "query", "similarity_fn_name": "cosine", "truncate_dim": 4,
        }  # fmt: skip
        text_folders.write_json(folder / "config_sentence_transformers.json", sentence)
        return contents(folder)


def a_pipeline():
    one = {name: json.loads(piped()[name]) for name in PIPELINE}
    return [dumps(one), dumps(one | {"1_Pooling/config.json": {"pooling_mode": ["cls", "max"]}})]


def read_pipeline(folder, content):
    put_parts(folder, piped(), PIPELINE, content)
    use_model(folder)


# ------------------------------------------------------------------------------------------- what selfattn writes

SENTENCES = ["the sea was calm", "a ship sailed over dark water", "near old stones"]


@functools.cache
def own(kind="whitespace"):
    """The files of an EmbeddingModel."""
    if kind == "sentencepiece":
        # Its table of normal forms would have 240 kB, and nearly all changes would hit it.
        tokenizer = train_sentencepiece(SENTENCES * 5, 30, normalization_rule_name="identity")
        size = tokenizer.get_piece_size()
    else:
        tokenizer = WhitespaceTokenizer.train(SENTENCES)
        size = tokenizer.vocab_size
    model = nn.EmbeddingModel(tokenizer, size, 8, max_seq_len=16, rng=0)
    with tempfile.TemporaryDirectory() as name:
        files.save_model(model, name)
        return contents(Path(name))


def read_own(name, kind="whitespace"):
    return reads(name, lambda folder: use(files.load_model(folder), SENTENCE), lambda content: own(kind))


def change_sentencepiece(content, draw):
    """Change the good file as often as changed ones: the library is not instrumented, and all its models look alike."""
    return change_bytes(draw.choice([content, own("sentencepiece")["tokenizer.model"]]), draw)


def read_arrays(folder):
    for array in files.load_arrays(folder / "x.safetensors").values():
        array.sum()


def some_arrays():
    kinds = ["float32", "float16", "float64", "bfloat16", "bool", "int8", "uint64"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    return [_disk.to_safetensors(arrays | {"empty": np.zeros((0, 3)), "one": np.float32(1)}, {"of": "text"})]


TRAINING = {"epochs": 1, "batch_size": 1, "rng": 0, "log_every": None, "progress": False}


def a_training():
    model = nn.EmbeddingModel(
        WhitespaceTokenizer.train(SENTENCES), len(text_folders.WORDS), 4, max_seq_len=16, rng=0
    )
    return nn.ProxyTask(model), [tuple(SENTENCES), tuple(reversed(SENTENCES))]


@functools.cache
def a_checkpoint():
    task, triplets = a_training()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "c.safetensors"
        training.fit(task, triplets, checkpoint=path, callbacks=[lambda step: step.step == 1], **TRAINING)
        return [path.read_bytes()]


def read_checkpoint(folder):
    task, triplets = a_training()
    before = {name: array.copy() for name, array in task.parameters().items()}
    try:
        training.fit(task, triplets, checkpoint=folder / "c.safetensors", resume=True, **TRAINING)
    except FloatingPointError:  # weights that are not finite
        return
    except ValueError:
        after = task.parameters()
        assert all(np.array_equal(array, after[name]) for name, array in before.items()), "half restored"
        raise


# The checkpoint's tree is JSON within JSON.
def change_checkpoint(content, draw):
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if draw.randrange(3):
            tree = change_tree(json.loads(header["__metadata__"]["tree"]), draw)
            header["__metadata__"]["tree"] = json.dumps(tree)
            text = dumps(header)
            return len(text).to_bytes(8, "little") + text + content[8 + length :]
    return change_safetensors(content, draw)


def run(*arguments):
    """Run a command, which must return 0 or report an error; return its status and output."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command([*map(str, arguments)])
    except SystemExit as end:
        status = end.code
    assert status in (0, 1, 2)
    return status, out.getvalue() + err.getvalue()


def read_npz(folder):
    status, printed = run("steps", folder / "x.npz", "--out", folder / "x.html")
    assert status == 0 or folder.name in printed


def some_npz():
    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    tokens = np.array(["a", "b", "c"])
    norm = {"norm_weight": x[0], "norm_bias": x[1]}
    found = []
    for arrays in (
        {"query": x, "key": x, "value": x, "tokens": tokens, "window": np.array([1, 1])},
        {"query": x, "key": x, "value": x, "attn_mask": np.eye(3, dtype=bool), "scale": np.float32(0.5)},
        {"inputs": x, **dict.fromkeys(("W_query", "W_key", "W_value"), x.T @ x), **norm},
    ):
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        found.append(buffer.getvalue())
    return found


def read_triplets(folder):
    path = folder / "x.tsv"
    training.read_sentences(path)
    training.read_sentences(path, split="sentences")
    for triplet in training.read_triplets(path):
        assert all(part.strip() for part in triplet)


def read_results(folder):
    status, printed = run("bench", "--load", folder / "x.json")
    shown = "interleaved" in printed  # it printed a table, perhaps with different results or failed libraries
    assert status == 0 or folder.name in printed or shown


def some_results():
    def contestant(name, **more):
        case = {"length": 16, "width": 8, "keys": 16, "dtype": "float32", "causal": False}
        times = {"sdpa(q, k, v)": [[2.5e-6, 2.6e-6], [3e-6]]}
        return {
            "name": name, "engine": name, "environment": {}, "case": case, "limit_dtype": "float32", "flops": 65536.0,
            "key_value_bytes": 8192, "times": times, "limits": [3.6e11, 5.1e11], "difference": 0.0, "agrees": True,
        } | more  # fmt: skip

    config = {"cpu": "a CPU", "system": "Linux x86_64", "isa": "avx2", "threads": 2}
    rows = [
        {"suite": "forward", "label": "16 x 8", "limit": "flops", "contestants": [
            contestant("selfattn"), contestant("numpy", times={}, error="x"), contestant("isa-avx2", environment={"SELFATTN_ISA": "avx2"}),
        ]},
        {"suite": "decode", "label": "16", "limit": "bytes", "contestants": [
            contestant("selfattn"), contestant("torch", unsupported="never"), contestant("naive", agrees=False, difference=1.0),
        ]},
    ]  # fmt: skip
    settings = {"threads": 2, "rounds": 2, "seconds": 0.1}
    return [dumps({"config": config, "versions": {"selfattn": "1"}, "settings": settings, "rows": rows})]


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
    names = [(dtype, name) for dtype in ("float32", "int8") for name in searched(dtype) if name != "lock"]
    return [f"{dtype} {name}\n".encode() + searched(dtype)[name] for dtype, name in names]


def change_index(content, draw):
    head, content = content.split(b"\n", 1)
    return head + b"\n" + (change_json if head.endswith(b"json") else change_bytes)(content, draw)


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
    "arrays": Target(some_arrays, reads("x.safetensors", read_arrays), change_safetensors),
    "weights": Target(
        lambda: [saved()["model.safetensors"], saved(kind="int8")["model.safetensors"]],
        reads("model.safetensors", use_model, lambda content: saved(kind="int8" if b'"I8"' in content else "")), change_safetensors,
    ),
    "index": Target(an_index, reads("model.safetensors.index.json", use_model, around_index), change_json),
    "config": Target(
        lambda: [dumps(config) for config in CONFIGS],
        reads("config.json", use_model, lambda content: saved(closest(content, CONFIGS, "architectures"))), change_json,
    ),
    "pipeline": Target(a_pipeline, read_pipeline, change_json),
    "tokenizer": Target(tokenizers_of_all_kinds, reads("tokenizer.json", use_model, lambda content: saved() | {"tokenizer_config.json": dumps({"tokenizer_class": "PreTrainedTokenizerFast"})}), change_json),
    "own_config": Target(lambda: [own()["config.json"]], read_own("config.json"), change_json),
    "own_vocabulary": Target(lambda: [own()["vocabulary.json"]], read_own("vocabulary.json"), change_json),
    "sentencepiece": Target(
        lambda: [own("sentencepiece")["tokenizer.model"]], read_own("tokenizer.model", "sentencepiece"), change_sentencepiece
    ),
    "checkpoint": Target(a_checkpoint, reads("c.safetensors", read_checkpoint), change_checkpoint),
    "npz": Target(some_npz, reads("x.npz", read_npz), change_zip),
    "bench": Target(some_results, reads("x.json", read_results), change_json),
    "gguf": Target(language.some_gguf, reads("x.gguf", language.read_gguf), change_gguf),
    "language_config": Target(
        lambda: [dumps(config) for config in language.LANGUAGE_CONFIGS], language.read_language_config, change_json
    ),
    "language_settings": Target(language.some_settings, language.read_settings, change_json),
    "template": Target(
        lambda: [each.encode() for each in language.TEMPLATES], language.read_template, language.change_template
    ),
    "search": Target(some_index_files, read_index, change_index),
    "triplets": Target(lambda: [b"a b\tc.\td e\n\nf\tg\th"], reads("x.tsv", read_triplets), change_bytes),
}  # fmt: skip


def known(name):
    """Return the valid contents of a target and the contents in its corpus."""
    kept = sorted((CORPUS / name).iterdir()) if (CORPUS / name).is_dir() else []
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]
