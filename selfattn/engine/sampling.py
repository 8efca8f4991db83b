"""Generation: tokens one after the other, from the logits of a decoder.

Draws follow Transformers' logits processors: the repetition penalty (Keskar et al., "CTRL", 2019, section 4.1), then
temperature, the k likeliest (Fan et al., 2018), and the nucleus of mass p (Holtzman et al., 2020). Each sequence has a seed of
its own: it gets the same tokens alone as with others.

`decoder.py` computes the logits and owns the cache; `selfattn.models` turns texts into ids.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from selfattn._check import Array, check_number, check_size, seed_from_rng


class Generates(Protocol):
    """What :func:`generate` needs of a decoder."""

    def new_cache(self, sequences: int) -> Any:
        """Return a cache for that number of sequences; its ``keep(indices)`` keeps only these, in this order."""

    def next_logits(self, ids: list[Array], cache: Any) -> Array:
        """Append tokens to each sequence, and return the logits (n, vocabulary) after the last of each."""


class Sampling(NamedTuple):
    """How a token is drawn from logits, checked by :func:`sampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    repetition_penalty: float


def sampling(
    temperature: Any = 0.0, top_k: Any = None, top_p: Any = None, repetition_penalty: Any = 1.0
) -> Sampling:
    """Check the options of drawing; warn of top_k or top_p at temperature 0, where they change nothing."""
    warmth = check_number("temperature", temperature)
    if not 0 <= warmth < math.inf:
        raise ValueError(
            f"temperature must be at least 0 and finite, not {temperature}; 0 takes the likeliest token"
        )
    most = None if top_k is None else check_size("top_k", top_k)
    mass = None if top_p is None else check_number("top_p", top_p)
    if mass is not None and not 0 <= mass <= 1:
        raise ValueError(f"top_p must be from 0 to 1, not {top_p}")
    penalty = check_number("repetition_penalty", repetition_penalty)
    if not 0 < penalty < math.inf:
        raise ValueError(f"repetition_penalty must be positive and finite, not {repetition_penalty}")
    if warmth == 0 and (most is not None or mass is not None):
        name = "top_p" if most is None else "top_k"
        warnings.warn(
            f"{name} changes nothing at temperature 0, which takes the likeliest token; temperature=1.0 draws from "
            "the model's own distribution",
            stacklevel=3,
        )
    return Sampling(warmth, most, mass, penalty)


def seeds(rng: Any, count: int) -> list[int]:
    """Return the seed of each sequence: s + i for an int s, the ints of a sequence, or draws of a generator."""
    one = isinstance(rng, np.ndarray) and rng.ndim == 0
    if isinstance(rng, Sequence | np.ndarray) and not isinstance(rng, str) and not one:
        if len(rng) != count:
            raise ValueError(f"rng has {len(rng)} seeds for {count} prompts; give one for each, or one int")
        return [seed_from_rng(each) for each in rng]
    if rng is None or hasattr(rng, "integers"):
        generator = np.random.default_rng() if rng is None else rng
        return [seed_from_rng(generator) for _ in range(count)]
    return [(seed_from_rng(rng) + i) % 2**64 for i in range(count)]


def probabilities(logits: Array, how: Sampling) -> Array:
    """Return the probabilities (vocabulary,), float64, of drawing each token, from logits after the penalty.

    The temperature is not 0. All tokens with the logit of the k-th likeliest stay, as in Transformers.
    """
    x = logits.astype(np.float64)
    with np.errstate(over="ignore"):  # to -inf, near temperature 0
        x = (x - x.max()) / how.temperature
    if how.top_k is not None and how.top_k < len(x):
        least = np.partition(x, -how.top_k)[-how.top_k]
        x[x < least] = -np.inf
    p: Array = np.exp(x)
    p /= p.sum()
    if how.top_p is not None and how.top_p < 1:
        tail = p <= (1 - how.top_p) / len(p)  # together no more than 1 - top_p: their order does not matter
        tail[p.argmax()] = False  # the likeliest always stays
        order = np.flatnonzero(~tail)
        order = order[np.argsort(p[order], kind="stable")]
        rare = p[tail].sum() + np.cumsum(p[order]) <= 1 - how.top_p
        rare[-1] = False
        p[tail] = 0
        p[order[rare]] = 0
        p /= p.sum()
    return p


class Sampler:
    """Draws the tokens of one sequence. The penalty counts the tokens of its prompt as repeated."""

    def __init__(self, how: Sampling, prompt: Array, seed: int) -> None:
        self.how, self.seen = how, set(prompt.tolist())
        self.rng = np.random.default_rng(seed) if how.temperature > 0 else None

    def draw(self, logits: Array) -> int:
        """Draw a token from its logits (vocabulary,); a ValueError if one is NaN or +inf, or all are −inf."""
        if not math.isfinite(largest := logits.max(initial=-np.inf)):  # NaN if one is NaN
            what = "all are -inf" if largest == -np.inf else f"one is {largest}"
            raise ValueError(
                f"no token can be drawn from these logits: {what}; are the weights or inputs finite?"
            )
        if self.how.repetition_penalty != 1:
            logits, again, penalty = logits.copy(), list(self.seen), self.how.repetition_penalty
            own = logits[again]
            logits[again] = np.where(own < 0, own * penalty, own / penalty)
        if self.rng is None:
            found = int(logits.argmax())
        else:
            p = probabilities(logits, self.how)
            possible = np.flatnonzero(p)
            ends = np.cumsum(p[possible])
            place = np.searchsorted(ends, self.rng.random() * ends[-1], side="right")
            found = int(possible[min(int(place), len(possible) - 1)])  # the product may round up to ends[-1]
        self.seen.add(found)
        return found


def generate(
    decoder: Generates,
    prompts: Sequence[Array],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop_ids: Collection[int] = (),
    rng: Any = None,
    context: int | None = None,
    ends: Callable[[int, int], bool] | None = None,
) -> Iterator[list[int | None]]:
    """Generate tokens after prompts, one for each at a time; arguments are checked at the call.

    Prompts are vectors of ids, none empty; the caller checks that the ids are in the vocabulary. :func:`sampling` and :func:`seeds`
    describe the options of drawing. A sequence ends after ``max_new_tokens``, after one of ``stop_ids`` or after a token for which
    ``ends(sequence, id)`` is true (these tokens are yielded too), or, with a UserWarning, when the ``context``, the most tokens that
    the decoder takes, is full.

    Each item is a list of the new id of each prompt, None where a sequence has ended before; after the item in which the last
    sequence ends there are no more. Logits from which no token can be drawn are a ValueError with the number of the prompt.
    """
    how = sampling(temperature, top_k, top_p, repetition_penalty)
    most = check_size("max_new_tokens", max_new_tokens)
    given = [_prompt(i, prompt, context) for i, prompt in enumerate(prompts)]
    if not given:
        raise ValueError("there are no prompts")
    samplers = [
        Sampler(how, prompt, seed) for prompt, seed in zip(given, seeds(rng, len(given)), strict=True)
    ]
    return _steps(decoder, given, samplers, most, frozenset(stop_ids), context, ends)


def _prompt(number: int, prompt: Array, context: int | None) -> Array:
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise TypeError(f"prompt {number} must be a vector of ids, not {ids.dtype} of shape {ids.shape}")
    if not ids.size:
        raise ValueError(f"prompt {number} is empty; there is nothing to continue")
    if context is not None and ids.size > context:
        raise ValueError(f"prompt {number} has {ids.size} tokens; the context of this model has {context}")
    return ids.astype(np.int64, copy=False)


def _steps(
    decoder: Generates,
    prompts: list[Array],
    samplers: list[Sampler],
    most: int,
    stop_ids: frozenset[int],
    context: int | None,
    ends: Callable[[int, int], bool] | None,
) -> Iterator[list[int | None]]:
    cache = decoder.new_cache(len(prompts))
    running, entering = list(range(len(prompts))), prompts
    for count in range(1, most + 1):
        logits = decoder.next_logits(entering, cache)
        step: list[int | None] = [None] * len(prompts)
        kept, entering = [], []
        for row, i in enumerate(running):
            try:
                new = step[i] = samplers[i].draw(logits[row])
            except ValueError as error:
                raise ValueError(f"prompt {i}, new token {count}: {error}") from None
            if new in stop_ids or (ends is not None and ends(i, new)):
                continue
            if context is not None and len(prompts[i]) + count > context and count < most:
                warnings.warn(
                    f"prompt {i} ended after {count} new tokens: the context of {context} tokens is full",
                    stacklevel=2,
                )
                continue
            kept.append(row)
            entering.append(np.array([new]))
        if len(kept) < len(running):
            cache.keep(kept)
            running = [running[row] for row in kept]
        yield step
        if not running:
            return
