"""Packed sequences: each has the bits of a call of its own, and the gradients too; no offsets make it crash."""

import warnings
from itertools import pairwise

import inputs
import numpy as np
import pytest
from bad_calls import BAD_PACKED, PACKED
from before_tests import examples
from gradients import PER_HEAD
from hypothesis import given
from hypothesis import strategies as st
from inputs import BFLOAT16, FLOAT_IDS, FLOATS, LAYOUTS, normal, random_mask
from numpy.testing import assert_allclose, assert_array_equal
from tolerances import assert_within, truth

import selfattn as sa
from selfattn import reference

HEADS = 4
LENGTHS_Q = (5, 0, 70, 1, 64, 3, 33)
LENGTHS_K = (7, 9, 0, 40, 130, 3, 65)


def offsets(lengths, dtype=np.int32):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def packed(
    lengths_q, lengths_k, *, dtype=np.float32, heads=HEADS, key_heads=None, width=12, v_width=9, seed=0
):
    """(query, key, value, cu_seqlens_q, cu_seqlens_k)."""
    rng = np.random.default_rng(seed)
    key_heads = heads if key_heads is None else key_heads
    return (
        normal(rng, (sum(lengths_q), heads, width), dtype),
        normal(rng, (sum(lengths_k), key_heads, width), dtype),
        normal(rng, (sum(lengths_k), key_heads, v_width), dtype),
        offsets(lengths_q),
        offsets(lengths_k),
    )


def masks(kind):
    """A mask of another shape for each sequence, and none for one of them."""
    rng = np.random.default_rng(1)
    shapes = [(HEADS, n, m) for n, m in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    shapes[3], shapes[4], shapes[6] = (1, 40), (HEADS, 1, 130), (65,)
    return [None if s == 5 else random_mask(rng, shape, kind) for s, shape in enumerate(shapes)]


RNG = np.random.default_rng(2)
OF_EACH = {"bool_mask", "float_mask", "key_lengths"}  # options that differ between sequences
DENSE = {"bias", "offset_bias"}
OPTIONS = {
    name: make((HEADS,), 0, 0, RNG) for name, make in inputs.OPTIONS.items() if name not in OF_EACH | DENSE
} | {
    "bool_mask": {"attn_mask": masks(np.bool_)},
    "float_mask": {"attn_mask": masks(np.float32)},
    "left_window, lower_right": {"window": (17, None), "causal": "lower_right"},
    "alibi_slopes, lower_right": {"alibi_slopes": RNG.random(HEADS) / 4, "causal": "lower_right"},
    "alibi_of_sequences": {"alibi_slopes": RNG.random((len(LENGTHS_Q), HEADS)) / 4},
    "sinks_of_sequences": {"sinks": RNG.standard_normal((len(LENGTHS_Q), 1))},
    "gqa": {"enable_gqa": True},
    "everything": {
        **inputs.options_together(sorted({*inputs.OTHERS} - OF_EACH - DENSE), (HEADS,), 0, 0, RNG),
        "attn_mask": masks(np.float32),
        "causal": "lower_right",
        "window": (60, 30),
        "alibi_slopes": RNG.random((len(LENGTHS_Q), HEADS)) / 4,
        "enable_gqa": True,
    },
}


def arguments_for(options, **how):
    return packed(LENGTHS_Q, LENGTHS_K, key_heads=2 if options.get("enable_gqa") else None, **how)


def alone(arguments, options):
    """Each sequence's rows, and the arguments and options of a dense call for it."""
    q, k, v, rows, keys = arguments
    for s, ((a, b), (c, d)) in enumerate(zip(pairwise(rows), pairwise(keys), strict=True)):
        own = dict(options)
        if own.get("attn_mask") is not None:
            own["attn_mask"] = own["attn_mask"][s]
        for name in PER_HEAD:
            if name in own:
                own[name] = np.broadcast_to(own[name], (len(rows) - 1, q.shape[1]))[s]
        yield s, slice(a, b), slice(c, d), tuple(x.swapaxes(0, 1) for x in (q[a:b], k[c:d], v[c:d])), own


def wrt_of(options):
    names = ["query", "key", "value"]
    if options.get("attn_mask") is not None and options["attn_mask"][0].dtype != np.bool_:
        names.append("attn_mask")
    return (*names, *(name for name in PER_HEAD if name in options))


def assert_bits_of_own_calls(arguments, options, wrt=None, num_threads=None):
    """Output, log-sum-exp and gradients of each sequence are those of a dense call for it alone, bit by bit."""
    wrt = wrt_of(options) if wrt is None else wrt
    out, lse = sa.varlen_attention(*arguments, **options, return_lse=True, num_threads=num_threads)
    assert_array_equal(sa.varlen_attention(*arguments, **options), out)
    assert lse.shape == out.shape[1::-1] and out.flags.c_contiguous and out.flags.owndata
    _, pullback = sa.varlen_attention_vjp(
        *arguments, **options, wrt=wrt, return_lse=True, num_threads=num_threads
    )
    grads = pullback(out, lse)
    sums = {name: [] for name in PER_HEAD if name in wrt}
    for s, rows, keys, one, own in alone(arguments, options):
        expected, expected_lse = sa.scaled_dot_product_attention(*one, **own, return_lse=True)
        assert_array_equal(out[rows].swapaxes(0, 1), expected)
        assert_array_equal(lse[:, rows], expected_lse)
        names = [x for x in wrt if x != "attn_mask" or own.get("attn_mask") is not None]
        _, pull = sa.scaled_dot_product_attention_vjp(*one, **own, wrt=names, return_lse=True)
        of_one = pull(out[rows].swapaxes(0, 1), lse[:, rows])
        for name, i in (("query", rows), ("key", keys), ("value", keys)):
            assert (getattr(grads, name) is None) == (name not in wrt)
            if name in wrt:
                assert_array_equal(
                    getattr(grads, name)[i].swapaxes(0, 1), getattr(of_one, name), err_msg=f"{name} {s}"
                )
        if "attn_mask" in wrt:
            assert_array_equal(grads.attn_mask[s], of_one.attn_mask)
        for name, found in sums.items():
            found.append(getattr(of_one, name))
    for name, found in sums.items():
        total = reference.arrays.sum_to_shape(np.array(found), options[name].shape)
        assert getattr(grads, name).shape == options[name].shape
        assert_allclose(getattr(grads, name), total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if "dropout_p" not in options])
def test_each_sequence_has_the_bits_of_its_own_call(name, isa):
    """From width 16 on, other kernels than multiply-adds compute products."""
    for dtype in (np.float32, np.float16, BFLOAT16):
        arguments = arguments_for(OPTIONS[name], dtype=dtype, width=18, v_width=17)
        assert_bits_of_own_calls(arguments, OPTIONS[name])


def test_keys_in_chunks():
    """For few queries the keys of a long sequence are split, even between short sequences."""
    arguments = packed([1, 20, 3, 0, 130], [5000, 20, 2100, 2048, 4100], heads=1)
    assert_bits_of_own_calls(arguments, {"causal": "lower_right"})


def test_rows_of_gradients_that_lie_far_apart():
    """Rows more than 1 KiB apart are gathered; 1040 rows and keys are computed in four parts."""
    arguments = packed([1040, 500, 0, 3], [1040, 510, 5, 0], heads=5, width=64, v_width=60)
    for n, options in enumerate(({}, {"window": (40, 0)}, {"is_causal": True})):
        for wrt in (("query", "key", "value"), ("key",), ("value",), ("query",))[n % 2 :: 2]:
            assert_bits_of_own_calls(arguments, options, wrt)


@pytest.mark.parametrize(("heads", "lengths"), [(8, [700, 40, 520]), (40, [450, 40])])
def test_masks_of_heads_that_follow_one_another(heads, lengths):
    """Long sequences whose heads share a mask: in dense calls heads wait for each other, here none does."""
    rng = np.random.default_rng(3)
    mask = [rng.standard_normal((n, n), dtype=np.float32) for n in lengths]
    arguments = packed(lengths, lengths, heads=heads, key_heads=8, width=100, v_width=124)
    for threads in (1, 7):
        assert_bits_of_own_calls(arguments, {"attn_mask": mask, "enable_gqa": True}, num_threads=threads)


@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
@pytest.mark.parametrize("name", ["plain", "dropout", "everything"])
def test_agrees_with_the_reference(name, dtype):
    """This compares what assert_bits_of_own_calls does not: dropout's choice of weights, and other dtypes."""
    options = OPTIONS[name]
    arguments = arguments_for(options, dtype=dtype)
    wrt = wrt_of(options)
    (out, lse), pullback = sa.varlen_attention_vjp(*arguments, **options, return_lse=True, wrt=wrt)
    assert out.dtype == dtype and lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    for s, rows, _, one, own in alone(arguments, options):
        exact = truth(*one, **own, first_head=s * HEADS)
        assert_within(out[rows].swapaxes(0, 1), exact.out, exact.out_bound, f"sequence {s}")
        assert_within(lse[:, rows], exact.lse, exact.lse_bound, f"lse {s}")
    grads = pullback(out, lse)
    assert [x.dtype for x in grads[:3]] == [dtype] * 3
    if dtype != np.float64:
        return
    _, of_reference = reference.varlen_attention_vjp(*arguments, **options, return_lse=True)
    expected = of_reference(out, lse)
    for field in wrt:
        pairs = [(getattr(grads, field), getattr(expected, field))]
        for mine, theirs in zip(*pairs[0], strict=True) if field == "attn_mask" else pairs:
            assert (mine is None) == (theirs is None)
            if mine is not None:  # sums of at most a hundred terms of the size of 1; masks are float32
                limit = 1e-11 if mine.dtype == np.float64 else 1e-6
                assert mine.dtype == theirs.dtype
                assert_allclose(mine, theirs, rtol=limit, atol=limit, err_msg=field)


def test_the_reference_is_a_loop_of_dense_calls():
    arguments = arguments_for({}, dtype=np.float64)
    options = OPTIONS["alibi_of_sequences"] | {"dropout_p": 0.3, "rng": np.random.default_rng(5)}
    out = reference.varlen_attention(*arguments, **options)
    seed = int(np.random.default_rng(5).integers(0, 2**64, dtype=np.uint64))
    for s, rows, _, one, own in alone(arguments, options):
        own["rng"] = seed
        expected = reference.scaled_dot_product_attention(*one, **own, first_head=s * HEADS)
        assert_array_equal(out[rows].swapaxes(0, 1), expected)


def test_the_references_gradients_agree_with_finite_differences():
    *arrays, rows, keys = packed((3, 0, 4), (2, 1, 5), dtype=np.float64, width=3, v_width=2, heads=2)
    options = {"softcap": 2.0, "dropout_p": 0.3, "rng": 1, "return_lse": True}

    def attend(query, key, value, sinks):
        return reference.varlen_attention_vjp(query, key, value, rows, keys, sinks=sinks, **options)

    sa.check_vjp(attend, *arrays, np.array([0.3, -0.2]))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_layouts(layout, dtype):
    arguments = packed(LENGTHS_Q, LENGTHS_K, dtype=dtype)
    expected = sa.varlen_attention(*arguments, is_causal=True)
    moved = [LAYOUTS[layout](x) for x in arguments]
    assert_array_equal(sa.varlen_attention(*moved, is_causal=True), expected)
    _, pullback = sa.varlen_attention_vjp(*moved, is_causal=True)
    _, plain = sa.varlen_attention_vjp(*arguments, is_causal=True)
    grads = pullback(LAYOUTS[layout](expected))[:3]
    np.testing.assert_equal(grads, plain(expected)[:3])
    assert {got.dtype for got in grads} == {np.dtype(dtype)}


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "how"),
    [
        ([], [], {}),
        ([0], [0], {}),
        ([0, 0], [3, 0], {}),
        ([2], [0], {}),
        ([3, 2], [1, 2], {"heads": 0, "key_heads": 0}),
        ([3, 2], [1, 2], {"width": 0}),
        ([3, 2], [1, 2], {"v_width": 0}),
        ([1], [1], {"width": 1, "v_width": 1, "heads": 1}),
    ],
)
def test_nothing_is_legal(lengths_q, lengths_k, how):
    arguments = packed(lengths_q, lengths_k, **how)
    sinks = np.ones(arguments[0].shape[1])
    for options in ({}, {"sinks": sinks}, {"attn_mask": [None] * len(lengths_q)}):
        (out, lse), pullback = sa.varlen_attention_vjp(
            *arguments, **options, return_lse=True, wrt=("query", "key", "value", *options)
        )
        expected, expected_lse = reference.varlen_attention(*arguments, **options, return_lse=True)
        assert out.shape == expected.shape and lse.shape == expected_lse.shape
        assert_allclose(out, expected, rtol=1e-5)
        assert_allclose(lse, expected_lse, rtol=1e-5)
        grads = pullback(out, lse)
        for gradient, x in zip(grads[:3], arguments[:3], strict=True):
            assert gradient.shape == x.shape and np.isfinite(gradient).all()
        assert grads.attn_mask == options.get("attn_mask")
        assert grads.sinks is None or grads.sinks.shape == sinks.shape


def test_out():
    arguments = packed(LENGTHS_Q, LENGTHS_K)
    expected = sa.varlen_attention(*arguments)
    out = np.full((2, *expected.shape[::-1]), 7, np.float32)[1].T
    assert sa.varlen_attention(*arguments, out=out) is out
    assert_array_equal(out, expected)


Q, K, V, ROWS, KEYS = PACKED.values()


@pytest.mark.parametrize("name", BAD_PACKED)
def test_errors(name):
    changes, kind, message = BAD_PACKED[name]
    for function in (sa.varlen_attention, sa.varlen_attention_vjp):
        with pytest.raises(kind, match=message):
            function(**(PACKED | changes))


def test_errors_of_the_vjp():
    vjp = sa.varlen_attention_vjp
    for changes, kind, message in [
        ({"wrt": "weights"}, ValueError, "wrt may name query"),
        ({"wrt": "sinks"}, ValueError, "wrt names sinks, which was not given"),
        (
            {"wrt": "attn_mask", "attn_mask": [None, np.ones((3, 4), bool)]},
            ValueError,
            r"attn_mask\[1\] is boolean",
        ),
        ({"return_weights": True}, TypeError, "unexpected keyword argument 'return_weights'"),
        ({"key_lengths": [1, 2]}, TypeError, "unexpected keyword argument 'key_lengths'"),
    ]:
        with pytest.raises(kind, match=message):
            vjp(**(PACKED | changes))
    out, pullback = vjp(Q, K, V, ROWS, KEYS)
    with pytest.raises(ValueError, match="grad_out must have shape"):
        pullback(out[:3])
    with pytest.raises(TypeError, match="grad_out has dtype float64"):
        pullback(out.astype(np.float64))
    with pytest.raises(TypeError, match="grad_lse was given"):
        pullback(out, np.zeros((HEADS, 5), np.float32))


@st.composite
def hostile_offsets(draw):
    if draw(st.booleans()):
        inner = draw(st.lists(st.integers(-1, 7), max_size=4))
        dtype = draw(st.sampled_from([np.int8, np.int16, np.int32, np.int64]))
        found = np.array(
            [draw(st.sampled_from([0, 0, 0, 1])), *sorted(inner), draw(st.integers(4, 8))], dtype
        )
        return found if draw(st.booleans()) else found.byteswap().view(found.dtype.newbyteorder())
    extreme = st.sampled_from([0, 1, 5, 7, 2**31 - 1, 2**63 - 1, -(2**63), -1])
    return np.array(
        draw(st.lists(extreme, max_size=5)), draw(st.sampled_from([np.int64, np.float64, object]))
    )


@examples(300)
@given(hostile_offsets(), hostile_offsets())
def test_offsets_of_any_kind(rows, keys):
    def right(x, total):
        x = x.tolist()
        return bool(x) and x[0] == 0 and x[-1] == total and x == sorted(x)

    legal = right(rows, 5) and right(keys, 7) and len(rows) == len(keys)
    legal = legal and rows.dtype.kind == keys.dtype.kind == "i"
    if legal:
        out, pullback = sa.varlen_attention_vjp(Q, K, V, rows, keys)
        assert_allclose(out, reference.varlen_attention(Q, K, V, rows, keys), rtol=1e-5, atol=1e-6)
        assert all(np.isfinite(gradient).all() for gradient in pullback(out)[:3])
    else:
        with pytest.raises((ValueError, TypeError)):
            sa.varlen_attention(Q, K, V, rows, keys)


def test_offsets_of_another_library_changed_later_do_not_matter():
    """If another library's arrays expose their memory, there is no warning, and the pullback keeps a copy."""

    class Offsets:
        def __init__(self):
            self.numbers = ROWS.copy()

        def __array__(self, dtype=None):
            return self.numbers

    for offsets in (Offsets(), ROWS.copy()):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out, pullback = sa.varlen_attention_vjp(Q, K, V, offsets, KEYS)
        expected = pullback(out)
        np.asarray(offsets)[:] = 10**6
        np.testing.assert_equal(pullback(out)[:3], expected[:3])
