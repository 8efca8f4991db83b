"""PyTorch's CPU random stream: a seed gives the same numbers as in PyTorch.

It is the stream of PyTorch 2.13: MT19937's words, which each kind of draw turns into numbers in its own way. The layers
decide what is drawn, and in which order.
"""

from __future__ import annotations

import contextlib
import copy
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import FLOATS, Array, check_number

__all__ = ["TorchGenerator", "torch_rng"]

Size: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | None

_LONG = 16  # normal_() fills tensors of at least this size block by block
_WIDE = 2**28  # randint() uses two words for a number of this range or a larger one


class TorchGenerator:
    """PyTorch's CPU generator, as :func:`torch_rng` returns and describes it.

    Parameters
    ----------
    seed : int
        As for ``torch.manual_seed``; its lowest 32 bits count.

    Notes
    -----
    Every ``rng=`` takes it: layers draw their weights from it in PyTorch's order, ``fit`` shuffles as a DataLoader
    does, and dropout takes its seed from :meth:`integers`.
    """

    def __init__(self, seed: SupportsIndex) -> None:
        self.manual_seed(seed)

    def __copy__(self) -> TorchGenerator:
        """Return an independent generator; if two shared their words, each would skip the words that the other drew."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        return f"torch_rng({self.initial_seed})"

    def manual_seed(self, seed: SupportsIndex) -> TorchGenerator:
        """Restart from ``seed``; return the generator itself, as PyTorch does."""
        if isinstance(seed, bool | np.bool_) or not hasattr(seed, "__index__"):
            raise TypeError(f"seed must be an int, not {type(seed).__name__}")
        self.initial_seed = operator.index(seed)
        if not -(2**63) <= self.initial_seed < 2**64:
            raise ValueError(f"seed must fit into 64 bits, as for torch.manual_seed, not {self.initial_seed}")
        self._source = np.random.RandomState(self.initial_seed & 0xFFFFFFFF)
        self._kept_normals: list[float] = []  # at most one, unless several threads draw at once
        return self

    # ------------------------------------------------------------------------------------------------- state

    def get_state(self) -> dict[str, Any]:
        """Return everything that the next draws depend on, as plain ints, floats and lists (JSON can hold it)."""
        _, words, position, _, _ = self._source.get_state(legacy=True)
        return {
            "generator": "torch_rng",
            "seed": self.initial_seed,
            "words": [int(word) for word in words],
            "position": int(position),
            "next_normal": self._kept_normals[-1] if self._kept_normals else None,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from where :meth:`get_state` was called.

        Raises
        ------
        ValueError
            ``state`` is not from :meth:`get_state`.
        """
        names = {"generator", "seed", "words", "position", "next_normal"}
        if not isinstance(state, Mapping) or set(state) != names or state["generator"] != "torch_rng":
            raise ValueError(f"state must come from get_state() of a torch_rng, with {sorted(names)}")
        words = np.asarray(state["words"], dtype=np.uint32)
        if words.shape != (624,) or not 0 <= state["position"] <= 624:
            raise ValueError(f"state needs 624 words and a position in 0...624, not {words.shape} words")
        self._source.set_state(("MT19937", words, state["position"], 0, 0.0))
        self.initial_seed = state["seed"]
        self._kept_normals = [] if state["next_normal"] is None else [state["next_normal"]]

    # ------------------------------------------------------------------------------------------------- draws

    def random(self, size: Size = None, dtype: npt.DTypeLike = np.float32) -> Array:
        """Draw from U[0, 1), as ``torch.rand``: 24 bits of a word for float32, 53 of two words for float64."""
        dtype, shape = _float_dtype(dtype), _shape(size)
        n = math.prod(shape)
        if dtype == np.float32:
            return ((self._words(n) & 0xFFFFFF) * np.float32(2.0**-24)).astype(dtype).reshape(shape)
        bits = self._words64(n) & np.uint64(2**53 - 1)
        return (bits * 2.0**-53).reshape(shape)

    def uniform(
        self, low: float = 0.0, high: float = 1.0, size: Size = None, dtype: npt.DTypeLike = np.float32
    ) -> Array:
        """Draw from U[low, high), as ``tensor.uniform_(low, high)``: to the bit."""
        low, high = check_number("low", low), check_number("high", high)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(f"uniform needs finite low <= high, not low={low}, high={high}")
        dtype = _float_dtype(dtype)
        a, b = dtype.type(low), dtype.type(high)
        return np.asarray(_fma(self.random(size, dtype), b - a, a))

    def normal(
        self, mean: float = 0.0, std: float = 1.0, size: Size = None, dtype: npt.DTypeLike = np.float32
    ) -> Array:
        """Draw from the normal distribution, as ``tensor.normal_(mean, std)``.

        Fewer than 16 numbers are PyTorch's to the bit; more agree to 3 ulp in float32 and 2 ulp in float64. Numbers
        of 16 bits are float32 ones, rounded; PyTorch draws them in another way, so the stream then continues from
        another position.
        """
        mean, std = check_number("mean", mean), check_number("std", std)
        if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
            raise ValueError(f"normal needs a finite mean and a finite std >= 0, not mean={mean}, std={std}")
        stored, shape = np.dtype(dtype), _shape(size)
        short = stored.itemsize == 2 and stored.name in FLOATS
        dtype = np.dtype(np.float32) if short else _float_dtype(stored)
        n = math.prod(shape)
        if n < _LONG:
            few = [self._one_normal() * std + mean for _ in range(n)]
            return np.array(few, stored).reshape(shape)
        whole = n - n % _LONG
        x = np.empty(n, dtype)
        x[:whole] = _box_muller(self.random(whole if short else n, dtype)[:whole], mean, std)
        if n != whole:  # PyTorch draws the last 16 again
            x[-_LONG:] = _box_muller(self.random(_LONG, dtype), mean, std)
        return x.astype(stored, copy=False).reshape(shape)

    def standard_normal(self, size: Size = None, dtype: npt.DTypeLike = np.float32) -> Array:
        """Draw from the standard normal distribution, as ``torch.randn``."""
        return self.normal(0.0, 1.0, size, dtype)

    def randperm(self, n: SupportsIndex) -> npt.NDArray[np.int64]:
        """Shuffle the integers 0 … n - 1, as ``torch.randperm(n)``."""
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"randperm needs n >= 0, not {n}")
        order = list(range(n))
        steps = self._words(max(n - 1, 0)) % np.arange(n, 1, -1, dtype=np.uint32)
        for i, step in enumerate(steps.tolist()):
            order[i], order[i + step] = order[i + step], order[i]
        return np.array(order, np.int64)

    def integers(
        self, low: int, high: int | None = None, size: Size = None, dtype: npt.DTypeLike = np.int64
    ) -> Any:
        """Draw integers with low <= x < high (or 0 <= x < low), as ``torch.randint``; an int without ``size``."""
        low, high = (0, low) if high is None else (low, high)
        span = high - low
        dtype = np.dtype(dtype)
        if dtype.kind not in "iu":
            raise TypeError(f"dtype must be one of integers, not {dtype}")
        info = np.iinfo(dtype)
        if not (0 < span <= 2**64 and info.min <= low and high - 1 <= info.max):
            raise ValueError(f"integers needs low < high, both within {dtype}, not low={low}, high={high}")
        shape = _shape(size)
        n = math.prod(shape)
        words = self._words(n) if span < _WIDE else self._words64(n)
        drawn = np.array([low + word % span for word in words.tolist()], dtype).reshape(shape)
        return drawn.item() if size is None else drawn

    def random_int64(self) -> int:
        """Draw as ``torch.empty((), dtype=torch.int64).random_()`` does: 63 bits of two words."""
        return int(self._words64(1)[0]) & (2**63 - 1)

    def permutation(self, n: SupportsIndex) -> npt.NDArray[np.int64]:
        """Shuffle as an epoch of ``DataLoader(shuffle=True)`` does: with a new generator that this one seeds."""
        self.random_int64()  # DataLoader draws a seed for its workers
        return TorchGenerator(self.random_int64()).randperm(n)

    # ----------------------------------------------------------------------------------------------- helpers

    def _words(self, n: int) -> npt.NDArray[np.uint32]:
        return self._source.randint(0, 2**32, n, dtype=np.uint32)

    def _words64(self, n: int) -> npt.NDArray[np.uint64]:
        pairs = self._words(2 * n).astype(np.uint64).reshape(n, 2)
        high_low: npt.NDArray[np.uint64] = pairs[:, 0] << np.uint64(32) | pairs[:, 1]
        return high_low

    def _one_normal(self) -> float:
        """Draw Box and Muller's pair: return the cosine, and keep the sine for the next call in any thread."""
        with contextlib.suppress(IndexError):
            return self._kept_normals.pop()  # atomic: no other thread gets the same
        u1, u2 = self.random(2, np.float64).tolist()
        radius, angle = math.sqrt(-2.0 * math.log1p(-u2)), 2.0 * math.pi * u1
        self._kept_normals.append(radius * math.sin(angle))
        return radius * math.cos(angle)


def torch_rng(seed: SupportsIndex) -> TorchGenerator:
    """Make a generator that yields what PyTorch's CPU generator yields after ``torch.manual_seed(seed)``.

    Give it as ``rng=`` to layers and to training, and the weights and the order of the data are those of a
    PyTorch script with that seed. Dropout masks are not PyTorch's.

    Parameters
    ----------
    seed : int
        Its lowest 32 bits count, as there.

    Returns
    -------
    TorchGenerator
        With ``random`` (torch.rand), ``uniform``, ``normal``, ``standard_normal`` (torch.randn), ``randperm``,
        ``integers`` (torch.randint), ``permutation`` (the order in which a DataLoader shuffles), ``get_state``
        and ``set_state``. Floating-point draws take ``dtype=``, float32 or float64; these are different streams:
        float64 numbers are not converted float32 numbers.

    Raises
    ------
    TypeError
        ``seed`` is not an int.
    ValueError
        ``seed`` does not fit into 64 bits.

    Notes
    -----
    Uniform numbers, integers, permutations and fewer than 16 normals at once are PyTorch's to the bit. Longer
    draws of normals agree to 3 ulp in float32 (about 5e-7) and to 2 ulp in float64. It is the stream of
    PyTorch 2.13 on a CPU.

    References
    ----------
    Matsumoto and Nishimura, "Mersenne Twister", 1998; Box and Muller, "A Note on the Generation of Random
    Normal Deviates", 1958.

    Examples
    --------
    The numbers of ``torch.manual_seed(0); torch.rand(3)``:

    >>> import selfattn as sa
    >>> sa.torch_rng(0).random(3).round(4)
    array([0.4963, 0.7682, 0.0885], dtype=float32)
    >>> sa.torch_rng(0).randperm(5)
    array([4, 0, 1, 3, 2])
    """
    return TorchGenerator(seed)


def _shape(size: Size) -> tuple[int, ...]:
    if size is None:
        return ()
    shape = tuple(map(operator.index, size)) if isinstance(size, Sequence) else (operator.index(size),)
    if min(shape, default=0) < 0:
        raise ValueError(f"size must not be negative, not {shape}")
    return shape


def _float_dtype(dtype: npt.DTypeLike) -> np.dtype[Any]:
    dtype = np.dtype(dtype)
    if dtype not in (np.float32, np.float64):
        raise TypeError(f"dtype must be float32 or float64, not {dtype}")
    return dtype


def _box_muller(uniforms: Array, mean: float, std: float) -> Array:
    """Turn blocks of 16 uniform numbers into normal ones: 8 radii, then 8 angles, in the uniforms' dtype."""
    blocks = uniforms.reshape(-1, 2, _LONG // 2)
    number = uniforms.dtype.type
    radius = np.sqrt(number(-2) * np.log(number(1) - blocks[:, 0]))
    angle = number(2 * math.pi) * blocks[:, 1]
    normals = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    shifted: Array = normals * number(std) + number(mean)
    return shifted.reshape(-1)


# ---------------------------------------------------------------------------------------- a fused multiply-add


def _fma(x: Array, y: Any, z: Any) -> Array:
    """Compute x·y + z with one rounding, as the processor's FMA instruction does, from ordinary operations.

    Boldo and Melquiond, "Emulation of FMA and Correctly Rounded Sums", 2008, algorithm 1 (Fma). Intermediate sums are
    rounded to odd, so that the last rounding, to nearest, is not a double rounding.
    """
    wide_x, wide_y, wide_z = (np.asarray(t, np.float64) for t in (x, y, z))
    if x.dtype == np.float32:  # the product is exact in float64
        return _odd_sum(wide_x * wide_y, wide_z).astype(np.float32)
    high, low = _two_product(wide_x, wide_y)
    top, rest = _two_sum(wide_z, low)
    total, lost = _two_sum(high, top)
    result: Array = total + _odd_sum(rest, lost)
    return result


def _two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a + b rounded, and the rounding error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Return a·b rounded, and the rounding error (Dekker)."""

    def halves(t: Array) -> tuple[Array, Array]:
        scaled = t * 134217729.0  # 2**27 + 1
        high = scaled - (scaled - t)
        return high, t - high

    product = a * b
    (a1, a2), (b1, b2) = halves(a), halves(b)
    return product, ((a1 * b1 - product) + a1 * b2 + a2 * b1) + a2 * b2


def _odd_sum(a: Array, b: Array) -> Array:
    """Add, and round to odd: an inexact sum becomes the neighbour whose last bit is 1."""
    total, lost = _two_sum(a, b)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where(lost > 0, np.inf, -np.inf)
    rounded: Array = np.where((lost != 0) & even, np.nextafter(total, towards), total)
    return rounded
