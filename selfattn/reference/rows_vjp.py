"""The gradients of the row operations in plain NumPy, under the names of the functions in :mod:`selfattn`.

Every function takes the arguments of its operation and returns ``(y, pullback)``: ``pullback(dy)`` takes the gradient
of a number with respect to y, and returns that with respect to the inputs. Gradients have the shapes and dtypes of
the inputs; integers count as float64. With ``compute_dtype`` they have that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._gradient_tuples import (
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
    check_wrt,
)
from selfattn.reference.arrays import Array, convert, like, sum_to_shape
from selfattn.reference.attention import merge_attention
from selfattn.reference.rows import (
    apply_rotary_emb,
    default_eps,
    gelu,
    layer_norm,
    log_softmax,
    mean,
    pairs,
    rms_norm,
    rotary_table,
    softmax,
)

Pullback: TypeAlias = Callable[[npt.ArrayLike], Array]


def softmax_vjp(
    x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None
) -> tuple[Array, Pullback]:
    """Compute softmax and its pullback, ``dx = y * (dy - sum(y * dy))``.

    Examples
    --------
    >>> y, pullback = softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.25, -0.25])
    """

    def backward(x: Array, dy: Array) -> Array:
        y = softmax(x, axis)
        dx: Array = y * (dy - (y * dy).sum(axis=axis, keepdims=True))
        return dx

    return softmax(x, axis, compute_dtype=compute_dtype), pullback_of(backward, x, compute_dtype)


def log_softmax_vjp(
    x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None
) -> tuple[Array, Pullback]:
    """Compute log-softmax and its pullback, ``dx = dy - exp(y) * sum(dy)``.

    Examples
    --------
    >>> y, pullback = log_softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.5, -0.5])
    """

    def backward(x: Array, dy: Array) -> Array:
        dx: Array = dy - softmax(x, axis) * dy.sum(axis=axis, keepdims=True)
        return dx

    return log_softmax(x, axis, compute_dtype=compute_dtype), pullback_of(backward, x, compute_dtype)


def layer_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Callable[[npt.ArrayLike], LayerNormGradients]]:
    """Compute layer norm and its pullback.

    With r = 1 / sqrt(variance + eps), u the normalised rows and g = dy * weight::

        dx = r * (g - mean(g) - u * mean(g * u))    dweight = sum(dy * u)    dbias = sum(dy)

    Examples
    --------
    >>> y, pullback = layer_norm_vjp([[1.0, 2.0, 3.0]], 3, weight=[1.0, 1.0, 1.0])
    >>> dx, dweight, dbias = pullback([[1.0, 0.0, 0.0]])
    >>> dx.round(4), dweight.round(4), dbias
    (array([[ 0.2041, -0.4082,  0.2041]]), array([-1.2247,  0.    ,  0.    ]), None)
    """
    y = layer_norm(x, normalized_shape, weight, bias, eps, compute_dtype=compute_dtype)
    params = {"weight": weight, "bias": bias}
    gradients = _norm_gradients(x, normalized_shape, params, eps, compute_dtype, is_centred=True)
    return y, lambda dy: LayerNormGradients(*gradients(dy))


def rms_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Callable[[npt.ArrayLike], RMSNormGradients]]:
    """Compute RMS norm and its pullback, that of :func:`layer_norm_vjp` without ``mean(g)``.

    Examples
    --------
    >>> y, pullback = rms_norm_vjp([[3.0, 4.0]], 2, weight=[1.0, 1.0])
    >>> dx, dweight = pullback([[1.0, 0.0]])
    >>> dx.round(4), dweight.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    if eps is None:
        eps = default_eps(x, weight)
    y = rms_norm(x, normalized_shape, weight, eps, compute_dtype=compute_dtype)
    gradients = _norm_gradients(x, normalized_shape, {"weight": weight}, eps, compute_dtype, is_centred=False)
    return y, lambda dy: RMSNormGradients(*gradients(dy))


def _norm_gradients(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    params: dict[str, npt.ArrayLike | None],
    eps: float,
    compute_dtype: npt.DTypeLike | None,
    *,
    is_centred: bool,
) -> Callable[[npt.ArrayLike], list[Any]]:
    """Return the pullback of layer norm (``is_centred``) or RMS norm, to x and to the parameters."""
    (wide, weight, _), _ = convert(compute_dtype, x, *(params.get(name) for name in ("weight", "bias")))

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> list[Any]:
        dy = np.asarray(dy, wide.dtype)
        centred = wide - mean(wide, normalized_shape) if is_centred else wide
        r = 1 / np.sqrt(mean(np.square(centred), normalized_shape) + wide.dtype.type(eps))
        u = centred * r
        g = dy if weight is None else dy * weight
        along = mean(g * u, normalized_shape)
        dx = r * ((g - mean(g, normalized_shape) if is_centred else g) - u * along)
        found = {"weight": dy * u, "bias": dy}
        return [
            like(x, dx, compute_dtype),
            *(None if one is None else like(one, found[name], compute_dtype) for name, one in params.items()),
        ]

    return pullback


def gelu_vjp(
    x: npt.ArrayLike, approximate: str = "none", *, compute_dtype: npt.DTypeLike | None = None
) -> tuple[Array, Pullback]:
    """Compute gelu and its pullback, ``dx = dy * (Phi(x) + x * Phi'(x))``.

    Examples
    --------
    >>> y, pullback = gelu_vjp([-1.0, 0.0, 1.0])
    >>> pullback([1.0, 1.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """

    def backward(x: Array, dy: Array) -> Array:
        if approximate == "tanh":  # (1 + tanh(z / 2)) / 2 is s
            c = 2 * math.sqrt(2 / math.pi)
            z = c * (x + 0.044715 * x * x * x)
            s, one_minus_s = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
            near = np.clip(x, -100, 100)  # beyond 100, s * (1 - s) is 0, but dz/dx may be infinite
            slope = s + x * s * one_minus_s * c * (1 + 3 * 0.044715 * near * near)
        else:
            density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            slope = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2.0)) / 2.0 + x * density
        return np.asarray(dy * slope.astype(x.dtype))

    return gelu(x, approximate, compute_dtype=compute_dtype), pullback_of(backward, x, compute_dtype)


def apply_rotary_emb_vjp(
    x: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    interleaved: bool = False,
    *,
    wrt: str | Sequence[str] = ("x", "cos", "sin"),
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Callable[[npt.ArrayLike], RotaryGradients]]:
    """Compute rotary embeddings, which turn a pair (a, b) of x into (p, q), and their pullback.

    ``dx`` is ``dy`` turned back. ``dcos = dp * a + dq * b`` and ``dsin = dq * a - dp * b``, summed over broadcast axes.

    Examples
    --------
    >>> y, pullback = apply_rotary_emb_vjp([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    >>> pullback([[0.0, 1.0]])
    RotaryGradients(x=array([[1., 0.]]), cos=array([[0.]]), sin=array([[1.]]))
    """
    y = apply_rotary_emb(x, cos, sin, interleaved, compute_dtype=compute_dtype)
    (wide, c, s), _ = convert(compute_dtype, x, cos, sin)
    names = check_wrt(wrt, ("x", "cos", "sin"))

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> RotaryGradients:
        dy = np.asarray(dy, wide.dtype)
        a, b = pairs(wide, interleaved)
        dp, dq = pairs(dy, interleaved)
        found = {"x": (x, apply_rotary_emb(dy, c, -s, interleaved))}
        for name, given, table, d in ("cos", cos, c, dp * a + dq * b), ("sin", sin, s, dq * a - dp * b):
            found[name] = given, sum_to_shape(d, rotary_table(table, wide.ndim).shape).reshape(table.shape)
        return RotaryGradients(**{name: like(*found[name], compute_dtype) for name in names})

    return y, pullback


def merge_attention_vjp(
    outs: Sequence[npt.ArrayLike],
    lses: Sequence[npt.ArrayLike],
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[tuple[Array, Array], Callable[..., MergeGradients]]:
    """Merge the parts of attention, and return the pullback of :func:`merge_attention`.

    With ``share_n = exp(lse_n - lse)``: ``dout_n = share_n * dout``, and
    ``dlse_n = share_n * (sum(dout * (out_n - out)) + dlse)``.

    Examples
    --------
    >>> (out, lse), pullback = merge_attention_vjp([[[1.0]], [[3.0]]], [[0.0], [0.0]])
    >>> pullback([[1.0]])
    MergeGradients(outs=[array([[0.5]]), array([[0.5]])], lses=[array([-0.5]), array([0.5])])
    """
    result = merge_attention(outs, lses, compute_dtype=compute_dtype)
    parts, sums = [np.asarray(out) for out in outs], [np.asarray(lse) for lse in lses]
    wide, _ = convert(compute_dtype, *parts, *sums)
    compute = wide[0].dtype
    wide_parts, wide_sums = wide[: len(parts)], wide[len(parts) :]

    @np.errstate(all="ignore")
    def pullback(dout: npt.ArrayLike, dlse: npt.ArrayLike | None = None) -> MergeGradients:
        out, lse = merge_attention(wide_parts, wide_sums, compute_dtype=compute)
        dout = np.asarray(dout, compute)
        dlse = 0 if dlse is None else np.asarray(dlse, compute)
        douts, dlses = [], []
        for n, (part, part_lse) in enumerate(zip(wide_parts, wide_sums, strict=True)):
            absent = part_lse == -np.inf
            share = np.where(absent, 0, np.exp(part_lse - lse))
            along = np.where(absent[..., None], 0, dout * (part - out)).sum(axis=-1) + dlse
            dpart = np.where(absent[..., None], 0, share[..., None] * dout)
            douts.append(like(parts[n], dpart.astype(compute), compute_dtype))
            dlses.append(like(sums[n], np.where(absent, 0, share * along).astype(compute), compute_dtype))
        return MergeGradients(douts, dlses)

    return result, pullback


def pullback_of(
    backward: Callable[[Array, Array], Array], x: npt.ArrayLike, compute_dtype: npt.DTypeLike | None
) -> Pullback:
    """Return the pullback of an operation of x; ``backward(x, dy)`` has the precision of the computation."""
    (wide,), _ = convert(compute_dtype, x)

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> Array:
        return like(x, backward(wide, np.asarray(dy, wide.dtype)), compute_dtype)

    return pullback
