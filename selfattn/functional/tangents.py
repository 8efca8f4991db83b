"""Attention with tangents of its inputs: forward mode, and second derivatives as products with the Hessian.

The C core computes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, float_dtype, promoted
from selfattn._gradient_tuples import AttentionGradients, check_wrt
from selfattn.functional._gradients import as_fitting_gradient, gradient_array, to_dtype
from selfattn.functional._options import AttentionOptions, accept_options
from selfattn.functional.attention import (
    NAMES,
    PER_HEAD,
    WRT,
    bits_of,
    check_float_mask,
    check_given,
    copy_shared_heads,
    draw_seed,
    fit_to_input,
)

OF_CORE = {  # what the core calls the tangent of each input
    "query": "query_tangent",
    "key": "key_tangent",
    "value": "value_tangent",
    "attn_mask": "mask_tangent",
    "bias": "mask_tangent",
    "offset_bias": "offset_bias_tangent",
    "alibi_slopes": "alibi_tangents",
    "sinks": "sink_tangents",
}

Tangents: TypeAlias = Sequence[npt.ArrayLike | None] | Mapping[str, npt.ArrayLike | None]


@accept_options(AttentionOptions)
def scaled_dot_product_attention_jvp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    tangents: Tangents,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Any]:
    """Compute attention, and how it changes along tangents of its inputs: forward mode, in linear memory.

    Parameters
    ----------
    tangents : sequence or mapping
        The tangents of query, key and value, None for zeros; or by name, in a mapping or an `AttentionGradients`, also
        of "attn_mask" (a float mask), "alibi_slopes", "sinks", "bias" and "offset_bias". Each has the shape of its
        input; what is not named does not move.
    return_lse : bool, default False
        Return ``((out, lse), (out_tangent, lse_tangent))``.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        As :func:`scaled_dot_product_attention`, to rounding.
    out_tangent : ndarray, of the same shape and dtype
        The Jacobian times the tangents. 16 bits are computed in float32.

    Raises
    ------
    ValueError, TypeError, MemoryError, KeyboardInterrupt
        As :func:`scaled_dot_product_attention`; a tangent of another shape than its input, of something that was not
        given or that has none, or float64 where the result has fewer bits. There is no `out`, and the weights
        (`return_weights`) have no derivative.

    Notes
    -----
    The same bits for any number of threads. A closed pair contributes nothing, whatever its tangents hold. A row
    without keys has tangents of 0. docs/theory/second_derivatives.md has the derivation.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.functional import scaled_dot_product_attention_jvp
    >>> q, k, v, dq = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> out, out_tangent = scaled_dot_product_attention_jvp(q, k, v, (dq, None, None))
    >>> step = 1e-6
    >>> moved, _ = scaled_dot_product_attention_jvp(q + step * dq, k, v, (None, None, None))
    >>> np.allclose((moved - out) / step, out_tangent, atol=1e-5)
    True
    """
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
    call = _Call((query, key, value), tangents, given)
    pair, _, (lse, lse_tangent) = _core._attention_jvp(*call.arrays, **call.options)
    out, out_tangent = call.rounded(pair, call.dtype)
    return ((out, lse), (out_tangent, lse_tangent)) if return_lse else (out, out_tangent)


@accept_options(AttentionOptions)
def scaled_dot_product_attention_hvp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    grad_out: npt.ArrayLike | None,
    tangents: Tangents,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    grad_out_tangent: npt.ArrayLike | None = None,
    grad_lse: npt.ArrayLike | None = None,
    grad_lse_tangent: npt.ArrayLike | None = None,
    wrt: Sequence[str] = WRT,
    **options: Unpack[AttentionOptions],
) -> tuple[AttentionGradients, AttentionGradients]:
    """Compute the gradients of attention, and how they change along tangents: products with the Hessian.

    For a loss of the output, give its gradient as `grad_out` and, as `grad_out_tangent`, the tangent of that along
    the tangent of the output (:func:`scaled_dot_product_attention_jvp`). Then the second result is the Hessian of the
    loss times the tangents. The Hessian itself is never stored: memory is linear in L and S.

    Parameters
    ----------
    grad_out : array_like, shape (..., L, Ev)
        The gradient of the output; None for zeros, with `grad_lse`.
    tangents : sequence or mapping
        As :func:`scaled_dot_product_attention_jvp` takes them.
    grad_out_tangent : array_like, optional
        The tangent of `grad_out`, zeros by default: then the loss is linear in the output.
    grad_lse, grad_lse_tangent : array_like, shape (..., L), optional
        The gradient of the log-sum-exp, and its tangent.
    wrt : str or sequence of str, default ("query", "key", "value")
        The inputs whose gradients are returned, as :func:`scaled_dot_product_attention_vjp` takes it; they need not be
        those that have tangents.

    Returns
    -------
    grads : AttentionGradients
        The gradients, as a pullback returns them.
    grads_tangents : AttentionGradients
        Their tangents, of the same shapes and dtypes.

    Raises
    ------
    ValueError, TypeError, MemoryError, KeyboardInterrupt
        As :func:`scaled_dot_product_attention_jvp` and the pullback of :func:`scaled_dot_product_attention_vjp`.

    Notes
    -----
    The same bits for any number of threads. With dropout, give a seed as `rng` to drop the weights that another call
    dropped. The Hessian is symmetric, so double backward is this function, too: docs/theory/second_derivatives.md.

    Examples
    --------
    The Hessian of ``sum(out**2) / 2``, times a tangent of the keys:

    >>> import numpy as np
    >>> from selfattn.functional import scaled_dot_product_attention_hvp, scaled_dot_product_attention_jvp
    >>> q, k, v, dk = np.random.default_rng(0).standard_normal((4, 5, 3))
    >>> out, out_tangent = scaled_dot_product_attention_jvp(q, k, v, {"key": dk})
    >>> grads, product = scaled_dot_product_attention_hvp(
    ...     q, k, v, out, {"key": dk}, grad_out_tangent=out_tangent
    ... )
    >>> product.key.shape
    (5, 3)
    """
    names = check_wrt(wrt, NAMES)
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
    check_given(names, given)
    if "attn_mask" in names:
        check_float_mask("attn_mask", attn_mask)
    call = _Call((query, key, value), tangents, given)
    out, statistics, lse = _core._attention_jvp(*call.arrays, **call.options)
    if grad_out is None and (grad_lse is not None or grad_lse_tangent is not None):
        grad_out = np.zeros_like(out[0])
    given_gradients = {
        "grad_out": (grad_out, out, call.dtype),
        "grad_out_tangent": (grad_out_tangent, out, call.dtype),
        "grad_lse": (grad_lse, lse, lse.dtype),
        "grad_lse_tangent": (grad_lse_tangent, lse, lse.dtype),
    }
    checked = {
        name: as_fitting_gradient(name, x, result.shape[1:], dtype)
        for name, (x, result, dtype) in given_gradients.items()
        if name == "grad_out" or x is not None
    }
    found = _core._attention_hvp(
        *call.arrays, **call.options, **checked, out=out, statistics=statistics, wrt=bits_of(names)
    )
    pairs = {name: call.gradients(name, found[NAMES.index(name)]) for name in names}
    grads, dots = (AttentionGradients(**{name: pair[n] for name, pair in pairs.items()}) for n in (0, 1))
    return grads, dots


class _Call:
    """What both functions take from the core: query, key, value and options, all tangents among these."""

    def __init__(
        self, arrays: tuple[npt.ArrayLike, ...], tangents: Tangents, options: dict[str, Any]
    ) -> None:
        given = dict(zip(WRT, map(as_array, WRT, arrays), strict=True))
        self.inputs = given | options
        self.dtype = promoted(float_dtype(name, x) for name, x in given.items())
        self.computes = np.dtype(np.float64 if self.dtype == np.float64 else np.float32)
        dropout_p, rng = draw_seed(options["dropout_p"], options.get("rng"))
        moved = {
            OF_CORE[name]: self._tangent(name, x) for name, x in _by_name(tangents).items() if x is not None
        }
        self.options = options | {"dropout_p": dropout_p, "rng": rng} | moved
        self.arrays = [
            copy_shared_heads(
                x.astype(np.float32) if x.dtype.itemsize == 2 and x.dtype.kind not in "iu" else x, {}
            )
            for x in given.values()
        ]

    def _tangent(self, name: str, tangent: npt.ArrayLike) -> Array:
        """Return a tangent that fits its input, as floats."""
        if self.inputs.get(name) is None:
            raise ValueError(f"tangents has {name}, which was not given")
        x, what = as_array(name, self.inputs[name]), f"the tangent of {name}"
        if x.dtype == np.bool_:
            raise ValueError(f"tangents has {name}, which is boolean and has no tangent")
        array = as_array(what, gradient_array(what, tangent, self.computes))
        dtype = float_dtype(what, array)
        if array.shape != x.shape:
            raise ValueError(f"{what} has shape {array.shape}; {name} has {x.shape}")
        if name in WRT and dtype == np.float64 != self.computes:
            raise TypeError(
                f"{what} has dtype {array.dtype}, but the result has {self.dtype}: it would be narrowed"
            )
        return array.astype(dtype, copy=False)

    def rounded(self, pair: Array, dtype: np.dtype[Any]) -> tuple[Array, Array]:
        """Return a result and its tangent in their dtype."""
        first, second = (to_dtype(x, dtype, self.options.get("num_threads")) for x in pair)
        return first, second

    def gradients(self, name: str, pair: Any) -> list[Any]:
        """Return the core's gradient of an input, and its tangent, in the input's shape and dtype."""
        if name in PER_HEAD:  # of each row
            pair = np.moveaxis(pair.astype(np.float64).sum(axis=-2), -1, 0)
        given, threads = self.inputs[name], self.options.get("num_threads")
        return [fit_to_input(np.ascontiguousarray(x), given, threads) for x in pair]


def _by_name(tangents: Tangents) -> Mapping[str, npt.ArrayLike | None]:
    if isinstance(tangents, AttentionGradients):
        return tangents._asdict()
    if not isinstance(tangents, Mapping):
        if not isinstance(tangents, list | tuple) or len(tangents) != len(WRT):
            got = f"{len(tangents)}" if isinstance(tangents, list | tuple) else type(tangents).__name__
            raise TypeError(
                f"tangents must be those of {', '.join(WRT)} (None for zeros) or a mapping, not {got}"
            )
        tangents = dict(zip(WRT, tangents, strict=True))
    for name in tangents:
        if name not in OF_CORE:
            raise ValueError(f"tangents may name {', '.join(NAMES)}; it has {name!r}")
    return tangents
