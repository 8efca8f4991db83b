"""Products of the C core with packed weights, of int8 and bfloat16: what they round, and what they refuse."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import _core

GROUP = 128


def split(x):
    """Split rows into groups of 128, and pad with the last number, which changes no range."""
    groups = -(-x.shape[1] // GROUP)
    return np.pad(x, ((0, 0), (0, groups * GROUP - x.shape[1])), "edge").reshape(len(x), groups, GROUP)


def rounded(x):
    """Round rows as the core does: to 255 steps between the least and the greatest of each group."""
    grouped = split(x)
    least = grouped.min(-1, keepdims=True)
    span = grouped.max(-1, keepdims=True) - least
    q = np.rint((grouped - least) * (np.float32(255) / np.where(span > 0, span, np.float32(1))))
    values = least.astype(np.float64) + (span / np.float32(255)).astype(np.float64) * q
    return values.reshape(len(x), -1)[:, : x.shape[1]]


def bfloat16(x):
    """Round to the nearest bfloat16, and return its bits and its value."""
    bits = x.view(np.uint32)
    bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return bits, (bits.astype(np.uint32) << 16).view(np.float32)


def weights(rng, out, width):
    """Draw int8 and its scales, packed; and their products, the weights."""
    q = rng.integers(-128, 128, (out, width), dtype=np.int8)
    scale = rng.uniform(0.5e-3, 2e-3, (out, -(-width // GROUP))).astype(np.float32)
    return _core._int8_panels(q, scale), q * np.repeat(scale, GROUP, 1)[:, :width].astype(np.float64)


@pytest.mark.parametrize(("rows", "width", "out"), [(1, 1, 1), (3, 129, 33), (70, 384, 100), (200, 700, 31)])
def test_int8(rows, width, out, isa, threads_restored):
    rng = np.random.default_rng(width)
    packed, w = weights(rng, out, width)
    x = rng.standard_normal((rows, width)).astype(np.float32) + np.float32(0.3)
    bias = rng.standard_normal(out).astype(np.float32)
    y = _core._linear_forward(x, packed, bias)
    # Two roundings for each group, and the rounding of the factors.
    groups = -(-width // GROUP)
    size = np.abs(split(x)).max() * 2 * np.abs(w).sum(1) + np.abs(bias)
    atol = (4 * groups + 6) * np.finfo(np.float32).eps * size.max()
    np.testing.assert_allclose(y, rounded(x) @ w.T + bias, rtol=0, atol=atol)
    for threads in (1, 2, 3):
        sa.set_num_threads(threads)
        np.testing.assert_array_equal(_core._linear_forward(x, packed, bias), y)
    alone = [_core._linear_forward(row[None], packed, bias)[0] for row in x]
    np.testing.assert_array_equal(alone, y)


def test_what_cannot_be_rounded_is_multiplied_as_it_is(isa):
    rng = np.random.default_rng(0)
    packed, w = weights(rng, 40, 200)
    x = rng.standard_normal((9, 200)).astype(np.float32)
    before = _core._linear_forward(x, packed, None)
    x[2, 7], x[4, 0], x[6, 3:5] = np.nan, np.inf, (3e38, -3e38)
    y = _core._linear_forward(x, packed, None)
    np.testing.assert_array_equal(np.delete(y, (2, 4, 6), 0), np.delete(before, (2, 4, 6), 0))
    assert np.isnan(y[2]).all()
    assert (np.isnan(y[4]) == (w[:, 0] == 0)).all()
    assert np.isposinf(y[4][w[:, 0] > 0]).all() and np.isneginf(y[4][w[:, 0] < 0]).all()
    expected = x[6].astype(np.float64) @ w.T
    np.testing.assert_allclose(y[6], expected, rtol=0, atol=1e-4 * 3e38 * np.abs(w).max())


def test_bfloat16(isa):
    rng = np.random.default_rng(1)
    bits, w = bfloat16(rng.standard_normal((33, 130)).astype(np.float32))
    packed = _core._bfloat16_panels(bits)
    x = rng.standard_normal((20, 130)).astype(np.float32)
    x[3, 5] = np.nan  # it spoils its row alone
    if _core._compact_unit(False) is None:
        with pytest.raises(RuntimeError, match="does not multiply bfloat16"):
            _core._linear_forward(x, packed, None)
        return
    y = _core._linear_forward(x, packed, None)
    own = bfloat16(x)[1].astype(np.float64)
    atol = 132 * np.finfo(np.float32).eps * np.nanmax(np.abs(own)) * np.abs(w).sum(1).max()
    np.testing.assert_allclose(y, own @ w.astype(np.float64).T, rtol=0, atol=atol)


@pytest.mark.parametrize(("rows", "width", "out"), [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
def test_empty_products(rows, width, out, isa):
    packed = _core._int8_panels(
        np.ones((out, width), np.int8), np.ones((out, -(-width // GROUP)), np.float32)
    )
    bias = np.arange(out, dtype=np.float32)
    y = _core._linear_forward(np.zeros((rows, width), np.float32), packed, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (rows, out)))
