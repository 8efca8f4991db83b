"""Draw ``docs/images/bank.svg``: the attention weights of *bank* in two sentences, in one head of all-MiniLM-L6-v2.

python docs/figures/bank.py all-MiniLM-L6-v2 docs/images/bank.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np
from svg import picture

import selfattn_models as models

SENTENCES = ("the boat drifted to the bank of the river", "she went to the bank and borrowed money")
LAYER, HEAD = 0, 4  # the one of 72 heads with most weight on the word that says which bank it is
LETTER, GAP, LEFT, ROW, TOP = 9.0, 26, 20, 128, 40  # pixels; the letters' width is that of a typical font
STYLE = """\
.token { font-size: 16px; text-anchor: middle } .share { text-anchor: middle }
path { fill: none; stroke: #2f6fde }
@media (prefers-color-scheme: dark) { path { stroke: #6ea8fe } }"""


def sentence(tokens: list[str], weights: np.ndarray, y: float) -> Iterator[str]:
    """Draw a sentence on the line `y`: its tokens, and an arc from *bank* to each, as wide as its weight."""
    widths = [LETTER * len(token) for token in tokens]
    lefts = LEFT + np.concatenate([[0.0], np.cumsum(np.array(widths) + GAP)[:-1]])
    middles = lefts + np.array(widths) / 2
    bank = tokens.index("bank")
    for j in np.argsort(weights):
        start, end, share = middles[bank], middles[j], float(weights[j])
        if j != bank:
            high = y - 24 - min(66.0, 0.3 * abs(end - start))
            arc = f"M{start:.0f} {y - 18:.0f} C{start:.0f} {high:.0f} {end:.0f} {high:.0f} {end:.0f} {y - 18:.0f}"
            yield (
                f'<path d="{arc}" stroke-width="{max(1, 13 * share):.1f}" stroke-opacity="{0.5 + 0.5 * share:.2f}"/>'
            )
    for j, token in enumerate(tokens):
        special = token.startswith("[")
        weight = ' style="font-weight: 700"' if j == bank else ' opacity="0.55"' if special else ""
        yield f'<text class="token" x="{middles[j]:.0f}" y="{y:.0f}"{weight}>{escape(token)}</text>'
        yield f'<text class="small share" x="{middles[j]:.0f}" y="{y + 16:.0f}">{100 * weights[j]:.0f}%</text>'


def main() -> None:
    """Run the model over both sentences, and write the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="the folder of all-MiniLM-L6-v2")
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    model = models.load(options.model)
    title = f"Where “bank” looks: head {HEAD} of layer {LAYER} in all-MiniLM-L6-v2"
    body = [
        f"<style>{STYLE}</style>",
        f'<text class="title" x="{LEFT}" y="24">{title}</text>',
    ]
    for n, text in enumerate(SENTENCES):
        tokens = model.tokens(text)
        weights = np.asarray(model.steps(text).layers[LAYER].weights)[HEAD, tokens.index("bank")]
        body += sentence(tokens, weights, TOP + ROW * (n + 1) - 30)
    options.path.write_text(picture(730, TOP + 2 * ROW, body), encoding="utf-8")


if __name__ == "__main__":
    main()
