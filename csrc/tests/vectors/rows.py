"""Vectors of packed sequences, row operations and optimisers."""

from __future__ import annotations

import numpy as np
from attention import any_of, attention_results, broadcast_shape, drawn_mask, layout
from case import EPS, FLOATS, STORED, UNBOUNDED, Case, encoded, reference

from selfattn.reference.arrays import sum_to_shape


def varlen(file):
    """Write packed sequences: each is a call of the reference, with heads that dropout counts over the whole batch."""
    few = (5, 0, 70, 1, 64, 3, 33), (7, 9, 0, 40, 130, 3, 65)
    mixed = (2, 20, 600), (2200, 20, 600)  # chunks of keys, and ranges of keys in turns
    for way in range(14):
        lengths, width, v_width = few, 20, 33
        if way >= 8:
            lengths, width, v_width = (
                (few, 1, 1) if way < 10 else (mixed, 8, 8) if way < 12 else (((), ()), 1, 1)
            )
        if way == 13:
            lengths, width, v_width = few, 0, 0
        rng, heads, rich, real = np.random.default_rng(way), 4, way in (6, 7), FLOATS[way % 2]
        f64, gqa, causal, lower_right = real == "f64", 2 if 4 <= way < 8 else 1, 2 <= way < 8, 4 <= way < 8
        begin_q, begin_k = (np.cumsum([0, *x]) for x in lengths)
        total, sequences = int(begin_q[-1]), len(lengths[0])
        case = Case(file, f"sequences {way}", 1 if f64 else 0.5, way < 10, wide=f64)
        options = {"scale": width**-0.5 if width else 1.0}
        if causal:
            options["causal"] = "lower_right" if lower_right else "upper_left"
        numbers = {
            "L": total,
            "S": begin_k[-1],
            "E": width,
            "Dv": v_width,
            "sequences": sequences,
            "gqa": gqa,
        }
        numbers |= {"f64": f64, "causal": causal, "lower_right": lower_right, "window_left": UNBOUNDED}

        def draw(name, n, *shape, magnitude=1.0, case=case, rng=rng, real=real):
            return case.draw(rng, name, (1, n, *shape), real, magnitude, ("heads_inside",))

        q = draw("query", heads, total, width, magnitude=2)
        k = draw("key", heads // gqa, int(begin_k[-1]), width, magnitude=2)
        v = draw("value", heads // gqa, int(begin_k[-1]), v_width)
        grads = {"grad_out": draw("grad_out", heads, total, v_width)}
        grads["grad_lse"] = case.draw(rng, "grad_lse", (1, heads, total, 1), real, 1.5)[..., 0]
        case.given("begin_q", begin_q, "i64")
        case.given("begin_k", begin_k, "i64")
        of_sequences = {}
        if rich:
            options |= {"softcap": 1.5, "dropout_p": 0.3, "window": (11, None), "enable_gqa": True}
            numbers |= {"softcap": 1.5, "dropout_p": 0.3, "window_left": 11, "seed": 7}
            for name, x, most in (("alibi_slopes", "alibi", 0.2), ("sinks", "sinks", 4)):
                of_sequences[name] = case.draw(rng, x, (sequences, heads, 1, 1), "f64", most)[..., 0, 0]
        case.numbers(**numbers, scale=options["scale"])
        found = []
        for s in range(sequences):
            rows, keys = slice(*begin_q[s : s + 2]), slice(*begin_k[s : s + 2])
            own = (
                options
                | {x: y[s : s + 1] for x, y in of_sequences.items()}
                | {"rng": 7, "first_head": s * heads}
            )
            masked, pairs = 6 <= way < 10 and s % 4 != 3, (1, heads, lengths[0][s], lengths[1][s])
            if masked:  # a whole mask; shared by heads; shared by rows
                shape = broadcast_shape(pairs, ((), (-3,), (-2,))[s % 4])
                mask = case.given(f"{s}__mask", drawn_mask(rng, shape, real, 0.3, 3), real)
                own["attn_mask"] = np.broadcast_to(mask, pairs)
            parts = {"enable_gqa": gqa > 1} | {x: y[:, :, rows] for x, y in grads.items()}
            found.append(attention_results(q[:, :, rows], k[:, :, keys], v[:, :, keys], f64, **own | parts))
            if masked:
                of_mask = (sum_to_shape(x, shape) for x in found[-1]["dmask"][:2])
                case.output(f"{s}__dmask", *of_mask, dtype=real, role="z")
        empty = {"out": v_width, "lse": 1, "dquery": width, "dkey": width, "dvalue": v_width}
        for name, columns in empty.items():
            of_keys = name in ("dkey", "dvalue")
            none = np.zeros((1, heads // gqa if of_keys else heads, 0, columns))
            pair = (np.concatenate([none, *(of[name][i] for of in found)], 2) for i in (0, 1))
            role, inside = "z" if name[0] == "d" else "o", () if name == "lse" else ("heads_inside",)
            case.output(name, *pair, dtype=real, role=role, layout=inside)
        case.array("stats", "o", real, (1, heads, total, 2))
        if rich:  # sums over the rows of each sequence are not what the runner adds up
            case.array("dslope_rows", "z", real, (1, heads, total, 3))
            case.array("dsink_rows", "z", real, (1, heads, total, 1))


ROW_KINDS = ("softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "gelu_tanh")
ROW_KINDS += ("rotary", "rotary_interleaved", *(f"{x} backward" for x in ROW_KINDS))


def row_size(kind, x, g, axes, scale, mean):
    """Return the size of each result: what its terms would add up to if none cancelled another."""
    if "softmax" in kind:
        top = x.max(axes, keepdims=True)
        p, far = reference.softmax(x, axes[0]), np.abs(x - top)
        if g is None:
            return p * (2 + far) if kind == "softmax" else 2 * far + 2 + np.abs(top)
        log, g = "log" in kind, np.abs(g)
        return (g if log else p * g) + p * (g if log else g * p).sum(axes, keepdims=True)
    if "norm" in kind:
        # The mean has an error of eps deviations, and of eps² of itself.
        t = scale * np.abs(x - mean) + 1 + EPS["f32"] * scale * np.abs(mean)
        if g is None:
            return t
        n, a = np.prod([x.shape[axis] for axis in axes]), np.abs(g)
        of_mean = a.mean(axes, keepdims=True) if "layer" in kind else 0
        return scale * (a + of_mean + t * (a * t).sum(axes, keepdims=True) / n)
    return np.abs(x) * (1 + np.abs(x)) if g is None else np.abs(g) * (1 + x * x)


def row_case(file, kind, dtype, lead, n, seed, quick):
    """Draw a row operation, or its gradients, along the last axis, the first or the last two, and write it."""
    rng, eps, base = np.random.default_rng([seed, lead, n]), 0.01, kind.split()[0]
    backward, norm, layers, f64 = "backward" in kind, "norm" in kind, "layer" in kind, dtype == "f64"
    shape, axes = (lead, 2 * n if "rotary" in kind else n), (1,)
    if seed % 4 == 1 and n < 1000 and norm:
        shape, axes = (lead, 2, n, 3), (2, 3)
    elif seed % 4 == 1 and "softmax" in kind:
        shape, axes = (n, lead), (0,)
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    own, of_layout = [shape[axis] for axis in axes], any_of((), layout(rng))(rng)
    n_sum, n_rows = np.prod(own), np.prod(shape) / np.prod(own)
    tolerance = (24 + np.sqrt(n_sum) + np.sqrt(n_rows)) * (2 if f64 else 1)
    case = Case(file, f"{kind} {lead} {n} {dtype}", tolerance, quick, wide=f64)
    case.numbers(kind=ROW_KINDS.index(kind), f64=f64, eps=eps, first=axes[0], last=axes[-1] + 1)
    # Sometimes the mean is far larger than the deviation: in float64 that would cost the reference its digits.
    x = rng.uniform(-3, 3, shape) + (rng.choice([0, 1e4]) if norm and dtype == "f32" else 0)
    x = case.given("x", x, dtype, of_layout)
    if "rotary" in kind:
        angles = [case.draw(rng, y, (lead, n), dtype, 1, of_layout) for y in ("cos", "sin")]
        right = reference.apply_rotary_emb(x, *angles, "interleaved" in kind, compute_dtype=np.float64)
        case.output("out", right, 4 + np.abs(right), dtype=dtype)
        return
    options = {"approximate": "tanh"} if "tanh" in kind else {} if base == "gelu" else {"axis": axes[0]}
    weight, bias, params, scale, mean = 1.0, 0.0, norm and rng.random() < 0.8, None, None
    if norm:
        mean = x.mean(axes, keepdims=True) if layers else np.zeros(1)
        scale = 1 / np.sqrt(np.square(x - mean).mean(axes, keepdims=True) + eps)
        options = {"normalized_shape": own, "eps": eps}
    if params:
        of_rows = tuple(1 if axis in others else size for axis, size in enumerate(shape))
        swapped = tuple(y for y in of_layout if y == "swapped")
        weight = case.draw(rng, "weight", of_rows, dtype, 2, swapped)
        options["weight"] = weight.reshape(own)
        if layers:
            # A bias has no effect on gradients, and has one.
            bias = np.zeros(own) if backward else case.draw(rng, "bias", of_rows, dtype, 2, swapped)
            options["bias"] = bias.reshape(own)
    function = getattr(reference, base.removesuffix("_tanh") + "_vjp")
    y, pull = function(x, **options, compute_dtype=np.float64)
    if not backward:
        size = row_size(kind, x, None, axes, scale, mean) * np.abs(weight) + np.abs(bias)
        case.output("out", y, size, dtype=dtype)
        return
    g = case.draw(rng, "dy", shape, any_of(*FLOATS)(rng), 1, of_layout)
    found = pull(g)
    case.output(
        "out", found.x if norm else found, row_size(kind, x, g * weight, axes, scale, mean), dtype=dtype
    )
    if params:
        scaled = np.abs(g) * row_size(base, x, None, axes, scale, mean)
        for name, size in (("weight", scaled), ("bias", np.abs(g)))[: 1 + layers]:
            case.output(
                f"d{name}", getattr(found, name).reshape(-1), size.sum(others).reshape(-1), dtype=dtype
            )


def rows(file):
    """Write row operations: sizes around vectors, several tasks, chunks and pieces."""
    few = ((5, n) for n in (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 65, 300, 2100))
    for i, (lead, n) in enumerate((*few, (270, 40), (700, 40), (3000, 40), (3, 40000))):
        for k, kind in enumerate(ROW_KINDS):
            for d, dtype in enumerate(FLOATS):
                if lead * n < 12000 or d == 0:
                    row_case(file, kind, dtype, lead, n, i + k + d, lead * n < 30000 and (i + d) % 2 == 0)


RULES = (
    {},
    {"weight_decay": 0.3, "momentum": 0.9, "dampening": 0.2},
    {"momentum": 0.9, "nesterov": True},
    {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    {"weight_decay": 0.3, "beta1": 0.5, "beta2": 0.8, "eps": 1e-3},
    {"weight_decay": 0.3, "beta1": 0.0, "beta2": 0.8, "eps": 1e-3, "decoupled": True},
)


def update_case(file, rule, n, real, step):
    """Write a step of an optimiser: formulas of torch.optim's documentation, in which each operation rounds."""
    rng, of, adam, lr = np.random.default_rng([n, step]), np.dtype(STORED[real]).type, "eps" in rule, 0.1
    case = Case(file, f"rule {RULES.index(rule)} n {n} {real} {step}", 0, n < 100000, wide=real == "f64")
    case.numbers(**rule, lr=lr, kind=adam, n=n, f64=real == "f64", step=step)
    p, g, m, v = start = [encoded(rng.uniform(least, 1, n), real) for least in (-1, -1, -1, 0)]
    decay, momentum = (rule.get(y, 0.0) for y in ("weight_decay", "momentum"))
    case.given("gradient", g, real)
    d = g if rule.get("decoupled") or not decay else g + of(decay) * p
    if adam:
        b1, b2 = rule["beta1"], rule["beta2"]
        p = p * of(1 - lr * decay) if rule.get("decoupled") else p
        m = of(b1) * m + of(1 - b1) * d
        v = of(b2) * v + of(1 - b2) * (d * d)
        root = np.sqrt(v) * of(1 / np.sqrt(1 - b2**step)) + of(rule["eps"])
        p = p - of(lr / (1 - b1**step)) * (m / root)
    else:
        if momentum:
            m = d if step == 1 else of(momentum) * m + of(1 - rule.get("dampening", 0)) * d
            d = d + of(momentum) * m if rule.get("nesterov") else m
        p = p - of(lr) * d
    for name, before, right, has in zip(
        ("parameter", "mean", "square"),
        (start[0], *start[2:]),
        (p, m, v),
        (True, adam or momentum, adam),
        strict=True,
    ):
        if has:
            case.given(name, before, real, role="c")
            case.expect(right.astype("f8"))


def update(file):
    """Write steps of optimisers, the first and a later one."""
    for n in (0, 1, 3, 7, 8, 9, 15, 16, 17, 33, 8193):
        for rule in RULES:
            for real in FLOATS[:2]:
                for step in (1, 7):
                    update_case(file, rule, n, real, step)
    for rule in RULES:
        update_case(file, rule, 100000, "f32", 7)
