"""Models as files: a folder with safetensors weights, a ``config.json`` and the tokenizer.

Owns what is read from and written to disk. Nothing is unpickled or executed; a file that is cut off, contradicts
itself or asks for absurd sizes is a ValueError. What is written appears whole or not at all.

>>> import tempfile
>>> from selfattn import files, nn
>>> from selfattn.text import WhitespaceTokenizer
>>> tokenizer = WhitespaceTokenizer.train(["tom chase jerry", "jerry likes cheese"])
>>> model = nn.EmbeddingModel(tokenizer, tokenizer.vocab_size, 8, max_seq_len=16, rng=0)
>>> with tempfile.TemporaryDirectory() as folder:
...     files.save_model(model, folder)
...     again = files.load_model(folder)
>>> bool((again("tom likes jerry") == model("tom likes jerry")).all())
True
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import selfattn
from selfattn._extras import import_extra
from selfattn._interrupt import DelayedInterrupt
from selfattn.functional._arguments import as_array
from selfattn.nn._arrays import FLOATS
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.text import WhitespaceTokenizer

__all__ = ["load_arrays", "load_model", "save_arrays", "save_model"]

Array: TypeAlias = npt.NDArray[Any]
PathLike: TypeAlias = str | os.PathLike[str]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT, VERSION = "selfattn.EmbeddingModel", 1
SIZES = {
    "vocab_size": 1,
    "embedding_dim": 2,
    "max_seq_len": 1,
    "num_layers": 0,
    "num_heads": 1,
}  # and the least
KEYS = {"format", "version", "selfattn", *SIZES, "dtype", "tokenizer"}
TOKENIZERS = {
    "sentencepiece": "tokenizer.model",
    "tokenizers": "tokenizer.json",
    "whitespace": "vocabulary.json",
}

MOST_LINKS = 40  # that are followed, as Linux does
LONGEST_NAME = 255  # bytes, of Linux's and macOS's file systems
MOST_CONFIG_BYTES = 2**20
# No other file bounds the positions: config.json alone must not fill memory.
MOST_POSITIONS = 2**28
SAFETENSORS_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
}  # fmt: skip


# ------------------------------------------------------------------------------------------------------ models


def save_model(model: EmbeddingModel, folder: PathLike) -> None:
    """Save a model as a folder: ``model.safetensors``, ``config.json`` and the tokenizer's file.

    Parameters
    ----------
    model : EmbeddingModel
        Its tokenizer is saved when it is SentencePiece's, one of Hugging Face's ``tokenizers`` or a
        :class:`~selfattn.text.WhitespaceTokenizer`; a tokenizer of any other kind has to be given to
        :func:`load_model` again.
    folder : path
        Made if need be. A model that is there is replaced; other files in it are left alone.

    Raises
    ------
    OSError
        It could not be written; what was there before is as it was.
    ValueError
        The model could not be loaded again: the tokenizer has more tokens than ``vocab_size``, parameters are not those of
        ``num_layers`` blocks, or there are too many positions.
    ImportError
        ``safetensors`` is missing: ``pip install 'selfattn[text]'``.

    Notes
    -----
    All files are first written under other names and flushed to the disk; then they are renamed, ``config.json`` last.
    Should the machine stop between two of the renames, ``config.json`` is missing and loading says so; both models,
    old and new, are then in the folder under names that begin with a dot.
    """
    if not isinstance(model, EmbeddingModel):
        raise TypeError(
            f"model must be an EmbeddingModel, not {type(model).__name__}; save_arrays saves any state_dict"
        )
    if model.max_seq_len * model.embedding_dim > MOST_POSITIONS:
        raise ValueError(
            f"max_seq_len * embedding_dim is {model.max_seq_len * model.embedding_dim}; "
            f"a model that is saved may have {MOST_POSITIONS} at most"
        )
    kind, tokenizer = _tokenizer_bytes(model.tokenizer)
    if (size := _tokens(kind, model.tokenizer)) > model.vocab_size:
        raise ValueError(
            f"the tokenizer has {size} tokens, more than vocab_size {model.vocab_size} of the model; it could not be loaded again"
        )
    config = {
        "format": FORMAT,
        "version": VERSION,
        "selfattn": selfattn.__version__,
        **{name: getattr(model, name) for name in SIZES},
        "dtype": model.embedding_layer.weight.dtype.name,
        "tokenizer": kind,
    }
    weights = model.state_dict()
    if differences := _differences(Path(folder), config, weights):  # layers were added or taken away, say
        raise ValueError(
            "the model does not fit its sizes, and could not be loaded again:\n  " + "\n  ".join(differences)
        )
    content = {WEIGHTS: to_safetensors(weights)}
    if kind is not None:
        content[TOKENIZERS[kind]] = tokenizer
    content[CONFIG] = (json.dumps(config, indent=2) + "\n").encode()
    folder = Path(folder)
    stale = _tokenizer_file(folder)
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_files(folder, content)
    except BaseException:
        if made:
            folder.rmdir()
        raise
    if stale is not None and stale not in content:
        (folder / stale).unlink(missing_ok=True)


def load_model(folder: PathLike, strict: bool = True, tokenizer: Any = None) -> EmbeddingModel:
    """Load a model that :func:`save_model` saved.

    Parameters
    ----------
    folder : path
    strict : bool, default True
        False loads what fits by name and shape, rounds to the model's dtype, and warns of what differs; what is
        missing keeps the initial weights of ``rng=0``.
    tokenizer : object, optional
        Used in place of the saved one; needed for a model whose tokenizer could not be saved.

    Returns
    -------
    EmbeddingModel

    Raises
    ------
    FileNotFoundError
        The folder or one of its files is missing.
    ValueError
        The files are damaged, are no model of selfattn's, or do not fit each other; the message lists the names, shapes
        and dtypes that differ.
    ImportError
        ``safetensors``, or the library of the tokenizer, is missing.

    Warns
    -----
    UserWarning
        With ``strict=False``, what differs.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; expected a model that save_model saved")
    config = _read_config(folder / CONFIG)
    weights = load_arrays(folder / WEIGHTS)
    # Check sizes before anything is allocated.
    differences = _differences(folder, config, weights)
    if differences and strict:
        raise ValueError(f"{folder / WEIGHTS} does not fit {CONFIG}:\n  " + "\n  ".join(differences))
    if tokenizer is None:
        tokenizer = _load_tokenizer(folder, config)
    sizes = {name: config[name] for name in SIZES}
    model = EmbeddingModel(tokenizer, **sizes, dtype=config["dtype"], rng=0)
    if differences:
        warnings.warn(
            f"{folder / WEIGHTS} differs from {CONFIG}:\n  " + "\n  ".join(differences), stacklevel=2
        )
        shapes = {name: array.shape for name, array in model.state_dict().items()}
        weights = {name: array for name, array in weights.items() if array.shape == shapes.get(name)}
    model.load_state_dict(weights, strict=strict)
    return model


def _tokenizer_file(folder: Path) -> str | None:
    """Return the name of the tokenizer's file of a model that is in a folder, None for no model of selfattn's."""
    try:
        return TOKENIZERS.get(_read_config(folder / CONFIG)["tokenizer"])
    except (OSError, ValueError):
        return None


def _read_config(path: Path) -> dict[str, Any]:
    config = read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a model of selfattn's: its format is not {FORMAT!r}")
    if config.get("version") != VERSION:
        raise ValueError(
            f"{path} has version {config.get('version')!r}; this selfattn reads version {VERSION}"
        )
    if set(config) != KEYS:
        raise ValueError(
            f"{path} must have {sorted(KEYS)}; missing {sorted(KEYS - set(config))}, "
            f"unexpected {sorted(set(config) - KEYS)}"
        )
    for name, least in SIZES.items():
        value = config[name]
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(f"{path}: {name} must be an int from {least} to 2**31 - 1, not {value!r}")
    if config["embedding_dim"] % 2 or config["embedding_dim"] % config["num_heads"]:
        raise ValueError(
            f"{path}: embedding_dim must be even and a multiple of num_heads, not {config['embedding_dim']} "
            f"with num_heads {config['num_heads']}"
        )
    if config["max_seq_len"] * config["embedding_dim"] > MOST_POSITIONS:
        raise ValueError(
            f"{path}: max_seq_len {config['max_seq_len']} times embedding_dim {config['embedding_dim']} "
            f"is more than {MOST_POSITIONS}"
        )
    if config["dtype"] not in FLOATS:
        raise ValueError(f"{path}: dtype must be one of {', '.join(FLOATS)}, not {config['dtype']!r}")
    if config["tokenizer"] not in (None, *TOKENIZERS):
        raise ValueError(
            f"{path}: tokenizer must be one of {', '.join(TOKENIZERS)}, not {config['tokenizer']!r}"
        )
    return config


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = config["embedding_dim"]
    yield "embedding_layer.weight", (config["vocab_size"], d)
    for i in range(config["num_layers"]):
        for layer in ("query", "key", "value"):
            yield f"attention_layers.{i}.{layer}.weight", (d, d)
            yield f"attention_layers.{i}.{layer}.bias", (d,)
        yield f"attention_layers.{i}.ln.weight", (d,)
        yield f"attention_layers.{i}.ln.bias", (d,)


def _differences(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> list[str]:
    """Say what differs between the parameters that a config describes and the arrays of a file."""
    if 8 * config["num_layers"] > len(weights) + 1000:  # too many to name
        raise ValueError(
            f"{folder / CONFIG} names {config['num_layers']} layers; {WEIGHTS} holds {len(weights)} arrays"
        )
    expected = dict(_shapes(config))
    found = [f"unexpected: {name} {array.shape}" for name, array in weights.items() if name not in expected]
    for name, shape in expected.items():
        if name not in weights:
            found.append(f"missing: {name} {shape}")
            continue
        if weights[name].shape != shape:
            found.append(f"{name} has shape {weights[name].shape}, {CONFIG} says {shape}")
        if weights[name].dtype.name != config["dtype"]:
            found.append(f"{name} is {weights[name].dtype}, {CONFIG} says {config['dtype']}")
    return found


# -------------------------------------------------------------------------------------------------- tokenizers


def _tokenizer_bytes(tokenizer: Any) -> tuple[str | None, bytes]:
    """Return the kind of a tokenizer and its file, or None for one that no file can hold."""
    if isinstance(tokenizer, WhitespaceTokenizer):
        return "whitespace", (json.dumps(tokenizer.vocabulary, ensure_ascii=False) + "\n").encode()
    if hasattr(tokenizer, "serialized_model_proto"):
        return "sentencepiece", bytes(tokenizer.serialized_model_proto())
    if hasattr(tokenizer, "to_str") and hasattr(tokenizer, "encode_batch"):
        return "tokenizers", tokenizer.to_str().encode()
    return None, b""


def _tokens(kind: str | None, tokenizer: Any) -> int:
    """Return how many tokens a tokenizer of a kind that files can hold has."""
    if kind == "whitespace":
        return int(tokenizer.vocab_size)
    if kind == "sentencepiece":
        return int(tokenizer.get_piece_size())
    return 0 if kind is None else int(tokenizer.get_vocab_size())


def _load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Any:
    kind = config["tokenizer"]
    if kind is None:
        raise ValueError(
            f"the tokenizer of {folder} was of a kind that is not saved; load_model(folder, tokenizer=...) takes it"
        )
    path = folder / TOKENIZERS[kind]
    content = _read(path)
    if kind == "whitespace":
        vocabulary = _parse_json(path, content)
        if not isinstance(vocabulary, list) or not all(isinstance(word, str) for word in vocabulary):
            raise ValueError(f"{path} must be a list of words")
        try:
            tokenizer: Any = WhitespaceTokenizer(vocabulary)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    elif kind == "sentencepiece":
        tokenizer = import_extra("sentencepiece", "text").SentencePieceProcessor()
        try:
            tokenizer.LoadFromSerializedProto(content)
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:  # the last of its own message
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
    else:
        tokenizer = parse_tokenizer(path, content, None)
    if (size := _tokens(kind, tokenizer)) > config["vocab_size"]:
        raise ValueError(f"{path} has {size} tokens, more than vocab_size {config['vocab_size']} in {CONFIG}")
    return tokenizer


# ------------------------------------------------------------------------------------------------------ arrays


def save_arrays(path: PathLike, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Save arrays by name as a safetensors file, such as the ``state_dict()`` of any module.

    Parameters
    ----------
    path : path
        A file that is there is replaced, once the new one is whole.
    arrays : mapping of str to array_like

    Raises
    ------
    OSError
        It could not be written; what was there before is as it was.
    TypeError
        An array holds something that safetensors has no name for.
    ImportError
        ``safetensors`` is missing: ``pip install 'selfattn[text]'``.
    """
    path = Path(path)
    content = to_safetensors(arrays)
    if is_special(path):  # it could not be read back
        raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
    write_file(path, content)


def load_arrays(path: PathLike) -> dict[str, Array]:
    """Load all arrays of a safetensors file, by name; ``module.load_state_dict`` takes them.

    Parameters
    ----------
    path : path

    Returns
    -------
    dict of str to ndarray

    Raises
    ------
    FileNotFoundError
        There is no such file.
    ValueError
        The file is cut off or damaged, or holds a dtype that NumPy does not have.
    ImportError
        ``safetensors`` is missing; or ``ml_dtypes`` has not been imported, and the file holds bfloat16.
    """
    return read_safetensors(Path(path))[0]


def to_safetensors(
    arrays: Mapping[str, npt.ArrayLike],
    metadata: dict[str, str] | None = None,
    bfloat16: Collection[str] = (),
) -> bytes:
    """Return the content of a safetensors file; arrays of some names hold the bits of bfloat16, in uint16."""
    safetensors = import_extra("safetensors.numpy", "text")
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise TypeError(f"arrays must be a mapping of names to arrays, not {arrays!r:.80}")
    if "__metadata__" in arrays:
        raise ValueError("safetensors has a use of its own for the name '__metadata__'")
    native = {}
    for name, value in arrays.items():
        array = np.asarray(as_array(name, value))
        if array.dtype.name not in SAFETENSORS_DTYPES.values():
            raise TypeError(f"{name} holds {array.dtype}, which safetensors has no name for")
        # safetensors ignores strides and byte order
        native[name] = np.asarray(array, array.dtype.newbyteorder("="), order="C")
    content: bytes = safetensors.save(native, metadata)
    if bfloat16:  # a name that NumPy does not have
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
    content = _read(path)
    try:
        entries = safetensors.deserialize(content)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut off, damaged or no safetensors file: {error}") from None
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
    return arrays, header.get("__metadata__") or {}  # null is none too


def _dtype(name: str, path: Path) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        raise ImportError(f"{path} holds {name}: import ml_dtypes first (pip install ml_dtypes)") from None


# ------------------------------------------------------------------------------------------ reading and writing


def write_file(path: Path, content: bytes) -> None:
    """Write one file so that it is there as a whole or as it was.

    A link is followed and stays one; a file that is there keeps its permissions. A pipe or device is written into.

    Raises
    ------
    OSError
        It could not be written, or may not be; what was there before is as it was.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is in the way of the file", str(path))
    if is_special(path):
        with _opened(path) as special:
            special.write(content)
        return
    place = _place(path)
    write_files(place.parent, {place.name: content})


def _place(path: Path) -> Path:
    """Return what a path names when links have been followed; a link to nothing yet names what it points at.

    Raises
    ------
    OSError
        Links go round in a circle, or what is there may not be written.
    """
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if place.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if place.is_file() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, "the file that is there may not be written", str(path))
    return place


def descriptor_of(path: PathLike) -> int | None:
    """Return n for a path that stands for a descriptor of this process, such as ``/dev/stdout`` or ``/dev/fd/n``."""
    name = os.path.abspath(path)
    for _ in range(MOST_LINKS):  # one by one: the last would lead to the file behind the descriptor
        folder = os.path.realpath(os.path.dirname(name))
        if folder in (f"/proc/{os.getpid()}/fd", "/dev/fd") and os.path.basename(name).isdigit():
            return int(os.path.basename(name))
        try:
            name = os.path.join(folder, os.readlink(name))
        except OSError:  # no link, or one of another process
            return None
    return None


def is_special(path: Path) -> bool:
    """Tell what is to be written into, not replaced: pipes, devices, and descriptors, whatever is behind them."""
    try:
        kind = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)) or descriptor_of(path) is not None


def _opened(path: Path) -> Any:
    """Open a pipe, a device or a descriptor; of a descriptor a copy, which goes on where it stands."""
    descriptor = descriptor_of(path)
    return path.open("wb") if descriptor is None else os.fdopen(os.dup(descriptor), "wb")


def write_files(folder: Path, content: Mapping[str, bytes]) -> None:
    """Write files into a folder so that each is there as a whole or as it was.

    All are written under temporary names first, so a full disk changes nothing. Of several, the last one is the first
    to go and the last to come: while it is there, the files belong together. Files that are there keep their permissions.
    """
    suffix = secrets.token_hex(8)
    paths = [folder / name for name in content]
    staged = {path: _beside(path, suffix, "new") for path in paths}
    try:
        for (path, temporary), data in zip(staged.items(), content.values(), strict=True):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder is in the way of the file", str(path))
            if path.exists() and not path.is_file():  # a rename would replace /dev/null
                raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
            _write_to_disk(temporary, data, path)
        if len(staged) == 1:
            os.replace(temporary, path)
        else:
            with DelayedInterrupt(raises=True):  # old files must not stay under names that nobody sees
                _exchange(staged, suffix)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)  # make the renames durable
    finally:
        os.close(directory)


def _keep_mode(descriptor: int, path: Path) -> None:
    """Give a file the permissions of the one that it will replace: what is private stays so."""
    with contextlib.suppress(FileNotFoundError):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode != stat.S_IMODE(os.fstat(descriptor).st_mode):
            os.fchmod(descriptor, mode)


def _beside(path: Path, suffix: str, ending: str) -> Path:
    """Return a hidden name beside a file: its own with an ending, or a digest of it where that would be too long."""
    name = f".{path.name}.{suffix}.{ending}"
    if len(os.fsencode(name)) > LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}.{suffix}.{ending}"
    return path.with_name(name)


def write_rows(path: Path, parts: Iterable[Array], width: int, dtype: npt.DTypeLike) -> None:
    """Write arrays (…, width) one below the other as a ``.npy`` file, which is there as a whole or as it was.

    How many rows there are shows at the end, and the header, which has room for any number, is then written again.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "a folder is in the way of the file", str(path))
    if is_special(path):  # there is no way back to the header
        raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
    path = _place(path)
    temporary = _beside(path, secrets.token_hex(8), "new")
    count = 0
    try:
        with temporary.open("xb") as file:
            _keep_mode(file.fileno(), path)
            _write_header(file, 0, width, dtype)
            for part in parts:
                try:
                    file.write(np.ascontiguousarray(part, dtype).data)
                except OSError as error:
                    raise OSError(
                        error.errno, f"{error.strerror} while writing {part.nbytes} bytes", str(path)
                    ) from error
                count += len(part)
            file.seek(0)
            _write_header(file, count, width, dtype)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_header(file: Any, count: int, width: int, dtype: npt.DTypeLike) -> None:
    header = {
        "descr": np.lib.format.dtype_to_descr(np.dtype(dtype)),
        "fortran_order": False,
        "shape": (count, width),
    }
    np.lib.format.write_array_header_1_0(
        file, header
    )  # pads to the length that it has with the largest count


def _exchange(staged: dict[Path, Path], suffix: str) -> None:
    """Put new files in the place of old ones, or the old ones back if that fails."""
    moved: dict[Path, Path] = {}
    placed: list[Path] = []
    try:
        for path in reversed(staged):
            if path.exists():
                moved[path] = _beside(path, suffix, "old")
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


def _write_to_disk(path: Path, data: bytes, replaced: Path) -> None:
    try:
        with path.open("xb") as file:
            _keep_mode(file.fileno(), replaced)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} while writing {len(data)} bytes", str(path)) from error


def read_json(path: Path) -> Any:
    """Read a small file, such as a ``config.json``."""
    return _parse_json(path, _read(path, MOST_CONFIG_BYTES))


def _read(path: Path, most: int | None = None) -> bytes:
    if not path.exists():
        raise FileNotFoundError(
            errno.ENOENT, "no such file; expected what save_model or save_arrays wrote", str(path)
        )
    if not path.is_file():  # a pipe or device never ends
        raise ValueError(f"{path} is not a regular file")
    with path.open("rb") as file:
        content = file.read(-1 if most is None else most + 1)
    if most is not None and len(content) > most:
        raise ValueError(f"{path} has more than {most} bytes")
    return content


def parse_tokenizer(path: Path, content: bytes, extra: str | None) -> Any:
    """Return the tokenizer that a file of Hugging Face's library ``tokenizers`` holds.

    Raises
    ------
    ValueError
        It holds none.
    ImportError
        ``tokenizers`` is not installed.
    """
    library = import_extra("tokenizers", extra)
    with library_errors(f"{path} is not a tokenizer of Hugging Face's"):
        return library.Tokenizer.from_str(content.decode())


@contextmanager
def library_errors(what: str) -> Iterator[None]:
    """Make a ValueError of what the library ``tokenizers`` raises: plain Exceptions, and Rust's panics, which are not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        raise ValueError(f"{what}: {error}") from None


def _parse_json(path: Path, content: bytes) -> Any:
    try:
        value = json.loads(content)
        json.dumps(
            value, ensure_ascii=False
        ).encode()  # halves of surrogate pairs, which could not be written again
    except (ValueError, RecursionError) as error:  # syntax, UTF-8, nesting
        raise ValueError(f"{path} is not JSON: {error}") from None
    return value
