"""Vectors of attention and its gradients, and of conversions between dtypes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from bounds import Bound, clean, finite, folded, transposed
from case import EPS, FLOATS, INTEGERS, LAYOUTS, STORED, TILE, UNBOUNDED, Case, decoded, reference, rounded
from tangents import tangent_results

from selfattn.reference.arrays import sum_to_shape
from selfattn.reference.attention import attend, dot_products
from selfattn.reference.attention_vjp import sum_by_offset
from selfattn.reference.call import attention_call, of_pairs


class Dense:
    """What the reference takes as a block mask."""

    def __init__(self, allowed):
        self.allowed = allowed

    def to_dense(self, n_queries, n_keys):
        """Return the pairs that are open."""
        return self.allowed


@np.errstate(all="ignore")
def attention_results(q, k, v, f64, grad_out=None, grad_lse=None, moves=None, **options):
    """Return what a call should find, by the output's name: numbers, and both sizes of their errors.

    The sizes follow docs/theory/backward.md, in the order of the computation. Gradients of keys and values have the
    shapes of ``k`` and ``v``, those of the mask the shape of all pairs. ``moves``: see `tangent_results`.
    """
    eps, tiny = (EPS["f64"], 2.0**-1022) if f64 else (EPS["f32"], 2.0**-126)
    least = tiny / eps  # the size of an underflow
    options["compute_dtype"] = np.float64
    (_, lse), pull = reference.scaled_dot_product_attention_vjp(q, k, v, return_lse=True, **options)
    a = attention_call(q, k, v, **options)
    of, (aq, ak, av) = attend(a, dot_products(a.query, a.key)), map(finite, (a.query, a.key, a.value))
    n_queries, n_keys, scale = aq.shape[-2], ak.shape[-2], abs(a.scale)

    # A score's size; the derivative of softcap, and its size.
    s, error = clean(of.scaled_scores), (aq.shape[-1] + 4) * scale * dot_products(aq, ak)
    gain, gain_error = np.ones(s.shape), np.zeros(s.shape)
    if a.softcap:
        gain, gain_error = 1 - (s / a.softcap) ** 2, 12 + 2 * error / a.softcap
        error = error + 8 * np.abs(s)
    distance = np.abs(np.arange(n_queries)[:, None] + a.offset - np.arange(n_keys)).astype(float)
    if a.alibi_slopes is not None:
        term = a.alibi_slopes[..., None, None] * distance
        s = s - term
        error = error + 3 * np.abs(term) + np.abs(s)
    if a.bias is not None:
        s = s + clean(a.bias)
        # A mask of finfo.min leaves nothing of a score: rows of it have exactly the same weights.
        error = np.where(np.abs(s) < 1e30, error + 4 * finite(a.bias) + np.abs(s), 0)
    if a.offset_bias is not None:
        by_offset = of_pairs(a.offset_bias, n_queries, n_keys)
        s = s + clean(by_offset)
        error = np.where(np.abs(s) < 1e30, error + 4 * finite(by_offset) + np.abs(s), 0)

    # A weight's relative size; a row's sums.
    w = finite(of.weights)
    error = np.where(w > 0, error + 2 * np.abs(np.log(w)) + 4, 0)
    mean = (w * error).sum(-1) + (0 if a.sinks is None else 4 * np.abs(a.sinks)[..., None])
    sums = 2 * (min(n_keys, TILE) + 6 * (n_keys // TILE + 1) + 16)
    spread = error + mean[..., None] + sums
    keep = 1.0 if a.keep is None else np.where(a.keep, 1 / (1 - a.dropout_p), 0)
    p = w * keep
    p_size = p * spread + 4 * keep * least
    out_size, out_coarse = p_size @ av, p @ av
    results = {
        "out": (of.output, out_size, out_coarse),
        "lse": (lse[..., None], (mean + sums + 4 * finite(lse) + 4)[..., None]),
        "weights": (of.dropped_weights, p_size),
    }
    share = None if a.sinks is None else np.exp(a.sinks[..., None] - np.where(np.isfinite(lse), lse, np.inf))
    if moves is not None:
        if share is not None:
            share = Bound(share, share * (mean + sums + 8) + 2 * finite(share * np.log(share)))
        capped = Bound(of.scaled_scores / (a.softcap or 1), gain_error)
        known = {"call": a, "keep": keep, "share": share, "weights": Bound(w, w * spread + 4 * least)}
        known |= {"gain": Bound(gain, gain_error), "capped": capped}
        more = tangent_results(q, k, v, SimpleNamespace(**known), grad_out, grad_lse, **moves, **options)
        return {x: results[x] for x in ("out", "lse")} | more
    if grad_out is None:
        return results

    found, go, v_width = pull(grad_out, grad_lse), finite(grad_out), av.shape[-1]
    d_lse = np.zeros(lse.shape) if grad_lse is None else clean(grad_lse)
    rows = n_queries * int(np.prod(aq.shape[:-2])) + 16
    dp = keep * (clean(grad_out) @ transposed(clean(a.value)))
    dp_error = (v_width + 4) * keep * (go @ transposed(av))
    delta = (w * dp).sum(-1) - d_lse
    delta_error = 2 * np.abs(d_lse) + (go * (out_size + (v_width + 4) * out_coarse)).sum(-1)
    delta_coarse = 2 * (go * out_coarse).sum(-1)  # a unit that rounds weights takes it from rounded outputs
    size = np.abs(dp) + np.abs(delta)[..., None]
    ds = np.abs(w * (dp - delta[..., None]))
    ds_error = w * (dp_error + delta_error[..., None] + (spread + 4) * size) + least * (1 + size)
    ds_coarse = w * delta_coarse[..., None]
    of_dot = ds * scale * gain
    dot = scale * (ds_error * gain + ds * (gain_error + 4)) + of_dot * (n_keys + rows) + least
    dot_coarse = scale * ds_coarse * gain + of_dot

    results["dquery"] = found.query, dot @ ak, dot_coarse @ ak
    of_keys = (folded(transposed(x) @ aq, k.shape) for x in (dot, dot_coarse))
    results["dkey"] = found.key, *of_keys
    of_values = (folded(transposed(x) @ go, v.shape) for x in (p * (spread + rows) + least, p))
    results["dvalue"] = found.value, *of_values
    if a.bias is not None:
        results["dmask"] = found.attn_mask, ds_error + rows * ds, ds_coarse
    if a.offset_bias is not None:
        of_diagonals = (sum_by_offset(x)[..., None, :] for x in (ds_error + rows * ds, ds_coarse))
        results["doffset_bias"] = found.offset_bias[..., None, :], *of_diagonals
    if a.alibi_slopes is not None:
        more = ds_error + (n_keys + rows) * w * size
        sizes = ((x * distance).sum((-2, -1)) for x in (more, ds_coarse))
        results["dslope_rows"] = found.alibi_slopes, *sizes
    if a.sinks is not None:
        more = delta_error + (mean + sums + rows) * np.abs(delta)
        results["dsink_rows"] = found.sinks, (share * more + least).sum(-1), (share * delta_coarse).sum(-1)
    return results


def broadcast_shape(shape, axes):
    """Return a shape with 1 for broadcast axes, counted from the end."""
    return tuple(1 if n - len(shape) in axes else size for n, size in enumerate(shape))


def drawn_mask(rng, shape, dtype, closed, largest):
    """Draw a mask, of which some heads are all closed or all open; ``largest`` inf: numbers are the dtype's least."""
    whole = rng.integers(0, 8, shape[:-2])[..., None, None]
    shut = (whole == 0) | ((whole > 1) & (rng.random(shape) < closed))
    if dtype == "bool":
        return ~shut
    if largest < np.inf:
        numbers = rng.uniform(-largest, largest, shape)
    else:
        least = -(2.0**128) + 2.0**120 if dtype == "bf16" else float(np.finfo(STORED[dtype]).min)
        numbers = np.where(rng.random(shape) < rng.choice([0, 0.1]), 0.5, least)
    return np.where(shut, -np.inf, numbers)


def write_block_mask(case, rng, prefix, kind, pairs, diagonal):
    """Write a block mask as classes of rows that see runs of keys, or as a prefix; return the open pairs."""
    *lead, n_queries, n_keys = pairs
    case.numbers(**{prefix + "open_fraction": rng.uniform(0, 1)})  # results must not depend on it
    shape = broadcast_shape((*lead, 1, 1), [-axis for axis in range(3, 6) if rng.random() < 0.3])
    i, j = np.arange(n_queries), np.arange(n_keys)
    if kind == "prefix":
        at = case.given(prefix + "prefix", rng.integers(0, n_keys + 1, shape), "i64")
        case.numbers(**{prefix + "diagonal": diagonal})
        return np.broadcast_to((j < at) | (j <= i[:, None] + diagonal), pairs)
    class_rows = int(rng.choice([1, 1, 3, 16, 64, 70, 2**30 - 1]))
    classes, length = int(rng.integers(1, 7)), -(-n_queries // class_rows)
    # Neighbours are often alike.
    of_rows = rng.integers(0, classes, (*shape[:-2], length, 1))
    of_rows = of_rows[..., np.maximum.accumulate(np.arange(length) * (rng.random(length) < 0.3)), :]
    step = TILE if rng.random() < 0.3 else 1
    # Runs and gaps between keys at which what is open changes; of kind "run" one run.
    edges = rng.integers(0, (4 if step > 1 else 51), (classes, 2 if kind == "run" else n_keys // step + 2))
    edges = np.minimum(edges.cumsum(-1) * step, n_keys)
    open_ = (edges[..., None] <= j).sum(-2) % 2 == 1
    changes = np.diff(np.pad(open_.astype(np.int8), ((0, 0), (1, 1))))
    runs = [np.stack([np.flatnonzero(x == 1), np.flatnonzero(x == -1)], 1) for x in changes]
    for one in runs:  # the last run may end beyond the last key, as a block that is cut off does
        if len(one) and one[-1, 1] == n_keys:
            one[-1, 1] += rng.integers(0, 70)
    case.given(prefix + "classes", of_rows, "i64")
    case.given(prefix + "starts", np.cumsum([0, *map(len, runs)]), "i64")
    case.given(prefix + "runs", np.concatenate(runs), "i64")
    case.numbers(**{prefix + "class_rows": class_rows, prefix + "gaps": any(len(one) > 1 for one in runs)})
    return np.broadcast_to(open_[of_rows[..., i // class_rows, 0]], pairs)


def poison(kind, rng, given, grads, moves, sees):
    """Put NaN and infinities where no pair is open ("closed"), or in some rows; arrays change in place.

    "weightless" keys have weight 0, but 0·NaN is NaN; each row sees others, too.
    """

    def put(x, rows, bad):
        rows = np.broadcast_to(rows, x.shape[:-1])[..., None]
        x[...] = np.where(rows & (rng.random(x.shape) < 0.5), rng.choice(bad, x.shape), x)

    nan, special = [np.nan], [np.nan, np.nan, np.inf, -np.inf]
    query, key, value = (given[x] for x in ("query", "key", "value"))
    others = np.delete(sees, slice(1, None, 97), -1)
    if kind == "closed":
        of_queries, of_keys = sees.any(-1, keepdims=True), transposed(sees.any(-2, keepdims=True))
        for x in grads:
            put(x, ~of_queries[..., 0], special)
        for name, x in (*given.items(), *moves.items()):
            by_row = of_queries if name == "query" else of_keys
            put(x, folded(by_row, (*x.shape[:-1], 1))[..., 0] == 0, special)
    elif kind == "weightless" and query.shape[-1] and (others.any(-1) | ~sees.any(-1)).all():
        query[..., 0] = 1
        key[..., 1::97, 0] = -np.inf
        put(value, np.arange(value.shape[-2]) % 97 == 1, nan)
    elif kind == "queries":
        put(query, np.arange(query.shape[-2]) % 3 == 0, nan)
    elif kind == "some":
        for x in (key, value):
            put(x, rng.random(x.shape[:-1]) < 0.06, nan)


def any_of(*values):
    """Return a function that draws one of these."""
    return lambda rng: values[rng.integers(len(values))]


def between(least, most):
    """Return a function that draws a number."""
    return lambda rng: rng.uniform(least, most)


def axes(p):
    """Return a function that draws axes to broadcast, each with this probability, the last seldom."""
    return lambda rng: tuple(axis for axis in range(-5, 0) if rng.random() < (p if axis < -1 else p / 4))


def some(*names):
    """Return a function that draws a subset."""
    return lambda rng: tuple(name for name in names if rng.random() < 0.5)


def layout(rng):
    """Draw the layout of an array."""
    return tuple(x for x in LAYOUTS if rng.random() < (0.15 if x != "long_rows" else 0.005))


TANGENTS = "query", "key", "value", "mask", "offset_bias", "alibi", "sinks", "grad_out", "grad_lse"
LAID_OUT = "query", "key", "value", "mask", "gate", "offset_bias", "moves", "out"
# A call's options: what it has without them, how often one is drawn, and what is drawn.
OPTIONS = {
    "lead": ((2,), 0.7, lambda rng: tuple(map(int, rng.integers(1, 4, rng.integers(0, 4))))),
    "gqa": (1, 0.3, any_of(2, 3, 4)),  # query heads of a key head
    "backward": (False, 0.7, any_of(True)),
    "grad_lse": (False, 0.4, any_of(True)),
    "out": (None, 0.4, any_of("f32")),  # of 16-bit inputs
    "wants": (("lse",), 0.7, some("lse", "weights")),
    "layouts": ({}, 0.5, lambda rng: {x: layout(rng) for x in LAID_OUT}),
    "query axes": ((), 0.3, axes(0.3)),
    "key axes": ((), 0.3, axes(0.5)),
    "value axes": ("key axes", 0.2, axes(0.5)),
    "mask": (None, 0.4, any_of("bool", "bool", *FLOATS)),
    "mask axes": ((), 0.7, axes(0.5)),
    "closed": (0.3, 1, between(-0.2, 1.1)),  # the mask's share
    "largest": (3.0, 0.1, any_of(np.inf)),  # of the mask
    "key_bias": (False, 0.2, any_of(True)),
    "alibi": (False, 0.25, any_of(True)),
    "sinks": (False, 0.25, any_of(True)),
    "shared": ((), 0.5, axes(0.5)),  # axes of slopes and sinks
    "lengths": (False, 0.2, any_of(True)),
    "query_lengths": (False, 0, any_of(True)),
    "causal": (False, 0.35, any_of(True)),
    "diagonal": (
        0,
        0.5,
        any_of("last", "last", "last", -1000, -50, -7, 9, 40, 1000),
    ),  # "last": lower_right's
    "left": (None, 0.2, any_of(0, 3, 6, 30, 49)),
    "right": (None, 0.2, any_of(0, 5, 31, 60)),
    "blocks": ((), 0.25, some("prefix", "run", "runs", "runs")),
    "softcap": (0.0, 0.15, between(0.1, 20)),
    "dropout": (0.0, 0.2, between(0, 1)),
    "scale": (None, 0.3, between(-2, 2)),
    "magnitude": (2.0, 0.2, lambda rng: np.exp(rng.uniform(-5, 9))),
    "poison": ("", 0.4, any_of("closed", "closed", "weightless", "queries", "some")),
    "climbing": (False, 0.03, any_of(True)),
    "gate": (False, 0.4, any_of(True)),  # beside a float mask
    "offset_bias": (None, 0.15, any_of(*FLOATS)),
    "offset axes": ((), 0.5, any_of((-3,), (-4, -3), (-4,))),
    "tangents": ((), 0, some(*TANGENTS)),
}


def attention_case(file, name, dtype, sizes, quick=True, seed=0, **settings):
    """Draw the arrays of a call of attention, and write it."""
    t, rng = {x: default for x, (default, *_) in OPTIONS.items()} | settings, np.random.default_rng(seed)
    n_queries, n_keys, width, v_width = sizes
    floating = dtype in FLOATS
    out = (dtype if floating else "f64") if dtype not in ("f16", "bf16") else t["out"] or dtype
    f64 = out == "f64"
    real = "f64" if f64 else "f32"
    lead, gqa = (*t["lead"][:-1], t["lead"][-1] * t["gqa"]) if t["lead"] else (), t["gqa"] if t["lead"] else 1
    k_lead, pairs = (*lead[:-1], lead[-1] // gqa) if lead else (), (*lead, n_queries, n_keys)
    case = Case(file, name, 1 if f64 else 0.5, quick, coarse=int(dtype == "bf16"), wide=f64)
    scale = t["scale"] if t["scale"] is not None else width**-0.5 if width else 1.0
    diagonal = n_keys - n_queries if t["diagonal"] == "last" else t["diagonal"]
    full = {"query": (*lead, n_queries, width)}
    full |= {"key": (*k_lead, n_keys, width), "value": (*k_lead, n_keys, v_width)}
    of_axes = {x: t[f"{x} axes"] for x in full}
    of_axes["value"] = of_axes["key"] if of_axes["value"] == "key axes" else of_axes["value"]
    given = {}
    for x, shape in full.items():
        most = (1 if floating else 9) if x == "value" else t["magnitude"] if floating else 3
        y = rng.uniform(-most, most, broadcast_shape(shape, of_axes[x]))
        given[x] = rounded(y if floating else np.rint(np.abs(y) if dtype[0] == "u" else y), dtype)
    if t["climbing"]:  # scores rise so far that exp of the difference underflows
        given["key"][...] = (np.arange(given["key"].shape[-2]) // 50 * 100.0)[:, None]
        given["query"][...] = np.where(np.arange(given["query"].shape[-2]) % 2, -1.0, 1.0)[:, None]

    # What closes pairs, and what is added to scores.
    moving = {}  # what has a tangent, by the name of its array
    options, allowed = {"scale": scale, "softcap": t["softcap"] or None, "enable_gqa": gqa > 1}, None
    if diagonal == 0 or (t["causal"] and diagonal == n_keys - n_queries):
        options["causal"] = ("lower_right" if diagonal else "upper_left") if t["causal"] else None
        options["window"] = t["left"], t["right"]
    else:  # the definition of causal and window at any diagonal
        place = np.arange(n_queries)[:, None] + diagonal - np.arange(n_keys)
        least = max(0 if t["causal"] else -np.inf, -np.inf if t["right"] is None else -t["right"])
        allowed = (place >= least) & (place <= (np.inf if t["left"] is None else t["left"]))
        allowed, t["alibi"] = np.broadcast_to(allowed, pairs), False
    for n, kind in enumerate(t["blocks"]):
        open_ = write_block_mask(case, rng, f"{n}__", kind, pairs, diagonal)
        allowed = open_ if allowed is None else allowed & open_
    for x, most in (("alibi", 0.2), ("sinks", 4)):
        if t[x]:
            moving[x] = y = case.draw(rng, x, broadcast_shape((*lead, 1, 1), t["shared"]), "f64", most)
            options["alibi_slopes" if x == "alibi" else x] = np.broadcast_to(y[..., 0, 0], lead)
    if t["lengths"]:
        y = rng.integers(0, n_keys + 1, (*lead, 1, 1)) * (rng.random((*lead, 1, 1)) < 0.7)
        options["key_lengths"] = case.given("key_lengths", y, "i64")[..., 0, 0]
    if t["query_lengths"]:  # later queries are padding; the last query has the place of the last key
        n = case.given("query_lengths", rng.integers(0, n_queries + 1, (*lead, 1, 1)), "i64")
        i, keys = np.arange(n_queries)[:, None], options.pop("key_lengths")[..., None, None]
        options["causal"] = None
        allowed = (np.arange(n_keys) < np.minimum(keys, i + keys - n + 1)) & (i < n)
    bias, mask_shape = None, broadcast_shape(pairs, t["mask axes"])
    if t["mask"]:
        mask = drawn_mask(rng, mask_shape, t["mask"], t["closed"], t["largest"])
        mask = case.given("mask", mask, t["mask"], t["layouts"].get("mask", ()))
        bias = np.broadcast_to(mask != 0 if t["mask"] == "bool" else mask, pairs)
        if t["mask"] != "bool":
            moving["mask"] = mask
        if t["mask"] != "bool" and t["gate"]:
            gate = drawn_mask(rng, broadcast_shape(pairs, axes(0.4)(rng)), "bool", t["closed"], 0)
            gate = case.given("gate", gate, "bool", t["layouts"].get("gate", ())) != 0
            allowed = np.broadcast_to(gate if allowed is None else allowed & gate, pairs)
    if t["offset_bias"] and n_queries and n_keys:
        y, dtype_, shape = t["closed"] * rng.integers(2), t["offset_bias"], (*lead, 1, n_queries + n_keys - 1)
        y = drawn_mask(rng, broadcast_shape(shape, t["offset axes"]), dtype_, y, 3.0)
        moving["offset_bias"] = y = case.given("offset_bias", y, dtype_, t["layouts"].get("offset_bias", ()))
        options["offset_bias"] = np.broadcast_to(y, shape)[..., 0, :]
    # Query heads that follow one another and share keys and values share their gradients.
    ones = [sizes == (1, 1) for sizes in zip(given["key"].shape[:-2], given["value"].shape[:-2], strict=True)]
    several = gqa > 1 and k_lead[-1] > 1
    shared = [] if several else [n for n in range(len(lead)) if all(ones[n:])]
    if t["key_bias"]:
        y = rng.uniform(-3, 3, (*(1 if n in shared else size for n, size in enumerate(k_lead)), 1, n_keys))
        y = np.where(rng.random(y.shape) < 0.5, 0, y)
        y = np.where(np.arange(n_keys) >= rng.integers(0, n_keys + 1, (*y.shape[:-1], 1)), -np.inf, y)
        y = np.broadcast_to(case.given("key_bias", y, real), (*k_lead, 1, n_keys))
        y = np.repeat(y, gqa, axis=-3) if lead else y
        bias = y + (0 if bias is None else np.where(bias, 0, -np.inf) if t["mask"] == "bool" else bias)
    options["attn_mask"] = bias
    options["block_mask"] = None if allowed is None else Dense(allowed)
    grad_out = rounded(rng.uniform(-1, 1, (*lead, n_queries, v_width)), out)
    grad_out_tangent = rounded(rng.uniform(-1, 1, grad_out.shape), out)
    of_dtype = dict.fromkeys(given, dtype if floating else "f64") | {"alibi": "f64", "sinks": "f64"}
    of_dtype |= {"mask": t["mask"], "offset_bias": t["offset_bias"]}
    moves = {
        x: rounded(rng.uniform(-1, 1, y.shape), of_dtype[x])
        for x, y in (given | moving).items()
        if x in t["tangents"]
    }
    if floating and t["poison"]:
        zeros = (np.zeros((*lead, n, 1)) for n in (n_queries, n_keys, n_keys))
        of_inputs = {x: y for x, y in moves.items() if x in given}
        sees = attention_call(*zeros, **options, rng=0).allowed
        poison(t["poison"], rng, given, (grad_out, grad_out_tangent), of_inputs, sees)
        for x in ("mask", "offset_bias"):
            if x in moves:
                moves[x][moving[x] == -np.inf] = np.nan
    for x, y in given.items():
        case.given(x, y, dtype, t["layouts"].get(x, ()))
    numbers = {"L": n_queries, "S": n_keys, "E": width, "Dv": v_width, "gqa": gqa, "f64": f64, "scale": scale}
    numbers |= {"softcap": t["softcap"], "causal": t["causal"], "diagonal": diagonal}
    for x in ("left", "right"):
        numbers[f"window_{x}"] = UNBOUNDED if t[x] is None else t[x]
    if t["dropout"]:
        numbers["dropout_p"] = options["dropout_p"] = t["dropout"]
        numbers["seed"] = options["rng"] = int(rng.integers(0, 2**63))
    case.numbers(**numbers)
    for x, y in moves.items():
        case.given(
            f"{x}_tangent", y, of_dtype[x], () if x in ("alibi", "sinks") else t["layouts"].get("moves", ())
        )
    if t["backward"]:
        case.array("stats", "o", real, (*lead, n_queries, 4 if t["tangents"] else 2))
        case.given("grad_out", grad_out, out, t["layouts"].get("out", ()))
        if t["grad_lse"]:
            options["grad_lse"] = case.draw(rng, "grad_lse", (*lead, n_queries, 1), real, 1.5)[..., 0]
        options["grad_out"] = grad_out

    def whole(arrays):
        """Return queries, keys and values with the axes that their gradients have."""
        q, k, v = (np.broadcast_to(arrays[x], full[x]) for x in full)
        return q, *(x[tuple(slice(1 if n in shared else None) for n in range(x.ndim))] for x in (k, v))

    if t["tangents"]:
        case.numbers(with_tangents=True)
        tangents = dict(zip(full, whole(dict.fromkeys(full, 0.0) | moves), strict=True))
        for x in moving.keys() & moves.keys():
            y = np.broadcast_to(moves[x], pairs if x == "mask" else (*lead, *moves[x].shape[-2:]))
            of = {"mask": ("attn_mask", ...), "offset_bias": (x, (..., 0, slice(None)))}
            name, at = of.get(x, ("alibi_slopes" if x == "alibi" else x, (..., 0, 0)))
            tangents[name] = y[at]
        rounding = EPS[out] / EPS[real] if out in ("f16", "bf16") else 0
        options["moves"] = {"tangents": tangents, "rounding": rounding}
        if t["backward"] and "grad_out" in t["tangents"]:
            case.given("grad_out_tangent", grad_out_tangent, out, t["layouts"].get("moves", ()))
            options["moves"]["grad_out_tangent"] = grad_out_tangent
        if t["backward"] and "grad_lse" in t["tangents"]:
            y = case.draw(rng, "grad_lse_tangent", (*lead, n_queries, 1), real, 1.5)
            options["moves"]["grad_lse_tangent"] = y[..., 0]
    results = attention_results(*whole(given), f64, **options)
    layout = tuple(x for x in t["layouts"].get("out", ()) if x != "swapped")
    for x in ("dmask", "dmask_tangent"):
        of_mask = results.pop(x, None)
        if of_mask and "mask" in moving:
            results[x] = [sum_to_shape(y, mask_shape) for y in of_mask]
    for x in {"lse", "weights"} - set(t["wants"]):
        results.pop(x, None)
        results.pop(f"{x}_tangent", None)
    # From 32 keys and a width of 16 on a unit may round bfloat16 that it multiplies, and δ.
    rounds = dtype in ("f16", "bf16") and n_keys >= 32 and width >= 16
    for x, (right, *errors) in results.items():
        plain, shape = x in ("out", "out_tangent", "weights"), None
        if x.endswith("_rows"):  # the runner adds up rows
            shape = (*lead, n_queries, 2 if t["tangents"] else 3 if x == "dslope_rows" else 1)
        as_ = {"dtype": out, "layout": layout} if plain else {"dtype": real}
        role = "o" if x in ("out", "out_tangent", "lse", "lse_tangent") else "z"
        case.output(x, right, *errors[: 2 if rounds else 1], role=role, shape=shape, **as_)


# Numbers of queries around a vector (2 … 16) and a block of rows (6 … 64); of keys around a vector and tiles; widths.
# The counts have no common factor, so that every pair occurs.
QUERIES = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 130, 0)
KEYS = (
    1,
    2,
    3,
    6,
    31,
    32,
    33,
    40,
    TILE - 1,
    TILE,
    TILE + 1,
    2 * TILE - 1,
    2 * TILE,
    2 * TILE + 1,
    150,
    265,
    0,
)
WIDTHS = (1, 3, 4, 5, 7, 8, 15, 16, 17, 24, 31, 33, 40, 64, 66, 80, 128, 130, 0)


# What closes pairs, alone: then nothing else can hide that a kernel has missed it.
CLOSERS = (
    *({"mask": x, "closed": 0.5} for x in ("bool", "f32", "f64")),
    *({"mask": x, "closed": 0.5, "mask axes": (-2,)} for x in ("bool", "f32", "f16")),
    *({"blocks": (x,)} for x in ("prefix", "run", "runs")),
    *({"causal": True, "diagonal": x} for x in (0, "last", -7)),
    {"left": 6},
    {"lengths": True},
    {"key_bias": True},
    {"mask": "f64", "closed": 0.5, "dropout": 0.4},
    {"mask": "f32", "closed": 0, "gate": True},
    {"offset_bias": "f32", "closed": 0.5},
)


def drawn(seed):
    """Draw the dtype, the sizes and the options of a call."""
    rng = np.random.default_rng(seed)
    settings = {x: draw(rng) for x, (_, p, draw) in OPTIONS.items() if rng.random() < p}
    if rng.random() < 0.3:
        settings = {x: y for x, y in settings.items() if x not in {x for one in CLOSERS for x in one}}
        settings |= any_of(*CLOSERS)(rng) | {
            "poison": any_of("closed", "closed", "weightless", "queries")(rng)
        }
    dtype = any_of("f32", *FLOATS)(rng) if rng.random() < 0.9 else any_of(*INTEGERS)(rng)
    sizes = QUERIES[seed % 21], KEYS[seed % 17], WIDTHS[seed % 19], WIDTHS[(seed + seed // 19) % 19]
    if rng.random() < 0.05:  # keys are cut into chunks
        sizes = int(rng.integers(1, 20)), int(rng.integers(2000, 2600)), sizes[2] % 9, sizes[3] % 6
    heads = np.prod(settings.get("lead", (2,)), dtype=int) * settings.get("gqa", 1)
    if heads * sizes[0] * sizes[1] * (sizes[2] + sizes[3] + 10) > 4e5:
        settings |= {"lead": (1,), "gqa": 1}
    return dtype, sizes, settings


ALL = {"wants": ("lse", "weights"), "backward": True}
RICH = ALL | {"causal": True, "sinks": True, "alibi": True, "grad_lse": True, "dropout": 0.1, "mask": "f32"}
SHORT = {"causal": True, "lengths": True, "query_lengths": True, "lead": (5,)}
# Calls that are cut into chunks, whose gradients take turns, or that no other has: dtype, sizes, settings.
NAMED = (
    *((dtype, (n, keys, 6, 5), ALL | {"sinks": n == 7}) for dtype, n, keys in
      (("f32", 7, 2047), ("f64", 13, 2048), ("f32", 1, 2048), ("f64", 7, 3548))),
    *((dtype, (2, 5000, 16, 16), {}) for dtype in FLOATS),
    *((dtype, (530, 540, 6, 6), {"lead": (1,), "backward": True, "causal": True}) for dtype in FLOATS[1::2]),
    *((dtype, (800, 540, 6, 6), {"lead": (1,), "backward": True, "blocks": ("runs",)}) for dtype in FLOATS[::2]),
    *((dtype, (150, 300, 24, 20), RICH | {"lead": (3,)}) for dtype in FLOATS[:2]),
    *((FLOATS[n], (150, 300, 24, 20), RICH | {"lead": (1,), "gqa": 3, "mask axes": (-3, -2)[:n % 2 + 1]})
      for n in range(4)),
    *(("f32", (n, 90, 8, 8), SHORT) for n in (1, 3, 20, 70)),
    *((FLOATS[n], (n + 1, 150, 17, 7), {"key_bias": True}) for n in range(4)),
    *(("f32", (530, 540, 6, 6), {"lead": (1,), "backward": True, "causal": True, "offset_bias": "f32", "tangents": x})
      for x in ((), ("query", "value", "grad_out"))),
    *((dtype, (150, 200, 24, 20), RICH | {"lead": (2,), "mask axes": x, "tangents": TANGENTS})
      for dtype, x in (("f32", (-3,)), ("f64", (-2,)))),
    ("f64", (33, 150, 8, 8), {"mask": "f32", "mask axes": (-2, -1), "closed": 0, "backward": True}),
    ("f32", (33, 150, 8, 8), {"mask": "f32", "mask axes": (-2, -1), "closed": 0, "backward": True}),
    *(("f32", (n, 150, 8, 8), {"mask": "bool", "layouts": {"mask": ("stepped",)}, "backward": True})
      for n in (1, 9, 70)),
)  # fmt: skip


def conversions(file):
    """Write every 16-bit number, what rounds to it, and integers: with one key the output is the value itself.

    Expected values are NumPy's conversions, and for bfloat16 the upper half of a float32.
    """

    def one(name, quick, value, dtype, out, layout, out_layout=()):
        case = Case(file, name, 0, quick)
        x = case.given("value", value.reshape(16, 1, -1), dtype, layout)
        for other in ("query", "key"):
            case.given(other, np.zeros((16, 1, 1)))
        case.numbers(L=1, S=1, E=1, Dv=x.shape[-1], gqa=1, f64=out == "f64", scale=1.0)
        case.output("out", rounded(x, out), dtype=out, layout=out_layout)

    codes = np.arange(65536, dtype=np.uint16)
    layouts = (), ("swapped",), ("stepped",), ("unaligned",), ("flipped_cols", "swapped", "unaligned")
    for n, layout in enumerate(layouts):
        place = n % 4
        for dtype in ("f16", "bf16"):
            numbers = decoded(codes.view(STORED[dtype]), dtype)
            one(f"every {dtype} read", n < 2, numbers, dtype, "f32", layout)
            # The number itself, or the middle between it and the next, or a float32 next to the middle.
            next_ = np.roll(numbers, -1)
            far = np.copysign(2.0**128 if dtype == "bf16" else 65536, numbers)
            next_ = np.where(np.isfinite(next_) & (np.abs(next_) > np.abs(numbers)), next_, far)
            with np.errstate(all="ignore"):
                x = np.where(np.isfinite(numbers) & (place > 0), (numbers + next_) / 2, numbers).astype("f4")
                x = np.nextafter(x, np.float32(np.inf * (5 - 2 * place))) if place > 1 else x
            out_layout = tuple(y for y in layout if y != "swapped")
            one(f"f32 around every {dtype}", n < 2, x.astype("f8"), "f32", dtype, (), out_layout)
        for dtype in INTEGERS:
            least, most = np.iinfo(STORED[dtype]).min, np.iinfo(STORED[dtype]).max
            x = np.rint(np.random.default_rng(n).uniform(least, most, 4096))
            x[:2] = least, most - (most >> 53)
            one(f"integers {dtype} read", n < 2, x, dtype, "f64", layout)


def with_tangents(seed):
    """Draw a call with tangents; it has fewer options than others, so that most pairs are open and weights differ."""
    dtype, sizes, settings = drawn(seed)
    rng = np.random.default_rng(seed + 1)
    extremes = ("magnitude", "climbing", "largest")
    settings = {x: y for x, y in settings.items() if rng.random() < (0.2 if x in extremes else 0.6)}
    more = ("mask", "gate", "offset_bias", "alibi", "sinks", "softcap")
    settings |= {x: OPTIONS[x][2](rng) for x in more if rng.random() < 0.35}
    settings |= {"tangents": some(*TANGENTS)(rng) or ("query",), "backward": rng.random() < 0.8}
    if "poison" in settings:
        settings["poison"] = any_of("closed", "closed", "queries")(rng)
    return dtype, sizes, settings


def attention(file):
    """Write calls of attention and its gradients."""
    for seed in range(720):
        dtype, sizes, settings = drawn(seed)
        attention_case(file, f"drawn {seed}", dtype, sizes, seed % 4 == 0, seed, **settings)
    for seed in range(720, 780):
        dtype, sizes, settings = with_tangents(seed)
        attention_case(file, f"tangents {seed}", dtype, sizes, seed % 3 == 0, seed, **settings)
    for n, (dtype, sizes, settings) in enumerate(NAMED):
        quick = sizes[0] * sizes[1] < (5e4 if dtype in ("f32", "bf16") else 4e4)
        attention_case(file, f"named {n}", dtype, sizes, quick, n, **settings)
    conversions(file)
