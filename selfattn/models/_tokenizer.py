"""The tokenizer of a folder, and texts to ids with it.

A ``tokenizer.json`` may switch padding on (that of all-MiniLM-L6-v2 pads to 128): sequences are packed here, so padding is
always off. The library cuts texts itself, and so keeps the special tokens.
"""

from __future__ import annotations

import json
import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from selfattn import _disk
from selfattn._check import as_array, if_missing, quoted
from selfattn._extras import import_extra
from selfattn.engine.transformer import check_ids
from selfattn.models import _tokenizer_class
from selfattn.models._folder import read_settings
from selfattn.text import without_pads

TOKENIZER, TOKENIZER_CONFIG = _tokenizer_class.TOKENIZER, _tokenizer_class.TOKENIZER_CONFIG
OTHER_FORMS = (
    "vocab.txt", "vocab.json", "sentencepiece.bpe.model", "spiece.model", "tokenizer.model", "merges.txt",
)  # fmt: skip
# Transformers' classes that have token_type_ids among their model_input_names.
TYPED = {
    "BertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FNetTokenizer", "CanineTokenizer",
}  # fmt: skip
MOST_IDS = 2**24  # the library writes a line for each id that is left out

Text: TypeAlias = str | tuple[str, str]


# ----------------------------------------------------------------------------------------------- a folder's tokenizer


def load_tokenizer(folder: Path, lowercase: bool = False) -> tuple[Any, dict[str, Any]]:
    """Read ``tokenizer.json`` and ``tokenizer_config.json``; the tokenizer is None if the folder has none.

    ``lowercase`` is ``do_lower_case`` of sentence-transformers: lower case, whatever the tokenizer does.
    """
    config = read_settings(folder / TOKENIZER_CONFIG)
    path = folder / TOKENIZER
    if not path.exists():
        return None, config.values
    library = import_extra("tokenizers", "models")
    raw = path.read_bytes()
    tokenizer = _disk.parse_tokenizer(path, raw, "models")
    with _disk.library_errors(f"{config.where} does not fit {TOKENIZER}", ValueError, Warning):
        side = config.raw("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
        if side not in ("left", "right"):
            raise config.error(f"truncation_side must be 'left' or 'right', not {side!r:.80}")
        config.read |= {"chat_template", "model_input_names", "model_max_length"}  # others use them
        tokenizer, named = _tokenizer_class.as_its_class(tokenizer, folder, raw, config)
        config.finish()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if lowercase:
        steps = [library.normalizers.Lowercase(), tokenizer.normalizer]
        tokenizer.normalizer = library.normalizers.Sequence([step for step in steps if step])
    return tokenizer, config.values | named | {"truncation_side": side}


def gives_types(config: Mapping[str, Any], of_model: Mapping[str, Any]) -> bool:
    """Tell whether Transformers' tokenizer of a folder says which text of a pair a token belongs to; else all are of the first."""
    by_model = _tokenizer_class.BY_MODEL.get(of_model["model_type"])
    kind = _tokenizer_class.named_class(config, of_model) or by_model
    names = config.get("model_input_names")
    return str(kind).removesuffix("Fast") in TYPED if names is None else "token_type_ids" in names


def check_vocabulary(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Refuse a tokenizer that has more tokens than the model has rows for."""
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        rows = f"the model's vocab_size is {vocab_size}"
        raise ValueError(f"{folder / TOKENIZER} has {size} tokens, and {rows}: it belongs to another model")
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest > MOST_IDS:
        raise ValueError(f"{folder / TOKENIZER} has a token with the id {largest}, more than {MOST_IDS}")


def missing(folder: Path | None) -> str:
    """Return a message for a model without a tokenizer.json."""
    where = "the model" if folder is None else str(folder)
    found = [] if folder is None else [name for name in OTHER_FORMS if (folder / name).exists()]
    convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    convert = f"; it has {found[0]}, which Transformers can convert: {convert}" if found else ""
    return f"{where} has no {TOKENIZER}, so text cannot be tokenised{convert}; ids can be given instead"


def without_cutting(tokenizer: Any) -> str:
    """Return a tokenizer's file without truncation; the tokenizer stays as it is, as other threads may use it."""
    with _disk.library_errors("the tokenizer cannot be written"):
        other = type(tokenizer).from_str(tokenizer.to_str())
    other.no_truncation()
    return str(other.to_str())


def readable(content: dict[str, bytes], lowercase: bool = False, types: bool = False) -> dict[str, bytes]:
    """Return a folder's files, with settings that keep its tokenizer the same where ``tokenizer_class`` would change it."""
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in {TOKENIZER, TOKENIZER_CONFIG, "special_tokens_map.json", "config.json"} & content.keys():
            Path(place, name).write_bytes(content[name])
        settings = json.loads(content.get(TOKENIZER_CONFIG, b"{}"))
        try:
            found, config = load_tokenizer(Path(place), lowercase)
            named = config.get("tokenizer_class") == settings.get("tokenizer_class")
            if named and json.loads(found.to_str()) == json.loads(content[TOKENIZER]):
                return content
        except ValueError:
            pass
    names = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    settings = {"model_input_names": names} | settings
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", _tokenizer_class.AS_WRITTEN: True}
    return content | {TOKENIZER_CONFIG: _disk.to_json(settings)}


# --------------------------------------------------------------------------------------------------------------- ids


def tokenize(
    tokenizer: Any, texts: Sequence[Text], places: Sequence[int], first: int, types: bool
) -> tuple[list[Sequence[int]], list[list[int]], int]:
    """Turn texts into ids, if they are wanted also into types, and count the texts that were cut.

    ``first`` and the places give the numbers of texts in messages; a text with a lone surrogate is a ValueError.
    """
    limit = (tokenizer.truncation or {}).get("max_length") or math.inf
    check_room(tokenizer, limit, pairs=not all(isinstance(text, str) for text in texts))
    try:
        with _disk.library_errors(f"the tokenizer cannot take sentence {first + places[0]} or one after it"):
            found = _encoded(tokenizer, texts)
    except ValueError:
        for n, text in zip(places, texts, strict=True):
            check_unicode(text, first + n)
        raise
    ids: list[Sequence[int]] = [without_pads(tokenizer, e, e.ids) for e in found]
    cut = sum(len(each) >= limit and bool(e.overflowing) for each, e in zip(ids, found, strict=True))
    return ids, [without_pads(tokenizer, e, e.type_ids) for e in found if types], cut


def check_room(tokenizer: Any, length: float, pairs: bool = False) -> None:
    """Refuse a length without room for the special tokens, at which `tokenizers` would cut nothing."""
    if length < (least := tokenizer.num_special_tokens_to_add(pairs)):
        each = "pair" if pairs else "text"
        raise ValueError(f"max_seq_length is {length}; each {each} has {least} special tokens")


def _encoded(tokenizer: Any, texts: Sequence[Text]) -> list[Any]:
    """Let the library encode texts: on its threads, or one by one where no more can be started."""
    try:
        return list(tokenizer.encode_batch_fast(list(texts)))
    except BaseException as error:  # a panic of Rust's
        if "ThreadPoolBuildError" not in str(error):
            raise
    return [tokenizer.encode(*((text,) if isinstance(text, str) else text)) for text in texts]


def check_unicode(text: Text, number: int, what: str = "sentence") -> None:
    """Refuse halves of surrogate pairs, which UTF-8 and so the library cannot hold, and say where they are."""
    for part in (text,) if isinstance(text, str) else text:
        try:
            part.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{what} {number}, {quoted(text)}, is not Unicode: character {error.start} is "
                f"{part[error.start]!a}, half of a surrogate pair; text.encode('utf-8', 'replace').decode() replaces such"
            ) from None


def checked_ids(
    ids: Any, number: int, vocab_size: int, longest: int | None, what: str = "sentence"
) -> list[int]:
    """Return ids that were given instead of a text, which messages call ``what`` with its number.

    A TypeError if they are no sequence of integers; a ValueError if there are none, more than the model has positions, or one that
    is not in 0 … vocab_size − 1.
    """
    way = if_missing(ids)
    try:
        plain = not isinstance(ids, np.ma.MaskedArray | bytes | bytearray | memoryview)
        found = as_array("ids", ids) if plain else np.empty((), object)
    except (TypeError, ValueError, RuntimeError) as error:
        found, way = np.empty((), object), f"; {error}" if hasattr(ids, "__dlpack__") else way
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"{what} {number} must be a str or a sequence of ids, not {quoted(ids)}{way}")
    if not found.size:
        raise ValueError(f"{what} {number} has no ids")
    if longest is not None and found.size > longest:
        raise ValueError(f"{what} {number} has {found.size} ids; the model has {longest} positions")
    check_ids(found, vocab_size, f"as vocab_size is {vocab_size}; {what} {number} has")
    listed: list[int] = found.tolist()
    return listed
