"""How far a gradient of attention may be from the truth, and the truth: `selfattn.reference` in float64.

With u = eps of the precision that is computed in, and sums whose rounding errors do not conspire (a sum of n
products is off by sqrt(n) u times the sum of their absolute values), following docs/theory/backward.md line by line:

* A score is off by what tolerances.py says; call it e. Its weight is then off by the factor e plus the weighted
  mean of e, which is the denominator's error.
* δ = O·dO has the errors of all weights of its row, and the output's own, which may be subnormal; never those of
  16 bits.
* dS = P (dP - δ): the relative error of P times both terms, and P times their errors.
* Soft-capping multiplies by 1 - t², which is off by a few u, and by 2e/softcap relatively.
* Where weights are rounded to bfloat16 (tolerances.py), so is dS, and the output has that error already.
* dQ, dK, dV and the other sums: their terms' errors, and their own rounding. Last comes that of the result.
"""

from dataclasses import dataclass

import numpy as np
from ml_dtypes import finfo
from tolerances import (
    FEW,
    assert_within,
    rounded_sum,
    rounding,
    rounds_weights,
    with_later_terms,
    without_two_kinds_of_16_bits,
)

import selfattn as sa
from selfattn import reference

FIELDS = reference.AttentionGradients._fields
PER_HEAD = ("alibi_slopes", "sinks")


def everything(options):
    """Return the names of the arguments that have gradients."""
    names = ["query", "key", "value"]
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype != np.bool_:
        names.append("attn_mask")
    return (*names, *(name for name in FIELDS[4:] if name in options))


@np.errstate(all="ignore")
def bounds(arrays, options, grad_out, grad_lse, dtype, rounds):
    """Errors that rounding may cause in each gradient, over all leading dims.

    `dtype` is that of the output, `rounds` of the weights as `rounds_weights` has it.
    """
    info = np.finfo(np.float64 if dtype == np.float64 else np.float32)
    u, least = float(info.eps), float(info.tiny)
    call = reference.call.attention_call(*arrays, **options, compute_dtype=np.float64)
    out, lse, P = reference.scaled_dot_product_attention(
        *arrays, **options, return_lse=True, return_weights=True, compute_dtype=np.float64
    )
    if options.get("dropout_p"):
        clean = {name: x for name, x in options.items() if name != "dropout_p"}
        _, P = reference.scaled_dot_product_attention(
            *arrays, **clean, return_weights=True, compute_dtype=np.float64
        )
    q, k, v, d_out = np.abs(call.query), np.abs(call.key), np.abs(call.value), np.abs(grad_out)
    S = call.allowed.shape[-1]
    E, Ev, scale = q.shape[-1], v.shape[-1], abs(call.scale)
    keep = 1 / (1 - call.dropout_p) if call.dropout_p < 1 else 1.0
    out, rows = np.abs(out), lse.size  # no sum over rows and heads has more terms than this

    products = scale * (q @ k.swapaxes(-1, -2))
    later, distance = with_later_terms(call, products)
    e = u * (np.sqrt(E) * products + FEW * (later + 1))
    mean_e = (P * e).sum(-1, keepdims=True)
    off = P * (e + mean_e + u * (np.sqrt(S) + FEW)) + np.where(call.allowed, least, 0)  # a weight's error

    terms = keep * (d_out @ v.swapaxes(-1, -2))  # |dP|, term by term
    delta = (out * d_out).sum(-1) + np.abs(grad_lse)
    e_delta = (off * terms + u * (np.sqrt(S) + np.sqrt(Ev) + FEW) * P * terms).sum(-1)
    e_delta = e_delta + u * delta + float(info.smallest_subnormal) * d_out.sum(-1)
    if rounds:
        e_delta = e_delta + (keep * rounded_sum(P, v, rounds) * d_out).sum(-1)
    size = P * (terms + delta[..., None])  # |dS|
    e_size = off * (terms + delta[..., None]) + P * (u * (np.sqrt(Ev) + FEW) * terms + e_delta[..., None])

    found = {"attn_mask": e_size + u * (np.sqrt(rows * S) + FEW) * size}
    found["bias"] = found["attn_mask"]
    found["offset_bias"] = reference.attention_vjp.sum_by_offset(found["attn_mask"])
    found["alibi_slopes"] = ((e_size + u * (np.sqrt(rows * S) + FEW) * size) * distance).sum((-2, -1))
    if call.sinks is not None:
        share = np.nan_to_num(np.exp(call.sinks[..., None] - lse), posinf=0.0)
        size_of_sink = 1 + np.abs(call.sinks[..., None]) + np.abs(np.nan_to_num(lse, neginf=0.0))
        factor = mean_e[..., 0] + u * (np.sqrt(S) + np.sqrt(rows) + FEW * size_of_sink)
        found["sinks"] = (share * (factor * delta + e_delta) + least * delta).sum(-1)
    if call.softcap is not None:
        e_size = e_size + size * (2 * FEW * u + 2 * e / call.softcap)
    side, e_side = size.swapaxes(-1, -2), e_size.swapaxes(-1, -2)
    found["query"] = scale * (e_size @ k + u * (np.sqrt(S) + FEW) * (size @ k))
    found["key"] = scale * (e_side @ q + u * (np.sqrt(rows) + FEW) * (side @ q))
    weights = keep * (off + u * (np.sqrt(rows) + FEW) * P).swapaxes(-1, -2)
    found["value"] = weights @ d_out
    if rounds:
        found["query"] += scale * rounded_sum(size, k, rounds)
        found["key"] += scale * rounded_sum(side, q, rounds)
        found["value"] += rounded_sum(keep * P.swapaxes(-1, -2), d_out, rounds)
    return found


@dataclass(frozen=True)
class TrueGradient:
    """One gradient in float64, and the bound of a computed gradient's error."""

    exact: np.ndarray
    limit: np.ndarray
    dtype: np.dtype


def true_gradients(arrays, options, grad_out, grad_lse=None):
    """Return the true gradient of each float argument, by name; `grad_out` has the dtype of the output."""
    d_out = np.asarray(grad_out, np.float64)
    d_lse = np.zeros(d_out.shape[:-1]) if grad_lse is None else np.asarray(grad_lse, np.float64)
    wide = without_two_kinds_of_16_bits(*arrays)
    _, pullback = reference.scaled_dot_product_attention_vjp(
        *wide, **options, return_lse=True, compute_dtype=np.float64
    )
    exact = pullback(d_out, d_lse)
    rounds = rounds_weights(*map(np.asarray, arrays), options.get("enable_gqa", False), has_pullback=True)
    limits = bounds(wide, options, d_out, d_lse, np.asarray(grad_out).dtype, rounds)
    given = dict(zip(FIELDS, (*arrays, *(options.get(name) for name in FIELDS[3:])), strict=True))
    found = {}
    for name in everything(options):
        x, limit = np.asarray(given[name]), limits[name]
        dtype = (np.result_type(x, 0.0) if x.dtype.kind in "iu" else x.dtype).newbyteorder("=")
        if name in ("key", "value") and options.get("enable_gqa"):
            *lead, heads, rows, width = limit.shape
            limit = limit.reshape(*lead, x.shape[-3], heads // max(x.shape[-3], 1), rows, width).sum(-3)
        limit = reference.arrays.sum_to_shape(limit, x.shape)
        truth = getattr(exact, name)
        found[name] = TrueGradient(truth, limit + rounding(dtype, truth), dtype)
    return found


def assert_true_gradients(got, expected, what="", wrt=FIELDS):
    """Compare an AttentionGradients with `true_gradients`; gradients that `wrt` leaves out are None."""
    for name in FIELDS:
        gradient = getattr(got, name)
        if name not in expected or name not in wrt:
            assert gradient is None, (name, what)
            continue
        truth = expected[name]
        assert (gradient.shape, gradient.dtype) == (truth.exact.shape, truth.dtype), (name, what)
        if np.isinf(gradient).any():
            gradient = np.where(overflowed(gradient, truth.exact, truth.limit), truth.exact, gradient)
        assert_within(gradient, truth.exact, truth.limit, f"gradient of {name}, {what}")


def gradients(arrays, options, *, num_threads=None, grad_out=None, grad_lse=None, wrt=None):
    """Return all gradients of a call, or those that `wrt` names, and the gradient of the output, if none is given a
    drawn one."""
    wrt = everything(options) if wrt is None else wrt
    out, pullback = sa.scaled_dot_product_attention_vjp(
        *arrays, **options, wrt=wrt, num_threads=num_threads, return_lse=grad_lse is not None
    )
    out = out[0] if grad_lse is not None else out
    if grad_out is None:
        grad_out = np.random.default_rng(5).standard_normal(out.shape).astype(out.dtype)
    return pullback(grad_out) if grad_lse is None else pullback(grad_out, grad_lse), grad_out


def assert_gradients(arrays, options, *, what="", grad_lse=None, wrt=None, **call):
    """Call vjp and the reference with the same arguments; compare all gradients; return them."""
    got, grad_out = gradients(arrays, options, grad_lse=grad_lse, wrt=wrt, **call)
    wrt = everything(options) if wrt is None else wrt
    assert_true_gradients(got, true_gradients(arrays, options, grad_out, grad_lse), what, wrt)
    return got


def overflowed(gradient, truth, limit):
    """Return where a gradient may be infinite: a sum within the truth's bound exceeds its dtype."""
    info = finfo(gradient.dtype)
    least = float(info.max) * (1 + float(info.eps) / 4)  # half a step beyond the largest number
    beyond = np.isfinite(truth) & (np.abs(truth) + limit >= least)
    return beyond & np.isinf(gradient) & (np.signbit(gradient) == np.signbit(truth))
