"""Layers and stacks of the Transformer: copies, dropout, masks, errors; test_every_layer.py has numbers and
gradients."""

import itertools

import numpy as np
import pytest
from leaks import peak_memory
from nn_checks import assert_close
from refusals import refusals

from selfattn import nn

N, L, S, D, HEADS, WIDE = 2, 5, 4, 6, 2, 10
RNG = np.random.default_rng(2)
X, MEMORY = RNG.standard_normal((N, L, D)), RNG.standard_normal((N, S, D))
PADDING = np.arange(L) >= np.array([[3], [5]])  # True = ignore
MEMORY_PADDING = np.arange(S) >= np.array([[4], [2]])
TRIANGLE = ~np.tri(L, dtype=bool)
BASE = {"d_model": D, "nhead": HEADS, "dim_feedforward": WIDE, "dropout": 0.0}
KINDS = {
    "as it is": {},
    "gelu": {"activation": "gelu", "batch_first": True},
    "norm first": {"norm_first": True, "batch_first": True},
}


def layer_of(kind, **more):
    return nn.TransformerEncoderLayer(**(BASE | KINDS[kind] | more))


def test_an_encoder_has_copies_that_part_when_trained():
    layer = layer_of("as it is", rng=0)
    model = nn.TransformerEncoder(layer, 2)
    assert len(model.layers) == 2 and model.norm is None
    model.layers[0].linear1.weight[...] = 0
    assert (model.layers[1].linear1.weight == layer.linear1.weight).all()
    assert (layer.linear1.weight != 0).any()


def test_is_causal_is_the_triangle():
    model = nn.TransformerEncoder(layer_of("gelu", dtype=np.float64, rng=0), 2)
    expected = model(X, mask=TRIANGLE)
    for arguments in ({"is_causal": True}, {"is_causal": True, "mask": TRIANGLE}):
        assert_close(model(X, **arguments), expected, "float64", n=D)
    changed = X.copy()
    changed[:, 3:] += 1
    assert_close(model(changed, is_causal=True)[:, :3], expected[:, :3], "float64", n=D)


def test_a_new_layer_is_in_training_mode_and_drops():
    layer = nn.TransformerEncoderLayer(D, HEADS, WIDE, rng=0, dtype=np.float64)
    assert layer.training and layer.self_attn.dropout == 0.1
    assert {layer.dropout.p, layer.dropout1.p, layer.dropout2.p} == {0.1}
    assert (layer(X) != layer(X)).any()
    layer.eval()
    np.testing.assert_array_equal(layer(X), layer(X))
    same = nn.TransformerEncoderLayer(D, HEADS, WIDE, 0.0, rng=0, dtype=np.float64)
    np.testing.assert_array_equal(layer(X), same(X))


def test_layers_of_an_encoder_drop_different_places():
    layer = nn.TransformerEncoderLayer(D, HEADS, WIDE, 0.5, rng=0)
    model = nn.TransformerEncoder(layer, 2)
    first, second = model.layers
    assert first.dropout.rng is second.dropout.rng is layer.dropout.rng is first.self_attn.rng
    ones = np.ones((50, 50), np.float32)
    assert (first.dropout(ones) != second.dropout(ones)).any()


@pytest.mark.parametrize("norm", [None, "norm"])
def test_layers_of_another_kind_compute_what_the_core_does(norm):
    """A subclass may compute anything, so the encoder calls each layer; these subclasses compute the same as the
    core."""

    class Own(nn.TransformerEncoderLayer):
        pass

    def encoder(kind):
        layer = kind(8, 2, 16, batch_first=True, dropout=0.0, dtype=np.float64, rng=0)
        last = nn.LayerNorm(8, dtype=np.float64) if norm else None
        return nn.TransformerEncoder(layer, 2, last)

    core, own = encoder(nn.TransformerEncoderLayer), encoder(Own)
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((2, 3, 5, 8))
    lengths = np.array([5, 3, 1])
    existing = np.arange(5) < lengths[:, None]
    # sums of 16 terms, in two layers
    near = {"rtol": 0, "atol": 1e-12}
    y, pullback = own.vjp(x, key_lengths=lengths)
    expected, expected_pullback = core.vjp(x, key_lengths=lengths)
    np.testing.assert_allclose(y[existing], expected[existing], **near)
    np.testing.assert_allclose(own(x, key_lengths=lengths)[existing], expected[existing], **near)
    dy = dy * existing[..., None]
    dx, gradients = pullback(dy)
    expected_dx, expected_gradients = expected_pullback(dy)
    np.testing.assert_allclose(dx, expected_dx, **near)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, expected_gradients[name], err_msg=name, **near)


def test_ways_to_say_the_same():
    layer = nn.TransformerDecoderLayer(**BASE, batch_first=True, dtype=np.float64, rng=0)
    y = layer(X, MEMORY, TRIANGLE, None, PADDING, MEMORY_PADDING)
    same = layer(X, MEMORY, tgt_is_causal=True, key_lengths=[3, 5], memory_key_lengths=[4, 2])
    np.testing.assert_allclose(same[:, :3], y[:, :3], atol=1e-12)
    upper = np.arange(S) > np.arange(L)[:, None]
    np.testing.assert_allclose(
        layer(X, MEMORY, memory_is_causal=True), layer(X, MEMORY, memory_mask=upper), atol=1e-12
    )
    decoder = nn.TransformerDecoder(layer, 1)
    np.testing.assert_array_equal(decoder(X, MEMORY, tgt_is_causal=None), layer(X, MEMORY))


def test_the_future_and_missing_memory_are_not_seen():
    layer = nn.TransformerDecoderLayer(**BASE, batch_first=True, dtype=np.float64, rng=0)
    tgt, memory = X.copy(), MEMORY.copy()
    y = layer(tgt, memory, tgt_is_causal=True, memory_key_lengths=[4, 2])
    tgt[:, 2:], memory[1, 2:] = 9.0, np.nan
    changed, pullback = layer.vjp(tgt, memory, tgt_is_causal=True, memory_key_lengths=[4, 2])
    np.testing.assert_array_equal(changed[:, :2], y[:, :2])
    (_, d_memory), grads = pullback(np.ones_like(y))
    assert (d_memory[1, 2:] == 0).all() and all(np.isfinite(grad).all() for grad in grads.values())


def test_dropout_drops_in_each_place_anew():
    layer = nn.TransformerDecoderLayer(**{**BASE, "dropout": 0.4}, batch_first=True, dtype=np.float64, rng=0)
    model = nn.TransformerDecoder(layer, 2)
    assert not np.array_equal(model(X, MEMORY), model(X, MEMORY))
    assert len({id(each.dropout1.rng) for each in model.layers}) == 1
    model.eval()
    np.testing.assert_array_equal(model(X, MEMORY), model(X, MEMORY))


def encode(lengths):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, rng=0)
    return lambda: nn.TransformerEncoder(layer, 1)(np.zeros((2, 3, 8), np.float32), key_lengths=lengths)


def replaced(**parts):
    layer = layer_of("as it is", batch_first=True, dtype=np.float64, rng=0)
    for name, part in parts.items():
        setattr(layer, name, part)
    return layer


test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: layer_of("as it is", nhead=4), ValueError, "4 does not divide 6"),
    (lambda: layer_of("as it is", activation="tanh"), ValueError, '"relu" or "gelu", not \'tanh\''),
    (lambda: layer_of("as it is", dropout=-1), ValueError, "dropout must be between 0 and 1, not -1"),
    (lambda: layer_of("as it is", dim_feedforward=0), ValueError, "dim_feedforward must be at least 1"),
    (lambda: layer_of("norm first")(np.ones((5, 2, 7))), ValueError, r"src .*, not \(5, 2, 7\)"),
    (lambda: layer_of("norm first")(np.ones(6)), ValueError, r"or \(L, d_model\), not \(6,\)"),
    (lambda: layer_of("as it is")(X, src_mask=np.ones((5, 5), bool)), ValueError, r"here \(2, 2\)"),
    (lambda: layer_of("as it is").vjp(X)[1](X[0]), ValueError, r"\(2, 5, 6\), not \(5, 6\)"),
    (lambda: nn.TransformerEncoder(lambda x: x, 2), TypeError, "must be a Module, not function"),
    (lambda: nn.TransformerEncoder(layer_of("gelu"), 0), ValueError, "num_layers must be at least 1"),
    (lambda: nn.TransformerEncoderLayer(8, 3), ValueError, "nhead must divide d_model"),
    (lambda: layer_of("gelu").load_state_dict(None), TypeError, "a mapping .*, not NoneType"),
    (lambda: nn.TransformerEncoder(layer_of("gelu"), 1, 6), TypeError, "norm must be a Module or None"),
    (lambda: replaced(norm1=nn.RMSNorm(6))(X), TypeError, "norm1 .* must be a LayerNorm, not RMSNorm"),
    (lambda: replaced(norm2=nn.LayerNorm(6, elementwise_affine=False))(X), ValueError, "norm2 .* a weight"),
    (lambda: replaced(self_attn=nn.MultiheadAttention(6, 2, kdim=4))(X), ValueError, "self_attn .* as wide"),
    (lambda: replaced(activation="silu")(X), ValueError, '"relu" or "gelu", not \'silu\''),
    (
        lambda: nn.TransformerDecoderLayer(6, 2, activation="silu"),
        ValueError,
        'activation must be "relu" or "gelu"',
    ),
    (lambda: nn.TransformerDecoderLayer(6, 4), ValueError, "nhead must divide d_model; 4 does not divide 6"),
    (lambda: nn.TransformerDecoder(3, 2), TypeError, "decoder_layer must be a Module, not int"),
    (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2), 2, 3),
        TypeError,
        "norm must be a Module or None, not int",
    ),
    (
        lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 5)), np.ones((2, 6))),
        ValueError,
        r"tgt must have shape \(..., 6\), not \(2, 5\)",
    ),
    (
        lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 6)), np.ones((2, 5))),
        ValueError,
        r"memory must have shape \(..., 6\), not \(2, 5\)",
    ),
    (
        lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 6)), np.ones((3, 2, 6))),
        ValueError,
        r"must all be \(L, E\) or all be",
    ),
    (
        lambda: nn.TransformerDecoderLayer(6, 2)(
            np.ones((2, 6)), np.ones((3, 6)), memory_mask=np.ones((2, 2), bool)
        ),
        ValueError,
        r"attn_mask must have shape .* \(2, 3\)",
    ),
    (encode([1.0, 2.0]), TypeError, "integers, got float64"),
    (encode([1]), ValueError, r"shape \(2,\) or \(\), not \(1,\)"),
    (encode([1, 4]), ValueError, r"in 0...3, not \[1, 4\]"),
    (encode([-1, 2]), ValueError, r"in 0...3"),
)


def as_floats(mask, dtype):
    return np.where(mask, dtype(-np.inf), dtype(0))


@pytest.mark.parametrize("kind", ["pairs", "per head"])
def test_two_masks_of_every_dtype_are_one(kind):
    """A pair that either mask ignores is ignored; floats are added, even if their sum is too large for float32."""
    layer = layer_of("as it is", batch_first=True, dtype=np.float64, rng=0)
    heads = layer.self_attn.num_heads
    pairs = TRIANGLE if kind == "pairs" else np.random.default_rng(0).random((N * heads, L, L)) < 0.3
    expected = layer(X, pairs, PADDING)
    for first, second in itertools.product((np.bool_, np.float16, np.float32, np.float64), repeat=2):
        masks = [x if t is np.bool_ else as_floats(x, t) for x, t in ((pairs, first), (PADDING, second))]
        np.testing.assert_array_equal(layer(X, *masks), expected)
    bias = np.random.default_rng(1).standard_normal(pairs.shape).astype(np.float32)
    for added, padding in [
        (np.where(pairs, np.float32(-np.inf), bias), as_floats(PADDING, np.float32)),
        (np.where(pairs, np.float32(-np.inf), bias), PADDING),
        (np.where(pairs, -3e38, bias).astype(np.float32), np.where(PADDING, -3e38, 1).astype(np.float32)),
        (bias, np.where(PADDING, -np.inf, np.random.default_rng(2).standard_normal(PADDING.shape))),
    ]:
        wide = [x if x.dtype == np.bool_ else x.astype(np.float64) for x in (added, padding)]
        np.testing.assert_array_equal(layer(X, added, padding), layer(X, *wide))


@pytest.mark.parametrize("dtype", [np.bool_, np.float16, np.float32, np.float64])
def test_masks_of_a_batch_stay_what_they_are(dtype):
    """No array is as large as the pairs of a batch, except a negated boolean mask."""
    length, batch = 300, 4
    layer = nn.TransformerEncoderLayer(8, 1, 8, batch_first=True, rng=0).eval()
    decoder = nn.TransformerDecoderLayer(8, 1, 8, batch_first=True, rng=0).eval()
    x = np.zeros((batch, length, 8), np.float32)
    pairs, padding = np.triu(np.ones((length, length), bool), 1), np.zeros((batch, length), bool)
    padding[:, -7:] = True
    if dtype is not np.bool_:
        pairs, padding = as_floats(pairs, dtype), as_floats(padding, dtype)
        pairs[0, 0] = padding[0, 0] = 0.5

    def calls():
        layer(x, pairs, padding)
        decoder(x, x, pairs, pairs, padding, padding)
        layer.vjp(x, pairs, padding)[1](x)

    assert peak_memory(calls) < 2 * batch * length**2
