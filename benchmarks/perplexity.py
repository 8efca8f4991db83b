"""Perplexity of GGUF files on the first tokens of a text: each file as it is, its weights in float32, and llama.cpp's.

The tokens are read in windows, each alone. llama.cpp rounds the rows that it multiplies to 8 bits; the column float32 has no rounding
but that of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import selfattn
from selfattn.benchmarks.app import new_parser
from selfattn.benchmarks.turns import Array
from selfattn.cli import streams
from selfattn.cli.parser import count

from . import shared

PEERS = {"float32": (), "llama.cpp": ("llama_cpp",)}


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", PEERS)
    add = parser.add_argument
    add("files", type=Path, nargs="+", metavar="FILE", help="GGUF files")
    shared.add_corpus(parser)
    add("--tokens", type=count, default=8192, metavar="N", help="of the text (8192)")
    add("--window", type=count, default=1024, metavar="N", help="tokens that are read at once (1024)")
    options = parser.parse_args(arguments)
    if missing := [str(file) for file in options.files if not file.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    shared.check_corpus(parser, options.corpus)
    streams.check(options.json)
    selfattn.set_num_threads(options.threads)
    with streams.table_beside(options.json):
        found = {str(file): _measured(file, options) for file in options.files}
    if options.json:
        streams.write(options.json, json.dumps(found, indent=1).encode())
    return 0


def _measured(file: Path, options: Any) -> dict[str, float]:
    models = import_module("selfattn.models")
    model, text = models.load(file), options.corpus.read_text(encoding="utf-8", errors="replace")
    ids = np.array(model.tokenizer.encode(text[: 20 * options.tokens]).ids[: options.tokens])
    windows = np.split(ids, range(options.window, len(ids) - 1, options.window))
    means = {"selfattn": [model.evaluate(window)["mean_nll"] for window in windows]}
    if "float32" in options.peers:
        exact = models.load(file, dtype="float32")
        means["float32"] = [exact.evaluate(window)["mean_nll"] for window in windows]
    if "llama.cpp" in options.peers:
        means["llama.cpp"] = _of_llama_cpp(file, windows, options.threads)
    predicted = [len(window) - 1 for window in windows]
    found = {name: math.exp(np.average(values, weights=predicted)) for name, values in means.items()}
    own = found["selfattn"]
    others = [f"  {name} {x:.4f} ({own / x - 1:+.3%})" for name, x in found.items() if name != "selfattn"]
    print(f"{file.name}, {len(ids)} tokens: {own:.4f}", *others, sep="", flush=True)
    return found


def _of_llama_cpp(file: Path, windows: Sequence[Array], threads: int) -> list[float]:
    """Compute the mean negative log-likelihood of each window's tokens but the first."""
    llama: Any = import_module("llama_cpp")
    most = max(map(len, windows))
    model = llama.Llama(str(file), n_ctx=most, n_threads_batch=threads, logits_all=True, verbose=False)
    found = []
    for window in windows:
        model.reset()
        model.eval(window.tolist())
        logits = model.scores[: len(window) - 1].astype(np.float64)
        wanted = np.take_along_axis(logits, window[1:, None], 1)[:, 0]
        found.append(float(np.mean(np.logaddexp.reduce(logits, axis=1) - wanted)))
    return found
