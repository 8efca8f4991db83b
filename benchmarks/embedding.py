"""Training steps and inference of the sentence-embedding model, against the same model in PyTorch.

PyTorch runs in two spellings: "as written" is the tutorial's; "torch" is its best, the faster of fused and other Adam, and "torch,
1 thread" is the same on one thread. Sentences differ from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from selfattn.benchmarks.app import listed, new_parser, one_of
from selfattn.benchmarks.turns import Contestant, Prepare, Row, Spelling

from . import shared

VOCABULARY = 1000
TRIPLETS = 32
SENTENCES = 10_000
PADDED_BATCH = 64  # PyTorch's batches, sorted by length
KINDS = ("step", "inference", "encode")
SIZES = ((32, 6), (64, 12), (128, 24), (256, 64))
PEERS = {"torch": ["torch"]}


@dataclass(frozen=True)
class Case(shared.Case):
    """A training ``step``, ``inference`` of one sentence, or ``encode`` of many."""

    kind: str
    width: int
    tokens: int
    layers: int = 1

    @property
    def label(self) -> str:
        """The name of the case in the table."""
        what = f"{SENTENCES} sentences" if self.kind == "encode" else f"{self.tokens} tokens"
        return f"{self.kind:9s} d={self.width:<3d} {what}"

    def triplets(self) -> list[list[list[int]]]:
        """Draw triplets of sentences of ``tokens`` tokens each."""
        rng = np.random.default_rng(0)
        return rng.integers(0, VOCABULARY, (TRIPLETS, 3, self.tokens)).tolist()  # type: ignore[no-any-return]

    def sentences(self) -> list[list[int]]:
        """Draw sentences whose lengths are log-normal around ``tokens``, at most 128."""
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(math.log(self.tokens), 0.5, SENTENCES).astype(int), 1, 128)
        return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


CASES = [Case(kind, *size) for kind in KINDS[:2] for size in SIZES] + [Case("encode", 128, 20, 2)]


def _timed(call: Callable[[], Any]) -> Spelling:
    return shared.called(call, lambda _: np.zeros(1))  # each library draws its own weights


def _selfattn(case: Case) -> list[Spelling]:
    from selfattn import nn, optim

    model = nn.EmbeddingModel(
        str.split, VOCABULARY, case.width, max_seq_len=128, num_layers=case.layers, rng=0
    )
    if case.kind == "encode":
        sentences = case.sentences()
        return [_timed(lambda: model.encode(sentences))]
    triplets = case.triplets()
    if case.kind == "inference":
        return [_timed(lambda: model(triplets[0][0]))]
    task = nn.ProxyTask(model)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    place = [0]

    def step() -> None:
        place[0] = (place[0] + 1) % TRIPLETS
        _, pullback = task.vjp(*triplets[place[0]])
        optimizer.step(pullback(-1.0))

    return [_timed(step)]


def torch_model(case: Case) -> Any:
    """Return the tutorial's model in PyTorch; ``model.padded`` computes it for a padded batch."""
    torch: Any = import_module("torch")
    nn, functional = torch.nn, torch.nn.functional

    class Block(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, width: int) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.ln = nn.LayerNorm(width)

        def forward(self, x: Any) -> Any:
            q, k, v = self.query(x), self.key(x), self.value(x)
            weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(x.shape[-1]), dim=-1)
            return self.ln(weights @ v + x)

        def padded(self, x: Any, mask: Any) -> Any:
            q, k, v = self.query(x), self.key(x), self.value(x)
            return self.ln(functional.scaled_dot_product_attention(q, k, v, attn_mask=mask) + x)

    class Model(nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.embedding_layer = nn.Embedding(VOCABULARY, case.width)
            self.attention_layers = nn.ModuleList(Block(case.width) for _ in range(case.layers))
            place = torch.arange(128)[:, None]
            rate = torch.exp(torch.arange(0, case.width, 2) * (-math.log(10000.0) / case.width))
            table = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=-1).flatten(1)
            self.register_buffer("positions", table, persistent=False)

        def forward(self, ids: list[int]) -> Any:
            x = self.embedding_layer(torch.tensor(ids))
            x = x + self.positions[: len(ids)]
            for block in self.attention_layers:
                x = block(x)
            return x.mean(0)

        def padded(self, sentences: Sequence[list[int]]) -> Any:
            lengths = torch.tensor([len(ids) for ids in sentences])
            ids = nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids in sentences], batch_first=True)
            exists = torch.arange(ids.shape[1]) < lengths[:, None]
            x = self.embedding_layer(ids) + self.positions[: ids.shape[1]]
            for block in self.attention_layers:
                x = block.padded(x, exists[:, None, :])
            return (x * exists[..., None]).sum(1) / lengths[:, None]

    return Model()


def _torch(torch: Any, case: Case, as_written: bool) -> list[Spelling]:
    logsigmoid = torch.nn.functional.logsigmoid
    torch.manual_seed(0)
    model = torch_model(case)
    if case.kind == "encode":
        sentences = sorted(case.sentences(), key=len)

        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def encode() -> None:
            for start in range(0, SENTENCES, PADDED_BATCH):
                model.padded(sentences[start : start + PADDED_BATCH])

        return [_timed(encode)]
    triplets = case.triplets()
    if case.kind == "inference":
        return [_timed(torch.inference_mode()(lambda: model(triplets[0][0])))]

    def spelling(fused: bool) -> Spelling:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
        place = [0]

        def step() -> None:
            place[0] = (place[0] + 1) % TRIPLETS
            main, similar, other = (model(ids) for ids in triplets[place[0]])
            loss = -(logsigmoid(main @ similar) + logsigmoid(-(main @ other)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return _timed(step)._replace(statement=f"call()  # fused={fused}")

    return [spelling(False)] if as_written else [spelling(False), spelling(True)]


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker."""
    module: Any = import_module(engine.partition(" ")[0])
    module.set_num_threads(threads)
    return _selfattn if engine == "selfattn" else lambda case: _torch(module, case, "written" in engine)


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", PEERS)
    kinds = listed(one_of("kind", KINDS))
    parser.add_argument("--kinds", type=kinds, default=list(KINDS), metavar="A,B", help=", ".join(KINDS))
    options = parser.parse_args(arguments)
    rows = []
    for case in [case for case in CASES if case.kind in options.kinds][:: 4 if options.quick else 1]:
        found = [Contestant("selfattn", "selfattn", case)]
        if options.peers:
            found += [Contestant("as written", "torch as written", case), Contestant("torch", "torch", case)]
            found += [Contestant("torch, 1 thread", "torch", case, threads=1)] * (options.threads > 1)
        rows.append(Row("embedding", case.label, tuple(found), limit=""))
    return shared.run(prog, options, rows, open_engine, {name: name for name in options.peers}, "float32")
