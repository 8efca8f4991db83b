"""The repr of modules, and the parameters and states that they refuse."""

import numpy as np
import pytest
from refusals import refusals

from selfattn import nn


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.GELU("tanh"), "GELU(approximate='tanh')"),
        (nn.Dropout(0.25), "Dropout(p=0.25)"),
        (nn.MSELoss(reduction="sum"), "MSELoss(reduction='sum')"),
        (nn.CrossEntropyLoss(np.ones(3), label_smoothing=0.1),
         "CrossEntropyLoss(ignore_index=-100, weight=(3,), label_smoothing=0.1, reduction='mean')"),
        (nn.RotaryEmbedding(8, max_len=16, interleaved=True),
         "RotaryEmbedding(dim=8, max_len=16, theta=10000.0, interleaved=True)"),
        (nn.MultiheadAttention(8, 2, batch_first=True),
         "MultiheadAttention(embed_dim=8, num_heads=2, dropout=0.0, batch_first=True"),
        (nn.TransformerEncoderLayer(8, 2, 16), "TransformerEncoderLayer(d_model=8, activation='relu', norm_first=False"),
        (nn.TransformerDecoderLayer(8, 2, 16), "TransformerDecoderLayer(d_model=8, activation='relu', norm_first=False"),
        (nn.GPT(5, 8, 1, 2, 4, rng=0), "GPT("),
    ],
)  # fmt: skip
def test_texts(module, text):
    assert "".join(repr(module).split()).startswith("".join(text.split()).rstrip(")"))


@pytest.mark.parametrize("norm", [None, "norm"])
def test_layers_of_another_kind_compute_what_the_core_does(norm):
    """A subclass may compute anything, so the encoder calls each layer; these subclasses compute the same as the core."""

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


def encode(lengths):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, rng=0)
    return lambda: nn.TransformerEncoder(layer, 1)(np.zeros((2, 3, 8), np.float32), key_lengths=lengths)


ARRAY = np.zeros((2, 3), np.float32)
test_what_is_refused = refusals(
    (encode([1.0, 2.0]), TypeError, "integers, got float64"),
    (encode([1]), ValueError, r"shape \(2,\) or \(\), not \(1,\)"),
    (encode([1, 4]), ValueError, r"in 0...3, not \[1, 4\]"),
    (encode([-1, 2]), ValueError, r"in 0...3"),
    (lambda: nn.Linear(2, 2).register_parameter("w", [1.0]), TypeError, "parameter"),
    (lambda: nn.Linear(2, 2).load_state_dict({"weight": np.ones((2, 2), bool), "bias": np.zeros(2, np.float32)}),
     ValueError, "weight must hold floats or integers, not bool"),
    (lambda: nn.init.kaiming_uniform_(ARRAY, mode="fan"), ValueError, 'mode must be "fan_in" or "fan_out", not \'fan\''),
    (lambda: nn.init.normal_(ARRAY, rng=-1), ValueError, "rng must not be negative, not -1"),
)  # fmt: skip


def test_ones():
    assert (nn.init.ones_(np.zeros((2, 3))) == 1).all()
