"""Pretrained models: encoders and language models, from folders as Transformers and sentence-transformers write them.

>>> from selfattn import models
>>> model = models.load("./all-MiniLM-L6-v2")  # doctest: +SKIP
>>> model.encode(["a storm at sea", "the sea was calm"]).shape  # doctest: +SKIP
(2, 384)

What is supported: BERT (MiniLM, BGE, E5, GTE), RoBERTa, XLM-R, DistilBERT, MPNet and ModernBERT; sequence classifiers and
cross-encoders on BERT, RoBERTa and DistilBERT; ViT and DINOv2; the language models GPT-2, Llama, Mistral and Qwen2. Anything in a configuration that would change results and is
not understood is an error. Needs ``pip install 'selfattn[models]'``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from selfattn import files
from selfattn._disk import read_json, to_safetensors, write_files
from selfattn.engine.weights import is_compact
from selfattn.models._answers import AnswerInterrupted
from selfattn.models._causal import CausalModel
from selfattn.models._config import quantization_config, read_config
from selfattn.models._gguf import begins_as_gguf
from selfattn.models._gguf_model import load_gguf
from selfattn.models._language import attach_language, language_files
from selfattn.models._pipeline import MODULES, pools, transformer_folder
from selfattn.models._pretrained import Pretrained
from selfattn.models._text_encoder import TextEncoder, attach, text_files
from selfattn.models._tokenizer import check_vocabulary
from selfattn.models._weights import INDEX, read_weights
from selfattn.models.bert import (
    BertForSequenceClassification,
    BertModel,
    DistilBertForSequenceClassification,
    DistilBertModel,
    MPNetModel,
    RobertaForSequenceClassification,
    RobertaModel,
)
from selfattn.models.gpt2 import GPT2LMHeadModel
from selfattn.models.llama import LlamaForCausalLM
from selfattn.models.modernbert import ModernBertModel
from selfattn.models.vit import ViTModel

__all__ = [
    "AnswerInterrupted",
    "BertForSequenceClassification",
    "BertModel",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "GPT2LMHeadModel",
    "LlamaForCausalLM",
    "MPNetModel",
    "ModernBertModel",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "ViTModel",
    "load",
    "save",
]


def _by_kind(*classes: type[Pretrained]) -> dict[str, type[Pretrained]]:
    return {kind: each for each in classes for kind in each.kinds}


MODELS = _by_kind(
    BertModel,
    RobertaModel,
    DistilBertModel,
    MPNetModel,
    ModernBertModel,
    ViTModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
)
CLASSIFIERS = _by_kind(
    BertForSequenceClassification, RobertaForSequenceClassification, DistilBertForSequenceClassification
)

# What another model may have left in a folder, and would change what is loaded from it.
STALE = {
    INDEX, "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja",
}  # fmt: skip


def load(path: str | os.PathLike[str], dtype: str | None = None) -> Any:
    """Load a pretrained model from a folder, or a language model from a GGUF file.

    Parameters
    ----------
    path : path
        A folder with ``config.json`` and ``model.safetensors`` (or its shards), and for texts ``tokenizer.json``; or a
        folder of sentence-transformers, with ``modules.json``; or one of :func:`selfattn.files.save_model`, as ``selfattn train``
        makes it; or a ``.gguf`` file of the architecture llama, qwen2 or gpt2.
    dtype : {"float32", "bfloat16", "int8"}, optional
        What the weights of layers and the table of words become; see ``quantize`` of the model. None: as they are stored,
        but 16-bit weights of a folder become float32. A folder of int8 becomes float32 again if that is asked for, and so
        does a GGUF file, whose weights are otherwise multiplied as they are stored, in blocks of 4 to 16 bits a number.

    Returns
    -------
    BertModel, RobertaModel, DistilBertModel, MPNetModel, ModernBertModel, ViTModel, a classifier, GPT2LMHeadModel, LlamaForCausalLM or EmbeddingModel
        Its weights are mapped from the file, not copied: the file must stay as it is.

    Raises
    ------
    FileNotFoundError
        The folder or one of its files is missing, or its weights are a pickle.
    ValueError
        The files are damaged or do not fit each other, the configuration asks for something that is not supported, or an
        EmbeddingModel was to be rounded; the message names it.
    RuntimeError
        ``dtype="bfloat16"``, and the CPU has no products of it.
    ImportError
        ``safetensors`` or ``tokenizers`` is missing: ``pip install 'selfattn[models]'``.
    """
    folder = Path(path)
    is_gguf = folder.is_file() and (folder.suffix.lower() == ".gguf" or begins_as_gguf(folder))
    if not folder.is_dir() and not is_gguf:
        raise FileNotFoundError(
            f"{folder} is not a folder; expected one that save_pretrained or sentence-transformers wrote, or a .gguf file"
        )
    if dtype not in (None, "float32", "bfloat16", "int8"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16', 'int8' or None, not {dtype!r}")
    if is_gguf:
        return load_gguf(folder, dtype)
    if not (folder / MODULES).exists() and files.is_model(folder):
        if dtype not in (None, "float32"):
            raise ValueError(f"{folder} is no pretrained model; only these are rounded to {dtype}")
        return files.load_model(folder)
    transformer = transformer_folder(folder)
    config = read_config(transformer)
    kind = config["model_type"]
    architectures = config.get("architectures") or []
    classifies = any("ForSequenceClassification" in name for name in architectures) and not pools(folder)
    table = CLASSIFIERS if classifies else MODELS
    if kind not in table:
        what = "a sequence classifier" if table is CLASSIFIERS else "a model"
        raise ValueError(
            f"{transformer / 'config.json'} describes {what} of type {kind!r}; supported are {', '.join(table)}"
        )
    arrays = read_weights(transformer, keep_bfloat16=dtype == "bfloat16")
    model = table[kind](config, arrays, where=str(transformer), dtype=dtype)
    if isinstance(model, TextEncoder):
        attach(model, folder)
    elif isinstance(model, CausalModel):
        attach_language(model, folder)
    return model


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Save a model as a folder that :func:`load`, Transformers and sentence-transformers load.

    Parameters
    ----------
    model : a model of this module
    path : path
        Made if need be. A model that is there is replaced, with the tokenizer and settings beside it; other files stay.

    Raises
    ------
    TypeError
        It is no model of this module.
    ValueError
        Its weights are in blocks of a GGUF file, or it is GPT-2 in int8; or its tokenizer has got more tokens than it has rows for.
    OSError
        It could not be written; what was there before is as it was.
    """
    if isinstance(model, Pretrained) and model.blocks:
        raise ValueError(
            "this model's weights are in blocks of GGUF, which a folder does not hold; load the file with dtype='float32' to save it"
        )
    if not isinstance(model, Pretrained):
        raise TypeError(
            f"model must be one of selfattn.models, not {type(model).__name__}; files.save_model saves an EmbeddingModel"
        )
    if isinstance(model, GPT2LMHeadModel) and model.dtype == "int8":
        raise ValueError(
            "GPT-2 is not saved in int8; save it as it was loaded, and round it when it is: load(path, dtype='int8')"
        )
    folder = Path(path)
    if isinstance(model, TextEncoder | CausalModel) and model.tokenizer is not None:
        check_vocabulary(model.tokenizer, model.vocab_size, folder)  # or the folder could not be loaded
    state = model.state_dict()
    compact = [name for name, array in state.items() if is_compact(array)]
    bfloat16 = compact if model.dtype == "bfloat16" else []
    content = {"model.safetensors": to_safetensors(state, {"format": "pt"}, bfloat16)}
    config = dict(model.config)
    if model.dtype == "int8":
        matrices = [name for name, array in state.items() if array.ndim == 2 and name.endswith(".weight")]
        tables = [name.removesuffix(".weight") for name in compact if "embed" in name]
        whole = [name.removesuffix(".weight") for name in matrices if name not in compact]
        config["quantization_config"] = quantization_config(tables, whole)
    config["architectures"] = [model.kinds[config["model_type"]] + model.suffix]
    if isinstance(model, TextEncoder):
        content |= text_files(model)
    elif isinstance(model, CausalModel):
        content |= language_files(model)
    content["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    places = dict.fromkeys((folder / name).parent for name in content)
    made = [place for place in places if not place.exists()]
    replaced = _holds_model(folder)
    try:
        for place in made:
            place.mkdir(parents=True, exist_ok=True)
        write_files(folder, content)
    except BaseException:
        for place in sorted(made, reverse=True):  # those below first
            if place.is_dir():
                place.rmdir()
        raise
    for stale in (STALE if replaced else {INDEX}) - set(content):
        (folder / stale).unlink(missing_ok=True)


def _holds_model(folder: Path) -> bool:
    """Tell a folder that a model was saved in from one with, say, a tokenizer of the user's own."""
    if (folder / "config.json").exists():
        return True
    try:
        modules = read_json(folder / "modules.json")
    except (OSError, ValueError):
        return False
    return isinstance(modules, list) and all(isinstance(each, dict) and "type" in each for each in modules)
