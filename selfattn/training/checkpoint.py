"""Checkpoints: everything that the next step of a training depends on, in one safetensors file.

Arrays are in the file as they are, everything else as JSON in its header. A checkpoint replaces the one before in one
rename, so there is always a whole one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import _disk
from selfattn.nn.init import Generator
from selfattn.random import TorchGenerator

FORMAT = "selfattn.training checkpoint 1"


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a tree of dicts and lists whose leaves are arrays, numbers, texts and None."""
    tree, arrays = parts(state)
    _disk.write_file(path, _disk.to_safetensors(arrays, {"format": FORMAT, "tree": tree}))


def parts(state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Take the arrays out of a state; the rest is JSON.

    Raises
    ------
    TypeError
        A leaf is something that no file can hold.
    """
    arrays: dict[str, Any] = {}
    return json.dumps(_without_arrays(state, "", arrays)), arrays


def load(path: Path) -> dict[str, Any]:
    """Read what :func:`save` wrote; tuples come back as lists.

    Raises
    ------
    ValueError
        The file is damaged, or no checkpoint.
    """
    arrays, metadata = _disk.read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of selfattn's")
    try:
        tree = _with_arrays(json.loads(metadata["tree"]), arrays)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is a damaged checkpoint: {error!r}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is a damaged checkpoint: it holds no state")
    return tree


def is_checkpoint(path: Path) -> bool:
    """Tell what :func:`save` wrote from files of others."""
    try:
        return _disk.read_safetensors(path)[1].get("format") == FORMAT
    except (OSError, ValueError):
        return False


def _without_arrays(node: Any, name: str, arrays: dict[str, Any]) -> Any:
    if isinstance(node, np.ndarray):
        arrays[name] = node
        return {"array": name}
    if isinstance(node, np.generic):
        return node.item()
    if isinstance(node, Mapping):
        return {"dict": {key: _without_arrays(value, f"{name}/{key}", arrays) for key, value in node.items()}}
    if isinstance(node, list | tuple):
        return [_without_arrays(value, f"{name}/{i}", arrays) for i, value in enumerate(node)]
    return node


def _with_arrays(node: Any, arrays: Mapping[str, Any]) -> Any:
    if isinstance(node, list):
        return [_with_arrays(value, arrays) for value in node]
    if isinstance(node, dict):
        ((kind, content),) = node.items()
        if kind == "array":
            return arrays[content]
        return {key: _with_arrays(value, arrays) for key, value in content.items()}
    return node


def generators(rng: Generator, task: Any) -> list[Generator]:
    """Return the generators that training draws from: its own, and those in layers such as Dropout, each once."""
    found = [rng]
    for module in task.modules() if hasattr(task, "modules") else ():
        found += [
            each for each in vars(module).values() if isinstance(each, np.random.Generator | TorchGenerator)
        ]
    return list({id(generator): generator for generator in found}.values())


def generator_state(generator: Generator) -> Any:
    """Return what the next draws depend on, the cached normal of a torch_rng included."""
    return generator.get_state() if isinstance(generator, TorchGenerator) else generator.bit_generator.state


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set what :func:`generator_state` returned.

    Raises
    ------
    ValueError
        It is the state of a generator of another kind.
    """
    if isinstance(generator, TorchGenerator):
        generator.set_state(state)
        return
    kind = type(generator.bit_generator).__name__
    if not isinstance(state, dict) or state.get("bit_generator") != kind:
        kept = state.get("bit_generator", state.get("generator")) if isinstance(state, dict) else state
        raise ValueError(f"the checkpoint holds the state of a generator {kept}, rng is a {kind}")
    try:
        generator.bit_generator.state = state
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the state of the generator in the checkpoint is damaged: {error!r}") from None


def fingerprint(triplets: Iterable[Sequence[Any]]) -> str:
    """Return a digest of the sentences: a place in a permutation is one in these triplets only."""
    digest = hashlib.sha256()
    for triplet in triplets:
        for sentence in triplet:
            if isinstance(sentence, str):
                content = sentence.encode("utf-8", "surrogatepass")
            else:
                content = np.asarray(sentence, np.int64).tobytes()
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def digest(things: Any) -> str:
    """Return a digest of a nest of sequences, dicts, arrays, texts and numbers. Of another object its class alone counts."""
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, np.ndarray | np.generic):
            found.update(f"{thing.dtype}{np.shape(thing)}".encode())
            if thing.dtype.kind in "OT":  # memory holds addresses
                add(thing.tolist())
            else:
                found.update(np.ascontiguousarray(thing).tobytes())
        elif isinstance(thing, Mapping):
            found.update(f"dict {len(thing)}".encode())
            for key, value in thing.items():
                add(key)
                add(value)
        elif isinstance(thing, list | tuple):
            found.update(f"sequence {len(thing)}".encode())
            for each in thing:
                add(each)
        elif isinstance(thing, str | bytes | int | float | complex | None):
            found.update(f"{type(thing).__name__} {thing!r}".encode("utf-8", "surrogatepass"))
        else:
            found.update(type(thing).__name__.encode())

    add(things)
    return found.hexdigest()
