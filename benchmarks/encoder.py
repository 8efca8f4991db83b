"""A pretrained sentence encoder, texts in and embeddings out, against other libraries.

Every library also tokenises, cuts at the folder's ``max_seq_length``, and returns normalised means of the tokens. The peers
get texts sorted by length, padded within a batch, in several sizes of batch, of which the fastest counts. Cases: "mixed",
1000 sentences; "long", 400 texts of about 150 tokens; "64", 32 texts of 64 tokens; "one" sentence. The texts come from
--corpus, a file of plain text such as gensim's lee_background.cor.

--dtype int8 compares models that each library has rounded to 8 bits: ONNX Runtime's dynamic quantisation, per channel; OpenVINO's
INT8 by nncf, calibrated on texts of the corpus. Then the least cosine with selfattn's float32 vectors is printed.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from selfattn.benchmarks.app import new_parser
from selfattn.benchmarks.turns import Array, Prepare, Result, Row, Spelling
from selfattn.cli import streams
from selfattn.cli.parser import Parser

from . import memory, shared

Encode = Callable[[list[str], int], Array]  # texts, size of a batch

BATCHES = (8, 16, 32, 64)
TOLERANCE = 1e-4  # the largest difference of elements of vectors of length 1
COMPACT_TOLERANCE = 0.2  # how far the cosine with float32 may be below 1: only wrong results exceed it
LONG, FIXED = 150, 64  # tokens
COUNTS = {"mixed": 1000, "long": 400, "64": 32, "one": 1}


@dataclass(frozen=True)
class Case(shared.Case):
    """Texts to embed, and the operations that their tokens need without any padding."""

    name: str
    texts: tuple[str, ...]
    tokens: int
    operations: float
    dtype: str = "float32"

    @property
    def label(self) -> str:
        """The name of the case in the table."""
        return f"{self.name}: {len(self.texts)} x {self.tokens / len(self.texts):.0f} tokens"

    @property
    def flops(self) -> float:
        """The operations, which were counted with the tokens."""
        return self.operations

    def facts(self) -> dict[str, Any]:
        """Return the properties of the case that are saved: numbers, not the texts."""
        case = {"case": self.name, "texts": len(self.texts), "tokens": self.tokens}
        return {**super().facts(), "case": case, "limit_dtype": self.dtype}


# --------------------------------------------------------------------------------------------------- texts


def _settings(folder: Path) -> tuple[dict[str, Any], int]:
    """Return the configuration, and the length at which texts are cut."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    cut = settings["max_position_embeddings"]
    modules = folder / "sentence_bert_config.json"
    if modules.exists():
        cut = json.loads(modules.read_text(encoding="utf-8")).get("max_seq_length") or cut
    return settings, cut


def tokenizer_of(folder: Path) -> Any:
    """Return the folder's tokenizer; its own padding, to a fixed length, is switched off."""
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(_settings(folder)[1])
    return tokenizer


def flops_of(folder: Path, lengths: Array) -> float:
    """Count the operations of the products of an encoder of BERT's shape."""
    s, n = _settings(folder)[0], lengths.astype(np.float64)
    width, wide, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
    return float(layers * np.sum(n * (8 * width**2 + 4 * width * wide) + 4 * n**2 * width))


def cases_of(
    folder: Path, corpus: Path, names: Sequence[str], scale: float = 1.0, dtype: str = "float32"
) -> list[Case]:
    """Take the cases' texts from the whole corpus; ``scale`` is the fraction of the long lists that is used."""
    tokenizer = tokenizer_of(folder)
    text = corpus.read_text(encoding="utf-8")
    sentences = [s.strip() for s in re.split(r"(?<=[.!?])\s+|\n", text) if s.strip()]
    paragraphs, current, length = [], [], 0
    counted = [len(e.ids) - 2 for e in tokenizer.encode_batch(sentences)]
    for sentence, count in zip(sentences, counted, strict=True):
        current.append(sentence)
        length += count
        if length >= LONG - 10:  # the last sentence exceeds LONG by half its length on average
            paragraphs.append(" ".join(current))
            current, length = [], 0
    different = dict.fromkeys(re.findall(r"\b[a-z]+\b", text))
    words = [word for word in different if tokenizer.token_to_id(word) is not None]
    rng = np.random.default_rng(0)
    sources = {
        "mixed": sentences,
        "long": paragraphs,
        "64": [" ".join(rng.choice(words, FIXED - 2)) for _ in range(COUNTS["64"])],
        "one": sorted(sentences, key=len)[len(sentences) // 2 :],
    }
    cases = []
    for name in names:
        source, count = sources[name], COUNTS[name]
        if name in ("mixed", "long"):
            count = max(1, round(count * scale))
        if len(source) < count:
            raise ValueError(f"{corpus} has texts for {len(source)} of the {count} of the case {name!r}")
        step = 1 if name == "one" else len(source) / count
        texts = tuple(source[int(i * step)] for i in range(count))
        lengths = np.array([len(e.ids) for e in tokenizer.encode_batch(list(texts))])
        cases.append(Case(name, texts, int(lengths.sum()), flops_of(folder, lengths), dtype))
    return cases


# ------------------------------------------------------------------------------------------------- libraries


def in_batches(tokenizer: Any, infer: Callable[[Array, Array], Array], texts: list[str], size: int) -> Array:
    """Embed texts in order of length; ``infer`` takes ids and mask, (B, L) each."""
    encodings = tokenizer.encode_batch(texts)
    order = sorted(range(len(texts)), key=lambda i: len(encodings[i].ids))
    found: list[Array] = [np.empty(0)] * len(texts)
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        longest = len(encodings[chosen[-1]].ids)
        ids, mask = np.zeros((2, len(chosen), longest), np.int64)
        for row, i in enumerate(chosen):
            count = len(encodings[i].ids)
            ids[row, :count], mask[row, :count] = encodings[i].ids, 1
        for i, vector in zip(chosen, infer(ids, mask), strict=True):
            found[i] = vector
    return np.stack(found)


class Source(NamedTuple):
    """The folder or the file made of it that a library loads, and the dtype to compute in."""

    folder: Path
    onnx: Path
    dtype: str

    @property
    def onnx_int8(self) -> Path:
        """The file that ONNX Runtime rounded."""
        return self.onnx.with_suffix(".int8.onnx")

    @property
    def openvino_int8(self) -> Path:
        """The file that nncf rounded."""
        return self.onnx.with_suffix(".int8.xml")


def _load_selfattn(source: Source, threads: int) -> Encode:
    import selfattn as sa

    models = import_module("selfattn.models")
    sa.set_num_threads(threads)
    model = models.load(source.folder, dtype=source.dtype)
    return lambda texts, size: model.encode(texts)


def _load_onnxruntime(source: Source, threads: int) -> Encode:
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    file = source.onnx_int8 if source.dtype == "int8" else source.onnx
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def infer(ids: Array, mask: Array) -> Array:
        return session.run(None, {"input_ids": ids, "attention_mask": mask})[0]  # type: ignore[no-any-return]

    return partial(in_batches, tokenizer_of(source.folder), infer)


def _load_openvino(source: Source, threads: int) -> Encode:
    openvino: Any = import_module("openvino")
    hints = {
        "INFERENCE_PRECISION_HINT": "bf16" if source.dtype == "bfloat16" else "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    file = source.openvino_int8 if source.dtype == "int8" else source.onnx
    request = openvino.Core().compile_model(str(file), "CPU", hints).create_infer_request()

    def infer(ids: Array, mask: Array) -> Array:
        return np.array(request.infer({"input_ids": ids, "attention_mask": mask})[0])

    return partial(in_batches, tokenizer_of(source.folder), infer)


def pooled_model(folder: Path) -> Any:
    """Return a torch module of ids and mask: Transformers' model, the mean of the tokens, normalised."""
    torch: Any = import_module("torch")
    transformers: Any = import_module("transformers")

    class Pooled(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(folder)

        def forward(self, input_ids: Any, attention_mask: Any) -> Any:
            hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            mask = attention_mask[..., None].to(hidden.dtype)
            return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    return Pooled().eval()


def _load_transformers(source: Source, threads: int) -> Encode:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    model = pooled_model(source.folder)

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def infer(ids: Array, mask: Array) -> Array:
        return model(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()  # type: ignore[no-any-return]

    return partial(in_batches, tokenizer_of(source.folder), infer)


def _load_sentence_transformers(source: Source, threads: int) -> Encode:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    model = import_module("sentence_transformers").SentenceTransformer(str(source.folder), device="cpu")
    return lambda texts, size: model.encode(
        texts, batch_size=size, show_progress_bar=False, normalize_embeddings=True
    )


class Library(NamedTuple):
    """A library: how it loads its source, the modules it needs, the dtypes it computes in."""

    load: Callable[[Source, int], Encode]
    modules: tuple[str, ...]
    dtypes: tuple[str, ...] = ("float32",)


DTYPES = ("float32", "bfloat16", "int8")
LIBRARIES = {
    "selfattn": Library(_load_selfattn, ("tokenizers",), DTYPES),
    "onnxruntime": Library(_load_onnxruntime, ("onnxruntime", "tokenizers"), ("float32", "int8")),
    "openvino": Library(_load_openvino, ("openvino", "tokenizers"), DTYPES),
    "transformers": Library(_load_transformers, ("torch", "transformers", "tokenizers")),
    "sentence-transformers": Library(_load_sentence_transformers, ("torch", "sentence_transformers")),
}
EXPORTING = ("torch", "transformers", "onnxscript")
QUANTIZING = {"onnxruntime": "onnx", "openvino": "nncf"}  # needed to round to int8
CALIBRATION = 300  # texts of the corpus
ONNX_USERS = ("onnxruntime", "openvino")


def export(folder: Path, file: Path) -> None:
    """Write the pooled model as ONNX, with any number and length of texts."""
    torch: Any = import_module("torch")
    given = tuple(
        torch.ones((2, 8), dtype=torch.int64) for _ in range(2)
    )  # the same tensor twice would be one input
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=_settings(folder)[1])
    axes = {0: batch, 1: length}
    torch.onnx.export(
        pooled_model(folder),
        given,
        str(file),
        input_names=["input_ids", "attention_mask"],
        output_names=["sentence_embedding"],
        dynamic_shapes=(axes, axes),
        dynamo=True,
        external_data=False,
        verbose=False,
    )


def quantize(source: Source, engines: Sequence[str], corpus: Path) -> None:
    """Round the exported model to 8 bits as each of these libraries does, unless the file exists already."""
    if "onnxruntime" in engines and not source.onnx_int8.exists():
        quantization: Any = import_module("onnxruntime.quantization")
        quantization.quantize_dynamic(
            str(source.onnx),
            str(source.onnx_int8),
            per_channel=True,
            weight_type=quantization.QuantType.QInt8,
        )
    if "openvino" in engines and not source.openvino_int8.exists():
        nncf: Any = import_module("nncf")
        openvino: Any = import_module("openvino")
        tokenizer = tokenizer_of(source.folder)
        texts = corpus.read_text(encoding="utf-8").splitlines()[:CALIBRATION]
        inputs = [
            {"input_ids": np.array([e.ids]), "attention_mask": np.array([e.attention_mask])}
            for e in tokenizer.encode_batch(texts)
        ]
        rounded = nncf.quantize(
            openvino.Core().read_model(str(source.onnx)),
            nncf.Dataset(inputs),
            model_type=nncf.ModelType.TRANSFORMER,
        )
        openvino.save_model(rounded, str(source.openvino_int8), compress_to_fp16=False)


class Opened:
    """Opens a library in a worker and prepares a case, with the batch size that is fastest."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __call__(self, engine: str, threads: int) -> Prepare:
        """Load the folder."""
        encode = LIBRARIES[engine].load(self.source, threads)

        def prepare(case: Case) -> list[Spelling]:
            texts = list(case.texts)
            sizes = [size for size in BATCHES if size < 2 * len(texts)] or [1]
            if engine == "selfattn":
                sizes = sizes[:1]  # selfattn packs texts itself
            sample = texts[:: max(1, len(texts) // 128)]
            best, least = sizes[0], np.inf
            for size in sizes:
                encode(sample, size)  # warm up
                begin = time.perf_counter()
                encode(sample, size)
                seconds = time.perf_counter() - begin
                best, least = (size, seconds) if seconds < least else (best, least)
            return [shared.called(lambda: encode(texts, best))]

        return prepare


def cosine_missing(result: Array, own: Array, whole: Array) -> float:
    """Return 1 minus the least cosine with the float32 vectors ``whole``."""
    return float(1 - np.min(np.sum(result.reshape(whole.shape) * whole, axis=1)))


# -------------------------------------------------------------------------------------- start and memory


def start(engine: str, threads: int, dtype: str, folder: Path, onnx: Path, texts: Path) -> None:
    """Embed a sentence in this new process, print that; then embed all, and print the peak of memory beyond imports."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for module in LIBRARIES[engine].modules:
        import_module(module)
    imported = memory.status("VmHWM")
    encode = LIBRARIES[engine].load(Source(folder, onnx, dtype), threads)
    sentences = json.loads(texts.read_text(encoding="utf-8"))
    encode(sentences[:1], 1)
    print("first", flush=True)
    encode(sentences, 32)
    print(memory.status("VmHWM") - imported, flush=True)


def time_to_first(engine: str, threads: int, source: Source, texts: Path) -> tuple[float, int]:
    """Return the seconds from a process's start to its first embedding, and its peak of memory beyond imports."""
    code = f"import sys; from pathlib import Path; from {__name__} import start; "
    code += "start(sys.argv[1], int(sys.argv[2]), sys.argv[3], *map(Path, sys.argv[4:]))"
    given = [engine, threads, source.dtype, source.folder, source.onnx, texts]
    begin = time.perf_counter()
    with shared.new_process(code, threads, *given) as process:
        assert process.stdout
        line = process.stdout.readline()
        while line and line != "first\n":
            line = process.stdout.readline()
        elapsed = time.perf_counter() - begin
        peak = process.stdout.read().split()
    if not peak:
        raise RuntimeError(f"{engine}'s process ended without an embedding")
    return elapsed, int(peak[-1])


# ------------------------------------------------------------------------------------------------ the command


def _parser(prog: str, arguments: Sequence[str]) -> Parser:
    """Return the parser; the modules that a peer needs depend on the dtype."""
    int8 = any(each.endswith("int8") for each in arguments)
    peers = {name: [*library.modules] for name, library in LIBRARIES.items() if name != "selfattn"}
    for name, module in QUANTIZING.items():
        peers[name] += [module] * int8
    parser = new_parser(prog, __doc__ or "", peers)
    add = parser.add_argument
    add("folder", type=Path, help="a folder of sentence-transformers with mean pooling, normalised")
    shared.add_texts(parser, COUNTS)
    add("--dtype", choices=DTYPES, default="float32", help="of weights and products")
    share = "use this share of the mixed and the long texts"
    add("--scale", type=float, default=1.0, metavar="F", help=share)
    add("--onnx", type=Path, metavar="FILE", help="write the exported model here, or read it if it exists")
    add(
        "--no-start",
        action="store_true",
        help="do not measure the time to the first embedding and the memory",
    )
    return parser


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = _parser(prog, arguments)
    options = parser.parse_args(arguments)
    options.peers = [peer for peer in options.peers if options.dtype in LIBRARIES[peer].dtypes]
    exports = set(options.peers) & set(ONNX_USERS) and not (options.onnx and options.onnx.exists())
    if exports and not all(find_spec(module) for module in EXPORTING):
        parser.error(f"writing the ONNX file needs {', '.join(EXPORTING)}; or give one with --onnx")
    for file in ("config.json", "tokenizer.json"):
        if not (options.folder / file).is_file():
            parser.error(f"{options.folder} has no {file}")
    shared.check_corpus(parser, options.corpus)
    if not 0 < options.scale <= 1:
        parser.error("scale must be in (0, 1]")
    streams.check(options.json)
    if options.quick:
        options.scale *= 0.1
    with tempfile.TemporaryDirectory() as folder:
        source = Source(options.folder, options.onnx or Path(folder) / "model.onnx", options.dtype)
        if exports:
            export(options.folder, source.onnx)
        if options.dtype == "int8":
            quantize(source, options.peers, options.corpus)
        try:
            cases = cases_of(options.folder, options.corpus, options.cases, options.scale, options.dtype)
        except ValueError as error:
            parser.error(str(error))
        return _run(prog, cases, source, Path(folder) / "texts.json", options)


def _run(prog: str, cases: Sequence[Case], source: Source, texts: Path, options: Any) -> int:
    whole = import_module("selfattn.models").load(source.folder) if source.dtype != "float32" else None
    rows = []
    for case in cases:
        found = shared.contestants(case, options, one_thread=True)
        row = Row("encoder", case.label, found, tolerance=TOLERANCE, count=(len(case.texts), "texts"))
        if whole is not None:
            distance = partial(cosine_missing, whole=whole.encode(list(case.texts)))
            row = replace(row, distance=distance, tolerance=COMPACT_TOLERANCE)
        rows.append(row)
    starts = {}
    if not options.no_start and memory.AVAILABLE:
        texts.write_text(json.dumps(max(cases, key=lambda case: case.tokens).texts), encoding="utf-8")
        for engine in ("selfattn", *options.peers):
            times = range(1 if options.quick else 3)
            measured = [time_to_first(engine, options.threads, source, texts) for _ in times]
            starts[engine] = {"seconds": median(t for t, _ in measured), "bytes": max(p for _, p in measured)}

    def after(found: Result) -> None:
        for row in found["rows"] if whole is not None else []:
            compared = [c for c in row["contestants"] if "difference" in c]
            cosines = [f"{c['name']} {1 - c['difference']:.4f}" for c in compared]
            print(f"least cosine with float32, {row['label']}: {', '.join(cosines)}")
        for engine, start in starts.items():
            first = f"{start['seconds']:.2f} s from the start of a process to the first embedding"
            print(f"{engine}: {first}, {start['bytes'] / 1e6:.0f} MB of memory beyond the imports")

    about = f"{source.dtype}; texts of {options.corpus.name}"
    packages = {peer: peer for peer in options.peers}
    return shared.run(prog, options, rows, Opened(source), packages, about, after, start=starts)
