"""What may happen to an index: a writer that is killed, two writers, readers meanwhile, a full disk, damaged files."""

import contextlib
import hashlib
import itertools
import json
import os
import resource
import struct
import tempfile
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from hostile import contents, put
from hypothesis import given
from hypothesis import strategies as st
from processes import run_script

from selfattn import _disk
from selfattn_models import search
from selfattn_models.search import _store


def embed(texts):
    return np.array([[len(text), text.count("a"), 1.0] for text in texts])


@pytest.fixture(params=["float32", "int8"])
def index(request, tmp_path):
    index = search.Index.create(tmp_path / "index", embed, request.param)
    index.add(["a", "ab", "abc"], ids=["x", "y", "z"], metadata=[{"n": n} for n in range(3)])
    return index


def test_a_killed_writer_loses_nothing():
    found = run_script("import killed_writers as k; k.at_random(2); print(k.at_every_step())")
    assert int(found.split()[-1]) > 50


def test_a_second_writer_is_refused(index):
    refused = pytest.raises(BlockingIOError, match="is changing this index; try again")
    with _store.writing(index.folder), refused:
        index.add(["b"])
    index.add(["b"])
    assert len(index) == 4


def test_of_two_that_make_an_index_one_is_refused(tmp_path, monkeypatch):
    own = _disk.write_files

    def meanwhile(path, content):
        with pytest.raises(BlockingIOError, match="is changing this index"):
            search.Index.create(tmp_path, embed)
        own(path, content)

    monkeypatch.setattr(_disk, "write_files", meanwhile)
    search.Index.create(tmp_path, embed)
    with pytest.raises(FileExistsError, match=r"Index\.open opens an index"):
        search.Index.create(tmp_path, embed)


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


@pytest.mark.parametrize("change", ["add", "vacuum"])
def test_an_interrupt_after_the_commit_removes_nothing(index, monkeypatch, change):
    own = _disk.write_files

    def interrupted(path, content):
        own(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(_disk, "write_files", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index.add(["new"]) if change == "add" else index.vacuum()
    monkeypatch.undo()
    again = search.Index.open(index.folder, embed)
    assert again.texts == index.texts == ["a", "ab", "abc", *(["new"] if change == "add" else [])]
    assert len(again.search("a")) == len(again)


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
    def files():
        return {path: path.read_bytes() for path in index.folder.rglob("*") if path.is_file()}

    before = files(), index.search("a")
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
        assert (files(), index.search("a")) == before
    assert len(index.add([f"text {n}" for n in range(1500)])) == 1500


def test_the_files_are_those_of_the_documentation(index):
    """A reader of its own, written from docs/theory/index_format.md."""
    index.add(["new"], ids=[7], metadata=[{"n": 1.0, "list": [1]}])
    index.delete("x")

    def hashed(content):
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    manifest = json.loads((index.folder / "manifest.json").read_bytes())
    data = index.folder / f"data-{manifest['data']}"
    content, vectors = (data / "content").read_bytes(), (data / "vectors").read_bytes()
    assert manifest["counts"] == {"records": 4, "rows": 4, "tags": 4, "deleted": 1, "content": len(content)}
    assert manifest["checksums"] == {
        name: zlib.crc32((data / name).read_bytes()) for name in ("records", "tags", "deleted")
    }
    assert manifest["generation"] == 4 and manifest["next_id"] == 8 and manifest["fields"] == ["list", "n"]
    texts, width = [], manifest["width"]
    for n, record in enumerate(struct.iter_unpack("<QQQIIII", (data / "records").read_bytes())):
        offset, id_hash, text_hash, *lengths, crc = record
        ends = np.cumsum([offset, *lengths]).tolist()
        name, text, metadata = (content[begin:end] for begin, end in itertools.pairwise(ends))
        assert (id_hash, text_hash) == (hashed(name), hashed(b"\0" + text))
        packed = struct.pack("<QQIII", *record[1:6])
        assert crc == zlib.crc32(packed + name + text + metadata)
        row = struct.unpack_from("<IIII", (data / "rows").read_bytes(), 16 * n)
        vector = vectors[4 * width * n : 4 * width * (n + 1)]
        assert row == (n, 0, len(text.decode()), zlib.crc32(struct.pack("<III", *row[:3]) + vector))
        texts.append((json.loads(name), text.decode(), json.loads(metadata)))
    deleted = np.fromfile(data / "deleted", "<u8")
    assert deleted.tolist() == [0]
    assert texts[1:] == list(zip(index.ids, index.texts, index.metadata, strict=True))
    tags = [(hashed(f'["n", {value}]'.encode()), n) for n, value in enumerate([0, 1, 2, 1])]
    assert list(struct.iter_unpack("<QQ", (data / "tags").read_bytes())) == tags
    rows = embed([text for _, text, _ in texts])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(np.frombuffer(vectors, "<f4").reshape(4, width), rows, rtol=1e-6)
    if manifest["dtype"] == "int8":
        scales = np.fromfile(data / "scales", "<f4")[:, None]
        codes = np.fromfile(data / "codes", "i1").reshape(4, width)
        assert np.all(abs(codes * scales - rows) <= scales * 0.501) and np.all(abs(codes).max(axis=1) == 127)


@pytest.mark.parametrize(
    "name", ["manifest.json", "records", "rows", "vectors", "content", "tags", "deleted"]
)
def test_damaged_files_are_named(index, name):
    index.delete("y")
    path = next(index.folder.rglob(name))
    content = path.read_bytes()
    for changed in (content[:-5], bytes([content[0] ^ 1]) + content[1:]):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=rf"{name}\b") as error:
            search.Index.open(index.folder, embed).search("a", where={"n": [0, 1, 2]})
        assert str(index.folder) in str(error.value)
    path.write_bytes(content)
    assert len(search.Index.open(index.folder, embed).search("a")) == 2


def test_a_changed_hash_makes_no_second_text_of_an_id(index):
    path = next(index.folder.rglob("records"))
    content = path.read_bytes()
    path.write_bytes(content[:48] + bytes([content[48] ^ 1]) + content[49:])
    with pytest.raises(ValueError, match="records is damaged: its checksum is another"):
        index.add(["new"], ids=["y"])


def test_an_index_of_an_older_version_has_no_checksums_until_a_vacuum(index):
    manifest = _disk.read_json(index.folder / "manifest.json")
    del manifest["checksums"]
    (index.folder / "manifest.json").write_bytes(_disk.to_json(manifest))
    index.add(["new"])
    assert index.texts == ["a", "ab", "abc", "new"] and not index._current().sums
    index.vacuum()
    assert len(index._current().sums) == 3 and len(index.search("a")) == 4


CHANGES = {
    "add": lambda index: index.add(["new"]),
    "delete": lambda index: index.delete(index.ids[0]),
    "vacuum": lambda index: index.vacuum(),
}


@given(st.sampled_from(["float32", "int8"]), st.sampled_from(sorted(CHANGES)), st.data())
def test_no_change_follows_a_link(dtype, change, draw):
    with tempfile.TemporaryDirectory() as name:
        place, elsewhere = Path(name, "index"), Path(name, "elsewhere")
        index = search.Index.create(place, embed, dtype)
        index.add(["one", "two"])
        linked = place / draw.draw(
            st.sampled_from(sorted(str(each.relative_to(place)) for each in place.rglob("*")))
        )
        linked.rename(elsewhere)
        linked.symlink_to(elsewhere)
        if elsewhere.is_file() and linked.parent != place:  # more than the index knows of
            elsewhere.write_bytes(elsewhere.read_bytes() + b"my notes")
        before = elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere)
        refused = (OSError,) if elsewhere.is_file() and linked.name != "manifest.json" else ()
        with pytest.raises(refused) if refused and change != "vacuum" else contextlib.suppress(OSError):
            CHANGES[change](search.Index.open(place, embed))
        assert (elsewhere.read_bytes() if elsewhere.is_file() else contents(elsewhere)) == before
        if elsewhere.is_dir():
            assert linked.is_symlink()
            again = search.Index.open(place, embed)
            assert (again.texts == ["one", "two", "new"]) is (change == "add")
            again.search("one")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_user_keeps_in_an_index_stays(index, change, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (index.folder / "data-2").symlink_to(tmp_path / "elsewhere")
    (index.folder / "data-9").symlink_to("nowhere")
    theirs = (
        "data-raw/a.csv",
        "data-2024/tickets.csv",
        "data-x.txt",
        "data-3",
        ".manifest.json.bak",
        "notes/content",
    )
    put(index.folder, dict.fromkeys(theirs, b"mine"))
    put(tmp_path / "elsewhere", {"content": b"mine"})
    for _ in range(2):
        change(index)
    assert {name: (index.folder / name).read_bytes() for name in theirs} == dict.fromkeys(theirs, b"mine")
    assert contents(tmp_path / "elsewhere") == {"content": b"mine"}
    assert (index.folder / "data-9").is_symlink()
    assert index.search("a ship", k=1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_process_that_was_forked_during_a_change_does_not_keep_the_lock(tmp_path):
    waits, ends = os.pipe()
    children = []

    def forking(texts):
        if not children:
            children.append(os.fork())
            if not children[0]:
                os.close(ends)
                os.read(waits, 1)  # until the parent closes the other end
                os._exit(0)
        return embed(texts)

    index = search.Index.create(tmp_path, forking)
    index.add(["one"])
    index.add(["two"])
    os.close(ends)
    os.waitpid(children[0], 0)
    os.close(waits)
