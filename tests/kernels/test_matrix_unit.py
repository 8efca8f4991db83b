"""Attention on the matrix unit, where the CPU has one: the sizes and the numbers at which it changes its ways.

A float32 is multiplied there as the sum of three bfloat16 (docs/decisions/0004). What three cannot hold exactly (NaN, infinities,
magnitudes beyond 2^126, and below 2^-100 but 0) goes through multiply-adds, tile by tile. The tests that go through all instruction
sets run here as well; these ones look at the seams. Calls of 16 bits: tests/kernels/test_matrix_unit_16_bits.py.
"""

import itertools

import numpy as np
import pytest

import selfattn as sa
from selfattn import _core, reference

EPS = 2.0**-24

pytestmark = pytest.mark.usefixtures("on_the_matrix_unit")


def arrays(heads=2, length=100, keys=100, width=48, value_width=48, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (heads, length, width), (heads, keys, width), (heads, keys, value_width)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def exact(query, key, value, **options):
    return reference.scaled_dot_product_attention(query, key, value, compute_dtype=np.float64, **options)


def assert_close(out, query, key, value, **options):
    """Scores of n terms are off by at most (n + 4)·eps·Σ|q·k|; so are, relatively, weights, and then sums over the keys."""
    expected = exact(query, key, value, **options)
    q, k, v = (np.abs(x).astype(np.float64) for x in (query, key, value))
    scores = (q @ k.swapaxes(-1, -2)).max() / np.sqrt(query.shape[-1])
    bound = (
        (2 * (query.shape[-1] + 4) * scores + key.shape[-2] + 16) * EPS * v.max(axis=(-2, -1), keepdims=True)
    )
    assert out.dtype == query.dtype
    np.testing.assert_array_less(
        np.abs(out.astype(np.float64) - expected), np.broadcast_to(bound, out.shape) + 1e-300
    )


@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 64, 80])
@pytest.mark.parametrize("value_width", [15, 16, 31, 33, 80])
def test_widths_around_a_tile(width, value_width):
    query, key, value = arrays(length=70, keys=70, width=width, value_width=value_width)
    out = sa.scaled_dot_product_attention(query, key, value)
    assert_close(out, query, key, value)


@pytest.mark.parametrize("keys", [31, 32, 33, 47, 63, 64, 65, 96, 97, 129, 191])
@pytest.mark.parametrize("length", [16, 17, 33, 49, 63, 64, 65, 128])
def test_lengths_around_a_tile(length, keys):
    query, key, value = arrays(length=length, keys=keys)
    for options in ({}, {"is_causal": True}, {"causal": "lower_right", "window": (20, 3)}):
        out = sa.scaled_dot_product_attention(query, key, value, **options)
        assert_close(out, query, key, value, **options)


OF_A_TILE = [0, 40, 64, 99]  # in the first, in the second and at the end of the last tile of keys


@pytest.mark.parametrize("at", OF_A_TILE)
@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-130, 2.0**-101, 2.0**-100, 2.0**60, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_magnitudes_beyond_the_parts(which, magnitude, at):
    inputs = arrays()
    inputs[which][1, at] *= np.float32(magnitude) if magnitude < 1 else 1
    inputs[which][1, at, 3] = np.float32(magnitude)
    if magnitude > 1 and which != 2:
        inputs[1 - which][..., 3] *= np.float32(1 / magnitude)  # products stay small
    out = sa.scaled_dot_product_attention(*inputs)
    assert np.isfinite(out).all()
    if which == 2 and magnitude > 1:  # one value dwarfs all others: its column is its weight times it
        weights = exact(*inputs[:2], np.eye(100)[None].repeat(2, axis=0))
        np.testing.assert_allclose(out[1, :, 3], weights[1, :, at] * magnitude, rtol=200 * EPS)
        out, inputs[2] = out[..., :3], inputs[2][..., :3]
    assert_close(out, *inputs)


@pytest.mark.parametrize("scale", [2.0**-140, 2.0**-110, 2.0**-99, 2.0**126, 2.0**127])
def test_all_values_beyond_the_parts(scale):
    query, key, value = arrays()
    value /= 4 * np.abs(value).max()
    out = sa.scaled_dot_product_attention(query, key, value * np.float32(scale))
    expected = exact(query, key, (value * np.float32(scale)).astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=0, atol=200 * EPS * scale + 2.0**-148)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7F800000, 0xFF800000])
@pytest.mark.parametrize("at", OF_A_TILE)
def test_a_value_that_is_not_finite_reaches_its_column_and_no_other(bits, at):
    query, key, value = arrays()
    value.view(np.uint32)[0, at, 5] = bits
    bad = value[0, at, 5]
    out = sa.scaled_dot_product_attention(query, key, value)
    np.testing.assert_array_equal(out[0, :, 5], np.full(100, bad))
    value[0, at, 5] = 0
    clean = sa.scaled_dot_product_attention(query, key, value)
    np.testing.assert_array_equal(np.delete(out[0], 5, axis=1).shape, np.delete(clean[0], 5, axis=1).shape)
    np.testing.assert_allclose(np.delete(out[0], 5, axis=1), np.delete(clean[0], 5, axis=1), atol=200 * EPS)
    np.testing.assert_array_equal(out[1], clean[1])
    value.view(np.uint32)[0, at, 5] = bits
    mask = np.ones((100, 100), bool)
    mask[:, at] = False  # closed, it is not there
    out = sa.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    value[0, at, 5] = 0
    assert_close(out, query, key, value, attn_mask=mask)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF])
@pytest.mark.parametrize("at", OF_A_TILE)
def test_nan_in_a_query_stays_in_its_row_and_in_a_key_reaches_all(bits, at):
    query, key, value = arrays()
    query.view(np.uint32)[0, at, 7] = bits
    out = sa.scaled_dot_product_attention(query, key, value)
    assert np.isnan(out[0, at]).all()
    assert np.isfinite(np.delete(out[0], at, axis=0)).all() and np.isfinite(out[1]).all()
    query, key, value = arrays()
    key.view(np.uint32)[0, at, 7] = bits
    out = sa.scaled_dot_product_attention(query, key, value)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


def test_weights_too_small_for_three_parts():
    """Scores from 0 down to -140 in base 2: the last parts of the weights are subnormal, and values make up for it."""
    keys = 128
    query = np.zeros((1, 32, 16), np.float32)
    query[..., 0] = 1
    key = np.zeros((1, keys, 16), np.float32)
    key[0, :, 0] = -np.log(2) * np.linspace(0, 140, keys)
    value = np.zeros((1, keys, 16), np.float32)
    value[0] = np.exp2(np.minimum(100, np.linspace(0, 140, keys)))[:, None]
    out = sa.scaled_dot_product_attention(query, key, value, scale=1.0)
    # a score near 140 is off by 140·eps/2, and so is its weight, relatively
    np.testing.assert_allclose(out, exact(query, key, value, scale=1.0), rtol=(140 + keys) * EPS)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_same_bits_for_any_number_of_threads(threads):
    inputs = arrays(heads=6, length=150, keys=300)
    inputs[1][2, 70, 3] = 1e-38  # one tile of one head by multiply-adds
    inputs[2][4, 10, 3] = np.inf
    one = sa.scaled_dot_product_attention(*inputs, num_threads=1)
    many = sa.scaled_dot_product_attention(*inputs, num_threads=threads)
    np.testing.assert_array_equal(one.view(np.uint32), many.view(np.uint32))


def test_more_keys_than_the_scratch_keeps():
    query, key, value = arrays(heads=1, length=40, keys=12_000, width=96, value_width=112)
    assert_close(sa.scaled_dot_product_attention(query, key, value), query, key, value)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(["float16", "bfloat16", "float32"], repeat=3)), ids="-".join
)
def test_every_mix_of_dtypes(dtypes):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from the package ml_dtypes")
    types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    inputs = [x.astype(types[name]) for x, name in zip(arrays(), dtypes, strict=True)]
    out = sa.scaled_dot_product_attention(*inputs)
    expected = exact(*(x.astype(np.float64) for x in inputs))
    digits = {"float16": 11, "bfloat16": 8, "float32": 24}[out.dtype.name]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2.0**-digits, atol=200 * EPS)


@pytest.mark.parametrize("factor", [1, 8])
def test_the_error_is_below_that_of_multiply_adds(factor):
    query, key, value = arrays(heads=2, length=512, keys=1024, width=64, value_width=64)
    query, key = query * np.float32(factor), key * np.float32(factor)
    truth = exact(query, key, value)

    def error(isa):
        _core._set_isa(isa)
        out = sa.scaled_dot_product_attention(query, key, value)
        return np.sqrt(np.mean((out - truth) ** 2))

    assert error("amx") < error("avx512")
