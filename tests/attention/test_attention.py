"""scaled_dot_product_attention, the C function: its arguments and results; rows without open keys, sinks, NaN, numbers
near the largest.

Its numbers, with any shapes, dtypes, layouts and options: test_fuzz.py. Sizes at which kernels change, and what is
closed or not finite, on every instruction set: tests/kernels/test_instruction_sets.py. Bounds: tolerances.py.
"""

import numpy as np
import pytest
from inputs import FLOAT_IDS, FLOATS, LAYOUTS, covering, random_inputs, random_mask
from instruction_sets import ISAS, closing, using
from tolerances import assert_attention, assert_results, assert_within, finfo, truth

import selfattn as sa

pytestmark = pytest.mark.usefixtures("one_thread")
attend = sa.scaled_dot_product_attention
floats = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def test_bytes_other_than_one_in_a_boolean_mask_mean_true(isa):
    arrays = random_inputs((5, 8), 70)
    mask = random_mask(np.random.default_rng(1), (5, 70), np.bool_)
    odd = (mask * np.uint8(0xFE)).view(np.bool_)
    assert bits(attend(*arrays, odd)) == bits(attend(*arrays, mask))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_inputs_and_masks(isa, name):
    for kind in (np.dtype(np.bool_), *FLOATS):
        mask = random_mask(np.random.default_rng(6), (2, 3, 33, 150), kind)
        arrays = random_inputs((2, 3, 33, 8), 150)
        got = attend(*map(LAYOUTS[name], arrays), LAYOUTS[name](mask))
        np.testing.assert_array_equal(got, attend(*arrays, mask), err_msg=f"{kind}")


@floats
@pytest.mark.parametrize("kind", FLOATS, ids=FLOAT_IDS)
def test_a_row_of_the_least_float_is_uniform(isa, dtype, kind):
    query, key, value = random_inputs((4, 8), 70, dtype=dtype)
    least = float(finfo(kind).min)
    mask = np.zeros((4, 70), kind)
    mask[1:3] = least
    mask[2, 30:] = -np.inf
    out, lse, weights = attend(query, key, value, mask, return_lse=True, return_weights=True)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    if kind != np.float16:  # scores still count next to -65504
        step = 2e-2 if dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(weights[1].astype(float), 1 / 70, rtol=step)
        np.testing.assert_allclose(weights[2, :30].astype(float), 1 / 30, rtol=step)
    assert not weights[2, 30:].any()
    # next to an ordinary score, the least float has no weight
    mask[0, 1:] = least
    weights = attend(query, key, value, mask, return_weights=True)[1]
    assert weights[0].astype(float).tolist() == [1.0] + [0.0] * 69


def test_lists_and_the_array_protocol():
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x

    arrays = [x.astype(np.float64) for x in random_inputs((3, 4))]
    plain = attend(*arrays)
    assert bits(attend(*(x.tolist() for x in arrays))) == bits(plain)
    assert bits(attend(*(Wrapped(x) for x in arrays))) == bits(plain)


def test_memory_maps(tmp_path):
    arrays = random_inputs((2, 9, 8), 70)
    mapped = []
    for n, x in enumerate(arrays):
        np.save(tmp_path / f"{n}.npy", x)
        mapped.append(np.load(tmp_path / f"{n}.npy", mmap_mode="r"))
    assert all(type(x) is np.memmap for x in mapped)
    plain = attend(*arrays)
    got = attend(*mapped)
    assert type(got) is np.ndarray and bits(got) == bits(plain)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=plain.shape)
    assert attend(*mapped, out=out) is out
    assert bits(out) == bits(plain)


def test_what_is_returned_and_in_which_order():
    arrays = random_inputs((2, 9, 8), 20, v_width=5)
    out, lse, weights = attend(*arrays, return_lse=True, return_weights=True)
    assert (out.shape, lse.shape, weights.shape) == ((2, 9, 5), (2, 9), (2, 9, 20))
    assert bits(attend(*arrays)) == bits(out)
    pair = attend(*arrays, return_lse=True)
    assert type(pair) is tuple and [bits(x) for x in pair] == [bits(out), bits(lse)]
    pair = attend(*arrays, return_weights=True)
    assert type(pair) is tuple and [bits(x) for x in pair] == [bits(out), bits(weights)]
    for x in (out, lse, weights):
        x[...] = 0  # writable
    assert x.base is None


def test_outputs_without_elements_take_no_time():
    """The call has 2**40 queries whose outputs have no columns: its arrays have a few bytes."""
    query, key, value = (
        np.broadcast_to(np.float32(1), (2**40, 1)),
        np.ones((3, 1), "f4"),
        np.ones((3, 0), "f4"),
    )
    assert attend(query, key, value).shape == (2**40, 0)
    assert attend(query, key[:0], value[:0], return_weights=True)[1].shape == (2**40, 0)


@floats
def test_nothing_around_out_is_written(dtype):
    arrays = random_inputs((2, 3, 20, 8), 70, dtype=dtype, v_width=17)
    plain = attend(*arrays)
    around = np.full((4, 5, 22, 40), 7, plain.dtype)
    out = around[1:3, 1:4, 1:21, 1:35:2]
    got, lse = attend(*arrays, out=out, return_lse=True)
    assert got is out and lse.shape == (2, 3, 20)
    np.testing.assert_array_equal(out, plain)
    around[1:3, 1:4, 1:21, 1:35:2] = 7
    assert (around == 7).all()


def test_out_may_be_between_the_inputs_in_memory():
    buffer = np.random.default_rng(0).standard_normal((4, 9, 8)).astype(np.float32)
    plain = attend(buffer[0], buffer[1], buffer[3])
    attend(buffer[0], buffer[1], buffer[3], out=buffer[2])
    assert bits(buffer[2]) == bits(plain)
    woven = np.random.default_rng(0).standard_normal((9, 8, 2)).astype(np.float32)
    plain = attend(*[woven[..., 0]] * 3)
    attend(*[woven[..., 0]] * 3, out=woven[..., 1])
    np.testing.assert_array_equal(woven[..., 1], plain)


def test_the_generator_is_asked_for_one_number():
    arrays = random_inputs((2, 9, 8), 70)
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    first = attend(*arrays, dropout_p=0.5, rng=one)
    seed = int(other.integers(0, 2**64, dtype=np.uint64))
    assert one.bit_generator.state == other.bit_generator.state
    assert bits(first) == bits(attend(*arrays, dropout_p=0.5, rng=seed))
    assert bits(attend(*arrays, dropout_p=0.5, rng=3)) == bits(
        attend(*arrays, dropout_p=0.5, rng=np.uint8(3))
    )
    assert bits(first) != bits(attend(*arrays, dropout_p=0.5, rng=one))
    state = one.bit_generator.state
    attend(*arrays, rng=one)  # no dropout, no number
    assert one.bit_generator.state == state
    assert bits(attend(*arrays, dropout_p=0.5)) != bits(attend(*arrays, dropout_p=0.5))  # fresh entropy


real_floats = pytest.mark.parametrize("dtype", [np.float32, np.float64])


CLOSED_ROWS = {
    "bool_mask": {"attn_mask": [[False]]},
    "float_mask": {"attn_mask": [[-np.inf]]},
    "key_lengths": {"key_lengths": 0},
    "window": {"window": (None, 0), "causal": "lower_right"},
}


@pytest.mark.parametrize("how", CLOSED_ROWS)
def test_dead_rows_are_zeros(isa, how):
    for extra in ({}, {"dropout_p": 0.5, "rng": 1}, {"softcap": 2.0}):
        for dtype in FLOATS:
            n_queries, n_keys = (90, 40) if how == "window" else (40, 90)
            arrays = random_inputs((2, n_queries, 8), n_keys, dtype=dtype)
            out, lse, weights = assert_attention(*arrays, **CLOSED_ROWS[how], **extra)
            dead = np.arange(n_queries) < (50 if how == "window" else n_queries)
            assert out[:, dead].tobytes() == bytes(out[:, dead].nbytes)  # plus zero
            assert not weights[:, dead].any()
            assert (lse == -np.inf).all(axis=0).tolist() == dead.tolist()


@real_floats
def test_a_sink_is_one_more_key_with_a_value_of_zero(isa, dtype):
    query, key, value = random_inputs((2, 3, 20, 8), 70, dtype=dtype)
    sinks = np.array([0.5, -1.0, 3.0])
    scores = np.zeros((2, 3, 20, 71), dtype)
    scores[..., 70] = sinks[:, None]
    # a key of zeros replaces the sink; the mask gives its score
    with_key = [np.concatenate([x, np.zeros_like(x[..., :1, :])], axis=-2) for x in (key, value)]
    expected = truth(query, *with_key, scores)
    out, lse, weights = assert_attention(query, key, value, sinks=sinks)
    assert_within(out, expected.out, expected.out_bound)
    assert_within(lse, expected.lse, expected.lse_bound)
    assert_within(weights, expected.weights[..., :70], expected.weights_bound[..., :70])
    for shape in ((3,), (1, 3), (2, 3), (1,), ()):
        assert_attention(query, key, value, sinks=np.resize(sinks, shape))
    for rows in (1, 4):  # few rows of many keys, in chunks
        assert_attention(*random_inputs((3, rows, 8), 4100, dtype=dtype), sinks=sinks)
    minus = attend(query, key, value, sinks=-np.inf, return_lse=True)
    np.testing.assert_equal(minus, attend(query, key, value, return_lse=True))  # exp(-inf) is 0


@pytest.mark.parametrize("sink", [-1e4, 1e4, -3e38])
def test_sinks_far_away(isa, sink):
    assert_attention(*random_inputs((3, 20, 8), 70), sinks=[sink] * 3)


@real_floats
def test_a_mask_of_the_greatest_float_is_uniform_and_infinity_is_not_a_number(isa, dtype):
    """As finfo.min does, the greatest number stays finite in log2 units; +inf gives NaN, as inf - inf is NaN."""
    q, k, v = random_inputs((3, 20, 8), 70, dtype=dtype)
    out, lse = attend(q, k, v, np.full((20, 70), np.finfo(dtype).max, dtype), return_lse=True)
    np.testing.assert_allclose(
        out, np.broadcast_to(v.mean(axis=-2, keepdims=True), out.shape), atol=70 * np.finfo(dtype).eps
    )
    assert np.isfinite(lse).all()
    endless = np.zeros((20, 70), dtype)
    endless[3, 5] = np.inf
    assert np.isnan(attend(q, k, v, endless)).all(axis=(0, 2)).tolist() == [i == 3 for i in range(20)]


@real_floats
def test_numbers_beyond_what_log2_units_hold_are_the_largest(isa, dtype):
    """Beyond max / log2 e = 0.69 max the change of units would give infinity, and infinity times 0 is NaN."""
    q, k, v = random_inputs((3, 20, 8), 70, dtype=dtype)
    most = np.finfo(dtype).max
    out, lse = attend(q, k, v, sinks=dtype(most), return_lse=True)
    assert not out.any() and (lse > 0.69 * most).all() and np.isfinite(lse).all()
    _, empty = attend(q, k, v, sinks=dtype(-most), key_lengths=0, return_lse=True)
    assert (empty < -0.69 * most).all() and np.isfinite(empty).all()
    grads = sa.scaled_dot_product_attention_vjp(q, k, v, sinks=dtype(most), wrt=("key", "sinks"))[1](
        v[:, :20]
    )
    assert not grads.key.any() and not grads.sinks.any()
    nearest = attend(q, k[:, :20], v[:, :20], alibi_slopes=dtype(most))
    np.testing.assert_array_equal(nearest, v[:, :20])
    for cap in (float(most), 1e39 if dtype == np.float32 else float(most)):
        # scores over such a cap are subnormal
        np.testing.assert_allclose(attend(q, k, v, softcap=cap), attend(q, k, v), rtol=0, atol=1e-5)


def test_a_score_of_minus_infinity_is_open_all_the_same():
    for case in covering(
        shape=[(1, 80), (4, 40), (40, 80), (70, 200), (2, 4200)],
        name=list(closing(1, np.zeros(1, bool))),
        dtype=FLOATS,
        isa=ISAS,
    ):
        (n_queries, n_keys), name, dtype, isa = case.values()
        query, key, value = random_inputs((2, n_queries, 8), n_keys, dtype=dtype, v_width=5)
        query[..., 0] = 1.0  # so that only these scores become -inf
        key[..., 3 :: n_keys // 4, 0] = -np.inf
        value[..., 3 :: n_keys // 4, 2] = np.nan
        grad_out = np.ones((2, n_queries, 5), dtype)
        options = closing(n_queries, np.arange(n_keys) > n_keys * 3 // 4)[name]
        with using(isa):
            expected = truth(query, key, value, **options)
            assert np.isnan(expected.out[..., 2]).any() or (n_queries < 4 and "is_causal" in options), case
            got = attend(query, key, value, **options, return_lse=True, return_weights=True)
            assert_results(got, expected, str(case))
            _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **options)
            _, reference = sa.reference.scaled_dot_product_attention_vjp(query, key, value, **options)
            for got_gradient, gradient in zip(pullback(grad_out)[:3], reference(grad_out)[:3], strict=True):
                assert np.isnan(got_gradient).tolist() == np.isnan(gradient).tolist(), case


def test_a_nan_of_grad_lse_reaches_keys_whose_scores_overflow(isa):
    query, key, value = random_inputs((1, 6, 8), 40, dtype=np.float32)
    options = {"is_causal": True, "alibi_slopes": np.array([2e38], np.float32), "return_lse": True}
    grad_out, grad_lse = np.ones((1, 6, 8), np.float32), np.zeros((1, 6), np.float32)
    grad_lse[0, 3] = np.nan
    gradients = [
        f(query, key, value, **options)[1](grad_out, grad_lse)[:3]
        for f in (sa.scaled_dot_product_attention_vjp, sa.reference.scaled_dot_product_attention_vjp)
    ]
    assert np.isnan(gradients[1][1][0, :4]).all() and np.isfinite(gradients[1][1][0, 4:]).all()
    for got, expected in zip(*gradients, strict=True):
        assert np.isnan(got).tolist() == np.isnan(expected).tolist()


def test_a_nan_in_one_chunk_of_the_keys_is_one_of_the_whole(isa):
    query, key, value = random_inputs((2, 3, 16), 9000)
    key[0, 5000, 3] = np.nan
    out, *_ = assert_attention(query, key, value)
    assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()


@real_floats
def test_infinite_values_and_masks_do_what_arithmetic_does(isa, dtype):
    query, key, value = random_inputs((3, 8), 40, dtype=dtype)
    value[5, 0], value[6, 1], value[7, 1] = np.inf, np.inf, -np.inf
    out, *_ = assert_attention(query, key, value)
    assert (out[:, 0] == np.inf).all() and np.isnan(out[:, 1]).all()
    mask = np.zeros((3, 40), dtype)
    mask[1, 3], mask[2, 4] = np.inf, np.nan
    out = attend(query, key, np.ones_like(value), mask)
    assert np.isnan(out).all(axis=-1).tolist() == [False, True, True]
