"""softmax, log_softmax, layer_norm, rms_norm, gelu and apply_rotary_emb against `selfattn.reference` in float64.

The bounds are those that csrc/kernels/rowops/forward.h gives, with u = eps of the precision that is computed in; the
result is then rounded once to its dtype. The truth in float64 errs in the same way, so float64 gets twice
the bound. Their pullbacks are in test_rows_vjp.py, with memory layouts of both.

If a row is multiplied by a power of two, its norm (with eps=0) stays the same, and the gradient is divided by that
power. So the exact results for extreme rows, whose squares or sums overflow or underflow, follow from rows of moderate
size. The allowed errors are a few ulp of numbers of size 1.
"""

import itertools
import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from inputs import BFLOAT16, FLOAT_IDS, FLOATS, normal
from refusals import refusals
from tolerances import assert_within, rounding

import selfattn as sa
from selfattn import nn, reference

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)

# Around 1, 2 and 4 vectors of 2 to 16 lanes, and more than one piece of a sum; columns around a tile of 256.
LENGTHS = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130, 1000, 2049, 5000]
COLUMNS = [2, 3, 4, 8, 15, 17, 64, 255, 256, 257, 600]


def softmax_bound(x, y, u, axis=-1):
    with np.errstate(invalid="ignore"):
        distance = np.abs(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return u * y * (4 + np.where(np.isfinite(distance), distance, 0)) + np.finfo(np.float32).tiny


def log_softmax_bound(x, y, u, axis=-1):
    return u * (4 + 2 * np.abs(x - x.max(axis=axis, keepdims=True, initial=-np.inf)) + 2 * np.abs(y))


def layer_norm_bound(x, y, u, axes, weight=None, bias=None):
    mean, deviation = x.mean(axis=axes, keepdims=True), np.sqrt(x.var(axis=axes, keepdims=True) + 1e-5)
    shift = 1 + u * np.abs(mean) / deviation  # the mean has an error of u deviations, and of u² of itself
    before = (4 * np.abs(x - mean) / deviation + 20 * shift) * (1 if weight is None else np.abs(weight))
    return u * (before + 2 * np.abs(y) + (0 if bias is None else np.abs(bias)))


def rotary_bound(x, cos, sin, u, interleaved):
    x, cos, sin = map(np.abs, (x, cos, sin))
    one, other = (reference.apply_rotary_emb(x, cos, side, interleaved) for side in (-sin, sin))
    return 2 * u * (np.abs(one) + other)


def assert_like_reference(name, x, *arguments, bound, **options):
    """Call the function of this name; compare with the reference in float64 within `bound(x, y, u)`."""
    got = getattr(sa, name)(x, *arguments, **options)
    function = getattr(reference, name)
    plain = function(x, *arguments, **options)
    assert type(got) is np.ndarray and got.flags.c_contiguous and got.flags.writeable and got.flags.aligned
    assert (got.shape, got.dtype) == (plain.shape, plain.dtype)
    exact = np.asarray(function(x, *arguments, **options, compute_dtype=np.float64))
    u = 2 * 2.0**-52 if got.dtype == np.float64 else 2.0**-23
    with np.errstate(all="ignore"):
        limit = bound(np.asarray(x, np.float64), exact, u) + rounding(got.dtype, exact)
    assert_within(got, exact, limit, name)
    return got


def relative(ulp):
    return lambda x, y, u: ulp * u * np.abs(y)


@dtypes
def test_softmax(isa, dtype):
    """Some rows are far from 0: weights would be 0 or infinite if another row's maximum were subtracted."""
    rng = np.random.default_rng(1)
    for turn, n in enumerate(LENGTHS):
        x = normal(rng, (3, n), dtype) * np.asarray(4, dtype) + np.asarray((0, 300, -300)[turn % 3], dtype)
        assert_like_reference("softmax", x, bound=softmax_bound)
        assert_like_reference("log_softmax", x, bound=log_softmax_bound)


@dtypes
def test_softmax_along_other_axes(isa, dtype):
    rng = np.random.default_rng(2)
    for n in (1, 2, 5, 40):
        for columns in COLUMNS:
            x = normal(rng, (2, n, columns), dtype)
            for axis in (0, 1, -2):
                for name, bound in (("softmax", softmax_bound), ("log_softmax", log_softmax_bound)):
                    assert_like_reference(name, x, axis=axis, bound=partial(bound, axis=axis))


@dtypes
def test_norms(isa, dtype):
    """The calls have neither, one or both of the parameters."""
    rng = np.random.default_rng(4)
    for turn, n in enumerate(LENGTHS):
        x = normal(rng, (3, n), dtype) + np.asarray(0.5, dtype)
        weight = normal(rng, n, dtype) if turn % 3 else None
        bias = normal(rng, n, dtype) if turn % 2 else None
        w, b = (None if p is None else p.astype(np.float64) for p in (weight, bias))

        def bound(x, y, u, w=w, b=b):
            return layer_norm_bound(x, y, u, (-1,), w, b)

        assert_like_reference("layer_norm", x, n, weight, bias, bound=bound)
        assert_like_reference("rms_norm", x, (n,), weight, bound=relative(4))


@dtypes
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(isa, dtype, interleaved):
    rng = np.random.default_rng(6)
    for width in (2, 6, 8, 14, 16, 18, 34, 66, 130):
        x = normal(rng, (2, 3, 5, width), dtype)
        for shape in [(5,), (1,), (2, 1, 5), (2, 3, 5), (1, 3, 1), (2, 5), (2, 1), (1, 1)]:
            cos, sin = normal(rng, (*shape, width // 2), dtype), normal(rng, (*shape, width // 2), dtype)
            wide = [t.astype(np.float64) for t in (cos, sin)]
            if len(shape) == 2:  # no head axis
                wide = [t[:, None] for t in wide]
            assert_like_reference(
                "apply_rotary_emb",
                x,
                cos,
                sin,
                interleaved,
                bound=lambda x, y, u, wide=wide: rotary_bound(x, *wide, u, interleaved),
            )


@dtypes
def test_gelu(isa, dtype):
    x = np.linspace(-9, 9, 4001).astype(dtype)
    for n in (0, 1, 5, 17, 4001):
        ulp = 6 if dtype != np.float64 else 50  # the exact result has x²/2
        assert_like_reference("gelu", x[-n:], bound=relative(ulp))

        # the reference loses the digits of negative x: 1 + tanh
        def bound(x, y, u):
            return u * np.abs(y) * (4 + 6 * np.abs(x) * (1 + x * x / 20)) + 4 * 2.0**-52 * np.abs(x)

        assert_like_reference("gelu", x[-n:], "tanh", bound=bound)


def test_gelu_keeps_the_digits_of_both_tails(isa):
    # mpmath with 40 digits: x·erfc(−x/√2)/2
    golden = {
        -0.5: -1.5426876936299345e-1, -1.0: -1.5865525393145705e-1, -5.0: -1.4332578593959696e-6,
        -12.5: -4.6657053735971417e-35, -25.0: -7.6417417659564023e-137, -37.0: -2.1184613523340934e-298,
    }  # fmt: skip
    for x, y in golden.items():
        assert abs(sa.gelu(x) - y) <= 6 * 2.0**-52 * abs(y)
        if x > -13:
            assert abs(float(sa.gelu(np.float32(x))) - y) <= 6 * 2.0**-23 * abs(y)


def test_layer_norm_where_the_mean_is_much_larger_than_the_deviation(isa):
    x = (10_000 + np.random.default_rng(7).standard_normal((4, 5000))).astype(np.float32)
    exact = reference.layer_norm(x, 5000, compute_dtype=np.float64)
    assert np.max(np.abs(sa.layer_norm(x, 5000) - exact)) < 8 * 2.0**-23 * 4


def test_long_sums_do_not_drift(isa):
    n = 1_000_000
    for x in (np.zeros((1, n), np.float32), np.zeros((n, 2), np.float32)):
        axis = int(np.argmax(x.shape))
        np.testing.assert_allclose(sa.softmax(x, axis), 1 / n, rtol=3 * 2.0**-23)
        np.testing.assert_allclose(sa.log_softmax(x, axis), -math.log(n), rtol=2 * 2.0**-23)


def test_log_softmax_where_softmax_is_zero(isa):
    assert sa.log_softmax(np.array([0, -1000], np.float32)).tolist() == [0.0, -1000.0]
    assert sa.softmax(np.array([0, -1000], np.float32)).tolist() == [1.0, 0.0]


def test_16_bits_are_computed_in_float32(isa):
    x = np.full((1, 1000), 60000, np.float16)  # its square and the sum overflow float16
    np.testing.assert_array_equal(sa.rms_norm(x, 1000), np.ones_like(x))
    np.testing.assert_array_equal(sa.layer_norm(x, 1000), np.zeros_like(x))


def test_infinities_and_nan(isa):
    inf, nan = np.inf, np.nan
    for dtype in (np.float16, np.float32, np.float64):
        for n in (3, 70):
            x = np.zeros((6, n), dtype)
            x[0] = -inf
            x[1, :2] = -inf
            x[2, 1] = inf
            x[3, n - 1] = nan
            x[4] = [nan] * n
            x[5, 0] = -inf
            for name in ("softmax", "log_softmax"):
                exact = getattr(reference, name)(x)
                np.testing.assert_allclose(getattr(sa, name)(x), exact, rtol=1e-3, atol=0)
                np.testing.assert_allclose(getattr(sa, name)(x.T, 0), exact.T, rtol=1e-3, atol=0)
            for name in ("layer_norm", "rms_norm"):
                exact = getattr(reference, name)(x[2:], n)
                np.testing.assert_array_equal(np.isnan(getattr(sa, name)(x[2:], n)), np.isnan(exact))
            special = np.array([inf, -inf, nan, -0.0, 0.0, 60000, -60000], dtype)
            np.testing.assert_array_equal(sa.gelu(special), reference.gelu(special))
            np.testing.assert_array_equal(sa.gelu(special, "tanh"), reference.gelu(special, "tanh"))


def test_constant_rows():
    x = np.full((2, 1000), 0.1, np.float32)
    np.testing.assert_array_equal(sa.layer_norm(x, 1000), np.zeros_like(x))
    assert np.isnan(sa.layer_norm(np.full(4, 2.0), 4, eps=0)).all()  # 0/0, as the formula has it


def test_eps():
    x = np.full((1, 4), 1e-4, np.float32)
    for eps in (1e-5, 1e-12, 3):
        np.testing.assert_allclose(sa.rms_norm(x, 4, eps=eps), reference.rms_norm(x, 4, eps=eps), rtol=1e-6)
        rising = x * [[1, 2, 3, 4]]
        np.testing.assert_allclose(
            sa.layer_norm(rising, 4, eps=eps), reference.layer_norm(rising, 4, eps=eps)
        )
    for dtype in FLOATS:
        y = x.astype(dtype)
        found, expected = (module.rms_norm(y, 4).astype(float) for module in (sa, reference))
        np.testing.assert_allclose(found, expected, rtol=2.0**-7)


def test_dtypes_promote_as_numpy_has_it():
    x = normal(np.random.default_rng(11), (3, 8), np.float32)
    for dtype in FLOATS:
        for other in FLOATS:
            mixed = {dtype.name, other.name} == {"float16", "bfloat16"}
            expected = np.float32 if mixed else np.result_type(dtype, other)
            assert sa.layer_norm(x.astype(dtype), 8, x[0].astype(other)).dtype == expected
            assert sa.layer_norm(x.astype(dtype), 8, bias=x[0].astype(other)).dtype == expected
            assert sa.rms_norm(x.astype(dtype), 8, x[0].astype(other)).dtype == expected
            tables = x[:, :4].astype(other), x[:, 4:].astype(dtype)
            assert sa.apply_rotary_emb(x.astype(dtype), *tables).dtype == expected
    wide = x.astype(np.float64)
    np.testing.assert_array_equal(sa.layer_norm(x, 8, wide[0]), sa.layer_norm(wide, 8, wide[0]))


def test_empty_and_scalar():
    for shape in [(0,), (3, 0), (0, 4), (2, 0, 3)]:
        x = np.zeros(shape, np.float32)
        for axis in range(-x.ndim, x.ndim):
            assert sa.softmax(x, axis).shape == shape
            assert sa.log_softmax(x, axis).shape == shape
        assert sa.gelu(x).shape == shape
        assert sa.layer_norm(x, shape[-1], np.ones(shape[-1]), np.ones(shape[-1])).shape == shape
        assert sa.rms_norm(x, shape).shape == shape
    assert sa.apply_rotary_emb(np.zeros((2, 0)), np.zeros((2, 0)), np.zeros((2, 0))).shape == (2, 0)
    assert sa.apply_rotary_emb(np.zeros((0, 4)), np.zeros((0, 2)), np.zeros((0, 2))).shape == (0, 4)
    for axis in (0, -1):
        assert sa.softmax(3.0, axis) == 1 and sa.softmax(3.0, axis).shape == ()
    assert sa.gelu(0).shape == ()
    assert sa.softmax(np.zeros((1,) * 40 + (2,)), 3).shape == (1,) * 40 + (2,)


@given(st.data())
def test_any_shape_and_strides(data):
    """For a slice of a transposed array, each function has the same bits as for a contiguous copy, near the
    reference.
    """
    ndim = data.draw(st.integers(1, 4))
    shape = data.draw(st.lists(st.integers(0, 9), min_size=ndim, max_size=ndim))
    dtype = data.draw(st.sampled_from([*FLOATS, np.dtype(">f4"), np.dtype("i2")]))
    steps = data.draw(st.lists(st.sampled_from([1, 2, -1, -3]), min_size=ndim, max_size=ndim))
    order = data.draw(st.permutations(range(ndim)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    base = normal(rng, [n * abs(step) for n, step in zip(shape, steps, strict=True)], dtype.newbyteorder("="))
    x = base.astype(dtype)[tuple(slice(None, None, step) for step in steps)].transpose(order)
    axis = data.draw(st.integers(-ndim, ndim - 1))
    first = data.draw(st.integers(0, ndim - 1))
    ends = x.shape[first:]
    weight = normal(rng, ends, data.draw(st.sampled_from(FLOATS)))
    calls = dict.fromkeys(("softmax", "log_softmax"), (axis,))
    calls |= dict.fromkeys(("layer_norm", "rms_norm"), (ends, weight))
    calls["gelu"] = (data.draw(st.sampled_from(["none", "tanh"])),)
    if ndim >= 2 and x.shape[-1] % 2 == 0:
        table = normal(rng, (*x.shape[-2:-1], x.shape[-1] // 2), np.float32)
        calls["apply_rotary_emb"] = (table, table[::-1], data.draw(st.booleans()))
    for name, arguments in calls.items():
        y = getattr(sa, name)(x, *arguments)
        np.testing.assert_array_equal(y, getattr(sa, name)(np.ascontiguousarray(x), *arguments), err_msg=name)
        if BFLOAT16 in (x.dtype, weight.dtype) and np.float16 in (x.dtype, weight.dtype):
            continue  # NumPy does not promote them
        exact = getattr(reference, name)(x, *arguments, compute_dtype=np.float64)
        with np.errstate(all="ignore"):
            size = np.where(np.isfinite(exact), np.abs(exact), 0).max(initial=1)
        tolerance = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(y.dtype.name, 2.0**-17) * size
        np.testing.assert_allclose(y.astype(np.float64), exact, rtol=0, atol=tolerance, err_msg=name)


X = np.ones((2, 3, 4), np.float32)
BAD = [
    (np.exceptions.AxisError, r"axis 3 .*\(2, 3, 4\)", lambda: sa.softmax(X, 3)),
    (np.exceptions.AxisError, r"axis 1 .*\(\)", lambda: sa.softmax(1.0, 1)),
    (np.exceptions.AxisError, f"axis {2**70} is out of bounds", lambda: sa.softmax(X, 2**70)),
    (TypeError, "axis must be an int, got bool", lambda: sa.softmax(X, True)),
    (TypeError, "normalized_shape must be .* got True", lambda: sa.layer_norm(X, True)),
    (ValueError, "eps is an integer too large", lambda: sa.layer_norm(X, 4, eps=10**400)),
    (TypeError, "unexpected keyword argument 'dim'", lambda: sa.softmax(X, dim=0)),
    (TypeError, "x must be .*bool", lambda: sa.softmax(X > 0)),
    (TypeError, "x must be .*complex", lambda: sa.gelu(X * 1j)),
    (TypeError, "x must be .*(longdouble|float128)", lambda: sa.gelu(X.astype(np.longdouble))),
    (TypeError, "MaskedArray", lambda: sa.layer_norm(np.ma.array(X), 4)),
    (
        ValueError,
        r"x of shape \(2, 3, 4\) does not end in normalized_shape \(3,\)",
        lambda: sa.layer_norm(X, 3),
    ),
    (ValueError, r"normalized_shape \(-1,\)", lambda: sa.rms_norm(X, -1)),
    (TypeError, "normalized_shape must be .* got 4.0", lambda: sa.layer_norm(X, 4.0)),
    (
        ValueError,
        r"weight has shape \(3,\), not normalized_shape \(4,\)",
        lambda: sa.layer_norm(X, 4, np.ones(3)),
    ),
    (ValueError, r"bias has shape \(\)", lambda: sa.layer_norm(X, 4, None, 1.0)),
    (TypeError, "eps must be a real number, got str", lambda: sa.layer_norm(X, 4, eps="1")),
    (TypeError, "eps must be a real number, got a bool", lambda: sa.rms_norm(X, 4, eps=True)),
    (ValueError, "'none' or 'tanh', got 'erf'", lambda: sa.gelu(X, "erf")),
    (
        ValueError,
        r"x has shape \(2, 3\), not \(..., L, D\) with an even D",
        lambda: sa.apply_rotary_emb(np.ones((2, 3)), 1.0, 1.0),
    ),
    (
        ValueError,
        r"cos of shape \(3, 4\) does not broadcast to \(..., L, D / 2\) = \(2, 3, 2\)",
        lambda: sa.apply_rotary_emb(X, X[0], X[0, :, :2]),
    ),
    (ValueError, r"sin of shape", lambda: sa.apply_rotary_emb(X, X[0, :, :2], X[:, :2, :2])),
    (
        ValueError,
        r"cos of shape \(1, 2, 3, 2\)",
        lambda: sa.apply_rotary_emb(X, X[None, ..., :2], X[..., :2]),
    ),
    (
        ValueError,
        r"cos of shape \(3, 1, 2\), one axis less than x .*\(..., L, D / 2\) = \(2, 5, 2\); .* all axes of x",
        lambda: sa.apply_rotary_emb(np.ones((2, 3, 5, 4)), np.ones((3, 1, 2)), np.ones((5, 2))),
    ),
]


test_bad_calls = refusals(*((call, error, match) for error, match, call in BAD))


WIDTHS = (3, 7, 33, 1100)
PLAIN = [np.float32, np.float64]
EXPONENTS = {np.float32: (63, 64, 90, 126, -40, -80, -110), np.float64: (511, 600, 1022, -490, -700, -1000)}
ULP = 16  # ulps of the largest number of a row, and of the terms of size 1 that cancel in gradients


def close(got, exact, dtype, name):
    u = 2 * 2.0**-52 if dtype == np.float64 else 2.0**-23
    got, exact = np.asarray(got, np.float64), np.asarray(exact, np.float64)
    assert np.isfinite(got).all(), name
    assert (np.abs(got - exact) <= ULP * u * (1 + np.abs(exact).max(-1, keepdims=True))).all(), name


def norms(n, weight, bias):
    return {
        "layer_norm": (sa.layer_norm, sa.layer_norm_vjp, reference.layer_norm_vjp, (n, weight, bias)),
        "rms_norm": (sa.rms_norm, sa.rms_norm_vjp, reference.rms_norm_vjp, (n, weight)),
    }


@pytest.mark.parametrize("dtype", PLAIN)
def test_norms_and_their_gradients(isa, dtype):
    rng = np.random.default_rng(0)
    for n in WIDTHS:
        x, dy = normal(rng, (2, n), dtype), normal(rng, (2, n), dtype)
        x /= np.abs(x).max()
        weight, bias = normal(rng, n, dtype), normal(rng, n, dtype)
        wide = [each.astype(np.float64) for each in (x, dy, weight, bias)]
        for name, (function, vjp, exact_vjp, arguments) in norms(n, weight, bias).items():
            exact, pullback = exact_vjp(wide[0], n, *wide[2 : 1 + len(arguments)], eps=0)
            exact_grads = pullback(wide[1])
            for k in EXPONENTS[dtype]:
                big = np.ldexp(x, k)
                about = f"{name} of {n} at 2^{k}"
                close(function(big, *arguments, eps=0), exact, dtype, about)
                y, pullback = vjp(big, *arguments, eps=0)
                close(y, exact, dtype, about)
                # dx is dx·2^−k: dy brings it back into the range
                j = max(min(k, 100 if dtype == np.float32 else 900), -100 if dtype == np.float32 else -900)
                grads = pullback(np.ldexp(dy, j))
                close(
                    np.ldexp(np.asarray(grads[0], np.float64), k - j), exact_grads[0], dtype, f"dx, {about}"
                )
                for got, expected in zip(grads[1:], exact_grads[1:], strict=True):
                    close(np.ldexp(np.asarray(got, np.float64), -j), expected, dtype, f"parameters, {about}")


@pytest.mark.parametrize("dtype", PLAIN)
def test_a_positive_eps_with_large_and_small_rows(isa, dtype):
    """eps is negligible in a sum with 1e20, and nearly all of a sum with 1e−30."""
    signs = np.array([[1, -1, 1, -1]], dtype)
    for function in (sa.layer_norm, sa.rms_norm):
        for large in (1e18, 1e20, 1e30, np.finfo(dtype).max):
            np.testing.assert_allclose(function(dtype(large) * signs, 4), signs, rtol=1e-6)
        small = dtype(1e-30) * signs
        np.testing.assert_allclose(function(small, 4, eps=1e-4), 100 * small, rtol=1e-6)
        for eps in (1e-60, 1e-62):  # float32's own squares would be zeros
            exact = 1e-30 * signs / np.sqrt(1e-60 + eps)
            np.testing.assert_allclose(function(small, 4, eps=eps), exact, rtol=1e-6)


@pytest.mark.parametrize("dtype", PLAIN)
def test_rows_of_one_number_and_differences_beyond_the_range(isa, dtype):
    top = np.finfo(dtype).max
    for n in (2, 100, 1000):
        np.testing.assert_array_equal(
            sa.layer_norm(np.full((1, n), top / 3, dtype), n), np.zeros((1, n), dtype)
        )
    x = np.array([[top, top, top, -top]], dtype)
    np.testing.assert_allclose(sa.layer_norm(x, 4), [[3**-0.5] * 3 + [-(3**0.5)]], rtol=1e-6)
    x = np.array([[top, top], [1, 2]], dtype)
    np.testing.assert_array_equal(sa.layer_norm(x, 2)[1], sa.layer_norm(x[1:], 2)[0])  # as in its own call


@pytest.mark.parametrize("dtype", PLAIN)
def test_gradients_of_rows_of_one_number(isa, dtype):
    """Without variance only eps determines the scale, for every number: the gradient is (dy − mean(dy))/√eps."""
    top = np.finfo(dtype).max
    for number, n in itertools.product((top, -top, top / 4, top**0.75), (1, 2, 3, 4, 33)):
        x, dy = np.full((1, n), number, dtype), np.arange(n, dtype=dtype)[None]
        y, pullback = sa.layer_norm_vjp(x, n, np.ones(n, dtype))
        grads = pullback(dy)
        np.testing.assert_array_equal(y, 0)
        np.testing.assert_allclose(grads.x, (dy - dy.mean()) / np.float64(1e-5) ** 0.5, rtol=1e-5)
        np.testing.assert_array_equal(grads.weight, 0)


@pytest.mark.parametrize("dtype", PLAIN)
def test_what_is_not_finite_spoils_its_row_alone(isa, dtype):
    top = np.finfo(dtype).max
    x = np.array([[top, np.nan, 0, 1], [top, np.inf, 0, 1], [top, -top, 0, 0]], dtype)
    y = sa.layer_norm(x, 4)
    assert np.isnan(y[:2]).all()
    np.testing.assert_allclose(y[2], [2**0.5, -(2**0.5), 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", PLAIN)
def test_gradients_at_the_end_of_the_range(isa, dtype):
    """Sums of dy overflow, but the gradient, which is linear in dy, does not."""
    rng = np.random.default_rng(1)
    k = np.finfo(dtype).maxexp - 1
    for n in WIDTHS:
        x, dy, weight = normal(rng, (3, n), dtype), normal(rng, (3, n), dtype), normal(rng, n, dtype)
        dy /= np.abs(dy).max()
        dy[1] = 0.75
        for name, vjp in {
            "softmax": lambda dy, x=x: sa.softmax_vjp(x)[1](dy),
            "softmax of columns": lambda dy, x=x: sa.softmax_vjp(x.T, 0)[1](dy.T).T,
            "log_softmax of columns": lambda dy, x=x: (
                sa.log_softmax_vjp(0 * x.T, 0)[1](dy.T / dy.dtype.type(2)).T
            ),
            "log_softmax": lambda dy, x=x, n=n: sa.log_softmax_vjp(x)[1](dy / dy.dtype.type(2 * n)),
            "layer_norm": lambda dy, x=x, n=n: sa.layer_norm_vjp(4 * x, n)[1](dy)[0],
            "rms_norm": lambda dy, x=x, n=n, w=weight: sa.rms_norm_vjp(8 * x, n, w)[1](dy)[0],
        }.items():
            exact = np.asarray(vjp(dy), np.float64)
            got = np.asarray(vjp(np.ldexp(dy, k)), np.float64)
            assert np.isfinite(got).all(), (name, n)
            u = 2.0**-52 if dtype == np.float64 else 2.0**-23
            assert (np.abs(np.ldexp(got, -k) - exact) <= ULP * u).all(), (name, n)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dtype", PLAIN)
def test_norms_inside_a_transformer(isa, dtype, norm_first):
    """With layers that add nothing, norms act alone: forward and backward they scale with the row's power of two."""
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, norm_first=norm_first, layer_norm_eps=0.0, dtype=dtype, rng=0
    )
    for name, array in layer.parameters().items():
        if name.startswith(("linear", "self_attn")):
            array[...] = 0
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8, eps=0.0, dtype=dtype))
    x, dy = np.random.default_rng(2).standard_normal((2, 2, 5, 8)).astype(dtype)
    y, pullback = model.vjp(x)
    dx = pullback(dy)[0]
    for k in (90, -90) if dtype == np.float32 else (700, -700):
        got, pullback = model.vjp(np.ldexp(x, k))
        close(got, y, dtype, f"2^{k}")
        close(np.ldexp(pullback(dy)[0], k), dx, dtype, f"gradient at 2^{k}")


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_gelu_keeps_the_order_of_axes_in_memory(order):
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).transpose(order)
    y, pullback = sa.functional.gelu_vjp(x)
    assert sa.gelu(x).strides == y.strides == pullback(y).strides == np.exp(x).strides == x.strides
