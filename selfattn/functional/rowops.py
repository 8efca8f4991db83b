"""The gradients of the row operations and of merging.

The formulas are those of `selfattn.reference.rows_vjp`. A pullback keeps references to the inputs and nothing
else: what it needs of the forward pass it computes again, in float64 if an input is float64, else in float32.
Those of softmax, norms and gelu are in C. Rotary embeddings turn back by the forward function; the gradients of
their tables, which are rarely asked for, and merging, which is a few sums over arrays of its own output's size,
stay in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import as_array, compute_dtype
from selfattn._docs import described, put
from selfattn.functional._gradients import as_fitting_gradient, check_wrt, gradient_dtype, sum_to_shape
from selfattn.functional.merge import as_parts, merge_attention

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
Function = TypeVar("Function", bound=Callable[..., Any])

_SECTIONS = """\
Parameters
----------
{parameters}

Returns
-------
{y}
    As `{name}` returns it.
pullback : callable
    {gives}.
    It may be called again. A gradient has the shape and dtype of its input (float64 for integers); 16 bits are
    computed in float32. Arrays must stay as they are until the last call.

Raises
------
TypeError, ValueError
    As `{name}`{refuses}. In the pullback:
    a gradient of another shape than its result (ValueError), or float64 where that has fewer bits (TypeError).

See Also
--------
{name}"""


def gradient_of(
    function: Callable[..., Any],
    gives: str = "``dx = pullback(dy)``",
    more: str = "",
    refuses: str = "",
    y: str = "y : ndarray",
) -> Callable[[Function], Function]:
    """Put the sections that all docstrings here have in the place of ``{sections}``.

    ``more`` describes a parameter that the function does not have, ``refuses`` what is wrong with it.
    """

    def documented(vjp: Function) -> Function:
        parameters = "\n".join(filter(None, [described(function), more]))
        name = function.__name__
        text = _SECTIONS.format(parameters=parameters, name=name, gives=gives, refuses=refuses, y=y)
        put(vjp, "{sections}", text)
        return vjp

    return documented


class LayerNormGradients(NamedTuple):
    """What the pullback of `layer_norm_vjp` gives.

    Attributes
    ----------
    x : ndarray
        The gradient with respect to ``x``.
    weight, bias : ndarray or None
        Those of the parameters; None for one that was not given.
    """

    x: Array
    weight: Array | None
    bias: Array | None


class RMSNormGradients(NamedTuple):
    """What the pullback of `rms_norm_vjp` gives.

    Attributes
    ----------
    x : ndarray
        The gradient with respect to ``x``.
    weight : ndarray or None
        That of the weight; None if there was none.
    """

    x: Array
    weight: Array | None


class RotaryGradients(NamedTuple):
    """What the pullback of `apply_rotary_emb_vjp` gives.

    Attributes
    ----------
    x, cos, sin : ndarray or None
        The gradients with respect to each; None for what ``wrt`` does not name.
    """

    x: Array | None
    cos: Array | None
    sin: Array | None


class MergeGradients(NamedTuple):
    """What the pullback of `merge_attention_vjp` gives.

    Attributes
    ----------
    outs, lses : list of ndarray
        The gradients with respect to the outputs and the log-sum-exps, one array for each part.
    """

    outs: list[Array]
    lses: list[Array]


@gradient_of(_core.softmax)
def softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Softmax and the function that takes gradients back through it.

    ``y = exp(x) / sum(exp(x))``, ``dx = y * (dy - sum(y * dy))``, the sums along ``axis``.

    {sections}

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


@gradient_of(_core.log_softmax)
def log_softmax_vjp(x: npt.ArrayLike, axis: int = -1) -> tuple[Array, Pullback]:
    """Log-softmax and the function that takes gradients back through it.

    ``y = x - log(sum(exp(x)))``, ``dx = dy - exp(y) * sum(dy)``, the sums along ``axis``.

    {sections}

    Examples
    --------
    >>> y, pullback = log_softmax_vjp([0.0, 0.0])
    >>> pullback([1.0, 0.0])
    array([ 0.5, -0.5])
    """
    return _with_pullback(_core.log_softmax, _core._log_softmax_backward, x, axis)


@gradient_of(
    _core.layer_norm,
    """\
``pullback(dy)`` gives `LayerNormGradients` ``(x, weight, bias)``, None for a parameter that was not given.
    Sums over rows are kept in float64""",
)
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

    {sections}

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


@gradient_of(
    _core.rms_norm,
    """\
``pullback(dy)`` gives `RMSNormGradients` ``(x, weight)``, None for a weight that was not given.
    Sums over rows are kept in float64""",
)
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

    {sections}

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


@gradient_of(_core.gelu)
def gelu_vjp(x: npt.ArrayLike, approximate: Literal["none", "tanh"] = "none") -> tuple[Array, Pullback]:
    """Gelu and the function that takes gradients back through it.

    ``"none"``: ``y = x * Phi(x)``, so ``dx = dy * (Phi(x) + x * phi(x))``, phi the density of the standard
    normal. ``"tanh"``: ``y = x * s(z)`` with the logistic function ``s(z) = 1 / (1 + exp(-z))`` and
    ``z = 2 * sqrt(2 / pi) * (x + 0.044715 * x**3)``, so ``dx = dy * (s + x * s * (1 - s) * dz/dx)``. NaN where x is
    infinite, as in PyTorch.

    {sections}

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2, differentiated.

    Examples
    --------
    >>> y, pullback = gelu_vjp([-1.0, 0.0, 1.0])
    >>> pullback([1.0, 1.0, 1.0]).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """
    return _with_pullback(_core.gelu, _core._gelu_backward, x, approximate)


@gradient_of(
    _core.apply_rotary_emb,
    """\
``pullback(dy)`` gives `RotaryGradients` ``(x, cos, sin)``, None for what ``wrt`` does not name. Those of the
    tables are summed over what was broadcast""",
    """\
wrt : str or sequence of str
    What gradients are wanted of. ``wrt="x"`` saves the work for tables that nobody trains.""",
    "; another name in ``wrt``",
)
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

    {sections}

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

    def table_gradient(table: Array, d: Array) -> Array:
        without_heads = table.ndim == x.ndim - 1 and table.ndim >= 3
        shape = (*table.shape[:-2], 1, *table.shape[-2:]) if without_heads else table.shape
        return like(table, sum_to_shape(d, shape).reshape(table.shape))

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
            dcos = table_gradient(cos, dp * a + dq * b) if "cos" in names else None
            dsin = table_gradient(sin, dq * a - dp * b) if "sin" in names else None
        return RotaryGradients(dx, dcos, dsin)

    return y, pullback


@gradient_of(
    merge_attention,
    """\
``pullback(dout, dlse=None)`` gives `MergeGradients` ``(outs, lses)``, two lists with one array for each
    part""",
    y="result : tuple, (out, lse)",
)
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

    A part whose lse is -inf has no share: its gradients are 0 there, whatever its output holds. Without ``dlse`` the
    merged lse was not used, and with ``dout=None`` the merged output.

    {sections}

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


def _with_pullback(
    forward: Callable[..., Array], backward: Callable[..., Array], x: npt.ArrayLike, option: Any
) -> tuple[Array, Pullback]:
    """Run an operation of one array, both halves of which are in the core."""
    array = as_array("x", x)
    y = forward(array, option)
    dtype = y.dtype  # the pullback must not hold `y`

    def pullback(dy: npt.ArrayLike) -> Array:
        return backward(array, as_fitting_gradient("dy", dy, array.shape, dtype), option)

    return y, pullback


def optional(name: str, x: npt.ArrayLike | None) -> Array | None:
    """Convert an argument that may be None."""
    return None if x is None else as_array(name, x)


def like(x: Array, dx: Array) -> Array:
    """Return a gradient in the dtype of its input; integers count as float64."""
    return dx.astype(gradient_dtype(x), order="C", copy=False)


def pairs(x: Array, interleaved: bool) -> tuple[Array, Array]:
    """Return the two halves of the pairs that rotary embeddings turn, each (..., L, D / 2)."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]
