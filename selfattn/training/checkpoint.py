"""Checkpoints: everything that the next step of a training depends on, in one safetensors file.

Its header has everything but the arrays, as JSON. A new checkpoint replaces the old one in one rename, so there is
always a whole one.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import _disk
from selfattn._check import warn
from selfattn.nn.module import arrays_of
from selfattn.training.generators import generator_state, generators, set_generator_state
from selfattn.training.state import TrainingState

FORMAT = "selfattn.training checkpoint 2"
WITHOUT_DIGEST = "selfattn.training checkpoint 1"  # of checkouts before this one


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a tree of dicts and lists whose leaves are arrays, numbers, texts and None."""
    tree, arrays = parts(state)
    metadata = {"format": FORMAT, "tree": tree, "digest": _digest_of_parts(tree, arrays)}
    _disk.write_file(path, _disk.to_safetensors(arrays, metadata))


def parts(state: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split a state into JSON and arrays; a leaf that cannot be saved is a TypeError."""
    arrays: dict[str, Any] = {}
    return json.dumps(_without_arrays(state, "", arrays)), arrays


def load(path: Path) -> dict[str, Any]:
    """Read a file that :func:`save` wrote, with lists in place of tuples; a damaged or other file is a ValueError."""
    arrays, metadata = _disk.read_safetensors(path)
    if metadata.get("format") == WITHOUT_DIGEST:
        warn(
            f"{path} was written by an older selfattn, without a checksum, so damage to its numbers is not seen"
        )
    elif metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is no checkpoint of selfattn's")
    elif metadata.get("digest") != _digest_of_parts(metadata.get("tree", ""), arrays):
        raise ValueError(
            f"{path} is a damaged checkpoint: its content does not have the checksum it was written with"
        )
    try:
        tree = _with_arrays(json.loads(metadata["tree"]), arrays)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is a damaged checkpoint: {error!r}") from None
    if not isinstance(tree, dict):
        raise ValueError(f"{path} is a damaged checkpoint: it holds no state")
    return tree


def _digest_of_parts(tree: str, arrays: Mapping[str, Any]) -> str:
    return digest([tree, dict(sorted(arrays.items()))])


def is_checkpoint(path: Path) -> bool:
    """Return whether :func:`save` wrote a file."""
    try:
        return _disk.read_safetensors(path)[1].get("format") in {FORMAT, WITHOUT_DIGEST}
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


def state_of(training: TrainingState) -> dict[str, Any]:
    """Return the state of a training between two steps."""
    history, source, scheduler = training.history, training.source, training.scheduler
    drawn = generators(training.generator, training.model)
    return {
        "fixed": training.fixed,
        "parameters": arrays_of(training.model),
        "optimizer": training.optimizer.state_dict(),
        "generators": [generator_state(each) for each in drawn],
        "place": [training.epoch, source.done, source.order, training.total_loss, training.total_count],
        "step_losses": np.array(history.step_losses, np.float64),
        "epoch_losses": np.array(history.epoch_losses, np.float64),
        "validation_losses": np.array(history.validation_losses, np.float64).reshape(-1, 2),
        **({} if scheduler is None else {"scheduler": scheduler.state_dict()}),
        **({} if training.best is None else {"best": training.best}),
        "evaluations": np.array(history.evaluations, np.float64).reshape(-1, 2),
    }


def restore(training: TrainingState, path: Path) -> None:
    """Check that all of a checkpoint fits a training, then set the training's state from it."""
    state = load(path)
    try:
        _compare("", training.fixed, state["fixed"])
        parameters, saved = arrays_of(training.model), state["parameters"]
        _compare("shapes of ", _shapes(parameters), _shapes(saved))
        epoch, done, order, total_loss, *count = state["place"]
        (total_count,) = count or [float(done)]  # an older selfattn counted items
        if type(epoch) is not int or epoch < 0 or {type(total_loss), type(total_count)} != {float}:
            raise ValueError(f"its place is epoch {epoch!r} with a loss of {total_loss!r}")
        drawn, states = generators(training.generator, training.model), state["generators"]
        if len(states) != len(drawn):
            raise ValueError(f"it has {len(states)} generators, this training {len(drawn)}")
        steps, epochs = _losses(state["step_losses"], 1), _losses(state["epoch_losses"], 1)
        validations, evaluations = (
            [(int(n), number) for n, number in _losses(state[name], 2)]
            for name in ("validation_losses", "evaluations")
        )
        best = state.get("best")
        if best is not None:
            _compare("shapes of the best ", _shapes(parameters), _shapes(best))
        for generator, own in zip(drawn, states, strict=True):
            set_generator_state(copy.deepcopy(generator), own)  # raises if the state does not fit
        # Copies are tried first, so that nothing has changed if a later part does not fit.
        copy.copy(training.source).restore(done, order)
        copy.copy(training.optimizer).load_state_dict(state["optimizer"])
        if training.scheduler is not None:
            training.scheduler.load_state_dict(state["scheduler"])  # checks, then sets
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{error!r}" if isinstance(error, KeyError | AttributeError) else str(error)
        raise ValueError(f"{path} does not fit this training: {reason}") from error
    training.source.restore(done, order)
    training.optimizer.load_state_dict(state["optimizer"])
    for generator, own in zip(drawn, states, strict=True):
        set_generator_state(generator, own)
    for name, array in parameters.items():
        array[...] = saved[name]
    training.epoch, training.best = epoch, best
    training.total_loss, training.total_count = total_loss, total_count
    training.history = type(training.history)(steps, epochs, validations, evaluations)


def _losses(saved: Any, ndim: int) -> list[Any]:
    if not isinstance(saved, np.ndarray) or (saved.ndim, saved.dtype) != (ndim, np.float64):
        raise ValueError(f"it has losses of another shape or dtype: {saved!r:.80}")
    return list(saved.tolist())


def _compare(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{what}{name}: {found.get(name)} in the checkpoint, {expected.get(name)} in this training"
            )


def _shapes(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{array.shape} of {array.dtype}" for name, array in arrays.items()}


def fingerprint(triplets: Iterable[Sequence[Any]]) -> str:
    """Return a digest of the sentences of triplets."""
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
    """Return a digest of nested sequences, dicts, arrays, texts and numbers.

    Any other object counts only by its class.
    """
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, np.ndarray | np.generic):
            found.update(f"{thing.dtype}{np.shape(thing)}".encode())
            if thing.dtype.kind in "OT":  # the memory of such arrays holds addresses
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
