"""One to eight queries per key head by products of pairs of bfloat16, where the CPU has them.

Keys are read in pairs as they lie, values two rows at a time, and weights are rounded to bfloat16 (docs/decisions/0006, 0007). What
pairs cannot hold is found by its results, and then the block goes through multiply-adds. test_decode.py has what all dtypes share.
"""

import numpy as np
import pytest
from inputs import BFLOAT16, LAYOUTS, OPTIONS, options_together, random_inputs
from tolerances import assert_attention

import selfattn as sa
from selfattn import _core

pytestmark = pytest.mark.usefixtures("by_pairs")


def arrays(length=1, keys=100, width=48, value_width=48, heads=3, seed=0, **options):
    return random_inputs(
        (heads, length, width), keys, dtype=BFLOAT16, v_width=value_width, seed=seed, **options
    )


def times(x, power):
    return (x.astype(np.float64) * 2.0**power).astype(BFLOAT16)


def attention(*arguments, **options):
    return sa.scaled_dot_product_attention(*arguments, **options)


def by_multiply_adds(*arguments, **options):
    """With weights in float32, as without such products."""
    _core._set_isa("avx512")
    out = attention(*arguments, **options)
    _core._set_isa("avx512bf16")
    return out


def assert_close(out, expected, largest=None):
    """Equal where not finite, else within what rounding weights makes of values of that size."""
    out, expected = (x.astype(np.float64) for x in (out, expected))
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    largest = np.abs(expected[finite]).max(initial=0) if largest is None else largest
    np.testing.assert_allclose(out[finite], expected[finite], rtol=2.0**-7, atol=2.0**-8 * largest)


ROWS = pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8])


@ROWS
def test_they_are_used(length):
    inputs = arrays(length, 640, 128, 128)
    assert (attention(*inputs) != by_multiply_adds(*inputs)).any()


@ROWS
@pytest.mark.parametrize("width", [16, 17, 31, 32, 33, 63, 64, 130])
def test_widths_around_a_step(length, width):
    for value_width in (1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 128, 129, 161, 200):
        assert_attention(*arrays(length, 70, width, value_width), what=str(value_width))


@ROWS
@pytest.mark.parametrize(
    "keys", [32, 33, 35, 36, 37, 47, 48, 49, 63, 64, 65, 71, 72, 73, 95, 96, 97, 128, 2049, 2055]
)
def test_a_last_group_of_keys(length, keys):
    """Pairs are of keys 2, 4, 8 or 16 apart, and where tiles are masked of neighbours: some have no partner."""
    inputs = arrays(length, keys)
    assert_attention(*inputs)
    assert_attention(*inputs, softcap=3.0)
    one, two = (attention(*inputs, num_threads=n) for n in (1, 2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("heads", [(4, 2), (6, 2), (8, 2), (4, 1), (10, 2), (8, 1)])
def test_heads_that_share_a_key_head(heads):
    inputs = arrays(1, 200, 64, 64, heads=heads[0], key_heads=heads[1])
    assert_attention(*inputs, enable_gqa=True)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("length", [1, 4, 8])
def test_every_layout_gives_the_same_bits(name, length):
    inputs = arrays(length, 99, 41, 40)
    for options in ({}, {"softcap": 3.0}):
        expected = attention(*inputs, **options).view(np.uint16)
        for which in range(3):
            changed = [LAYOUTS[name](x) if n == which else x for n, x in enumerate(inputs)]
            np.testing.assert_array_equal(attention(*changed, **options).view(np.uint16), expected)


@pytest.mark.parametrize("length", [1, 3, 4, 8])
@pytest.mark.parametrize(
    "names", [(name,) for name in OPTIONS] + [("softcap", "dropout", "is_causal", "sinks")], ids="+".join
)
def test_options(names, length):
    inputs = arrays(length, 170)
    options = options_together(names, (3,), length, 170, np.random.default_rng(1))
    assert_attention(*inputs, **options)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.02, 3.0, 2.0**-50, 2.0**38, 2.0**45])
def test_scales_of_every_kind(scale):
    query, key, value = arrays(2)
    power = -round(np.log2(scale)) / 2 if scale > 4 else 0  # scores stay ordinary
    assert_attention(times(query, power), times(key, power), value, scale=scale)


@pytest.mark.parametrize("power", [-126, -120, -61, 49, 50, 51, 100, 126])
def test_queries_and_keys_of_any_size(power):
    """A column of the queries times a power of two, of the keys times its inverse: the products are the same."""
    query, key, value = arrays(3)
    query[..., 3] = times(query[..., 3], power)
    key[..., 3] = times(key[..., 3], -power)
    assert_attention(query, key, value)


@pytest.mark.parametrize("at", [0, 40, 64, 99])
@pytest.mark.parametrize("power", [-133, -126, -61, 100, 127])
def test_a_value_of_any_size(power, at):
    inputs = arrays(3)
    inputs[2][:, at, 3] = 2.0**power
    assert_attention(*inputs)


@pytest.mark.parametrize("power", [-133, -126, -110, -100, -90, 100, 120])
def test_values_of_any_size(power):
    """So small that an instruction which takes subnormal numbers for 0 would lose them: found by the output."""
    query, key, value = arrays(2)
    expected = attention(query, key, value).astype(np.float64) * 2.0**power
    out = attention(query, key, times(value, power))
    np.testing.assert_allclose(
        out.astype(np.float64), expected, rtol=2.0**-7, atol=2.0**-7 * np.abs(expected).max() + 2.0**-132
    )


@pytest.mark.parametrize("power", [-133, -126, -110])
@pytest.mark.parametrize("width", [1, 5, 16, 17, 31, 33])
def test_a_small_last_column(width, power):
    """Columns are looked at by vectors, and those behind the last whole one."""
    query, key, value = arrays(2, value_width=width)
    expected = attention(query, key, value)[..., -1].astype(np.float64) * 2.0**power
    value[..., -1] = times(value[..., -1], power)
    out = attention(query, key, value)[..., -1].astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=2.0**-7 * np.abs(expected).max() + 2.0**-132)


@ROWS
@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_sum_that_leaves_float32_without_its_scale(length, options, sign):
    """The score of key 0 is finite, and without scale its first terms are not: -inf would pass for a closed pair."""
    query, key, value = arrays(length, 40, 64, 32)
    query[...], key[...] = 1, 0
    key[:, 0, [0, 1]] = -2e38 * sign
    key[:, 0, [2, 4, 6]] = 1e38 * sign
    key[:, 0, [8, 10, 12, 14]] = 0.7e38 * sign
    assert_close(
        attention(query, key, value, **options), by_multiply_adds(query, key, value, **options), largest=1
    )


@pytest.mark.parametrize("columns", [slice(3, 4), slice(0, 40), slice(None)])
def test_columns_of_zeros(columns):
    query, key, value = arrays(2)
    full = attention(query, key, value)
    value[..., columns] = 0
    out = attention(query, key, value)
    assert (out[..., columns] == 0).all()
    others = np.delete(np.arange(48), np.arange(48)[columns])
    assert_close(out[..., others], full[..., others])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 64, 99])
def test_what_is_not_finite_reaches_the_same_results_as_by_multiply_adds(bad, which, at):
    inputs = arrays(3)
    inputs[which][0, at if which else 1, 5] = bad
    mask = np.ones((3, 100), bool)
    mask[::2, at] = False
    for options in ({}, {"attn_mask": mask}):
        out, expected = (f(*inputs, **options) for f in (attention, by_multiply_adds))
        assert_close(out, expected, largest=1 if np.isfinite(bad) and which == 2 else None)


@pytest.mark.parametrize("at", [0, 63, 64, 99])
@pytest.mark.parametrize("poison", [np.nan, np.inf, 2.0**127])
def test_weights_are_rounded_alike_whatever_a_closed_key_holds(at, poison):
    """That block goes through multiply-adds, and all but a few results are the same to the last bit."""
    inputs = arrays(4, heads=40)
    mask = np.arange(100) != at
    clean = attention(*inputs, mask)
    float32_weights = by_multiply_adds(*inputs, mask)
    inputs[1][:, at, 5] = inputs[2][:, at, 7] = poison
    found = attention(*inputs, mask)
    assert np.mean(found != clean) < 0.02 < np.mean(float32_weights != clean)


def test_a_row_that_is_closed_or_whose_weights_are_dropped():
    inputs = arrays(2)
    mask = np.ones((2, 100), bool)
    mask[1] = False
    out = assert_attention(*inputs, mask)[0]
    assert (out[:, 1] == 0).all() and (out[:, 0] != 0).any()
    assert (attention(*inputs, dropout_p=1.0, rng=3) == 0).all()


@pytest.mark.parametrize("other", [np.float16, np.float32])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_arrays_of_other_dtypes(which, other):
    """Not by pairs then, and weights stay in float32."""
    inputs = list(arrays(2))
    inputs[which] = inputs[which].astype(other)
    np.testing.assert_array_equal(attention(*inputs), by_multiply_adds(*inputs))


def test_more_keys_than_the_scratch_keeps():
    assert_attention(*arrays(2, 4200, 512, 512, heads=1))


def test_a_cache_that_grows():
    """As KVCache hands them over: one more key a step, past the ends of tiles."""
    rng = np.random.default_rng(3)
    query, key, value = (rng.standard_normal((1, 2, n, 64)).astype(BFLOAT16) for n in (1, 140, 140))
    cache = sa.KVCache(1, 2, 64, dtype=BFLOAT16)
    for step in range(140):
        cache.append(key[:, :, step : step + 1], value[:, :, step : step + 1])
        out = cache.attend(query)
        np.testing.assert_array_equal(out, attention(query, key[:, :, : step + 1], value[:, :, : step + 1]))
