"""Pretrained models: a sentence encoder, texts in and vectors out; a language model, its prompts and answers.

--encoder FOLDER: "sentences", "lines" and "one" sentence of --corpus, tokenising included. ONNX Runtime and OpenVINO
read --onnx FILE, such as sentence-transformers ships, of any precision; they get texts sorted by length, padded within
batches of 32.

--lm FILE: a "prompt" of 512 tokens and the token after it; an "answer" of 128 tokens after 16, each the most probable.

"quants": the product of one row with each kind of a GGUF file's weights.
"""

import json
import math
import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import selfattn as sa
from benchmarks.peers import Peer, Row, calling
from selfattn.cli.parser import count
from selfattn.engine.weights import QUANTS, Quants, multiply

SUITES = ("sentences", "lines", "one", "prompt", "answer", "quants")
PEERS = ("onnxruntime", "openvino", "sentence_transformers", "llama_cpp")
MEGABYTES = 96  # of quants: more than fit into caches


class Case(NamedTuple):
    """A model, what it reads, and how many tokens it writes; ``options`` are those of selfattn's load."""

    library: str
    path: Path
    given: Any  # texts, or ids
    new: int = 0
    options: Any = None


def load(case, threads):
    """Load selfattn's model."""
    sa.set_num_threads(threads)
    return import_module("selfattn_models").load(case.path, **case.options or {})


# -------------------------------------------------------------------------------------------------- encoders


def tokenizer_of(folder):
    """Return the folder's tokenizer, which cuts where sentence-transformers does, and does not pad."""
    tokenizer = import_module("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    settings = json.loads((folder / "sentence_bert_config.json").read_text())
    tokenizer.enable_truncation(settings["max_seq_length"])
    return tokenizer


def in_batches(tokenizer, infer, texts):
    """Embed texts in order of length, by the mean of their tokens' vectors, normalised."""
    found, order = {}, np.argsort([len(text) for text in texts])
    for chosen in np.split(order, range(32, len(order), 32)):
        batch = tokenizer.encode_batch([texts[i] for i in chosen])
        ids, mask = np.array([[each.ids, each.attention_mask] for each in batch]).swapaxes(0, 1)
        sums = np.einsum("blc,bl->bc", infer(ids, mask, 0 * ids), mask)
        found |= dict(zip(chosen, sums / np.linalg.norm(sums, axis=1, keepdims=True), strict=True))
    return np.stack([found[i] for i in range(len(texts))])


def encoder(case, threads):
    """Prepare a library to embed texts."""
    if case.library == "selfattn":
        return calling(partial(load(case, threads).encode, case.given))  # packs texts itself
    if case.library == "sentence_transformers":
        import_module("torch").set_num_threads(threads)
        model = import_module("sentence_transformers").SentenceTransformer(str(case.path), device="cpu")
        return calling(partial(model.encode, case.given, normalize_embeddings=True))
    library, file = import_module(case.library), str(case.options["onnx"])
    if case.library == "onnxruntime":
        how = library.SessionOptions()
        how.intra_op_num_threads = threads
        session = library.InferenceSession(file, how, providers=["CPUExecutionProvider"])
        run = partial(session.run, None)
    else:
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        run = library.Core().compile_model(file, "CPU", hints).create_infer_request().infer

    def infer(*given):
        return run(dict(zip(("input_ids", "attention_mask", "token_type_ids"), given, strict=True)))[0]

    tokenizer = tokenizer_of(case.path)
    tokenizer.enable_padding()
    return calling(partial(in_batches, tokenizer, infer, case.given))


def encoder_rows(options):
    """Return the rows of the encoder."""
    folder, onnx = options.encoder, options.onnx or options.encoder / "onnx" / "model.onnx"
    lines = [line for line in options.corpus.read_text(encoding="utf-8").splitlines() if line]
    sentences = [text for line in lines for text in re.split(r"(?<=[.!?])\s+", line) if text]
    texts = {"sentences": sentences[: options.texts], "lines": lines[: options.texts], "one": sentences[:1]}
    settings, rows, tokenizer = json.loads((folder / "config.json").read_text()), [], tokenizer_of(folder)
    width, wide, layers = (
        settings[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    known = ["sentence_transformers", *["onnxruntime", "openvino"] * onnx.exists()]
    for suite in [name for name in texts if name in options.suite]:
        lengths = np.array([len(e.ids) for e in tokenizer.encode_batch(texts[suite])], np.float64)
        work = layers * np.sum(lengths * (8 * width**2 + 4 * width * wide) + 4 * lengths**2 * width)
        cases = {
            "selfattn": {"dtype": options.dtype},
            **{name: {"onnx": onnx} for name in options.peers if name in known},
        }
        peers = {
            name: Peer(encoder, Case(name, folder, texts[suite], options=how)) for name, how in cases.items()
        }
        label, count = f"{suite}: {len(lengths)} x {lengths.mean():.0f} tokens", (len(lengths), "texts")
        # Vectors have length 1; roundings to int8 differ, and only wrong results by more.
        rows.append(Row(label, peers, options.dtype, work, count, tolerance=0.1))
    return rows


# -------------------------------------------------------------------------------------------- language models


def writer(case, threads):
    """Prepare a library to write; the logits after the prompt are compared."""
    ids, new = case.given, case.new
    if case.library == "selfattn":
        model = load(case, threads)
        logits = model.logits(ids)[-1]
        write = partial(model.generate, ids, new, temperature=0, min_new_tokens=new)
    else:
        add = llama(case.path, threads)
        logits = add(ids, 0).copy()

        def write():
            given, kept = ids, 0
            for _ in range(new):
                best = int(np.argmax(add(given, kept)))
                given, kept = [best], kept + len(given)

    return calling(write, lambda _: logits - logits.mean())


def llama(file, threads):
    """Return llama.cpp's function of ids and of the tokens to keep in its cache: the logits after the ids."""
    library = import_module("llama_cpp")
    most = {"n_ctx": 2048, "n_batch": 2048, "n_threads": threads, "n_threads_batch": threads}
    model = library.Llama(str(file), flash_attn=True, verbose=False, **most)
    context, vocabulary = model._ctx.ctx, model.n_vocab()

    def add(ids, kept, model=model):
        library.llama_memory_seq_rm(library.llama_get_memory(context), -1, kept, -1)
        given = (library.llama_token * len(ids))(*ids)  # the batch points to it
        if library.llama_decode(context, library.llama_batch_get_one(given, len(ids))):
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(library.llama_get_logits_ith(context, -1), shape=(vocabulary,))

    return add


def lm_rows(options):
    """Return the rows of the language model."""
    model, text = (
        import_module("selfattn_models").load(options.lm),
        options.corpus.read_text(encoding="utf-8"),
    )
    ids = model.tokenizer.encode(text[:50000]).ids
    weights = {name: w for name, w in {**model.parameters(), **model.quants}.items() if len(w.shape) == 2}
    operations = 2.0 * sum(math.prod(w.shape) for name, w in weights.items() if "layers" in name)
    read = float(sum(w.nbytes for name, w in weights.items() if model.tied or "embed" not in name))
    own = {"selfattn": {}, **{name: {"precision": name} for name in options.precision}}
    n, new = min(512, len(ids)), options.answer
    rows = {
        "prompt": (f"prompt of {n} tokens", ids[:n], 1, "int8", operations * n, (n, "tokens")),
        "answer": (f"answer of {new} tokens after 16", ids[:16], new, "bytes", read * new, (new, "tokens")),
    }
    found = []
    for label, given, length, *limit in (rows[suite] for suite in rows if suite in options.suite):
        peers = {
            name: Peer(writer, Case("selfattn", options.lm, given, length, how)) for name, how in own.items()
        }
        if "llama_cpp" in options.peers:
            peers["llama_cpp"] = Peer(writer, Case("llama_cpp", options.lm, given, length))
        found.append(Row(label, peers, *limit, tolerance=2.0))  # of logits; llama.cpp rounds rows to 8 bits
    return found


# ---------------------------------------------------------------------------------------------------- quants


def product(case, threads):
    """Prepare the product of one row with random quants."""
    sa.set_num_threads(threads)
    numbers, block = QUANTS[case.given]
    out, columns = case.new, 1536
    bits = np.random.default_rng(0).integers(0, 64, 7919, np.uint8)  # no scale of them is infinite
    raw = np.resize(bits, (out, columns // numbers * block))
    weights = Quants(raw, case.given, (out, columns))
    return calling(partial(multiply, np.ones((1, columns), np.float32), weights, None, decoding=True))


def add_options(parser):
    """Add the options of this program."""
    add = parser.add_argument
    add(
        "--encoder",
        type=Path,
        metavar="FOLDER",
        help="of sentence-transformers, of BERT's shape: mean, normalised",
    )
    add("--lm", type=Path, metavar="FILE", help="a language model: a GGUF file, or a folder of Transformers")
    add("--corpus", type=Path, metavar="FILE", help="plain text, such as gensim's lee_background.cor")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "int8"),
        default="float32",
        help="of the encoder (%(default)s)",
    )
    add("--precision", nargs="*", choices=("int16", "int8"), default=[], help="selfattn's LM with these, too")
    add("--texts", type=count, default=300, metavar="N", help="texts for the encoder (%(default)s)")
    add("--answer", type=count, default=128, metavar="N", help="tokens of an answer (%(default)s)")
    add(
        "--onnx",
        type=Path,
        metavar="FILE",
        help="the encoder for other libraries; default: FOLDER/onnx/model.onnx",
    )


def rows(options):
    """Return the rows of the suites whose files are given."""
    found = []
    if options.corpus is None and (options.encoder or options.lm):
        raise ValueError("--corpus FILE names the text that models read")
    found += encoder_rows(options) if options.encoder else []
    found += lm_rows(options) if options.lm else []
    for kind, (numbers, block) in QUANTS.items() if "quants" in options.suite else ():
        if numbers > 1:
            size = 1536 // numbers * block
            out = (MEGABYTES << 20) // size
            case = Case("selfattn", Path(), kind, out)
            found.append(Row(f"quants {kind}", {"selfattn": Peer(product, case)}, "bytes", float(out * size)))
    return found
