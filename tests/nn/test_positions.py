"""LearnedPositions and RotaryEmbedding; the warning of masks that look inverted."""

import warnings

import numpy as np
import pytest
from refusals import refusals

from selfattn import nn, reference
from selfattn.engine.rope import read_rope
from selfattn.models._folder import Config

RNG = np.random.default_rng(0)
F64 = {"dtype": np.float64}
X = RNG.standard_normal((2, 3, 5, 6))


def test_learned_positions():
    layer = nn.LearnedPositions(6, 7, rng=0, **F64)
    np.testing.assert_array_equal(layer.weight, nn.Embedding(7, 6, rng=0, **F64).weight)
    np.testing.assert_array_equal(layer(X), X + layer.weight[:5])
    _, grads = layer.vjp(X)[1](np.ones_like(X))
    np.testing.assert_array_equal(grads["weight"][:, 0], [6] * 5 + [0] * 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 50])
@pytest.mark.parametrize("positions", [None, [3, 3, 0, 9, 1]])
def test_rotary_by_its_angles(theta, interleaved, positions):
    layer = nn.RotaryEmbedding(6, 10, theta, interleaved=interleaved, **F64)
    places = np.arange(5) if positions is None else np.array(positions)
    angles = places[:, None] * theta ** (-np.arange(3) / 3)
    expected = reference.apply_rotary_emb(X, np.cos(angles), np.sin(angles), interleaved)
    # The layer computes angles, here below 10, in float32, with an error of a few roundings.
    np.testing.assert_allclose(layer(X, positions), expected, atol=10 * 8 * 6e-8)
    assert layer.parameters() == {} and layer.state_dict() == {}


def test_what_is_written_into_one_layers_angles_stays_there():
    one, other = nn.RotaryEmbedding(6, 10), nn.RotaryEmbedding(6, 10)
    before = other(X)
    one.cos[...] = one.sin[...] = 0
    np.testing.assert_array_equal(other(X), before)
    np.testing.assert_array_equal(nn.RotaryEmbedding(6, 10)(X), before)


def test_positions_of_each_sequence():
    layer = nn.RotaryEmbedding(6, 20, **F64)
    positions = np.arange(5) + np.array([[0], [7]])
    y = layer(X, positions)
    for n in range(2):
        np.testing.assert_array_equal(y[n], layer(X[n], positions[n]))
    y, pullback = layer.vjp(X, positions)
    np.testing.assert_allclose(pullback(y)[0], X, atol=1e-14)  # a rotation is undone by its transpose


def test_scaled_angles_are_those_of_language_models():
    """Drawn folders compare these with Transformers'."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    turns = read_rope(Config({"rope_parameters": scaling | {"rope_theta": 500.0}}), 6, 64)
    angles, x = np.arange(5, dtype=np.float32)[:, None] * np.float32(turns.frequencies), X.astype(np.float32)
    expected = reference.apply_rotary_emb(x, np.cos(angles) * turns.factor, np.sin(angles) * turns.factor)
    np.testing.assert_allclose(nn.RotaryEmbedding(6, 64, 500.0, scaling=scaling)(x), expected, atol=1e-5)
    assert turns.factor > 1


test_errors_say_what_was_given = refusals(
    (lambda: nn.RotaryEmbedding(3), ValueError, "dim must be even"),
    (lambda: nn.RotaryEmbedding(4, theta=1.0), ValueError, "theta must be above 1"),
    (lambda: nn.RotaryEmbedding(4, scaling={"rope_type": "x"}),
     ValueError, "the type 'x' of rotary positions is not supported"),
    (lambda: nn.RotaryEmbedding(4, scaling={"rope_theta": 3.0}),
     ValueError, "scaling must not have rope_theta: pass it as theta"),
    (lambda: nn.RotaryEmbedding(4)(np.ones(4)), ValueError, r"x must have shape \(..., L, 4\)"),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((5, 4))), ValueError, "x has 5 positions, more than max_len=3"),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [1, 3]),
     ValueError, "positions must be in 0...2, not 1 to 3"),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [0, 1, 2]),
     ValueError, r"positions must have shape \(..., L\) with L = 2, not \(3,\)"),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [0.0, 1.0]), TypeError, "positions must be integers"),
    (lambda: nn.LearnedPositions(4, 3)(np.ones((5, 4))),
     ValueError, "x has 5 positions, more than max_len=3"),
    (lambda: nn.SinusoidalPositions(4, 3)(np.ones((5, 4))),
     ValueError, "x has 5 positions, more than max_len=3"),
)  # fmt: skip


def masked_calls():
    """Every way to give a layer a mask that says what to ignore."""
    x = RNG.standard_normal((2, 5, 6))
    attention = nn.MultiheadAttention(6, 2, batch_first=True, rng=0, **F64)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, rng=0, **F64)
    decoder = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True, rng=0, **F64)
    return {
        "MultiheadAttention": lambda mask: attention(x, x, x, attn_mask=mask),
        "its vjp": lambda mask: attention.vjp(x, x, x, attn_mask=mask),
        "TransformerEncoderLayer": lambda mask: layer(x, mask),
        "TransformerEncoder": lambda mask: nn.TransformerEncoder(layer, 2).vjp(x, mask),
        "TransformerDecoder": lambda mask: nn.TransformerDecoder(decoder, 1)(x, x, tgt_mask=mask),
    }


@pytest.mark.parametrize("name", masked_calls())
def test_a_mask_that_looks_inverted_is_a_warning_that_says_what_to_do(name):
    call = masked_calls()[name]
    hidden = np.where(np.tri(5), -np.inf, 0.0)
    for mask in (np.tri(5, dtype=bool), np.tri(5), hidden, np.tile(np.tri(5, dtype=bool), (4, 1, 1))):
        with pytest.warns(
            UserWarning, match=r"attn_mask is a lower triangle .* pass is_causal=True"
        ) as caught:
            call(mask)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (~np.tri(5, dtype=bool), np.zeros((5, 5), bool), np.tri(5, k=1, dtype=bool), np.eye(5) == 1,
                     np.where(np.tri(5), 0, -np.inf), np.tri(5) * -1, np.tri(5, k=-1, dtype=bool)):  # fmt: skip
            call(mask)
