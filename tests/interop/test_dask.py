"""Dask: attention over chunks is attention, whatever the chunks, the scheduler and the number of workers."""

import numpy as np
import pytest
from operations import HEADS, Draw, block_mask_of, mask_of, of_heads, positions

import selfattn as sa

dask = pytest.importorskip("dask")
pytest.importorskip("distributed")
da = pytest.importorskip("dask.array")
from selfattn.interop import dask as interop

EPS = {"float64": 1e-14, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}


def chunked(d, x):
    """An array of Dask, cut at random places."""
    cuts = [np.sort(d.rng.integers(0, n + 1, d.rng.integers(0, 4))) for n in x.shape]
    ends = [np.unique([0, *cut, n]) for cut, n in zip(cuts, x.shape, strict=True)]
    return da.from_array(x, chunks=tuple(tuple(np.diff(end).tolist()) or (0,) for end in ends))


def drawn(d):
    """Query, key, value and options of a call."""
    heads, key_heads = d.one_of(HEADS)
    batch, n, s, width = d.one_of((1, 2)), *d.rng.integers(1, 50, 2), d.one_of((1, 3, 16))
    arrays = d.normal(batch, heads, n, width), *d.normal(2, batch, key_heads, s, width)
    options = {"enable_gqa": heads != key_heads, "attn_mask": mask_of(d, (batch, heads), n, s)}
    positions(d, options)
    of_heads(d, options, heads)
    if d.chance(0.3):
        options["key_lengths"] = d.rng.integers(0, s + 1, (batch, 1))
    return arrays, options | block_mask_of(d, int(n), int(s))


@pytest.mark.parametrize("seed", range(10))
def test_chunks_change_nothing(seed):
    for case in range(10):
        d = Draw(seed, case, most=100)
        arrays, options = drawn(d)
        (out, lse), pullback = sa.scaled_dot_product_attention_vjp(*arrays, return_lse=True, **options)
        grads = d.normal(*out.shape), np.where(lse == -np.inf, 0, d.normal(*lse.shape, dtype=lse.dtype))
        wanted = [out, lse, *pullback(*grads)[:3]]
        cut = [chunked(d, x) for x in arrays]
        (out, lse), pullback = interop.scaled_dot_product_attention_vjp(*cut, return_lse=True, **options)
        lazy = [out, lse, *pullback(*grads)[:3]]
        found = dask.compute(*lazy, scheduler="sync")
        for own, shape, expected in zip(found, lazy, wanted, strict=True):
            assert (own.dtype, own.shape, shape.dtype, shape.shape) == (expected.dtype, expected.shape) * 2
            size = np.abs(expected[expected != -np.inf]).max(initial=1)
            np.testing.assert_allclose(
                own.astype(float), expected.astype(float), rtol=0, atol=EPS[d.name] * float(size)
            )
