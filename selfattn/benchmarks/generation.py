"""``selfattn bench generation FILE``: a language model of a GGUF file reads a prompt and writes an answer, against others.

Cases: "prompt", 512 tokens to the logits behind them; "answer", 64 tokens behind a prompt of 16, each the likeliest. selfattn and
llama.cpp compute with the file as it is; Transformers with what it stands for, dequantised to float32, in a folder that is written
before. Where selfattn writes an answer, the time of a token is compared with that of reading the weights' bytes from memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from selfattn import config
from selfattn.cli import streams
from selfattn.cli.parser import Parser

from .encoder import find_corpus
from .turns import Contestant, Measured, Prepare, Prepared, Turns, preamble, versions_of

Array = np.ndarray[Any, Any]

TOLERANCE = 2.0  # of logits: llama.cpp rounds what enters a product to 8 bits; whoever computes something else is found
BEFORE = 16  # tokens before an answer


class Case(NamedTuple):
    """What is read, and how many tokens are written."""

    name: str
    ids: tuple[int, ...]
    new: int

    @property
    def tokens(self) -> int:
        """How many tokens count."""
        return self.new or len(self.ids)


class Source(NamedTuple):
    """The file, and the folder with its weights in float32."""

    file: Path
    folder: Path


class Model(NamedTuple):
    """How a library reads a prompt, to the logits behind it, and writes an answer."""

    read: Callable[[Array], Array]
    write: Callable[[Array, int], Any]


def _load_selfattn(source: Source, threads: int) -> Model:
    import selfattn as sa

    models = import_module("selfattn.models")
    sa.set_num_threads(threads)
    model = models.load(source.file)
    model.stop_ids = frozenset()

    def read(ids: Array) -> Array:
        decoder = model._decoder(len(ids))
        found: Array = decoder.next_logits([ids], decoder.new_cache(1))[0]
        return found

    return Model(read, model.generate)


def _load_transformers(source: Source, threads: int) -> Model:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    model = import_module("transformers").AutoModelForCausalLM.from_pretrained(source.folder).eval()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def read(ids: Array) -> Array:
        found: Array = model(torch.from_numpy(ids)[None], logits_to_keep=1).logits[0, -1].numpy()
        return found

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def write(ids: Array, new: int) -> Any:
        return model.generate(
            torch.from_numpy(ids)[None], max_new_tokens=new, min_new_tokens=new, do_sample=False
        )

    return Model(read, write)


def _load_llama_cpp(source: Source, threads: int) -> Model:
    llama: Any = import_module("llama_cpp")
    model = llama.Llama(
        str(source.file), n_ctx=1024, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def read(ids: Array) -> Array:
        model.reset()
        model.eval(ids.tolist())
        pointer = llama.llama_get_logits_ith(model._ctx.ctx, -1)
        found: Array = np.ctypeslib.as_array(pointer, shape=(model.n_vocab(),)).copy()
        return found

    def write(ids: Array, new: int) -> Any:
        tokens = model.generate(ids.tolist(), top_k=1, temp=0.0, repeat_penalty=1.0, reset=True)
        model.reset()
        return [next(tokens) for _ in range(new)]

    return Model(read, write)


class Library(NamedTuple):
    """How a library loads its source, and the modules it needs."""

    load: Callable[[Source, int], Model]
    modules: tuple[str, ...]
    package: str


LIBRARIES = {
    "selfattn": Library(_load_selfattn, ("tokenizers",), "selfattn"),
    "transformers": Library(_load_transformers, ("torch", "transformers"), "transformers"),
    "llama.cpp": Library(_load_llama_cpp, ("llama_cpp",), "llama-cpp-python"),
}


def is_installed(engine: str) -> bool:
    """Tell whether the modules can be found that a library needs."""
    return all(find_spec(module) is not None for module in LIBRARIES[engine].modules)


class Opened:
    """How a worker opens a library and prepares a case."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, engine: str, threads: int) -> Prepare:
        """Load the model."""
        model = LIBRARIES[engine].load(self.source, threads)

        def prepare(case: Case) -> Prepared:
            ids = np.array(case.ids, np.int64)
            result = np.asarray(model.read(ids), np.float64)
            call = (lambda: model.write(ids, case.new)) if case.new else (lambda: model.read(ids))
            return Prepared(call, result - result.mean())

        return prepare


def seconds_to_first(source: Source, threads: int) -> float:
    """Return the seconds from the start of a process to selfattn's first token, the file in the page cache."""
    code = (
        "import sys; from selfattn import models, set_num_threads; set_num_threads(int(sys.argv[2])); "
        "print(len(models.load(sys.argv[1]).generate([1, 2, 3, 4], 1)), flush=True)"
    )
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    begin = time.perf_counter()
    command = [sys.executable, "-P", "-c", code, str(source.file), str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}) as process:
        assert process.stdout
        process.stdout.readline()
        return time.perf_counter() - begin


def bytes_of_a_token(file: Path) -> int:
    """Return the bytes of the weights that every token reads: all, but of a table that is not the head one row."""
    gguf = import_module("selfattn.models._gguf").GGUF(file)
    sizes = {name: tensor.size for name, tensor in gguf.tensors.items()}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight", None)
    return sum(sizes.values())


def seconds_to_read(count: int, threads: int) -> float:
    """Return the time of reading so many bytes from memory, at best."""
    from selfattn import _core

    return count / max(float(_core._read_bandwidth(count, threads, 50)) for _ in range(5))


# ------------------------------------------------------------------------------------------------ the command


def lines_of(case: Case, measured: Measured, threads: int, engines: Sequence[str]) -> str:
    """Return the lines of a case: a library each."""
    lines = []
    first = Contestant(engines[0], threads)
    for engine in engines:
        head = f"{case.name:8s} {case.tokens:4d} tokens {threads:7d}  {engine:14s}"
        times = measured.times.get(Contestant(engine, threads))
        if not times:
            lines.append(f"{head} {measured.errors.get(Contestant(engine, threads), '-')}")
            continue
        seconds = median(times)
        ratio = measured.ratio(Contestant(engine, threads), first)
        cells = f"{case.tokens / seconds:9.1f} {seconds / case.tokens * 1e3:9.3f}"
        lines.append(f"{head} {cells} " + (f"{ratio:8.2f}x" if ratio else f"{'-':>9s}"))
    return "\n".join(lines)


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file, such as SmolLM2-135M-Instruct.Q4_1.gguf")
    add(
        "--corpus",
        type=Path,
        default=find_corpus(),
        metavar="FILE",
        help="plain text; default: gensim's, if installed",
    )
    add("--cases", default="prompt,answer", metavar="A,B", help="any of these (the default: both)")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt (512)")
    add("--answer", type=int, default=64, metavar="N", help="tokens of the answer (64)")
    add("--engines", metavar="A,B", help=f"any of {', '.join(LIBRARIES)}; default: all installed")
    add("--threads", default="", metavar="N,N", help="default: the CPUs of this process")
    add("--rounds", type=int, default=5, metavar="N")
    add("--seconds", type=float, default=0.1, metavar="T", help="least length of a batch of timings")
    streams.add_json(add)
    return parser


def _check(parser: Parser, options: argparse.Namespace) -> None:
    options.cases = options.cases.split(",")
    if unknown := set(options.cases) - {"prompt", "answer"}:
        parser.error(f"no cases of kind {', '.join(sorted(unknown))}; there are prompt and answer")
    named = options.engines.split(",") if options.engines else list(LIBRARIES)
    if unknown := set(named) - set(LIBRARIES):
        parser.error(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(LIBRARIES)}")
    missing = [engine for engine in named if not is_installed(engine)]
    if options.engines and missing:
        packages = " ".join(LIBRARIES[engine].package for engine in missing)
        parser.error(f"{', '.join(missing)} is not installed: pip install {packages}")
    options.missing = missing
    options.engines = [engine for engine in named if engine not in missing]
    if not options.engines:
        parser.error("no engine is installed")
    if not options.file.is_file():
        parser.error(f"there is no file {options.file}")
    if options.corpus is None or not options.corpus.is_file():
        parser.error("there is no corpus; --corpus FILE names a file of plain text")
    if options.rounds < 1 or not options.seconds >= 0 or min(options.prompt, options.answer) < 1:
        parser.error("rounds, prompt and answer must be at least 1, seconds at least 0")
    try:
        options.threads = [int(n) for n in options.threads.split(",") if n] or [config.usable_cpus()]
    except ValueError:
        parser.error(f"threads are integers with commas between them, not {options.threads!r}")
    if min(options.threads) < 1:
        parser.error("threads must be at least 1")


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench generation") -> int:
    """Run the benchmark and return its exit code."""
    parser = _parser(prog)
    options = parser.parse_args(arguments)
    _check(parser, options)
    streams.check(options.json)
    models = import_module("selfattn.models")
    with tempfile.TemporaryDirectory() as folder, streams.table_beside(options.json):
        source = Source(options.file, Path(folder))
        text = options.corpus.read_text(encoding="utf-8", errors="replace")
        model = models.load(options.file)
        ids = model.tokenizer.encode(text[: 20 * options.prompt + 1000]).ids
        if "transformers" in options.engines:
            models.save(models.load(options.file, dtype="float32"), folder)
        lengths = {"prompt": (options.prompt, 0), "answer": (BEFORE, options.answer)}
        cases = [Case(name, tuple(ids[: lengths[name][0]]), lengths[name][1]) for name in options.cases]
        return _run(cases, source, options)


def _run(cases: Sequence[Case], source: Source, options: argparse.Namespace) -> int:
    engines = options.engines
    peers = {LIBRARIES[engine].package for engine in engines if engine != "selfattn"}
    print(preamble(versions_of(sorted(peers)), options.rounds, options.seconds))
    for engine in options.missing:
        print(f"not compared: {engine}, as {LIBRARIES[engine].package} is not installed")
    heads = f"\n{'case':20s} threads  {'library':14s} {'tokens/s':>9s} {'ms/token':>9s} {'vs first':>9s}"
    print(heads, flush=True)
    saved: list[dict[str, Any]] = []
    sound = True
    try:
        for threads in options.threads:
            contestants = [Contestant(engine, threads) for engine in engines]
            with Turns(Opened(source), contestants) as turns:
                for case in cases:
                    measured = turns.measure(case, options.rounds, options.seconds, TOLERANCE)
                    print(lines_of(case, measured, threads, engines), flush=True)
                    sound = sound and not measured.errors
                    saved.append({"case": case.name, "tokens": case.tokens, "results": measured.as_rows()})
                    own = measured.times.get(Contestant("selfattn", threads))
                    if case.new and own:
                        _tell_reading(source, case, median(own), threads, saved)
            if "selfattn" in engines:
                first = median(seconds_to_first(source, threads) for _ in range(min(options.rounds, 3)))
                print(
                    f"{'':20s} {threads:7d}  from a process's start to the first token {first:.2f} s",
                    flush=True,
                )
                saved.append({"first": first, "threads": threads})
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(saved, indent=1).encode())
    return 0 if sound else 1


def _tell_reading(
    source: Source, case: Case, seconds: float, threads: int, saved: list[dict[str, Any]]
) -> None:
    count = bytes_of_a_token(source.file)
    reading = seconds_to_read(count, threads)
    token = seconds / case.new
    print(
        f"{'':20s} {threads:7d}  reading {count / 1e6:.0f} MB takes {reading * 1e3:.2f} ms; a token takes {token / reading:.2f} times that",
        flush=True,
    )
    saved.append({"bytes": count, "reading": reading, "token": token, "threads": threads})
