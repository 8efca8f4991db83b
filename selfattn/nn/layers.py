"""The layers that all models use: Linear, Embedding and Dropout."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    as_array,
    as_features,
    as_input,
    check_gradient,
    check_probability,
    check_size,
    layer_dtype,
)
from selfattn._docs import copy_doc
from selfattn.engine.transformer import check_ids
from selfattn.engine.weights import multiply, refuse_gradients
from selfattn.functional._products import as_rows, linear, linear_backward, widened
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
    _in_repr = ("in_features", "out_features")

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

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``."""
        refuse_gradients(self.weight)
        x = as_features(x, self.in_features, self.weight.dtype)
        y = linear(x, self.weight, self.bias)

        def backward(dy: Array) -> tuple[Array, Gradients]:
            dx, *gradients = linear_backward(dy, x, self.weight, with_bias=self.bias is not None)
            return dx, dict(zip(("weight", "bias"), gradients, strict=False))

        return y, checked_pullback(self, y, [self.weight], backward)


class Embedding(Module):
    """Look up a row of a table for each id.

    Parameters
    ----------
    num_embeddings : int
        The number of ids: 0 … num_embeddings − 1.
    embedding_dim : int
    padding_idx : int, optional
        An id whose row is initially 0 and gets no gradient; a negative one counts from the end.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the table.

    Attributes
    ----------
    weight : ndarray, shape (num_embeddings, embedding_dim)
        Drawn from N(0, 1).

    Notes
    -----
    ``y, pullback = layer.vjp(ids)`` and ``grads = pullback(dy)``: ids have no gradient.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> table = nn.Embedding(4, 2, rng=0)
    >>> table.weight = [[0, 0], [-1.072, -0.5001], [-0.002, -0.4311], [-0.002, -0.4311]]
    >>> table([[1, 2, 3]])
    array([[[-1.072 , -0.5001],
            [-0.002 , -0.4311],
            [-0.002 , -0.4311]]], dtype=float32)
    """

    weight: Array
    _in_repr = ("num_embeddings", "embedding_dim", "padding_idx")

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        dtype: npt.DTypeLike = np.float32,
        rng: init.Rng = None,
    ) -> None:
        self.num_embeddings = num_embeddings = check_size("num_embeddings", num_embeddings)
        self.embedding_dim = embedding_dim = check_size("embedding_dim", embedding_dim)
        if padding_idx is not None:
            padding_idx = check_size("padding_idx", padding_idx, -num_embeddings)
            if padding_idx >= num_embeddings:
                raise ValueError(f"padding_idx must be below {num_embeddings}, not {padding_idx}")
            padding_idx %= num_embeddings
        self.padding_idx = padding_idx
        weight = np.empty((num_embeddings, embedding_dim), layer_dtype(dtype))
        self.register_parameter("weight", init.normal_(weight, rng=rng))
        if padding_idx is not None:
            self.weight[padding_idx] = 0

    def check_ids(self, ids: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """Return ids as an array, after a check that they are integers within the table.

        Parameters
        ----------
        ids : array_like of int

        Returns
        -------
        ndarray of intp, in the shape of ``ids``
            The array itself if it is of that dtype.

        Raises
        ------
        TypeError
            They are not integers, or a masked array.
        ValueError
            One is negative or beyond the table.
        """
        array = as_array("ids", ids)
        if array.size == 0 and not isinstance(ids, np.ndarray):
            array = array.astype(np.intp)  # an empty list is float64
        if array.dtype.kind not in "iu":
            raise TypeError(f"ids must be integers, not {array.dtype}")
        check_ids(array, self.num_embeddings)
        return array.astype(np.intp, copy=False)

    def forward(self, ids: npt.ArrayLike) -> Array:
        """Look up ids.

        Parameters
        ----------
        ids : array_like of int
            Of any shape, each in 0 … num_embeddings − 1; errors are those of :meth:`check_ids`.

        Returns
        -------
        ndarray, shape (*ids.shape, embedding_dim)
            Copies of the rows, in the dtype of ``weight``.
        """
        return self.weight[self.check_ids(ids)]

    @copy_doc(forward)
    def vjp(self, ids: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Look up ids; the pullback is ``dy -> {"weight": gradient}``.

        Each row of the gradient is the sum of ``dy`` over the places of its id; that of ``padding_idx`` is 0.
        """
        ids = self.check_ids(ids)
        y = self.weight[ids]

        def backward(dy: Array) -> Gradients:
            d_weight = np.zeros_like(widened(self.weight))
            if ids.size:
                # Sums over runs of equal ids are several times as fast as adding row by row.
                order = np.argsort(ids, axis=None, kind="stable")
                in_order = ids.reshape(-1)[order]
                starts = np.flatnonzero(np.concatenate([[True], in_order[1:] != in_order[:-1]]))
                d_weight[in_order[starts]] = np.add.reduceat(as_rows(widened(dy))[order], starts, axis=0)
            if self.padding_idx is not None:
                d_weight[self.padding_idx] = 0
            return {"weight": d_weight.astype(self.weight.dtype, copy=False)}

        # The pullback refuses changed parameters, as every model's does, so the table is checked too.
        return y, checked_pullback(self, y, [self.weight], backward)


class Dropout(Module):
    """Set each number to zero with probability p, and divide the others by 1 − p; only while ``training``.

    Parameters
    ----------
    p : float, default 0.5
        Between 0 and 1, both included.
    dtype : dtype of lists and integers, default float32
    rng : int, Generator or torch_rng, optional
        Every call draws from it. The zeros are at other places than PyTorch's.

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

    _in_repr = ("p",)

    def __init__(self, p: float = 0.5, *, dtype: npt.DTypeLike = np.float32, rng: init.Rng = None) -> None:
        self.p = check_probability("p", p)
        self.dtype = layer_dtype(dtype)
        self.rng = init.as_generator(rng)

    def forward(self, x: npt.ArrayLike) -> Array:
        """Drop numbers of an array of any shape.

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

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``; dx has zeros in the same places as the output."""
        x = as_input(x, self.dtype)
        factors = self._factors(x)
        y = _times(x, factors)

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            return _times(check_gradient(dy, y), factors), {}

        return y, pullback

    def _factors(self, x: Array) -> Array | None:
        """Return 0 or 1/(1 − p) for each element, or None if nothing is dropped."""
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
