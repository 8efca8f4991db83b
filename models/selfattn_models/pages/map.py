"""The map of a corpus: texts as points by the two principal components of their embeddings; `map.js` draws it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn.engine import Array, as_array, bar, is_float, quoted, search_rows, unit_rows
from selfattn.views.document import Document, drawn_by_script, svg_picture
from selfattn.views.language import fill, in_language
from selfattn.views.writing import short, token_list
from selfattn_models.pages.texts import MAP, PACKAGE, own

__all__ = ["CorpusMap", "corpus_map"]

MOST = 50_000  # a point's number has 16 bits
LETTERS = 400  # of a text
NEAREST = 8
BLOCK = 512  # texts whose neighbours are sought at once
# As in map.css, for light paper; the last is for other values.
COLOURS = ("0072b2", "d55e00", "009e73", "c05a98", "8a6d00", "4b3fc0", "7d8791")
SIDE, DRAWN = 600, 2000  # pixels and points of the still picture


@dataclass(frozen=True, repr=False)
class CorpusMap(Document):
    """The page of :func:`corpus_map`: shows itself in a notebook; ``page.save(path)`` writes a file."""

    styles: ClassVar[tuple[str, ...]] = own("map.css")
    scripts: ClassVar[tuple[str, ...]] = own("map.js")


def corpus_map(
    embeddings: npt.ArrayLike,
    texts: Iterable[str],
    fields: Mapping[str, Sequence[Any]] | None = None,
    *,
    colour: str | None = None,
    name: str = "",
    lang: str = "en",
    progress: bool = False,
) -> CorpusMap:
    """Show a corpus as a map: a point for each text, near points for similar texts as far as two directions can tell.

    Parameters
    ----------
    embeddings : array_like, shape (n, d)
        At most 50,000 rows, such as ``vectors`` of a :class:`selfattn_models.search.Index`.
    texts : iterable of str, n
        The page has 400 characters of each.
    fields : mapping of str to sequence, n values each, optional
        What points can be coloured by: the six most frequent values of a field have colours of their own.
    colour : str, optional
        The field that is chosen at first; by default the first one.
    name : str, optional
        The name of the corpus, for the title.
    lang : {"en", "de", "fr"}
        The language of the page.
    progress : bool, default False
        Show a bar while neighbours are sought.

    Returns
    -------
    CorpusMap
        The eight neighbours that it lists of each text are those with the largest cosines.

    Raises
    ------
    TypeError, ValueError
        Texts are not strings; numbers of rows differ; no texts, or too many; a row is not finite; no field is named
        ``colour``.

    Examples
    --------
    >>> corpus_map([[1, 0], [0, 1], [1, 1]], ["tea", "storm", "stormy tea"], {"kind": ["food", "sea", "both"]}).title
    'A map of 3 texts'
    """
    if isinstance(texts, str):
        raise TypeError(f"texts must be a sequence of texts, not {quoted(texts)}")
    given, shown = as_array("embeddings", embeddings), token_list("texts", texts)
    columns = fields or {"": [None] * len(shown)}
    if not isinstance(columns, Mapping) or any(
        isinstance(each, str) or not hasattr(each, "__len__") for each in columns.values()
    ):
        raise TypeError(f"fields must be a mapping of names to sequences of values, not {quoted(fields)}")
    if given.ndim != 2 or not (is_float(given.dtype) or given.dtype.kind in "iu"):
        what = f"real numbers of shape (n, d), not {given.dtype} of {given.shape}"
        raise ValueError(f"embeddings must be {what}")
    with np.errstate(over="ignore"):
        rows = np.asarray(given, np.float32)
    if {len(rows), *map(len, columns.values())} != {len(shown)}:
        lengths = "".join(f", {of!r} {len(values)}" for of, values in columns.items() if of)
        what = f"not {len(rows)}, {len(shown)}{lengths}"
        raise ValueError(f"rows, texts and fields must be equally many, {what}")
    if not 1 <= len(rows) <= MOST:
        raise ValueError(f"a map has 1 to {MOST:,} texts; there are {len(rows):,}")
    if not (finite := np.isfinite(rows).all(axis=1)).all():
        raise ValueError(f"embedding {np.argmin(finite)} is not finite in float32")
    if colour is not None and colour not in columns:
        known = ", ".join(fields or ()) or "none at all"
        raise ValueError(f"no field is named {colour!r}; the fields are {known}")
    points, share = _components(rows)
    nearest, scores = _neighbours(rows, progress)
    coded = [_coded(values) for values in columns.values()]
    field = list(columns).index(colour) if colour else 0
    captions = in_language(MAP, lang, PACKAGE)
    title = fill(captions["title of" if name else "title"], lang, n=f"{len(rows):,}", name=short(name, 40))
    data = {
        "texts": [short(each, LETTERS) for each in shown],
        "field": field,
        "nearest": nearest.shape[1],
        "fields": [{"name": of, "values": names} for of, (_, names) in zip(columns, coded, strict=True)],
        "captions": captions | {"share": f"{100 * share:.0f}"},
    }
    parts = (points.astype("<f4"), scores.astype("<f4"), nearest.astype("<u2"), *(code for code, _ in coded))
    every = slice(None, None, -(-len(rows) // DRAWN))
    places = (SIDE / 2 + points[every] * [290, -290]).round(1).tolist()
    fills = (COLOURS[min(n, len(COLOURS) - 1)] for n in coded[field][0][every].tolist())
    dots = [
        f'<circle cx="{x}" cy="{y}" r="3" fill="#{fill}"/>'
        for (x, y), fill in zip(places, fills, strict=True)
    ]
    picture = svg_picture(SIDE, SIDE, title, "".join(dots))
    packed = b"".join(part.tobytes() for part in parts)
    body = drawn_by_script("sa-corpus-map", lang, title, "", data, packed)
    return CorpusMap(title, body, picture, lang)


def _components(rows: Array) -> tuple[Array, float]:
    """Return the two principal components, (n, 2), between -1 and 1, and their share of the variance."""
    centred = rows - rows.mean(axis=0)
    variances, directions = np.linalg.eigh(centred.T @ centred)
    points = np.zeros((len(rows), 2))
    points[:, : rows.shape[1]] = centred @ directions[:, :-3:-1]
    low, high = points.min(axis=0), points.max(axis=0)
    points = (points - (low + high) / 2) / max((high - low).max() / 2, np.finfo(np.float32).tiny)
    return points, float(variances[-2:].sum() / max(variances.sum(), np.finfo(np.float32).tiny))


def _neighbours(rows: Array, progress: bool) -> tuple[Array, Array]:
    """Return each row's nearest other rows by the cosine, the nearest first, (n, k), and their cosines."""
    unit, k = np.ascontiguousarray(unit_rows(rows), np.float32), min(NEAREST, len(rows) - 1)
    found = []
    with bar(progress, len(unit), "neighbours") as done:
        for block in (unit[n : n + BLOCK] for n in range(0, len(unit), BLOCK)):
            found.append(search_rows(block, unit, k + 1))
            done(len(block))
    scores, places = (np.concatenate(each) for each in zip(*found, strict=True))
    own = places == np.arange(len(rows))[:, None]
    own[~own.any(axis=1), -1] = True  # more than k copies of a text are before it
    return places[~own].reshape(len(rows), k), scores[~own].reshape(len(rows), k)


def _coded(values: Sequence[Any]) -> tuple[Array, list[str]]:
    """Return the number of each value, and the values by their numbers.

    The first ones have colours, and are most frequent.
    """
    written = ["" if value is None else str(value) for value in values]
    names = [name for name, _ in Counter(written).most_common()]
    codes = {name: n for n, name in enumerate(names)}
    shown = token_list("values", [short(name, 40) for name in names])
    return np.array([codes[each] for each in written], "<u2"), shown
