"""What attention layers share: projections and sums that masked tokens do not touch, and masks that say what to ignore."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn.functional._arguments import as_array, is_float
from selfattn.functional._products import linear_backward
from selfattn.nn._arrays import Array
from selfattn.nn._compact import Weight, multiply

PROJECTIONS = ("query", "key", "value")
# What a call may set.
OPTIONS = (
    "dropout_p", "is_causal", "causal", "window", "softcap", "alibi_slopes", "sinks", "key_lengths", "rng",
    "num_threads",
)  # fmt: skip
ADDITIVE_OPTIONS = ("is_causal", "causal", "key_lengths", "num_threads")


def check_options(options: dict[str, Any], known: tuple[str, ...] = OPTIONS) -> None:
    """Refuse options that the layers do not pass on."""
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; a layer takes {', '.join(known)}")


def project(x: Array, weight: Weight, bias: Array | None) -> Array:
    """Compute ``x @ weight.T + bias``; padding that holds infinities makes NaN of itself, quietly."""
    with np.errstate(invalid="ignore", over="ignore"):
        return multiply(x, weight, bias)


def project_backward(dy: Array, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Differentiate :func:`project`; a token whose ``dy`` is zero contributes nothing, whatever it holds.

    Masked tokens have zero gradients, but 0 · NaN is NaN. That always shows in the gradient of the weight,
    which is then computed again without them.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        dx, d_weight, d_bias = linear_backward(dy, x, weight)
        if not np.isfinite(d_weight).all():
            used = np.where(dy.any(axis=-1, keepdims=True), x, x.dtype.type(0))
            d_weight = linear_backward(dy, used, weight)[1]
    return dx, d_weight, d_bias


def weighted_sum(weights: Array, value: Array, allowed: Array) -> Array:
    """Compute ``weights @ value``, (..., L, Ev); a pair that is not ``allowed`` contributes nothing at all.

    Its weight is 0, but 0 · NaN is NaN. So the NaN and infinite values are set to 0 first, and added key by key for the
    queries that are allowed to see them.
    """
    finite, zero = np.isfinite(value), value.dtype.type(0)
    output: Array = weights @ np.where(finite, value, zero)
    rest = np.where(finite, zero, value)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
        term = weights[..., :, j, None] * rest[..., None, j, :]
        output += np.where(allowed[..., :, j, None], term, zero)
    return output


def mask_from_ignored(
    attn_mask: npt.ArrayLike | None,
    key_padding_mask: npt.ArrayLike | None,
    lead: tuple[int, ...],
    num_heads: int,
    pairs: tuple[int, int],
) -> Array | None:
    """Turn PyTorch's two masks for layers, whose True means *ignore*, into one for the attention function.

    Parameters
    ----------
    attn_mask : array_like, shape (L, S) or (N·num_heads, L, S), optional
    key_padding_mask : array_like, shape (N, S), or (S,) for one sequence, optional
        Each is boolean or floating point, which is added to the scores.
    lead : tuple of int
        (N,), or () for one sequence.
    num_heads : int
    pairs : (L, S)

    Returns
    -------
    ndarray, broadcastable to (N, num_heads, L, S), or None
        Boolean, True where attention is allowed, or floating point.
    """
    masks = []
    if attn_mask is not None:
        per_head = (lead[0] * num_heads if lead else num_heads, *pairs)
        mask = _checked_mask("attn_mask", attn_mask, "(L, S) or (N·num_heads, L, S)", pairs, per_head)
        _warn_of_inverted(mask)
        masks.append(mask if mask.ndim == 2 else mask.reshape(*lead, num_heads, *pairs))
    if key_padding_mask is not None:
        named = "(N, S)" if lead else "(S,)"
        mask = _checked_mask("key_padding_mask", key_padding_mask, named, (*lead, pairs[1]))
        masks.append(mask[..., None, None, :])
    if not masks:
        return None
    first, *more = masks
    return _both(first, *more) if more else _allowed(first)


def _checked_mask(name: str, mask: npt.ArrayLike, named: str, *shapes: tuple[int, ...]) -> Array:
    array = as_array(name, mask)
    if array.dtype != np.bool_ and not is_float(array.dtype):
        raise TypeError(
            f"{name} must be boolean, True where attention is to ignore something, or floats that are added to "
            f"the scores, not {array.dtype}"
        )
    if array.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name} must have shape {named}, here {wanted}, not {array.shape}")
    return array


def _warn_of_inverted(mask: Array) -> None:
    """Warn of a lower triangle, which is what a causal mask allows, where it says what to ignore."""
    length = mask.shape[-1]
    if mask.shape[-2] != length or length < 2 or not mask.size:
        return
    one = mask.reshape(-1, length, length)[0]
    closed = one[0, 0]
    if closed not in (1, -np.inf) or one[-1, 0] != closed or one[0, -1] != 0:  # a quick look
        return
    if not (one == np.where(np.tri(length, dtype=np.bool_), closed, 0)).all():
        return
    if mask.dtype == np.bool_ or closed != 1:
        meaning = f"{closed} means ignore here, so each token sees those after it alone"
    else:
        meaning = "floats are added to the scores here, so each token sees all others"
    warnings.warn(
        f"attn_mask is a lower triangle of {closed}, but {meaning}; for causal attention pass is_causal=True, "
        "or a boolean mask that is True above the diagonal: ~np.tri(L, dtype=bool)",
        UserWarning,
        stacklevel=_frames_to_caller(),
    )


def _frames_to_caller() -> int:
    """Return the stacklevel, for the function that calls this, of the first frame outside of the package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "selfattn":
        frame, level = frame.f_back, level + 1
    return level


def _allowed(mask: Array) -> Array:
    return ~mask if mask.dtype == np.bool_ else mask


def _both(first: Array, second: Array) -> Array:
    """Put two masks of ignored pairs together: what either ignores is ignored.

    The result is as large as the batch, so it is boolean where it can be, and of no wider floats than the masks.
    """
    closed, others = _as_closed(first), _as_closed(second)
    if closed is not None and others is not None:
        both: Array = closed | others
        return np.logical_not(both, out=both)
    if closed is not None or others is not None:
        added = first if closed is None else second
        ignored = others if closed is None else closed
        assert ignored is not None
        return np.where(ignored, added.dtype.type(-np.inf), added)
    if first.dtype == second.dtype and first.dtype.kind == "f" and _sum_is_finite(first, second):
        return first + second
    # The sum of finite float32 masks is finite in float64.
    with np.errstate(invalid="ignore"):
        added = first.astype(np.float64) + second.astype(np.float64)
    added[np.broadcast_to((first == -np.inf) | (second == -np.inf), added.shape)] = -np.inf
    return added


def _as_closed(mask: Array) -> Array | None:
    """See a mask as boolean, True for what is ignored, if it says no more than that."""
    if mask.dtype == np.bool_:
        return mask
    ignored: Array = mask == -np.inf
    return ignored if (ignored | (mask == 0)).all() else None


def _sum_is_finite(*masks: Array) -> bool:
    """Tell whether the sum of float masks has no infinity but that of what is ignored, and no NaN."""
    least = [float(mask.min(where=mask > -np.inf, initial=0)) for mask in masks]
    most = [float(mask.max(initial=0)) for mask in masks]
    limit = float(np.finfo(masks[0].dtype).max)
    return -sum(least) <= limit and sum(most) <= limit  # False for NaN
