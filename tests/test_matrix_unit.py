"""Attention on the matrix unit, where the CPU has one: the sizes and the numbers at which it changes its ways.

A float32 is multiplied there as the sum of three bfloat16 (docs/decisions/0004). What three cannot hold exactly (NaN, infinities,
magnitudes beyond 2^126, and below 2^-100 but 0) goes through multiply-adds, tile by tile. Where all is bfloat16, queries and keys are
multiplied as they are (from 2^-80 to 2^50), the scale follows, and weights have two parts. The tests that go through all instruction
sets run here as well; these ones look at the seams.
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


# ---------------------------------------------------------------------------------------------------- bfloat16


def bfloat16(*xs):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from the package ml_dtypes")
    return [x.astype(ml_dtypes.bfloat16) for x in xs]


def wide(*xs):
    return [x.astype(np.float64) for x in xs]


def assert_rounded(out, expected, largest):
    """Within an ulp, and what 17 bits of a weight come to where values cancel: 2^-17 of the largest value."""
    assert out.dtype.name == "bfloat16"
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=2.0**-8, atol=2.0**-17 * largest)


@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 47, 64, 80])
@pytest.mark.parametrize("value_width", [15, 16, 17, 33, 80])
def test_bfloat16_widths_around_a_tile(width, value_width):
    inputs = bfloat16(*arrays(length=70, keys=70, width=width, value_width=value_width))
    assert_rounded(sa.scaled_dot_product_attention(*inputs), exact(*wide(*inputs)), 4)


@pytest.mark.parametrize("keys", [31, 32, 33, 47, 63, 64, 65, 97, 129])
@pytest.mark.parametrize("length", [17, 33, 49, 64, 65])
def test_bfloat16_lengths_around_a_tile(length, keys):
    inputs = bfloat16(*arrays(length=length, keys=keys))
    for options in ({}, {"is_causal": True}, {"causal": "lower_right", "window": (20, 3)}):
        assert_rounded(
            sa.scaled_dot_product_attention(*inputs, **options), exact(*wide(*inputs), **options), 4
        )


@pytest.mark.parametrize("width", [16, 40, 64])
def test_bfloat16_in_every_layout_gives_the_same_bits(width):
    inputs = bfloat16(*arrays(heads=2, length=66, keys=99, width=width, value_width=width))
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


@pytest.mark.parametrize("name", options_after_the_product(1, 1))
def test_bfloat16_scores_are_scaled_before_what_follows(name):
    inputs = bfloat16(*arrays(length=70, keys=99))
    options = options_after_the_product(70, 99)[name]
    assert_rounded(sa.scaled_dot_product_attention(*inputs, **options), exact(*wide(*inputs), **options), 4)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.02, 1.0, 2.0**-50, 2.0**-90, 2.0**45, 2.0**100])
def test_bfloat16_scales_of_every_kind(scale):
    query, key, value = arrays(length=70, keys=99)
    if scale > 1:  # scores stay ordinary
        query *= np.float32(2.0**-30) if scale == 2.0**45 else np.float32(2.0**-60)
        key *= np.float32(2.0**-15) if scale == 2.0**45 else np.float32(2.0**-40)
    inputs = bfloat16(query, key, value)
    out = sa.scaled_dot_product_attention(*inputs, scale=scale)
    assert_rounded(out, exact(*wide(*inputs), scale=scale), 4)


def test_bfloat16_lse_and_weights():
    inputs = bfloat16(*arrays(length=70, keys=99))
    out, lse, weights = sa.scaled_dot_product_attention(*inputs, return_lse=True, return_weights=True)
    expected, expected_lse, expected_weights = exact(*wide(*inputs), return_lse=True, return_weights=True)
    assert_rounded(out, expected, 4)
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2.0**-17)  # of a sum of weights of 17 bits
    np.testing.assert_allclose(weights.astype(np.float64), expected_weights, rtol=2.0**-8)


@pytest.mark.parametrize("at", OF_A_TILE)
@pytest.mark.parametrize("magnitude", [2.0**-133, 2.0**-126, 2.0**-81, 2.0**-80, 2.0**49, 2.0**50, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_bfloat16_magnitudes_at_the_bounds(which, magnitude, at):
    inputs = arrays()
    inputs[which][1, at, 3] = np.float32(magnitude)
    if magnitude > 1 and which != 2:
        inputs[1 - which][..., 3] *= np.float32(1 / magnitude)  # products stay small
    inputs = bfloat16(*inputs)
    out, expected = sa.scaled_dot_product_attention(*inputs), exact(*wide(*inputs))
    if which == 2 and magnitude > 1:
        assert_rounded(out[1, :, 3], expected[1, :, 3], magnitude)
        out[1, :, 3] = expected[1, :, 3] = 0
    assert_rounded(out, expected, 4)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", OF_A_TILE)
def test_bfloat16_that_is_not_finite_reaches_the_same_results_as_with_multiply_adds(bad, which, at):
    inputs = bfloat16(*arrays())
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
        np.testing.assert_allclose(out[finite], expected[finite], rtol=2.0**-7, atol=2.0**-15)


def test_bfloat16_dropout_drops_the_same_pairs_as_with_multiply_adds():
    inputs = bfloat16(*arrays(length=70, keys=99))
    out = sa.scaled_dot_product_attention(*inputs, dropout_p=0.4, rng=5).astype(np.float64)
    _core._set_isa("avx512")
    expected = sa.scaled_dot_product_attention(*inputs, dropout_p=0.4, rng=5).astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=2.0**-15)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 3, 17, 65])
def test_bfloat16_groups_of_heads_and_few_rows(heads, length):
    rng = np.random.default_rng(0)
    shapes = (1, heads[0], length, 32), (1, heads[1], 130, 32), (1, heads[1], 130, 32)
    inputs = bfloat16(*(rng.standard_normal(shape).astype(np.float32) for shape in shapes))
    out = sa.scaled_dot_product_attention(*inputs, enable_gqa=True)
    repeated = [wide(inputs[0])[0], *(np.repeat(x, heads[0] // heads[1], axis=1) for x in wide(*inputs[1:]))]
    assert_rounded(out, exact(*repeated), 4)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bfloat16_the_same_bits_for_any_number_of_threads(threads):
    inputs = bfloat16(*arrays(heads=6, length=150, keys=300))
    inputs[1][2, 70, 3] = 2.0**60  # one tile of one head by multiply-adds
    inputs[2][4, 10, 3] = np.inf
    one = sa.scaled_dot_product_attention(*inputs, num_threads=1)
    many = sa.scaled_dot_product_attention(*inputs, num_threads=threads)
    np.testing.assert_array_equal(one.view(np.uint16), many.view(np.uint16))


def test_bfloat16_weight_of_one_is_exact():
    """A row that attends one key gives that key's value, bit by bit."""
    query, key, value = bfloat16(*arrays(length=64, keys=64))
    out = sa.scaled_dot_product_attention(query, key, value, attn_mask=np.eye(64, dtype=bool))
    np.testing.assert_array_equal(out.view(np.uint16), value.view(np.uint16))
    out = sa.scaled_dot_product_attention(query, key, value, window=(0, 0))
    np.testing.assert_array_equal(out.view(np.uint16), value.view(np.uint16))


@pytest.mark.parametrize("span", [4.0, 40.0, 400.0])
@pytest.mark.parametrize("large", [None, 10, 70, 250])
def test_bfloat16_maxima_that_grow_from_tile_to_tile(span, large):
    """The running maximum lags behind by less than 2^8, or follows where values leave no room."""
    query, key, value = arrays(heads=1, length=64, keys=256, width=16, value_width=32)
    key[0, :, 0] = np.linspace(-span, span, 256)
    query[0, :, 0] = np.where(np.arange(64) % 2, 2, -2)
    if large is not None:
        value[0, large] *= np.float32(2.0**118)
    inputs = bfloat16(query, key, value)
    for options in ({}, {"is_causal": True}, {"sinks": np.zeros(1, np.float32)}):
        out = sa.scaled_dot_product_attention(*inputs, **options)
        q, k, v = wide(*inputs)
        near = 2.0**-8 * np.abs(exact(q, k, v, **options)) + 2.0**-16 * exact(q, k, np.abs(v), **options)
        np.testing.assert_array_less(np.abs(out.astype(np.float64) - exact(q, k, v, **options)), near)


def test_bfloat16_gradients_after_a_maximum_that_lags():
    query, key, value = arrays(heads=1, length=64, keys=256, width=16, value_width=32)
    key[0, :, 0] = np.linspace(-9, 9, 256)
    query[0, :, 0] = 2
    inputs = bfloat16(query, key, value)
    gradients = []
    for isa in ("amx", "avx512"):
        _core._set_isa(isa)
        out, vjp = sa.scaled_dot_product_attention_vjp(*inputs)
        gradients.append(vjp(np.ones_like(out)))
    for name in ("query", "key", "value"):
        one, other = (getattr(g, name).astype(np.float64) for g in gradients)
        np.testing.assert_allclose(one, other, rtol=2.0**-7, atol=2.0**-10 * np.abs(other).max())
