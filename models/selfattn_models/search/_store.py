"""The files of an index: a database of SQLite says what is valid, and embeddings are in files that are mapped.

A change appends embeddings, flushes them, and commits; so a reader sees all of it or nothing. A connection belongs to
one call: no thread and no forked process shares it. ``docs/theory/index_format.md`` has the tables and the files.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn.engine import SIMILARITIES, Array, Entries, checksum, disk
from selfattn_models.search._where import Condition, index_name, meeting, value_of

DATABASE, SUM = "index.sqlite", "index.sum"
FORMAT = 2
DTYPES = ("float32", "int8")
NAMES = ("vectors", "codes", "scales")
FILES = {"vectors": ("vectors",), "codes": ("codes", "scales")}  # what one sum is about
SCHEMA = (
    "CREATE TABLE state(name TEXT PRIMARY KEY, value)",
    'CREATE TABLE "texts"(row INTEGER PRIMARY KEY, id UNIQUE, text TEXT, metadata TEXT '
    "CHECK(metadata IS NULL OR json_valid(metadata)), hash BLOB, spans TEXT)",
)
BY_HASH = "CREATE INDEX hashes ON texts(hash)"
NONE = np.empty((0, 0), np.float32)
BLOCK = 1024  # rows that have a sum in common
MOST = 2**62
SAMPLE = 256  # texts by which the share that a range selects is estimated
INDEXED = 10_000  # texts from which a field that is asked for gets an index
SELECTIONS = 16  # conditions whose rows are kept for the next search
TIMEOUT = 10.0  # seconds
# The last bytes of a journal that names another file, which SQLite would remove.
SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")
ENDS = ("", "-wal", "-shm", "-journal")
BUSY = (
    "another process or thread is changing this index; try again when it has ended, or with a longer timeout"
)
KEPT = "another program vacuums this index, or reads it as it was before the last vacuum; wait, or let it search again"
CODES = {5: errno.EAGAIN, 6: errno.EAGAIN, 8: errno.EACCES, 10: errno.EIO, 13: errno.ENOSPC, 14: errno.EIO}


class Entry(NamedTuple):
    """A text as it is stored: the number of its first row, and where its windows begin and end; None for the whole."""

    row: int
    id: Any
    text: str
    metadata: dict[str, Any]
    spans: list[tuple[int, int]] | None


# ------------------------------------------------------------------------------------------------------- connections


class _Files:
    """Databases that are read as plain files: closing one would release the locks of all connections to it."""

    def __init__(self) -> None:
        self.lock, self.users, self.opened = threading.RLock(), dict[Path, int](), dict[Path, Any]()

    @contextmanager
    def used(self, path: Path) -> Iterator[None]:
        """Count a connection; a file is closed after the last."""
        with self.lock:
            self.users[path] = self.users.get(path, 0) + 1
        try:
            yield
        finally:
            with self.lock:
                self.users[path] -= 1
                if not self.users[path]:
                    del self.users[path]
                    if path in self.opened:
                        self.opened.pop(path).close()

    def sum(self, path: Path) -> int:
        """Return the sum of a file."""
        with self.lock:
            file = self.opened.get(path) or self.opened.setdefault(path, path.open("rb", buffering=0))
            file.seek(0)
            total = 0
            while block := file.read(2**20):
                total = checksum((np.array([total], "<u8"), np.frombuffer(block, "u1")))
            return total


_files = _Files()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_files.__init__)  # type: ignore[misc]


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Let errors of SQLite say what they mean, and name the file."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise ValueError(f"the metadata are nested too deeply, or {path} is damaged: {error}") from None
    except sqlite3.Error as error:
        code = CODES.get(getattr(error, "sqlite_errorcode", 0) & 255)
        if code is None:
            raise ValueError(f"{path} is damaged: {error}") from None
        what = BUSY if code == errno.EAGAIN else f"{error} while writing or reading; nothing has changed"
        raise OSError(code, what, str(path if code != errno.EAGAIN else path.parent)) from None


@contextmanager
def connected(folder: Path, timeout: float = TIMEOUT) -> Iterator[sqlite3.Connection]:
    """Open the database of an index; what is not committed at the end is undone."""
    path = folder / DATABASE
    if not os.path.lexists(path):
        if os.path.lexists(folder / "manifest.json"):
            raise ValueError(
                f"{folder} is an index of an older format, which is not read: index its texts again"
            )
        raise FileNotFoundError(errno.ENOENT, "no index is here; Index.create makes one", str(folder))
    for end in ENDS:
        if os.path.islink(f"{path}{end}"):
            raise OSError(errno.ELOOP, disk.FOLLOWED, f"{path}{end}")
    disk.check_regular(path)
    journal, log = Path(f"{path}-journal"), Path(f"{path}-wal")
    if journal.exists() and journal.read_bytes()[-8:] == SUPER_JOURNAL:
        raise ValueError(f"{journal} names another file, which SQLite would remove")
    mode = "rw" if os.access(folder, os.W_OK) and os.access(path, os.W_OK) else "ro"
    fixed = mode == "ro" and not log.exists() and not journal.exists()
    uri = f"{path.as_uri()}?mode={mode}" + "&immutable=1" * fixed
    with (
        _files.used(path),
        _errors(path),
        contextlib.closing(sqlite3.connect(uri, timeout, isolation_level=None, uri=True)) as db,
    ):
        yield db


@contextmanager
def _new_database(folder: Path) -> Iterator[sqlite3.Connection]:
    """Yield the database of a new index, in a folder that is new or empty; it appears when it is whole."""
    taken = FileExistsError(errno.EEXIST, "the folder is not empty; Index.open opens an index", str(folder))
    if folder.is_dir() and any(each.name[0] != "." for each in folder.iterdir()):
        raise taken
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f".{DATABASE}.{secrets.token_hex(8)}"
    try:
        with _errors(new), contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
            yield db
        os.link(new, folder / DATABASE)
    except FileExistsError:
        raise taken from None
    finally:
        for end in ENDS:
            Path(f"{new}{end}").unlink(missing_ok=True)
    disk.sync_folder(folder)


def make(folder: Path, dtype: str, metric: str, model: Mapping[str, Any]) -> None:
    """Make an index without texts in a folder that is new or empty."""
    own = {"format": FORMAT, "dtype": dtype, "metric": metric, "model": json.dumps(model), "fields": "[]"}
    own |= dict.fromkeys(("width", "rows", "texts", "next_id", "spare"), 0) | {"file": 1}
    own |= dict.fromkeys(("vectors", "codes", "valid", "begins"), b"")
    own["generation"] = secrets.randbits(63)
    with _new_database(folder) as db:
        db.execute("PRAGMA journal_mode=WAL")
        for each in (*SCHEMA, BY_HASH):
            db.execute(each)
        db.executemany("INSERT INTO state VALUES(?, ?)", own.items())


def copy(folder: Path, place: Path, seen: Snapshot | None) -> None:
    """Copy one state of an index to a folder that is new or empty."""
    with reading(folder, seen) as reader, _new_database(place) as db:
        now = reader.now
        for name, array in now.arrays.items():
            now.check("vectors" if name == "vectors" else "codes")
            with disk.open_own(place / f"{name}-{now.file}") as file:
                for n in range(0, now.rows, BLOCK):
                    file.write(array[n : n + BLOCK].tobytes())
                os.fsync(file.fileno())
        reader.db.backup(db)
    with writing(place) as writer:
        writer.commit()
        writer.seal()


# ---------------------------------------------------------------------------------------------------------- snapshots


class Snapshot:
    """One state of an index, which no change touches: settings, the valid rows, and embeddings, which are mapped."""

    trusted = False  # the database has its sum

    def __init__(self, folder: Path, state: Mapping[str, Any], seen: Snapshot | None) -> None:
        self.folder, self.generation = folder, state.get("generation")
        entries = Entries(state, str(folder / DATABASE))
        entries.only("format", FORMAT)
        try:
            self.model, self.fields = json.loads(state["model"]), json.loads(state["fields"])
        except (KeyError, TypeError, ValueError) as error:
            raise entries.error(f"model or fields: {error}") from None
        self.dtype, self.metric = str(state.get("dtype")), str(state.get("metric"))
        if self.dtype not in DTYPES or self.metric not in SIMILARITIES:
            raise entries.error(f"unknown dtype or metric: {self.dtype!r:.80}, {self.metric!r:.80}")
        self.width, self.rows, self.texts, self.next_id, self.spare = (
            entries.size(name, least=0, most=MOST) for name in ("width", "rows", "texts", "next_id", "spare")
        )
        self.file = entries.size("file", most=MOST)
        bits = (np.frombuffer(state[name], "u1") for name in ("valid", "begins"))
        self.valid, self.begins = (
            np.unpackbits(each, count=self.rows).view(bool) if len(each) else np.ones(self.rows, bool)
            for each in bits
        )
        shapes: dict[str, Any] = {"vectors": ("<f4", (self.rows, self.width))}
        if self.dtype == "int8":
            shapes |= {"codes": ("i1", (self.rows, self.width)), "scales": ("<f4", (self.rows,))}
        self.arrays = {name: self._mapped(name, *each) for name, each in shapes.items()}
        self.vectors, self.codes = self.arrays["vectors"], self.arrays.get("codes")
        self.sums = {name: np.frombuffer(state[name], "<u8") for name in ("vectors", "codes")}
        self.selections = dict[str, Array]()  # rows that a condition has selected
        self._checked = {name: np.zeros(len(sums), bool) for name, sums in self.sums.items()}
        for name, checked in self._checked.items():
            if seen is not None and seen.file == self.file:  # blocks whose sums are as they were
                n = min(len(checked), len(seen.sums[name]))
                checked[:n] = seen._checked[name][:n] & (seen.sums[name][:n] == self.sums[name][:n])

    def _mapped(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        path, needed = self.path(name), int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        if not needed:
            return np.empty(shape, dtype)
        if (size := disk.check_regular(path)) < needed:
            raise ValueError(f"{path} is damaged: it has {size} bytes, and the index needs {needed}")
        return np.asarray(disk.mapped(path, dtype, "r", shape))

    def path(self, name: str) -> Path:
        """Return where embeddings are, or codes, or scales."""
        return self.folder / f"{name}-{self.file}"

    def check(self, name: str, rows: Array | None = None) -> None:
        """Compare blocks of embeddings, or of codes, with their sums when they are first read: all, or some rows'."""
        checked = self._checked[name]
        if checked.all():
            return
        places = (
            np.arange(self.rows) if rows is None else np.flatnonzero(rows) if rows.dtype == bool else rows
        )
        needed = np.bincount(places // BLOCK, minlength=len(checked)) > 0
        for block in np.flatnonzero(needed & ~checked).tolist():
            if self._sum(name, block) != self.sums[name][block]:
                what = f"rows {block * BLOCK} to {min((block + 1) * BLOCK, self.rows) - 1} have another sum"
                raise ValueError(
                    f"{' or '.join(str(self.path(each)) for each in FILES[name])} is damaged: {what}"
                )
            checked[block] = True

    def _sum(self, name: str, block: int) -> int:
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        return sums_of(*(self.arrays[each][part] for each in FILES[name]))[0]

    @functools.cached_property
    def owner(self) -> Array | None:
        """The first row of each row's text; None if each text has one row."""
        if self.begins.all():
            return None
        return np.maximum.accumulate(np.where(self.begins, np.arange(self.rows), 0))

    def means(self) -> Array:
        """Return the mean of the embeddings of each text's windows."""
        self.check("vectors")
        starts, rows = np.flatnonzero(self.begins), self.vectors
        if self.owner is not None:
            rows = np.add.reduceat(rows, starts, axis=0) / np.diff(starts, append=self.rows)[:, None]
        return np.asarray(rows[self.valid[starts]], np.float32)

    def live(self) -> Array:
        """Return the first rows of the texts that are not deleted, in order."""
        return np.flatnonzero(self.valid & self.begins)


def sums_of(*arrays: Array) -> list[int]:
    """Return the sum of each block of rows."""
    parts = (slice(n, n + BLOCK) for n in range(0, len(arrays[0]), BLOCK))
    return [checksum(tuple(np.ascontiguousarray(each[part]) for each in arrays)) for part in parts]


def quantized(rows: Array) -> tuple[Array, Array]:
    """Round rows to int8 and a scale each: ``codes * scales`` is near the row."""
    largest = np.abs(rows).max(axis=1, initial=0)
    scales = np.where(largest > 0, largest, 127).astype("<f4") / np.float32(127)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales


# -------------------------------------------------------------------------------------------------------------- reading


class Reader:
    """A snapshot and the texts of its database, for the time of one call."""

    def __init__(
        self,
        folder: Path,
        db: sqlite3.Connection,
        seen: Snapshot | None,
        begin: str = "BEGIN",
        check: bool = True,
    ) -> None:
        self.folder, self.db = folder, db
        self.begin(seen, begin, check)

    def begin(self, seen: Snapshot | None, how: str, check: bool = True) -> None:
        """Begin a transaction, with the newest state; the first that is to check compares the database with its sum."""
        failed = None
        while True:
            self.db.execute(how)
            generation = self.generation()
            trusted = seen is not None and seen.trusted
            if check and not trusted:
                self._check_database(generation)
            try:
                if seen is None or generation != seen.generation:
                    state = dict(self.db.execute("SELECT name, value FROM state"))
                    seen = Snapshot(self.folder, state, seen)
                self.now = seen
                self.now.trusted = trusted or check
                return
            except FileNotFoundError:  # a vacuum has removed a file since the database was read
                self.db.execute("ROLLBACK")
                if generation == failed:
                    raise
                failed = generation

    def generation(self) -> int:
        """Return the number of the newest state."""
        (found,) = self.one("SELECT value FROM state WHERE name = 'generation'") or (None,)
        if type(found) is not int or found < 0:
            raise ValueError(f"{self.folder / DATABASE} is damaged: it has no state")
        return found

    def _check_database(self, generation: Any) -> None:
        """Compare the file with its sum, if it holds all that was written."""
        found = [sql for (sql,) in self.db.execute("SELECT sql FROM sqlite_schema WHERE type != 'index'")]
        if found != list(SCHEMA):
            raise ValueError(f"{self.folder / DATABASE} is damaged: it has other tables than an index")
        stored = _read_sum(self.folder) if self.is_whole() else None
        if stored and stored[0] == generation and _files.sum(self.folder / DATABASE) != stored[1]:
            raise ValueError(f"{self.folder / DATABASE} is damaged: it has another sum")

    def is_whole(self) -> bool:
        """Tell whether the file has all pages, and keeps them while this transaction lasts."""
        log = Path(f"{self.folder / DATABASE}-wal")
        return not log.exists() or not log.stat().st_size

    def one(self, sql: str, *values: Any) -> Any:
        """Return the first row of a query, or None."""
        return self.db.execute(sql, values).fetchone()

    def entries(self, where: str = "id IS NOT NULL ORDER BY row", *values: Any) -> list[Entry]:
        """Return texts, by default all in order."""
        sql = f"SELECT row, id, text, metadata, spans FROM texts WHERE {where}"
        try:
            rows = self.db.execute(sql, values).fetchall()
            fields = json.loads(f"[{','.join(row[3] for row in rows)}]")  # faster than one by one
            return [
                Entry(row, name, text, own, spans and [(a, b) for a, b in json.loads(spans)])
                for (row, name, text, _, spans), own in zip(rows, fields, strict=True)
            ]
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self.folder / DATABASE} is damaged: {error}") from None

    def every(self) -> list[Entry]:
        """Return all texts."""
        found = self.entries()
        if len(found) != self.now.texts:
            what = f"it has {len(found)} texts of {self.now.texts}"
            raise ValueError(f"{self.folder / DATABASE} is damaged: {what}")
        return found

    def entry(self, row: int) -> Entry:
        """Return the text of a row."""
        return self.entries_of([row])[row]

    def entries_of(self, rows: Iterable[int]) -> dict[int, Entry]:
        """Return the texts of some rows."""
        owner = self.now.owner
        first = {row: row if owner is None else int(owner[row]) for row in rows}
        among = "row IN (SELECT value FROM json_each(?)) AND id IS NOT NULL"
        found = {entry.row: entry for entry in self.entries(among, json.dumps([*first.values()]))}
        if missing := first.values() - found.keys():
            raise ValueError(f"{self.folder / DATABASE} is damaged: row {min(missing)} has no text")
        return {row: found[each] for row, each in first.items()}

    def passage(self, row: int) -> str:
        """Return what was embedded as a row."""
        entry = self.entry(row)
        return entry.text[slice(*entry.spans[row - entry.row])] if entry.spans else entry.text

    def _rows(self, sql: str, values: Sequence[str]) -> Array:
        """Return which rows a query of first rows selects, (rows,) of bool, with those of all windows."""
        found = np.zeros(self.now.rows, bool)
        (listed,) = self.one(f"SELECT group_concat(row) FROM texts WHERE {sql}", *values)
        if listed:  # one text is read three times as fast as many ints
            found[np.fromstring(listed, np.int64, sep=",")] = True
        return found if self.now.owner is None else found[self.now.owner]

    def _meeting(self, name: str, conditions: Sequence[Condition]) -> Array:
        """Return which rows are those of texts that meet conditions, by those that do not if these seem fewer."""
        found, outside = meeting(name, conditions), False
        if self.now.texts >= INDEXED:
            live = self.now.live()
            sql = " OR ".join(f"({each})" for each, _ in found)
            values = [value for _, each in found for value in each]
            sample = json.dumps(live[:: 1 + len(live) // SAMPLE].tolist())
            among = "texts WHERE row IN (SELECT value FROM json_each(?))"
            (outside,) = self.one(
                f"SELECT 2 * count(CASE WHEN {sql} THEN 1 END) > count(*) FROM {among}", *values, sample
            )
            found = meeting(name, conditions, outside=True) if outside else found
        rows: Array = np.logical_or.reduce([self._rows(*each) for each in found])
        return rows ^ bool(outside)

    def selected(self, where: Mapping[str, Sequence[Condition]]) -> Array | None:
        """Return which rows are those of texts that are not deleted and meet all conditions, (rows,) of bool.

        It is None if all are selected.
        """
        found = None if self.now.valid.all() else self.now.valid
        for name, conditions in where.items():
            bounds = [each for each in conditions if each[0] not in ("==", "!=")]
            for every in (bounds, *([each] for each in conditions if each not in bounds)):
                if every:
                    kept, key = self.now.selections, repr((name, every))
                    if (rows := kept.get(key)) is None:
                        if len(kept) >= SELECTIONS:
                            kept.clear()
                        rows = kept[key] = self._meeting(name, every)
                    found = rows if found is None else found & rows
        return found

    def fields_indexed(self) -> set[str]:
        """Return the names of the indexes of fields."""
        sql = "SELECT name FROM sqlite_schema WHERE type = 'index' AND name LIKE 'field %'"
        return {f'"{name}"' for (name,) in self.db.execute(sql)}

    def without_index(self, fields: Collection[str]) -> list[str]:
        """Return those of some fields that can have an index, would gain by it, and have none."""
        if not fields or self.now.texts < INDEXED:
            return []
        known = {None, *self.fields_indexed()}
        return [name for name in fields if index_name(name) not in known]

    def known(self, hashes: Sequence[bytes]) -> dict[bytes, tuple[int, str | None]]:
        """Return the first row and the spans of each text that has been embedded, also of deleted ones, by its hash."""
        found = (self.one("SELECT row, spans FROM texts WHERE hash = ?", each) for each in hashes)
        return {name: each for name, each in zip(hashes, found, strict=True) if each}

    def spans(self, row: int, spans: str | None) -> tuple[list[tuple[int, int]] | None, Array]:
        """Return where the windows of a text begin and end, and their embeddings."""
        listed = [(a, b) for a, b in json.loads(spans)] if spans else None
        rows = np.arange(row, row + (len(listed) if listed else 1))
        self.now.check("vectors", rows)
        return listed, self.now.vectors[rows]


@contextmanager
def reading(
    folder: Path, seen: Snapshot | None = None, timeout: float = TIMEOUT, check: bool = True
) -> Iterator[Reader]:
    """Open an index to read one state of it."""
    with connected(folder, timeout) as db:
        yield Reader(folder, db, seen, check=check)


def _read_sum(folder: Path) -> tuple[int, int] | None:
    """Return the state that the sum of a database is about, and the sum; None if there is none."""
    path = folder / SUM
    content = disk.read(path, 24) if os.path.lexists(path) else b""
    if len(content) < 24:  # a writer was killed
        return None
    numbers = np.frombuffer(content, "<u8")
    return (int(numbers[0]), int(numbers[1])) if checksum((numbers[:2],)) == numbers[2] else None


# -------------------------------------------------------------------------------------------------------------- writing


@contextmanager
def writing(folder: Path, seen: Snapshot | None = None, timeout: float = TIMEOUT) -> Iterator[Writer]:
    """Wait until no other writer is there, and yield what changes an index; what is not committed is undone."""
    with connected(folder, timeout) as db:
        writer = Writer(folder, db, seen, "BEGIN IMMEDIATE")
        try:
            yield writer
        finally:
            writer.close()


class Writer(Reader):
    """What changes an index; ``now`` is the state that is committed."""

    def __init__(self, *given: Any) -> None:
        self._opened: dict[Path, tuple[Any, int]] = {}
        super().__init__(*given)

    def close(self) -> None:
        """Undo what is not committed, and close all files."""
        undone = self.db.in_transaction
        while self._opened:
            file, size = self._opened.popitem()[1]
            with suppress(OSError), file:
                if undone:
                    file.truncate(size)
        if undone:
            self.db.execute("ROLLBACK")

    def clean(self, number: int) -> None:
        """Remove the files of a number, which no state needs."""
        for name in NAMES:
            with suppress(OSError):  # a folder, or a file that another process has mapped on Windows
                (self.folder / f"{name}-{number}").unlink(missing_ok=True)

    def _write(self, name: str, file: int, at: int, array: Array) -> None:
        """Append to a file, after as many bytes as are valid."""
        path, left = self.folder / f"{name}-{file}", memoryview(array.tobytes())
        try:
            if path not in self._opened:
                opened = self._opened[path] = disk.open_own(path), at
                opened[0].truncate(at)
            while left:
                left = left[self._opened[path][0].write(left) :]
        except OSError as error:
            what = f"{error.strerror} while writing {len(left)} bytes; nothing has changed"
            raise OSError(error.errno, what, str(path)) from error

    def append(self, vectors: Array, file: int, rows: int, sums: Mapping[str, Array]) -> dict[str, bytes]:
        """Append embeddings to files with some rows; return the sums of all blocks."""
        arrays = {"vectors": vectors}
        if self.now.dtype == "int8":
            arrays |= dict(zip(("codes", "scales"), quantized(vectors), strict=True))
        for name, array in arrays.items():
            self._write(name, file, rows * array[:1].nbytes, array)
        begin, found = rows % BLOCK, {}
        for name, of in FILES.items():
            if all(each in arrays for each in of):
                parts = [arrays[each] for each in of]
                if begin:  # the last block has room
                    self.now.check(name, np.arange(rows - begin, rows))
                    old = (self.now.arrays[each][rows - begin :] for each in of)
                    parts = [np.concatenate(each) for each in zip(old, parts, strict=True)]
                found[name] = (
                    sums[name][: rows // BLOCK].tobytes() + np.array(sums_of(*parts), "<u8").tobytes()
                )
        return found

    def change(
        self,
        texts: Sequence[tuple[Any, str, str, bytes]] = (),
        spans: Sequence[Sequence[tuple[int, int]] | None] = (),
        vectors: Array = NONE,
        gone: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """Add texts, each an id, a text, metadata and a hash, and delete those whose first rows are given; commit."""
        now, added = self.now, len(vectors)
        rows = now.rows + added
        valid = np.append(now.valid, np.ones(added, bool))
        valid[: now.rows][np.array(gone, int) if now.owner is None else np.isin(now.owner, gone)] = False
        ends = now.rows + np.cumsum([0, *(len(each or [0]) for each in spans)])
        begins = np.append(now.begins, np.zeros(added, bool))
        begins[ends[:-1]] = True
        if added:
            changes |= self.append(vectors, now.file, now.rows, now.sums) | {"width": vectors.shape[1]}
        run = self.db.executemany
        run(
            "UPDATE texts SET id = NULL, text = NULL, metadata = NULL WHERE row = ?",
            [(each,) for each in gone],
        )
        written = zip(ends.tolist(), texts, spans, strict=False)
        new = [(row, *text, json.dumps(each) if each else None) for row, text, each in written]
        run("INSERT INTO texts VALUES(?, ?, ?, ?, ?, ?)", new)
        self.commit(rows=rows, texts=now.texts + len(texts) - len(gone), **_packed(valid, begins), **changes)
        self.seal()

    def vacuum(self, done: Callable[[int], Any]) -> None:
        """Write all files anew without the rows of deleted texts, under another number; commit.

        Others may write while rows are copied: theirs are copied at the end. On Windows files that a program has open
        stay: it is an OSError if those of the last vacuum do.
        """
        if self.now.spare not in (0, self.now.file):
            self.clean(self.now.spare)
            for old in (self.folder / f"{name}-{self.now.spare}" for name in NAMES):
                if old.is_file():
                    raise OSError(errno.EBUSY, KEPT, str(old))
        number = max(self.now.file, self.now.spare) + 1  # no other vacuum's
        while any(os.path.lexists(self.folder / f"{name}-{number}") for name in NAMES):
            number += 1  # the user's
        self.commit(spare=number)
        sums = {name: np.empty(0, "<u8") for name in self.now.sums}
        step = 8 * BLOCK

        def copy_rows(begin: int, end: int) -> None:
            for n in range(begin, end, step):
                some = places[n : min(n + step, end)]
                self.now.check("vectors", some)
                written = self.append(self.now.vectors[some], number, n, sums)
                sums.update({name: np.frombuffer(each, "<u8") for name, each in written.items()})
                done(len(some))

        try:
            self.begin(self.now, "BEGIN")
            self.db.execute("ROLLBACK")
            file, rows, places = self.now.file, self.now.rows, np.flatnonzero(self.now.valid)
            whole = len(places) // step * step
            copy_rows(0, whole)
            self._flush()  # takes long here, and not in the commit
            self.begin(self.now, "BEGIN IMMEDIATE")
            now = self.now
            if (now.spare, now.file) != (number, file):
                raise BlockingIOError(errno.EAGAIN, BUSY, str(self.folder))  # another vacuum has begun
            places = np.append(places, rows + np.flatnonzero(now.valid[rows:]))
            copy_rows(whole, len(places))
        except BaseException:
            self.close()
            self.clean(number)
            raise
        kept = np.zeros(now.rows, bool)
        kept[places] = True
        gone = ((row,) for row in np.flatnonzero(now.begins & ~kept).tolist())
        self.db.executemany("DELETE FROM texts WHERE row = ?", gone)
        # A new table takes half of the time of moving rows. The next search makes the indexes of fields again.
        self.db.execute(SCHEMA[1].replace("texts", "moved", 1))
        windows = "ifnull(json_array_length(spans), 1)"
        columns = f"sum({windows}) OVER (ORDER BY row) - {windows}, id, text, metadata, hash, spans"
        self.db.execute(f"INSERT INTO moved SELECT {columns} FROM texts ORDER BY row")
        for each in ("DROP TABLE texts", "ALTER TABLE moved RENAME TO texts", BY_HASH):
            self.db.execute(each)
        packed = _packed(now.valid[places], now.begins[places])
        self.commit(rows=len(places), file=number, spare=now.file, **packed, **sums)
        self.clean(now.file)
        with suppress(sqlite3.OperationalError):  # a reader is there
            self.db.execute("VACUUM")
        self.seal()

    def _flush(self) -> None:
        for file, size in self._opened.values():
            os.fsync(file.fileno())
            if not size:
                disk.sync_folder(self.folder)

    def commit(self, **changes: Any) -> None:
        """Make changed entries of the state durable, after all that they are about."""
        self._flush()
        changes["generation"] = secrets.randbits(63)
        named = [(value, name) for name, value in changes.items()]
        self.db.executemany("UPDATE state SET value = ? WHERE name = ?", named)
        self.db.execute("COMMIT")
        self.close()

    def seal(self) -> None:
        """Let the database's file have all pages, and write its sum, unless other callers need it now."""
        with suppress(sqlite3.OperationalError, OSError):
            self.db.execute("PRAGMA busy_timeout = 0")
            self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self.db.execute("BEGIN IMMEDIATE")
            if self.is_whole():
                numbers = np.array([self.generation(), _files.sum(self.folder / DATABASE)], "<u8")
                with disk.open_own(self.folder / SUM) as file:
                    file.truncate(0)
                    file.write(np.append(numbers, np.uint64(checksum((numbers,)))).tobytes())


def _packed(valid: Array, begins: Array) -> dict[str, bytes]:
    """Return bitmaps as they are stored: of rows that are all alike, nothing."""
    both = {"valid": valid, "begins": begins}
    return {name: b"" if bits.all() else np.packbits(bits).tobytes() for name, bits in both.items()}


def index_fields(folder: Path, names: Sequence[str], seen: Snapshot) -> None:
    """Make an index for each field that can have one, unless another writer is there or nothing may be written."""
    with suppress(OSError), writing(folder, seen, 0) as writer:
        for name in names:
            writer.db.execute(f"CREATE INDEX IF NOT EXISTS {index_name(name)} ON texts({value_of(name)})")
        writer.commit()
        writer.seal()
