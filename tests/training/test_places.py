"""What stands in the place of a file is an error that names it: pipes, devices, links, holes."""

import contextlib
import os
from pathlib import Path

import pytest
from hostile import put
from hostile_places import THINGS, assert_refused
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")

import fuzzing

from selfattn import _disk, files, training
from selfattn.text import read_text
from selfattn.views.live_pages import read_kernels


def resume(folder):
    task, triplets = fuzzing.a_training()
    training.fit(task, triplets, checkpoint=folder / "c.safetensors", resume=True, **fuzzing.TRAINING)


def steps(folder):
    status, printed = fuzzing.run("steps", folder / "x.npz", "--out", folder / "x.html")
    if status:
        raise ValueError(printed.rstrip("\n"))


# The files of each kind of place, and what reads them.
PLACES = {
    "model": (fuzzing.own, files.load_model),
    "model of SentencePiece's": (lambda: fuzzing.own("sentencepiece"), files.load_model),
    "arrays": (lambda: {"x.safetensors": b""}, lambda folder: files.load_arrays(folder / "x.safetensors")),
    "checkpoint": (lambda: {"c.safetensors": b""}, resume),
    "archive": (lambda: {"x.npz": b""}, steps),
    "kernels": (lambda: {"x.wasm": b""}, lambda folder: read_kernels(folder / "x.wasm")),
    "text": (lambda: {"x.tsv": b""}, lambda folder: training.read_triplets(folder / "x.tsv")),
}
PAIRS = [
    (kind, name, thing)
    for kind, (found, _) in PLACES.items()
    for name in found()
    for thing in THINGS
    if (kind, thing) != ("text", "a pipe")  # which a user may name
]


# A checkpoint that is not there begins a training, also through a link.
@given(st.sampled_from([each for each in PAIRS if each[0] != "checkpoint" or "link" not in each[2]]))
def test_what_is_no_file(pair):
    kind, name, thing = pair
    found, use = PLACES[kind]
    assert_refused(found(), name, thing, use)


def test_what_a_user_names_may_be_a_pipe():
    reader, writer = os.pipe()
    os.write(writer, b"tom\n")
    os.close(writer)
    assert read_text(f"/dev/fd/{reader}") == "tom\n"
    os.close(reader)
    assert read_text(os.devnull) == ""
    if os.path.exists("/proc/version"):  # its size is 0
        assert read_text("/proc/version").startswith("Linux")


def test_an_error_of_memory_names_the_file_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = Path("a")  # a letter of the message
    name.touch()
    with (
        pytest.raises(MemoryError, match=r"^a: its 0 bytes do not fit into memory$"),
        _disk.fitting(name),
        _disk.fitting(name),
    ):
        raise MemoryError("Unable to allocate an array")


@pytest.mark.parametrize(
    "linked", ["unfinished", "unfinished/checkpoint.safetensors", "unfinished/config.json"]
)
@pytest.mark.parametrize("option", ["--force", "--resume"])
def test_a_training_follows_no_link_of_its_folder(linked, option, tmp_path):
    """Files elsewhere would be replaced, or removed."""
    (tmp_path / "elsewhere").mkdir()
    put(tmp_path / "elsewhere", fuzzing.own())
    text, out = tmp_path / "x.txt", tmp_path / "out"
    text.write_text("".join(f"tom chases jerry {n} times\n" for n in range(300)))
    with contextlib.suppress(FileExistsError):
        (out / linked).parent.mkdir(parents=True)
    target = "elsewhere" if linked == "unfinished" else "elsewhere/config.json"
    (out / linked).symlink_to(tmp_path / target)
    status, printed = fuzzing.run("train", text, "--out", out, option)
    assert status == 1
    assert f"{Path(linked).name} is a link, which is not followed" in printed
    assert fuzzing.contents(tmp_path / "elsewhere") == fuzzing.own()


def test_a_folder_in_the_place_of_a_stale_file_changes_nothing(tmp_path):
    """The old tokenizer's file goes when the new model comes, or both stay."""
    put(tmp_path, fuzzing.own())
    (tmp_path / "vocabulary.json").unlink()
    (tmp_path / "vocabulary.json").mkdir()
    before = fuzzing.contents(tmp_path)
    model = fuzzing.nn.EmbeddingModel(lambda text: [len(text)], 10, 4, max_seq_len=8, rng=0)
    with pytest.raises(IsADirectoryError, match=r"vocabulary\.json"):
        files.save_model(model, tmp_path)
    assert fuzzing.contents(tmp_path) == before
