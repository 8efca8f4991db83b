"""The linear layer."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_features, check_size, layer_dtype
from selfattn.engine.weights import multiply, refuse_gradients
from selfattn.functional._products import linear, linear_backward
from selfattn.nn import init
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback


class Linear(Module):
    """``y = x @ weight.T + bias`` on the last axis.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool, default True
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the weights.

    Attributes
    ----------
    weight : ndarray, shape (out_features, in_features)
        Drawn from U(−1/√in_features, 1/√in_features), which is PyTorch's Kaiming-uniform with a = √5.
    bias : ndarray, shape (out_features,), or None
        Drawn from the same distribution, after the weight.

    Examples
    --------
    >>> import selfattn as sa
    >>> from selfattn import nn
    >>> layer = nn.Linear(2, 3, rng=sa.torch_rng(0))  # torch.manual_seed(0); torch.nn.Linear(2, 3)
    >>> layer
    Linear(in_features=2, out_features=3, weight=(3, 2), bias=(3,), dtype=float32)
    >>> layer.weight.round(4)
    array([[-0.0053,  0.3793],
           [-0.582 , -0.5204],
           [-0.2723,  0.1896]], dtype=float32)
    >>> y, pullback = layer.vjp([[1.0, 2.0]])
    >>> dx, grads = pullback([[1.0, 0.0, 0.0]])
    >>> grads["weight"]
    array([[1., 2.],
           [0., 0.],
           [0., 0.]], dtype=float32)
    """

    weight: Array
    bias: Array | None
    _rounds = ("weight",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.in_features = check_size("in_features", in_features)
        self.out_features = check_size("out_features", out_features)
        kind, generator = layer_dtype(dtype), init.as_generator(rng)
        weight = np.empty((out_features, in_features), kind)
        self.register_parameter("weight", init.kaiming_uniform_(weight, a=math.sqrt(5), rng=generator))
        bound = 1 / math.sqrt(in_features)
        drawn = init.uniform_(np.empty(out_features, kind), -bound, bound, rng=generator) if bias else None
        self.register_parameter("bias", drawn)

    def extra_repr(self) -> str:
        """Return the sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def forward(self, x: npt.ArrayLike) -> Array:
        """Map (..., in_features) to (..., out_features).

        Parameters
        ----------
        x : array_like, shape (..., in_features)

        Returns
        -------
        ndarray, shape (..., out_features)
            In the dtype to which ``x`` and ``weight`` promote.

        Raises
        ------
        ValueError
            The last axis of ``x`` is not ``in_features`` long.
        """
        weight = self._operand("weight")
        return multiply(as_features(x, self.in_features, weight.dtype), weight, self.bias)

    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``.

        Parameters
        ----------
        x : array_like, shape (..., in_features)

        Returns
        -------
        y : ndarray, shape (..., out_features)
        pullback : callable
            ``dx, grads = pullback(dy)``, as :class:`Module` says.
        """
        refuse_gradients(self.weight)
        x = as_features(x, self.in_features, self.weight.dtype)
        y = linear(x, self.weight, self.bias)

        def backward(dy: Array) -> tuple[Array, Gradients]:
            dx, d_weight, d_bias = linear_backward(dy, x, self.weight)
            return dx, {"weight": d_weight} | ({} if self.bias is None else {"bias": d_bias})

        return y, checked_pullback(self, y, [self.weight], backward)
