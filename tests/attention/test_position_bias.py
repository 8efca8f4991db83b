"""Biases by relative position: T5's buckets, and the gradient of their table."""

import numpy as np
import pytest
from refusals import refusals

import selfattn as sa
from selfattn.functional import relative_position_bias, relative_position_bias_vjp


def buckets(count, L, S, **options):
    return relative_position_bias(np.arange(count)[:, None], L, S, **options)[0].astype(int)


def test_half_of_the_buckets_are_one_position_each_and_the_rest_are_logarithmic():
    # Of 32 buckets 16 are for keys after the query, 8 of them for one position; the next begins at 8 · 16^(n/8).
    far = [8] * 4 + [9] * 4 + [10] * 7 + [11] * 9 + [12] * 14 + [13] * 18 + [14] * 27 + [15] * 40
    after = np.array([*range(8), *far])
    both = buckets(32, 100, 100)
    np.testing.assert_array_equal(both[99::-1], after[:100])
    np.testing.assert_array_equal(both[100:], 16 + after[1:100])
    causal = buckets(32, 1, 300, causal="lower_right")  # one query, which sees all keys
    np.testing.assert_array_equal(causal[:-17:-1], range(16))
    assert causal.min() == 0 and (causal[: 300 - 128] == 31).all() and (np.diff(causal) <= 0).all()
    assert not buckets(32, 1, 300, causal="upper_left").any()


@pytest.mark.parametrize("count", [4, 32, 33])
@pytest.mark.parametrize("max_distance", [20, 128, 1000])
def test_the_buckets_are_those_of_transformers(count, max_distance):
    torch = pytest.importorskip("torch")
    of_t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention._relative_position_bucket
    for (L, S), causal in zip(
        [(70, 500), (500, 70), (300, 300)], [None, "upper_left", "lower_right"], strict=True
    ):
        at = torch.arange(1 - L, S) - (S - L if causal == "lower_right" else 0)
        expected = of_t5(at, causal is None, count, max_distance)
        np.testing.assert_array_equal(
            buckets(count, L, S, causal=causal, max_distance=max_distance), expected
        )


@pytest.mark.parametrize(("L", "S"), [(0, 3), (3, 0), (1, 1), (1, 6), (40, 30)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_gradient_of_the_table(L, S, dtype):
    table = np.random.default_rng(0).standard_normal((8, 3)).astype(dtype)
    for causal in (None, "upper_left", "lower_right"):
        bias, pullback = relative_position_bias_vjp(table, L, S, causal=causal, max_distance=16)
        np.testing.assert_array_equal(
            bias, relative_position_bias(table, L, S, causal=causal, max_distance=16)
        )
        assert bias.shape == (3, L + S - 1 if L and S else 0) and bias.dtype == dtype
        gradient = pullback(np.ones_like(bias))
        assert gradient.shape == table.shape and gradient.dtype == dtype and gradient.sum() == bias.size
        if bias.size:
            sa.check_vjp(lambda x, c=causal: relative_position_bias_vjp(x, L, S, causal=c), table)


TABLE = np.zeros((32, 2))
test_refusals = refusals(
    (lambda: relative_position_bias(TABLE[0], 3, 4), r"\(num_buckets, H\), not \(2,\)"),
    (lambda: relative_position_bias(TABLE > 0, 3, 4), TypeError, "table has dtype bool"),
    (lambda: relative_position_bias(TABLE[:3], 3, 4), "at least 4 buckets .* not 3"),
    (lambda: relative_position_bias(TABLE, 3, 4, causal=True), "causal must be"),
    (lambda: relative_position_bias(TABLE, -1, 4), "L must be at least 0"),
    (lambda: relative_position_bias(TABLE, 3, 4, max_distance=8), "must exceed the 8 exact distances"),
    (lambda: relative_position_bias_vjp(TABLE, 3, 4)[1](np.ones((2, 5))), r"\(2, 5\); .* \(2, 6\)"),
)
