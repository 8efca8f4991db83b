"""What each head of a model does with a text: its weights, its habit, and a compact form of both for a page.

A page of a long text must stay small and hold the model's numbers. So weights are stored in 16 bits each or, where
these are smaller, as the queries and keys that give the weights, which the script multiplies again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.functional import softmax

__all__ = ["HABITS", "Habit", "TextHeads", "habits", "read_steps"]

Array: TypeAlias = npt.NDArray[Any]

#: The kinds of keys that a word may attend to; a key belongs to the first kind that fits.
HABITS = ("itself", "first", "separators", "marks", "before", "after", "words")

BROAD = 0.85  # the least entropy of "broad"; equal weights have 1
MOST, SOME = 0.5, 0.35  # the least share of a habit, and of a weak habit
SMALL = 48  # pixels of a side of a small map, at most
CLOSE = 5e-4  # the largest error of weights that the page computes

_SPECIAL = re.compile(r"\[.+\]|<.+>")
_MARK = re.compile(r"[^\w]+", re.UNICODE)


@dataclass(frozen=True)
class TextHeads:
    """The attention of all heads to one text; tuples have an item for each layer."""

    queries: list[str]  # tokens, as they are shown
    keys: list[str]
    layers: tuple[Array, ...]  # weights, (H, L, S)
    closed: tuple[Array | None, ...]  # pairs that every head masks, (L, S), or None
    made_of: tuple[tuple[Array, Array] | None, ...]  # scaled queries (H, L, D) and keys (H, S, D)
    crossed: bool  # queries and keys are different texts
    prompt: int = 0  # given tokens; the model added the others
    next: dict[str, Any] | None = None  # what a language model expects


@dataclass(frozen=True)
class Habit:
    """A head's habit, over all texts of a page."""

    shares: dict[str, float]  # the share of the words' attention for each of HABITS; the sum is 1
    entropy: float  # the mean over rows, divided by the largest possible entropy
    kind: str  # habit with the largest share; "broad": nearly equal weights; "mixed" if no share reaches SOME
    clear: bool  # the largest share is at least MOST


def read_steps(steps: Any, queries: list[str], keys: list[str], **more: Any) -> TextHeads:
    """Read the weights of all layers and heads from what attention_steps, a layer's or a model's ``steps`` returned."""
    layers, closed, made_of = [], [], []
    for each in getattr(steps, "layers", getattr(steps, "blocks", [steps])):
        attention = getattr(each, "attention", each)
        if not hasattr(attention, "weights"):
            raise TypeError(
                f"{type(attention).__name__} has no attention to show; pass a model, or what its steps return"
            )
        weights = np.asarray(attention.weights)
        if weights.ndim > 3 or weights.ndim < 2:
            raise ValueError(f"the explorer shows one text: weights (heads, L, S), not {weights.shape}")
        weights = weights.reshape(-1, *weights.shape[-2:])
        layers.append(weights)
        masked: Array = (~np.isfinite(attention.masked_scores).reshape(weights.shape)).all(axis=0)
        closed.append(masked if masked.any() else None)  # the pairs that every head masks, (L, S)
        made_of.append(_made_of(attention, weights, closed[-1]))
    if not layers:
        raise ValueError("there is no layer of attention in these steps")
    length, width = layers[0].shape[1:]
    for name, tokens, count, axis in (
        ("tokens", queries, length, "rows"),
        ("key tokens", keys, width, "columns"),
    ):
        if len(tokens) != count:
            raise ValueError(f"{len(tokens)} {name} do not fit the {count} {axis} of the steps")
    more = {"crossed": queries != keys, "prompt": length} | more
    return TextHeads(queries, keys, tuple(layers), tuple(closed), tuple(made_of), **more)


def _made_of(attention: Any, weights: Array, closed: Array | None) -> tuple[Array, Array] | None:
    """Return scaled queries and keys, if the softmax of their products gives the weights; else None."""
    query, key = (getattr(attention, name, None) for name in ("query", "key"))
    if query is None or key is None or query.ndim < 2:
        return None
    heads, length, width = weights.shape
    query, key = (x.reshape(-1, *x.shape[-2:]).astype(np.float32) for x in (query, key))
    if query.shape[:2] != (heads, length) or key.shape[:2] != (heads, width):
        return None
    with np.errstate(all="ignore"):
        scores = np.asarray(attention.scores).reshape(weights.shape)
        largest = np.unravel_index(np.argmax(np.abs(scores)), scores.shape)
        scaled = np.asarray(attention.scaled_scores).reshape(weights.shape)
        query = query * np.float32(scaled[largest] / scores[largest])
        q, k = (values * size for values, size in map(_sixteen, (query, key)))
        products = q @ k.swapaxes(1, 2)
        again = softmax(products if closed is None else np.where(closed, -np.inf, products))
        good = np.abs(again - weights).max(initial=0) <= CLOSE
    return (query, key) if good else None


def habits(texts: Sequence[TextHeads]) -> list[list[Habit]]:
    """Return the habit of each head over the words of these texts, layer by layer.

    Words are tokens that are neither special nor punctuation. A word next to such a token does not count, since the
    token before or after it is not a word.
    """
    found = []
    plans = [_plan(text) for text in texts]
    for n in range(len(texts[0].layers)):
        heads, rows = len(texts[0].layers[n]), 0
        sums, entropy = np.zeros((heads, len(HABITS))), np.zeros(heads)
        for text, (where, kept) in zip(texts, plans, strict=True):
            weights = text.layers[n][:, kept].astype(np.float32)
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
            parts = [(weights * (where[kept] == k)).sum(axis=(1, 2)) for k in range(len(HABITS))]
            logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
            closed = text.closed[n]
            seen = weights.shape[-1] - (0 if closed is None else closed[kept].sum(axis=-1))
            sums += np.stack(parts, axis=1)
            entropy += (-(weights * logs).sum(axis=-1) / np.log(np.maximum(seen, 2))).sum(axis=1)
            rows += int(kept.sum())
        found.append([_named(own / rows, float(h) / rows) for own, h in zip(sums, entropy, strict=True)])
    return found


def _named(shares: Array, entropy: float) -> Habit:
    top = HABITS[int(shares.argmax())]
    most = float(shares.max())
    kind = "broad" if entropy >= BROAD else top if most >= SOME else "mixed"
    named = {name: float(share) for name, share in zip(HABITS, shares, strict=True)}
    return Habit(named, entropy, kind, kind in ("broad", "mixed") or most >= MOST)


def is_causal(text: TextHeads) -> bool:
    """Return whether no token attends to a later one, as in a language model."""
    return not text.crossed and not any((layer[:, 0, 1:] > 0).any() for layer in text.layers)


def is_special(token: str) -> bool:
    """Return whether a token is special, such as [CLS] or <s>."""
    return bool(_SPECIAL.fullmatch(token))


def is_mark(token: str) -> bool:
    """Return whether a token is special or punctuation, not a word."""
    return is_special(token) or bool(_MARK.fullmatch(token.strip("␣Ġ▁#")))


def _plan(text: TextHeads) -> tuple[Array, Array]:
    """Return which habit each pair of query and key belongs to, (L, S), and which queries count, (L,)."""
    length, width = len(text.queries), len(text.keys)
    i, j = np.arange(length)[:, None], np.arange(width)[None, :]
    special = np.array([is_special(token) for token in text.keys])
    mark = np.array([is_mark(token) for token in text.keys])
    where = np.full((length, width), HABITS.index("words"))
    if not text.crossed:
        where[j == i + 1] = HABITS.index("after")
        where[j == i - 1] = HABITS.index("before")
    where[:, mark] = HABITS.index("marks")
    where[:, special] = HABITS.index("separators")
    where[:, :1] = HABITS.index("first")
    if not text.crossed:
        where[i == j] = HABITS.index("itself")
    words = np.array([not is_mark(token) for token in text.queries])
    kept = words.copy()
    if not text.crossed:
        kept[1:] &= ~mark[:-1]
        kept[:-1] &= ~mark[1:] | is_causal(text)
        kept[:1] = False  # "itself" and "first" are the same key there
    for rows in (kept, words):
        if rows.any():
            return where, rows
    return where, np.ones(length, bool)


class Store:
    """Arrays one after the other, each aligned to eight bytes."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, array: Array, kind: Literal["u1", "i2", "u2", "f4"]) -> dict[str, Any]:
        """Append an array; return its place and type for the script."""
        data = np.ascontiguousarray(array, f"<{kind}").tobytes()
        found = {"type": kind, "at": self.size, "shape": list(array.shape)}
        self.parts.append(data + bytes(-len(data) % 8))
        self.size += len(self.parts[-1])
        return found


def stored(text: TextHeads, store: Store) -> dict[str, Any]:
    """Put a text's weights into a store; return the text as the script reads it."""
    small = np.concatenate([_small(weights) for weights in text.layers])
    found = {name: getattr(text, name) for name in ("queries", "keys", "crossed", "prompt", "next")}
    found["marks"] = [is_mark(token) for token in text.keys]
    found["layers"] = [_layer(text, n, store) for n in range(len(text.layers))]
    found["small"] = store.add(_shares(np.sqrt(small), 255), "u1")
    square = not text.crossed and len(text.queries) == len(text.keys)
    if square and len(text.layers) > 1:
        found["means"] = store.add(_shares(np.stack([w.mean(axis=0) for w in text.layers]), 65535), "u2")
    return found


def _shares(weights: Array, most: int) -> Array:
    whole: Array = np.rint(np.clip(weights, 0, 1) * most)
    return whole


def _layer(text: TextHeads, n: int, store: Store) -> dict[str, Any]:
    weights, made_of = text.layers[n], text.made_of[n]
    if made_of is not None:
        query, key = made_of
        groups, band = shared_by(key), _band(text.closed[n])
        if band is not None and query.size + key[::groups].size < weights.size:
            rows = {"query": _stored_rows(query, store), "key": _stored_rows(key[::groups], store)}
            return rows | {"band": band}
    return {"weights": store.add(_shares(weights, 65535), "u2")}


def shared_by(key: Array) -> int:
    """Return how many heads share each key."""
    for groups in range(len(key), 1, -1):
        if len(key) % groups == 0:
            each = key.reshape(-1, groups, *key.shape[1:])
            if (each == each[:, :1]).all():
                return groups
    return 1


def _band(closed: Array | None) -> list[int | None] | None:
    """Return how many keys to the left and right a query sees (None: all), or None if the open pairs are not a band."""
    if closed is None:
        return [None, None]
    length, width = closed.shape
    distance = np.arange(width)[None, :] - np.arange(length)[:, None]
    open_at = distance[~closed]
    if open_at.size == 0:
        return None
    left, right = -int(open_at.min()), int(open_at.max())
    if not np.array_equal(closed, (distance < -left) | (distance > right)):
        return None
    return [left, right]


def _sixteen(rows: Array) -> tuple[Array, Array]:
    """Return rows as 16-bit integers, and a factor for each row."""
    size = np.abs(rows).max(axis=-1, keepdims=True, initial=0) / np.float32(32767)
    return np.rint(rows / np.where(size == 0, 1, size)), size


def _stored_rows(rows: Array, store: Store) -> dict[str, Any]:
    values, size = _sixteen(rows)
    return {"values": store.add(values, "i2"), "size": store.add(size[..., 0], "f4")}


def _small(weights: Array) -> Array:
    """Shrink maps (H, L, S) to at most SMALL pixels a side; a pixel is the largest weight within it."""
    for axis in (1, 2):
        count = weights.shape[axis]
        if count > SMALL:
            starts = [count * n // SMALL for n in range(SMALL)]
            weights = np.maximum.reduceat(weights, starts, axis=axis)
    return weights


TEMPERATURES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
LIKELY = 50  # tokens of each place that a page holds


def next_tokens(logits: Array, spell: Callable[[Sequence[int]], list[str]], store: Store) -> dict[str, Any]:
    """Return the largest logits (L, vocabulary) of each place, and the log-sum-exp of all at each temperature."""
    count = min(LIKELY, logits.shape[1])
    order = np.argpartition(-logits, count - 1, axis=1)[:, :count]
    top = np.take_along_axis(logits, order, axis=1)
    best = np.argsort(-top, axis=1, kind="stable")
    order, top = np.take_along_axis(order, best, axis=1), np.take_along_axis(top, best, axis=1)
    most = top[:, :1].astype(np.float64)
    sums = [np.log(np.exp((logits - most) / t).sum(axis=1)) + most[:, 0] / t for t in TEMPERATURES]
    names: dict[int, int] = {}
    for token in order.ravel().tolist():
        names.setdefault(token, len(names))
    return {
        "names": spell(list(names)),
        "tokens": [[names[token] for token in row] for row in order.tolist()],
        "logits": store.add(top, "f4"),
        "temperatures": list(TEMPERATURES),
        "sums": store.add(np.stack(sums, axis=1), "f4"),
        "vocabulary": logits.shape[1],
    }
