"""Encoders of texts: sentences to embeddings, any number of them.

Sentences are tokenised some thousand at a time, in a thread, while the core computes those before them; a call of the
core has them packed one after the other. The result of one does not depend on the others, so their order and the size
of a batch change no bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn.engine import (
    Array,
    bar,
    check_size,
    copy_doc,
    disk,
    pairwise_similarities,
    quoted,
    similarities,
    transformer,
    warn,
)
from selfattn.engine.transformer import Call, Transformer, check_ids, without_table
from selfattn.nn.module import Gradients, checked_pullback
from selfattn.text import spelled
from selfattn_models import _pipeline, _tokenizer
from selfattn_models._keywords import rename_arguments
from selfattn_models._known_settings import FolderWarning
from selfattn_models._pipeline import Pipeline, normalized, pool, read_pipeline
from selfattn_models._pretrained import Pretrained, Pulled, Shapes, linear
from selfattn_models._tokenizer import (
    Chunk,
    Sentences,
    Text,
    TokenBatch,
    chunks,
    is_pair,
    map_ahead,
)


class TextEncoder(Pretrained):
    """An encoder of texts and token ids.

    Subclasses name its tables: of words, of which text a token belongs to, of positions.

    Attributes
    ----------
    vocab_size : int
    max_positions : int
        The longest sequence.
    tokenizer : tokenizers.Tokenizer or None
    max_seq_length : int
        The most tokens of a text; longer ones are cut there. May be set, and is saved.
    """

    vocab_size: int
    max_positions: int
    word_table: ClassVar[str]
    type_table: ClassVar[str | None] = None
    position_table: ClassVar[str | None] = None
    first_position = 0
    pad: int | None = None  # an id that positions do not count; its position is the one before the first
    types = 1  # how many texts a sequence has token types for
    has_fixed_settings = True  # they depend on no lengths or parameters' values, so they are made once
    has_pooler: ClassVar[bool] = False  # files may hold a pooler, which classifiers use
    # In a classifier: the first layer, the activation and the second layer, on the first token's last hidden state.
    head: ClassVar[tuple[str, str, str] | None] = None
    tokenizer: Any = None
    _folder: Path | None = None
    _knows_types = True  # the folder's tokenizer tells the texts of a pair apart

    @cached_property
    def pipeline(self) -> Pipeline:
        """What comes after the transformer: of a model without a folder the mean."""
        return Pipeline()

    # -------------------------------------------------------------------------------------------------- embeddings

    def encode(
        self,
        sentences: Any,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        prompt: str | None = None,
        truncate_dim: int | None = None,
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
        truncate_dim : int, optional
            The width to which embeddings are cut, before normalising. By default as the folder says.
        **theirs
            Keywords of sentence-transformers: ``prompt_name``; ``normalize_embeddings`` (False leaves it to the
            folder); ``show_progress_bar``; others, such as ``device``, with what is done anyway.

        Returns
        -------
        ndarray of float32, shape (d,) or (n, d)
            The bits of each do not depend on the others, their order, ``batch_size`` or threads.

        Raises
        ------
        TypeError
            A sentence is neither text nor ids; the message says which.
        ValueError
            Lone surrogates, ids beyond the vocabulary, a text without tokens, or a folder without ``tokenizer.json``;
            or ``convert_to_tensor``, ``device``, ``pool``, ``output_value`` or ``precision`` asks for what is not
            done here.
        ImportError
            ``tqdm`` is not installed.

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
        if theirs:
            ours = {"batch_size": batch_size, "progress": progress, "normalize": normalize, "prompt": prompt}
            ours["truncate_dim"] = truncate_dim
            return self.encode(sentences, **rename_arguments("encode", theirs, self.pipeline, **ours))
        given = Sentences(sentences)
        parts = list(self._embeddings(given, batch_size, progress, normalize, prompt, truncate_dim))
        given.warn(self.tokenizer)
        if not parts:
            return np.empty((0, self.pipeline.width(self.hidden_size, truncate_dim)), np.float32)
        y = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return y[0] if given.alone else y

    def _embeddings(
        self,
        given: Sentences,
        batch_size: int | None,
        progress: bool,
        normalize: bool | None,
        prompt: str | None,
        truncate_dim: int | None = None,
    ) -> Iterator[Array]:
        """Tokenise sentences, group them, run the transformer, finish its rows: embeddings, a chunk at a time."""
        if truncate_dim is not None:
            check_size("truncate_dim", truncate_dim)
        most = sys.maxsize if batch_size is None else check_size("batch_size", batch_size)
        pipeline, pooling = self.pipeline, self.pipeline.core_pooling
        with bar(progress, given.total, "encode") as done:
            for batch in self._token_batches(given, prompt, skips_prompt=not pipeline.include_prompt):
                parts: list[Array] = []
                order: list[int] = []
                for group in batch.groups(most):
                    ids, cu_seqlens, types, skipped = batch.pack(group)
                    if pooling is not None and skipped is None:
                        rows = self._rows(ids, cu_seqlens, pooling, types)
                    else:
                        states = self._rows(ids, cu_seqlens, None, types)
                        rows = pool(states, cu_seqlens, pipeline.modes, skipped)
                    parts.append(pipeline.finish(rows, normalize, truncate_dim))
                    order += group
                    done(len(group))
                yield in_order(parts, order)

    def _token_batches(
        self, given: Sentences, prompt: str | None, skips_prompt: bool = False
    ) -> Iterator[TokenBatch]:
        """Tokenise sentences in chunks, with a prompt before each text; the next chunk while one is used."""
        before = self.pipeline.prompt(prompt)
        skip = _tokenizer.prompt_length(self.tokenizer, before) if skips_prompt and before else 0
        refuse = prompt is not None and bool(before)  # ids can have no prompt
        tokenise = partial(self._token_batch, before=before, skip=skip, refuse_ids=refuse)
        for batch in map_ahead(tokenise, chunks(given.sentences)):
            given.add(batch)
            yield batch

    def _token_batch(
        self, chunk: Chunk, before: str = "", skip: int = 0, refuse_ids: bool = False
    ) -> TokenBatch:
        """Turn a chunk into ids, with a prompt ``before`` each text, and into types if some of them differ.

        ``skip`` tokens of each text are the prompt's, and are not pooled.
        """
        given = dict(enumerate(chunk.sentences, chunk.first))
        texts: dict[int, Text] = {n: before + x for n, x in given.items() if isinstance(x, str)}
        texts |= {n: (before + x[0], x[1]) for n, x in given.items() if is_pair(x)}
        if texts and self.tokenizer is None:
            raise ValueError(_tokenizer.missing_message(self._folder))
        most_types = self.types if self.type_table is not None and self._knows_types else 1
        found, of_texts, cut = _tokenizer.tokenize(self.tokenizer, texts, most_types > 1)
        ids = [found[n] if n in texts else self._given_ids(x, n, refuse_ids) for n, x in given.items()]
        _tokenizer.check_tokens(ids, given, self.vocab_size, skip)
        types: list[Sequence[int]] | None = None
        if any(map(any, of_texts.values())):
            if (most := max(map(max, of_texts.values()))) >= most_types:
                raise ValueError(f"the tokenizer made the token type {most}; type_vocab_size is {most_types}")
            types = [of_texts[n] if n in texts else [0] * len(own) for n, own in zip(given, ids, strict=True)]
        return TokenBatch(ids, types, [skip * (n in texts) for n in given] if skip else None, cut)

    def _given_ids(self, ids: Any, number: int, refuse: bool) -> Sequence[int]:
        """Check ids that are given in place of a text."""
        if refuse:
            raise TypeError(f"a prompt goes before text; sentence {number} is ids")
        return _tokenizer.checked_ids(ids, number, self.vocab_size, self.max_positions)

    def _rows(self, ids: Array, cu_seqlens: Array, pooling: Any = None, types: Array | None = None) -> Array:
        """Compute the last hidden states of packed sequences, or one row for each."""
        self._check_ids(ids, cu_seqlens)
        if self.has_fixed_settings and self._are_plain(ids, types):  # views: changed weights show through
            if "settings" not in self._prepared:
                self._prepared["settings"], _ = self._built(self.max_positions)
            settings, inputs = self._prepared["settings"], ids
        else:
            settings, _ = self._built(int(np.diff(cu_seqlens).max(initial=1)))
            settings, inputs = self._inputs(settings, ids, cu_seqlens, types)
        return transformer.forward(settings, inputs, cu_seqlens, Call(pooling=pooling))

    def _inputs(
        self, settings: Transformer, ids: Array, cu_seqlens: Array, types: Array | None
    ) -> tuple[Transformer, Array]:
        """Return the ids, or the rows of a table's sums if the core would look up other ones."""
        if self._are_plain(ids, types):
            return settings, ids
        assert settings.table is not None
        rows = settings.table[ids]
        if self.type_table is not None:
            rows = rows + self.arrays[self.type_table][0 if types is None else types]
        if self.position_table is not None:
            rows = rows + self.arrays[self.position_table][self._places(ids, cu_seqlens)]
        return without_table(settings), rows

    def _are_plain(self, ids: Array, types: Array | None) -> bool:
        """Tell whether the core looks up the right rows: all types are 0, and no position is left out."""
        of_one_text = types is None or self.type_table is None or not types.any()
        return of_one_text and (self.pad is None or not np.any(ids == self.pad))

    def _places(self, ids: Array, cu_seqlens: Array) -> Array:
        """Return each token's row of the table of positions."""
        counted = np.ones(len(ids), bool) if self.pad is None else ids != self.pad
        before = np.cumsum(np.append(0, counted))
        places = before[:-1] - np.repeat(before[cu_seqlens[:-1]], np.diff(cu_seqlens))
        found: Array = self.first_position + np.where(counted, places, -1)
        return found

    def _check_ids(self, ids: Array, cu_seqlens: Array) -> None:
        longest = int(np.diff(cu_seqlens).max(initial=0))
        if longest > (most := self.max_positions):
            raise ValueError(f"a sequence has {longest} tokens; this model takes {most} at most")
        check_ids(ids, self.vocab_size, "the vocabulary of this model; one is")

    def _more_shapes(self) -> tuple[Shapes, bool]:
        return linear("pooler.dense", self.hidden_size, self.hidden_size) if self.has_pooler else {}, True

    # ------------------------------------------------------------------------------------ queries, documents, files

    @copy_doc(encode)
    def encode_query(
        self,
        sentences: Any,
        prompt: str | None = None,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        **theirs: Any,
    ) -> Array:
        """Compute the embeddings of queries, for :meth:`similarity` to those of :meth:`encode_document`.

        Parameters
        ----------
        prompt : str, optional
            By default the folder's prompt of the name ``"query"``, none without one.
        """
        prompt = self._prompt(self.pipeline.prompts.get("query", ""), prompt, theirs)
        return self.encode(sentences, batch_size, progress, normalize, prompt, truncate_dim, **theirs)

    @copy_doc(encode)
    def encode_document(
        self,
        sentences: Any,
        prompt: str | None = None,
        batch_size: int | None = None,
        progress: bool = False,
        normalize: bool | None = None,
        truncate_dim: int | None = None,
        **theirs: Any,
    ) -> Array:
        """Compute the embeddings of texts that are searched.

        Parameters
        ----------
        prompt : str, optional
            By default the folder's prompt of the name ``"document"``, ``"passage"`` or ``"corpus"``, the first that it
            has; none without one. sentence-transformers documents this, but takes ``"document"`` alone.

        Examples
        --------
        ::

            documents = model.encode_document(["a storm at sea", "tea with milk"])
            scores = model.similarity(model.encode_query("the waves rose"), documents)[0]
        """
        prompt = self._prompt(self.pipeline.document_prompt, prompt, theirs)
        return self.encode(sentences, batch_size, progress, normalize, prompt, truncate_dim, **theirs)

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
            raise ValueError(_tokenizer.missing_message(self._folder))
        if check_size("max_seq_length", value) > (most := self.max_positions):
            raise ValueError(f"max_seq_length is {value}; this model takes {most} tokens at most")
        direction = (self.tokenizer.truncation or {}).get("direction", "right")
        _tokenizer.check_room(self.tokenizer, value)
        self.tokenizer.enable_truncation(value, direction=direction)
        self.pipeline.keep_length(value)

    def _prompt(self, usual: str, given: str | None, theirs: dict[str, Any]) -> str | None:
        """Return what was given, or the usual prompt if nothing was."""
        if given is not None or theirs.get("prompt_name") is not None:
            return given
        return usual

    def encode_to(
        self,
        path: disk.PathLike,
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
        given = Sentences(sentences)
        if given.alone:
            raise TypeError(f"sentences must be an iterable of sentences, not {quoted(sentences)}")
        parts = self._embeddings(given, batch_size, progress, normalize, prompt)
        disk.write_rows(Path(path), parts, self.pipeline.width(self.hidden_size), np.float32)
        given.warn(self.tokenizer)
        y: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return y

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
            raise ValueError(_tokenizer.missing_message(self._folder))
        return [str(self.tokenizer.id_to_token(n)) for n in ids]

    def _ids(self, sentence: Any) -> Sequence[int]:
        """Return the ids of one text or pair, or check those that are given."""
        return self._whole(Sentences([sentence])).ids[0]

    def _whole(self, given: Sentences, before: str = "") -> TokenBatch:
        """Tokenise all sentences at once, with a prompt ``before`` each text, and warn of those that were cut."""
        batch = self._token_batch(Chunk(list(given.sentences)), before)
        given.add(batch)
        given.warn(self.tokenizer)
        return batch

    def _one(self, text: Any) -> tuple[Transformer, Array, list[str] | None]:
        batch = self._whole(Sentences([text]))
        ids, cu_seqlens, types, _ = batch.pack([0])
        self._check_ids(ids, cu_seqlens)
        settings, _ = self._built(len(ids))
        tokens = None if self.tokenizer is None else spelled(self.tokenizer, batch.ids[0])
        return *self._inputs(settings, ids, cu_seqlens, types), tokens

    # --------------------------------------------------------------------------------------------- calls and gradients

    def forward(self, sentences: Any) -> Array:
        """Compute embeddings, as :meth:`encode` does, or logits, as :meth:`predict` does.

        A classifier or a cross-encoder has logits.

        Parameters
        ----------
        sentences : str, pair of str, sequence of int, or list of such

        Returns
        -------
        ndarray, shape (d,) or (n, d), or of logits (labels,) or (n, labels)
        """
        return self.encode(sentences)

    @copy_doc(forward)
    def vjp(self, sentences: Any) -> tuple[Array, Pulled]:
        """Compute embeddings or logits, and their pullback, ``dy -> grads``.

        Parameters that took no part have no gradients.

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
        skips = pipeline.prompt(None) and not pipeline.include_prompt
        after = [dense for _, dense in pipeline.after]
        if pipeline.core_pooling is None or any(after) or skips:
            need = "a pooling of mean, cls or last token, over the prompt as well, and no Dense after it"
            raise NotImplementedError(f"gradients need {need}")
        given = Sentences(sentences)
        ids, cu_seqlens, types, _ = self._whole(given, pipeline.prompt(None)).pack()
        rows, pulled = self._rows_vjp(ids, cu_seqlens, pipeline.core_pooling, types)
        unit = normalized(rows) if after else rows
        y = unit[:, : pipeline.truncate_dim]

        def backward(dy: Array) -> Gradients:
            d = np.zeros(rows.shape, dy.dtype)
            d[:, : y.shape[1]] = dy.reshape(y.shape)
            if after:  # d/dx of x / |x|
                length = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1, keepdims=True))
                d = ((d - unit * (d * unit).sum(axis=1, keepdims=True)) / length).astype(rows.dtype)
            return pulled(d)

        return self._with_pullback(y[0] if given.alone else y, backward)

    def _with_pullback(self, y: Array, backward: Pulled) -> tuple[Array, Pulled]:
        """Return a result and its pullback, which names gradients and refuses parameters that have changed."""
        tables = (self.word_table, self.type_table, self.position_table)  # no gradient depends on them
        used = [array for name, array in self.arrays.items() if name not in tables]
        return y, checked_pullback(self, y, used, lambda dy: self._named(backward(dy)))

    def _rows_vjp(
        self, ids: Array, cu_seqlens: Array, pooling: Any = None, types: Array | None = None
    ) -> tuple[Array, Pulled]:
        """Compute what :meth:`_rows` does, and ``dy -> grads`` of all parameters that took part."""
        self._check_ids(ids, cu_seqlens)
        settings, parameters = self._built(int(np.diff(cu_seqlens).max(initial=1)))
        settings, inputs = self._inputs(settings, ids, cu_seqlens, types)
        call, has_bias = Call(pooling=pooling), settings.position_bias is not None
        y, pullback = transformer.vjp(settings, inputs, cu_seqlens, call, wants_mask=has_bias)

        def pulled(dy: Array) -> Gradients:
            dx, grads, dmask = pullback(dy)
            found = parameters.gradients(transformer.arrays(settings), grads)
            # Of the tables that are added to the words, and of the words' own where rows went in.
            tables: dict[str | None, Array] = {} if self.word_table in found else {self.word_table: ids}
            tables[self.type_table] = np.zeros_like(ids) if types is None else types
            tables[self.position_table] = self._places(ids, cu_seqlens)
            for name, rows in tables.items():
                if name is not None:
                    np.add.at(found.setdefault(name, np.zeros_like(self.arrays[name])), rows, dx)
            if dmask is not None:
                self._mask_gradient(found, dmask)
            return found

        return y, pulled

    def _mask_gradient(self, found: Gradients, dmask: Array) -> None:
        """Add the gradient of the parameters of the mask."""

    def predict(self, *inputs: Any, **theirs: Any) -> Any:
        """Refuse: a classifier or a cross-encoder has logits."""
        one = "the folders of …ForSequenceClassification have one"
        raise TypeError(f"{type(self).__name__} has no classifier; {one}")

    def rank(self, *inputs: Any, **theirs: Any) -> Any:
        """Refuse, as :meth:`predict` does."""
        self.predict()


def in_order(parts: Sequence[Array], order: Sequence[int]) -> Array:
    """Return the rows of groups in the order of their sentences, whose numbers are given."""
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if len(order) == 1:
        return rows
    y = np.empty_like(rows)
    y[order] = rows
    return y


def attach(model: TextEncoder, folder: Path) -> None:
    """Give a model the tokenizer of a folder, and the pipeline of its sentence-transformers files."""
    pipeline, inner = read_pipeline(folder, classifies=model.head is not None)
    tokenizer, config = _tokenizer.load_tokenizer(inner, pipeline.lowercase)
    for name in ("special_tokens_map.json", _tokenizer.TOKENIZER_CONFIG):
        if (found := disk.read_kept(inner / name)) is not None:
            pipeline.kept[name] = found
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
