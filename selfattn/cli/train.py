"""The command ``selfattn train``: a model of sentence embeddings, new or from a pretrained one; `training` trains it.

Owns what is kept of a training that was interrupted, so that ``--resume`` continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import _disk, files, nn, training
from selfattn.cli import streams
from selfattn.cli.parser import (
    EXIT_CODES,
    Command,
    Parser,
    UsageError,
    add_numbers,
    checked_seed,
    count,
    rate,
)
from selfattn.cli.plugins import load_plugin
from selfattn.text import WhitespaceTokenizer, as_tokenizer, train_sentencepiece

DEFAULTS = {
    "contrastive": {"dim": 256, "heads": 4, "epochs": 3, "lr": 1e-3, "batch_size": 128},
    "proxy": {"dim": 64, "heads": 1, "epochs": 10, "lr": 1e-3, "batch_size": 8},
    "--from": {"epochs": 1, "lr": 5e-5, "batch_size": 32},
}
OF_A_NEW_MODEL = {
    "split": "lines",
    "near": 1,
    "far": None,
    "per_sentence": 1,
    "tokenizer": "sentencepiece",
    "dim": None,
    "vocab_size": 4000,
    "layers": 1,
    "heads": None,
    "max_seq_len": 128,
    "objective": None,
}
UNFINISHED, CHECKPOINT, OPTIONS = "unfinished", "checkpoint.safetensors", "options.json"
OURS = (files.CONFIG, files.WEIGHTS, *files.TOKENIZERS.values(), CHECKPOINT, OPTIONS)
_LEFT = re.compile(rf"\.({'|'.join(map(re.escape, OURS))})\.[0-9a-f]{{16}}\.(new|old)")

DESCRIPTION = "Train a sentence-embedding model on a text: near sentences are similar, distant ones are not."
EPILOG = f"""\
examples:
  selfattn train book.txt --out model                  a sentence on each line
  selfattn train book.txt --out model --split sentences    running text
  selfattn train triplets.tsv --out model              main, similar and non-similar sentence, separated by tabs
  selfattn train book.txt --out model --resume         continue after Ctrl-C, a crash or a full disk
  selfattn train book.txt --out model --tokenizer whitespace --dim 32 --epochs 100
  selfattn train --from all-MiniLM-L6-v2 pairs.tsv --out mine    a pretrained model learns from pairs
  selfattn train gpt book.txt --out mine               a small GPT; selfattn train gpt --help
{EXIT_CODES}"""


def _add(parser: Parser) -> None:
    text = "a UTF-8 file of text, or of triplets if it ends in .tsv; with --from a table; - is standard input"
    parser.add_argument("text", metavar="TEXT", help=text)
    base = (
        "go on from a pretrained model, with a table: a text and its answer, perhaps wrong answers; or "
        "two texts and a number"
    )
    parser.add_argument("--from", metavar="FOLDER", dest="base", type=Path, help=base)
    where = "the folder of the model"
    parser.add_argument("--out", metavar="DIR", required=True, type=streams.folder, help=where)
    add_split(parser)
    data = parser.add_argument_group("triplets")
    add_numbers(data, {"--near": (count, 1, "similar sentences are at most N sentences away")})
    far = "non-similar sentences are more than N away (10, less in a short text)"
    data.add_argument("--far", type=count, metavar="N", help=far)
    add_numbers(data, {"--per-sentence": (count, 1, "triplets for each sentence")})
    model = parser.add_argument_group("model")
    kinds = ("sentencepiece", "whitespace")
    pieces = "sentencepiece (the default): pieces of words; whitespace: whole words"
    model.add_argument("--tokenizer", choices=kinds, default="sentencepiece", help=pieces)
    model.add_argument("--dim", type=count, metavar="N", help="the width of an embedding (256, proxy 64)")
    model.add_argument("--heads", type=count, metavar="N", help="heads of each layer (4, proxy 1)")
    sizes = {
        "--vocab-size": (count, 4000, "at most N tokens"),
        "--layers": (count, 1, "layers of self-attention"),
        "--max-seq-len": (count, 128, "tokens of a sentence that are used"),
    }
    add_numbers(model, sizes)
    loop = parser.add_argument_group("training")
    task = (
        "contrastive: a neighbour is told from those of other sentences; proxy: the tutorial's task, "
        "for triplets the default"
    )
    loop.add_argument("--objective", choices=("contrastive", "proxy"), help=task)
    for name, take, what in (
        ("--epochs", count, "passes through the text"),
        ("--lr", rate, "learning rate of Adam"),
        ("--batch-size", count, "examples for each step"),
    ):
        key = name[2:].replace("-", "_")
        of_each = ", ".join(f"{kind} {values[key]:g}" for kind, values in DEFAULTS.items())
        loop.add_argument(name, type=take, metavar="X" if take is rate else "N", help=f"{what} ({of_each})")
    numbers = {
        "--seed": (int, 0, "seed of everything random"),
        "--log-every": (count, 1000, "steps between printed lines"),
    }
    add_numbers(loop, numbers)
    loop.add_argument("--quiet", action="store_true", help="print nothing")
    how = parser.add_mutually_exclusive_group()
    resume = "continue the unfinished training in DIR, with the same options or more --epochs"
    how.add_argument("--resume", action="store_true", help=resume)
    how.add_argument("--force", action="store_true", help="replace the model in DIR")


def _train(options: argparse.Namespace) -> int:
    unfinished = options.out / UNFINISHED
    _check_place(options, unfinished)

    def say(line: str) -> None:
        if not options.quiet:
            print(line, flush=True)

    started = time.monotonic()
    if options.base is not None:
        for name, default in OF_A_NEW_MODEL.items():
            if getattr(options, name) != default:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for a new model, not for one that --from names"
                )
        fine_tune = load_plugin("train.from", "selfattn train --from")
        _complete(options, "--from", unfinished)
        fine_tune(options, unfinished / CHECKPOINT, lambda: _begin(options, None, unfinished), say)
    else:
        _train_new(options, unfinished, say)
    _remove(unfinished)
    searched = "TEXT" if options.base or options.text == "-" else options.text
    seconds = time.monotonic() - started
    say(f'saved in {options.out} after {seconds:.0f} s; try: selfattn search {options.out} {searched} "..."')
    return 0


def _complete(options: argparse.Namespace, kind: str, unfinished: Path) -> None:
    """Fill in the defaults of a kind of training, and compare with the options of the training that is continued."""
    for name, value in DEFAULTS[kind].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    if options.resume:
        _check_options(options, unfinished / OPTIONS)


def _train_new(options: argparse.Namespace, unfinished: Path, say: Callable[[str], None]) -> None:
    # One stream each: a resumed run need not repeat the model's draws.
    for_triplets, for_model, for_orders = np.random.default_rng(checked_seed(options.seed)).spawn(3)
    triplets, sentences = _read_triplets(options, for_triplets)
    least = 2 * (options.batch_size or DEFAULTS["contrastive"]["batch_size"])
    if options.objective is None:
        of_text = not options.text.lower().endswith(".tsv")
        options.objective = "contrastive" if of_text and len(triplets) >= least else "proxy"
        if of_text and options.objective == "proxy":
            few = f"{len(triplets)} examples are fewer than two batches of negatives, {least}"
            say(f"{few}: the tutorial's task trains the model, as with --objective proxy")
    _complete(options, options.objective, unfinished)
    if options.resume:
        model = files.load_model(unfinished)
    else:
        model = _new_model(options, sentences, for_model)
        _begin(options, model, unfinished)
    empty = without_tokens(model, (sentence for triplet in triplets for sentence in triplet))
    tell_left_out("train", empty)
    triplets = [triplet for triplet in triplets if empty.isdisjoint(triplet)]
    parameters = sum(array.size for array in model.parameters().values())
    proxy = options.objective == "proxy"
    what = "triplets" if proxy else "examples"
    say(f"{len(triplets)} {what}, {model.vocab_size} tokens, {parameters} parameters")
    # A distant sentence that was asked for is one more negative of each example.
    examples: Any = triplets if proxy or options.far else [triplet[:2] for triplet in triplets]
    saved = streams.saved_at_the_end(lambda: files.save_model(model, options.out), options.out)
    with saved, warnings.catch_warnings():
        # A sentence and both its neighbours may meet there.
        warnings.filterwarnings("ignore", "a batch holds")
        training.fit(
            nn.ProxyTask(model) if proxy else model,
            examples,
            None if proxy else nn.MultipleNegativesRankingLoss(),
            epochs=options.epochs,
            lr=options.lr,
            batch_size=options.batch_size,
            rng=for_orders,
            log_every=None if options.quiet else options.log_every,
            checkpoint=unfinished / CHECKPOINT,
            resume=options.resume,
            progress=False if options.quiet else None,
        )


def _check_place(options: argparse.Namespace, unfinished: Path) -> None:
    foreign, left = "", [name for name in OURS if (unfinished / name).exists()]
    if unfinished.exists() and not unfinished.is_dir():
        foreign = f"{unfinished} is in the way of the unfinished training's folder"
    elif left and not _is_begun_here(unfinished):
        foreign = f"{unfinished} holds {left[0]}, which is not from a training of selfattn's"
    begun = (unfinished / OPTIONS).is_file() if options.resume else bool(left)
    kept = (files.CONFIG, files.WEIGHTS, files.TOKENIZERS[options.tokenizer])
    own = [unfinished, *(unfinished / name for name in OURS)]
    check_place(options, begun, foreign * (not options.resume), dict.fromkeys(kept, "a model"), own)


def check_place(
    options: argparse.Namespace, begun: bool, foreign: str, kept: Mapping[str, str], own: Iterable[Path]
) -> None:
    """Refuse a training that would replace what nobody asked it to replace.

    ``foreign`` complains of a file of the user's that is in the way, or is ``""``; ``kept`` says what each file of a
    model is; ``own`` are written while it trains, and may not be links.
    """
    out: Path = options.out
    for path in own:
        if path.is_symlink():
            raise FileExistsError(f"{path} is {_disk.FOLLOWED}")
    if out.exists() and not out.is_dir():
        raise NotADirectoryError(f"--out must be a folder, and {out} is not one")
    if options.resume and not begun:
        raise FileNotFoundError(f"{out} holds no unfinished training that --resume could continue")
    if foreign:
        raise FileExistsError(foreign)
    if options.resume or options.force:
        return
    if begun:
        ways = "--resume continues it, --force replaces it"
        raise FileExistsError(f"{out} holds an unfinished training: {ways}")
    for name, what in kept.items():
        if (out / name).exists():
            raise FileExistsError(f"{out} holds {what}: --force replaces it")


def _is_begun_here(unfinished: Path) -> bool:
    """Tell whether a training made this folder, perhaps without its options yet; if not, the folder is the user's."""
    for name, key in ((OPTIONS, "tokenizer"), (files.CONFIG, "selfattn")):
        try:
            if key in _disk.read_json(unfinished / name):
                return True
        except (OSError, ValueError, TypeError):
            pass
    return False


def _remove(unfinished: Path) -> None:
    """Remove the files of an unfinished training, and the folder if nothing else is in it."""
    for name in OURS:
        (unfinished / name).unlink(missing_ok=True)
    for path in unfinished.glob(".*"):  # files of a training that was killed while it wrote
        if _LEFT.fullmatch(path.name):
            path.unlink()
    with contextlib.suppress(OSError):  # it has files of the user's
        unfinished.rmdir()


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a resumed training cannot change."""
    free = {"text", "out", "epochs", "log_every", "quiet", "resume", "force", "warned"}
    given = {name: value for name, value in vars(options).items() if name not in free}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _check_options(options: argparse.Namespace, path: Path) -> None:
    before = _disk.read_json(path)
    if not isinstance(before, dict):
        raise ValueError(f"{path} holds no options")
    for name, value in _settings(options).items():
        if before.get(name) != value:
            begun = f"--{name.replace('_', '-')} {before.get(name)}"
            raise ValueError(f"the training was started with {begun}, not {value}")


def _read_triplets(
    options: argparse.Namespace, rng: np.random.Generator
) -> tuple[list[training.Triplet], Iterable[str]]:
    if options.text.lower().endswith(".tsv"):
        triplets = training.read_triplets(options.text)
        return triplets, [sentence for triplet in triplets for sentence in triplet]
    sentences = training.read_sentences(streams.source(options.text), options.split)
    try:
        made = training.make_triplets(
            sentences, rng, near=options.near, far=options.far, per_sentence=options.per_sentence
        )
    except ValueError as error:
        hint = "; --split sentences splits running text" if options.split == "lines" else ""
        raise ValueError(f"{options.text}: {error}{hint}") from None
    return made, sentences


def _new_model(
    options: argparse.Namespace, sentences: Iterable[str], rng: np.random.Generator
) -> nn.EmbeddingModel:
    if options.tokenizer == "whitespace":
        tokenizer: Any = WhitespaceTokenizer.train(sentences, options.vocab_size)
        size = tokenizer.vocab_size
    else:
        tokenizer = train_sentencepiece(sentences, options.vocab_size)
        size = tokenizer.get_piece_size()
    return nn.EmbeddingModel(
        tokenizer,
        size,
        options.dim,
        max_seq_len=options.max_seq_len,
        num_layers=options.layers,
        num_heads=options.heads,
        rng=rng,
    )


def _begin(options: argparse.Namespace, model: nn.EmbeddingModel | None, unfinished: Path) -> None:
    """Write what resuming needs; the model itself appears only when it has been trained."""
    made = not options.out.exists()
    _remove(unfinished)
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        if model is not None:
            files.save_model(model, unfinished)
        settings = json.dumps(_settings(options), indent=2) + "\n"
        _disk.write_files(unfinished, {OPTIONS: settings.encode()})
    except BaseException:
        _remove(unfinished)
        if made and options.out.exists():
            options.out.rmdir()
        raise


def add_split(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how a text is split."""
    what = "lines (the default): each line is a sentence; sentences: running text, split after . ! and ?"
    parser.add_argument("--split", choices=training.SPLITS, default="lines", help=what)


def without_tokens(model: nn.EmbeddingModel, sentences: Iterable[str]) -> set[str]:
    """Return the sentences that have no tokens, such as invisible characters and empty lines."""
    tokenize = as_tokenizer(model.tokenizer)
    return {sentence for sentence in set(sentences) if not len(tokenize(sentence))}


def tell_left_out(command: str, sentences: set[str]) -> None:
    """Print the number of sentences without tokens, if there are any."""
    if sentences:
        some = f"{len(sentences)} sentence{'s' * (len(sentences) > 1)}"
        streams.tell(f"selfattn {command}: {some} without tokens left out")


COMMANDS = {"train": Command(DESCRIPTION, EPILOG, _add, _train)}
