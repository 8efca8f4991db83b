"""sentence-transformers' names: its keywords in our words, and its functions of a classifier's logits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from selfattn._check import Array, check_size
from selfattn.models._pipeline import SENTENCE_CONFIG, Pipeline

# Our name for each of its keywords, and our default.
OURS = {
    "show_progress_bar": ("progress", False), "normalize_embeddings": ("normalize", None),
    "prompt_name": ("prompt", None),
}  # fmt: skip
ARRAYS = "results are NumPy arrays; torch.from_numpy(y) is a tensor in the memory of y"
PROCESSES = "one process computes on all CPUs, or on as many as selfattn.set_num_threads says"
# Keywords whose first values ask for what is done anyway, and the way to the others.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "convert_to_numpy": ((True,), ARRAYS), "convert_to_tensor": ((False,), ARRAYS),
    "device": ((None, "cpu"), "selfattn computes on the CPU"), "pool": ((None,), PROCESSES), "chunk_size": ((None,), PROCESSES),
    "output_value": (("sentence_embedding",), "hidden_states(text)[-1] has a row for each token of a text"),
    "precision": ((None, "float32"), "embeddings are float32; sentence_transformers.quantize_embeddings rounds them"),
}  # fmt: skip


def check_fixed(
    name: str, theirs: Mapping[str, Any], fixed: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    """Refuse values of keywords that ask for what is not done."""
    for key, (values, way) in fixed.items():
        if key in theirs and str(theirs[key]) not in map(str, values):
            raise ValueError(f"{name}() does not take {key}={theirs[key]!r:.80}: {way}")


def in_our_words(name: str, theirs: Mapping[str, Any], pipeline: Pipeline, **ours: Any) -> dict[str, Any]:
    """Return the arguments of a method, with sentence-transformers' keywords in our words, or refuse them."""
    check_fixed(name, theirs, FIXED)
    for key, value in theirs.items():
        own, default = OURS.get(key, (key, ours.get(key)))
        if key in FIXED or (own in ours and value is None):
            continue
        if own not in ours:
            raise TypeError(f"{name}() got an unexpected keyword argument {key!r}")
        if own != key and ours[own] is not default:
            raise TypeError(f"{name}() got both {own} and {key}; give one")
        ours[own] = pipeline.named(value) if key == "prompt_name" else default if value is False else value
    if ours.get("truncate_dim") is not None:
        check_size("truncate_dim", ours["truncate_dim"])
    return ours


def _sigmoid(x: Array) -> Array:
    y: Array = np.exp(-np.logaddexp(0, -x, dtype=x.dtype))  # 1 / (1 + exp(-x)) without overflow
    return y


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"Identity": lambda x: x, "Sigmoid": _sigmoid}


def folder_activation(config: Mapping[str, Any], pipeline: Pipeline, labels: int) -> str:
    """Return the name of the function that CrossEncoder applies to the logits of a folder by default."""
    settings = json.loads(pipeline.kept.get(SENTENCE_CONFIG, b"{}"))
    newer, older = config.get("sentence_transformers"), config.get("sbert_ce_default_activation_function")
    of_model = newer.get("activation_fn") if isinstance(newer, dict) else older
    return str(settings.get("activation_fn") or of_model or ("Sigmoid" if labels == 1 else "Identity"))


def activated(logits: Array, given: Any) -> Array:
    """Apply an activation to logits: a function of an array, or a name or module of PyTorch, if it is known here."""
    if isinstance(given, str) or type(given).__module__.startswith("torch."):
        name = given.rpartition(".")[2] if isinstance(given, str) else type(given).__name__
        if name not in ACTIVATIONS:
            known = f"supported are {', '.join(ACTIVATIONS)} and any function of a NumPy array"
            raise ValueError(f"activation_fn {name} is not supported; {known}")
        given = ACTIVATIONS[name]
    y: Array = np.asarray(given(logits))
    if y.shape != logits.shape:
        raise ValueError(f"activation_fn must keep the shape {logits.shape}; it returned {y.shape}")
    return y
