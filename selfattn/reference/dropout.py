"""The random numbers of dropout, in plain NumPy: a counter-based generator, without state and order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def philox4x32(key: npt.ArrayLike, counter: npt.ArrayLike, rounds: int = 7) -> npt.NDArray[np.uint32]:
    """Compute Philox4x32: four random 32-bit words from a counter and a key.

    ``key`` (..., 2) and ``counter`` (..., 4) are 32-bit words, the lowest first; so is the result, (..., 4). 7 rounds
    are the fewest that pass the BigCrush tests; 10 are the paper's choice with a margin.

    References
    ----------
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.

    Examples
    --------
    The authors' first known answer:

    >>> [f"{word:08x}" for word in philox4x32([0, 0], [0, 0, 0, 0], rounds=10)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    low_half = np.uint64(0xFFFFFFFF)
    key, counter = np.asarray(key, dtype=np.uint64), np.asarray(counter, dtype=np.uint64)
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, c2, c3 = (counter[..., n] for n in range(4))
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ k0, product1 & low_half
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ k1, product0 & low_half
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low_half, (k1 + np.uint64(0xBB67AE85)) & low_half
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def seed_of(rng: Any) -> int:
    """Return a seed of 64 bits: an int modulo 2**64, or one uint64 of a generator, for None of a new one."""
    if rng is None:
        rng = np.random.default_rng()
    if hasattr(rng, "integers"):
        rng = rng.integers(0, 2**64, dtype=np.uint64)
    return int(rng) % 2**64


def dropout_keep_mask(
    seed: int, p: float, lead_shape: Sequence[int], n_queries: int, n_keys: int, first_head: int = 0
) -> npt.NDArray[np.bool_]:
    """Return which weights dropout keeps, a function of the arguments alone.

    The word for key j of query i in head h (the flattened index over the leading dims) is number ``j & 3``
    of Philox4x32 with 7 rounds, key ``(seed, seed >> 32)`` and counter ``(j >> 2, i, h, h >> 32)``, all
    modulo 2**32. A weight is kept when its word is at least ``round(p * 2**32)`` (a half goes to the even
    neighbour).

    The result is (*lead_shape, L, S). In a part of a larger batch, the first h is ``first_head``.

    Examples
    --------
    >>> dropout_keep_mask(seed=0, p=0.5, lead_shape=(), n_queries=2, n_keys=6).astype(int)
    array([[0, 0, 0, 0, 1, 1],
           [1, 1, 0, 1, 1, 1]])
    """
    mask32 = 0xFFFFFFFF
    blocks, n_heads = -(-n_keys // 4), math.prod(lead_shape)
    heads = np.arange(first_head, first_head + n_heads)[:, None, None]
    counter = np.zeros((n_heads, n_queries, blocks, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(blocks) & mask32
    counter[..., 1] = np.arange(n_queries)[:, None] & mask32
    counter[..., 2] = heads & mask32
    counter[..., 3] = heads >> 32
    words = philox4x32([seed & mask32, seed >> 32 & mask32], counter)
    words = words.reshape(n_heads, n_queries, 4 * blocks)[..., :n_keys]  # word j & 3 of block j >> 2
    return np.asarray(words >= np.uint64(round(p * 2**32))).reshape(*lead_shape, n_queries, n_keys)
