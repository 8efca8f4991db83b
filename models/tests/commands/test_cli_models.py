"""The commands that train and use models, as a new user would type them."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import numpy as np
import pytest
from processes import COMMAND, finish, run_command, start

from selfattn import files, training
from selfattn.functional._similarity import similarities

# Two topics alternate in blocks of five lines.
SEA = "the ship, a sailor, the captain, a wave, the harbour, one anchor, the storm, a fish"
GARDEN = "the rose, a gardener, the tulip, a spade, the hedge, one bee, the lawn, a seed"
TOPICS = {"sea": SEA.split(", "), "garden": GARDEN.split(", ")}
VERBS = ["met", "saw", "left", "found", "lost", "kept"]


def make_text():
    rng = np.random.default_rng(0)
    blocks = [list(TOPICS.values())[i % 2] for i in range(24)]
    each = [block for block in blocks for _ in range(5)]
    return [f"{rng.choice(block)} {rng.choice(VERBS)} {rng.choice(block)}" for block in each]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a text and a model that the command has trained on it."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("\n".join(make_text()) + "\n")
    options = ["--dim", "16", "--vocab-size", "100", "--epochs", "20", "--lr", "0.01"]
    done = run_command("train", "text.txt", "--out", "model", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    few = "120 examples are fewer than two batches of negatives, 256: .*--objective proxy"
    assert re.match(few + r"\n120 triplets, \d+ tokens, \d+ parameters\n", done.stdout)
    epochs = r"^--- Epoch \d+ completed\. Average Loss: \d\.\d{4} ---$"
    assert len(re.findall(epochs, done.stdout, re.MULTILINE)) == 20
    assert done.stdout.splitlines()[-1].startswith("saved in model after ")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def test_the_folder_holds_a_model_and_nothing_else(here):
    names = {path.name for path in (here / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.model"}
    assert files.load_model("model")("the ship").shape == (16,)


def test_search_finds_the_topic(here, run):
    for topic, words in TOPICS.items():
        found = run("search", "model", "text.txt", " ".join(words[:3]), "-k", "5").out
        rows = [line.split("\t") for line in found.splitlines()]
        assert len(rows) == 5
        lines = make_text()
        assert all(lines[int(number) - 1] == text for _, number, text in rows)
        scores = [float(score) for score, _, _ in rows]
        assert scores == sorted(scores, reverse=True)
        assert sum(any(word in text for word in words) for *_, text in rows) >= 4, topic


def test_search_as_json_with_several_queries(here, run):
    lines = run("search", "model", "text.txt", "the ship", "the rose", "-k", "2", "--json").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert [each["query"] for each in found] == ["the ship"] * 2 + ["the rose"] * 2
    assert all(set(each) == {"query", "score", "number", "text"} for each in found)
    lines = run("search", "model", "text.txt", "the ship", "the rose", "-k", "1").out.splitlines()
    assert (lines[0], lines[2], len(lines)) == ("the ship:", "the rose:", 4)


def test_the_number_of_a_line_counts_empty_ones(here, tmp_path, run):
    (tmp_path / "gaps.txt").write_text("\n\nthe ship met a fish\n\nthe rose\n")
    found = run("search", "model", tmp_path / "gaps.txt", "the ship met a fish", "-k", "1").out
    assert found == "1.000\t3\tthe ship met a fish\n"


def test_embed_prints_json_lines(here, run):
    out = run("embed", "model", "the ship", "the “rosé”").out
    assert out.isascii()
    lines = [json.loads(line) for line in out.splitlines()]
    model = files.load_model("model")
    assert [line["sentence"] for line in lines] == ["the ship", "the “rosé”"]
    for line, vector in zip(lines, model.encode(["the ship", "the “rosé”"]), strict=True):
        np.testing.assert_array_equal(np.array(line["embedding"], np.float32), vector)


def test_a_trained_model_is_not_rounded(here, run):
    error = run("embed", "model", "a word", "--dtype", "int8", code=1).err
    assert "model is not a pretrained model; only these are rounded to int8" in error


def test_embed_writes_files(here, tmp_path, run):
    model, text = files.load_model("model"), make_text()
    for name in ("v.npy", "v.jsonl"):
        assert run("embed", "model", "--file", "text.txt", "--out", tmp_path / name) == ("", "")
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy", allow_pickle=False), model.encode(text))
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text().splitlines()]
    assert [line["sentence"] for line in lines] == text


def test_pipes(here):
    done = run_command("embed", "model", "--out", "v.npy", given="the ship\n\n  \nthe rose\n", cwd=here)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.startswith("selfattn embed: 2 lines without tokens: NaN")
    expected = files.load_model(here / "model").encode(["the ship", "the rose"])
    np.testing.assert_array_equal(np.load(here / "v.npy"), np.insert(expected, [1, 1], np.nan, axis=0))
    arguments = ["search", "model", "-", "the ship", "-k", "1"]
    done = run_command(*arguments, given="the rose\r\nthe ship\r\n", cwd=here)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1.000\t2\tthe ship\n", "")


def test_text_that_the_terminal_cannot_show(here, tmp_path):
    (tmp_path / "text.txt").write_text("the rosé\n")
    arguments = ["search", "model", tmp_path / "text.txt", "the ship"]
    done = run_command(*arguments, environment={"PYTHONIOENCODING": "ascii"}, cwd=here)
    assert done.stdout.endswith("the ros\\xe9\n")


def test_triplets_in_a_table(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    triplets = training.make_triplets(make_text(), rng=0)
    lines = "\r\n".join(map("\t".join, triplets))
    (tmp_path / "t.tsv").write_text(f"\ufeff{lines}\r\n\r\n")
    assert run("train", "t.tsv", "--out", "m", *SMALL, "1") == ("", "")
    model = files.load_model("m")
    assert set(model.tokenizer.vocabulary) == {"<unk>", *" ".join(make_text()).split()}


def test_running_text(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    sentences = [f"{line.capitalize()}." for line in make_text()]
    (tmp_path / "t.txt").write_text(" ".join(sentences))
    error = run("train", "t.txt", "--out", "m", code=1).err
    assert "a text of 1 sentence is too short" in error
    assert "--split sentences" in error
    options = "--split sentences --tokenizer whitespace --dim 8 --epochs 1 --layers 2 --heads 2"
    assert "\n120 triplets" in run("train", "t.txt", "--out", "m", *options.split()).out
    found = run("search", "m", "t.txt", sentences[3], "--split", "sentences", "-k", "1").out
    assert found.startswith("1.000\t")


SMALL = ["--tokenizer", "whitespace", "--dim", "8", "--quiet", "--epochs"]


def test_the_same_seed_gives_the_same_model_also_from_a_pipe(here, tmp_path, run):
    for name, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        run("train", "text.txt", "--out", tmp_path / name, *SMALL, "1", "--seed", seed)
    arguments = ["train", "-", "--out", tmp_path / "piped", *SMALL, "1", "--seed", "3"]
    done = run_command(*arguments, given="\n".join(make_text()), cwd=here)
    assert (done.returncode, done.stderr) == (0, "")
    names = ("a", "b", "c", "piped")
    a, b, c, piped = ((tmp_path / name / "model.safetensors").read_bytes() for name in names)
    assert a == b == piped != c


def test_ctrl_c_and_resume(folder, tmp_path):
    """Ctrl-C keeps the model as it is; --resume ends where an uninterrupted training does."""
    text = str(folder / "text.txt")
    arguments = ["train", text, "--out", "m", *SMALL]
    process = start([*COMMAND, *arguments, 100000], stdout=subprocess.DEVNULL, cwd=tmp_path)
    checkpoint = tmp_path / "m" / "unfinished" / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130, done.stderr
    assert done.stderr == "\nstopped; the model as it is now is in m, and --resume continues the training\n"
    files.load_model(tmp_path / "m")
    epochs = len(training.loop.checkpoints.load(checkpoint)["epoch_losses"]) + 2

    assert run_command(*arguments, epochs, cwd=tmp_path).returncode == 1  # neither --resume nor --force
    done = run_command(*arguments, epochs, "--resume", "--dim", "16", cwd=tmp_path)
    assert done.returncode == 1
    assert "started with --dim 8, not 16" in done.stderr
    done = run_command(*arguments, epochs, "--resume", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not checkpoint.parent.exists()
    assert run_command("train", text, "--out", "whole", *SMALL, epochs, cwd=tmp_path).returncode == 0
    resumed, whole = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("m", "whole"))
    assert resumed == whole


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (b"", "", "holds no sentence"),
        (b"\n \n\n", "", "holds no sentence"),
        (b"one line\n", "", "a text of 1 sentence is too short: with far=1 at least 4 are needed"),
        (b"a\nb\nc\nd\n", "--far 10", "at least 22 are needed"),
        (b"same\n" * 30, "", "distant sentences were all the same as 'same'"),
        (b"fine\n\xff\n", "", "is not UTF-8: byte 0xff in line 2"),
        (b"a b\nb c\nc d\nd e\n", "--lr 1e30", "the loss is nan in epoch"),
        (b"a b\nb c\nc d\nd e\n", "--dim 7", "embedding_dim must be even"),
        (b"a b\nb c\nc d\nd e\n", "--heads 3", "num_heads must divide"),
        (b"a b\nb c\nc d\nd e\n", "--seed -1", "--seed must not be negative"),
        (b"a b\nb c\nc d\nd e\n", "--resume", "no unfinished training"),
    ],
)
def test_texts_and_numbers_that_will_not_do(tmp_path, run, content, arguments, message):
    (tmp_path / "t.txt").write_bytes(content)
    command = ["train", tmp_path / "t.txt", "--out", tmp_path / "m", "--tokenizer", "whitespace"]
    error = run(*command, *arguments.split(), code=1).err
    assert error.startswith("selfattn train: error: ")
    assert message in error
    assert not (tmp_path / "m" / "config.json").exists()


def test_arguments_that_are_no_text(here):
    done = run_command("embed", "model", b"the \xff".decode(errors="surrogateescape"))
    assert done.returncode == 2
    assert "must be UTF-8, not b'the \\xff'" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("train nowhere.txt --out m", 1, "nowhere.txt"),
        ("train . --out m", 1, "directory"),
        ("train text.txt --out text.txt", 1, "--out must be a folder, and text.txt is not one"),
        ("embed nowhere sentence", 1, "nowhere is not a folder"),
        ("embed . sentence", 1, "config.json"),
        ("embed model --file nowhere.txt", 1, "there is no file nowhere.txt; expected a UTF-8 text"),
        ("embed model sentence --out v.csv", 1, ".csv is not written; name it .npy"),
        ("embed model sentence --prompt x", 1, "model is from selfattn train, and has no prompts"),
        ("embed model --file model/config.json --out nowhere/v.npy", 1, "nowhere"),
        ("search model nowhere.txt query", 1, "nowhere.txt"),
        (
            "search nowhere text.txt query",
            1,
            "nowhere is not a folder; expected the folder of a model, or an index, from selfattn index. Get one with",
        ),
        ("search model /dev/null query", 1, "holds no sentence"),
        ("search model text.txt ''", 1, "no tokens"),
        ("train gpt nothing.txt --out m", 1, "there is no file nothing.txt"),
        ("train gpt text.txt --out m --context 5000", 1, "a context of 5000 needs"),
        ("train gpt text.txt --out m --heads 5", 1, "num_heads must divide d_model"),
        ("train gpt text.txt --out m --seed -1", 1, "--seed must not be negative"),
        ("train gpt text.txt --out m --resume", 1, "no unfinished training"),
        ("train text.txt", 2, "usage: selfattn train"),
        ("train text.txt --out m --lr nan", 2, "argument --lr: must be at least 0 and finite, not nan"),
        ("train text.txt --out m --lr=-1", 2, "argument --lr: must be at least 0 and finite, not -1"),
        ("train text.txt --out m --lr fast", 2, "argument --lr: must be a number, not 'fast'"),
        ("train text.txt --out m --epochs 1e3", 2, "argument --epochs: must be a whole number, not '1e3'"),
        ("train text.txt --out m --dim -2", 2, "argument --dim: must be at least 1, not -2"),
        ("train text.txt --out m --resume --force", 2, "usage: selfattn train"),
        ("train text.txt --out m --tokenizer bytes", 2, "usage: selfattn train"),
        ("embed model sentence --file text.txt", 2, "usage: selfattn embed"),
        ("search model text.txt query -k 0", 2, "usage: selfattn search"),
        *(
            (f"train gpt text.txt --out m {option}", 2, f"argument {option.split()[0]}: must be")
            for option in ("--steps 0", "--lr inf")
        ),
    ],
)
def test_what_a_command_cannot_do_is_one_line_and_leaves_nothing(here, run, arguments, code, message):
    out, error = run(*shlex.split(arguments), code=code)
    assert out == ""
    assert code == 2 or (error.startswith(f"selfattn {arguments.split()[0]}") and error.count("\n") == 1)
    assert message in error
    assert not (here / "m").exists()


def test_embed_does_not_wait_for_a_terminal(here, run, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    assert "give a sentence" in run("embed", "model", code=2).err


@pytest.mark.parametrize("command", ["train", "embed", "search"])
def test_help_has_examples_and_needs_no_extra(command, run, monkeypatch):
    for module in ("safetensors", "sentencepiece", "tqdm"):
        monkeypatch.setitem(sys.modules, module, None)
    out = run(command, "--help").out
    assert f"selfattn {command} " in out.split("examples:")[1]
    assert "exit codes:" in out
    assert command in run("--help").out


@pytest.mark.parametrize("module", ["safetensors", "sentencepiece"])
def test_a_missing_extra_is_named_before_anything_is_done(module, here, tmp_path, monkeypatch, run):
    for name in list(sys.modules):
        if name.split(".")[0] == module:
            monkeypatch.setitem(sys.modules, name, None)
    assert "pip install 'selfattn[text]'" in run("train", "text.txt", "--out", tmp_path / "m", code=1).err
    assert not (tmp_path / "m").exists()


def test_the_sign_of_standard_output_and_endings_in_capitals(here, tmp_path, run):
    before = set(os.listdir())
    assert json.loads(run("embed", "model", "the ship", "--out", "-").out)["sentence"] == "the ship"
    assert set(os.listdir()) == before
    run("embed", "model", "the ship", "--out", tmp_path / "v.NPY")
    np.testing.assert_array_equal(np.load(tmp_path / "v.NPY"), files.load_model("model").encode(["the ship"]))
    (tmp_path / "T.TSV").write_text("the ship\ta wave\tthe rose\n" * 3)
    found = run("train", tmp_path / "T.TSV", "--out", tmp_path / "m", *SMALL[:2], "--epochs", 1)
    assert found.out.startswith("3 triplets, ")


def test_lines_without_tokens(here, tmp_path, run):
    """SentencePiece removes invisible characters: a line of them is not a sentence."""
    lines = make_text()
    lines[20:20] = ["\u200b", "\ufeff\u200b"]
    text = tmp_path / "t.txt"
    text.write_text("\n".join(lines), encoding="utf-8")
    found = run("train", text, "--out", tmp_path / "m", "--dim", 8, "--vocab-size", 100, "--epochs", 1)
    assert "selfattn train: 2 sentences without tokens left out\n" in found.err
    found = run("search", "model", text, lines[30], "-k", "1")
    assert found.out == f"1.000\t{lines.index(lines[30]) + 1}\t{lines[30]}\n"
    assert found.err == "selfattn search: 2 sentences without tokens left out\n"
    found = run("embed", "model", "--file", text)
    rows = [json.loads(line) for line in found.out.splitlines()]
    assert [row["sentence"] for row in rows if row["embedding"]] == lines[:20] + lines[22:]
    assert [row["embedding"] for row in rows[20:22]] == [None, None]
    assert found.err.startswith("selfattn embed: 2 lines without tokens: ")


def everything(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


TRAIN = {
    "train": f"train text.txt {' '.join(SMALL)} 1",
    "train gpt": "train gpt text.txt --dim 8 --heads 1 --layers 1 --context 8 --steps 1 --quiet",
}


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize(
    ("command", "mine", "made"),
    [
        # also a folder with the name that training uses for its own files
        (
            "train",
            ["unfinished/novel.txt", "unfinished/notes/a", "tokenizer.json", "b.txt"],
            ["config.json", "model.safetensors", "vocabulary.json"],
        ),
        (
            "train gpt",
            ["modules.json", "special_tokens_map.json", "notes.txt"],
            ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"],
        ),
    ],
)
def test_other_files_stay_where_a_model_is_trained(here, tmp_path, run, command, mine, made, force):
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"mine")
    run(*TRAIN[command].split(), "--out", tmp_path, *force)
    found = everything(tmp_path)
    assert [found.pop(name) for name in mine] == [b"mine"] * len(mine)
    assert set(found) == set(made)


@pytest.mark.parametrize(
    ("command", "file", "message"),
    [
        *(
            ("train", file, "--force replaces it")
            for file in ("config.json", "model.safetensors", "vocabulary.json")
        ),
        *(
            ("train gpt", file, "--force replaces it")
            for file in ("tokenizer.json", "tokenizer_config.json", "model.safetensors")
        ),
        ("train", "unfinished/config.json", "which is not from a training of selfattn's"),
        ("train", "unfinished/model.safetensors", "which is not from a training of selfattn's"),
        ("train", "unfinished", "is in the way of the unfinished training's folder"),
        ("train gpt", "unfinished.safetensors", "is not from a training of selfattn's"),
    ],
)
def test_files_of_others_are_replaced_only_by_force_or_never(here, tmp_path, run, command, file, message):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"{}")
    arguments = [*TRAIN[command].split(), "--out", tmp_path]
    assert message in run(*arguments, code=1).err
    assert everything(tmp_path) == {file: b"{}"}
    replaces = "--force" in message
    run(*arguments, "--force", code=not replaces)
    assert (everything(tmp_path)[file] != b"{}") == replaces


def test_lengths_of_vectors_of_any_size():
    for size in (1e-310, 1e-200, 1.0, 1e200, 1.7e308):
        cosines = similarities("cosine", [[size, size], [0, size]], [0, 1])
        np.testing.assert_allclose(cosines, [[0.5**0.5], [1]])
    assert similarities("cosine", np.zeros((1, 2)), [0.0, 1.0]) == 0
    for dtype in (np.float16, np.float32):
        most = np.finfo(dtype).max
        np.testing.assert_allclose(similarities("cosine", np.array([[most, most]]), [[0, 1]]), [[0.5**0.5]])


def test_what_json_has_no_number_for(here, tmp_path, run):
    """A model after a failed training gives NaN and Infinity, which json.dumps writes but other readers refuse."""
    model = files.load_model("model")
    model.embedding_layer.weight[...] = np.nan
    files.save_model(model, tmp_path / "broken")
    (tmp_path / "text.txt").write_text("the sea\n")

    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    found = json.loads(run("embed", tmp_path / "broken", "the sea").out, parse_constant=refuse)
    assert found["embedding"] == [None] * model.embedding_dim
    found = run("search", tmp_path / "broken", tmp_path / "text.txt", "sea", "--json").out
    assert json.loads(found, parse_constant=refuse)["score"] is None
