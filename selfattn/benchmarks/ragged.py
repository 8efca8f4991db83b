"""How selfattn and PyTorch are asked for a ragged batch: packed, padded, or in several calls.

A `Batch` is some of the sequences, padded to the longest of them: all for who pads, neighbours in length for who
sorts, and one alone for who calls once for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .cases import BACKWARD, Array, Case, Inputs
from .spelling import Spelling, one_array

# Sequences per bucket: little padding, and still a batch.
BUCKET = 8


class Batch(NamedTuple):
    """Padded sequences: their numbers, and query, key, value and grad_out as (n, H, longest, D).

    `mask` is (n, 1, 1, longest), True on keys that there are; None where it is not needed.
    """

    members: list[int]
    mask: Any
    query: Any
    key: Any
    value: Any
    grad_out: Any = None


class Phrases(NamedTuple):
    """What a library says for one batch of mask, q, k, v and g: code, put into a comprehension over batches."""

    forward: str
    both: str  # forward and gradients
    prepare: str  # forward
    pull: str  # gradients


def selfattn_ragged(case: Case, inputs: Inputs) -> list[Spelling]:
    """Ask for the packed batch in one call, or, of a case that is split, for each sequence in its own."""
    import selfattn as sa

    if case.split:
        names = {"sdpa": sa.scaled_dot_product_attention, "vjp": sa.scaled_dot_product_attention_vjp}
        call = f"(q, k, v, is_causal={case.causal})"
        phrases = Phrases(f"sdpa{call}", f"vjp{call}[1](g)", f"vjp{call}[1]", "prepared(g)")
        return [_in_batches(case, make_batches(case, inputs, _each_alone(case)), names, phrases)]
    call = f"(query, key, value, at, at, is_causal={case.causal})"
    packed: dict[str, Any] = {
        "varlen": sa.varlen_attention,
        "vjp": sa.varlen_attention_vjp,
        **inputs._asdict(),
        "at": case.offsets,
    }
    if not case.gradients:
        return [Spelling(f"varlen{call}", packed)]
    packed["grad_out"] = case.grad_out()
    if case.gradients == BACKWARD:
        packed["pullback"] = eval(f"vjp{call}[1]", packed)
        return [Spelling("pullback(grad_out)", packed, one_array)]
    return [Spelling(f"vjp{call}[1](grad_out)", packed, one_array)]


def torch_ragged(case: Case, inputs: Inputs, torch: Any) -> list[Spelling]:
    """Ask PyTorch: padded to the longest of all, or, of a case that is split, in buckets and one by one."""
    call = f"sdpa(q, k, v, mask, is_causal={case.causal})"
    phrases = Phrases(
        forward=call,
        both=f"grad({call}, (q, k, v), g)",
        prepare=f"({call}, (q, k, v))",
        pull="grad(*prepared, g, retain_graph=True)",
    )
    names = {"sdpa": torch.nn.functional.scaled_dot_product_attention, "grad": torch.autograd.grad}
    by_length = sorted(range(case.ragged), key=case.lengths.__getitem__)
    buckets = [by_length[i : i + BUCKET] for i in range(0, case.ragged, BUCKET)]
    spellings = []
    for groups in (buckets, _each_alone(case)) if case.split else ([by_length],):
        batches = []
        for batch in make_batches(case, inputs, groups):
            wrt = (torch.from_numpy(x).requires_grad_(bool(case.gradients)) for x in batch[2:5])
            query, key, value = wrt
            others = (batch.mask, batch.grad_out)
            mask, grad_out = (None if x is None else torch.from_numpy(x) for x in others)
            batches.append(Batch(batch.members, mask, query, key, value, grad_out))
        spellings.append(_in_batches(case, batches, names, phrases))
    return spellings


def _each_alone(case: Case) -> list[list[int]]:
    return [[s] for s in range(case.ragged)]


def _in_batches(case: Case, batches: list[Batch], names: dict[str, Any], phrases: Phrases) -> Spelling:
    names = {**names, "batches": batches}
    each = f"for _, mask, q, k, v, g in batches]  # calls: {len(batches)}"

    def gradients_to_array(found: Sequence[Sequence[Any]]) -> Array:
        return one_array(pack(case, batches, [gradients[n] for gradients in found]) for n in range(3))

    if case.gradients == BACKWARD:
        names["forward"] = eval(f"[({phrases.prepare}, g) {each}", names)
        return Spelling(
            f"[{phrases.pull} for prepared, g in forward]  # calls: {len(batches)}", names, gradients_to_array
        )
    if case.gradients:
        return Spelling(f"[{phrases.both} {each}", names, gradients_to_array)
    return Spelling(f"[{phrases.forward} {each}", names, lambda outs: pack(case, batches, outs))


def make_batches(case: Case, inputs: Inputs, groups: Iterable[Sequence[int]]) -> list[Batch]:
    """Pad each group of sequences to its longest.

    A causal batch needs no mask: its padding comes after every query that counts.
    """
    packed = [inputs.query, inputs.key, inputs.value, *([case.grad_out()] if case.gradients else [])]
    batches = []
    for members in groups:
        longest = max(case.lengths[s] for s in members)
        padded = [np.zeros((len(members), case.heads, longest, case.width), x.dtype) for x in packed]
        mask = np.zeros((len(members), 1, 1, longest), np.bool_)
        for n, s in enumerate(members):
            for to, array in zip(padded, packed, strict=True):
                to[n, :, : case.lengths[s]] = array[case.offsets[s] : case.offsets[s + 1]].swapaxes(0, 1)
            mask[n, ..., : case.lengths[s]] = True
        batches.append(Batch(list(members), None if case.causal or mask.all() else mask, *padded))
    return batches


def pack(case: Case, batches: Iterable[Batch], results: Iterable[Any]) -> Array:
    """Undo the padding: results that are like the queries of each batch, to (total, H, D)."""
    packed = np.empty((case.offsets[-1], case.heads, case.width), case.dtype)
    for batch, result in zip(batches, results, strict=True):
        for s, rows in zip(batch.members, np.asarray(result), strict=True):
            packed[case.offsets[s] : case.offsets[s + 1]] = rows[:, : case.lengths[s]].swapaxes(0, 1)
    return packed
