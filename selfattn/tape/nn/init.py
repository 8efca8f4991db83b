"""Filling parameters, as ``torch.nn.init``: with the same numbers for a seed, to the last bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from selfattn.nn import init as arrays
from selfattn.nn.init import calculate_gain
from selfattn.tape.creation import source
from selfattn.tape.tensors import Tensor

__all__ = [
    "calculate_gain",
    "constant_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
]


def _filling(function: Callable[..., Any], draws: bool) -> Callable[..., Tensor]:
    def fill(tensor: Tensor, *args: Any, generator: Any = None, **options: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{function.__name__} fills a Tensor, not {type(tensor).__name__}")
        if draws:
            options["rng"] = source(generator)
        function(tensor._array, *args, **options)
        tensor._versions[0] += 1
        return tensor

    fill.__name__ = fill.__qualname__ = function.__name__
    fill.__doc__ = function.__doc__ and function.__doc__.partition("\n\n    Examples")[0]
    return fill


uniform_, normal_, xavier_uniform_, xavier_normal_, kaiming_uniform_, kaiming_normal_ = (
    _filling(function, True)
    for function in (
        arrays.uniform_,
        arrays.normal_,
        arrays.xavier_uniform_,
        arrays.xavier_normal_,
        arrays.kaiming_uniform_,
        arrays.kaiming_normal_,
    )
)
constant_, ones_, zeros_ = (
    _filling(function, False) for function in (arrays.constant_, arrays.ones_, arrays.zeros_)
)


def _eye(tensor: Any) -> None:
    if tensor.ndim != 2:
        raise ValueError(f"eye_ fills a matrix, not a tensor of {tensor.ndim} axes")
    tensor[...] = np.eye(*tensor.shape)


def _orthogonal(tensor: Any, gain: float = 1.0, *, rng: Any) -> None:
    if tensor.ndim < 2:
        raise ValueError("Only tensors with 2 or more dimensions are supported")
    rows = len(tensor)
    flat = rng.standard_normal((rows, tensor.size // rows), tensor.dtype)
    q, r = np.linalg.qr(flat.T if flat.shape[0] < flat.shape[1] else flat)
    q = q * np.sign(np.diag(r))
    tensor[...] = gain * (q.T if flat.shape[0] < flat.shape[1] else q).reshape(tensor.shape)


def _trunc_normal(
    tensor: Any, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, *, rng: Any
) -> None:
    low, high = tensor.dtype.type(a), tensor.dtype.type(b)
    found = rng.normal(mean, std, tensor.shape, tensor.dtype)
    while (out := (found < low) | (found > high)).any():
        found = np.where(out, rng.normal(mean, std, tensor.shape, tensor.dtype), found)
    tensor[...] = found


_eye.__name__, _orthogonal.__name__, _trunc_normal.__name__ = "eye_", "orthogonal_", "trunc_normal_"
_eye.__doc__ = "Fill a matrix with ones on its diagonal and zeros elsewhere."
_orthogonal.__doc__ = "Fill with a matrix of orthogonal rows or columns; Saxe et al., 2013."
_trunc_normal.__doc__ = (
    "Fill from the normal distribution between a and b: PyTorch's numbers, if most are there."
)
eye_, orthogonal_, trunc_normal_ = (
    _filling(_eye, False),
    _filling(_orthogonal, True),
    _filling(_trunc_normal, True),
)
