"""The index of one's texts: embedded once, kept on the disk, searched by meaning.

`_store` owns the files, `_models` the model, `_nearest` the best rows; this file owns arguments, messages and hits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn.engine import SIMILARITIES, Array, bar, check_number, check_size, disk, one_of
from selfattn_models._encoders import column
from selfattn_models._tokenizer import check_unicode
from selfattn_models.search._adding import append, checked_ids, checked_metadata, checked_where, id_json
from selfattn_models.search._models import Model, model_of, model_of_manifest
from selfattn_models.search._nearest import best_records
from selfattn_models.search._ranking import Words, joined, near, reranked
from selfattn_models.search._store import DTYPES, MANIFEST, Generation, hash64, make, writing

CHUNK = 8192  # texts that are looked up and written at once
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


class Index:
    """Texts with their embeddings, in a folder: embedded once, then searched by any number of processes.

    ``Index.create`` makes one, ``Index.open`` opens it. One process at a time changes it, and a change is seen whole
    or not at all: each method uses the newest state, and ends with it. Texts are in the order in which they were
    added.

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

    def __init__(self, folder: Path, load: Callable[[], Model], entry: dict[str, Any]) -> None:
        self.folder = folder
        self._load, self._entry = load, entry
        self._loaded: Model | None = None
        self._words: tuple[Generation, Words] | None = None
        self._seen: tuple[Any, Generation] | None = None
        now = self._current()
        self.metric, self.dtype = str(now.metric), str(now.dtype)

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
        BlockingIOError
            Another process or thread is making an index there.
        """
        folder = Path(path).absolute()
        one_of("dtype", dtype, DTYPES)
        made, entry = model_of(model)
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
        entry = Generation.newest(folder).manifest.get("model")
        index = cls(folder, *model_of_manifest(folder / MANIFEST, entry, model))
        if model is not None:
            index.model  # noqa: B018 an error if it is another one
        return index

    # ------------------------------------------------------------------------------------------------- properties

    @property
    def model(self) -> Model:
        """What embeds; an error if it makes other embeddings than those that are here."""
        if self._loaded is None:
            loaded, now = self._load(), self._current()
            if len(now.rows):
                loaded.check(now)
            self._loaded = loaded
        return self._loaded

    @property
    def ids(self) -> list[str | int]:
        """The ids of all texts."""
        return [entry[0] for entry in self._entries()]

    @property
    def texts(self) -> list[str]:
        """All texts."""
        return [entry[1] for entry in self._entries()]

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """The metadata of all texts."""
        return [entry[2] for entry in self._entries()]

    @property
    def vectors(self) -> Array:
        """The embedding of each text."""
        now = self._current()
        whole = now.alive is None and not now.has_windows
        return now.vectors if whole else now.vectors[now.rows_of(now.live())[0]]

    def _entries(self) -> list[tuple[Any, str, dict[str, Any]]]:
        now = self._current()
        return [now.entry(n) for n in now.live().tolist()]

    def __len__(self) -> int:
        now = self._current()
        return len(now.records) if now.alive is None else int(now.alive.sum())

    def __repr__(self) -> str:
        now = self._current()
        return (
            f"Index({str(self.folder)!r}: {len(self)} texts, {now.metric}, {now.dtype}, "
            f"{now.manifest['model'].get('name')})"
        )

    def _current(self) -> Generation:
        """Return the newest generation."""
        path = self.folder / MANIFEST
        state = path.stat() if path.exists() else None
        mark = state and (state.st_ino, state.st_mtime_ns, state.st_size)
        if mark is None or self._seen is None or self._seen[0] != mark:
            self._seen = mark, Generation.newest(self.folder)
        return self._seen[1]

    # ---------------------------------------------------------------------------------------------------- changes

    def add(
        self,
        texts: Sequence[str],
        ids: Sequence[str | int] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        *,
        progress: bool = False,
    ) -> list[str | int]:
        """Add texts, all or none. One that is here already, to the letter, is not embedded again.

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
            other values, which are only kept.
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
            Another process or thread is changing the index; or the disk is full. After any error the index is as it
            was.
        """
        listed, model = column(texts), self.model
        for n, text in enumerate(listed):
            check_unicode(text, n, "text")
        given = None if ids is None else checked_ids(ids, len(listed))
        fields = checked_metadata(metadata, len(listed))
        with writing(self.folder) as writer, bar(progress, len(listed), "add") as done:
            if given is None:
                first = writer.now.next_id
                given = list(range(first, first + len(listed)))
            before = writer.now
            for n in range(0, len(listed), CHUNK):
                part = slice(n, n + CHUNK)
                append(writer, model, listed[part], given[part], fields[part], done)
            if writer.now is not before:
                writer.commit(model=self._entry)
        return given

    def delete(self, ids: Sequence[str | int] | str | int) -> None:
        """Delete texts, all or none. Their room on the disk is free after :meth:`vacuum`.

        Parameters
        ----------
        ids : sequence of str or int, or one

        Raises
        ------
        TypeError, ValueError
            An id is no str or int, is not in the index, or is given twice; nothing is deleted.
        BlockingIOError, OSError
            As for :meth:`add`.
        """
        given = [ids] if isinstance(ids, str | int | np.generic) else ids
        given = list(given) if isinstance(given, Set) else given
        wanted = {name: hash64(name) for name in map(id_json, checked_ids(given))}
        with writing(self.folder) as writer:
            found = writer.now.find("id", wanted)
            if missing := [name.decode() for name in wanted if name not in found]:
                raise ValueError(f"there is no id {missing[0]}; {len(missing)} of {len(wanted)} are missing")
            if found:
                writer.append([], [], [], np.empty((0, writer.now.width), np.float32), sorted(found.values()))
                writer.commit(model=self._entry)

    def vacuum(self, *, progress: bool = False) -> None:
        """Write all files anew without what was deleted or replaced; searches go on meanwhile, with the old ones.

        Raises
        ------
        BlockingIOError, OSError, ValueError
            As for :meth:`add`; the disk needs room for both. Or a file is damaged.
        """
        with writing(self.folder) as writer:
            old = writer.now
            live = old.live()
            writer.renew()
            with bar(progress, len(live), "vacuum") as done:
                for n in range(0, len(live), CHUNK):
                    some = live[n : n + CHUNK].tolist()
                    spans, vectors = zip(*map(old.spans, some), strict=True)
                    hashes = old.records["text_hash"][some].tolist()
                    writer.append(list(map(old.raw, some)), hashes, spans, np.concatenate(vectors))
                    done(len(some))
            writer.commit(model=self._entry)

    # ----------------------------------------------------------------------------------------------------- search

    def search(
        self,
        query: str | Sequence[str],
        k: int = 10,
        where: Mapping[str, Any] | None = None,
        rerank: Any = None,
        hybrid: bool = False,
    ) -> list[Hit] | list[list[Hit]]:
        """Find the texts that are most similar to a query.

        Parameters
        ----------
        query : str or sequence of str
        k : int, default 10
            How many texts to find at most.
        where : mapping, optional
            A value, or a list of values, for each of some fields: only texts whose metadata have one of them in every
            field are compared at all. Types matter: 1, "1" and True differ; 1 and 1.0 are one number.
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
        queries: list[str] = [query] if isinstance(query, str) else column(query, "query", "queries")
        for n, each in enumerate(queries):
            check_unicode(each, n, "query")
        if not isinstance(hybrid, bool | np.bool_):
            raise TypeError(f"hybrid must be True or False, not {hybrid!r:.80}")
        model, now = self.model, self._current()
        k = min(check_size("k", k), max(1, len(now.records)))
        selected = now.selected(checked_where(where, now.fields))
        if not queries or not len(now.rows):
            return [] if isinstance(query, str) else [list[Hit]() for _ in queries]
        vectors = model.rows_for(now, model.encode_query(queries))
        most = k if rerank is None and not hybrid else max(LEAST_RANKED_AGAIN, 4 * k)
        found = best_records(now, vectors, most, now.kept(selected))
        if hybrid:
            if self._words is None or self._words[0] is not now:
                records = now.live()
                self._words = now, Words(records, [now.entry(n)[1] for n in records.tolist()])
            best = [self._words[1].best(each, most, selected) for each in queries]
            found = [joined(now, *both, most if rerank else k) for both in zip(found, best, strict=True)]
        if rerank is not None:
            found = [reranked(now, each, some, rerank, k) for each, some in zip(queries, found, strict=True)]
        hits = [[_hit(now, row, score) for row, score in each] for each in found]
        return hits[0] if isinstance(query, str) else hits

    def duplicates(self, threshold: float = 1.0, *, progress: bool = False) -> list[list[str | int]]:
        """Find texts that are equal, or nearly so.

        Parameters
        ----------
        threshold : float, default 1.0
            1.0 finds texts that are equal to the letter, among any number. Below it texts are also the same if the
            cosine of their embeddings is as high; this compares each text with each, up to 100,000 of them, but no
            text of several windows.
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
        now = self._current()
        with bar(progress, len(now.live()), "duplicates") as done:
            groups = near(now, threshold, done)
        return [[now.entry(n)[0] for n in group] for group in groups]


def _hit(now: Generation, row: int, score: float) -> Hit:
    record, span = now.row(row)
    name, text, metadata = now.entry(record)
    hit = Hit(name, score, text, metadata)
    hit.span = None if span == (0, len(text)) else span
    return hit
