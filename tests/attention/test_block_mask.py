"""Block masks: each kind is its dense boolean mask, with every other option, forward and backward."""

import pickle
import re
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from bad_calls import with_tables
from covering import TOGETHER, covering
from gradients import assert_gradients
from inputs import FLOAT_IDS, FLOATS, options_together, random_inputs
from instruction_sets import ISAS, check, using
from tolerances import assert_attention

import selfattn as sa
from selfattn import BlockMask, reference

pytestmark = pytest.mark.usefixtures("one_thread")
attend = sa.scaled_dot_product_attention
SIZES = [(0, 5), (5, 0), (1, 1), (1, 70), (3, 2300), (17, 5), (33, 33), (64, 65), (130, 65), (65, 193)]


def contiguous_ids(rng, lead, length):
    return np.sort(rng.integers(0, 4, size=(*lead, length)), axis=-1)


def scattered_ids(rng, lead, length):
    return np.repeat(rng.integers(-2, 2, size=(*lead, length)), 1 + rng.integers(0, 9), axis=-1)[..., :length]


def pattern(rng, lead, n_queries, n_keys, sizes):
    return rng.random((*lead, -(-n_queries // sizes[0]), -(-n_keys // sizes[1]))) < 0.4


def blocks(sizes):
    return lambda rng, lead, L, S: BlockMask.from_blocks(pattern(rng, lead, L, S, sizes), sizes)


# Name -> a function of (rng, lead, L, S); lead broadcasts to that of the call.
KINDS = {
    "documents": lambda rng, lead, L, S: BlockMask.from_documents(
        contiguous_ids(rng, lead, L), contiguous_ids(rng, lead[:1] + (1,) * len(lead[1:]), S)
    ),
    "scattered": lambda rng, lead, L, S: BlockMask.from_documents(
        scattered_ids(rng, lead, L), scattered_ids(rng, lead, S)
    ),
    "prefix": lambda rng, lead, L, S: BlockMask.prefix_lm(rng.integers(0, S + 1, size=lead)),
    "prefix_lower_right": lambda rng, lead, L, S: BlockMask.prefix_lm(
        rng.integers(0, S + 1, size=lead), causal="lower_right"
    ),
    "blocks_of_64": blocks((64, 64)),
    "blocks_of_16_and_100": blocks((16, 100)),
    "blocks_of_7_and_1": blocks((7, 1)),
    "combined": lambda rng, lead, L, S: (
        blocks((20, 12))(rng, lead, L, S)
        & BlockMask.prefix_lm(S // 2)
        & BlockMask.from_documents(scattered_ids(rng, (), L), scattered_ids(rng, (), S))
        & BlockMask.from_documents(contiguous_ids(rng, lead, L), contiguous_ids(rng, lead, S))
    ),
}
kinds = pytest.mark.parametrize("kind", KINDS)
floats = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)


def assert_same_as_dense(arrays, mask, options, what=""):
    """Against the reference in float64, which reads the mask as a dense one; and the tiles that were left out change nothing."""
    out, lse, weights = assert_attention(*arrays, **options, block_mask=mask, what=what)
    dense = np.broadcast_to(mask.to_dense(*weights.shape[-2:]), weights.shape)
    assert not weights[~dense].any(), what
    return out, lse, weights


def test_each_kind_with_every_option():
    """Any two of kind, size, options, dtype, heads and instruction set are together in one of these cases."""
    cases = covering(
        kind=list(KINDS), size=SIZES, options=[(), *TOGETHER], dtype=FLOATS, key_heads=[None, 1, 2],
        lead=[(), (1,), (2, 1), (2, 2)], isa=ISAS,
    )  # fmt: skip
    for n, case in enumerate(cases):
        kind, (n_queries, n_keys), names, dtype, key_heads, lead, isa = case.values()
        rng = np.random.default_rng(n)
        arrays = random_inputs((2, 2, n_queries, 17), n_keys, dtype=dtype, v_width=9, key_heads=key_heads)
        options = options_together(names, (2, 2), n_queries, n_keys, rng) | {
            "enable_gqa": key_heads is not None
        }
        if "float_mask" in names:  # shared by the heads: its gradient is a pass of its own
            options["attn_mask"] = options["attn_mask"][0, 0]
        mask = KINDS[kind](rng, lead, n_queries, n_keys)
        with using(isa):
            assert_same_as_dense(arrays, mask, options, str(case))
            lse = rng.standard_normal((2, 2, n_queries))
            lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
            assert_gradients(arrays, options | {"block_mask": mask}, grad_lse=lse, what=str(case))


# -------------------------------------------------------------------------------------------------- semantics


@floats
def test_a_document_has_the_bits_that_it_has_alone(isa, dtype):
    """Blocks of queries and tiles of keys begin with documents, so no neighbour moves them."""
    lengths = (100, 37, 200, 64, 450, 1, 18)
    edges = np.cumsum((0, *lengths))
    arrays = random_inputs((2, edges[-1], 32), dtype=dtype)
    mask = BlockMask.from_documents(np.repeat(np.arange(len(lengths)), lengths))
    for options in ({}, {"is_causal": True}, {"enable_gqa": True, "key_heads": 1}):
        query, key, value = arrays
        if options.pop("key_heads", None):
            key, value = key[:1], value[:1]
        packed = attend(query, key, value, **options, block_mask=mask, return_lse=True)
        for lo, hi in pairwise(edges[:6]):  # alone, the short ones would go through other kernels
            own = [x[:, lo:hi] for x in (query, key, value)]
            for got, alone in zip(packed, attend(*own, **options, return_lse=True), strict=True):
                assert got[:, lo:hi].tobytes() == alone.tobytes()


@kinds
def test_the_number_of_threads_changes_no_bit(kind):
    rng = np.random.default_rng(4)
    for shape, n_keys in [((2, 4, 300, 32), 300), ((1, 2, 1, 32), 9000)]:
        arrays = random_inputs(shape, n_keys)
        mask = KINDS[kind](rng, (shape[0], 1), shape[-2], n_keys)
        results = []
        for num_threads in (1, 2, 3, 7):
            call = {"block_mask": mask, "num_threads": num_threads, "dropout_p": 0.2, "rng": 5}
            out, pullback = sa.scaled_dot_product_attention_vjp(*arrays, **call)
            results.append([x.tobytes() for x in (out, *pullback(np.ones_like(out))[:3])])
        assert all(result == results[0] for result in results)


@kinds
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@floats
def test_what_is_closed_leaves_no_trace(kind, poison, dtype):
    rng = np.random.default_rng(5)
    for n_queries, n_keys in [(1, 90), (40, 200), (100, 2100)]:
        clean = random_inputs((2, n_queries, 8), n_keys, dtype=dtype)
        mask = KINDS[kind](rng, (), n_queries, n_keys)
        seen = mask.to_dense(n_queries, n_keys)
        query, key, value = (x.copy() for x in clean)
        query[:, ~seen.any(axis=1)] = poison
        key[:, ~seen.any(axis=0)] = value[:, ~seen.any(axis=0)] = poison
        check((query, key, value), {"block_mask": mask}, clean=clean, what=kind)


def test_a_mask_that_closes_nothing_more_changes_no_bit():
    arrays = random_inputs((2, 40, 8), 70)
    for mask, causal in [
        (BlockMask.from_documents(np.zeros(40, int), np.zeros(70, int)), None),
        (BlockMask.prefix_lm(70), None),
        (BlockMask.from_blocks(np.ones((3, 5), bool), 16), None),
        (BlockMask.from_blocks([[True]], 10**40), None),
        (BlockMask.prefix_lm(0), "upper_left"),
        (BlockMask.prefix_lm(0, causal="lower_right"), "lower_right"),
    ]:
        np.testing.assert_array_equal(attend(*arrays, block_mask=mask), attend(*arrays, causal=causal))


def test_steps_show_what_is_closed():
    mask = BlockMask.from_documents([0, 0, 1])
    steps = sa.attention_steps(np.eye(3), np.eye(3), np.eye(3), block_mask=mask)
    np.testing.assert_array_equal(steps.masked_scores == -np.inf, ~mask.to_dense(3, 3))


def test_the_two_halves_take_it_as_well():
    arrays = random_inputs((2, 40, 8), 70)
    mask = BlockMask.from_blocks(np.eye(3, 5, dtype=bool), 16)
    out, statistics = sa.scaled_dot_product_attention_forward(*arrays, block_mask=mask)
    grads = sa.scaled_dot_product_attention_backward(
        np.ones_like(out), out, statistics, *arrays, block_mask=mask
    )
    _, pullback = sa.scaled_dot_product_attention_vjp(*arrays, block_mask=mask)
    for x, y in zip(grads[:3], pullback(np.ones_like(out))[:3], strict=True):
        np.testing.assert_array_equal(x, y)


# ------------------------------------------------------------------------------------------------- the object


def test_it_never_changes():
    ids, opened, lengths = np.arange(6) // 3, np.ones((2, 2), bool), np.array([1, 2])
    masks = [BlockMask.from_documents(ids), BlockMask.from_blocks(opened, 3), BlockMask.prefix_lm(lengths)]
    dense = [mask.to_dense(6, 6) for mask in masks]
    arrays = random_inputs((2, 6, 4))
    calls = [sa.scaled_dot_product_attention_vjp(*arrays, block_mask=mask) for mask in masks]
    before = [pullback(out) for out, pullback in calls]
    ids[:], opened[:], lengths[:] = 7, False, 0
    for mask, was, (out, pullback), gradients in zip(masks, dense, calls, before, strict=True):
        np.testing.assert_array_equal(mask.to_dense(6, 6), was)
        np.testing.assert_array_equal(pullback(out).query, gradients.query)
        with pytest.raises(AttributeError):
            mask.shape = (1, 2)
        with pytest.raises(AttributeError):
            mask._parts = ()
        for part in mask._parts:
            held = (
                [part.prefix]
                if hasattr(part, "prefix")
                else [part.found.classes, part.found.starts, part.found.runs]
            )
            for array in held:
                assert not array.flags.writeable
                with pytest.raises(ValueError, match="WRITEABLE"):
                    array.flags.writeable = True


def test_shape_share_and_repr():
    documents = BlockMask.from_documents(np.repeat(np.arange(8), 512))
    assert (documents.shape, documents.open_share) == ((4096, 4096), 0.125)
    prefix = BlockMask.prefix_lm([[1], [2]])
    assert (prefix.shape, prefix.open_share) == ((2, 1, None, None), None)
    assert BlockMask.from_blocks(np.eye(4, dtype=bool), 64).open_share == 0.25
    both = documents & prefix
    assert repr(both) == "BlockMask(documents & prefix_lm, shape=(2, 1, 4096, 4096), open_share=None)"
    uneven = BlockMask.from_documents([0, 1, 1, 1], [1, 1, 0])
    assert uneven.open_share == uneven.to_dense(4, 3).mean()


def test_a_pickle_is_the_same_mask():
    mask = BlockMask.from_documents([0, 0, 1]) & BlockMask.prefix_lm(1)
    again = pickle.loads(pickle.dumps(mask))
    np.testing.assert_array_equal(again.to_dense(3, 3), mask.to_dense(3, 3))
    np.testing.assert_array_equal(
        attend(np.eye(3), np.eye(3), np.eye(3), block_mask=again),
        attend(np.eye(3), np.eye(3), np.eye(3), block_mask=mask),
    )


Q = np.ones((2, 3, 8, 4), np.float32)
DOCUMENTS = BlockMask.from_documents(np.zeros(8, int))


ONE, RUNS = np.zeros(8, np.int64), np.array([[0, 8]])
BAD = [
    (lambda: BlockMask.from_documents([0.0, 1.0]), TypeError, "query_ids must be integers, got float64"),
    (lambda: BlockMask.from_documents([0], [True]), TypeError, "key_ids must be integers, got bool"),
    (lambda: BlockMask.from_documents(3), ValueError, "query_ids must have an id for each token"),
    (lambda: BlockMask.from_documents(np.array([2**63], np.uint64)), ValueError, "beyond 2**63 - 1"),
    (lambda: BlockMask.from_documents(np.ma.ones(3, int)), TypeError, "query_ids is a MaskedArray"),
    (lambda: BlockMask.from_documents(np.ones((2, 3), int), np.ones((3, 3), int)), ValueError, "(2, 3) and key_ids (3, 3)"),
    (lambda: BlockMask.prefix_lm(-1), ValueError, "prefix_lengths must be at least 0, got -1"),
    (lambda: BlockMask.prefix_lm(1.5), TypeError, "prefix_lengths must be integers, got float64"),
    (lambda: BlockMask.prefix_lm(1, causal="left"), ValueError, "'upper_left' or 'lower_right', got 'left'"),
    (lambda: BlockMask.prefix_lm(2**70), TypeError, "prefix_lengths must be integers, got object"),
    (lambda: BlockMask.from_blocks([[1, 0]], 4), TypeError, "pattern must be boolean, True = open, got int64"),
    (lambda: BlockMask.from_blocks([True], 4), ValueError, "at least 2 dims"),
    (lambda: BlockMask.from_blocks([[True]], 0), ValueError, "block_size must be an int >= 1 or two of them, got 0"),
    (lambda: BlockMask.from_blocks([[True]], (4, -1)), ValueError, "block_size must be an int >= 1 or two of them, got (4, -1)"),
    (lambda: BlockMask.from_blocks([[True]], True), TypeError, "block_size must be an int >= 1"),
    (lambda: BlockMask.from_blocks([[True]], 4.0), TypeError, "block_size must be an int >= 1"),
    (lambda: BlockMask.from_blocks([[True]], (1, 2, 3)), ValueError, "or two of them, got (1, 2, 3)"),
    (lambda: BlockMask.from_blocks([[True] * 3], 2**62), ValueError, "more keys than there can be"),
    (lambda: BlockMask(()), TypeError, "make a BlockMask with"),
    (lambda: BlockMask(DOCUMENTS), TypeError, "make a BlockMask with"),
    (lambda: DOCUMENTS & DOCUMENTS & DOCUMENTS & DOCUMENTS & DOCUMENTS, ValueError, "at most 4 block masks"),
    (lambda: np.ones((8, 8), bool) & DOCUMENTS, TypeError, "unsupported operand"),
    (lambda: BlockMask.prefix_lm([1, 2]) & BlockMask.prefix_lm([1, 2, 3]), ValueError, "(2,) and (3,)"),
    (lambda: DOCUMENTS & BlockMask.from_documents([0] * 8, [0] * 9), ValueError, "one is for 8 keys, the other for 9"),
    (lambda: BlockMask.from_documents([0]) & BlockMask.from_documents([0, 0]), ValueError, "one is for 1 queries"),
    (lambda: DOCUMENTS & BlockMask.from_blocks([[True]], 4), ValueError, "L = 8 and S = 8 need (2, 2)"),
    (lambda: BlockMask.prefix_lm(9) & DOCUMENTS, ValueError, "between 0 and S = 8, got 9"),
    (lambda: DOCUMENTS & np.ones((8, 8), bool), TypeError, "& takes two BlockMasks, got ndarray: give an array to the call, as attn_mask"),
    (lambda: DOCUMENTS.to_dense(8, 8.0), TypeError, "n_keys must be an int, not 8.0"),
    (lambda: DOCUMENTS.to_dense(8, np.array([3])), TypeError, "n_keys must be an int, not array([3])"),
    (lambda: DOCUMENTS.to_dense(-1, 8), ValueError, "n_queries must be at least 0, not -1"),
    (lambda: DOCUMENTS.to_dense(8, 7), ValueError, "here L = 8 and S = 7"),
    *((lambda mask=mask: attend(Q, Q, Q, block_mask=mask), error, message) for mask, error, message in [
        (np.ones((8, 8), bool), TypeError, "block_mask must be a selfattn.BlockMask or None, got numpy.ndarray"),
        (True, TypeError, "got bool"),
        (BlockMask, TypeError, "got type"),
        (BlockMask.from_documents(np.zeros(7, int)), ValueError, "ids for 7 queries and 7 keys; here L = 8 and S = 8"),
        (BlockMask.prefix_lm(9), ValueError, "between 0 and S = 8, got 9"),
        (BlockMask.prefix_lm([1, 2]), ValueError, "leading dims (2, 3) without enlarging them, but has leading dims (2,)"),
        (BlockMask.prefix_lm(np.ones((4, 1, 1), int)), ValueError, "leading dims (4, 1, 1)"),
        (BlockMask.from_blocks(np.ones((2, 3), bool), 4), ValueError, "need (2, 2)"),
        (BlockMask.from_blocks(np.ones((0, 0), bool), 4), ValueError, "need (2, 2)"),
        *((with_tables(answer), TypeError, "block_mask has tables that selfattn.BlockMask does not make") for answer in [
            # more in test_fuzz.py
            (3,),
            ((ONE + 1, 1, np.array([0, 1]), RUNS, 1.0),),  # a class that is not there
            ((ONE, 1, np.array([0, 1]), np.array([[0, 2**62]]), 1.0),),
            ((np.array(9), 0, 1.0),),
            ((np.array(1), 0, 1.0),) * 5,
        ]),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=range(len(BAD)))
def test_bad_input(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


def test_the_reference_refuses_the_same():
    q = Q[0]
    with pytest.raises(TypeError, match="must be a selfattn"):
        reference.scaled_dot_product_attention(q, q, q, block_mask=np.ones((8, 8), bool))
    with pytest.raises(ValueError, match="does not broadcast"):
        reference.scaled_dot_product_attention(q, q, q, block_mask=BlockMask.prefix_lm([1, 2]))
    with pytest.raises(TypeError, match="block_mask"):
        sa.varlen_attention(q, q, q, [0, 8], [0, 8], block_mask=DOCUMENTS)


def test_memory_grows_with_the_lengths_alone():
    """At 8192 tokens a dense mask has 64 MiB; the tables of 128 scattered documents have less than 1."""
    length = 8192
    ids = np.arange(length) // 8 % 128
    arrays = random_inputs((1, length, 4))
    tracemalloc.start()
    try:
        for mask in (
            BlockMask.from_documents(ids),
            BlockMask.prefix_lm(1000),
            BlockMask.from_blocks(np.eye(128, dtype=bool), 64),
        ):
            tracemalloc.reset_peak()
            attend(*arrays, block_mask=mask)
            assert tracemalloc.get_traced_memory()[1] < 2**21
        tracemalloc.reset_peak()
        BlockMask.from_documents(ids)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_tables_that_change_after_they_were_checked():
    """Drawing dropout's seed runs other Python code: the call has copies."""
    classes = np.zeros(8, np.int64)

    class Changes(np.random.Generator):
        def integers(self, *args, **kwargs):
            classes[:] = 2**40
            return np.uint64(1)

    mask = with_tables(((classes, 1, np.array([0, 1]), RUNS, 1.0),))
    out = attend(Q, Q, Q, dropout_p=0.1, rng=Changes(np.random.PCG64(0)), block_mask=mask)
    assert (classes == 2**40).all()
    np.testing.assert_array_equal(out, attend(Q, Q, Q, dropout_p=0.1, rng=1))
