"""The files of an index: what is on the disk, in which order it gets there, and how it is read without being parsed.

A folder ``data-n`` has files that only grow; ``manifest.json`` says how much of each is valid. Replacing the manifest is the one
step that makes a change visible, so a reader sees all of a change or nothing. ``docs/theory/index_format.md`` has every byte.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn import _disk
from selfattn._check import Array, Entries

MANIFEST, LOCK = "manifest.json", "lock"
FORMAT, VERSION = "selfattn.search.Index", 1
RECORD = np.dtype(
    [("offset", "<u8"), ("id", "<u4"), ("text", "<u4"), ("metadata", "<u4"), ("crc", "<u4"), ("id_hash", "<u8"), ("text_hash", "<u8")]
)  # fmt: skip
ROW = np.dtype([("record", "<u4"), ("start", "<u4"), ("end", "<u4"), ("crc", "<u4")])
TAG = np.dtype([("hash", "<u8"), ("record", "<u8")])
DELETED = np.dtype("<u8")
DTYPES = ("float32", "int8")
MOST = 2**32 - 1  # records, and rows


class Raw(NamedTuple):
    """A record as it is stored: the id and the metadata in JSON, the text in UTF-8."""

    id: bytes
    text: bytes
    metadata: bytes


def hash64(content: bytes) -> int:
    """Return the number by which an id, a text or a field with its value is found."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "little")


class Generation:
    """A whole state of an index, which no writer changes: the manifest, and the files' valid parts, mapped."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, manifest
        entries = Entries(manifest, str(folder / MANIFEST))
        if entries.raw("format") != FORMAT or entries.raw("version") != VERSION:
            raise entries.error(
                f"format and version must be {FORMAT!r} and {VERSION}: no index of this version"
            )
        self.dtype, self.metric = entries.raw("dtype"), entries.raw("metric")
        if self.dtype not in DTYPES:
            raise entries.error(f"dtype must be one of {DTYPES}, not {self.dtype!r:.80}")
        self.number = entries.size("generation", most=2**62)
        self.width = entries.size("width", least=0, most=2**24)
        self.next_id = entries.size("next_id", least=0, most=2**62)
        self.fields = _checked_fields(entries)
        self.data = folder / f"data-{entries.size('data', most=2**62)}"
        if not isinstance(counts := entries.raw("counts"), dict):
            raise entries.error("counts must be an object")
        counted = entries.inner("counts", counts)
        most = {"rows": MOST, "records": MOST}
        names = ("records", "rows", "tags", "deleted", "bytes")
        self.counts = {name: counted.size(name, least=0, most=most.get(name, 2**62)) for name in names}
        n = self.counts["rows"]
        self.records = self._mapped("records", RECORD, (self.counts["records"],))
        self.rows = self._mapped("rows", ROW, (n,))
        self.tags = self._mapped("tags", TAG, (self.counts["tags"],))
        self.deleted = self._mapped("deleted", DELETED, (self.counts["deleted"],))
        self.bytes = self._mapped("bytes", np.dtype("u1"), (self.counts["bytes"],))
        self.vectors = self._mapped("vectors", np.dtype("<f4"), (n, self.width))
        self.codes = self.scales = None
        if self.dtype == "int8":
            self.codes = self._mapped("codes", np.dtype("i1"), (n, self.width))
            self.scales = self._mapped("scales", np.dtype("<f4"), (n,))

    @classmethod
    def newest(cls, folder: Path) -> Generation:
        """Read the manifest, and map what it names; a vacuum that ends meanwhile removes these files, and is read instead."""
        before = None
        while True:
            path = folder / MANIFEST
            if not path.exists():
                raise FileNotFoundError(errno.ENOENT, "no index is here; Index.create makes one", str(folder))
            manifest = _disk.read_object(path)
            try:
                return cls(folder, manifest)
            except OSError:
                if manifest == before:
                    raise
                before = manifest

    def _mapped(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        """Map the valid part of a file of arrays; nothing of it is read yet."""
        path, needed = self.data / name, int(np.prod(shape, dtype=object)) * dtype.itemsize
        if not needed:
            return np.empty(shape, dtype)
        if (size := path.stat().st_size) < needed:
            raise ValueError(f"{path} has {size} bytes, and the index needs {needed}: it is damaged")
        return np.asarray(np.memmap(path, dtype, "r", shape=shape))

    def damaged(self, name: str, what: str) -> ValueError:
        """Return an error about a file."""
        return ValueError(f"{self.data / name} is damaged: {what}")

    # ------------------------------------------------------------------------------------------------- records

    def raw(self, n: int) -> Raw:
        """Read a record."""
        offset, *sizes, crc, _, _ = self.records[n].item()
        content = self.bytes[offset : offset + sum(sizes)].tobytes()
        if len(content) != sum(sizes) or zlib.crc32(content) != crc:
            raise self.damaged("bytes", f"record {n} has another checksum")
        a, b = sizes[0], sizes[0] + sizes[1]
        return Raw(content[:a], content[a:b], content[b:])

    def entry(self, n: int) -> tuple[Any, str, dict[str, Any]]:
        """Return a record's id, text and metadata."""
        raw = self.raw(n)
        try:
            return json.loads(raw.id), raw.text.decode(), json.loads(raw.metadata)
        except ValueError as error:
            raise self.damaged("bytes", f"record {n}: {error}") from None

    @functools.cached_property
    def alive(self) -> Array | None:
        """Which records are not deleted; None for all."""
        if not len(self.deleted):
            return None
        alive = np.ones(len(self.records), bool)
        alive[self._within("deleted", self.deleted)] = False
        return alive

    def live(self) -> Array:
        """Return the numbers of the records that are not deleted, in order."""
        return np.arange(len(self.records)) if self.alive is None else np.flatnonzero(self.alive)

    def _within(self, name: str, records: Array) -> Array:
        """Return numbers of records that a file holds."""
        if len(records) and int(records.max()) >= len(self.records):
            raise self.damaged(name, f"it names record {int(records.max())} of {len(self.records)}")
        return records

    def find(self, kind: str, wanted: Mapping[bytes, int], deleted: bool = False) -> dict[bytes, int]:
        """Return the last record of each id or text that there is; ``wanted`` has their hashes."""
        index = Raw._fields.index(kind)
        hashes = np.fromiter(wanted.values(), np.uint64, len(wanted))
        found = {}
        for n in np.flatnonzero(np.isin(self.records[f"{kind}_hash"], hashes)).tolist():
            if deleted or self.alive is None or self.alive[n]:
                content = self.raw(n)[index]
                if content in wanted:
                    found[content] = n
        return found

    # ---------------------------------------------------------------------------------------------------- rows

    def rows_of(self, n: int) -> slice:
        """Return which rows are those of a record."""
        if len(self.rows) == len(self.records):
            return slice(n, n + 1)
        first, end = np.searchsorted(self.rows["record"], np.array([n, n + 1], np.uint32))
        return slice(int(first), int(end))

    def row(self, n: int) -> tuple[int, int, int]:
        """Return a row's record, and where in its text what was embedded begins and ends, in characters."""
        record, start, end, crc = self.rows[n].item()
        if record >= len(self.records):
            raise self.damaged("rows", f"row {n} names record {record} of {len(self.records)}")
        if zlib.crc32(self.vectors[n].data) != crc:
            raise self.damaged("vectors", f"row {n} has another checksum")
        return record, start, end

    def selected(self, where: Mapping[str, Collection[Any]]) -> Array | None:
        """Return which records are not deleted and have one of the values in each field, (records,) of bool; None for all."""
        found = self.alive
        for name, values in where.items():
            hashes = np.fromiter((tag(name, value) for value in values), np.uint64, len(values))
            records = self.tags["record"][np.isin(self.tags["hash"], hashes)]
            has = np.zeros(len(self.records), bool)
            has[self._within("tags", records)] = True
            found = has if found is None else found & has
        return found

    def kept(self, selected: Array | None) -> Array | None:
        """Return which rows are those of selected records, (rows,) of bool; None for all."""
        if selected is None or len(self.rows) == len(self.records):
            return selected
        return selected[self._within("rows", self.rows["record"])]

    def taken(self, records: Array, first: int) -> dict[str, Any]:
        """Return what the files hold of some records, which are in order, as records ``first`` and after; offsets are from 0."""
        chosen = self.records[records]
        content = [b"".join(self.raw(n)) for n in records.tolist()]
        chosen["offset"] = np.cumsum([0, *map(len, content)])[:-1]
        arrays: dict[str, Any] = {"records": chosen, "bytes": b"".join(content)}
        for name in ("rows", "tags"):
            table = getattr(self, name)
            ends = np.array([records[0], records[-1] + 1], table["record"].dtype)
            begin, end = np.searchsorted(table["record"], ends)
            kept = begin + np.flatnonzero(np.isin(table["record"][begin:end], records))
            arrays[name] = table[kept]
            arrays[name]["record"] = first + np.searchsorted(records, arrays[name]["record"])
            if name == "rows":
                for n in kept.tolist():
                    self.row(n)  # an error if it is damaged
                arrays |= {each: getattr(self, each)[kept] for each in self.of_rows}
        return arrays

    @property
    def of_rows(self) -> tuple[str, ...]:
        """The files that have a part for each row."""
        return ("vectors", "codes", "scales") if self.dtype == "int8" else ("vectors",)


def _checked_fields(entries: Entries) -> list[str]:
    fields = entries.raw("fields")
    if not isinstance(fields, list) or not all(isinstance(name, str) for name in fields):
        raise entries.error("fields must be a list of names")
    return fields


def tag(name: str, value: Any) -> int:
    """Return the hash of a field with a value: 1 and 1.0 are one number in JSON; ``"1"`` and true are others."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return hash64(json.dumps([name, value]).encode())


class Writer:
    """The one process that changes an index: as a context it holds the lock; what is not committed at its end is removed.

    ``now`` has what was appended, also before it is committed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now: Generation
        self._files: dict[str, Any] = {}

    def __enter__(self) -> Writer:
        import fcntl  # POSIX has it

        self._lock = (self.folder / LOCK).open("ab")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.now = self._committed = Generation.newest(self.folder)
            self._clean()
        except BaseException as error:
            self._lock.close()
            if isinstance(error, BlockingIOError):
                what = "another process or thread is changing this index; try again when it has ended"
                raise BlockingIOError(errno.EAGAIN, what, str(self.folder)) from None
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._close()
            self._clean()
        finally:
            self._lock.close()

    def _close(self) -> None:
        files, self._files = self._files, {}
        for file in files.values():
            file.close()

    def _clean(self) -> None:
        """Remove what a writer has left that ended before its commit."""
        for path in self.folder.iterdir():
            if path.name.startswith("data-") and path != self._committed.data:
                shutil.rmtree(path)
            elif path.name.startswith(f".{MANIFEST}."):
                path.unlink()
        for name, size in _sizes(self._committed).items():
            path = self._committed.data / name
            if path.exists() and path.stat().st_size > size:
                os.truncate(path, size)

    def renew(self) -> None:
        """Begin with empty files, in a new folder."""
        self._close()
        data = int(self.now.manifest["data"]) + 1
        counts = dict.fromkeys(self.now.counts, 0)
        self.now = Generation(self.folder, {**self.now.manifest, "data": data, "counts": counts})

    def append(self, arrays: Mapping[str, Any], **changes: Any) -> None:
        """Append to files, and change entries of the manifest; offsets of records are from what is appended here."""
        now = self.now
        if "records" in arrays:
            arrays["records"]["offset"] += now.counts["bytes"]
        self.now.data.mkdir(exist_ok=True)
        counts = dict(now.counts)
        for name, content in arrays.items():
            if name in counts:
                counts[name] += len(content)
            self._write(name, content)
        if max(counts["records"], counts["rows"]) > MOST:
            raise ValueError(f"an index holds {MOST} texts or windows of texts at most")
        self.now = Generation(self.folder, {**now.manifest, **changes, "counts": counts})

    def _write(self, name: str, content: Any) -> None:
        path = self.now.data / name
        given = content if isinstance(content, bytes) else np.ascontiguousarray(content).data
        left = memoryview(given).cast("B") if len(content) else memoryview(b"")
        try:
            if name not in self._files:
                self._files[name] = path.open("ab", buffering=0)
            while left:
                left = left[self._files[name].write(left) :]
        except OSError as error:
            what = f"{error.strerror} while writing {len(left)} bytes; the index is as it was before"
            raise OSError(error.errno, what, str(path)) from error

    def commit(self, **changes: Any) -> None:
        """Make what was appended the newest generation, durably, with changed entries of the manifest."""
        for file in self._files.values():
            os.fsync(file.fileno())
        if self._files:
            _disk.sync_folder(self.now.data)
        manifest = {**self.now.manifest, **changes, "generation": self._committed.number + 1}
        _disk.write_file(self.folder / MANIFEST, _disk.to_json(manifest))
        self.now = self._committed = Generation(self.folder, manifest)
        self._close()


def _sizes(generation: Generation) -> dict[str, int]:
    """Return how many bytes of each file are valid."""
    names = ("records", "rows", "tags", "deleted", "bytes", *generation.of_rows)
    return {name: getattr(generation, name).nbytes for name in names}


def first_manifest(dtype: str, metric: str, width: int, model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest of an index without texts."""
    counts = dict.fromkeys(("records", "rows", "tags", "deleted", "bytes"), 0)
    return {
        "format": FORMAT, "version": VERSION, "generation": 1, "data": 1, "dtype": dtype, "metric": metric, "width": width,
        "next_id": 0, "fields": [], "counts": counts, "model": dict(model),
    }  # fmt: skip


def table_of(contents: Sequence[Raw], hashes: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return records and their bytes; ``hashes`` are those of ids and of texts."""
    sizes = [tuple(map(len, raw)) for raw in contents]
    if any(size > MOST for each in sizes for size in each):
        raise ValueError("a text of 4 GiB or more cannot be stored")
    joined = [b"".join(raw) for raw in contents]
    offsets = np.cumsum([0, *map(len, joined)]).tolist()
    rows = [
        (offset, *size, zlib.crc32(content), *pair)
        for offset, size, content, pair in zip(offsets, sizes, joined, hashes, strict=False)
    ]
    return {"records": np.array(rows, RECORD), "bytes": b"".join(joined)}


def tags_of(metadata: Iterable[Mapping[str, Any]], first: int) -> Iterator[tuple[int, int]]:
    """Return the hash of each field with its value, and its record; ``first`` is the first record."""
    for record, fields in enumerate(metadata, first):
        for name, value in fields.items():
            if not isinstance(value, list | dict):
                yield tag(name, value), record
