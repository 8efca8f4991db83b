"""Commands of models and search: streams that are closed, full or minimal, ``-`` for a file, and what is refused."""

import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

import pytest
from cli_checks import (
    ASCII_ONLY,
    Minimal,
    assert_refused,
    closed,
    gone,
    written_by_name,
    written_without_descriptors,
)
from processes import COMMAND, finish, run_command, start

from selfattn import cli

TRAIN = shlex.split("train t.txt --epochs 1 --dim 8 --tokenizer whitespace --out m --quiet")
# These commands print their result to standard output, or write it into a file.
PRINTING = [["embed", "m", "sea"], ["embed", "m", "sea", "--out", "-"], ["search", "m", "t.txt", "sea"]]
WRITING = ["embed", "m", "sea", "--out", "v.npy"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("streams")
    with contextlib.chdir(folder):
        Path("t.txt").write_text("\n".join(f"line {i} of the sea" for i in range(40)))
        assert cli.main(TRAIN) == 0
    return folder


@pytest.fixture
def here(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize("stream", [lambda: None, closed], ids=["none", "closed"])
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_result_that_cannot_be_written_is_an_error(arguments, stream, here, monkeypatch, run):
    monkeypatch.setattr(sys, "stdout", stream())
    assert "standard output is closed, and the result would be lost" in run(*arguments, code=1).err


def test_a_file_is_written_without_standard_output(here, monkeypatch, run):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(sys, "stdin", None)
    run(*WRITING)


@pytest.mark.parametrize("arguments", [*PRINTING, WRITING], ids=" ".join)
def test_streams_may_be_minimal(arguments, here, monkeypatch, run):
    out = Minimal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", Minimal())
    monkeypatch.setattr(sys, "stdin", Minimal())
    run(*arguments)
    assert out.text or "v.npy" in arguments


def test_descriptors_that_are_closed(here):
    """The next opened file must not become standard output, or it would get the printed text."""
    assert (
        json.loads(written_without_descriptors(["embed", "m", "sea"], here / "v.json"))["sentence"] == "sea"
    )


def test_messages_that_cannot_be_written(here):
    with open("/dev/full", "w") as full:
        done = run_command("embed", "no/model", "sea", stderr=full)
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize("how", ["full", "unread"])
def test_a_remark_that_cannot_be_written_is_no_failure(how, here):
    """If text remained in the buffer of standard error, Python would exit with code 120."""
    with gone(how) as stderr:
        # The command reports that empty lines have no embedding.
        done = run_command("embed", "m", given="the sea\n\n\na line\n", stderr=stderr)
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)


@pytest.mark.parametrize("arguments", [["embed", "m", "--file", "t.txt"], ["search", "m", "t.txt", "sea"]])
def test_a_reader_that_goes_away(arguments, here):
    with gone("unread") as stdout:
        done = run_command(*arguments, stdout=stdout)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["embed", "m", "die Möwe"],
        ["search", "m", "t.txt", "die Möwe", "-k", "1"],
        ["explore", "m", "die Möwe", "--out", "-"],
    ],
)
def test_text_where_the_locale_is_ascii(arguments, here):
    done = finish(start([*COMMAND, *arguments], ASCII_ONLY))
    assert done.returncode == 0, done.stderr
    assert "\\udc" not in done.stdout


# The messages of commands that refuse to start.
REFUSED = {
    "must be UTF-8, not ": ["explore m sea --compare \udcff", "generate m \udcff", "embed m \ud800"],
    "argument --out: must be the name of a folder, not ''": ["train gpt t.txt --out ''"],
    "argument --out: must be the name of a file": ["embed m sea --out ''", "explore m sea --out ''"],
    "argument --out: must be a file": ["embed m sea --out new/", "explore m sea --out new/"],
    "; did you mean 'search'?\n": ["serch m t.txt sea"],
    "; did you mean '--split'?\n": ["search m t.txt sea --splt=lines"],
    "; did you mean 'lines'?\n": ["search m t.txt sea --split line"],
}


@pytest.mark.parametrize(
    ("command", "message"), [(each, message) for message, commands in REFUSED.items() for each in commands]
)
def test_wrong_arguments(command, message, here, run):
    assert_refused(run, command, message)
    assert not (here / "new").exists()


def test_standard_input_that_is_no_file(here):
    """A socket cannot be opened as /dev/stdin, and a file would be read from its beginning."""
    import socket

    ours, theirs = socket.socketpair()
    ours.sendall(b"the sea\n")
    ours.close()
    done = finish(start([*COMMAND, "embed", "m"], stdin=theirs))
    theirs.close()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sentence"] == "the sea"
    with (here / "t.txt").open() as text:
        text.readline()
        os.lseek(text.fileno(), len("line 0 of the sea\n"), os.SEEK_SET)
        done = finish(start([*COMMAND, "search", "m", "-", "line 1 of the sea", "-k", "1"], stdin=text))
    assert done.stdout.split("\t")[1:] == ["1", "line 1 of the sea\n"], done.stderr


def test_a_pipe_is_written_into(here, capfd):
    """The shell's >(...) makes a pipe; a rename would replace it by a file."""
    reading, writing = os.pipe()
    assert cli.main(["embed", "m", "sea", "--out", f"/dev/fd/{writing}"]) == 0
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert json.load(pipe)["sentence"] == "sea"


@pytest.mark.parametrize("mode", ["w", "a"])
def test_the_name_of_standard_output(mode, here, tmp_path):
    written = written_by_name(["embed", "m", "sea"], mode, here, tmp_path / "log")
    assert written.count('"sentence"') == (2 if mode == "a" else 1)
    assert written.startswith("begun" if mode == "a" else "{")


@pytest.mark.parametrize("command", ["embed", "explore"])
@pytest.mark.parametrize("name", ["m/model.safetensors", "m/config.json", "link/vocabulary.json"])
def test_the_model_is_not_replaced(command, name, here, tmp_path, run):
    (tmp_path / "m").symlink_to(here / "m")
    place = tmp_path / name.replace("link", "m")
    before = place.read_bytes()
    assert "would replace a part of the model" in run(command, "m", "sea", "--out", place, code=1).err
    assert place.read_bytes() == before


def test_other_files_in_a_models_folder_are_written(here, run):
    for _ in range(2):
        run("embed", "m", "sea", "--out", "m/vectors.json")
    (here / "m" / "vectors.json").unlink()


@pytest.mark.parametrize("place", ["no/such/x.json", "m"])
def test_a_place_is_checked_before_the_work(place, here, monkeypatch, run):
    def work(*_, **__):
        raise AssertionError("it began to work")

    monkeypatch.setattr("selfattn_models.cli.models._load", work)
    out, error = run("embed", "m", "sea", "--out", place, code=1)
    assert out == ""
    assert ("no such folder" if "/" in place else "a folder has the name of the file") in error


def test_the_input_is_not_replaced(here, run):
    before = (here / "t.txt").read_bytes()
    assert (
        "would replace the sentences" in run("embed", "m", "--file", "t.txt", "--out", "./t.txt", code=1).err
    )
    assert (here / "t.txt").read_bytes() == before


def test_no_suggestion_where_nothing_is_near(capsys, here):
    cli.main(["embed", "m", "--", "--flie"])
    assert "did you mean" not in capsys.readouterr().err


def test_help_lists_the_commands_in_a_group_of_their_own(run):
    own, _, further = run("--help").out.partition("commands of other packages:\n")
    listed = [line.split("  ")[1] for line in further.partition("\n\n")[0].splitlines()]
    assert listed == [
        "chat",
        "embed",
        "evaluate",
        "explore",
        "generate",
        "index",
        "map",
        "search",
        "train gpt",
    ]
    assert not any(f"\n    {name} " in own for name in listed)
    assert "pip install selfattn-models" not in own + further
