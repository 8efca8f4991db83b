"""The gradients of the row operations and of merging.

The formulas are those of `selfattn.reference.rows_vjp`. A pullback keeps references to the inputs and nothing
else: what it needs of the forward pass it computes again, in float64 if an input is float64, else in float32.
Those of softmax, norms and gelu are in C. Rotary embeddings turn back by the forward function; the gradients of
their tables, which are rarely asked for, and merging, which is a few sums over arrays of its own output's size,
stay in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn.functional._gradients import as_fitting_gradient
from selfattn.functional.merge import as_parts, merge_attention
from selfattn.reference.arguments import as_array, float_dtype, rotary_table
from selfattn.reference.rows_vjp import (
    LayerNormGradients,
    MergeGradients,
    RMSNormGradients,
    RotaryGradients,
    check_wrt,
    pairs,
    sum_to_shape,
)

__all__ = [
    "LayerNormGradients",
    "MergeGradients",
    "RMSNormGradients",
    "RotaryGradients",
    "apply_rotary_emb_vjp",
    "gelu_vjp",
    "layer_norm_vjp",
    "log_softmax_vjp",
    "merge_attention_vjp",
    "rms_norm_vjp",
    "softmax_vjp",
]

Array: TypeAlias = npt.NDArray[Any]
Pullback: TypeAlias = Callable[[npt.ArrayLike], Array]


def softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Softmax and the function that takes gradients back through it.

    ``y = exp(x) / sum(exp(x))``, ``dx = y * (dy - sum(y * dy))``, the sums along ``axis``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback it must stay as it is.
    axis : int, default -1

    Returns
    -------
    y : ndarray, the shape of ``x``
        `softmax` of ``x``.
    pullback : callable
        ``dx = pullback(dy)``, as often as wanted: from the gradient with respect to y, of its shape, that
        with respect to ``x``, in the dtype of ``x`` (float64 for integers). 16 bits are computed in float32.

    Raises
    ------
    ValueError
        ``numpy.exceptions.AxisError``: no such axis. In the pullback: ``dy`` has another shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    softmax, log_softmax_vjp

    References
    ----------
    Goodfellow, Bengio and Courville, "Deep Learning", 2016, section 6.5.6, for Jacobian-vector products.

    Examples
    --------
    >>> y, pullback = softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.25, -0.25])
    """
    x = as_array("x", x)
    y = _core.softmax(x, axis)
    dtype = y.dtype

    def pullback(dy: npt.ArrayLike) -> Array:
        return _core._softmax_backward(x, as_fitting_gradient("dy", dy, x.shape, dtype), axis)

    return y, pullback


def log_softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Log-softmax and the function that takes gradients back through it.

    ``y = x - log(sum(exp(x)))``, ``dx = dy - exp(y) * sum(dy)``, the sums along ``axis``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback it must stay as it is.
    axis : int, default -1

    Returns
    -------
    y : ndarray, the shape of ``x``
        `log_softmax` of ``x``.
    pullback : callable
        ``dx = pullback(dy)``, as often as wanted: from the gradient with respect to y, of its shape, that
        with respect to ``x``, in the dtype of ``x`` (float64 for integers). 16 bits are computed in float32.

    Raises
    ------
    ValueError
        ``numpy.exceptions.AxisError``: no such axis. In the pullback: ``dy`` has another shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    log_softmax, softmax_vjp

    Examples
    --------
    >>> y, pullback = log_softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.5, -0.5])
    """
    x = as_array("x", x)
    y = _core.log_softmax(x, axis)
    dtype = y.dtype

    def pullback(dy: npt.ArrayLike) -> Array:
        return _core._log_softmax_backward(x, as_fitting_gradient("dy", dy, x.shape, dtype), axis)

    return y, pullback


def layer_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Callable[[npt.ArrayLike], LayerNormGradients]]:
    """Layer norm and the function that takes gradients back through it.

    ::

        r    = 1 / sqrt(variance + eps)
        unit = (x - mean) * r
        y    = unit * weight + bias

        dbias   = sum(dy)                                        # over the leading axes
        dweight = sum(dy * unit)
        dunit   = dy * weight
        dx      = r * (dunit - mean(dunit) - unit * mean(dunit * unit))   # means over normalized_shape

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback, it and the parameters must stay as they are.
    normalized_shape : int or sequence of int
        The last axes of ``x``, over which mean and variance are taken.
    weight, bias : array_like, shape normalized_shape, optional
        1 and 0 by default.
    eps : float, default 1e-5

    Returns
    -------
    y : ndarray, the shape of ``x``
        `layer_norm` of the arguments.
    pullback : callable
        ``pullback(dy)`` gives `LayerNormGradients` ``(x, weight, bias)``, as often as wanted: the gradients
        with respect to each, in its shape and dtype (float64 for integers), None for a parameter that was not
        given. 16 bits are computed in float32; sums over rows are kept in float64.

    Raises
    ------
    ValueError
        Shapes that do not fit ``normalized_shape``. In the pullback: ``dy`` has another shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    layer_norm, rms_norm_vjp

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equations 3 and 4, differentiated.

    Examples
    --------
    >>> y, pullback = layer_norm_vjp([[1.0, 2.0, 3.0]], 3, weight=[1.0, 1.0, 1.0])
    >>> dx, dweight, dbias = pullback([[1.0, 0.0, 0.0]])
    >>> dx.round(4), dweight.round(4), dbias
    (array([[ 0.2041, -0.4082,  0.2041]]), array([-1.2247,  0.    ,  0.    ]), None)
    """
    x, weight, bias = as_array("x", x), optional("weight", weight), optional("bias", bias)
    y = _core.layer_norm(x, normalized_shape, weight, bias, eps)
    dtype = y.dtype

    def pullback(dy: npt.ArrayLike) -> LayerNormGradients:
        dy = as_fitting_gradient("dy", dy, x.shape, dtype)
        return LayerNormGradients(*_core._layer_norm_backward(x, dy, normalized_shape, weight, bias, eps))

    return y, pullback


def rms_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
) -> tuple[Array, Callable[[npt.ArrayLike], RMSNormGradients]]:
    """RMS norm and the function that takes gradients back through it.

    ::

        r    = 1 / sqrt(mean(x**2) + eps)
        unit = x * r
        y    = unit * weight

        dweight = sum(dy * unit)                                 # over the leading axes
        dunit   = dy * weight
        dx      = r * (dunit - unit * mean(dunit * unit))        # means over normalized_shape

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback, it and the weight must stay as they are.
    normalized_shape : int or sequence of int
        The last axes of ``x``, over which the mean is taken.
    weight : array_like, shape normalized_shape, optional
        1 by default.
    eps : float, optional
        By default the machine epsilon of the precision that is computed in: float64's for float64, else
        float32's.

    Returns
    -------
    y : ndarray, the shape of ``x``
        `rms_norm` of the arguments.
    pullback : callable
        ``pullback(dy)`` gives `RMSNormGradients` ``(x, weight)``, as often as wanted: the gradients with
        respect to each, in its shape and dtype (float64 for integers), None for a weight that was not given.
        16 bits are computed in float32; sums over rows are kept in float64.

    Raises
    ------
    ValueError
        Shapes that do not fit ``normalized_shape``. In the pullback: ``dy`` has another shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    rms_norm, layer_norm_vjp

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equations 4 and 9.

    Examples
    --------
    >>> y, pullback = rms_norm_vjp([[3.0, 4.0]], 2, weight=[1.0, 1.0])
    >>> dx, dweight = pullback([[1.0, 0.0]])
    >>> dx.round(4), dweight.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    x, weight = as_array("x", x), optional("weight", weight)
    y = _core.rms_norm(x, normalized_shape, weight, eps)
    dtype = y.dtype

    def pullback(dy: npt.ArrayLike) -> RMSNormGradients:
        dy = as_fitting_gradient("dy", dy, x.shape, dtype)
        dx, dweight, _ = _core._rms_norm_backward(x, dy, normalized_shape, weight, None, eps)
        return RMSNormGradients(dx, dweight)

    return y, pullback


def gelu_vjp(x: npt.ArrayLike, approximate: Literal["none", "tanh"] = "none") -> tuple[Array, Pullback]:
    """Gelu and the function that takes gradients back through it.

    ``"none"``: ``y = x * Phi(x)``, so ``dx = dy * (Phi(x) + x * phi(x))``, phi the density of the standard
    normal. ``"tanh"``: ``y = x * s(z)`` with the logistic function ``s(z) = 1 / (1 + exp(-z))`` and
    ``z = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)``, so ``dx = dy * (s + x * s * (1 - s) * dz/dx)``.

    Parameters
    ----------
    x : array_like
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback it must stay as it is.
    approximate : {"none", "tanh"}

    Returns
    -------
    y : ndarray, the shape of ``x``
        `gelu` of ``x``.
    pullback : callable
        ``dx = pullback(dy)``, as often as wanted: from the gradient with respect to y, of its shape, that
        with respect to ``x``, in the dtype of ``x`` (float64 for integers). 16 bits are computed in float32.
        NaN where ``x`` is infinite, as in PyTorch.

    Raises
    ------
    ValueError
        Another ``approximate``. In the pullback: ``dy`` has another shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    gelu

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2, differentiated.

    Examples
    --------
    >>> y, pullback = gelu_vjp([-1.0, 0.0, 1.0])
    >>> pullback([1.0, 1.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """
    x = as_array("x", x)
    y = _core.gelu(x, approximate)
    dtype = y.dtype

    def pullback(dy: npt.ArrayLike) -> Array:
        return _core._gelu_backward(x, as_fitting_gradient("dy", dy, x.shape, dtype), approximate)

    return y, pullback


def apply_rotary_emb_vjp(
    x: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    interleaved: bool = False,
    *,
    wrt: str | Sequence[str] = ("x", "cos", "sin"),
) -> tuple[Array, Callable[[npt.ArrayLike], RotaryGradients]]:
    """Rotary embeddings and the function that takes gradients back through them.

    The pair (a, b) of x becomes (p, q)::

        p  = a * cos - b * sin            q  = a * sin + b * cos
        da = dp * cos + dq * sin          db = dq * cos - dp * sin          # turned back
        dcos = dp * a + dq * b            dsin = dq * a - dp * b

    Parameters
    ----------
    x : array_like, shape (..., L, D), D even
        float16, bfloat16, float32, float64 or integers (which count as float64). Until the last call of the
        pullback, it and the tables must stay as they are.
    cos, sin : array_like, shape (L, D / 2) or (..., L, D / 2)
        Tables of the angles, as `apply_rotary_emb` takes them.
    interleaved : bool, default False
        Pairs are neighbouring columns (2 n, 2 n + 1); by default column n goes with column n + D / 2.
    wrt : str or sequence of str
        What gradients are wanted of. ``wrt="x"`` saves the work for tables that nobody trains.

    Returns
    -------
    y : ndarray, the shape of ``x``
        `apply_rotary_emb` of the arguments.
    pullback : callable
        ``pullback(dy)`` gives `RotaryGradients` ``(x, cos, sin)``, as often as wanted: the gradients with
        respect to each, in its shape and dtype (float64 for integers), None for what ``wrt`` does not name.
        Those of the tables are summed over the axes along which they were broadcast. 16 bits are computed in
        float32.

    Raises
    ------
    ValueError
        An odd D, tables that do not fit ``x``, another name in ``wrt``. In the pullback: ``dy`` has another
        shape than y.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: ``dy`` is
        float64 where y has fewer bits.

    See Also
    --------
    apply_rotary_emb

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34,
    differentiated.

    Examples
    --------
    >>> y, pullback = apply_rotary_emb_vjp([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    >>> pullback([[0.0, 1.0]])
    RotaryGradients(x=array([[1., 0.]]), cos=array([[0.]]), sin=array([[1.]]))
    """
    names = check_wrt(wrt, RotaryGradients._fields)
    x, cos, sin = as_array("x", x), as_array("cos", cos), as_array("sin", sin)
    y = _core.apply_rotary_emb(x, cos, sin, interleaved)
    dtype = y.dtype

    def table_gradient(name: str, table: Array, d: Array) -> Array:
        broadcast = rotary_table(name, table, x.ndim, d.shape)
        return like(table, sum_to_shape(d, broadcast.shape).reshape(table.shape))

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> RotaryGradients:
        compute = compute_dtype(x, cos, sin)
        dy = as_fitting_gradient("dy", dy, x.shape, dtype).astype(compute, copy=False)
        dx = dcos = dsin = None
        if "x" in names:
            back = -sin.astype(compute, copy=False)
            dx = like(x, _core.apply_rotary_emb(dy, cos.astype(compute, copy=False), back, interleaved))
        if "cos" in names or "sin" in names:
            a, b = pairs(x.astype(compute, copy=False), interleaved)
            dp, dq = pairs(dy, interleaved)
            dcos = table_gradient("cos", cos, dp * a + dq * b) if "cos" in names else None
            dsin = table_gradient("sin", sin, dq * a - dp * b) if "sin" in names else None
        return RotaryGradients(dx, dcos, dsin)

    return y, pullback


def merge_attention_vjp(
    outs: Sequence[npt.ArrayLike], lses: Sequence[npt.ArrayLike]
) -> tuple[tuple[Array, Array], Callable[..., MergeGradients]]:
    """Merge the parts of attention, and get the function that takes gradients back to them.

    ::

        lse     = log(sum(exp(lse_n)))
        share_n = exp(lse_n - lse)
        out     = sum(share_n * out_n)

        dout_n = share_n * dout
        dlse_n = share_n * (sum(dout * (out_n - out)) + dlse)        # the sum over Ev

    Parameters
    ----------
    outs : sequence of array_like, each of shape (..., L, Ev)
        As `merge_attention` takes them. Until the last call of the pullback, they and ``lses`` must stay as
        they are.
    lses : sequence of array_like, each of shape (..., L)
        The log-sum-exp of each part. A part that is -inf has no share: its gradients are 0 there, whatever
        its output holds.

    Returns
    -------
    result : tuple of ndarray
        ``(out, lse)``, as `merge_attention` returns them.
    pullback : callable
        ``pullback(dout, dlse=None)`` gives `MergeGradients` ``(outs, lses)``, as often as wanted: two lists
        with one array for each part, in its shape and dtype (float64 for integers). Without ``dlse``, the
        merged lse was not used, and with ``dout=None`` the merged output. 16 bits are computed in float32.

    Raises
    ------
    ValueError
        No part at all, not as many ``lses`` as ``outs``, or shapes that differ. In the pullback: a gradient
        of another shape than its result.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix. In the pullback: a gradient
        that is float64 where all ``outs`` and ``lses`` have fewer bits.

    See Also
    --------
    merge_attention

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2, differentiated.

    Examples
    --------
    >>> (out, lse), pullback = merge_attention_vjp([[[1.0]], [[3.0]]], [[0.0], [0.0]])
    >>> pullback([[1.0]])
    MergeGradients(outs=[array([[0.5]]), array([[0.5]])], lses=[array([-0.5]), array([0.5])])
    """
    parts, sums = as_parts("outs", outs), as_parts("lses", lses)
    result = merge_attention(parts, sums)
    compute = compute_dtype(*parts, *sums)
    dtype = result[0].dtype if compute == np.float32 else compute

    @np.errstate(all="ignore")
    def pullback(dout: npt.ArrayLike | None, dlse: npt.ArrayLike | None = None) -> MergeGradients:
        if dout is None and dlse is not None:
            dout = np.zeros(parts[0].shape, dtype)
        dout = as_fitting_gradient("dout", dout, parts[0].shape, dtype).astype(compute, copy=False)
        if dlse is not None:
            dlse = as_fitting_gradient("dlse", dlse, sums[0].shape, compute).astype(compute, copy=False)
        wide = [part.astype(compute, copy=False) for part in parts]
        wide_lses = [part_lse.astype(compute, copy=False) for part_lse in sums]
        out, lse = (merged.astype(compute, copy=False) for merged in merge_attention(wide, wide_lses))
        grads = MergeGradients([], [])
        for n, (part, part_lse) in enumerate(zip(wide, wide_lses, strict=True)):
            absent = part_lse == -np.inf
            share = np.where(absent, 0, np.exp(part_lse - lse))
            along = np.where(absent[..., None], 0, dout * (part - out)).sum(axis=-1)
            along = along if dlse is None else along + dlse
            grads.outs.append(like(parts[n], np.where(absent[..., None], 0, share[..., None] * dout)))
            grads.lses.append(like(sums[n], np.where(absent, 0, share * along)))
        return grads

    return result, pullback


def compute_dtype(*arrays: Array | None) -> np.dtype[Any]:
    """Choose the dtype to compute in: float64 if an array is or counts as that, else float32."""
    wide = any(float_dtype("x", array) == np.float64 for array in arrays if array is not None)
    return np.dtype(np.float64 if wide else np.float32)


def optional(name: str, x: npt.ArrayLike | None) -> Array | None:
    """Convert an argument that may be None."""
    return None if x is None else as_array(name, x)


def like(x: Array, dx: Array) -> Array:
    """Return a gradient in the dtype of its input; integers count as float64."""
    return dx.astype(float_dtype("x", x), order="C", copy=False)
