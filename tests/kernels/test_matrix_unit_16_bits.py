"""Attention of 16 bits on the matrix unit, where the CPU has one: the sizes and the numbers at which it changes its ways.

Where all is float16, or all bfloat16, queries and keys are multiplied as they are and the scale follows (docs/decisions/0004). bfloat16
goes that way from 2^-80 to 2^50, with weights of two parts; all float16 numbers that are finite do, with weights of three. What
tests/kernels/test_matrix_unit.py is for float32.
"""

import itertools

import numpy as np
import pytest

import selfattn as sa
from selfattn import _core, reference

EPS = 2.0**-24

pytestmark = pytest.mark.usefixtures("on_the_matrix_unit")

BOTH = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def arrays(dtype, heads=2, length=100, keys=100, width=48, value_width=48):
    rng = np.random.default_rng(0)
    shapes = (heads, length, width), (heads, keys, width), (heads, keys, value_width)
    return rounded(dtype, *(rng.standard_normal(shape) for shape in shapes))


def rounded(dtype, *xs):
    if dtype == "bfloat16":
        ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from the package ml_dtypes")
        return [x.astype(np.float32).astype(ml_dtypes.bfloat16) for x in xs]
    return [x.astype(np.float16) for x in xs]


def wide(*xs):
    return [x.astype(np.float64) for x in xs]


def exact(query, key, value, **options):
    return reference.scaled_dot_product_attention(*wide(query, key, value), **options)


def assert_rounded(out, expected, largest=4):
    """Within an ulp; and where values cancel, what a weight's error comes to: of the largest value, 2^-17 where weights have 17 bits,
    else that of float32 arithmetic, with half of the smallest float16 for results below its range."""
    if out.dtype == np.float16:
        ulp, near_zero = 2.0**-11, 50 * EPS * largest + 2.0**-25
    else:
        ulp, near_zero = 2.0**-8, 2.0**-17 * largest
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=ulp, atol=near_zero)


OF_A_TILE = [0, 40, 64, 99]  # in the first, in the second and at the end of the last tile of keys


@BOTH
@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 47, 64, 80])
@pytest.mark.parametrize("value_width", [15, 16, 17, 33, 80])
def test_widths_around_a_tile(width, value_width, dtype):
    inputs = arrays(dtype, length=70, keys=70, width=width, value_width=value_width)
    assert_rounded(sa.scaled_dot_product_attention(*inputs), exact(*inputs))


@BOTH
@pytest.mark.parametrize("keys", [31, 32, 33, 47, 63, 64, 65, 97, 129])
@pytest.mark.parametrize("length", [17, 33, 49, 64, 65])
def test_lengths_around_a_tile(length, keys, dtype):
    inputs = arrays(dtype, length=length, keys=keys)
    for options in ({}, {"is_causal": True}, {"causal": "lower_right", "window": (20, 3)}):
        assert_rounded(sa.scaled_dot_product_attention(*inputs, **options), exact(*inputs, **options))


@BOTH
@pytest.mark.parametrize("width", [16, 40, 64])
def test_every_layout_gives_the_same_bits(width, dtype):
    inputs = arrays(dtype, heads=2, length=66, keys=99, width=width, value_width=width)
    expected = sa.scaled_dot_product_attention(*inputs).view(np.uint16)
    for which in range(3):
        x = inputs[which]
        padded = np.zeros((*x.shape[:-1], 2 * width + 3), x.dtype)
        padded[..., 1 : 2 * width + 1 : 2] = x
        odd = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
        odd[...] = x
        steps = (padded[..., 1 : 2 * width + 1 : 2], x.swapaxes(1, 2).copy().swapaxes(1, 2), odd)
        for same in (*steps, x[:, ::-1].copy()[:, ::-1]):
            changed = [*inputs[:which], same, *inputs[which + 1 :]]
            np.testing.assert_array_equal(sa.scaled_dot_product_attention(*changed).view(np.uint16), expected)


def options_after_the_product(length, keys):
    rng = np.random.default_rng(3)
    return {
        "softcap": {"softcap": 1.5},
        "ALiBi": {"alibi_slopes": np.array([0.5, 0.125], np.float32)},
        "boolean mask": {"attn_mask": rng.random((length, keys)) < 0.7},
        "float mask": {"attn_mask": rng.standard_normal((length, keys)).astype(np.float32)},
        "shared mask": {"attn_mask": rng.standard_normal((1, keys)).astype(np.float32)},
        "key lengths": {"key_lengths": np.array([70, 33])},
        "sinks": {"sinks": np.array([0.5, 3.0], np.float32)},
        "causal, softcap": {"is_causal": True, "softcap": 2.0},
    }


@BOTH
@pytest.mark.parametrize("name", options_after_the_product(1, 1))
def test_scores_are_scaled_before_what_follows(name, dtype):
    inputs = arrays(dtype, length=70, keys=99)
    options = options_after_the_product(70, 99)[name]
    assert_rounded(sa.scaled_dot_product_attention(*inputs, **options), exact(*inputs, **options))


SCALES = [0.0, -0.3, -3.0, 0.02, 1.0, 2.0**-50, 2.0**-90, 2.0**38, 2.0**45]


@pytest.mark.parametrize(
    ("dtype", "scale"), [*itertools.product(["float16", "bfloat16"], SCALES), ("bfloat16", 2.0**100)]
)
def test_scales_of_every_kind(scale, dtype):
    query, key, value = wide(*arrays(dtype, length=70, keys=99))
    if scale > 1:  # scores stay ordinary, and float16 are subnormal
        query, key = query * scale**-0.5, key * scale**-0.5
    inputs = rounded(dtype, query, key, value)
    out = sa.scaled_dot_product_attention(*inputs, scale=scale)
    assert_rounded(out, exact(*inputs, scale=scale))


@BOTH
def test_lse_and_weights(dtype):
    inputs = arrays(dtype, length=70, keys=99)
    out, lse, weights = sa.scaled_dot_product_attention(*inputs, return_lse=True, return_weights=True)
    expected, expected_lse, expected_weights = exact(*inputs, return_lse=True, return_weights=True)
    assert_rounded(out, expected)
    # of a sum of weights of 17 bits, or of 24
    near = {"float16": 64 * EPS, "bfloat16": 2.0**-17}[dtype]
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=near)
    digits = {"float16": 11, "bfloat16": 8}[dtype]
    np.testing.assert_allclose(weights.astype(np.float64), expected_weights, rtol=2.0**-digits, atol=2.0**-25)


@pytest.mark.parametrize("at", OF_A_TILE)
@pytest.mark.parametrize("magnitude", [2.0**-133, 2.0**-126, 2.0**-81, 2.0**-80, 2.0**49, 2.0**50, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_bfloat16_magnitudes_at_the_bounds(which, magnitude, at):
    inputs = [x.astype(np.float32) for x in arrays("bfloat16")]
    inputs[which][1, at, 3] = np.float32(magnitude)
    if magnitude > 1 and which != 2:
        inputs[1 - which][..., 3] *= np.float32(1 / magnitude)  # products stay small
    inputs = rounded("bfloat16", *inputs)
    out, expected = sa.scaled_dot_product_attention(*inputs), exact(*inputs)
    if which == 2 and magnitude > 1:
        assert_rounded(out[1, :, 3], expected[1, :, 3], magnitude)
        out[1, :, 3] = expected[1, :, 3] = 0
    assert_rounded(out, expected)


@pytest.mark.parametrize("at", OF_A_TILE)
@pytest.mark.parametrize("magnitude", [2.0**-24, 3 * 2.0**-24, 1023 * 2.0**-24, 2.0**-14, 65504.0])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_float16_from_the_smallest_to_the_largest(which, magnitude, at):
    inputs = arrays("float16")
    inputs[which][1, at, ::2] = magnitude
    inputs[which][1, at, 1::2] = -magnitude
    if magnitude > 1 and which != 2:
        inputs[1 - which] *= np.float16(2.0**-14)  # products stay ordinary
    out, expected = sa.scaled_dot_product_attention(*inputs), exact(*inputs)
    assert_rounded(out, expected, max(4, magnitude) if which == 2 else 4)


def test_float16_is_an_ulp_from_the_nearest_number_at_most():
    """Also next to 0, where values cancel: weights of two parts, or scores without the product of the second parts, would be up
    to twenty off."""
    for inputs in (arrays("float16", 2, 512, 1024, 64, 64), arrays("float16", 1, 128, 4096, 64, 64)):
        for options in ({}, {"is_causal": True}):
            found = sa.scaled_dot_product_attention(*inputs, **options)
            nearest = exact(*inputs, **options).astype(np.float16)
            ordered = [
                np.where(bits < 0, -(bits & 0x7FFF), bits)
                for bits in (x.view(np.int16).astype(np.int32) for x in (found, nearest))
            ]
            assert np.abs(ordered[0] - ordered[1]).max() <= 1
            # with float32 all the way 1 in 1000 lies so near to the middle of two numbers, 1 in 400 at 4096 keys
            assert np.mean(ordered[0] != ordered[1]) <= 0.005


@BOTH
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", OF_A_TILE)
def test_what_is_not_finite_reaches_the_same_results_as_with_multiply_adds(bad, which, at, dtype):
    inputs = arrays(dtype)
    inputs[which][0, at, 5] = bad
    mask = np.ones((100, 100), bool)
    mask[::3, at] = False
    for options in ({}, {"attn_mask": mask}):
        out = sa.scaled_dot_product_attention(*inputs, **options).astype(np.float64)
        _core._set_isa("avx512")
        expected = sa.scaled_dot_product_attention(*inputs, **options).astype(np.float64)
        _core._set_isa("amx")
        np.testing.assert_array_equal(np.isnan(out), np.isnan(expected))
        np.testing.assert_array_equal(np.isinf(out) * np.sign(out), np.isinf(expected) * np.sign(expected))
        finite = np.isfinite(expected)
        ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
        np.testing.assert_allclose(out[finite], expected[finite], rtol=ulp, atol=ulp * 2.0**-8)


@BOTH
def test_dropout_drops_the_same_pairs_as_with_multiply_adds(dtype):
    inputs = arrays(dtype, length=70, keys=99)
    out = sa.scaled_dot_product_attention(*inputs, dropout_p=0.4, rng=5).astype(np.float64)
    _core._set_isa("avx512")
    expected = sa.scaled_dot_product_attention(*inputs, dropout_p=0.4, rng=5).astype(np.float64)
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    np.testing.assert_allclose(out, expected, rtol=ulp, atol=ulp * 2.0**-8)


@BOTH
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 3, 17, 65])
def test_groups_of_heads_and_few_rows(heads, length, dtype):
    rng = np.random.default_rng(0)
    shapes = (1, heads[0], length, 32), (1, heads[1], 130, 32), (1, heads[1], 130, 32)
    inputs = rounded(dtype, *(rng.standard_normal(shape) for shape in shapes))
    out = sa.scaled_dot_product_attention(*inputs, enable_gqa=True)
    repeated = [inputs[0][0], *(np.repeat(x[0], heads[0] // heads[1], axis=0) for x in inputs[1:])]
    assert_rounded(out[0], exact(*repeated))


@BOTH
def test_blocks_by_multiply_adds_leave_the_others_alone(dtype):
    """Block masks with gaps, and the last six rows of a head, go through multiply-adds, beside blocks that do not."""
    inputs = arrays(dtype, heads=3, length=262, keys=200)
    pattern = np.ones((5, 5), bool)
    pattern[::2, 1::2] = False
    mask = sa.BlockMask.from_blocks(pattern, (64, 40))
    out = sa.scaled_dot_product_attention(*inputs, block_mask=mask, num_threads=1)
    dense = np.broadcast_to(mask.to_dense(262, 200), (3, 262, 200))
    assert_rounded(out, exact(*inputs, attn_mask=dense))


@BOTH
@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_same_bits_for_any_number_of_threads(threads, dtype):
    inputs = arrays(dtype, heads=6, length=150, keys=300)
    inputs[1][2, 70, 3] = {"float16": np.inf, "bfloat16": 2.0**60}[
        dtype
    ]  # one tile of one head by multiply-adds
    inputs[2][4, 10, 3] = np.inf
    one = sa.scaled_dot_product_attention(*inputs, num_threads=1)
    many = sa.scaled_dot_product_attention(*inputs, num_threads=threads)
    np.testing.assert_array_equal(one.view(np.uint16), many.view(np.uint16))


@BOTH
def test_weight_of_one_is_exact(dtype):
    """A row that attends one key gives that key's value, bit by bit."""
    query, key, value = arrays(dtype, length=64, keys=64)
    out = sa.scaled_dot_product_attention(query, key, value, attn_mask=np.eye(64, dtype=bool))
    np.testing.assert_array_equal(out.view(np.uint16), value.view(np.uint16))
    out = sa.scaled_dot_product_attention(query, key, value, window=(0, 0))
    np.testing.assert_array_equal(out.view(np.uint16), value.view(np.uint16))


@BOTH
@pytest.mark.parametrize("span", [4.0, 40.0, 400.0])
@pytest.mark.parametrize("large", [None, 10, 70, 250])
def test_maxima_that_grow_from_tile_to_tile(span, large, dtype):
    """The running maximum lags behind by less than 2^8, or follows where values of bfloat16 leave no room."""
    query, key, value = (
        x.astype(np.float32) for x in arrays(dtype, heads=1, length=64, keys=256, width=16, value_width=32)
    )
    key[0, :, 0] = np.linspace(-span, span, 256)
    query[0, :, 0] = np.where(np.arange(64) % 2, 2, -2)
    if large is not None:
        value[0, large] *= np.float32({"float16": 2.0**13, "bfloat16": 2.0**118}[dtype])
    query, key, value = rounded(dtype, query, key, value)
    for options in ({}, {"is_causal": True}, {"sinks": np.zeros(1, np.float32)}):
        out = sa.scaled_dot_product_attention(query, key, value, **options)
        expected = exact(query, key, value, **options)
        mean = exact(query, key, np.abs(value), **options)
        near = 2.0**-8 * np.abs(expected) + 2.0**-16 * mean
        if dtype == "float16":  # scores are below span, and as sums of 16 terms off by span·EPS each at most
            near = 2.0**-11 * np.abs(expected) + (16 * span + 256) * EPS * mean + 2.0**-25
        np.testing.assert_array_less(np.abs(out.astype(np.float64) - expected), near)


@BOTH
def test_gradients_after_a_maximum_that_lags(dtype):
    query, key, value = arrays(dtype, heads=1, length=64, keys=256, width=16, value_width=32)
    key[0, :, 0] = np.linspace(-9, 9, 256)
    query[0, :, 0] = 2
    gradients = []
    for isa in ("amx", "avx512"):
        _core._set_isa(isa)
        out, vjp = sa.scaled_dot_product_attention_vjp(query, key, value)
        gradients.append(vjp(np.ones_like(out)))
    ulp = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    for name in ("query", "key", "value"):
        one, other = (getattr(g, name).astype(np.float64) for g in gradients)
        np.testing.assert_allclose(one, other, rtol=ulp, atol=ulp / 8 * np.abs(other).max())
