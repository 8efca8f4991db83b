"""Every instruction set against float64, forward and backward, at sizes where kernels switch paths.

Kernels depend on the number of rows (kernels for 1 to 8 rows read keys in place), on tiles of 64 keys and on vectors of
2 to 32 numbers. Numbers that bfloat16 or a sum of three can represent are multiplied as bfloat16 pairs or on the matrix
unit, tiles with other numbers by multiply-adds (docs/decisions/0004, 0006, 0007). So the cases are sizes around these,
every layout, every option, numbers at the bounds of what fits, and what is not finite. `check` runs a case on all
instruction sets and holds each to the bounds of tolerances.py and gradients.py. What does not depend on the instruction
set is tested elsewhere, on one set.
"""

import itertools

import numpy as np
import pytest
from gradients import FIELDS, everything, true_gradients
from inputs import (
    BFLOAT16,
    FLOAT_IDS,
    FLOATS,
    LAYOUTS,
    SETS_OF_OPTIONS,
    covering,
    heads_inside,
    normal,
    options_together,
    random_inputs,
)
from instruction_sets import ISAS, check, closing, using
from tolerances import assert_within, rounding

import selfattn as sa

attend, attend_vjp = sa.scaled_dot_product_attention, sa.scaled_dot_product_attention_vjp
pytestmark = pytest.mark.usefixtures("one_thread")
floats = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
IN_TILES = [0, 40, 64, 99]  # places among 100 keys: in the first tile, in the second, at its end


def assert_same_bits(function, calls):
    """Assert that on each instruction set all calls of the function, (arguments, options), return the same bits."""
    for isa in ISAS:
        with using(isa):
            results = [function(*arguments, **options) for arguments, options in calls]
        results = [[np.ascontiguousarray(x).tobytes() for x in result] for result in results]
        for (_, options), result in zip(calls, results, strict=True):
            assert result == results[0], (isa, options)


def attended(*arrays, **options):
    return [attend(*arrays, **options)]


def differentiated(query, key, value, grad_out=None, **options):
    """The output and all gradients."""
    out, pullback = attend_vjp(query, key, value, **options, wrt=everything(options))
    return [out, *(x for x in pullback(out if grad_out is None else grad_out) if x is not None)]


def inputs(dtype, length=100, keys=100, width=48, value_width=48, heads=2, **options):
    return list(random_inputs((heads, length, width), keys, dtype=dtype, v_width=value_width, **options))


def scaled(x, factor):
    """Return x times a number, rounded to x's dtype."""
    return (x.astype(np.float64) * factor).astype(x.dtype)


def test_sizes_at_which_kernels_change_their_way():
    """All pairs; csrc/tests/vectors has more sizes."""
    cases = covering(
        dtype=FLOATS,
        length=[1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 49, 63, 64, 65, 129],
        keys=[1, 16, 31, 32, 33, 47, 63, 64, 65, 72, 97, 129, 191],
        width=[1, 8, 15, 16, 17, 31, 32, 33, 64, 80, 128, 130],
        value_width=[1, 4, 15, 16, 17, 31, 33, 65, 80, 128, 161],
        heads=[(2, None), (4, 2), (8, 2), (6, 1)],
        options=[{}, {}, {"is_causal": True}, {"causal": "lower_right", "window": (20, 3)}, {"softcap": 3.0}],
    )
    for case in cases:
        heads, key_heads = case.pop("heads")
        options = case.pop("options") | {"enable_gqa": key_heads is not None}
        check(inputs(**case, heads=heads, key_heads=key_heads), options, what=f"{options}")


def test_few_queries_of_many_keys():
    """Keys are split into chunks; on the matrix unit, bfloat16 also in steps of 16, 32 and 256."""
    cases = covering(
        dtype=FLOATS,
        heads=[(1, 1), (2, 1), (4, 1), (7, 1), (8, 1), (9, 1)],
        keys=[255, 256, 257, 320, 575, 2055, 4100],
        widths=[(32, 160), (64, 64), (96, 128), (128, 32), (40, 24), (288, 288)],
        options=[
            {},
            {},
            {"dropout_p": 0.5, "rng": 7},
            {"dropout_p": 0.1, "rng": 2**64 + 5, "window": (3000, 2)},
        ],
    )
    for case in cases:
        heads, key_heads = case["heads"]
        width, value_width = case["widths"]
        arrays = inputs(case["dtype"], 1, case["keys"], width, value_width, heads, key_heads=key_heads)
        check(arrays, case["options"] | {"enable_gqa": True}, backward=False)


SLIDING = {"causal": "lower_right", "window": (2190, 0)}  # the first key is inside of a tile


@pytest.mark.parametrize(
    ("dtype", "length", "keys", "width", "options"),
    [
        (np.float32, 20, 5500, 100, {}),
        (BFLOAT16, 2, 4200, 512, {}),
        (np.float32, 20, 1100, 1024, {"attn_mask": "shared", "dropout_p": 0.2, "rng": 3}),
        (BFLOAT16, 20, 2300, 1024, {"attn_mask": "shared"} | SLIDING),
        (np.float64, 12, 1100, 500, {"attn_mask": "shared", "softcap": 3.0}),
    ],
    ids=str,
)
def test_more_keys_than_the_scratch_keeps(dtype, length, keys, width, options):
    """Copies of keys and values beyond 4 MiB are made again. Heads are interleaved in memory, and those that share a
    mask take turns.
    """
    arrays = [heads_inside(x) for x in inputs(np.dtype(dtype), length, keys, width, width)]
    if "attn_mask" in options:
        mask = np.random.default_rng(0).standard_normal((length, keys)).astype(np.float32)
        options = options | {"attn_mask": mask}
    check(arrays, options | {"scale": 0.02})


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (np.float16, {"is_causal": True}),
        (BFLOAT16, {}),
        (BFLOAT16, {"window": (100, 50), "causal": "lower_right"}),
        (np.float32, {}),
        (np.float32, {"is_causal": True}),
        (np.float64, {"window": (100, 50), "causal": "lower_right"}),
    ],
    ids=str,
)
def test_rows_and_keys_of_one_head_in_parts(dtype, options):
    check(inputs(np.dtype(dtype), 1100, 900, 24, 24, heads=1), options)


# ------------------------------------------------------------------------------------------ options and layouts


@floats
def test_options_alone_and_together(dtype):
    """Each set of options meets each of four sizes in one of the four dtypes."""
    for n, names in enumerate(SETS_OF_OPTIONS):
        sizes = [(1 + n % 4, 170), (4 + n % 5, 97), (70, 170), (130, 67)]
        length, keys = sizes[(n + FLOATS.index(dtype)) % 4]
        options = options_together(names, (4,), length, keys, np.random.default_rng(n))
        arrays = inputs(dtype, length, keys, 41, 33, heads=4, key_heads=2)
        check(arrays, options | {"enable_gqa": True}, what=f"{names}")


@floats
def test_every_layout_has_the_same_bits(dtype):
    sizes = [(1, 99, 41, 40), (1, 600, 64, 96), (4, 99, 16, 17), (66, 99, 41, 40)]
    for length, keys, width, value_width in sizes:
        given = inputs(dtype, length, keys, width, value_width)
        given.append(normal(np.random.default_rng(5), (2, length, value_width), dtype))
        others = [
            [layout(x) if n in which else x for n, x in enumerate(given)]
            for layout in LAYOUTS.values()
            for which in ((0,), (1,), (2,), (3,), (1, 2), (0, 1, 2, 3))
        ]
        for options in ({}, {"softcap": 3.0}):
            assert_same_bits(attended, [(arrays[:3], options) for arrays in [given, *others]])
        assert_same_bits(differentiated, [(arrays, {}) for arrays in [given, *others]])


@floats
def test_the_same_bits_for_any_number_of_threads(dtype):
    for shape, keys, options in [
        ((6, 150, 16), 300, {}),
        ((1, 700, 32), 600, {"is_causal": True}),
        ((2, 40, 16), 200, {"dropout_p": 0.3, "rng": 5, "window": (30, 3)}),
        ((2, 1, 64), 9000, {}),
        ((8, 1, 64), 6000, {"key_lengths": np.arange(8) * 800, "softcap": 2.0}),
    ]:
        arrays = random_inputs(shape, keys, dtype=dtype)
        arrays[1][0, 70, 3] = 1e-38 if dtype.itemsize > 2 else 2.0**-20  # multiply-adds compute that tile
        arrays[2][0, 20, 3] = np.inf
        for function, threads in ((attended, (1, 7)), (differentiated, (1, 2, 7))):
            assert_same_bits(function, [(arrays, options | {"num_threads": n}) for n in threads])


@floats
@pytest.mark.parametrize("length", [17, 37, 63, 101])
def test_a_last_row_without_a_neighbour(dtype, length):
    """The last row's neighbour in a pair is no query, and a mask of 300 makes that neighbour's score exceed float32."""
    check(inputs(dtype, length, 70), {"attn_mask": np.full((length, 70), 300, np.float32)})


@floats
@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_heads_that_share_a_mask_begin_with_the_last_rows(dtype, rows):
    """The last range of a head's rows is short, and may be computed first: that range then also loads new keys and
    values.
    """
    arrays = inputs(dtype, 64 + rows, 100, 32, 32)
    mask = normal(np.random.default_rng(2), (64 + rows, 100), np.float32)
    for options in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}):
        check(arrays, options)


@floats
def test_block_masks_with_gaps(dtype):
    gaps = np.ones((5, 5), bool)
    gaps[::2, 1::2] = False
    short_before_long = np.array([[1, 0], [0, 1], [1, 1]], bool)
    for pattern, sizes, (length, keys) in [
        (gaps, (64, 40), (262, 200)),
        (short_before_long, (16, 32), (48, 64)),
    ]:
        mask = sa.BlockMask.from_blocks(pattern, sizes)
        for seed in range(3):  # memory from earlier calls holds other values
            check(inputs(dtype, length, keys, seed=seed), {"block_mask": mask})


# Numbers near the least and the largest, and near those that three bfloat16 or products of pairs can no longer
# represent.
MAGNITUDES = {
    "float16": [2.0**-24, 1023 * 2.0**-24, 2.0**-14, 65504.0],
    "bfloat16": [2.0**n for n in (-133, -126, -81, -80, -61, -60, 49, 50, 51, 100, 127)],
    "float32": [2.0**n for n in (-149, -130, -101, -100, 60, 126, 127)],
    "float64": [2.0**n for n in (-1074, -1022, -100, 60, 1022)],
}


def differentiable(magnitude):
    """Return whether products of gradients of this size are normal numbers of float32."""
    return 2.0**-102 < magnitude < 2.0**61


@floats
def test_one_number_of_any_size(dtype):
    for case in covering(magnitude=MAGNITUDES[dtype.name], at=IN_TILES, which=[0, 1, 2], length=[3, 100]):
        magnitude, at, which, length = case.values()
        arrays = inputs(dtype, length)
        arrays[which][1, at % arrays[which].shape[1], 3] = magnitude
        if magnitude > 1 and which != 2:  # products stay small
            arrays[1 - which][..., 3] = scaled(arrays[1 - which][..., 3], 1 / magnitude)
        check(arrays, backward=magnitude < 2.0**61, what=f"{case}")


@floats
@pytest.mark.parametrize("length", [2, 70])
def test_all_numbers_of_any_size(dtype, length):
    """Values or the gradient of the output are scaled; or a column of the queries, and by the inverse that column of
    the keys.
    """
    grad_out = normal(np.random.default_rng(5), (2, length, 48), dtype)
    for magnitude in MAGNITUDES[dtype.name]:
        query, key, value = inputs(dtype, length, 99)
        of_value = [query, key, scaled(value, magnitude / 8)]
        check(of_value, backward=differentiable(magnitude), what=f"value {magnitude}")
        if differentiable(magnitude):
            of_grad_out = scaled(grad_out, magnitude / 8)
            check([query, key, value], grad_out=of_grad_out, what=f"grad_out {magnitude}")
        if differentiable(magnitude) and dtype != np.float16:
            query[..., 3] = scaled(query[..., 3], magnitude)
            key[..., 3] = scaled(key[..., 3], 1 / magnitude)
            check([query, key, value], what=f"column {magnitude}")


SCALES = [0.0, -0.3, -3.0, 0.02, 1.0, 2.0**-90, 2.0**-50, 2.0**38, 2.0**45, 2.0**100]


def test_scales_of_every_kind():
    for case in covering(dtype=FLOATS, scale=SCALES, length=[2, 70]):
        dtype, scale, length = case.values()
        query, key, value = inputs(dtype, length, 99)
        if scale > 4:  # scores stay ordinary
            query, key = scaled(query, scale**-0.5), scaled(key, scale**-0.5)
        check([query, key, value], {"scale": scale}, backward=scale < 2.0**50, what=f"{case}")


@floats
@pytest.mark.parametrize("width", [1, 5, 16, 17, 31, 33])
def test_a_small_last_column(dtype, width):
    """Kernels read whole vectors of columns, and the remaining columns alone; if all numbers are 0, so is the
    result.
    """
    for length, magnitude in itertools.product(
        (2, 40), (0, MAGNITUDES[dtype.name][0], MAGNITUDES[dtype.name][1])
    ):
        arrays = inputs(dtype, length, value_width=width)
        arrays[2][..., -1] = scaled(arrays[2][..., -1], magnitude)
        check(arrays, backward=False, what=f"{magnitude}")
        if magnitude == 0:
            assert not attend(*arrays)[..., -1].any()


@floats
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 40])
def test_a_sum_that_leaves_float32_without_its_scale(dtype, length):
    """The score of key 0 is finite, and without scale its first terms are not: -inf would pass for a closed pair."""
    if dtype == np.float16:
        pytest.skip("no such numbers")
    for sign, options, isa in itertools.product((1, -1), ({}, {"softcap": 500.0}), ISAS):
        query, key, value = inputs(dtype, length, 40, 64, 32)
        query[...], key[...] = 1, 0
        key[:, 0, [0, 1]] = -2e38 * sign
        key[:, 0, [2, 4, 6]] = 1e38 * sign
        key[:, 0, [8, 10, 12, 14]] = 0.7e38 * sign  # now the score of key 0 is sign * 1.8e38 / 8
        with using(isa):
            out = attend(query, key, value, **options).astype(np.float64)
        rest = value[:, 1:].astype(np.float64).mean(axis=1, keepdims=True)
        expected = value[:, :1].astype(np.float64) if sign > 0 else rest
        limit = 2.0**-8 if dtype == BFLOAT16 else 40 * np.finfo(dtype).eps
        np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=0, atol=limit)


def test_maxima_that_grow_from_tile_to_tile():
    """The running maximum may be too small by a factor below 2^8, but is exact if values leave no room for that."""
    cases = covering(
        dtype=FLOATS,
        span=[4.0, 40.0, 400.0],
        large=[None, 10, 70, 250],
        length=[2, 64],
        options=[{}, {"is_causal": True}, {"sinks": np.zeros(2, np.float32)}],
    )
    for case in cases:
        dtype, span, large, length, options = case.values()
        query, key, value = inputs(dtype, length, 256, 16, 32)
        key[..., 0] = np.linspace(-span, span, 256)
        query[..., 0] = np.where(np.arange(length) % 2, 2, -2)
        if large is not None:
            most = {"float16": 2.0**13, "bfloat16": 2.0**118}.get(dtype.name, 2.0**60)
            value[:, large] = scaled(value[:, large], most)
        backward = large is None or dtype.name != "bfloat16"
        check([query, key, value], options, backward=backward, what=f"{case}")


def test_weights_too_small_for_three_parts():
    """Scores go from 0 down to -140 in base 2: the last weights' parts are subnormal, and large values compensate."""
    query, key, value = (np.zeros((1, n, 16), np.float32) for n in (32, 128, 128))
    query[..., 0] = 1
    key[0, :, 0] = -np.log(2) * np.linspace(0, 140, 128)
    value[0] = np.exp2(np.minimum(100, np.linspace(0, 140, 128)))[:, None]
    check([query, key, value], {"scale": 1.0})


@floats
def test_a_weight_of_one_is_exact(dtype):
    """A row that attends to one key gives that key's value, bit by bit."""
    query, key, value = inputs(dtype, 64, 64)
    for options in ({"attn_mask": np.eye(64, dtype=bool)}, {"window": (0, 0)}):
        for isa in ISAS:
            with using(isa):
                assert attend(query, key, value, **options).tobytes() == value.tobytes(), isa


SEEN_BY_SOME = [
    {},
    {"is_causal": True},
    {"window": (2, 2), "causal": "lower_right"},
    {"softcap": 3.0},
    {"dropout_p": 0.5, "rng": 3},
    {"sinks": np.ones(2), "attn_mask": np.arange(100) % 3 > 0},
]


def test_what_is_not_finite_reaches_what_attends_it():
    cases = covering(
        dtype=FLOATS * 2,
        bad=[np.nan, -np.nan, np.inf, -np.inf],
        at=IN_TILES,
        which=[0, 1, 2, 3],
        options=SEEN_BY_SOME,
        length=[1, 4, 100],
    )
    for case in cases:
        dtype, bad, at, which, options, length = case.values()
        given = [*inputs(dtype, length), normal(np.random.default_rng(5), (2, length, 48), dtype)]
        given[which][0, at % given[which].shape[1], 5] = bad
        check(given[:3], options, backward=False, what=f"{case}")
        for isa in ISAS:
            with using(isa):
                assert_same_as_float64(given, options, f"{isa} {case}")


def assert_same_as_float64(given, options, what):
    """Gradients are NaN or infinite exactly where float64's are not finite; the others are within their bounds.

    The bounds are those of the same arrays with 0 for what is not finite, plus the rounding of the exact gradient.
    """
    *arrays, grad_out = given
    got = attend_vjp(*arrays, **options)[1](grad_out)
    _, pullback = sa.reference.scaled_dot_product_attention_vjp(*arrays, **options, compute_dtype=np.float64)
    *clean, clean_grad_out = (np.where(np.isfinite(x), x, 0).astype(x.dtype) for x in given)
    limits = true_gradients(clean, options, clean_grad_out)
    for name, exact in zip(FIELDS[:3], pullback(grad_out.astype(np.float64)), strict=False):
        gradient, finite = getattr(got, name).astype(np.float64), np.isfinite(exact)
        np.testing.assert_array_equal(np.isfinite(gradient), finite, err_msg=f"{name} {what}")
        limit = limits[name].limit + rounding(limits[name].dtype, exact)
        assert_within(np.where(finite, gradient, exact), exact, limit, f"{name} {what}")


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_weight_stays_out_of_tiles_of_multiply_adds(isa):
    """Rows 37 to 53 attend to the NaN, but to no key of the second tile, which needs multiply-adds."""
    given = [*inputs(BFLOAT16), normal(np.random.default_rng(5), (2, 100, 48), BFLOAT16)]
    given[1][:, 45, 5] = np.nan
    given[1][:, 70, 3] = 2.0**-70
    with using(isa):
        assert_same_as_float64(given, {"window": (8, 8)}, isa)


def test_numbers_of_closed_keys_do_not_count():
    cases = covering(
        dtype=FLOATS * 2,
        bad=[np.nan, np.inf, -np.inf, 2.0**127, 1e-38],
        at=[[0], IN_TILES, range(40, 100)],
        how=list(closing(1, np.zeros(100, bool))),
        which=[(1,), (2,), (1, 2)],
        length=[1, 4, 100],
    )
    for case in cases:
        dtype, bad, at, name, which, length = case.values()
        closed = np.zeros(100, bool)
        closed[at] = True
        options = closing(length, closed)[name]
        hidden = (
            np.arange(100) >= np.array([[90], [33]])
            if "lengths" in name
            else np.broadcast_to(closed, (2, 100))
        )
        clean = inputs(dtype, length)
        arrays = [x.copy() for x in clean]
        with np.errstate(over="ignore"):
            for n in which:
                arrays[n][hidden] = bad
        check(arrays, options, clean=clean, what=f"{case}")


@floats
@pytest.mark.parametrize("padding", [2.0**60, 1e-30, np.nan])
def test_numbers_of_padding_change_no_bit(dtype, padding):
    lengths = np.array([90, 33])
    clean = inputs(dtype, 70, 200)
    padded = [x.copy() for x in clean]
    with np.errstate(over="ignore"):
        for x in padded[1:]:
            x[np.arange(200) >= lengths[:, None]] = padding
    assert_same_bits(differentiated, [(arrays, {"key_lengths": lengths}) for arrays in (clean, padded)])


@pytest.mark.parametrize("isa", ISAS)
def test_products_that_overflow_do_what_arithmetic_does(isa):
    """V·dO is beyond float32 although both fit: dS is infinite or NaN, and dV stays finite."""
    query, key, value = inputs(np.float32, 40, 70)
    grad_out = normal(np.random.default_rng(5), (2, 40, 48), np.float32)
    value[0, 33, 0] = grad_out[0, 20, 0] = 2.0**90
    with using(isa):
        dq, dk, dv = attend_vjp(query, key, value)[1](grad_out)
    assert not np.isfinite(dq[0, 20]).any() and np.isfinite(np.delete(dq[0], 20, axis=0)).all()
    assert not np.isfinite(dk[0, 33]).any()
    assert np.isfinite(dv).all()


@pytest.mark.parametrize(
    ("isa", "dtype", "lengths"),
    [
        ("amx", np.float32, [64]),
        ("amx", np.float16, [64]),
        ("amx", BFLOAT16, [1, 64]),
        ("avx512bf16", BFLOAT16, [1, 2, 3, 4, 7, 8, 64]),
    ],
    ids=str,
)
def test_other_products_than_multiply_adds_are_used(isa, dtype, lengths):
    """Other products round differently: among many sums of 512 terms, some differ."""
    if isa not in ISAS:
        pytest.skip(f"this CPU or this build has no {isa}")
    for length in lengths:
        arrays = inputs(dtype, length, 640, 512, 512)
        found = []
        for name in (isa, "avx512"):
            with using(name):
                found.append([attend(*arrays), *(differentiated(*arrays) if length > 8 else [])])
        for one, other in zip(*found, strict=True):
            assert (one != other).any(), length


@pytest.mark.parametrize("bad", [np.nan, np.inf, 2.0**127])
def test_weights_are_rounded_alike_whatever_a_closed_key_holds(bad):
    """Multiply-adds compute that key's tile: nearly all results keep their bits, and all results of the first head
    do.
    """
    if "avx512bf16" not in ISAS:
        pytest.skip("this CPU or this build has no avx512bf16")
    for length, heads, keys in [(4, 40, 100), (200, 2, 64)]:
        arrays = inputs(BFLOAT16, length, keys, heads=heads)
        mask = np.arange(keys) != 30
        with using("avx512"):
            unrounded = attend(*arrays, mask)
        with using("avx512bf16"):
            clean = attend(*arrays, mask)
            arrays[1][1:, 30, 5] = arrays[2][1:, 30, 7] = bad
            found = attend(*arrays, mask)
        assert np.mean(found[1:] != clean[1:]) < 0.01 < np.mean(unrounded != clean)
        np.testing.assert_array_equal(found[0], clean[0])
