"""Results of 16 bits are rounded once: to the nearest, ties to even, on every instruction set."""

import numpy as np
import pytest
from inputs import BFLOAT16, FLOAT_IDS, FLOATS

import selfattn as sa
from selfattn import _core
from selfattn.functional._gradients import to_dtype


def attend_evenly(values, n_queries):
    """Attend with equal weights: every row of the result is the mean of the values."""
    query = np.zeros((n_queries, 16), values.dtype)
    key = np.zeros((len(values), 16), values.dtype)
    return sa.scaled_dot_product_attention(query, key, values)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=FLOAT_IDS[:2])
@pytest.mark.parametrize("n_queries", [1, 5, 20, 70])  # each kernel
def test_means_of_neighbours_are_ties(isa, dtype, n_queries):
    bits = np.arange(0x0001, 0x7B00, 97, dtype=np.uint16)[:256]  # from subnormal numbers on
    bits = np.concatenate([bits, bits | 0x8000])
    if dtype == BFLOAT16:
        bits = bits[(bits & 0x7FFF) > 0x2800]  # 2^-47: half of the last place is not subnormal in float32
    pair = np.stack([bits, bits + 1]).view(dtype)
    mean = pair.astype(np.float64).mean(axis=0)
    out = attend_evenly(pair, n_queries)
    expected = mean.astype(np.float32).astype(dtype)
    assert (out.view(np.uint16) == expected.view(np.uint16)).all()
    assert (expected.view(np.uint16) % 2 == 0).all()


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=FLOAT_IDS[:2])
def test_gradients_are_rounded_as_numpy_rounds(dtype):
    """Every pattern of the upper half of a float32, with lower halves around ties."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = ((np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] | lower).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(dtype)
    nan = np.isnan(x)
    for threads in (1, 2, 3):
        got = to_dtype(x, dtype, threads)
        assert got.dtype == dtype and got.shape == x.shape
        assert (got.view(np.uint16) == expected.view(np.uint16))[~nan].all()
        assert np.isnan(got.astype(np.float32)[nan]).all()
    for n in (5, 32769):
        assert to_dtype(x.ravel()[:n], dtype, None).tobytes() == got.ravel()[:n].tobytes()


@pytest.mark.parametrize("n", [0, 1, 7, 32768, 65537, 100_003])
def test_rounding_ends_where_the_array_ends(n):
    x = np.linspace(-1, 1, 200_000, dtype=np.float32)
    out = np.full(200_000, 7, np.float16)
    _core._narrow(x[:n], out[:n], 3)
    assert (out[:n] == x[:n].astype(np.float16)).all()
    assert (out[n:] == 7).all()


def test_what_needs_no_rounding_is_returned_as_it_is():
    x = np.ones((3, 4), np.float32)
    assert to_dtype(x, np.dtype(np.float32), None) is x
    assert to_dtype(x.T, np.dtype(np.float16), None).dtype == np.float16
    with pytest.raises(TypeError, match="16 bits"):
        _core._narrow(x, np.empty((3, 5), np.float16), 1)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_gradient_of_a_single_number_is_an_array(dtype):
    query, key, value = np.random.default_rng(0).standard_normal((3, 5, 4)).astype(dtype)
    options = {"attn_mask": np.asarray(0.25, dtype), "alibi_slopes": np.asarray(0.5, dtype)}
    out, pullback = sa.scaled_dot_product_attention_vjp(
        query, key, value, **options, wrt=("query", "attn_mask", "alibi_slopes")
    )
    for gradient in (pullback(np.ones_like(out)).attn_mask, pullback(np.ones_like(out)).alibi_slopes):
        assert isinstance(gradient, np.ndarray) and gradient.shape == () and gradient.dtype == dtype
