"""Encoders of texts: sentences to embeddings, tokens and logits, any number of them.

Sentences are tokenised some thousand at a time, in a thread, while the core computes those before them (`_sentences`); a call has
them packed one after the other (`_packed`). The result of one does not depend on the others, so their order and the size of a batch
change no bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import _disk
from selfattn._check import Array, check_size, quoted, warn
from selfattn._docs import repeats
from selfattn._extras import bar
from selfattn.engine.transformer import Transformer, pack
from selfattn.functional import softmax
from selfattn.functional._similarity import pairwise_similarities, similarities
from selfattn.models import _names, _pipeline, _tokenizer
from selfattn.models._packed import PackedEncoder
from selfattn.models._pipeline import IN_CORE, Pipeline, normalized, read_pipeline
from selfattn.models._pretrained import Pulled
from selfattn.models._sentences import Chunk, Given, TextIds, computed, is_pair
from selfattn.models._table import FolderWarning
from selfattn.nn.module import Gradients, checked_pullback
from selfattn.text import spelled


class TextEncoder(PackedEncoder):
    """An encoder of texts and token ids. Subclasses name its tables.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The longest sequence.
    tokenizer : tokenizers.Tokenizer or None
    max_seq_length : int
        The most tokens of a text; longer ones are cut there. May be set, and is saved.
    num_labels : int
        How many logits a classifier has.
    """

    tokenizer: Any = None
    pipeline = Pipeline()
    _folder: Path | None = None
    types = 1  # how many texts a sequence has token types for
    _knows_types = True  # the folder's tokenizer tells the texts of a pair apart

    # -------------------------------------------------------------------------------------------------- embeddings

    def encode(
        self,
        sentences: Any,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
        **theirs: Any,
    ) -> Array:
        """Compute the embedding of a sentence, or of each of many.

        Parameters
        ----------
        sentences : str or iterable of str
            Any iterable. Ids, with the special ones, may take the place of a text.
        batch_size : int, optional
            How many sentences go through the model at once at most; it changes no bit. By default as many as have
            16,384 tokens: they are packed one after the other, not padded to the longest.
        progress : bool, default False
            Show a bar with rate and remaining time; needs ``tqdm``.
        normalize : bool, optional
            Scale embeddings to length 1. By default as the folder says; False does not, even if the folder does.
        prompt : str, optional
            A text to put before each sentence, or the name of one of the folder's prompts. By default the prompt that
            the folder names; ``""`` for none.
        **theirs
            Keywords of sentence-transformers: ``prompt_name``; ``normalize_embeddings`` (False leaves it to the folder);
            ``show_progress_bar``; ``truncate_dim``, before normalising; others, such as ``device``, with what is done anyway.

        Returns
        -------
        ndarray of float32, shape (d,) or (n, d)
            The bits of each do not depend on the others, their order, ``batch_size`` or threads.

        Raises
        ------
        TypeError
            A sentence is neither text nor ids; the message says which.
        ValueError
            Lone surrogates, ids beyond the vocabulary, a text without tokens, or a folder without ``tokenizer.json``; or
            ``convert_to_tensor``, ``device``, ``pool``, ``output_value`` or ``precision`` asks for what is not done here.
        ImportError
            ``tqdm`` is not installed: ``pip install 'selfattn[models]'``.

        Warns
        -----
        UserWarning
            How many texts were cut, because they were longer than the model or the folder's ``max_seq_length`` allows.

        Examples
        --------
        ::

            model = models.load("all-MiniLM-L6-v2")
            found = model.encode(["a storm at sea", "tea with milk"]) @ model.encode("the waves rose")
        """
        call = _names.in_our_words(
            "encode", theirs, self.pipeline, batch_size=batch_size, progress=progress, normalize=normalize, prompt=prompt,
            truncate_dim=None,
        )  # fmt: skip
        given = Given(sentences)
        parts = list(self._embeddings(given, **call))
        given.warn(self.tokenizer)
        if not parts:
            return np.empty((0, self.pipeline.width(self.hidden_size, call["truncate_dim"])), np.float32)
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return y[0] if given.alone else y

    @repeats(encode)
    def encode_query(
        self,
        sentences: Any,
        prompt: str | None = None,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        **theirs: Any,
    ) -> Array:
        """Compute the embeddings of queries, for :meth:`similarity` to those of :meth:`encode_document`.

        Parameters
        ----------
        prompt : str, optional
            By default the folder's prompt of the name ``"query"``, none without one.
        """
        prompt = self._prompt("query", prompt, theirs)
        return self.encode(sentences, batch_size, progress, normalize, prompt, **theirs)

    @repeats(encode)
    def encode_document(
        self,
        sentences: Any,
        prompt: str | None = None,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        **theirs: Any,
    ) -> Array:
        """Compute the embeddings of texts that are searched.

        Parameters
        ----------
        prompt : str, optional
            By default the folder's prompt of the name ``"document"``, none without one, as in sentence-transformers: a prompt of
            another name, such as ``"passage"``, must be given.

        Examples
        --------
        ::

            documents = model.encode_document(["a storm at sea", "tea with milk"])
            scores = model.similarity(model.encode_query("the waves rose"), documents)[0]
        """
        prompt = self._prompt("document", prompt, theirs)
        return self.encode(sentences, batch_size, progress, normalize, prompt, **theirs)

    def similarity(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
        """Compute the similarity of each embedding of a with each of b, as the folder means it.

        Parameters
        ----------
        a, b : array_like, shape (n, d), (m, d) or (d,)

        Returns
        -------
        ndarray, shape (n, m)
            The cosine, or what ``similarity_fn_name`` of the folder names: ``"dot"``, the product; ``"euclidean"`` or
            ``"manhattan"``, minus the distance. The most similar have the highest.

        Raises
        ------
        ValueError
            The widths differ.
        """
        return similarities(self.pipeline.similarity, a, b)

    def similarity_pairwise(self, a: npt.ArrayLike, b: npt.ArrayLike) -> Array:
        """Compute the similarity of each embedding of a with the same one of b, as the folder means it.

        Parameters
        ----------
        a, b : array_like, shape (n, d) or (d,)

        Returns
        -------
        ndarray, shape (n,)
        """
        return pairwise_similarities(self.pipeline.similarity, a, b)

    def get_embedding_dimension(self) -> int:
        """Return the width of an embedding."""
        return self.pipeline.width(self.hidden_size)

    get_sentence_embedding_dimension = get_embedding_dimension  # its older name

    @property
    def max_seq_length(self) -> int:
        """The most tokens of a text; longer ones are cut there."""
        cutting = getattr(self.tokenizer, "truncation", None) or {}
        return int(cutting.get("max_length", self.max_positions))

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        if check_size("max_seq_length", value) > (most := self.max_positions):
            raise ValueError(f"max_seq_length is {value}; this model takes {most} tokens at most")
        direction = (self.tokenizer.truncation or {}).get("direction", "right")
        _tokenizer.check_room(self.tokenizer, value)
        self.tokenizer.enable_truncation(value, direction=direction)
        self.pipeline.keep_length(value)

    def _prompt(self, name: str, given: str | None, theirs: dict[str, Any]) -> str | None:
        """Return what was given, or the folder's prompt of a name if nothing was."""
        if given is not None or theirs.get("prompt_name") is not None:
            return given
        return self.pipeline.prompts.get(name, "")

    def encode_to(
        self,
        path: _disk.PathLike,
        sentences: Iterable[Any],
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
    ) -> Array:
        """Write the embeddings of many sentences to a ``.npy`` file, chunk by chunk.

        Neither the sentences nor the embeddings need fit into memory.

        Parameters
        ----------
        path : path
            An existing file is replaced once the new one is whole.
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
        given = Given(sentences)
        if given.alone:
            raise TypeError(f"sentences must be an iterable of sentences, not {quoted(sentences)}")
        parts = self._embeddings(given, batch_size, progress, normalize, prompt)
        _disk.write_rows(Path(path), parts, self.pipeline.width(self.hidden_size), np.float32)
        given.warn(self.tokenizer)
        y: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return y

    def _embeddings(
        self,
        given: Given,
        batch_size: int | None,
        progress: bool,
        normalize: bool | None,
        prompt: str | None,
        truncate_dim: int | None = None,
    ) -> Iterator[Array]:
        """Compute the embeddings of sentences, a chunk at a time."""
        pipeline = self.pipeline

        def compute(ids: Array, cu_seqlens: Array, types: Array | None, skipped: list[int] | None) -> Array:
            modes = pipeline.modes
            if skipped is None and len(modes) == 1 and modes[0] in IN_CORE:
                y = self._rows(ids, cu_seqlens, IN_CORE[modes[0]], types)
            else:
                rows = self._rows(ids, cu_seqlens, None, types)
                y = _pipeline.pool(rows, cu_seqlens, modes, skipped or [0] * (len(cu_seqlens) - 1))
            return pipeline.finish(y, normalize, truncate_dim)

        skips = not pipeline.include_prompt
        return self._computed("encode", given, batch_size, progress, prompt, compute, skips)

    def _computed(
        self,
        name: str,
        given: Given,
        batch_size: int | None,
        progress: bool,
        prompt: str | None,
        compute: Callable[[Array, Array, Array | None, list[int] | None], Array],
        skips: bool = False,
    ) -> Iterator[Array]:
        """Tokenise chunks with a prompt before each text, one ahead, and compute each in packed calls.

        ``skips`` if ``compute`` is to know how many tokens of each belong to the prompt.
        """
        most = sys.maxsize if batch_size is None else check_size("batch_size", batch_size)
        before, ids = self.pipeline.prompt(prompt), self._text_ids()
        skip = ids.prompt_length(before) if skips and before else 0
        refuse = prompt is not None and bool(before)
        prepare = partial(ids.ready, before=before, skip=skip, refuse_ids=refuse)
        with bar(progress, given.total, name) as done:
            yield from computed(given, prepare, compute, most, done)

    def _text_ids(self) -> TextIds:
        types = self.types if self.type_table is not None and self._knows_types else 1
        return TextIds(self.tokenizer, self._folder, self.vocab_size, self.max_positions, types)

    # ---------------------------------------------------------------------------------------------- others

    def tokens(self, sentence: Any) -> list[str]:
        """Return the tokens of a sentence, as strings, special ones included.

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
        ids = self._ids(sentence)
        if self.tokenizer is None:
            raise ValueError(_tokenizer.missing(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids]

    def _ids(self, sentence: Any) -> Sequence[int]:
        """Return the ids of one text or pair, or check those that are given."""
        return self._ids_and_types(sentence)[0]

    def _ids_and_types(self, sentence: Any) -> tuple[Sequence[int], Sequence[int] | None]:
        given, ready = Given([sentence]), self._text_ids().ready(Chunk([sentence], 0))
        given.add(ready)
        given.warn(self.tokenizer)
        return ready.ids[0], None if ready.types is None else ready.types[0]

    def predict(
        self, sentences: Any, batch_size: int | None = None, progress: bool = False, **theirs: Any
    ) -> Array:
        """Compute the logits of a classifier or cross-encoder.

        Parameters
        ----------
        sentences : str, pair of str, or iterable of such
            A tuple of two texts is a pair. Ids may take the place of a text.
        batch_size, progress
            As for :meth:`encode`.
        **theirs
            Keywords of sentence-transformers: ``activation_fn``, a function of all logits, or ``"Sigmoid"``; ``apply_softmax``
            over several labels; ``prompt``, before each first text; others as for :meth:`encode`.

        Returns
        -------
        ndarray of float32, shape (labels,) or (n, labels)
            Logits, not probabilities: of one label, sentence-transformers' CrossEncoder returns ``1 / (1 + exp(-x))`` by
            default. The bits of each do not depend on the others.

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
        self._classifier()
        call = _names.in_our_words(
            "predict", theirs, self.pipeline, progress=progress, prompt=None, activation_fn="Identity", apply_softmax=False
        )  # fmt: skip
        pair = isinstance(sentences, tuple) and is_pair(sentences)
        given = Given([sentences] if pair else sentences)
        how = batch_size, call["progress"], call["prompt"]
        parts = list(self._computed("predict", given, *how, lambda *packed: self._logits(*packed[:3])))
        given.warn(self.tokenizer)
        y = np.concatenate(parts or [np.empty((0, self.num_labels), np.float32)])
        y = _names.activated(y, call["activation_fn"])
        y = softmax(y) if call["apply_softmax"] and self.num_labels > 1 else y
        return y[0] if pair or given.alone else y

    def rank(
        self,
        query: str,
        documents: Iterable[str],
        top_k: int | None = None,
        return_documents: bool = False,
        batch_size: int | None = None,
        progress: bool = False,
        **theirs: Any,
    ) -> list[dict[str, Any]]:
        """Sort documents by the scores of a cross-encoder for them and a query, the best first.

        Parameters
        ----------
        query : str
        documents : iterable of str
        top_k : int, optional
            How many to return at most; by default all.
        return_documents : bool, default False
        batch_size, progress, **theirs
            As for :meth:`predict`. By default ``activation_fn`` is the folder's, as in sentence-transformers.

        Returns
        -------
        list of dict
            ``corpus_id``, a document's number, ``score``, and ``text`` if asked for.

        Raises
        ------
        TypeError, ValueError
            As for :meth:`predict`; or the model has several labels.
        """
        if self._classifier() and (labels := self.num_labels) != 1:
            raise ValueError(f"rank needs one label, and the model has {labels}; predict has a score of each")
        if isinstance(documents, str):
            raise TypeError(f"documents must be an iterable of str, not {quoted(documents)}")
        texts, most = list(documents), None if top_k is None else check_size("top_k", top_k)
        of_folder = _names.folder_activation(self.config, self.pipeline, labels)
        theirs["activation_fn"] = theirs.get("activation_fn") or of_folder
        scores = self.predict([(query, text) for text in texts], batch_size, progress, **theirs)
        found = [{"corpus_id": n, "score": score} for n, score in enumerate(scores[:, 0].tolist())]
        found = sorted(found, key=lambda each: each["score"], reverse=True)[:most]
        return [each | {"text": texts[each["corpus_id"]]} for each in found] if return_documents else found

    def _one(self, text: Any) -> tuple[Transformer, Array, list[str] | None]:
        ids, types = self._ids_and_types(text)
        tokens = None if self.tokenizer is None else spelled(self.tokenizer, ids)
        return *self._of_ids(ids, types), tokens

    def _of_ids(self, given: Sequence[int], types: Sequence[int] | None) -> tuple[Transformer, Array]:
        """Return the core's settings for one sentence, and what goes into the core."""
        ids, cu_seqlens = np.asarray(given, np.int64), np.array([0, len(given)])
        self._check_ids(ids, cu_seqlens)
        settings, _ = self._built(len(ids))
        return self._inputs(settings, ids, cu_seqlens, None if types is None else np.asarray(types))

    def forward(self, sentences: Any) -> Array:
        """Compute embeddings, as :meth:`encode` does; a classifier's or cross-encoder's logits, as :meth:`predict` does.

        Parameters
        ----------
        sentences : str, pair of str, sequence of int, or list of such

        Returns
        -------
        ndarray, shape (d,) or (n, d), or of logits (labels,) or (n, labels)
        """
        return self.encode(sentences) if self.head is None else self.predict(sentences)

    @repeats(forward)
    def vjp(self, sentences: Any) -> tuple[Array, Pulled]:
        """Compute embeddings or logits, and their pullback, ``dy -> grads``, without gradients of parameters that took no part.

        Raises
        ------
        NotImplementedError
            The folder's pooling is not mean, cls or last token, leaves the prompt out, or a Dense follows it.

        Warns
        -----
        UserWarning
            Texts were cut, as for :meth:`encode`.
        """
        pipeline = self.pipeline
        before = pipeline.prompt(None)
        after = [dense for _, dense in pipeline.after]
        pools = len(pipeline.modes) == 1 and pipeline.modes[0] in IN_CORE
        skips = before and not pipeline.include_prompt
        if self.head is None and (not pools or any(after) or pipeline.truncate_dim or skips):
            need = "a pooling of mean, cls or last token, over the prompt as well, and no Dense after it"
            raise NotImplementedError(f"gradients need {need}")
        pair = self.head is not None and isinstance(sentences, tuple) and is_pair(sentences)
        given = Given([sentences] if pair else sentences)
        ready = self._text_ids().ready(Chunk(list(given.sentences), 0), before)
        given.add(ready)
        given.warn(self.tokenizer)
        ids, cu_seqlens = pack(ready.ids)
        types = None if ready.types is None else pack(ready.types)[0]
        pooling = IN_CORE[pipeline.modes[0]] if self.head is None else "first"
        rows, pulled = self._rows_vjp(ids, cu_seqlens, pooling, types)
        if self.head is None:
            y = unit = normalized(rows) if after else rows
        else:
            y, of_head = self._head_vjp(rows)

        def backward(dy: Array) -> Gradients:
            d = dy.reshape(len(rows), -1)
            more: Gradients = {}
            if self.head is not None:
                d, more = of_head(d)
            elif after:  # d/dx of x / |x|
                length = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
                d = ((d - unit * (d * unit).sum(axis=1, keepdims=True)) / length).astype(rows.dtype)
            return self._named(pulled(d) | more)

        y = y[0] if pair or given.alone else y
        tables = (self.word_table, self.type_table, self.position_table)  # no gradient depends on them
        used = [array for name, array in self.arrays.items() if name not in tables]
        return y, checked_pullback(self, y, used, backward)


def attach(model: TextEncoder, folder: Path) -> None:
    """Give a model the tokenizer of a folder, and the pipeline of its sentence-transformers files."""
    pipeline, inner = read_pipeline(folder, classifies=model.head is not None)
    tokenizer, config = _tokenizer.load_tokenizer(inner, pipeline.lowercase)
    for name in ("special_tokens_map.json", _tokenizer.TOKENIZER_CONFIG):
        if (inner / name).exists():
            pipeline.kept[name] = (inner / name).read_bytes()
    if tokenizer is not None:
        _tokenizer.check_vocabulary(tokenizer, model.vocab_size, inner)
        limits = [pipeline.longest or config.get("model_max_length"), model.max_positions]
        known = [int(n) for n in limits if isinstance(n, int | float) and n < 2**31]
        _tokenizer.check_room(tokenizer, min(known))
        tokenizer.enable_truncation(min(known), direction=config["truncation_side"])
    chats = config.get("chat_template") is not None or (inner / "chat_template.jinja").exists()
    if chats and _pipeline.MODULES not in pipeline.kept:
        what = "sentence-transformers would put each text into the chat template of this folder, which has no"
        warn(FolderWarning(f"{inner}: {what} {_pipeline.MODULES}; here a text is embedded as it is"))
    model.tokenizer, model.pipeline, model._folder = tokenizer, pipeline, inner
    model._knows_types = _tokenizer.gives_types(config, model.config)


def text_files(model: TextEncoder) -> dict[str, bytes]:
    """Return the files of a model's tokenizer and pipeline, by their path in the folder that it is saved in."""
    found = _pipeline.pipeline_files(model.pipeline)
    if model.tokenizer is not None:
        found[_tokenizer.TOKENIZER] = _tokenizer.without_cutting(model.tokenizer).encode()
    return found
