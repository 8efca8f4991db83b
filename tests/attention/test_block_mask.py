"""Block masks: the numbers of closed keys do not count; the class BlockMask, and its errors.

Each kind as its dense boolean mask, with every other option, forward and backward: test_fuzz.py.
"""

import pickle
import re
from functools import reduce
from itertools import pairwise
from operator import and_

import numpy as np
import pytest
from bad_calls import with_tables
from inputs import BLOCK_MASKS, FLOAT_IDS, FLOATS, covering, random_inputs
from instruction_sets import check
from leaks import peak_memory
from refusals import refusals

import selfattn as sa
from selfattn import BlockMask

pytestmark = pytest.mark.usefixtures("one_thread")
attend = sa.scaled_dot_product_attention
KINDS = BLOCK_MASKS | {
    "combined": lambda *of: reduce(and_, (BLOCK_MASKS[kind](*of) for kind in list(BLOCK_MASKS)[1:]))
}


@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
def test_a_document_has_the_bits_that_it_has_alone(isa, dtype):
    """Blocks of queries and tiles of keys begin with documents, so that other documents do not shift them."""
    lengths = (100, 37, 200, 64, 450, 1, 18)
    edges = np.cumsum((0, *lengths))
    arrays = random_inputs((2, edges[-1], 32), dtype=dtype)
    mask = BlockMask.from_documents(np.repeat(np.arange(len(lengths)), lengths))
    for key_heads, options in ((2, {}), (2, {"is_causal": True}), (1, {"enable_gqa": True})):
        given = [arrays[0], *(x[:key_heads] for x in arrays[1:])]
        packed = attend(*given, **options, block_mask=mask, return_lse=True)
        for lo, hi in pairwise(edges[:6]):  # alone, short documents would use other kernels
            own = [x[:, lo:hi] for x in given]
            for got, alone in zip(packed, attend(*own, **options, return_lse=True), strict=True):
                assert got[:, lo:hi].tobytes() == alone.tobytes()


def test_numbers_of_closed_keys_and_dead_rows_do_not_count():
    rng = np.random.default_rng(5)
    for case in covering(
        kind=list(KINDS), size=[(1, 90), (40, 200), (100, 2100)], dtype=FLOATS, poison=[np.nan, np.inf]
    ):
        kind, (n_queries, n_keys), dtype, poison = case.values()
        clean = random_inputs((2, n_queries, 8), n_keys, dtype=dtype)
        mask = KINDS[kind]((), n_queries, n_keys, rng)
        seen = mask.to_dense(n_queries, n_keys)
        query, key, value = (x.copy() for x in clean)
        query[:, ~seen.any(axis=1)] = poison
        key[:, ~seen.any(axis=0)] = value[:, ~seen.any(axis=0)] = poison
        check((query, key, value), {"block_mask": mask}, clean=clean, what=str(case))


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


def test_a_prefix_with_another_mask_has_the_same_bits_after_any_call():
    """The tables of a prefix have no strides of classes; those of the call before must not take their place."""
    rng = np.random.default_rng(0)
    q, k, v, grad_out = rng.standard_normal((4, 2, 200, 16), dtype=np.float32)
    bias = rng.standard_normal((200, 200), dtype=np.float32)
    ids = np.arange(200) // 70
    documents, of_each_head = (BlockMask.from_documents(x) for x in (ids, np.stack([ids, ids + 1])))

    def pullback(mask):
        options = {"attn_mask": bias, "block_mask": mask, "wrt": ("query", "key", "value", "attn_mask")}
        return sa.scaled_dot_product_attention_vjp(q, k, v, **options)[1]

    befores = pullback(documents & documents), pullback(of_each_head & documents)
    asked = pullback(BlockMask.prefix_lm(200) & documents)
    results = []
    for before in befores:
        before(grad_out)
        results.append(asked(grad_out))
    for first, second in zip(*results, strict=True):
        assert np.array_equal(first, second)


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
            for array in filter(np.ndim, [part.prefix] if hasattr(part, "prefix") else part.found):
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
    (
        lambda: BlockMask.from_documents(np.ones((2, 3), int), np.ones((3, 3), int)),
        ValueError,
        "(2, 3) and key_ids (3, 3)",
    ),
    (lambda: BlockMask.prefix_lm(-1), ValueError, "prefix_lengths must be at least 0, got -1"),
    (lambda: BlockMask.prefix_lm(1.5), TypeError, "prefix_lengths must be integers, got float64"),
    (
        lambda: BlockMask.prefix_lm(1, causal="left"),
        ValueError,
        '"upper_left" or "lower_right", not \'left\'',
    ),
    (lambda: BlockMask.prefix_lm(2**70), TypeError, "prefix_lengths must be integers, got object"),
    (
        lambda: BlockMask.from_blocks([[1, 0]], 4),
        TypeError,
        "pattern must be boolean, True = open, got int64",
    ),
    (lambda: BlockMask.from_blocks([True], 4), ValueError, "at least 2 dims"),
    (
        lambda: BlockMask.from_blocks([[True]], 0),
        ValueError,
        "block_size must be an int >= 1 or two of them, got 0",
    ),
    (
        lambda: BlockMask.from_blocks([[True]], (4, -1)),
        ValueError,
        "block_size must be an int >= 1 or two of them, got (4, -1)",
    ),
    (lambda: BlockMask.from_blocks([[True]], True), TypeError, "block_size must be an int >= 1"),
    (lambda: BlockMask.from_blocks([[True]], 4.0), TypeError, "block_size must be an int >= 1"),
    (lambda: BlockMask.from_blocks([[True]], (1, 2, 3)), ValueError, "or two of them, got (1, 2, 3)"),
    (lambda: BlockMask.from_blocks([[True] * 3], 2**62), ValueError, "more keys than there can be"),
    (lambda: BlockMask(()), TypeError, "make a BlockMask with"),
    (lambda: BlockMask(DOCUMENTS), TypeError, "make a BlockMask with"),
    (lambda: DOCUMENTS & DOCUMENTS & DOCUMENTS & DOCUMENTS & DOCUMENTS, ValueError, "at most 4 block masks"),
    (lambda: np.ones((8, 8), bool) & DOCUMENTS, TypeError, "unsupported operand"),
    (lambda: BlockMask.prefix_lm([1, 2]) & BlockMask.prefix_lm([1, 2, 3]), ValueError, "(2,) and (3,)"),
    (
        lambda: DOCUMENTS & BlockMask.from_documents([0] * 8, [0] * 9),
        ValueError,
        "one is for 8 keys, the other for 9",
    ),
    (
        lambda: BlockMask.from_documents([0]) & BlockMask.from_documents([0, 0]),
        ValueError,
        "one is for 1 queries",
    ),
    (lambda: DOCUMENTS & BlockMask.from_blocks([[True]], 4), ValueError, "L = 8 and S = 8 need (2, 2)"),
    (lambda: BlockMask.prefix_lm(9) & DOCUMENTS, ValueError, "between 0 and S = 8, got 9"),
    (
        lambda: DOCUMENTS & np.ones((8, 8), bool),
        TypeError,
        "& takes two BlockMasks, got ndarray: give an array to the call, as attn_mask",
    ),
    (lambda: DOCUMENTS.to_dense(8, 8.0), TypeError, "n_keys must be an int, not 8.0"),
    (lambda: DOCUMENTS.to_dense(8, np.array([3])), TypeError, "n_keys must be an int, not array([3])"),
    (lambda: DOCUMENTS.to_dense(-1, 8), ValueError, "n_queries must be at least 0, not -1"),
    (lambda: DOCUMENTS.to_dense(8, 7), ValueError, "here L = 8 and S = 7"),
    (
        lambda: sa.attention_steps(Q, Q, Q, block_mask=np.ones((8, 8), bool)),
        TypeError,
        "must be a selfattn",
    ),
    (
        lambda: sa.attention_steps(Q[0], Q[0], Q[0], block_mask=BlockMask.prefix_lm([1, 2])),
        ValueError,
        "does not broadcast",
    ),
    (
        lambda: sa.varlen_attention(Q[0], Q[0], Q[0], [0, 8], [0, 8], block_mask=DOCUMENTS),
        TypeError,
        "block_mask",
    ),
    *(
        (lambda mask=mask: attend(Q, Q, Q, block_mask=mask), error, message)
        for mask, error, message in [
            (
                np.ones((8, 8), bool),
                TypeError,
                "block_mask must be a selfattn.BlockMask or None, got numpy.ndarray",
            ),
            (True, TypeError, "got bool"),
            (BlockMask, TypeError, "got type"),
            (
                BlockMask.from_documents(np.zeros(7, int)),
                ValueError,
                "ids for 7 queries and 7 keys; here L = 8 and S = 8",
            ),
            (BlockMask.prefix_lm(9), ValueError, "between 0 and S = 8, got 9"),
            (
                BlockMask.prefix_lm([1, 2]),
                ValueError,
                "leading dims (2, 3) without enlarging them, but has leading dims (2,)",
            ),
            (BlockMask.prefix_lm(np.ones((4, 1, 1), int)), ValueError, "leading dims (4, 1, 1)"),
            (BlockMask.from_blocks(np.ones((2, 3), bool), 4), ValueError, "need (2, 2)"),
            (BlockMask.from_blocks(np.ones((0, 0), bool), 4), ValueError, "need (2, 2)"),
            *(
                (
                    with_tables(answer),
                    TypeError,
                    "block_mask has tables that selfattn.BlockMask does not make",
                )
                for answer in [
                    # more in test_fuzz.py
                    (3,),
                    ((ONE + 1, 1, np.array([0, 1]), RUNS, 1.0),),  # a class that does not exist
                    ((ONE, 1, np.array([0, 1]), np.array([[0, 2**62]]), 1.0),),
                    ((np.array(9), 0, 1.0),),
                    ((np.array(1), 0, 1.0),) * 5,
                ]
            ),
        ]
    ),
]


test_bad_input = refusals(*((call, error, re.escape(message)) for call, error, message in BAD))


def test_memory_grows_with_the_lengths_alone():
    """At 8192 tokens a dense mask has 64 MiB; the tables of 128 scattered documents have less than 1."""
    ids = np.arange(8192) // 8 % 128
    arrays = random_inputs((1, 8192, 4))
    blocks = BlockMask.from_blocks(np.eye(128, dtype=bool), 64)
    for mask in (BlockMask.from_documents(ids), BlockMask.prefix_lm(1000), blocks):
        assert peak_memory(lambda mask=mask: attend(*arrays, block_mask=mask)) < 2**21
    assert peak_memory(lambda: BlockMask.from_documents(ids)) < 2**22


def test_tables_that_change_after_they_were_checked():
    """Drawing dropout's seed may run other Python code that changes the tables, so the call copies them."""
    classes = np.zeros(8, np.int64)

    class Changes(np.random.Generator):
        def integers(self, *args, **kwargs):
            classes[:] = 2**40
            return np.uint64(1)

    mask = with_tables(((classes, 1, np.array([0, 1]), RUNS, 1.0),))
    out = attend(Q, Q, Q, dropout_p=0.1, rng=Changes(np.random.PCG64(0)), block_mask=mask)
    assert (classes == 2**40).all()
    np.testing.assert_array_equal(out, attend(Q, Q, Q, dropout_p=0.1, rng=1))
