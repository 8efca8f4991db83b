"""Layers that are functions of single rows or numbers: LayerNorm, RMSNorm and the activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_input, check_gradient, check_number, check_size, layer_dtype, one_of
from selfattn._docs import copy_doc
from selfattn.functional import gelu, layer_norm, layer_norm_vjp, rms_norm, rms_norm_vjp
from selfattn.functional._products import widened
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback


class Norm(Module):
    """The base of the norms: they normalise the last axes; each place in them has a weight, and perhaps a bias.

    A subclass has the function and its vjp, which take x, the shape, the parameters of ``_names`` and eps.
    """

    _function: ClassVar[Callable[..., Any]]
    _function_vjp: ClassVar[Callable[..., Any]]
    weight: Array | None
    _names: ClassVar[tuple[str, ...]]  # a subclass of a norm may have more parameters

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None,
        dtype: npt.DTypeLike,
        initial: tuple[float | None, ...],
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.normalized_shape = tuple(check_size("normalized_shape", size) for size in sizes)
        self.eps = eps
        self.dtype = layer_dtype(dtype)
        for name, number in zip(self._names, initial, strict=True):
            filled = None if number is None else np.full(self.normalized_shape, number, self.dtype)
            self.register_parameter(name, filled)

    def extra_repr(self) -> str:
        """Return shape and eps."""
        return f"{self.normalized_shape}, eps={self.eps}"

    def _arguments(self, x: npt.ArrayLike) -> tuple[Any, ...]:
        parameters = (getattr(self, name) for name in self._names)
        return as_input(x, self.dtype), self.normalized_shape, *parameters, self.eps

    def forward(self, x: npt.ArrayLike) -> Array:
        """Normalise.

        Parameters
        ----------
        x : array_like, shape (..., *normalized_shape)

        Returns
        -------
        ndarray, in the shape of ``x``
            In the dtype to which ``x`` and the parameters promote.

        Raises
        ------
        ValueError
            The shape of ``x`` does not end in ``normalized_shape``.
        """
        y: Array = self._function(*self._arguments(x))
        return y

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``."""
        y, norm_pullback = self._function_vjp(*self._arguments(x))

        def backward(dy: Array) -> tuple[Array, Gradients]:
            grads = norm_pullback(dy)
            found = {name: getattr(grads, name) for name in self._names}
            return grads.x, {name: gradient for name, gradient in found.items() if gradient is not None}

        return y, checked_pullback(self, y, [self.weight], backward)


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
        Initially 1 and 0.

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

    _function, _function_vjp = staticmethod(layer_norm), staticmethod(layer_norm_vjp)
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


class RMSNorm(Norm):
    """``x / sqrt(mean(x²) + eps) * weight`` over the last axes.

    Parameters
    ----------
    normalized_shape : int or sequence of int
        The last axes of the input.
    eps : float, optional
        By default the machine epsilon of the precision of the computation.
    elementwise_affine : bool, default True
        Without it there are no parameters.
    dtype : dtype, default float32

    Attributes
    ----------
    weight : ndarray, shape normalized_shape, or None
        Initially 1.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> from selfattn import nn
    >>> nn.RMSNorm(2)([[3.0, 4.0]]).round(4)
    array([[0.8485, 1.1314]], dtype=float32)
    """

    _function, _function_vjp = staticmethod(rms_norm), staticmethod(rms_norm_vjp)
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


class Activation(Module):
    """The base of the activations. A subclass defines the function and its gradient, of float32 or float64."""

    def __init__(self, *, dtype: npt.DTypeLike = np.float32) -> None:
        self.dtype = layer_dtype(dtype)

    def _apply(self, x: Array) -> Array:
        raise NotImplementedError

    def _back(self, x: Array, dy: Array) -> Array:
        raise NotImplementedError

    @np.errstate(all="ignore")  # the result shows infinities and NaN
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

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``."""
        array = as_input(x, self.dtype)
        y = self.forward(array)

        @np.errstate(all="ignore")
        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            d = widened(check_gradient(dy, y))
            return np.asarray(self._back(widened(array), d), array.dtype), {}

        return y, pullback


class ReLU(Activation):
    """max(x, 0), as ``torch.nn.ReLU``. The gradient at 0 is 0.

    Parameters
    ----------
    dtype : dtype of lists and integers, default float32

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
        return np.where(x <= 0, x.dtype.type(0), dy)  # if x is NaN, dx is dy, as in PyTorch


class Tanh(Activation):
    """The hyperbolic tangent, as ``torch.nn.Tanh``.

    Parameters
    ----------
    dtype : dtype of lists and integers, default float32

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
    dtype : dtype of lists and integers, default float32

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
    """x·Φ(x), where Φ is the standard normal distribution function, as ``torch.nn.GELU``.

    Parameters
    ----------
    approximate : {"none", "tanh"}, default "none"
        "tanh" takes Φ(x) ≈ (1 + tanh(√(2/π)·(x + 0.044715·x³))) / 2, as GPT-2 does.
    dtype : dtype of lists and integers, default float32

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

    _in_repr = ("approximate",)

    def __init__(
        self, approximate: Literal["none", "tanh"] = "none", *, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(dtype=dtype)
        self.approximate = one_of("approximate", approximate, ("none", "tanh"))

    def _apply(self, x: Array) -> Array:
        return gelu(x, self.approximate)

    def _back(self, x: Array, dy: Array) -> Array:
        return _core._gelu_backward(x, dy, self.approximate)
