"""What the figures of saved runs share: the style, the frame of a picture, and the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 }
.small { font-size: 10.5px; fill: #57606a }
.grid { stroke: #d0d7de; stroke-width: 1 }
.limit { stroke: #57606a; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } .grid { stroke: #3d444d } .limit { stroke: #9da7b3 }
}"""


def picture(width: int, height: int, body: Iterable[str]) -> str:
    """Put the elements of a picture into an SVG file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
            f"<style>{STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def main(draw: Callable[[dict[str, Any]], str], name: str) -> None:
    """Read a saved run and write its picture, by default to ``docs/images``."""
    parser = argparse.ArgumentParser(description="Draw a saved run as an SVG picture.")
    parser.add_argument("results", type=Path, help="what the benchmark saved with --json")
    parser.add_argument("picture", type=Path, nargs="?", default=Path(__file__).parents[1] / "images" / name)
    options = parser.parse_args()
    text = draw(json.loads(options.results.read_text(encoding="utf-8")))
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    options.picture.write_text(text, encoding="utf-8")
