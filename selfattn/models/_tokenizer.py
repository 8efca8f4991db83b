"""The tokenizer of a folder: read without its padding, and cut at what the model takes.

A ``tokenizer.json`` may switch padding on (that of all-MiniLM-L6-v2 pads to 128): here sequences are packed, so padding is
always off. Cutting is the library's own, which keeps the special tokens; who was cut is counted, so that it can be said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from selfattn import _disk
from selfattn._check import quoted
from selfattn._extras import import_extra
from selfattn.engine.packing import check_ids
from selfattn.text import without_pads

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
OTHER_FORMS = (
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
    "merges.txt",
)
# What Transformers sets in the normalizer of BERT from tokenizer_config.json, by its names and the library's.
BERT_NORMALIZER = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}

MOST_IDS = 2**24  # the library writes a line for each id that is left out

Text: TypeAlias = str | tuple[str, str]


class Tokenized(NamedTuple):
    """The ids of some texts."""

    ids: list[Sequence[int]]
    types: list[list[int]] | None  # which of a pair each token belongs to; None: there are no pairs
    cut: int  # how many texts were longer than may be


def load_tokenizer(folder: Path, lowercase: bool = False) -> tuple[Any, dict[str, Any]]:
    """Read ``tokenizer.json`` and ``tokenizer_config.json``; the tokenizer is None where there is none.

    ``lowercase`` is ``do_lower_case`` of sentence-transformers: small letters whatever the tokenizer does.

    Raises
    ------
    ValueError
        A file is damaged.
    ImportError
        ``tokenizers`` is not installed.
    """
    config = _disk.read_object(folder / TOKENIZER_CONFIG, required=False)
    path = folder / TOKENIZER
    if not path.exists():
        return None, config
    library = import_extra("tokenizers", "models")
    tokenizer = _disk.parse_tokenizer(path, path.read_bytes(), "models")
    side = config.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right")
    if side not in ("left", "right"):
        raise ValueError(
            f"{folder / TOKENIZER_CONFIG}: truncation_side must be 'left' or 'right', not {side!r:.80}"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    normalizer = tokenizer.normalizer
    if isinstance(normalizer, library.normalizers.BertNormalizer):
        for name, own in BERT_NORMALIZER.items():
            if name in config and getattr(normalizer, own) != config[name]:
                if not isinstance(config[name], bool) and (config[name], name) != (None, "strip_accents"):
                    raise ValueError(
                        f"{folder / TOKENIZER_CONFIG}: {name} must be true or false, not {config[name]!r:.80}"
                    )
                setattr(normalizer, own, config[name])
        tokenizer.normalizer = normalizer
    if lowercase:
        before = [library.normalizers.Lowercase()]
        tokenizer.normalizer = library.normalizers.Sequence(before + ([normalizer] if normalizer else []))
    return tokenizer, config | {"truncation_side": side}


def check_vocabulary(tokenizer: Any, vocab_size: int, folder: Path) -> None:
    """Refuse a tokenizer that has more tokens than the model has rows for."""
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise ValueError(
            f"{folder / TOKENIZER} has {size} tokens, and the model's vocab_size is {vocab_size}: "
            "it belongs to another model"
        )
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest > MOST_IDS:
        raise ValueError(
            f"{folder / TOKENIZER} has a token with the id {largest}; there may be {MOST_IDS} at most"
        )


def missing(folder: Path | None) -> str:
    """Say what there is to do without a tokenizer.json."""
    where = "the model" if folder is None else str(folder)
    found = [] if folder is None else [name for name in OTHER_FORMS if (folder / name).exists()]
    convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    convert = f"; it has {found[0]}, of which Transformers makes one: {convert}" if found else ""
    return (
        f"{where} has no {TOKENIZER}, so text cannot be tokenised{convert}; ids can be given in place of text"
    )


def tokenize(
    tokenizer: Any, texts: Sequence[Text], places: Sequence[int], first: int, *, types: bool = False
) -> Tokenized:
    """Turn texts and pairs of them into ids.

    ``first`` and the places give their numbers in messages.

    Raises
    ------
    ValueError
        A text is no Unicode: it has a lone surrogate, half of a pair.
    """
    try:
        with _disk.library_errors(f"the tokenizer cannot take sentence {first + places[0]} or one behind it"):
            found = _encoded(tokenizer, texts)
    except ValueError:
        for n, text in zip(places, texts, strict=True):
            check_unicode(text, first + n)
        raise
    limit = (tokenizer.truncation or {}).get("max_length") or math.inf
    ids: list[Sequence[int]] = [without_pads(tokenizer, e, e.ids) for e in found]
    cut = sum(len(each) >= limit and bool(e.overflowing) for each, e in zip(ids, found, strict=True))
    of_pairs = [without_pads(tokenizer, e, e.type_ids) for e in found] if types else None
    return Tokenized(ids, of_pairs, cut)


def _encoded(tokenizer: Any, texts: Sequence[Text]) -> list[Any]:
    """Let the library turn texts into its encodings: on its threads, or without them where no more are to be had."""
    try:
        return list(tokenizer.encode_batch_fast(list(texts)))
    except BaseException as error:  # a panic of Rust's
        if "ThreadPoolBuildError" not in str(error):
            raise
    return [tokenizer.encode(*((text,) if isinstance(text, str) else text)) for text in texts]


def check_unicode(text: Text, number: int, what: str = "sentence") -> None:
    """Refuse halves of surrogate pairs, which UTF-8 and so the library has no form for, and say where they are."""
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
    """Take ids that were given in place of a text, which messages call ``what`` with its number.

    Raises
    ------
    TypeError
        They are no sequence of integers.
    ValueError
        There are none, more than the model has positions for, or one that is not in 0 … vocab_size − 1.
    """
    try:
        plain = not isinstance(ids, np.ma.MaskedArray | bytes | bytearray | memoryview)
        found = np.asarray(ids) if plain else np.empty((), object)
    except (TypeError, ValueError):
        found = np.empty((), object)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise TypeError(f"{what} {number} must be a str or a sequence of ids, not {quoted(ids)}")
    if not found.size:
        raise ValueError(f"{what} {number} has no ids")
    if longest is not None and found.size > longest:
        raise ValueError(f"{what} {number} has {found.size} ids; the model has {longest} positions")
    check_ids(found, vocab_size, f"as vocab_size is {vocab_size}; {what} {number} has")
    listed: list[int] = found.tolist()
    return listed


def cut_at(tokenizer: Any, config: Mapping[str, Any], most: int) -> None:
    """Have the tokenizer cut texts to so many tokens, special ones included."""
    tokenizer.enable_truncation(
        most, strategy="longest_first", direction=config.get("truncation_side", "right")
    )


def without_cutting(tokenizer: Any) -> str:
    """Return a tokenizer's file with cutting switched off, as it was read. Others may use the tokenizer meanwhile."""
    with _disk.library_errors("the tokenizer cannot be written"):
        other = type(tokenizer).from_str(tokenizer.to_str())
    other.no_truncation()
    content: str = other.to_str()
    return content
