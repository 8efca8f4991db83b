"""``selfattn bench layers``: TransformerEncoder and Linear against PyTorch's, and NumPy's product.

Encoders have 2 layers, a feed-forward network four times as wide and heads of 32 columns, and ``batch_first``, without
which PyTorch leaves out its fast way. "train" drops 10 %, which is the default of both; "eval" drops nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from selfattn import config
from selfattn.cli import streams
from selfattn.cli.parser import Parser

from .turns import Contestant, Distance, Measured, Prepare, Prepared, Turns, greatest, preamble, versions_of

LAYERS, HEAD_WIDTH = 2, 32
TOLERANCE = 2e-4  # of float32 results of size 1, behind sums of up to 3072


class Case(NamedTuple):
    """What is timed: an encoder's pass in a mode, or a linear layer, whose rows are ``tokens``."""

    kind: str  # "train" or "eval": forward and gradients; "forward": in eval mode; "linear": forward
    width: int
    tokens: int
    batch: int = 1
    out: int = 0  # of a linear layer

    @property
    def label(self) -> str:
        """Name the case in the table."""
        if self.kind == "linear":
            return f"linear {self.width}x{self.out}, {self.tokens} rows"
        return f"{self.kind} d={self.width}, {self.batch} x {self.tokens}"

    @property
    def flops(self) -> float:
        """Count the products, a multiply and an add each; gradients are two for each product forward."""
        rows = self.batch * self.tokens
        if self.kind == "linear":
            return 2.0 * rows * self.width * self.out
        forward = LAYERS * (24.0 * rows * self.width**2 + 4.0 * rows * self.tokens * self.width)
        return forward * (1 if self.kind == "forward" else 3)


SIZES = ((64, 64, 16), (128, 128, 32), (384, 64, 32), (768, 128, 8))
LINEAR = ((384, 1536), (768, 768), (64, 64))
ROWS = (1, 16, 256, 4096)


def cases_of(kinds: Sequence[str], sizes: Sequence[tuple[int, ...]]) -> list[Case]:
    """List the cases of some kinds; the sizes are those of the encoders."""
    found = [Case(kind, *size) for kind in kinds if kind != "linear" for size in sizes]
    if "linear" in kinds:
        found += [Case("linear", width, rows, out=out) for width, out in LINEAR for rows in ROWS]
    return found


def inputs_of(case: Case) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Draw the input and the gradient of the output."""
    rng = np.random.default_rng(0)
    if case.kind == "linear":
        x = rng.standard_normal((case.tokens, case.width), np.float32)
        return x, rng.standard_normal((case.out, case.width), np.float32) / np.float32(case.width**0.5)
    shape = (case.batch, case.tokens, case.width)
    return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """Draw an encoder's weights, the same for every library: norms near one, products that keep the size."""
    rng = np.random.default_rng(1)
    weights = {}
    for name in sorted(shapes):
        drawn = rng.standard_normal(shapes[name], np.float32)
        if drawn.ndim == 1:
            weights[name] = drawn * np.float32(0.1) + np.float32("norm" in name and "weight" in name)
        else:
            weights[name] = drawn / np.float32(drawn.shape[1] ** 0.5)
    return weights


def _sample(array: Any, gradient: Any = None) -> np.ndarray[Any, Any]:
    arrays = [array] if gradient is None else [array, gradient]
    parts = [np.asarray(a, np.float64).reshape(-1) for a in arrays]
    return np.concatenate([part[:: max(1, part.size // 500)][:500] for part in parts])


def _with_gradient(result: Any, expected: Any) -> float:
    """Compare outputs by the greatest difference, and gradients by the median one.

    Where an input of ReLU lies within rounding of 0, its gradient is there in one library and not in the other, and with
    it all gradients of that sequence differ: by 1e-3 to 5e-2, from float64's too.
    """
    (y, dy), (expected_y, expected_dy) = np.split(result, 2), np.split(expected, 2)
    return max(greatest(y, expected_y), float(np.median(np.abs(dy - expected_dy))))


def distance_of(case: Case) -> Distance:
    """Return how results of a case are compared."""
    return _with_gradient if case.kind in ("train", "eval") else greatest


def open_selfattn(engine: str, threads: int) -> Prepare:
    """Return how selfattn prepares a case."""
    import selfattn as sa
    from selfattn import nn

    sa.set_num_threads(threads)

    def prepare(case: Case) -> Prepared:
        x, dy = inputs_of(case)
        if case.kind == "linear":
            linear = nn.Linear(case.width, case.out)
            linear.load_state_dict({"weight": dy, "bias": np.zeros(case.out, np.float32)})
            return Prepared(lambda: linear(x), _sample(linear(x)))
        layer = nn.TransformerEncoderLayer(
            case.width, case.width // HEAD_WIDTH, 4 * case.width, batch_first=True, rng=0
        )
        model = nn.TransformerEncoder(layer, LAYERS).eval()
        model.load_state_dict(weights_of({name: a.shape for name, a in model.parameters().items()}))
        if case.kind == "forward":
            return Prepared(lambda: model(x), _sample(model(x)))

        def both() -> tuple[Any, Any]:
            y, pullback = model.vjp(x)
            return y, pullback(dy)[0]

        result = _sample(*both())
        model.train(case.kind == "train")
        return Prepared(both, result)

    return prepare


def open_torch(engine: str, threads: int) -> Prepare:
    """Return how PyTorch prepares a case."""
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)

    def prepare(case: Case) -> Prepared:
        x, dy = (torch.from_numpy(array) for array in inputs_of(case))
        if case.kind == "linear":
            linear = torch.nn.functional.linear
            bias = torch.zeros(case.out)
            call = torch.inference_mode()(lambda: linear(x, dy, bias))
            return Prepared(call, _sample(call()))
        layer = torch.nn.TransformerEncoderLayer(
            case.width, case.width // HEAD_WIDTH, 4 * case.width, batch_first=True
        )
        model = torch.nn.TransformerEncoder(layer, LAYERS).eval()
        weights = weights_of({name: tuple(a.shape) for name, a in model.named_parameters()})
        model.load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()})
        if case.kind == "forward":
            call = torch.inference_mode()(lambda: model(x))
            return Prepared(call, _sample(call()))
        x.requires_grad_()  # selfattn returns this gradient too
        wrt = [x, *model.parameters()]

        def both() -> tuple[Any, Any]:
            y = model(x)
            return y, torch.autograd.grad(y, wrt, dy)[0]

        result = _sample(*(t.detach() for t in both()))
        model.train(case.kind == "train")
        return Prepared(both, result)

    return prepare


def open_numpy(engine: str, threads: int) -> Prepare:
    """Return how NumPy prepares a case: linear layers alone."""

    def prepare(case: Case) -> Prepared:
        if case.kind != "linear":
            raise ValueError("NumPy has no encoder")
        x, weight = inputs_of(case)
        bias = np.zeros(case.out, np.float32)
        return Prepared(lambda: x @ weight.T + bias, _sample(x @ weight.T + bias))

    return prepare


ENGINES = {"selfattn": open_selfattn, "torch": open_torch, "numpy": open_numpy}
PEERS = ("torch", "numpy")


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker."""
    return ENGINES[engine](engine, threads)


def line_of(
    case: Case, measured: Measured, threads: Sequence[int], peers: Sequence[str], label_width: int
) -> str:
    """Return the lines of a case, one for each number of threads."""
    lines = []
    for count in threads:
        own = Contestant("selfattn", count)
        cells = [f"{case.label:{label_width}s} {count:7d}"]
        for engine in ("selfattn", *peers):
            contestant = Contestant(engine, count)
            if not measured.times.get(contestant):
                cells.append(f"{'-':>28s}")
                continue
            seconds = median(measured.times[contestant])
            rate = case.flops / seconds
            share = rate / measured.peaks[count] if measured.peaks.get(count) else 0.0
            cells.append(f"{seconds * 1e3:9.3f} ms {rate / 1e9:5.0f} ({share:4.0%})    ")
        ratios = [measured.ratio(Contestant(peer, count), own) for peer in peers]
        cells += [f"{ratio:8.2f}x" if ratio else f"{'-':>9s}" for ratio in ratios]
        if count == max(threads) and len(threads) > 1:
            gain = measured.ratio(Contestant("selfattn", min(threads)), own)
            cells.append(f"{gain:8.2f}x" if gain else f"{'-':>9s}")
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _sizes(text: str) -> list[tuple[int, ...]]:
    sizes = [tuple(int(n) for n in size.split("x")) for size in text.split(",")]
    if any(len(size) != 3 or min(size) < 1 or size[0] % HEAD_WIDTH for size in sizes):
        raise argparse.ArgumentTypeError(
            f"WIDTHxTOKENSxBATCH, widths multiples of {HEAD_WIDTH}, not {text!r}"
        )
    return sizes


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench layers") -> int:
    """Run the benchmark and return its exit code."""
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--kinds", default="train,eval,forward,linear", metavar="A,B", help="any of these (the default: all)")
    add(
        "--sizes",
        type=_sizes,
        default=list(SIZES),
        metavar="DxTxB,…",
        help="of the encoders: width, tokens, batch",
    )
    add("--peers", metavar="A,B", help="any of torch, numpy, or none; default: all installed")
    add("--threads", default="", metavar="N,N", help="default: the CPUs of this process, and 1")
    add("--rounds", type=int, default=7, metavar="N")
    add("--seconds", type=float, default=0.1, metavar="T", help="length of a batch")
    streams.add_json(add)
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - {"train", "eval", "forward", "linear"}:
        parser.error(f"no cases of kind {', '.join(sorted(unknown))}")
    peers = list(PEERS) if options.peers is None else [p for p in options.peers.split(",") if p != "none"]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}, or none")
    peers = [peer for peer in peers if find_spec(peer)]
    if "linear" not in kinds:
        peers = [peer for peer in peers if peer != "numpy"]
    if options.rounds < 1 or not options.seconds >= 0:
        parser.error("rounds must be at least 1, seconds at least 0")
    try:
        threads = sorted({int(n) for n in options.threads.split(",") if n} or {config.usable_cpus(), 1})[::-1]
    except ValueError:
        parser.error(f"threads are integers with commas between them, not {options.threads!r}")
    if min(threads) < 1:
        parser.error("threads must be at least 1")
    streams.check(options.json)
    with streams.table_beside(options.json):
        return _run(cases_of(kinds, options.sizes), peers, threads, options)


def _run(
    cases: Sequence[Case], peers: Sequence[str], threads: Sequence[int], options: argparse.Namespace
) -> int:
    versions = versions_of(peers)
    print(preamble(versions, options.rounds, options.seconds), end="\n\n")
    label_width = max(len(case.label) for case in cases)
    heads = [
        f"{'case':{label_width}s} threads",
        *(f"{name + ': time, GFLOP/s (of peak)':>28s}" for name in versions),
    ]
    heads += [f"vs {peer}".rjust(9) for peer in peers]
    heads += [f"{max(threads)} vs {min(threads)} thr"] if len(threads) > 1 else []
    print("  ".join(heads), flush=True)
    saved: list[dict[str, Any]] = []
    sound = True
    contestants = [Contestant(name, count) for count in threads for name in versions]
    try:
        with Turns(open_engine, contestants) as turns:
            for case in cases:
                measured = turns.measure(case, options.rounds, options.seconds, TOLERANCE, distance_of(case))
                print(line_of(case, measured, threads, peers, label_width), flush=True)
                for contestant, error in measured.errors.items():
                    if not (contestant.engine == "numpy" and case.kind != "linear"):
                        sound = False
                        print(f"! {contestant.engine}, {contestant.threads} threads: {error}")
                saved.append({**case._asdict(), "peaks": measured.peaks, "results": measured.as_rows()})
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(saved, indent=1).encode())
    return 0 if sound else 1
