"""Packs of models, which live pages run; :mod:`selfattn.views.packs` has the format.

A pack has the description that the core takes, and the tables of the tokenizer after the rules of Transformers'
classes.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfattn import nn
from selfattn.engine import disk, one_of, quoted
from selfattn.text import WhitespaceTokenizer
from selfattn.views.packs import described, gpt_pack, pack_bytes
from selfattn_models import _gguf_tokenizer, _tokenizer, _tokenizer_class
from selfattn_models._pretrained import Pretrained
from selfattn_models.bert import BertModel, DistilBertModel, RobertaModel
from selfattn_models.gpt2 import GPT2LMHeadModel, as_gpt
from selfattn_models.llama import LlamaForCausalLM
from selfattn_models.loading import load

ENCODERS = (BertModel, DistilBertModel, RobertaModel)
PACKED = (
    "BERT, RoBERTa, XLM-R, CamemBERT and DistilBERT, nn.EmbeddingModel with a WhitespaceTokenizer, Llama, Mistral and "
    "Qwen2, and GPTs of letters"
)
LONGEST = 1024  # tokens of a language model's text in a page
# What the tokenizer of a page does: the parts of a tokenizer.json, and the expressions that cut words, with the names
# that packs give them.
STEPS = {
    "normalizer": ("normalizers", {"BertNormalizer", "Lowercase", "NFC", "NFD"}),
    "pre_tokenizer": ("pretokenizers", {"BertPreTokenizer", "Digits", "Split", "ByteLevel"}),
    "post_processor": (
        "processors",
        {"TemplateProcessing", "BertProcessing", "RobertaProcessing", "ByteLevel"},
    ),
    "decoder": ("decoders", {"WordPiece", "ByteLevel"}),
}
WORDS = {_tokenizer_class.QWEN2: "qwen2", _gguf_tokenizer.LLAMA3: "llama3"}
UNDONE = (
    "dropout",
    "byte_fallback",
    "continuing_subword_prefix",
    "end_of_word_suffix",
)  # of byte-level models


def pack(
    model: Any,
    path: str | os.PathLike[str],
    dtype: str = "int8",
    *,
    alphabet: Sequence[str] | None = None,
) -> None:
    """Write a model as one file that a live page of ``selfattn pages`` reads, such as when it is dropped there.

    The page's results have the bits of the model's here with the instruction set "baseline".

    Parameters
    ----------
    model : model, or path of a folder or a .gguf file
        An encoder of the kinds BERT, RoBERTa, XLM-R, CamemBERT or DistilBERT; a language model of the kinds Llama,
        Mistral or Qwen2, with a byte-level tokenizer; an nn.EmbeddingModel with a WhitespaceTokenizer; an nn.GPT, or
        what ``selfattn train gpt`` wrote.
    path : path
        A file of that name is replaced as a whole.
    dtype : {"int8", "float32"}, default "int8"
        Of the weights, as of :func:`load`. An nn.EmbeddingModel and a GPT of letters keep float32.
    alphabet : sequence of str, optional
        The letter of each id, of an nn.GPT.

    Raises
    ------
    TypeError
        The model is of another kind.
    ValueError
        Pages do not do a part of its tokenizer or of its pooling, or the dtype is another one; or as for
        :func:`load`.

    Examples
    --------
    >>> import os, tempfile
    >>> from selfattn import nn
    >>> model = nn.GPT(vocab_size=3, d_model=8, num_layers=1, num_heads=2, max_seq_len=16, rng=0)
    >>> path = os.path.join(tempfile.mkdtemp(), "letters.sapack")
    >>> pack(model, path, alphabet="ab ")
    >>> open(path, "rb").read(8)
    b'sa-pack1'
    """
    disk.write_file(Path(path), packed(model, Path(path).stem, dtype, alphabet))


def packed(model: Any, name: str, dtype: str = "int8", alphabet: Sequence[str] | None = None) -> bytes:
    """Return what :func:`pack` writes, under a name that the page shows."""
    one_of("dtype", dtype, ("int8", "float32"))
    if isinstance(model, str | os.PathLike):
        kept = dtype == "int8" and os.path.isdir(model)  # int8 is not rounded again
        model = load(model, None if kept else dtype)
    if isinstance(model, nn.GPT):
        return gpt_pack(model, _letters(model, alphabet), name)
    if alphabet is not None:
        raise TypeError(f"alphabet is for an nn.GPT; a {type(model).__name__} has its own tokenizer")
    if type(model) is GPT2LMHeadModel and model.tokenizer is not None:
        letters = [model.tokenizer.id_to_token(n) for n in range(model.tokenizer.get_vocab_size())]
        return packed(as_gpt(model), name, dtype, letters)
    whole: dict[str, Any]
    if type(model) is nn.EmbeddingModel and isinstance(model.tokenizer, WhitespaceTokenizer):
        whole = _small(model)
    elif type(model) in ENCODERS:
        whole = _encoder(_rounded(model, dtype))
    elif type(model) is LlamaForCausalLM:
        whole = _language_model(_rounded(model, dtype))
    else:
        raise TypeError(f"packs hold {PACKED}, not {type(model).__name__}")
    return pack_bytes({"name": name, **whole})


def _letters(model: nn.GPT, alphabet: Sequence[str] | None) -> list[str]:
    found = list(alphabet or ())
    if len(found) != model.vocab_size or not all(isinstance(each, str) and len(each) == 1 for each in found):
        raise ValueError(
            f"a GPT's pack needs a letter for each of its {model.vocab_size} ids, not {quoted(alphabet)}"
        )
    return found


def _rounded(model: Pretrained, dtype: str) -> Any:
    if dtype == "int8" and model.dtype != dtype:
        return copy.copy(model).quantize(dtype)
    if model.dtype != dtype:
        raise ValueError(
            f"this model is {model.dtype}; load it as float32: models.load(path, dtype='float32')"
        )
    return model


def _small(model: nn.EmbeddingModel) -> dict[str, Any]:
    words = {"words": model.tokenizer.vocabulary, "limit": model.max_seq_len}
    pipeline = {"modes": ["mean"], "scaled": False, "prompt": "", "width": None, "dots": False}
    return {"kind": "encoder", "model": described(model._model()), "tokenizer": words, "pipeline": pipeline}


def _encoder(model: Any) -> dict[str, Any]:
    pipeline = model.pipeline
    undone = {
        "a Dense after the pooling": any(dense for _, dense in pipeline.after),
        "a pooling without the prompt": pipeline.prompt(None) and not pipeline.include_prompt,
        f"the similarity {pipeline.similarity!r}": pipeline.similarity not in ("cosine", "dot"),
    }
    for name, there in undone.items():
        if there:
            raise ValueError(f"pages do not do {name}")
    found = described(model._built(model.max_positions)[0])
    if model.pad is not None:
        found["padRow"] = model.arrays[model.position_table][model.pad]
    return {
        "kind": "encoder",
        "model": found,
        "tokenizer": tables(model) | {"limit": model.max_seq_length},
        "pad": model.pad,
        "pipeline": {
            "modes": list(pipeline.modes),
            "scaled": bool(pipeline.after),
            "prompt": pipeline.prompt(None),
            "width": pipeline.truncate_dim,
            "dots": pipeline.similarity == "dot",
        },
    }


def _language_model(model: Any) -> dict[str, Any]:
    most = min(model.max_positions, LONGEST)
    settings, parameters = model._built(most)
    return {
        "kind": "language",
        "model": described(settings, model._head(parameters)),
        "tokenizer": tables(model),
        "ends": sorted(model.stop_ids),
        "most": most,
    }


def tables(model: Any) -> dict[str, Any]:
    """Return the tables of a model's tokenizer, which the tokenizer of a page does; another part is a ValueError."""
    if model.tokenizer is None:
        raise ValueError(_tokenizer.missing_message(model._folder))
    found = json.loads(model.tokenizer.to_str())

    def refuse(part: Any) -> ValueError:
        return ValueError(f"pages do not do a part of this tokenizer: {json.dumps(part)[:80]}")

    for step, (inner, known) in STEPS.items():
        parts = _flat(found[step], inner)
        for each in parts:
            if each["type"] not in known:
                raise refuse(each["type"])
            if each["type"] == "Split":
                words = WORDS.get(each["pattern"].get("Regex"))
                if words is None or each["behavior"] != "Isolated" or each["invert"]:
                    raise refuse(each)
                each["words"] = words
        found[step] = parts
    kind, cutters = found["model"]["type"], [each["type"] for each in found["pre_tokenizer"]]
    bytewise = cutters[-1:] == ["ByteLevel"]
    if kind != ("BPE" if bytewise else "WordPiece") or not cutters:
        raise refuse(kind)
    for name in UNDONE if bytewise else ():
        if found["model"][name]:
            raise refuse(name)
    for token in found["added_tokens"]:
        if token["single_word"] or (token["normalized"] and found["normalizer"]):
            raise refuse(token)
    if model.tokenizer.encode_special_tokens:
        raise refuse("split_special_tokens")
    cutting = found["truncation"] or {}
    before, after = _around(found["post_processor"])
    return {
        "normalizers": found["normalizer"],
        "cutters": found["pre_tokenizer"],
        "before": before,
        "after": after,
        "added": found["added_tokens"],
        "model": found["model"],
        "side": str(cutting.get("direction", "right")).lower(),
    }


def _flat(part: Any, inner: str) -> list[Any]:
    """Return the parts of a step of a tokenizer, in which sequences may be nested."""
    if part is None or part["type"] != "Sequence":
        return [part] if part else []
    return [each for one in part[inner] for each in _flat(one, inner)]


def _around(parts: list[Any]) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts before and after a text alone."""
    frame = next((part for part in parts if part["type"] != "ByteLevel"), None)
    if frame is None:
        return [], []
    if frame["type"] != "TemplateProcessing":
        return [frame["cls"][1]], [frame["sep"][1]]
    single, special = frame["single"], frame["special_tokens"]
    text = [n for n, each in enumerate(single) if "Sequence" in each]
    if len(text) != 1 or any(of["type_id"] for each in single for of in each.values()):
        raise ValueError(f"pages do not do the template of this tokenizer: {json.dumps(single)[:80]}")
    before, after = (
        [own for each in some for own in special[each["SpecialToken"]["id"]]["ids"]]
        for some in (single[: text[0]], single[text[0] + 1 :])
    )
    return before, after
