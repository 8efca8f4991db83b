"""One to eight queries per key head, as in decoding: keys and values are read where they lie, 16 bits as they are."""

import numpy as np
import pytest
from inputs import BFLOAT16, FLOATS, byte_swapped, heads_inside, last_axis_strided, negative, unaligned
from tolerances import assert_attention, finfo

import selfattn as sa
from selfattn import reference

pytestmark = pytest.mark.usefixtures("isa")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def inputs(dtype, group=4, keys=150, width=64, value_width=64):
    rng = np.random.default_rng(width)
    shapes = ((2, 2 * group, 1, width), (2, 2, keys, width), (2, 2, keys, value_width))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 9])
def test_widths_around_a_vector_and_a_pair_of_them(dtype, group):
    for width, value_width in (
        (1, 33),
        (7, 32),
        (15, 16),
        (17, 31),
        (31, 8),
        (33, 130),
        (63, 1),
        (65, 4),
        (128, 15),
    ):
        q, k, v = inputs(dtype, group, 70, width, value_width)
        assert_attention(q, k, v, enable_gqa=True, what=f"{width}, {value_width}")


@dtypes
@pytest.mark.parametrize("keys", [32, 33, 63, 64, 65, 127, 129, 2049])
def test_numbers_of_keys_around_a_tile_and_in_chunks(dtype, keys):
    arrays = inputs(dtype, 4, keys, 40, 24)
    results = assert_attention(*arrays, enable_gqa=True, num_threads=1)
    again = sa.scaled_dot_product_attention(*arrays, enable_gqa=True, num_threads=2)
    np.testing.assert_array_equal(again, results[0])


@dtypes
def test_the_same_bits_from_any_memory(dtype):
    q, k, v = inputs(dtype, width=48, value_width=40)
    plain = sa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    layouts = {
        "rows far apart": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "rows longer than a page": lambda x: np.pad(x, ((0, 0), (0, 0), (0, 0), (0, 3000)))[
            ..., : x.shape[3]
        ],
        "backwards": lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
        "columns apart": last_axis_strided,
        "other byte order": byte_swapped,
        "unaligned": unaligned,
    }
    for name, layout in layouts.items():
        for keys, values in ((layout(k), layout(v)), (layout(k), v), (k, layout(v))):
            other = sa.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            np.testing.assert_array_equal(other, plain, err_msg=name)


@dtypes
def test_nothing_of_what_is_masked_is_seen(dtype):
    q, k, v = inputs(dtype, width=33, value_width=35)
    lengths = np.array([[0, 1], [77, 150]])[:, [0, 0, 0, 0, 1, 1, 1, 1]]
    clean = assert_attention(q, k, v, enable_gqa=True, key_lengths=lengths)
    mask = np.arange(150) % 3 != 1
    open_keys = assert_attention(q, k, v, mask, enable_gqa=True)
    for poison in (np.nan, np.inf, -np.inf):
        poisoned = [k.copy(), v.copy()]
        for x in poisoned:
            for head in np.ndindex(2, 2):
                x[head][lengths[head[0], 4 * head[1]] :] = poison
        got = sa.scaled_dot_product_attention(q, *poisoned, enable_gqa=True, key_lengths=lengths)
        np.testing.assert_array_equal(got, clean[0])
        for x, original in zip(poisoned, (k, v), strict=True):
            x[...] = original
            x[:, :, ~mask] = poison
        got = sa.scaled_dot_product_attention(q, *poisoned, mask, enable_gqa=True)
        # the careful kernel adds up in another order: an average of numbers of size 1, rounded once more
        error = np.abs(got.astype(np.float64) - open_keys[0].astype(np.float64)).max()
        assert error <= 8 * finfo(dtype).eps


@dtypes
def test_what_is_attended_shows(dtype):
    q, k, v = inputs(dtype)
    k[0, 0, 70, 5] = np.nan
    v[1, 1, 149, 3] = np.inf
    out = sa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert np.isnan(out[0, :4]).all() and np.isfinite(out[0, 4:]).all() and np.isfinite(out[1, :4]).all()
    assert (out[1, 4:, 0, 3] == np.inf).all() and np.isfinite(np.delete(out[1, 4:], 3, axis=-1)).all()


@dtypes
@pytest.mark.parametrize(
    "options",
    [{"softcap": 2.0}, {"window": (40, 0), "causal": "lower_right"}, {"alibi_slopes": np.linspace(0, 0.2, 8)}, {"sinks": np.linspace(-1, 1, 8)}],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_options_take_the_other_way_through_the_same_products(dtype, options):
    q, k, v = inputs(dtype, width=50, value_width=34)
    assert_attention(q, k, v, enable_gqa=True, **options)


# ---- bfloat16 from 256 keys on, with widths that are multiples of 32: on the matrix unit where there is one

LONG = {"keys": 600, "width": 64, "value_width": 96}


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("keys", [256, 257, 271, 319, 320, 512, 575, 2100])
def test_bfloat16_with_numbers_of_keys_around_16_and_256(group, keys):
    arrays = inputs(BFLOAT16, group, keys, 64, 32)
    results = assert_attention(*arrays, enable_gqa=True, num_threads=1)
    again = sa.scaled_dot_product_attention(*arrays, enable_gqa=True, num_threads=2)
    np.testing.assert_array_equal(again, results[0])


@pytest.mark.parametrize("group", [1, 2, 4])
def test_bfloat16_with_widths_of_one_to_nine_steps_of_32(group):
    for width, value_width in ((32, 160), (64, 128), (96, 96), (128, 64), (160, 32), (288, 288)):
        assert_attention(
            *inputs(BFLOAT16, group, 300, width, value_width), enable_gqa=True, what=f"{width}, {value_width}"
        )


def test_bfloat16_has_the_same_bits_from_any_memory():
    q, k, v = inputs(BFLOAT16, **LONG)
    plain = sa.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    for layout in (heads_inside, negative, last_axis_strided, byte_swapped, unaligned):
        for arrays in ((layout(q), k, v), (q, layout(k), v), (q, k, layout(v)), map(layout, (q, k, v))):
            got = sa.scaled_dot_product_attention(*arrays, enable_gqa=True)
            np.testing.assert_array_equal(got, plain, err_msg=layout.__name__)


@pytest.mark.parametrize(
    ("query", "key", "value", "scale"),
    [
        (2.0**45, 2.0**-45, 1, 0.125),
        (2.0**60, 2.0**-60, 1, 0.125),
        (2.0**-90, 2.0**90, 1, 0.125),
        (2.0**49, 2.0**-133, 1, 2.0**40),
        (2.0**110, 2.0**-128, 1, 2.0**15),  # subnormal keys, subnormal queries
        (2.0**-128, 2.0**110, 1, 2.0**15),
        (2.0**45, 2.0**100, 1, 2.0**-39),  # products beyond float32, scores within
        (1, 1, 2.0**-110, 0.125),
        (1, 1, 2.0**-128, 0.125),  # subnormal
        (1, 1, 2.0**70, 0.125),
        (1, 1, 2.0**120, 0.125),
    ],
)
def test_bfloat16_of_any_size(query, key, value, scale):
    factors = (query, key, value)
    arrays = [(x.astype(np.float32) * np.float32(f)).astype(BFLOAT16) for x, f in zip(inputs(BFLOAT16, **LONG), factors, strict=True)]  # fmt: skip
    got = sa.scaled_dot_product_attention(*arrays, scale=scale, enable_gqa=True).astype(np.float64)
    truth = reference.scaled_dot_product_attention(*(x.astype(np.float64) for x in arrays), scale=scale, enable_gqa=True)  # fmt: skip
    # two roundings of what is largest in a row, or a step between subnormal numbers
    bound = 2.0**-8 * np.abs(truth).max(axis=-1, keepdims=True) + 2.0**-133
    assert (np.abs(got - truth) <= bound).all()
    assert got.any()


def test_bfloat16_columns_of_zeros_and_what_is_not_finite():
    q, k, v = inputs(BFLOAT16, **LONG)
    v[..., 7] = 0
    out = assert_attention(q, k, v, enable_gqa=True)[0]
    assert (out[..., 7] == 0).all()
    v[0, 0, 300, 5], v[1, 1, 3, 6] = np.inf, np.nan
    out = sa.scaled_dot_product_attention(q, k, v, enable_gqa=True).astype(np.float32)
    assert (out[0, :4, 0, 5] == np.inf).all() and np.isnan(out[1, 4:, 0, 6]).all()
    assert (~np.isfinite(out)).sum() == 8  # and nowhere else
    k[0, 0, 300, 5] = np.nan
    out = sa.scaled_dot_product_attention(q, k, v, enable_gqa=True).astype(np.float32)
    assert np.isnan(out[0, :4]).all() and not np.isnan(out[0, 4:]).any()
