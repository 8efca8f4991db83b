"""Gradients of attention: finite differences check the reference, and the reference checks the C core.

Sizes, options, layouts and threads on every instruction set: tests/kernels/test_instruction_sets.py. Any combination:
test_fuzz.py.
"""

import ctypes
import ctypes.util
import inspect
import platform
import sys
from itertools import combinations, product

import numpy as np
import pytest
from gradients import assert_gradients, assert_true_gradients, everything, true_gradients
from inputs import BFLOAT16, SETS_OF_OPTIONS, options_together, random_inputs
from instruction_sets import ISAS, check, using
from leaks import peak_memory
from numpy.testing import assert_allclose, assert_array_equal

import selfattn as sa
from selfattn import reference
from selfattn.functional.attention import WRT, attention_backward, attention_forward


@pytest.mark.parametrize("names", SETS_OF_OPTIONS, ids="+".join)
def test_reference_agrees_with_finite_differences(names):
    arguments = random_inputs((2, 3, 7, 4), 9, dtype=np.float64, v_width=5)
    options = options_together(names, (2, 3), 7, 9, np.random.default_rng(1))
    moving = dict(zip(("query", "key", "value"), arguments, strict=True))
    moving |= {name: options.pop(name) for name in everything(options)[3:]}

    def attend(*arrays):
        given = dict(zip(moving, arrays, strict=True))
        (out, lse), pullback = reference.scaled_dot_product_attention_vjp(**given, **options, return_lse=True)

        def pull(d_out, d_lse):
            gradients = pullback(d_out, np.where(np.isfinite(lse), d_lse, 0))
            return tuple(getattr(gradients, name) for name in moving)

        return (out, np.where(np.isfinite(lse), lse, 0)), pull

    sa.check_vjp(attend, *moving.values())


def vjp_of(packed, *arrays, offsets=None, **options):
    """Call the vjp of (H, L, E), or of those heads packed, as one sequence if there are no offsets of queries and
    keys.
    """
    if not packed:
        return sa.scaled_dot_product_attention_vjp(*arrays, **options)
    query, key, value = (x.swapaxes(0, 1) for x in arrays)
    return sa.varlen_attention_vjp(
        query, key, value, *(offsets or ([0, len(query)], [0, len(key)])), **options
    )


@pytest.mark.parametrize(
    ("sinks", "packed", "heads", "keys", "of_lse"),
    [
        (False, False, 4, 16, 0),
        (False, False, 4, 16, 1),
        (True, True, 4, 16, 1),
        (True, False, 1, 1024, 1),
        (False, True, 1, 1024, 1),
    ],
)
def test_slopes_of_16_bits_whose_distances_are_long(sinks, packed, heads, keys, of_lse):
    """A 16-bit output is off by 2^-9, and distances here are a thousand, but the slopes' gradient is still exact.

    The sum of a row's dS is known: its rounding error, times the distance, is subtracted (docs/theory/backward.md).
    """
    r = np.random.default_rng(1)
    shapes = ((heads, 1024, 64), (heads, keys, 64), (heads, keys, 64), (heads, 1024, 64))
    exact = [r.standard_normal(shape).astype(BFLOAT16).astype(np.float64) for shape in shapes]
    options = {"alibi_slopes": np.full(heads, 0.01), "sinks": np.linspace(-1, 1, heads) if sinks else None}
    lse = of_lse * r.standard_normal((heads, 1024))

    def slopes(dtype):
        *arrays, d = (x.astype(dtype) for x in exact)
        _, pullback = vjp_of(packed, *arrays, return_lse=True, wrt=("alibi_slopes",), **options)
        d_lse = lse.astype(np.float64 if dtype == np.float64 else np.float32)
        return pullback(d.swapaxes(0, 1) if packed else d, d_lse).alibi_slopes

    q, k, v, d = exact
    expected = reference.scaled_dot_product_attention_vjp(q, k, v, return_lse=True, **options)[1](d, lse)
    for isa, dtype in product(ISAS, (np.float64, np.float32, np.float16, BFLOAT16)):
        # sums of 16,000 terms in float32, some 100 times the result; without correction, the first case is 1e-4 off
        rtol = {np.float64: 1e-12, np.float32: 3e-4 if of_lse else 5e-5}.get(dtype, 3e-4)
        with using(isa):
            assert_allclose(slopes(dtype), expected.alibi_slopes, rtol=rtol, err_msg=f"{isa} {dtype}")


def test_a_gradient_beyond_its_dtype_is_infinite():
    """The gradient of float16 slopes, a sum over all pairs, exceeds 65,504."""
    rng = np.random.default_rng(3)
    arrays = [rng.standard_normal((2, 40, 8), dtype=np.float32) for _ in range(3)]
    grad_out = np.float32(1e5) * rng.standard_normal((2, 40, 8), dtype=np.float32)
    slopes = np.array([0.1, 0.2], np.float16)
    got = assert_gradients(arrays, {"alibi_slopes": slopes}, grad_out=grad_out)
    wide = assert_gradients(arrays, {"alibi_slopes": slopes.astype(np.float32)}, grad_out=grad_out)
    assert np.abs(wide.alibi_slopes).min() > np.finfo(np.float16).max
    assert_array_equal(got.alibi_slopes, np.copysign(np.float16(np.inf), wide.alibi_slopes))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3e38])
def test_a_gradient_of_the_log_sum_exp_stays_in_its_row(isa, bad):
    """The gradients of row 10, and of the keys that it sees, may be anything; the others are within their bounds."""
    for dtype in (BFLOAT16, np.float16, np.float32):
        arrays = random_inputs((2, 64, 32), 64, dtype=np.dtype(dtype))
        (out, lse), pullback = sa.scaled_dot_product_attention_vjp(*arrays, is_causal=True, return_lse=True)
        d_lse = np.zeros_like(lse)
        expected = true_gradients(arrays, {"is_causal": True}, out, d_lse)
        d_lse[:, 10] = bad
        got = pullback(out, d_lse)
        got.query[:, 10], got.key[:, :11] = expected["query"].exact[:, 10], expected["key"].exact[:, :11]
        assert_true_gradients(got, expected)


@pytest.mark.parametrize("packed", [False, True])
def test_no_gradient_of_the_output(packed):
    (out, lse), pullback = vjp_of(packed, *random_inputs((2, 5, 4), 3), return_lse=True)
    np.testing.assert_equal(pullback(None, lse), pullback(np.zeros_like(out), lse))
    with pytest.raises(TypeError, match="grad_out must be an array, not None"):
        pullback(None)


def test_sums_over_rows_give_no_warnings():
    """Arithmetic in C gives no warnings: overflow gives inf, an undefined result NaN."""
    o = np.ones((2, 1), np.float32)
    with np.errstate(all="raise"):
        _, pullback = sa.scaled_dot_product_attention_vjp(o, o, o, sinks=np.float16(0), wrt=("sinks",))
        assert np.isnan(pullback(np.float32([[np.inf], [-np.inf]])).sinks)
        assert pullback(np.full((2, 1), 1e6, np.float32)).sinks == -np.inf
        half = o.astype(np.float16)
        _, pullback = sa.scaled_dot_product_attention_vjp(half, half, half)
        assert pullback([[1e6], [1.0]]).value[0] == np.inf  # a list, rounded to the dtype of the output
        rows = o[:, None]
        _, pullback = sa.varlen_attention_vjp(
            rows, rows, rows, [0, 2], [0, 2], sinks=np.float16([0]), wrt=("sinks",)
        )
        assert pullback(np.full((2, 1, 1), 1e6, np.float32)).sinks == -np.inf


def test_without_keys_the_log_sum_exp_is_the_sink(isa):
    q, k = np.ones((2, 20, 8), np.float32), np.ones((2, 0, 8), np.float32)
    (out, lse), pullback = sa.scaled_dot_product_attention_vjp(
        q,
        k,
        k,
        np.zeros((20, 1), np.float32),
        sinks=[0.5, -1.0],
        return_lse=True,
        wrt=("query", "key", "attn_mask", "sinks"),
    )
    got = pullback(np.ones_like(out), np.ones_like(lse))
    assert_array_equal(got.sinks, [20, 20])
    assert not got.query.any() and not got.attn_mask.any() and got.key.shape == k.shape


def test_without_columns_of_values_the_log_sum_exp_has_gradients(isa):
    q, k, _ = random_inputs((2, 20, 8), 30)
    v, d_lse = np.ones((2, 30, 0), np.float32), np.ones((2, 20), np.float32)
    got = assert_gradients((q, k, v), {}, grad_out=np.ones((2, 20, 0), np.float32), grad_lse=d_lse)
    assert got.query.any() and got.key.any()


@pytest.mark.parametrize("rows", [1, 70])
def test_a_closed_pair_whose_score_is_nan_from_finite_numbers(rows):
    """A product of finite numbers contains infinity minus infinity: neither its score nor softcap's slope reaches a
    gradient.
    """
    q, k, v = random_inputs((1, 2, 70, 16), 90)
    q, bad, closed = np.abs(q) + 2, k.copy(), np.arange(90) % 9 == 3
    bad[..., closed, ::2], bad[..., closed, 1::2] = 3e38, -3e38
    options = {"attn_mask": np.broadcast_to(~closed, (rows, 90)).copy(), "softcap": 5.0, "scale": 1.0}
    check((q, bad, v), options, clean=(q, k, v))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_keys_has_no_gradient_whatever_it_holds(isa, bad):
    q, k, v = random_inputs((3, 6, 4), 5)
    grad_out, grad_lse = np.ones_like(q), np.ones((3, 6), np.float32)
    q[0], grad_out[0], grad_lse[0] = bad, bad, bad
    options = {"key_lengths": np.array([0, 3, 5]), "alibi_slopes": np.full(3, 0.1, np.float32)}
    wrt = ("query", "key", "value", "alibi_slopes")
    (out, _), pullback = sa.scaled_dot_product_attention_vjp(q, k, v, **options, return_lse=True, wrt=wrt)
    found = [getattr(pullback(grad_out, grad_lse), name) for name in wrt]
    assert not out[0].any() and not any(x[0].any() for x in found)
    assert all(np.isfinite(x).all() and x[1:].any() for x in found)


@pytest.mark.parametrize("length", [9, 65, 100, 197])
def test_the_output_has_the_bits_of_a_call_without_gradients(isa, length):
    for dtype in (np.float32, np.float64, np.float16, "bfloat16"):
        arguments = random_inputs((2, length, 20), 90, dtype=np.dtype(dtype))
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.3, "rng": 1}):
            out, _ = sa.scaled_dot_product_attention_vjp(*arguments, **options)
            assert_array_equal(out, sa.scaled_dot_product_attention(*arguments, **options))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 4, 8, 28, 65, 72, 76, 200])
def test_the_backward_pass_has_the_weights_of_the_forward_pass(isa, length, dtype):
    """Scores are large here: a score that was summed in another order is off by an ulp of 10^5, and its weight by 1 %.
    Weights sum to 1, so dV sums to dO along the keys, and dS to 0."""
    rng = np.random.default_rng(length)
    size = 300 if dtype == np.float32 else 3e4
    q, k = (rng.uniform(-size, size, (2, n, 64)).astype(dtype) for n in (length, 150))
    v, grad_out = (rng.standard_normal((2, n, 20)).astype(dtype) for n in (150, length))
    mask = np.zeros((2, length, 150), dtype)
    _, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, mask, wrt=("value", "attn_mask"))
    found = pullback(grad_out)
    eps = float(np.finfo(dtype).eps)
    # Errors come from the sum of 150 weights, and sums of 20 terms in dP and delta: a few eps of the largest |dP|.
    largest = np.abs(grad_out).sum(-1).max() * np.abs(v).max()
    assert_allclose(
        found.value.sum(axis=1), grad_out.sum(axis=1), rtol=0, atol=16 * eps * np.abs(grad_out).sum(1).max()
    )
    assert_allclose(found.attn_mask.sum(axis=-1), 0, rtol=0, atol=16 * eps * largest)


def gradients_of_16_bits(arrays, grad_out, options, rounded):
    if not rounded:
        return sa.scaled_dot_product_attention_vjp(*arrays, **options)[1](grad_out)
    out, statistics, _ = attention_forward(*arrays, **options)
    assert out.dtype == grad_out.dtype
    given = {"grad_out": grad_out, "out": out, "statistics": statistics}
    return attention_backward(*arrays, names=WRT, **given, **options)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"dropout_p": 0.3, "rng": 1}, {"sinks": 2.0}], ids=str
)
@pytest.mark.parametrize("dtype", [np.float16, "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 6, 8), (70, 128, 64)], ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_16_bit_gradients_are_those_of_the_output_before_it_was_rounded(shape, dtype, options, rounded):
    """Delta must not come from rounded outputs: dQ of inputs that are all positive would be off by seven ulps.

    The pullback keeps the output from before it was rounded; a backward pass with the rounded one, as of
    nn.MultiheadAttention, sums delta over the keys.
    """
    length, keys, width = shape
    rng = np.random.default_rng(0)
    q, k, v, grad_out = (rng.uniform(0, 1, (2, n, width)).astype(dtype) for n in (length, keys, keys, length))
    if isinstance(options.get("sinks"), float):
        options = options | {"sinks": np.full(2, options["sinks"], np.float32)}
    wide = (x.astype(np.float64) for x in (q, k, v))
    _, pullback = reference.scaled_dot_product_attention_vjp(*wide, **options)
    expected = pullback(grad_out.astype(np.float64))
    for isa, name in product(ISAS, ("query", "key", "value")):
        if width >= 16 and isa == "avx512bf16" and dtype == "bfloat16":
            continue  # weights are rounded (tests/attention/test_accuracy.py)
        if width >= 16 and isa == "amx" and rounded:
            continue  # with a matrix unit, delta comes from the rounded output (docs/theory/backward.md)
        if name == "query":
            with using(isa):
                found = gradients_of_16_bits((q, k, v), grad_out, options, rounded)
        truth = getattr(expected, name)
        ulp = np.abs(np.spacing(truth.astype(dtype))).astype(np.float64)
        # Half an ulp of rounding, and the error of float32's sums where dP, about 20, and delta differ by 1.
        bound = ulp / 2 + float(np.spacing(np.abs(truth).max().astype(dtype))) / 4
        error = np.abs(getattr(found, name).astype(np.float64) - truth)
        assert (error <= bound).all(), f"{name}: {(error / bound).max()}"


def flag_of_overflow():
    """Return functions that clear and read the flag that an overflow sets in the thread that computed it."""
    bit = {"x86_64": 8, "AMD64": 8, "aarch64": 4, "arm64": 4}.get(platform.machine())
    library = ctypes.util.find_library("m")
    if bit is None or sys.platform == "win32" or library is None:
        pytest.skip("it is not known here how to read floating-point flags")
    functions = ctypes.CDLL(library)
    return lambda: functions.feclearexcept(bit), lambda: bool(functions.fetestexcept(bit) & bit)


# The product that overflows -> factors of query, key, value and grad_out, and the gradients that need the product.
OVERFLOWING = {
    "dP = dO V": ((1, 1, 1e30, 1e30), {"query", "key"}), "dQ = dS K": ((1e-25, 1e25, 1, 1e15), {"query"}),
    "dK = dS Q": ((1e25, 1e-25, 1, 1e15), {"key"}), "dV = P dO": ((1, 1, 1e-30, 5e37), {"value"}),
}  # fmt: skip


@pytest.mark.parametrize("product", OVERFLOWING)
def test_what_wrt_leaves_out_is_not_computed(isa, product):
    """One product at a time overflows, and nothing else: the CPU's flag shows whether that product was computed."""
    if isa == "amx":
        pytest.skip("a matrix unit leaves no flags")
    clear, overflowed = flag_of_overflow()
    factors, needed_by = OVERFLOWING[product]
    rng = np.random.default_rng(0)
    query, key, value, grad_out = (
        (np.abs(rng.standard_normal((2, n, 16))) * factor).astype(np.float32)
        for n, factor in zip((200, 8, 8, 200), factors, strict=True)
    )
    _, statistics, _ = attention_forward(query, key, value)
    zeros = np.zeros_like(grad_out)  # as output, so that δ = O·dO does not overflow
    given = {"grad_out": grad_out, "out": zeros, "statistics": statistics, "num_threads": 1}
    for wrt in (names for n in (1, 2, 3) for names in combinations(WRT, n)):
        clear()
        attention_backward(query, key, value, names=wrt, **given)
        assert overflowed() == bool(needed_by & set(wrt)), wrt


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_wrt_leaves_out_takes_no_memory(name):
    """Each gradient takes 8 MiB; scratch memory and statistics take far less."""
    arguments = random_inputs((1, 65536, 32))
    options = {"window": (8, 0), "num_threads": 1}
    out, pullback = sa.scaled_dot_product_attention_vjp(*arguments, **options, wrt=name)
    assert out.nbytes == 2**23 < peak_memory(lambda: pullback(out)) < 1.5 * 2**23


def test_the_gradient_of_a_row_with_a_sink_and_no_keys_is_0():
    """The row's output is always 0: a NaN in the output's gradient reaches nothing, in the core and in the
    reference.
    """
    x, mask = np.ones((2, 3)), np.array([[False, False], [True, True]])
    grad_out = np.array([[np.nan] * 3, [1.0] * 3])
    for module in (sa, reference):
        _, pullback = module.scaled_dot_product_attention_vjp(x, x, x, mask, sinks=0.3)
        clean = pullback(np.where(np.isnan(grad_out), 0, grad_out))
        for a, b in zip(pullback(grad_out), clean, strict=True):
            assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("function", "forward"),
    [
        (sa.scaled_dot_product_attention_vjp, sa.scaled_dot_product_attention),
        (sa.varlen_attention_vjp, sa.varlen_attention),
    ],
)
def test_signatures_are_those_of_the_forward_call(function, forward):
    own, forward = inspect.signature(function).parameters, inspect.signature(forward).parameters
    assert list(own) == [*forward, "wrt"]
    for name in forward:
        assert own[name].default == forward[name].default and own[name].kind == forward[name].kind, name


@pytest.mark.parametrize("p", [np.array(0.4), np.float32(0.4), np.array(0.4, np.float16), 0.4], ids=repr)
@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)], ids=["entropy", "generator"])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_is_the_same_forward_and_backward(p, rng, packed):
    """For a gradient of ones, the value's gradient has the sums of each key's weights, which the output has too."""
    q, k, _ = random_inputs((1, 40, 8), 60, dtype=np.float64)
    p = p.copy() if isinstance(p, np.ndarray) else p
    offsets, v = ([0, 13, 40], [0, 30, 60]), np.eye(60)[None]  # V is the identity: the output is the weights
    out, pullback = vjp_of(packed, q, k, v, offsets=offsets, dropout_p=p, rng=rng)
    given = out.sum(axis=(0, 1))
    if isinstance(p, np.ndarray):
        p[...] = 0  # changing the weights changes nothing
    for _ in range(2):
        got = pullback(np.ones_like(out)).value.reshape(60, 60)
        assert_allclose(got, np.broadcast_to(given[:, None], got.shape), rtol=0, atol=1e-14)
    assert (given == 0).sum() < 60 and (out == 0).sum() > 100


@pytest.mark.parametrize("packed", [False, True])
def test_gradients_given_as_lists_have_the_dtype_of_the_result(packed):
    """The pullback holds a float32 output, in which 0.1 is another number."""
    arrays = random_inputs((2, 6, 8), dtype=np.dtype(np.float16))
    (out, lse), pullback = vjp_of(packed, *arrays, return_lse=True)
    numbers, of_lse = np.full(out.shape, 0.1), np.full(lse.shape, 0.1, np.float32)
    from_lists = pullback(numbers.tolist(), of_lse.tolist())
    np.testing.assert_equal(from_lists, pullback(numbers.astype(np.float16), of_lse))


def test_a_gradient_that_there_is_not_is_an_error_of_the_call():
    q, k, v = random_inputs((2, 6, 4), 5)
    with pytest.raises(ValueError, match="wrt names attn_mask, but attn_mask is boolean"):
        sa.scaled_dot_product_attention_vjp(q, k, v, np.ones((6, 5), bool), wrt="attn_mask")
    for name in ("alibi_slopes", "sinks", "attn_mask"):
        with pytest.raises(ValueError, match=f"wrt names {name}, which was not given"):
            sa.scaled_dot_product_attention_vjp(q, k, v, wrt=name)
    with pytest.raises(ValueError, match=r"wrt may name query, key.*it has 'q'"):
        sa.scaled_dot_product_attention_vjp(q, k, v, wrt=("key", "q"))
    with pytest.raises(ValueError, match=r"wrt names key twice, got \('key', 'query', 'key'\)"):
        sa.scaled_dot_product_attention_vjp(q, k, v, wrt=["key", "query", "key"])
    with pytest.raises(TypeError, match="wrt must be a name or a sequence of names, got NoneType"):
        sa.scaled_dot_product_attention_vjp(q, k, v, wrt=None)
    with pytest.raises(TypeError, match="grad_lse was given"):
        sa.scaled_dot_product_attention_vjp(q, k, v)[1](
            np.ones((2, 6, 4), np.float32), np.ones((2, 6), np.float32)
        )


@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)], ids=["key", "value", "both"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_broadcast_view_has_a_gradient_for_each_of_its_heads(which, packed):
    q, *one = random_inputs((2, 6, 4), 6)
    seen = [np.broadcast_to(x[:1], x.shape) if n in which else x for n, x in enumerate(one)]

    def gradients(*arrays):
        out, pullback = vjp_of(packed, *arrays, offsets=([0, 2, 6], [0, 2, 6]))
        return pullback(np.ones_like(out))

    np.testing.assert_equal(gradients(q, *seen), gradients(q, *(x.copy() for x in seen)))


def test_a_pullback_may_be_called_again_and_outlives_its_inputs():
    q, k, v = random_inputs((2, 50, 8), 70)
    out, pullback = sa.scaled_dot_product_attention_vjp(q.copy(), k.copy(), v.copy(), is_causal=True)
    d = np.random.default_rng(0).standard_normal(out.shape).astype(np.float32)
    _, held = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    first, other, again = pullback(d), pullback(-2 * d), pullback(d)
    for a, b, c, e in zip(first, other, again, held(d), strict=True):
        assert a is not c
        assert_array_equal(a, c)
        assert_array_equal(a, e)
        assert_array_equal(-2 * a, b)  # a power of two rounds nothing


def test_changed_inputs_change_later_gradients_and_are_checked_again():
    """The pullback holds references, not copies: changed inputs give wrong numbers, but nothing is read out of
    bounds.
    """
    q, k, v = random_inputs((2, 20, 8), 30)
    lengths = np.array([20, 30])
    out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, key_lengths=lengths)
    before = pullback(np.ones_like(out))
    k[...] = 1e30
    got = pullback(np.ones_like(out))
    assert got.query.shape == q.shape and not np.array_equal(got.query, before.query)
    lengths[0] = 10**9
    with pytest.raises(ValueError, match="key_lengths must be between 0 and S = 30"):
        pullback(np.ones_like(out))
    q.resize((2, 20, 4), refcheck=False)
    with pytest.raises(ValueError, match=r"query has shape \(2, 20, 4\)"):
        pullback(np.ones_like(out))
