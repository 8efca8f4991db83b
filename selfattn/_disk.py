"""Reading and writing on the disk: files that appear whole or not at all, rows, safetensors and JSON with limits.

Nothing is unpickled or executed; a file that is truncated, contradicts itself or has absurd sizes is a ValueError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array
from selfattn._extras import import_extra
from selfattn._interrupt import DelayedInterrupt

PathLike: TypeAlias = str | os.PathLike[str]
MOST_LINKS = 40  # that are followed, as Linux does
FOLLOWED = "a link, which is not followed within a folder"
LONGEST_NAME = 255  # bytes, of Linux's and macOS's file systems
MOST_CONFIG_BYTES = 2**22  # that of Gemma 3's tokenizer lists more than 6,000 tokens, which is above 1 MiB
MOST_TOKENIZER_BYTES = 2**28
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
}


def to_safetensors(
    arrays: Mapping[str, npt.ArrayLike],
    metadata: dict[str, str] | None = None,
    bfloat16: Collection[str] = (),
) -> bytes:
    """Return the content of a safetensors file; arrays named in ``bfloat16`` are uint16 with the bits of bfloat16."""
    safetensors = import_extra("safetensors.numpy", "text")
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise TypeError(f"arrays must be a mapping of names to arrays, not {arrays!r:.80}")
    if "__metadata__" in arrays:
        raise ValueError("safetensors reserves the name '__metadata__'")
    native = {}
    for name, value in arrays.items():
        array = np.asarray(as_array(name, value))
        if array.dtype.name not in SAFETENSORS_DTYPES.values():
            raise TypeError(f"{name} holds {array.dtype}, which safetensors cannot store")
        # safetensors ignores strides and byte order
        native[name] = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    content: bytes = safetensors.save(native, metadata)
    if bfloat16:  # NumPy has no such dtype
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        for name in bfloat16:
            header[name]["dtype"] = "BF16"
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # numbers stay aligned
        content = len(text).to_bytes(8, "little") + text + content[end:]
    return content


def read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Return the arrays of a safetensors file, and the texts in its header."""
    header, _ = safetensors_header(path)
    arrays = {}
    for name, entry in import_extra("safetensors", "text").deserialize(read(path)):
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which NumPy does not have")
        try:
            arrays[name] = np.frombuffer(entry["data"], _dtype(dtype, path)).reshape(entry["shape"])
        except ValueError as error:  # no elements, but a shape that NumPy cannot count
            raise ValueError(f"{path}: {name} has shape {entry['shape']}: {error}") from None
    return arrays, header.get("__metadata__") or {}  # or null


def safetensors_header(path: Path, extra: str | None = "text") -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and where its arrays begin.

    The library compares sizes, overlaps and holes with the file's size, and reads no array.
    """
    safetensors = import_extra("safetensors", extra)
    check_regular(path)
    try:
        with fitting(path), safetensors.safe_open(path, "np"), path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return json.loads(file.read(size)), 8 + size
    except safetensors.SafetensorError as error:
        what = stand_in(path) or f": {error}"
        raise ValueError(f"{path} is cut off, damaged or no safetensors file{what}") from None


def _dtype(name: str, path: Path) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        raise ImportError(f"{path} holds {name}: import ml_dtypes first (pip install ml_dtypes)") from None


def write_file(path: Path, content: bytes) -> None:
    """Write one file so that either the new or the old content is there.

    Links are followed and stay; the file keeps its permissions. Pipes and devices are written to, not replaced.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has the name of the file", str(path))
    if is_special(path):
        with _opened(path) as special:
            special.write(content)
        return
    place = _place(path)
    write_files(place.parent, {place.name: content})


def _place(path: Path) -> Path:
    """Return the target of a path after all links; it need not exist."""
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if place.is_file() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, "the existing file may not be written", str(path))
    return place


def descriptor_of(path: PathLike) -> int | None:
    """Return the descriptor of this process that a path such as ``/dev/stdout`` or ``/dev/fd/n`` names, or None."""
    name = os.path.abspath(path)
    for _ in range(MOST_LINKS):  # one link at a time: the last leads to the descriptor's file
        folder = os.path.realpath(os.path.dirname(name))
        if folder in (f"/proc/{os.getpid()}/fd", "/dev/fd") and os.path.basename(name).isdigit():
            return int(os.path.basename(name))
        try:
            name = os.path.join(folder, os.readlink(name))
        except OSError:  # not a link, or another process's
            return None
    return None


def is_special(path: Path) -> bool:
    """Return whether a path is written to, not replaced: a pipe, a device, or a descriptor of any file."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or descriptor_of(path) is not None


def _opened(path: Path) -> Any:
    """Open a pipe, a device or a descriptor; a descriptor is copied with its position."""
    descriptor = descriptor_of(path)
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def write_files(folder: Path, content: Mapping[str, bytes], stale: Collection[str] = ()) -> None:
    """Write files into a folder so that either the new or the old content of each is there; remove those of ``stale``.

    All are first written under temporary names, so a full disk changes nothing. The last file is the first to be
    removed and the last to be added: while it is there, the files belong together. Files keep their permissions; a
    link is replaced, and its target is not written.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    suffix = secrets.token_hex(8)
    paths = [folder / name for name in content]
    staged = {path: _hidden(path, suffix, "new") for path in paths}
    removed = [folder / name for name in stale if os.path.lexists(folder / name)]
    try:
        for path in (*staged, *removed):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder has the name of the file", str(path))
        for (path, temporary), data in zip(staged.items(), content.values(), strict=True):
            if path.exists() and not path.is_file():  # a rename would replace /dev/null
                raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
            _write_to_disk(temporary, data, path)
        if len(staged) == 1 and not removed:
            _rename(temporary, path)
        else:
            with DelayedInterrupt(raises=True):  # old files must not stay under hidden names
                _exchange(staged, removed, suffix)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    sync_folder(folder)  # make the renames durable


def _rename(path: Path, other: Path, wanted: Path | None = None) -> None:
    """Rename a file, over another if there is one. Windows refuses that while one of them is open or mapped."""
    try:
        os.replace(path, other)
    except PermissionError as error:
        if getattr(error, "winerror", None) is None:
            raise
        what = (
            f"{error.strerror}: Windows replaces no file that is open, as by a model that was loaded from it"
        )
        raise PermissionError(
            error.errno, f"{what}; close it, or name another file", str(wanted or other)
        ) from error


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk. Windows opens no folders, and does that by itself."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    directory = os.open(folder, os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def open_own(path: Path) -> Any:
    """Open a file of a folder that may be a stranger's, to append to it; it is made if it is missing.

    A link, which may lead out of the folder, is an OSError, and so is all but a regular file.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, FOLLOWED, str(path))
    more = os.O_NONBLOCK | os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0  # Windows has neither
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | more, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return os.fdopen(descriptor, "ab", buffering=0)


def write_folder(folder: Path, content: Mapping[str, bytes], stale: Collection[str] = ()) -> None:
    """Write files into a folder and folders in it, as :func:`write_files` does; those that are missing are made."""
    for inner in {folder / each for name in content for each in PurePath(name).parents[:-1]}:
        if inner.is_symlink():
            raise OSError(errno.ELOOP, FOLLOWED, str(inner))
    places = dict.fromkeys([folder, *((folder / name).parent for name in content)])
    made = [place for place in places if not place.exists()]
    try:
        for place in made:
            place.mkdir(parents=True, exist_ok=True)
        write_files(folder, content, stale)
    except BaseException:
        for place in sorted(made, reverse=True):  # those below first
            if place.is_dir():
                place.rmdir()
        raise


def _keep_mode(descriptor: int, path: Path) -> None:
    """Give a file the permissions of the file that it will replace: private files stay private."""
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != stat.S_IMODE(os.fstat(descriptor).st_mode) and hasattr(os, "fchmod"):  # not on Windows
            os.fchmod(descriptor, mode)


def _hidden(path: Path, suffix: str, ending: str) -> Path:
    """Return a hidden name in a file's folder: the file's name with an ending, or its digest if that is too long."""
    name = f".{path.name}.{suffix}.{ending}"
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}.{suffix}.{ending}"
    return path.with_name(name)


def write_rows(path: Path, arrays: Iterable[Array], width: int, dtype: npt.DTypeLike) -> None:
    """Write the rows of arrays (…, width) as one ``.npy`` file, so that either the new or the old content is there.

    The number of rows is known at the end; the header, which has room for any number, is then written again.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder has the name of the file", str(path))
    if is_special(path):  # the header, written again at the end, might go elsewhere
        raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
    path = _place(path)
    temporary = _hidden(path, secrets.token_hex(8), "new")
    count = 0
    try:
        with _new_file(temporary, path) as file:
            _write_header(file, 0, width, dtype)
            for array in arrays:
                try:
                    file.write(np.ascontiguousarray(array, dtype).data)
                except OSError as error:
                    raise OSError(
                        error.errno, f"{error.strerror} while writing {array.nbytes} bytes", str(path)
                    ) from error
                count += len(array)
            file.seek(0)
            _write_header(file, count, width, dtype)
        _rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(file: Any, count: int, width: int, dtype: npt.DTypeLike) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (count, width),
    }
    # NumPy pads the header, so its length is the same for every count.
    np.lib.format.write_array_header_1_0(file, header)


def _exchange(staged: dict[Path, Path], removed: Iterable[Path], suffix: str) -> None:
    """Replace old files by new ones and remove others, or restore the old ones if that fails."""
    moved: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for path in (*reversed(staged), *removed):
            if os.path.lexists(path):
                moved[path] = _hidden(path, suffix, "old")
                _rename(path, moved[path], path)
        for path, temporary in staged.items():
            placed.append(path)
            _rename(temporary, path)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        for path, old in reversed(moved.items()):
            if os.path.lexists(old):
                os.replace(old, path)
        raise
    for old in moved.values():
        old.unlink()


@contextmanager
def _new_file(path: Path, replaced: Path) -> Iterator[Any]:
    """Open a new file with the permissions of the file that it will replace; flush it to the disk at the end."""
    try:
        opened = path.open("xb")
    except OSError as error:  # names the file that is wanted, not the hidden one
        raise OSError(error.errno, error.strerror, str(replaced)) from error
    with opened as file:
        _keep_mode(file.fileno(), replaced)
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_to_disk(path: Path, data: bytes, replaced: Path) -> None:
    try:
        with _new_file(path, replaced) as file:
            file.write(data)
    except OSError as error:
        what = f"{error.strerror} while writing {len(data)} bytes"
        raise OSError(error.errno, what, str(replaced)) from error


def read_json(path: Path) -> Any:
    """Read a small file, such as a ``config.json``."""
    return parse_json(path, read(path, MOST_CONFIG_BYTES))


def read_object(path: Path, required: bool = True) -> dict[str, Any]:
    """Read a small JSON file that must hold an object; a missing file gives {}, unless it is required."""
    found = read_json(path) if required or os.path.lexists(path) else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object")
    return found


def to_json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def stand_in(content: bytes | Path) -> str:
    """Return what a file is that came in place of another, and what to do; nothing for all other files."""
    if isinstance(content, Path):
        with content.open("rb") as file:
            content = file.read(100)
    head = content[:100].lstrip().lower()
    if head.startswith(b"version https://git-lfs"):
        return ": it is a pointer of Git LFS, not the file itself, which git lfs pull fetches"
    if head.startswith((b"<!doctype html", b"<html")):
        return ": it is HTML, perhaps a page that says why a download failed; download the file again"
    return ""


def check_regular(path: Path) -> int:
    """Return the size of a file; an error that names it if it is missing, or a pipe or a device, which may not end."""
    try:
        found = path.stat()  # once, as another process may remove it meanwhile
    except (FileNotFoundError, NotADirectoryError):
        what = "the link leads to no file" if path.is_symlink() else os.strerror(errno.ENOENT)
        raise FileNotFoundError(errno.ENOENT, what, str(path)) from None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return found.st_size


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Let an error that memory is short, also of mapping, name the file that does not fit."""
    try:
        yield
    except (MemoryError, OSError) as error:
        named = str(error).startswith(f"{path}: ")  # by a function that this one's body has called
        if named or getattr(error, "errno", errno.ENOMEM) != errno.ENOMEM:
            raise
        raise MemoryError(f"{path}: its {path.stat().st_size} bytes do not fit into memory") from None


def read(path: Path, most: int | None = None) -> bytes:
    """Read a regular file of at most ``most`` bytes; one of more bytes than the machine has is a MemoryError."""
    size = check_regular(path)
    if most is not None and size > most:
        raise ValueError(f"{path} has more than {most} bytes")
    with fitting(path), path.open("rb") as file:
        if hasattr(os, "sysconf") and size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
            raise MemoryError
        return file.read()  # not `size` bytes: Linux's own files, as in /proc, have a size of 0


def read_kept(path: Path) -> bytes | None:
    """Read a small file that a folder may lack, such as a chat template; None if it does."""
    return read(path, MOST_CONFIG_BYTES) if os.path.lexists(path) else None


def has_mark(path: Path, mark: bytes) -> bool:
    """Return whether a file is regular and contains a mark, in its first 16 MiB."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return mark in file.read(2**24)


def read_input(path: Path) -> bytes:
    """Read a file that a user names, which may be a descriptor such as ``/dev/stdin``, or ``/dev/null``."""
    named = descriptor_of(path) is not None or path == Path(os.devnull)
    return path.read_bytes() if named else read(path)


def mapped(path: Path, dtype: npt.DTypeLike = np.uint8, mode: Any = "c", shape: Any = None) -> Array:
    """Map a regular file; pages are read when they are needed, and with mode ``"c"`` copied when they are changed."""
    check_regular(path)
    with fitting(path):
        return np.memmap(path, dtype, mode, shape=shape)


def parse_tokenizer(path: Path, content: bytes, extra: str | None) -> Any:
    """Return the tokenizer that a file of Hugging Face's library ``tokenizers`` holds.

    If it holds none, this is a ValueError.
    """
    library = import_extra("tokenizers", extra)
    with library_errors(f"{path} is not a tokenizer of Hugging Face's{stand_in(content)}"):
        return library.Tokenizer.from_str(content.decode())


@contextmanager
def library_errors(what: str, *but: type[BaseException]) -> Iterator[None]:
    """Convert exceptions of the library ``tokenizers``, and Rust's panics (BaseExceptions), to a ValueError.

    Those of ``but`` are kept.
    """
    kept: tuple[type[BaseException], ...] = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, *but)
    try:
        yield
    except kept:
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def parse_json(path: Path, content: bytes) -> Any:
    try:
        value = json.loads(content)
        json.dumps(value, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except (ValueError, RecursionError) as error:  # syntax, UTF-8, nesting
        raise ValueError(f"{path} is not JSON{stand_in(content) or f': {error}'}") from None
    return value
