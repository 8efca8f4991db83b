"""The same numbers as PyTorch, in float64, for every option that it has too: calls carry over unchanged.

`torch.nn.functional` has masks, causality, scale and grouped queries; soft-capping, ALiBi, windows, key
lengths and lse are compared with `flex_attention`, which takes them as functions; sinks with a few lines.
Gradients are compared with autograd's, of a few lines where `torch.nn.functional` lacks the option.
"""

import warnings

import numpy as np
import pytest
from gradients import bounds
from tolerances import assert_within

import selfattn as sa
from selfattn import reference

torch = pytest.importorskip("torch", reason="comparing with PyTorch needs the package torch")
F = torch.nn.functional

functions = pytest.mark.parametrize("function", [reference, sa], ids=["reference", "selfattn"])

EPS = float(np.finfo(np.float64).eps)
RNG = np.random.default_rng(20)
START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _same_numbers_whichever_tests_run():
    RNG.bit_generator.state = START


def normal(*shape):
    """Give normal numbers within ±4, so that tolerances can be worked out."""
    return np.clip(RNG.normal(size=shape), -4.0, 4.0)


def tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def tolerance(query, key, scale=None, extra=0.0):
    """Largest difference that rounding explains between two computations, for values up to 4.

    A score is a sum of E products and a few roundings, below `size` in all; `extra` is what is added to it.
    exp makes its error relative, in the weight and in the denominator, a sum of S terms like the output.
    """
    width, n_keys = query.shape[-1], key.shape[-2]
    scale = max(width, 1) ** -0.5 if scale is None else abs(scale)
    size = scale * 16.0 * width + extra
    return 2 * (2 * (width + 8) * max(size, 1.0) + 2 * n_keys + 8) * EPS * 4.0


def assert_close(got, expected, atol):
    got, expected = np.asarray(got), expected.numpy()
    assert got.dtype == expected.dtype == np.float64
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


# ------------------------------------------------------------------------------- scaled_dot_product_attention


@functions
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((5, 8), (7, 8), (7, 8)),
        ((3, 5, 8), (3, 7, 8), (3, 7, 6)),
        ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 1)),
        ((2, 1, 2, 3, 33, 17), (2, 1, 2, 3, 40, 17), (2, 1, 2, 3, 40, 65)),
        ((3, 1, 5, 8), (1, 2, 7, 8), (7, 6)),  # leading dims are broadcast
        ((2, 2, 1, 64), (2, 2, 130, 64), (2, 2, 130, 64)),
        ((1, 1), (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}, {"scale": -1.0}], ids=str)
def test_shapes_causal_and_scale(function, query, key, value, options):
    q, k, v = normal(*query), normal(*key), normal(*value)
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), **options)
    got = function.scaled_dot_product_attention(q, k, v, **options)
    assert_close(got, expected, tolerance(q, k, options.get("scale")))


@functions
@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (5, 1), (2, 1, 1, 7), (1, 3, 5, 7), (2, 3, 5, 7)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(function, shape, kind):
    q, k, v = normal(2, 3, 5, 8), normal(2, 3, 7, 8), normal(2, 3, 7, 6)
    mask = RNG.random(shape) < 0.7 if kind == "bool" else normal(*shape)
    mask[..., 0] = True if kind == "bool" else 0.0  # rows without keys are tested below
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), tensor(mask))
    assert_close(function.scaled_dot_product_attention(q, k, v, mask), expected, tolerance(q, k, extra=4.0))


@functions
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_mask_of_finfo_min_gives_uniform_rows(function, dtype):
    q, k, v = normal(2, 5, 8), normal(2, 7, 8), normal(2, 7, 6)
    mask = np.zeros((5, 7), dtype)
    mask[2], mask[3, 2:] = np.finfo(dtype).min, np.finfo(dtype).min
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), tensor(mask.astype(np.float64)))
    # 65504 is not so large that it would swallow a score of float64 whole, but it takes 16 bits from it
    extra = 65504.0 if dtype == np.float16 else 0.0
    assert_close(function.scaled_dot_product_attention(q, k, v, mask), expected, tolerance(q, k, extra=extra))
    if dtype != np.float16:
        got = function.scaled_dot_product_attention(q, k, v, mask)
        np.testing.assert_allclose(got[:, 2], v.mean(axis=1), rtol=0, atol=2 * 7 * EPS * 4.0)


@functions
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_rows_with_nothing_to_attend_to_are_zero(function, kind):
    q, k, v = normal(2, 5, 8), normal(2, 7, 8), normal(2, 7, 6)
    mask = np.ones((5, 7), bool)
    mask[2] = False
    if kind == "float":
        mask = np.where(mask, 0.0, -np.inf)
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), tensor(mask))
    if expected.isnan().any():
        pytest.skip("this PyTorch gives NaN, as PyTorch did before 2.5")
    got = function.scaled_dot_product_attention(q, k, v, mask)
    assert_close(got, expected, tolerance(q, k))
    assert not got[:, 2].any()


@functions
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_attended_is_not_hidden(function, bad, where):
    arrays = {"query": normal(5, 8), "key": normal(7, 8), "value": normal(7, 6)}
    arrays[where][2, 3] = bad
    expected = F.scaled_dot_product_attention(*map(tensor, arrays.values()))
    got = function.scaled_dot_product_attention(*arrays.values())
    finite = expected.isfinite().numpy()
    np.testing.assert_array_equal(np.isfinite(got), finite)
    atol = tolerance(arrays["query"], arrays["key"])
    np.testing.assert_allclose(got[finite], expected.numpy()[finite], rtol=0, atol=atol)


@functions
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}], ids=str)
def test_grouped_queries(function, heads, options):
    q, k, v = normal(2, 6, 5, 8), normal(2, heads, 7, 8), normal(2, heads, 7, 3)
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), enable_gqa=True, **options)
    got = function.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert_close(got, expected, tolerance(q, k, options.get("scale")))


@functions
@pytest.mark.parametrize(("n_queries", "n_keys"), [(5, 7), (6, 6), (1, 9)])
def test_causal_lower_right(function, n_queries, n_keys):
    from torch.nn.attention.bias import causal_lower_right

    q, k, v = normal(2, 3, n_queries, 8), normal(2, 3, n_keys, 8), normal(2, 3, n_keys, 8)
    mask = causal_lower_right(n_queries, n_keys)
    expected = F.scaled_dot_product_attention(*map(tensor, (q, k, v)), attn_mask=mask)
    assert_close(
        function.scaled_dot_product_attention(q, k, v, causal="lower_right"), expected, tolerance(q, k)
    )


# ------------------------------------------------------------------------ what flex_attention is told in code

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
LENGTHS = np.array([7, 3])


def capped(score, b, h, i, j):
    return 1.5 * torch.tanh(score / 1.5)


def with_alibi(score, b, h, i, j):
    return score - tensor(SLOPES)[h] * (i - j).abs()


def with_lower_right_alibi(score, b, h, i, j):
    return score - tensor(SLOPES)[h] * (i + 2 - j).abs()


FLEX = {
    "softcap": ({"softcap": 1.5}, capped, None),
    "alibi": ({"alibi_slopes": SLOPES}, with_alibi, None),
    "softcap, then alibi": (
        {"softcap": 1.5, "alibi_slopes": SLOPES},
        lambda score, b, h, i, j: with_alibi(capped(score, b, h, i, j), b, h, i, j),
        None,
    ),
    "causal": ({"is_causal": True}, None, lambda b, h, i, j: j <= i),
    "window": ({"window": (2, 1)}, None, lambda b, h, i, j: (j >= i - 2) & (j <= i + 1)),
    "causal window": (
        {"window": (2, None), "causal": "upper_left"}, None, lambda b, h, i, j: (j >= i - 2) & (j <= i)
    ),
    "lower right window, alibi": (
        {"window": (3, 0), "causal": "lower_right", "alibi_slopes": SLOPES},
        with_lower_right_alibi,
        lambda b, h, i, j: (j >= i + 2 - 3) & (j <= i + 2),
    ),
    "key lengths": ({"key_lengths": LENGTHS[:, None]}, None, lambda b, h, i, j: j < tensor(LENGTHS)[b]),
}  # fmt: skip


@functions
@pytest.mark.parametrize(("options", "score_mod", "mask_mod"), FLEX.values(), ids=FLEX)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_flex_attention(function, options, score_mod, mask_mod, key_heads):
    flex = pytest.importorskip("torch.nn.attention.flex_attention", reason="this PyTorch has none")
    if not hasattr(flex, "AuxRequest"):
        pytest.skip("this PyTorch's flex_attention has no return_aux")
    q, k, v = normal(2, 4, 5, 8), normal(2, key_heads, 7, 8), normal(2, key_heads, 7, 6)
    mask = None if mask_mod is None else flex.create_block_mask(mask_mod, 2, 4, 5, 7, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is slow when not compiled
        expected, aux = flex.flex_attention(
            *map(tensor, (q, k, v)), score_mod=score_mod, block_mask=mask, enable_gqa=True,
            return_aux=flex.AuxRequest(lse=True),
        )  # fmt: skip
    got, lse = function.scaled_dot_product_attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    assert_close(got, expected, tolerance(q, k, extra=4.0))
    assert_close(lse, aux.lse, tolerance(q, k, extra=4.0))


@functions
def test_sinks_as_one_more_logit(function):
    q, k, v = normal(2, 4, 5, 8), normal(2, 4, 7, 8), normal(2, 4, 7, 6)
    sinks = np.array([0.5, -3.0, 2.0, -np.inf])
    scores = tensor(q) @ tensor(k).mT * 8**-0.5
    logits = torch.cat([scores, tensor(sinks)[:, None, None].expand(2, 4, 5, 1)], dim=-1)
    weights = logits.softmax(-1)[..., :-1]
    got = function.scaled_dot_product_attention(q, k, v, sinks=sinks, return_lse=True, return_weights=True)
    for a, b in zip(got, (weights @ tensor(v), logits.logsumexp(-1), weights), strict=True):
        assert_close(a, b, tolerance(q, k, extra=4.0))


# ------------------------------------------------------------------------------------------ gradients of attention


def limit_of(name, limits, shape):
    """Sum the bounds of each query head's gradient over what shares an array of this shape: broadcast axes, and groups."""
    limit = limits[name]
    if name in ("key", "value") and len(shape) > 2 and limit.shape[-3] % shape[-3] == 0:
        limit = limit.reshape(*limit.shape[:-3], shape[-3], -1, *limit.shape[-2:]).sum(-3)
    return reference.attention_vjp.sum_to_shape(limit, shape)


def assert_same_gradients(function, inputs, options, attend, *, with_lse=False):
    """Compare the gradients of all floating inputs, by name, with those that autograd makes of `attend`.

    `attend` takes the same inputs as tensors. gradients.py says how far rounding may move each element (measured: a
    twelfth of it); and nowhere more than 1e-12 of the largest.
    """
    tensors = {name: tensor(x).requires_grad_(x.dtype == np.float64) for name, x in inputs.items()}
    names = [name for name, x in tensors.items() if x.requires_grad]
    results = attend(**tensors) if with_lse else (attend(**tensors),)
    grads = [normal(*x.shape) for x in results]
    wanted = torch.autograd.grad(results, [tensors[name] for name in names], list(map(tensor, grads)))

    call = {**inputs, **options, "return_lse": with_lse}
    _, pullback = function.scaled_dot_product_attention_vjp(
        **call, **({"wrt": names} if function is sa else {})
    )
    got = pullback(*grads)
    arrays = [inputs[name] for name in ("query", "key", "value")]
    others = {name: x for name, x in inputs.items() if name not in ("query", "key", "value")}
    grad_lse = grads[1] if with_lse else np.zeros(results[0].shape[:-1])
    limits = bounds(arrays, others | options, grads[0], grad_lse, np.dtype(np.float64))
    for name, expected in zip(names, wanted, strict=True):
        gradient, shape = getattr(got, name), inputs[name].shape
        assert gradient.dtype == np.float64 and gradient.shape == shape == tuple(expected.shape), name
        largest = max(1.0, float(expected.abs().max()))
        limit = np.minimum(limit_of(name, limits, shape), 1e-12 * largest)
        assert_within(gradient, expected.numpy(), limit, name)


def qkv(query, key, value):
    return {"query": normal(*query), "key": normal(*key), "value": normal(*value)}


@functions
@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((5, 8), (7, 8), (7, 8)),
        ((2, 3, 33, 17), (2, 3, 40, 17), (2, 3, 40, 65)),
        ((3, 1, 5, 8), (1, 2, 7, 8), (7, 6)),  # leading dims are broadcast
        ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 3)),
        ((2, 2, 1, 64), (2, 2, 130, 64), (2, 2, 130, 64)),
        ((1, 1), (1, 1), (1, 1)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.7}, {"scale": -1.0}], ids=str)
def test_gradients_of_shapes_causal_and_scale(function, query, key, value, options):
    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, **options)

    assert_same_gradients(function, qkv(query, key, value), options, attend)


MASK_SHAPES = [(5, 7), (7,), (1, 7), (5, 1), (1, 1), (2, 1, 5, 7), (2, 1, 1, 7), (2, 1, 5, 1),
               (3, 5, 7), (3, 1, 1), (1, 3, 5, 7), (2, 3, 1, 7), (2, 3, 5, 1), (2, 3, 5, 7)]  # fmt: skip


@functions
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_gradients_of_and_with_masks(function, shape, kind):
    inputs = qkv((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6))
    mask = RNG.random(shape) < 0.7 if kind == "bool" else normal(*shape)
    mask[..., 0] = True if kind == "bool" else mask[..., 0]  # no row without keys

    def attend(query, key, value, attn_mask):  # PyTorch takes no boolean mask of one axis
        return F.scaled_dot_product_attention(query, key, value, torch.atleast_2d(attn_mask))

    assert_same_gradients(function, {**inputs, "attn_mask": mask}, {}, attend)


@functions
@pytest.mark.parametrize("heads", [1, 2, 3, 6])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.5}, "mask"], ids=str)
def test_gradients_of_grouped_queries(function, heads, options):
    inputs = qkv((2, 6, 5, 8), (2, heads, 7, 8), (2, heads, 7, 3))
    if options == "mask":
        inputs, options = inputs | {"attn_mask": normal(2, 1, 5, 7)}, {}
    options = {**options, "enable_gqa": True}
    assert_same_gradients(
        function, inputs, options, lambda **given: F.scaled_dot_product_attention(**given, **options)
    )


def written_out(
    query, key, value, attn_mask=None, alibi_slopes=None, sinks=None, *, softcap=None, offset=0, allowed=None
):
    """Attention and its log-sum-exp in PyTorch's operations, for any number of query heads to a key head."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * query.shape[-1] ** -0.5
    i, j = torch.arange(scores.shape[-2])[:, None] + offset, torch.arange(scores.shape[-1])
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[..., None, None] * (i - j).abs()
    if attn_mask is not None:
        scores = scores + attn_mask
    if allowed is not None:
        scores = scores.masked_fill(~allowed(i, j), -torch.inf)
    if sinks is None:
        return scores.softmax(-1) @ value, scores.logsumexp(-1)
    one_more = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    scores = torch.cat([scores, one_more], dim=-1)
    return scores.softmax(-1)[..., :-1] @ value, scores.logsumexp(-1)


# Name -> arrays to differentiate with respect to; the other options; and how these are written above.
GRADIENTS = {
    "softcap": ({}, {"softcap": 1.5}, {"softcap": 1.5}),
    "window": ({}, {"window": (2, 1)}, {"allowed": lambda i, j: (j >= i - 2) & (j <= i + 1)}),
    "causal window": (
        {}, {"window": (2, None), "causal": "upper_left"}, {"allowed": lambda i, j: (j >= i - 2) & (j <= i)},
    ),
    "causal, lower right": ({}, {"causal": "lower_right"}, {"offset": 2, "allowed": lambda i, j: j <= i}),
    "key lengths": (
        {}, {"key_lengths": LENGTHS[:, None]}, {"allowed": lambda i, j: (j < tensor(LENGTHS)[:, None])[:, None, None]},
    ),
    "alibi": ({"alibi_slopes": SLOPES}, {}, {}),
    "alibi of each head of a batch": ({"alibi_slopes": np.outer([1.0, -0.5], SLOPES)}, {}, {}),
    "alibi, lower right window": (
        {"alibi_slopes": SLOPES}, {"window": (3, 0), "causal": "lower_right"},
        {"offset": 2, "allowed": lambda i, j: (j >= i - 3) & (j <= i)},
    ),
    "sinks": ({"sinks": np.array([0.5, -3.0, 2.0, 0.0])}, {}, {}),
    "sinks of each head of a batch": ({"sinks": np.linspace(-2.0, 2.0, 8).reshape(2, 4)}, {}, {}),
    "a number for all keys in the mask, and sinks": (
        {"attn_mask": np.linspace(-1.0, 1.0, 5)[:, None], "sinks": np.array([0.5, -3.0, 2.0, 0.0])}, {}, {},
    ),
    "all": (
        {"attn_mask": np.linspace(-1.0, 1.0, 70).reshape(2, 1, 5, 7), "alibi_slopes": SLOPES,
         "sinks": np.array([0.5, -3.0, 2.0, 0.0])},
        {"softcap": 2.5, "window": (3, 2), "causal": None},
        {"softcap": 2.5, "allowed": lambda i, j: (j >= i - 3) & (j <= i + 2)},
    ),
}  # fmt: skip


@functions
@pytest.mark.parametrize(("arrays", "options", "written"), GRADIENTS.values(), ids=GRADIENTS)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_gradients_of_what_autograd_is_told_in_code(function, arrays, options, written, key_heads):
    """With those of the log-sum-exp."""
    inputs = qkv((2, 4, 5, 8), (2, key_heads, 7, 8), (2, key_heads, 7, 6)) | arrays
    options = {**options, "enable_gqa": True}
    assert_same_gradients(
        function, inputs, options, lambda **given: written_out(**given, **written), with_lse=True
    )


# --------------------------------------------------------------------------------------- the other operations


@functions
@pytest.mark.parametrize("axis", [-1, 0, 1])
def test_softmax_and_log_softmax(function, axis):
    x = 5.0 * normal(3, 40, 7)
    # exp and log of numbers below 40: their error of 40 · eps becomes relative; sums of up to 40 terms
    atol = 2 * (40 + 40 + 8) * EPS
    assert_close(function.softmax(x, axis), F.softmax(tensor(x), axis), atol)
    assert_close(function.log_softmax(x, axis), F.log_softmax(tensor(x), axis), atol * 4)


@functions
@pytest.mark.parametrize("shape", [(7,), (40, 7), (3, 40, 7)], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_layer_norm(function, shape, eps):
    x, weight, bias = normal(3, 40, 7) + 2.0, normal(*shape), normal(*shape)
    # mean and variance are sums of n numbers up to 36; the quotient is below sqrt(n), the weight below 4
    n = weight.size
    atol = 2 * (n + 16) * EPS * 36 * 4
    expected = F.layer_norm(tensor(x), shape, tensor(weight), tensor(bias), eps)
    assert_close(function.layer_norm(x, shape, weight, bias, eps), expected, atol)
    assert_close(
        function.layer_norm(x, shape, None, None, eps), F.layer_norm(tensor(x), shape, eps=eps), atol
    )


@functions
@pytest.mark.parametrize("shape", [(7,), (40, 7)], ids=str)
@pytest.mark.parametrize("eps", [None, 0.5])
def test_rms_norm(function, shape, eps):
    x, weight = normal(3, 40, 7) + 2.0, normal(*shape)
    atol = 2 * (weight.size + 16) * EPS * 36 * 4  # as for layer_norm
    assert_close(
        function.rms_norm(x, shape, weight, eps), F.rms_norm(tensor(x), shape, tensor(weight), eps), atol
    )
    assert_close(function.rms_norm(x, shape), F.rms_norm(tensor(x), shape), atol)


@functions
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rms_norm_default_eps(function, dtype):
    x = np.full((2, 4), 1e-3, dtype)  # so small that eps shows
    got, expected = function.rms_norm(x, 4), F.rms_norm(tensor(x), (4,)).numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=4 * float(np.finfo(dtype).eps), atol=0)


@functions
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(function, approximate):
    x = np.linspace(-12.0, 12.0, 97)
    expected = F.gelu(tensor(x), approximate=approximate)
    # 1 + erf, as PyTorch has it, loses a half ulp of 1 in the left tail; times x
    assert_close(function.gelu(x, approximate=approximate), expected, 12 * 8 * EPS)


@functions
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_as_complex_numbers(function, interleaved):
    x, angle = normal(2, 3, 5, 8), normal(5, 4)
    pairs = tensor(x).unflatten(-1, (-1, 2)) if interleaved else tensor(x).unflatten(-1, (2, -1)).mT
    turn = torch.polar(torch.ones(5, 4, dtype=torch.float64), tensor(angle))
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    expected = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    got = function.apply_rotary_emb(x, np.cos(angle), np.sin(angle), interleaved)
    assert_close(got, expected, 8 * EPS * 4.0)
