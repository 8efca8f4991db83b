"""A language model of a GGUF file reads a prompt and writes an answer, against other libraries.

Cases: "prompt", 512 tokens to the logits after them; "answer", 64 tokens after a prompt of 16, each the most probable. selfattn
and llama.cpp compute with the file as it is; Transformers with its weights dequantised to float32, in a folder that is written
first. Where selfattn writes an answer, the time of a token is compared with that of reading the weights' bytes from memory.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from selfattn import _core
from selfattn.benchmarks.app import new_parser
from selfattn.benchmarks.report import best_time
from selfattn.benchmarks.turns import Array, Prepare, Result, Row, Spelling
from selfattn.cli import streams
from selfattn.cli.parser import count

from . import shared

TOLERANCE = 2.0  # between logits; llama.cpp rounds inputs to 8 bits, and wrong results differ more
BEFORE = 16  # tokens before an answer
CASES = ("prompt", "answer")


@dataclass(frozen=True)
class Case(shared.Case):
    """The tokens that are read, and how many are written."""

    name: str
    ids: tuple[int, ...]
    new: int

    @property
    def tokens(self) -> int:
        """The number of tokens that the rate counts."""
        return self.new or len(self.ids)


class Source(NamedTuple):
    """The file, and the folder with its weights in float32."""

    file: Path
    folder: Path


class Model(NamedTuple):
    """A model in a library: it reads a prompt, up to the logits after it, and writes an answer."""

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
    """A library: its function that loads a model from a source, and the modules that this function needs."""

    load: Callable[[Source, int], Model]
    modules: tuple[str, ...]
    package: str


LIBRARIES = {
    "selfattn": Library(_load_selfattn, ("tokenizers",), "selfattn"),
    "transformers": Library(_load_transformers, ("torch", "transformers"), "transformers"),
    "llama.cpp": Library(_load_llama_cpp, ("llama_cpp",), "llama-cpp-python"),
}


class Opened:
    """Opens a library in a worker and prepares a case; the logits after the prompt are compared."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, engine: str, threads: int) -> Prepare:
        """Load the model."""
        model = LIBRARIES[engine].load(self.source, threads)

        def prepare(case: Case) -> list[Spelling]:
            ids = np.array(case.ids, np.int64)
            logits = np.asarray(model.read(ids), np.float64)
            call = (lambda: model.write(ids, case.new)) if case.new else (lambda: model.read(ids))
            return [shared.called(call, lambda _: logits - logits.mean())]

        return prepare


def seconds_to_first(source: Source, threads: int) -> float:
    """Return the seconds from the start of a process to selfattn's first token, with the file in the page cache."""
    code = (
        "import sys; from selfattn import models, set_num_threads; set_num_threads(int(sys.argv[2])); "
        "print(len(models.load(sys.argv[1]).generate([1, 2, 3, 4], 1)), flush=True)"
    )
    begin = time.perf_counter()
    with shared.new_process(code, threads, source.file, threads) as process:
        assert process.stdout
        process.stdout.readline()
        return time.perf_counter() - begin


def bytes_of_a_token(file: Path) -> int:
    """Return the bytes of the weights that every token reads: all but the embedding table, unless it is also the head."""
    gguf = import_module("selfattn.models._gguf").GGUF(file)
    sizes = {name: tensor.size for name, tensor in gguf.tensors.items()}
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight", None)
    return sum(sizes.values())


def seconds_to_read(size: int, threads: int) -> float:
    """Return the least time of reading ``size`` bytes from memory."""
    return size / max(float(_core._read_bandwidth(size, threads, 50)) for _ in range(5))


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    peers = {name: library.modules for name, library in LIBRARIES.items() if name != "selfattn"}
    parser = new_parser(prog, __doc__ or "", peers)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file, such as SmolLM2-135M-Instruct.Q4_1.gguf")
    shared.add_texts(parser, CASES)
    add("--prompt", type=count, default=512, metavar="N", help="tokens of the prompt (512)")
    add("--answer", type=count, default=64, metavar="N", help="tokens of the answer (64)")
    options = parser.parse_args(arguments)
    if not options.file.is_file():
        parser.error(f"there is no file {options.file}")
    shared.check_corpus(parser, options.corpus)
    streams.check(options.json)
    models = import_module("selfattn.models")
    with tempfile.TemporaryDirectory() as folder:
        text = options.corpus.read_text(encoding="utf-8", errors="replace")
        ids = models.load(options.file).tokenizer.encode(text[: 20 * options.prompt + 1000]).ids
        if "transformers" in options.peers:
            models.save(models.load(options.file, dtype="float32"), folder)
        read = {"prompt": (options.prompt, 0), "answer": (BEFORE, options.answer)}
        found = [Case(name, tuple(ids[: read[name][0]]), read[name][1]) for name in options.cases]
        return _run(prog, found, Source(options.file, Path(folder)), options)


def _run(prog: str, cases: Sequence[Case], source: Source, options: Any) -> int:
    rows = []
    for case in cases:
        count, found = (case.tokens, "tokens"), shared.contestants(case, options)
        label = f"{case.name}, {case.tokens} tokens"
        rows.append(Row("generation", label, found, limit="", tolerance=TOLERANCE, count=count))
    size = bytes_of_a_token(source.file)
    reading = seconds_to_read(size, options.threads)
    first = median(seconds_to_first(source, options.threads) for _ in range(1 if options.quick else 3))

    def after(found: Result) -> None:
        print(f"from the start of a process to the first token {first:.2f} s")
        print(f"reading the {size / 1e6:.0f} MB of a token's weights takes {reading * 1e3:.2f} ms", end="")
        for case, row in zip(cases, found["rows"], strict=True):
            if case.new and (best := best_time(row["contestants"][0])):
                print(f"; a token takes {best / case.new / reading:.2f} times that", end="")
        print()

    packages = {peer: LIBRARIES[peer].package for peer in options.peers}
    about = f"{options.file.name}; each token is the most probable"
    return shared.run(
        prog, options, rows, Opened(source), packages, about, after, bytes=size, reading=reading, first=first
    )
