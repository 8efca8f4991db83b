"""The commands ``selfattn train``, ``embed`` and ``search``: sentence embeddings from the command line.

Parses arguments, reads and prints; `training`, `files`, `models` and `nn` compute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from selfattn import _disk, files, nn, training
from selfattn._check import Array
from selfattn.cli import fine_tune, streams
from selfattn.cli.parser import (
    EXIT_CODES,
    Command,
    Parser,
    UsageError,
    add_dtype,
    add_numbers,
    checked_seed,
    count,
    rate,
)
from selfattn.cli.search import add_selection, check_options, is_index, search_index
from selfattn.functional._similarity import similarities
from selfattn.text import WhitespaceTokenizer, as_tokenizer, train_sentencepiece

DEFAULTS = {
    "contrastive": {"dim": 256, "heads": 4, "epochs": 3, "lr": 1e-3, "batch_size": 128},
    "proxy": {"dim": 64, "heads": 1, "epochs": 10, "lr": 1e-3, "batch_size": 8},
    "--from": fine_tune.DEFAULTS,
}  # fmt: skip
OF_A_NEW_MODEL = {
    "split": "lines", "near": 1, "far": None, "per_sentence": 1, "tokenizer": "sentencepiece", "dim": None,
    "vocab_size": 4000, "layers": 1, "heads": None, "max_seq_len": 128, "objective": None,
}  # fmt: skip
UNFINISHED, CHECKPOINT, OPTIONS = "unfinished", "checkpoint.safetensors", "options.json"
OURS = (files.CONFIG, files.WEIGHTS, *files.TOKENIZERS.values(), CHECKPOINT, OPTIONS)
_LEFT = re.compile(rf"\.({'|'.join(map(re.escape, OURS))})\.[0-9a-f]{{16}}\.(new|old)")
CHUNK = 1024  # sentences
MANY = 2000  # lines whose embeddings are worth keeping
# Names of files of other forms than those that are written.
TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".npz")
WHERE = (
    "Get one with: hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir all-MiniLM-L6-v2 (pip install huggingface_hub); "
    "or make one: selfattn train book.txt --out model"
)

TRAIN_EPILOG = f"""\
examples:
  selfattn train book.txt --out model                  a sentence on each line
  selfattn train book.txt --out model --split sentences    running text
  selfattn train triplets.tsv --out model              main, similar and non-similar sentence, separated by tabs
  selfattn train book.txt --out model --resume         continue after Ctrl-C, a crash or a full disk
  selfattn train book.txt --out model --tokenizer whitespace --dim 32 --epochs 100
  selfattn train --from all-MiniLM-L6-v2 pairs.tsv --out mine    a pretrained model learns from pairs
  selfattn train gpt book.txt --out mine               a small GPT; selfattn train gpt --help
{EXIT_CODES}"""
FOLDER = (
    "the folder of a model, from sentence-transformers or Transformers (MiniLM, BGE, E5 and others; needs selfattn[models]) or "
    "from selfattn train"
)
EMBED_EPILOG = f"""\
examples:
  selfattn embed all-MiniLM-L6-v2 "jerry is in trouble"    one line of JSON for each sentence
  selfattn embed model --file lines.txt --out vectors.npy
  sort lines.txt | selfattn embed model | head -3
{EXIT_CODES}"""
SEARCH_EPILOG = f"""\
examples:
  selfattn search all-MiniLM-L6-v2 book.txt "the sea was calm"    score, line number and text of the ten most similar lines
  selfattn search model book.txt "a storm" "a harbour" -k 3
  selfattn search all-MiniLM-L6-v2 book.txt "a storm" --dtype int8   three times as fast where the CPU multiplies int8
  cat *.txt | selfattn search model - "a storm" --json
  selfattn search book.index "a storm" "a harbour"    an index, from selfattn index, is not embedded anew
{EXIT_CODES}"""


def _add_train(parser: Parser) -> None:
    text = "a UTF-8 file of text, or of triplets if it ends in .tsv; with --from a table; - is standard input"
    parser.add_argument("text", metavar="TEXT", help=text)
    base = "go on from a pretrained model, with a table: a text and its answer, perhaps wrong answers; or two texts and a number"
    parser.add_argument("--from", metavar="FOLDER", dest="base", type=Path, help=base)
    where = "the folder of the model"
    parser.add_argument("--out", metavar="DIR", required=True, type=streams.folder, help=where)
    _add_split(parser)
    data = parser.add_argument_group("triplets")
    add_numbers(data, {"--near": (count, 1, "similar sentences are at most N sentences away")})
    far = "non-similar sentences are more than N away (10, less in a short text)"
    data.add_argument("--far", type=count, metavar="N", help=far)
    add_numbers(data, {"--per-sentence": (count, 1, "triplets for each sentence")})
    model = parser.add_argument_group("model")
    kinds = ("sentencepiece", "whitespace")
    pieces = "sentencepiece (the default): pieces of words; whitespace: whole words"
    model.add_argument("--tokenizer", choices=kinds, default="sentencepiece", help=pieces)
    for name, what in (
        ("--dim", "the width of an embedding (256, proxy 64)"),
        ("--heads", "heads of each layer (4, proxy 1)"),
    ):
        model.add_argument(name, type=count, metavar="N", help=what)
    sizes = {
        "--vocab-size": (count, 4000, "at most N tokens"),
        "--layers": (count, 1, "layers of self-attention"),
        "--max-seq-len": (count, 128, "tokens of a sentence that are used"),
    }
    add_numbers(model, sizes)
    loop = parser.add_argument_group("training")
    task = "contrastive: a neighbour is told from those of other sentences; proxy: the tutorial's task, for triplets the default"
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
        _check_exists(options.base)
        _complete(options, "--from", unfinished)
        fine_tune.fine_tune(options, unfinished / CHECKPOINT, lambda: _begin(options, None, unfinished), say)
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
    empty = _left_out("train", model, (sentence for triplet in triplets for sentence in triplet))
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
            nn.ProxyTask(model) if proxy else model, examples, None if proxy else nn.MultipleNegativesRankingLoss(),
            epochs=options.epochs, lr=options.lr, batch_size=options.batch_size, rng=for_orders,
            log_every=None if options.quiet else options.log_every, checkpoint=unfinished / CHECKPOINT,
            resume=options.resume, progress=False if options.quiet else None,
        )  # fmt: skip


def _check_place(options: argparse.Namespace, unfinished: Path) -> None:
    foreign, left = "", [name for name in OURS if (unfinished / name).exists()]
    if unfinished.exists() and not unfinished.is_dir():
        foreign = f"{unfinished} is in the way of the unfinished training's folder"
    elif left and not _is_begun_here(unfinished):
        foreign = f"{unfinished} holds {left[0]}, which is not from a training of selfattn's"
    begun = (unfinished / OPTIONS).is_file() if options.resume else bool(left)
    kept = (files.CONFIG, files.WEIGHTS, files.TOKENIZERS[options.tokenizer])
    check_place(options, begun, foreign * (not options.resume), dict.fromkeys(kept, "a model"))


def check_place(options: argparse.Namespace, begun: bool, foreign: str, kept: Mapping[str, str]) -> None:
    """Refuse a training that would replace what nobody asked it to replace.

    ``foreign`` complains of a file of the user's that is in the way, or is ``""``; ``kept`` says what each file of a model is.
    """
    out: Path = options.out
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
        tokenizer, size, options.dim, max_seq_len=options.max_seq_len, num_layers=options.layers,
        num_heads=options.heads, rng=rng,
    )  # fmt: skip


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


def _add_embed(parser: Parser) -> None:
    parser.add_argument("model", metavar="DIR", type=Path, help=FOLDER)
    without = "a sentence; without any, the lines of standard input"
    parser.add_argument("sentences", metavar="SENTENCE", nargs="*", type=streams.sentence, help=without)
    parser.add_argument("--file", metavar="FILE", help="use the lines of a file; - is standard input")
    add_dtype(parser, " of a pretrained model")
    _add_prompt(parser, "--prompt", "sentence", "the one that the folder names")
    where = "write to a file, as an array if it ends in .npy, else as lines of JSON; - is standard output"
    parser.add_argument("--out", metavar="FILE", type=streams.target, help=where)


def _embed(options: argparse.Namespace) -> int:
    if options.file is not None and options.sentences:
        raise UsageError("give either sentences or --file")
    if options.file is None and not options.sentences and streams.is_terminal(sys.stdin):
        raise UsageError("give a sentence, --file, or lines on standard input")
    out = options.out or streams.DASH
    if (suffix := Path(out).suffix.lower()) in TABLES:
        way = "name it .npy for an array, or .jsonl for lines of JSON"
        raise ValueError(f"--out {out}: {suffix} is not written; {way}")
    streams.check(out)
    if options.file is not None and streams.is_same(out, options.file):
        raise ValueError(f"--out {out} would replace the sentences themselves")
    streams.check_not_of(options.model, options.out)
    _check_exists(options.model)
    sentences = options.sentences or _lines(streams.source(options.file or streams.DASH))
    model = _load(options.model, options.dtype)
    empty: set[str] = set()
    if not options.sentences:
        empty = _without_tokens(model, sentences, options.prompt)
        if number := sum(sentence in empty for sentence in sentences):
            lines = f"{number} line{'s' * (number > 1)} without tokens"
            streams.tell(f"selfattn embed: {lines}: NaN, in JSON null, in place of embeddings")
    more = _prompted(options.model, model, options.prompt)
    if out.lower().endswith(".npy"):
        if isinstance(model, nn.EmbeddingModel) or empty or _disk.is_special(Path(out)):
            file = io.BytesIO()
            np.save(file, _rows(model, sentences, empty, more), allow_pickle=False)
            streams.write(out, file.getvalue())
        else:
            model.encode_to(Path(out), sentences, progress=_shows_progress(sentences), **more)
        return 0
    found = _json_lines(model, sentences, empty, more)
    if out == streams.DASH:
        for line in found:
            print(line)
    else:
        streams.write(out, "".join(f"{line}\n" for line in found).encode())
    return 0


def _lines(source: str | streams.Input) -> list[str]:
    """Read the lines of a source, empty ones too: embedding n is that of line n."""
    lines = training.read_lines(source)
    if not any(lines):
        raise ValueError(f"{source} holds no sentence")
    return lines


def _rows(model: Any, sentences: Sequence[str], empty: set[str], more: dict[str, Any]) -> Array:
    """Compute a row for each sentence, NaN for those that are empty."""
    kept = np.array([sentence not in empty for sentence in sentences])
    y: Array = model.encode([sentence for sentence in sentences if sentence not in empty], **more)
    rows = np.full((len(sentences), y.shape[1]), np.nan, y.dtype)
    rows[kept] = y
    return rows


def _json_lines(model: Any, sentences: Iterable[str], empty: set[str], more: dict[str, Any]) -> Iterator[str]:
    remaining = iter(sentences)
    while chunk := list(islice(remaining, CHUNK)):
        for sentence, vector in zip(chunk, _rows(model, chunk, empty, more), strict=True):
            embedding = None if sentence in empty else _shortest(vector)
            yield json.dumps({"sentence": sentence, "embedding": embedding})


def _shortest(vector: Array) -> list[float | None]:
    """Return numbers with the shortest text that gives the same bits in the vector's dtype."""
    return [_of_json(float(str(x))) for x in vector]


def _of_json(number: float) -> float | None:
    """Return a number, or None: JSON has neither NaN nor infinities."""
    return number if math.isfinite(number) else None


def _add_search(parser: Parser) -> None:
    parser.add_argument("model", metavar="DIR", type=Path, help=f"{FOLDER}; or an index, from selfattn index")
    corpus = "a UTF-8 file with the lines to search; - is standard input; of an index the first sentence"
    parser.add_argument("corpus", metavar="CORPUS", type=streams.sentence, help=corpus)
    parser.add_argument("queries", metavar="QUERY", nargs="*", type=streams.sentence, help="a sentence")
    _add_split(parser)
    add_dtype(parser, " of a pretrained model")
    _add_prompt(parser, "--query-prompt", "query", "the one named query")
    _add_prompt(parser, "--prompt", "line", "the one named document")
    parser.add_argument("-k", type=count, default=10, metavar="N", help="how many to print (10)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")
    add_selection(parser)


def _search(options: argparse.Namespace) -> int:
    streams.results()
    _check_exists(options.model, ", or an index, from selfattn index")
    check_options(options, "split", "dtype", "query_prompt", "prompt")
    if is_index(options.model):
        return search_index(options, [options.corpus, *options.queries])
    if not options.queries:
        raise UsageError("a model needs a CORPUS and a QUERY; selfattn index makes an index")
    source = streams.source(options.corpus)
    if options.split == "lines":
        numbered = [(i, line) for i, line in enumerate(training.read_lines(source), 1) if line]
    else:
        numbered = list(enumerate(training.read_sentences(source, options.split), 1))
    model = _load(options.model, options.dtype)
    empty = _left_out("search", model, (text for _, text in numbered))
    numbered = [(number, text) for number, text in numbered if text not in empty]
    if not numbered:
        raise ValueError(f"{source} holds no sentence")
    texts = [text for _, text in numbered]
    if len(texts) > MANY:
        once = f"lines are embedded anew for each search; selfattn index {options.model} {options.corpus} --out DIR"
        streams.tell(f"selfattn search: {len(texts):,} {once} keeps them")
    for_queries = _prompted(options.model, model, options.query_prompt)
    for_texts = _prompted(options.model, model, options.prompt)
    if isinstance(model, nn.EmbeddingModel):
        vectors, wanted = model.encode(texts), model.encode(options.queries)
    else:
        vectors = model.encode_document(texts, progress=_shows_progress(texts), **for_texts)
        wanted = model.encode_query(options.queries, **for_queries)
    kind = "cosine" if isinstance(model, nn.EmbeddingModel) else model.pipeline.similarity
    for query, scores in zip(options.queries, similarities(kind, wanted, vectors), strict=True):
        best = np.argsort(-scores, kind="stable")[: options.k]
        if len(options.queries) > 1 and not options.json:
            print(f"{query}:")
        for i in best:
            number, text = numbered[i]
            if options.json:
                score = _of_json(round(float(scores[i]), 6))
                print(json.dumps({"query": query, "score": score, "number": number, "text": text}))
            else:
                print(f"{scores[i]:.3f}\t{number}\t{text}")
    return 0


COMMANDS = {
    "train": Command(
        "Train a sentence-embedding model on a text: near sentences are similar, distant ones are not.",
        TRAIN_EPILOG,
        _add_train,
        _train,
    ),
    "embed": Command("Turn sentences into vectors.", EMBED_EPILOG, _add_embed, _embed),
    "search": Command(
        "Print the lines of a text most similar to a query.", SEARCH_EPILOG, _add_search, _search
    ),
}


def _check_exists(folder: Path, other: str = "") -> None:
    """Refuse the name of a folder that does not exist, before texts are read, and say where models can be had."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not a folder; expected the folder of a model{other}. {WHERE}")


def _load(folder: Path, dtype: str | None) -> Any:
    """Load a model of texts."""
    from selfattn import models  # needs the extra's packages

    model = models.load(folder, dtype=dtype)
    if not hasattr(model, "encode") and not isinstance(model, nn.EmbeddingModel):
        raise ValueError(f"{folder} holds a {type(model).__name__}, which does not take text")
    return model


def _without_tokens(model: Any, sentences: Iterable[str], prompt: str | None = None) -> set[str]:
    """Return the sentences that have no tokens, such as invisible characters and empty lines."""
    if isinstance(model, nn.EmbeddingModel):
        tokenize = as_tokenizer(model.tokenizer)
        return {sentence for sentence in set(sentences) if not len(tokenize(sentence))}
    # A pretrained model mostly has special tokens; else a blank text has none, unless a prompt comes before it.
    bare = model.tokenizer is not None and not model.tokenizer.encode(model.pipeline.prompt(prompt)).ids
    return {sentence for sentence in set(sentences) if not sentence} if bare else set()


def _left_out(command: str, model: Any, sentences: Iterable[str]) -> set[str]:
    """Return the sentences that have no tokens, and print their number."""
    if empty := _without_tokens(model, sentences):
        sentence = f"{len(empty)} sentence{'s' * (len(empty) > 1)}"
        streams.tell(f"selfattn {command}: {sentence} without tokens left out")
    return empty


def _add_prompt(parser: Parser, name: str, of: str, default: str) -> None:
    what = f"a text before each {of}, or the name of one of the folder's prompts; default: {default}, if there is one"
    parser.add_argument(name, metavar="TEXT", type=streams.sentence, help=what)


def _prompted(folder: Path, model: Any, prompt: str | None) -> dict[str, Any]:
    """Return a prompt as an argument of ``encode``."""
    if prompt is not None and isinstance(model, nn.EmbeddingModel):
        raise ValueError(f"{folder} is from selfattn train, and has no prompts; leave the prompt out")
    return {} if prompt is None else {"prompt": prompt}


def _shows_progress(sentences: Sequence[str]) -> bool:
    """Tell whether a bar, or lines in its place, are useful and possible."""
    return len(sentences) > CHUNK and find_spec("tqdm") is not None


def _add_split(parser: argparse.ArgumentParser) -> None:
    what = "lines (the default): each line is a sentence; sentences: running text, split after . ! and ?"
    parser.add_argument("--split", choices=training.SPLITS, default="lines", help=what)
