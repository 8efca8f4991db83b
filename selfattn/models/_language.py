"""The files of a language model's folder besides weights: tokenizer, chat template, and what ends an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfattn import _disk
from selfattn._check import quoted
from selfattn.models import _tokenizer

GENERATION_CONFIG, TEMPLATE = "generation_config.json", "chat_template.jinja"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def attach_language(model: Any, folder: Path) -> None:
    """Give a language model the tokenizer of a folder, its chat template, and what ends its answers.

    Raises
    ------
    ValueError
        A file is damaged, or belongs to a model with another vocabulary.
    """
    tokenizer, config = _tokenizer.load_tokenizer(folder)
    model.kept = {
        name: (folder / name).read_bytes()
        for name in (_tokenizer.TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, TEMPLATE)
        if (folder / name).is_file()
    }
    model._folder, model.tokenizer = folder, tokenizer
    if tokenizer is not None:
        _tokenizer.check_vocabulary(tokenizer, model.vocab_size, folder)
    more = _disk.read_object(folder / SPECIAL_TOKENS_MAP, required=False)
    model.special_tokens = {}
    for name in SPECIAL_TOKENS:
        token = config.get(name) or more.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            model.special_tokens[name] = token
    model.chat_template = _template(folder, config)
    generation = _disk.read_object(folder / GENERATION_CONFIG, required=False)
    given = generation.get("eos_token_id", model.config.get("eos_token_id"))
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(n) is int for n in ids):
        raise ValueError(f"{folder}: eos_token_id must be an int or a list of them, not {given!r}")
    if given is None and tokenizer is not None and "eos_token" in model.special_tokens:
        ids = [tokenizer.token_to_id(model.special_tokens["eos_token"])]
    model.stop_ids = frozenset(n for n in ids if n is not None)
    model._as_read = model.chat_template, model.stop_ids


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / TEMPLATE).is_file():
        try:
            return (folder / TEMPLATE).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / TEMPLATE} is not UTF-8: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{folder}: chat_template must be a text, not {quoted(found)}")
    return found


def language_files(model: Any) -> dict[str, bytes]:
    """Return the files of a model's tokenizer and template, by name: those that were read, with what was changed, or new ones."""
    if model.tokenizer is None:
        return {}
    found = dict(model.kept)
    if not found:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
        found[_tokenizer.TOKENIZER_CONFIG] = _disk.to_json(settings)
    template, stop_ids = model._as_read
    if model.stop_ids != stop_ids:
        generation = json.loads(found.get(GENERATION_CONFIG, b"{}"))
        found[GENERATION_CONFIG] = _disk.to_json(generation | {"eos_token_id": sorted(model.stop_ids)})
    if model.chat_template is not None and model.chat_template != template:
        found[TEMPLATE] = model.chat_template.encode()
    elif model.chat_template is None and template is not None:
        found.pop(TEMPLATE, None)
        settings = json.loads(found.get(_tokenizer.TOKENIZER_CONFIG, b"{}"))
        settings.pop("chat_template", None)
        found[_tokenizer.TOKENIZER_CONFIG] = _disk.to_json(settings)
    return found | {_tokenizer.TOKENIZER: _tokenizer.without_cutting(model.tokenizer).encode()}
