"""The oracle itself: `selfattn.reference` against loops over Python floats and against published numbers.

Everything else is tested against the reference, so here it is held against things that share no line with it. The
transformer's gradients are held against finite differences, and its forms against each other.
"""

import math

import numpy as np
import pytest
from before_tests import examples
from drawn_attention import problems
from drawn_transformers import drawn
from hypothesis import given
from hypothesis import strategies as st
from processes import run_script
from refusals import refusals

from selfattn import reference
from selfattn.engine import transformer
from selfattn.engine.transformer import Layer, Projection, Transformer

EPS = float(np.finfo(np.float64).eps)


def attention_by_hand(
    query,
    key,
    value,
    *,
    scale=None,
    enable_gqa=False,
    attn_mask=None,
    is_causal=False,
    causal=None,
    window=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    key_lengths=None,
    bias=None,
    offset_bias=None,
    keep=None,
    dropout_p=0.0,
):
    """Compute attention pair by pair with `math`: (output, lse, weights, tolerance). `keep` is dropout's."""
    if enable_gqa:
        served = [h * key.shape[-3] // query.shape[-3] for h in range(query.shape[-3])]
        key, value = key[..., served, :, :], value[..., served, :, :]
    lead = np.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    n_queries, n_keys, width, v_width = query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1]
    query, key, value = (np.broadcast_to(x, lead + x.shape[-2:]) for x in (query, key, value))
    pairs = (*lead, n_queries, n_keys)
    mask, bias = (None if x is None else np.broadcast_to(x, pairs) for x in (attn_mask, bias))
    by_offset = None if offset_bias is None else np.broadcast_to(offset_bias, (*lead, offset_bias.shape[-1]))
    given = (alibi_slopes, sinks, key_lengths)
    slopes, sinks, lengths = (None if x is None else np.broadcast_to(x, lead) for x in given)
    offset = n_keys - n_queries if causal == "lower_right" else 0
    left, right = window or (None, None)
    if scale is None:
        scale = width**-0.5 if width else 1.0

    output, lse = np.zeros((*lead, n_queries, v_width)), np.full((*lead, n_queries), -math.inf)
    weights, largest = np.zeros((*lead, n_queries, n_keys)), 1.0
    for head in np.ndindex(lead):
        for i in range(n_queries):
            scores = {}
            for j in range(n_keys):
                here = i + offset
                if (is_causal or causal) and j > here:
                    continue
                if (left is not None and j < here - left) or (right is not None and j > here + right):
                    continue
                if lengths is not None and j >= lengths[head]:
                    continue
                if mask is not None and not (mask[head][i, j] > (0 if mask.dtype == bool else -math.inf)):
                    continue
                added = [x[head][i, j] for x in (mask, bias) if x is not None and x.dtype != bool]
                if by_offset is not None:  # the numbers begin with the last query's first key
                    added.append(by_offset[head][j + n_queries - 1 - i])
                if -math.inf in added:
                    continue
                pairs = zip(query[head][i], key[head][j], strict=True)
                products = [scale * float(a) * float(b) for a, b in pairs]
                score, size = math.fsum(products), sum(map(abs, products))
                if softcap is not None:
                    score = softcap * math.tanh(score / softcap)
                if slopes is not None:
                    score, size = score - slopes[head] * abs(here - j), size + abs(slopes[head] * (here - j))
                for term in added:
                    score, size = score + term, size + abs(term)
                scores[j], largest = score, max(largest, size)
            terms = dict(scores)
            if sinks is not None and sinks[head] > -math.inf:
                terms[None] = sinks[head]
            if terms:
                top = max(terms.values())
                total = math.fsum(math.exp(term - top) for term in terms.values())
                lse[head][i] = top + math.log(total)
                for j, score in scores.items():
                    weights[head][i, j] = math.exp(score - top) / total
                    if keep is not None:
                        weights[head][i, j] *= keep[head][i, j] / (1.0 - dropout_p) if dropout_p < 1 else 0.0
            for column in range(v_width):
                shares = (weights[head][i, j] * value[head][j, column] for j in scores)
                output[head][i, column] = math.fsum(shares)
    # A score is a sum of E products and up to 8 roundings around them, of numbers that are at most `largest`;
    # exp makes its absolute error relative, in the weight and in the denominator, a sum of S + 1 terms.
    tolerance = (2.0 * (width + 8) * largest + n_keys + 9) * EPS
    return output, lse, weights, tolerance


@examples(250)
@given(problems())
def test_attention_agrees_with_loops(problem):
    arrays, options, dropout_p, seed = problem
    got = reference.scaled_dot_product_attention(
        *arrays, dropout_p=dropout_p, rng=seed, return_lse=True, return_weights=True, **options
    )
    pairs, keep = got[2].shape, None
    if dropout_p > 0:
        keep = reference.dropout_keep_mask(seed, dropout_p, pairs[:-2], *pairs[-2:])
    *expected, tolerance = attention_by_hand(*arrays, **options, keep=keep, dropout_p=dropout_p)
    for name, a, b in zip(("output", "lse", "weights"), got, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == np.float64
        assert a.flags.c_contiguous
        assert a.flags.writeable
        largest = max(1.0, np.abs(b[np.isfinite(b)]).max(initial=0.0), np.abs(arrays[2]).max(initial=0.0))
        atol = tolerance * largest / max(1.0 - dropout_p, 0.5)
        np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


@pytest.fixture
def qkv():
    """Query (2, 3, 4), key (2, 5, 4) and value (2, 5, 3)."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 5, 4)), rng.normal(size=(2, 5, 3))


def attend(*args, **options):
    return reference.scaled_dot_product_attention(*args, return_lse=True, return_weights=True, **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", ["bool", "float", "causal", "window", "key_lengths"])
def test_masked_keys_and_values_never_show(qkv, bad, how):
    query, key, value = qkv
    masked = np.zeros((3, 5), bool)
    masked[:, 3:] = True
    options = {
        "bool": {"attn_mask": ~masked},
        "float": {"attn_mask": np.where(masked, -np.inf, 0.25)},
        "causal": {"is_causal": True},  # 3 queries never see keys 3 and 4
        "window": {"window": (None, 0)},
        "key_lengths": {"key_lengths": 3},
    }[how]
    expected = attend(query, key, value, **options)
    key, value = key.copy(), value.copy()
    key[:, 3:], value[:, 3:] = bad, bad
    np.testing.assert_equal(attend(query, key, value, **options), expected)


def test_a_value_that_some_queries_see_poisons_those_alone(qkv):
    query, key, value = qkv
    value = value.copy()
    value[:, 1, 0] = np.nan
    expected, _, weights = attend(*qkv, is_causal=True)
    out = reference.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert np.isnan(out[:, 1:, 0]).all()  # queries 1 and 2 see key 1
    np.testing.assert_array_equal(out[:, :1], expected[:, :1])
    np.testing.assert_array_equal(out[..., 1:], expected[..., 1:])
    assert np.isfinite(weights).all()


def test_a_nan_score_spoils_its_row_but_not_the_weights_of_masked_keys(qkv):
    query, key, value = qkv
    query = query.copy()
    query[0, 1] = np.nan
    mask = np.array([True, True, False, True, False])
    out, lse, weights = attend(query, key, value, attn_mask=mask)
    assert np.isnan(out[0, 1]).all()
    assert np.isnan(lse[0, 1])
    np.testing.assert_array_equal(np.isnan(weights[0, 1]), mask)
    assert not weights[..., ~mask].any()
    assert np.isfinite(out[0, [0, 2]]).all()
    assert np.isfinite(out[1]).all()


def test_attended_scores_of_minus_infinity_weigh_nothing(qkv):
    query, key, value = np.ones((1, 2)), np.array([[-np.inf, 0.0], [1.0, 1.0]]), np.array([[1.0], [2.0]])
    out, _, weights = attend(query, key, value)
    np.testing.assert_array_equal(weights, [[0.0, 1.0]])
    np.testing.assert_array_equal(out, [[2.0]])
    out, lse, weights = attend(query, key[:1], value[:1])  # as for a row without keys, as in PyTorch
    assert (out.item(), lse.item(), weights.item()) == (0.0, -np.inf, 0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("mask_dtype", [np.float32, np.float64])
def test_a_row_of_finfo_min_is_uniform_not_dead(dtype, mask_dtype):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 2, 4)).astype(dtype)
    value = np.array([[1.0, 2.0], [3.0, 6.0]], dtype)
    mask = np.full((2, 2), np.finfo(mask_dtype).min, mask_dtype)
    out = reference.scaled_dot_product_attention(query, key, value, mask)
    np.testing.assert_array_equal(out, np.full((2, 2), [2.0, 4.0], dtype))


def test_the_float_mask_is_read_as_it_is_and_leaves_the_dtype_alone(qkv):
    query, key, value = (x.astype(np.float32) for x in qkv)
    mask = np.where(np.random.default_rng(0).random((3, 5)) < 0.5, 0.0, -np.inf)
    expected = reference.scaled_dot_product_attention(query, key, value, mask == 0.0)
    for dtype in (np.float16, np.float32, np.float64, ">f4"):
        out = reference.scaled_dot_product_attention(query, key, value, mask.astype(dtype))
        assert out.dtype == np.float32
        np.testing.assert_array_equal(out, expected)


def test_dtypes(qkv):
    def result(*dtypes):
        out, lse, weights = attend(*(x.astype(dtype) for x, dtype in zip(qkv, dtypes, strict=True)))
        assert weights.dtype == out.dtype
        return out.dtype.name, lse.dtype.name

    assert result("f2", "f2", "f2") == ("float16", "float32")
    assert result("f4", "f4", "f4") == ("float32", "float32")
    assert result("f8", "f8", "f8") == ("float64", "float64")
    assert result("f2", "f4", "f2") == ("float32", "float32")
    assert result("f2", "f8", "f4") == ("float64", "float64")
    assert result("i1", "i1", "i1") == ("float64", "float64")
    assert result("i1", "f2", "f2") == ("float64", "float64")  # an integer of any width counts as float64
    assert result(">f4", ">f4", ">f4") == ("float32", "float32")


def test_bfloat16(qkv):
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    mask = np.where(np.random.default_rng(0).random((3, 5)) < 0.5, 0.0, -np.inf).astype(bfloat16)
    rounded = [x.astype(bfloat16) for x in qkv]
    out, lse, weights = attend(*rounded, mask)
    assert (out.dtype, lse.dtype, weights.dtype) == (bfloat16, np.float32, bfloat16)
    wide = attend(*(x.astype(np.float32) for x in rounded), mask == 0)
    for a, b in zip((out, lse, weights), wide, strict=True):  # computed in float32, then rounded once
        np.testing.assert_array_equal(a, b.astype(a.dtype))


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_compute_dtype_gives_the_truth_and_the_default_is_near_it(qkv, dtype):
    inputs = [x.astype(dtype) for x in qkv]
    truth = attend(*inputs, compute_dtype=np.float64)
    for a, b in zip(truth, attend(*(x.astype(np.float64) for x in inputs)), strict=True):
        assert a.dtype == np.float64
        np.testing.assert_array_equal(a, b)
    # E = 4 products of at most 4 · 4, S = 5 terms (see attention_by_hand), then one rounding to the dtype
    eps = float(np.finfo(np.float32).eps)
    bound = (2 * (4 + 8) * 16 + 5 + 9) * eps * 4 + float(np.finfo(dtype).eps) * 4
    for a, b in zip(attend(*inputs), truth, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=0, atol=bound)


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_its_authors_known_answers(counter, key, expected):
    got = reference.philox4x32(words(key), words(counter), rounds=10)
    assert got.dtype == np.uint32
    assert got.tolist() == words(expected)


def philox_by_hand(key, counter, rounds):
    """Philox4x32 on Python ints."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return [c0, c1, c2, c3]


def test_dropout_mask_by_definition():
    seed, p, lead, n_queries, n_keys = 0x0123456789ABCDEF, 0.3, (2, 3), 4, 11
    mask = reference.dropout_keep_mask(seed, p, lead, n_queries, n_keys).reshape(6, n_queries, n_keys)
    for head, i, j in np.ndindex(mask.shape):
        word = philox_by_hand((0x89ABCDEF, 0x01234567), (j >> 2, i, head, head >> 32), 7)[j & 3]
        assert mask[head, i, j] == (word >= round(p * 2**32))


def test_dropout_threshold_to_the_last_bit():
    first = reference.philox4x32([0, 0], [0, 0, 0, 0]).tolist()  # for keys 0 to 3 of query 0 in head 0
    assert {word % 2 for word in first} == {0, 1}
    for j, word in enumerate(first):
        kept = [reference.dropout_keep_mask(0, (word + x) / 2**32, (), 1, 4)[0, j] for x in (0, 0.25, 0.5, 1)]
        assert kept == [True, True, word % 2 == 0, False]  # a tie is rounded to even


def test_rng(qkv):
    def drop(rng):
        return reference.scaled_dot_product_attention(*qkv, dropout_p=0.5, rng=rng)

    np.testing.assert_array_equal(drop(3), drop(np.int8(3)))
    np.testing.assert_array_equal(drop(3), drop(3 + 2**64))
    assert not np.array_equal(drop(3), drop(3 + 2**32))
    generator, twin = np.random.default_rng(0), np.random.default_rng(0)
    np.testing.assert_array_equal(drop(generator), drop(int(twin.integers(0, 2**64, dtype=np.uint64))))
    assert generator.bit_generator.state == twin.bit_generator.state
    reference.scaled_dot_product_attention(*qkv, rng=generator)  # without dropout nothing is drawn
    assert generator.bit_generator.state == twin.bit_generator.state
    large = [np.ones((64, 64))] * 3
    fresh = [reference.scaled_dot_product_attention(*large, dropout_p=0.5) for _ in range(2)]
    assert not np.array_equal(*fresh)


def test_a_dropped_nan_is_still_attended_to(qkv):
    query, key, value = qkv
    value = value.copy()
    value[0, 0, 0] = np.nan
    out = reference.scaled_dot_product_attention(query, key, value, dropout_p=1.0, rng=0)
    assert np.isnan(out[0, :, 0]).all()  # 0 · NaN is NaN; only a mask hides a key
    assert not out[0, :, 1:].any()


@given(st.lists(st.floats(-800, 800), min_size=1, max_size=8))
def test_softmax_and_log_softmax_by_hand(numbers):
    top = max(numbers)
    total = math.fsum(math.exp(x - top) for x in numbers)
    # the difference x - top is rounded once, and exp makes that relative; then a sum of len(numbers) terms
    rtol = (2 * 1600 / 2 + len(numbers) + 4) * EPS
    expected = [math.exp(x - top) / total for x in numbers]
    np.testing.assert_allclose(reference.softmax(numbers), expected, rtol=rtol, atol=5e-324)
    expected, atol = [x - top - math.log(total) for x in numbers], (1600 + len(numbers) + 4) * EPS
    np.testing.assert_allclose(reference.log_softmax(numbers), expected, rtol=0, atol=atol)


def test_softmax_axes_and_edges():
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    np.testing.assert_array_equal(reference.softmax(x, 1), reference.softmax(x.swapaxes(1, 2)).swapaxes(1, 2))
    np.testing.assert_array_equal(reference.softmax([1.0, -np.inf]), [1.0, 0.0])
    assert np.isnan(reference.softmax([-np.inf, -np.inf])).all()
    assert np.isnan(reference.softmax([np.nan, 1.0])).all()
    assert reference.softmax(np.ones((3, 0))).shape == (3, 0)
    assert reference.softmax(np.ones(3, np.float16)).dtype == np.float16


def test_norms_by_hand():
    x = np.random.default_rng(0).normal(3.0, 2.0, size=(2, 3, 4))
    weight, bias = np.random.default_rng(1).normal(size=(2, 3, 4))
    layer = reference.layer_norm(x, (3, 4), weight, bias, eps=0.1)
    rms = reference.rms_norm(x, (3, 4), weight, eps=0.1)
    for n in range(2):
        numbers = x[n].ravel().tolist()
        mean = math.fsum(numbers) / 12
        deviation = math.sqrt(math.fsum((a - mean) ** 2 for a in numbers) / 12 + 0.1)
        root = math.sqrt(math.fsum(a * a for a in numbers) / 12 + 0.1)
        # two sums of 12 terms (mean, variance), and fewer than 8 further roundings
        tolerance = {"rtol": 0, "atol": 32 * EPS * np.abs(x).max() * np.abs(weight).max()}
        np.testing.assert_allclose(layer[n], (x[n] - mean) / deviation * weight + bias, **tolerance)
        np.testing.assert_allclose(rms[n], x[n] / root * weight, **tolerance)


def test_norm_defaults_and_edges():
    x = np.random.default_rng(0).normal(size=(5, 4))
    plain = reference.layer_norm(x, (4,), np.ones(4), np.zeros(4))
    np.testing.assert_array_equal(reference.layer_norm(x, 4), plain)
    np.testing.assert_array_equal(reference.rms_norm(x, 4), reference.rms_norm(x, [4], np.ones(4), EPS))
    eps32 = float(np.finfo(np.float32).eps)
    tiny = np.full((1, 4), 1e-3, np.float16)  # for 16 bits the epsilon is float32's, as PyTorch has it
    np.testing.assert_array_equal(reference.rms_norm(tiny, 4), reference.rms_norm(tiny, 4, eps=eps32))
    assert reference.layer_norm(x.astype(np.float16), 4, np.ones(4, np.float32)).dtype == np.float32
    assert not reference.layer_norm(np.full((2, 4), 7.0), 4).any()
    assert reference.layer_norm(np.ones((3, 0)), 0).shape == (3, 0)


X = np.random.default_rng(0).normal(size=(2, 3, 5, 8))
test_nothing_is_checked_but_what_numpy_checks = refusals(
    (lambda: reference.scaled_dot_product_attention(X, X[..., :7], X), "matmul"),
    (lambda: reference.scaled_dot_product_attention(X, X, X, np.ones((5, 4), bool)), "broadcast"),
    (lambda: reference.layer_norm(X, 8, np.ones(8), np.ones(3)), "broadcast"),
    (lambda: reference.apply_rotary_emb(X[..., :7], np.ones((5, 3)), np.ones((5, 3))), "broadcast"),
    (lambda: reference.apply_rotary_emb(X, np.ones((5, 4)), np.ones((5, 3))), "broadcast"),
    (lambda: reference.softmax(X, 4), np.exceptions.AxisError, "out of bounds"),
)


def test_gelu_by_hand():
    x = np.linspace(-9.0, 9.0, 37)
    exact = [a * math.erfc(-a / math.sqrt(2.0)) / 2.0 for a in x]
    # relative: erfc amplifies the half ulp of its argument t by 2 t² (in the left tail, t up to 9 / √2)
    np.testing.assert_allclose(reference.gelu(x), exact, rtol=(2 * 41 + 4) * EPS)
    bent = [a / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) for a in x]
    np.testing.assert_allclose(reference.gelu(x, approximate="tanh"), bent, rtol=0, atol=9 * 8 * EPS)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_turns_pairs_as_complex_numbers(interleaved):
    rng = np.random.default_rng(0)
    x, angle = rng.normal(size=(2, 3, 5, 8)), rng.normal(size=(5, 4))
    pairs = [x[..., ::2], x[..., 1::2]] if interleaved else [x[..., :4], x[..., 4:]]
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * angle)
    expected = np.empty_like(x)
    if interleaved:
        expected[..., ::2], expected[..., 1::2] = turned.real, turned.imag
    else:
        expected[..., :4], expected[..., 4:] = turned.real, turned.imag
    cos, sin = np.cos(angle), np.sin(angle)
    got = reference.apply_rotary_emb(x, cos, sin, interleaved)
    np.testing.assert_allclose(got, expected, rtol=0, atol=8 * EPS * np.abs(x).max())
    for lead in [(1,), (2,), (2, 1), (2, 3)]:  # without a head axis, with one, and with one for every head
        tables = (np.broadcast_to(t, lead + t.shape) for t in (cos, sin))
        np.testing.assert_array_equal(reference.apply_rotary_emb(x, *tables, interleaved), got)


def test_rotary_tables_without_a_head_axis_differ_by_batch():
    rng = np.random.default_rng(0)
    x, angle = rng.normal(size=(2, 3, 5, 8)), rng.normal(size=(2, 5, 4))
    got = reference.apply_rotary_emb(x, np.cos(angle), np.sin(angle))
    for b in range(2):
        alone = reference.apply_rotary_emb(x[b], np.cos(angle[b]), np.sin(angle[b]))
        np.testing.assert_array_equal(got[b], alone)


def test_sinks_of_one_head_have_a_gradient_of_their_shape():
    """For one head without leading dimensions, sinks of shape (1,) and () mean the same."""
    x = np.ones((3, 2))
    for shape in ((), (1,)):
        _, pullback = reference.scaled_dot_product_attention_vjp(x, x, x, sinks=np.zeros(shape))
        assert pullback(x).sinks.shape == shape


STEP = 1e-6


def slope(value, array):
    """The derivative of value() along a drawn direction, by central differences; and the direction."""
    direction = np.random.default_rng(0).standard_normal(array.shape)
    before = array.copy()
    array += STEP * direction
    up = value()
    array[...] = before - STEP * direction
    down = value()
    array[...] = before
    return (up - down) / (2 * STEP), direction


@pytest.mark.parametrize("seed", range(14))
def test_gradients_by_finite_differences(seed):
    model, inputs, ends, call = drawn(seed, np.float64, dropout=seed % 2 == 1)
    y, pullback = reference.transformer_vjp(model, inputs, ends, call=call)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, grads, d_mask = pullback(dy)

    def value():
        return float((reference.transformer(model, inputs, ends, call=call) * dy).sum())

    arrays = transformer.arrays(model)
    assert [grad.shape for grad in grads] == [array.shape for array in arrays]
    checked = dict(zip(map(str, range(len(arrays))), zip(arrays, grads, strict=True), strict=True))
    if model.table is None:
        checked["rows"] = (inputs, dx)
    if model.token_type_row is not None:
        checked["token_type_row"] = (model.token_type_row, dx.sum(axis=0))
    if d_mask is not None:
        mask = call.mask if model.position_bias is None else model.position_bias
        # If heads share the mask too, its gradient is the sum over heads.
        checked["mask"] = (mask, d_mask[None] if mask.shape[1] > 1 else d_mask.sum(axis=0)[None, None])
    # Central differences are off by STEP² times a third derivative and by eps/STEP times the value's size.
    size = np.abs(y * dy).sum() + 1
    for name, (array, gradient) in checked.items():
        expected, direction = slope(value, array)
        found = (gradient * direction).sum()
        assert abs(found - expected) <= 1e-8 * (size + np.abs(gradient * direction).sum()), name


def test_the_definition_does_without_the_core():
    """The vectors of the core's own tests are written where no core is built."""
    run_script("""
    import importlib.util, sys, types

    alone = types.ModuleType("selfattn")
    alone.__path__ = list(importlib.util.find_spec("selfattn").submodule_search_locations)
    sys.modules |= {"selfattn": alone, "selfattn._core": None}
    from selfattn import reference
    """)


def test_compute_dtype_is_the_truth_for_float32():
    model, inputs, ends, call = drawn(3, np.float32)
    y = reference.transformer(model, inputs, ends, call=call)
    truth = reference.transformer(model, inputs, ends, np.float64, call=call)
    assert (y.dtype, truth.dtype) == (np.float32, np.float64)
    # A few layers of sums of at most 12 terms.
    np.testing.assert_allclose(y, truth, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(truth).max())


def test_one_layer_by_hand():
    """Attention over two tokens, with projections that are numbers: x + o·Σ w·v."""
    one = [Projection(np.array([[factor]])) for factor in (1.0, 2.0, 3.0, 5.0)]
    model = Transformer((Layer(1, *one),))
    y = reference.transformer(model, np.array([[1.0], [2.0]]), [0, 2])
    for i, x in enumerate((1.0, 2.0)):
        terms = np.exp([x * 2.0 * key for key in (1.0, 2.0)])
        np.testing.assert_allclose(y[i], x + 5 * 3 * (terms @ [1.0, 2.0]) / terms.sum(), rtol=1e-14)
