"""What may happen to an index: a writer that is killed, two writers, readers meanwhile, a full disk, damaged files."""

import resource
import threading

import numpy as np
import pytest
from processes import run_script

from selfattn import search
from selfattn.search import _store


def embed(texts):
    return np.array([[len(text), text.count("a"), 1.0] for text in texts])


@pytest.fixture(params=["float32", "int8"])
def index(request, tmp_path):
    index = search.Index.create(tmp_path / "index", embed, request.param)
    index.add(["a", "ab", "abc"], ids=["x", "y", "z"], metadata=[{"n": n} for n in range(3)])
    return index


def test_a_killed_writer_loses_nothing():
    steps = int(run_script("import killed_writers; print(killed_writers.at_every_step())"))
    assert steps > 50


def test_a_second_writer_is_refused(index):
    with (
        _store.Writer(index.folder),
        pytest.raises(BlockingIOError, match="is changing this index; try again"),
    ):
        index.add(["b"])
    index.add(["b"])
    assert len(index) == 4


def test_a_reader_that_meets_a_vacuum_reads_the_new_files(index, monkeypatch):
    own, index_of_the_other = _store.Generation._mapped, search.Index.open(index.folder, embed)

    def meanwhile(generation, name, dtype, shape):
        if name == "tags" and generation.data.name == "data-1":
            monkeypatch.setattr(_store.Generation, "_mapped", own)
            index.vacuum()
        return own(generation, name, dtype, shape)

    index.delete("x")
    monkeypatch.setattr(_store.Generation, "_mapped", meanwhile)
    assert index_of_the_other.ids == ["y", "z"] and index_of_the_other._current().data.name == "data-2"


def test_searches_go_on_while_texts_change(index):
    stop, wrong = threading.Event(), []

    def read():
        reader = search.Index.open(index.folder, embed)
        while not stop.is_set():
            versions = {hit.metadata["n"] for hit in reader.search("a", 10)}
            if len(versions) != 1 or len(reader) != 3:
                wrong.append(versions)

    index.add(["a", "ab", "abc"], ids=["x", "y", "z"], metadata=[{"n": 9}] * 3)
    thread = threading.Thread(target=read)
    thread.start()
    for version in range(12):
        index.add([f"a{version}"] * 3, ids=["x", "y", "z"], metadata=[{"n": version}] * 3)
        if version % 4 == 0:
            index.vacuum()
    stop.set()
    thread.join()
    assert not wrong


def test_a_full_disk_changes_nothing(index):
    before, files = (
        index.search("a"),
        {path: path.read_bytes() for path in index.folder.rglob("*") if path.is_file()},
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Each of the files gets too long in turn: the texts, the records, the vectors, and the manifest.
    for limit in (40_000, 20_000, 5_000, 300):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match="File too large while writing") as error:
                index.add([f"text {n}" for n in range(1500)])
            assert str(index.folder) in str(error.value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path: path.read_bytes() for path in index.folder.rglob("*") if path.is_file()} == files
        assert index.search("a") == before
    assert len(index.add([f"text {n}" for n in range(1500)])) == 1500


@pytest.mark.parametrize("name", ["manifest.json", "records", "rows", "vectors", "content"])
def test_damaged_files_are_named(index, name):
    path = next(index.folder.rglob(name))
    content = path.read_bytes()
    for changed in (content[:-5], content[:-4] + bytes(byte ^ 85 for byte in content[-4:])):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name}\b") as error:
            search.Index.open(index.folder, embed).search("a")
        assert str(index.folder) in str(error.value)
    path.write_bytes(content)
    assert len(search.Index.open(index.folder, embed).search("a")) == 3
