"""Generation: tokens one after the other, from the logits of a decoder.

Settings have the names of Transformers' ``GenerationConfig`` and do what its logits processors do, in their order:
penalties and a least number of new tokens (:class:`Sampler`), then what may be drawn (:func:`probabilities`). Three
are OpenAI's. Each sequence has a seed of its own, so a sequence gets the same tokens alone as with others.

`decoder.py` computes the logits and owns the cache; `selfattn_models` turns texts into ids, and reads a folder's
settings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from selfattn._check import Array, as_array, check_number, check_size, quoted, seed_from_rng, warn
from selfattn.functional import log_softmax


class Generates(Protocol):
    """What :func:`generate` needs of a decoder."""

    def new_cache(self, sequences: int) -> Any:
        """Return a cache for that number of sequences; its ``keep(indices)`` keeps only these, in this order."""

    def next_logits(self, ids: list[Array], cache: Any) -> Array:
        """Append tokens to each sequence, and return the logits (n, vocabulary) after the last of each."""


class Sampling(NamedTuple):
    """How a token is chosen from logits, checked by :func:`sampling`.

    Parameters
    ----------
    temperature : float, optional
        0, the default, takes the most probable token each time. Else logits are divided by it, and a token is drawn.
    top_k : int, optional
        Draw only from the k most probable tokens.
    top_p : float, optional
        Draw only from the most probable tokens that together have this probability.
    min_p : float, optional
        Draw only from tokens that have at least this share of the most probable token's probability.
    repetition_penalty : float, optional
        Above 1, tokens that occur already, also in the prompt, become less probable. By default 1, or what a folder
        says.
    presence_penalty, frequency_penalty : float, default 0
        From -2 to 2, as OpenAI defines them: taken from the logit of each token of the answer so far,
        ``presence_penalty`` once and ``frequency_penalty`` as often as the token is there.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())  # ids, and what is added to their logits
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


TRANSFORMERS = Sampling._fields[:-3]  # the others are OpenAI's
DRAWING = Sampling._fields[:4]  # change nothing where the most probable token is taken


def _checked(name: str, value: Any) -> Any:
    """Check a setting, and return it as :class:`Sampling` has it."""
    if name in ("top_k", "min_new_tokens"):
        return check_size(name, value, int(name == "top_k"))
    if name == "logit_bias":
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a dict of a number for each token, not {quoted(value)}")
        biases = tuple(check_number(f"{name} of {n!r}", x) for n, x in value.items())
        if not all(x < math.inf for x in biases):
            raise ValueError(f"{name} must have numbers below inf, not {quoted(value)}")
        return tuple(check_size(f"a token of {name}", n, 0) for n in value), biases
    number = check_number(name, value)
    if name == "temperature" and not 0 <= number < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, not {value}; 0 takes the likeliest token")
    if name == "repetition_penalty" and not 0 < number < math.inf:
        raise ValueError(f"{name} must be positive and finite, not {value}")
    if name in ("presence_penalty", "frequency_penalty") and not -2 <= number <= 2:
        raise ValueError(f"{name} must be from -2 to 2, not {value}; 0 changes nothing")
    if name in ("top_p", "min_p") and not 0 <= number <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {value}")
    return number


def sampling(temperature: Any = 0.0, **given: Any) -> Sampling:
    """Check settings, of which None is the default.

    Warn of those of drawing at temperature 0, where they change nothing.
    """
    given = {"temperature": temperature} | {name: value for name, value in given.items() if value is not None}
    how = Sampling(**{name: _checked(name, value) for name, value in given.items()})
    idle = [name for name in DRAWING[1:] if name in given]
    if how.temperature == 0 and idle:
        why = "at temperature 0, which takes the likeliest token"
        way = "temperature=1.0 draws from the model's own distribution"
        warn(f"{idle[0]} changes nothing {why}; {way}")
    return how


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
    """Return the probabilities (vocabulary,), float64, of drawing each token.

    They are those of logits to which penalties have been applied.

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
        tail = p <= (1 - how.top_p) / len(p)  # the sum is at most 1 - top_p, so their order does not matter
        tail[p.argmax()] = False  # the likeliest always stays
        order = np.flatnonzero(~tail)
        order = order[np.argsort(p[order], kind="stable")]
        rare = p[tail].sum() + np.cumsum(p[order]) <= 1 - how.top_p
        rare[-1] = False
        p[tail] = 0
        p[order[rare]] = 0
        p /= p.sum()
    if how.min_p is not None:
        p[p < how.min_p * p.max()] = 0
        p /= p.sum()
    return p


def log_probabilities(logits: Array, new: int, most: int) -> tuple[float, Array, Array]:
    """Return log p of a token, and ids and log p, float64, of the ``most`` likeliest, as raw logits (vocabulary,) say.

    The likeliest is first; of equal ones the first id is. Few are sorted: the largest of each 256 bound what is among
    them.
    """
    largest = np.maximum.reduceat(logits, np.arange(0, len(logits), 256))
    least = -np.inf if most > len(largest) else np.partition(largest, -most)[-most] if most else np.inf
    ids = np.flatnonzero(logits >= least)
    ids = ids[np.argsort(-logits[ids], kind="stable")[:most]]
    log_p = log_softmax(logits.astype(np.float64))
    return float(log_p[new]), ids, log_p[ids]


class Sampler:
    """Draws the tokens of one sequence, which one of ``stop_ids`` may end."""

    def __init__(self, how: Sampling, prompt: Array, seed: int, stop_ids: Collection[int] = ()) -> None:
        self.how, self.prompt, self.stop_ids = how, prompt.tolist(), list(stop_ids)
        self.ids = list(self.prompt)
        self.plain = how[len(DRAWING) :] == Sampling()[len(DRAWING) :]
        self.rng = np.random.default_rng(seed) if how.temperature > 0 else None

    def draw(self, logits: Array) -> int:
        """Draw a token from its logits (vocabulary,); raise ValueError if one is NaN or +inf, or all are −inf."""
        if not self.plain:
            try:
                logits = self.process(logits.copy())
            except IndexError as error:
                raise ValueError(f"a setting names a token beyond the vocabulary: {error}") from None
        if not math.isfinite(largest := logits.max(initial=-np.inf)):  # NaN if one is NaN
            what = "all are -inf" if largest == -np.inf else f"one is {largest}"
            or_so = "" if self.plain else ", or do settings forbid every token"
            so = f"{what}; are the weights or inputs finite{or_so}?"
            raise ValueError(f"no token can be drawn from these logits: {so}")
        if self.rng is None:
            found = int(logits.argmax())
        else:
            p = probabilities(logits, self.how)
            possible = np.flatnonzero(p)
            sums = np.cumsum(p[possible])
            place = np.searchsorted(sums, self.rng.random() * sums[-1], side="right")
            found = int(possible[min(int(place), len(possible) - 1)])  # the product may round up to sums[-1]
        self.ids.append(found)
        return found

    @np.errstate(all="ignore")  # `draw` finds what is not finite
    def process(self, x: Array) -> Array:
        """Change logits (vocabulary,) as the settings say, in the order of Transformers.

        OpenAI's penalties come after its own.
        """
        how, ids, begin = self.how, self.ids, len(self.prompt)
        x[list(how.logit_bias[0])] += how.logit_bias[1]
        if how.repetition_penalty != 1:
            own = x[ids]
            x[ids] = np.where(own < 0, own * how.repetition_penalty, own / how.repetition_penalty)
        if (how.presence_penalty or how.frequency_penalty) and len(ids) > begin:
            new, times = np.unique(ids[begin:], return_counts=True)
            x[new] -= how.presence_penalty + how.frequency_penalty * times
        if len(ids) - begin < how.min_new_tokens:
            x[[n for n in self.stop_ids if 0 <= n < len(x)]] = -np.inf
        return x


def generate(
    decoder: Generates,
    prompts: Sequence[Array],
    *,
    max_new_tokens: int = 100,
    max_length: int | None = None,
    stop_ids: Collection[int] = (),
    rng: Any = None,
    context: int | None = None,
    stop_when: Callable[[int, int, Array], bool] | None = None,
    **how: Any,
) -> Iterator[list[int | None]]:
    """Generate tokens after prompts, one for each at a time; arguments are checked at the call.

    Prompts are vectors of ids, none empty; the caller checks that the ids are in the vocabulary. :func:`sampling`
    takes ``how``, and :func:`seeds` takes ``rng``. A sequence ends after ``max_new_tokens`` or, if ``max_length`` is
    given, after that many tokens with its prompt; after one of ``stop_ids`` or after a token for which
    ``stop_when(sequence, id, logits)``, with the decoder's logits, is true (these tokens are yielded too); or, with a
    UserWarning, when the ``context``, the most tokens that the decoder takes, is full.

    Each item is a list of the new id of each prompt, None where a sequence has ended before; after the item in which
    the last sequence ends there are no more. Logits from which no token can be drawn are a ValueError with the number
    of the prompt.
    """
    checked = sampling(**how)
    new = check_size("max_new_tokens", max_new_tokens)
    given = [_prompt(i, prompt, context) for i, prompt in enumerate(prompts)]
    if not given:
        raise ValueError("there are no prompts")
    whole = None if max_length is None else check_size("max_length", max_length)
    most = [new if whole is None else whole - len(prompt) for prompt in given]
    if min(most) < 1:
        i = most.index(min(most))
        so = f"max_length, {max_length}, leaves nothing to generate; max_new_tokens= says how many may be new"
        raise ValueError(f"prompt {i} has {len(given[i])} tokens: {so}")
    samplers = [
        Sampler(checked, prompt, seed, stop_ids)
        for prompt, seed in zip(given, seeds(rng, len(given)), strict=True)
    ]
    return _steps(decoder, given, samplers, most, frozenset(stop_ids), context, stop_when)


def _prompt(number: int, prompt: Array, context: int | None) -> Array:
    ids = as_array(f"prompt {number}", prompt)
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
    most: list[int],
    stop_ids: frozenset[int],
    context: int | None,
    stop_when: Callable[[int, int, Array], bool] | None,
) -> Iterator[list[int | None]]:
    cache = decoder.new_cache(len(prompts))
    running, entering = list(range(len(prompts))), prompts
    for count in itertools.count(1):
        logits = decoder.next_logits(entering, cache)
        step: list[int | None] = [None] * len(prompts)
        kept, entering = [], []
        for row, i in enumerate(running):
            try:
                new = step[i] = samplers[i].draw(logits[row])
            except ValueError as error:
                raise ValueError(f"prompt {i}, new token {count}: {error}") from None
            stopped = stop_when is not None and stop_when(i, new, logits[row])
            if stopped or new in stop_ids or count == most[i]:
                continue
            if context is not None and len(prompts[i]) + count > context:
                full = f"the context of {context} tokens is full"
                warn(f"prompt {i} ended after {count} new tokens: {full}")
                continue
            kept.append(row)
            entering.append(np.array([new]))
        if 0 < len(kept) < len(running):
            cache.keep(kept)
        running = [running[row] for row in kept]
        yield step
        if not running:
            return
