"""merge_attention: attention over parts of the keys, here or in other processes, merged, is attention over all of
them.
"""

import concurrent.futures
import itertools
import multiprocessing

import numpy as np
import pytest
from before_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from inputs import BFLOAT16, FLOAT_IDS, FLOATS, random_inputs
from refusals import refusals
from tolerances import assert_within, rounding, truth

import selfattn as sa
from selfattn import reference

merges = pytest.mark.parametrize(
    "merge", [reference.merge_attention, sa.merge_attention], ids=["reference", "selfattn"]
)


@merges
@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
@pytest.mark.parametrize("owner", range(5))
def test_parts_of_the_keys_make_the_whole(merge, dtype, owner):
    """A part may be empty, and one part has the sink. Other tests have gradients and any split of the keys."""
    query, key, value = random_inputs((2, 6, 8), 20, dtype=dtype, v_width=3)
    mask = np.random.default_rng(1).random((2, 6, 20)) < 0.4
    mask[:, 3] = False
    sinks, parts = np.array([0.7, -0.2]), []
    for n, (a, b) in enumerate(itertools.pairwise([0, 3, 3, 4, 15, 20])):
        out, lse = reference.scaled_dot_product_attention(
            query,
            key[:, a:b],
            value[:, a:b],
            mask[..., a:b],
            sinks=sinks if n == owner else None,
            return_lse=True,
            compute_dtype=np.float64,
        )
        parts.append((out.astype(dtype), lse.astype(np.float64 if dtype == np.float64 else np.float32)))
    whole = truth(query, key, value, mask, sinks=sinks)
    out, lse = merge(*zip(*parts, strict=True))
    assert (out.dtype, lse.dtype) == (dtype, whole.lse_dtype)
    # each part's output is a mean of values
    rounded = rounding(dtype, np.abs(value.astype(np.float64)).max())
    assert_within(out, whole.out, whole.out_bound + rounded)
    assert_within(lse, whole.lse, whole.lse_bound)


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
    for garbage in (0.0, np.nan, np.inf):  # the output of a part without keys is not read
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
@pytest.mark.parametrize(
    ("kinds", "out_dtype", "lse_dtype"),
    [
        ([np.float16] * 2, np.float16, np.float32),
        ([BFLOAT16] * 2, BFLOAT16, np.float32),
        ([np.float16, BFLOAT16], np.float32, np.float32),  # as in attention; NumPy does not promote them
        ([np.float16, np.float32], np.float32, np.float32),
        ([np.float32, np.float64], np.float64, np.float64),
        ([np.int64, np.int64], np.float64, np.float64),
    ],
)
def test_dtypes(merge, kinds, out_dtype, lse_dtype):
    outs = [np.full((1, 2), n + 1, dtype) for n, dtype in enumerate(kinds)]
    out, lse = merge(outs, [np.zeros(1, np.float32)] * 2)
    assert (out.dtype, lse.dtype) == (out_dtype, lse_dtype)
    np.testing.assert_array_equal(out, [[1.5, 1.5]])


@merges
def test_shapes_without_elements(merge):
    out, lse = merge([np.ones((0, 3, 4))] * 2, [np.ones((0, 3))] * 2)
    assert (out.shape, lse.shape) == ((0, 3, 4), (0, 3))
    out, lse = merge([np.ones((3, 0))] * 2, [np.zeros(3)] * 2)
    assert (out.shape, lse.shape) == ((3, 0), (3,))
    np.testing.assert_array_equal(lse, np.log(2.0))


ONES = np.ones((3, 4))
test_errors_name_the_part_and_the_shapes = refusals(
    (lambda: sa.merge_attention([], []), ValueError, "at least one"),
    (lambda: sa.merge_attention(None, None), TypeError, "outs must be a sequence of arrays, got NoneType"),
    (lambda: sa.merge_attention_vjp([ONES], 3), TypeError, "lses must be a sequence of arrays, got int"),
    (lambda: sa.merge_attention([ONES] * 2, [np.ones(3)]), ValueError, "2 outs but 1 lses"),
    (
        lambda: sa.merge_attention([ONES, np.ones((3, 5))], [np.ones(3)] * 2),
        ValueError,
        r"outs\[1\] has shape \(3, 5\)",
    ),
    (
        lambda: sa.merge_attention([ONES] * 2, [np.ones(3), np.ones(4)]),
        ValueError,
        r"lses\[1\] has shape \(4,\)",
    ),
    (lambda: sa.merge_attention([ONES], [np.ones((3, 1))]), ValueError, r"lses\[0\] has shape \(3, 1\)"),
    (lambda: sa.merge_attention([np.ones(3)], [np.ones(())]), ValueError, "2 dims"),
    (lambda: sa.merge_attention([ONES > 0], [np.ones(3)]), TypeError, r"outs\[0\].*bool"),
    (lambda: sa.merge_attention([ONES], [np.ones(3, complex)]), TypeError, r"lses\[0\].*complex"),
    (lambda: sa.merge_attention([np.ma.ones((3, 4))], [np.ones(3)]), TypeError, "MaskedArray"),
)


def attend(query, key, value, mask, sinks):
    return sa.scaled_dot_product_attention(query, key, value, mask, sinks=sinks, return_lse=True)


def gradients(query, key, value, mask, sinks, d_out, d_lse):
    wrt = ["query", "key", "value"] + ([] if sinks is None else ["sinks"])
    _, pullback = sa.scaled_dot_product_attention_vjp(
        query, key, value, mask, sinks=sinks, return_lse=True, wrt=wrt
    )
    return pullback(d_out, d_lse)


def in_shards(run, cuts, arrays, mask, sinks, owner, d_out, d_lse):
    """Compute each shard alone, merge the results, and return the gradients; `run` maps a function over shards."""
    query, key, value = arrays
    shards = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    each = (
        [query] * len(shards),
        [key[..., s, :] for s in shards],
        [value[..., s, :] for s in shards],
        [mask[..., s] for s in shards],
        [sinks if n == owner else None for n in range(len(shards))],
    )
    parts = list(run(attend, *each))
    (out, lse), pullback = sa.merge_attention_vjp(*zip(*parts, strict=True))
    found = list(run(gradients, *each, *pullback(d_out, d_lse)))
    d_key, d_value = (np.concatenate([f[n] for f in found], -2) for n in (1, 2))
    d_sinks = None if sinks is None else found[owner].sinks
    return out, lse, (sum(f.query for f in found), d_key, d_value, d_sinks)


def assert_the_whole(found, arrays, mask, sinks, d_out, d_lse):
    query, key, value = arrays
    names = ["query", "key", "value"] + ([] if sinks is None else ["sinks"])
    (out, lse), pullback = sa.scaled_dot_product_attention_vjp(
        *arrays, mask, sinks=sinks, return_lse=True, wrt=names
    )
    wanted = pullback(d_out, d_lse)
    eps, length = float(np.finfo(out.dtype).eps), key.shape[-2] + 2
    size = [np.abs(x).max(initial=1.0) for x in (query, key, value, d_out, d_lse)]
    # A score, and the lse, is known to a few eps of its size, and every weight relatively to that; dS is a weight
    # times a sum over Ev, at most. The rest are sums over keys or rows, a rounding for each term.
    score = size[0] * size[1] * np.sqrt(query.shape[-1]) + np.log(length) + 1
    weight = (4 * score + 2 * length + 8) * eps
    d_score = value.shape[-1] * size[2] * size[3] + size[4]
    rows = query.shape[-2] + 2
    np.testing.assert_allclose(found[0], out, rtol=0, atol=weight * size[2])
    np.testing.assert_allclose(found[1], lse, rtol=0, atol=weight)
    bounds = (size[1] * d_score * length, size[0] * d_score * rows, size[3] * rows, d_score * rows)
    for name, got, bound in zip(names, found[2], bounds, strict=False):
        np.testing.assert_allclose(got, getattr(wanted, name), rtol=0, atol=weight * bound, err_msg=name)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_shards_in_processes_make_the_whole(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    rng = np.random.default_rng(0)
    query, key, value, d_out = rng.standard_normal((4, 2, 96, 16))
    d_lse, sinks = rng.standard_normal((2, 96)), rng.standard_normal(2)
    mask = np.tri(96, dtype=bool)  # the first rows see no key of the later shards
    mask[[5, 70]] = False  # two rows see no key at all, only the sink
    cuts = [0, 10, 11, 11, 60, 96]  # shards of very different sizes, and one without keys
    # the parent has used its threads before it forks
    sa.scaled_dot_product_attention(query, key, value, num_threads=2)

    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        problem = (query, key, value), mask, sinks
        found = in_shards(pool.map, cuts, *problem, 3, d_out, d_lse)
        assert_the_whole(found, *problem, d_out, d_lse)
        problem = (query, key, value), mask, None
        found = in_shards(pool.map, cuts, *problem, None, d_out, np.zeros_like(d_lse))
        assert_the_whole(found, *problem, d_out, np.zeros_like(d_lse))
    out, lse, (d_query, *_) = found
    assert not out[:, [5, 70]].any()
    assert not d_query[:, [5, 70]].any()
    assert (lse[:, [5, 70]] == -np.inf).all()


@st.composite
def problems(draw):
    """Draw inputs, a mask that may leave rows without keys, cuts that may make empty shards, and who has the sink."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_keys = draw(st.integers(0, 20))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, n_keys), max_size=5))), n_keys]
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    query, key = rng.normal(size=(2, 5, 8)).astype(dtype), rng.normal(size=(2, n_keys, 8)).astype(dtype)
    value = rng.normal(size=(2, n_keys, 3)).astype(dtype)
    mask = rng.random((2, 5, n_keys)) < draw(st.sampled_from([0.1, 0.6, 1.0]))
    sinks = draw(st.sampled_from([None, rng.normal(size=2)]))
    owner = None if sinks is None else draw(st.integers(0, len(cuts) - 2))
    d_out, d_lse = rng.normal(size=(2, 5, 3)).astype(dtype), rng.normal(size=(2, 5)).astype(dtype)
    dead = ~mask.any(axis=-1) & (sinks is None)
    d_lse[dead] = draw(st.sampled_from([1.0, np.nan]))  # an lse of -inf passes no gradient on
    return cuts, (query, key, value), mask, sinks, owner, d_out, np.where(dead, 0, d_lse), d_lse


@examples(200)
@given(problems())
def test_any_split_over_keys(problem):
    cuts, arrays, mask, sinks, owner, d_out, d_lse, given_d_lse = problem
    found = in_shards(map, cuts, arrays, mask, sinks, owner, d_out, given_d_lse)
    assert_the_whole(found, arrays, mask, sinks, d_out, d_lse)
