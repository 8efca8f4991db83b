"""Attention over shards of the keys in other processes, merged: forward and backward equal the whole."""

import concurrent.futures
import itertools
import multiprocessing

import numpy as np
import pytest

import selfattn as sa

EPS = float(np.finfo(np.float64).eps)


def attend(query, key, value, mask):
    return sa.scaled_dot_product_attention(query, key, value, mask, return_lse=True)


def gradients(query, key, value, mask, d_out, d_lse):
    _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, mask, return_lse=True)
    return pullback(d_out, d_lse)[:3]


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_shards_in_processes_make_the_whole(method):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    rng = np.random.default_rng(0)
    q, k, v, d_out = rng.standard_normal((4, 2, 96, 16))
    cuts = [0, 10, 11, 60, 96]
    shards = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    causal = np.tri(96, dtype=bool)  # the later shards are closed to the first rows altogether
    keys, values = [k[:, s] for s in shards], [v[:, s] for s in shards]
    masks = [causal[:, s] for s in shards]
    sa.scaled_dot_product_attention(q, k, v, num_threads=2)  # the parent has used its threads before it forks

    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        parts = list(pool.map(attend, [q] * 4, keys, values, masks))
        (out, lse), merge_pullback = sa.merge_attention_vjp(*zip(*parts, strict=True))
        d_outs, d_lses = merge_pullback(d_out, np.zeros_like(lse))
        found = list(pool.map(gradients, [q] * 4, keys, values, masks, d_outs, d_lses))

    expected, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    wanted = pullback(d_out)
    # a few roundings for each of the 96 terms of a sum
    np.testing.assert_allclose(out, expected, rtol=0, atol=96 * EPS)
    np.testing.assert_allclose(sum(f[0] for f in found), wanted.query, rtol=0, atol=8 * 96 * EPS)
    np.testing.assert_allclose(
        np.concatenate([f[1] for f in found], 1), wanted.key, rtol=0, atol=8 * 96 * EPS
    )
    np.testing.assert_allclose(
        np.concatenate([f[2] for f in found], 1), wanted.value, rtol=0, atol=8 * 96 * EPS
    )
