"""TransformerEncoder and Linear, against PyTorch's and NumPy's product.

Encoders have 2 layers, a feed-forward network four times as wide, heads of 32 columns, and ``batch_first``, without which
PyTorch does not use its fast path. "train" has dropout 10 %, the default of both; "eval" has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np

from selfattn.benchmarks.app import listed, new_parser, one_of
from selfattn.benchmarks.turns import Array, Prepare, Row, Spelling

from . import shared

LAYERS, HEAD_WIDTH = 2, 32
TOLERANCE = 2e-4  # the largest difference of float32 results of size 1, sums of up to 3072 terms
KINDS = ("train", "eval", "forward", "linear")
SIZES = ((64, 64, 16), (128, 128, 32), (384, 64, 32), (768, 128, 8))
LINEAR = ((384, 1536), (768, 768), (64, 64))
ROWS = (1, 16, 256, 4096)


@dataclass(frozen=True)
class Case(shared.Case):
    """A pass of an encoder in a mode, or of a linear layer with ``tokens`` rows."""

    kind: str  # "train" or "eval": forward and gradients; "forward": in eval mode; "linear": forward
    width: int
    tokens: int
    batch: int = 1
    out: int = 0  # the outputs of a linear layer

    @property
    def label(self) -> str:
        """The name of the case in the table."""
        if self.kind == "linear":
            return f"linear {self.width}x{self.out}, {self.tokens} rows"
        return f"{self.kind} d={self.width}, {self.batch} x {self.tokens}"

    @property
    def flops(self) -> float:
        """The operations of the products; each forward product has two for its gradients."""
        rows = self.batch * self.tokens
        if self.kind == "linear":
            return 2.0 * rows * self.width * self.out
        forward = LAYERS * (24.0 * rows * self.width**2 + 4.0 * rows * self.tokens * self.width)
        return forward * (1 if self.kind == "forward" else 3)

    def inputs(self) -> tuple[Array, Array]:
        """Draw the input and the gradient of the output, or the weight of a linear layer."""
        rng = np.random.default_rng(0)
        if self.kind == "linear":
            x = rng.standard_normal((self.tokens, self.width), np.float32)
            return x, rng.standard_normal((self.out, self.width), np.float32) / np.float32(self.width**0.5)
        shape = (self.batch, self.tokens, self.width)
        return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)


def cases_of(kinds: Sequence[str], sizes: Sequence[tuple[int, ...]], quick: bool) -> list[Case]:
    """Return the cases of some kinds; the sizes are those of the encoders."""
    sizes, linear, rows = (sizes[:1], LINEAR[-1:], ROWS[:2]) if quick else (sizes, LINEAR, ROWS)
    found = [Case(kind, *size) for kind in kinds if kind != "linear" for size in sizes]
    if "linear" in kinds:
        found += [Case("linear", width, n, out=out) for width, out in linear for n in rows]
    return found


def weights_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray[Any, Any]]:
    """Draw an encoder's weights, the same for every library: norms near one, products that keep the variance."""
    rng = np.random.default_rng(1)
    weights = {}
    for name in sorted(shapes):
        drawn = rng.standard_normal(shapes[name], np.float32)
        if drawn.ndim == 1:
            weights[name] = drawn * np.float32(0.1) + np.float32("norm" in name and "weight" in name)
        else:
            weights[name] = drawn / np.float32(drawn.shape[1] ** 0.5)
    return weights


def _sample(array: Any, gradient: Any = None) -> Array:
    arrays = [np.asarray(each).reshape(-1) for each in (array, gradient) if each is not None]
    return np.concatenate([each[:: max(1, each.size // 500)][:500] for each in arrays])


def output_and_gradient(result: Array, own: Array) -> float:
    """Compare outputs by the greatest difference, and gradients by the median one.

    Where an input of ReLU is 0 up to rounding, its gradient may be 0 in only one library; then all gradients of that sequence differ,
    by 1e-3 to 5e-2, also from float64's.
    """
    (y, own_y), (dy, own_dy) = zip(np.split(result, 2), np.split(own, 2), strict=True)
    return float(max(np.max(np.abs(y - own_y)), np.median(np.abs(dy - own_dy))))


def _both(both: Callable[[], tuple[Any, Any]], model: Any, kind: str) -> list[Spelling]:
    """Return a pass with its gradient; it is compared without dropout, before the mode is set."""
    result = _sample(*both())
    model.train(kind == "train")
    return [shared.called(both, lambda _: result)]


def _selfattn(case: Case, threads: int) -> list[Spelling]:
    import selfattn as sa
    from selfattn import nn

    sa.set_num_threads(threads)
    x, dy = case.inputs()
    if case.kind == "linear":
        linear = nn.Linear(case.width, case.out)
        linear.load_state_dict({"weight": dy, "bias": np.zeros(case.out, np.float32)})
        return [shared.called(lambda: linear(x), _sample)]
    heads = case.width // HEAD_WIDTH
    layer = nn.TransformerEncoderLayer(case.width, heads, 4 * case.width, batch_first=True, rng=0)
    model = nn.TransformerEncoder(layer, LAYERS).eval()
    model.load_state_dict(weights_of({name: a.shape for name, a in model.parameters().items()}))
    if case.kind == "forward":
        return [shared.called(lambda: model(x), _sample)]

    def both() -> tuple[Any, Any]:
        y, pullback = model.vjp(x)
        return y, pullback(dy)[0]

    return _both(both, model, case.kind)


def _torch(case: Case, threads: int) -> list[Spelling]:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)
    x, dy = (torch.from_numpy(array) for array in case.inputs())
    if case.kind == "linear":
        linear, bias = torch.nn.functional.linear, torch.zeros(case.out)
        return [shared.called(torch.inference_mode()(lambda: linear(x, dy, bias)), _sample)]
    heads = case.width // HEAD_WIDTH
    layer = torch.nn.TransformerEncoderLayer(case.width, heads, 4 * case.width, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, LAYERS).eval()
    weights = weights_of({name: tuple(a.shape) for name, a in model.named_parameters()})
    model.load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()})
    if case.kind == "forward":
        return [shared.called(torch.inference_mode()(lambda: model(x)), _sample)]
    wrt = [x.requires_grad_(), *model.parameters()]  # selfattn returns the input's gradient too

    def both() -> tuple[Any, Any]:
        y = model(x)
        return y.detach(), torch.autograd.grad(y, wrt, dy)[0]

    return _both(both, model, case.kind)


def _numpy(case: Case, threads: int) -> list[Spelling]:
    x, weight = case.inputs()
    bias = np.zeros(case.out, np.float32)
    return [shared.called(lambda: x @ weight.T + bias, _sample)]


ENGINES = {"selfattn": _selfattn, "torch": _torch, "numpy": _numpy}
PEERS = {"torch": ["torch"], "numpy": ["numpy"]}


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker."""
    return lambda case: ENGINES[engine](case, threads)


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", PEERS)
    add = parser.add_argument
    kinds = listed(one_of("kind", KINDS))
    add("--kinds", type=kinds, default=list(KINDS), metavar="A,B", help=", ".join(KINDS))
    sizes = listed(shared.sizes_of("WIDTHxTOKENSxBATCH", HEAD_WIDTH))
    add("--sizes", type=sizes, default=SIZES, metavar="DxTxB,…", help="of the encoders: width, tokens, batch")
    options = parser.parse_args(arguments)
    rows = []
    for case in cases_of(options.kinds, options.sizes, options.quick):
        found = shared.contestants(case, options, one_thread=True)
        able = tuple(each for each in found if each.name != "numpy" or case.out)
        row = Row("layers", case.label, able, tolerance=TOLERANCE)
        rows.append(replace(row, distance=output_and_gradient) if case.kind in ("train", "eval") else row)
    return shared.run(prog, options, rows, open_engine, {name: name for name in options.peers}, "float32")
