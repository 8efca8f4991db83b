"""`load` and `save`: which class a folder or file is, and how a model becomes a folder again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from selfattn import files
from selfattn.engine import disk, one_of
from selfattn.engine.weights import is_compact
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.gpt import GPT
from selfattn_models import _text_encoder, _text_files
from selfattn_models._causal import CausalModel, Conversation
from selfattn_models._classifier import CLASSIFIER
from selfattn_models._folder import INDEX, one_warning, quantization_config, read_config, read_weights
from selfattn_models._generation import Answer, AnswerInterrupted
from selfattn_models._gguf import load_gguf
from selfattn_models._gguf_file import begins_as_gguf
from selfattn_models._known_settings import FolderWarning
from selfattn_models._language_model import PRECISIONS
from selfattn_models._pipeline import MODULES, OLD_TRANSFORMER_CONFIGS, pools, transformer_folder
from selfattn_models._pretrained import Pretrained
from selfattn_models._text_encoder import TextEncoder
from selfattn_models._tokenizer import check_vocabulary, readable
from selfattn_models.bert import (
    BertForSequenceClassification,
    BertModel,
    DistilBertForSequenceClassification,
    DistilBertModel,
    MPNetModel,
    RobertaForSequenceClassification,
    RobertaModel,
)
from selfattn_models.gemma3 import Gemma3ForCausalLM, Gemma3TextModel
from selfattn_models.gpt2 import GPT2LMHeadModel, as_gpt2
from selfattn_models.llama import LlamaForCausalLM, LlamaModel
from selfattn_models.modernbert import ModernBertModel
from selfattn_models.phi3 import Phi3ForCausalLM
from selfattn_models.qwen3 import Qwen3ForCausalLM, Qwen3Model
from selfattn_models.smollm3 import SmolLM3ForCausalLM
from selfattn_models.vit import ViTModel

__all__ = [
    "Answer",
    "AnswerInterrupted",
    "BertForSequenceClassification",
    "BertModel",
    "Conversation",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "FolderWarning",
    "GPT2LMHeadModel",
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    "LlamaForCausalLM",
    "LlamaModel",
    "MPNetModel",
    "ModernBertModel",
    "Phi3ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "SmolLM3ForCausalLM",
    "ViTModel",
    "load",
    "save",
]


CLASSES: tuple[type[Pretrained], ...] = (
    BertModel,
    RobertaModel,
    DistilBertModel,
    MPNetModel,
    ModernBertModel,
    ViTModel,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
    Gemma3ForCausalLM,
    SmolLM3ForCausalLM,
    Phi3ForCausalLM,
    BertForSequenceClassification,
    RobertaForSequenceClassification,
    DistilBertForSequenceClassification,
)
MODELS, CLASSIFIERS = (
    {kind: each for each in CLASSES for kind in each.kinds if (each.suffix == CLASSIFIER) is classifies}
    for classifies in (False, True)
)
# Decoders that make embeddings, where a folder says so.
EMBEDDERS = {kind: each for each in (LlamaModel, Qwen3Model, Gemma3TextModel) for kind in each.kinds}

# Files that another model may have left in a folder and that would change the model that is loaded from it.
STALE = {
    INDEX,
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    *OLD_TRANSFORMER_CONFIGS,
    "added_tokens.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
}


def no_model(path: str | os.PathLike[str], owner: str | None = None) -> FileNotFoundError:
    """Return the error for what is no model's folder, with the line that fetches one.

    On the hub it has the path as its name, after that of its ``owner`` if the path names none.
    """
    given, hub = str(path), "NAME"
    if not given.startswith(("/", ".", "~")):
        hub = given if given.count("/") == 1 else f"{owner}/{given}" if owner and "/" not in given else hub
    what = "is not a folder" if os.path.exists(path) else "does not exist"
    expected = "a folder that save_pretrained or sentence-transformers wrote, or a .gguf file"
    fetched = f"hf download {hub} --local-dir {path} fetches a folder"
    return FileNotFoundError(f"{Path(path)} {what}; expected {expected} ({fetched})")


def load(
    path: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    precision: str = "float32",
    cache_dtype: str | None = None,
) -> Any:
    """Load a pretrained model from a folder, or a language model from a GGUF file.

    Parameters
    ----------
    path : path
        A folder with ``config.json`` and ``model.safetensors`` (or its shards), and for texts ``tokenizer.json``; or a
        folder of sentence-transformers, with ``modules.json``; or one of :func:`selfattn.files.save_model`, as
        ``selfattn train`` makes it; or a ``.gguf`` file of the architecture llama, qwen2, qwen3, gemma3, smollm3,
        phi3 or gpt2.
    dtype : {"float32", "bfloat16", "int8"}, optional
        The dtype to which the weights of layers and the table of words are rounded; see ``quantize`` of the model.
        None keeps them as they are stored, but 16-bit weights of a folder become float32; a GGUF file's quants of 4
        to 16 bits are multiplied as they are stored. With any dtype, stored int8 weights and quants become float32
        before they are rounded.
    precision : {"float32", "int16", "int8"}, default "float32"
        The numbers to which rows of prompts are rounded where they multiply quants; a token of an answer is always
        computed to float32's precision. ``"int8"`` is what llama.cpp does, and fastest: each 32 numbers of a row
        become integers from −127 to 127. With ``"int16"`` they are from −32639 to 32639. With all three a sequence
        has the same bits alone and in a batch. Weights of 16 or 32 bits multiply float32. ``model.set_precision``
        changes it.
    cache_dtype : {"float32", "float16", "bfloat16"}, optional
        How a language model keeps keys and values while it generates tokens: its attribute of the same name. None is
        "float32".

    Returns
    -------
    BertModel, RobertaModel, DistilBertModel, MPNetModel, ModernBertModel, ViTModel, a classifier, a language model or
    EmbeddingModel
        A decoder whose folder has ``modules.json``, or names a bare model such as ``Qwen3Model``, is an encoder:
        LlamaModel, Qwen3Model or Gemma3TextModel. The weights of a GGUF file are mapped, and the file must not
        change; loading also copies quants.

    Raises
    ------
    FileNotFoundError
        The folder or one of its files is missing, or its weights are a pickle.
    ValueError
        The files are damaged or do not fit each other, the configuration needs something that is not supported, or an
        EmbeddingModel was to be rounded, ``precision`` is not "float32" and the weights are not quants, or
        ``cache_dtype`` is of no language model or is not one of its names; the message names it.
    RuntimeError
        ``dtype="bfloat16"`` on a CPU that cannot multiply it.
    ImportError
        ``safetensors`` or ``tokenizers`` is not installed.

    Warns
    -----
    FolderWarning
        The files have settings that are not known here; the warning names them.
    """
    folder = Path(path)
    if folder.is_file() and (what := disk.stand_in(folder)):
        raise ValueError(f"{folder} is no model{what}")
    is_gguf = folder.is_file() and (folder.suffix.lower() == ".gguf" or begins_as_gguf(folder))
    if not folder.is_dir() and not is_gguf:
        raise no_model(path)
    if dtype not in (None, "float32", "bfloat16", "int8"):
        raise ValueError(f"dtype must be 'float32', 'bfloat16', 'int8' or None, not {dtype!r}")
    one_of("precision", precision, PRECISIONS)
    with one_warning(str(folder)):
        if is_gguf:
            with disk.fitting(folder):
                model = load_gguf(folder, dtype)
        else:
            model = _load(folder, dtype)
    if isinstance(model, CausalModel):
        model.set_precision(precision)
        if cache_dtype is not None:
            model.cache_dtype = cache_dtype
    elif cache_dtype is not None:
        raise ValueError(f"cache_dtype={cache_dtype!r} is for language models; {folder} holds another model")
    elif precision != "float32":
        raise ValueError(f"precision={precision!r} is for weights in quants; {folder} has none")
    return model


def _load(folder: Path, dtype: str | None) -> Any:
    if not os.path.lexists(folder / MODULES) and files.is_model(folder):
        if dtype not in (None, "float32"):
            raise ValueError(f"{folder} is not a pretrained model; only these are rounded to {dtype}")
        return files.load_model(folder)
    transformer = transformer_folder(folder)
    config = read_config(transformer)
    kind = _class(folder, config, str(transformer / "config.json"))
    arrays = read_weights(transformer, keep_bfloat16=dtype == "bfloat16")
    model = kind(config, arrays, where=str(transformer), dtype=dtype)
    if isinstance(model, TextEncoder):
        _text_encoder.attach(model, folder)
    elif isinstance(model, CausalModel):
        _text_files.attach(model, folder)
    return model


def _class(folder: Path, config: dict[str, Any], where: str) -> type[Pretrained]:
    """Return the class for a folder.

    The files of sentence-transformers or the name of a bare model make an encoder of a decoder.
    """
    kind, names = config["model_type"], config.get("architectures") or []
    has_modules = os.path.lexists(folder / MODULES)
    classifies = any(CLASSIFIER in name for name in names) and not pools(folder)
    table = CLASSIFIERS if classifies else MODELS
    if kind not in table:
        what = f"{'a sequence classifier' if classifies else 'a model'} of type {kind!r}"
        raise ValueError(f"{where} describes {what}; supported are {', '.join(table)}")
    encoder = EMBEDDERS.get(kind)
    if has_modules and issubclass(table[kind], CausalModel) and encoder is None:
        what = f"{folder / MODULES} makes embeddings or scores with a decoder, {kind}, which is not supported"
        raise ValueError(f"{what}; supported are {', '.join(EMBEDDERS)}, and encoders such as bert")
    bare = encoder is not None and names[:1] == [encoder.kinds[kind] + encoder.suffix]
    return encoder if encoder is not None and (has_modules or bare) else table[kind]


def save(model: Any, path: str | os.PathLike[str], tokenizer: Any = None) -> None:
    """Save a model as a folder that :func:`load`, Transformers and sentence-transformers load.

    Parameters
    ----------
    model : a model of this module, selfattn.nn.GPT, or selfattn.nn.EmbeddingModel
        A GPT with learned positions, norms first and biases is saved as the GPT-2 that it is, in float32. An
        EmbeddingModel is saved by :func:`selfattn.files.save_model`, for :func:`load` alone.
    path : path
        Made if necessary. A model in it is replaced, with its tokenizer and settings; other files stay.
    tokenizer : tokenizers.Tokenizer or a fast tokenizer of Transformers, optional
        That of a GPT, which has none itself.

    Raises
    ------
    TypeError
        It is not a model of this module, or ``tokenizer`` is given for one that has its own.
    ValueError
        A GPT lacks what a GPT-2 has; the message names it. Or the weights are the quants of a GGUF file, it is a GPT-2
        in int8, or its tokenizer has more tokens than the model has rows.
    OSError
        It could not be written; the folder is as it was before.
    """
    if isinstance(model, GPT):
        model = as_gpt2(model, getattr(tokenizer, "backend_tokenizer", tokenizer))
    elif tokenizer is not None:
        raise TypeError(f"tokenizer is for a GPT; a {type(model).__name__} is saved with its own")
    if isinstance(model, EmbeddingModel):
        return files.save_model(model, path)
    if not isinstance(model, Pretrained):
        kinds = "one of selfattn_models, an nn.GPT or an nn.EmbeddingModel"
        raise TypeError(f"model must be {kinds}, not {type(model).__name__}")
    if model.quants:
        load = "load the file with dtype='float32' to save it"
        raise ValueError(f"this model's weights are quants of GGUF, which a folder cannot hold; {load}")
    if isinstance(model, GPT2LMHeadModel) and model.dtype == "int8":
        raise ValueError("GPT-2 is not saved in int8; save it before rounding, and load(path, dtype='int8')")
    folder = Path(path)
    if isinstance(model, TextEncoder | CausalModel) and model.tokenizer is not None:
        check_vocabulary(model.tokenizer, model.vocab_size, folder)  # or the folder could not be loaded
    state = model.state_dict()
    compact = [name for name, array in state.items() if is_compact(array)]
    bfloat16 = compact if model.dtype == "bfloat16" else []
    content = {"model.safetensors": disk.to_safetensors(state, {"format": "pt"}, bfloat16)}
    config = dict(model.config)
    if model.dtype == "int8":
        matrices = [name for name, array in state.items() if array.ndim == 2 and name.endswith(".weight")]
        tables = [name.removesuffix(".weight") for name in compact if "embed" in name]
        whole = [name.removesuffix(".weight") for name in matrices if name not in compact]
        config["quantization_config"] = quantization_config(tables, whole)
    config["architectures"] = [model.kinds[config["model_type"]] + model.suffix]
    if isinstance(model, TextEncoder):
        content |= _text_encoder.text_files(model)
    elif isinstance(model, CausalModel):
        content |= _text_files.text_files(model)
    content["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    if "tokenizer.json" in content:
        more = (model.pipeline.lowercase, model._knows_types) if isinstance(model, TextEncoder) else ()
        content = readable(content, *more)
    replaced = _holds_model(folder)
    disk.write_folder(folder, content, (STALE if replaced else {INDEX}) - set(content))


def _holds_model(folder: Path) -> bool:
    """Tell whether a model was saved in a folder, which might hold only a tokenizer of the user's own."""
    if (folder / "config.json").exists():
        return True
    try:
        modules = disk.read_json(folder / "modules.json")
    except (OSError, ValueError):
        return False
    return isinstance(modules, list) and all(isinstance(each, dict) and "type" in each for each in modules)
