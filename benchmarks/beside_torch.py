#!/usr/bin/env python3
"""Prints the ms of a training step of two encoder layers, alone and in turns with PyTorch's step in one process."""

import argparse
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import selfattn as sa
from selfattn import nn, optim

TOKENS, WIDTH, HEADS, WIDER = (8, 64), 128, 4, 512


def ours(x: np.ndarray) -> Callable[[], None]:
    """Return a step of selfattn."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDER, dropout=0.0, batch_first=True, rng=0)
    encoder = nn.TransformerEncoder(layer, 2)
    optimizer = optim.AdamW(encoder.parameters())

    def step() -> None:
        out, pullback = encoder.vjp(x)
        optimizer.step(pullback(out)[1])

    return step


def theirs(x: np.ndarray, threads: int) -> Callable[[], None]:
    """Return the same step of PyTorch."""
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(threads)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, WIDER, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    optimizer, rows = torch.optim.AdamW(encoder.parameters()), torch.from_numpy(x)

    def step() -> None:
        optimizer.zero_grad()
        (encoder(rows) ** 2).sum().backward()
        optimizer.step()

    return step


def milliseconds(steps: list[Callable[[], None]], rounds: int) -> list[float]:
    """Run the steps in turns; return the least median of each."""
    times = np.empty((rounds, 30, len(steps)))
    for index in np.ndindex(times.shape):
        start = time.perf_counter()
        steps[index[-1]]()
        times[index] = 1e3 * (time.perf_counter() - start)
    return [*map(float, np.median(times, axis=1).min(axis=0))]


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=sa.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    sa.set_num_threads(options.threads)
    facts = sa.show_config("dicts")
    print(f"{facts['cpu']}; ISA {facts['isa']}; {options.threads} threads; {facts['build']['team']}")
    x = np.random.default_rng(0).standard_normal((*TOKENS, WIDTH), dtype=np.float32)
    step = ours(x)
    (alone,) = milliseconds([step], options.rounds)
    other = theirs(x, options.threads)
    in_turns, torch_in_turns = milliseconds([step, other], options.rounds)
    (torch_alone,) = milliseconds([other], options.rounds)
    print(f"selfattn alone {alone:.2f} ms, in turns {in_turns:.2f} ms")
    print(f"PyTorch  alone {torch_alone:.2f} ms, in turns {torch_in_turns:.2f} ms")


if __name__ == "__main__":
    main()
