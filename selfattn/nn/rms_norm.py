"""RMSNorm: mean square 1 over the last axes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

import selfattn as sa
from selfattn._check import check_number
from selfattn.nn._norm import Norm


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axes.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last axes of the input.
    eps : float, optional
        The machine epsilon of the precision that is computed in, by default.
    elementwise_affine : bool, default True
        Without it there are no parameters.
    dtype : dtype, default float32

    Attributes
    ----------
    weight : ndarray, shape normalized_shape, or None
        1 at birth.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> from selfattn import nn
    >>> nn.RMSNorm(2)([[3.0, 4.0]]).round(4)
    array([[0.8485, 1.1314]], dtype=float32)
    """

    _function, _function_vjp = staticmethod(sa.rms_norm), staticmethod(sa.rms_norm_vjp)
    _names = ("weight",)

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        *,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        eps = None if eps is None else check_number("eps", eps)
        super().__init__(normalized_shape, eps, dtype, (1.0 if elementwise_affine else None,))
