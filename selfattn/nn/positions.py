"""Positions: sinusoids and learned rows, which are added to inputs, and rotary embeddings of queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    Entries,
    as_integers,
    as_sequence,
    check_gradient,
    check_number,
    check_size,
    layer_dtype,
)
from selfattn._docs import copy_doc
from selfattn.engine.rope import read_rope
from selfattn.functional import apply_rotary_emb, apply_rotary_emb_vjp
from selfattn.functional._products import widened
from selfattn.nn import init
from selfattn.nn.module import Gradients, Module, Pullback, checked_pullback


class AddedPositions(Module):
    """Adds row t of a table to row t of a sequence. A subclass makes the table, (max_len, d_model)."""

    d_model: int
    max_len: int
    _in_repr = ("d_model", "max_len")

    def _rows(self) -> Array:
        raise NotImplementedError

    def forward(self, x: npt.ArrayLike) -> Array:
        """Add the positions to (..., L, d_model).

        Parameters
        ----------
        x : array_like, shape (..., L, d_model)

        Returns
        -------
        ndarray, shape (..., L, d_model)
            A new array, in the dtype to which ``x`` and the table promote.

        Raises
        ------
        ValueError
            L is above ``max_len``, or the width is not ``d_model``.
        """
        table = self._rows()
        x = as_sequence(x, self.d_model, table.dtype)
        _check_length(x, self.max_len)
        y: Array = x + table[: x.shape[-2]]
        return y

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, grads)``; ``dx`` is a copy of ``dy``."""
        x = as_sequence(x, self.d_model, self._rows().dtype)
        y, kind, parameters = self(x), x.dtype, self.parameters()

        def backward(dy: Array) -> tuple[Array, Gradients]:
            grads = {}
            for name, weight in parameters.items():  # the table, if it is a parameter
                d_weight = np.zeros_like(widened(weight))
                d_weight[: dy.shape[-2]] = widened(dy).reshape(-1, *dy.shape[-2:]).sum(axis=0)
                grads[name] = d_weight.astype(weight.dtype, copy=False)
            return dy.astype(kind), grads

        return y, checked_pullback(self, y, parameters.values(), backward)


class SinusoidalPositions(AddedPositions):
    """Adds to row t of a sequence sin(t·10000^(−i/d)) in column i = 0, 2, …, and the cosine in column i + 1.

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
        Computed in float64, then rounded. It is not a parameter: neither trained nor in the ``state_dict``.

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
        self.d_model = d_model = check_size("d_model", d_model)
        self.max_len = max_len = check_size("max_len", max_len)
        if d_model % 2:
            raise ValueError(f"d_model must be even, as sines and cosines come in pairs, not {d_model}")
        kind = layer_dtype(dtype)
        frequencies = np.exp(np.arange(0, d_model, 2) * (-math.log(10000.0) / d_model))
        angles = np.arange(max_len)[:, None] * frequencies
        table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(max_len, d_model)
        self.table: Array = table.astype(kind)

    def _rows(self) -> Array:
        return self.table


class LearnedPositions(AddedPositions):
    """Adds row t of a learned table to row t of a sequence, as in BERT and GPT-2.

    Parameters
    ----------
    d_model : int
        The width.
    max_len : int
        The longest sequence.
    dtype : dtype, default float32
    rng : int, Generator or torch_rng, optional
        The source of the table.

    Attributes
    ----------
    weight : ndarray, shape (max_len, d_model)
        Drawn from N(0, 1), like an :class:`Embedding`.

    See Also
    --------
    SinusoidalPositions, RotaryEmbedding

    References
    ----------
    Gehring et al., "Convolutional Sequence to Sequence Learning", 2017, section 3.1.

    Examples
    --------
    >>> from selfattn import nn
    >>> positions = nn.LearnedPositions(2, max_len=3, rng=0)
    >>> positions.weight = [[1, 2], [3, 4], [5, 6]]
    >>> positions([[0.0, 0.0], [0.5, 0.5]])
    array([[1. , 2. ],
           [3.5, 4.5]], dtype=float32)
    """

    weight: Array

    def __init__(
        self, d_model: int, max_len: int, *, dtype: npt.DTypeLike = np.float32, rng: init.Rng = None
    ) -> None:
        self.d_model = check_size("d_model", d_model)
        self.max_len = check_size("max_len", max_len)
        weight = np.empty((self.max_len, self.d_model), layer_dtype(dtype))
        self.register_parameter("weight", init.normal_(weight, rng=rng))

    def _rows(self) -> Array:
        return self.weight


class RotaryEmbedding(Module):
    """Rotates pairs of columns of row t by angles that grow with t.

    So products of queries and keys depend on distances.

    Pair n of a row at position t is rotated by t·theta^(−2n/dim). There are no parameters. Queries and keys of each
    head are rotated after their projection and before attention.

    Parameters
    ----------
    dim : int
        The width of a head, even.
    max_len : int, default 2048
        The number of positions.
    theta : float, default 10000.0
        The base of the angles, above 1.
    interleaved : bool, default False
        Pairs are neighbouring columns (2n, 2n + 1), as in the paper; by default columns n and n + dim/2, as in Llama.
    scaling : dict, optional
        A change of the angles, as ``rope_scaling`` of Transformers' configurations: ``{"rope_type": "linear",
        "factor": 2.0}``, or of the types "yarn", "llama3" or "longrope".
    dtype : dtype, default float32

    Attributes
    ----------
    cos, sin : ndarray, shape (max_len, dim/2)
        Of the angles, which are computed in float32, as in Transformers. They are not parameters.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> rotary = nn.RotaryEmbedding(2, max_len=100)
    >>> rotary([[1.0, 0.0]] * 3).round(4)
    array([[ 1.    ,  0.    ],
           [ 0.5403,  0.8415],
           [-0.4161,  0.9093]], dtype=float32)

    A product depends only on the distance:

    >>> far = rotary([[1.0, 0.0]] * 2, positions=[60, 62])
    >>> near = rotary([[1.0, 0.0]] * 2, positions=[0, 2])
    >>> bool(np.isclose(far[0] @ far[1], near[0] @ near[1], atol=1e-6))
    True
    """

    def __init__(
        self,
        dim: int,
        max_len: int = 2048,
        theta: float = 10000.0,
        *,
        interleaved: bool = False,
        scaling: Mapping[str, Any] | None = None,
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.dim, self.max_len = check_size("dim", dim), check_size("max_len", max_len)
        if self.dim % 2:
            raise ValueError(f"dim must be even, as columns come in pairs, not {dim}")
        self.theta, self.interleaved = check_number("theta", theta), bool(interleaved)
        if not 1 < self.theta < math.inf:
            raise ValueError(f"theta must be above 1 and finite, not {theta}")
        self.scaling = None if scaling is None else dict(scaling)
        given = {} if self.scaling is None else self.scaling
        if "rope_theta" in given:
            raise ValueError("scaling must not have rope_theta: pass it as theta")
        config = Entries({"rope_parameters": {**given, "rope_theta": self.theta}}, "nn.RotaryEmbedding")
        rotary = read_rope(config, self.dim, self.max_len).rotary(self.max_len, layer_dtype(dtype))
        self.cos, self.sin = rotary.cos.copy(), rotary.sin.copy()  # rotary() returns cached arrays

    def extra_repr(self) -> str:
        """Return the sizes and the options that are not the default."""
        more = ", interleaved=True" if self.interleaved else ""
        more += "" if self.scaling is None else f", scaling={self.scaling}"
        return f"dim={self.dim}, max_len={self.max_len}, theta={self.theta}{more}"

    def _tables(self, x: Array, positions: npt.ArrayLike | None) -> tuple[Array, Array]:
        if positions is None:
            _check_length(x, self.max_len)
            return self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        index = as_integers("positions", positions)
        if index.ndim == 0 or index.shape[-1] != x.shape[-2]:
            raise ValueError(f"positions must have shape (..., L) with L = {x.shape[-2]}, not {index.shape}")
        if index.size and not (index.min() >= 0 and index.max() < self.max_len):
            raise ValueError(
                f"positions must be in 0...{self.max_len - 1}, not {index.min()} to {index.max()}"
            )
        return self.cos[index], self.sin[index]

    def forward(self, x: npt.ArrayLike, positions: npt.ArrayLike | None = None) -> Array:
        """Rotate the rows of (..., L, dim).

        Parameters
        ----------
        x : array_like, shape (..., L, dim)
            Queries or keys: (B, heads, L, dim), for instance.
        positions : array_like of int, shape (L,) or (B, L), optional
            The rows' positions, the same for all heads; by default 0, 1, 2 …

        Returns
        -------
        ndarray, in the shape of ``x``
            In the dtype to which ``x`` and ``cos`` promote.

        Raises
        ------
        TypeError, ValueError
            L is above ``max_len``, a position is not below it, or the width is not ``dim``.
        """
        x = as_sequence(x, self.dim, self.cos.dtype)
        return apply_rotary_emb(x, *self._tables(x, positions), self.interleaved)

    @copy_doc(forward)
    def vjp(self, x: npt.ArrayLike, positions: npt.ArrayLike | None = None) -> tuple[Array, Pullback]:
        """Compute the output and its pullback, ``dy -> (dx, {})``, which rotates the gradient back."""
        x = as_sequence(x, self.dim, self.cos.dtype)
        y, rotary_pullback = apply_rotary_emb_vjp(x, *self._tables(x, positions), self.interleaved, wrt="x")

        def pullback(dy: npt.ArrayLike) -> tuple[Array, Gradients]:
            (dx,) = rotary_pullback(check_gradient(dy, y))
            return dx, {}

        return y, pullback


def _check_length(x: Array, longest: int) -> None:
    if x.shape[-2] > longest:
        raise ValueError(f"x has {x.shape[-2]} positions, more than max_len={longest}")
