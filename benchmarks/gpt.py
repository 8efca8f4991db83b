"""A training step of a small GPT, against PyTorch's modules, and against a GPT written for speed.

A step is the loss of a batch, the gradients of all parameters, and AdamW's update, in float32 with 4 layers and 4 heads, without
dropout, on 65 characters. "torch-modules" is a stack of ``torch.nn.TransformerEncoderLayer`` with a causal mask. "torch-fused" is
written like nanoGPT: one product for queries, keys and values, and ``scaled_dot_product_attention`` with ``is_causal``. All begin
with the same weights; the losses of their first steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from selfattn.benchmarks.app import listed, new_parser
from selfattn.benchmarks.turns import Array, Prepare, Row, Spelling

from . import shared

LAYERS, HEADS, LETTERS, RATE = 4, 4, 65, 1e-3
TOLERANCE = 1e-4  # the largest difference of the first losses, which are about 4
STEPS = 3  # steps whose losses are compared
SIZES = ((64, 64, 16), (128, 128, 32))
PEERS = {"torch-modules": ["torch"], "torch-fused": ["torch"]}


@dataclass(frozen=True)
class Case(shared.Case):
    """A size of the model and of its batch."""

    width: int
    context: int
    batch: int

    @property
    def label(self) -> str:
        """The name of the case in the table."""
        return f"C={self.width}, T={self.context}, B={self.batch}"

    def ids(self) -> Array:
        """Draw a batch: contexts, and the token after each."""
        return np.random.default_rng(0).integers(0, LETTERS, (self.batch, self.context + 1))

    def new_model(self) -> Any:
        """Make the model whose initial weights all libraries get."""
        from selfattn import nn

        return nn.GPT(LETTERS, self.width, LAYERS, HEADS, self.context, rng=0)


def _stepping(step: Callable[[], float]) -> list[Spelling]:
    losses = np.array([step() for _ in range(STEPS)])
    return [shared.called(step, lambda _: losses)]


def _selfattn(case: Case) -> list[Spelling]:
    from selfattn import optim

    model, ids = case.new_model(), case.ids()
    optimizer = optim.AdamW(model.parameters(), lr=RATE)

    def step() -> float:
        loss, pullback = model.loss_vjp(ids)
        optimizer.step(pullback(1.0))
        return float(loss)

    return _stepping(step)


def _torch(torch: Any, case: Case, fused: bool) -> list[Spelling]:
    model = (_fused if fused else _modules)(torch, case)
    model.load_state_dict({name: torch.from_numpy(a) for name, a in case.new_model().state_dict().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    ids = torch.from_numpy(case.ids())
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].reshape(-1)

    def step() -> float:
        loss = torch.nn.functional.cross_entropy(model(inputs).view(-1, LETTERS), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return _stepping(step)


def _outside(torch: Any, case: Case) -> Any:
    """Make a module with everything except the layers, under the names of nn.GPT."""
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
    """Add a forward pass to the module, in which a layer is ``layer(module, x)``."""

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, ids: Any) -> Any:
            x = self.token_embedding(ids) + self.position_embedding(torch.arange(ids.shape[1]))
            for own in self.layers:
                x = layer(own, x)
            return self.head(self.norm(x))

    parts.__class__ = Model
    return parts


def _modules(torch: Any, case: Case) -> Any:
    """Make a model of PyTorch's own layers."""
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
    """Make a model with one product for queries, keys and values, and fused attention."""
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


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker."""
    module: Any = import_module(engine.partition("-")[0])
    module.set_num_threads(threads)
    return _selfattn if engine == "selfattn" else lambda case: _torch(module, case, engine == "torch-fused")


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", PEERS)
    sizes = listed(shared.sizes_of("WIDTHxCONTEXTxBATCH", HEADS))
    parser.add_argument("--sizes", type=sizes, default=SIZES, metavar="CxTxB,…", help="width, context, batch")
    options = parser.parse_args(arguments)
    cases = [Case(*size) for size in (options.sizes[:1] if options.quick else options.sizes)]
    how: dict[str, Any] = {"limit": "", "tolerance": TOLERANCE, "count": (1, "steps")}
    rows = [Row("gpt", case.label, shared.contestants(case, options), **how) for case in cases]
    packages = {"torch": "torch"} if options.peers else {}
    about = "float32; C channels, T tokens, batches of B"
    return shared.run(prog, options, rows, open_engine, packages, about)
