"""LayerNorm: mean 0 and variance 1 over the last axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import selfattn as sa
from selfattn._check import Array, check_number
from selfattn.nn._norm import Norm


class LayerNorm(Norm):
    """``(x − mean) / sqrt(variance + eps) * weight + bias`` over the last axes.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last axes of the input.
    eps : float, default 1e-5
    elementwise_affine : bool, default True
        Without it there are no parameters.
    bias : bool, default True
    dtype : dtype, default float32

    Attributes
    ----------
    weight, bias : ndarray, shape normalized_shape, or None
        1 and 0 at birth.

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equations 3 and 4.

    Examples
    --------
    >>> from selfattn import nn
    >>> nn.LayerNorm(3)([[1.0, 2.0, 3.0]]).round(4)
    array([[-1.2247,  0.    ,  1.2247]], dtype=float32)
    """

    eps: float
    bias: Array | None

    _function, _function_vjp = staticmethod(sa.layer_norm), staticmethod(sa.layer_norm_vjp)
    _names = ("weight", "bias")

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        weight, shift = (1.0 if elementwise_affine else None, 0.0 if elementwise_affine and bias else None)
        super().__init__(normalized_shape, check_number("eps", eps), dtype, (weight, shift))
