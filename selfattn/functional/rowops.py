"""The gradients of the row operations.

The docstrings have the formulas. A pullback keeps only references to the inputs: it computes again the values of the
forward pass that it needs, in float64 if an input is float64, else in float32. The gradients of softmax, norms and
gelu are in C. The forward function of rotary embeddings also rotates gradients back; NumPy computes the tables'
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, compute_dtype
from selfattn._docs import copy_doc, in_core
from selfattn._gradient_tuples import LayerNormGradients, RMSNormGradients, RotaryGradients, check_wrt
from selfattn.functional._gradients import as_fitting_gradient, like, sum_to_shape

Pullback: TypeAlias = Callable[[npt.ArrayLike], Array]


@in_core
def softmax(x: npt.ArrayLike, axis: int = -1) -> Array:
    """Turn numbers into positive ones with sum 1 along an axis: ``exp(x) / sum(exp(x))``.

    Parameters
    ----------
    x : array_like
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    axis : int, default -1

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype of `x`; 16 bits are computed in float32.
        A slice that is -inf throughout gives NaN, 0/0; attention makes such rows zeros.

    Raises
    ------
    ValueError
        ``numpy.exceptions.AxisError``: no such axis.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    See Also
    --------
    log_softmax

    References
    ----------
    .. [1] J. S. Bridle, "Probabilistic interpretation of feedforward classification network outputs",
           1990.

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.softmax([2, 4, 4]).round(5)
    array([0.06338, 0.46831, 0.46831])
    """
    return _core.softmax(x, axis)


@copy_doc(softmax)
def softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Compute softmax, and a function that pulls gradients back through it.

    ``y = exp(x) / sum(exp(x))``, ``dx = y * (dy - sum(y * dy))``, the sums along ``axis``.

    Returns
    -------
    pullback : callable
        ``dx = pullback(dy)``, in the shape and dtype of x (float64 for integers). It may be called again; until the
        last call x must not change.

    Raises
    ------
    TypeError, ValueError
        As :func:`softmax`; in the pullback, a gradient of another shape than its result, or float64 where the result
        has fewer bits.

    References
    ----------
    Goodfellow, Bengio and Courville, "Deep Learning", 2016, section 6.5.6, for Jacobian-vector products.

    Examples
    --------
    >>> y, pullback = softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.25, -0.25])
    """
    return _with_pullback(_core.softmax, _core._softmax_backward, x, axis)


@in_core
def log_softmax(x: npt.ArrayLike, axis: int = -1) -> Array:
    """Take the log of `softmax`, ``x - log(sum(exp(x)))``, accurate where softmax itself underflows.

    Parameters
    ----------
    x : array_like
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    axis : int, default -1

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype of `x`; 16 bits are computed in float32.
        A slice that is -inf throughout gives NaN.

    Raises
    ------
    ValueError
        ``numpy.exceptions.AxisError``: no such axis.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    See Also
    --------
    softmax

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.log_softmax([0.0, -1000.0])
    array([    0., -1000.])
    """
    return _core.log_softmax(x, axis)


@copy_doc(log_softmax)
def log_softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Compute log-softmax, and a function that pulls gradients back through it.

    ``y = x - log(sum(exp(x)))``, ``dx = dy - exp(y) * sum(dy)``, the sums along ``axis``.

    Returns
    -------
    pullback : callable, as that of :func:`softmax_vjp`

    Examples
    --------
    >>> y, pullback = log_softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.5, -0.5])
    """
    return _with_pullback(_core.log_softmax, _core._log_softmax_backward, x, axis)


@in_core
def layer_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
) -> Array:
    """Shift and scale to mean 0 and variance 1 over the last axes.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``, the variance being the biased one.

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    normalized_shape : int or tuple of int
        The last axes of `x`, over which mean and variance are taken.
    weight, bias : array_like, shape normalized_shape, optional
        1 and 0 by default.
    eps : float, default 1e-5

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype to which `x`, `weight` and `bias` promote.
        16-bit inputs are computed in float32.

    Raises
    ------
    ValueError
        Shapes that do not fit `normalized_shape`.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    See Also
    --------
    rms_norm

    References
    ----------
    .. [1] J. L. Ba, J. R. Kiros and G. E. Hinton, "Layer normalization", 2016, equations 3 and 4.

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.layer_norm([[1.0, 2.0, 3.0]], 3).round(4)
    array([[-1.2247,  0.    ,  1.2247]])
    """
    return _core.layer_norm(x, normalized_shape, weight, bias, eps)


@copy_doc(layer_norm)
def layer_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
) -> tuple[Array, Callable[[npt.ArrayLike], LayerNormGradients]]:
    """Compute layer norm, and a function that pulls gradients back through it.

    ::

        r    = 1 / sqrt(variance + eps)
        unit = (x - mean) * r
        y    = unit * weight + bias

        dbias   = sum(dy)                                        # over the leading axes
        dweight = sum(dy * unit)
        dunit   = dy * weight
        dx      = r * (dunit - mean(dunit) - unit * mean(dunit * unit))   # means over normalized_shape

    Returns
    -------
    pullback : callable
        ``pullback(dy)`` returns :class:`LayerNormGradients` ``(x, weight, bias)``, None for a parameter that was not
        given, in the shapes and dtypes of the inputs (float64 for integers). It may be called again; until the last
        call the inputs must not change. Sums over rows are float64. Errors are those of the pullback of
        :func:`softmax_vjp`.

    Examples
    --------
    >>> y, pullback = layer_norm_vjp([[1.0, 2.0, 3.0]], 3, weight=[1.0, 1.0, 1.0])
    >>> dx, dweight, dbias = pullback([[1.0, 0.0, 0.0]])
    >>> dx.round(4), dweight.round(4), dbias
    (array([[ 0.2041, -0.4082,  0.2041]]), array([-1.2247,  0.    ,  0.    ]), None)
    """
    x, weight, bias = as_array("x", x), optional("weight", weight), optional("bias", bias)
    options = normalized_shape, weight, bias, eps
    y, gradients = _with_pullback(_core.layer_norm, _core._layer_norm_backward, x, *options)
    return y, lambda dy: LayerNormGradients(*gradients(dy))


@in_core
def rms_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
) -> Array:
    """Scale to mean square 1 over the last axes: ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    normalized_shape : int or tuple of int
        The last axes of `x`, over which the mean is taken.
    weight : array_like, shape normalized_shape, optional
        1 by default.
    eps : float, optional
        By default the machine epsilon of float64 for float64, else of float32.

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype to which `x` and `weight` promote.
        16-bit inputs are computed in float32.

    Raises
    ------
    ValueError
        Shapes that do not fit `normalized_shape`.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    See Also
    --------
    layer_norm

    References
    ----------
    .. [1] B. Zhang and R. Sennrich, "Root mean square layer normalization", 2019, equation 4.

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.rms_norm([[3.0, 4.0]], 2).round(4)
    array([[0.8485, 1.1314]])
    """
    return _core.rms_norm(x, normalized_shape, weight, eps)


@copy_doc(rms_norm)
def rms_norm_vjp(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
) -> tuple[Array, Callable[[npt.ArrayLike], RMSNormGradients]]:
    """Compute RMS norm, and a function that pulls gradients back through it.

    ::

        r    = 1 / sqrt(mean(x**2) + eps)
        unit = x * r
        y    = unit * weight

        dweight = sum(dy * unit)                                 # over the leading axes
        dunit   = dy * weight
        dx      = r * (dunit - unit * mean(dunit * unit))        # means over normalized_shape

    Returns
    -------
    pullback : callable, as that of :func:`layer_norm_vjp`; it returns :class:`RMSNormGradients` ``(x, weight)``

    Examples
    --------
    >>> y, pullback = rms_norm_vjp([[3.0, 4.0]], 2, weight=[1.0, 1.0])
    >>> dx, dweight = pullback([[1.0, 0.0]])
    >>> dx.round(4), dweight.round(4)
    (array([[ 0.181 , -0.1358]]), array([0.8485, 0.    ]))
    """
    x, weight = as_array("x", x), optional("weight", weight)

    def backward(x: Array, dy: Array, *options: Any) -> RMSNormGradients:
        dx, dweight, _ = _core._rms_norm_backward(x, dy, normalized_shape, weight, None, eps)
        return RMSNormGradients(dx, dweight)

    return _with_pullback(_core.rms_norm, backward, x, normalized_shape, weight, eps)


@in_core
def gelu(x: npt.ArrayLike, approximate: Literal["none", "tanh"] = "none") -> Array:
    """Multiply x by Phi(x), the distribution function of the standard normal: a smooth ``max(x, 0)``.

    Parameters
    ----------
    x : array_like
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    approximate : {'none', 'tanh'}
        'tanh': ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype of `x`; 16 bits are computed in float32.
        Both tails keep their relative accuracy.

    Raises
    ------
    ValueError
        Another `approximate`.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    References
    ----------
    .. [1] D. Hendrycks and K. Gimpel, "Gaussian error linear units", 2016, section 2.

    Examples
    --------
    >>> import selfattn as sa
    >>> sa.gelu([-1.0, 0.0, 1.0]).round(4)
    array([-0.1587,  0.    ,  0.8413])
    """
    return _core.gelu(x, approximate)


@copy_doc(gelu)
def gelu_vjp(x: npt.ArrayLike, approximate: Literal["none", "tanh"] = "none") -> tuple[Array, Pullback]:
    """Compute gelu, and a function that pulls gradients back through it.

    ``"none"``: ``y = x * Phi(x)``, so ``dx = dy * (Phi(x) + x * phi(x))``, phi the density of the standard
    normal. ``"tanh"``: ``y = x * s(z)`` with the logistic function ``s(z) = 1 / (1 + exp(-z))`` and
    ``z = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)``, so ``dx = dy * (s + x * s * (1 - s) * dz/dx)``. NaN where x is
    infinite, as in PyTorch.

    Returns
    -------
    pullback : callable, as that of :func:`softmax_vjp`

    Examples
    --------
    >>> y, pullback = gelu_vjp([-1.0, 0.0, 1.0])
    >>> pullback([1.0, 1.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """
    return _with_pullback(_core.gelu, _core._gelu_backward, x, approximate)


@in_core
def apply_rotary_emb(
    x: npt.ArrayLike, cos: npt.ArrayLike, sin: npt.ArrayLike, interleaved: bool = False
) -> Array:
    """Rotate pairs of columns by angles that grow with the position, so that dot products depend on distances.

    The pair (a, b) becomes ``(a * cos - b * sin, a * sin + b * cos)``.

    Parameters
    ----------
    x : array_like, shape (..., L, D), D even
        Queries or keys, heads last among the leading dims: (B, H, L, D) for instance.
        Floats of 16 to 64 bits, or integers, which count as float64; any strides, alignment and byte order.
    cos, sin : array_like, shape (L, D / 2) or (..., L, D / 2)
        Tables of the angles. With one axis less than `x`, and three or more, they have no head axis,
        (B, L, D / 2), and are the same for every head. Else they broadcast to (..., L, D / 2).
    interleaved : bool, default False
        Pairs are neighbouring columns (2 n, 2 n + 1); by default column n goes with column n + D / 2.

    Returns
    -------
    out : ndarray, the shape of `x`
        New and C-contiguous, in the dtype to which `x`, `cos` and `sin` promote.
        16-bit inputs are computed in float32.

    Raises
    ------
    ValueError
        An odd D, or tables that do not fit `x`.
    TypeError
        A boolean, complex, object or long double array, a masked array or a matrix.

    References
    ----------
    .. [1] J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021,
           equation 34 (interleaved pairs).

    Examples
    --------
    A quarter turn takes (1, 0) to (0, 1):

    >>> import selfattn as sa
    >>> sa.apply_rotary_emb([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    array([[0., 1.]])
    """
    return _core.apply_rotary_emb(x, cos, sin, interleaved)


@copy_doc(apply_rotary_emb)
def apply_rotary_emb_vjp(
    x: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    interleaved: bool = False,
    *,
    wrt: str | Sequence[str] = ("x", "cos", "sin"),
) -> tuple[Array, Callable[[npt.ArrayLike], RotaryGradients]]:
    """Compute rotary embeddings, and a function that pulls gradients back through them.

    The pair (a, b) of x becomes (p, q)::

        p  = a * cos - b * sin            q  = a * sin + b * cos
        da = dp * cos + dq * sin          db = dq * cos - dp * sin          # turned back
        dcos = dp * a + dq * b            dsin = dq * a - dp * b

    Parameters
    ----------
    wrt : str or sequence of str
        The inputs to differentiate with respect to. ``wrt="x"`` saves the gradients of tables that are not trained.

    Returns
    -------
    pullback : callable
        ``dx, dcos, dsin = pullback(dy)``: it returns :class:`RotaryGradients`, a tuple of the gradients that ``wrt``
        names, in its order, in the shapes and dtypes of the inputs (float64 for integers). It may be called again;
        until the last call the inputs must not change. The gradients of the tables are summed over broadcast axes.

    Raises
    ------
    TypeError, ValueError
        As :func:`apply_rotary_emb`; another name in ``wrt``, or one twice; in the pullback as :func:`softmax_vjp`.

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

    def table_gradient(table: Array, d: Array) -> Array:
        without_heads = table.ndim == x.ndim - 1 and table.ndim >= 3
        shape = (*table.shape[:-2], 1, *table.shape[-2:]) if without_heads else table.shape
        return like(table, sum_to_shape(d, shape).reshape(table.shape))

    @np.errstate(all="ignore")
    def pullback(dy: npt.ArrayLike) -> RotaryGradients:
        compute = compute_dtype(x, cos, sin)
        dy = as_fitting_gradient("dy", dy, x.shape, dtype).astype(compute, copy=False)
        found = {}
        if "x" in names:
            back = -sin.astype(compute, copy=False)
            found["x"] = like(
                x, _core.apply_rotary_emb(dy, cos.astype(compute, copy=False), back, interleaved)
            )
        if "cos" in names or "sin" in names:
            a, b = pairs(x.astype(compute, copy=False), interleaved)
            dp, dq = pairs(dy, interleaved)
            if "cos" in names:
                found["cos"] = table_gradient(cos, dp * a + dq * b)
            if "sin" in names:
                found["sin"] = table_gradient(sin, dq * a - dp * b)
        return RotaryGradients(**{name: found[name] for name in names})

    return y, pullback


def _with_pullback(
    forward: Callable[..., Array], backward: Callable[..., Any], x: npt.ArrayLike, *options: Any
) -> tuple[Array, Callable[[npt.ArrayLike], Any]]:
    """Run the core's forward half of an operation on the rows of x; the pullback runs its backward half."""
    array = as_array("x", x)
    y = forward(array, *options)
    dtype = y.dtype  # the pullback must not hold `y`

    def pullback(dy: npt.ArrayLike) -> Any:
        return backward(array, as_fitting_gradient("dy", dy, array.shape, dtype), *options)

    return y, pullback


def optional(name: str, x: npt.ArrayLike | None) -> Array | None:
    """Convert an argument that may be None."""
    return None if x is None else as_array(name, x)


def pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Return the two halves of the pairs that rotary embeddings rotate, each (..., L, D / 2)."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
