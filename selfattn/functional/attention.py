"""Attention with its gradients: the call, its pullback, and gradients in the inputs' shapes, from top to bottom.

The C core computes both passes. Packed attention, layers and other libraries' doors share what follows the first
function: a call with ``cu_seqlens_q`` and ``cu_seqlens_k`` among its options is one of packed sequences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_array, seed_from_rng
from selfattn._gradient_tuples import AttentionGradients, check_wrt
from selfattn.functional._gradients import gradient_array, gradient_dtype, sum_to_shape, to_dtype
from selfattn.functional._options import AttentionOptions, accept_options

WRT = ("query", "key", "value")
NAMES = AttentionGradients._fields
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k")
PER_HEAD = ("alibi_slopes", "sinks")

Pullback: TypeAlias = Callable[..., AttentionGradients]


@accept_options(AttentionOptions)
def scaled_dot_product_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    wrt: Sequence[str] = WRT,
    **options: Unpack[AttentionOptions],
) -> tuple[Any, Pullback]:
    """Compute attention, and return with it the function that pulls gradients back through it.

    The backward pass recomputes the weights tile by tile from two numbers a row, so forward and backward
    take memory linear in L and S. The gradients have the same bits for any number of threads.

    Parameters
    ----------
    return_lse : bool, default False
        Return ``(out, lse)`` in place of ``out``; the pullback then takes the gradient of both.
    return_weights : bool, default False
        Refused: the weights have no gradient here.
    wrt : str or sequence of str, default ("query", "key", "value")
        The inputs to differentiate with respect to, each once: also "attn_mask" (a float mask), "alibi_slopes",
        "sinks", "bias", "offset_bias". Other gradients are not computed.

    Returns
    -------
    out : ndarray, shape (..., L, Ev), or (out, lse)
    pullback : callable
        ``dq, dk, dv = pullback(grad_out)``: it returns :class:`AttentionGradients`, a tuple of the gradients that
        ``wrt`` names, in its order; with ``return_lse`` it is ``pullback(grad_out, grad_lse)``, of shapes
        (..., L, Ev) and (..., L). Each gradient has the shape and dtype of its input (float64 for integers), summed
        over broadcast axes. It may be called again. It holds references to the arguments and to ``out``: changing
        them in place makes later gradients wrong, but never unsafe. The notes say which arguments it copies. An
        ``out`` of 16 bits is held in float32, before rounding.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention`; a name in ``wrt`` that has no gradient, or twice; in the pullback,
        a ``grad_out`` or ``grad_lse`` of another shape than its result, or float64 where the result has fewer bits.
    KeyboardInterrupt
        Ctrl-C, in Python's main thread, during the call, which leaves ``out`` undefined, or in the pullback,
        which may be called again.

    Notes
    -----
    The options also hold for the pullback, which drops the same weights. In ``pullback(None, grad_lse)`` None means
    zeros.

    Two kinds of inputs are copied: lists and other queries, keys and values that NumPy converts; and keys and values
    that are repeated along a leading axis by a view (as of ``numpy.broadcast_to``), since each repetition has a
    gradient of its own.

    The gradients of a row without keys, of a masked key and of a masked query are zeros, whatever values these have.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4 and appendix B.2. The derivation in this package's
    notation is docs/theory/backward.md.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))
    >>> out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    >>> dq, dk, dv = pullback(np.ones_like(out))
    >>> dk.shape
    (2, 5, 4)
    >>> np.allclose(dv.sum(axis=1), 5)  # five rows of weights with sum 1
    True
    """
    names = check_wrt(wrt, NAMES)
    if return_weights:
        raise TypeError("return_weights has no gradient; call scaled_dot_product_attention for the weights")
    if "attn_mask" in names:
        check_float_mask("attn_mask", attn_mask)
    given = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
    return attention_vjp((query, key, value), names, return_lse=return_lse, out=out, **given)


def attention_vjp(
    arrays: tuple[npt.ArrayLike, ...],
    names: tuple[str, ...],
    *,
    return_lse: bool,
    out: Array | None,
    dropout_p: Any,
    rng: Any = None,
    **options: Any,
) -> tuple[Any, Pullback]:
    """Run the forward pass on query, key and value; return its result and its pullback."""
    check_given(names, options)
    q, k, v = map(as_array, WRT, arrays)
    k, v = copy_shared_heads(k, options), copy_shared_heads(v, options)
    options["dropout_p"], options["rng"] = draw_seed(dropout_p, rng)
    output, statistics, unrounded, *lse = attention_forward(
        q, k, v, return_lse=return_lse, out=out, **options
    )
    dtype = output.dtype  # the pullback must not hold `output`
    # Copies: the caller may change the offsets before the pullback runs.
    options |= {name: as_array(name, options[name]).copy() for name in OFFSETS if name in options}

    def pullback(grad_out: npt.ArrayLike | None, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        """Pull the gradient of the output (and of the log-sum-exp) back to the inputs named in ``wrt``."""
        if grad_lse is not None:
            if not return_lse:
                raise TypeError(
                    "grad_lse was given, but the log-sum-exp was not returned: use return_lse=True"
                )
            grad_out = np.zeros_like(unrounded, dtype) if grad_out is None else grad_out
            grad_lse = gradient_array("grad_lse", grad_lse, statistics.dtype)
        grad_out = gradient_array("grad_out", grad_out, dtype)
        return attention_backward(
            q,
            k,
            v,
            names=names,
            grad_out=grad_out,
            grad_lse=grad_lse,
            out=unrounded,
            statistics=statistics,
            **options,
        )

    return ((output, lse[0]) if return_lse else output), pullback


def attention_forward(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, ...]:
    """Run the core's forward pass; return the output, what the backward pass needs, and what ``options`` ask for.

    The backward pass needs for each row the maximum of its scores, in log2 units (or less, by at most 8), and one over
    the sum of its exponentials, as statistics (..., L, 2); and the output before it was rounded to 16 bits.
    """
    forward = _core._varlen_forward if _is_packed(options) else _core._attention_forward
    output, statistics, unrounded, *others = forward(query, key, value, **options, unrounded=True)
    if unrounded is not output:
        if output.flags.c_contiguous and output.flags.aligned:
            _core._narrow(unrounded, output, options.get("num_threads") or 0)
        else:
            output[...] = to_dtype(unrounded, output.dtype, options.get("num_threads"))
    return output, statistics, unrounded, *others


def attention_backward(
    query: Array,
    key: Array,
    value: Array,
    *,
    names: tuple[str, ...],
    out: Array,
    statistics: Array,
    grad_out: Array,
    grad_lse: Array | None = None,
    **options: Any,
) -> AttentionGradients:
    """Run the core's backward pass; return the gradients that ``names`` lists, in their order and the inputs' shapes.

    ``out`` may be the output before it was rounded. Dropout needs the forward pass's seed as ``rng``.
    """
    key, value = copy_shared_heads(key, options), copy_shared_heads(value, options)
    given, threads = {"query": query, "key": key, "value": value, **options}, options.get("num_threads")
    backward = _core._varlen_backward if _is_packed(options) else _core._attention_backward
    kept: dict[str, Any] = {"out": out, "statistics": statistics, "grad_out": grad_out, "grad_lse": grad_lse}
    gradients = backward(**given, **kept, wrt=bits_of(names))
    found = {}
    for name in names:
        x: Any = gradients[NAMES.index(name)]
        x = _sum_rows(x, options.get("cu_seqlens_q")) if name in PER_HEAD else x
        found[name] = fit_to_input(x, given[name], threads)
    return AttentionGradients(**found)


def _sum_rows(rows: Array, offsets: Any) -> Array:
    """Sum the terms of rows in the gradient of numbers per head: over all rows, or over those of each sequence.

    A term is x, or x - y * z, in float64: see docs/theory/backward.md.
    """
    with np.errstate(all="ignore"):  # as in C, without NumPy's warnings
        wide = rows.astype(np.float64)
        terms = wide[..., 0] if wide.shape[-1] == 1 else wide[..., 0] - wide[..., 1] * wide[..., 2]
        if offsets is None:
            return np.asarray(terms.sum(axis=-1))
        sums = [terms[a:b].sum(axis=0) for a, b in pairwise(offsets)]
        return np.array(sums).reshape(len(offsets) - 1, terms.shape[1])


def fit_to_input(gradient: Any, given: Any, num_threads: int | None) -> Any:
    """Return the core's gradient in its input's shape and dtype: it is summed over the axes that were broadcast."""
    if isinstance(gradient, list):  # masks of packed sequences
        pairs = zip(gradient, given, strict=True)
        return [None if each is None else fit_to_input(each, mask, num_threads) for each, mask in pairs]
    given = as_array("given", given)
    if gradient.shape == given.shape and gradient.dtype == given.dtype:
        return gradient
    dtype = gradient_dtype(given)
    if gradient.size == 0:  # without query heads, there may be any number of key heads
        return np.zeros(given.shape, dtype)
    with np.errstate(all="ignore"):
        return to_dtype(sum_to_shape(gradient, given.shape), dtype, num_threads)


# -------------------------------------------------------------------------------------------------- arguments


@functools.cache
def bits_of(names: tuple[str, ...]) -> int:
    """Return what the core takes as ``wrt``."""
    return sum(1 << NAMES.index(name) for name in names)


def check_given(names: tuple[str, ...], options: dict[str, Any]) -> None:
    """Refuse names in ``wrt`` of arguments that were not given."""
    for name in names:
        if name not in WRT and options.get(name) is None:
            raise ValueError(f"wrt names {name}, which was not given")


def check_float_mask(name: str, mask: npt.ArrayLike | None) -> None:
    """Refuse a boolean mask, which has no gradient."""
    if mask is not None and as_array(name, mask).dtype == np.bool_:
        raise ValueError(f"wrt names attn_mask, but {name} is boolean and has no gradient: pass a float mask")


def copy_shared_heads(x: Array, options: dict[str, Any]) -> Array:
    """Copy keys or values that are broadcast along an axis of heads, so that each head has its own gradient.

    The core would add up the gradients of heads that share keys and values in memory, which is right only along axes
    of length 1.
    """
    if 0 not in x.strides:
        return x
    axes = slice(1, 2) if _is_packed(options) else slice(None, -2)
    shared = any(n > 1 and step == 0 for n, step in zip(x.shape[axes], x.strides[axes], strict=True))
    return x.copy() if shared else x


def _is_packed(options: dict[str, Any]) -> bool:
    return "cu_seqlens_q" in options


def draw_seed(dropout_p: Any, rng: Any) -> tuple[Any, Any]:
    """Return dropout's probability as a float and, if it is not 0, a seed.

    With the seed both passes drop the same weights.
    """
    try:
        is_bool = isinstance(dropout_p, bool) or getattr(dropout_p, "dtype", None) == np.bool_
        number = dropout_p if is_bool or isinstance(dropout_p, str | bytes) else float(dropout_p)
    except (TypeError, ValueError, OverflowError):
        return dropout_p, rng  # the core raises
    drops = isinstance(number, float) and 0 < number <= 1
    return number, seed_from_rng(rng) if drops else rng
