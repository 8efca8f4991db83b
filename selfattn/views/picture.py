"""The weights as one SVG picture: for places that show no HTML."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from selfattn.views.writing import Array, number, text

CELL, LABEL, GAP, MAX_SIDE, MAX_TOKEN = 48, 90, 24, 32, 12


def weights_svg(matrices: Sequence[tuple[Array, list[str], list[str]]], title: str) -> str:
    """Draw matrices of weights side by side, darker for more; the first rows and columns if there are many."""
    drawn, left, height = [], 0, LABEL + GAP
    for data, rows, columns in matrices[:4]:
        shown = data[:MAX_SIDE, :MAX_SIDE]
        parts = [
            f'<text x="{LABEL + j * CELL + CELL / 2}" y="{LABEL - 8}" text-anchor="middle">{text(_short(name))}</text>'
            for j, name in enumerate(columns[:MAX_SIDE])
        ]
        for i, row in enumerate(shown):
            y = LABEL + i * CELL
            parts.append(
                f'<text x="{LABEL - 8}" y="{y + CELL / 2 + 4}" text-anchor="end">{text(_short(rows[i]))}</text>'
            )
            for j, weight in enumerate(row):
                opacity = float(np.clip(np.nan_to_num(weight), 0, 1))
                parts.append(
                    f'<rect x="{LABEL + j * CELL}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="#3b6fd4" fill-opacity="{opacity:.3f}" stroke="#888"/>'
                    f'<text x="{LABEL + j * CELL + CELL / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle">{number(float(weight), 2, 3)}</text>'
                )
        drawn.append(f'<g transform="translate({left} 0)">{"".join(parts)}</g>')
        left += LABEL + shown.shape[1] * CELL + GAP
        height = max(height, LABEL + shown.shape[0] * CELL + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {max(left, 1)} {height}" width="{max(left, 1)}" height="{height}" role="img" font-family="sans-serif" font-size="12">'
        f'<title>{text(title)}</title><rect width="100%" height="100%" fill="#fff"/>{"".join(drawn)}</svg>'
    )


def _short(token: str) -> str:
    return token if len(token) <= MAX_TOKEN else token[: MAX_TOKEN - 1] + "…"
