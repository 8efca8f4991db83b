"""What may happen to an index: writers that are killed or wait, readers meanwhile, a full disk, damaged files."""

import contextlib
import functools
import os
import resource
import shutil
import sqlite3
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hostile import contents, put
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import run_script

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


def test_writers_wait_for_each_other(index):
    refused = pytest.raises(BlockingIOError, match="is changing this index; try again")
    with _store.writing(index.folder), refused:
        index.add(["b"], timeout=0.01)

    def add(n):
        for each in range(3):
            index.add([f"thread {n}", f"text {each}"])

    threads = [threading.Thread(target=add, args=(n,)) for n in range(8)]
    for step in (threading.Thread.start, threading.Thread.join):
        for thread in threads:
            step(thread)
    assert len(index) == 3 + 8 * 6 and sorted(index.ids[3:]) == [*range(8 * 6)]


def test_a_reader_that_meets_a_vacuum_reads_the_new_files(index, monkeypatch):
    own, index_of_the_other = _store.Snapshot._mapped, search.Index.open(index.folder, embed)

    def meanwhile(snapshot, *given):
        monkeypatch.setattr(_store.Snapshot, "_mapped", own)
        index.vacuum()
        return own(snapshot, *given)

    index.delete("x")
    monkeypatch.setattr(_store.Snapshot, "_mapped", meanwhile)
    assert index_of_the_other.ids == ["y", "z"] and index_of_the_other._seen.file == 2


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_others_write_while_a_vacuum_copies(tmp_path, monkeypatch, journal):
    monkeypatch.setattr(_store, "BLOCK", 1)
    index, changes = search.Index.create(tmp_path, embed, metric="dot"), []
    with contextlib.closing(sqlite3.connect(tmp_path / "index.sqlite")) as db:
        db.execute(f"PRAGMA journal_mode={journal}")

    def meanwhile(_):
        for each in changes[:1]:
            changes.clear()
            each()

    def change():
        index.add(["new", "other"], ids=["new", 7], timeout=0)
        index.delete([0, 5], timeout=0)

    index.add(["a" * n for n in range(1, 21)])
    index.delete(3)
    for concurrent in (change, index.vacuum):  # of two vacuums the later one stays
        changes.append(concurrent)
        with contextlib.suppress(BlockingIOError), _store.writing(index.folder) as writer:
            writer.vacuum(meanwhile)
        texts = {n: "a" * (n + 1) for n in range(20) if n not in (0, 3, 5, 7)} | {"new": "new", 7: "other"}
        assert index.ids == [*texts] and index.texts == [*texts.values()]
        assert np.array_equal(index.vectors, embed(index.texts)) and len(contents(tmp_path)) == 3
    assert index._seen.file == 4 and index._seen.rows == len(index)


CHANGES = {
    "add": lambda index: index.add(["new"]),
    "delete": lambda index: index.delete(index.ids[0]),
    "vacuum": lambda index: index.vacuum(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, sqlite3.OperationalError])
def test_every_step_of_a_change_may_fail(index, monkeypatch, change, error):
    """The state is that before the change or after it, and the next change works."""
    before, steps = index.texts, iter(range(10**9))
    after = {"add": [*before, "new"], "delete": before[1:], "vacuum": before}[change]

    def failing(own, at):
        def step(*given, **named):
            if next(steps) == at:
                raise error("failed")
            return own(*given, **named)

        return step

    for at in range(0, 30, 2 if error is OSError else 5):
        index.delete([name for name in index.ids if isinstance(name, int)])
        index.add(before, ids=["x", "y", "z"])
        steps = iter(range(10**9))
        with monkeypatch.context() as patch, contextlib.suppress(error, OSError, ValueError):
            for of, name in (
                (os, "fsync"),
                (_store.Writer, "_write"),
                (_store.Writer, "one"),
                (Path, "unlink"),
            ):
                patch.setattr(of, name, failing(getattr(of, name), at))
            names = ("execute", "executemany")
            kind = type(
                "C", (sqlite3.Connection,), {n: failing(getattr(sqlite3.Connection, n), at) for n in names}
            )
            patch.setattr(_store.sqlite3, "connect", functools.partial(sqlite3.connect, factory=kind))
            index.delete("x") if change == "delete" else CHANGES[change](index)
        for each in (index, search.Index.open(index.folder, embed)):
            assert sorted(each.texts) in (sorted(before), sorted(after))
            assert len(each.search("a", 9)) == len(each)


def test_a_full_disk_changes_nothing(index):
    before, texts = everything(index), [f"text {n}" for n in range(500)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (30_000, 5_000, 300):  # of the database, of the vectors, of any file
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(OSError, match=r"nothing has changed") as error:
                index.add(texts)
            assert str(index.folder) in str(error.value)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert everything(index) == before
    assert len(index.add(texts)) == 500


def test_the_files_are_those_of_the_documentation(index):
    """A reader of its own, written from docs/theory/index_format.md."""
    index.add(["new"], ids=[7], metadata=[{"n": 1.0, "list": [1]}])
    index.delete("x")
    with contextlib.closing(sqlite3.connect(index.folder / "index.sqlite")) as db:
        state = dict(db.execute("SELECT name, value FROM state"))
        texts = db.execute("SELECT row, id, text, metadata FROM texts WHERE id IS NOT NULL").fetchall()
    width, rows = state["width"], state["rows"]
    assert [each[1:3] for each in texts] == list(zip(index.ids, index.texts, strict=True))
    assert texts[-1] == (3, 7, "new", '{"n": 1.0, "list": [1]}') and state["next_id"] == 8
    valid = np.unpackbits(np.frombuffer(state["valid"], "u1"), count=rows)
    assert valid.tolist() == [0, 1, 1, 1] and state["begins"] == b"" and state["texts"] == 3
    vectors = np.fromfile(index.folder / f"vectors-{state['file']}", "<f4").reshape(rows, width)
    expected = embed(["a", "ab", "abc", "new"])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    if state["dtype"] == "int8":
        scales = np.fromfile(index.folder / "scales-1", "<f4")[:, None]
        codes = np.fromfile(index.folder / "codes-1", "i1").reshape(rows, width)
        assert np.all(abs(codes * scales - expected) <= scales * 0.501)


def everything(index):
    hits = [index.search("a", 9, where) for where in (None, {"n": [0, 1, 2]}, {"n": (">", 0)})]
    return hits, index.ids, index.texts, index.metadata, index.vectors.tolist()


@settings(max_examples=30)
@given(st.data())
def test_a_changed_byte_is_an_error_or_has_no_effect(data):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "index")
        index = search.Index.create(folder, embed, data.draw(st.sampled_from(["float32", "int8"])))
        index.add(["a", "ab", "abc", "b"], metadata=[{"n": n} for n in range(4)])
        index.delete(1)
        before, files = everything(index), contents(folder)
        assert not [each for each in files if each.endswith(("-wal", "-shm", "-journal"))]  # a copy is whole
        path = folder / data.draw(st.sampled_from(sorted(files)))
        content = bytearray(files[path.name])
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes(content)
        try:
            assert everything(search.Index.open(folder, embed)) == before
        except (ValueError, OSError) as error:
            assert str(path) in str(error) or path.name == "index.sqlite"
        path.write_bytes(files[path.name][: place // 2])
        with contextlib.suppress(ValueError, OSError):
            assert everything(search.Index.open(folder, embed)) == before
        path.write_bytes(files[path.name])
        assert everything(search.Index.open(folder, embed)) == before


def test_a_copy_is_whole_also_without_write_ahead_logs(index, tmp_path):
    with contextlib.closing(sqlite3.connect(index.folder / "index.sqlite")) as db:
        db.execute("PRAGMA journal_mode=DELETE")  # as where the file system has no shared memory
    index.delete("y")
    index.copy(tmp_path / "copy")
    shutil.copytree(index.folder, tmp_path / "copied")
    again = [search.Index.open(tmp_path / name, embed) for name in ("copy", "copied")]
    index.add(["new"])
    assert [everything(each) for each in again] == [everything(again[0])] * 2
    assert again[0].ids == ["x", "z"] and len(contents(tmp_path / "copy")) == len(contents(index.folder))
    with pytest.raises(FileExistsError):
        index.copy(tmp_path / "copy")


def test_a_journal_that_names_other_files_is_not_played_back(index, tmp_path):
    put(tmp_path, {"notes": b"mine"})
    name = str(tmp_path / "notes").encode()
    ends = len(name).to_bytes(4, "big"), sum(name).to_bytes(4, "big"), _store.SUPER_JOURNAL
    put(index.folder, {"index.sqlite-journal": _store.SUPER_JOURNAL + bytes(1020) + name + b"".join(ends)})
    with pytest.raises(ValueError, match="names another file"):
        index.search("a")
    assert (tmp_path / "notes").read_bytes() == b"mine"


def test_an_index_of_an_older_format_is_refused(index, tmp_path):
    put(tmp_path / "old", {"manifest.json": b"{}", "lock": b""})
    with pytest.raises(ValueError, match=r"old is an index of an older format, .*: index its texts again"):
        search.Index.open(tmp_path / "old")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("mount") is None, reason="a read-only medium needs root"
)
def test_a_read_only_medium_is_read(index):
    before = everything(index)
    if os.system(f"mount --bind -o ro {index.folder} {index.folder} 2> {os.devnull}"):
        pytest.skip("no mount is allowed here")
    try:
        assert everything(search.Index.open(index.folder, embed)) == before
        with pytest.raises(OSError, match=r"readonly|Read-only"):
            index.add(["new"])
    finally:
        os.system(f"umount {index.folder}")


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
        if not linked.name.startswith("index."):  # more than the index knows of
            elsewhere.write_bytes(elsewhere.read_bytes() + b"my notes")
        before = elsewhere.read_bytes()
        with contextlib.suppress(OSError):
            CHANGES[change](search.Index.open(place, embed))
        assert elsewhere.read_bytes() == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_a_user_keeps_in_an_index_stays(index, change, tmp_path):
    (index.folder / "vectors-2").symlink_to(tmp_path / "elsewhere")
    (index.folder / "codes-9").symlink_to("nowhere")
    theirs = (
        "vectors-raw/a.csv",
        "vectors-3",
        "codes-4/tickets.csv",
        "data-1",
        ".index.sqlite.bak",
        "notes/content",
    )
    put(index.folder, dict.fromkeys(theirs, b"mine"))
    put(tmp_path, {"elsewhere": b"mine"})
    for _ in range(2):
        change(index)
    assert {name: (index.folder / name).read_bytes() for name in theirs} == dict.fromkeys(theirs, b"mine")
    assert (tmp_path / "elsewhere").read_bytes() == b"mine" and (index.folder / "codes-9").is_symlink()
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
