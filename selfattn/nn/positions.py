"""Sinusoidal positions, added to embeddings."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from selfattn.functional._arguments import check_size
from selfattn.nn._arrays import Array, Gradients, Pullback, as_gradient, as_sequence, float_dtype
from selfattn.nn._docs import documented_vjp
from selfattn.nn.module import Module


class SinusoidalPositions(Module):
    """Add to row t of a sequence: sin(t·10000^(−i/d)) in column i = 0, 2, …, and the cosine in the next.

    Parameters
    ----------
    d_model : int
        The width d, even.
    max_len : int, default 5000
        The longest sequence.
    dtype : dtype, default float32

    Attributes
    ----------
    table : ndarray, shape (max_len, d_model)
        Computed in float64, then rounded. It is no parameter: not trained, and not in the ``state_dict``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3.5.

    Examples
    --------
    >>> from selfattn import nn
    >>> nn.SinusoidalPositions(4)([[0.0] * 4] * 2).round(4)
    array([[0.    , 1.    , 0.    , 1.    ],
           [0.8415, 0.5403, 0.01  , 1.    ]], dtype=float32)
    """

    def __init__(self, d_model: int, max_len: int = 5000, *, dtype: npt.DTypeLike = np.float32) -> None:
        self.d_model = check_size("d_model", d_model)
        self.max_len = check_size("max_len", max_len)
        if d_model % 2:
            raise ValueError(f"d_model must be even, as sines and cosines come in pairs, not {d_model}")
        kind = float_dtype(dtype)
        angles = np.arange(max_len)[:, None] * np.exp(
            np.arange(0, d_model, 2) * (-math.log(10000.0) / d_model)
        )
        table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(max_len, d_model)
        self.table: Array = table.astype(kind)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"d_model={self.d_model}, max_len={self.max_len}"

    def forward(self, x: npt.ArrayLike) -> Array:
        """Add the positions to (..., L, d_model).

        Parameters
        ----------
        x : array_like, shape (..., L, d_model)

        Returns
        -------
        ndarray, shape (..., L, d_model)
            A new array, in the dtype to which ``x`` and ``table`` promote.

        Raises
        ------
        ValueError
            L is above ``max_len``, or the width is another.
        """
        x = as_sequence(x, self.d_model, self.table.dtype)
        length = x.shape[-2]
        if length > self.max_len:
            raise ValueError(f"x has {length} positions, more than max_len={self.max_len}")
        y: Array = x + self.table[:length]
        return y

    @documented_vjp(None, keeps=False)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``; ``dx`` is a copy of ``dy``."""
        x = as_sequence(x, self.d_model, self.table.dtype)
        y = self(x)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            return as_gradient(dy, y).astype(x.dtype), {}

        return y, pullback
