"""Dropout: random zeros while training."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_gradient, as_input, check_probability, layer_dtype
from selfattn.nn import init
from selfattn.nn.module import Gradients, Module, Pullback


class Dropout(Module):
    """Set each number to zero with probability p, and divide the others by 1 − p; only while ``training``.

    Parameters
    ----------
    p : float, default 0.5
        Between 0 and 1, both included.
    dtype : dtype, default float32
        The dtype of lists and integers.
    rng : int, Generator or torch_rng, optional
        Every call draws from it. The zeros are not in PyTorch's places.

    References
    ----------
    Srivastava et al., "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014, section 10.

    Examples
    --------
    >>> from selfattn import nn
    >>> layer = nn.Dropout(0.5, rng=0)
    >>> layer([1.0, 2.0, 3.0, 4.0])
    array([2., 0., 0., 0.], dtype=float32)
    >>> layer.eval()([1.0, 2.0, 3.0, 4.0])
    array([1., 2., 3., 4.], dtype=float32)
    """

    def __init__(self, p: float = 0.5, *, dtype: npt.DTypeLike = np.float32, rng: init.Rng = None) -> None:
        self.p = check_probability("p", p)
        self.dtype = layer_dtype(dtype)
        self.rng = init.as_generator(rng)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"

    def forward(self, x: npt.ArrayLike) -> Array:
        """Drop from an array of any shape.

        Parameters
        ----------
        x : array_like

        Returns
        -------
        ndarray, in the shape and dtype of ``x``
            A new array, also without training.
        """
        x = as_input(x, self.dtype)
        return _times(x, self._factors(x))

    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``, with zeros in the same places.

        Parameters
        ----------
        x : array_like

        Returns
        -------
        y : ndarray, in the shape and dtype of ``x``
        pullback : callable
            ``dx, {} = pullback(dy)``, as :class:`Module` says.
        """
        x = as_input(x, self.dtype)
        factors = self._factors(x)
        y = _times(x, factors)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            return _times(as_gradient(dy, y), factors), {}

        return y, pullback

    def _factors(self, x: Array) -> Array | None:
        """Return 0 or 1/(1 − p) for each element; None where nothing is dropped."""
        if not self.training or self.p == 0:
            return None
        if self.p == 1:
            return np.zeros_like(x)
        keep: Array = self.rng.random(x.shape, np.float64) >= self.p
        factors: Array = keep.astype(x.dtype)
        factors *= x.dtype.type(1 / (1 - self.p))
        return factors


@np.errstate(all="ignore")
def _times(x: Array, factors: Array | None) -> Array:
    return x.copy() if factors is None else np.asarray(x * factors)  # no warning for infinity times 0
