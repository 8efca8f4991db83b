"""Attention and its companions in plain NumPy: the oracle. Read this file first.

Everything here is written to be read and believed, not to be fast: the C core of selfattn is tested against
these functions, and :mod:`selfattn.steps` shows their intermediate results. Only NumPy is imported.

At its heart attention is four lines::

    scores  = query @ key.T * scale                   # how well does each query fit each key?
    scores  = where(allowed, scores, -inf)            # masks
    weights = softmax(scores)                         # each row: positive, with sum 1
    output  = weights @ value                         # each row: a weighted mean of the values

:func:`scaled_dot_product_attention` is those lines with every option; each line has become a small
function, which follows it in the file. After them come the other operations of a Transformer, each about as
long as its formula; then the random numbers of dropout; last, the checks of arguments.

Shape letters: ``...`` are leading (batch and head) dims, H the heads, L the queries, S the keys, E the
width of a query and of a key, Ev the width of a value.

**Precision.** Results have the dtype that NumPy's promotion gives the inputs, integers counting as float64.
Arithmetic is in float64 when that is float64, else in float32. Every function takes ``compute_dtype``: with
``np.float64`` the inputs are converted first, and the result stays float64; it is the "truth" that results
in fewer bits are held against.

**NaN and infinities** go through what is attended as arithmetic has it, without warnings. What is masked
takes no part.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "apply_rotary_emb",
    "dropout_keep_mask",
    "gelu",
    "layer_norm",
    "log_softmax",
    "merge_attention",
    "philox4x32",
    "rms_norm",
    "scaled_dot_product_attention",
    "softmax",
]

Array: TypeAlias = npt.NDArray[Any]


# -------------------------------------------------------------------------------------------------- attention


@np.errstate(all="ignore")
def scaled_dot_product_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    causal: str | None = None,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    alibi_slopes: npt.ArrayLike | None = None,
    sinks: npt.ArrayLike | None = None,
    key_lengths: npt.ArrayLike | None = None,
    rng: int | np.random.Generator | None = None,
    return_lse: bool = False,
    return_weights: bool = False,
    compute_dtype: npt.DTypeLike | None = None,
) -> Any:
    """Let every query gather a weighted mean of the values; the weights tell how well it fits their keys.

    The score of query i and key j is made in this order: ``scale * (query[i] @ key[j])``, then ``softcap``,
    then ALiBi, then a float mask; then every mask that forbids the pair. A softmax over j turns scores into
    weights.

    Parameters
    ----------
    query : array_like, shape (..., L, E)
    key : array_like, shape (..., S, E)
    value : array_like, shape (..., S, Ev)
        float16, bfloat16, float32, float64 or integers (which count as float64). The leading dims are
        broadcast.
    attn_mask : array_like, broadcastable to (..., L, S), optional
        Boolean: True = attend. Floating point: added to the scores; ``-inf`` forbids the pair as False does.
    dropout_p : float, default 0.0
        Probability, 0 to 1, with which a weight is dropped; the others are divided by ``1 - dropout_p``.
    is_causal : bool, default False
        Query i sees the keys j <= i, whatever L and S are. The same as ``causal="upper_left"``.
    scale : float, optional
        Factor of the dot products, 1/sqrt(E) by default.
    enable_gqa : bool, default False
        Grouped queries: with H query heads and H_kv key and value heads (axis -3), each key head serves H /
        H_kv query heads in a row.
    causal : {None, "upper_left", "lower_right"}
        ``"lower_right"``: query i sees the keys j <= i + o with o = S - L, so the last query sees all keys.
    window : (left, right), optional
        Query i sees the keys from i + o - left to i + o + right, both included; None leaves a side open. o
        is S - L for ``causal="lower_right"``, else 0.
    softcap : float > 0, optional
        Bounds the scores softly: ``softcap * tanh(score / softcap)``.
    alibi_slopes : array_like, shape (H,) or broadcastable to the leading dims, optional
        Adds ``-slope * |i + o - j|``.
    sinks : array_like, shape (H,) or broadcastable to the leading dims, optional
        A score that takes part in the softmax's denominator alone, so that a row of weights may sum to less
        than 1.
    key_lengths : array_like of integers in 0...S, broadcastable to the leading dims, optional
        The keys from this index on do not exist.
    rng : int or numpy.random.Generator, optional
        Makes dropout repeatable. An int, modulo 2**64, is the seed; a generator is asked for one uint64 when
        ``dropout_p > 0``; None takes fresh entropy.
    return_lse : bool, default False
        Also return the natural log of each softmax's denominator, sink included, dropout not.
    return_weights : bool, default False
        Also return the weights, after dropout.
    compute_dtype : dtype, optional
        float32 or float64: compute in this precision and return it. See the top of the module.

    Returns
    -------
    output : ndarray, shape (..., L, Ev)
        A query that may attend to nothing gets zeros.
    lse : ndarray, shape (..., L)
        Only with ``return_lse``. float64 where the output is float64, else float32; -inf where there is
        nothing to attend to and no sink.
    weights : ndarray, shape (..., L, S)
        Only with ``return_weights``; in the dtype of the output.

    Raises
    ------
    TypeError
        A dtype that is not listed above (booleans, complex numbers, long double, objects), a masked array
        or a matrix, an integer mask, an ``rng`` of another kind.
    ValueError
        Shapes that do not fit each other, or an argument outside its range. The message names both.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1. ALiBi: Press et al., "Train Short, Test
    Long", 2022, section 3. Grouped queries: Ainslie et al., "GQA", 2023, section 2.2. Soft-capping: Gemma
    Team, "Gemma 2", 2024, section 2. Sinks: Xiao et al., "Efficient Streaming Language Models with
    Attention Sinks", 2024, equation 2 gives the idea (a one in the denominator); here its logarithm is
    learned per head, as in OpenAI's gpt-oss.

    Examples
    --------
    The query fits the first key better, so the result is nearer to the first value:

    >>> import numpy as np
    >>> query, key = np.array([[1.0, 0.0]]), np.array([[2.0, 0.0], [0.0, 2.0]])
    >>> value = np.array([[10.0], [20.0]])
    >>> out, weights = scaled_dot_product_attention(query, key, value, return_weights=True)
    >>> weights.round(3)
    array([[0.804, 0.196]])
    >>> out.round(3)
    array([[11.956]])
    >>> scaled_dot_product_attention(query, key, value, attn_mask=[[False, True]])
    array([[20.]])
    """
    call = prepare(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal,
        window=window, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, key_lengths=key_lengths,
        rng=rng, compute_dtype=compute_dtype,
    )  # fmt: skip
    scores = dot_products(call.query, call.key)
    scores = scaled_scores(scores, call.scale, call.softcap)
    scores = masked_scores(scores, call.allowed, call.bias, call.alibi_slopes, call.offset)
    weights, lse = attention_weights(scores, call.allowed, call.sinks)
    weights = drop_weights(weights, call.keep, call.dropout_p)
    output = weighted_sum(weights, call.value, call.allowed)

    results = [output.astype(call.result_dtype, order="C")]
    if return_lse:
        results.append(lse)
    if return_weights:
        results.append(weights.astype(call.result_dtype, order="C"))
    return results[0] if len(results) == 1 else tuple(results)


def dot_products(query: Array, key: Array) -> Array:
    """Multiply every query by every key: (..., L, E) and (..., S, E) give (..., L, S)."""
    scores: Array = query @ key.swapaxes(-1, -2)
    return scores


def scaled_scores(scores: Array, scale: float, softcap: float | None) -> Array:
    """Multiply the scores by ``scale``, then bound them softly to ±``softcap``; the shape stays (..., L, S).

    Without the scale, scores grow like sqrt(E) for random queries and keys, and the softmax saturates.
    """
    scores = scores * scores.dtype.type(scale)
    if softcap is not None:
        cap = scores.dtype.type(softcap)
        scores = cap * np.tanh(scores / cap)
    return scores


def masked_scores(
    scores: Array, allowed: Array, bias: Array | None, slopes: Array | None, offset: int
) -> Array:
    """Add ALiBi's distances and the float mask, then put -inf wherever ``allowed`` is False.

    ``bias`` (..., L, S) is the float mask; ``slopes`` (...,) belong to ALiBi; query i stands on key i +
    ``offset``. The forbidden scores are replaced, not added to: NaN + -inf would still be NaN.
    """
    if slopes is not None:
        n_queries, n_keys = scores.shape[-2:]
        distance = np.abs(np.arange(n_queries)[:, None] + offset - np.arange(n_keys)).astype(scores.dtype)
        scores = scores - slopes[..., None, None] * distance
    if bias is not None:
        scores = scores + bias
    return np.where(allowed, scores, scores.dtype.type(-np.inf))


def attention_weights(scores: Array, allowed: Array, sinks: Array | None = None) -> tuple[Array, Array]:
    """Take the softmax over the keys: weights (..., L, S), and the log of their denominators, lse (..., L).

    ``exp(score) / sum(exp(score))`` with the maximum taken off first, which changes nothing but the danger
    of overflow. ``sinks`` (...,) add ``exp(sink)`` to the denominator. Where nothing is allowed (or all of
    it scores -inf) and there is no sink, the denominator is 0: then weights are 0 and lse is -inf. A NaN
    score makes the weights of its row NaN, but those of forbidden keys stay 0.
    """
    sink = scores.dtype.type(-np.inf) if sinks is None else sinks[..., None, None]
    top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(top == -np.inf, scores.dtype.type(0), top)  # -inf - -inf would be NaN
    exps = np.where(allowed, np.exp(scores - top), scores.dtype.type(0))
    total = exps.sum(axis=-1, keepdims=True) + np.exp(sink - top)
    weights = np.where(allowed & (total != 0), exps / total, scores.dtype.type(0))
    return weights, (np.log(total) + top)[..., 0]


def drop_weights(weights: Array, keep: Array | None, dropout_p: float) -> Array:
    """Set the weights to zero where ``keep`` is False and divide the others by 1 - ``dropout_p``.

    So their expected sum stays the same (Srivastava et al., "Dropout", 2014, section 10). ``keep`` is None
    when there is no dropout. A dropped weight is weight · 0: NaN stays NaN.
    """
    if keep is None:
        return weights
    kept: Array = weights / weights.dtype.type(1.0 - dropout_p)
    dropped: Array = weights * weights.dtype.type(0)
    return np.where(keep, kept, dropped)


def weighted_sum(weights: Array, value: Array, allowed: Array) -> Array:
    """Add up ``weights @ value``, (..., L, Ev); a pair that is not ``allowed`` contributes nothing at all.

    Its weight is 0, but 0 · NaN is NaN. So the NaN and infinite values are set to 0 first and brought back
    key by key, for the queries that are allowed to see them.
    """
    finite = np.isfinite(value)
    output: Array = weights @ np.where(finite, value, value.dtype.type(0))
    rest = np.where(finite, value.dtype.type(0), value)
    for j in np.flatnonzero(~finite.all(axis=(*range(value.ndim - 2), -1))):
        term = weights[..., :, j, None] * rest[..., None, j, :]
        output += np.where(allowed[..., :, j, None], term, value.dtype.type(0))
    return output


def weighted_values(weights: Array, value: Array, allowed: Array) -> Array:
    """Return the terms of :func:`weighted_sum`, not yet added up over the keys: shape (..., L, S, Ev)."""
    terms = weights[..., :, :, None] * value[..., None, :, :]
    return np.where(allowed[..., None], terms, value.dtype.type(0))


@np.errstate(all="ignore")
def merge_attention(
    outs: Sequence[npt.ArrayLike],
    lses: Sequence[npt.ArrayLike],
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Put attention over several parts of the keys together, as if there had been one call over all of them.

    With ``lse = log(sum_n exp(lse_n))`` the result is ``sum_n exp(lse_n - lse) * out_n``.

    Parameters
    ----------
    outs : sequence of array_like, each of shape (..., L, Ev)
    lses : sequence of array_like, each of shape (..., L)
        What ``scaled_dot_product_attention(..., return_lse=True)`` gave for each part. -inf marks a row
        that attended to nothing; its output is not looked at.
    compute_dtype : dtype, optional
        See the top of the module.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        Zeros where every part has lse -inf.
    lse : ndarray, shape (..., L)

    References
    ----------
    Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021, section 2; Dao et al.,
    "FlashAttention", 2022, section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> query, key, value = np.ones((1, 2)), np.array([[3.0, 1], [0, 1], [2, 2]]), np.array([[1.0], [2], [4]])
    >>> parts = [scaled_dot_product_attention(query, key[s], value[s], return_lse=True)
    ...          for s in (slice(0, 2), slice(2, 3))]
    >>> out, lse = merge_attention(*zip(*parts))
    >>> np.allclose(out, scaled_dot_product_attention(query, key, value))
    True
    """
    arrays = [as_array(f"outs[{n}]", out) for n, out in enumerate(outs)]
    compute, result = dtypes(compute_dtype, {f"outs[{n}]": out for n, out in enumerate(arrays)})
    out_n = np.stack([out.astype(compute) for out in arrays])
    lse_n = np.stack([as_array("lses", lse).astype(compute) for lse in lses])
    top = lse_n.max(axis=0)
    top = np.where(top == -np.inf, compute.type(0), top)
    parts = np.exp(lse_n - top)
    total = parts.sum(axis=0)
    share = np.where(total == 0, compute.type(0), parts / total)[..., None]
    terms = np.where(lse_n[..., None] == -np.inf, compute.type(0), share * out_n)
    return terms.sum(axis=0).astype(result), np.log(total) + top


# ---------------------------------------------------------------------- the other operations of a Transformer


@np.errstate(all="ignore")
def softmax(x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Turn numbers into positive ones with sum 1 along ``axis``: ``exp(x) / sum(exp(x))``.

    Parameters
    ----------
    x : array_like
        Any shape; float16, bfloat16, float32, float64 or integers.
    axis : int, default -1
    compute_dtype : dtype, optional
        See the top of the module.

    Returns
    -------
    ndarray, the shape of ``x``
        A slice that is -inf throughout gives NaN, 0/0. (Attention defines its rows without keys as zeros
        instead.)

    References
    ----------
    Bridle, "Probabilistic Interpretation of Feedforward Classification Network Outputs", 1990.

    Examples
    --------
    >>> softmax([2, 4, 4]).round(5)
    array([0.06338, 0.46831, 0.46831])
    """
    x = as_array("x", x)
    compute, result = dtypes(compute_dtype, {"x": x})
    x = x.astype(compute)
    exps = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    y: Array = exps / exps.sum(axis=axis, keepdims=True)
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def log_softmax(x: npt.ArrayLike, axis: int = -1, *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Take the log of :func:`softmax`, ``x - log(sum(exp(x)))``, accurate where softmax itself underflows.

    Parameters, result and errors are those of :func:`softmax`.

    Examples
    --------
    >>> log_softmax([0.0, -1000.0])
    array([    0., -1000.])
    """
    x = as_array("x", x)
    compute, result = dtypes(compute_dtype, {"x": x})
    x = x.astype(compute)
    shifted = x - x.max(axis=axis, keepdims=True, initial=-np.inf)
    y: Array = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def layer_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    bias: npt.ArrayLike | None = None,
    eps: float = 1e-5,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Shift and scale to mean 0 and variance 1 over the last axes.

    ``(x - mean) / sqrt(variance + eps) * weight + bias``

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
    normalized_shape : int or sequence of int
        The last axes of ``x``, over which mean and (biased) variance are taken.
    weight, bias : array_like, shape normalized_shape, optional
        1 and 0 by default.
    eps : float, default 1e-5
    compute_dtype : dtype, optional
        See the top of the module.

    Returns
    -------
    ndarray, the shape of ``x``
        In the dtype to which ``x``, ``weight`` and ``bias`` promote.

    Raises
    ------
    ValueError
        Shapes that do not fit ``normalized_shape``.
    TypeError
        A dtype that is not floating point or integer.

    References
    ----------
    Ba, Kiros and Hinton, "Layer Normalization", 2016, equations 3 and 4.

    Examples
    --------
    >>> layer_norm([[1.0, 2.0, 3.0]], 3).round(4)
    array([[-1.2247,  0.    ,  1.2247]])
    """
    x, params, axes, compute, result = norm_arguments(
        x, normalized_shape, compute_dtype, weight=weight, bias=bias
    )
    n = math.prod(x.shape[axis] for axis in axes)
    centred = x - x.sum(axis=axes, keepdims=True) / n
    variance = np.square(centred).sum(axis=axes, keepdims=True) / n
    y: Array = centred / np.sqrt(variance + compute.type(eps))
    if "weight" in params:
        y = y * params["weight"]
    if "bias" in params:
        y = y + params["bias"]
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def rms_norm(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    weight: npt.ArrayLike | None = None,
    eps: float | None = None,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Scale to mean square 1 over the last axes: ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    x : array_like, shape (..., *normalized_shape)
    normalized_shape : int or sequence of int
        The last axes of ``x``, over which the mean is taken.
    weight : array_like, shape normalized_shape, optional
        1 by default.
    eps : float, optional
        The machine epsilon of the precision that is computed in by default: float64's for float64, else
        float32's. It is what PyTorch does (its page says "of x's dtype", which differs for 16-bit input).
    compute_dtype : dtype, optional
        See the top of the module. It has no influence on the default of ``eps``.

    Returns
    -------
    ndarray, the shape of ``x``
        In the dtype to which ``x`` and ``weight`` promote.

    Raises
    ------
    ValueError
        Shapes that do not fit ``normalized_shape``.
    TypeError
        A dtype that is not floating point or integer.

    References
    ----------
    Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.

    Examples
    --------
    >>> rms_norm([[3.0, 4.0]], 2).round(4)
    array([[0.8485, 1.1314]])
    """
    if eps is None:
        eps = float(np.finfo(norm_arguments(x, normalized_shape, None, weight=weight)[3]).eps)
    x, params, axes, compute, result = norm_arguments(x, normalized_shape, compute_dtype, weight=weight)
    n = math.prod(x.shape[axis] for axis in axes)
    y: Array = x / np.sqrt(np.square(x).sum(axis=axes, keepdims=True) / n + compute.type(eps))
    if "weight" in params:
        y = y * params["weight"]
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def gelu(x: npt.ArrayLike, approximate: str = "none", *, compute_dtype: npt.DTypeLike | None = None) -> Array:
    """Multiply x by Phi(x), the distribution function of the standard normal: a smooth ``max(x, 0)``.

    Parameters
    ----------
    x : array_like
        Any shape; float16, bfloat16, float32, float64 or integers.
    approximate : {"none", "tanh"}
        ``"tanh"``: ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``.
    compute_dtype : dtype, optional
        See the top of the module.

    Returns
    -------
    ndarray, the shape of ``x``

    Raises
    ------
    ValueError
        Another ``approximate``.
    TypeError
        A dtype that is not floating point or integer.

    References
    ----------
    Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, section 2.

    Examples
    --------
    >>> gelu([-1.0, 0.0, 1.0]).round(4)
    array([-0.1587,  0.    ,  0.8413])
    """
    x = as_array("x", x)
    compute, result = dtypes(compute_dtype, {"x": x})
    x = x.astype(compute)
    if approximate == "none":  # 1 + erf(t) is erfc(-t), which keeps its digits where the sum would cancel
        phi = np.vectorize(math.erfc, otypes=[np.float64])(-x / math.sqrt(2.0)) / 2.0
    elif approximate == "tanh":
        phi = (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))) / 2.0
    else:
        raise ValueError(f'approximate must be "none" or "tanh", not {approximate!r}')
    y: Array = x * phi.astype(compute)
    return y.astype(result, order="C")


@np.errstate(all="ignore")
def apply_rotary_emb(
    x: npt.ArrayLike,
    cos: npt.ArrayLike,
    sin: npt.ArrayLike,
    interleaved: bool = False,
    *,
    compute_dtype: npt.DTypeLike | None = None,
) -> Array:
    """Rotate pairs of columns by angles that grow with the position, so that dot products tell distances.

    The pair (a, b) becomes ``(a * cos - b * sin, a * sin + b * cos)``.

    Parameters
    ----------
    x : array_like, shape (..., L, D), D even
        Queries or keys, with any leading dims, heads last among them: (B, H, L, D) for instance.
    cos, sin : array_like, shape (L, D / 2) or (..., L, D / 2)
        Tables of the angles. With one axis less than ``x``, and three or more, they have no head axis, (B,
        L, D / 2), and are the same for every head. Else they broadcast to (..., L, D / 2).
    interleaved : bool, default False
        Pairs are neighbouring columns (2 n, 2 n + 1); by default column n goes with column n + D / 2.
    compute_dtype : dtype, optional
        See the top of the module.

    Returns
    -------
    ndarray, the shape of ``x``
        In the dtype to which ``x``, ``cos`` and ``sin`` promote.

    Raises
    ------
    ValueError
        An odd D, or tables that do not fit ``x``.
    TypeError
        A dtype that is not floating point or integer.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, equation 34
    (interleaved pairs).

    Examples
    --------
    A quarter turn takes (1, 0) to (0, 1):

    >>> apply_rotary_emb([[1.0, 0.0]], cos=[[0.0]], sin=[[1.0]])
    array([[0., 1.]])
    """
    x, cos, sin = as_array("x", x), as_array("cos", cos), as_array("sin", sin)
    compute, result = dtypes(compute_dtype, {"x": x, "cos": cos, "sin": sin})
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"x must have shape (..., L, D) with an even D, not {x.shape}")
    half = (*x.shape[:-1], x.shape[-1] // 2)
    cos = rotary_table("cos", cos, x.ndim, half).astype(compute)
    sin = rotary_table("sin", sin, x.ndim, half).astype(compute)
    x = x.astype(compute)
    pairs = x.reshape(*half, 2) if interleaved else x.reshape(*half[:-1], 2, half[-1]).swapaxes(-1, -2)
    a, b = pairs[..., 0], pairs[..., 1]
    rotated = np.stack([a * cos - b * sin, a * sin + b * cos], axis=-1 if interleaved else -2)
    return rotated.reshape(x.shape).astype(result)


# ---------------------------------------------------------------------------------- random numbers of dropout


def philox4x32(key: npt.ArrayLike, counter: npt.ArrayLike, rounds: int = 7) -> npt.NDArray[np.uint32]:
    """Philox4x32: four random 32-bit words from a counter and a key, with no state to keep.

    Parameters
    ----------
    key : array_like of integers, shape (..., 2)
    counter : array_like of integers, shape (..., 4)
        32-bit words each, the lowest first. The leading dims are broadcast.
    rounds : int, default 7
        7 is the fewest that passes the BigCrush tests; 10 is the paper's choice with a margin.

    Returns
    -------
    ndarray of uint32, shape (..., 4)

    References
    ----------
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.

    Examples
    --------
    The authors' first known answer:

    >>> [f"{word:08x}" for word in philox4x32([0, 0], [0, 0, 0, 0], rounds=10)]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    low_half = np.uint64(0xFFFFFFFF)
    key, counter = np.asarray(key, dtype=np.uint64), np.asarray(counter, dtype=np.uint64)
    k0, k1 = key[..., 0], key[..., 1]
    c0, c1, c2, c3 = (counter[..., n] for n in range(4))
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (product1 >> np.uint64(32)) ^ c1 ^ k0, product1 & low_half
        c2, c3 = (product0 >> np.uint64(32)) ^ c3 ^ k1, product0 & low_half
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low_half, (k1 + np.uint64(0xBB67AE85)) & low_half
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def dropout_keep_mask(
    seed: int, p: float, lead_shape: Sequence[int], n_queries: int, n_keys: int
) -> npt.NDArray[np.bool_]:
    """Tell which weights dropout keeps. It depends on nothing but the arguments.

    The word for key j of query i in head h (the flattened index over the leading dims) is number ``j & 3``
    of Philox4x32 with 7 rounds, key ``(seed, seed >> 32)`` and counter ``(j >> 2, i, h, h >> 32)``, all
    modulo 2**32. A weight is kept when its word is at least ``round(p * 2**32)`` (a half goes to the even
    neighbour).

    Parameters
    ----------
    seed : int
        Taken modulo 2**64.
    p : float in 0...1
        Probability to drop a weight.
    lead_shape : sequence of int
        The leading dims of the attention, broadcast: (B, H) for instance.
    n_queries, n_keys : int
        L and S.

    Returns
    -------
    ndarray of bool, shape (*lead_shape, L, S)
        True = kept.

    Examples
    --------
    >>> dropout_keep_mask(seed=0, p=0.5, lead_shape=(), n_queries=2, n_keys=6).astype(int)
    array([[0, 0, 0, 0, 1, 1],
           [1, 1, 0, 1, 1, 1]])
    """
    mask32 = 0xFFFFFFFF
    heads, blocks = math.prod(lead_shape), -(-n_keys // 4)
    counter = np.zeros((heads, n_queries, blocks, 4), dtype=np.uint64)
    counter[..., 0] = np.arange(blocks) & mask32
    counter[..., 1] = np.arange(n_queries)[:, None] & mask32
    counter[..., 2] = np.arange(heads)[:, None, None] & mask32
    counter[..., 3] = np.arange(heads)[:, None, None] >> 32
    words = philox4x32([seed & mask32, seed >> 32 & mask32], counter)
    words = words.reshape(heads, n_queries, 4 * blocks)[..., :n_keys]  # word j & 3 of block j >> 2
    return np.asarray(words >= np.uint64(round(p * 2**32))).reshape(*lead_shape, n_queries, n_keys)


def seed_from_rng(rng: Any) -> int:
    """Turn ``rng`` into dropout's 64-bit seed.

    That is an int modulo 2**64, one uint64 of a generator, or fresh entropy for None. Anything with the
    ``integers`` method of :class:`numpy.random.Generator` counts as a generator.
    """
    if rng is None:
        rng = np.random.default_rng()
    if hasattr(rng, "integers"):
        return int(rng.integers(0, 2**64, dtype=np.uint64))
    return check_seed(rng) % 2**64


# ---------------------------------------------------------------------------------------- checks of arguments


@dataclass(frozen=True)
class Call:
    """What :func:`scaled_dot_product_attention` was asked, checked and brought to one form.

    Leading dims ``...`` are broadcast and the same for all; floating-point arrays are in the precision to
    compute in.
    """

    query: Array  # (..., L, E)
    key: Array  # (..., S, E)
    value: Array  # (..., S, Ev)
    scale: float
    softcap: float | None
    alibi_slopes: Array | None  # (...,)
    bias: Array | None  # (..., L, S), the float mask
    allowed: Array  # (..., L, S), bool: what all masks together allow
    sinks: Array | None  # (...,)
    keep: Array | None  # (..., L, S), bool: what dropout keeps
    dropout_p: float
    offset: int  # query i stands on key i + offset
    result_dtype: np.dtype[Any]


def prepare(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
    causal: str | None,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    alibi_slopes: npt.ArrayLike | None,
    sinks: npt.ArrayLike | None,
    key_lengths: npt.ArrayLike | None,
    rng: int | np.random.Generator | None,
    compute_dtype: npt.DTypeLike | None,
) -> Call:
    """Check the arguments of :func:`scaled_dot_product_attention` and bring them into a :class:`Call`."""
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
            bias = np.where(np.isfinite(mask), np.clip(bias, -limit, limit), bias)  # finite stays finite
            mask = mask != -np.inf
    lengths = check_key_lengths(key_lengths, lead, n_keys)
    allowed = allowed_pairs(pairs, mask, bool(is_causal or causal), check_window(window), offset, lengths)

    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(f"softcap must be a finite number above 0, not {softcap!r}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, not {dropout_p!r}")
    if rng is not None and not hasattr(rng, "integers"):
        check_seed(rng)
    dropout_p = float(dropout_p)
    keep = None
    if dropout_p > 0:
        keep = dropout_keep_mask(seed_from_rng(rng), dropout_p, lead, n_queries, n_keys)
    if scale is None:
        scale = 1.0 / math.sqrt(width) if width else 1.0
    return Call(
        query=q, key=k, value=v,
        scale=float(scale),
        softcap=None if softcap is None else float(softcap),
        alibi_slopes=check_per_head("alibi_slopes", alibi_slopes, lead, compute),
        bias=bias, allowed=allowed,
        sinks=check_per_head("sinks", sinks, lead, compute),
        keep=keep, dropout_p=dropout_p, offset=offset, result_dtype=result,
    )  # fmt: skip


def allowed_pairs(
    shape: tuple[int, ...],
    mask: Array | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    offset: int,
    key_lengths: Array | None,
) -> Array:
    """Combine all that may forbid a query a key: a boolean array of ``shape`` (..., L, S), True = may attend.

    ``mask`` is boolean and has that shape; ``key_lengths`` has shape (...,); query i stands on key i +
    ``offset``.
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
    """Repeat each key and value head (axis -3) for the query heads in a row that it serves."""
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


def as_array(name: str, x: npt.ArrayLike) -> Array:
    """Convert lists and the like; refuse the subclasses of ndarray that would mean something else by it."""
    if isinstance(x, np.ma.MaskedArray | np.matrix):
        raise TypeError(f"{name} is a {type(x).__name__}; pass a plain array")
    return np.asarray(x)


def float_dtype(name: str, array: Array) -> np.dtype[Any]:
    """Give the floating-point dtype that an input counts as; integers count as float64."""
    if array.dtype.kind in "iu":
        return np.dtype(np.float64)
    if array.dtype.char in "efd" or array.dtype.name == "bfloat16":
        return array.dtype.newbyteorder("=")
    raise TypeError(f"{name} has dtype {array.dtype}; float16, bfloat16, float32, float64 or integers work")


def dtypes(
    compute_dtype: npt.DTypeLike | None, arrays: dict[str, Array]
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Choose the dtype to compute in, and the dtype of the result, for the named inputs."""
    result = np.result_type(*(float_dtype(name, array) for name, array in arrays.items()))
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
    try:
        return np.broadcast_to(mask, pairs)
    except ValueError:
        raise ValueError(f"attn_mask {mask.shape} does not broadcast to (..., L, S) = {pairs}") from None


def check_per_head(
    name: str, x: npt.ArrayLike | None, lead: tuple[int, ...], dtype: np.dtype[Any]
) -> Array | None:
    """Return one number per head, broadcast to the leading dims; (1,) will do when there are none."""
    if x is None:
        return None
    array = as_array(name, x)
    float_dtype(name, array)
    if lead == () and array.shape == (1,):
        array = array.reshape(())
    try:
        return np.broadcast_to(array, lead).astype(dtype)
    except ValueError:
        raise ValueError(f"{name} {array.shape} does not broadcast to the leading dims {lead}") from None


def check_key_lengths(key_lengths: npt.ArrayLike | None, lead: tuple[int, ...], n_keys: int) -> Array | None:
    """Return the key lengths, broadcast to the leading dims; (1,) will do when there are none."""
    if key_lengths is None:
        return None
    lengths = as_array("key_lengths", key_lengths)
    if lengths.dtype.kind not in "iu":
        raise TypeError(f"key_lengths must be integers, not {lengths.dtype}")
    if lengths.size and (lengths.min() < 0 or lengths.max() > n_keys):
        raise ValueError(f"key_lengths must lie in 0...{n_keys}, not {lengths.min()}...{lengths.max()}")
    if lead == () and lengths.shape == (1,):
        lengths = lengths.reshape(())
    try:
        return np.broadcast_to(lengths, lead)
    except ValueError:
        raise ValueError(
            f"key_lengths {lengths.shape} does not broadcast to the leading dims {lead}"
        ) from None


def check_window(window: tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """Return (left, right), each an int >= 0 or None."""
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be (left, right), not {window!r}") from None
    for side in (left, right):
        if side is not None and isinstance(side, bool | np.bool_):
            raise TypeError(f"window bounds are integers or None, not booleans: {window!r}")
        if side is not None and operator.index(side) < 0:
            raise ValueError(f"window bounds must not be negative: {window!r}")
    return (
        None if left is None else operator.index(left),
        None if right is None else operator.index(right),
    )


def check_seed(rng: Any) -> int:
    """Return an ``rng`` that is not a generator as an int."""
    if isinstance(rng, bool | np.bool_) or not hasattr(rng, "__index__"):
        raise TypeError(f"rng must be an int, a numpy.random.Generator or None, not {type(rng).__name__}")
    if operator.index(rng) < 0:
        raise ValueError(f"rng must not be negative, not {rng}")
    return operator.index(rng)


def norm_arguments(
    x: npt.ArrayLike,
    normalized_shape: int | Sequence[int],
    compute_dtype: npt.DTypeLike | None,
    **params: npt.ArrayLike | None,
) -> tuple[Array, dict[str, Array], tuple[int, ...], np.dtype[Any], np.dtype[Any]]:
    """Check the arguments of a norm; return x and params to compute with, axes, and both :func:`dtypes`."""
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
    """Return a table of cosines or sines with a head axis where it lacks one; ``half`` is (..., L, D / 2)."""
    if table.ndim == x_ndim - 1 and table.ndim >= 3:
        table = np.expand_dims(table, -3)
    try:
        np.broadcast_to(table, half)
    except ValueError:
        raise ValueError(f"{name} {table.shape} does not broadcast to (..., L, D / 2) = {half}") from None
    return table
