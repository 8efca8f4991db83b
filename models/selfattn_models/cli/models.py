"""The commands ``selfattn embed`` and ``search``: sentence embeddings from the command line; ``info`` of a file.

Parses arguments, reads and prints; `models` and `nn` compute.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import selfattn_models as models
from selfattn import nn, training
from selfattn.cli import streams
from selfattn.cli.parser import EXIT_CODES, Command, Parser, UsageError, add_dtype, count
from selfattn.cli.train import add_split, tell_left_out, without_tokens
from selfattn.engine import Array, disk, similarities
from selfattn_models._gguf_file import kinds
from selfattn_models.cli.search import add_selection, check_options, is_index, search_index

CHUNK = 1024  # sentences
MANY = 2000  # lines whose embeddings are worth keeping
# Names of files of other forms than those that are written.
TABLES = (".csv", ".tsv", ".xlsx", ".parquet", ".npz")
WHERE = (
    "Get one with: hf download sentence-transformers/all-MiniLM-L6-v2 --local-dir all-MiniLM-L6-v2 "
    "(pip install huggingface_hub); or make one: selfattn train book.txt --out model"
)
FOLDER = (
    "the folder of a model, from sentence-transformers or Transformers (MiniLM, BGE, E5 and others) or "
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
  selfattn search all-MiniLM-L6-v2 book.txt "the sea was calm"    score, number and text of the ten most similar lines
  selfattn search model book.txt "a storm" "a harbour" -k 3
  selfattn search all-MiniLM-L6-v2 book.txt "a storm" --dtype int8   three times as fast where the CPU multiplies int8
  cat *.txt | selfattn search model - "a storm" --json
  selfattn search book.index "a storm" "a harbour"    an index, from selfattn index, is not embedded anew
{EXIT_CODES}"""


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
    check_exists(options.model)
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
        if isinstance(model, nn.EmbeddingModel) or empty or disk.is_special(Path(out)):
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
    corpus = (
        "a UTF-8 file with the lines to search; - is standard input. An index needs none: write a QUERY here"
    )
    parser.add_argument("corpus", metavar="CORPUS", type=streams.sentence, help=corpus)
    parser.add_argument("queries", metavar="QUERY", nargs="*", type=streams.sentence, help="a sentence")
    add_split(parser)
    add_dtype(parser, " of a pretrained model")
    _add_prompt(parser, "--query-prompt", "query", "the one named query")
    _add_prompt(parser, "--prompt", "line", "the one named document")
    parser.add_argument("-k", type=count, default=10, metavar="N", help="how many to print (10)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each")
    add_selection(parser)


def _search(options: argparse.Namespace) -> int:
    streams.results()
    check_exists(options.model, ", or an index, from selfattn index")
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
    empty = _without_tokens(model, (text for _, text in numbered))
    tell_left_out("search", empty)
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


def check_exists(folder: Path, other: str = "") -> None:
    """Refuse the name of a folder that does not exist, before texts are read, and say where models can be had."""
    if not folder.exists():
        raise FileNotFoundError(f"{folder} is not a folder; expected the folder of a model{other}. {WHERE}")


def _load(folder: Path, dtype: str | None) -> Any:
    """Load a model of texts."""
    model = models.load(folder, dtype=dtype)
    if not hasattr(model, "encode") and not isinstance(model, nn.EmbeddingModel):
        raise ValueError(f"{folder} holds a {type(model).__name__}, which does not take text")
    return model


def _without_tokens(model: Any, sentences: Iterable[str], prompt: str | None = None) -> set[str]:
    """Return the sentences that have no tokens, such as invisible characters and empty lines."""
    if isinstance(model, nn.EmbeddingModel):
        return without_tokens(model, sentences)
    # A pretrained model mostly has special tokens; else a blank text has none, unless a prompt comes before it.
    bare = model.tokenizer is not None and not model.tokenizer.encode(model.pipeline.prompt(prompt)).ids
    return {sentence for sentence in set(sentences) if not sentence} if bare else set()


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


def _info(options: argparse.Namespace) -> int:
    """Print the kinds of weights in a GGUF file."""
    found = kinds(options.file)
    rows = {kind: dict(zip(("tensors", "bytes", "how"), row, strict=True)) for kind, row in found.items()}
    lines = [f"{kind:8}{n:6} tensors {size / 1e6:10.1f} MB  {how}" for kind, (n, size, how) in found.items()]
    print(json.dumps(rows, indent=2) if options.json else "\n".join(lines), file=streams.results())
    return 0


EMBED = Command("Turn sentences into vectors.", EMBED_EPILOG, _add_embed, _embed)
SEARCH = Command(
    "Print the texts of an index, or the lines of a text, most similar to a query.",
    SEARCH_EPILOG,
    _add_search,
    _search,
)
INFO_FILE = Command(
    "Print the kinds of weights in a file, and how they are computed.", EXIT_CODES, lambda parser: None, _info
)
