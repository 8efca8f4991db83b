"""nn.TransformerDecoderLayer and nn.TransformerDecoder: equivalent masks, masked tokens, dropout."""

import numpy as np
from nn_checks import assert_born_alike
from refusals import refusals

from selfattn import nn

N, L, S, D, HEADS, WIDE = 2, 4, 5, 6, 2, 10
RNG = np.random.default_rng(3)
TGT, MEMORY = RNG.standard_normal((N, L, D)), RNG.standard_normal((N, S, D))
PADDING = np.arange(L) >= np.array([[3], [4]])  # True = ignore
MEMORY_PADDING = np.arange(S) >= np.array([[5], [2]])
TRIANGLE = ~np.tri(L, dtype=bool)
BAND = np.abs(np.arange(L)[:, None] - np.arange(S)) > 2
BASE = {"d_model": D, "nhead": HEADS, "dim_feedforward": WIDE, "dropout": 0.0}


def test_ways_to_say_the_same():
    layer = nn.TransformerDecoderLayer(**BASE, batch_first=True, dtype=np.float64, rng=0)
    y = layer(TGT, MEMORY, TRIANGLE, None, PADDING, MEMORY_PADDING)
    same = layer(TGT, MEMORY, tgt_is_causal=True, key_lengths=[3, 4], memory_key_lengths=[5, 2])
    np.testing.assert_allclose(same[:, :3], y[:, :3], atol=1e-12)
    upper = np.arange(S) > np.arange(L)[:, None]
    np.testing.assert_allclose(
        layer(TGT, MEMORY, memory_is_causal=True), layer(TGT, MEMORY, memory_mask=upper), atol=1e-12
    )
    decoder = nn.TransformerDecoder(layer, 1)
    np.testing.assert_array_equal(decoder(TGT, MEMORY, tgt_is_causal=None), layer(TGT, MEMORY))


def test_weights_at_birth_are_those_of_pytorch():
    assert_born_alike(
        lambda rng: nn.TransformerDecoderLayer(8, 2, 16, rng=rng),
        lambda torch: torch.nn.TransformerDecoderLayer(8, 2, 16),
        seed=3,
    )


def test_the_future_and_missing_memory_are_not_seen():
    layer = nn.TransformerDecoderLayer(**BASE, batch_first=True, dtype=np.float64, rng=0)
    tgt, memory = TGT.copy(), MEMORY.copy()
    y = layer(tgt, memory, tgt_is_causal=True, memory_key_lengths=[5, 2])
    tgt[:, 2:], memory[1, 2:] = 9.0, np.nan
    changed, pullback = layer.vjp(tgt, memory, tgt_is_causal=True, memory_key_lengths=[5, 2])
    np.testing.assert_array_equal(changed[:, :2], y[:, :2])
    (_, d_memory), grads = pullback(np.ones_like(y))
    assert (d_memory[1, 2:] == 0).all() and all(np.isfinite(grad).all() for grad in grads.values())


def test_dropout_drops_in_each_place_anew():
    layer = nn.TransformerDecoderLayer(**{**BASE, "dropout": 0.4}, batch_first=True, dtype=np.float64, rng=0)
    model = nn.TransformerDecoder(layer, 2)
    assert not np.array_equal(model(TGT, MEMORY), model(TGT, MEMORY))
    assert len({id(each.dropout1.rng) for each in model.layers}) == 1
    model.eval()
    np.testing.assert_array_equal(model(TGT, MEMORY), model(TGT, MEMORY))


test_errors_say_what_was_given = refusals(
    (lambda: nn.TransformerDecoderLayer(6, 2, activation="silu"),
     ValueError, 'activation must be "relu" or "gelu"'),
    (lambda: nn.TransformerDecoderLayer(6, 4), ValueError, "nhead must divide d_model; 4 does not divide 6"),
    (lambda: nn.TransformerDecoder(3, 2), TypeError, "decoder_layer must be a Module, not int"),
    (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2), 2, 3),
     TypeError, "norm must be a Module or None, not int"),
    (lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 5)), np.ones((2, 6))),
     ValueError, r"tgt must have shape \(..., 6\), not \(2, 5\)"),
    (lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 6)), np.ones((2, 5))),
     ValueError, r"memory must have shape \(..., 6\), not \(2, 5\)"),
    (lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 6)), np.ones((3, 2, 6))),
     ValueError, r"must all be \(L, E\) or all be"),
    (lambda: nn.TransformerDecoderLayer(6, 2)(np.ones((2, 6)), np.ones((3, 6)), memory_mask=np.ones((2, 2), bool)),
     ValueError, r"attn_mask must have shape .* \(2, 3\)"),
)  # fmt: skip
