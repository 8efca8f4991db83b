"""Ids as the core takes them: checked, and packed, sequences one after the other without padding.

``cu_seqlens`` says where each sequence begins, and ends with the number of all ids. Messages are the callers': what is here says what
is wrong with which id.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_integers

Ids = npt.NDArray[np.int64]


def vectors(name: str, sequences: Iterable[npt.ArrayLike]) -> list[Ids]:
    """Take the ids of each sequence as a vector of int64."""
    found = [as_integers(f"{name} of sequence {n}", own) for n, own in enumerate(sequences)]
    for n, own in enumerate(found):
        if own.ndim != 1:
            raise ValueError(f"{name} of sequence {n} must have shape (L,), not {own.shape}")
    return found


def pack(sequences: Sequence[Any]) -> tuple[Ids, Ids]:
    """Put the ids of sequences, vectors or lists of int, one after the other; also return ``cu_seqlens``."""
    cu_seqlens = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(own) for own in sequences], out=cu_seqlens[1:])
    if sequences and isinstance(sequences[0], np.ndarray):
        return np.concatenate(sequences, dtype=np.int64), cu_seqlens
    return np.fromiter(itertools.chain.from_iterable(sequences), np.int64, int(cu_seqlens[-1])), cu_seqlens


def check_ids(ids: Array, vocab_size: int, found: str = "not") -> None:
    """Refuse ids that are not in 0 … vocab_size − 1; the first of them ends the message, after ``found``."""
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        raise ValueError(f"ids must be in 0...{vocab_size - 1}, {found} {wrong}")
