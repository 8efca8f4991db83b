"""What modules say of themselves, and what they refuse as parameters and states."""

import numpy as np
import pytest

from selfattn import nn


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.GELU("tanh"), "GELU(approximate='tanh')"),
        (nn.Dropout(0.25), "Dropout(p=0.25)"),
        (nn.MSELoss(reduction="sum"), "MSELoss(reduction='sum')"),
        (
            nn.CrossEntropyLoss(np.ones(3), label_smoothing=0.1),
            "CrossEntropyLoss(ignore_index=-100, weight=(3,), label_smoothing=0.1, reduction='mean')",
        ),
        (
            nn.RotaryEmbedding(8, max_len=16, interleaved=True),
            "RotaryEmbedding(dim=8, max_len=16, theta=10000.0, interleaved=True)",
        ),
        (
            nn.MultiheadAttention(8, 2, batch_first=True),
            "MultiheadAttention(embed_dim=8, num_heads=2, dropout=0.0, batch_first=True",
        ),
        (
            nn.TransformerEncoderLayer(8, 2, 16),
            "TransformerEncoderLayer(d_model=8, activation='relu', norm_first=False",
        ),
        (
            nn.TransformerDecoderLayer(8, 2, 16),
            "TransformerDecoderLayer(d_model=8, activation='relu', norm_first=False",
        ),
        (nn.GPT(5, 8, 1, 2, 4, rng=0), "GPT("),
    ],
)
def test_texts(module, text):
    assert "".join(repr(module).split()).startswith("".join(text.split()).rstrip(")"))


def test_what_is_no_parameter():
    layer = nn.Linear(2, 2, rng=0)
    with pytest.raises(TypeError, match="parameter"):
        layer.register_parameter("w", [1.0])
    with pytest.raises(ValueError, match="weight must hold floats or integers, not bool"):
        layer.load_state_dict({"weight": np.ones((2, 2), bool), "bias": np.zeros(2, np.float32)})


def test_what_initialising_refuses():
    array = np.zeros((2, 3), np.float32)
    with pytest.raises(ValueError, match='mode must be "fan_in" or "fan_out", not \'fan\''):
        nn.init.kaiming_uniform_(array, mode="fan")
    with pytest.raises(ValueError, match="rng must not be negative, not -1"):
        nn.init.normal_(array, rng=-1)
    assert (nn.init.ones_(array) == 1).all()


@pytest.mark.parametrize("norm", [None, "norm"])
def test_layers_of_another_kind_compute_what_the_core_does(norm):
    """A subclass may compute anything, so the encoder calls each; here they are as the core has them."""

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


def test_lengths_that_do_not_fit():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, rng=0), 1)
    x = np.zeros((2, 3, 8), np.float32)
    for lengths, error, message in (
        ([1.0, 2.0], TypeError, "integers, got float64"),
        ([1], ValueError, r"shape \(2,\) or \(\), not \(1,\)"),
        ([1, 4], ValueError, r"in 0...3, not \[1, 4\]"),
        ([-1, 2], ValueError, r"in 0...3"),
    ):
        with pytest.raises(error, match=message):
            encoder(x, key_lengths=lengths)
