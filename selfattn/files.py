"""Models as files: a folder with safetensors weights, a ``config.json`` and the tokenizer.

Nothing is unpickled or executed; a file that is truncated, contradicts itself or claims absurd sizes is a ValueError.
A file that is written appears whole or not at all.

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

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt

from selfattn import _disk
from selfattn._check import FLOATS, Array, Entries, warn
from selfattn._extras import import_extra
from selfattn._version import __version__
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.text import WhitespaceTokenizer

__all__ = ["load_arrays", "load_model", "save_arrays", "save_model"]

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FORMAT, VERSION = "selfattn.EmbeddingModel", 1
# Sizes, and the least of each.
SIZES = {"vocab_size": 1, "embedding_dim": 2, "max_seq_len": 1, "num_layers": 0, "num_heads": 1}
KEYS = {"format", "version", "selfattn", *SIZES, "dtype", "tokenizer"}
TOKENIZERS = {
    "sentencepiece": "tokenizer.model",
    "tokenizers": "tokenizer.json",
    "whitespace": "vocabulary.json",
}
# Only config.json says how many positions there are; a wrong number must not fill the memory.
MOST_POSITIONS = 2**28


# ------------------------------------------------------------------------------------------------------ models


def save_model(model: EmbeddingModel, folder: _disk.PathLike) -> None:
    """Save a model as a folder: ``model.safetensors``, ``config.json`` and the tokenizer's file.

    Parameters
    ----------
    model : EmbeddingModel
        Its tokenizer is saved if it is SentencePiece's, one of Hugging Face's ``tokenizers`` or a
        :class:`~selfattn.text.WhitespaceTokenizer`; any other tokenizer has to be given to :func:`load_model` again.
    folder : path
        Made if necessary. A model in it is replaced; other files stay.

    Raises
    ------
    OSError
        The folder could not be written, and is unchanged.
    ValueError
        The model could not be loaded again: the tokenizer has more tokens than ``vocab_size``, parameters are not
        those of ``num_layers`` layers, or there are too many positions.
    ImportError
        ``safetensors`` is missing: ``pip install 'selfattn[text]'``.

    Notes
    -----
    All files are first written under other names and flushed to the disk; then they are renamed, ``config.json`` last.
    If the machine stops between two of the renames, ``config.json`` is missing and loading says so; both models, old
    and new, are then in the folder under names that begin with a dot.
    """
    if not isinstance(model, EmbeddingModel):
        other = "save_arrays saves any state_dict"
        raise TypeError(f"model must be an EmbeddingModel, not {type(model).__name__}; {other}")
    if (positions := model.max_seq_len * model.embedding_dim) > MOST_POSITIONS:
        most = f"a saved model may have {MOST_POSITIONS} at most"
        raise ValueError(f"max_seq_len * embedding_dim is {positions}; {most}")
    kind, tokenizer = _tokenizer_bytes(model.tokenizer)
    again = "could not be loaded again"
    if (size := _tokens(kind, model.tokenizer)) > model.vocab_size:
        more = f"more than vocab_size {model.vocab_size} of the model"
        raise ValueError(f"the tokenizer has {size} tokens, {more}; it {again}")
    config = {
        "format": FORMAT,
        "version": VERSION,
        "selfattn": __version__,
        **{name: getattr(model, name) for name in SIZES},
        "dtype": model.embedding_layer.weight.dtype.name,
        "tokenizer": kind,
    }
    weights = model.state_dict()
    folder = Path(folder)
    if differences := _differences(folder, config, weights):  # layers were added or removed, for example
        raise ValueError(f"the model does not fit its sizes, and {again}:\n  " + "\n  ".join(differences))
    content = {WEIGHTS: _disk.to_safetensors(weights)}
    if kind is not None:
        content[TOKENIZERS[kind]] = tokenizer
    content[CONFIG] = _disk.to_json(config)
    before = _tokenizer_file(folder)
    _disk.write_folder(folder, content, [before] if before is not None and before not in content else [])


def load_model(folder: _disk.PathLike, strict: bool = True, tokenizer: Any = None) -> EmbeddingModel:
    """Load a model that :func:`save_model` saved.

    Parameters
    ----------
    folder : path
    strict : bool, default True
        False loads arrays that fit by name and shape, rounds them to the model's dtype, and warns of differences;
        missing ones keep the initial weights of ``rng=0``.
    tokenizer : object, optional
        Used instead of the saved one; needed for a model whose tokenizer could not be saved.

    Returns
    -------
    EmbeddingModel

    Raises
    ------
    FileNotFoundError
        The folder or one of its files is missing.
    ValueError
        The files are damaged, are not a model of selfattn's, or do not fit each other; the message lists the names,
        shapes and dtypes that differ.
    ImportError
        ``safetensors``, or the library of the tokenizer, is missing.

    Warns
    -----
    UserWarning
        With ``strict=False``, the differences.
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
        listed = "\n  ".join(differences)
        warn(f"{folder / WEIGHTS} differs from {CONFIG}:\n  {listed}")
        shapes = {name: array.shape for name, array in model.state_dict().items()}
        weights = {name: array for name, array in weights.items() if array.shape == shapes.get(name)}
    model.load_state_dict(weights, strict=strict)
    return model


def is_model(folder: Path) -> bool:
    """Return whether :func:`save_model` wrote the folder, even if it is damaged now; False for a pretrained model's."""
    config = _disk.read_json(folder / CONFIG) if (folder / CONFIG).exists() else None
    return isinstance(config, dict) and "format" in config and "model_type" not in config


def _tokenizer_file(folder: Path) -> str | None:
    """Return the name of the tokenizer's file in a folder, or None if selfattn did not save the folder."""
    try:
        return TOKENIZERS.get(_read_config(folder / CONFIG)["tokenizer"])
    except (OSError, ValueError):
        return None


def _read_config(path: Path) -> dict[str, Any]:
    config = _disk.read_json(path)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise ValueError(f"{path} does not describe a model of selfattn's: its format is not {FORMAT!r}")
    if config.get("version") != VERSION:
        version = config.get("version")
        raise ValueError(f"{path} has version {version!r}; this selfattn reads version {VERSION}")
    if set(config) != KEYS:
        differ = f"missing {sorted(KEYS - set(config))}, unexpected {sorted(set(config) - KEYS)}"
        raise ValueError(f"{path} must have {sorted(KEYS)}; {differ}")
    for name, least in SIZES.items():
        Entries(config, str(path)).size(name, least=least)
    d, heads, longest = (config[name] for name in ("embedding_dim", "num_heads", "max_seq_len"))
    if d % 2 or d % heads:
        even = f"even and a multiple of num_heads, not {d} with num_heads {heads}"
        raise ValueError(f"{path}: embedding_dim must be {even}")
    if longest * d > MOST_POSITIONS:
        product = f"max_seq_len {longest} times embedding_dim {d}"
        raise ValueError(f"{path}: {product} is more than {MOST_POSITIONS}")
    for name, allowed in {"dtype": FLOATS, "tokenizer": (*TOKENIZERS, None)}.items():
        if config[name] not in allowed:
            known = ", ".join(filter(None, allowed))
            raise ValueError(f"{path}: {name} must be one of {known}, not {config[name]!r}")
    return config


def _shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    d = config["embedding_dim"]
    yield "embedding_layer.weight", (config["vocab_size"], d)
    for i in range(config["num_layers"]):
        for layer, weight in {"query": (d, d), "key": (d, d), "value": (d, d), "ln": (d,)}.items():
            yield f"attention_layers.{i}.{layer}.weight", weight
            yield f"attention_layers.{i}.{layer}.bias", (d,)


def _differences(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> list[str]:
    """List the differences between the parameters that a config describes and the arrays of a file."""
    if 8 * config["num_layers"] > len(weights) + 1000:  # too many to name
        layers = f"{folder / CONFIG} names {config['num_layers']} layers"
        raise ValueError(f"{layers}; {WEIGHTS} holds {len(weights)} arrays")
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
    """Return the kind of a tokenizer and its file, or None for a kind that no file can hold."""
    if isinstance(tokenizer, WhitespaceTokenizer):
        return "whitespace", (json.dumps(tokenizer.vocabulary, ensure_ascii=False) + "\n").encode()
    if hasattr(tokenizer, "serialized_model_proto"):
        return "sentencepiece", bytes(tokenizer.serialized_model_proto())
    if hasattr(tokenizer, "to_str") and hasattr(tokenizer, "encode_batch"):
        return "tokenizers", tokenizer.to_str().encode()
    return None, b""


def _tokens(kind: str | None, tokenizer: Any) -> int:
    """Return the number of tokens of a tokenizer of this kind; 0 if no file can hold the kind."""
    if kind == "whitespace":
        return int(tokenizer.vocab_size)
    if kind == "sentencepiece":
        return int(tokenizer.get_piece_size())
    return 0 if kind is None else int(tokenizer.get_vocab_size())


def _load_tokenizer(folder: Path, config: Mapping[str, Any]) -> Any:
    kind = config["tokenizer"]
    if kind is None:
        give = "give it to load_model(folder, tokenizer=...)"
        raise ValueError(f"the tokenizer of {folder} was of a kind that is not saved; {give}")
    path = folder / TOKENIZERS[kind]
    content = _disk.read(path, _disk.MOST_TOKENIZER_BYTES)
    if kind == "whitespace":
        vocabulary = _disk.parse_json(path, content)
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
        except (RuntimeError, TypeError, UnicodeDecodeError) as error:  # its message may be undecodable
            raise ValueError(f"{path} is not a SentencePiece model: {error}") from None
    else:
        tokenizer = _disk.parse_tokenizer(path, content, None)
    if (size := _tokens(kind, tokenizer)) > config["vocab_size"]:
        raise ValueError(f"{path} has {size} tokens, more than vocab_size {config['vocab_size']} in {CONFIG}")
    return tokenizer


# ------------------------------------------------------------------------------------------------------ arrays


def save_arrays(path: _disk.PathLike, arrays: Mapping[str, npt.ArrayLike]) -> None:
    """Save arrays by name as a safetensors file, such as the ``state_dict()`` of any module.

    Parameters
    ----------
    path : path
        An existing file is replaced once the new one is whole.
    arrays : mapping of str to array_like

    Raises
    ------
    OSError
        The file could not be written, and an old file is unchanged.
    TypeError
        An array has a dtype that safetensors does not have.
    ImportError
        ``safetensors`` is missing: ``pip install 'selfattn[text]'``.
    """
    path = Path(path)
    content = _disk.to_safetensors(arrays)
    if _disk.is_special(path):  # load_arrays could not read it
        raise OSError(errno.EINVAL, "not a regular file, which could be replaced", str(path))
    _disk.write_file(path, content)


def load_arrays(path: _disk.PathLike) -> dict[str, Array]:
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
        The file is truncated or damaged, or holds a dtype that NumPy does not have.
    ImportError
        ``safetensors`` is missing; or ``ml_dtypes`` has not been imported, and the file holds bfloat16.
    """
    return _disk.read_safetensors(Path(path))[0]
