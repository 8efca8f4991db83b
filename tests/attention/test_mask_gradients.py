"""Gradients of float masks: sums over axes that were broadcast, and the order in which heads that share a mask add to its rows
(csrc/drivers/attention_backward.c). Masks of every shape: test_fuzz.py."""

import numpy as np
import pytest
from gradients import assert_gradients
from instruction_sets import check
from numpy.testing import assert_array_equal

import selfattn as sa
from selfattn import reference

ALL = ("query", "key", "value", "attn_mask")


def inputs(*lead, length=200, keys=150, key_heads=None, seed=0):
    """Query, key and value of 20 and 24 features, and a gradient of the output."""
    rng = np.random.default_rng(seed)
    kv = lead if key_heads is None else (*lead[:-1], key_heads)
    shapes = (*lead, length, 20), (*kv, keys, 20), (*kv, keys, 24), (*lead, length, 24)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def mask_of(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", [(64,), (2, 1, 1, 64), (1, 4, 1, 64)], ids=str)
@pytest.mark.parametrize("length", [2048, 4500])
def test_sums_over_many_rows_keep_their_digits(shape, length):
    """Rows are summed in blocks, at most 64 for each head, and these sums are added; 4500 rows exceed 64 blocks.

    An addition is off by eps/√12 of the sum so far, in the root of the mean square: n of them to a sum that grows evenly by
    √(n/3)/√12 of its eps. That is 1 for 32 blocks, a half for 8 heads, and 21 for all rows one by one. (The shares' own
    errors do not conspire, since grad_out differs from row to row.)
    """
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((2, 4, n, 16), dtype=np.float32) for n in (length, 64, 64))
    mask = rng.standard_normal(shape, dtype=np.float32)
    grad_out = rng.uniform(0.5, 1.5, query.shape).astype(np.float32)
    _, exact = reference.scaled_dot_product_attention_vjp(query, key, value, mask, compute_dtype=np.float64)
    truth = exact(grad_out.astype(np.float64)).attn_mask
    _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, mask, wrt="attn_mask")
    error = np.sqrt(np.mean((pullback(grad_out).attn_mask - truth) ** 2) / np.mean(truth**2))
    print(f"{sa.get_isa()} {shape}: {error / np.finfo(np.float32).eps:.2f} eps")
    assert error <= 3 * np.finfo(np.float32).eps


@pytest.mark.parametrize("options", [{}, {"window": (30, 20)}], ids=str)
def test_long_keys_in_parts_and_few_heads_that_share(options):
    *arrays, _ = inputs(2, length=800, keys=780)
    check(arrays, options | {"attn_mask": mask_of(800, 780)}, num_threads=2)


def assert_same_bits(arrays, grad_out, options, threads, wrts=(ALL,)):
    """Neither threads nor the other gradients of a call change a bit."""
    first = {}
    for n, wrt in [*((n, wrts[0]) for n in threads), *zip(threads[1:], wrts[1:], strict=False)]:
        _, pullback = sa.scaled_dot_product_attention_vjp(*arrays, **options, wrt=wrt, num_threads=n)
        got = pullback(grad_out)
        for name in wrt:
            expected = first.setdefault(name, getattr(got, name))
            assert_array_equal(getattr(got, name), expected, err_msg=f"{name} {n} {wrt}")


@pytest.mark.parametrize("shape", [(900, 1), (900, 850), (6, 900, 1), (1, 850)], ids=str)
def test_parts_of_keys_do_not_meet_in_the_mask(shape):
    """With few groups, keys are split in parts; a mask with one number for all keys has the same elements in each part."""
    for key_heads in (2, 6, 1):
        *arrays, grad_out = inputs(6, length=900, keys=850, key_heads=key_heads)
        options = {"attn_mask": mask_of(*shape), "sinks": np.linspace(-1, 5, 6), "enable_gqa": True}
        assert_same_bits(arrays, grad_out, options, (1, 4, 3))
    assert_gradients(arrays, options, what=f"{shape}")


MASKS = [mask_of(200, 150), mask_of(3, 1, 200, 150), mask_of(3, 5, 200, 150), mask_of(3, 1, 1, 150), mask_of(200, 1),
         np.broadcast_to(mask_of(200, 150), (3, 5, 200, 150)), np.broadcast_to(mask_of(150), (3, 5, 200, 150))]  # fmt: skip


@pytest.mark.parametrize("key_heads", [5, 1])
def test_the_masks_gradient_changes_no_bit_of_the_others(isa, key_heads):
    """Heads that share a mask go through its rows in the same order, whether or not they have to wait for each other."""
    *arrays, grad_out = inputs(3, 5, key_heads=key_heads)
    for mask in MASKS:
        options = {"attn_mask": mask, "enable_gqa": True, "is_causal": True}
        assert_same_bits(arrays, grad_out, options, (1, 2, 7), (ALL, ALL[:3], ("key", "value")))


@pytest.mark.parametrize("of_each_head", [False, True])
def test_documents_whose_heads_share_a_mask(isa, of_each_head):
    """Blocks of rows end with documents only if these are the same for all heads: turns go by rows."""
    ids = np.sort(np.random.default_rng(4).integers(0, 7, (10 if of_each_head else 1, 300)))
    mask, documents = mask_of(300, 300), sa.BlockMask.from_documents(ids, ids)
    for key_heads in (10, 5, 2):
        *arrays, grad_out = inputs(10, length=300, keys=300, key_heads=key_heads)
        options = {"attn_mask": mask, "block_mask": documents, "enable_gqa": True}
        assert_same_bits(arrays, grad_out, options, (1, 2, 3), (ALL, ALL[:3]))
    assert_gradients(arrays, options)


def test_packed_sequences_whose_heads_share_masks():
    """Rows of packed sequences are far apart in memory: dK and dV are gathered while heads take turns."""
    heads, lengths = 11, (130, 40, 300)
    rng = np.random.default_rng(3)
    packed = [rng.standard_normal((sum(lengths), heads, 32), dtype=np.float32) for _ in range(4)]
    ends = np.cumsum([0, *lengths])
    masks = [mask_of(n, n, seed=n) for n in lengths]
    _, pullback = sa.varlen_attention_vjp(*packed[:3], ends, ends, attn_mask=masks, wrt=ALL)
    found = pullback(packed[3])
    for s, (n, mask) in enumerate(zip(lengths, masks, strict=True)):
        own = [x[ends[s] : ends[s + 1]].swapaxes(0, 1) for x in packed]
        _, pullback = sa.scaled_dot_product_attention_vjp(*(x.copy() for x in own[:3]), mask, wrt=ALL)
        expected = pullback(own[3].copy())
        assert_array_equal(found.attn_mask[s], expected.attn_mask, err_msg=str(n))
        for name in ("query", "key", "value"):
            rows = getattr(found, name)[ends[s] : ends[s + 1]].swapaxes(0, 1)
            assert_array_equal(rows, getattr(expected, name), err_msg=f"{name} {n}")


# With this many keys and heads per mask, heads follow one another through the rows of their mask: attention_backward.c.
DOCUMENTS = sa.BlockMask.from_documents(np.arange(640) // 150, np.arange(900) // 210)
LARGE = {
    "heads": ((8, 520, 128), (8, 410, 128), {}),
    "causal": ((2, 8, 520, 96), (2, 8, 520, 96), {"is_causal": True, "dropout_p": 0.1, "rng": 4}),
    # blocks end within a row of the mask
    "groups of five": ((40, 110, 128), (8, 410, 128), {"enable_gqa": True}),
    "closed blocks": ((8, 640, 64), (8, 900, 64), {"block_mask": DOCUMENTS}),
}


@pytest.mark.parametrize("name", LARGE)
def test_heads_that_follow_one_another_through_a_mask(name):
    """The other gradients have the same bits as without the mask's; each head has a thread, which waits for the previous head."""
    of_queries, of_keys, options = LARGE[name]
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in (of_queries, of_keys, of_keys)]
    mask = rng.standard_normal((of_queries[-2], of_keys[-2]), dtype=np.float32)
    mask[7:9] = -np.inf
    options = {"attn_mask": mask, **options}
    assert_gradients(arrays, options, num_threads=3, what=name)
    out = sa.scaled_dot_product_attention(*arrays, **options)
    assert_same_bits(arrays, out, options, (1, 2, 8), (ALL, ALL[:3]))
