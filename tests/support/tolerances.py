"""How far a result of attention may be from the truth, and the truth: `selfattn.reference` in float64.

The bounds follow the arithmetic, element by element, with u = eps of the precision that is computed in:

* A score is a sum of E products, whose rounding errors are independent, unless they are equal: sqrt(E) u times the
  sum of their absolute values. Each later step (scale, change of units, soft cap, ALiBi, float mask, subtraction of
  the maximum) costs a few u of each term's absolute value.
* An error d in a score changes its weight by the factor exp(d); the denominator by the weighted mean of that.
  exp itself costs a few u, and is 0 below the least normal number.
* A row of the output is a sum of S terms: sqrt(S) u of the sum of their absolute values, plus what the errors
  of the weights amount to.
* Where the instruction set multiplies pairs of bfloat16, weights are rounded to it before they meet values of
  that dtype (docs/decisions/0007), in calls of some size: u' = 2^-8 of each term, also independent errors.
* At the end the result is rounded once to its dtype.

"A few" is FEW; the truth in float64 has errors of the same kind when float64 is tested. The largest error seen
is half a bound where 16 bits are rounded (eps is two half-ulps) and nearly a whole one where a weight is flushed
to 0; else it is about a tenth. Computing with a scale that is wrong by 1e-5 already fails.
"""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo

import selfattn as sa
from selfattn import reference

FEW = 4.0


@dataclass(frozen=True)
class Truth:
    """The right results in float64, with the bounds of the errors, and the dtype of the result."""

    out: np.ndarray
    lse: np.ndarray
    weights: np.ndarray
    out_bound: np.ndarray
    lse_bound: np.ndarray
    weights_bound: np.ndarray
    dtype: np.dtype

    @property
    def lse_dtype(self):
        return np.dtype(np.float64 if self.dtype == np.float64 else np.float32)


def without_two_kinds_of_16_bits(*arrays):
    """NumPy does not promote float16 with bfloat16; selfattn does, to float32, which holds both exactly."""
    arrays = [np.asarray(x) for x in arrays]
    if {"float16", "bfloat16"} <= {x.dtype.name for x in arrays}:
        arrays = [x.astype(np.float32) if x.dtype.name == "float16" else x for x in arrays]
    return arrays


def rounding(dtype, x):
    """Return the error of rounding x to dtype; it is 0 for NaN and inf."""
    info = finfo(dtype)
    return np.where(np.isfinite(x), np.abs(x), 0) * float(info.eps) + float(info.smallest_subnormal)


def rounds_weights(query, key, value, enable_gqa=False, has_pullback=False):
    """Return the rounding error of weights in this call, 0 if they are not rounded.

    2^-8, of bfloat16: products/bf16dot.h and decode/decode_bf16dot.h say where. 2^-16, of two bfloat16 terms:
    gradients of 16 bits on AMX (products/amx_gradients.h).
    """
    dtypes = {x.dtype.name for x in (query, key, value)}
    group = query.shape[-3] // max(key.shape[-3], 1) if enable_gqa and query.ndim > 2 else 1
    rows, keys, width = query.shape[-2] * group, key.shape[-2], query.shape[-1]
    if not (dtypes <= {"float16", "bfloat16"} and keys >= 32 and width >= 16):
        return 0.0
    if sa.get_isa() == "amx" and has_pullback and rows > 16 and value.shape[-1] >= 16:
        return 2.0**-16
    rounded = dtypes == {"bfloat16"} and (rows > 16 or (rows <= 8 and not has_pullback))
    return 2.0**-8 if rounded and sa.get_isa() == "avx512bf16" else 0.0


def rounded_sum(weights, terms, rounds):
    """Return two errors of weights @ terms with rounded weights: the first is never exceeded, the second hardly
    ever."""
    return rounds * np.minimum(weights @ terms, FEW * np.sqrt(weights**2 @ terms**2))


def with_later_terms(call, products):
    """Add the absolute terms of later steps to |q|·|k|; also return ALiBi's distances, 0 without ALiBi."""
    n_queries, n_keys = call.allowed.shape[-2:]
    distance = np.zeros((n_queries, n_keys))
    if call.alibi_slopes is not None:
        distance = np.abs(np.arange(n_queries)[:, None] + call.offset - np.arange(n_keys))
        products = products + np.abs(call.alibi_slopes[..., None, None]) * distance
    if call.bias is not None:
        products = products + np.where(np.isfinite(call.bias), np.abs(call.bias), 0)
    if call.offset_bias is not None:
        added = reference.call.of_pairs(call.offset_bias, n_queries, n_keys)
        products = products + np.where(np.isfinite(added), np.abs(added), 0)
    return products, distance


@np.errstate(all="ignore")
def truth(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
    """Reference and bounds for one call. With dropout `rng` must be an int."""
    query, key, value = without_two_kinds_of_16_bits(query, key, value)
    rounds = rounds_weights(query, key, value, options.get("enable_gqa", False))
    arguments = (query, key, value, attn_mask, dropout_p, is_causal)
    call = reference.call.attention_call(*arguments, **options, compute_dtype=np.float64)
    found = reference.attention.attend(call, reference.attention.dot_products(call.query, call.key))
    out, lse, weights = found.output, found.lse, found.dropped_weights
    dtype = reference.arrays.float_dtype(query, key, value)
    info = np.finfo(np.float64 if dtype == np.float64 else np.float32)
    u, least = float(info.eps), float(info.tiny)

    finite = [np.where(np.isfinite(x), np.abs(x), 0) for x in (call.query, call.key, call.value)]
    n_keys = call.allowed.shape[-1]
    # NumPy's float64 adds n equal terms with n equal errors
    if dtype == np.float64 and np.isfinite(call.value).all():
        out = (weights.astype(np.longdouble) @ call.value).astype(np.float64)
    products = reference.attention.dot_products(*finite[:2]) * abs(call.scale)
    later, _ = with_later_terms(call, products)
    width = call.query.shape[-1]
    alike = all((x == x[..., :1]).all() for x in (call.query, call.key))  # equal terms have equal errors
    error = u * ((width if alike else np.sqrt(width)) * products + FEW * (later + 1))

    # weight and denominator: exp(score + error - lse) against exp(score - lse)
    keep = 1.0 / (1.0 - call.dropout_p) if call.dropout_p < 1 else 1.0
    exact = np.where(np.isfinite(found.weights), found.weights, 0)
    up = np.where(exact > 0, np.exp(found.masked_scores - lse[..., None] + error), 0)
    d_weights = np.where(np.isfinite(up), up - exact, np.inf) + np.where(call.allowed, least, 0)
    d_sum = d_weights.sum(-1, keepdims=True) + u * (np.sqrt(n_keys) + FEW)
    if call.sinks is not None:
        d_sum = d_sum + FEW * u * (np.abs(call.sinks[..., None, None]) + 1)
    d_sum = d_sum / np.maximum(1 - d_sum, 0.1)
    d_weights = (d_weights + exact * (d_sum + FEW * u)) * keep
    d_out = d_weights @ finite[2] + u * (np.sqrt(n_keys) + FEW) * (exact * keep @ finite[2])
    d_out = d_out + np.sqrt(n_keys) * float(info.smallest_subnormal)  # for subnormal terms
    if rounds:
        d_out = d_out + rounded_sum(exact * keep, finite[2], rounds)
    lse_bound = d_sum[..., 0] + FEW * u * (np.abs(np.where(np.isfinite(lse), lse, 0)) + 1)
    lse_bound = lse_bound + error.max(-1, initial=0, where=call.allowed)
    return Truth(
        out=out,
        lse=lse,
        weights=weights,
        out_bound=d_out + rounding(dtype, out),
        lse_bound=lse_bound,
        weights_bound=d_weights + rounding(dtype, weights),
        dtype=dtype,
    )


def assert_within(got, expected, bound, what=""):
    """Check that numbers are equal if not finite, else within the bound; one that is NaN allows no error."""
    got, bound = np.asarray(got, np.float64), np.asarray(bound)
    assert got.shape == expected.shape, what
    finite = np.isfinite(expected)
    if not finite.all():
        np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=what)
    with np.errstate(all="ignore"):
        wrong = ~(np.abs(got - expected) <= bound) & finite & (got != expected)
    if wrong.any():
        at = tuple(int(n) for n in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} elements are out of bounds; the first, {at}, is {got[at]!r}, "
            f"should be {expected[at]!r} within {bound[at]:.3g}"
        )


def assert_results(results, expected, what=""):
    """Check (out, lse, weights), as `return_lse` with `return_weights` gives them, against a Truth."""
    out, lse, weights = results
    assert (out.dtype, lse.dtype, weights.dtype) == (expected.dtype, expected.lse_dtype, expected.dtype), what
    for x in results:
        assert type(x) is np.ndarray and x.flags.c_contiguous and x.flags.writeable and x.flags.aligned, what
    assert_within(out, expected.out, expected.out_bound, f"out {what}")
    assert_within(lse, expected.lse, expected.lse_bound, f"lse {what}")
    assert_within(weights, expected.weights, expected.weights_bound, f"weights {what}")


def assert_attention(*arguments, num_threads=None, what="", **options):
    """Call selfattn and the reference with the same arguments; check all three results; return them.

    The call without lse and weights must give the same output, to the last bit: it is another path.
    """
    results = sa.scaled_dot_product_attention(
        *arguments, **options, return_lse=True, return_weights=True, num_threads=num_threads
    )
    assert_results(results, truth(*arguments, **options), what)
    alone = sa.scaled_dot_product_attention(*arguments, **options, num_threads=num_threads)
    np.testing.assert_array_equal(alone.astype(np.float64), results[0].astype(np.float64), err_msg=what)
    return results
