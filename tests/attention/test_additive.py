"""Additive attention against its definition, the definition's gradients against finite differences, and memory."""

import numpy as np
import pytest
from inputs import FLOAT_IDS, FLOATS, normal, random_mask
from leaks import peak_memory
from numpy.testing import assert_allclose, assert_array_equal

import selfattn as sa
from selfattn import reference
from selfattn.functional import additive

RNG = np.random.default_rng(0)
LEAD, L, S, A = (2, 3), 7, 9, 5
OPTIONS = {
    "plain": {},
    "bool mask": {"attn_mask": random_mask(RNG, (L, S), np.bool_)},
    "float mask": {"attn_mask": random_mask(RNG, (2, 1, L, S), np.float32)},
    "row of a mask": {"attn_mask": np.arange(S) != 3},
    "lowest mask": {"attn_mask": np.where(RNG.random((L, S)) < 0.5, np.finfo(np.float64).min, 0)},
    "causal": {"is_causal": True},
    "lower right": {"causal": "lower_right", "attn_mask": random_mask(RNG, (3, 1, S), np.bool_)},
    "lengths": {"key_lengths": np.array([[4], [0]])},
}


def arguments(dtype=np.float64, lead=LEAD, n_queries=L, n_keys=S, widths=(4, 6, 3, A)):
    """query, key, value, w_query, w_key, v: the key is shared by the first axis."""
    rng, (of_query, of_key, of_value, hidden) = np.random.default_rng(1), widths
    shapes = [(*lead, n_queries, of_query), (*lead[1:], n_keys, of_key), (*lead, n_keys, of_value)]
    shapes += [(of_query, hidden), (of_key, hidden), (hidden,)]
    return [normal(rng, shape, dtype) for shape in shapes]


@pytest.fixture
def small_tiles(monkeypatch):
    """Make tiles small, so that few numbers need several blocks of rows, and several tiles for each."""
    monkeypatch.setattr(additive, "TILE", 40)
    monkeypatch.setattr(additive, "SCORES", 4 * S)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
def test_agrees_with_the_reference(name, dtype, small_tiles):
    """A score is a sum of 5 terms below 4, and a mask below 4: exp makes errors of some 20 u of it; then one
    rounding.
    """
    given, options = arguments(dtype), OPTIONS[name]
    results = sa.additive_attention(*given, **options, return_lse=True, return_weights=True)
    expected = reference.additive_attention(
        *given, **options, return_lse=True, return_weights=True, compute_dtype=np.float64
    )
    u = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 0, "float64": 0}[dtype.name]
    u += 40 * np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    for got, exact, kind in zip(results, expected, (dtype, None, dtype), strict=True):
        assert got.dtype == (kind or (np.float64 if dtype == np.float64 else np.float32))
        assert_allclose(got.astype(np.float64), exact, rtol=2 * u, atol=4 * u)
    out, pullback = sa.additive_attention_vjp(*given, **options)
    assert_array_equal(out, results[0])
    assert_array_equal(sa.additive_attention(*given, **options), results[0])
    grad_out = normal(np.random.default_rng(2), out.shape, dtype)
    _, of_reference = reference.additive_attention_vjp(*given, **options, compute_dtype=np.float64)
    bits = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 1e-5, "float64": 1e-12}[dtype.name]
    exact = of_reference(grad_out.astype(np.float64))
    for got, right, x in zip(pullback(grad_out), exact, given, strict=True):
        assert got.shape == x.shape and got.dtype == dtype
        assert_allclose(got.astype(np.float64), right, rtol=bits, atol=bits)


@pytest.mark.parametrize("name", ["float mask", "lower right"])
def test_the_references_gradients_agree_with_finite_differences(name):
    sa.check_vjp(lambda *given: reference.additive_attention_vjp(*given, **OPTIONS[name]), *arguments())


@pytest.mark.parametrize("module", [sa, reference], ids=lambda module: module.__name__)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_of_closed_keys_and_dead_queries_do_not_count(small_tiles, module, bad):
    """All six gradients ignore them, although NaN or infinity times a gradient of 0 is not 0."""
    given = arguments(np.float32)
    open_pairs = np.ones((L, S), np.bool_)
    open_pairs[1] = False
    masks = {"key_lengths": np.full(LEAD, S - 2), "attn_mask": np.where(open_pairs, np.float32(0.5), -np.inf)}
    expected, pullback = module.additive_attention_vjp(*given, **masks)
    gradients = pullback(expected)
    given[0][..., 1, :] = bad
    for x in given[1:3]:
        x[..., S - 2 :, :] = bad
    out, poisoned = module.additive_attention_vjp(*given, **masks)
    assert_array_equal(out, expected)
    for name, found, clean in zip(gradients._fields, poisoned(out), gradients, strict=True):
        assert_allclose(found, clean, rtol=1e-5, atol=1e-6, err_msg=name)
    assert not poisoned(out).key[..., S - 2 :, :].any() and not poisoned(out).query[..., 1, :].any()


@pytest.mark.parametrize(
    "sizes",
    [
        {"n_queries": 0},
        {"n_keys": 0},
        {"lead": (0, 3)},
        {"lead": ()},
        {"widths": (4, 4, 3, 0)},
        {"widths": (0, 4, 3, 2)},
        {"widths": (4, 0, 3, 2)},
        {"widths": (4, 4, 0, 2)},
        {"widths": (0, 0, 0, 0)},
    ],
    ids=str,
)
def test_sizes_and_widths_of_nothing(sizes):
    given = arguments(**sizes)
    out, pullback = sa.additive_attention_vjp(*given)
    _, exact = reference.additive_attention_vjp(*given)
    d_out = np.random.default_rng(0).standard_normal(out.shape)
    for name, found, expected in zip(exact(d_out)._fields, pullback(d_out), exact(d_out), strict=True):
        assert_allclose(found, expected, rtol=1e-12, atol=1e-12, err_msg=name)


def test_integers_and_lists():
    x, w = [[1, 2], [3, 4]], [[1, 0], [0, 1]]
    out, pullback = sa.additive_attention_vjp(x, x, x, w, w, [1, 1])
    assert out.dtype == np.float64
    assert_allclose(out, reference.additive_attention(x, x, x, w, w, [1, 1]))
    assert all(gradient.dtype == np.float64 for gradient in pullback(out))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"query": np.ones(4)}, ValueError, r"query must have at least 2 dimensions, .* got shape \(4,\)"),
        ({"value": np.ones((2, 3, 8, 3))}, ValueError, "same length"),
        ({"v": np.ones((5, 1))}, ValueError, r"v must have shape \(A,\), got \(5, 1\)"),
        (
            {"w_query": np.ones((5, 4))},
            ValueError,
            r"w_query must have shape \(width, A\) = \(4, 5\), got \(5, 4\)",
        ),
        ({"w_key": np.ones((4, 5))}, ValueError, "w_key must have shape"),
        ({"value": np.ones((4, 3, 9, 3))}, ValueError, "leading dimensions must broadcast"),
        ({"attn_mask": np.ones((L, S), int)}, TypeError, "attn_mask must be boolean"),
        ({"attn_mask": True}, TypeError, "attn_mask must be an array, got True"),
        ({"is_causal": "no"}, TypeError, "is_causal must be a bool, got 'no'"),
        ({"key_lengths": S + 1}, ValueError, "key_lengths must be between 0 and S = 9"),
        ({"causal": "left"}, ValueError, "causal must be None"),
        ({"causal": "lower_right", "is_causal": True}, ValueError, "causal='lower_right' was given too"),
        ({"v": np.ones(5) > 0}, TypeError, "v has dtype bool"),
    ],
)
def test_errors(changes, kind, message):
    given = dict(zip(sa.AdditiveGradients._fields, arguments(), strict=True)) | changes
    for function in (sa.additive_attention, sa.additive_attention_vjp):
        with pytest.raises(kind, match=message):
            function(**given)


def test_gradient_of_another_shape():
    out, pullback = sa.additive_attention_vjp(*arguments())
    with pytest.raises(ValueError, match=r"grad_out has shape \(3, 7, 3\); the result .* has \(2, 3, 7, 3\)"):
        pullback(out[0])


def test_memory_grows_with_the_length_alone():
    """The scores of all pairs would take 16 MiB here, the tangents five times that."""
    given = arguments(np.float32, lead=(), n_queries=2048, n_keys=2048)

    def call():
        out, pullback = sa.additive_attention_vjp(*given, is_causal=True)
        pullback(out)

    assert peak_memory(call) < 8 << 20
