"""merge_attention: attention over parts of the keys, put together, is attention over all of them."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfattn as sa
from selfattn import reference

merges = pytest.mark.parametrize(
    "merge", [reference.merge_attention, sa.merge_attention], ids=["reference", "selfattn"]
)


def bound(dtype, parts, lse, out):
    """Largest error that rounding explains, for output and lse.

    An lse is rounded to its dtype, an error of eps · |lse|, which exp makes relative in a share; the sums
    have as many terms as there are parts, and a few roundings; then the result is rounded to its own dtype.
    """
    wide = np.float64 if np.dtype(dtype) == np.float64 else np.float32
    eps = float(np.finfo(wide).eps)
    finite = np.abs(lse[np.isfinite(lse)]).max(initial=1.0)
    relative = (4.0 * finite + 2.0 * parts + 8.0) * eps
    return (relative + float(np.finfo(dtype).eps)) * np.abs(out).max(initial=1.0), relative * max(finite, 1.0)


@st.composite
def splits(draw):
    """Draw queries (2, 4, 8), keys and values of S rows, where to cut them, a mask and the dtype."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_keys = draw(st.integers(0, 20))
    cuts = sorted(draw(st.lists(st.integers(0, n_keys), max_size=5)))  # equal cuts give empty parts
    arrays = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, n_keys, 8)), rng.normal(size=(2, n_keys, 3))
    mask = rng.random((2, 4, n_keys)) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    return arrays, [0, *cuts, n_keys], mask, draw(st.sampled_from([np.float16, np.float32, np.float64]))


@merges
@settings(max_examples=200, deadline=None)
@given(splits())
def test_parts_of_the_keys_make_the_whole(merge, problem):
    (query, key, value), cuts, mask, dtype = problem
    query, key, value = (x.astype(dtype) for x in (query, key, value))
    outs, lses = [], []
    for a, b in itertools.pairwise(cuts):
        out, lse = reference.scaled_dot_product_attention(
            query, key[:, a:b], value[:, a:b], mask[..., a:b], return_lse=True, compute_dtype=np.float64
        )
        outs.append(out.astype(dtype))
        lses.append(lse.astype(np.float64 if dtype == np.float64 else np.float32))
    out, lse = merge(outs, lses)
    whole_out, whole_lse = reference.scaled_dot_product_attention(
        query, key, value, mask, return_lse=True, compute_dtype=np.float64
    )
    assert out.dtype == dtype
    assert lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    finite = [np.abs(part[np.isfinite(part)]).max(initial=0.0) for part in lses]
    atol_out, atol_lse = bound(dtype, len(outs) + 20, np.array(finite), np.stack(outs))
    np.testing.assert_allclose(out.astype(np.float64), whole_out, rtol=0, atol=2 * atol_out)
    np.testing.assert_allclose(lse, whole_lse, rtol=0, atol=2 * atol_lse)


@merges
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_one_part_is_returned_as_it_is(merge, dtype):
    rng = np.random.default_rng(0)
    out, lse = rng.normal(size=(3, 4, 5)).astype(dtype), rng.normal(size=(3, 4))
    lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
    got = merge([out], [lse])
    np.testing.assert_array_equal(got[0], out)
    np.testing.assert_array_equal(got[1], lse)
    assert got[0] is not out
    assert all(x.flags.c_contiguous and x.flags.writeable for x in got)


@merges
def test_rows_that_attended_to_nothing(merge):
    out, lse = np.array([[1.0, 2.0]]), np.array([0.5])
    dead = np.zeros((1, 2)), np.array([-np.inf])
    got = merge([dead[0], dead[0]], [dead[1], dead[1]])
    assert (got[0].tolist(), got[1].tolist()) == ([[0.0, 0.0]], [-np.inf])
    for garbage in (0.0, np.nan, np.inf):  # what a dead part's output holds is not looked at
        for order in (1, -1):
            parts = [(out, lse), (np.full((1, 2), garbage), dead[1])][::order]
            got = merge([part[0] for part in parts], [part[1] for part in parts])
            assert (got[0].tolist(), got[1].tolist()) == (out.tolist(), lse.tolist())


@merges
def test_large_lses_do_not_overflow(merge):
    for shift in (0.0, 1e4, -1e4, 1e300):
        out, lse = merge([[[1.0]], [[3.0]]], [[shift], [shift]])
        assert out.item() == 2.0
        assert abs(lse.item() - shift - np.log(2.0)) <= 4 * np.finfo(float).eps * max(1.0, abs(shift))
    out, lse = merge([[[1.0]], [[3.0]]], [[-1e4], [1e4]])
    assert (out.item(), lse.item()) == (3.0, 1e4)


@merges
def test_nan_is_not_hidden(merge):
    out, lse = merge([[[1.0], [1.0], [np.nan]], [[3.0]] * 3], [[np.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(np.isnan(out[:, 0]), [True, False, True])
    np.testing.assert_array_equal(np.isnan(lse), [True, False, False])


@merges
def test_the_sink_belongs_to_one_part(merge):
    rng = np.random.default_rng(3)
    query, key, value = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 6, 8)), rng.normal(size=(2, 6, 3))
    sinks = np.array([0.7, -0.2])
    whole = reference.scaled_dot_product_attention(query, key, value, sinks=sinks, return_lse=True)
    for n_first in (0, 2, 6):  # 0: a part of the sink alone
        first = reference.scaled_dot_product_attention(
            query, key[:, :n_first], value[:, :n_first], sinks=sinks, return_lse=True
        )
        rest = reference.scaled_dot_product_attention(
            query, key[:, n_first:], value[:, n_first:], return_lse=True
        )
        out, lse = merge(*zip(first, rest, strict=True))
        atol_out, atol_lse = bound(np.float64, 2 + 7, whole[1], value)
        np.testing.assert_allclose(out, whole[0], rtol=0, atol=2 * atol_out)
        np.testing.assert_allclose(lse, whole[1], rtol=0, atol=2 * atol_lse)


@merges
def test_dtypes(merge):
    def result(out_dtypes, lse_dtype=np.float32):
        outs = [np.ones((1, 2), dtype) for dtype in out_dtypes]
        return tuple(x.dtype.name for x in merge(outs, [np.zeros(1, lse_dtype)] * len(outs)))

    assert result(["f2", "f2"]) == ("float16", "float32")
    assert result(["f2", "f4"]) == ("float32", "float32")
    assert result(["f4", "f8"]) == ("float64", "float64")
    assert result(["i8"]) == ("float64", "float64")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    assert result([bfloat16, bfloat16]) == ("bfloat16", "float32")


@merges
def test_float16_and_bfloat16_meet_in_float32(merge):
    """As in attention; NumPy does not promote them."""
    outs = np.ones((1, 2), np.float16), np.full((1, 2), 2, "bfloat16")
    out, lse = merge(outs, [np.zeros(1, np.float32)] * 2)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    np.testing.assert_array_equal(out, [[1.5, 1.5]])


def test_what_is_no_sequence_of_parts():
    with pytest.raises(TypeError, match="outs must be a sequence of arrays, got NoneType"):
        sa.merge_attention(None, None)
    with pytest.raises(TypeError, match="lses must be a sequence of arrays, got int"):
        sa.merge_attention_vjp([np.ones((1, 2))], 3)


@merges
def test_shapes_without_elements(merge):
    out, lse = merge([np.ones((0, 3, 4))] * 2, [np.ones((0, 3))] * 2)
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))
    out, lse = merge([np.ones((3, 0))] * 2, [np.zeros(3)] * 2)
    assert (out.shape, lse.shape) == ((3, 0), (3,))
    np.testing.assert_array_equal(lse, np.log(2.0))


@pytest.mark.parametrize(
    ("error", "match", "outs", "lses"),
    [
        (ValueError, "at least one", [], []),
        (ValueError, "2 outs but 1 lses", [np.ones((3, 4))] * 2, [np.ones(3)]),
        (ValueError, r"outs\[1\] has shape \(3, 5\)", [np.ones((3, 4)), np.ones((3, 5))], [np.ones(3)] * 2),
        (ValueError, r"lses\[1\] has shape \(4,\)", [np.ones((3, 4))] * 2, [np.ones(3), np.ones(4)]),
        (ValueError, r"lses\[0\] has shape \(3, 1\)", [np.ones((3, 4))], [np.ones((3, 1))]),
        (ValueError, "2 dims", [np.ones(3)], [np.ones(())]),
        (TypeError, r"outs\[0\].*bool", [np.ones((3, 4), bool)], [np.ones(3)]),
        (TypeError, r"lses\[0\].*complex", [np.ones((3, 4))], [np.ones(3, complex)]),
        (TypeError, "MaskedArray", [np.ma.ones((3, 4))], [np.ones(3)]),
    ],
)
def test_errors_name_the_part_and_the_shapes(error, match, outs, lses):
    with pytest.raises(error, match=match):
        sa.merge_attention(outs, lses)
