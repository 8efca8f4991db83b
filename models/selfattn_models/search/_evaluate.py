"""How good a search is: queries whose answers are known, three measures, and the rankings that a model must beat."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from selfattn.engine import Array, bar, search_rows, weights
from selfattn_models.search._adding import checked_pairs
from selfattn_models.search._models import normalized
from selfattn_models.search._ranking import Words

SHORTEST = 40  # characters of a text that is cut into halves


def evaluate(
    index: Any,
    queries: Iterable[Any] | None = None,
    relevant: Iterable[Any] | None = None,
    *,
    k: int = 10,
    most: int = 1000,
    progress: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Measure an index with queries whose answers are known, next to BM25, a mean of word vectors, and chance.

    Parameters
    ----------
    index : Index
    queries, relevant : sequence, optional
        Queries, and for each the id of its answer, or a list or set of ids; without ``relevant`` pairs of a query and
        an id. Without both ``most`` drawn texts are cut: the first half is a query that must find the second, among
        these second halves and all other texts.
    k : int, default 10
        How many hits count.
    most : int, default 1000
    progress : bool, default False
    **options
        Those of :meth:`Index.search`, for queries that are given.

    Returns
    -------
    dict
        The ``task`` in words, the ``measures`` of each ranking, and a ``verdict``: is the index better than BM25?

    Raises
    ------
    ValueError
        The index has no texts, or not the id of an answer.
    """
    pairs: Any = queries
    if relevant is not None:
        listed = zip(list(queries or ()), list(relevant), strict=True)
        pairs = [
            (query, id)
            for query, ids in listed
            for id in (ids if isinstance(ids, list | set | tuple) else [ids])
        ]
    texts, draw, known = index.texts, np.random.default_rng(0), dict[str, set[int]]()
    if not texts:
        raise ValueError("the index has no texts")
    if pairs is None:
        counts = Counter(texts)
        once = [n for n, text in enumerate(texts) if len(text) >= SHORTEST and counts[text] == 1]
        if options or not once or index.metric not in ("cosine", "dot"):
            what = ", ".join(options) or "short texts, copies and distances"
            halved = f"without one, halves of texts are the queries, of {SHORTEST} characters or more that occur once"
            raise ValueError(f"{what} need a table of queries and ids; {halved}")
        places = [once[n] for n in draw.permutation(len(once))[:most]]
        for n in places:
            end = texts[n].find(" ", middle := len(texts[n]) // 2)
            end = middle if end < 0 else end
            known.setdefault(texts[n][:end], set()).add(n)
            texts[n] = texts[n][end:].strip()
        vectors, model = np.array(index.vectors), index.model
        vectors[places] = normalized(model.encode_document([texts[n] for n in places]), index.metric)
        asked = normalized(model.encode_query(list(known)), index.metric)
        found = search_rows(asked, vectors, min(k, len(texts)))[1].tolist()
        task = f"first halves of {len(places):,} texts must find the second among {len(texts):,} texts"
    else:
        at = {name: n for n, name in enumerate(index.ids)}
        for query, name in (answers := checked_pairs(pairs, "(query, id)")):
            if not isinstance(name, Hashable) or name not in at:
                what = f"the id {name!r:.80}, the answer to {query!r:.80}"
                raise ValueError(f"the index has no text with {what}")
            known.setdefault(query, set()).add(at[name])
        if not answers:
            raise ValueError("there are no queries with ids to measure by")
        found = [[at[hit.id] for hit in hits] for hits in index.search(list(known), k, **options)]
        task = f"{len(known):,} queries must find texts of known ids among {len(texts):,} texts"
    words = Words(np.arange(len(texts)), texts)
    with bar(progress and len(known) > 500, len(known), "BM25") as done:
        by_words = [(words.best(query, k, None), done(1))[0] for query in known]
    ranked = {"index": found, "BM25": by_words}
    if (means := word_means(index.model, [*texts, *known])) is not None:
        rows, asked = means[: len(texts)], means[len(texts) :]
        ranked["mean of words"] = search_rows(asked, rows, min(k, len(rows)))[1].tolist()
    ranked["chance"] = draw.integers(len(texts), size=(len(known), k)).tolist()
    each = {name: measures(rows, list(known.values()), k) for name, rows in ranked.items()}
    table = {name: {of: float(row.mean()) for of, row in rows.items()} for name, rows in each.items()}
    gap = each["index"][f"nDCG@{k}"] - each["BM25"][f"nDCG@{k}"]
    verdict = "the index is better than BM25" if gap.mean() > 0 else "BM25 is better than the index"
    if abs(gap.mean()) <= 2 * gap.std() / np.sqrt(len(gap)):  # two standard errors
        verdict = "neither the index nor BM25 is clearly better"
    return {"task": task, "measures": table, "verdict": verdict}


def measures(found: Sequence[Sequence[Any]], answers: Sequence[set[Any]], k: int = 10) -> dict[str, Array]:
    """Compute the reciprocal rank, the recall and the nDCG of the first k hits, for each query.

    All answers count alike.

    Examples
    --------
    >>> measures([["a", "b", "c"]], [{"b"}], k=3)
    {'MRR@3': array([0.5]), 'recall@3': array([1.]), 'nDCG@3': array([0.63092975])}
    """
    discounts, rows = 1 / np.log2(np.arange(2, k + 2)), np.zeros((3, len(found)))
    for n, (hits, right) in enumerate(zip(found, answers, strict=True)):
        gains = np.array([hit in right for hit in dict.fromkeys(hits)][:k], float)
        if gains.any():
            gain = gains @ discounts[: len(gains)] / discounts[: len(right)].sum()
            rows[:, n] = 1 / (1 + gains.argmax()), gains.sum() / len(right), gain
    return dict(zip((f"MRR@{k}", f"recall@{k}", f"nDCG@{k}"), rows, strict=True))


def word_means(model: Any, texts: Sequence[str]) -> Array | None:
    """Return the mean of each text's word vectors, of length 1, (n, d); None if the model has no table of words."""
    name, tokenizer = getattr(model, "word_table", ""), getattr(model, "tokenizer", None)
    if not name or tokenizer is None:
        return None
    table, scale = model.arrays[name], model.arrays.get(name + weights.SCALE)
    table = weights.to_float32(table, scale) if weights.is_compact(table) else table
    means = np.zeros((len(texts), table.shape[1]), np.float32)
    for n, text in enumerate(tokenizer.encode_batch(texts, add_special_tokens=False)):
        ids = np.array(text.ids, int)[np.array(text.attention_mask, bool)]  # the tokenizer may pad
        means[n] = table[ids].mean(axis=0) if len(ids) else 0
    return normalized(means, "cosine")
