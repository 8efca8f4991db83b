"""nn.ScaledDotProductAttention: the fifth tutorial's module, its −1e9, its dropout per call, gradients."""

import math

import numpy as np
import pytest
from nn_checks import assert_close
from refusals import refusals

import selfattn as sa
from selfattn import nn

B, H, L, S, D, DV = 2, 3, 4, 5, 6, 2
RNG = np.random.default_rng(5)
Q, K, V = (RNG.standard_normal(shape) for shape in ((B, H, L, D), (B, H, S, D), (B, H, S, DV)))
PADDING = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:, None, None, :]  # (batch, 1, 1, len)
NOTHING = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])[:, None, None, :]  # a sentence without words
PER_QUERY = (RNG.random((L, S)) < 0.5) & (np.arange(L) != 1)[:, None]
MASKS = {"none": None, "padding": PADDING, "booleans": PADDING == 1, "nothing": NOTHING, "per query": PER_QUERY}  # fmt: skip

attention = nn.ScaledDotProductAttention()


class Halve(nn.Module):
    """A dropout without randomness."""

    def forward(self, x):
        return x * x.dtype.type(0.5)

    def vjp(self, x):
        return self(x), lambda dy: (dy * dy.dtype.type(0.5), {})


def as_taught(query, key, value, mask=None, dropout=None):
    """Compute the tutorial's code in NumPy."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    scores = scores - scores.max(-1, keepdims=True)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights = weights if dropout is None else dropout(weights)
    return weights @ value, weights


@pytest.mark.parametrize(("dropout", "dtype"), [(None, "float32"), (Halve(), "float64")])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_weights_are_those_of_the_tutorial(mask, dropout, dtype):
    expected = as_taught(Q, K, V, MASKS[mask], dropout)
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    for result in (
        attention(*arrays, MASKS[mask], dropout),
        attention.forward(*arrays, mask=MASKS[mask], dropout=dropout),
        attention.vjp(*arrays, MASKS[mask], dropout)[0],
    ):
        for got, wanted in zip(result, expected, strict=True):
            assert_close(got, wanted, dtype, n=D + S)


@pytest.mark.parametrize("dropout", [None, Halve()], ids=["", "dropout"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_those_of_finite_differences(mask, dropout):
    def f(query, key, value):
        results, pullback = attention.vjp(query, key, value, MASKS[mask], dropout)

        def both(d_values, d_weights):
            d_inputs, grads = pullback(d_values, d_weights)
            assert grads == {}
            return d_inputs

        return results, both

    sa.check_vjp(f, Q, K, V)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_row_that_the_mask_closes_is_uniform(dtype):
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    (values, weights), pullback = attention.vjp(*arrays, NOTHING)
    assert values.dtype == weights.dtype == dtype
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(weights[1].astype(float), 1 / S, rtol=4 * eps)
    means = np.broadcast_to(V[1].mean(-2, keepdims=True), values[1].shape)
    np.testing.assert_allclose(values[1].astype(float), means, rtol=0, atol=8 * eps)
    (dq, dk, dv), _ = pullback(np.ones_like(values))
    np.testing.assert_array_equal(dq[1], 0)
    np.testing.assert_array_equal(dk[1], 0)
    np.testing.assert_allclose(dv[1].astype(float), L / S, rtol=8 * eps)
    # the function of the same name has zeros there
    zeros = sa.scaled_dot_product_attention(*arrays, NOTHING == 1)
    np.testing.assert_array_equal(zeros[1], 0)
    np.testing.assert_array_equal(zeros[0], values[0])


def test_uniform_rows_are_uniform_over_what_exists():
    lengths = np.array([[5], [2]])
    values, weights = attention(Q, K, V, NOTHING, key_lengths=lengths)
    np.testing.assert_allclose(weights[1, :, :, :2], 0.5, rtol=1e-15)
    np.testing.assert_array_equal(weights[1, :, :, 2:], 0)
    np.testing.assert_allclose(values[1], np.repeat(V[1, :, :2].mean(-2, keepdims=True), L, -2), rtol=1e-13)
    np.testing.assert_array_equal(attention(Q, K, V, NOTHING, key_lengths=[[5], [0]])[0][1], 0)


def test_attn_mask_and_key_lengths_are_those_of_the_function():
    bias = RNG.standard_normal((L, S))
    bias[0, 0] = -np.inf
    for options in ({"attn_mask": PER_QUERY}, {"attn_mask": bias}, {"key_lengths": [[3], [5]]}):
        expected = sa.scaled_dot_product_attention(Q, K, V, **options, return_weights=True)
        np.testing.assert_equal(attention(Q, K, V, **options), expected)
    both = attention(Q, K, V, PADDING, attn_mask=bias)[1]
    expected = sa.scaled_dot_product_attention(
        Q, K, V, np.where(PADDING == 1, bias, -np.inf), return_weights=True
    )[1]
    np.testing.assert_array_equal(both, expected)
    sa.check_vjp(
        lambda q, k, v: (lambda out, pullback: (out[0], lambda dy: pullback(dy)[0]))(
            *attention.vjp(q, k, v, PADDING, attn_mask=bias, key_lengths=[[3], [4]])
        ),
        *(Q, K, V),
    )


@pytest.mark.parametrize("dropout", [None, Halve()], ids=["", "dropout"])
def test_padding_may_hold_anything(dropout):
    closed = np.broadcast_to(PADDING == 0, (B, H, 1, S)).swapaxes(-1, -2)
    results = []
    for filler in (0.0, np.nan, np.inf):
        k, v = np.where(closed, filler, K), np.where(closed, filler, V)
        (values, weights), pullback = attention.vjp(Q, k, v, PADDING, dropout)
        results.append([values, weights, *pullback(np.ones_like(values))[0]])
    for others in results[1:]:
        for got, expected in zip(others, results[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15)


def test_leading_dims_broadcast_and_may_be_missing():
    values, _ = attention(Q[0, 0], K[0, 0], V[0, 0])
    assert_close(values, as_taught(Q[0, 0], K[0, 0], V[0, 0])[0], "float64", n=S)
    shared = K[:, :1]
    (values, weights), pullback = attention.vjp(Q, shared, V)
    assert_close(values, as_taught(Q, shared, V)[0], "float64", n=S)
    assert pullback(values, weights)[0][1].shape == shared.shape
    for n_queries, n_keys in ((0, 3), (3, 0), (1, 1)):
        q, k = np.ones((1, 2, n_queries, 4)), np.ones((1, 2, n_keys, 4))
        for mask in (None, np.zeros((1, 1, 1, n_keys), int)):
            (values, weights), pullback = attention.vjp(q, k, k, mask)
            assert values.shape == q.shape and weights.shape == (1, 2, n_queries, n_keys)
            assert [d.shape for d in pullback(values)[0]] == [q.shape, k.shape, k.shape]


def test_the_dropout_of_the_call_is_applied_to_the_weights():
    plain = attention(Q, K, V, PADDING)[1]
    values, weights = attention(Q, K, V, PADDING, nn.Dropout(0.5, rng=3))
    np.testing.assert_array_equal(weights, nn.Dropout(0.5, rng=3)(plain))
    np.testing.assert_allclose(values, weights @ V, rtol=1e-13, atol=1e-15)
    np.testing.assert_array_equal(attention(Q, K, V, PADDING, nn.Dropout(0.5).eval())[1], plain)
    np.testing.assert_array_equal(attention(Q, K, V, dropout=lambda w: 0 * w)[0], 0)


test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: attention(Q, K, V, PADDING.astype(float)), TypeError, "mask .* not float64 .*attn_mask="),
    (lambda: attention(Q, K, V, np.ones((2, 5))), TypeError, "not float64"),
    (lambda: attention(Q, K, V, np.ones((2, 5), int)), ValueError, r"mask \(2, 5\) does not .*"),
    (lambda: attention(Q, K, V, np.ones((1, 2, 1, 1, 5), int)), ValueError, "does not broadcast"),
    (lambda: attention(Q, K, V, dropout=0.1), TypeError, r"nn.Dropout\(0.1\), not 0.1"),
    (lambda: attention.vjp(Q, K, V, dropout=lambda w: w), TypeError, "with a vjp"),
    (lambda: attention(Q, K, V, dropout=lambda w: w[0]), ValueError, r"not \(3, 4, 5\)"),
    (lambda: attention(Q, K[..., 1:], V), ValueError, r"\(2, 3, 4, 6\), key .* \(2, 3, 5, 5\)"),
    (lambda: attention(Q, K[..., 1:], V, PADDING), ValueError, "the same last dimension"),
    (lambda: attention(Q > 0, K, V), TypeError, "query must hold floats or integers, not bool"),
    (lambda: attention.vjp(Q, K, V)[1](np.ones(3)), ValueError, r"d_values .*, not \(3,\)"),
)
