"""Filling parameters with random numbers: uniform, normal, Xavier and Kaiming, as ``torch.nn.init`` does.

Each function writes into the array and returns it. ``rng`` is an int, a :class:`numpy.random.Generator`, or
``selfattn.torch_rng(seed)``, whose numbers are those of PyTorch; None takes fresh entropy. float16 and bfloat16 are
drawn in float32 and rounded.
"""

from __future__ import annotations

import math
import operator
from typing import Any, Literal, TypeAlias

import numpy as np

from selfattn._check import FLOATS, Array, check_number, one_of
from selfattn.random import TorchGenerator

__all__ = [
    "calculate_gain",
    "constant_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]

Generator: TypeAlias = np.random.Generator | TorchGenerator
Rng: TypeAlias = int | Generator | None
Fan: TypeAlias = Literal["fan_in", "fan_out"]


def as_generator(rng: Any) -> Generator:
    """Return the generator of ``rng``: an int that is not negative, a generator, or None for fresh entropy."""
    if isinstance(rng, np.random.Generator | TorchGenerator):
        return rng
    if rng is not None and (isinstance(rng, bool | np.bool_) or not hasattr(rng, "__index__")):
        raise TypeError(
            "rng must be an int, a numpy.random.Generator, a selfattn.torch_rng or None, "
            f"not {type(rng).__name__}"
        )
    seed = None if rng is None else operator.index(rng)
    if seed is not None and seed < 0:
        raise ValueError(f"rng must not be negative, not {rng}")
    return np.random.default_rng(seed)


def uniform_(tensor: Array, a: float = 0.0, b: float = 1.0, *, rng: Rng = None) -> Array:
    """Fill with numbers from U[a, b).

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> uniform_(np.empty(2, np.float32), rng=sa.torch_rng(0)).round(4)
    array([0.4963, 0.7682], dtype=float32)
    """
    generator, wide = as_generator(rng), _drawn_dtype(tensor)
    a, b = check_number("a", a), check_number("b", b)
    if isinstance(generator, TorchGenerator):
        tensor[...] = generator.uniform(a, b, tensor.shape, wide)
    else:
        tensor[...] = a + (b - a) * generator.random(tensor.shape, wide)
    return tensor


def normal_(tensor: Array, mean: float = 0.0, std: float = 1.0, *, rng: Rng = None) -> Array:
    """Fill with numbers from the normal distribution N(mean, std²)."""
    generator, wide = as_generator(rng), _drawn_dtype(tensor)
    mean, std = check_number("mean", mean), check_number("std", std)
    if isinstance(generator, TorchGenerator):
        tensor[...] = generator.normal(mean, std, tensor.shape, tensor.dtype.newbyteorder("="))
    else:
        tensor[...] = mean + std * generator.standard_normal(tensor.shape, wide)
    return tensor


def constant_(tensor: Array, val: float) -> Array:
    """Fill with one number."""
    _drawn_dtype(tensor)
    tensor[...] = check_number("val", val)
    return tensor


def ones_(tensor: Array) -> Array:
    """Fill with ones."""
    return constant_(tensor, 1.0)


def zeros_(tensor: Array) -> Array:
    """Fill with zeros."""
    return constant_(tensor, 0.0)


def xavier_uniform_(tensor: Array, gain: float = 1.0, *, rng: Rng = None) -> Array:
    """Fill from U(−a, a), a = gain · √(6 / (fan_in + fan_out)).

    A weight is (fan_out, fan_in).

    References
    ----------
    Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks", 2010,
    equation 16.
    """
    bound = math.sqrt(3.0) * _xavier_std(tensor, gain)
    return uniform_(tensor, -bound, bound, rng=rng)


def xavier_normal_(tensor: Array, gain: float = 1.0, *, rng: Rng = None) -> Array:
    """Fill from N(0, std²), std = gain · √(2 / (fan_in + fan_out)); Glorot and Bengio, 2010, equation 12."""
    return normal_(tensor, 0.0, _xavier_std(tensor, gain), rng=rng)


def kaiming_uniform_(
    tensor: Array, a: float = 0.0, mode: Fan = "fan_in", nonlinearity: str = "leaky_relu", *, rng: Rng = None
) -> Array:
    """Fill from U(−bound, bound), bound = gain · √(3 / fan).

    ``a`` is the slope of a leaky ReLU's negative half, which the gain depends on.

    References
    ----------
    He et al., "Delving Deep into Rectifiers", 2015, equation 14.
    """
    bound = math.sqrt(3.0) * _kaiming_std(tensor, a, mode, nonlinearity)
    return uniform_(tensor, -bound, bound, rng=rng)


def kaiming_normal_(
    tensor: Array, a: float = 0.0, mode: Fan = "fan_in", nonlinearity: str = "leaky_relu", *, rng: Rng = None
) -> Array:
    """Fill from N(0, std²), std = gain / √fan; He et al., 2015, equation 14."""
    return normal_(tensor, 0.0, _kaiming_std(tensor, a, mode, nonlinearity), rng=rng)


def calculate_gain(nonlinearity: str, param: float | None = None) -> float:
    """Return the gain of weights with which activations keep their variance through a non-linearity.

    Parameters
    ----------
    nonlinearity : {"linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu"}
    param : float, optional
        The slope of ``"leaky_relu"``, 0.01 by default.

    Examples
    --------
    >>> round(calculate_gain("relu"), 4)
    1.4142
    """
    gains = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3, "relu": math.sqrt(2.0), "selu": 0.75}
    if nonlinearity == "leaky_relu":
        slope = 0.01 if param is None else check_number("param", param)
        return math.sqrt(2.0 / (1.0 + slope**2))
    if nonlinearity not in gains:
        raise ValueError(f"nonlinearity must be one of {[*gains, 'leaky_relu']}, not {nonlinearity!r}")
    return gains[nonlinearity]


def _drawn_dtype(tensor: Array) -> Any:
    """Return the dtype in which the numbers of an array are drawn; refuse anything but an array of floats."""
    if not isinstance(tensor, np.ndarray) or tensor.dtype.name not in FLOATS:
        raise TypeError(f"tensor must be an ndarray of floats, which is filled, not {tensor!r:.80}")
    return np.float64 if tensor.dtype.char == "d" else np.float32


def _fans(tensor: Array) -> tuple[int, int]:
    """Return (fan_in, fan_out) of a weight (fan_out, fan_in, ...)."""
    _drawn_dtype(tensor)
    if tensor.ndim < 2:
        raise ValueError(f"fans need a weight of at least 2 dims, not shape {tensor.shape}")
    receptive = math.prod(tensor.shape[2:])
    return tensor.shape[1] * receptive, tensor.shape[0] * receptive


def _xavier_std(tensor: Array, gain: float) -> float:
    return check_number("gain", gain) * math.sqrt(2.0 / float(sum(_fans(tensor))))


def _kaiming_std(tensor: Array, a: float, mode: str, nonlinearity: str) -> float:
    fan = _fans(tensor)[one_of("mode", mode, ("fan_in", "fan_out")) == "fan_out"]
    return calculate_gain(nonlinearity, a) / math.sqrt(fan)
