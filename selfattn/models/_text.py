"""Encoders of text: tokens, embeddings, hidden states, logits, of any number of sentences, packed without padding."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from selfattn._extras import import_extra
from selfattn.functional._arguments import check_size
from selfattn.models._encoder import Pulled, TextEncoder
from selfattn.models._pipeline import Pipeline, normalized, prompt_of
from selfattn.nn._arrays import Array, Gradients
from selfattn.nn.embedding_model import quoted

PIECE = 4096  # sentences that are read and sorted at a time
TOKENS = 16384  # of a call of the core

Sentence: TypeAlias = str | Sequence[int] | tuple[str, str]


class _Tokens(NamedTuple):
    """Sentences as ids, one behind the other."""

    ids: Array
    starts: Array
    types: Array | None  # where a text is the second of a pair
    cut: int  # how many were longer


class TextModel(TextEncoder):
    """What encoders of text can do. `load` gives a model its tokenizer and what a sentence-transformers folder says.

    Attributes
    ----------
    tokenizer : tokenizers.Tokenizer or None
        None: only ids are taken.
    pipeline : Pipeline
        Pooling and what follows; a bare encoder takes the mean.
    """

    tokenizer: Any = None
    pipeline: Pipeline = Pipeline()

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sentence, special ones included; longer ones are cut, with a warning."""
        own = self.pipeline.max_tokens
        return self.max_positions if own is None else min(int(own), self.max_positions)

    # ------------------------------------------------------------------------------------------------------ tokens

    def tokens(self, sentence: str) -> list[str]:
        """Return the pieces of a sentence, special tokens included.

        Parameters
        ----------
        sentence : str

        Returns
        -------
        list of str
            At most :attr:`max_tokens`.
        """
        if not isinstance(sentence, str):
            raise TypeError(f"sentence must be a str, not {quoted(sentence)}")
        found = self._encodings([sentence], 0, "")[0].tokens
        return list(found)

    def _encodings(self, sentences: Sequence[Any], first: int, prompt: str) -> list[Any]:
        if self.tokenizer is None:
            raise ValueError(f"this {type(self).__name__} has no tokenizer.json: give ids in place of texts")
        texts = [self._prepared(sentence, first + n, prompt) for n, sentence in enumerate(sentences)]
        self.tokenizer.enable_truncation(self.max_tokens)
        found: list[Any] = self.tokenizer.encode_batch(texts)
        return found

    def _prepared(self, sentence: Any, n: int, prompt: str) -> Any:
        """Check a text, or a pair of texts, and lower it if the model wants that."""
        parts = sentence if isinstance(sentence, tuple | list) else (sentence,)
        if len(parts) not in (1, 2) or not all(isinstance(part, str) for part in parts):
            raise TypeError(f"sentence {n} must be a str, a pair of them or a list of ids, not {quoted(sentence)}")
        for part in parts:
            try:
                part.encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"sentence {n} is no text: {error}") from None
        texts = [part.lower() if self.pipeline.lower else part for part in parts]
        return prompt + texts[0] if len(texts) == 1 else (texts[0], texts[1])

    def _tokenize(self, sentences: Sequence[Any], first: int = 0, prompt: str = "") -> _Tokens:
        """Turn sentences into ids. Those that are ids already stay as they are."""
        lists: list[Any] = [None] * len(sentences)
        types: list[Any] = [None] * len(sentences)
        texts = []
        for n, sentence in enumerate(sentences):
            if isinstance(sentence, str) or (isinstance(sentence, tuple | list) and sentence and isinstance(sentence[0], str)):
                texts.append(n)
            else:
                lists[n] = self._checked_ids(sentence, first + n)
        cut = 0
        if texts:
            for n, encoding in zip(texts, self._encodings([sentences[n] for n in texts], first, prompt), strict=True):
                lists[n] = encoding.ids
                types[n] = encoding.type_ids if isinstance(sentences[n], tuple | list) else None
                cut += bool(encoding.overflowing)
                if not lists[n]:
                    raise ValueError(f"sentence {first + n}, {quoted(sentences[n])}, has no tokens")
        lengths = [len(ids) for ids in lists]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        ids = np.concatenate([np.asarray(own, np.int64) for own in lists]) if lists else np.zeros(0, np.int64)
        of_types = None
        if any(own is not None for own in types):
            of_types = np.concatenate([np.asarray(own or [0] * n, np.int64) for own, n in zip(types, lengths, strict=True)])
        return _Tokens(ids, starts, of_types, cut)

    def _checked_ids(self, sentence: Any, n: int) -> Array:
        ids = np.asarray(sentence) if isinstance(sentence, list | tuple | np.ndarray) else np.empty(0, object)
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise TypeError(f"sentence {n} must be a str or a list of ids, not {quoted(sentence)}")
        if not 0 < len(ids) <= self.max_positions:
            raise ValueError(f"sentence {n} has {len(ids)} ids; this model takes 1 to {self.max_positions}")
        self._check(ids, np.array([0, len(ids)]))
        return ids

    def _warn(self, cut: int) -> None:
        if cut:
            warnings.warn(f"{cut} texts were longer than {self.max_tokens} tokens and have been cut", stacklevel=3)

    # -------------------------------------------------------------------------------------------------- embeddings

    def encode(
        self,
        sentences: str | Iterable[Any],
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Array:
        """Compute the embeddings of sentences.

        Parameters
        ----------
        sentences : str, or iterable of str or of lists of ids
            Any iterable, a generator too: it is read some thousand sentences at a time.
        batch_size : int, optional
            The most sentences of one call of the core. It changes no bit; None is fastest.
        progress : bool, default False
            Show a progress bar, with rate and remaining time; needs ``tqdm``.
        normalize : bool, optional
            Give embeddings the length 1, or leave their length. None: as the folder says.
        prompt : str, optional
            What goes before each text: the name of one of the folder's prompts, or a text. None: the folder's default.

        Returns
        -------
        ndarray, shape (n, d), or (d,) for one str
            A sentence's bits depend neither on the others, nor on their order, on ``batch_size`` or on threads.

        Raises
        ------
        TypeError, ValueError
            A sentence is no text, or has ids beyond the vocabulary; the message says which.
        ImportError
            ``tokenizers`` or ``tqdm`` is not installed: ``pip install 'selfattn[models]'``.

        Warns
        -----
        UserWarning
            Texts were longer than the model takes, and have been cut.
        """
        alone = isinstance(sentences, str)
        if not alone and not isinstance(sentences, Iterable):
            raise TypeError(f"sentences must be a str or an iterable of them, not {quoted(sentences)}")
        given: Any = [sentences] if alone else sentences
        pieces = list(self._pieces(given, batch_size, progress, normalize, prompt))
        y = np.concatenate(pieces) if pieces else self._finish(np.zeros((0, self.hidden_size), np.float32), normalize)
        return y[0] if alone else y

    def encode_to(
        self,
        path: str | os.PathLike[str],
        sentences: Iterable[Any],
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Array:
        """Compute the embeddings of sentences into a ``.npy`` file, piece by piece: neither need fit into memory.

        Parameters
        ----------
        path : path
            A file that is there is replaced, once the new one is whole.
        sentences, batch_size, progress, normalize, prompt
            As for :meth:`encode`.

        Returns
        -------
        ndarray, shape (n, d)
            The file, mapped into memory for reading.
        """
        path = Path(path)
        if isinstance(sentences, str) or not isinstance(sentences, Iterable):
            raise TypeError(f"sentences must be an iterable of str, not {quoted(sentences)}")
        part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        count, width = 0, len(self._finish(np.zeros((1, self.hidden_size), np.float32), normalize)[0])
        try:
            with part.open("xb") as file:
                header = _npy_header(0, width)
                file.write(header)
                for piece in self._pieces(sentences, batch_size, progress, normalize, prompt):
                    file.write(np.ascontiguousarray(piece).tobytes())
                    count += len(piece)
                file.seek(0)
                file.write(_npy_header(count, width))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        found: Array = np.load(path, mmap_mode="r") if count else np.load(path)
        return found

    def _pieces(
        self, sentences: Iterable[Any], batch_size: int | None, progress: bool, normalize: bool | None, prompt: str | None
    ) -> Iterator[Array]:
        """Yield embeddings in order. The next piece is tokenized in the library's threads while the core computes."""
        batch_size = None if batch_size is None else check_size("batch_size", batch_size)
        text = prompt_of(self.pipeline, prompt)
        skip = self._prompt_tokens(text)
        bar = None
        if progress:
            total = len(sentences) if hasattr(sentences, "__len__") else None
            bar = import_extra("tqdm.auto", "models").tqdm(total=total, desc="encode", unit="sentence")
        cut, first, source = 0, 0, iter(sentences)
        try:
            with ThreadPoolExecutor(1) as pool:
                piece = list(islice(source, PIECE))
                waiting = pool.submit(self._tokenize, piece, first, text) if piece else None
                while waiting is not None:
                    tokens = waiting.result()
                    first += len(piece)
                    piece = list(islice(source, PIECE))
                    waiting = pool.submit(self._tokenize, piece, first, text) if piece else None
                    cut += tokens.cut
                    yield self._embed(tokens, batch_size, normalize, skip, bar)
        finally:
            if bar is not None:
                bar.close()
        self._warn(cut)

    def _prompt_tokens(self, prompt: str) -> int:
        """Return how many tokens pooling leaves out: those of a prompt, and the special ones before it."""
        if not prompt or self.pipeline.include_prompt:
            return 0
        return len(self._encodings([prompt], 0, "")[0].ids) - 1  # but the special one behind it

    def _embed(self, tokens: _Tokens, batch_size: int | None, normalize: bool | None, skip: int, bar: Any) -> Array:
        lengths = np.diff(tokens.starts)
        order = np.argsort(lengths, kind="stable")
        found: list[Any] = []
        for chosen in _batches(order, lengths, batch_size):
            ids, starts, types = _chosen(tokens, chosen)
            found.append(self._pooled(ids, starts, types, normalize, skip))
            if bar is not None:
                bar.update(len(chosen))
        y = np.empty((len(lengths), found[0].shape[1]), found[0].dtype)
        y[order] = np.concatenate(found)
        return y

    def _pooled(self, ids: Array, starts: Array, types: Array | None, normalize: bool | None, skip: int) -> Array:
        pooling = None if skip else self.pipeline.core_pooling
        rows = self._rows(ids, starts, pooling, types)
        if pooling is None:
            rows = self.pipeline.pool(rows, starts, skip)
            return self.pipeline.finish(rows, np.ones(len(rows)), normalize)
        return self.pipeline.finish(rows, np.diff(starts), normalize)

    def _finish(self, pooled: Array, normalize: bool | None) -> Array:
        wide = np.tile(pooled, (1, len(self.pipeline.modes)))
        return self.pipeline.finish(wide, np.ones(len(wide)), normalize)

    # ---------------------------------------------------------------------------------------- a module's own calls

    def forward(self, sentences: Any) -> Array:
        """Compute embeddings, as :meth:`encode` does.

        Parameters
        ----------
        sentences : str, or list of str or of lists of ids

        Returns
        -------
        ndarray, shape (d,) or (n, d)
        """
        return self.encode(sentences)

    def vjp(self, sentences: Any) -> tuple[Array, Pulled]:
        """Compute embeddings and their pullback, ``dy -> grads``.

        Parameters
        ----------
        sentences : str, or list of str or of lists of ids

        Returns
        -------
        y : ndarray, shape (d,) or (n, d)
        pullback : callable
            ``grads = pullback(dy)``, keyed like :meth:`parameters`, without those that took no part.

        Raises
        ------
        NotImplementedError
            The folder's pooling is none of mean, cls and last token, or a Dense follows it.
        """
        pipeline = self.pipeline
        pooling = pipeline.core_pooling
        if pooling is None or pipeline.modes[0] == "mean_sqrt_len_tokens" or any(s != "normalize" for s in pipeline.steps):
            raise NotImplementedError("gradients need a pooling of mean, cls or last token, and no Dense behind it")
        alone = isinstance(sentences, str)
        tokens = self._tokenize([sentences] if alone else list(sentences), 0, prompt_of(pipeline, None))
        self._warn(tokens.cut)
        rows, pulled = self._rows_vjp(tokens.ids, tokens.starts, pooling, tokens.types)
        y = normalized(rows) if pipeline.steps else rows

        def pullback(dy: Any) -> Gradients:
            d = np.asarray(dy, rows.dtype).reshape(rows.shape)
            if pipeline.steps:  # d/dx of x / |x|
                length = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
                d = ((d - y * (d * y).sum(axis=1, keepdims=True)) / length).astype(rows.dtype)
            return self._named(pulled(d))

        return (y[0] if alone else y), pullback

    def hidden_states(self, sentence: str | Sequence[int]) -> list[Array]:
        """Compute what enters the first layer, and what leaves each layer, of one sentence.

        Parameters
        ----------
        sentence : str or sequence of int

        Returns
        -------
        list of ndarray, shape (L, d)
            The last is the encoder's result, behind its final norm if it has one.
        """
        tokens = self._tokenize([sentence])
        self._warn(tokens.cut)
        return self._states(tokens.ids)

    def predict(self, pairs_or_sentences: Any, batch_size: int | None = None) -> Array:
        """Compute the logits of a sequence classifier or cross-encoder.

        Parameters
        ----------
        pairs_or_sentences : str, pair of str, or iterable of either
        batch_size : int, optional
            As for :meth:`encode`.

        Returns
        -------
        ndarray, shape (n, labels), or (labels,) for one
            Without a sigmoid or softmax.

        Raises
        ------
        TypeError
            The model is no classifier.
        """
        if not hasattr(self, "_logits"):
            raise TypeError(f"a {type(self).__name__} has no classifier: load a folder of a sequence classifier or cross-encoder")
        alone = isinstance(pairs_or_sentences, str) or (
            isinstance(pairs_or_sentences, tuple) and len(pairs_or_sentences) == 2 and isinstance(pairs_or_sentences[0], str)
        )
        tokens = self._tokenize([pairs_or_sentences] if alone else list(pairs_or_sentences))
        self._warn(tokens.cut)
        lengths = np.diff(tokens.starts)
        order = np.argsort(lengths, kind="stable")
        y = np.empty((len(lengths), self.num_labels), self.arrays[self.word_table].dtype)  # type: ignore[attr-defined]
        for chosen in _batches(order, lengths, batch_size):
            y[chosen] = self._logits(*_chosen(tokens, chosen))
        return y[0] if alone else y


def _batches(order: Array, lengths: Array, batch_size: int | None) -> Iterator[Array]:
    """Cut sentences, sorted by length, into calls of about as many tokens."""
    ends = np.cumsum(lengths[order])
    first = 0
    while first < len(order):
        before = ends[first - 1] if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + TOKENS, "right")))
        last = last if batch_size is None else min(last, first + batch_size)
        yield order[first:last]
        first = last


def _chosen(tokens: _Tokens, chosen: Array) -> tuple[Array, Array, Array | None]:
    """Return ids, offsets and types of some of the sentences."""
    lengths = np.diff(tokens.starts)[chosen]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1] - tokens.starts[chosen], lengths)
    return tokens.ids[places], starts, None if tokens.types is None else tokens.types[places]


def _npy_header(rows: int, columns: int) -> bytes:
    """Return the header of a .npy file of float32, always of the same length (NumPy's format 1.0)."""
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {columns}), }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"
