"""What the backward pass takes from the forward pass, and refuses; gradients of float masks: sums over broadcast axes,
and their order.
"""

import weakref

import numpy as np
import pytest
from gradients import assert_gradients
from inputs import random_inputs
from instruction_sets import check
from numpy.testing import assert_array_equal

import selfattn as sa
from selfattn import reference
from selfattn.functional.attention import WRT, attention_backward, attention_forward


class Convertible:
    """An array of another library, in float64."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array.astype(np.float64)


SHAPE = (2, 6, 4)
BAD_GRADIENTS = [
    (ValueError, r"grad_out must have shape \(2, 6, 4\), got \(6, 4\)", {"grad_out": lambda x: x[0]}),
    (
        TypeError,
        "grad_out has dtype float64, but the output has dtype float32",
        {"grad_out": lambda x: x.astype(np.float64)},
    ),
    (
        TypeError,
        "grad_out has dtype float64, but the output has dtype float32",
        {"grad_out": Convertible},
    ),
    (
        TypeError,
        "grad_out must have a floating dtype, .* got int64",
        {"grad_out": lambda x: x.astype(np.int64)},
    ),
    (
        TypeError,
        "grad_out must be of dtype float16, bfloat16, float32 or float64, got bool",
        {"grad_out": lambda x: x > 0},
    ),
    (
        TypeError,
        "grad_out must be of dtype float16, bfloat16, float32 or float64, got <U1",
        {"grad_out": "x"},
    ),
    (TypeError, "grad_out has dtype bool", {"grad_out": [True]}),
    (TypeError, "grad_out must be an array, not None", {"grad_out": None, "grad_lse": None}),
    (ValueError, "grad_out cannot become an array: .*inhomogeneous", {"grad_out": [[1.0], [1.0, 2.0]]}),
    (ValueError, r"grad_lse must have shape \(2, 6\)", {"grad_lse": np.ones((2, 5), np.float32)}),
    (TypeError, "grad_lse has dtype float64, but lse has dtype float32", {"grad_lse": np.ones((2, 6))}),
]


@pytest.mark.parametrize(
    "error, words, changes", BAD_GRADIENTS, ids=lambda x: x if isinstance(x, str) else ""
)
def test_gradients_of_results_that_do_not_fit(error, words, changes):
    (out, lse), pullback = sa.scaled_dot_product_attention_vjp(*random_inputs(SHAPE, 5), return_lse=True)
    given = {name: x(out) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(error, match=words):
        pullback(**({"grad_out": out, "grad_lse": lse} | given))


BAD_RESULTS = [
    (ValueError, r"out must have shape \(2, 6, 4\), got \(1, 6, 4\)", {"out": lambda x: x[:1]}),
    (
        TypeError,
        "out must have the dtype of the forward call's result, float32, got float16",
        {"out": lambda x: x.astype(np.float16)},
    ),
    (ValueError, r"statistics must have shape \(2, 6, 2\)", {"statistics": lambda x: x[:, :3]}),
    (
        TypeError,
        "statistics must be what the forward call returned, a C-contiguous float32 array, got float64$",
        {"statistics": lambda x: x.astype(np.float64)},
    ),
    (
        TypeError,
        "statistics must be what .*, got other strides or byte order of float32",
        {"statistics": np.asfortranarray},
    ),
    (TypeError, "rng must be an int here, .* got None", {"dropout_p": 0.5}),
    (
        TypeError,
        "rng must be an int here, .* got numpy.*Generator",
        {"dropout_p": np.array(0.5), "rng": lambda _: np.random.default_rng(0)},
    ),
]


@pytest.mark.parametrize("error, words, changes", BAD_RESULTS, ids=lambda x: x if isinstance(x, str) else "")
def test_results_that_are_not_those_of_the_forward_pass(error, words, changes):
    """Doors of other libraries carry them from one pass to the other."""
    arrays = random_inputs(SHAPE, 5)
    out, statistics, _ = attention_forward(*arrays)
    given = {"grad_out": out, "out": out, "statistics": statistics}
    given |= {name: x(given.get(name)) if callable(x) else x for name, x in changes.items()}
    with pytest.raises(error, match=words):
        attention_backward(*arrays, names=("query",), **given)


@pytest.mark.parametrize(
    ("dtype", "wrong", "words"),
    [
        (np.float16, np.float64, r"float16 \(or float32, not rounded\), got float64"),
        (np.float64, np.float32, "float64, got float32"),
    ],
)
def test_an_output_of_another_dtype_is_not_that_of_the_forward_pass(dtype, wrong, words):
    arrays = random_inputs((2, 20, 8), dtype=np.dtype(dtype))
    out, statistics, _ = attention_forward(*arrays)
    with pytest.raises(TypeError, match=f"dtype of the forward call's result, {words}"):
        attention_backward(*arrays, names=WRT, grad_out=out, out=out.astype(wrong), statistics=statistics)


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 70, 32)], ids=str)
def test_the_output_of_16_bits_is_kept_as_it_was_before_it_was_rounded(isa, shape, dtype):
    arrays = [x.astype(dtype) for x in random_inputs(shape, 50)]
    out, statistics, unrounded = attention_forward(*arrays)
    assert (out.dtype, unrounded.dtype) == (np.dtype(dtype), np.float32)
    assert_array_equal(unrounded.astype(dtype), out)
    assert (unrounded != out.astype(np.float32)).any()
    grad_out = np.ones_like(out)
    got = attention_backward(*arrays, names=WRT, grad_out=grad_out, out=unrounded, statistics=statistics)
    _, pullback = sa.scaled_dot_product_attention_vjp(*arrays)
    for a, b in zip(got, pullback(grad_out), strict=True):
        assert a.dtype == dtype
        assert_array_equal(a, b)


@pytest.mark.parametrize("function", [sa.scaled_dot_product_attention, sa.scaled_dot_product_attention_vjp])
@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [
        (np.float16, np.float64),
        (np.float16, np.float32),
        (np.float16, np.dtype(np.float16).newbyteorder()),
        (np.float64, np.float32),
    ],
    ids=str,
)
def test_an_array_of_another_dtype_is_refused_as_out(function, dtype, wrong):
    arrays, right = random_inputs((2, 20, 8), dtype=np.dtype(dtype)), np.dtype(dtype).name
    with pytest.raises(TypeError, match=f"out must be of dtype {right} in native byte order, got"):
        function(*arrays, out=np.empty((2, 20, 8), wrong))


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
def test_the_pullbacks_output_is_written_where_it_is_wanted(dtype):
    """The output is rounded from float32, to the bits of a plain call, into arrays of any strides."""
    q, k, v = (x.astype(dtype) for x in random_inputs((2, 3, 40, 8)))
    k[0, 0, 3], v[1, 1] = np.nan, np.inf
    expected = sa.scaled_dot_product_attention(q, k, v, is_causal=True)
    strided = np.zeros((2, 40, 3, 8), dtype).swapaxes(1, 2)
    unaligned = np.zeros(expected.nbytes + 1, np.uint8)[1:].view(dtype).reshape(expected.shape)
    for mine in (np.zeros_like(expected), strided, unaligned):
        out, _ = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True, out=mine)
        assert out is mine
        assert_array_equal(out.astype(np.float32), expected.astype(np.float32))  # NaN included
    packed, outs = [x[0].swapaxes(0, 1) for x in (q, k, v)], [np.zeros((40, 3, 8), dtype) for _ in range(2)]
    for function, out in zip((sa.varlen_attention, sa.varlen_attention_vjp), outs, strict=True):
        function(*packed, [0, 40], [0, 40], out=out)
    assert_array_equal(*(x.astype(np.float32) for x in outs))


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float32])
@pytest.mark.parametrize("packed", [False, True])
def test_the_pullback_holds_one_output(dtype, packed):
    """For 16 bits it holds the float32 output; the rounded output is freed when the caller drops it."""
    q, k, v = (x.astype(dtype) for x in random_inputs((6, 2, 8)))
    if packed:
        out, pullback = sa.varlen_attention_vjp(q, k, v, [0, 6], [0, 6])
    else:
        out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v)
    held, grad_out = weakref.ref(out), np.ones_like(out)
    del out
    assert (held() is None) == (dtype != np.float32)
    assert pullback(grad_out).query.dtype == dtype


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

    An addition is off by eps/√12 of the sum so far, in the root of the mean square: n of them to a sum that grows
    evenly by √(n/3)/√12 of its eps. That is 1 for 32 blocks, a half for 8 heads, and 21 for all rows one by one. (The
    shares' own errors do not conspire, since grad_out differs from row to row.)
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


@pytest.mark.parametrize(
    ("shape", "key_heads"), [((900, 1), 1), ((900, 850), 6), ((6, 900, 1), 2), ((1, 850), 1), ((900, 1), 2)]
)
def test_parts_of_keys_do_not_meet_in_the_mask(shape, key_heads):
    """With few groups, keys are split in parts; a mask with one number for all keys has the same elements in each
    part.
    """
    *arrays, grad_out = inputs(6, length=900, keys=850, key_heads=key_heads)
    options = {"attn_mask": mask_of(*shape), "sinks": np.linspace(-1, 5, 6), "enable_gqa": True}
    assert_same_bits(arrays, grad_out, options, (1, 3))
    if key_heads == 1:
        assert_gradients(arrays, options, what=f"{shape}")


MASKS = [
    mask_of(200, 150),
    mask_of(3, 1, 200, 150),
    mask_of(3, 5, 200, 150),
    mask_of(3, 1, 1, 150),
    mask_of(200, 1),
    np.broadcast_to(mask_of(200, 150), (3, 5, 200, 150)),
    np.broadcast_to(mask_of(150), (3, 5, 200, 150)),
]


@pytest.mark.parametrize("key_heads", [5, 1])
def test_the_masks_gradient_changes_no_bit_of_the_others(isa, key_heads):
    """Heads that share a mask go through its rows in the same order, whether or not they have to wait for each
    other.
    """
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
    """The other gradients have the same bits as without the mask's; each head has a thread, which waits for the
    previous head.
    """
    of_queries, of_keys, options = LARGE[name]
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in (of_queries, of_keys, of_keys)]
    mask = rng.standard_normal((of_queries[-2], of_keys[-2]), dtype=np.float32)
    mask[7:9] = -np.inf
    options = {"attn_mask": mask, **options}
    assert_gradients(arrays, options, num_threads=3, what=name)
    out = sa.scaled_dot_product_attention(*arrays, **options)
    assert_same_bits(arrays, out, options, (1, 8), (ALL, ALL[:3]))
