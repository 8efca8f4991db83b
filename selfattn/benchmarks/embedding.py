"""Training steps and inference of the sentence-embedding model, against the same model in PyTorch.

Run ``python -m selfattn.benchmarks.embedding`` (``--help`` for more). Each library has processes of its own, which take
turns round by round; nobody computes while another is timed. PyTorch is asked in two ways: as the tutorial writes it,
and in its best spelling, which is the fastest of fused Adam or not, on one thread or all.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from selfattn import config
from selfattn._timing import wait_until_quiet

VOCABULARY = 1000
TRIPLETS = 32
SENTENCES = 10_000
PADDED_BATCH = 64  # PyTorch's, sorted by length


class Case(NamedTuple):
    """What is timed: ``step``, ``inference`` of one sentence, or ``encode`` of many."""

    kind: str
    width: int
    tokens: int
    layers: int = 1

    @property
    def label(self) -> str:
        """Name the case in the table."""
        what = f"{SENTENCES} sentences" if self.kind == "encode" else f"{self.tokens} tokens"
        return f"{self.kind:9s} d={self.width:<3d} {what}"


SIZES = ((32, 6), (64, 12), (128, 24), (256, 64))
CASES = [
    *(Case("step", *size) for size in SIZES),
    *(Case("inference", *size) for size in SIZES),
    Case("encode", 128, 20, 2),
]


def triplets_of(case: Case) -> list[list[list[int]]]:
    """Draw sentences of so many tokens each, three by three."""
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCABULARY, (TRIPLETS, 3, case.tokens)).tolist()  # type: ignore[no-any-return]


def sentences_of(case: Case) -> list[list[int]]:
    """Draw sentences whose lengths are log-normal around ``case.tokens``, at most 128."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(case.tokens), 0.5, SENTENCES).astype(int), 1, 128)
    return [rng.integers(0, VOCABULARY, length).tolist() for length in lengths]


Calls = dict[str, Callable[[], Any]]


# ------------------------------------------------------------------------------------------------- selfattn


def selfattn_calls(case: Case, threads: int) -> Calls:
    """Return what is timed, by its spelling."""
    import selfattn as sa
    from selfattn import nn, optim

    sa.set_num_threads(threads)
    model = nn.EmbeddingModel(
        str.split, VOCABULARY, case.width, max_seq_len=128, num_layers=case.layers, rng=0
    )
    if case.kind == "encode":
        sentences = sentences_of(case)
        return {"encode": lambda: model.encode(sentences)}
    triplets = triplets_of(case)
    if case.kind == "inference":
        return {"model(ids)": lambda: model(triplets[0][0])}
    task = nn.ProxyTask(model)
    optimizer = optim.Adam(model.parameters(), lr=1e-4)
    place = [0]

    def step() -> None:
        place[0] = (place[0] + 1) % TRIPLETS
        _, pullback = task.vjp(*triplets[place[0]])
        optimizer.step(pullback(-1.0))

    return {"Adam": step}


# -------------------------------------------------------------------------------------------------- PyTorch


def torch_model(case: Case) -> Any:
    """Write the model of the tutorial in PyTorch; ``model.padded`` does the same for a padded batch."""
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


def torch_calls(case: Case, threads: int) -> Calls:
    """Return what is timed, by its spelling; "as written" is the tutorial's."""
    torch: Any = import_module("torch")
    logsigmoid = torch.nn.functional.logsigmoid
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = torch_model(case)
    if case.kind == "encode":
        sentences = sorted(sentences_of(case), key=len)

        @torch.inference_mode()  # type: ignore[untyped-decorator]
        def encode() -> None:
            for start in range(0, SENTENCES, PADDED_BATCH):
                model.padded(sentences[start : start + PADDED_BATCH])

        return {"as written": encode}
    triplets = triplets_of(case)
    if case.kind == "inference":
        return {"as written": torch.inference_mode()(lambda: model(triplets[0][0]))}

    def stepper(fused: bool) -> Callable[[], None]:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=fused)
        place = [0]

        def step() -> None:
            place[0] = (place[0] + 1) % TRIPLETS
            main, similar, other = (model(ids) for ids in triplets[place[0]])
            loss = -(logsigmoid(main @ similar) + logsigmoid(-(main @ other)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return step

    return {"as written": stepper(False), "fused": stepper(True)}


# ------------------------------------------------------------------------------------------------ measuring

ENGINES: dict[str, Callable[[Case, int], Calls]] = {"selfattn": selfattn_calls, "torch": torch_calls}


def work(pipe: Connection, engine: str, threads: int) -> None:
    """Answer ``(case, seconds)`` with the seconds that a call takes in each spelling, until None comes."""
    made: dict[Case, Calls] = {}
    while (request := pipe.recv()) is not None:
        case, seconds = request
        if case not in made:
            made = {case: ENGINES[engine](case, threads)}
            for call in made[case].values():
                call()
        times = {spelling: time_of(call, seconds) for spelling, call in made[case].items()}
        wait_until_quiet()  # spinning threads would slow the next one
        pipe.send(times)


def time_of(call: Callable[[], Any], seconds: float) -> float:
    """Return the mean time of calls made for so many seconds, at least one."""
    call()  # warm up
    start, calls = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - start) < seconds or calls == 0:
        call()
        calls += 1
    return elapsed / calls


def measure(cases: Sequence[Case], threads: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Time all cases, round by round in turn, and print a line for each; the least time of all rounds counts."""
    context = multiprocessing.get_context("spawn")
    contestants = [("selfattn", threads), ("torch", threads)] + ([("torch", 1)] if threads > 1 else [])
    pipes, processes, results = [], [], []
    for engine, count in contestants:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=work, args=(theirs, engine, count), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    try:
        print(f"{'':33s} {'selfattn':>10s} {'as written':>18s} {'best spelling':>18s}")
        for case in cases:
            least: list[dict[str, float]] = [{} for _ in contestants]
            for _ in range(rounds):
                for pipe, times in zip(pipes, least, strict=True):
                    pipe.send((case, seconds))
                    for spelling, t in pipe.recv().items():
                        times[spelling] = min(t, times.get(spelling, math.inf))
            own = min(least[0].values())
            written = least[1]["as written"]
            best = min(t for times in least[1:] for t in times.values())
            print(
                f"{case.label:33s} {own * 1e6:8.1f}µs {written * 1e6:10.1f} ({written / own:4.1f}×) "
                f"{best * 1e6:10.1f} ({best / own:4.1f}×)",
                flush=True,
            )
            results.append({**case._asdict(), "selfattn": own, "as written": written, "best": best})
    finally:
        for process in processes:
            process.kill()
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m selfattn.benchmarks.embedding", description=__doc__)
    parser.add_argument("--kinds", default="step,inference,encode", metavar="A,B", help="which cases")
    parser.add_argument("--threads", type=int, default=config.usable_cpus(), metavar="N")
    parser.add_argument("--rounds", type=int, default=7, metavar="N")
    parser.add_argument("--seconds", type=float, default=0.1, metavar="T", help="length of a batch")
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the times, in seconds")
    options = parser.parse_args(arguments)
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - {case.kind for case in CASES}:
        parser.error(f"no cases of kind {', '.join(sorted(unknown))}")
    if min(options.threads, options.rounds) < 1 or not options.seconds >= 0:
        parser.error("threads and rounds must be at least 1, seconds at least 0")
    cases = [case for case in CASES if case.kind in kinds]
    results = measure(cases, options.threads, options.rounds, options.seconds)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
