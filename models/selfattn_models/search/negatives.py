"""Hard negatives: texts of an index that look like the answer to a query and are none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from selfattn.engine import check_number, check_size, pairwise_similarities, warn
from selfattn_models.search._adding import checked_pairs

if TYPE_CHECKING:
    from selfattn_models.search.index import Index


def mine_negatives(
    index: Index,
    pairs: Iterable[tuple[str, str]],
    num_negatives: int = 3,
    *,
    range_min: int = 0,
    relative_margin: float | None = None,
) -> list[tuple[str, ...]]:
    """Find wrong answers that are hard to tell from the right ones, as examples for training.

    Parameters
    ----------
    index : Index
    pairs : iterable of (query, answer)
        A query may have several answers, in a pair each; none of them counts as wrong.
    num_negatives : int, default 3
    range_min : int, default 0
        How many of the most similar texts, each counted once, to skip: they may be answers that nobody wrote down.
    relative_margin : float, optional
        Take only texts whose similarity is below the answer's by this share of it; 0.05 is usual.

    Returns
    -------
    list of (query, answer, wrong, ...)
        For :class:`~selfattn.nn.MultipleNegativesRankingLoss`, in the order of the pairs.

    Warns
    -----
    UserWarning
        How many pairs were left out, because fewer texts than ``num_negatives`` were found for them.

    Examples
    --------
    >>> import tempfile
    >>> from selfattn_models import search
    >>> folder = tempfile.mkdtemp()
    >>> index = search.Index.create(folder, lambda texts: [[float(t.count(c)) for c in "aest"] for t in texts])
    >>> _ = index.add(["a sea", "tea", "test"])
    >>> search.mine_negatives(index, [("seas", "a sea")], 1)
    [('seas', 'a sea', 'test')]
    """
    rows, wanted = checked_pairs(pairs, "(query, answer)"), check_size("num_negatives", num_negatives)
    known: dict[str, set[str]] = {}
    for query, answer in rows:
        known.setdefault(query, {query}).add(answer)
    least = np.full(len(rows), np.inf)
    if relative_margin is not None and rows:
        model, margin = index.model, check_number("relative_margin", relative_margin)
        queries, answers = (list(column) for column in zip(*rows, strict=True))
        vectors = model.encode_query(queries), model.encode_document(answers)
        scores = pairwise_similarities(index.metric, *vectors)
        least = scores - margin * np.abs(scores)
    skip = check_size("range_min", range_min, 0)
    most = skip + 10 * wanted + max(map(len, known.values()), default=0)
    hits: dict[str, Any] = dict(zip(known, index.search(list(known), most), strict=True))
    found = []
    for (query, answer), limit in zip(rows, least.tolist(), strict=True):
        ranked: dict[str, float] = {}
        for hit in hits[query]:
            if hit.text not in known[query]:
                ranked.setdefault(hit.text, hit.score)
        texts = [text for text, score in [*ranked.items()][skip:] if score <= limit][:wanted]
        if len(texts) == wanted:
            found.append((query, answer, *texts))
    if len(found) < len(rows):
        what = f"fewer than {wanted} wrong texts were found for them"
        warn(f"{len(rows) - len(found)} of {len(rows)} pairs were left out: {what}")
    return found
