"""quantize of layers: which weights it rounds, what rounded layers compute, and what it refuses."""

import copy
import pickle

import numpy as np
import pytest
from refusals import refusals
from rounded import GROUP, from_bits, from_int8, groups_of

from selfattn import _core, nn

KINDS = ["int8"] + (["bfloat16"] if _core._compact_unit(False) else [])


def steps_of(x):
    """Return the step to which each element of x (..., n) is rounded in int8: the range of its group divided by 255."""
    rows = x.reshape(-1, x.shape[-1])
    return from_int8(np.ones_like(rows), np.ptp(groups_of(rows), axis=2) / 255).reshape(x.shape)


def float32_of(weight, scale=None):
    if weight.dtype == np.int8:
        return from_int8(weight, scale.astype(np.float64))
    return from_bits(weight) if weight.dtype == np.uint16 else weight


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("into", "out"), [(7, 3), (128, 33), (300, 64)])
def test_a_linear_layer(kind, into, out):
    rng = np.random.default_rng(into)
    layer = nn.Linear(into, out, rng=0)
    exact = layer.weight.astype(np.float64)
    assert layer.quantize(kind) is layer
    weight = float32_of(layer.weight, getattr(layer, "weight_scale", None)).astype(np.float64)
    x = rng.standard_normal((2, 5, into)).astype(np.float32)
    if kind == "int8":
        steps = np.repeat(np.abs(layer.weight_scale), 128, axis=1)[:, :into] / 2
        errors = steps_of(x) / 2 @ np.abs(weight).T
    else:
        steps = np.abs(exact) * 2.0**-8
        errors = np.abs(x) * 2.0**-8 @ np.abs(weight).T
    assert (np.abs(weight - exact) <= steps * 1.0001).all()
    sums = np.abs(x).astype(np.float64) @ np.abs(weight).T + np.abs(layer.bias)
    difference = np.abs(layer(x) - (x @ weight.T + layer.bias))
    assert (difference <= errors + into * 2.0**-22 * sums).all()
    assert layer(x).dtype == np.float32
    assert np.array_equal(layer(x)[1, 2], layer(x[1, 2]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_computes_with_its_rounded_weights(kind, norm_first):
    layer = nn.TransformerEncoderLayer(64, 4, 160, batch_first=True, norm_first=norm_first, rng=0)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = np.random.default_rng(1).standard_normal((3, 9, 64)).astype(np.float32)
    whole, before = copy.deepcopy(encoder), encoder(x)
    encoder.quantize(kind)
    given = encoder.state_dict()
    state = {n: float32_of(x, given.get(f"{n}_scale")) for n, x in given.items() if not n.endswith("_scale")}
    whole.load_state_dict({name: x.astype(np.float32) for name, x in state.items()})
    y = encoder(x)
    # Rounded inputs are off by 1/255 of a group's range at most in each of eight products; norms keep the size of the
    # rows at 1.
    assert np.abs(y - whole(x)).max() < (0.1 if kind == "int8" else 0.05)
    assert not np.array_equal(y, before)
    assert np.corrcoef(y.ravel(), before.ravel())[0, 1] > 0.999
    assert np.array_equal(encoder(x[1:2])[0], y[1])
    lengths = [9, 4, 1]
    assert np.array_equal(encoder(x, key_lengths=lengths)[1, :4], encoder(x[1:2, :4])[0])


@pytest.mark.parametrize("kind", KINDS)
def test_multihead_attention(kind):
    layer = nn.MultiheadAttention(64, 4, batch_first=True, rng=0)
    x = np.random.default_rng(1).standard_normal((2, 6, 64)).astype(np.float32)
    before = layer(x, x, x)[0]
    layer.quantize(kind)
    after = layer(x, x, x)[0]
    assert np.corrcoef(after.ravel(), before.ravel())[0, 1] > 0.999
    assert not np.array_equal(after, before)
    assert np.allclose(layer.steps(x, x, x).result, after, atol=0.02)


def test_state_and_copies():
    layer, other = (nn.Linear(130, 4, rng=seed).quantize("int8") for seed in (0, 1))
    x = np.random.default_rng(0).standard_normal((3, 130)).astype(np.float32)
    first, second = layer(x), other(x)
    assert not np.array_equal(first, second)
    assert list(layer.state_dict()) == ["weight", "bias", "weight_scale"]
    for made in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert np.array_equal(made(x), first)
        made.load_state_dict(other.state_dict())
        assert np.array_equal(made(x), second)
    with pytest.raises(ValueError, match="read-only"):
        layer.weight[0, 0] = 1
    for wrong in (np.nan, np.inf, -1):
        state = layer.state_dict()
        state["weight_scale"][1, 1] = wrong
        with pytest.raises(ValueError, match="weight_scale must hold finite numbers, none negative"):
            layer.load_state_dict(state)
    assert np.array_equal(layer(x), first)
    with pytest.raises(ValueError, match="rounded weights"):
        nn.Linear(130, 4).load_state_dict({"weight": layer.weight, "bias": layer.bias}, strict=False)


def test_a_model_with_a_weight_that_is_not_finite_stays_as_it_was():
    stack = nn.Sequential(nn.Linear(4, 4, rng=0), nn.Linear(4, 2, rng=0))
    stack[1].weight[1, 1] = np.inf
    with pytest.raises(ValueError, match="weight of a Linear holds NaN or an infinity"):
        stack.quantize("int8")
    assert all(array.dtype == np.float32 for array in stack.parameters().values())


TASK = nn.ProxyTask(nn.EmbeddingModel(len, 10, 8, max_seq_len=4, rng=0))
LINEAR = nn.Linear(4, 2, rng=0).quantize("int8")
ENCODER = nn.TransformerEncoderLayer(8, 2, 16, rng=0).eval().quantize("int8")
test_what_is_refused = refusals(
    (lambda: nn.Linear(4, 2).quantize("int4"), ValueError, "'bfloat16' or 'int8', not 'int4'"),
    (lambda: nn.LayerNorm(4).quantize("int8"), ValueError, "no weights that are rounded"),
    (lambda: TASK.quantize("int8"), ValueError, "EmbeddingModel computes only with float weights"),
    (lambda: nn.Linear(4, 2, dtype=np.float64).quantize("int8"), ValueError, r"float64; only float32"),
    (lambda: LINEAR.quantize("int8"), ValueError, "is int8"),
    (lambda: LINEAR.vjp(np.ones((1, 4), np.float32)), ValueError, "no gradients"),
    (lambda: LINEAR(np.ones((1, 4))), TypeError, "float64"),
    (lambda: ENCODER.vjp(np.ones((3, 8), np.float32)), ValueError, "no gradients"),
    (lambda: ENCODER(np.ones((3, 8))), TypeError, "float64"),
)


def packed_weights(rng, out, width):
    """Draw int8 and its scales, packed; and their products, the weights."""
    q = rng.integers(-128, 128, (out, width), dtype=np.int8)
    scale = rng.uniform(0.5e-3, 2e-3, (out, -(-width // GROUP))).astype(np.float32)
    return _core._int8_panels(q, scale), from_int8(q, scale.astype(np.float64))


def test_what_cannot_be_rounded_is_multiplied_as_it_is(isa):
    rng = np.random.default_rng(0)
    packed, w = packed_weights(rng, 40, 200)
    x = rng.standard_normal((9, 200)).astype(np.float32)
    before = _core._linear_forward(x, packed, None)
    x[2, 7], x[4, 0], x[6, 3:5] = np.nan, np.inf, (3e38, -3e38)
    y = _core._linear_forward(x, packed, None)
    np.testing.assert_array_equal(np.delete(y, (2, 4, 6), 0), np.delete(before, (2, 4, 6), 0))
    assert np.isnan(y[2]).all()
    assert (np.isnan(y[4]) == (w[:, 0] == 0)).all()
    assert np.isposinf(y[4][w[:, 0] > 0]).all() and np.isneginf(y[4][w[:, 0] < 0]).all()
    expected = x[6].astype(np.float64) @ w.T
    np.testing.assert_allclose(y[6], expected, rtol=0, atol=1e-4 * 3e38 * np.abs(w).max())


@pytest.mark.parametrize(("rows", "width", "out"), [(0, 5, 4), (2, 0, 4), (2, 5, 0), (0, 0, 0)])
def test_empty_products(rows, width, out, isa):
    packed = _core._int8_panels(
        np.ones((out, width), np.int8), np.ones((out, -(-width // GROUP)), np.float32)
    )
    bias = np.arange(out, dtype=np.float32)
    y = _core._linear_forward(np.zeros((rows, width), np.float32), packed, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (rows, out)))
