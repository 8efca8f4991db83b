"""Checks of arguments, and their common form for the functions of :mod:`selfattn.reference`."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array, seed_from_rng
from selfattn.reference.dropout import Array, dropout_keep_mask


@dataclass(frozen=True)
class Call:
    """The arguments of a call of :func:`scaled_dot_product_attention`, checked and in one form.

    Leading dims ``...`` are broadcast and the same for all; arrays of floats are in the precision of the computation.
    """

    query: Array  # (..., L, E)
    key: Array  # (..., S, E)
    value: Array  # (..., S, Ev)
    scale: float
    softcap: float | None
    alibi_slopes: Array | None  # (...,)
    bias: Array | None  # (..., L, S), the float mask
    allowed: Array  # (..., L, S), bool: all masks combined
    sinks: Array | None  # (...,)
    keep: Array | None  # (..., L, S), bool: weights not dropped
    dropout_p: float
    offset: int  # query i has the position of key i + offset
    result_dtype: np.dtype[Any]


def prepare(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: str | None = None,
    window: Sequence[int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    block_mask: Any = None,
    rng: Any = None,
    compute_dtype: npt.DTypeLike | None = None,
    first_head: int = 0,
) -> Call:
    """Check the arguments of :func:`scaled_dot_product_attention` and return them as a :class:`Call`."""
    q, k, v = as_array("query", query), as_array("key", key), as_array("value", value)
    compute, result = dtypes(compute_dtype, {"query": q, "key": k, "value": v})
    for name, array in (("query", q), ("key", k), ("value", v)):
        if array.ndim < 2:
            raise ValueError(
                f"{name} must have at least 2 dims, (..., length, width), not shape {array.shape}"
            )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"query and key differ in width (last axis): shapes {q.shape} and {k.shape}")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"key and value differ in length (axis -2): shapes {k.shape} and {v.shape}")
    if enable_gqa:
        k, v = repeat_heads(q, k, v)
    try:
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    except ValueError:
        hint = "" if enable_gqa else " (fewer key heads than query heads need enable_gqa=True)"
        raise ValueError(
            f"the leading dims of query {q.shape}, key {k.shape} and value {v.shape} do not broadcast{hint}"
        ) from None
    n_queries, n_keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    pairs = (*lead, n_queries, n_keys)
    q, k, v = (np.broadcast_to(a, lead + a.shape[-2:]).astype(compute) for a in (q, k, v))

    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if isinstance(flag, str | bytes | float):
            raise TypeError(f"{name} must be a bool, not {flag!r}")
    if isinstance(attn_mask, bool):
        raise TypeError(f"attn_mask must be an array, not {attn_mask} (a causal mask is is_causal=True)")
    if causal not in (None, "upper_left", "lower_right"):
        raise ValueError(f'causal must be None, "upper_left" or "lower_right", not {causal!r}')
    if is_causal and causal == "lower_right":
        raise ValueError('is_causal=True is causal="upper_left" and contradicts causal="lower_right"')
    offset = n_keys - n_queries if causal == "lower_right" else 0

    bias, mask = None, None
    if attn_mask is not None:
        mask = check_mask(attn_mask, pairs)
        if mask.dtype != np.bool_:
            bias, limit = mask.astype(compute), np.finfo(compute).max
            bias = np.where(np.isfinite(mask), np.clip(bias, -limit, limit), bias)  # finite is kept
            mask = mask != -np.inf
    lengths = check_key_lengths(key_lengths, lead, n_keys)
    allowed = allowed_pairs(pairs, mask, bool(is_causal or causal), check_window(window), offset, lengths)
    if block_mask is not None:
        allowed &= dense_block_mask(block_mask, pairs)

    softcap = None if softcap is None else check_real("softcap", softcap)
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a finite number above 0, not {softcap!r}")
    dropout_p = check_real("dropout_p", dropout_p)
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, not {dropout_p!r}")
    seed, keep = seed_from_rng(rng, draws=dropout_p > 0), None
    if dropout_p > 0:
        keep = dropout_keep_mask(seed, dropout_p, lead, n_queries, n_keys, first_head)
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0
    return Call(
        query=q, key=k, value=v,
        scale=check_real("scale", scale), softcap=softcap,
        alibi_slopes=check_per_head("alibi_slopes", alibi_slopes, lead, compute),
        bias=bias, allowed=allowed,
        sinks=check_per_head("sinks", sinks, lead, compute),
        keep=keep, dropout_p=dropout_p, offset=offset, result_dtype=result,
    )  # fmt: skip


def check_real(name: str, value: Any) -> float:
    """Return a real number of any kind as a float; texts, bools and complex numbers are a TypeError."""
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    is_other = isinstance(value, bool | str | bytes | complex) or kind in "bcOSTUmM"
    if is_other or getattr(value, "ndim", 0) != 0:
        raise TypeError(f"{name} must be a real number, not {value!r:.80}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is too large for a float: {value!r:.80}") from None


def allowed_pairs(
    shape: tuple[int, ...],
    mask: Array | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    offset: int,
    key_lengths: Array | None,
) -> Array:
    """Combine all masks to one boolean array of ``shape`` (..., L, S), True = may attend.

    ``mask`` is boolean and has that shape; ``key_lengths`` has shape (...,); query i has the position of
    key i + ``offset``.
    """
    n_queries, n_keys = shape[-2:]
    i, j = np.arange(n_queries)[:, None] + offset, np.arange(n_keys)
    left, right = (None if side is None else min(side, n_queries + n_keys) for side in window)
    allowed = np.ones(shape, dtype=np.bool_)
    if mask is not None:
        allowed &= mask
    if is_causal:
        allowed &= j <= i
    if left is not None:
        allowed &= j >= i - left
    if right is not None:
        allowed &= j <= i + right
    if key_lengths is not None:
        allowed &= j < key_lengths[..., None, None]
    return allowed


def repeat_heads(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
    """Repeat each key and value head (axis -3) for the consecutive query heads that share it."""
    if query.ndim < 3 or key.ndim < 3 or value.ndim < 3:
        raise ValueError(
            f"enable_gqa=True needs a head axis (-3): shapes {query.shape}, {key.shape} and {value.shape}"
        )
    heads, kv_heads = query.shape[-3], key.shape[-3]
    if value.shape[-3] != kv_heads:
        raise ValueError(f"key and value differ in heads (axis -3): shapes {key.shape} and {value.shape}")
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"enable_gqa=True: {heads} query heads are not a multiple of {kv_heads} key heads")
    times = heads // kv_heads if kv_heads else 1
    return np.repeat(key, times, axis=-3), np.repeat(value, times, axis=-3)


def float_dtype(name: str, array: Array) -> np.dtype[Any]:
    """Return the dtype of an array of floats; integers count as float64."""
    if array.dtype.kind in "iu":
        return np.dtype(np.float64)
    if array.dtype.char in "efd" or array.dtype.name == "bfloat16":
        return array.dtype.newbyteorder("=")
    raise TypeError(f"{name} has dtype {array.dtype}; float16, bfloat16, float32, float64 or integers work")


def promoted(found: Iterable[np.dtype[Any]]) -> np.dtype[Any]:
    """Return NumPy's common dtype; float16 with bfloat16, which NumPy refuses, gives float32."""
    kinds = set(found)
    if {dtype.name for dtype in kinds} >= {"float16", "bfloat16"}:
        kinds = {dtype for dtype in kinds if dtype.itemsize > 2} | {np.dtype(np.float32)}
    return np.result_type(*kinds)


def dtypes(
    compute_dtype: npt.DTypeLike | None, arrays: dict[str, Array]
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the dtype of the computation and the dtype of the result for the named inputs."""
    result = promoted(float_dtype(name, array) for name, array in arrays.items())
    if compute_dtype is not None:
        compute = np.dtype(compute_dtype)
        if compute.char not in "fd":
            raise TypeError(f"compute_dtype must be float32 or float64, not {compute}")
        return compute, compute
    return np.dtype(np.float64 if result == np.float64 else np.float32), result


def check_mask(attn_mask: npt.ArrayLike, pairs: tuple[int, ...]) -> Array:
    """Return the mask, boolean or float, broadcast to (..., L, S)."""
    mask = as_array("attn_mask", attn_mask)
    if mask.dtype.kind in "iu":
        raise TypeError(
            f"attn_mask has dtype {mask.dtype}, which could mean two things: use .astype(bool) "
            "if nonzero means attend, or a float dtype if it is to be added to the scores"
        )
    if mask.dtype != np.bool_ and not (mask.dtype.char in "efd" or mask.dtype.name == "bfloat16"):
        raise TypeError(f"attn_mask has dtype {mask.dtype}; bool or a float dtype is needed")
    return broadcast("attn_mask", mask, "(..., L, S) =", pairs)


def broadcast(name: str, x: Array, what: str, shape: tuple[int, ...]) -> Array:
    """Broadcast an argument to a shape."""
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(f"{name} {x.shape} does not broadcast to {what} {shape}") from None


def dense_block_mask(block_mask: Any, pairs: tuple[int, ...]) -> Array:
    """Return the pairs that a block mask leaves open, broadcast to (..., L, S)."""
    if not hasattr(block_mask, "to_dense"):
        raise TypeError(f"block_mask must be a selfattn.BlockMask or None, not {type(block_mask).__name__}")
    return broadcast("block_mask", block_mask.to_dense(*pairs[-2:]), "(..., L, S) =", pairs)


def check_per_head(
    name: str, x: npt.ArrayLike | None, lead: tuple[int, ...], dtype: np.dtype[Any]
) -> Array | None:
    """Return one number per head."""
    if x is None:
        return None
    array = as_array(name, x)
    float_dtype(name, array)
    return for_each_head(name, array, lead).astype(dtype)


def for_each_head(name: str, x: Array, lead: tuple[int, ...]) -> Array:
    """Broadcast to the leading dims; without any, the shape may also be (1,)."""
    return broadcast(name, x.reshape(()) if lead == () and x.shape == (1,) else x, "the leading dims", lead)


def check_key_lengths(key_lengths: npt.ArrayLike | None, lead: tuple[int, ...], n_keys: int) -> Array | None:
    """Return the number of keys of each head."""
    if key_lengths is None:
        return None
    lengths = as_array("key_lengths", key_lengths)
    empty_list = lengths.size == 0 and lengths.dtype == np.float64
    if lengths.dtype.kind not in "iu" and not empty_list:
        raise TypeError(f"key_lengths must be integers, not {lengths.dtype}")
    if lengths.size and (lengths.min() < 0 or lengths.max() > n_keys):
        raise ValueError(f"key_lengths must be in 0...{n_keys}, not {lengths.min()}...{lengths.max()}")
    return for_each_head("key_lengths", lengths, lead)


def check_window(window: Sequence[int | None] | None) -> tuple[int | None, int | None]:
    """Return (left, right), each an int >= 0 or None."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be (left, right), not {window!r}") from None
    for side in (left, right):
        if isinstance(side, bool | np.bool_):
            raise TypeError(f"window bounds are integers or None, not booleans: {window!r}")
        if side is not None and operator.index(side) < 0:
            raise ValueError(f"window bounds must not be negative: {window!r}")
    return tuple(None if side is None else operator.index(side) for side in (left, right))  # type: ignore[return-value]


def norm_arguments(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    compute_dtype: npt.DTypeLike | None,
    **params: npt.ArrayLike | None,
) -> tuple[Array, dict[str, Array], tuple[int, ...], np.dtype[Any], np.dtype[Any]]:
    """Check the arguments of a norm; return x and params in the dtype of the computation, axes, and :func:`dtypes`."""
    shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
    x = as_array("x", x)
    given = {name: as_array(name, param) for name, param in params.items() if param is not None}
    compute, result = dtypes(compute_dtype, {"x": x, **given})
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"x of shape {x.shape} does not end in normalized_shape {shape}")
    for name, param in given.items():
        if param.shape != shape:
            raise ValueError(f"{name} has shape {param.shape}, not normalized_shape {shape}")
    converted = {name: param.astype(compute) for name, param in given.items()}
    return x.astype(compute), converted, tuple(range(-len(shape), 0)), compute, result


def rotary_table(name: str, table: Array, x_ndim: int, half: tuple[int, ...]) -> Array:
    """Return a table of cosines or sines, with a head axis if it has none; ``half`` is (..., L, D / 2)."""
    without_heads = table.ndim == x_ndim - 1 and table.ndim >= 3
    wanted = (*half[:-3], *half[-2:]) if without_heads else half
    try:
        np.broadcast_to(table, wanted)
    except ValueError:
        note, hint = "", ""
        if without_heads:
            note = ", one axis less than x and so without a head axis,"
            hint = "; a table that differs between heads needs all axes of x"
        raise ValueError(
            f"{name} of shape {table.shape}{note} does not broadcast to (..., L, D / 2) = {wanted}{hint}"
        ) from None
    return np.expand_dims(table, -3) if without_heads else table


def sum_to_shape(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Sum over the axes along which an array of ``shape`` was broadcast: the transpose of broadcasting."""
    gradient = gradient.reshape((1,) * (len(shape) - gradient.ndim) + gradient.shape)  # (1,) may mean ()
    extra = tuple(range(gradient.ndim - len(shape)))
    gradient = gradient.sum(axis=extra) if extra else gradient
    axes = tuple(axis for axis in range(gradient.ndim) if shape[axis] == 1 != gradient.shape[axis])
    return gradient.sum(axis=axes, keepdims=True) if axes else gradient.reshape(shape)


def like(x: npt.ArrayLike, dx: Array, compute_dtype: npt.DTypeLike | None) -> Array:
    """Return a gradient in the shape and dtype of its input, or in the ``compute_dtype`` if there is one."""
    given = as_array("x", x)
    summed = sum_to_shape(dx, given.shape)
    return summed if compute_dtype is not None else summed.astype(float_dtype("x", given), order="C")
