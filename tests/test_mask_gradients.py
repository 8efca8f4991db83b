"""Gradients of float masks that heads and rows share: sums over what was broadcast, and the order of heads in them."""

import numpy as np
import pytest
from gradients import assert_gradients
from inputs import random_inputs
from numpy.testing import assert_allclose, assert_array_equal

import selfattn as sa
from selfattn import reference


@pytest.mark.parametrize("shape", [(2, 3, 40, 70), (40, 70), (3, 1, 70), (2, 1, 40, 70), (40, 1), (2, 3, 1, 1),
                                   (70,), (1, 3, 40, 1), (1,)], ids=str)  # fmt: skip
def test_mask_gradients_are_summed_over_broadcast_axes(isa, shape):
    for dtype in (np.float32, np.float64):
        arguments = random_inputs((2, 3, 40, 16), 70, dtype=dtype)
        mask = np.random.default_rng(4).standard_normal(shape).astype(np.float32)
        assert_gradients(arguments, {"attn_mask": mask, "is_causal": True}, what=f"{shape} {dtype}")


@pytest.mark.parametrize("shape", [(20, 1), (1, 1), (2, 1, 1)], ids=str)
def test_the_gradient_of_a_mask_that_is_one_number_for_all_keys(shape, isa):
    """The softmax does not see such a mask, and its gradient is 0, but for a sink, which has no part in it."""
    rng = np.random.default_rng(0)
    query, key, value, grad_out = rng.normal(size=(4, 2, 20, 8))
    arguments = query, key, value, rng.normal(size=shape)
    options = {"sinks": np.array([0.5, 1.0]), "wrt": "attn_mask"}
    got = sa.scaled_dot_product_attention_vjp(*arguments, **options)[1](grad_out).attn_mask
    _, pullback = reference.scaled_dot_product_attention_vjp(*arguments, sinks=options["sinks"])
    expected = pullback(grad_out).attn_mask
    assert np.abs(expected).max() > 0.01
    assert_allclose(got, expected, rtol=0, atol=1e-13)  # sums of at most 800 terms below 10, a rounding each


# So many keys and heads that share a mask that one head follows another through its rows: attention_backward.c.
LARGE = {
    "heads": ((8, 520, 128), (8, 410, 128), {}),
    "causal": ((2, 8, 520, 96), (2, 8, 520, 96), {"is_causal": True, "dropout_p": 0.1, "rng": 4}),
    "groups of five": (
        (40, 110, 128),
        (8, 410, 128),
        {"enable_gqa": True},
    ),  # blocks end amid a row of the mask
    "closed blocks": ((8, 640, 64), (8, 900, 64), {"block_mask": "documents"}),
}


def large(name):
    of_queries, of_keys, options = LARGE[name]
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal(shape, dtype=np.float32) for shape in (of_queries, of_keys, of_keys))
    if "block_mask" in options:
        ids = np.arange(640) // 150, np.arange(900) // 210
        options = {"block_mask": sa.BlockMask.from_documents(*ids)}
    mask = rng.standard_normal((of_queries[-2], of_keys[-2]), dtype=np.float32)
    mask[7:9] = -np.inf
    return (q, k, v), {"attn_mask": mask, **options}


@pytest.mark.parametrize("name", LARGE)
def test_heads_that_follow_one_another_through_a_mask(name, isa):
    assert_gradients(*large(name), num_threads=3, what=name)


@pytest.mark.parametrize("name", LARGE)
def test_heads_that_follow_have_the_same_bits_without_the_mask(name):
    """And in as many threads as there are heads: each waits for the one before."""
    arguments, options = large(name)
    expected = None
    for threads in (1, 2, 8):
        for wrt in (("query", "key", "value", "attn_mask"), ("query", "key", "value")):
            out, pullback = sa.scaled_dot_product_attention_vjp(
                *arguments, **options, wrt=wrt, num_threads=threads
            )
            got = pullback(out)
            expected = expected or got
            for a, b in zip(got[: len(wrt)], expected, strict=False):
                assert_array_equal(a, b, err_msg=f"{threads} {wrt}")
