"""A language model of a GGUF file reads prompts and writes answers, against other libraries.

Cases: "prompt", 512 tokens to the logits after them; "answer", 128 tokens after 16, each the most probable; "later", as many after
the prompt; "turn", 32 tokens to the logits after them, when the prompt and the answer are in the cache. selfattn and llama.cpp compute
with the file as it is; Transformers with its weights dequantised to float32, in a folder that is written first. ``--precision`` adds
selfattn with prompts in integers. Prompts are compared with the machine's multiply-adds of int8, a token of an answer with reading the
weights' bytes from memory.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from selfattn import _core
from selfattn.benchmarks import app
from selfattn.benchmarks.app import new_parser
from selfattn.benchmarks.report import best_time, title_of
from selfattn.benchmarks.turns import Array, Prepare, Result, Row, Spelling
from selfattn.cli import streams
from selfattn.cli.parser import count

from . import shared

TOLERANCE = 2.0  # between logits; llama.cpp rounds inputs to 8 bits, and wrong results differ more
BEFORE = 16  # tokens before an answer
TURN = 32  # tokens of a second turn
CONTEXT = 2048
CASES = ("prompt", "answer", "later", "turn")


@dataclass(frozen=True)
class Case(shared.Case):
    """The tokens in the cache, those that are read after them, how many are written, and the operations of all products."""

    name: str
    past: tuple[int, ...]
    ids: tuple[int, ...]
    new: int
    work: float = 0.0

    @property
    def flops(self) -> float:
        """The operations of the layers' products."""
        return self.work

    def facts(self) -> dict[str, Any]:
        """Return the properties of the case; the limit of its products is int8's."""
        return {**super().facts(), "limit_dtype": "int8"}


class Source(NamedTuple):
    """The file, and the folder with its weights in float32."""

    file: Path
    folder: Path


class Model(NamedTuple):
    """A model in a library, with a sequence in its cache: it keeps the first tokens; it adds some, and returns the logits after them."""

    keep: Callable[[int], Any]
    add: Callable[[Sequence[int]], Array]

    def write(self, ids: Sequence[int], new: int) -> list[int]:
        """Add ids, and append the most probable token again and again."""
        written: list[int] = []
        for _ in range(new):
            written.append(int(np.argmax(self.add(written[-1:] or ids))))
        return written


def _load_selfattn(source: Source, threads: int, precision: str = "float32") -> Model:
    import selfattn as sa

    sa.set_num_threads(threads)
    model = import_module("selfattn.models").load(source.file, precision=precision)
    decoder = model._decoder(min(CONTEXT, model.max_positions))
    cache = decoder.new_cache(1)

    def keep(tokens: int) -> None:
        cache.lengths = np.array([tokens])

    return Model(keep, lambda ids: decoder.next_logits([ids], cache)[0])


def _load_transformers(source: Source, threads: int) -> Model:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    library: Any = import_module("transformers")
    model, cache = library.AutoModelForCausalLM.from_pretrained(source.folder).eval(), library.DynamicCache()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def add(ids: Sequence[int]) -> Array:
        given = torch.tensor([list(ids)])
        found: Array = model(given, past_key_values=cache, logits_to_keep=1).logits[0, -1].numpy()
        return found

    return Model(cache.crop, add)


def _load_llama_cpp(source: Source, threads: int) -> Model:
    llama: Any = import_module("llama_cpp")
    model = llama.Llama(
        str(source.file),
        n_ctx=CONTEXT,
        n_batch=CONTEXT,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=True,
        verbose=False,
    )
    context, vocabulary = model._ctx.ctx, model.n_vocab()
    memory = llama.llama_get_memory(context)

    def keep(tokens: int) -> None:
        llama.llama_memory_seq_rm(memory, -1, tokens, -1)

    def add(ids: Sequence[int], kept: Any = model) -> Array:
        given = (llama.llama_token * len(ids))(*ids)  # the batch points to it
        if llama.llama_decode(context, llama.llama_batch_get_one(given, len(ids))):
            raise RuntimeError("llama_decode failed")
        pointer = llama.llama_get_logits_ith(context, -1)
        return np.ctypeslib.as_array(pointer, shape=(vocabulary,))

    return Model(keep, add)


class Library(NamedTuple):
    """A library: its function that loads a model from a source, and the modules that this function needs."""

    load: Callable[[Source, int], Model]
    modules: tuple[str, ...]
    package: str


SELFATTN = Library(_load_selfattn, ("selfattn.models", "tokenizers"), "selfattn")
INTEGERS = ("int16", "int8")
LIBRARIES = {
    "selfattn": SELFATTN,
    **{
        f"selfattn {name}": SELFATTN._replace(load=partial(_load_selfattn, precision=name))
        for name in INTEGERS
    },
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
            def call() -> Any:
                model.keep(len(case.past))
                return model.write(case.ids, case.new) if case.new else model.add(case.ids)

            model.keep(0)
            if case.past:
                model.add(case.past)
            logits = np.asarray(model.add(case.ids), np.float64)
            return [shared.called(call, lambda _: logits - logits.mean())]

        return prepare


def start(engine: str, source: Source, threads: int) -> tuple[float, float]:
    """Return the seconds of loading, and from the start of a process to the first token, with the file in the page cache."""
    code = (
        f"import sys, time; from {__name__} import *; load = LIBRARIES[sys.argv[1]].load; "
        "[import_module(name) for name in LIBRARIES[sys.argv[1]].modules]; begin = time.perf_counter(); "
        "model = load(Source(*map(Path, sys.argv[2:4])), int(sys.argv[4])); print(time.perf_counter() - begin); "
        "print(model.write([1, 2, 3, 4], 1), flush=True)"
    )
    begin = time.perf_counter()
    with shared.new_process(code, threads, engine, *source, threads) as process:
        assert process.stdout
        loading = float(process.stdout.readline())
        process.stdout.readline()
        return loading, time.perf_counter() - begin


def work_of_a_token(file: Path) -> tuple[int, int]:
    """Return the bytes of the weights that a token of an answer reads, and the operations of a token of a prompt.

    The bytes are those of all tensors but the embedding table, unless it is also the head. The operations are those of the layers.
    """
    tensors = import_module("selfattn.models._gguf").GGUF(file).tensors
    size = sum(tensor.size for tensor in tensors.values())
    if "output.weight" in tensors:
        size -= tensors["token_embd.weight"].size
    matrices = [
        tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) == 2
    ]
    return size, 2 * sum(math.prod(tensor.shape) for tensor in matrices)


def seconds_to_read(size: int, threads: int) -> float:
    """Return the least time of reading ``size`` bytes from memory."""
    return size / max(float(_core._read_bandwidth(size, threads, 50)) for _ in range(5))


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    peers = {name: library.modules for name, library in LIBRARIES.items() if library.package != "selfattn"}
    parser = new_parser(prog, __doc__ or "", peers)
    add = parser.add_argument
    add("file", type=Path, help="a GGUF file, such as SmolLM2-135M-Instruct.Q4_1.gguf")
    shared.add_texts(parser, CASES)
    add("--prompt", type=count, default=512, metavar="N", help="tokens of the prompt (512)")
    take = app.listed(app.one_of("precision", INTEGERS))
    add("--precision", type=take, default=[], metavar="A,B", help="int16 or int8: selfattn with it, too")
    add("--answer", type=count, default=128, metavar="N", help="tokens of the answer (128)")
    options = parser.parse_args(arguments)
    options.peers = [*(f"selfattn {name}" for name in options.precision), *options.peers]
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
        read = {
            "prompt": (0, options.prompt, 0), "answer": (BEFORE, 1, options.answer),
            "later": (options.prompt, 1, options.answer), "turn": (options.prompt + options.answer, TURN, 0),
        }  # fmt: skip
        size, work = work_of_a_token(options.file)
        found = []
        for name in options.cases:
            past, given, new = read[name]
            if len(ids) < past + given:
                parser.error(f"the corpus has {len(ids)} tokens; {name} needs {past + given}")
            case = Case(name, tuple(ids[:past]), tuple(ids[past : past + given]), new, float(work * given))
            found.append(case)
        return _run(prog, found, Source(options.file, Path(folder)), size, options)


def _run(prog: str, cases: Sequence[Case], source: Source, size: int, options: Any) -> int:
    rows = []
    for case in cases:
        tokens, limit = case.new or len(case.ids), "" if case.new else "flops"
        found = shared.contestants(case, options)
        label = f"{case.name}, {tokens} tokens after {len(case.past)}"
        rows.append(
            Row("generation", label, found, limit=limit, tolerance=TOLERANCE, count=(tokens, "tokens"))
        )
    reading, starts = seconds_to_read(size, options.threads), {}
    for name in ("selfattn", *options.peers):
        runs = [start(name, source, options.threads) for _ in range(1 if options.quick else 3)]
        starts[name] = [median(figures) for figures in zip(*runs, strict=True)]

    def after(found: Result) -> None:
        for name, (loading, first) in starts.items():
            print(
                f"{title_of(name)}: loading {loading:.2f} s; start of a process to the first token {first:.2f} s"
            )
        print(f"reading the {size / 1e6:.0f} MB of a token's weights takes {reading * 1e3:.2f} ms", end="")
        for case, row in zip(cases, found["rows"], strict=True):
            if case.new and (best := best_time(row["contestants"][0])):
                print(f"; a token of {case.name} takes {best / case.new / reading:.2f} times that", end="")
        print()

    packages = {peer: package for peer in options.peers if (package := LIBRARIES[peer].package) != "selfattn"}
    about = f"{options.file.name}; each token is the most probable"
    return shared.run(
        prog,
        options,
        rows,
        Opened(source),
        packages,
        about,
        after,
        bytes=size,
        reading=reading,
        starts=starts,
    )
