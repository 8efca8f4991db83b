"""Draw ``docs/images/long.svg`` from a saved run of long sequences, as plain SVG text.

python -m benchmarks attention --suite long --json docs/measurements/long.json
python docs/figures/long.py docs/measurements/long.json docs/images/long.svg
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from math import log2
from typing import Any

from svg import main, picture

COLORS = {"plain": "#2f6fde", "causal": "#e07b39", "window": "#3a9d8f"}
HEADS, HALVES = 4, ("forward", "forward + backward")
LABEL = re.compile(
    r"(?:(?P<both>forward \+ backward) )?(?:(?P<kind>causal|window) )?4/4 heads (?P<length>\d+) x \d+"
)
LEFT, TOP, WIDTH, HEIGHT, BETWEEN = 64, 66, 286, 230, 96


class Panel:
    """One half of the pass: time for each head and pair of tokens over the length, both on logarithmic scales."""

    def __init__(self, run: dict[str, Any], half: str, left: int) -> None:
        self.half, self.left = half, left
        self.title = f"{half}, ps for each head and pair of tokens"
        self.lines: dict[str, list[tuple[int, float]]] = {}
        for row in run["rows"]:
            found = LABEL.fullmatch(row["label"])
            if found and (found["both"] or "forward") == half:
                length, (samples,) = int(found["length"]), row["peers"]["selfattn"]["times"].values()
                least = min(t for times in samples for t in times)
                point = length, least / (HEADS * length**2) * 1e12
                self.lines.setdefault(found["kind"] or "plain", []).append(point)
        points = [point for line in self.lines.values() for point in line]
        self.lengths = sorted({length for length, _ in points})
        times = [log2(t) for _, t in points]
        self.low, self.high = int(min(times) // 1), int(-(-max(times) // 1))

    def x(self, length: float) -> float:
        """Place a length."""
        first, last = log2(self.lengths[0]), log2(self.lengths[-1])
        return self.left + WIDTH * (log2(length) - first) / ((last - first) or 1)

    def y(self, picoseconds: float) -> float:
        """Place a time."""
        return TOP + HEIGHT * (self.high - log2(picoseconds)) / ((self.high - self.low) or 1)

    def draw(self) -> Iterator[str]:
        """Draw grid, axes and lines, each line with its name at its end."""
        yield f'<text x="{self.left}" y="{TOP - 14}">{self.title}</text>'
        for power in range(self.low, self.high + 1):
            y, label = self.y(2.0**power), f"{2.0**power:g}"
            yield f'<line class="grid" x1="{self.left}" x2="{self.left + WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text class="small" x="{self.left - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for length in self.lengths:
            label = f"{length // 1024}k" if length % 1024 == 0 else str(length)
            yield (
                f'<text class="small" x="{self.x(length):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">'
                f"{label}</text>"
            )
        for kind, line in self.lines.items():
            color = COLORS.get(kind, "#8a8f98")
            path = " ".join(f"{self.x(length):.1f},{self.y(t):.1f}" for length, t in line)
            yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
            for length, t in line:
                yield (
                    f'<circle cx="{self.x(length):.1f}" cy="{self.y(t):.1f}" r="3" fill="{color}">'
                    f"<title>{escape(kind)}, {length} tokens: {t:.3g} ps</title></circle>"
                )
            end = line[-1]
            yield (
                f'<text x="{self.x(end[0]) + 8:.1f}" y="{self.y(end[1]) + 4:.1f}" style="fill:{color}">'
                f"{escape(kind)}</text>"
            )


def draw(run: dict[str, Any]) -> str:
    """Return the picture of a run as the text of an SVG file."""
    if not run["rows"]:
        raise SystemExit("this run has no rows")
    panels = [Panel(run, half, LEFT + n * (WIDTH + BETWEEN)) for n, half in enumerate(HALVES)]
    config = run["config"]
    setting = (
        f"H={HEADS}, D=64, float32; window: the last 256 keys; "
        f"{config['cpu']}, {config['isa']}, {run['settings']['threads']} threads"
    )
    width, height = LEFT + 2 * WIDTH + BETWEEN + 70, TOP + HEIGHT + 44
    body = [
        f'<text class="title" x="20" y="24">Time over length squared, {min(panels[0].lengths):,} to '
        f"{max(panels[0].lengths):,} tokens</text>",
        *(piece for panel in panels for piece in panel.draw()),
        f'<text class="small" x="{LEFT}" y="{height - 8}">{escape(setting)}</text>',
    ]
    return picture(width, height, body)


if __name__ == "__main__":
    main(draw, "long.svg")
