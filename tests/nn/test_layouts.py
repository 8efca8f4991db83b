"""Losses, activations, positions and decoders with arrays in any layout: the same bits as of plain arrays."""

import numpy as np
import pytest
from inputs import LAYOUTS

from selfattn import nn

RNG = np.random.default_rng(0)
X, MEMORY = RNG.standard_normal((3, 4, 6)), RNG.standard_normal((3, 5, 6))
CLASSES = RNG.integers(0, 4, (3, 6))
SHARES = RNG.random((3, 4, 6))
OPTIONS = {"batch_first": True, "dim_feedforward": 8, "dropout": 0.0, "rng": 0}
LAYERS = {
    "CrossEntropyLoss": (nn.CrossEntropyLoss([1.0, 2.0, 3.0, 0.5], label_smoothing=0.1), (X, CLASSES)),
    "CrossEntropyLoss of probabilities": (nn.CrossEntropyLoss(), (X, SHARES)),
    "MSELoss": (nn.MSELoss(), (X, SHARES)),
    "BCEWithLogitsLoss": (nn.BCEWithLogitsLoss(pos_weight=np.arange(6.0)), (X, SHARES)),
    "ReLU": (nn.ReLU(), (X,)),
    "Tanh": (nn.Tanh(), (X,)),
    "SiLU": (nn.SiLU(), (X,)),
    "GELU": (nn.GELU(), (X,)),
    "Linear": (nn.Linear(6, 3, rng=0), (X,)),
    "LearnedPositions": (nn.LearnedPositions(6, 9, rng=0), (X,)),
    "RotaryEmbedding": (nn.RotaryEmbedding(6, 9), (X, np.array([3, 1, 8, 0]))),
    "TransformerDecoderLayer": (
        nn.TransformerDecoderLayer(6, 2, **OPTIONS),
        (X, MEMORY, ~np.tri(4, dtype=bool)),
    ),
}


def results(layer, arguments):
    y, pullback = layer.vjp(*arguments)
    found = pullback(np.cos(np.arange(np.size(y))).reshape(np.shape(y)))
    flat = [y]
    for part in found if isinstance(found, tuple) else (found,):
        flat += part.values() if isinstance(part, dict) else part if isinstance(part, tuple) else [part]
    return [layer(*arguments), *flat]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_arrays_in_any_layout(name, layout, dtype):
    layer, arguments = LAYERS[name]
    arguments = [x.astype(dtype) if x.dtype.kind == "f" else x for x in arguments]
    before = [x.copy() for x in arguments]
    laid_out = [LAYOUTS[layout](x) for x in arguments]
    for got, expected in zip(results(layer, laid_out), results(layer, arguments), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert np.asarray(got).dtype.isnative and np.asarray(got).dtype == np.asarray(expected).dtype
    for x, kept in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(x, kept)
