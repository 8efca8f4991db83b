"""What a model says with each head off, what it would say after each layer, and what each word does.

The explorer shows it; it is computed when the explorer is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn.engine import Array
from selfattn.functional import softmax
from selfattn_models import readings
from selfattn_models._causal import CausalModel
from selfattn_models._classifier import TextClassifier
from selfattn_models.pages.heads import Store
from selfattn_models.readings import Label, Logit, Similarity

SHOWN = 5  # tokens that may come next
Spell: TypeAlias = Callable[[Sequence[int]], list[str]]
Found: TypeAlias = dict[str, Any]
Pairs: TypeAlias = list[tuple[Array, Array]]


def without_heads(model: Any, texts: Sequence[Any], place: int, spell: Spell, store: Store) -> Found | None:
    """Return what the page shows of heads that are off; None for a model without readings. ``texts`` are one or two."""
    pooling, classifies = readings.pooling(model), isinstance(model, TextClassifier)
    if not (pooling or classifies or isinstance(model, CausalModel)):
        return None
    changes = readings.heads_off(model, texts[0])
    pairs = [
        readings.runs(model, text, changes) for text in (texts if pooling and not classifies else texts[:1])
    ]
    if isinstance(model, CausalModel):
        return _next(model, texts[0], pairs[0], place, spell, store)
    name, targets = "", list[readings.Target]()
    if classifies:
        kind, plain, off = "label", *(_chances(model, [pair[n] for pair in pairs[0]]) for n in (0, 1))
        label = int(plain[0].argmax())
        plain, off = plain[:, label], off[:, label]
        labels = model.config.get("id2label") or {}
        name = str(labels.get(str(label), labels.get(label, label)))
        targets += [Label(label)] * len(texts)
    elif pooling:
        pooled = pooling[0]
        kind, alone = ("similarity", 1) if len(texts) == 2 else ("moved", 0)  # compared with itself before
        each = [[[pooled(rows) for rows in pair] for pair in own] for own in (pairs[0], pairs[-1])]
        plain = np.array([_cosine(a[0], b[0]) for a, b in zip(*each, strict=True)])
        off = np.array([_cosine(a[1], b[alone]) for a, b in zip(*each, strict=True)])
        targets += [Similarity(text) for text in texts[::-1]] * alone
    words = [_bars(model, text, target) for text, target in zip(texts, targets, strict=False)]
    return _stored(kind, name, plain, off, store) | {"words": words}


def _next(model: CausalModel, text: Any, pairs: Pairs, place: int, spell: Spell, store: Store) -> Found:
    """Return what a language model expects after a place, for each head off, and the lens there."""
    rows = (np.stack([pair[n][place] for pair in pairs]) for n in (0, 1))
    plain, off = (softmax(np.float64(readings.logits(model, each))) for each in rows)
    token, order = int(plain[0].argmax()), np.argsort(-off, axis=1)[:, :SHOWN]
    lens = softmax(np.float64(readings.logit_lens(model, text, place)[1:]))
    best = lens.argmax(axis=1)
    names = {n: k for k, n in enumerate(dict.fromkeys([token, *order.ravel().tolist(), *best.tolist()]))}
    return _stored("next", spell([token])[0], plain[:, token], off[:, token], store) | {
        "names": spell(list(names)),
        "place": place,
        "tokens": [[names[n] for n in row] for row in order.tolist()],
        "likely": store.add(np.take_along_axis(off, order, axis=1), "f4"),
        "lens": [[names[n], round(float(lens[k, n]), 3)] for k, n in enumerate(best.tolist())],
        "words": [_bars(model, text[: place + 1], Logit(token))],
    }


def _stored(kind: str, name: str, plain: Array, off: Array, store: Store) -> Found:
    # Each head's effect is against a run that is computed in the same way, which differs by rounding between layers.
    before = float(plain[-1])
    return {"kind": kind, "name": name, "before": before, "after": store.add(before + off - plain, "f4")}


def _bars(model: Any, text: Any, target: Any) -> list[float]:
    found = readings.gradient_times_input(model, text, target)
    return [round(float(x), 3) for x in found / max(float(np.abs(found).max(initial=0)), 1e-30)]


def _chances(model: TextClassifier, rows: list[Array]) -> Array:
    logits = model._head_vjp(np.stack([each[0] for each in rows]))[0].astype(np.float64)
    return softmax(logits) if logits.shape[1] > 1 else 1 / (1 + np.exp(-logits))


def _cosine(a: Array, b: Array) -> float:
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))
