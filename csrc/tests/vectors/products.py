"""Vectors of products: matrices, weights of all kinds, and what is rounded or looked up for them."""

from __future__ import annotations

import numpy as np
from attention import any_of
from bounds import finite
from case import EPS, FLOATS, Case, decoded, reference, rounded

GROUP = 128  # SA_GROUP
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


@np.errstate(all="ignore")
def activated(kind, x):
    """Return the activation of numbers."""
    if kind in (2, 3):
        return reference.gelu(x, ("none", "tanh")[kind - 2], compute_dtype=np.float64)
    return (x, np.maximum(x, 0), None, None, x / (1 + np.exp(-x)))[kind]


def kept_factors(seed, p, rows, width):
    """Return the factors of dropout of rows; csrc/kernels/kernels.h says which word of Philox an element has."""
    if not p:
        return np.ones((rows, width))
    row, column = np.arange(rows)[:, None], np.arange(width)
    counter = np.stack(np.broadcast_arrays(row, column // 64 * 16 + column % 16, 0, 0), -1)
    which = np.broadcast_to(column % 64 // 16, (rows, width))[..., None]
    words = np.take_along_axis(reference.philox4x32([seed, 0], counter), which, -1)[..., 0]
    return (words >= round(p * 2**32)) / (1 - p)


MATMUL_ROWS, DEPTHS = (0, 1, 2, 5, 6, 13, 64, 97), (0, 1, 7, 16, 17, 96, 128, 129, 268)
COLUMNS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 97, 130)


def matmul_case(file, seed, kind):
    """Write a product of matrices: rows of both ("NT"), rows and columns, or columns of both."""
    m, depth, width = MATMUL_ROWS[seed % 8], DEPTHS[seed % 9], COLUMNS[seed % 11]
    m, depth = (min(m, 64), min(depth, 256)) if kind == 2 else (m, depth)  # SA_WEIGHT_ROWS, SA_SUM_ROWS
    rng, real = np.random.default_rng([seed, kind]), FLOATS[(seed // 3 + kind) % 2]
    tolerance = (depth + 2) * (1 if real == "f64" else 0.5)
    case = Case(file, f"kind {kind} {m} {depth} {width} {seed}", tolerance, seed % 3 == 0, wide=real == "f64")
    a, b = rng.uniform(-1, 1, (m, depth)), rng.uniform(-1, 1, (depth, width))
    if m and depth and rng.random() < 0.2:  # numbers that a matrix unit cannot split
        odd = any_of(np.nan, -np.inf, 3.4e38, 2e38, 1e-37, 0.0)(rng)
        a[m // 2, depth // 2] = b[depth // 2, width // 3] = odd
    a = case.given("a", a.T, real).T if kind == 2 else case.given("a", a, real)
    b = case.given("b", b.T, real).T if kind == 0 else case.given("b", b, real)
    adds, c_stride, bias = bool(rng.random() < 0.5), width + 3, np.zeros(width)
    right = case.given("c", rng.uniform(-1, 1, (m, c_stride)), real, role="c")
    size, start = np.zeros(right.shape), right[:, :width] * adds
    has_bias = kind == 0 and not adds and rng.random() < 0.7
    if has_bias:
        bias = rounded(rng.uniform(-1, 1, width), real)
    with np.errstate(all="ignore"):
        right[:, :width] = start + bias + a @ b
        size[:, :width] = np.abs(start) + np.abs(bias) + np.abs(a) @ np.abs(b)
    far = np.abs(right)
    size = np.where(
        (far > 3.3e38) & (far < 3.5e38), np.inf, np.nan_to_num(size, posinf=np.inf)
    )  # it may overflow
    case.expect(right, size)
    if has_bias:
        case.given("bias", bias, real)
    numbers = {"m": m, "n": depth, "width": width, "adds": adds, "c_stride": c_stride, "f64": real == "f64"}
    a_stride, b_stride = m if kind == 2 else depth, depth if kind == 0 else width
    case.numbers(kind=kind, **numbers, a_stride=a_stride, b_stride=b_stride)


def matmul(file):
    """Write products of matrices."""
    for seed in range(264):
        for kind in range(3):
            matmul_case(file, seed, kind)


def by_group(x, mode="constant"):
    """Cut rows into groups; the last is padded with zeros, or with its last number ("edge")."""
    rows, n = x.shape
    return np.pad(x, ((0, 0), (0, -n % GROUP)), mode).reshape(rows, -(-n // GROUP), GROUP)


@np.errstate(all="ignore")
def round_rows(x):
    """Round rows of float32 to 0 … 255 in groups: numbers, least and scale of each group, and whether a row can be.

    csrc/kernels/kernels.h defines sa_rounded; each operation rounds to float32.
    """
    groups = by_group(x, "edge")
    low, span = groups.min(-1), np.abs(groups.max(-1) - groups.min(-1))
    fits = (span == 0) | ((span >= np.float32(1e-30)) & (span <= np.float32(1e30)))
    whole = np.isfinite(x).all(1) & fits.all(1)
    inverse = np.where(span > 0, np.float32(255) / span, np.float32(0))
    q = np.rint((groups - low[..., None]) * inverse[..., None])
    q = q.reshape(len(x), groups.shape[1] * GROUP)[:, : x.shape[1]]
    return np.where(whole[:, None], np.nan_to_num(q), 0).astype(np.uint8), low, span / np.float32(255), whole


# Kinds of rows: what uniform random numbers t of n columns become.
ROWS = {
    "plain": lambda t, at: t,
    "zeros": lambda t, at: t * 0,
    "signed zeros": lambda t, at: np.copysign(0, t),
    "constant": lambda t, at: 0 * t + 0.37,
    "large constant": lambda t, at: 0 * t - 3e34,
    "huge": lambda t, at: t * 0.5e30,
    "small": lambda t, at: t * 1e-28,
    "tiny": lambda t, at: t * 1e-32,
    "subnormal": lambda t, at: t * 1e-40,
    "narrow": lambda t, at: 1 + 20 * t * EPS["f32"],
    "lone": lambda t, at: np.where(at == len(t) // 3, -7.0, 0),
    "overflows": lambda t, at: np.where(at == 0, 3e38, np.where(at == len(t) - 1, -3e38, t)),
    "spoiled by size": lambda t, at: np.copysign(1e37, t),
    "nan": lambda t, at: np.where(at == len(t) // 2, np.nan, t),
    "infinity": lambda t, at: np.where(at == len(t) - 1, np.inf, t),
    "both infinities": lambda t, at: np.where(at == 0, -np.inf, np.where(at == len(t) - 1, np.inf, t)),
}


def odd_rows(rng, n):
    """Draw a row of each kind."""
    return np.stack([of(rng.uniform(-1, 1, n), np.arange(n)) for of in ROWS.values()]).astype("f4")


WIDTHS = (*range(71), 127, 128, 129, 255, 384, 385, 512, 513, 700, 1025)


def rounding(file):
    """Write rows of all kinds, rounded to 8 bits."""
    for n in WIDTHS:
        case = Case(file, f"{n}", 0, n % 3 == 0 or n > 70)
        q, least, scale, whole = round_rows(
            case.given("x", odd_rows(np.random.default_rng(n), n)).astype("f4")
        )
        case.output("q", np.pad(q, ((0, 0), (0, (n + 1 + 63) // 64 * 64 - n))), dtype="u8")
        # A row that cannot be rounded has no scale in its first group, and anything else.
        groups = np.stack([least, scale], -1).astype("f8")
        free = np.zeros(groups.shape) + np.where(whole, 0, np.inf)[:, None, None]
        if n:
            groups[~whole, 0, 1] = np.nan
            free[~whole, 0, 1] = 0
        case.output("groups", groups, free)


def compact_weight(rng, kind, out, width, size=None, positive=False):
    """Draw a weight of int8 with scales of groups, or of bfloat16: what is stored, its dtype, numbers, and scales."""
    size = 1 / np.sqrt(width + 1) if size is None else size
    if kind == 2:
        w = rounded(rng.uniform(0 if positive else -size, size, (out, width)), "bf16")
        return w, "bf16", w, None
    scale = rng.uniform(0.5, 2, (out, -(-width // GROUP))).astype("f4") / np.float32(127) * np.float32(size)
    raw = rng.integers(0 if positive else -128, 128, (out, width))
    w = np.repeat(scale, GROUP, 1)[:, :width] * raw.astype("f4")
    return raw, "i8", w.astype("f8"), scale


def table(file):
    """Write rows looked up in tables of int8 with scales, and of bfloat16; each operation rounds to float32."""
    ids = np.array([8, 0, 3, 3, 7])
    for n in WIDTHS[1:]:
        for way in range(8):
            rng, case = np.random.default_rng(n), Case(file, f"{n} way {way}", 0, n % 8 == way or n > 70)
            raw, dtype, w, scale = compact_weight(rng, 2 - (way & 1), 9, n)
            case.given("table", raw, dtype)
            if scale is not None:
                case.given("scale", scale)
            y = w[ids].astype("f4")
            for name, rows, used in (("added", 1, way & 2), ("positions", 5, way & 4)):
                if used:
                    y = y + case.draw(rng, name, (rows, n)).astype("f4")
            case.given("ids", ids, "i64")
            case.output("out", y)


def leaf_case(file, int8, n_rows, words):
    """Write a tile of products with a panel: of uint8 and int8 exact, of bfloat16 with a special number in one row."""
    rng, way, each = np.random.default_rng([words, n_rows]), (n_rows + words) % 4, 4 if int8 else 2
    n, tolerance = words * each, 0 if int8 else n_rows + words * 2
    case = Case(file, f"int8 {int8} {n_rows} {words}", tolerance, n_rows % 4 == words % 4, wide=False)
    if int8 and way:  # the largest sums
        least, most = ((-128, -128), (-128, 127), (127, 127))[way - 1]
        x, w = (
            rng.choice((0 if way == 2 else 255, 255), (n_rows, n)),
            rng.choice((least, most), (words, 32, each)),
        )
    elif int8:
        x, w = rng.integers(0, 256, (n_rows, n)), rng.integers(-128, 128, (words, 32, each))
    else:
        x, w = rng.uniform(-1, 1, (n_rows, n)), rng.uniform(-1, 1, (words, 32, each))
        if n:
            x[n_rows // 2, n // 2] = (0, 0, np.nan, np.inf)[way]
    kinds = ("u8", "i8") if int8 else ("bf16", "bf16")
    x = case.given("x", x, kinds[0])
    panel = np.concatenate([w.reshape(-1), rng.integers(-100, 100, 2048 * each // 4)])
    w = (
        case.given("panel", panel, kinds[1])[: w.size]
        .reshape(words, 32, each)
        .transpose(1, 0, 2)
        .reshape(32, n)
    )
    case.numbers(int8=int8, words=words)
    with np.errstate(all="ignore"):
        right, size = x @ w.T, np.nan_to_num(np.abs(x) @ np.abs(w).T) + 2.0**-100
    case.output("sums", right, None if int8 else size, dtype="i32" if int8 else "f32")


def leaf(file):
    """Write tiles of all numbers of rows."""
    for int8 in (True, False):
        for n_rows in range(1, 33):
            for n in range(4):
                leaf_case(file, int8, n_rows, (0, 1, 2, 15, 16, 17, 96, 130, 300)[(n_rows + 2 * n) % 9])


@np.errstate(all="ignore")
def compact_product(x, raw, w, w_scale, start):
    """Return products of rows that are rounded to 8 bits with int8, and the size of their errors."""
    q, least, scale, whole = round_rows(x.astype("f4"))
    sums = np.einsum("rgi,ogi->rog", by_group(q.astype("f8")), by_group(raw.astype("f8")))
    terms = sums * scale[:, None].astype("f8") * w_scale
    offsets = least[:, None].astype("f8") * w_scale * by_group(raw.astype("f8")).sum(-1)
    y, error = x @ w.T, (x.shape[1] + 3) * (finite(x) @ np.abs(w).T + start)
    size = start + np.abs(terms).sum(-1) + np.abs(offsets).sum(-1)
    y = np.where(whole[:, None], (terms + offsets).sum(-1), y)
    return y, np.where(whole[:, None], (4 * w_scale.shape[1] + 6) * size, error)


@np.errstate(all="ignore")
def linear_case(file, name, kind, x, weights, rng, quick=True, f64=False, **numbers):
    """Write products of the same rows with several weights, of which each is what `compact_weight` returns.

    Options that ``numbers`` does not have are drawn. A quant's last item is the magnitude of its terms.
    """
    real, one, width, n_rows = "f64" if f64 else "f32", len(weights) == 1, x.shape[1], len(x)

    def chance(p):
        return bool(rng.random() < p)

    drawn = {"activation": int(rng.integers(1, 5)) if one and kind < 3 and chance(0.5) else 0}
    activation = (drawn | numbers)["activation"]
    residual, gate = kind == 3 or (one and not activation and chance(0.7)), bool(activation) and chance(0.5)
    if one and kind < 3 and chance(0.3):
        drawn["dropout.p"] = 0.3
    dropout = drawn.get("dropout.p", 0)
    in_place = 0 < kind < 3 and chance(0.5) and bool(activation or (residual and not dropout))
    backward = kind == 0 and not (activation or residual or dropout)
    case = Case(file, name, 1 if f64 else 0.5, quick, wide=f64)
    plain = {
        "f64": f64,
        "weights": kind,
        "rows": n_rows,
        "in": width,
        "count": len(weights),
        "in_place": in_place,
    }
    case.numbers(**plain | drawn | {"dropout.seed": 5} | numbers)
    x, dys = case.given("x", x, real), []
    for which, (raw, of_raw, w, more) in enumerate(weights):
        out, shape = len(w), (n_rows, len(w))
        case.numbers(**{f"out{which}": out})
        case.given(f"weight{which}", raw, of_raw)
        if kind == 1:
            case.given(f"scale{which}", more)
        has_bias = chance(0.75)
        bias = case.draw(rng, f"bias{which}", (out,), real) if has_bias else np.zeros(out)
        before = case.draw(rng, "gate", shape, real) if gate else None
        rest = rounded(rng.uniform(-1, 1, shape), real) if residual else np.zeros(shape)
        if residual and not in_place:
            case.given("residual", rest, real)
        start, w_size = np.abs(bias) + np.abs(rest), more if kind == 3 else np.abs(w)
        multiplied = rounded(x, "bf16") if kind == 2 else x
        if kind == 1:
            y, error = compact_product(x, raw, w, more, start)
        else:
            y, error = (
                multiplied @ w.T,
                (width + 3 + 5 * (kind == 3)) * (finite(multiplied) @ w_size.T + start),
            )
        digits = 3 if numbers.get("decoding") else numbers.get("digits")
        if digits:  # the largest of 32 is 127, 32639 or 8355000 units of the last digit
            unit = {1: 0.501 / 127, 2: 0.501 / 32639, 3: 2.0**-21}[digits] / (EPS["f32"] / 2)
            largest = np.repeat(finite(x).reshape(n_rows, -1, 32).max(-1), 32, -1)
            error = (width + 3) * start + ((width + 8) * finite(x) + unit * largest) @ w_size.T
        y = y + bias
        if activation:
            x_active, factor = (before, y) if gate else (y, 1.0)
            active = activated(activation, x_active)
            rough = 3e-5 / (EPS["f32"] / 2) if kind == 1 and activation == 2 and not gate else 0  # rough_gelu
            error = (np.abs(active) if gate else 1.2) * error + 16 * np.abs(x_active) * np.abs(factor) + rough
            y = active * factor
        factors = kept_factors(5, dropout, n_rows, out)
        y = np.where(factors == 0, rest, y * factors + rest)
        error = np.where(factors == 0, 0, error * factors) + 3 * (np.abs(y) + np.abs(rest))
        error = np.where(np.isfinite(y), error, 0)
        into = "active" if activation else f"y{which}"
        if residual and in_place:
            case.given(into, rest, real, role="c")
            case.expect(y, error)
        else:
            case.output(into, y, error, dtype=real)
        if backward:
            dys.append((case.draw(rng, f"dy{which}", shape, real), w, has_bias))
    if backward:
        dx, dx_size = (sum(f(dy) @ f(w) for dy, w, _ in dys) for f in (np.array, np.abs))
        case.output("dx", dx, (sum(len(w) for _, w, _ in dys) + 4) * dx_size, dtype=real)
    for which, (dy, _, has_bias) in enumerate(dys):
        case.output(f"dweight{which}", dy.T @ x, (n_rows + 4) * (np.abs(dy).T @ np.abs(x)), dtype=real)
        if has_bias:
            case.output(f"dbias{which}", dy.sum(0), (n_rows + 4) * np.abs(dy).sum(0), dtype=real)


def linear(file):
    """Write products with weights: whole, with their gradients; int8 and bfloat16; quants."""
    for kind in range(3):
        for n in (*WIDTHS, 5000):
            rng = np.random.default_rng([kind, n])
            n_rows = any_of(0, 1, 2, 4, 6, 13, 15, 17, 29, 33, 64, 70, 130, 200)(rng) if n < 1000 else 3
            sizes = any_of((5,), (33,), (64,), (97,), (100,), (9, 3), (33, 1, 64), (0, 20))(rng)
            x = rng.uniform(-1, 1, (n_rows, n))
            if kind and rng.random() < 0.4:  # special numbers in every other row
                x = rng.uniform(-1, 1, (2 * len(ROWS) + 1, n))
                x[1::2] = odd_rows(rng, n)
            f64, positive = kind == 0 and n % 2 == 1, bool(rng.random() < 0.2)
            real = "f64" if f64 else "f32"
            weights = [compact_weight(rng, max(kind, 1), size, n, positive=positive) for size in sizes]
            if kind == 0:
                drawn = (rounded(rng.uniform(-1, 1, (size, n)), real) for size in sizes)
                weights = [(w, real, w, None) for w in drawn]
            linear_case(file, f"{kind} {n}", kind, x, weights, rng, n % 3 == 0 or n > 70, f64)
    # GELU after int8 from −8 to 8, and of far larger numbers: one row's products with 1.
    w = np.array([*(np.arange(1600) - 800) * 0.01, 1e30, -1e30])[:, None].astype("f4")
    rough = np.sign(w).astype(int), "i8", w.astype("f8"), np.abs(w)
    rng = np.random.default_rng(0)
    linear_case(file, "rough gelu", 1, np.ones((1, 1), "f4"), [rough], rng, activation=2)
    for quant, (name, numbers, *_) in enumerate(QUANTS):
        for number, (n_rows, out, count) in enumerate(
            ((1, 1, 1), (1, 37, 3), (2, 16, 2), (7, 33, 5), (60, 70, 6))
        ):
            for digits in range(4):
                for hostile in (False, True)[: 2 - (number == 4)]:
                    rng = np.random.default_rng([quant, number, digits])
                    raw, w, size = drawn_quants(rng, quant, out, count * (32 if numbers == 1 else 1), hostile)
                    weight = raw, "u8", w, np.where(np.isfinite(w), size, np.inf)
                    x = rng.uniform(-1, 1, (n_rows, w.shape[1]))
                    x[0, 0] = np.nan if hostile else 100
                    options = {"type": quant, "decoding": digits == 3, "digits": digits % 3}
                    quick = number < 3 + (digits == 1)
                    linear_case(
                        file, f"{name} {number} {digits} {hostile}", 3, x, [weight], rng, quick, **options
                    )


# Quants of GGUF files: name, numbers, bytes, and where a quant has float16 numbers.
QUANTS = (
    ("F32", 1, 4, ()),
    ("F16", 1, 2, (0,)),
    ("BF16", 1, 2, ()),
    ("Q4_0", 32, 18, (0,)),
    ("Q4_1", 32, 20, (0, 2)),
    ("Q5_0", 32, 22, (0,)),
    ("Q5_1", 32, 24, (0, 2)),
    ("Q8_0", 32, 34, (0,)),
    ("IQ4_NL", 32, 18, (0,)),
    ("Q2_K", 256, 84, (80, 82)),
    ("Q3_K", 256, 110, (108,)),
    ("Q4_K", 256, 144, (0, 2)),
    ("Q5_K", 256, 176, (0, 2)),
    ("Q6_K", 256, 210, (208,)),
    ("IQ4_XS", 256, 136, (0,)),
)
NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])


def drawn_quants(rng, kind, out, count, hostile):
    """Draw rows of quants of any bits; scales are small, or hostile: any float16. Return them as `numbers_of`."""
    name, _, size, halves = QUANTS[kind]
    raw = rng.integers(0, 256, (out, count, size), np.uint8)
    if not hostile:
        for at in halves:
            x = rng.uniform(-1, 1, raw.shape[:2]) * (1 if kind < 3 else 0.01)
            raw[..., at : at + 2] = x.astype("<f2")[..., None].view(np.uint8)
        if name in ("F32", "BF16"):
            x = rng.uniform(-1, 1, raw.shape[:2]).astype("<f4")[..., None].view(np.uint8)
            raw = x[..., 2:] if name == "BF16" else x
    return raw.reshape(out, -1), *numbers_of(kind, raw)


@np.errstate(all="ignore")
def numbers_of(kind, raw):
    """Return the numbers of quants (out, count, bytes), and the sum of the magnitudes of their terms.

    As ggml-quants.c in llama.cpp says: d·scale·q − m·least.
    """
    name, numbers, _, halves = QUANTS[kind]
    out, p, i = len(raw), raw.astype(np.int64), np.arange(numbers)
    half_at = [np.ascontiguousarray(raw[..., at : at + 2]).view("<f2").astype("f8") for at in halves]
    d = half_at[0] if halves else None
    m = np.zeros(1)
    nibble = lambda at: np.where(i < 16, p[..., at + i % 16] & 15, p[..., at + i % 16] >> 4)  # noqa: E731
    half, l, g, h = i // 128, i % 32, i // 32, i // 16
    if name == "F32":
        d, q = np.ascontiguousarray(raw).view("<f4").astype("f8"), 1
    elif name == "F16":
        q = 1
    elif name == "BF16":
        d, q = decoded(np.ascontiguousarray(raw).view("<u2"), "bf16"), 1
    elif name in ("Q4_0", "Q4_1"):
        q, m = (nibble(2) - 8, m) if name == "Q4_0" else (nibble(4), -half_at[1])
    elif name in ("Q5_0", "Q5_1"):
        at = 2 if name == "Q5_0" else 4
        q = nibble(at + 4) + 16 * (p[..., at + i // 8] >> i % 8 & 1) - (16 if name == "Q5_0" else 0)
        m = m if name == "Q5_0" else -half_at[1]
    elif name == "Q8_0":
        q = p[..., 2 + i].astype(np.int8)
    elif name == "IQ4_NL":
        q = NONLINEAR[nibble(2)]
    elif name == "Q2_K":
        q = (p[..., 16 + 32 * half + l] >> 2 * (i % 128 // 32) & 3) * (p[..., h] & 15)
        m = half_at[1] * (p[..., h] >> 4)
    elif name == "Q3_K":
        low, high = (
            np.where(h < 8, p[..., 96 + h % 8] & 15, p[..., 96 + h % 8] >> 4),
            p[..., 104 + h % 4] >> 2 * (h // 4) & 3,
        )
        q = (p[..., 32 + 32 * half + l] >> 2 * (i % 128 // 32) & 3) - np.where(p[..., l] >> g & 1, 0, 4)
        q = q * (low + 16 * high - 32)
    elif name in ("Q4_K", "Q5_K"):
        byte = p[..., (16 if name == "Q4_K" else 48) + g // 2 * 32 + l]
        q = np.where(g % 2 == 0, byte & 15, byte >> 4) + (
            16 * (p[..., 16 + l] >> g & 1) if name == "Q5_K" else 0
        )
        upper = p[..., 4 + g % 4], p[..., 8 + g % 4], p[..., 12 + g % 4]
        q = q * np.where(g < 4, upper[0] & 63, (upper[2] & 15) + 16 * (upper[0] >> 6))
        m = half_at[1] * np.where(g < 4, upper[1] & 63, (upper[2] >> 4) + 16 * (upper[1] >> 6))
    elif name == "Q6_K":
        at = i % 128
        low, high = p[..., 64 * half + at % 64], p[..., 128 + 32 * half + at % 32] >> 2 * (at // 32) & 3
        q = (np.where(at < 64, low & 15, low >> 4) + 16 * high - 32) * p[..., 192 + h].astype(np.int8)
    else:
        byte, low, high = (
            p[..., 8 + 16 * g + i % 16],
            p[..., 4 + g // 2] >> g % 2 * 4 & 15,
            p[..., 2 + g // 4] >> g % 4 * 2 & 3,
        )
        q = NONLINEAR[np.where(l < 16, byte & 15, byte >> 4)] * (low + 16 * high - 32)
    return (d * q - m).reshape(out, -1), (np.abs(d * q) + np.abs(m)).reshape(out, -1)


def quants(file):
    """Write quants expanded and looked up: float32, rounded once."""
    for kind in range(len(QUANTS)):
        for hostile in (False, True):
            rng = np.random.default_rng([kind, hostile])
            raw, w, _ = drawn_quants(rng, kind, 5, 96 if kind < 3 else 3, hostile)
            case = Case(file, f"{QUANTS[kind][0]} {hostile}", 0, wide=False)
            case.given("weight", raw, "u8", ("unaligned",))
            case.numbers(type=kind)
            case.given("ids", np.array([4, 0]), "i64")
            with np.errstate(all="ignore"):
                w = w.astype("f4")
                added, positions = (
                    case.draw(rng, x, (2, w.shape[1])).astype("f4") for x in ("added", "positions")
                )
                found = (w[[4, 0]] + added[0]) + positions
            case.output("out", w)
            case.output("found", found)
