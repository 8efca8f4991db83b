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
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array
from selfattn._extras import import_extra
from selfattn._interrupt import DelayedInterrupt

PathLike: TypeAlias = str | os.PathLike[str]
MOST_LINKS = 40  # that are followed, as Linux does
LONGEST_NAME = 255  # bytes, of Linux's and macOS's file systems
MOST_CONFIG_BYTES = 2**20
MOST_TOKENIZER_BYTES = 2**28  # the largest that are published have some 30 MB
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
    safetensors = import_extra("safetensors", "text")
    check_regular(path)
    try:
        with safetensors.safe_open(path, "np"):  # compares the size with the header, before anything is read
            content = read(path)
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        what = stand_in(path) or f": {error}"
        raise ValueError(f"{path} is cut off, damaged or no safetensors file{what}") from None
    arrays = {}
    for name, entry in entries:
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"{path}: {name} has dtype {entry['dtype']}, which NumPy does not have")
        try:
            arrays[name] = np.frombuffer(entry["data"], _dtype(dtype, path)).reshape(entry["shape"])
        except ValueError as error:  # no elements, but a shape that NumPy cannot count
            raise ValueError(f"{path}: {name} has shape {entry['shape']}: {error}") from None
    # deserialize() has checked the header, but does not return the texts.
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return arrays, header.get("__metadata__") or {}  # or null


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


def write_files(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write files into a folder so that either the new or the old content of each is there.

    All are first written under temporary names, so a full disk changes nothing. The last file is the first to be
    removed and the last to be added: while it is there, the files belong together. Files keep their permissions.
    """
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    suffix = secrets.token_hex(8)
    paths = [folder / name for name in content]
    staged = {path: _hidden(path, suffix, "new") for path in paths}
    try:
        for (path, temporary), data in zip(staged.items(), content.values(), strict=True):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder has the name of the file", str(path))
            if path.exists() and not path.is_file():  # a rename would replace /dev/null
                raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
            _write_to_disk(temporary, data, path)
        if len(staged) == 1:
            os.replace(temporary, path)
        else:
            with DelayedInterrupt(raises=True):  # old files must not stay under hidden names
                _exchange(staged, suffix)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    sync_folder(folder)  # make the renames durable


def sync_folder(folder: Path) -> None:
    """Flush a folder's names to the disk."""
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_folder(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write files into a folder and folders in it, as :func:`write_files` does; those that are missing are made."""
    places = dict.fromkeys([folder, *((folder / name).parent for name in content)])
    for place in places:  # a link in a folder from elsewhere may lead to anybody's files
        if os.path.realpath(place) != os.path.join(
            os.path.realpath(folder), place.relative_to(folder)
        ).rstrip("/."):
            raise OSError(errno.ELOOP, "a link in the place of a folder, which is not followed", str(place))
    made = [place for place in places if not place.exists()]
    try:
        for place in made:
            place.mkdir(parents=True, exist_ok=True)
        write_files(folder, content)
    except BaseException:
        for place in sorted(made, reverse=True):  # those below first
            if place.is_dir():
                place.rmdir()
        raise


def _keep_mode(descriptor: int, path: Path) -> None:
    """Give a file the permissions of the file that it will replace: private files stay private."""
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
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
        os.replace(temporary, path)
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


def _exchange(staged: dict[Path, Path], suffix: str) -> None:
    """Replace old files by new ones, or restore the old ones if that fails."""
    moved: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for path in reversed(staged):
            if path.exists():
                moved[path] = _hidden(path, suffix, "old")
                os.replace(path, moved[path])
        for path, temporary in staged.items():
            placed.append(path)
            os.replace(temporary, path)
    except BaseException:
        for path in placed:
            path.unlink(missing_ok=True)
        for path, old in reversed(moved.items()):
            if old.exists():
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
    found = read_json(path) if required or path.exists() else {}
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


def check_regular(path: Path) -> None:
    """Refuse what is no file: reading a pipe or a device may never end."""
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT, "no such file; expected what save_model or save_arrays wrote", str(path)
        )
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file")


@contextmanager
def in_memory(path: Any) -> Iterator[None]:
    """Give a MemoryError, also a mapping's OSError, the name of the file that is read."""
    try:
        yield
    except (MemoryError, OSError) as error:
        if isinstance(error, OSError) and error.errno != errno.ENOMEM:
            raise
        raise MemoryError(f"{path} does not fit into the memory that is left") from None


def read(path: Path, most: int | None = None) -> bytes:
    """Return a regular file's content, of at most ``most`` bytes."""
    check_regular(path)
    if most is not None and path.stat().st_size > most:
        raise ValueError(f"{path} has more than {most} bytes")
    with in_memory(path), path.open("rb") as file:
        return file.read() if most is None else file.read(most)


def map_bytes(path: Path) -> Array:
    """Return a file's bytes (n,), which are read as they are used; writing to them does not change the file."""
    check_regular(path)
    with in_memory(path):
        return np.memmap(path, np.uint8, "c")


def open_inside(path: Path, flags: int) -> int:
    """Open a file of a folder that may come from elsewhere, to write into it: no link is followed."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise OSError(errno.EINVAL, "a link, or no regular file, in the place of a file to write", str(path))
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


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
