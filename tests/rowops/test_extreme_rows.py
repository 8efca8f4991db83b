"""Rows at the ends of a dtype's range: their squares or sums overflow or underflow, but their norms and gradients do not.

If a row is multiplied by a power of two, its norm (with eps=0) stays the same, and the gradient is divided by that power. So the
exact results for extreme rows follow from rows of moderate size, by the formula in float64. The allowed errors are a few ulp of
numbers of size 1, as in test_rows.py.
"""

import itertools

import numpy as np
import pytest
from inputs import normal

import selfattn as sa
from selfattn import nn, reference

LENGTHS = (3, 7, 33, 1100)
FLOATS = [np.float32, np.float64]
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


@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_and_their_gradients(isa, dtype):
    rng = np.random.default_rng(0)
    for n in LENGTHS:
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


@pytest.mark.parametrize("dtype", FLOATS)
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


@pytest.mark.parametrize("dtype", FLOATS)
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


@pytest.mark.parametrize("dtype", FLOATS)
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


@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_not_finite_spoils_its_row_alone(isa, dtype):
    top = np.finfo(dtype).max
    x = np.array([[top, np.nan, 0, 1], [top, np.inf, 0, 1], [top, -top, 0, 0]], dtype)
    y = sa.layer_norm(x, 4)
    assert np.isnan(y[:2]).all()
    np.testing.assert_allclose(y[2], [2**0.5, -(2**0.5), 0, 0], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_at_the_end_of_the_range(isa, dtype):
    """Sums of dy overflow, but the gradient, which is linear in dy, does not."""
    rng = np.random.default_rng(1)
    k = np.finfo(dtype).maxexp - 1
    for n in LENGTHS:
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
@pytest.mark.parametrize("dtype", FLOATS)
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
