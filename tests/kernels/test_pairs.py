"""bfloat16 by products of pairs, where the CPU has them: the sizes, layouts and numbers at which the kernels change their ways.

All products go that way where arrays are of bfloat16 and their numbers are below 2^50, and but for scores also 0 or at least
2^-60, tile by tile. Weights and dS are rounded to bfloat16 for it, and sums are those of float32 (docs/decisions/0007): the
bounds of tolerances.py and gradients.py know that.
"""

import numpy as np
import pytest
from gradients import assert_gradients
from inputs import BFLOAT16, LAYOUTS, OPTIONS, normal, options_together, random_inputs
from tolerances import assert_attention

import selfattn as sa
from selfattn import _core

pytestmark = pytest.mark.usefixtures("by_pairs")

# Of the largest number of a result: what rounding weights, or not, may make of another.
ROUNDED = 2.0**-8


def arrays(length=100, keys=100, width=48, value_width=48, heads=2, seed=0):
    return random_inputs((heads, length, width), keys, dtype=BFLOAT16, v_width=value_width, seed=seed)


def by_multiply_adds(function):
    _core._set_isa("avx512")
    found = function()
    _core._set_isa("avx512bf16")
    return found


def gradients(inputs, grad_out=None, **options):
    out, pullback = sa.scaled_dot_product_attention_vjp(*inputs, **options)
    if grad_out is None:
        grad_out = normal(np.random.default_rng(5), out.shape, BFLOAT16)
    return [out, *pullback(grad_out)[:3]]


def wide(results):
    return [x.astype(np.float64) for x in results]


def bits(results):
    return [x.view(np.uint16) for x in results]


def test_they_are_used():
    """Scores of 512 terms are other sums than those of multiply-adds: some of so many results differ in their last bit."""
    inputs = arrays(length=64, keys=640, width=512, value_width=512)
    found = gradients(inputs)
    expected = by_multiply_adds(lambda: gradients(inputs))
    for x, y in zip(found, expected, strict=True):
        assert (x != y).any()


@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 47, 64, 80])
@pytest.mark.parametrize("value_width", [15, 16, 33, 80])
def test_widths_around_a_step(width, value_width):
    inputs = arrays(length=70, keys=70, width=width, value_width=value_width)
    assert_attention(*inputs)
    assert_gradients(inputs, {})


@pytest.mark.parametrize("keys", [31, 32, 33, 63, 64, 65, 97, 129])
@pytest.mark.parametrize("length", [16, 17, 33, 49, 64, 65])
def test_lengths_around_a_tile(length, keys):
    inputs = arrays(length=length, keys=keys)
    for options in ({}, {"is_causal": True}, {"causal": "lower_right", "window": (20, 3)}):
        assert_attention(*inputs, **options)
        assert_gradients(inputs, options)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_bits(name):
    inputs = arrays(length=66, keys=99, width=41, value_width=40)
    grad_out = normal(np.random.default_rng(5), (2, 66, 40), BFLOAT16)
    expected = gradients(inputs, grad_out)
    for which in range(4):
        changed = [LAYOUTS[name](x) if n == which else x for n, x in enumerate((*inputs, grad_out))]
        found = gradients(changed[:3], changed[3])
        for x, y in zip(bits(found), bits(expected), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "names", [(name,) for name in OPTIONS] + [("softcap", "dropout", "is_causal", "sinks")], ids="+".join
)
def test_options(names):
    inputs = arrays(length=70, keys=170)
    options = options_together(names, (2,), 70, 170, np.random.default_rng(1))
    assert_attention(*inputs, **options)
    assert_gradients(inputs, options)


@pytest.mark.parametrize("length", [17, 37, 63, 101])
def test_a_last_row_without_a_neighbour(length):
    """Its pair is a lane that is no query, and that a mask like this one sends beyond float32's range."""
    inputs = arrays(length=length, keys=70)
    mask = np.full((length, 70), 300, np.float32)
    assert_attention(*inputs, mask)
    assert_gradients((*inputs,), {"attn_mask": mask})


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.02, 3.0, 2.0**-50, 2.0**38, 2.0**45])
def test_scales_of_every_kind(scale):
    inputs = list(arrays(length=70, keys=99))
    if scale > 4:  # scores stay ordinary
        inputs[:2] = [(x.astype(np.float32) * np.float32(scale**-0.5)).astype(BFLOAT16) for x in inputs[:2]]
    assert_attention(*inputs, scale=scale)


@pytest.mark.parametrize("at", [0, 40, 64, 99])
@pytest.mark.parametrize("power", [-133, -126, -61, -60, 49, 50, 127])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_magnitudes_at_the_bounds(which, power, at):
    inputs = [x.astype(np.float32) for x in arrays()]
    inputs[which][1, at, 3] = np.float32(2.0**power)
    if power > 0 and which != 2:
        inputs[1 - which][..., 3] *= np.float32(2.0**-power)  # products stay small
    inputs = [x.astype(BFLOAT16) for x in inputs]
    assert_attention(*inputs)
    if power < 0:
        assert_gradients(inputs, {})


@pytest.mark.parametrize("power", [-100, -61, -60, 40, 60])
def test_gradients_of_any_size(power):
    """dO times a power of two: so are the gradients, whichever way they go."""
    inputs = arrays(length=70, keys=130)
    grad_out = normal(np.random.default_rng(5), (2, 70, 48), BFLOAT16)
    larger = (grad_out.astype(np.float32) * np.float32(2.0**power)).astype(BFLOAT16)
    found = gradients(inputs, larger)
    for x, y in zip(found[1:], gradients(inputs, grad_out)[1:], strict=True):
        expected = y.astype(np.float64) * 2.0**power
        np.testing.assert_allclose(
            x.astype(np.float64), expected, rtol=2.0**-7, atol=ROUNDED * np.abs(expected).max()
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 64, 99])
def test_what_is_not_finite_reaches_the_same_results_as_by_multiply_adds(bad, which, at):
    inputs = arrays()
    inputs[which][0, at, 5] = bad
    mask = np.ones((100, 100), bool)
    mask[::3, at] = False
    for options in ({}, {"attn_mask": mask}):
        found = gradients(inputs, **options)
        expected = by_multiply_adds(lambda options=options: gradients(inputs, **options))
        for x, y in zip(wide(found), wide(expected), strict=True):
            finite = np.isfinite(y)
            np.testing.assert_array_equal(np.isfinite(x), finite)
            atol = ROUNDED * np.abs(y[finite]).max(initial=1)
            np.testing.assert_allclose(x[finite], y[finite], rtol=2.0**-7, atol=atol)


@pytest.mark.parametrize("at", [0, 16, 63, 64, 99])
def test_a_masked_key_touches_nothing(at):
    inputs = arrays()
    mask = np.ones((100, 100), bool)
    mask[:, at] = False
    clean = gradients(inputs, attn_mask=mask)
    inputs[1][0, at, 5] = inputs[2][0, at, 7] = np.nan
    found = gradients(inputs, attn_mask=mask)
    for x, y in zip(wide(found), wide(clean), strict=True):
        np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=ROUNDED * np.abs(y).max())
        np.testing.assert_array_equal(x[1], y[1])  # the other head keeps its way


def test_weights_are_rounded_alike_whatever_a_closed_key_holds():
    """The tile of the NaN goes by multiply-adds, and all but a few results are the same to the last bit."""
    inputs = arrays(length=200, keys=64)
    mask = np.ones((200, 64), bool)
    mask[:, 30] = False
    clean = sa.scaled_dot_product_attention(*inputs, mask)
    inputs[2][0, 30, 7] = np.nan
    found = sa.scaled_dot_product_attention(*inputs, mask)
    assert np.mean(found[0] != clean[0]) < 0.01
    np.testing.assert_array_equal(found[1], clean[1])


@pytest.mark.parametrize("shape", [(6, 150, 300), (1, 700, 600)])
def test_the_same_bits_for_any_number_of_threads(shape):
    heads, length, keys = shape
    inputs = arrays(length, keys, heads=heads)
    inputs[1][0, 70, 3] = 2.0**60  # one tile of one head by multiply-adds
    inputs[2][0, 200, 3] = 2.0**-70
    one = gradients(inputs, num_threads=1)
    for threads in (2, 3, 7):
        for x, y in zip(bits(one), bits(gradients(inputs, num_threads=threads)), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)])
@pytest.mark.parametrize("length", [1, 3, 17, 65])
def test_groups_of_heads_and_few_rows(heads, length):
    inputs = random_inputs((1, heads[0], length, 32), 130, dtype=BFLOAT16, key_heads=heads[1])
    assert_attention(*inputs, enable_gqa=True)
    assert_gradients(inputs, {"enable_gqa": True})


def test_blocks_with_gaps_leave_the_others_alone():
    inputs = arrays(length=262, keys=200, heads=3)
    pattern = np.ones((5, 5), bool)
    pattern[::2, 1::2] = False
    mask = sa.BlockMask.from_blocks(pattern, (64, 40))
    found = gradients(inputs, block_mask=mask, num_threads=1)
    dense = np.broadcast_to(mask.to_dense(262, 200), (3, 262, 200))
    for x, y in zip(wide(found), wide(gradients(inputs, attn_mask=dense)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=ROUNDED * np.abs(y).max())


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_heads_that_share_a_mask_begin_with_the_last_rows(rows):
    """The last part of a head's rows is short, goes by multiply-adds, and may come first: keys and values are new then, too."""
    inputs = arrays(length=64 + rows, keys=100, width=32, value_width=32)
    mask = normal(np.random.default_rng(2), (64 + rows, 100), np.float32)
    for options in ({"attn_mask": mask}, {"attn_mask": mask, "is_causal": True}):
        one = assert_gradients(inputs, options, wrt=("query", "key", "value"), num_threads=1)
        every = assert_gradients(inputs, options, num_threads=2)
        for x, y in zip(bits(one[:3]), bits(every[:3]), strict=True):
            np.testing.assert_array_equal(x, y)


def test_a_short_stretch_of_rows_before_a_long_one():
    mask = sa.BlockMask.from_blocks(np.array([[1, 0], [0, 1], [1, 1]], bool), (16, 32))
    for seed in range(3):  # what an earlier call left in memory is of other values
        inputs = arrays(length=48, keys=64, heads=1, seed=seed)
        found = gradients(inputs, block_mask=mask)
        dense = mask.to_dense(48, 64)
        for x, y in zip(wide(found), wide(gradients(inputs, attn_mask=dense)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2.0**-7, atol=ROUNDED * np.abs(y).max())


@pytest.mark.parametrize("padding", [2.0**60, 1e-30, np.nan])
def test_padding_behind_the_lengths_changes_no_bit(padding):
    inputs = arrays(length=70, keys=200)
    lengths = np.array([90, 33])
    clean = gradients(inputs, key_lengths=lengths)
    for head, length in enumerate(lengths):
        inputs[1][head, length:] = inputs[2][head, length:] = padding
    for x, y in zip(bits(gradients(inputs, key_lengths=lengths)), bits(clean), strict=True):
        np.testing.assert_array_equal(x, y)


def test_more_keys_than_the_scratch_keeps():
    inputs = arrays(length=40, keys=4200, width=512, value_width=512, heads=1)
    assert_attention(*inputs)
    assert_gradients(inputs, {})


@pytest.mark.parametrize("other", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_arrays_of_other_dtypes(which, other):
    """Queries and keys go by pairs where both are of bfloat16, values and dO too."""
    inputs = [*arrays(length=40), normal(np.random.default_rng(5), (2, 40, 48), BFLOAT16)]
    inputs[which] = inputs[which].astype(other)
    *inputs, grad_out = inputs
    assert_attention(*inputs)
    out = sa.scaled_dot_product_attention(*inputs)
    if which != 3 or other == np.float32:
        assert_gradients(inputs, {}, grad_out=grad_out.astype(out.dtype if which != 3 else other))
