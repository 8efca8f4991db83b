"""The index of one's texts: embedded once, kept on the disk, searched by meaning.

`_store` owns the files, `_models` the model, `_nearest` the best rows; this file owns arguments, messages and hits.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn.engine import SIMILARITIES, Array, bar, check_number, check_size, disk, one_of
from selfattn_models._encoders import column
from selfattn_models._tokenizer import check_unicode
from selfattn_models.search._adding import BATCH, add, checked_ids, checked_metadata
from selfattn_models.search._models import Model, as_stored, checked_rows, model_of, model_of_index
from selfattn_models.search._nearest import best_texts
from selfattn_models.search._ranking import Words, joined, near, reranked
from selfattn_models.search._store import (
    DTYPES,
    TIMEOUT,
    Entry,
    Reader,
    Snapshot,
    copy,
    index_fields,
    make,
    reading,
    writing,
)
from selfattn_models.search._where import checked_where

LEAST_RANKED_AGAIN = 50  # hits, by words too or by a reranker


class _Hit(NamedTuple):
    id: str | int
    score: float
    text: str
    metadata: dict[str, Any]


class Hit(_Hit):
    """A text that was found: ``id, score, text, metadata``.

    ``score`` is the similarity; after re-ranking that of the cross-encoder, in a hybrid search the sum of reciprocal
    ranks. ``span`` says where in a long text the window that was found begins and ends,
    ``hit.text[slice(*hit.span)]``; None for the whole text.
    """

    span: tuple[int, int] | None = None


class Ids(list[Any]):
    """Ids, of which a notebook shows the first."""

    def __repr__(self) -> str:
        return reprlib.repr([*self])


class Index:
    """Texts with their embeddings, in a folder: embedded once, then searched by any number of processes.

    ``Index.create`` makes one, ``Index.open`` opens it. Any number of threads and processes search and change it: one
    change waits for another, and is seen whole or not at all. Each method uses the newest state, and ends with it.
    Texts are in the order in which they were added.

    Attributes
    ----------
    folder, metric, dtype
    model : object
        What embeds, with ``encode_document`` and ``encode_query``; a folder is loaded when it is first used.
    ids, texts, metadata : list
        Those of all texts, read from the disk each time.
    vectors : ndarray of float32, shape (n, d)
        The embedding of each text; of a long one that of its first window. For the cosine they have length 1.

    Examples
    --------
    >>> import tempfile
    >>> from selfattn_models import search
    >>> def letters(texts):  # any function of a list of texts, or the folder of a model
    ...     return np.array([[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], float)
    >>> folder = tempfile.TemporaryDirectory()
    >>> index = search.Index.create(folder.name, letters)
    >>> index.add(["tea with milk", "a storm at sea"], metadata=[{"kind": "food"}, {"kind": "weather"}])
    [0, 1]
    >>> [hit.text for hit in index.search("ale with milk", k=1)]
    ['tea with milk']
    >>> [hit.text for hit in index.search("ale with milk", where={"kind": "weather"})]
    ['a storm at sea']
    """

    def __init__(self, folder: Path, load: Callable[[], Model] | None = None, entry: Any = None) -> None:
        self.folder = folder
        self._load, self._entry = load, entry
        self._loaded: Model | None = None
        self._words: tuple[Snapshot, Words] | None = None
        self._seen: Snapshot | None = None
        with self._reading(check=False) as reader:
            self.metric, self.dtype = reader.now.metric, reader.now.dtype
            self._entry = reader.now.model if entry is None else entry

    def __reduce__(self) -> Any:
        return type(self), (self.folder,)

    @contextmanager
    def _reading(self, check: bool = True) -> Iterator[Reader]:
        """Read the newest state."""
        with reading(self.folder, self._seen, check=check) as reader:
            self._seen = reader.now
            yield reader

    @classmethod
    def create(
        cls, path: disk.PathLike, model: Any, dtype: str = "float32", metric: str | None = None
    ) -> Index:
        """Make an index without texts.

        Parameters
        ----------
        path : path
            A folder, which is made; an existing one must be empty.
        model : path or object
            The folder of an encoder, as :func:`selfattn_models.load` takes it; or what that returned; or an object
            with ``encode``; or a function of a list of texts that returns their embeddings, (n, d). Only a folder is
            loaded again by :meth:`open`.
        dtype : {"float32", "int8"}, default "float32"
            int8 reads a quarter of the bytes for a search, and takes a quarter more on the disk: candidates that it
            finds are compared by the exact embeddings.
        metric : {"cosine", "dot", "euclidean", "manhattan"}, optional
            By default the one that the model's folder names, else the cosine. int8 has no distances.

        Raises
        ------
        FileExistsError, FileNotFoundError, TypeError, ValueError
            The folder is not empty; or something is not as above.
        """
        folder = Path(path).absolute()
        one_of("dtype", dtype, DTYPES)
        made, entry = model_of(model, folder)
        metric = one_of("metric", made.similarity if metric is None else metric, SIMILARITIES)
        if dtype == "int8" and metric not in ("cosine", "dot"):
            raise ValueError(f"int8 works with cosine and dot, not {metric}; dtype='float32' works with each")
        make(folder, dtype, metric, entry)
        return cls(folder, lambda: made, entry)

    @classmethod
    def open(cls, path: disk.PathLike, model: Any = None) -> Index:
        """Open an index; nothing is read yet but the sizes of its files.

        Parameters
        ----------
        path : path
        model : path or object, optional
            As for :meth:`create`. By default the folder that made the index.

        Raises
        ------
        FileNotFoundError
            There is no index, or the model's folder has moved.
        ValueError
            The model has changed, another one is given, or the index is damaged; the message names the file.
        """
        folder = Path(path).absolute()
        index = cls(folder)
        index._load, index._entry = model_of_index(folder, index._entry, model)
        if model is not None:
            index.model  # noqa: B018 an error if it is another one
        return index

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def model(self) -> Model:
        """What embeds; an error if it makes other embeddings than those that are here."""
        if self._loaded is None:
            if self._load is None:  # of a pickle
                self._load, self._entry = model_of_index(self.folder, self._entry, None)
            loaded = self._load()
            with self._reading(check=False) as reader:
                loaded.check(reader)
            self._loaded = loaded
        return self._loaded

    @property
    def ids(self) -> list[str | int]:
        """The ids of all texts."""
        return [entry.id for entry in self._entries()]

    @property
    def texts(self) -> list[str]:
        """All texts."""
        return [entry.text for entry in self._entries()]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """The metadata of all texts."""
        return [entry.metadata for entry in self._entries()]

    @property
    def vectors(self) -> Array:
        """The embedding of each text."""
        with self._reading() as reader:
            now = reader.now
            now.check("vectors")
            live = now.live()
            return now.vectors if len(live) == now.rows else now.vectors[live]

    @property
    def means(self) -> Array:
        """The mean of the embeddings of each text's windows, which classifiers may take for whole long texts."""
        with self._reading() as reader:
            return reader.now.means()

    def get(self, id: str | int) -> Hit:
        """Return a text by its id, with its metadata; an error if there is none."""
        with self._reading() as reader:
            row = _row(reader, id)
            return _hit(reader.entry(row), row, 1.0)

    def __contains__(self, id: object) -> bool:
        with self._reading() as reader:
            return bool(reader.entries("id = ?", *checked_ids([id])))

    def _entries(self) -> list[Entry]:
        with self._reading() as reader:
            return reader.every()

    def __len__(self) -> int:
        with self._reading() as reader:
            return reader.now.texts

    def __repr__(self) -> str:
        with self._reading() as reader:
            now = reader.now
        what = f"{now.texts} texts, {now.metric}, {now.dtype}, {now.model.get('name')}"
        return f"Index({str(self.folder)!r}: {what})"

    # ---------------------------------------------------------------------------------------------------- changes

    def add(
        self,
        texts: Sequence[str],
        ids: Sequence[str | int] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        vectors: Any = None,
        timeout: float = TIMEOUT,
        *,
        progress: bool = False,
    ) -> list[str | int]:
        """Add texts. One that is here already, to the letter, is not embedded again.

        Each 512 texts are written as a whole: what an interruption or an error has left out, the same call adds.

        Parameters
        ----------
        texts : sequence of str
            A list, an array, or a column of a table. A text that is longer than the model takes is cut into windows
            of sentences, and is found if one of them is.
        ids : sequence of str or int, optional
            Ints are below 2**62. A text whose id is here replaces that one. By default 0, 1, 2, …, after the highest
            int that was an id.
        metadata : sequence of mapping, optional
            JSON for each text: names with numbers, texts, True, False or None, by which :meth:`search` selects; and
            lists, which it looks into; other values are only kept.
        vectors : array_like of float, shape (n, d), optional
            The embeddings of the texts, as the model makes them, which is not used then.
        timeout : float, default 10
            How many seconds to wait for another process or thread that is writing.
        progress : bool, default False
            Show a bar with rate and remaining time; needs ``tqdm``.

        Returns
        -------
        list of str or int
            The ids.

        Raises
        ------
        TypeError, ValueError
            Something is not as above, an id is given twice, or the model cannot take a text; the message says which.
        BlockingIOError, OSError
            Another process or thread has been changing the index for ``timeout`` seconds; or the disk is full.
        """
        listed = column(texts)
        rows = None if vectors is None else checked_rows("vectors must be", vectors, listed)
        model = self.model if rows is None else None
        for n, text in enumerate(listed):
            check_unicode(text, n, "text")
        given = None if ids is None else checked_ids(ids, len(listed))
        fields = checked_metadata(metadata, len(listed))
        found = Ids()
        with bar(progress, len(listed), "add") as done:
            for n in range(0, len(listed), BATCH):
                part = slice(n, n + BATCH)
                some = None if given is None else given[part]
                own = None if rows is None else rows[part]
                place = self.folder, self._seen, model, self._entry
                found += add(*place, listed[part], some, fields[part], own, timeout)
                done(len(listed[part]))
        return found

    def delete(self, ids: Sequence[str | int] | str | int, *, timeout: float = TIMEOUT) -> None:
        """Delete texts, all or none. Their room on the disk is free after :meth:`vacuum`.

        Parameters
        ----------
        ids : sequence of str or int, or one
        timeout : float, default 10
            As for :meth:`add`.

        Raises
        ------
        TypeError, ValueError
            An id is no str or int, is not in the index, or is given twice; nothing is deleted.
        BlockingIOError, OSError
            As for :meth:`add`.
        """
        given = [ids] if isinstance(ids, str | int | np.generic) else ids
        given = list(given) if isinstance(given, Set) else given
        wanted = checked_ids(given)
        with writing(self.folder, self._seen, timeout) as writer:
            rows = {name: writer.one("SELECT row FROM texts WHERE id = ?", name) for name in wanted}
            if missing := [name for name, row in rows.items() if row is None]:
                what = f"there is no id {json.dumps(missing[0], ensure_ascii=False)}"
                raise ValueError(f"{what}; {len(missing)} of {len(wanted)} are missing")
            if rows:
                writer.change(gone=[row for (row,) in rows.values()], model=json.dumps(self._entry))

    def vacuum(self, *, timeout: float = TIMEOUT, progress: bool = False) -> None:
        """Write all files anew without what was deleted or replaced; searches go on meanwhile, with the old ones.

        Raises
        ------
        BlockingIOError, OSError, ValueError
            As for :meth:`add`; the disk needs room for both. Or a file is damaged.
        """
        with (
            writing(self.folder, self._seen, timeout) as writer,
            bar(progress, writer.now.rows, "vacuum") as done,
        ):
            writer.vacuum(done)
        self._seen = None  # it has the old files mapped

    def _record(self) -> None:
        """Keep where the model is now."""
        with writing(self.folder, self._seen) as writer:
            if writer.now.model != self._entry:
                writer.commit(model=json.dumps(self._entry))
                writer.seal()

    def copy(self, path: disk.PathLike) -> None:
        """Copy the newest state to a folder that is new or empty; others may write meanwhile."""
        copy(self.folder, Path(path).absolute(), self._seen)

    # ----------------------------------------------------------------------------------------------------- search

    def search(
        self,
        query: str | Sequence[str] | Array,
        k: int = 10,
        where: Mapping[str, Any] | None = None,
        rerank: Any = None,
        hybrid: bool = False,
    ) -> list[Hit] | list[list[Hit]]:
        """Find the texts that are most similar to a query.

        Parameters
        ----------
        query : str or sequence of str, or array of float
            An array (d,) or (n, d) has embeddings of queries, by which ``rerank`` and ``hybrid`` have no words to rank.
        k : int, default 10
            How many texts to find at most.
        where : mapping, optional
            For each of some fields a value, a list or a set of values, or a pair of an operator, ``== != < <= > >=``,
            and a value, or a list of such pairs: only texts whose metadata meet all of them are compared at all. Types
            matter: 1, "1" and True differ; 1 and 1.0 are one number. None is a field that is null or missing. A list in
            the metadata equals each of its values.
        rerank : object or path, optional
            A cross-encoder, with ``rank(query, texts)``, or its folder: it sorts the best 50, or 4·k if these are more.
        hybrid : bool, default False
            Also rank by words, by BM25 of the library ``bm25s``, and join both by their reciprocal ranks. The first
            such search after a change reads all texts.

        Returns
        -------
        list of Hit, or a list of such lists for a sequence of queries
            The best first; of equal scores the one that was added first.

        Raises
        ------
        TypeError, ValueError
            Something is not as above, or no text has a field.
        ImportError
            ``bm25s`` is not installed.

        Notes
        -----
        A query has the same hits, to the bit, alone and with others, and for any number of threads. Scores are sums
        in float32, so texts are in the order of exact scores where these differ by more than some d · 1e-7.
        """
        given = np.atleast_2d(query) if isinstance(query, np.ndarray) and query.dtype.kind == "f" else None
        alone = isinstance(query, str) or (given is not None and np.ndim(query) == 1)
        queries: Any = given if given is not None else [query] if alone else column(query, "query", "queries")
        for n, each in enumerate(queries if given is None else ()):
            check_unicode(each, n, "query")
        if given is not None and (rerank is not None or hybrid):
            raise TypeError("rerank and hybrid need a query of words, not an embedding")
        if not isinstance(hybrid, bool | np.bool_):
            raise TypeError(f"hybrid must be True or False, not {hybrid!r:.80}")
        k = check_size("k", k)
        if given is None:
            embedded = self.model.encode_query(queries) if queries else None
        else:
            embedded = checked_rows("queries must be", given, given)
        with self._reading() as reader:
            now, conditions = reader.now, checked_where(where, reader.now.fields)
            if embedded is None or not now.texts:
                return [] if alone else [list[Hit]() for _ in queries]
            vectors, k = as_stored("the query has", now, embedded), min(k, now.texts)
            selected = reader.selected(conditions)
            most = k if rerank is None and not hybrid else max(LEAST_RANKED_AGAIN, 4 * k)
            found = best_texts(reader, vectors, most, selected)
            if hybrid:
                if self._words is None or self._words[0] is not now:
                    every = reader.every()
                    rows, texts = [each.row for each in every], [each.text for each in every]
                    self._words = now, Words(np.array(rows, int), texts)
                best = [self._words[1].best(each, most, selected) for each in queries]
                each = zip(queries, found, best, strict=True)
                found = [joined(reader, *given, most if rerank else k) for given in each]
            if rerank is not None:
                pairs = zip(queries, found, strict=True)
                found = [reranked(reader, each, some, rerank, k) for each, some in pairs]
            entries = reader.entries_of(row for each in found for row, _ in each)
            hits = [[_hit(entries[row], row, score) for row, score in each] for each in found]
            missing = reader.without_index(conditions)
        if missing:
            index_fields(self.folder, missing, now)
        return hits[0] if alone else hits

    def similar(self, id: str | int, k: int = 10, where: Mapping[str, Any] | None = None) -> list[Hit]:
        """Find the texts that are most similar to one that is here, without it, by its first window."""
        with self._reading() as reader:
            rows = np.array([_row(reader, id)])
            reader.now.check("vectors", rows)
            vector = np.array(reader.now.vectors[rows[0]])
        found: Any = self.search(vector, check_size("k", k) + 1, where)
        return [hit for hit in found if hit.id != id or type(hit.id) is not type(id)][:k]

    def duplicates(self, threshold: float = 1.0, *, progress: bool = False) -> list[list[str | int]]:
        """Find texts that are equal, or nearly so.

        Parameters
        ----------
        threshold : float, default 1.0
            1.0 finds texts that are equal to the letter, among any number. Below it texts are also the same if the
            cosine of their embeddings is as high; this compares each text with each, up to 100,000 of them, and long
            ones by the means of their windows.
        progress : bool, default False

        Returns
        -------
        list of list
            Ids in groups: each text is the same as another one of its group. In the order of the texts.

        Raises
        ------
        ValueError
            There are more than 100,000 texts; the message says how long they would take.
        """
        if not 0 < check_number("threshold", threshold) <= 1:
            raise ValueError(f"threshold must be above 0 and at most 1, not {threshold}")
        with self._reading() as reader, bar(progress, reader.now.texts, "duplicates") as done:
            groups = near(reader, threshold, done)
            entries = reader.entries_of(row for group in groups for row in group)
            return [[entries[row].id for row in group] for group in groups]


def _row(reader: Reader, id: str | int) -> int:
    """Return the first row of a text."""
    found = reader.one("SELECT row FROM texts WHERE id = ?", *checked_ids([id]))
    if found is None:
        raise KeyError(f"there is no id {id!r:.80}")
    return int(found[0])


def _hit(entry: Entry, row: int, score: float) -> Hit:
    hit = Hit(entry.id, score, entry.text, entry.metadata)
    hit.span = entry.spans[row - entry.row] if entry.spans else None
    return hit
