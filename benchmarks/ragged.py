"""Packed sequences of many lengths, forward and backward, against padding and against a call for each sequence.

64 sequences have lengths log-uniform in 16 to 2048, for ``selfattn.varlen_attention``; rates do not count padding. "equal lengths" is
a dense batch of sequences of 1024, compared by the time of one operation; "one by one" is selfattn's dense function, called for
each sequence. "torch" gets one batch padded to the longest, with a key-padding mask unless causal; "PyTorch in parts" is the
faster of eight buckets of like lengths, and a call for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib import import_module
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from selfattn._timing import attention_flops
from selfattn.benchmarks import attention
from selfattn.benchmarks.app import listed, new_parser
from selfattn.benchmarks.attention import BACKWARD, one_array
from selfattn.benchmarks.turns import Array, Contestant, Prepare, Row, Spelling
from selfattn.cli.parser import count

from . import shared

SHORTEST = 16
BUCKET = 8  # sequences per padded batch: few, for little padding
PEERS = {"torch": ["torch"]}


@dataclass(frozen=True)
class Case(attention.Case):
    """Packed sequences of up to L tokens: forward, or the pullback if gradients is BACKWARD."""

    ragged: int = 64  # number of sequences
    split: bool = False  # a call for each sequence or bucket

    @property
    def label(self) -> str:
        """The name of the case in a table."""
        shape = f"{self.ragged} of {SHORTEST} to {self.length} x {self.width}"
        return ", ".join(filter(None, [self.gradients, "causal" * self.causal, shape]))

    @cached_property
    def lengths(self) -> list[int]:
        """Lengths of the sequences: log-uniform from 16 to `length`."""
        shortest = min(SHORTEST, self.length)
        logarithms = np.random.default_rng(0).uniform(np.log(shortest), np.log(self.length), self.ragged)
        return [round(x) for x in np.exp(logarithms).tolist()]

    @cached_property
    def offsets(self) -> Array:
        """The begin of each sequence, and the end of the last."""
        return np.cumsum([0, *self.lengths])

    def facts(self) -> dict[str, Any]:
        """Return the properties of the case that are saved."""
        flops = sum(attention_flops(1, self.heads, n, n, self.width, self.causal) for n in self.lengths)
        return {**super().facts(), "flops": flops * (2.5 if self.gradients else 1.0)}

    def packed(self) -> list[Array]:
        """Make query, key, value and the output's gradient, each (total, H, D)."""
        rng, shape = np.random.default_rng(0), (int(self.offsets[-1]), self.heads, self.width)
        return [self.draw(rng, shape) for _ in range(4)]


class Batch(NamedTuple):
    """Some of the sequences, padded to the longest: their numbers, and arrays of (n, H, longest, D).

    `mask` is (n, 1, 1, longest), True on existing keys; None where it is not needed.
    """

    members: Sequence[int]
    mask: Array | None
    arrays: list[Array]


def batches_of(case: Case, groups: Sequence[Sequence[int]]) -> Iterator[Batch]:
    """Pad each group of sequences; a causal batch needs no mask, since its padding is after every existing query."""
    packed = case.packed()
    for members in groups:
        lengths = [case.lengths[s] for s in members]
        padded = [np.zeros((len(members), case.heads, max(lengths), case.width), x.dtype) for x in packed]
        for n, s in enumerate(members):
            for to, array in zip(padded, packed, strict=True):
                to[n, :, : lengths[n]] = array[case.offsets[s] : case.offsets[s + 1]].swapaxes(0, 1)
        mask = (np.arange(max(lengths)) < np.array(lengths)[:, None])[:, None, None]
        yield Batch(members, None if case.causal or mask.all() else mask, padded)


def spelling_of(case: Case, groups: Sequence[Sequence[int]], calls: list[Callable[[], Any]]) -> Spelling:
    """Return the spelling of a call for each group; the padded results are packed to be compared."""

    def pack(results: Sequence[Any]) -> Array:
        packed = np.empty((case.offsets[-1], case.heads, case.width), case.dtype)
        for members, result in zip(groups, results, strict=True):
            for s, rows in zip(members, result, strict=True):
                packed[case.offsets[s] : case.offsets[s + 1]] = rows[:, : case.lengths[s]].swapaxes(0, 1)
        return packed

    def to_array(found: list[Any]) -> Array:
        if not case.gradients:
            return thinned(pack([np.asarray(out) for out in found]))
        return thinned(one_array(pack([np.asarray(gradients[n]) for gradients in found]) for n in range(3)))

    return Spelling(f"[call() for call in calls]  # calls: {len(calls)}", {"calls": calls}, to_array)


def thinned(result: Array) -> Array:
    """Return evenly spaced elements of a long result."""
    return result.reshape(-1)[:: max(1, result.size >> 18)]


def _alone(case: Case) -> list[list[int]]:
    return [[s] for s in range(case.ragged)]


def _selfattn(sa: Any, case: Case) -> list[Spelling]:
    if case.split:
        calls: list[Callable[[], Any]] = []
        for batch in batches_of(case, _alone(case)):
            *qkv, grad_out = batch.arrays
            if case.gradients:
                pullback = sa.scaled_dot_product_attention_vjp(*qkv, is_causal=case.causal)[1]
                calls.append(partial(pullback, grad_out))
            else:
                calls.append(partial(sa.scaled_dot_product_attention, *qkv, is_causal=case.causal))
        return [spelling_of(case, _alone(case), calls)]
    *qkv, grad_out = case.packed()
    at = (case.offsets, case.offsets)
    if case.gradients:
        pullback = sa.varlen_attention_vjp(*qkv, *at, is_causal=case.causal)[1]
        names = {"pullback": pullback, "grad_out": grad_out}
        return [Spelling("pullback(grad_out)", names, lambda found: thinned(one_array(found)))]
    call = partial(sa.varlen_attention, *qkv, *at, is_causal=case.causal)
    return [shared.called(call, lambda out: thinned(np.asarray(out)))]


def _torch(torch: Any, case: Case) -> list[Spelling]:
    by_length = sorted(range(case.ragged), key=case.lengths.__getitem__)
    buckets = [by_length[i : i + BUCKET] for i in range(0, case.ragged, BUCKET)]
    spellings = []
    for groups in (buckets, _alone(case)) if case.split else ([by_length],):
        calls: list[Callable[[], Any]] = []
        for batch in batches_of(case, groups):
            *qkv, grad_out = map(torch.from_numpy, batch.arrays)
            mask = None if batch.mask is None else torch.from_numpy(batch.mask)
            for x in qkv:
                x.requires_grad_(bool(case.gradients))
            sdpa = torch.nn.functional.scaled_dot_product_attention
            call = partial(sdpa, *qkv, mask, is_causal=case.causal)
            if case.gradients:
                call = partial(torch.autograd.grad, call(), qkv, grad_out, retain_graph=True)
            calls.append(call)
        spellings.append(spelling_of(case, groups, calls))
    return spellings


def open_engine(engine: str, threads: int) -> Prepare:
    """Open a library in a worker, also for the dense batch of equal lengths."""
    module: Any = import_module(engine)
    module.set_num_threads(threads)

    def prepare(case: attention.Case) -> list[Spelling]:
        if not isinstance(case, Case):
            return attention.ENGINES[engine].spell(case, case.inputs(), threads)
        return _selfattn(module, case) if engine == "selfattn" else _torch(module, case)

    return prepare


def row_of(case: Case, peers: Sequence[str]) -> Row:
    """Return a row with the contestants of a packed batch."""
    one = attention.Case(min(case.length, 1024), case.width, causal=case.causal, gradients=case.gradients)
    equal = replace(one, batch=max(1, round(case.facts()["flops"] / one.facts()["flops"])))
    apart = replace(case, split=True)
    found = [
        Contestant("selfattn", "selfattn", case),
        Contestant("equal lengths", "selfattn", equal, yardstick=True),
        Contestant("one by one", "selfattn", apart),
    ]
    if peers:
        found += [Contestant("torch", "torch", case), Contestant("PyTorch in parts", "torch", apart)]
    return Row("ragged", case.label, tuple(found))


def main(arguments: Sequence[str], prog: str) -> int:
    """Run the benchmark and return its exit code."""
    parser = new_parser(prog, __doc__ or "", PEERS)
    add = parser.add_argument
    add("--lengths", type=listed(count), default=[2048], metavar="N,N", help="the longest sequence (2048)")
    add("--dims", type=listed(count), default=[64], metavar="N,N", help="widths of a head (64)")
    options = parser.parse_args(arguments)
    rows = [
        row_of(Case(*shape, causal=causal, gradients=kind, ragged=16 if options.quick else 64), options.peers)
        for shape in product(options.lengths, options.dims)
        for kind, causal in product(("", BACKWARD), (False, True))
    ]
    packages = {name: name for name in options.peers}
    return shared.run(prog, options, rows, open_engine, packages, "H=8, float32")
