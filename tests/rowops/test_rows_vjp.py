"""The pullbacks of the row operations and of merging.

Finite differences check `selfattn.reference` in float64; the reference checks the public functions in every dtype, on
every instruction set.
"""

import math

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT_IDS, FLOATS, LAYOUTS, normal
from refusals import refusals
from tolerances import assert_within, rounding

import selfattn as sa
from selfattn import reference

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)

SHAPES = [(1,), (5,), (2, 3, 17), (3, 0), (0, 4), (2, 64)]
ROTARY_SHAPES = [  # x, tables
    ((1, 2), (1, 1)),
    ((3, 8), (3, 4)),
    ((2, 5, 3, 6), (3, 3)),
    ((2, 5, 3, 6), (2, 3, 3)),  # no head axis
    ((2, 5, 3, 6), (2, 1, 3, 1)),
    ((2, 0, 6), (0, 3)),
]


def random_arrays(seed, *shapes, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return [normal(rng, shape, dtype) for shape in shapes]


def flat(grads):
    """The gradients as one list of arrays and Nones."""
    if not isinstance(grads, tuple):
        return [grads]
    return [g for field in grads for g in (field if isinstance(field, list) else [field])]


def every_vjp(module, x, weight, cos, sin):
    """Return each function's result and pullback, by the name of the pullback's argument."""
    n = x.shape[-1]
    of_dy = [
        *(module.softmax_vjp(x, axis) for axis in (-1, 0, 1)),
        module.log_softmax_vjp(x),
        module.log_softmax_vjp(x, -2),
        module.layer_norm_vjp(x, n, weight, weight),
        module.layer_norm_vjp(x, x.shape[-2:], x.reshape(-1, *x.shape[-2:])[0]),
        module.rms_norm_vjp(x, n, weight),
        module.rms_norm_vjp(x, x.shape, x),
        module.gelu_vjp(x),
        module.gelu_vjp(x, "tanh"),
        *(module.apply_rotary_emb_vjp(x, cos, sin, interleaved) for interleaved in (False, True)),
    ]
    merged = module.merge_attention_vjp([x, x], [x[..., 0], x[..., 1]])
    return [*(("dy", *found) for found in of_dy), ("dout", *merged)]


def merge(out_1, out_2, lse_1, lse_2):
    """merge_attention_vjp of the reference as a function of two outs and two lses."""
    result, pullback = reference.merge_attention_vjp([out_1, out_2], [lse_1, lse_2])
    return result, lambda dout, dlse: tuple(flat(pullback(dout, dlse)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_finite_differences_of_softmax_and_gelu(shape):
    (x,) = random_arrays(1, shape)
    for axis in range(-len(shape), len(shape)):
        sa.check_vjp(lambda x, axis=axis: reference.softmax_vjp(x, axis), x)
        sa.check_vjp(lambda x, axis=axis: reference.log_softmax_vjp(x, axis), x)
    for approximate in ("none", "tanh"):
        sa.check_vjp(lambda x, approximate=approximate: reference.gelu_vjp(x, approximate), 3 * x)


@pytest.mark.parametrize("shape", [(1,), (4, 1), (5,), (2, 3, 17), (3, 0), (0, 4), (7, 64)], ids=str)
def test_finite_differences_of_norms(shape):
    for axes in range(1, len(shape) + 1):
        normalized = shape[-axes:]
        x, weight, bias = random_arrays(2, shape, normalized, normalized)
        # eps = 1 keeps rows of one or two elements from bending too sharply
        sa.check_vjp(lambda x, w, b, n=normalized: reference.layer_norm_vjp(x, n, w, b, 1.0), x, weight, bias)
        sa.check_vjp(lambda x, w, n=normalized: reference.layer_norm_vjp(x, n, w, eps=1.0), x, weight)
        sa.check_vjp(lambda x, b, n=normalized: reference.layer_norm_vjp(x, n, None, b, 1.0), x, bias)
        sa.check_vjp(lambda x, n=normalized: reference.layer_norm_vjp(x, n, eps=1.0), x)
        sa.check_vjp(lambda x, w, n=normalized: reference.rms_norm_vjp(x, n, w, 1.0), x, weight)
        sa.check_vjp(lambda x, n=normalized: reference.rms_norm_vjp(x, n, eps=1.0), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "table"), ROTARY_SHAPES, ids=str)
def test_finite_differences_of_rotary(shape, table, interleaved):
    x, cos, sin = random_arrays(4, shape, table, table)
    sa.check_vjp(lambda x, cos, sin: reference.apply_rotary_emb_vjp(x, cos, sin, interleaved), x, cos, sin)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (2, 4, 8), (0, 3), (3, 0)], ids=str)
def test_finite_differences_of_merging(shape):
    sa.check_vjp(merge, *random_arrays(5, shape, shape, shape[:-1], shape[:-1]))


def test_finite_differences_of_merging_rows_without_keys():
    """If both lses are -inf, so is the merged lse, and all gradients are 0."""
    out_1, out_2, lse_1, lse_2 = random_arrays(6, (3, 4), (3, 4), (3,), (3,))
    lse_1[:2], lse_2[0] = -np.inf, -np.inf
    sa.check_vjp(merge, out_1, out_2, lse_1, lse_2)
    _, pullback = merge(out_1, out_2, lse_1, lse_2)
    grads = pullback(np.ones((3, 4)), np.ones(3))
    assert all((g[0] == 0).all() for g in grads)
    out_1[:2], out_2[0] = np.nan, np.inf  # the outputs of parts without keys do not matter
    again = merge(out_1, out_2, lse_1, lse_2)[1](np.ones((3, 4)), np.ones(3))
    np.testing.assert_equal(grads, again)
    nothing = np.array([np.nan, 1, 1])  # the gradients of a row without keys do not matter either
    again = pullback(np.ones((3, 4)) * nothing[:, None], nothing)
    np.testing.assert_equal(grads, again)


def assert_like_reference(name, dys, *arguments, bounds, **options):
    """Compare all gradients with the reference in float64: within u times the bounds, and one rounding.

    The bounds are the terms of the formulas, added up without their signs, times the roundings that each meets.
    """
    y, pullback = getattr(sa, name)(*arguments, **options)
    forward = getattr(sa, name.removesuffix("_vjp"))
    wrt = {key: value for key, value in options.items() if key != "wrt"}
    np.testing.assert_equal(flat(y), flat(forward(*arguments, **wrt)))
    got = flat(pullback(*dys))
    plain = flat(getattr(reference, name)(*arguments, **options)[1](*dys))
    exact = flat(getattr(reference, name)(*arguments, **options, compute_dtype=np.float64)[1](*dys))
    is_wide = any(np.float64 == p.dtype for p in plain if p is not None)
    u = 2 * 2.0**-52 if is_wide else 2.0**-23  # the reference has the same error
    for g, p, e, bound in zip(got, plain, exact, bounds, strict=True):
        if p is None:
            assert g is None
            continue
        assert type(g) is np.ndarray and g.flags.c_contiguous and g.flags.writeable
        assert (g.shape, g.dtype) == (p.shape, p.dtype)
        assert_within(g, e, u * bound + rounding(g.dtype, e), name)
    return got


def wide(*arrays):
    return [x.astype(np.float64) for x in arrays]


@dtypes
@pytest.mark.parametrize("shape", [(4, 0), (2, 5, 130), (3, 70, 300), (2, 2100)], ids=str)
def test_softmax(isa, dtype, shape):
    x, dy = random_arrays(7, shape, shape, dtype=dtype)
    x = (4 * x).astype(dtype)
    for axis in range(-len(shape), len(shape)):
        y, d = sa.softmax(wide(x)[0], axis), np.abs(wide(dy)[0])
        distance = np.ptp(wide(x)[0], axis=axis, keepdims=True) if x.size else 0
        few = 8 + math.sqrt(shape[axis]) + distance
        along = (y * d).sum(axis=axis, keepdims=True)
        assert_like_reference("softmax_vjp", [dy], x, axis, bounds=[few * y * (d + along)])
        total = d.sum(axis=axis, keepdims=True)
        assert_like_reference("log_softmax_vjp", [dy], x, axis, bounds=[few * (d + y * total)])


def norm_bounds(x, dy, weight, axes, eps, centred):
    x, dy, weight = wide(x, dy, weight)
    last, first = tuple(range(-axes, 0)), tuple(range(x.ndim - axes))
    n = math.prod(x.shape[x.ndim - axes :])
    c = x - x.mean(axis=last, keepdims=True) if centred else x
    r = 1 / np.sqrt((c * c).mean(axis=last, keepdims=True) + eps)
    unit, g = np.abs(c * r) + centred * np.abs(x * r), np.abs(dy * weight)
    few = 16 + math.sqrt(n)
    dx = g + centred * g.mean(axis=last, keepdims=True) + unit * (g * unit).mean(axis=last, keepdims=True)
    rows = few + math.sqrt(x.size / n)
    return [few * r * dx, rows * (np.abs(dy) * unit).sum(axis=first), rows * np.abs(dy).sum(axis=first)]


@dtypes
@pytest.mark.parametrize("shape", [(3, 2, 17), (2, 3000), (600, 100)], ids=str)
def test_norms(isa, dtype, shape):
    """Rows of several pieces, blocks of several rows, and, in the last shape, several chunks of blocks."""
    for axes in range(1, len(shape)):
        n = shape[-axes:]
        x, dy, weight, bias = random_arrays(8, shape, shape, n, n, dtype=dtype)
        x = (x + 0.5).astype(dtype)
        bounds = norm_bounds(x, dy, weight, axes, 1e-5, True)
        assert_like_reference("layer_norm_vjp", [dy], x, n, weight, bias, bounds=bounds)
        assert_like_reference("layer_norm_vjp", [dy], x, n, weight, bounds=bounds)
        bounds = norm_bounds(x, dy, np.ones_like(weight), axes, 1e-5, True)
        assert_like_reference("layer_norm_vjp", [dy], x, n, None, bias, bounds=bounds)
        eps = 2.0**-52 if dtype == np.float64 else 2.0**-23
        bounds = norm_bounds(x, dy, weight, axes, eps, False)[:2]
        assert_like_reference("rms_norm_vjp", [dy], x, n, weight, bounds=bounds)


def test_rows_too_many_for_one_chunk_add_up_in_float64():
    """The rows are a million ones and a large number: in float32 the ones would be lost."""
    x, dy = np.zeros((1_000_000, 1), np.float32), np.ones((1_000_000, 1), np.float32)
    dy[0] = 2.0**30
    assert sa.layer_norm_vjp(x, 1, None, [0.0])[1](dy).bias == 2.0**30 + 1_000_000 - 1


def test_a_large_mean_costs_layer_norm_no_digits():
    """x is exact in float32: integers around 2**20. Without the second centring the error is 1000 times this bound."""
    rng = np.random.default_rng(9)
    x = (2.0**20 + rng.integers(-1, 2, (5, 300))).astype(np.float32)
    dy = normal(rng, x.shape, np.float32)
    got = sa.layer_norm_vjp(x, 300)[1](dy).x
    bound = norm_bounds(x - np.float32(2**20), dy, np.ones(300, np.float32), 1, 1e-5, True)[0]
    expected = reference.layer_norm_vjp(x.astype(np.float64), 300)[1](dy).x
    assert_within(got, expected, 2.0**-23 * bound, "layer_norm_vjp")


@dtypes
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(isa, dtype, approximate):
    """The exponents x²/2 and z have relative errors of a few u; the exponentials' errors are those times the
    exponents.
    """
    x = np.concatenate([np.linspace(-15, 15, 997), np.linspace(-1e-3, 1e-3, 50), [0.0]]).astype(dtype)
    dy = normal(np.random.default_rng(10), x.shape, dtype)
    w, d = wide(x, np.abs(dy))
    if approximate == "none":
        share = np.array([math.erfc(-t / math.sqrt(2)) / 2 for t in w])
        terms = share + np.abs(w) * np.exp(-w * w / 2) * (1 + w * w / 2)
    else:
        z = 2 * math.sqrt(2 / math.pi) * (w + 0.044715 * w**3)
        share = 1 / (1 + np.exp(-z))
        terms = share * (1 + np.abs(w) * (1 - share) * (1.6 + 0.22 * w * w)) * (1 + np.abs(z))
    flushed = d * 64 * float(np.finfo(np.float32).tiny) / 2.0**-23  # below the least normal number, exp is 0
    assert_like_reference("gelu_vjp", [dy], x, approximate, bounds=[16 * d * terms + flushed])


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_at_the_ends(isa, dtype, approximate):
    """The slope is 0 far left and 1 far right, however far, and NaN where x is infinite, as in PyTorch."""
    big = float(np.finfo(dtype).max)
    x = np.array([-big, -1e20, -200, 0, 200, 1e20, big, -np.inf, np.inf, np.nan], dtype)
    for module in (sa, reference):
        dx = module.gelu_vjp(x, approximate)[1](np.ones_like(x))
        np.testing.assert_array_equal(dx, [0, 0, 0, 0.5, 1, 1, 1, np.nan, np.nan, np.nan])
    tiny = np.array([1e-45, -1e-45, 1e-38, -1e-40], dtype)
    np.testing.assert_array_equal(sa.gelu_vjp(tiny, approximate)[1](np.ones_like(tiny)), [0.5] * 4)


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("shape", "table"), ROTARY_SHAPES, ids=str)
def test_rotary(dtype, shape, table, interleaved):
    x, dy, cos, sin = random_arrays(11, shape, shape, table, table, dtype=dtype)
    most_x, most_dy, most_cos, most_sin = (np.abs(a).max(initial=0) for a in wide(x, dy, cos, sin))
    products = x.size / max(cos.size, 1)  # in the sum of one element of a table
    of_tables = (4 + math.sqrt(products)) * products * most_x * most_dy
    bounds = [4 * most_dy * (most_cos + most_sin), of_tables, of_tables]
    assert_like_reference("apply_rotary_emb_vjp", [dy], x, cos, sin, interleaved, bounds=bounds)
    for wrt in ("x", ("cos",), ("sin", "x"), ()):
        names = (wrt,) if isinstance(wrt, str) else wrt
        own = [bounds[("x", "cos", "sin").index(name)] for name in names]
        assert_like_reference("apply_rotary_emb_vjp", [dy], x, cos, sin, interleaved, bounds=own, wrt=wrt)


@dtypes
def test_merge(dtype):
    shape = (2, 7, 5)
    lse_dtype = np.float64 if dtype == np.float64 else np.float32
    out_1, out_2, dout = random_arrays(12, shape, shape, shape, dtype=dtype)
    lse_1, lse_2, dlse = random_arrays(13, shape[:-1], shape[:-1], shape[:-1], dtype=lse_dtype)
    lse_1[0, :2], lse_2[0, 1:3] = -np.inf, -np.inf
    o_1, o_2, d = wide(np.abs(out_1), np.abs(out_2), np.abs(dout))
    # a share has an error of a few u times 1 + |lse|, which is below 5 here
    few = 32 * np.ones(shape)
    along = 32 * ((d * (2 * o_1 + 2 * o_2)).sum(axis=-1) + np.abs(dlse) + 1)
    bounds = [few * d, few * d, along, along]
    assert_like_reference("merge_attention_vjp", [dout, dlse], [out_1, out_2], [lse_1, lse_2], bounds=bounds)
    assert_like_reference("merge_attention_vjp", [dout], [out_1, out_2], [lse_1, lse_2], bounds=bounds)


def test_dtypes_that_differ():
    x, dy = random_arrays(14, (4, 6), (4, 6), dtype=np.float16)
    weight, bias = random_arrays(15, (6,), (6,), dtype=np.float32)
    bounds = norm_bounds(x, dy, weight, 1, 1e-5, True)
    got = assert_like_reference("layer_norm_vjp", [dy], x, 6, weight, bias, bounds=bounds)
    assert [g.dtype for g in got] == [np.float16, np.float32, np.float32]
    # the C functions promote float16 with bfloat16 to float32, which NumPy does not
    y, pullback = sa.layer_norm_vjp(x, 6, weight.astype(BFLOAT16))
    assert y.dtype == np.float32
    assert [g.dtype for g in pullback(dy)[:2]] == [np.float16, BFLOAT16]
    # one float64 array makes the arithmetic float64
    got = sa.layer_norm_vjp(x.astype(np.float32), 6, weight.astype(np.float64))[1](dy)
    assert [g.dtype for g in got[:2]] == [np.float32, np.float64]
    expected = reference.layer_norm_vjp(x.astype(np.float64), 6, weight.astype(np.float64))[1](dy)
    np.testing.assert_allclose(got.weight, expected.weight, rtol=1e-13)


def test_integers_count_as_float64():
    x = np.arange(8).reshape(2, 4)
    dy = [[1, 0, 2, 0], [0, 1, 0, 3]]
    for f in (sa.softmax_vjp, sa.gelu_vjp, lambda x: sa.rms_norm_vjp(x, 4)):
        got, expected = (flat(f(a)[1](dy))[0] for a in (x, x.astype(np.float64)))
        assert got.dtype == np.float64
        np.testing.assert_array_equal(got, expected)
    expected = sa.softmax_vjp(x.astype(np.float64))[1](dy)
    np.testing.assert_array_equal(sa.softmax_vjp(x.tolist())[1](dy), expected)


def has_no_gaps(array):
    return array.transpose(np.argsort(array.strides)[::-1]).flags.c_contiguous


@dtypes
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_memory_layouts(layout, dtype):
    *arrays, dy = random_arrays(16, (3, 5, 8), (8,), (5, 4), (5, 4), (3, 5, 8), dtype=dtype)
    inputs = [layout(a) for a in arrays]
    for a in inputs:
        a.flags.writeable = False
    eps = 2.0**-7 if dtype == BFLOAT16 else float(np.finfo(dtype).eps)
    for (_, y, ours), (_, plain_y, plain) in zip(every_vjp(sa, *inputs), every_vjp(sa, *arrays), strict=True):
        for g, e in zip(flat(y), flat(plain_y), strict=True):
            assert g.dtype == e.dtype and g.dtype.isnative and has_no_gaps(g)
            np.testing.assert_array_equal(g, e)
        for g, e in zip(flat(ours(layout(dy))), flat(plain(dy)), strict=True):
            if e is None:
                assert g is None
                continue
            assert g.dtype == e.dtype and g.dtype.isnative and g.flags.writeable and has_no_gaps(g)
            # the order of the sums differs: a few eps
            np.testing.assert_allclose(g.astype(float), e.astype(float), rtol=64 * eps, atol=8 * eps)


def test_a_gradient_that_does_not_fit():
    x = np.ones((2, 4), np.float32)
    for name, _, pullback in every_vjp(sa, x, x[0], x[:, :2], x[:, :2]):
        with pytest.raises(ValueError, match=rf"{name} has shape \(4,\); the result .* has \(2, 4\)"):
            pullback(np.ones(4))
        for wrong, dtype in ((x > 0, "bool"), (x * 1j, "complex64"), (np.ma.ones((2, 4)), "MaskedArray")):
            with pytest.raises(TypeError, match=rf"{name} .*{dtype}"):
                pullback(wrong)
    with pytest.raises(ValueError, match=r"dlse has shape \(2, 4\); the result .* has \(2,\)"):
        pullback(x, x)


NARROWED = r"{} has dtype {}, but the result has {}: it would be narrowed"


def test_a_gradient_of_more_bits_than_the_result_is_refused():
    """A gradient is never narrowed silently, as in attention's pullback; lists are read in the result's dtype."""
    for dtype in (np.float16, BFLOAT16, np.float32):
        x, result = np.ones((2, 4), dtype), np.dtype(dtype)
        additive = ("grad_out", *sa.additive_attention_vjp(x, x, x, x.T, x.T, x[:, 0]))
        calls = [additive, *every_vjp(sa, x, x[0], x[:, :2], x[:, :2])]
        for name, _, pullback in calls:
            for dy in (np.ones((2, 4)), np.ones((2, 4), ">f8"), np.ones((2, 4), np.int64)):
                with pytest.raises(TypeError, match=NARROWED.format(name, dy.dtype.name, result)):
                    pullback(dy)
            same = flat(pullback(np.ones((2, 4), dtype)))
            for dy in (np.ones((2, 4)).tolist(), np.ones((2, 4), np.float32)):  # computed in float32
                np.testing.assert_equal(flat(pullback(dy)), same)
        with pytest.raises(TypeError, match=NARROWED.format("dlse", "float64", "float32")):
            calls[-1][-1](x, np.ones(2))


ONES = np.ones((2, 4), np.float32)
TABLE = np.ones((2, 2))
test_bad_arguments_are_refused_by_the_call = refusals(
    (lambda: sa.softmax_vjp(ONES, 2), np.exceptions.AxisError, ""),
    (lambda: sa.layer_norm_vjp(ONES, 3), ValueError, "normalized_shape"),
    (lambda: sa.gelu_vjp(ONES, "sigmoid"), ValueError, "approximate"),
    (
        lambda: sa.apply_rotary_emb_vjp(ONES, TABLE, TABLE, wrt=None),
        TypeError,
        "wrt must be a name or a sequence of names, got NoneType",
    ),
    (
        lambda: sa.apply_rotary_emb_vjp(ONES, TABLE, TABLE, wrt=("x", "y")),
        ValueError,
        "wrt may name x, cos, sin; it has 'y'",
    ),
    (lambda: sa.merge_attention_vjp([], []), ValueError, "at least one"),
    (lambda: sa.gelu_vjp(ONES > 0), TypeError, "bool"),
    (lambda: reference.softmax_vjp(ONES, 2), np.exceptions.AxisError, ""),
    (lambda: reference.merge_attention_vjp([], []), ValueError, "at least one"),
)


def test_merging_of_which_the_output_was_not_used():
    rng = np.random.default_rng(0)
    outs, lses, dlse = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3)), rng.normal(size=3)
    _, pullback = sa.merge_attention_vjp(list(outs), list(lses))
    np.testing.assert_equal(flat(pullback(None, dlse)), flat(pullback(np.zeros((3, 4)), dlse)))
    with pytest.raises(TypeError, match="dout"):
        pullback(None)
