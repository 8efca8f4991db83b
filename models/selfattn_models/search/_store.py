"""The files of an index: what is on the disk, in which order it gets there, and how it is read without being parsed.

A folder ``data-n`` has files that only grow; ``manifest.json`` says how much of each is valid. Replacing the manifest
is the one step that makes a change visible, so a reader sees all of a change or nothing.
``docs/theory/index_format.md`` has every byte.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn.engine import SIMILARITIES, Array, Entries, disk

MANIFEST, LOCK = "manifest.json", "lock"
FORMAT, VERSION = "selfattn_models.search.Index", 1
DTYPES = ("float32", "int8")
SUMMED = ("records", "tags", "deleted")  # a changed bit of these files would hide texts, or show deleted ones
HASHED = {40: slice(8, 36), 16: slice(12)}  # the bytes of a record and of a row that their checksums include
TABLES = {
    "records": np.dtype(
        [
            ("offset", "<u8"),
            ("id_hash", "<u8"),
            ("text_hash", "<u8"),
            ("id", "<u4"),
            ("text", "<u4"),
            ("metadata", "<u4"),
            ("crc", "<u4"),
        ]
    ),
    "rows": np.dtype([("record", "<u4"), ("start", "<u4"), ("end", "<u4"), ("crc", "<u4")]),
    "tags": np.dtype([("hash", "<u8"), ("record", "<u8")]),
    "deleted": np.dtype("<u8"),
    "content": np.dtype("u1"),
}
MOST = 2**62
# What is removed: folders of older files, and a manifest that a killed writer left.
DATA = re.compile("data-[1-9][0-9]*")
LEFT = re.compile(rf"\.{re.escape(MANIFEST)}\.[0-9a-f]{{16}}\.(new|old)")
EMPTY = {"counts": dict.fromkeys(TABLES, 0), "checksums": dict.fromkeys(SUMMED, 0)}  # of a manifest


class Raw(NamedTuple):
    """A record as it is stored: the id and the metadata in JSON, the text in UTF-8."""

    id: bytes
    text: bytes
    metadata: bytes


def hash64(content: bytes) -> int:
    """Return the number by which an id, a text or a field with its value is found."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


def tag(name: str, value: Any) -> int:
    """Return the hash of a field with a value: 1 and 1.0 are one number in JSON; ``"1"`` and true are others."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    return hash64(json.dumps([name, number]).encode())


def make(folder: Path, dtype: str, metric: str, model: Mapping[str, Any]) -> None:
    """Make an index without texts in a folder that is new or empty."""
    own = {"format": FORMAT, "version": VERSION, "generation": 1, "data": 1, "dtype": dtype, "metric": metric}
    own |= {"width": 0, "next_id": 0, "fields": [], **EMPTY, "model": dict(model)}
    _check_empty(folder)  # before a lock is put into it
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        _check_empty(folder)
        disk.write_files(folder, {MANIFEST: disk.to_json(own)})


def _check_empty(folder: Path) -> None:
    if folder.is_dir() and any(each.name != LOCK and each.name[0] != "." for each in folder.iterdir()):
        what = "the folder is not empty; Index.open opens an index"
        raise FileExistsError(errno.EEXIST, what, str(folder))


def check_place(folder: Path) -> None:
    """Refuse a folder without an index."""
    if not os.path.lexists(folder / MANIFEST):
        raise FileNotFoundError(errno.ENOENT, "no index is here; Index.create makes one", str(folder))


class Generation:
    """A whole state of an index, which no writer changes: the manifest, and the files' valid parts, mapped.

    Attributes are the files' names: ``records``, ``rows``, ``tags``, ``deleted``, ``content``, ``vectors``, and for
    int8 ``codes`` and ``scales``.
    """

    records: Array
    rows: Array
    tags: Array
    deleted: Array
    content: Array
    vectors: Array
    codes: Array | None = None
    scales: Array | None = None

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.manifest = manifest
        entries = Entries(manifest, str(folder / MANIFEST))
        entries.only("format", FORMAT)
        entries.only("version", VERSION)
        self.metric, self.dtype, self.fields = (entries.raw(name) for name in ("metric", "dtype", "fields"))
        of_names = isinstance(self.fields, list) and all(isinstance(name, str) for name in self.fields)
        if self.dtype not in DTYPES or self.metric not in SIMILARITIES or not of_names:
            raise entries.error("dtype, metric or fields are not those of an index")
        self.number = entries.size("generation", most=MOST)
        self.width = entries.size("width", least=0, most=2**24)
        self.next_id = entries.size("next_id", least=0, most=MOST)
        self.data = folder / f"data-{entries.size('data', most=MOST)}"
        counts, sums = entries.raw("counts"), entries.raw("checksums", {})  # an older index has no checksums
        if not isinstance(counts, dict) or not isinstance(sums, dict):
            raise entries.error("counts and checksums must be objects")
        summed = entries.inner("checksums", sums)
        self.sums = {name: summed.size(name, least=0, most=2**32) for name in SUMMED if name in sums}
        self._unchecked = set(self.sums)
        counted = entries.inner("counts", counts)
        self.shapes: dict[str, Any] = {name: (counted.size(name, least=0, most=MOST),) for name in TABLES}
        (n,) = self.shapes["rows"]
        if n < self.shapes["records"][0]:
            raise counted.error("there are fewer rows than records")
        self.shapes["vectors"] = n, self.width
        if self.dtype == "int8":
            self.shapes |= {"codes": (n, self.width), "scales": (n,)}
        for name, shape in self.shapes.items():
            dtype = TABLES.get(name, np.dtype("i1" if name == "codes" else "<f4"))
            setattr(self, name, self._mapped(name, dtype, shape))

    @classmethod
    def newest(cls, folder: Path) -> Generation:
        """Read the manifest, and map what it names.

        If a vacuum ends meanwhile, it removes these files, and what it wrote is read instead.
        """
        before = None
        while True:
            check_place(folder)
            manifest = disk.read_object(folder / MANIFEST)
            try:
                return cls(folder, manifest)
            except OSError:
                if manifest == before:
                    raise
                before = manifest

    def _mapped(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        path, needed = self.data / name, int(np.prod(shape, dtype=object)) * dtype.itemsize
        if not needed:
            return np.empty(shape, dtype)
        if (size := disk.check_regular(path)) < needed:
            raise self.damaged(name, f"it has {size} bytes, and the index needs {needed}")
        return np.asarray(disk.mapped(path, dtype, "r", shape))

    def checked(self, name: str) -> Array:
        """Return what a file holds; an error at the first call if it has changed since it was written."""
        table: Array = getattr(self, name)
        if name in self._unchecked:
            if zlib.crc32(table.data) != self.sums[name]:
                raise self.damaged(name, "its checksum is another")
            self._unchecked.discard(name)
        return table

    def damaged(self, name: str, what: str) -> ValueError:
        """Return an error about a file."""
        return ValueError(f"{self.data / name} is damaged: {what}")

    # ------------------------------------------------------------------------------------------------- records

    def raw(self, n: int) -> Raw:
        """Read a record."""
        record = self.records[n]
        offset, _, _, *sizes, crc = record.item()
        content = self.content[offset : offset + sum(sizes)].tobytes()
        if checksum(record, content) != crc:
            raise self.damaged("content", f"record {n} is another one than that of {self.data / 'records'}")
        a, b = sizes[0], sizes[0] + sizes[1]
        return Raw(content[:a], content[a:b], content[b:])

    def entry(self, n: int) -> tuple[Any, str, dict[str, Any]]:
        """Return a record's id, text and metadata."""
        raw = self.raw(n)
        try:
            return json.loads(raw.id), raw.text.decode(), json.loads(raw.metadata)
        except ValueError as error:
            raise self.damaged("content", f"record {n}: {error}") from None

    @functools.cached_property
    def alive(self) -> Array | None:
        """Which records are not deleted, (records,) of bool; None for all."""
        if not len(self.deleted):
            return None
        alive = np.ones(len(self.records), bool)
        alive[self._within("deleted", self.checked("deleted"))] = False
        return alive

    def live(self) -> Array:
        """Return the numbers of the records that are not deleted, in order."""
        return np.arange(len(self.records)) if self.alive is None else np.flatnonzero(self.alive)

    def _within(self, name: str, records: Array) -> Array:
        """Return numbers of records that a file holds."""
        if len(records) and int(records.max()) >= len(self.records):
            raise self.damaged(name, f"it names record {records.max()} of {len(self.records)}")
        return records

    def find(self, kind: str, wanted: Mapping[bytes, int], deleted: bool = False) -> dict[bytes, int]:
        """Return the last record of each id or text that there is; ``wanted`` has their hashes."""
        found = {}
        for n in np.flatnonzero(_among(self.checked("records")[f"{kind}_hash"], wanted.values())).tolist():
            if deleted or self.alive is None or self.alive[n]:
                found[getattr(self.raw(n), kind)] = n
        return {content: n for content, n in found.items() if content in wanted}

    def selected(self, where: Mapping[str, Collection[Any]]) -> Array | None:
        """Return which records are not deleted and have one of the values in each field, (records,) of bool.

        It is None if all are selected.
        """
        found, tags = self.alive, self.checked("tags") if where else self.tags
        for name, values in where.items():
            tagged = _among(tags["hash"], {tag(name, value) for value in values})
            has = np.zeros(len(self.records), bool)
            has[self._within("tags", tags["record"][tagged])] = True
            found = has if found is None else found & has
        return found

    # ---------------------------------------------------------------------------------------------------- rows

    @property
    def has_windows(self) -> bool:
        """True if some texts have several rows; without them, the row of a record has its number."""
        return len(self.rows) != len(self.records)

    def rows_of(self, records: Array) -> tuple[Array, Array]:
        """Return the first row of each record, and the one after its last."""
        if not self.has_windows:
            return records, records + 1
        column, wanted = self.rows["record"], records.astype("<u4")
        first, end = np.searchsorted(column, wanted), np.searchsorted(column, wanted, "right")
        if not np.all(first < end):
            raise self.damaged("rows", "a record has none")
        return first, end

    def row(self, n: int) -> tuple[int, tuple[int, int]]:
        """Return a row's record, and where in its text what was embedded begins and ends, in characters."""
        record, start, end, crc = self.rows[n].item()
        if record >= len(self.records) or checksum(self.rows[n], self.vectors[n].data) != crc:
            raise self.damaged("vectors", f"row {n} is another one than that of {self.data / 'rows'}")
        return record, (start, end)

    def passage(self, n: int) -> str:
        """Return what was embedded as a row."""
        record, (start, end) = self.row(n)
        return self.entry(record)[1][start:end]

    def kept(self, selected: Array | None) -> Array | None:
        """Return which rows are those of selected records, (rows,) of bool; None for all."""
        if selected is None or not self.has_windows:
            return selected
        return selected[self._within("rows", self.rows["record"])]

    def spans(self, record: int) -> tuple[list[tuple[int, int]], Array]:
        """Return where the windows of a record begin and end, and their embeddings."""
        (first,), (end,) = map(np.ndarray.tolist, self.rows_of(np.array([record])))
        return [self.row(n)[1] for n in range(first, end)], self.vectors[first:end]


def _among(hashes: Array, wanted: Collection[int]) -> Array:
    """Return which hashes are wanted, in a third of the time of np.isin."""
    few = np.sort(np.fromiter(wanted, np.uint64, len(wanted)))
    found: Array = np.zeros(len(hashes), bool)
    if len(few) > 30:
        found = few[np.searchsorted(few[1:], hashes, "right")] == hashes
    else:
        for each in few:
            found |= hashes == each
    return found


def checksum(entry: Any, content: Any) -> int:
    """Return the checksum of a record or a row, with what it is about."""
    return zlib.crc32(content, zlib.crc32(entry.tobytes()[HASHED[entry.nbytes]]))


def quantized(rows: Array) -> tuple[Array, Array]:
    """Round rows to int8 and a scale each: ``codes * scales`` is near the row."""
    largest = np.abs(rows).max(axis=1, initial=0)
    scales = np.where(largest > 0, largest, 127).astype("<f4") / np.float32(127)
    return np.rint(rows / scales[:, None]).astype(np.int8), scales


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the one process that changes an index."""
    import fcntl  # POSIX has it

    owner = os.getpid()
    with disk.open_own(folder / LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = "another process or thread is changing this index; try again when it has ended"
            raise BlockingIOError(errno.EAGAIN, what, str(folder)) from None
        try:
            yield
        finally:
            # A process that was forked meanwhile has the file open too: closing would leave the lock, and the process
            # may come here itself.
            if os.getpid() == owner:
                fcntl.flock(lock, fcntl.LOCK_UN)


@contextmanager
def writing(folder: Path) -> Iterator[Writer]:
    """Hold the lock of an index, and yield what changes it; what is not committed at the end is removed."""
    check_place(folder)
    with locked(folder):
        writer = Writer(folder)
        writer.clean()
        try:
            if writer.now.data.is_symlink():
                writer.copy()
            yield writer
        finally:
            writer.close()
            writer.clean()


class Writer:
    """What changes an index; ``now`` has what was appended, also before it is committed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, Generation.newest(folder)
        self._files: dict[Path, Any] = {}

    def close(self) -> None:
        """Close all files."""
        while self._files:
            self._files.popitem()[1].close()

    def clean(self) -> None:
        """Remove what is not committed, also of a writer that was killed.

        Only the manifest knows, as Ctrl-C may follow its rename.
        """
        valid = Generation.newest(self.folder)
        for path in self.folder.iterdir():
            if DATA.fullmatch(path.name) and path != valid.data and not path.is_symlink():
                with suppress(OSError):  # it has files of the user's
                    for name in valid.shapes:
                        (path / name).unlink(missing_ok=True)
                    path.rmdir()
            elif LEFT.fullmatch(path.name) and not path.is_dir():
                path.unlink()
        for name in valid.shapes:
            path, size = valid.data / name, getattr(valid, name).nbytes
            if not valid.data.is_symlink() and path.exists() and path.stat().st_size > size:
                with disk.open_own(path) as file:
                    file.truncate(size)

    def renew(self) -> None:
        """Begin with empty files, in a new folder."""
        data = self.now.manifest["data"] + 1
        while os.path.lexists(self.folder / f"data-{data}"):  # the user's
            data += 1
        self.now = Generation(self.folder, {**self.now.manifest, **EMPTY, "data": data})

    def copy(self) -> None:
        """Continue with copies of the valid files in a new folder, as theirs is a link, which is not followed."""
        old = self.now
        self.renew()
        data = self.now.data
        data.mkdir()
        for name in old.shapes:
            self._write(name, getattr(old, name))
        self.now = Generation(self.folder, {**old.manifest, "data": int(data.name.removeprefix("data-"))})

    def append(
        self,
        raws: Sequence[Raw],
        text_hashes: Sequence[int],
        spans: Sequence[Sequence[tuple[int, int]]],
        vectors: Array,
        deleted: Sequence[int] = (),
        **changes: Any,
    ) -> None:
        """Append records with their windows and the windows' embeddings, and change entries of the manifest."""
        now, first = self.now, len(self.now.records)
        joined = [b"".join(raw) for raw in raws]
        records = np.zeros(len(raws), TABLES["records"])
        records["offset"] = len(now.content) + np.cumsum([0, *map(len, joined)])[:-1]
        for n, name in enumerate(Raw._fields):
            records[name] = [len(raw[n]) for raw in raws]
        records["id_hash"], records["text_hash"] = [hash64(raw.id) for raw in raws], text_hashes
        records["crc"] = [checksum(*each) for each in zip(records, joined, strict=True)]
        windows = [(n, *span) for n, each in enumerate(spans, first) for span in each]
        rows = np.array([(*window, 0) for window in windows], TABLES["rows"])
        rows["crc"] = [checksum(row, vector.data) for row, vector in zip(rows, vectors, strict=True)]
        fields = [(n, json.loads(raw.metadata)) for n, raw in enumerate(raws, first)]
        values = [(name, value, n) for n, each in fields for name, value in each.items()]
        tags = [(tag(name, value), n) for name, value, n in values if not isinstance(value, list | dict)]
        tables = {"records": records, "rows": rows, "vectors": vectors}
        tables["content"] = np.frombuffer(b"".join(joined), "u1")
        tables |= {"tags": np.array(tags, TABLES["tags"]), "deleted": np.array(deleted, TABLES["deleted"])}
        if now.dtype == "int8":
            tables["codes"], tables["scales"] = quantized(vectors)
        self.now.data.mkdir(exist_ok=True)
        for name, table in tables.items():
            self._write(name, table)
        counts = {name: len(getattr(now, name)) + len(tables[name]) for name in TABLES}
        sums = {name: zlib.crc32(tables[name].data, before) for name, before in now.sums.items()}
        changes |= {"counts": counts, "checksums": sums}
        self.now = Generation(self.folder, {**now.manifest, **changes})

    def _write(self, name: str, array: Array) -> None:
        path, left = self.now.data / name, memoryview(array.tobytes())
        try:
            if path not in self._files:
                self._files[path] = disk.open_own(path)
            while left:
                left = left[self._files[path].write(left) :]
        except OSError as error:
            what = f"{error.strerror} while writing {len(left)} bytes; the index is as it was before"
            raise OSError(error.errno, what, str(path)) from error

    def commit(self, **changes: Any) -> None:
        """Make what was appended the newest generation, durably, with changed entries of the manifest."""
        for file in self._files.values():
            os.fsync(file.fileno())
        if self.now.data.exists():  # not after a vacuum that leaves nothing
            disk.sync_folder(self.now.data)
        manifest = {**self.now.manifest, **changes, "generation": self.now.number + 1}
        disk.write_files(self.folder, {MANIFEST: disk.to_json(manifest)})
        self.now = Generation(self.folder, manifest)
