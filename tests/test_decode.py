"""One to four queries per key head, as in decoding: keys and values are read where they lie, 16 bits as they are."""

import numpy as np
import pytest
from inputs import FLOATS, byte_swapped, last_axis_strided, unaligned
from tolerances import assert_attention, finfo

import selfattn as sa

pytestmark = pytest.mark.usefixtures("isa")
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=str)


def inputs(dtype, group=4, keys=150, width=64, value_width=64):
    rng = np.random.default_rng(width)
    shapes = ((2, 2 * group, 1, width), (2, 2, keys, width), (2, 2, keys, value_width))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5])
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
