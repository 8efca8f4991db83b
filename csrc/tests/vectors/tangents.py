"""What a call of attention with tangents should find: tangents of results, gradients, and tangents of gradients."""

from __future__ import annotations

import numpy as np
from bounds import Bound, finite, folded
from case import reference

from selfattn.reference.attention import distances
from selfattn.reference.attention_jvp import tangents_as_call
from selfattn.reference.attention_vjp import sum_by_offset
from selfattn.reference.call import of_pairs


def tangent_results(q, k, v, of, grad_out=None, grad_lse=None, tangents=(), rounding=0, **options):
    """Return numbers and sizes of their errors by the output's name.

    ``of`` has what `attention.attention_results` knows of the call; outputs, of which δ is made, are rounded by
    ``rounding`` eps. Sizes follow the lines of `selfattn.reference.attention_jvp`.
    """
    of_grads = {x: options.pop(x, None) for x in ("grad_out_tangent", "grad_lse_tangent")}
    a, allowed, heads = of.call, of.call.allowed, int(np.prod(of.weights.x.shape[:-2]))
    moved = tangents_as_call(tangents, {"query": q, "key": k, "value": v} | options, a)
    _, dot = reference.scaled_dot_product_attention_jvp(q, k, v, tangents, return_lse=True, **options)

    def given(x, like):
        """Return the bounds of an optional array that is converted; it has the shape of ``like``."""
        return Bound(0 * like if x is None else x, 0 if x is None else finite(x))

    one = np.ones(allowed.shape[:-2])
    query, key, value = map(Bound, (a.query, a.key, a.value))
    query_dot, key_dot, value_dot = map(Bound, (moved.query, moved.key, moved.value))
    scaled = (query_dot @ key.T + query @ key_dot.T) * a.scale
    score = scaled * of.gain
    for x in (
        moved.bias,
        None if moved.offset_bias is None else of_pairs(moved.offset_bias, *allowed.shape[-2:]),
    ):
        score = score if x is None else score + given(x, allowed)
    if moved.alibi_slopes is not None:
        score = score + given(moved.alibi_slopes, one).columns.columns * distances(a)
    score = score.map(lambda x: np.where(allowed, x, 0))
    lse = (of.weights * score).sum()
    if a.sinks is not None:
        sink_dot = given(moved.sinks, one).columns
        lse = lse + of.share * sink_dot
    weights = of.weights * (score + lse.columns)
    dropped, dropped_dot = of.weights * of.keep, weights * of.keep
    out, out_dot = dropped @ value, dropped_dot @ value + dropped @ value_dot
    results = {"out_tangent": (dot[0], out_dot.error), "lse_tangent": (dot[1][..., None], lse.columns.error)}
    if grad_out is None:
        return results

    grads, grads_dot = reference.scaled_dot_product_attention_hvp(
        q, k, v, grad_out, tangents, grad_lse=grad_lse, **of_grads, **options
    )
    rows, n_keys = allowed.shape[-2] * heads, allowed.shape[-1]
    out, out_dot = (Bound(x.x, x.error + rounding * x.x) for x in (out, out_dot))
    d_out, d_out_dot = (given(x, out.x) for x in (grad_out, of_grads["grad_out_tangent"]))
    d_lse, d_lse_dot = (given(x, lse.x) for x in (grad_lse, of_grads["grad_lse_tangent"]))
    delta, delta_dot = (out * d_out).sum() + d_lse, (out_dot * d_out + out * d_out_dot).sum() + d_lse_dot
    gap = (d_out @ value.T) * of.keep + delta.columns
    gap_dot = (d_out_dot @ value.T + d_out @ value_dot.T) * of.keep + delta_dot.columns
    d_scores, d_scores_dot = of.weights * gap, weights * gap + of.weights * gap_dot

    def both(name, x, x_dot, sum_=lambda x: x):
        """Add a gradient and its tangent; ``sum_`` adds up their sizes."""
        for to, right, bound in ((name, grads, x), (f"{name}_tangent", grads_dot, x_dot)):
            results[to] = getattr(right, FIELDS[name]), bound.map(sum_, rows).error

    def pair(name, x, x_dot, axis=-1):
        """Add a gradient and its tangent as one array."""
        right = np.stack([getattr(grads, FIELDS[name]), getattr(grads_dot, FIELDS[name])], axis)
        results[name] = right, np.stack([x.error, x_dot.error], axis)

    both(
        "dvalue",
        dropped.T @ d_out,
        dropped_dot.T @ d_out + dropped.T @ d_out_dot,
        lambda x: folded(x, v.shape),
    )
    if a.bias is not None:
        both("dmask", d_scores, d_scores_dot)
    if a.offset_bias is not None:
        pair("doffset_bias", *(x.map(sum_by_offset, rows) for x in (d_scores, d_scores_dot)), axis=0)
        results["doffset_bias"] = [x[..., None, :] for x in results["doffset_bias"]]
    if a.alibi_slopes is not None:
        distance = Bound(distances(a))
        distance = distance + (of.weights * distance).sum().columns
        of_slopes = (
            (x * distance).map(lambda x: x.sum((-2, -1)), n_keys + rows) for x in (d_scores, d_scores_dot)
        )
        pair("dslope_rows", *of_slopes)
    if a.sinks is not None:
        pair(
            "dsink_rows", (of.share * delta).sum(), (of.share * ((sink_dot + lse) * delta + delta_dot)).sum()
        )
    if a.softcap:
        bend = of.gain * of.capped * scaled * (2 / a.softcap)
        d_scores, d_scores_dot = d_scores * of.gain, d_scores_dot * of.gain + d_scores * bend
    d_scores, d_scores_dot = d_scores * a.scale, d_scores_dot * a.scale
    both("dquery", d_scores @ key, d_scores_dot @ key + d_scores @ key_dot)
    of_keys = d_scores.T @ query, d_scores_dot.T @ query + d_scores.T @ query_dot
    both("dkey", *of_keys, lambda x: folded(x, k.shape))
    return results


FIELDS = {
    "dquery": "query",
    "dkey": "key",
    "dvalue": "value",
    "dmask": "attn_mask",
    "doffset_bias": "offset_bias",
    "dslope_rows": "alibi_slopes",
    "dsink_rows": "sinks",
}
