"""Gradients on the matrix unit, where the CPU has one: the sizes and the numbers at which the backward pass changes its ways.

What tests/kernels/test_matrix_unit.py is for the forward pass; the tests of gradients that go through all instruction sets run on the matrix
unit as well.
"""

import itertools

import numpy as np
import pytest

import selfattn as sa
from selfattn import _core

EPS = 2.0**-24

pytestmark = pytest.mark.usefixtures("on_the_matrix_unit")


def arrays(heads=2, length=100, keys=100, width=48, value_width=48, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (
        (heads, length, width),
        (heads, keys, width),
        (heads, keys, value_width),
        (heads, length, value_width),
    )
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def gradients(query, key, value, grad_out, **options):
    _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, **options)
    return pullback(grad_out)[:3]


def swap(x):
    return x.swapaxes(-1, -2)


def assert_close(found, query, key, value, grad_out, open_pairs=None, eps=EPS):
    """Against the formulas of docs/theory/backward.md in float64. The error of every product of sums is at most eps times its terms' number
    times the sum of their magnitudes; that of a weight is relatively twice its score's."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (query, key, value, grad_out))
    scale = 1 / np.sqrt(q.shape[-1])
    scores = scale * q @ swap(k)
    if open_pairs is not None:
        scores = np.where(open_pairs, scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    dp = g @ swap(v)
    delta = (p * dp).sum(axis=-1, keepdims=True)
    ds = scale * p * (dp - delta)
    expected = ds @ k, swap(ds) @ q, swap(p) @ g
    size = np.abs(g) @ swap(np.abs(v))
    size = scale * p * (size + (p * size).sum(axis=-1, keepdims=True))
    reach = scale * (np.abs(q) @ swap(np.abs(k))).max()
    terms = 2 * (q.shape[-1] + 4) * reach + v.shape[-1] + k.shape[-2] + q.shape[-2] + 32
    sizes = size @ np.abs(k), swap(size) @ np.abs(q), swap(p) @ np.abs(g)
    for x, true, magnitude, like in zip(found, expected, sizes, (query, key, value), strict=True):
        assert x.dtype == like.dtype and x.shape == like.shape
        bound = terms * eps * magnitude + np.finfo(np.float32).tiny
        np.testing.assert_array_less(np.abs(x.astype(np.float64) - true), bound)


@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 64, 80])
@pytest.mark.parametrize("value_width", [15, 16, 31, 33, 80])
def test_widths_around_a_tile(width, value_width):
    inputs = arrays(length=70, keys=70, width=width, value_width=value_width)
    assert_close(gradients(*inputs), *inputs)


@pytest.mark.parametrize("keys", [31, 32, 33, 47, 63, 64, 65, 97, 129, 191])
@pytest.mark.parametrize("length", [16, 17, 31, 33, 49, 63, 64, 65, 128])
def test_lengths_around_a_tile(length, keys):
    inputs = arrays(length=length, keys=keys)
    assert_close(gradients(*inputs), *inputs)


@pytest.mark.parametrize("length", [33, 64, 100, 161])
def test_causal(length):
    inputs = arrays(length=length, keys=length)
    found = gradients(*inputs, is_causal=True)
    assert_close(found, *inputs, open_pairs=np.tril(np.ones((length, length), bool)))


def test_a_window_begins_inside_a_cell():
    inputs = arrays(length=300, keys=300)
    i = np.arange(300)
    open_pairs = (i[:, None] - i <= 70) & (i - i[:, None] <= 5)
    assert_close(gradients(*inputs, window=(70, 5)), *inputs, open_pairs=open_pairs)


@pytest.mark.parametrize("wrt", [("query",), ("key",), ("value",), ("query", "value"), ("key", "value")])
def test_what_wrt_leaves_out_changes_no_bit_of_the_rest(wrt):
    inputs = arrays(length=130, keys=170)
    every = sa.scaled_dot_product_attention_vjp(*inputs[:3])[1](inputs[3])
    some = sa.scaled_dot_product_attention_vjp(*inputs[:3], wrt=wrt)[1](inputs[3])
    for name in ("query", "key", "value"):
        if name in wrt:
            np.testing.assert_array_equal(getattr(some, name), getattr(every, name))
        else:
            assert getattr(some, name) is None


@pytest.mark.parametrize("shift", [0, 1, 3, 16])
def test_gradients_anywhere_in_a_cache_line(shift):
    """dK and dV are added to in place or gathered: 600 rows are more than eight blocks."""
    inputs = arrays(length=600, keys=150, width=64, value_width=32)
    query, key, value, grad_out = inputs
    out, statistics = sa.scaled_dot_product_attention_forward(query, key, value)
    places = {}
    for name, like in (("query", query), ("key", key), ("value", value)):
        memory = np.zeros(like.size + 64, np.float32)
        start = -(memory.ctypes.data // 4) % 16 + shift
        places[name] = memory[start : start + like.size].reshape(like.shape)
    found = sa.scaled_dot_product_attention_backward(
        grad_out, out, statistics, query, key, value, gradients=sa.AttentionGradients(**places)
    )
    assert_close(found[:3], *inputs)


@pytest.mark.parametrize("magnitude", [2.0**-149, 2.0**-130, 2.0**-101, 2.0**-100, 2.0**60, 2.0**127])
@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_magnitudes_beyond_the_parts(which, magnitude):
    inputs = arrays()
    inputs[which][0, 70, 5] = magnitude
    if magnitude > 1:  # one pair of numbers above all others: nothing but its terms is left of sums
        found = gradients(*inputs)
        other = gradients(*(x[1:] for x in inputs))
        for a, b in zip(found, other, strict=True):
            np.testing.assert_array_equal(a[1:], b)
    else:
        assert_close(gradients(*inputs), *inputs)


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-99, 2.0**-80, 2.0**80, 2.0**100])
def test_gradients_of_any_size_scale(scale):
    inputs = arrays(length=70, keys=130)
    found = gradients(*inputs[:3], inputs[3] * np.float32(scale))
    for x, one in zip(found, gradients(*inputs), strict=True):
        size = np.abs(one).max()
        np.testing.assert_allclose(x / scale, one, rtol=0, atol=size * 400 * EPS + 2.0**-120 / scale)


@pytest.mark.parametrize("bits", [0x7FC00000, 0xFFFFFFFF, 0x7F800000])
@pytest.mark.parametrize("at", [0, 15, 16, 63, 64, 99])
def test_what_is_not_finite_stays_behind_its_mask(bits, at):
    query, key, value, grad_out = arrays()
    mask = np.ones((100, 100), bool)
    mask[:, at] = False
    clean = gradients(query, key, value, grad_out, attn_mask=mask)
    key.view(np.uint32)[0, at, 5] = bits
    value.view(np.uint32)[0, at, 7] = bits
    found = gradients(query, key, value, grad_out, attn_mask=mask)
    for x, y in zip(found, clean, strict=True):
        np.testing.assert_allclose(x, y, atol=400 * EPS)
        np.testing.assert_array_equal(x[1], y[1])


@pytest.mark.parametrize("at", [0, 16, 63, 64, 99])
def test_nan_of_a_gradient_reaches_its_row_of_dq_alone(at):
    query, key, value, grad_out = arrays()
    grad_out[0, at, 3] = np.nan
    dq, dk, dv = gradients(query, key, value, grad_out)
    assert np.isnan(dq[0, at]).all() and np.isfinite(np.delete(dq[0], at, axis=0)).all()
    assert np.isnan(dk[0]).all() and np.isnan(dv[0, :, 3]).all()
    assert np.isfinite(np.delete(dv[0], 3, axis=1)).all()
    assert all(np.isfinite(x[1]).all() for x in (dq, dk, dv))


def test_products_that_overflow_do_what_arithmetic_does():
    """V·dO is beyond float32 although both fit: dS is infinite or NaN, dV is not touched by it."""
    query, key, value, grad_out = arrays(length=40, keys=70)
    value[0, 33, 0] = grad_out[0, 20, 0] = 2.0**90
    dq, dk, dv = gradients(query, key, value, grad_out)
    assert not np.isfinite(dq[0, 20]).any() and np.isfinite(np.delete(dq[0], 20, axis=0)).all()
    assert not np.isfinite(dk[0, 33]).any()
    assert np.isfinite(dv).all()


@pytest.mark.parametrize(
    "options",
    [
        {"dropout_p": 0.3, "rng": 5},
        {"softcap": 3.0},
        {"alibi_slopes": np.array([0.5, 0.25], np.float32)},
        {"key_lengths": np.array([37, 150])},
        {"sinks": np.array([0.5, -1.0], np.float32)},
        {"attn_mask": np.where(np.tri(130, 170, 20) > 0, 0.25, -np.inf).astype(np.float32)},
        {"dropout_p": 0.5, "rng": 5, "is_causal": True, "softcap": 2.0},
    ],
    ids="-".join,
)
def test_every_option_agrees_with_float64(options):
    inputs = arrays(length=130, keys=170)
    if "attn_mask" in options:
        options = options | {"attn_mask": options["attn_mask"].reshape(1, 130, 170)}
    found = gradients(*inputs, **options)
    wide = {
        k: v.astype(np.float64) if getattr(v, "dtype", None) == np.float32 else v for k, v in options.items()
    }
    expected = gradients(*(x.astype(np.float64) for x in inputs), **wide)
    for x, true in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, true, atol=(170 + 130 + 48) * EPS * np.abs(true).max())


@pytest.mark.parametrize("heads", [(6, 6), (6, 2), (6, 1)])
def test_heads_that_share_keys(heads):
    rng = np.random.default_rng(0)
    query, grad_out = rng.standard_normal((2, 2, heads[0], 75, 32)).astype(np.float32)
    key, value = rng.standard_normal((2, 2, heads[1], 90, 32)).astype(np.float32)
    dq, dk, dv = gradients(query, key, value, grad_out, enable_gqa=True)
    group = heads[0] // heads[1]
    whole = [query, key.repeat(group, axis=1), value.repeat(group, axis=1), grad_out]
    each = gradients(*(x.astype(np.float64) for x in whole))
    shared = [each[0]] + [x.reshape(2, heads[1], group, 90, 32).sum(axis=2) for x in each[1:]]
    for x, true in zip((dq, dk, dv), shared, strict=True):
        np.testing.assert_allclose(x, true, atol=(75 * group + 90 + 32) * EPS * np.abs(true).max())


@pytest.mark.parametrize("rows", [1, 5, 16, 17])
def test_heads_that_share_a_mask_begin_with_the_last_rows(rows):
    """The last part of a head's rows is short, goes by multiply-adds, and may come first: keys are new then, too."""
    inputs = arrays(length=64 + rows)
    found = gradients(*inputs, attn_mask=np.zeros((64 + rows, 100), np.float32), num_threads=1)
    assert_close(found, *inputs)


@pytest.mark.parametrize("shape", [(6, 150, 300), (1, 700, 600)])
def test_the_same_bits_for_any_number_of_threads(shape):
    heads, length, keys = shape
    inputs = arrays(heads=heads, length=length, keys=keys)
    inputs[1][0, 70, 3] = 1e-38  # one tile of one head by multiply-adds
    one = gradients(*inputs, num_threads=1)
    for threads in (2, 3, 7):
        for x, y in zip(one, gradients(*inputs, num_threads=threads), strict=True):
            np.testing.assert_array_equal(x.view(np.uint32), y.view(np.uint32))


def test_more_keys_than_the_scratch_keeps():
    inputs = arrays(heads=1, length=40, keys=12_000, width=96, value_width=112)
    assert_close(gradients(*inputs), *inputs)


@pytest.mark.parametrize(
    "dtypes", list(itertools.product(["float16", "bfloat16", "float32"], repeat=4)), ids="-".join
)
def test_every_mix_of_dtypes(dtypes):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 comes from the package ml_dtypes")
    types = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
    inputs = [x.astype(types[name]) for x, name in zip(arrays(length=40), dtypes, strict=True)]
    found = gradients(*inputs)
    expected = gradients(*(x.astype(np.float64) for x in inputs))
    # two parts of Q, dO, P and dS leave 2^-17 of every term; the saved output has the digits of its dtype
    out_digits = {"float16": 11, "bfloat16": 8, "float32": 24}[
        sa.scaled_dot_product_attention(*inputs[:3]).dtype.name
    ]
    for x, true in zip(found, expected, strict=True):
        digits = {"float16": 11, "bfloat16": 8, "float32": 24}[x.dtype.name]
        assert x.dtype in types.values()
        size = np.abs(true).max()
        atol = size * (100 * 2.0**-17 / 8 + 4 * 2.0**-out_digits)
        np.testing.assert_allclose(x.astype(np.float64), true, rtol=2.0**-digits, atol=atol)


@pytest.mark.parametrize("factor", [1, 8])
def test_the_error_is_below_that_of_multiply_adds(factor):
    inputs = arrays(heads=2, length=512, keys=1024, width=64, value_width=64)
    inputs[0] *= np.float32(factor)
    inputs[1] *= np.float32(factor)
    truth = gradients(*(x.astype(np.float64) for x in inputs))

    def errors(isa):
        _core._set_isa(isa)
        return [np.sqrt(np.mean((x - y) ** 2)) for x, y in zip(gradients(*inputs), truth, strict=True)]

    for name, by_parts, by_multiply_adds in zip("qkv", errors("amx"), errors("avx512"), strict=True):
        assert by_parts < by_multiply_adds, name
