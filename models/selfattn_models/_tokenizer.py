"""The tokenizer of a folder, and sentences to packed ids with it.

A ``tokenizer.json`` may switch padding on (that of all-MiniLM-L6-v2 pads to 128): sequences are packed here, so
padding is always off. The library cuts texts itself, and so keeps the special tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from selfattn.engine import Array, as_array, check_rows, disk, if_missing, import_extra, quoted, warn
from selfattn.engine.transformer import check_ids, pack
from selfattn.text import without_pads
from selfattn_models import _tokenizer_class
from selfattn_models._folder import read_settings

TOKENIZER, TOKENIZER_CONFIG = _tokenizer_class.TOKENIZER, _tokenizer_class.TOKENIZER_CONFIG
OTHER_FORMS = (
    "vocab.txt",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
    "tokenizer.model",
    "merges.txt",
)
# Transformers' classes that have token_type_ids among their model_input_names.
TYPED = {
    "BertTokenizer",
    "DebertaTokenizer",
    "DebertaV2Tokenizer",
    "ElectraTokenizer",
    "FNetTokenizer",
    "CanineTokenizer",
}
MOST_IDS = 2**24  # the library writes a line for each id that is left out
# Sentences that are tokenised at once; few at first, so that the core soon has work.
FIRST_CHUNK, CHUNK = 256, 2048
MOST_CHARACTERS = 2**18  # the most characters of these sentences together
MOST_TOKENS = 16_384  # the most tokens of a call of the core; a longer text has a call of its own

Text: TypeAlias = str | tuple[str, str]


# ----------------------------------------------------------------------------------------------- a folder's tokenizer


def load_tokenizer(folder: Path, lowercase: bool = False) -> tuple[Any, dict[str, Any]]:
    """Read ``tokenizer.json`` and ``tokenizer_config.json``; the tokenizer is None if the folder has none.

    ``lowercase`` is ``do_lower_case`` of sentence-transformers: lower case, whatever the tokenizer does.
    """
    config = read_settings(folder / TOKENIZER_CONFIG)
    path = folder / TOKENIZER
    if not os.path.lexists(path):
        return None, config.values
    library = import_extra("tokenizers")
    raw = disk.read(path, disk.MOST_TOKENIZER_BYTES)
    tokenizer = disk.parse_tokenizer(path, raw, "models")
    with disk.library_errors(f"{config.where} does not fit {TOKENIZER}", ValueError, Warning):
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
    """Tell whether Transformers' tokenizer of a folder says which text of a pair a token belongs to.

    If not, all tokens are of the first.
    """
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


def missing_message(folder: Path | None) -> str:
    """Return a message for a model without a tokenizer.json."""
    where = "the model" if folder is None else str(folder)
    found = [] if folder is None else [name for name in OTHER_FORMS if (folder / name).exists()]
    convert = "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    convert = f"; it has {found[0]}, which Transformers can convert: {convert}" if found else ""
    return f"{where} has no {TOKENIZER}, so text cannot be tokenised{convert}; ids can be given instead"


def without_cutting(tokenizer: Any) -> str:
    """Return a tokenizer's file without truncation; the tokenizer stays as it is, as other threads may use it."""
    with disk.library_errors("the tokenizer cannot be written"):
        other = type(tokenizer).from_str(tokenizer.to_str())
    other.no_truncation()
    return str(other.to_str())


def readable(content: dict[str, bytes], lowercase: bool = False, types: bool = False) -> dict[str, bytes]:
    """Return a folder's files, with settings that keep its tokenizer the same.

    Without them ``tokenizer_class`` would change it.
    """
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
    return content | {TOKENIZER_CONFIG: disk.to_json(settings)}


# --------------------------------------------------------------------------------------------------------- sentences


class Sentences:
    """The sentences of a call, one alone or an iterable.

    Their number is here too, if it is known, and how many of them were cut.
    """

    def __init__(self, sentences: Any, name: str = "sentences") -> None:
        self.cut, self.texts = 0, 0
        self.total: int | None = 1
        if isinstance(sentences, np.ndarray) and sentences.ndim == 0:
            sentences = sentences.item()
        self.alone, self.sentences = True, iter([sentences])
        if isinstance(sentences, str):
            return
        check_rows(name, sentences)
        if isinstance(sentences, bytes | bytearray | memoryview) or not isinstance(sentences, Iterable):
            raise TypeError(f"{name} must be a str or an iterable of str, not {quoted(sentences)}")
        try:
            total: int | None = len(sentences)  # type: ignore[arg-type]
        except TypeError:
            total = None
        rest = iter(sentences)
        first = list(itertools.islice(rest, 1))
        if first and hasattr(first[0], "__index__") and not getattr(first[0], "ndim", 0):  # ids
            self.sentences = iter([[*first, *rest] if total is None else sentences])
        else:
            self.alone, self.sentences, self.total = False, itertools.chain(first, rest), total

    def add(self, batch: TokenBatch) -> None:
        """Count the texts of a chunk, and those that were cut."""
        self.cut, self.texts = self.cut + batch.cut, self.texts + len(batch.ids)

    def warn(self, tokenizer: Any) -> None:
        """Warn of texts that the tokenizer has cut, once a call, where the package was called."""
        if self.cut:
            what = "the text was" if self.texts == 1 else f"{self.cut} of {self.texts} texts were"
            limit = f"{tokenizer.truncation['max_length']} tokens, the most that the model takes"
            warn(f"{what} longer than {limit}, and cut there")


def is_pair(sentence: Any) -> bool:
    """Tell whether something is a pair of texts."""
    two = isinstance(sentence, tuple | list) and len(sentence) == 2
    return two and all(isinstance(each, str) for each in sentence)


class Chunk(NamedTuple):
    """Sentences that go through the tokenizer together, and the number of the first."""

    sentences: list[Any]
    first: int = 0


def chunks(sentences: Iterable[Any]) -> Iterator[Chunk]:
    """Split an iterable into chunks that are not too large to be tokenised at once."""
    rest, first, most = iter(sentences), 0, FIRST_CHUNK
    while True:
        chunk: list[Any] = []
        characters = 0
        for sentence in rest:
            chunk.append(sentence)
            characters += len(sentence) if isinstance(sentence, str) else 0
            if len(chunk) == most or characters >= MOST_CHARACTERS:
                break
        if not chunk:
            return
        yield Chunk(chunk, first)
        first, most = first + len(chunk), CHUNK


class PackedIds(NamedTuple):
    """The ids of some sentences, one after the other, as the core takes them."""

    ids: Array
    cu_seqlens: Array  # where each begins, and the end of all
    types: Array | None  # which text of a pair each token belongs to; None: all belong to the first
    skipped: (
        list[int] | None
    )  # how many tokens of each are a prompt's, which is not pooled; None: there are none


class TokenBatch(NamedTuple):
    """The sentences of a chunk in ids; the fields are those of :class:`PackedIds`, sentence by sentence."""

    ids: list[Sequence[int]]
    types: list[Sequence[int]] | None
    skipped: list[int] | None
    cut: int  # how many texts were cut

    def pack(self, numbers: Sequence[int] | None = None) -> PackedIds:
        """Pack some of the sentences, by their numbers; None is all."""
        numbers = range(len(self.ids)) if numbers is None else numbers
        ids, cu_seqlens = pack([self.ids[n] for n in numbers])
        types = None if self.types is None else pack([self.types[n] for n in numbers])[0]
        return PackedIds(ids, cu_seqlens, types, self.skipped and [self.skipped[n] for n in numbers])

    def groups(self, most: int) -> Iterator[list[int]]:
        """Sort sentences by length, the longest first, and group their numbers: a group is a call of the core.

        A group has ``most`` sentences at most, and no more tokens than a call takes.
        """
        group: list[int] = []
        tokens, lengths = 0, [len(ids) for ids in self.ids]
        for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
            if group and (tokens + lengths[n] > MOST_TOKENS or len(group) == most):
                yield group
                group, tokens = [], 0
            group.append(n)
            tokens += lengths[n]
        if group:
            yield group


def map_ahead(function: Callable[[Chunk], TokenBatch], chunks: Iterator[Chunk]) -> Iterator[TokenBatch]:
    """Map a function that releases the GIL, one result ahead, in a thread; chunks are read in the caller's thread."""
    first = list(itertools.islice(chunks, 2))
    if len(first) < 2:
        yield from map(function, first)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(function, first[0])
        except RuntimeError:  # no more threads can be started
            yield from map(function, itertools.chain(first, chunks))
            return
        for chunk in itertools.chain(first[1:], chunks):
            coming = pool.submit(function, chunk)
            yield waiting.result()
            waiting = coming
        yield waiting.result()


# --------------------------------------------------------------------------------------------------------------- ids


def tokenize(
    tokenizer: Any, texts: Mapping[int, Text], types: bool
) -> tuple[dict[int, Sequence[int]], dict[int, list[int]], int]:
    """Turn texts by their numbers into ids, if they are wanted also into types, and count the texts that were cut.

    A text with a lone surrogate is a ValueError.
    """
    if not texts:
        return {}, {}, 0
    limit = (tokenizer.truncation or {}).get("max_length") or math.inf
    check_room(tokenizer, limit, pairs=not all(isinstance(text, str) for text in texts.values()))
    try:
        with disk.library_errors(f"the tokenizer cannot take sentence {min(texts)} or one after it"):
            found = dict(zip(texts, _encoded(tokenizer, list(texts.values())), strict=True))
    except ValueError:
        for n, text in sorted(texts.items()):
            check_unicode(text, n)
        raise
    ids: dict[int, Sequence[int]] = {n: without_pads(tokenizer, e, e.ids) for n, e in found.items()}
    cut = sum(len(ids[n]) >= limit and bool(e.overflowing) for n, e in found.items())
    return ids, {n: without_pads(tokenizer, e, e.type_ids) for n, e in found.items() if types}, cut


def prompt_length(tokenizer: Any, prompt: str) -> int:
    """Return how many tokens at the beginning of a text belong to the prompt before it."""
    if tokenizer is None:
        return 0
    encoding = tokenizer.encode(prompt)
    special = without_pads(tokenizer, encoding, encoding.special_tokens_mask)
    return len(special) - bool(special[-1:] == [1])


def check_tokens(ids: Sequence[Sequence[int]], given: Mapping[int, Any], vocab_size: int, skip: int) -> None:
    """Refuse ids that the tokenizer made of sentences, given by their numbers, and that the model cannot take."""
    if min(map(len, ids), default=1) > skip and max(map(max, ids), default=0) < vocab_size:
        return
    for own, (n, sentence) in zip(ids, given.items(), strict=True):
        where = f"sentence {n}, {quoted(sentence)}"
        if not own:
            raise ValueError(f"{where}, has no tokens")
        if max(own) >= vocab_size:
            made = f"the tokenizer made the id {max(own)} of {where}; vocab_size is {vocab_size}"
            raise ValueError(f"{made}: the tokenizer belongs to another model")
        if isinstance(sentence, str) and len(own) <= skip:
            raise ValueError(f"the prompt is left out of pooling, and {where}, has no other tokens")


def check_room(tokenizer: Any, length: float, pairs: bool = False) -> None:
    """Refuse a length without room for the special tokens, at which `tokenizers` would cut nothing."""
    if length < (least := tokenizer.num_special_tokens_to_add(pairs)):
        each = "pair" if pairs else "text"
        raise ValueError(f"max_seq_length is {length}; each {each} has {least} special tokens")


def _encoded(tokenizer: Any, texts: list[Text]) -> list[Any]:
    """Let the library encode texts: on its threads, or one by one where no more can be started."""
    try:
        return list(tokenizer.encode_batch_fast(texts))
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
                f"{part[error.start]!a}, half of a surrogate pair; "
                "text.encode('utf-8', 'replace').decode() replaces such"
            ) from None


def checked_ids(
    ids: Any, number: int, vocab_size: int, longest: int | None, what: str = "sentence"
) -> list[int]:
    """Return ids that were given instead of a text, which messages call ``what`` with its number.

    A TypeError if they are no sequence of integers; a ValueError if there are none, more than the model has
    positions, or one that is not in 0 … vocab_size − 1.
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
