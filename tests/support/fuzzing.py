"""Files with any content: the functions that read them, and the outcomes that are allowed.

A target is one way to read a file. What it reads works, or ends in an error of ours: a ValueError or an OSError whose
message names the file or its folder. Anything else is a finding: another exception, a crash, a hang, memory beyond a
limit.

`tests/fuzz` tries some changes of each target; `tools/fuzz` runs for hours. `hostile.py` has the changes, and
`fuzzing_models.py`, among the tests of models, the targets that are files of models.
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

import ml_dtypes  # noqa: F401 registers "bfloat16"
import numpy as np
from hostile import (
    SENTENCE,
    change_bytes,
    change_json,
    change_safetensors,
    change_tree,
    change_zip,
    contents,
    dumps,
    reads,
    use,
)
from hypothesis import settings

from selfattn import _disk, files, nn, training
from selfattn.cli.app import main as command
from selfattn.text import WhitespaceTokenizer, train_sentencepiece

IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a disk takes longer than what is tested
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
    tokenizer = WhitespaceTokenizer.train(SENTENCES)
    model = nn.EmbeddingModel(tokenizer, tokenizer.vocab_size, 4, max_seq_len=16, rng=0)
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


TARGETS = {
    "arrays": Target(some_arrays, reads("x.safetensors", read_arrays), change_safetensors),
    "own_config": Target(lambda: [own()["config.json"]], read_own("config.json"), change_json),
    "own_vocabulary": Target(lambda: [own()["vocabulary.json"]], read_own("vocabulary.json"), change_json),
    "sentencepiece": Target(
        lambda: [own("sentencepiece")["tokenizer.model"]],
        read_own("tokenizer.model", "sentencepiece"),
        change_sentencepiece,
    ),
    "checkpoint": Target(a_checkpoint, reads("c.safetensors", read_checkpoint), change_checkpoint),
    "npz": Target(some_npz, reads("x.npz", read_npz), change_zip),
    "triplets": Target(lambda: [b"a b\tc.\td e\n\nf\tg\th"], reads("x.tsv", read_triplets), change_bytes),
}


def known(name):
    """Return the valid contents of a target and the contents in its corpus."""
    return known_of(TARGETS[name], CORPUS / name)


def known_of(target, folder):
    kept = sorted(folder.iterdir()) if folder.is_dir() else []
    return [*target.seeds(), *(path.read_bytes() for path in kept)]


TRIES = 3 * settings().max_examples


def read_good_files(target, folder, seeds=None):
    """Read the valid contents, or some of them, which raises nothing."""
    for n, content in enumerate(target.seeds() if seeds is None else seeds):
        place = folder / str(n)
        place.mkdir()
        target.read(place, content)


def check_drawn(target, contents, tries=TRIES):
    """Check drawn changes of contents."""
    draw = random.Random(0)
    for _ in range(tries):
        content = target.mutate(draw.choice(contents), draw)
        try:
            check(target, content)
        except BaseException as error:
            error.add_note(f"the content was {content!r:.4000}")
            raise
