"""Attention with its gradients: the C core's two halves, put together and brought to the inputs' shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn.functional._gradients import (
    apart,
    as_gradient,
    check_names,
    gradient_dtype,
    round_into,
    rounded,
    row_shares,
    settle_dropout,
)
from selfattn.functional.block_mask import BlockMask
from selfattn.random import TorchGenerator
from selfattn.reference.attention_vjp import AttentionGradients, sum_to_shape

__all__ = [
    "AttentionGradients",
    "scaled_dot_product_attention_backward",
    "scaled_dot_product_attention_forward",
    "scaled_dot_product_attention_vjp",
]

Array: TypeAlias = npt.NDArray[Any]
HEADS = slice(None, -2)  # the axes before length and width
Causal: TypeAlias = Literal["upper_left", "lower_right"]

_OVERLAP_WORK = 10_000  # steps of the search for a shared element, as in the core for out


def scaled_dot_product_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Causal | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    rng: int | np.random.Generator | TorchGenerator | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
) -> tuple[Any, Callable[..., AttentionGradients]]:
    """Compute attention, and return with it the function that pulls gradients back through it.

    The backward pass recomputes the weights tile by tile from two numbers a row, so forward and backward
    take memory linear in L and S. The gradients have the same bits for any number of threads.

    Parameters
    ----------
    query : array_like, shape (..., L, E)
    key : array_like, shape (..., S, E)
    value : array_like, shape (..., S, Ev)
        Floating point or integers; integers count as float64.
    attn_mask, dropout_p, is_causal
    scale, enable_gqa, causal, window, softcap, alibi_slopes, sinks, key_lengths, block_mask
        See :func:`scaled_dot_product_attention`.
    rng : int or numpy.random.Generator, optional
        The seed of dropout. The pullback drops the same weights.
    return_lse : bool, default False
        Return ``(out, lse)`` in place of ``out``; the pullback then takes the gradient of both.
    return_weights : bool, default False
        Refused: the weights have no gradient here.
    out, num_threads
        See :func:`scaled_dot_product_attention`. ``num_threads`` counts for the pullback as well.
    wrt : sequence of str, default ("query", "key", "value")
        What to differentiate with respect to: also "attn_mask" (a float mask), "alibi_slopes", "sinks".
        Gradients that are left out are not computed.

    Returns
    -------
    out : ndarray, shape (..., L, Ev), or (out, lse)
    pullback : callable
        ``pullback(grad_out)`` returns :class:`AttentionGradients`, a named tuple; with ``return_lse`` it is
        ``pullback(grad_out, grad_lse)``, of shapes (..., L, Ev) and (..., L). Each gradient has the shape and
        dtype of its input (float64 for integers), summed over what was broadcast. It may be called again. It
        holds references to the arguments and to ``out``: changed in place, they make later gradients
        meaningless, never unsafe. See the notes for what it copies. An ``out`` of 16 bits it holds in
        float32, not yet rounded.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention`; a ``wrt`` that names what has no gradient; in the pullback,
        a ``grad_out`` or ``grad_lse`` of another shape than its result, or float64 where that has fewer bits.
    KeyboardInterrupt
        Ctrl-C, in Python's main thread, during the call, which leaves ``out`` undefined, or in the pullback,
        which may be called again.

    Notes
    -----
    In ``pullback(None, grad_lse)`` None stands for zeros.

    Two kinds of inputs are copied: queries, keys and values that NumPy has to convert, such as lists; and keys
    and values that are views which repeat themselves along a leading axis (as ``numpy.broadcast_to`` makes),
    since each repetition has a gradient of its own.

    A row with nothing to attend to, a masked key and a masked query get zeros, whatever they hold.

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
    >>> grads = pullback(np.ones_like(out))
    >>> grads.key.shape, grads.attn_mask is None
    ((2, 5, 4), True)
    >>> np.allclose(grads.value.sum(axis=1), 5)  # five rows of weights with sum 1
    True
    """
    names = check_names(wrt)
    if return_weights:
        raise TypeError("return_weights has no gradient; call scaled_dot_product_attention for the weights")
    for name, what in {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sinks": sinks}.items():
        if name in names and what is None:
            raise ValueError(f"wrt names {name}, which was not given")
    if "attn_mask" in names and np.asarray(attn_mask).dtype == np.bool_:
        raise ValueError("wrt names attn_mask, but a boolean mask has no gradient: pass a float mask")
    q, k, v = _as_array(query), apart(_as_array(key), HEADS), apart(_as_array(value), HEADS)
    dropout_p, rng = settle_dropout(dropout_p, rng)
    arguments = (q, k, v, attn_mask, dropout_p, is_causal)
    options: dict[str, Any] = {
        "scale": scale, "enable_gqa": enable_gqa, "causal": causal, "window": window, "softcap": softcap,
        "alibi_slopes": alibi_slopes, "sinks": sinks, "key_lengths": key_lengths, "block_mask": block_mask,
        "rng": rng, "num_threads": num_threads,
    }  # fmt: skip
    output, statistics, unrounded, *lse = _core._attention_forward(
        *arguments, **options, return_lse=return_lse, out=out, unrounded=True
    )
    if unrounded is not output:
        round_into(output, unrounded, num_threads)
    dtype = output.dtype  # the pullback holds the other one alone

    def pullback(grad_out: npt.ArrayLike | None, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        """Pull the gradient of the output (and of the log-sum-exp) back to the inputs that wrt names."""
        if grad_lse is not None and not return_lse:
            raise TypeError("grad_lse was given, but the log-sum-exp was not returned: use return_lse=True")
        if grad_out is None and grad_lse is not None:
            grad_out = np.zeros_like(unrounded, dtype)
        grad_out = as_gradient("grad_out", grad_out, dtype)
        return scaled_dot_product_attention_backward(
            grad_out, unrounded, statistics, *arguments, **options, grad_lse=grad_lse, wrt=names
        )

    return ((output, lse[0]) if return_lse else output), pullback


def scaled_dot_product_attention_forward(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Causal | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    rng: int | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    num_threads: int | None = None,
) -> tuple[Array, ...]:
    """Compute attention and keep what the backward pass needs: the lower half of the vjp.

    For those who manage memory themselves; :func:`scaled_dot_product_attention_vjp` does it for you.

    Parameters
    ----------
    query, key, value, attn_mask, dropout_p, is_causal
    scale, enable_gqa, causal, window, softcap, alibi_slopes, sinks, key_lengths, block_mask
    return_lse, return_weights, num_threads
        As :func:`scaled_dot_product_attention`.
    rng : int, optional
        The seed of dropout, needed with it: the backward call must be given the same.
    out : ndarray, optional
        As :func:`scaled_dot_product_attention`. In place of 16 bits it may be of float32: it is then not rounded,
        and gradients from it take less time and are more exact, as those of the vjp.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
    statistics : ndarray, shape (..., L, 2)
        Of each row the maximum of its scores, in log2 units (or less, by at most 8), and one over the sum of
        its exponentials; float64 for float64, else float32.
    lse, weights
        If asked for.

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention`.
    KeyboardInterrupt
        Ctrl-C during the call, in Python's main thread. What ``out`` holds is then undefined.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> x = np.eye(3)
    >>> out, statistics = sa.scaled_dot_product_attention_forward(x, x, x)
    >>> grads = sa.scaled_dot_product_attention_backward(np.ones_like(out), out, statistics, x, x, x)
    >>> grads.query.shape
    (3, 3)
    """
    results: tuple[Array, ...] = _core._attention_forward(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        block_mask=block_mask, rng=rng, return_lse=return_lse, return_weights=return_weights, out=out, num_threads=num_threads,
    )  # fmt: skip
    return results


def scaled_dot_product_attention_backward(
    grad_out: npt.ArrayLike | None,
    out: Array,
    statistics: Array,
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: Causal | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    block_mask: BlockMask | None = None,
    rng: int | None = None,
    num_threads: int | None = None,
    grad_lse: npt.ArrayLike | None = None,
    wrt: Sequence[str] = ("query", "key", "value"),
    gradients: AttentionGradients | None = None,
) -> AttentionGradients:
    """Compute the gradients of attention from what the forward half returned.

    Parameters
    ----------
    grad_out : array_like, shape (..., L, Ev)
        The gradient with respect to ``out``.
    out : ndarray, shape (..., L, Ev)
    statistics : ndarray, shape (..., L, 2)
        As :func:`scaled_dot_product_attention_forward` returned them.
    query, key, value, attn_mask, dropout_p, is_causal
    scale, enable_gqa, causal, window, softcap, alibi_slopes, sinks, key_lengths, block_mask, rng
        Those of the forward call.
    num_threads : int, optional
        See :func:`scaled_dot_product_attention`.
    grad_lse : array_like, shape (..., L), optional
        The gradient with respect to the log-sum-exp.
    wrt : sequence of str
        See :func:`scaled_dot_product_attention_vjp`.
    gradients : AttentionGradients, optional
        Arrays to write the gradients to: exact shapes and dtypes, writable, without overlap with an input
        or with one another; None for those that should be new. C-contiguous arrays of the precision that
        computes (float32, or float64) are written in place; what has other strides, 16 bits or a broadcast
        shape, and what is summed from shares of rows, is computed beside them and copied.

    Returns
    -------
    AttentionGradients

    Raises
    ------
    TypeError, ValueError, MemoryError
        As :func:`scaled_dot_product_attention_vjp`.
    KeyboardInterrupt
        Ctrl-C during the call, in Python's main thread. What the arrays of ``gradients`` hold is then
        undefined.

    References
    ----------
    Dao et al., "FlashAttention", 2022, algorithm 4.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> x = np.eye(3, dtype=np.float32)
    >>> out, statistics = sa.scaled_dot_product_attention_forward(x, x, x)
    >>> mine = sa.AttentionGradients(query=np.empty_like(x), key=None, value=None)
    >>> grads = sa.scaled_dot_product_attention_backward(
    ...     np.ones_like(out), out, statistics, x, x, x, wrt=("query",), gradients=mine)
    >>> grads.query is mine.query
    True
    """
    names = check_names(wrt)
    for name, kept in (("out", out), ("statistics", statistics)):
        if not isinstance(kept, np.ndarray):
            raise TypeError(
                f"{name} must be the array that the forward call returned, got {type(kept).__name__}"
            )
    q, k, v = _as_array(query), _as_array(key), _as_array(value)
    extras = (attn_mask, alibi_slopes, sinks)
    inputs = AttentionGradients(q, k, v, *(None if x is None else np.asarray(x) for x in extras))
    grad_out = as_gradient("grad_out", grad_out, out.dtype)
    grad_lse = None if grad_lse is None else as_gradient("grad_lse", grad_lse, statistics.dtype)
    if gradients is not None:
        others = {"grad_out": grad_out, "out": out, "statistics": statistics, "grad_lse": grad_lse,
                  "key_lengths": key_lengths}  # fmt: skip
        _check_gradients(gradients, names, inputs, others)
    bits = sum(1 << n for n, name in enumerate(AttentionGradients._fields) if name in names)
    found = _core._attention_backward(
        q, apart(k, HEADS), apart(v, HEADS), attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa,
        causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks,
        key_lengths=key_lengths, block_mask=block_mask, rng=rng, num_threads=num_threads, out=out, grad_out=grad_out, statistics=statistics, grad_lse=grad_lse, wrt=bits, gradients=gradients,
    )  # fmt: skip
    fitted: list[Array | None] = []
    for name, raw, given in zip(AttentionGradients._fields, found, inputs, strict=True):
        if raw is None or given is None:
            fitted.append(None)
            continue
        gradient = _fitted(name, raw, given, num_threads)
        target = None if gradients is None else getattr(gradients, name)
        if target is not None and target is not gradient:
            np.copyto(target, gradient)
        fitted.append(gradient if target is None else target)
    return AttentionGradients(*fitted)


def _fitted(name: str, raw: Array, given: Array, num_threads: int | None) -> Array:
    """Sum what the core found to the shape of the input, in the gradient's dtype."""
    in_shares = name in ("alibi_slopes", "sinks")  # of those there is each row's share
    if not in_shares and raw.shape == given.shape and raw.dtype == given.dtype:
        return raw  # as a rule: the rest takes 2 us for each gradient
    dtype = gradient_dtype(given)
    with np.errstate(all="ignore"):
        whole = row_shares(name, raw).sum(axis=-1) if in_shares else raw
        if whole.size == 0:  # no query head may be a broadcast of any number of key heads
            return np.zeros(given.shape, dtype)
        return rounded(sum_to_shape(whole, given.shape), dtype, num_threads)


def _as_array(x: npt.ArrayLike) -> Any:
    """Convert what is no array once, so that the backward pass need not; the core checks the rest."""
    return x if isinstance(x, np.ndarray) else np.asarray(x)


def _check_gradients(
    gradients: AttentionGradients, names: tuple[str, ...], inputs: AttentionGradients, others: dict[str, Any]
) -> None:
    if not isinstance(gradients, AttentionGradients):
        raise TypeError(f"gradients must be an AttentionGradients, got {type(gradients).__name__}")
    readers = {name: x for name, x in (inputs._asdict() | others).items() if isinstance(x, np.ndarray)}
    for name, target in gradients._asdict().items():
        if target is None:
            continue
        given = getattr(inputs, name)
        if name not in names or given is None:
            raise ValueError(f"gradients has an array for {name}, which wrt does not name")
        _check_target(f"gradients.{name}", target, given)
        for other, x in readers.items():
            _check_overlap(f"gradients.{name}", target, other, x)
        readers[f"gradients.{name}"] = target


def _check_target(name: str, target: Array, given: Array) -> None:
    dtype = gradient_dtype(given)
    if not isinstance(target, np.ndarray) or isinstance(target, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name} must be a plain array of shape {given.shape} and dtype {dtype}, "
                        f"got {type(target).__name__}")  # fmt: skip
    if (target.shape, target.dtype) != (given.shape, dtype):
        raise ValueError(f"{name} must be an array of shape {given.shape} and dtype {dtype}, "
                         f"got {target.dtype} of shape {target.shape}")  # fmt: skip
    if not target.flags.writeable:
        raise ValueError(f"{name} is read-only")
    reach = target.itemsize  # each step must be longer than everything below it, as the core has it for out
    for step, n in sorted(
        (abs(step), n) for step, n in zip(target.strides, target.shape, strict=True) if n > 1
    ):
        if step < reach and target.size > 0:
            raise ValueError(f"{name} overlaps itself in memory: several of its elements are one")
        reach += (n - 1) * step


def _check_overlap(name: str, target: Array, other_name: str, other: Array) -> None:
    try:
        shared = np.shares_memory(target, other, max_work=_OVERLAP_WORK)  # type: ignore[arg-type] # NumPy's stub has 0, -1
    except np.exceptions.TooHardError:
        raise ValueError(f"cannot tell whether {name} overlaps {other_name}: their strides are too intricate; "
                         f"pass a plain {name}") from None  # fmt: skip
    if shared:
        raise ValueError(f"{name} overlaps {other_name} in memory")
