"""Attention over shards of the keys, here or in other processes, merged: forward and backward equal the whole."""

import concurrent.futures
import itertools
import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import selfattn as sa


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
        [query] * len(shards), [key[..., s, :] for s in shards], [value[..., s, :] for s in shards],
        [mask[..., s] for s in shards], [sinks if n == owner else None for n in range(len(shards))],
    )  # fmt: skip
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


@settings(max_examples=200, deadline=None)
@given(problems())
def test_any_split_over_keys(problem):
    cuts, arrays, mask, sinks, owner, d_out, d_lse, given_d_lse = problem
    found = in_shards(map, cuts, arrays, mask, sinks, owner, d_out, given_d_lse)
    assert_the_whole(found, arrays, mask, sinks, d_out, d_lse)
