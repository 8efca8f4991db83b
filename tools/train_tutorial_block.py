#!/usr/bin/env python3
"""Train the small models that the page of tutorial 2 shows, and write them to selfattn/data/tutorials/.

    python tools/train_tutorial_block.py

The corpus and the loop are those of notebooks/src/2_sentence_embeddings.py. The seeds were chosen, out of forty, for
models in which *bank* attends to the word that shows which bank is meant; others solve the task in other ways, as the
notebook shows.
"""

import json
from pathlib import Path

import numpy as np

from selfattn import nn, optim

PATTERNS = [
    "the bank and the {}",
    "the {} is near the bank",
    "we saw the {} and the bank",
    "a {} at the bank",
    "this bank has a {}",
    "the bank is here and so is the {}",
]
TELLING = {
    "river": ["stream", "mud", "boat", "fish", "reeds", "water"],
    "finance": ["money", "loan", "clerk", "cash", "account", "interest"],
}
TEST = [
    "the bank and the stream",
    "we saw the mud and the bank",
    "the bank and the money",
    "we saw the loan and the bank",
]
CORPUS = {
    topic: [s for pattern in PATTERNS for word in some if (s := pattern.format(word)) not in TEST]
    for topic, some in TELLING.items()
}
WORDS = sorted({word for some in CORPUS.values() for sentence in some for word in sentence.split()})
WIDTH, STEPS, DECIMALS = 4, 600, 3


def new_model(seed, num_heads):
    """Return an untrained model."""
    return nn.EmbeddingModel(
        lambda sentence: [WORDS.index(word) for word in sentence.split()],
        len(WORDS),
        WIDTH,
        max_seq_len=16,
        num_heads=num_heads,
        dtype=np.float64,
        rng=seed,
    )


def train(model, seed):
    """Train a model on triplets, without the bias of the keys, whose gradient is zero."""
    task, rng = nn.ProxyTask(model), np.random.default_rng(seed)
    learned = {name: array for name, array in task.parameters().items() if not name.endswith("key.bias")}
    optimizer = optim.Adam(learned, lr=0.01)
    for _ in range(STEPS):
        same, other = rng.permutation(["river", "finance"])
        main, similar = rng.choice(CORPUS[same], 2, replace=False)
        _, pullback = task.vjp(str(main), str(similar), str(rng.choice(CORPUS[other])))
        grads = pullback(-1.0)
        optimizer.step({name: grads[name] for name in learned})
    return model


def rounded(model):
    """Return the parameters as lists of few decimals."""
    return {name: array.round(DECIMALS).tolist() for name, array in model.state_dict().items()}


def main():
    """Write the models."""
    models = {
        "untrained": {"num_heads": 1, "parameters": rounded(new_model(28, 1))},
        "trained": {"num_heads": 1, "parameters": rounded(train(new_model(28, 1), 28))},
        "two_heads": {"num_heads": 2, "parameters": rounded(train(new_model(10, 2), 10))},
    }
    data = {
        "tutorial": "LLMs: Self Attention",
        "made_by": "tools/train_tutorial_block.py",
        "words": WORDS,
        "sentences": [TEST[0], TEST[2]],
        "models": models,
    }
    path = Path(__file__).parents[1] / "selfattn/data/tutorials/sentence_embeddings.json"
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
