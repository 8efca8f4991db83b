"""Rotary positions as configurations describe them: frequencies, and tables of their angles.

Everything is computed in float32 in the order of Transformers, so that the angles of far positions equal those of
Transformers. Powers, cosines and sines are rounded from float64: they equal Transformers' more often than NumPy's in
float32 do, and no CPU has its own.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from selfattn._check import Entries
from selfattn.engine.transformer import Rotary

MOST_WIDTH = 2**16  # the largest width of a head, so that a short file cannot fill memory
NEW, OLD = "rope_parameters", "rope_scaling"  # in configurations of Transformers 5, and before


class Rope(NamedTuple):
    """The frequency of each pair of elements of a head."""

    frequencies: tuple[float, ...]  # radians per position, float32
    factor: float = 1.0  # multiplies cosines and sines

    def rotary(self, longest: int, dtype: Any, interleaved: bool = False) -> Rotary:
        """Return the angles of the positions 0 … longest − 1."""
        cos, sin = _tables(self, longest, np.dtype(dtype).name)
        return Rotary(cos, sin, interleaved)


@functools.lru_cache(8)
def _tables(rope: Rope, longest: int, dtype: str) -> tuple[Any, Any]:
    frequencies = np.array(rope.frequencies, np.float32)
    angles = (np.arange(longest, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
    cos, sin = (of(angles).astype(np.float32) * np.float32(rope.factor) for of in (np.cos, np.sin))
    return cos.astype(dtype), sin.astype(dtype)


def read_rope(config: Entries, width: int, longest: int, usual: float = 10000.0) -> Rope:
    """Read rotary positions for heads of a width.

    ``longest`` is the number max_position_embeddings, ``usual`` rope_theta by default.

    The types are default, linear, dynamic, yarn, llama3, and longrope with the same factors near and far; another
    type or key is a ValueError. dynamic differs from default only beyond max_position_embeddings, which is never used
    here.
    """
    new, old, before = config.raw(NEW), config.raw(OLD), config.raw("original_max_position_embeddings")
    found: Any = old or new or {}  # in Transformers' order
    name = OLD if old else NEW
    where = f"{config.where}: {name}"
    if not isinstance(found, dict):
        raise config.error(f"{name} must be an object, not {found!r}")
    own = config.inner(name, {key: value for key, value in found.items() if value is not None})
    theta = own.number("rope_theta", config.number("rope_theta", usual))
    config.only("partial_rotary_factor", 1.0)
    own.only("partial_rotary_factor", 1.0)
    kind, spelled = own.raw("rope_type"), own.raw("type")
    kind = kind or spelled or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(KINDS)
        raise own.error(f"the type {kind!r} of rotary positions is not supported; there are {known}")
    if theta <= 1:
        raise config.error(f"rope_theta must be above 1, not {theta}")
    if width % 2:
        raise config.error(f"rotary positions need heads of an even width, not {width}")
    if width > MOST_WIDTH:
        raise config.error(f"heads of a width of {width}; more than {MOST_WIDTH} are not read")
    periods = _periods(width, theta)
    if kind != "default":
        own.raw("original_max_position_embeddings")  # files have the key even if nothing reads it
        if before is not None:
            own.values["original_max_position_embeddings"] = before
    try:
        with np.errstate(all="ignore"):
            rope = KINDS[kind](own, periods, theta, longest)
    except ArithmeticError as error:
        raise ValueError(f"{where} cannot be computed: {error}") from None
    own.finish()
    if not np.isfinite(rope.frequencies).all() or not 0 < rope.factor < math.inf:
        raise ValueError(f"{where} gives frequencies or a factor that are not finite")
    return rope


def plain_rope(width: int, theta: float) -> Rope:
    """Return the frequencies θ^(−2i/width) of heads of a width (Su et al., "RoFormer", 2021, equation 15)."""
    return Rope(_tuple(1 / _periods(width, theta)))


def _periods(width: int, theta: float) -> Any:
    exponents = np.arange(0, width, 2).astype(np.float32) / np.float32(width)
    return (float(np.float32(theta)) ** exponents.astype(np.float64)).astype(np.float32)


def _tuple(frequencies: Any) -> tuple[float, ...]:
    return tuple(np.asarray(frequencies, np.float32).tolist())


def _default(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    return Rope(_tuple(1 / periods))


def _linear(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    """Divide positions by a factor (Chen et al., 2023)."""
    return Rope(_tuple(1 / periods / np.float32(own.number("factor"))))


def _dynamic(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    own.number("factor")
    return _default(own, periods, theta, longest)


def _yarn(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    """Divide slow frequencies, keep fast ones, and interpolate between them (Peng et al., "YaRN", 2023, section 3)."""
    factor = own.number("factor")
    before = own.size("original_max_position_embeddings", longest)
    fast, slow = own.number("beta_fast", 32.0), own.number("beta_slow", 1.0)
    whole = own.flag("truncate", True)
    both = own.raw("mscale"), own.raw("mscale_all_dim")
    if own.raw("attention_factor") is not None:
        attention = own.number("attention_factor")
    elif all(both):
        attention = _yarn_scale(factor, own.number("mscale"))
        attention /= _yarn_scale(factor, own.number("mscale_all_dim"))
    else:
        attention = _yarn_scale(factor, 1.0)
    width = 2 * len(periods)

    def dimension(turns: float) -> float:
        """Return the index of the pair that makes this number of turns within the original length."""
        return width * math.log(before / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(fast), dimension(slow)
    if whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    place = (np.arange(len(periods), dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    ramp = np.clip(place, 0, 1)
    kept = np.float32(1) - ramp
    slowed = 1 / (np.float32(factor) * periods)
    return Rope(_tuple(slowed * (1 - kept) + 1 / periods * kept), attention)


def _yarn_scale(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    """Lengthen long waves, keep short ones, and interpolate between them, as Llama 3.1 does."""
    factor = np.float32(own.number("factor"))
    low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
    before = own.size("original_max_position_embeddings", longest)
    if not low < high:
        raise ValueError(f"{own.where}: low_freq_factor {low} must be below high_freq_factor {high}")
    frequencies = (1 / periods).astype(np.float32)
    waves = np.float32(2 * math.pi) / frequencies
    smooth = (np.float32(before) / waves - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    long, short = waves > np.float32(before / low), waves < np.float32(before / high)
    return Rope(_tuple(np.where(long, frequencies / factor, np.where(short, frequencies, between))))


def _longrope(own: Entries, periods: Any, theta: float, longest: int) -> Rope:
    """Divide each frequency by a factor (Ding et al., "LongRoPE", 2024); a GGUF file may have such factors too."""
    near, far = own.raw("short_factor"), own.raw("long_factor")
    if near != far:
        raise ValueError(
            f"{own.where}: longrope is not supported if long_factor differs from short_factor: cached keys "
            "would change while a text grows"
        )
    numbers = isinstance(near, list) and all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < math.inf for x in near
    )
    if not numbers or len(near) != len(periods):
        raise ValueError(f"{own.where}: short_factor must be {len(periods)} positive numbers")
    before = own.size("original_max_position_embeddings", longest)
    factor = own.number("factor", longest / before)
    if own.raw("attention_factor") is not None:
        attention = own.number("attention_factor")
    else:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(before))
    return Rope(_tuple(1 / (np.array(near, np.float32) * periods)), attention)


KINDS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
