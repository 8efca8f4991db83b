"""The files about text in the folder of a language model: tokenizer, chat template, settings of generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selfattn.engine import disk, quoted, warn
from selfattn_models import _tokenizer
from selfattn_models._causal import CausalModel
from selfattn_models._folder import Config, read_settings
from selfattn_models._generation import checked_settings
from selfattn_models._known_settings import NOT_DONE, REMOVED, SETTINGS, FolderWarning
from selfattn_models._tokenizer_class import SPECIAL_TOKENS, SPECIAL_TOKENS_MAP

GENERATION_CONFIG, TEMPLATE = "generation_config.json", "chat_template.jinja"


def attach(model: CausalModel, folder: Path) -> None:
    """Give a language model the tokenizer of a folder, its chat template, and the tokens that end its answers."""
    tokenizer, config = _tokenizer.load_tokenizer(folder)
    names = (_tokenizer.TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP, GENERATION_CONFIG, TEMPLATE)
    model.kept = {name: found for name in names if (found := disk.read_kept(folder / name)) is not None}
    model._folder, model.tokenizer = folder, tokenizer
    if tokenizer is not None:
        _tokenizer.check_vocabulary(tokenizer, model.vocab_size, folder)
    model.special_tokens = {n: x for n in SPECIAL_TOKENS if isinstance(x := config.get(n), str)}
    model.chat_template = _template(folder, model.kept.get(TEMPLATE), config)
    model._expect_chats()
    generation = _settings(model, folder)
    given = generation.pop("eos_token_id", None)
    said = given is not None or GENERATION_CONFIG not in model.kept
    given = model.config.get("eos_token_id") if given is None else given
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(n) is int for n in ids):
        raise ValueError(f"{folder}: eos_token_id must be an int or a list of them, not {given!r}")
    if given is None and tokenizer is not None and "eos_token" in model.special_tokens:
        ids = [tokenizer.token_to_id(model.special_tokens["eos_token"])]
    model.stop_ids = frozenset(ids) - {None}
    if model.stop_ids and not said:
        ends = ", ".join(map(str, sorted(model.stop_ids)))
        what = f"has no eos_token_id; answers end at {ends}, as other files of the folder say"
        warn(FolderWarning(f"{folder / GENERATION_CONFIG} {what}"))
    model.generation_config = generation
    model._as_read = model.chat_template, model.stop_ids, dict(generation)


def _settings(model: CausalModel, folder: Path) -> dict[str, Any]:
    """Read the settings of generation, with ``eos_token_id``.

    They are in their own file or, if there is none, in ``config.json``.
    """
    path = folder / GENERATION_CONFIG
    read = (
        read_settings(path)
        if GENERATION_CONFIG in model.kept
        else Config(model.config, str(folder / "config.json"))
    )
    found = {name: read.raw(name) for name in (*SETTINGS, "eos_token_id")}
    given = {name: read.values.get(name) for name in NOT_DONE}
    undone = {n: x for n, x in given.items() if x not in (None, NOT_DONE[n], [], {}, [-1])}
    if undone:
        told = ", ".join(f"{name}={value!r:.80}" for name, value in undone.items())
        warn(FolderWarning(f"{read.where}: {told} is not done here"))
    found |= {name: value for name, value in undone.items() if name in REMOVED}
    if GENERATION_CONFIG in model.kept:
        read.finish()
    return checked_settings(found, read.where)


def _template(folder: Path, content: bytes | None, config: dict[str, Any]) -> str | None:
    if content is not None:
        try:
            return content.decode().replace("\r\n", "\n").replace("\r", "\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / TEMPLATE} is not UTF-8: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):  # several, by name
        named = [each for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1].get("template") if named else None
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{folder}: chat_template must be a text, not {quoted(found)}")
    return found


def text_files(model: CausalModel) -> dict[str, bytes]:
    """Return the files of generation, tokenizer and template by name.

    They are those that were read, with changes, or new ones.
    """
    found = dict(model.kept)
    if not found:
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **model.special_tokens}
        found[_tokenizer.TOKENIZER_CONFIG] = disk.to_json(settings)
    template, stop_ids, generation = model._as_read
    if model.stop_ids != stop_ids or model.generation_config != generation:
        before = json.loads(found.get(GENERATION_CONFIG, b"{}"))
        other = {name: value for name, value in before.items() if name not in (*SETTINGS, *REMOVED)}
        new = model.stop_ids != stop_ids or "eos_token_id" not in other
        ends = {"eos_token_id": sorted(model.stop_ids)} if new else {}
        found[GENERATION_CONFIG] = disk.to_json(other | dict(model.generation_config) | ends)
    if model.tokenizer is None:
        return {name: content for name, content in found.items() if name == GENERATION_CONFIG}
    if model.chat_template is not None and model.chat_template != template:
        found[TEMPLATE] = model.chat_template.encode()
    elif model.chat_template is None and template is not None:
        found.pop(TEMPLATE, None)
        settings = json.loads(found.get(_tokenizer.TOKENIZER_CONFIG, b"{}"))
        settings.pop("chat_template", None)
        found[_tokenizer.TOKENIZER_CONFIG] = disk.to_json(settings)
    return found | {_tokenizer.TOKENIZER: _tokenizer.without_cutting(model.tokenizer).encode()}
