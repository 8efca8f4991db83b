"""The command ``selfattn train gpt``: a small GPT that learns a text character by character.

Parses arguments, reads and prints; `training`, `nn` and `models` compute.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from typing import Any

import numpy as np

import selfattn_models as models
from selfattn import files, nn, optim, training
from selfattn.cli import streams
from selfattn.cli.parser import EXIT_CODES, Command, Parser, add_numbers, checked_seed, count, rate
from selfattn.cli.train import check_place
from selfattn.engine import Array
from selfattn.text import read_text
from selfattn.training import checkpoint as checkpoints
from selfattn_models.gpt2 import character_tokenizer

UNFINISHED = "unfinished.safetensors"
WRITTEN = dict.fromkeys((files.CONFIG, files.WEIGHTS), "a model")
WRITTEN |= {name: name for name in ("tokenizer.json", "tokenizer_config.json")}
VALIDATION = 10  # a tenth of the text is held out
EPILOG = f"""\
The folder is a GPT-2 in Transformers' form, with a tokenizer of single characters. selfattn generate,
selfattn evaluate, selfattn_models.load and Transformers load it.

examples:
  selfattn train gpt book.txt --out mine                   takes about a minute
  selfattn train gpt book.txt --out mine --layers 6 --dim 384 --heads 6 --context 256 --steps 5000
  selfattn train gpt book.txt --out mine --resume          continue after Ctrl-C or a crash, with the same options
  selfattn generate mine "It was" --temperature 0.8
{EXIT_CODES}"""


def _add(parser: Parser) -> None:
    parser.add_argument("text", metavar="TEXT", help="a UTF-8 file; - is standard input")
    where = "the folder of the model"
    parser.add_argument("--out", metavar="DIR", required=True, type=streams.folder, help=where)
    model = parser.add_argument_group("model")
    sizes = {
        "--dim": (count, 128, "width"),
        "--layers": (count, 4, "layers"),
        "--heads": (count, 4, "heads, a divisor of the width"),
        "--context": (count, 128, "characters that each prediction depends on"),
    }
    add_numbers(model, sizes)
    dropped = "probability of dropout in training (0)"
    model.add_argument("--dropout", type=float, default=0.0, metavar="P", help=dropped)
    learning = parser.add_argument_group("training")
    numbers = {
        "--steps": (count, 1000, "batches to train on"),
        "--batch-size": (count, 32, "sequences in a batch"),
        "--lr": (rate, 1e-3, "the highest learning rate"),
        "--seed": (int, 0, "seed of weights and batches"),
        "--log-every": (count, 100, "steps between printed lines"),
    }
    add_numbers(learning, numbers)
    learning.add_argument("--quiet", action="store_true", help="print nothing")
    learning.add_argument("--resume", action="store_true", help="continue an unfinished training")
    learning.add_argument("--force", action="store_true", help="replace the model in DIR")


def _train(options: argparse.Namespace) -> int:
    unfinished = options.out / UNFINISHED
    begun = unfinished.is_file() if options.resume else unfinished.exists()
    is_ours = not unfinished.exists() or checkpoints.is_checkpoint(unfinished)
    foreign = "" if is_ours else f"{unfinished} is not from a training of selfattn's"
    check_place(options, begun, foreign, WRITTEN, [unfinished])
    text = read_text(streams.source(options.text))
    characters = "".join(sorted(set(text)))
    tokenizer = character_tokenizer(characters)
    vocabulary = tokenizer.get_vocab()  # all characters are in it
    ids: Array = np.fromiter(map(vocabulary.__getitem__, text), np.int64, len(text))
    held = len(ids) // VALIDATION
    learned, kept = ids[: len(ids) - held], ids[len(ids) - held :]
    # All characters of these sequences but the first are predicted.
    validation = [
        kept[at : at + options.context + 1] for at in range(0, held - options.context, options.context)
    ]
    if len(learned) < options.context + 1:
        needed = f"a context of {options.context} needs {options.context * 10 // 9 + 2}"
        raise ValueError(f"{options.text} has {len(text)} characters; {needed}")
    for_weights, for_batches = np.random.default_rng(checked_seed(options.seed)).spawn(2)
    model = nn.GPT(
        tokenizer.get_vocab_size(),
        options.dim,
        options.layers,
        options.heads,
        options.context,
        dropout=options.dropout,
        rng=for_weights,
    )

    def batches(rng: Any) -> Array:
        starts = rng.integers(0, len(learned) - options.context, options.batch_size)
        found: Array = learned[starts[:, None] + np.arange(options.context + 1)]
        return found

    if not options.quiet:
        size = sum(array.size for array in model.parameters().values())
        print(f"{len(text)} characters, {len(characters)} different; {size} parameters", flush=True)
    made = not options.out.exists()
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.resume:  # with --force, now that the text has been read
        unfinished.unlink(missing_ok=True)
    started = time.monotonic()
    warm: int = max(1, options.steps // 20)

    def warmed(step: int) -> float:
        cosine = math.cos(math.pi * step / options.steps)
        return min(1, (step + 1) / warm) * (0.55 + 0.45 * cosine)

    try:
        with streams.saved_at_the_end(lambda: models.save(model, options.out, tokenizer), options.out):
            history = training.fit(
                model,
                batches,
                None,
                lr=options.lr,
                rng=for_batches,
                steps=options.steps,
                scheduler=lambda optimizer: optim.lr_scheduler.LambdaLR(optimizer, warmed),
                max_norm=1.0,
                log_every=None if options.quiet else options.log_every,
                checkpoint=unfinished,
                checkpoint_every=max(100, options.steps // 10),
                resume=options.resume,
                validation=validation or None,
                progress=False if options.quiet else None,
            )
    except BaseException:
        if made:
            with contextlib.suppress(OSError):  # a checkpoint is in it
                options.out.rmdir()
        raise
    unfinished.unlink(missing_ok=True)
    if not options.quiet:
        done = f"saved in {options.out} after {time.monotonic() - started:.0f} s"
        if validation:
            done += f"; loss of the last tenth of the text {history.validation_losses[-1][1]:.3f}"
        print(f'{done}; try: selfattn generate {options.out} "..." --temperature 0.8')
    return 0


TRAIN_GPT = Command("Train a small GPT on a text's characters.", EPILOG, _add, _train)
