"""Functions that attention layers share: projections, sums that leave masked tokens out, masks of pairs to ignore."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, is_float, warn
from selfattn.engine.weights import Weight, multiply
from selfattn.functional._options import AttentionOptions, names_of
from selfattn.functional._products import linear_backward

PROJECTIONS = ("query", "key", "value")
# The options of a layer's call. The layer itself chooses the others.
OPTIONS = (
    "dropout_p",
    "is_causal",
    *(name for name in names_of(AttentionOptions) if name not in ("scale", "enable_gqa", "block_mask")),
)
BIASES = ("bias", "offset_bias")
ADDITIVE_OPTIONS = ("is_causal", "causal", "key_lengths", "num_threads")


def check_options(options: dict[str, Any], known: tuple[str, ...] = OPTIONS) -> None:
    """Refuse options that the layer does not have."""
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; a layer takes {', '.join(known)}")


def given_biases(options: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the biases of scores that a call has; each has a gradient."""
    return tuple(name for name in BIASES if options.get(name) is not None)


def project(x: Array, weight: Weight, bias: Array | None) -> Array:
    """Compute ``x @ weight.T + bias``; infinities in padding become NaN without a warning."""
    with np.errstate(invalid="ignore", over="ignore"):
        return multiply(x, weight, bias)


def project_backward(dy: Array, x: Array, weight: Array) -> tuple[Array, Array, Array]:
    """Return the gradients of :func:`project`; a token whose ``dy`` is zero contributes nothing, even if it is NaN.

    Masked tokens have zero gradients, but 0 · NaN is NaN. If the gradient of the weight is not finite, it is computed
    again without masked tokens.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        dx, d_weight, d_bias = linear_backward(dy, x, weight)
        if not np.isfinite(d_weight).all():
            used = np.where(dy.any(axis=-1, keepdims=True), x, x.dtype.type(0))
            d_weight = linear_backward(dy, used, weight, with_bias=False)[1]
    return dx, d_weight, d_bias


def weighted_sum(weights: Array, value: Array, allowed: Array) -> Array:
    """Compute ``weights @ value``, (..., L, Ev); a pair that is not ``allowed`` contributes nothing at all.

    Such a pair has weight 0, but 0 · NaN is NaN. So NaN and infinite values are replaced by 0, and then added key by
    key for the queries that may see them.
    """
    finite, zero = np.isfinite(value), value.dtype.type(0)
    output: Array = weights @ np.where(finite, value, zero)
    rest = np.where(finite, zero, value)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
        term = weights[..., :, j, None] * rest[..., None, j, :]
        output += np.where(allowed[..., :, j, None], term, zero)
    return output


class IgnoreMasks(NamedTuple):
    """What a call of PyTorch's layers ignores, as given: True in a boolean mask means *ignore*."""

    attn_mask: npt.ArrayLike | None
    key_padding_mask: npt.ArrayLike | None
    is_causal: bool | None
    key_lengths: npt.ArrayLike | None
    bias: npt.ArrayLike | None = None  # added to the scores beside what is ignored
    offset_bias: npt.ArrayLike | None = None


def mask_from_ignored(
    ignored: IgnoreMasks, lead: tuple[int, ...], num_heads: int, pairs: tuple[int, int], dtype: npt.DTypeLike
) -> tuple[Array | None, Array | None]:
    """Convert the two masks of PyTorch's layers to attention's mask and a bias of keys.

    ``attn_mask`` is (L, S) or (N·num_heads, L, S), ``key_padding_mask`` (N, S), or (S,) for one sequence; each is
    boolean, or floats that are added to the scores. ``lead`` is (N,), or () for one sequence, ``pairs`` (L, S);
    attention computes in ``dtype``.

    The mask that is returned is broadcastable to (N, num_heads, L, S), and boolean, True where attention is allowed,
    or floats. The bias is added to the scores of a key, (N, 1, S) or (1, S), and None unless there are both masks, or a
    padding of floats beside a bias: one mask of both would be as large as the batch.
    """
    attn_mask, key_padding_mask, *_ = ignored
    mask = padding = None
    if attn_mask is not None:
        per_head = (lead[0] * num_heads if lead else num_heads, *pairs)
        mask = _checked_mask("attn_mask", attn_mask, "(L, S) or (N·num_heads, L, S)", pairs, per_head)
        _warn_of_inverted(mask)
        mask = _allowed(mask if mask.ndim == 2 else mask.reshape(*lead, num_heads, *pairs))
    if key_padding_mask is not None:
        named = "(N, S)" if lead else "(S,)"
        padding = _checked_mask("key_padding_mask", key_padding_mask, named, (*lead, pairs[1]))
    if padding is None:
        return mask, None
    if mask is None and (padding.dtype == np.bool_ or ignored.bias is None):
        return _allowed(padding)[..., None, None, :], None
    return mask, _as_bias(padding, np.dtype(dtype))[..., None, :]


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
    """Warn if a mask of pairs to ignore is the lower triangle, which are the pairs that a causal mask allows."""
    length = mask.shape[-1]
    if mask.shape[-2] != length or length < 2 or not mask.size:
        return
    one = mask.reshape(-1, length, length)[0]
    closed = one[0, 0]
    if closed not in (1, -np.inf) or one[-1, 0] != closed or one[0, -1] != 0:  # a quick check
        return
    if not (one == np.where(np.tri(length, dtype=np.bool_), closed, 0)).all():
        return
    if mask.dtype == np.bool_ or closed != 1:
        meaning = f"{closed} means ignore here, so each token sees those after it alone"
    else:
        meaning = "floats are added to the scores here, so each token sees all others"
    warn(
        f"attn_mask is a lower triangle of {closed}, but {meaning}; for causal attention pass is_causal=True, "
        "or a boolean mask that is True above the diagonal: ~np.tri(L, dtype=bool)"
    )


def _allowed(mask: Array) -> Array:
    return ~mask if mask.dtype == np.bool_ else mask


def _as_bias(ignored: Array, dtype: np.dtype[Any]) -> Array:
    """Return a bias of -inf for ignored keys, or the given floats.

    These are clipped so that finite ones stay finite in fewer bits.
    """
    bias: Array
    if ignored.dtype == np.bool_:
        bias = np.where(ignored, dtype.type(-np.inf), dtype.type(0))
    else:
        most = np.finfo(dtype).max
        with np.errstate(over="ignore", invalid="ignore"):
            bias = ignored.astype(dtype)
        bias = np.where(np.isfinite(ignored), np.clip(bias, -most, most), bias)
    return np.ascontiguousarray(bias)  # NumPy kept the memory order of the mask


def with_key_bias(mask: Array, key_bias: Array) -> Array:
    """Combine a mask and a bias of keys into one mask, (N, num_heads, L, S), for steps, which show all scores."""
    bias, both = key_bias[..., None, :], mask
    if mask.dtype != np.bool_:
        with np.errstate(invalid="ignore"):
            both = mask.astype(np.float64) + bias
        both[np.broadcast_to((mask == -np.inf) | (bias == -np.inf), both.shape)] = -np.inf
    elif ((bias == 0) | (bias == -np.inf)).all():
        both = mask & (bias == 0)
    else:
        both = np.where(mask, bias, -np.inf)
    return both


def split_heads(x: Array, num_heads: int) -> Array:
    """View (..., L, h·d) as (..., h, L, d)."""
    return x.reshape(*x.shape[:-1], num_heads, x.shape[-1] // num_heads).swapaxes(-2, -3)


def merge_heads(x: Array) -> Array:
    """Copy (..., h, L, d) to (..., L, h·d)."""
    x = x.swapaxes(-2, -3)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


def mask_for_heads(mask: npt.ArrayLike | None) -> Array | None:
    """Add the axis of heads to a mask (..., L, S) that all heads share."""
    if mask is None:
        return None
    array = as_array("attn_mask", mask)
    return array[..., None, :, :] if array.ndim > 2 else array


def lengths_for_heads(key_lengths: npt.ArrayLike | None) -> Array | None:
    """Add the axis of heads to key lengths, one per sequence."""
    return None if key_lengths is None else as_array("key_lengths", key_lengths)[..., None]
