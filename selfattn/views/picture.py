"""The weights as one SVG picture: for places that show no HTML."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from selfattn.views.writing import Array, letters, number, short, text

CELL, LETTER, GAP, LINE = 48, 7, 24, 20  # pixels
MAX_SIDE, MAX_TOKEN, MAX_MATRICES = 32, 12, 4

Matrix: TypeAlias = tuple[str, Array, list[str], list[str], set[tuple[int, int]]]


def weights_svg(matrices: Sequence[Matrix], title: str, notes: Sequence[str] = ()) -> str:
    """Draw matrices of weights side by side, darker for more: the first four, of each the first rows and columns.

    The name of a matrix stands above it, the notes below all; numbers at ``blanks`` are not told.
    """
    drawn, left, height = [], 0, LINE
    for name, data, rows, columns, blanks in matrices[:MAX_MATRICES]:
        shown = data[:MAX_SIDE, :MAX_SIDE]
        labels = [[short(label, MAX_TOKEN) for label in axis[:MAX_SIDE]] for axis in (rows, columns)]
        beside, cell = (max([CELL, *(LETTER * letters(label) + GAP for label in axis)]) for axis in labels)
        above = f'<text x="{beside}" y="{LINE}" font-weight="bold">{text(name)}</text>' if name else ""
        grid = _grid(shown, labels[0], labels[1], beside, cell, blanks)
        drawn.append(f'<g transform="translate({left} 0)">{above}{grid}</g>')
        left += beside + max(shown.shape[1] * cell, LETTER * letters(name)) + GAP
        height = max(height, 3 * LINE + shown.shape[0] * CELL)
    below = ""
    for note in notes:
        height += LINE
        below += f'<text x="{GAP}" y="{height}">{text(note)}</text>'
        left = max(left, LETTER * letters(note) + 2 * GAP)
    return _document(max(left, 1), height + GAP, title, "".join(drawn) + below)


def stacked(pictures: Sequence[tuple[str, str]], title: str) -> str:
    """Put pictures that :func:`weights_svg` drew below each other, each with its heading; empty ones are left out."""
    parts, wide, height = [], 1, 0
    for heading, picture in pictures:
        size = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
        if size is None or "<rect x=" not in picture:
            continue
        height += 2 * LINE
        parts.append(
            f'<text x="{GAP}" y="{height - GAP / 2}" font-size="15" font-weight="bold">{text(heading)}</text>'
            + picture.replace("<svg ", f'<svg y="{height}" ', 1)
        )
        wide = max(wide, int(size[1]), 2 * GAP + (LETTER + 2) * letters(heading))
        height += int(size[2])
    return _document(max(wide, 1), max(height, 1), title, "".join(parts))


def _document(wide: int, high: int, title: str, drawn: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
        f'role="img" font-family="sans-serif" font-size="12"><title>{text(title)}</title>'
        f'<rect width="100%" height="100%" fill="#fff"/>{drawn}</svg>'
    )


def _grid(
    data: Array, rows: list[str], columns: list[str], left: int, cell: int, blanks: set[tuple[int, int]]
) -> str:
    top = 2 * LINE + 4
    parts = [
        f'<text x="{left + (j + 0.5) * cell}" y="{top - 6}" text-anchor="middle">{text(name)}</text>'
        for j, name in enumerate(columns)
    ]
    for i, row in enumerate(data):
        y = top + i * CELL
        parts.append(f'<text x="{left - 8}" y="{y + CELL / 2 + 4}" text-anchor="end">{text(rows[i])}</text>')
        for j, weight in enumerate(row):
            x, blank = left + j * cell, (i, j) in blanks
            opacity = 0.0 if blank else float(np.clip(np.nan_to_num(weight), 0, 1))
            written = "____" if blank else number(float(weight), 2, 3)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{cell - 2}" height="{CELL - 2}" fill="#5b8ee0" '
                f'fill-opacity="{opacity:.3f}" stroke="#888"/>'
                f'<text x="{x + cell / 2}" y="{y + CELL / 2 + 4}" text-anchor="middle">{written}</text>'
            )
    return "".join(parts)
