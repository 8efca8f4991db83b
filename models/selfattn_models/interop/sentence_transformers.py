"""sentence-transformers' classes for a folder: its names, order of arguments and defaults, without PyTorch.

>>> from selfattn_models.interop.sentence_transformers import SentenceTransformer
>>> model = SentenceTransformer("all-MiniLM-L6-v2")  # doctest: +SKIP
>>> model.encode(["a storm at sea", "the sea was calm"]).shape  # doctest: +SKIP
(2, 384)
"""

from __future__ import annotations

import copy
import os
import sys
from inspect import Parameter, Signature
from typing import Any

import numpy as np

from selfattn_models import _keywords
from selfattn_models._classifier import TextClassifier, folder_activation
from selfattn_models._encoders import with_settings
from selfattn_models._pipeline import change_settings
from selfattn_models._text_encoder import TextEncoder
from selfattn_models.loading import no_model

__all__ = ["CrossEncoder", "SentenceTransformer"]

HUB = "a folder is loaded, nothing is fetched"
LOADED = "models.load(folder, dtype=…) gives a model to pass instead"
# Keywords of constructors: the values that ask for what is done anyway, and the way to the others.
FIXED = {
    "device": _keywords.FIXED["device"],
    "backend": (("torch",), LOADED),
    "local_files_only": ((False, True), HUB),
    "trust_remote_code": ((False,), "no code of a folder is run"),
    **dict.fromkeys(("cache_folder", "revision", "token"), ((None,), HUB)),
    **dict.fromkeys(("modules", "model_kwargs", "processor_kwargs", "config_kwargs"), ((None,), LOADED)),
}
# Attributes that are settings of the folder, by their names in its pipeline.
SETTINGS = {
    "prompts": "prompts",
    "default_prompt_name": "default_prompt_name",
    "similarity_fn_name": "similarity",
    "truncate_dim": "truncate_dim",
}


def _method(name: str, order: str) -> Any:
    """Return a method that takes its arguments in sentence-transformers' order, for the model's of the same name."""
    signature = Signature([Parameter(each, Parameter.POSITIONAL_OR_KEYWORD) for each in order.split()])

    def method(self: _Model, *inputs: Any, **theirs: Any) -> Any:
        if "sentences" in theirs:  # the older name
            theirs["inputs"] = theirs.pop("sentences")
        given = signature.bind_partial(*inputs, **theirs).arguments
        if (prompt := given.get("prompt")) is not None and prompt in self.prompts:
            raise ValueError(f"prompt={prompt!r} is the name of a prompt; prompt_name= takes its text")
        if name == "encode_document" and given.get("prompt") is None is given.get("prompt_name"):
            given["prompt"] = (
                "document" if "document" in self.prompts else ""
            )  # its numbers, not what its docs say
        if "inputs" in given:
            given["sentences"] = _pairs(given.pop("inputs")) if name == "predict" else given.pop("inputs")
        if "activation_fn" in signature.parameters and given.get("activation_fn") is None:
            given["activation_fn"] = self.activation_fn
        as_tensor, as_array = given.pop("convert_to_tensor", False), given.pop("convert_to_numpy", True)
        if name == "rank" or ("torch" not in sys.modules and (as_tensor or not as_array)):
            given |= {
                "convert_to_tensor": as_tensor,
                "convert_to_numpy": as_array,
            }  # refused, unless the default
        found = getattr(self.model, name)(**given)
        if name == "rank" or not (as_tensor or not as_array):
            return found
        found = sys.modules["torch"].from_numpy(np.asarray(found))
        return found if as_tensor or found.ndim < 2 else list(found)

    method.__name__, method.__doc__ = name, f"Call ``model.{name}`` with: {', '.join(order.split())}."
    return method


def _comparison(name: str) -> Any:
    """Return a method of two embeddings: a tensor where one is given, or sentence-transformers' tools are in use."""

    def method(self: _Model, embeddings1: Any, embeddings2: Any) -> Any:
        torch = sys.modules.get("torch")
        tensors = torch is not None and any(isinstance(x, torch.Tensor) for x in (embeddings1, embeddings2))
        arrays = (x.detach() if hasattr(x, "detach") else x for x in (embeddings1, embeddings2))
        found = getattr(self.model, name)(*map(_stacked, arrays))
        if torch is not None and (tensors or "sentence_transformers" in sys.modules):
            return torch.from_numpy(np.asarray(found))
        return found

    method.__name__, method.__doc__ = name, f"Call ``model.{name}`` with two arrays or tensors of embeddings."
    return method


def _stacked(embeddings: Any) -> Any:
    """Return embeddings as one array; sentence-transformers' may be a list of tensors."""
    is_list = isinstance(embeddings, list) and bool(embeddings) and hasattr(embeddings[0], "detach")
    return np.stack([np.asarray(x.detach()) for x in embeddings]) if is_list else np.asarray(embeddings)


def _pairs(inputs: Any) -> Any:
    """Return pairs as the model takes them: a list of two texts is one pair in sentence-transformers."""
    inputs = inputs.tolist() if isinstance(inputs, np.ndarray) else inputs
    return tuple(inputs) if isinstance(inputs, list) and inputs and isinstance(inputs[0], str) else inputs


class ModelCardData:
    """What sentence-transformers' tools note in a model's card: it takes all, and has nothing."""

    def set_evaluation_metrics(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Model:
    """What both classes share. Other attributes and methods are those of ``model``, which ``models.load`` returned."""

    owner: str  # on the hub, of models that are named without one
    device = "cpu"
    model_card_data = ModelCardData()

    def __init__(
        self, given: Any, theirs: dict[str, Any], prompts: dict[str, str] | None, **settings: Any
    ) -> None:
        name = type(self).__name__
        _keywords.check_fixed(name, theirs, FIXED)
        if unknown := sorted(theirs.keys() - FIXED.keys()):
            raise TypeError(f"{name}() got an unexpected keyword argument {unknown[0]!r}")
        if isinstance(given, str | os.PathLike) and not os.path.exists(given):
            raise no_model(given, self.owner)
        self.model = with_settings(given, name, prompts, **settings)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """sentence-transformers' class where that is imported: KeyBERT and MTEB take its instances alone."""
        kind = type(self)
        return getattr(sys.modules.get("sentence_transformers"), kind.__name__, kind)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _made, (type(self), vars(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":  # a copy in the making has no model yet
            raise AttributeError(name)
        if name in SETTINGS:
            return getattr(self.model.pipeline, SETTINGS[name])
        if not hasattr(self.model, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTINGS:
            change_settings(self.model.pipeline, type(self).__name__, {name: value})
        elif name in ("model", "activation_fn", "model_card_data"):
            super().__setattr__(name, value)
        else:
            if name == "max_seq_length":  # a setting of the tokenizer, which is that of the given model
                self.model.tokenizer = copy.deepcopy(self.model.tokenizer)
            setattr(self.model, name, value)


def _made(kind: type, attributes: dict[str, Any]) -> Any:
    """Make a copy."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


class SentenceTransformer(_Model):
    """An encoder, from a folder or one that ``models.load`` returned; ``prompts`` are added to the folder's."""

    owner = "sentence-transformers"
    _ORDER = """inputs prompt_name prompt batch_size show_progress_bar output_value precision convert_to_numpy
    convert_to_tensor device normalize_embeddings truncate_dim pool chunk_size"""
    encode = _method("encode", _ORDER)
    encode_query, encode_document = _method("encode_query", _ORDER), _method("encode_document", _ORDER)
    similarity, similarity_pairwise = _comparison("similarity"), _comparison("similarity_pairwise")

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | TextEncoder,
        *,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: str | None = None,
        truncate_dim: int | None = None,
        **theirs: Any,
    ) -> None:
        super().__init__(
            model_name_or_path,
            theirs,
            prompts,
            default_prompt_name=default_prompt_name,
            similarity_fn_name=similarity_fn_name,
            truncate_dim=truncate_dim,
        )


class CrossEncoder(_Model):
    """A classifier of pairs, from a folder or ``models.load``.

    ``activation_fn`` of its logits is the folder's by default.
    """

    owner = "cross-encoder"
    _ORDER = "prompt_name prompt batch_size show_progress_bar activation_fn"
    _REST = "convert_to_numpy convert_to_tensor device pool chunk_size"
    _predict = _method("predict", f"inputs {_ORDER} apply_softmax {_REST}")
    rank = _method("rank", f"query documents top_k return_documents {_ORDER} {_REST}")

    def __init__(
        self,
        model_name_or_path: str | os.PathLike[str] | TextEncoder,
        *,
        prompts: dict[str, str] | None = None,
        default_prompt_name: str | None = None,
        num_labels: int | None = None,
        max_length: int | None = None,
        activation_fn: Any = None,
        **theirs: Any,
    ) -> None:
        super().__init__(model_name_or_path, theirs, prompts, default_prompt_name=default_prompt_name)
        if not isinstance(self.model, TextClassifier):
            self.model.predict(())  # an error that says what has one
        of_folder = folder_activation(self.config, self.pipeline, self.num_labels)
        self.activation_fn = activation_fn or of_folder
        if num_labels not in (None, self.num_labels):
            raise ValueError(f"num_labels is {num_labels}, and the folder's classifier has {self.num_labels}")
        if max_length is not None:
            self.max_seq_length = max_length

    def predict(self, *inputs: Any, **theirs: Any) -> Any:
        """Compute scores, (n,) for one label or (n, labels), or one pair's; the arguments are those of ``_predict``."""
        y = self._predict(*inputs, **theirs)
        return y[..., 0][()] if self.num_labels == 1 else y
