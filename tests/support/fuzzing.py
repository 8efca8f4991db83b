"""Files that may hold anything: what reads them, hostile changes to them, and what may come of that.

A target is one way to read a file. What it reads works, or ends in an error of ours: a ValueError or an OSError whose message
names the file or its folder. Anything else is a finding: another exception, a crash, a hang, memory beyond a limit.

`tests/fuzz` tries some changes of each target; `tools/fuzz` goes on for hours.
"""

import contextlib
import copy
import functools
import io
import json
import random
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes  # noqa: F401 bfloat16 has a name then
import numpy as np
from text_folders import (
    VOCABULARY,
    WORDS,
    add_pipeline,
    make_tokenizer,
    old_pooling,
    random_dense,
    write_json,
)

from selfattn import files, models, nn, training
from selfattn.cli.app import main as command
from selfattn.text import WhitespaceTokenizer, train_sentencepiece

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
SENTENCE = "the sea was calm"


class Target(NamedTuple):
    """One way to read a file."""

    seeds: Callable[[], list[bytes]]  # contents that are good
    read: Callable[[Path, bytes], None]  # in a folder of its own
    mutate: Callable[[bytes, random.Random], bytes]


def check(target: Target, content: bytes) -> str | None:
    """Read a content. What came of it must be allowed: return what is wrong, or None.

    ``AssertionError`` and other exceptions that are no error of ours are raised as they are, with their traceback.
    """
    with tempfile.TemporaryDirectory(prefix="fuzz") as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        try:
            with np.errstate(all="ignore"):
                target.read(folder, content)
        except (ValueError, OSError) as error:
            ours = type(error) is ValueError or isinstance(error, OSError)
            if not ours or folder.name not in f"{error}{getattr(error, 'filename', '')}":
                raise
    return None


# ------------------------------------------------------------------------------------------------------- changes

NUMBERS = [
    0, 1, -1, 2, 3, 7, 8, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, -(2**63),
    0.0, 0.5, -0.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"),
]  # fmt: skip
SIZES = [n for n in NUMBERS if isinstance(n, int) and 0 <= n < 2**64]  # what may stand in 8 bytes
TEXTS = [
    "", " ", "a", "\0", "é", "\ud800", "🙂", "..", "../x", "/", "/etc/passwd", "a/b", "x" * 5000, "0", "8", "true", "float32",
    "BF16", "F8_E4M3", "int8", "nan", "__class__", "{}", "%s%n", "mean", "cls",
]  # fmt: skip
OTHERS = [None, True, False, [], {}, [[]], [None], [0], {"": None}, {"a": {"b": []}}, [1, 2, 3], ["a", "b"]]


def places(node, above=()):
    """All places in a tree of JSON, as (container, key)."""
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in list(pairs):
        yield node, key
        yield from places(value, (*above, key))


def hostile(draw: random.Random, value: object) -> object:
    """A value in the place of another: near it, of its kind, or of any."""
    kind = draw.randrange(4)
    if kind == 0 and isinstance(value, int | float):
        number = draw.choice([value + 1, value - 1, value * 2, -value, value * 10**9])
        return number if draw.randrange(4) else float(max(-(2**900), min(number, 2**900)))
    if kind == 1 and isinstance(value, str) and value:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice(TEXTS) + value[at + draw.randrange(3) :]
    if kind == 2:
        return draw.choice([[value], {"value": value}, str(value), [value] * 3])
    return copy.deepcopy(draw.choice(draw.choice([NUMBERS, TEXTS, OTHERS])))


def change_tree(tree: object, draw: random.Random) -> object:
    """Change a tree of JSON in one to three places."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        found = list(places(tree))
        if not found:
            return hostile(draw, tree)
        node, key = draw.choice(found)
        what = draw.randrange(8)
        if what == 0:
            del node[key]
        elif what == 1:
            other, there = draw.choice(found)
            with contextlib.suppress(KeyError, IndexError):
                node[key] = copy.deepcopy(other[there])
        elif what == 2 and isinstance(node, dict):
            names = [name for _, name in found if isinstance(name, str)] + TEXTS
            node[draw.choice(names)] = node.pop(key)
        elif what == 3 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = hostile(draw, node[key])
    if not draw.randrange(40):
        return hostile(draw, tree)
    return tree


def dumps(tree: object) -> bytes:
    return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass")


def change_bytes(content: bytes, draw: random.Random) -> bytes:
    """Change a content in one to four places."""
    data = bytearray(content)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at, length = draw.randrange(len(data) + 1), draw.choice([1, 1, 2, 4, 8, 64])
        what = draw.randrange(6)
        if what == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            data[at : at + length] = draw.randbytes(length)
        elif what == 2:
            del data[at : at + length]
        elif what == 3:
            data[at:at] = data[at : at + length] * draw.choice([1, 2, 100])
        elif what == 4:
            data[at : at + 8] = draw.choice(SIZES).to_bytes(8, "little")
        elif not draw.randrange(4):
            del data[at:]
    return bytes(data)


def change_json(content: bytes, draw: random.Random) -> bytes:
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return change_bytes(content, draw)
    if draw.randrange(12):
        with contextlib.suppress(ValueError):  # an int of thousands of digits
            return dumps(change_tree(tree, draw))
    if draw.randrange(2):
        return change_bytes(content, draw)
    deep = draw.choice([50, 500, 100_000])
    return draw.choice(
        [b"[" * deep, b'{"a":' * deep, b"9" * deep, content + content, b"\xef\xbb\xbf" + content]
    )


def change_safetensors(content: bytes, draw: random.Random) -> bytes:
    """Change the header as JSON, or bytes anywhere."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    if draw.randrange(5) == 0:
        return change_bytes(content, draw)
    if draw.randrange(4) == 0:  # numbers that mean something else
        data = change_bytes(data, draw) if draw.randrange(2) else data[: len(data) - draw.randrange(1, 9)]
    else:
        header = change_json(header, draw)
    length = len(header) if draw.randrange(8) else draw.choice(SIZES)
    return length.to_bytes(8, "little") + header + data


def change_zip(content: bytes, draw: random.Random) -> bytes:
    """Change a member of an archive, or bytes anywhere."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = [(name, archive.read(name)) for name in archive.namelist()]
    except Exception:  # a damaged one, of which there are many kinds
        return change_bytes(content, draw)
    if not members or draw.randrange(3) == 0:
        return change_bytes(content, draw)
    n = draw.randrange(len(members))
    name, data = members[n]
    what = draw.randrange(6)
    if what == 0:
        del members[n]
    elif what == 1:
        members[n] = (
            draw.choice([*TEXTS[2:5], "query.npy", "tokens.npy", "dropout_p.npy", "window.npy"]),
            data,
        )
    elif what == 2:
        members[n] = name, members[draw.randrange(len(members))][1]
    elif what == 3:  # a header that says something else
        for old, new in draw.choice([
            [(b"'<f4'", draw.choice([b"'<f8'", b"'|O'  ", b"'<U9'", b"'>c16'", b"'|V4'", b"[('a', '<f4')]"]))],
            [(b"(", draw.choice([b"(-1, ", b"(99999999999, ", b"((", b"(0, ", b"(2, 3, "]))],
            [(b"False", b"True")], [(b"descr", b"dsecr")],
        ]):  # fmt: skip
            data = data.replace(old, new, 1)
        members[n] = name, data
    else:
        members[n] = name, change_bytes(data, draw)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", draw.choice([0, 8])) as archive:
        warnings.simplefilter("ignore")  # of two members with one name
        for name, data in members:
            with contextlib.suppress(UnicodeEncodeError):
                archive.writestr(name.partition("\0")[0] or "x", data)
    return buffer.getvalue()


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
]  # fmt: skip


@functools.cache
def saved(n: int = 0, kind: str = "") -> dict[str, bytes]:
    """The files of a small model, by their path."""
    config = CONFIGS[n]
    table = models.CLASSIFIERS if "SequenceClassification" in str(config) else models.MODELS
    model = table[config["model_type"]](config, rng=0)
    if kind:
        model.quantize(kind)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.save(model, folder)
        if hasattr(model, "encode"):
            (folder / "tokenizer.json").write_text(make_tokenizer().to_str())
            write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
        return contents(folder)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(folder: Path, found: dict[str, bytes]) -> None:
    for name, content in found.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


TOKENIZER_CONFIG = {
    "do_lower_case": True, "model_max_length": 18, "strip_accents": None, "tokenize_chinese_chars": True, "truncation_side": "right",
    "cls_token": "[CLS]", "tokenizer_class": "BertTokenizer",
}  # fmt: skip


def use(function: Callable[..., object], *arguments: object) -> None:
    """Use what was read. It may refuse, as for a word that its tokenizer has not; no file need be named then."""
    try:
        function(*arguments)
    except ValueError as error:
        if type(error) is not ValueError:
            raise


def use_model(folder: Path) -> None:
    """Load a model and compute with it; what it makes of numbers that mean nothing is not looked at."""
    model = models.load(folder)
    if not isinstance(model, models.ViTModel):
        use(model.tokens, SENTENCE)
        classifies = "Classification" in type(model).__name__
        use(model.predict if classifies else model.encode, [SENTENCE, ""])
    use(models.save, model, folder / "again")
    if (folder / "again").exists():
        models.load(folder / "again")


def read_config(folder: Path, content: bytes) -> None:
    try:
        kind, names = (json.loads(content).get(key) for key in ("model_type", "architectures"))
    except (ValueError, AttributeError, RecursionError):
        kind = names = None
    same = [n for n, config in enumerate(CONFIGS) if config["model_type"] == kind] or [0]
    n = same[-1] if "SequenceClassification" in str(names) else same[0]
    put(folder, saved(n) | {"config.json": content})
    use_model(folder)


def read_weights(folder: Path, content: bytes) -> None:
    put(folder, saved(kind="int8" if b'"I8"' in content else "") | {"model.safetensors": content})
    use_model(folder)


def read_index(folder: Path, content: bytes) -> None:
    found = dict(saved())
    found["a.safetensors"] = found.pop("model.safetensors")
    put(folder, found | {"model.safetensors.index.json": content})
    use_model(folder)


def an_index() -> list[bytes]:
    names = files_of(saved()["model.safetensors"])
    return [dumps({"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")})]


def files_of(content: bytes) -> list[str]:
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return [name for name in header if name != "__metadata__"]


def read_tokenizer(folder: Path, content: bytes) -> None:
    put(folder, saved() | {"tokenizer.json": content})
    use_model(folder)


def tokenizers_of_all_kinds() -> list[bytes]:
    import tokenizers
    from tokenizers import models as kinds

    level = tokenizers.Tokenizer(kinds.WordLevel(VOCABULARY, unk_token="[UNK]"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    pieces = tokenizers.Tokenizer(kinds.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("▁sea", -2.0)], 0, False))
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    pairs = tokenizers.Tokenizer(kinds.BPE({"t": 0, "h": 1, "th": 2, "e": 3}, [("t", "h")]))
    pairs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    return [each.to_str().encode() for each in (make_tokenizer(), level, pieces, pairs)]


# A folder's small files in one: {path: content}.
PIPELINE = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json",
    "3_Normalize/config.json", "tokenizer_config.json", "special_tokens_map.json",
)  # fmt: skip


@functools.cache
def piped() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put(folder, saved())
        add_pipeline(folder, old_pooling("mean"), dense=random_dense(8), normalize=True)
        write_json(folder / "3_Normalize" / "config.json", {})
        write_json(folder / "special_tokens_map.json", {"cls_token": "[CLS]"})
        sentence = {
            "prompts": {"query": "query: "}, "default_prompt_name": "query", "similarity_fn_name": "cosine", "truncate_dim": 4,
        }  # fmt: skip
        write_json(folder / "config_sentence_transformers.json", sentence)
        return contents(folder)


def a_pipeline() -> list[bytes]:
    one = {name: json.loads(piped()[name]) for name in PIPELINE}
    return [dumps(one), dumps(one | {"1_Pooling/config.json": {"pooling_mode": ["cls", "max"]}})]


def read_pipeline(folder: Path, content: bytes) -> None:
    found = {name: data for name, data in piped().items() if name not in PIPELINE}
    with contextlib.suppress(ValueError, RecursionError):
        tree = json.loads(content)
        if isinstance(tree, dict):
            found |= {name: dumps(part) for name, part in tree.items() if name in PIPELINE}
    put(folder, found)
    use_model(folder)


# ------------------------------------------------------------------------------------------- what selfattn writes

SENTENCES = ["the sea was calm", "a ship sailed over dark water", "near old stones"]


@functools.cache
def own(kind: str = "whitespace") -> dict[str, bytes]:
    """The files of an EmbeddingModel."""
    if kind == "sentencepiece":
        tokenizer = train_sentencepiece(SENTENCES * 5, 30)
        size = tokenizer.get_piece_size()
    else:
        tokenizer = WhitespaceTokenizer.train(SENTENCES)
        size = tokenizer.vocab_size
    model = nn.EmbeddingModel(tokenizer, size, 8, max_seq_len=16, rng=0)
    with tempfile.TemporaryDirectory() as name:
        files.save_model(model, name)
        return contents(Path(name))


def read_own(name: str, kind: str = "whitespace") -> Callable[[Path, bytes], None]:
    def read(folder: Path, content: bytes) -> None:
        put(folder, own(kind) | {name: content})
        use(files.load_model(folder), SENTENCE)

    return read


def read_arrays(folder: Path, content: bytes) -> None:
    put(folder, {"x.safetensors": content})
    for array in files.load_arrays(folder / "x.safetensors").values():
        array.sum()


def some_arrays() -> list[bytes]:
    kinds = ["float32", "float16", "float64", "bfloat16", "bool", "int8", "uint64"]
    arrays = {kind: np.arange(6).reshape(2, 3).astype(kind) for kind in kinds}
    return [files.to_safetensors(arrays | {"empty": np.zeros((0, 3)), "one": np.float32(1)}, {"of": "text"})]


def a_training() -> tuple[nn.ProxyTask, list[tuple[str, ...]]]:
    model = nn.EmbeddingModel(WhitespaceTokenizer.train(SENTENCES), len(WORDS), 4, max_seq_len=16, rng=0)
    return nn.ProxyTask(model), [tuple(SENTENCES), tuple(reversed(SENTENCES))]


@functools.cache
def a_checkpoint() -> list[bytes]:
    task, triplets = a_training()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "c.safetensors"
        training.fit(
            task, triplets, epochs=1, batch_size=1, rng=0, log_every=None, checkpoint=path, progress=False,
            callbacks=[lambda step: step.step == 1],
        )  # fmt: skip
        return [path.read_bytes()]


def read_checkpoint(folder: Path, content: bytes) -> None:
    path = folder / "c.safetensors"
    path.write_bytes(content)
    task, triplets = a_training()
    before = {name: array.copy() for name, array in task.parameters().items()}
    try:
        training.fit(
            task, triplets, epochs=1, batch_size=1, rng=0, log_every=None, checkpoint=path, resume=True, progress=False
        )  # fmt: skip
    except FloatingPointError:  # weights that are not finite
        return
    except ValueError:
        after = task.parameters()
        assert all(np.array_equal(array, after[name]) for name, array in before.items()), "half restored"
        raise


# The checkpoint's tree is JSON within JSON.
def change_checkpoint(content: bytes, draw: random.Random) -> bytes:
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        if draw.randrange(3):
            tree = change_tree(json.loads(header["__metadata__"]["tree"]), draw)
            header["__metadata__"]["tree"] = json.dumps(tree)
            text = dumps(header)
            return len(text).to_bytes(8, "little") + text + content[8 + length :]
    return change_safetensors(content, draw)


# ------------------------------------------------------------------------------------------------------- commands


def run(folder: Path, *arguments: str) -> None:
    """Run a command, which returns 0, or says in a line on stderr what is wrong."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = command(list(arguments))
    except SystemExit as end:
        status = end.code
    assert status in (0, 1, 2)
    assert status == 0 or folder.name in err.getvalue() + out.getvalue()


def read_npz(folder: Path, content: bytes) -> None:
    path = folder / "x.npz"
    path.write_bytes(content)
    run(folder, "steps", str(path), "--out", str(folder / "x.html"))


def some_npz() -> list[bytes]:
    x = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    tokens = np.array(["a", "b", "c"])
    found = []
    for arrays in (
        {"query": x, "key": x, "value": x, "tokens": tokens, "window": np.array([1, 1])},
        {"query": x, "key": x, "value": x, "attn_mask": np.eye(3, dtype=bool), "scale": np.float32(0.5)},
        {
            "inputs": x,
            "W_query": x.T @ x,
            "W_key": x.T @ x,
            "W_value": x.T @ x,
            "norm_weight": x[0],
            "norm_bias": x[1],
        },
    ):
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)
        found.append(buffer.getvalue())
    return found


def read_triplets(folder: Path, content: bytes) -> None:
    path = folder / "x.tsv"
    path.write_bytes(content)
    training.read_sentences(path)
    training.read_sentences(path, split="sentences")
    for triplet in training.read_triplets(path):
        assert all(part.strip() for part in triplet)


TARGETS: dict[str, Target] = {
    "arrays": Target(some_arrays, read_arrays, change_safetensors),
    "weights": Target(
        lambda: [saved()["model.safetensors"], saved(kind="int8")["model.safetensors"]], read_weights, change_safetensors
    ),
    "index": Target(an_index, read_index, change_json),
    "config": Target(lambda: [dumps(config) for config in CONFIGS], read_config, change_json),
    "pipeline": Target(a_pipeline, read_pipeline, change_json),
    "tokenizer": Target(tokenizers_of_all_kinds, read_tokenizer, change_json),
    "own_config": Target(lambda: [own()["config.json"]], read_own("config.json"), change_json),
    "own_vocabulary": Target(lambda: [own()["vocabulary.json"]], read_own("vocabulary.json"), change_json),
    "sentencepiece": Target(
        lambda: [own("sentencepiece")["tokenizer.model"]], read_own("tokenizer.model", "sentencepiece"), change_bytes
    ),
    "checkpoint": Target(a_checkpoint, read_checkpoint, change_checkpoint),
    "npz": Target(some_npz, read_npz, change_zip),
    "triplets": Target(lambda: [b"a b\tc.\td e\n\nf\tg\th"], read_triplets, change_bytes),
}  # fmt: skip


def known(name: str) -> list[bytes]:
    """The good contents of a target and those in the corpus."""
    kept = sorted((CORPUS / name).iterdir()) if (CORPUS / name).is_dir() else []
    return [*TARGETS[name].seeds(), *(path.read_bytes() for path in kept)]
