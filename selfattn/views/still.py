"""Words and ribbons as one SVG picture: what a page shows first, for where no script runs.

The layout is that of ``kit/ribbons.js``: what arrives at a word fills its bar, and a bar at the left is what all words take
from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from selfattn.views.writing import Array, letters, text

UNIT, GAP, BAR = 44, 10, 7  # thickness of weight 1, space between words, width of a bar
LETTER, MAX_TOKEN, MAX_WORDS = 10, 14, 24
WIDE, APART, HEAD = 260, 48, 30  # of the ribbons; between two texts; height of a heading
LEAST = 20  # height of a word
COLOURS = ("var(--text0, #0b5cad)", "var(--text1, #b4470a)")
OWN, INK, PAPER = "var(--itself, #737d88)", "var(--ink, #18212b)", "var(--paper, #fff)"


@dataclass(frozen=True)
class Sentence:
    """One text: its name, its words, and the weights between them.

    Attributes
    ----------
    name : str
    queries, keys : list of str
    weights : ndarray, shape (queries, keys)
    row : int
        The word that stands out.
    told : bool
        Whether its weights are written on its ribbons.
    """

    name: str
    queries: list[str]
    keys: list[str]
    weights: Array
    row: int
    told: bool = True


def ribbons_svg(sentences: Sequence[Sentence], title: str) -> str:
    """Draw texts side by side; of long ones the first words."""
    parts, left, height = [], 0.0, 1.0
    for side, sentence in enumerate(sentences):
        drawn, wide, high = _sentence(sentence, side)
        parts.append(f'<g transform="translate({left:.0f} 0)">{drawn}</g>')
        left, height = left + wide + APART, max(height, high)
    wide = max(left - APART, 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {height:.0f}" width="{wide:.0f}" '
        f'height="{height:.0f}" role="img" font-family="sans-serif" font-size="16"><title>{text(title)}</title>'
        f"{''.join(parts)}</svg>"
    )


def _sentence(sentence: Sentence, side: int) -> tuple[str, float, float]:
    """Draw one text; return it with its width and height."""
    queries, keys = (
        [_short(word) for word in words[:MAX_WORDS]] for words in (sentence.queries, sentence.keys)
    )
    shown = np.nan_to_num(
        sentence.weights[:MAX_WORDS, :MAX_WORDS].astype(np.float64), posinf=0, neginf=0
    ).clip(0)
    sums, ends = shown.sum(axis=0), shown.sum(axis=1).clip(1)
    total = max(max(shown.shape) * (UNIT + GAP), *(np.maximum(x * UNIT, LEAST).sum() for x in (sums, ends)))
    left, right = _tops(sums, total), _tops(ends, total)
    beside, after = (LETTER * max(map(letters, words), default=1) + 12 for words in (keys, queries))
    x, y = beside + BAR, beside + BAR + WIDE
    weak: list[str] = []
    strong: list[str] = []
    figures: list[tuple[float, str]] = []
    start = left.copy()
    for i, row in enumerate(shown):
        top = right[i]
        for j, weight in enumerate(row):
            high = weight * UNIT
            hue = OWN if i == j and queries == keys else COLOURS[side]
            path = _ribbon(x, y, start[j], top, high)
            stands = i == sentence.row
            (strong if stands else weak).append(
                f'<path d="{path}" fill="{hue}" opacity="{0.82 if stands else 0.12}"/>'
            )
            if stands and sentence.told and (len(keys) <= 4 or weight >= 0.145):
                figures.append((top + high / 2, f"{weight:.2f}"))
            start[j] += high
            top += high
    bars = [_bar(beside, at, size) for at, size in zip(left, sums, strict=True)]
    bars += [_bar(y, at, size) for at, size in zip(right, ends, strict=True)]
    words = [
        _text(at + size * UNIT / 2, beside - 6, "end", word)
        for at, size, word in zip(left, sums, keys, strict=True)
    ]
    words += [
        _text(at + size * UNIT / 2, y + BAR + 6, "start", word, ' font-weight="bold"' * (n == sentence.row))
        for n, (at, size, word) in enumerate(zip(right, ends, queries, strict=True))
    ]
    halo = f' font-size="13" font-weight="bold" paint-order="stroke" stroke="{PAPER}" stroke-width="3"'
    told = [_text(at, y - 6, "end", written, halo) for at, written in _spread(figures)]
    name = f'<text x="{beside + WIDE / 2:.0f}" y="18" text-anchor="middle" font-weight="bold" fill="{COLOURS[side]}">{text(sentence.name)}</text>'
    drawn = "".join([*weak, *strong, *bars, *words, *told])
    return f'{name}<g transform="translate(0 {HEAD})">{drawn}</g>', y + BAR + after, total + HEAD + GAP


def _tops(sizes: Array, total: float) -> Array:
    """Return where bars of these sizes start, evenly spaced."""
    high = np.maximum(sizes * UNIT, LEAST)
    room = (total - high.sum()) / max(len(sizes), 1)
    before = np.cumsum(high + room) - (high + room)
    return np.asarray(before + room / 2 + (high - sizes * UNIT) / 2)


def _spread(figures: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Move numbers apart that would cover each other; their middle stays."""
    found: list[tuple[float, str]] = []
    for at, written in figures:
        found.append((max(at, found[-1][0] + 14) if found else at, written))
    shift = sum(at for at, _ in figures) - sum(at for at, _ in found)
    return [(at + shift / len(found), written) for at, written in found]


def _ribbon(x: float, y: float, start: float, end: float, high: float) -> str:
    m = (x + y) / 2
    return (
        f"M{x:.1f},{start:.1f}C{m:.1f},{start:.1f} {m:.1f},{end:.1f} {y:.1f},{end:.1f}v{high:.1f}"
        f"C{m:.1f},{end + high:.1f} {m:.1f},{start + high:.1f} {x:.1f},{start + high:.1f}Z"
    )


def _bar(x: float, y: float, size: float) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{BAR}" height="{max(1.0, size * UNIT):.1f}" fill="{INK}"/>'


def _text(y: float, x: float, anchor: str, word: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y + 5:.1f}" text-anchor="{anchor}" fill="{INK}"{more}>{text(word)}</text>'


def _short(token: str) -> str:
    return token if len(token) <= MAX_TOKEN else token[: MAX_TOKEN - 1] + "…"
