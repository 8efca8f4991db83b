"""scaled_dot_product_attention at its edges: rows without open keys, sinks, NaN and infinities, numbers near the largest.

What is closed or not finite on every instruction set, by sizes: tests/kernels/test_instruction_sets.py. Bounds: tolerances.py.
"""

import numpy as np
import pytest
from covering import covering
from inputs import FLOATS, random_inputs
from instruction_sets import ISAS, closing, using
from tolerances import assert_attention, assert_results, assert_within, truth

import selfattn as sa

pytestmark = pytest.mark.usefixtures("one_thread")
attend = sa.scaled_dot_product_attention
real_floats = pytest.mark.parametrize("dtype", [np.float32, np.float64])


CLOSED_ROWS = {
    "bool_mask": {"attn_mask": [[False]]}, "float_mask": {"attn_mask": [[-np.inf]]}, "key_lengths": {"key_lengths": 0},
    "window": {"window": (None, 0), "causal": "lower_right"},
}  # fmt: skip


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
    gradients = [f(query, key, value, **options)[1](grad_out, grad_lse)[:3]
                 for f in (sa.scaled_dot_product_attention_vjp, sa.reference.scaled_dot_product_attention_vjp)]  # fmt: skip
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
