"""sentence-transformers' keywords, by our names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfattn_models._pipeline import Pipeline

# Our name for each of its keywords, and our default.
OURS = {
    "show_progress_bar": ("progress", False),
    "normalize_embeddings": ("normalize", None),
    "prompt_name": ("prompt", None),
}
ARRAYS = "results are NumPy arrays; torch.from_numpy(y) is a tensor in the memory of y"
PROCESSES = "one process computes on all CPUs, or on as many as selfattn.set_num_threads says"
# Keywords whose first values ask for what is done anyway, and the way to the others.
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "convert_to_numpy": ((True,), ARRAYS),
    "convert_to_tensor": ((False,), ARRAYS),
    "device": ((None, "cpu"), "selfattn computes on the CPU"),
    "pool": ((None,), PROCESSES),
    "chunk_size": ((None,), PROCESSES),
    "output_value": (("sentence_embedding",), "hidden_states(text)[-1] has a row for each token of a text"),
    "precision": (
        (None, "float32"),
        "embeddings are float32; sentence_transformers.quantize_embeddings rounds them",
    ),
}


def check_fixed(
    name: str, theirs: Mapping[str, Any], fixed: Mapping[str, tuple[tuple[Any, ...], str]]
) -> None:
    """Refuse values of keywords that ask for what is not done."""
    for key, (values, way) in fixed.items():
        if key in theirs and str(theirs[key]) not in map(str, values):
            raise ValueError(f"{name}() does not take {key}={theirs[key]!r:.80}: {way}")


def rename_arguments(name: str, theirs: Mapping[str, Any], pipeline: Pipeline, **ours: Any) -> dict[str, Any]:
    """Return the arguments of a method, with sentence-transformers' keywords by our names, or refuse them."""
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
    return ours
