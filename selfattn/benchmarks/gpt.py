"""``selfattn bench gpt``: a training step of a small GPT against PyTorch's modules, and against a GPT written for speed.

A step is the loss of a batch, the gradients of all parameters, and AdamW's update, in float32 with 4 layers and 4 heads, without
dropout: characters, of which there are 65. "torch-modules" is a stack of ``torch.nn.TransformerEncoderLayer`` with a causal mask.
"torch-fused" is what nanoGPT made usual: one product for queries, keys and values, and ``scaled_dot_product_attention`` with
``is_causal``. All begin with the same weights; the losses of their first steps are compared.
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

from .turns import Contestant, Prepare, Prepared, Turns, preamble, versions_of

LAYERS, HEADS, LETTERS, RATE = 4, 4, 65, 1e-3
TOLERANCE = 1e-4  # of the first losses, about 4
STEPS = 3  # whose losses are compared


class Case(NamedTuple):
    """What is timed."""

    width: int
    context: int
    batch: int

    @property
    def label(self) -> str:
        """Name the case in the table."""
        return f"C={self.width}, T={self.context}, B={self.batch}"


SIZES = (Case(64, 64, 16), Case(128, 128, 32))


def ids_of(case: Case) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw a batch: contexts, and the token behind each."""
    return np.random.default_rng(0).integers(0, LETTERS, (case.batch, case.context + 1))


def new_model(case: Case) -> Any:
    """Make the model whose weights all begin with."""
    from selfattn import nn

    return nn.GPT(LETTERS, case.width, LAYERS, HEADS, case.context, rng=0)


def _prepared(step: Any) -> Prepared:
    return Prepared(step, np.array([step() for _ in range(STEPS)]))


def open_selfattn(engine: str, threads: int) -> Prepare:
    """Return how selfattn prepares a case."""
    import selfattn as sa
    from selfattn import optim

    sa.set_num_threads(threads)

    def prepare(case: Case) -> Prepared:
        model, ids = new_model(case), ids_of(case)
        optimizer = optim.AdamW(model.parameters(), lr=RATE)

        def step() -> float:
            loss, pullback = model.loss_vjp(ids)
            optimizer.step(pullback(1.0))
            return float(loss)

        return _prepared(step)

    return prepare


def open_torch(engine: str, threads: int) -> Prepare:
    """Return how PyTorch prepares a case."""
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)

    def prepare(case: Case) -> Prepared:
        model = (_fused if engine == "torch-fused" else _modules)(torch, case)
        state = {name: torch.from_numpy(array) for name, array in new_model(case).state_dict().items()}
        model.load_state_dict(state)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        ids = torch.from_numpy(ids_of(case))
        inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)

        def step() -> float:
            loss = torch.nn.functional.cross_entropy(model(inputs).view(-1, LETTERS), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        return _prepared(step)

    return prepare


def _outside(torch: Any, case: Case) -> Any:
    """Make a module with the parts around the layers, under the names of nn.GPT."""
    nn = torch.nn
    model = nn.Module()
    model.token_embedding = nn.Embedding(LETTERS, case.width)
    model.position_embedding = nn.Embedding(case.context, case.width)
    model.layers = nn.ModuleList()
    model.norm = nn.LayerNorm(case.width)
    model.head = nn.Linear(case.width, LETTERS, bias=False)
    model.head.weight = model.token_embedding.weight
    return model


def _with_forward(torch: Any, parts: Any, layer: Any) -> Any:
    """Give the parts a forward pass, with a layer as ``layer(module, x)``."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
            for own in self.layers:
                x = layer(own, x)
            return self.head(self.norm(x))

    parts.__class__ = Model
    return parts


def _modules(torch: Any, case: Case) -> Any:
    """PyTorch's own layers."""
    parts = _outside(torch, case)
    for _ in range(LAYERS):
        parts.layers.append(
            torch.nn.TransformerEncoderLayer(
                case.width, HEADS, 4 * case.width, 0.0, "gelu", batch_first=True, norm_first=True
            )
        )
    mask = torch.nn.Transformer.generate_square_subsequent_mask(case.context)
    return _with_forward(torch, parts, lambda own, x: own(x, src_mask=mask, is_causal=True))


def _fused(torch: Any, case: Case) -> Any:
    """Layers with one product for queries, keys and values, and fused attention."""
    nn, functional = torch.nn, torch.nn.functional
    parts = _outside(torch, case)
    for _ in range(LAYERS):
        layer, attention = nn.Module(), nn.Module()
        attention.in_proj_weight = nn.Parameter(torch.empty(3 * case.width, case.width))
        attention.in_proj_bias = nn.Parameter(torch.empty(3 * case.width))
        attention.out_proj = nn.Linear(case.width, case.width)
        layer.self_attn = attention
        layer.linear1 = nn.Linear(case.width, 4 * case.width)
        layer.linear2 = nn.Linear(4 * case.width, case.width)
        layer.norm1, layer.norm2 = nn.LayerNorm(case.width), nn.LayerNorm(case.width)
        parts.layers.append(layer)

    def run(own: Any, x: Any) -> Any:
        shape = x.shape
        joint = functional.linear(own.norm1(x), own.self_attn.in_proj_weight, own.self_attn.in_proj_bias)
        query, key, value = joint.view(*shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + own.self_attn.out_proj(y.transpose(1, 2).reshape(shape))
        return x + own.linear2(functional.gelu(own.linear1(own.norm2(x))))

    return _with_forward(torch, parts, run)


PEERS = ("torch-modules", "torch-fused")


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker."""
    return (open_selfattn if engine == "selfattn" else open_torch)(engine, threads)


def _sizes(text: str) -> list[Case]:
    try:
        cases = [Case(*(int(n) for n in size.split("x"))) for size in text.split(",")]
    except (TypeError, ValueError):
        cases = []
    if not cases or any(min(case) < 1 or case.width % HEADS for case in cases):
        raise argparse.ArgumentTypeError(f"CxTxB, widths multiples of {HEADS}, not {text!r}")
    return cases


def main(arguments: Sequence[str] | None = None, prog: str = "selfattn bench gpt") -> int:
    """Run the benchmark and return its exit code."""
    parser = Parser(prog=prog, description=__doc__)
    add = parser.add_argument
    add("--sizes", type=_sizes, default=list(SIZES), metavar="CxTxB,…", help="width, context, batch")
    add(
        "--peers",
        metavar="A,B",
        help=f"any of {', '.join(PEERS)}, or none; default: all if PyTorch is installed",
    )
    add(
        "--threads",
        type=int,
        default=config.usable_cpus(),
        metavar="N",
        help="for everybody; default: all CPUs",
    )
    add("--rounds", type=int, default=7, metavar="N")
    add("--seconds", type=float, default=0.3, metavar="T", help="length of a batch of steps")
    streams.add_json(add)
    options = parser.parse_args(arguments)
    default = PEERS if find_spec("torch") else ()
    peers = list(default) if options.peers is None else [p for p in options.peers.split(",") if p != "none"]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}, or none")
    if peers and not find_spec("torch"):
        parser.error("torch is not installed; pip install 'selfattn[bench]' installs all peers")
    if min(options.threads, options.rounds) < 1 or not options.seconds >= 0:
        parser.error("threads and rounds must be at least 1, seconds at least 0")
    streams.check(options.json)
    with streams.table_beside(options.json):
        return _run(options.sizes, peers, options)


def _run(cases: Sequence[Case], peers: Sequence[str], options: argparse.Namespace) -> int:
    print(preamble(versions_of(["torch"] if peers else []), options.rounds, options.seconds), end="\n\n")
    names = ["selfattn", *peers]
    width = max(len(case.label) for case in cases)
    heads = [f"{name + ': ms a step':>24s}" for name in names] + [f"vs {peer}".rjust(17) for peer in peers]
    print("  ".join([f"{'case':{width}s}", *heads]), flush=True)
    saved: list[dict[str, Any]] = []
    sound = True
    contestants = [Contestant(name, options.threads) for name in names]
    try:
        with Turns(open_engine, contestants) as turns:
            for case in cases:
                measured = turns.measure(case, options.rounds, options.seconds, TOLERANCE)
                own, cells = contestants[0], []
                for contestant in contestants:
                    times = measured.times.get(contestant)
                    cells.append(f"{median(times) * 1e3:24.2f}" if times else f"{'-':>24s}")
                for contestant in contestants[1:]:
                    ratio = measured.ratio(contestant, own)
                    cells.append(f"{ratio:16.2f}x" if ratio else f"{'-':>17s}")
                print("  ".join([f"{case.label:{width}s}", *cells]), flush=True)
                for contestant, error in measured.errors.items():
                    sound = False
                    print(f"! {contestant.engine}: {error}")
                saved.append({**case._asdict(), "results": measured.as_rows()})
    finally:  # keep what was measured
        if options.json:
            streams.write(options.json, json.dumps(saved, indent=1).encode())
    return 0 if sound else 1
