"""The backward half of the vjp, whose gradients may be in the caller's arrays; gradients of float masks: sums over broadcast axes, and their order."""

import functools
import weakref

import numpy as np
import pytest
from bad_calls import undecided_overlaps
from gradients import assert_gradients, everything
from inputs import LAYOUTS, random_inputs
from instruction_sets import check
from leaks import peak_memory
from numpy.testing import assert_array_equal

import selfattn as sa
from selfattn import reference

GRADIENTS = sa.AttentionGradients


def assert_same_in_place(arrays, layout=np.copy, **options):
    """Gradients in the caller's arrays equal those in new arrays, whatever the arrays held before."""
    wrt = everything(options)
    out, statistics = sa.scaled_dot_product_attention_forward(*arrays, **options)
    call = np.ones_like(out), out, statistics, *arrays
    new = sa.scaled_dot_product_attention_backward(*call, **options, wrt=wrt)
    given = dict(zip(("query", "key", "value"), arrays, strict=True)) | options
    mine = GRADIENTS(
        *(layout(np.full_like(given[name], 9)) if name in wrt else None for name in GRADIENTS._fields)
    )
    got = sa.scaled_dot_product_attention_backward(*call, **options, wrt=wrt, gradients=mine)
    for a, b, own in zip(got, new, mine, strict=True):
        assert a is own
        assert (a is None and b is None) or a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("layout", ["plain", *sorted({*LAYOUTS} - {"byte_swapped", "read_only"})])
def test_gradients_in_place_of_any_layout(layout, dtype):
    assert_same_in_place(random_inputs((2, 20, 8), dtype=dtype), LAYOUTS.get(layout, np.copy))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize(("query", "key"), [((20, 8), (2, 30, 8)), ((2, 20, 8), (30, 8)), ((1, 20, 8), (3, 30, 8)), ((3, 20, 8), (1, 30, 8)),
                                            ((2, 0, 8), (2, 0, 8)), ((2, 0, 8), (2, 20, 8)), ((2, 20, 8), (2, 0, 8))], ids=str)  # fmt: skip
def test_gradients_in_place_of_what_was_broadcast_and_of_nothing(query, key, dtype):
    """Such gradients are sums over the broadcast axes."""
    rng = np.random.default_rng(0)
    assert_same_in_place([rng.standard_normal(shape).astype(dtype) for shape in (query, key, key)])


@pytest.mark.parametrize("shape", [(20, 30), (1, 20, 30), (2, 20, 30), (20, 1), (30,), (1, 1), ()], ids=str)
def test_gradients_in_place_of_a_mask_and_of_sinks(shape):
    mask = np.asarray(np.random.default_rng(0).standard_normal(shape), np.float32)
    sinks = np.zeros((), np.float32)
    assert_same_in_place(random_inputs((2, 20, 8), 30), attn_mask=mask, sinks=sinks)
    assert_same_in_place(random_inputs((1, 4)), sinks=sinks)  # a sum of one row's share


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradients_in_place_take_no_memory_of_their_own(dtype):
    """C-contiguous arrays in the dtype of the computation are written in place."""
    given = *random_inputs((2, 3, 400, 64), dtype=dtype), np.zeros((400, 400), dtype)
    out, statistics = sa.scaled_dot_product_attention_forward(*given)
    call = functools.partial(
        sa.scaled_dot_product_attention_backward, out, out, statistics, *given,
        wrt=("query", "key", "value", "attn_mask"), gradients=GRADIENTS(*(np.full_like(x, np.nan) for x in given)),
    )  # fmt: skip
    assert peak_memory(call) < out.nbytes // 8  # objects, not arrays


def test_gradients_in_place_are_left_alone_when_the_call_is_wrong():
    q, k, v = random_inputs((2, 20, 8))
    out, statistics = sa.scaled_dot_product_attention_forward(q, k, v)
    mine = sa.AttentionGradients(np.full_like(q, 9), np.full_like(k, 9), np.full_like(v, 9))
    names = ("query", "key", "value", "sinks")
    for wrong in ({"rng": 1.5, "dropout_p": 0.5}, {"num_threads": 0}, {"wrt": names}):
        with pytest.raises((TypeError, ValueError)):
            sa.scaled_dot_product_attention_backward(out, out, statistics, q, k, v, gradients=mine, **wrong)
    assert all((x == 9).all() for x in mine[:3])


class Convertible:
    """An array of another library, in float64."""

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        return self.array.astype(np.float64)


def backward(**changes):
    q, k, v = random_inputs((2, 6, 4), 5)
    out, statistics = sa.scaled_dot_product_attention_forward(q, k, v)
    given = {"grad_out": np.ones_like(out), "out": out, "statistics": statistics}
    given |= {name: x(given[name]) if callable(x) else x for name, x in changes.items()}
    return sa.scaled_dot_product_attention_backward(query=q, key=k, value=v, **given)


@pytest.mark.parametrize(
    "error, words, changes",
    [
        (ValueError, r"grad_out must have shape \(2, 6, 4\), got \(6, 4\)", {"grad_out": lambda x: x[0]}),
        (TypeError, "grad_out has dtype float64", {"grad_out": lambda x: x.astype(np.float64)}),
        (TypeError, "grad_out must have a floating dtype, .* got int64", {"grad_out": lambda x: x.astype(np.int64)}),
        (ValueError, r"statistics must have shape \(2, 6, 2\)", {"statistics": lambda x: x[:, :3]}),
        (TypeError, "statistics must be what the forward call returned, a C-contiguous float32 array, got float64$", {"statistics": lambda x: x.astype(np.float64)}),
        (TypeError, "statistics must be what .*, got other strides or byte order of float32", {"statistics": np.asfortranarray}),
        (ValueError, r"out must have shape", {"out": lambda x: x[:1]}),
        (ValueError, r"grad_lse must have shape \(2, 6\)", {"grad_lse": np.ones((2, 5), np.float32)}),
        (ValueError, "wrt may name query, key.*it has 'q'", {"wrt": ("q",)}),
        (ValueError, "wrt names sinks", {"wrt": ("sinks",)}),
        (TypeError, "wrt must be a name or a sequence of names, got NoneType", {"wrt": None}),
        (TypeError, "grad_out must be of dtype float16, bfloat16, float32 or float64, got <U1", {"grad_out": "x"}),
        (TypeError, "grad_out has dtype bool", {"grad_out": [True]}),
        (TypeError, "grad_out has dtype float64, but the output has dtype float32", {"grad_out": Convertible}),
        (ValueError, "grad_out cannot become an array: .*inhomogeneous", {"grad_out": [[1.0], [1.0, 2.0]]}),
        (TypeError, "out must have the dtype of the forward call's result, float32, got float16", {"out": lambda x: x.astype(np.float16)}),
        (ValueError, "has an array for key, which wrt", {"wrt": "query", "gradients": GRADIENTS(None, np.ones(1), None)}),
        (ValueError, r"gradients.key must be an array of shape \(2, 5, 4\)", {"gradients": GRADIENTS(None, np.ones(1), None)}),
        (TypeError, r"gradients.key must be a plain array of shape \(2, 5, 4\) .* got list", {"gradients": GRADIENTS(None, [1], None)}),
        (TypeError, "gradients must be an AttentionGradients, got tuple", {"gradients": (None, None, None)}),
        (TypeError, "out must be the array that the forward call returned, got list", {"out": lambda x: x.tolist()}),
        (TypeError, "statistics must be the array .* got list", {"statistics": lambda x: x.tolist()}),
        (TypeError, "grad_lse has dtype float64, but lse has dtype float32", {"grad_lse": np.ones((2, 6))}),
        (TypeError, "grad_out must be of dtype float16, bfloat16, float32 or float64, got bool", {"grad_out": lambda x: x > 0}),
        (TypeError, "rng must be an int here, .* got None", {"dropout_p": 0.5}),
        (TypeError, "dropout_p must be a real number, got a bool", {"dropout_p": np.True_}),
        (TypeError, "dropout_p must be a real number, got a bool", {"dropout_p": np.array(True)}),
        (TypeError, "rng must be an int here, .* got numpy.*Generator", {"dropout_p": np.array(0.5), "rng": np.random.default_rng(0)}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_bad_input(error, words, changes):
    with pytest.raises(error, match=words):
        backward(**changes)
    if changes.keys() <= {"grad_out", "grad_lse"}:  # a pullback gets these too
        out, lse = (np.ones(shape, np.float32) for shape in ((2, 6, 4), (2, 6)))
        given = {name: x(out) if callable(x) else x for name, x in changes.items()}
        _, pullback = sa.scaled_dot_product_attention_vjp(*random_inputs((2, 6, 4), 5), return_lse=True)
        with pytest.raises(error, match=words):
            pullback(**({"grad_out": out, "grad_lse": lse} | given))


def test_gradients_must_not_overlap():
    q, k, v = random_inputs((2, 6, 4), 6)
    out, statistics = sa.scaled_dot_product_attention_forward(q, k, v)
    half = np.zeros((2, 6, 4), np.float32)
    grad_lse = np.zeros(60, np.float32)

    def pull(query=None, key=None, value=None):
        return sa.scaled_dot_product_attention_backward(
            np.ones_like(out), out, statistics, q, k, v, grad_lse=grad_lse[:12].reshape(2, 6),
            gradients=GRADIENTS(query, key, value),
        )  # fmt: skip

    for words, targets in [
        (r"gradients\.query overlaps query in memory", {"query": q}),
        (r"gradients\.key overlaps out in memory", {"key": out[::-1]}),
        (r"gradients\.query overlaps grad_lse in memory", {"query": grad_lse[11:59].reshape(2, 6, 4)}),
        (r"gradients\.value overlaps gradients\.key in memory", {"key": half, "value": half[:, ::-1]}),
        (r"gradients\.query overlaps itself", {"query": np.lib.stride_tricks.as_strided(half, strides=(48, 4, 4))}),
        (r"gradients\.query is read-only", {"query": np.broadcast_to(half[:, :1], half.shape)}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=words):
            pull(**targets)
    # interlaced: bounds that overlap, and no element that does
    together = np.zeros((2, 6, 8), np.float32)
    got = pull(query=together[..., ::2], key=together[..., 1::2])
    assert_array_equal(together[..., ::2], pull().query)
    assert got.key.base is together


def test_an_overlap_that_cannot_be_decided_is_an_error():
    query, target = next(undecided_overlaps())
    ones = np.ones((2, 2))
    out, statistics = sa.scaled_dot_product_attention_forward(query, ones, ones)
    with pytest.raises(ValueError, match=r"cannot tell whether gradients\.query overlaps query"):
        sa.scaled_dot_product_attention_backward(
            out, out, statistics, query, ones, ones, gradients=GRADIENTS(target, None, None)
        )
    assert not target.any()


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 70, 32)], ids=str)
def test_an_output_of_float32_is_that_of_16_bits_before_it_was_rounded(isa, shape, dtype):
    q, k, v = (x.astype(dtype) for x in random_inputs(shape, 50))
    mine = np.full((*shape[:-1], 2 * shape[-1]), np.nan, np.float32)[..., ::2]
    out, statistics = sa.scaled_dot_product_attention_forward(q, k, v, out=mine)
    rounded, pullback = sa.scaled_dot_product_attention_vjp(q, k, v)
    assert out is mine and rounded.dtype == dtype
    assert_array_equal(out.astype(dtype), rounded)
    assert (out != rounded.astype(np.float32)).any()
    d = np.ones_like(rounded)
    got = sa.scaled_dot_product_attention_backward(d, out, statistics, q, k, v)
    for a, b in zip(got[:3], pullback(d)[:3], strict=True):
        assert a.dtype == dtype
        assert_array_equal(a, b)


def test_outputs_of_other_dtypes_are_refused():
    half, wide = ([x.astype(dtype) for x in random_inputs((2, 20, 8))] for dtype in (np.float16, np.float64))
    swapped = np.dtype(np.float16).newbyteorder()
    forward, vjp = sa.scaled_dot_product_attention_forward, sa.scaled_dot_product_attention_vjp
    for function, arrays, dtype, right in [
        (forward, half, np.float64, "float16 or float32"),
        (forward, half, swapped, "float16 or float32"),
        (vjp, half, np.float32, "float16"),
        (sa.scaled_dot_product_attention, half, np.float32, "float16"),
        (forward, wide, np.float32, "float64"),
    ]:
        with pytest.raises(TypeError, match=f"out must be of dtype {right} in native byte order, got"):
            function(*arrays, out=np.empty((2, 20, 8), dtype))
    for arrays, dtype, right in [
        (half, np.float64, r"float16 \(or float32, not rounded\)"),
        (wide, np.float32, "float64"),
    ]:
        out, statistics = forward(*arrays)
        with pytest.raises(TypeError, match=f"dtype of the forward call's result, {right}, got"):
            sa.scaled_dot_product_attention_backward(out, out.astype(dtype), statistics, *arrays)


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
