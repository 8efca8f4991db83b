"""The same numbers as PyTorch in float64, of the reference and of the core: results, log-sum-exp and gradients with
each option.

`torch.nn.functional` where it has an option, else a few lines of PyTorch's operations, which autograd differentiates.
Masks, shapes, operations on rows: test_onnx_cases.py; layers: tests/nn/test_every_layer.py.
"""

import numpy as np
import pytest
from gradients import true_gradients
from tolerances import assert_within, truth

import selfattn as sa
from selfattn import reference

torch = pytest.importorskip("torch", reason="comparing with PyTorch needs the package torch")
F = torch.nn.functional

functions = pytest.mark.parametrize("function", [reference, sa], ids=["reference", "selfattn"])
ARRAYS = ("query", "key", "value")


def random_numbers(*shapes):
    rng = np.random.default_rng(20)
    return [np.clip(rng.normal(size=shape), -4.0, 4.0) for shape in shapes]


def tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x))


def assert_same(function, inputs, options, attend):
    """Compare results and the gradients of all float inputs with those of `attend`, which takes the same inputs as
    tensors.

    Gradients may be off by no more than 1e-12 of the largest, either.
    """
    tensors = {name: tensor(x).requires_grad_(x.dtype == np.float64) for name, x in inputs.items()}
    names = [name for name, x in tensors.items() if x.requires_grad]
    results = attend(**tensors)
    grads = random_numbers(*(x.shape for x in results))
    wanted = torch.autograd.grad(results, [tensors[name] for name in names], list(map(tensor, grads)))

    wrt = {"wrt": names} if function is sa else {}
    (out, lse), pullback = function.scaled_dot_product_attention_vjp(
        **inputs, **options, **wrt, return_lse=True
    )
    grad_lse = grads[1] if len(grads) > 1 else np.zeros_like(lse)
    got = pullback(grads[0], grad_lse)
    arrays = [inputs[name] for name in ARRAYS]
    options = {name: x for name, x in inputs.items() if name not in ARRAYS} | options
    limits = truth(*arrays, **options)
    for x, expected, limit in zip((out, lse), results, (limits.out_bound, limits.lse_bound), strict=False):
        assert x.dtype == np.float64
        assert_within(x, expected.detach().numpy(), limit)
    limits = true_gradients(arrays, options, grads[0], grad_lse)
    for name, expected in zip(names, wanted, strict=True):
        gradient = getattr(got, name)
        assert gradient.dtype == np.float64 and gradient.shape == inputs[name].shape, name
        largest = max(1.0, float(expected.abs().max()))
        assert_within(gradient, expected.numpy(), np.minimum(limits[name].limit, 1e-12 * largest), name)


@functions
def test_rows_of_the_least_number_are_uniform_and_closed_rows_are_zero(function):
    arrays = random_numbers((2, 5, 8), (2, 7, 8), (2, 7, 6))
    mask = np.zeros((5, 7))
    mask[2], mask[3, 2:], mask[4] = np.finfo(float).min, np.finfo(float).min, -np.inf
    expected = F.scaled_dot_product_attention(*map(tensor, (*arrays, mask)))
    if expected.isnan().any():
        pytest.skip("this PyTorch gives NaN, as PyTorch did before 2.5")
    got = function.scaled_dot_product_attention(*arrays, mask)
    assert_within(got, expected.numpy(), truth(*arrays, mask).out_bound)
    assert not got[:, 4].any()


@functions
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_nan_and_infinities_have_the_effect_that_they_have_in_torch(function, bad, where):
    arrays = random_numbers((5, 8), (7, 8), (7, 6))
    arrays[where][2, 3] = bad
    expected = F.scaled_dot_product_attention(*map(tensor, arrays))
    got = function.scaled_dot_product_attention(*arrays)
    assert_within(got, expected.numpy(), truth(*arrays).out_bound)


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


SLOPES, SINKS, LENGTHS = 0.5 ** np.arange(1.0, 5.0), np.array([0.5, -3.0, 2.0, 0.0]), np.array([7, 3])

# Name -> more arrays that get gradients; the other options; how `written_out` takes them.
WRITTEN = {
    "plain": ({}, {}, {}),
    "causal": ({}, {"is_causal": True}, {"allowed": lambda i, j: j <= i}),
    "softcap": ({}, {"softcap": 1.5}, {"softcap": 1.5}),
    "window": ({}, {"window": (2, 1)}, {"allowed": lambda i, j: (j >= i - 2) & (j <= i + 1)}),
    "causal window": (
        {},
        {"window": (2, None), "causal": "upper_left"},
        {"allowed": lambda i, j: (j >= i - 2) & (j <= i)},
    ),
    "causal, lower right": ({}, {"causal": "lower_right"}, {"offset": 2, "allowed": lambda i, j: j <= i}),
    "key lengths": (
        {},
        {"key_lengths": LENGTHS[:, None]},
        {"allowed": lambda i, j: (j < tensor(LENGTHS)[:, None])[:, None, None]},
    ),
    "alibi": ({"alibi_slopes": SLOPES}, {}, {}),
    "alibi of each head of a batch": ({"alibi_slopes": np.outer([1.0, -0.5], SLOPES)}, {}, {}),
    "alibi, lower right window": (
        {"alibi_slopes": SLOPES},
        {"window": (3, 0), "causal": "lower_right"},
        {"offset": 2, "allowed": lambda i, j: (j >= i - 3) & (j <= i)},
    ),
    "sinks": ({"sinks": SINKS}, {}, {}),
    "sinks of each head of a batch": ({"sinks": np.linspace(-2.0, 2.0, 8).reshape(2, 4)}, {}, {}),
    "a number for all keys in the mask, and sinks": (
        {"attn_mask": np.linspace(-1.0, 1.0, 5)[:, None], "sinks": SINKS},
        {},
        {},
    ),
    "all": (
        {"attn_mask": np.linspace(-1.0, 1.0, 70).reshape(2, 1, 5, 7), "alibi_slopes": SLOPES, "sinks": SINKS},
        {"softcap": 2.5, "window": (3, 2)},
        {"softcap": 2.5, "allowed": lambda i, j: (j >= i - 3) & (j <= i + 2)},
    ),
}


@functions
@pytest.mark.parametrize(("more", "options", "written"), WRITTEN.values(), ids=WRITTEN)
@pytest.mark.parametrize("key_heads", [2, 4])
def test_options_in_operations_of_torch(function, more, options, written, key_heads):
    arrays = random_numbers((2, 4, 5, 8), (2, key_heads, 7, 8), (2, key_heads, 7, 6))
    inputs = dict(zip(ARRAYS, arrays, strict=True)) | more
    assert_same(
        function, inputs, {**options, "enable_gqa": True}, lambda **given: written_out(**given, **written)
    )


@functions
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rms_norm_default_eps(function, dtype):
    x = np.full((2, 4), 1e-3, dtype)  # so small that eps changes the result
    got, expected = function.rms_norm(x, 4), F.rms_norm(tensor(x), (4,)).numpy()
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, rtol=4 * float(np.finfo(dtype).eps), atol=0)
