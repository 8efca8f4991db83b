"""Results of 16 bits are rounded once: to the nearest, ties to even, whatever the instruction set stores them with."""

import numpy as np
import pytest

import selfattn as sa

DTYPES = ("float16", "bfloat16")


def as_dtype(name):
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


def attend_evenly(values, n_queries):
    """Attend with equal weights: every row of the result is the mean of the values."""
    query = np.zeros((n_queries, 16), values.dtype)
    key = np.zeros((len(values), 16), values.dtype)
    return sa.scaled_dot_product_attention(query, key, values)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n_queries", [1, 5, 20, 70])  # each kernel
def test_means_of_neighbours_are_ties(isa, name, n_queries):
    dtype = as_dtype(name)
    bits = np.arange(0x0001, 0x7B00, 97, dtype=np.uint16)[:256]  # from subnormal numbers on
    bits = np.concatenate([bits, bits | 0x8000])
    if name == "bfloat16":
        bits = bits[(bits & 0x7FFF) > 0x2800]  # 2^-47: half of the last place is not subnormal in float32
    pair = np.stack([bits, bits + 1]).view(dtype)
    mean = pair.astype(np.float64).mean(axis=0)
    out = attend_evenly(pair, n_queries)
    expected = mean.astype(np.float32).astype(dtype)
    assert (out.view(np.uint16) == expected.view(np.uint16)).all()
    assert (expected.view(np.uint16) % 2 == 0).all()


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("n_queries", [1, 20, 70])
def test_what_is_not_finite_stays_so(isa, name, n_queries):
    dtype = as_dtype(name)
    special = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, float(np.finfo(np.float16).max)] * 4
    values = np.array([special], dtype)
    out = attend_evenly(values, n_queries)
    np.testing.assert_array_equal(
        out.astype(np.float64), np.broadcast_to(values, out.shape).astype(np.float64)
    )
    sums = np.array([[6e4], [6e4], [np.finfo(np.float16).max]]).repeat(32, axis=1).astype(np.float16)
    assert np.isfinite(attend_evenly(sums, n_queries).astype(np.float64)).all()
