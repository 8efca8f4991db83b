"""The gradients of the row operations in plain NumPy, under the names of the functions in :mod:`selfattn`.

Every function takes the arguments of its operation and returns ``(y, pullback)``: ``pullback(dy)`` takes the gradient of a
number with respect to y, and returns that with respect to the inputs. Gradients have the shapes and dtypes of the inputs;
integers count as float64. With ``compute_dtype`` they have that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array
from selfattn._gradients import (
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
    check_wrt,
)
from selfattn.reference.arguments import dtypes, float_dtype, like, norm_arguments, rotary_table, sum_to_shape
from selfattn.reference.attention import merge_attention
from selfattn.reference.dropout import Array
from selfattn.reference.rows import apply_rotary_emb, gelu, layer_norm, log_softmax, pairs, rms_norm, softmax

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
    """Compute RMS norm and its pullback.

    Examples
    --------
    >>> y, pullback = rms_norm_vjp([[3.0, 4.0]], 2, weight=[1.0, 1.0])
    >>> dx, dweight = pullback([[1.0, 0.0]])
    >>> dx.round(4), dweight.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    if eps is None:
        eps = float(np.finfo(norm_arguments(x, normalized_shape, None, weight=weight)[3]).eps)
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
    """Return the pullback of layer norm (``is_centred``) or RMS norm; it returns gradients of x and of the parameters."""
    wide, given, axes, compute, _ = norm_arguments(x, normalized_shape, compute_dtype, **params)
    n = math.prod(wide.shape[axis] for axis in axes)

    def mean(a: Array) -> Array:
        return np.asarray(a.sum(axis=axes, keepdims=True) / n)

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> list[Any]:
        dy = gradient("dy", dy, wide.shape, compute)
        centred = wide - mean(wide) if is_centred else wide
        r = 1 / np.sqrt(mean(np.square(centred)) + compute.type(eps))
        unit = centred * r
        dunit = dy * given["weight"] if "weight" in given else dy
        along = mean(dunit * unit)
        dx = r * ((dunit - mean(dunit) if is_centred else dunit) - unit * along)
        found = {"weight": dy * unit, "bias": dy}
        return [
            like(x, dx, compute_dtype),
            *(None if one is None else like(one, found[name], compute_dtype) for name, one in params.items()),
        ]

    return pullback


def gelu_vjp(
    x: npt.ArrayLike, approximate: str = "none", *, compute_dtype: npt.DTypeLike | None = None
) -> tuple[Array, Pullback]:
    """Compute gelu and its pullback.

    Examples
    --------
    >>> y, pullback = gelu_vjp([-1.0, 0.0, 1.0])
    >>> pullback([1.0, 1.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """

    def backward(x: Array, dy: Array) -> Array:
        if approximate == "none":
            phi = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
            slope = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2.0)) / 2.0 + x * phi
        else:
            c = 2 * math.sqrt(2 / math.pi)
            z = c * (x + 0.044715 * x * x * x)
            s, one_minus_s = 1 / (1 + np.exp(-z)), 1 / (1 + np.exp(z))
            near = np.clip(x, -100, 100)  # beyond 100, s * (1 - s) is 0, but dz/dx may be infinite
            slope = s + x * s * one_minus_s * c * (1 + 3 * 0.044715 * near * near)
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

    Examples
    --------
    >>> y, pullback = apply_rotary_emb_vjp([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    >>> pullback([[0.0, 1.0]])
    RotaryGradients(x=array([[1., 0.]]), cos=array([[0.]]), sin=array([[1.]]))
    """
    names = check_wrt(wrt, RotaryGradients._fields)
    y = apply_rotary_emb(x, cos, sin, interleaved, compute_dtype=compute_dtype)
    x, cos, sin = as_array("x", x), as_array("cos", cos), as_array("sin", sin)
    compute, _ = dtypes(compute_dtype, {"x": x, "cos": cos, "sin": sin})

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> RotaryGradients:
        dy = gradient("dy", dy, x.shape, compute)
        half = (*x.shape[:-1], x.shape[-1] // 2)
        a, b = pairs(x.astype(compute), interleaved)
        dp, dq = pairs(dy, interleaved)
        dx = apply_rotary_emb(dy, cos.astype(compute), -sin.astype(compute), interleaved)
        dcos, dsin = (
            sum_to_shape(d, rotary_table(name, table, x.ndim, half).shape).reshape(table.shape)
            for name, table, d in (("cos", cos, dp * a + dq * b), ("sin", sin, dq * a - dp * b))
        )
        return RotaryGradients(
            like(x, dx, compute_dtype) if "x" in names else None,
            like(cos, dcos, compute_dtype) if "cos" in names else None,
            like(sin, dsin, compute_dtype) if "sin" in names else None,
        )

    return y, pullback


def merge_attention_vjp(
    outs: Sequence[npt.ArrayLike],
    lses: Sequence[npt.ArrayLike],
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[tuple[Array, Array], Callable[..., MergeGradients]]:
    """Merge the parts of attention, and return the pullback of :func:`merge_attention`.

    Examples
    --------
    >>> (out, lse), pullback = merge_attention_vjp([[[1.0]], [[3.0]]], [[0.0], [0.0]])
    >>> pullback([[1.0]])
    MergeGradients(outs=[array([[0.5]]), array([[0.5]])], lses=[array([-0.5]), array([0.5])])
    """
    result = merge_attention(outs, lses, compute_dtype=compute_dtype)
    parts = [as_array("outs", out) for out in outs]
    sums = [as_array("lses", lse) for lse in lses]
    compute, _ = dtypes(compute_dtype, {f"{n}": array for n, array in enumerate(parts + sums)})

    @np.errstate(all="ignore")
    def pullback(dout: npt.ArrayLike, dlse: npt.ArrayLike | None = None) -> MergeGradients:
        out, lse = merge_attention(
            [p.astype(compute) for p in parts], [s.astype(compute) for s in sums], compute_dtype=compute
        )
        dout = gradient("dout", dout, out.shape, compute)
        dlse = 0 if dlse is None else gradient("dlse", dlse, lse.shape, compute)
        douts, dlses = [], []
        for part, part_lse in zip(parts, sums, strict=True):
            absent = part_lse == -np.inf
            share = np.where(absent, 0, np.exp(part_lse.astype(compute) - lse))
            along = np.where(absent[..., None], 0, dout * (part.astype(compute) - out)).sum(axis=-1) + dlse
            dpart = np.where(absent[..., None], 0, share[..., None] * dout)
            douts.append(like(part, dpart.astype(compute), compute_dtype))
            dlses.append(like(part_lse, np.where(absent, 0, share * along).astype(compute), compute_dtype))
        return MergeGradients(douts, dlses)

    return result, pullback


def pullback_of(
    backward: Callable[[Array, Array], Array], x: npt.ArrayLike, compute_dtype: npt.DTypeLike | None
) -> Pullback:
    """Return the pullback of an operation of one array; ``backward`` gets x and dy in the precision of the computation."""
    given = as_array("x", x)
    compute, _ = dtypes(compute_dtype, {"x": given})

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> Array:
        dx = backward(given.astype(compute), gradient("dy", dy, given.shape, compute))
        return like(given, dx, compute_dtype)

    return pullback


def gradient(name: str, dy: npt.ArrayLike, shape: tuple[int, ...], compute: np.dtype[Any]) -> Array:
    """Check the argument of a pullback, and return it in the precision of the computation."""
    dy = as_array(name, dy)
    if dy.shape != shape:
        raise ValueError(f"{name} has shape {dy.shape}; the result that it is the gradient of has {shape}")
    float_dtype(name, dy)
    return dy.astype(compute, copy=False)
