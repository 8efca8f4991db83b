"""The timing of short computations, and attention in five lines of NumPy to compare with.

The command line and the benchmarks use it. It knows nothing of cases, peers or tables.
"""

from __future__ import annotations

import time
import timeit
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def numpy_attention(query: Array, key: Array, value: Array, bias: Array | None = None) -> Array:
    """Compute attention in plain NumPy, which allocates several arrays (…, L, S)."""
    scores = query @ np.swapaxes(key, -1, -2) * query.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    output: Array = weights @ value
    return output


def attention_flops(
    batch: int, heads: int, queries: int, keys: int, width: int, causal: bool = False
) -> float:
    """Count the multiplications and additions of the two products, without the masked half of a causal call."""
    return 4.0 * batch * heads * queries * keys * width * (0.5 if causal else 1.0)


def wait_until_quiet(at_most: float = 1.0) -> None:
    """Sleep until the threads of this process sleep too: some pools spin for a tenth of a second after a call."""
    deadline = time.monotonic() + at_most
    while time.monotonic() < deadline:
        cpu, wall = time.process_time(), time.monotonic()
        time.sleep(0.005)
        if time.process_time() - cpu < 0.2 * (time.monotonic() - wall):
            return


def sample_times(statement: str, names: dict[str, Any], seconds: float, warm_up: float = 0.01) -> list[float]:
    """Return the times of single runs of `statement`, sampled for about `seconds` after a warm-up.

    A sample is the mean over the runs of a millisecond, so that a call of 100 ns can be timed; a longer run is a sample. There
    is always at least one.
    """
    timer = timeit.Timer(statement, globals=names)
    number, warm = 1, 0.0
    while True:
        elapsed = timer.timeit(number)
        warm += elapsed
        if elapsed < 1e-3:
            number *= 2
        elif warm >= warm_up:
            break
    samples: list[float] = []
    total = 0.0
    while not samples or total < seconds:
        elapsed = timer.timeit(number)
        total += elapsed
        samples.append(elapsed / number)
    return samples
