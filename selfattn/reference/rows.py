"""The operations on single rows, in plain NumPy: softmax, norms, gelu, rotary embeddings.

Shape letters, precision, NaN: see :mod:`selfattn.reference`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from selfattn.reference.arrays import Array, convert


@np.errstate(all="ignore")
def softmax(x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Compute ``exp(x) / sum(exp(x))`` along ``axis``: positive numbers with sum 1.

    A slice in which all numbers are -inf becomes NaN, 0/0. (In attention, rows without keys are zeros.)

    References
    ----------
    Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990.

    Examples
    --------
    >>> softmax([2, 4, 4]).round(5)
    array([0.06338, 0.46831, 0.46831])
    """
    (x,), result = convert(compute_dtype, x)
    exps = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    y: Array = exps / exps.sum(axis=axis, keepdims=True)
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def log_softmax(x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Compute the log of :func:`softmax`, ``x - log(sum(exp(x)))``, accurate where softmax underflows.

    Examples
    --------
    >>> log_softmax([0.0, -1000.0])
    array([    0., -1000.])
    """
    (x,), result = convert(compute_dtype, x)
    shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
    y: Array = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def layer_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Shift and scale to mean 0 and variance 1 over the last axes.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``

    The mean and the biased variance are those over the last axes, ``normalized_shape``.

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equations 3 and 4.

    Examples
    --------
    >>> layer_norm([[1.0, 2.0, 3.0]], 3).round(4)
    array([[-1.2247,  0.    ,  1.2247]])
    """
    (x, weight, bias), result = convert(compute_dtype, x, weight, bias)
    centred = x - mean(x, normalized_shape)
    variance = mean(np.square(centred), normalized_shape)
    y: Array = centred / np.sqrt(variance + x.dtype.type(eps))
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.astype(result, order="C")


def mean(x: Array, normalized_shape: int | Sequence[int]) -> Array:
    """Return the mean over the last axes, as many as the shape has, which stay with length 1."""
    axes = tuple(range(-np.size(normalized_shape), 0))
    return np.asarray(x.sum(axis=axes, keepdims=True) / math.prod(x.shape[axis] for axis in axes))


@np.errstate(all="ignore")
def rms_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Scale to mean square 1 over the last axes: ``x / sqrt(mean(x**2) + eps) * weight``.

    By default ``eps`` is the machine epsilon of the precision of the computation: float64's for float64, else
    float32's, as in PyTorch (its documentation says "of x's dtype", which differs for 16-bit input). It does not
    depend on ``compute_dtype``.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> rms_norm([[3.0, 4.0]], 2).round(4)
    array([[0.8485, 1.1314]])
    """
    if eps is None:
        eps = default_eps(x, weight)
    (x, weight), result = convert(compute_dtype, x, weight)
    y: Array = x / np.sqrt(mean(np.square(x), normalized_shape) + x.dtype.type(eps))
    if weight is not None:
        y = y * weight
    return y.astype(result, order="C")


def default_eps(x: npt.ArrayLike, weight: npt.ArrayLike | None) -> float:
    """Return the machine epsilon of the precision of the computation."""
    (x, _), _ = convert(None, x, weight)
    return float(np.finfo(x.dtype).eps)


@np.errstate(all="ignore")
def gelu(x: npt.ArrayLike, approximate: str = "none", *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Multiply x by Phi(x), the distribution function of the standard normal: a smooth ``max(x, 0)``.

    ``approximate="tanh"``: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    Examples
    --------
    >>> gelu([-1.0, 0.0, 1.0]).round(4)
    array([-0.1587,  0.    ,  0.8413])
    """
    (x,), result = convert(compute_dtype, x)
    if approximate == "tanh":
        phi = (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))) / 2.0
    else:  # erfc keeps the digits that 1 + erf would cancel
        phi = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2.0)) / 2.0
    y: Array = x * phi.astype(x.dtype)
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def apply_rotary_emb(
    x: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    interleaved: bool = False,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Rotate pairs of columns by angles that grow with the position, so that dot products depend on distances.

    The pair (a, b) becomes ``(a * cos - b * sin, a * sin + b * cos)``.

    Pairs are the columns n and n + D / 2, or neighbours, (2 n, 2 n + 1), if ``interleaved``. Tables with one axis
    less than ``x``, and three or more, have no head axis, (B, L, D / 2), and are the same for every head. Else they
    broadcast to (..., L, D / 2).

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34
    (interleaved pairs).

    Examples
    --------
    A quarter turn takes (1, 0) to (0, 1):

    >>> apply_rotary_emb([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    array([[0., 1.]])
    """
    (x, cos, sin), result = convert(compute_dtype, x, cos, sin)
    cos, sin = rotary_table(cos, x.ndim), rotary_table(sin, x.ndim)
    a, b = pairs(x, interleaved)
    rotated = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1 if interleaved else -2)
    return rotated.reshape(x.shape).astype(result)


def rotary_table(table: Array, x_ndim: int) -> Array:
    """Return a table of cosines or sines, with a head axis if it has none."""
    return np.expand_dims(table, -3) if table.ndim == x_ndim - 1 and table.ndim >= 3 else table


def pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Return the two halves of the pairs that rotary embeddings rotate, each (..., L, D / 2)."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
