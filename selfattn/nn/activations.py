"""Activations: functions of each number by itself, without parameters."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

import selfattn as sa
from selfattn import _core
from selfattn._check import Array, as_gradient, as_input, layer_dtype
from selfattn.functional._products import widened
from selfattn.nn.module import Gradients, Module, Pullback


class Activation(Module):
    """The base of the activations. A subclass defines the function and its gradient, of float32 or float64."""

    def __init__(self, *, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = layer_dtype(dtype)

    def _apply(self, x: Array) -> Array:
        raise NotImplementedError

    def _back(self, x: Array, dy: Array) -> Array:
        raise NotImplementedError

    @np.errstate(all="ignore")  # infinities and NaN show in the result
    def forward(self, x: npt.ArrayLike) -> Array:
        """Compute the function of each number.

        Parameters
        ----------
        x : array_like
            Of any shape.

        Returns
        -------
        ndarray, in the shape and dtype of ``x``
            It is computed in float32 for 16 bits.
        """
        array = as_input(x, self.dtype)
        return np.asarray(self._apply(widened(array)), array.dtype)

    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``.

        Parameters
        ----------
        x : array_like

        Returns
        -------
        y : ndarray, in the shape and dtype of ``x``
        pullback : callable
            ``dx, {} = pullback(dy)``, as :class:`Module` says.
        """
        array = as_input(x, self.dtype)
        y = self.forward(array)

        @np.errstate(all="ignore")
        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            d = widened(as_gradient(dy, y))
            return np.asarray(self._back(widened(array), d), array.dtype), {}

        return y, pullback


class ReLU(Activation):
    """max(x, 0), as ``torch.nn.ReLU``. The gradient at 0 is 0.

    Parameters
    ----------
    dtype : dtype, default float32
        The dtype of lists and integers.

    Examples
    --------
    >>> from selfattn import nn
    >>> y, pullback = nn.ReLU().vjp([-1.0, 0.0, 2.0])
    >>> y, pullback([1.0, 1.0, 1.0])[0]
    (array([0., 0., 2.], dtype=float32), array([0., 0., 1.], dtype=float32))
    """

    def _apply(self, x: Array) -> Array:
        return np.maximum(x, 0)

    def _back(self, x: Array, dy: Array) -> Array:
        return np.where(x <= 0, x.dtype.type(0), dy)  # at NaN dy, as in PyTorch


class Tanh(Activation):
    """The hyperbolic tangent, as ``torch.nn.Tanh``.

    Parameters
    ----------
    dtype : dtype, default float32
        The dtype of lists and integers.

    Examples
    --------
    >>> from selfattn import nn
    >>> y, pullback = nn.Tanh().vjp([0.0, 1.0])
    >>> y.round(4), pullback([1.0, 1.0])[0].round(4)
    (array([0.    , 0.7616], dtype=float32), array([1.  , 0.42], dtype=float32))
    """

    def _apply(self, x: Array) -> Array:
        return np.asarray(np.tanh(x))

    def _back(self, x: Array, dy: Array) -> Array:
        return np.asarray(dy * (1 - np.tanh(x) ** 2))


class SiLU(Activation):
    """x·σ(x) with σ(x) = 1 / (1 + exp(−x)), as ``torch.nn.SiLU``; also called swish.

    Parameters
    ----------
    dtype : dtype, default float32
        The dtype of lists and integers.

    References
    ----------
    Elfwing, Uchibe and Doya, "Sigmoid-Weighted Linear Units for Neural Network Function Approximation in Reinforcement
    Learning", 2017, section 2.

    Examples
    --------
    >>> from selfattn import nn
    >>> y, pullback = nn.SiLU().vjp([0.0, 1.0])
    >>> y.round(4), pullback([1.0, 1.0])[0].round(4)
    (array([0.    , 0.7311], dtype=float32), array([0.5   , 0.9277], dtype=float32))
    """

    def _apply(self, x: Array) -> Array:
        return np.asarray(x / (1 + np.exp(-x)))

    def _back(self, x: Array, dy: Array) -> Array:
        gate = 1 / (1 + np.exp(-x))
        return np.asarray(dy * gate * (1 + x * (1 - gate)))


class GELU(Activation):
    """x·Φ(x), Φ the distribution of the standard normal, as ``torch.nn.GELU``.

    Parameters
    ----------
    approximate : {"none", "tanh"}, default "none"
        "tanh" takes Φ(x) ≈ (1 + tanh(√(2/π)·(x + 0.044715·x³))) / 2, as GPT-2 does.
    dtype : dtype, default float32
        The dtype of lists and integers.

    See Also
    --------
    selfattn.gelu

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    Examples
    --------
    >>> from selfattn import nn
    >>> y, pullback = nn.GELU().vjp([0.0, 1.0])
    >>> y.round(4), pullback([1.0, 1.0])[0].round(4)
    (array([0.    , 0.8413], dtype=float32), array([0.5   , 1.0833], dtype=float32))
    """

    def __init__(
        self, approximate: Literal["none", "tanh"] = "none", *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(dtype=dtype)
        if approximate not in ("none", "tanh"):
            raise ValueError(f'approximate must be "none" or "tanh", not {approximate!r}')
        self.approximate = approximate

    def extra_repr(self) -> str:
        """Return the kind."""
        return f"approximate={self.approximate!r}"

    def _apply(self, x: Array) -> Array:
        return sa.gelu(x, self.approximate)

    def _back(self, x: Array, dy: Array) -> Array:
        return _core._gelu_backward(x, dy, self.approximate)
