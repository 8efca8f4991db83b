"""Text for models: sentences to embeddings, pieces and logits, any number of them.

Sentences are tokenised some thousand at a time, in a thread while the core computes those before, and stand packed one
behind the other in a call. What comes out for one does not depend on the others, so their order and the size of a
batch change no bit.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from selfattn import _disk
from selfattn._check import Array, check_size, quoted
from selfattn._extras import progress_bar
from selfattn.engine.packing import pack
from selfattn.models import _pipeline, _tokenizer
from selfattn.models._pipeline import Pipeline, pools, read_pipeline, transformer_folder

if TYPE_CHECKING:
    from selfattn.engine.transformer import Transformer
    from selfattn.steps.transformer import TransformerSteps

__all__ = ["TextModel", "attach", "pools", "text_files", "transformer_folder"]

PathLike: TypeAlias = _disk.PathLike
P = TypeVar("P")
Q = TypeVar("Q")

FIRST_PIECE, PIECE = (
    256,
    2048,
)  # sentences that are tokenised at once; few at first, so that the core soon has work
MOST_CHARACTERS = 2**18  # of them together
TOKENS = 16_384  # in a call of the core, or one sentence
OTHER_TOKENIZER_FILES = ("special_tokens_map.json", _tokenizer.TOKENIZER_CONFIG)


class Piece(NamedTuple):
    """Sentences that go through the tokenizer together, and the number of the first."""

    sentences: list[Any]
    first: int


class Ready(NamedTuple):
    """A piece in ids."""

    ids: list[Sequence[int]]
    types: list[Sequence[int]] | None
    skipped: list[int] | None  # tokens of a prompt that are not pooled
    cut: int


def attach(model: TextModel, folder: PathLike) -> None:
    """Give a model the tokenizer of a folder, and what its sentence-transformers files say.

    Parameters
    ----------
    model : TextModel
        Its ``vocab_size`` and ``max_positions`` are there already.
    folder : path

    Raises
    ------
    ValueError
        A file is damaged, has something unknown that would change results, or belongs to a model with another
        vocabulary.
    ImportError
        ``tokenizers`` is not installed: ``pip install 'selfattn[models]'``.
    """
    pipeline, inner = read_pipeline(Path(folder), classifies=hasattr(model, "_logits"))
    tokenizer, config = _tokenizer.load_tokenizer(inner, pipeline.lowercase)
    for name in OTHER_TOKENIZER_FILES:
        if (inner / name).exists():
            pipeline.kept[name] = (inner / name).read_bytes()
    if tokenizer is not None:
        _tokenizer.check_vocabulary(tokenizer, model.vocab_size, inner)
        limits = [pipeline.longest or config.get("model_max_length"), model.max_positions]
        known = [int(n) for n in limits if isinstance(n, int | float) and n < 2**31]
        if known:
            _tokenizer.cut_at(tokenizer, config, min(known))
    model.tokenizer, model.pipeline, model._folder = tokenizer, pipeline, inner


def text_files(model: TextModel) -> dict[str, bytes]:
    """Return the files of a model's tokenizer and pipeline, by their path in the folder that it is saved in."""
    found = {} if model.pipeline is None else _pipeline.pipeline_files(model.pipeline)
    if model.tokenizer is not None:
        found[_tokenizer.TOKENIZER] = _tokenizer.without_cutting(model.tokenizer).encode()
    return found


class TextModel:
    """What models of text have in common; a model itself computes rows of ids.

    Attributes
    ----------
    tokenizer : tokenizers.Tokenizer or None
    """

    config: dict[str, Any]
    vocab_size: int
    max_positions: int | None
    num_labels: int  # of classifiers
    tokenizer: Any = None
    pipeline: Pipeline | None = None
    _folder: Path | None = None

    def _core(self) -> Transformer:
        raise NotImplementedError

    def _rows(
        self, ids: Array, cu_seqlens: Array, pooling: str | None, token_types: Array | None = None
    ) -> Array:
        raise NotImplementedError

    def _inputs(
        self, settings: Transformer, ids: Array, cu_seqlens: Array, types: Array | None
    ) -> tuple[Transformer, Array]:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------- embeddings

    def encode(
        self,
        sentences: Any,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Array:
        """Compute the embedding of a sentence, or of each of many.

        Parameters
        ----------
        sentences : str or iterable of str
            Any iterable. In place of a text, its ids, with the special ones.
        batch_size : int, optional
            How many sentences go through the model at once at most; it changes no bit. By default as many as have
            16,384 tokens: they stand one behind the other, not padded to the longest.
        progress : bool, default False
            Show a bar with rate and remaining time; needs ``tqdm``.
        normalize : bool, optional
            Scale embeddings to length 1. By default as the folder says; False leaves out that it does.
        prompt : str, optional
            A text that is put before each sentence, or the name of one of the folder's prompts. By default the one
            that the folder names; ``""`` for none.

        Returns
        -------
        ndarray of float32, shape (d,) or (n, d)
            The bits of each do not depend on the others, their order, ``batch_size`` or threads.

        Raises
        ------
        TypeError
            Something is neither text nor ids; the message says which sentence.
        ValueError
            Lone surrogates, ids beyond the vocabulary, a text without tokens, or a folder without ``tokenizer.json``.
        ImportError
            ``tqdm`` is not installed: ``pip install 'selfattn[models]'``.

        Warns
        -----
        UserWarning
            Texts were longer than the model or the folder's ``max_seq_length`` allows, and were cut: how many.

        Examples
        --------
        ::

            model = models.load("all-MiniLM-L6-v2")
            found = model.encode(["a storm at sea", "tea with milk"]) @ model.encode("the waves rose")
        """
        alone, given, total = one_or_many(sentences)
        cut = Cut()
        parts = list(self._embeddings(given, total, cut, batch_size, progress, normalize, prompt))
        cut.tell()
        if not parts:
            return np.empty((0, self._width()), np.float32)
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return y[0] if alone else y

    def encode_to(
        self,
        path: PathLike,
        sentences: Iterable[Any],
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Array:
        """Write the embeddings of many sentences to a ``.npy`` file, piece by piece.

        Neither the sentences nor the embeddings need fit into memory.

        Parameters
        ----------
        path : path
            A file that is there is replaced, once the new one is whole.
        sentences : iterable of str
        batch_size, progress, normalize, prompt
            As for :meth:`encode`, and so are errors and warnings.

        Returns
        -------
        ndarray of float32, shape (n, d)
            The file, mapped into memory to be read.

        Raises
        ------
        OSError
            It could not be written; what was there before is as it was.
        """
        alone, given, total = one_or_many(sentences)
        if alone:
            raise TypeError(f"sentences must be an iterable of sentences, not {quoted(sentences)}")
        cut = Cut()
        parts = self._embeddings(given, total, cut, batch_size, progress, normalize, prompt)
        _disk.write_rows(Path(path), parts, self._width(), np.float32)
        cut.tell()
        y: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return y

    def _embeddings(
        self,
        given: Iterable[Any],
        total: int | None,
        cut: Cut,
        batch_size: int | None,
        progress: bool,
        normalize: bool | None,
        prompt: str | None,
    ) -> Iterator[Array]:
        """Compute the embeddings of sentences, a piece at a time."""
        pipeline = self._pipeline()
        before = pipeline.prompt(prompt)
        skip = 0 if pipeline.include_prompt or not before else self._prompt_length(before)

        def prepare(piece: Piece) -> Ready:
            return self._ready(piece, before, skip, refuse_ids=prompt is not None and bool(before))

        def compute(ids: Array, cu_seqlens: Array, types: Array | None, skipped: list[int] | None) -> Array:
            modes = pipeline.modes
            if skipped is None and len(modes) == 1 and modes[0] in _pipeline.IN_CORE:
                y = self._rows(ids, cu_seqlens, _pipeline.IN_CORE[modes[0]])
            else:
                rows = self._rows(ids, cu_seqlens, None)
                y = _pipeline.pool(rows, cu_seqlens, modes, skipped or [0] * (len(cu_seqlens) - 1))
            return pipeline.finish(y, normalize)

        return self._computed(given, total, cut, batch_size, progress, prepare, compute, "encode")

    def _computed(
        self,
        given: Iterable[Any],
        total: int | None,
        cut: Cut,
        batch_size: int | None,
        progress: bool,
        prepare: Callable[[Piece], Ready],
        compute: Callable[[Array, Array, Array | None, list[int] | None], Array],
        name: str,
    ) -> Iterator[Array]:
        """Tokenise pieces, one ahead, and compute each in packed calls."""
        most = sys.maxsize if batch_size is None else check_size("batch_size", batch_size)
        with bar(progress, total, name) as done:
            for ready in ahead(pieces(given), prepare):
                cut.add(ready.cut, len(ready.ids), self._limit())
                y: Array | None = None
                for group in groups([len(ids) for ids in ready.ids], most):
                    ids, cu_seqlens = pack([ready.ids[n] for n in group])
                    types = None if ready.types is None else pack([ready.types[n] for n in group])[0]
                    skipped = None if ready.skipped is None else [ready.skipped[n] for n in group]
                    rows = compute(ids, cu_seqlens, types, skipped)
                    if y is None:
                        y = np.empty((len(ready.ids), *rows.shape[1:]), rows.dtype)
                    y[group] = rows
                    done(len(group))
                if y is not None:
                    yield y

    def _ready(
        self, piece: Piece, before: str = "", skip: int = 0, *, refuse_ids: bool = False, pairs: bool = False
    ) -> Ready:
        """Turn a piece into ids."""
        places = [
            n for n, each in enumerate(piece.sentences) if isinstance(each, str) or (pairs and is_pair(each))
        ]
        given = [piece.sentences[n] for n in places]
        texts = [before + each if isinstance(each, str) else tuple(each) for each in given]
        tokenized = _tokenizer.Tokenized([], None, 0)
        if texts:
            if self.tokenizer is None:
                raise ValueError(_tokenizer.missing(self._folder))
            tokenized = _tokenizer.tokenize(self.tokenizer, texts, places, piece.first, types=pairs)
        if len(texts) == len(piece.sentences):
            ids: list[Sequence[int]] = tokenized.ids
        else:
            ids = [()] * len(piece.sentences)
            for n, each in zip(places, tokenized.ids, strict=True):
                ids[n] = each
            for n in sorted(set(range(len(ids))) - set(places)):
                number = piece.first + n
                if refuse_ids:
                    raise TypeError(f"a prompt stands before text; sentence {number} is ids")
                ids[n] = _tokenizer.checked_ids(
                    piece.sentences[n], number, self.vocab_size, self.max_positions
                )
        self._check(ids, piece, skip)
        types: list[Sequence[int]] | None = None
        if tokenized.types is not None and any(map(any, tokenized.types)):
            types = [[0] * len(each) for each in ids]
            for n, of_one in zip(places, tokenized.types, strict=True):
                types[n] = of_one
        skipped = None
        if skip:
            skipped = [skip if isinstance(each, str) else 0 for each in piece.sentences]
        return Ready(ids, types, skipped, tokenized.cut)

    def _check(self, ids: list[Sequence[int]], piece: Piece, skip: int) -> None:
        """Refuse what the tokenizer made of texts if the model cannot take it."""
        if min(map(len, ids), default=1) > skip and max(map(max, ids), default=0) < self.vocab_size:
            return
        for n, (own, given) in enumerate(zip(ids, piece.sentences, strict=True), piece.first):
            if not own:
                raise ValueError(f"sentence {n}, {quoted(given)}, has no tokens")
            if max(own) >= self.vocab_size:
                raise ValueError(
                    f"the tokenizer made the id {max(own)} of sentence {n}, {quoted(given)}; the model's vocab_size is "
                    f"{self.vocab_size}: the tokenizer belongs to another model"
                )
            if isinstance(given, str) and len(own) <= skip:
                raise ValueError(
                    f"the prompt is left out of pooling, and sentence {n}, {quoted(given)}, has no other tokens"
                )

    def _pipeline(self) -> Pipeline:
        return Pipeline() if self.pipeline is None else self.pipeline

    def _width(self) -> int:
        """Return the width of an embedding."""
        table = self._core().table
        assert table is not None
        return self._pipeline().width(table.shape[1])

    def _limit(self) -> int | None:
        """Return how many tokens a text may have."""
        return None if self.tokenizer is None else (self.tokenizer.truncation or {}).get("max_length")

    def _prompt_length(self, prompt: str) -> int:
        """Return how many tokens at the beginning of a text are those of the prompt before it."""
        if self.tokenizer is None:
            return 0
        encoding = self.tokenizer.encode(prompt)
        special = _tokenizer.without_pads(self.tokenizer, encoding, encoding.special_tokens_mask)
        return len(special) - bool(special[-1:] == [1])

    # ---------------------------------------------------------------------------------------------- others

    def tokens(self, sentence: Any) -> list[str]:
        """Return the pieces of a sentence, as strings, special ones included.

        Parameters
        ----------
        sentence : str, pair of str, or sequence of int
            No prompt is put before it.

        Returns
        -------
        list of str

        Raises
        ------
        TypeError, ValueError
            As for :meth:`encode`.

        Examples
        --------
        ::

            model.tokens("a storm at sea")        # ['[CLS]', 'a', 'storm', 'at', 'sea', '[SEP]']
        """
        ids = self._ids_and_types(sentence)[0]
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids]

    def _pieces(self, ids: Sequence[int]) -> list[str] | None:
        """Return the pieces of ids, if there is a tokenizer that tells them."""
        return None if self.tokenizer is None else [str(self.tokenizer.id_to_token(n)) for n in ids]

    def _ids(self, sentence: Any) -> Sequence[int]:
        """Return the ids of one text or pair, or check those that are given."""
        return self._ids_and_types(sentence)[0]

    def _ids_and_types(self, sentence: Any) -> tuple[Sequence[int], Sequence[int] | None]:
        ready = self._ready(Piece([sentence], 0), pairs=True)
        cut = Cut()
        cut.add(ready.cut, 1, self._limit())
        cut.tell(depth=4)
        return ready.ids[0], None if ready.types is None else ready.types[0]

    def predict(self, sentences: Any, batch_size: int | None = None, progress: bool = False) -> Array:
        """Compute the logits of a classifier or cross-encoder.

        Parameters
        ----------
        sentences : str, pair of str, or iterable of such
            A tuple of two texts is a pair. In place of a text, its ids.
        batch_size, progress
            As for :meth:`encode`.

        Returns
        -------
        ndarray of float32, shape (labels,) or (n, labels)
            Logits, no probabilities: of one label, ``1 / (1 + exp(-x))`` is what sentence-transformers' CrossEncoder
            returns by default. The bits of each do not depend on the others.

        Raises
        ------
        TypeError
            The model has no classifier, or as for :meth:`encode`.
        ValueError
            As for :meth:`encode`.

        Examples
        --------
        ::

            reranker = models.load("ms-marco-MiniLM-L6-v2")
            scores = reranker.predict([("who wrote it?", passage) for passage in passages])[:, 0]
        """
        logits = getattr(self, "_logits", None)
        if logits is None:
            raise TypeError(
                f"{type(self).__name__} has no classifier; the folders of …ForSequenceClassification have one"
            )
        alone, given, total = one_or_many(sentences)
        if isinstance(sentences, tuple) and is_pair(sentences):
            alone, given, total = True, [sentences], 1
        typed = (
            self.config.get("type_vocab_size", 0) > 1
        )  # DistilBERT and RoBERTa tell texts of a pair apart without
        cut = Cut()

        def compute(ids: Array, cu_seqlens: Array, types: Array | None, _: Any) -> Array:
            y: Array = logits(ids, cu_seqlens, types if typed else None)
            return y

        parts = list(
            self._computed(
                given,
                total,
                cut,
                batch_size,
                progress,
                lambda piece: self._ready(piece, pairs=True),
                compute,
                "predict",
            )
        )
        cut.tell()
        if not parts:
            return np.empty((0, self.num_labels), np.float32)
        y = np.concatenate(parts)
        return y[0] if alone else y

    def steps(self, sentence: Any) -> TransformerSteps:
        """Compute the embedding of one sentence with every intermediate result, to look at.

        Parameters
        ----------
        sentence : str, pair of str, or sequence of int
            No prompt is put before it.

        Returns
        -------
        selfattn.steps.transformer.TransformerSteps
            What enters the first layer, and of each layer queries, keys and values of every head, scores, weights, sums
            and norms. They are computed in NumPy, and so equal what the model computes up to rounding.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`encode`.
        """
        from selfattn.steps.transformer import transformer_steps  # in NumPy; imported when needed

        given, types = self._ids_and_types(sentence)
        ids, ends = np.asarray(given, np.int64), np.array([0, len(given)])
        return transformer_steps(
            *self._inputs(self._core(), ids, ends, None if types is None else np.asarray(types)),
            tokens=self._pieces(given),
        )


# ------------------------------------------------------------------------------------------------------- parts


class Cut:
    """Counts texts that were cut, to say so once a call."""

    def __init__(self) -> None:
        self.cut, self.texts, self.limit = 0, 0, None

    cut: int
    texts: int
    limit: int | None

    def add(self, cut: int, texts: int, limit: int | None) -> None:
        """Count the texts of a piece."""
        self.cut, self.texts, self.limit = self.cut + cut, self.texts + texts, limit

    def tell(self, depth: int = 3) -> None:
        """Say it where the model was called."""
        if self.cut:
            what = (
                "the text was" if self.texts == 1 else f"{self.cut} of {self.texts} texts were"
            )  # fmt: skip
            warnings.warn(
                f"{what} longer than {self.limit} tokens, the most that the model takes, and cut there",
                stacklevel=depth,
            )


def is_pair(sentence: Any) -> bool:
    """Tell a pair of texts."""
    return (
        isinstance(sentence, tuple | list)
        and len(sentence) == 2
        and all(isinstance(each, str) for each in sentence)
    )


def one_or_many(sentences: Any) -> tuple[bool, Iterable[Any], int | None]:
    """Tell one sentence from many: whether it is one, an iterable, and how many there are, if that is known."""
    if isinstance(sentences, str):
        return True, [sentences], 1
    if isinstance(sentences, np.ndarray) and sentences.ndim == 0 and isinstance(sentences.item(), str):
        return True, [sentences.item()], 1
    if isinstance(sentences, bytes | bytearray | memoryview) or not isinstance(sentences, Iterable):
        raise TypeError(f"sentences must be a str or an iterable of str, not {quoted(sentences)}")
    try:
        total: int | None = len(sentences)  # type: ignore[arg-type]
    except TypeError:
        total = None
    rest = iter(sentences)
    first = list(itertools.islice(rest, 1))
    if first and hasattr(first[0], "__index__") and not getattr(first[0], "ndim", 0):
        return True, [[*first, *rest] if total is None else sentences], 1
    return False, itertools.chain(first, rest), total


def pieces(sentences: Iterable[Any]) -> Iterator[Piece]:
    """Cut an iterable into pieces that are not too large to be tokenised at once."""
    rest, first, most = iter(sentences), 0, FIRST_PIECE
    while True:
        piece: list[Any] = []
        characters = 0
        for sentence in rest:
            piece.append(sentence)
            characters += len(sentence) if isinstance(sentence, str) else 0
            if len(piece) == most or characters >= MOST_CHARACTERS:
                break
        if not piece:
            return
        yield Piece(piece, first)
        first, most = first + len(piece), PIECE


def ahead(pieces: Iterator[P], function: Callable[[P], Q]) -> Iterator[Q]:
    """Map a function that lets go of the GIL, one result ahead, in a thread; pieces are read in the caller's."""
    piece, following = next(pieces, None), next(pieces, None)
    if piece is None:
        return
    if following is None:
        yield function(piece)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        try:
            waiting = pool.submit(function, piece)
        except RuntimeError:  # no more threads are to be had
            yield from map(function, itertools.chain([piece, following], pieces))
            return
        while following is not None:
            coming = pool.submit(function, following)
            yield waiting.result()
            waiting, following = coming, next(pieces, None)
        yield waiting.result()


def groups(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Sort sentences by length, the longest first, and group them by their tokens."""
    group: list[int] = []
    tokens = 0
    for n in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if group and (tokens + lengths[n] > TOKENS or len(group) == most):
            yield group
            group, tokens = [], 0
        group.append(n)
        tokens += lengths[n]
    if group:
        yield group


@contextmanager
def bar(progress: bool, total: int | None, name: str) -> Iterator[Callable[[int], Any]]:
    """Show a bar, if there is to be one; gives what moves it."""
    if not progress:
        yield lambda count: None
        return
    with progress_bar(extra="models", total=total, desc=name, unit=" sentences", dynamic_ncols=True) as shown:
        yield shown.update
