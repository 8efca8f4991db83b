"""Tokenizers: one form for anything that turns a sentence into token ids; a tokenizer of words.

SentencePiece's training and the reading of texts are here, too.

>>> from selfattn.text import WhitespaceTokenizer
>>> tokenizer = WhitespaceTokenizer.train(["tom chase jerry", "jerry likes cheese"])
>>> tokenizer.encode("jerry likes voldemort")
[1, 4, 0]
"""

from __future__ import annotations

import functools
import io
import operator
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias

from selfattn import _disk
from selfattn._check import check_rows, check_size, if_missing
from selfattn._extras import import_extra

__all__ = ["Tokenize", "WhitespaceTokenizer", "as_tokenizer", "read_text", "train_sentencepiece"]

Tokenize: TypeAlias = Callable[[str], Sequence[int]]

PathLike: TypeAlias = str | os.PathLike[str]


class BinaryFile(Protocol):
    """A file that is open in binary mode, such as ``sys.stdin.buffer``."""

    def read(self) -> bytes:
        """Return the rest of it."""


# White space after the end of a sentence, with quotes and brackets; after an ideographic stop there need be none.
_STOPS = r"(?:(?<=[.!?…؟۔।॥])|(?<=[.!?…؟۔।॥][\"'”’»)\]]))\s+"
_ENDS = re.compile(_STOPS + r"|(?:(?<=[。！？])|(?<=[。！？][」』）]))(?![。！？」』）])\s*")
_OPENING = "\"'“‘«([¿¡「『（"
UNKNOWN = "<unk>"
UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet
BYTES = [f"<0x{n:02X}>" for n in range(256)]  # SentencePiece's tokens of single bytes
LONGEST_LINE = 1024  # characters, at most 4,096 bytes: SentencePiece's limit


def is_quoted(table: str) -> bool:
    """Tell whether cells between tabs have quotes around them: all that begin with one end with one, in their line."""
    cells = [cell for line in table.splitlines() for cell in line.split("\t") if cell.startswith('"')]
    return all(len(cell) > 1 and cell.endswith('"') for cell in cells)


def sentence_gaps(text: str, begin: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield where the gap between two sentences begins and ends: a small letter after it begins no sentence.

    >>> list(sentence_gaps("He came, e.g. by car. She went."))
    [(21, 22)]
    """
    for gap in _ENDS.finditer(text, begin, len(text) if end is None else end):
        after = text[gap.end() : gap.end() + 9].lstrip(_OPENING)[:1]
        if after.isalnum() and not after.islower():
            yield gap.span()


def as_tokenizer(tokenizer: Any) -> Tokenize:
    """Make a function ``str -> ids`` of a tokenizer.

    Parameters
    ----------
    tokenizer : object
        An object with SentencePiece's ``encode(sentence, out_type=int)``; a ``tokenizers.Tokenizer`` of Hugging Face,
        whose ``encode(sentence).ids`` is used, with the special tokens that it adds and without its padding; or a
        callable ``str -> list of int``, such as the ``encode`` method of any other tokenizer.

    Returns
    -------
    callable
        ``str -> sequence of int``; its result is not checked.

    Raises
    ------
    TypeError
        ``tokenizer`` is not one of these.

    Examples
    --------
    >>> as_tokenizer(str.split)("a b")
    ['a', 'b']
    """
    encode = getattr(tokenizer, "encode", None)
    if isinstance(tokenizer, type | str) or not (callable(encode) or callable(tokenizer)):
        raise TypeError(
            "tokenizer must have encode(sentence, out_type=int), as SentencePiece's, be a tokenizers.Tokenizer, "
            f"or a callable str -> list of int, not {tokenizer!r}"
        )
    if not callable(encode):
        return tokenizer  # type: ignore[no-any-return]
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "token_to_id"):
        return functools.partial(_with_reason, functools.partial(_ids, tokenizer))
    return functools.partial(_with_reason, functools.partial(encode, out_type=int))


def without_pads(tokenizer: Any, encoding: Any, numbers: list[int]) -> list[int]:
    """Return the ids or types of an encoding without pads, which a tokenizer adds if padding is switched on."""
    if getattr(tokenizer, "padding", None) is None:
        return numbers
    return [n for n, counts in zip(numbers, encoding.attention_mask, strict=True) if counts]


def _with_reason(encode: Tokenize, sentence: str) -> Sequence[int]:
    """Tokenize; where libraries in other languages could only say that they cannot cast a text, say why."""
    try:
        return encode(sentence)
    except Exception as error:
        _check_text(sentence, error)
        raise


def is_text(sentence: str) -> bool:
    """Tell whether UTF-8 can hold a str: halves of surrogate pairs alone cannot be written."""
    try:
        sentence.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_text(text: str, cause: Exception | None = None) -> None:
    if not is_text(text):
        raise ValueError(f"{text!r:.80} is not Unicode: it has a lone surrogate") from cause


def _ids(tokenizer: Any, sentence: str) -> list[int]:
    encoding = tokenizer.encode(sentence)
    return without_pads(tokenizer, encoding, encoding.ids)


def spelled(tokenizer: Any, ids: Iterable[SupportsIndex]) -> list[str]:
    """Return each token as it reads in a text, with the space before a word.

    Bytes of an unfinished character read as <0x…>.
    """
    steps = [tokenizer.decoder, tokenizer.pre_tokenizer]
    by_bytes = any(step is not None and b'"ByteLevel"' in step.__getstate__() for step in steps)
    added = tokenizer.get_added_tokens_decoder()
    # A byte-level tokenizer names each byte by a letter: itself where it can be seen, the others from U+0100 on.
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(n): n for n in seen} if by_bytes else {}
    letters |= {chr(256 + k): n for k, n in enumerate(sorted({*range(256)} - {*seen}))} if by_bytes else {}

    def one(n: int) -> str:
        name = str(tokenizer.id_to_token(n))
        if n in added:
            return name
        if name in BYTES:
            found = bytes([BYTES.index(name)])
        elif letters.keys() >= {*name}:
            found = bytes(letters[letter] for letter in name)
        else:
            return name.replace("▁", " ")
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "".join(BYTES[byte] for byte in found)

    return [one(operator.index(n)) for n in ids]


class TextStream:
    """Text of ids that come one by one: the texts that it returns join to what decoding all ids together gives.

    A decoder looks at a token's neighbours: it drops the space before the first word, and makes one character of the
    bytes of several tokens. So each id is decoded together with ids before it, and bytes wait until they cannot
    change any more.

    Parameters
    ----------
    tokenizer : tokenizers.Tokenizer
    before : iterable of int, optional
        The ids that come first, such as a prompt; their text is not returned.
    skip_special_tokens : bool, default True

    Examples
    --------
    ::

        stream = TextStream(tokenizer, prompt)
        answer = "".join(stream.add(n) for n in ids) + stream.finish()
        # tokenizer.decode(prompt + ids) == tokenizer.decode(prompt) + answer
    """

    def __init__(
        self, tokenizer: Any, before: Iterable[SupportsIndex] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder() if skip_special_tokens else {}
        self._skipped = {n for n, token in added.items() if token.special}
        # SentencePiece makes a replacement character of each byte of a run that is not UTF-8 as a whole.
        whole, decoder = "é", tokenizer.decoder
        by_bytes = decoder is not None and whole in decoder.decode([BYTES[n] for n in whole.encode()])
        self._bytes = {tokenizer.token_to_id(name) for name in BYTES} if by_bytes else set[int]()
        ids = [n for n in map(operator.index, before) if self._has_text(n)]
        first, text = len(ids), ""
        while first and (not text or ids[first] in self._bytes):
            first = max(0, 2 * first - len(ids) - 2)  # more than twice as many
            text = self._decode(ids[first:])
        # The ids that new ones are decoded with; how many of them, and of the letters of their text, are known.
        self._window, self._known_ids, self._known = ids[first:], len(ids) - first, len(text)

    def _has_text(self, n: int) -> bool:
        return n not in self._skipped and self._tokenizer.id_to_token(n) is not None

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def add(self, new: SupportsIndex) -> str:
        """Return the text that an id adds, in whole characters; it may be empty."""
        n = operator.index(new)
        if not self._has_text(n):
            return ""
        self._window.append(n)
        text = self._decode(self._window)
        if n in self._bytes or text.endswith(UNFINISHED):
            return ""
        piece = text[self._known :]
        own = self._decode(self._window[self._known_ids :])
        if own:  # else the next token would be taken for the first of a text
            del self._window[: self._known_ids]
            text = own
        self._known_ids, self._known = len(self._window), len(text)
        return piece

    def finish(self) -> str:
        """Return the text that was held back: there are no more ids."""
        piece = self._decode(self._window)[self._known :]
        self._known_ids, self._known = len(self._window), self._known + len(piece)
        return piece


class WhitespaceTokenizer:
    """Words between white space, each with an id; for small models, and where nothing else is installed.

    Parameters
    ----------
    vocabulary : sequence of str
        Different words; the place of each is its id. Other words get the id of ``"<unk>"``, if that is one of them.

    Attributes
    ----------
    vocabulary : list of str
        Everything that has to be saved.
    unknown_id : int or None

    Examples
    --------
    >>> tokenizer = WhitespaceTokenizer(["<unk>", "tom", "chase", "jerry"])
    >>> tokenizer.encode("tom chase spike")
    [1, 2, 0]
    >>> tokenizer.decode([1, 2, 0])
    'tom chase <unk>'
    """

    def __init__(self, vocabulary: Sequence[str]) -> None:
        if not isinstance(vocabulary, Mapping):  # whose keys are in order
            check_rows("vocabulary", vocabulary)
        words = list(vocabulary) if isinstance(vocabulary, Iterable) else [vocabulary]
        if isinstance(vocabulary, str) or not all(isinstance(word, str) for word in words):
            raise TypeError(f"vocabulary must be a sequence of words, not {vocabulary!r:.80}")
        self.vocabulary = words
        for word in self.vocabulary:
            _check_text(word)  # a file could not hold it
        self._ids = {word: n for n, word in enumerate(self.vocabulary)}
        if len(self._ids) != len(self.vocabulary):
            doubles = [word for word, count in Counter(self.vocabulary).items() if count > 1]
            raise ValueError(f"vocabulary has words twice: {doubles!r:.80}")
        self.unknown_id = self._ids.get(UNKNOWN)

    @classmethod
    def train(
        cls, sentences: Iterable[str], vocab_size: int | None = None, min_count: int = 1
    ) -> WhitespaceTokenizer:
        """Collect the words of sentences.

        ``"<unk>"`` is first, then the others by frequency, equally frequent ones by first use.

        Parameters
        ----------
        sentences : iterable of str
        vocab_size : int, optional
            Keep this many at most, ``"<unk>"`` among them; all by default.
        min_count : int, default 1
            Keep words that occur at least this often.

        Raises
        ------
        ValueError
            There are no words.
        """
        sentences = _sentences(sentences)
        most = None if vocab_size is None else check_size("vocab_size", vocab_size, 2) - 1
        least = check_size("min_count", min_count)
        counts = Counter(word for sentence in sentences for word in sentence.split())
        del counts[UNKNOWN]
        return cls([UNKNOWN, *(word for word, count in counts.most_common(most) if count >= least)])

    @property
    def vocab_size(self) -> int:
        """How many words there are."""
        return len(self.vocabulary)

    def encode(self, sentence: str, out_type: type = int) -> list[Any]:
        """Return the ids of the words of a sentence, or with ``out_type=str`` the words.

        Raises
        ------
        ValueError
            A word is not in the vocabulary, and the vocabulary has no ``"<unk>"``.
        """
        if not isinstance(sentence, str):
            raise TypeError(f"sentence must be a str, not {type(sentence).__name__}")
        if out_type not in (int, str):
            raise ValueError(f"out_type must be int or str, not {out_type!r}")
        words = sentence.split()
        ids = [self._ids.get(word, self.unknown_id) for word in words]
        if None in ids:
            word = words[ids.index(None)]
            raise ValueError(f"{word!r} is not in the vocabulary, which has no {UNKNOWN!r} for such words")
        return ids if out_type is int else [self.vocabulary[n] for n in ids if n is not None]

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the words of ids with spaces between them.

        Raises
        ------
        ValueError
            An id is not in 0 … vocab_size − 1.
        """
        numbers = [operator.index(n) for n in ids]
        for n in numbers:
            if not 0 <= n < self.vocab_size:
                raise ValueError(f"ids must be in 0...{self.vocab_size - 1}, not {n}")
        return " ".join(self.vocabulary[n] for n in numbers)

    def __repr__(self) -> str:
        return f"WhitespaceTokenizer({self.vocab_size} words, unknown_id={self.unknown_id})"


def train_sentencepiece(
    sentences: Iterable[str],
    vocab_size: int,
    *,
    model_type: Literal["unigram", "bpe", "char", "word"] = "unigram",
    **options: Any,
) -> Any:
    """Train a SentencePiece model on sentences.

    Parameters
    ----------
    sentences : iterable of str
        Blank ones are skipped.
    vocab_size : int
        The number of pieces. A unigram model of a small text may have fewer: ``tokenizer.get_piece_size()`` is the
        vocabulary size for a model.
    model_type : {"unigram", "bpe", "char", "word"}
    **options
        Other options of ``SentencePieceTrainer.train``, such as ``character_coverage=0.9995``.

    Returns
    -------
    sentencepiece.SentencePieceProcessor
        Its ``serialized_model_proto()`` is the content of a file ``*.model``.

    Raises
    ------
    ImportError
        SentencePiece is not installed: ``pip install 'selfattn[text]'``.
    ValueError
        There are no words, or SentencePiece refuses; the message has its reason.

    References
    ----------
    Kudo and Richardson, "SentencePiece", 2018; Kudo, "Subword Regularization", 2018, for unigram models.

    Notes
    -----
    ::

        tokenizer = train_sentencepiece(open("text.txt", encoding="utf-8"), 8000)
        model = nn.EmbeddingModel(tokenizer, tokenizer.get_piece_size(), 128, max_seq_len=64)
    """
    sentencepiece = import_extra("sentencepiece", "text")
    sentences = _sentences(sentences)
    for sentence in sentences:
        _check_text(sentence)
    vocab_size = check_size("vocab_size", vocab_size)
    model = io.BytesIO()
    parts = (part for sentence in sentences for part in _cut(sentence))
    # 2: no progress is printed.
    settings = {"model_type": model_type, "hard_vocab_limit": False, "minloglevel": 2} | options
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=parts, model_writer=model, vocab_size=vocab_size, **settings
        )
    except (RuntimeError, OSError, ValueError) as error:
        failed = f"SentencePiece could not be trained with vocab_size={vocab_size}"
        raise ValueError(f"{failed}: {error}") from None
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def _cut(sentence: str) -> list[str]:
    """Split a very long line into shorter ones, at white space if there is any.

    SentencePiece silently skips lines of more than 4,192 bytes, and its time grows with the square of a line that
    repeats itself. Pieces do not cross white space, so splitting there changes none of their counts.
    """
    if len(sentence) <= LONGEST_LINE:
        return [sentence]
    return textwrap.wrap(sentence, LONGEST_LINE, break_on_hyphens=False)


def _sentences(sentences: Iterable[str]) -> list[str]:
    """Return the sentences that are not blank, and refuse a text without any."""
    check_rows("sentences", sentences)
    if isinstance(sentences, str) or not isinstance(sentences, Iterable):
        raise TypeError(f"sentences must be a list of str, or a file, not {sentences!r:.80}")
    kept = []
    for sentence in sentences:
        if not isinstance(sentence, str):
            what = f"{type(sentence).__name__}: {sentence!r:.80}{if_missing(sentence)}"
            raise TypeError(f"sentences must be str, not {what}")
        if sentence.strip():
            kept.append(sentence)
    if not kept:
        raise ValueError("there is no text to train on: all sentences are blank")
    return kept


def read_text(path: PathLike | BinaryFile) -> str:
    """Read a UTF-8 file, given by path or open in binary mode, with or without a byte order mark, with any line ends.

    Other bytes are a ValueError with their place, and another argument is a TypeError.
    """
    if isinstance(path, str | os.PathLike):
        place = Path(path)
        content: Any = place.read_bytes() if place.is_fifo() else _disk.read_input(place)
    else:
        read: Any = getattr(path, "read", None)
        content = read() if callable(read) else None
    if not isinstance(content, bytes):
        raise TypeError(f"path must be a path, or a file that is open in binary mode, not {path!r:.80}")
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{content[error.start]:02x} in line {line} (offset {error.start})"
        ) from None
