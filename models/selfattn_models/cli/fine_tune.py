"""``selfattn train --from FOLDER``: a pretrained model learns from a table of texts.

The command tells what the model gained on rows that it never saw.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import selfattn_models as models
from selfattn import nn, training
from selfattn.cli import streams
from selfattn.engine import pairwise_similarities, similarities
from selfattn_models.cli.models import check_exists

LEAST, MOST_HELD = 10, 1000  # rows of a table; rows that are held out
PIECE = 64  # texts that are computed at once, so that the memory does not grow with the batch


def fine_tune(
    options: argparse.Namespace, checkpoint: Path, begin: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Train a folder's model on a table, and write it to ``options.out``.

    ``begin`` is called once all is known to fit.
    """
    check_exists(options.base)
    model: Any = models.load(options.base, dtype="float32")
    if not hasattr(model, "pipeline") or not hasattr(model, "vjp"):
        raise ValueError(
            f"{options.base} holds a {type(model).__name__}; --from takes encoders and cross-encoders of models.load"
        )
    crosses = model.head is not None
    rows = training.read_pairs(streams.source(options.text), 0 if crosses else -1, 1)
    scored = isinstance(rows[0][-1], float)
    if len(rows) < LEAST:
        raise ValueError(
            f"{options.text} has {len(rows)} rows; at least {LEAST} are needed, of which a tenth is held out"
        )
    if crosses and not (scored and len(rows[0]) == 3 and model.num_labels == 1):
        raise ValueError(
            "a cross-encoder with one label learns from rows of two texts and a number between tabs"
        )
    if scored and len(rows[0]) != 3:
        raise ValueError(f"a number follows two texts, not {len(rows[0]) - 1}")
    for_split, for_orders = np.random.default_rng(options.seed).spawn(2)
    kept, tested = _split(rows, for_split.permutation(len(rows)).tolist())
    loss: Any = nn.MultipleNegativesRankingLoss(mini_batch_size=PIECE)
    if scored:
        loss = nn.BCEWithLogitsLoss() if crosses else nn.CosineSimilarityLoss(mini_batch_size=PIECE)
    else:
        kept = _prompted(model, kept)
    before = measure(model, rows, tested)
    say(f"{len(kept)} rows to learn from, {len(tested)} held out; before: {before}")
    if not options.resume:
        begin()
    steps = options.epochs * -(-len(kept) // options.batch_size)
    trained = copy.copy(model)  # with the same weights; prompts are before the texts already
    trained.pipeline = replace(
        model.pipeline, default_prompt_name=None if not scored else model.pipeline.default_prompt_name
    )
    with streams.saved_at_the_end(lambda: models.save(model, options.out), options.out):
        training.fit(
            trained,
            kept,
            loss,
            epochs=options.epochs,
            lr=options.lr,
            batch_size=options.batch_size,
            rng=for_orders,
            warmup_steps=max(1, steps // 10),
            max_norm=1.0,
            log_every=None if options.quiet else options.log_every,
            checkpoint=checkpoint,
            resume=options.resume,
            progress=False if options.quiet else None,
        )
    say(f"after: {measure(model, rows, tested)}; before: {before}")


def _split(rows: Sequence[Any], order: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Return rows to learn from, and a tenth to hold out: with a row, all of its query, or copies of a scored pair."""
    alike: dict[Any, list[int]] = {}
    for n in order:
        texts = rows[n][:2] if isinstance(rows[n][-1], float) else rows[n][:1]
        alike.setdefault(frozenset(" ".join(text.casefold().split()) for text in texts), []).append(n)
    held: list[int] = []
    for group in alike.values():
        held += group if len(held) + len(group) <= min(MOST_HELD, len(rows) // 10) else []
    if not held:
        raise ValueError(
            "no query has so few rows that a tenth of all can be held out with all rows of a query"
        )
    return [rows[n] for n in sorted({*order} - {*held})], [rows[n] for n in held]


def _prompted(model: Any, rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, ...]]:
    """Put the folder's prompts of queries and documents before the texts, as encode_query and encode_document do."""
    query, document = model.pipeline.prompts.get("query", ""), model.pipeline.document_prompt
    if (query or document) and not model.pipeline.include_prompt:
        raise NotImplementedError(
            "gradients need a pooling over the prompt as well, which this folder leaves out"
        )
    return [(query + first, *(document + text for text in rest)) for first, *rest in rows]


def measure(model: Any, rows: Sequence[tuple[Any, ...]], held: Sequence[tuple[Any, ...]]) -> str:
    """Return in words how well a model does on held-out rows: their answers are looked for among those of all rows."""
    first, second = [row[0] for row in held], [row[1] for row in held]
    if isinstance(held[0][-1], float):
        if model.head is None:
            scores = pairwise_similarities("cosine", model.encode(first), model.encode(second))
        else:
            scores = model.predict(list(zip(first, second, strict=True)))[:, 0]
        with np.errstate(invalid="ignore"):
            return f"correlation with the scores {np.corrcoef(scores, [row[-1] for row in held])[0, 1]:.3f}"
    texts = list(dict.fromkeys(row[1] for row in rows))
    places = {text: n for n, text in enumerate(texts)}
    found = similarities(model.pipeline.similarity, model.encode_query(first), model.encode_document(texts))
    own = found[np.arange(len(held)), [places[text] for text in second]]
    right: dict[str, list[int]] = {}
    for query, answer, *_ in rows:
        right.setdefault(query, []).append(places[answer])
    for scores, query in zip(found, first, strict=True):
        scores[right[query]] = -np.inf  # other right answers are not before it
    ranks = 1 + (found > own[:, None]).sum(axis=1)
    return f"recall@1 {np.mean(ranks == 1):.3f}, mean reciprocal rank {np.mean(1 / ranks):.3f} among {len(texts)} texts"
