"""Checks of the arguments of attention: messages name what does not fit. `selfattn.reference` checks nothing."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import (
    Array,
    as_array,
    check_number,
    check_probability,
    float_dtype,
    is_float,
    seed_from_rng,
)
from selfattn.reference.call import Call, attention_call


def check_call(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Call:
    """Check the arguments of attention, and return them as the reference takes them."""
    q, k, v = as_array("query", query), as_array("key", key), as_array("value", value)
    for name, x in (("query", q), ("key", k), ("value", v)):
        float_dtype(name, x)
    enable_gqa, causal = options.get("enable_gqa", False), options.get("causal")
    pairs = check_shapes(q, k, v, enable_gqa)

    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if isinstance(flag, str | bytes | float):
            raise TypeError(f"{name} must be a bool, not {flag!r}")
    if isinstance(attn_mask, bool):
        raise TypeError(f"attn_mask must be an array, not {attn_mask} (a causal mask is is_causal=True)")
    if causal not in (None, "upper_left", "lower_right"):
        raise ValueError(f'causal must be None, "upper_left" or "lower_right", not {causal!r}')
    if is_causal and causal == "lower_right":
        raise ValueError('is_causal=True is causal="upper_left" and contradicts causal="lower_right"')
    mask = None if attn_mask is None else check_mask(attn_mask, pairs)
    checked: dict[str, Any] = check_biases(options, mask, pairs) | {
        "key_lengths": check_key_lengths(options.get("key_lengths"), pairs),
        "window": check_window(options.get("window")),
    }
    if (block_mask := options.get("block_mask")) is not None:
        if not hasattr(block_mask, "to_dense"):
            kind = type(block_mask).__name__
            raise TypeError(f"block_mask must be a selfattn.BlockMask or None, not {kind}")
        check_broadcast("block_mask", block_mask.to_dense(*pairs[-2:]), "(..., L, S) =", pairs)

    if (softcap := options.get("softcap")) is not None:
        checked["softcap"] = softcap = check_number("softcap", softcap)
        if not (math.isfinite(softcap) and softcap > 0):
            raise ValueError(f"softcap must be a finite number above 0, not {softcap!r}")
    dropout_p = check_probability("dropout_p", dropout_p)
    checked["rng"] = seed_from_rng(options.get("rng"), draws=dropout_p > 0)
    if (scale := options.get("scale")) is not None:
        checked["scale"] = check_number("scale", scale)
        if math.isnan(checked["scale"]):
            raise ValueError("scale must be a number, not NaN")
    for name in ("alibi_slopes", "sinks"):
        if (numbers := options.get(name)) is not None:
            checked[name] = numbers = as_array(name, numbers)
            float_dtype(name, numbers)
            check_per_head(name, numbers, pairs)
    return attention_call(q, k, v, mask, dropout_p, is_causal, **options | checked)


def check_shapes(query: Array, key: Array, value: Array, enable_gqa: bool) -> tuple[int, ...]:
    """Return (..., L, S) of arrays whose shapes fit."""
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dims, (..., length, width), not shape {array.shape}"
            )
    q, k, v = query.shape, key.shape, value.shape
    if q[-1] != k[-1]:
        raise ValueError(f"query and key differ in width (last axis): shapes {q} and {k}")
    if k[-2] != v[-2]:
        raise ValueError(f"key and value differ in length (axis -2): shapes {k} and {v}")
    if enable_gqa:
        if min(len(q), len(k), len(v)) < 3:
            raise ValueError(f"enable_gqa=True needs a head axis (-3): shapes {q}, {k} and {v}")
        heads, kv_heads = q[-3], k[-3]
        if v[-3] != kv_heads:
            raise ValueError(f"key and value differ in heads (axis -3): shapes {k} and {v}")
        if heads % kv_heads if kv_heads else heads:
            raise ValueError(
                f"enable_gqa=True: {heads} query heads are not a multiple of {kv_heads} key heads"
            )
        k, v = ((*shape[:-3], heads, *shape[-2:]) for shape in (k, v))
    try:
        return (*np.broadcast_shapes(q[:-2], k[:-2], v[:-2]), q[-2], k[-2])
    except ValueError:
        hint = "" if enable_gqa else " (fewer key heads than query heads need enable_gqa=True)"
        raise ValueError(
            f"the leading dims of query {q}, key {k} and value {v} do not broadcast{hint}"
        ) from None


def check_broadcast(name: str, x: Array, what: str, shape: tuple[int, ...]) -> None:
    """Refuse an array that does not broadcast to a shape."""
    try:
        np.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} {x.shape} does not broadcast to {what} {shape}") from None


def check_mask(attn_mask: npt.ArrayLike, pairs: tuple[int, ...]) -> Array:
    """Return a mask, boolean or float, that broadcasts to (..., L, S)."""
    mask = as_array("attn_mask", attn_mask)
    if mask.dtype.kind in "iu":
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}, which could mean two things: use .astype(bool) "
            "if nonzero means attend, or a float dtype if it is to be added to the scores"
        )
    if mask.dtype != np.bool_ and not is_float(mask.dtype):
        raise TypeError(f"attn_mask has dtype {mask.dtype}; bool or a float dtype is needed")
    check_broadcast("attn_mask", mask, "(..., L, S) =", pairs)
    return mask


def check_biases(
    options: dict[str, Any], attn_mask: Array | None, pairs: tuple[int, ...]
) -> dict[str, Array | None]:
    """Return the bias and the bias by offset, floats that broadcast to (..., L, S) and to (..., L + S - 1)."""
    *lead, n_queries, n_keys = pairs
    offsets = n_queries + n_keys - 1 if n_queries and n_keys else 0
    found: dict[str, Array | None] = {}
    for name, what, shape in (
        ("bias", "(..., L, S)", pairs),
        ("offset_bias", "(..., L + S - 1)", (*lead, offsets)),
    ):
        if options.get(name) is not None:
            found[name] = bias = as_array(name, options[name])
            if not is_float(bias.dtype):
                raise TypeError(f"{name} has dtype {bias.dtype}; a float dtype is needed")
            if name == "offset_bias" and bias.shape[-1:] != (offsets,):
                raise ValueError(f"{name} {bias.shape} does not end with L + S - 1 = {offsets}")
            check_broadcast(name, bias, f"{what} =", shape)
    if "bias" in found and attn_mask is not None and attn_mask.dtype != np.bool_:
        raise ValueError("attn_mask and bias are both float: give their sum as one of them")
    return found


def check_per_head(name: str, x: Array, pairs: tuple[int, ...]) -> None:
    """Refuse numbers that do not broadcast to the leading dims; without any, the shape may also be (1,)."""
    lead = pairs[:-2]
    check_broadcast(name, x.reshape(()) if not lead and x.shape == (1,) else x, "the leading dims", lead)


def check_key_lengths(key_lengths: npt.ArrayLike | None, pairs: tuple[int, ...]) -> Array | None:
    """Return the number of keys of each head."""
    if key_lengths is None:
        return None
    lengths, n_keys = as_array("key_lengths", key_lengths), pairs[-1]
    empty_list = lengths.size == 0 and lengths.dtype == np.float64
    if lengths.dtype.kind not in "iu" and not empty_list:
        raise TypeError(f"key_lengths must be integers, not {lengths.dtype}")
    if lengths.size and (lengths.min() < 0 or lengths.max() > n_keys):
        raise ValueError(f"key_lengths must be in 0...{n_keys}, not {lengths.min()}...{lengths.max()}")
    check_per_head("key_lengths", lengths, pairs)
    return lengths


def check_window(window: Sequence[int | None] | None) -> tuple[int | None, ...] | None:
    """Return (left, right), each an int >= 0 or None."""
    if window is None:
        return None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be (left, right), not {window!r}") from None
    for side in (left, right):
        if isinstance(side, bool | np.bool_):
            raise TypeError(f"window bounds are integers or None, not booleans: {window!r}")
        if side is not None and operator.index(side) < 0:
            raise ValueError(f"window bounds must not be negative: {window!r}")
    return tuple(None if side is None else operator.index(side) for side in (left, right))
