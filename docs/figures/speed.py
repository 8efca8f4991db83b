"""Draw ``docs/images/speed.svg`` from a saved benchmark, as plain SVG text.

python -m benchmarks attention --suite forward causal masks float64 --json results.json
python docs/figures/speed.py results.json docs/images/speed.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any

from svg import main, picture

COLORS = {
    "selfattn": "#2f6fde",
    "onnxruntime": "#8c6bb1",
    "openvino": "#3a9d8f",
    "torch": "#e07b39",
    "numpy": "#8a8f98",
}
LABEL_WIDTH, BAR_WIDTH, BAR_HEIGHT, GAP, TOP = 210, 500, 13, 16, 58


def chosen(row: dict[str, Any]) -> bool:
    """Return whether a row is a forward call whose rate is in GFLOP/s."""
    return row["limit"].startswith("float") and "backward" not in row["label"]


def best_time(peer: dict[str, Any]) -> float | None:
    """Return the seconds of the fastest sample, or None without samples."""
    return min((t for rounds in peer["times"].values() for times in rounds for t in times), default=None)


def rates(row: dict[str, Any]) -> dict[str, float]:
    """Return the operations per second of each library that computed the row."""
    found = {name: best_time(peer) for name, peer in row["peers"].items()}
    return {name: row["work"] / best for name, best in found.items() if best}


def bars(rows: list[dict[str, Any]], per_unit: float) -> Iterator[str]:
    """Draw a group of bars for each row, and a tick at the limit that was measured with it."""
    y = float(TOP)
    for row in rows:
        speeds = rates(row)
        height = BAR_HEIGHT * len(speeds)
        label = escape(row["label"])
        yield f'<text x="{LABEL_WIDTH - 10}" y="{y + height / 2 + 4}" text-anchor="end">{label}</text>'
        limit = max(row["peers"]["selfattn"]["limits"], default=0) * per_unit + LABEL_WIDTH
        yield f'<line class="limit" x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - 3}" y2="{y + height + 3}"/>'
        for name, speed in speeds.items():
            width = speed * per_unit
            yield (
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 2}" rx="2"'
                f' fill="{COLORS.get(name, "#999999")}"><title>{escape(name)}</title></rect>'
                f'<text class="small" x="{LABEL_WIDTH + width + 4:.1f}" y="{y + BAR_HEIGHT - 4}">'
                f"{speed / 1e9:.0f}</text>"
            )
            y += BAR_HEIGHT
        y += GAP


def draw(run: dict[str, Any]) -> str:
    """Return the picture of a run as the text of an SVG file."""
    rows = [row for row in run["rows"] if chosen(row) and rates(row)]
    if not rows:
        raise SystemExit("no row of this run has a rate in GFLOP/s")
    limits = [limit for row in rows for limit in row["peers"]["selfattn"]["limits"]]
    highest = max([*limits, *(speed for row in rows for speed in rates(row).values())])
    names = list(dict.fromkeys(name for row in rows for name in rates(row)))
    height = TOP + sum(BAR_HEIGHT * len(rates(row)) + GAP for row in rows)
    legend = "".join(
        f'<rect x="{x}" y="34" width="10" height="10" rx="2" fill="{COLORS.get(name, "#999999")}"/>'
        f'<text x="{x + 14}" y="43">{escape(name)}</text>'
        for x, name in zip(range(20, 10**4, 112), names, strict=False)
    )
    config, threads = run["config"], run["settings"]["threads"]
    machine = f"{config['cpu']}, {config['isa']}, {threads} threads; dashed: FMA peak of the same rounds"
    width = LABEL_WIDTH + BAR_WIDTH + 60
    body = [
        '<text class="title" x="20" y="20">Forward attention, GFLOP/s, more is better</text>',
        legend,
        *bars(rows, BAR_WIDTH / highest),
        f'<text class="small" x="{LABEL_WIDTH}" y="{height + 10}">{escape(machine)}</text>',
    ]
    return picture(width, height + 22, body)


if __name__ == "__main__":
    main(draw, "speed.svg")
