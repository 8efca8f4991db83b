"""What holds of every layer and loss: arrays in any layout give the same bits, and what may become of results and parameters."""

import copy

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
MORE = {  # of which other tests draw layouts, or which take none
    "LayerNorm": (nn.LayerNorm(6), (X,)),
    "RMSNorm": (nn.RMSNorm(6), (X,)),
    "SinusoidalPositions": (nn.SinusoidalPositions(6), (X,)),
    "Dropout": (nn.Dropout(0.5, rng=0), (X,)),
    "SelfAttention": (nn.SelfAttention(6, 4, bias=True, rng=0), (X,)),
    "SelfAttention, dot": (nn.SelfAttention(6, 4, score="dot", rng=0), (X,)),
    "SelfAttention, additive": (nn.SelfAttention(6, 4, score="additive", rng=0), (X,)),
    "SelfAttentionBlock": (nn.SelfAttentionBlock(6, rng=0), (X,)),
    "SelfAttentionBlock of 3 heads": (nn.SelfAttentionBlock(6, 3, rng=0), (X,)),
    "MultiheadAttention": (nn.MultiheadAttention(6, 2, rng=0), (X, X, X)),
    "MultiheadAttention of other widths": (nn.MultiheadAttention(8, 2, kdim=6, vdim=6, rng=0), (np.ones((3, 4, 8)), X, X)),
    "ScaledDotProductAttention": (nn.ScaledDotProductAttention(), (X, X, X)),
    "ScaledDotProductAttention with dropout": (nn.ScaledDotProductAttention(), (X, X, X, None, nn.Dropout(0.5, rng=0))),
    "TransformerEncoderLayer": (nn.TransformerEncoderLayer(6, 2, **OPTIONS), (X,)),
    "TransformerEncoder": (nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, **OPTIONS), 2), (X,)),
    "TransformerDecoderLayer, norms first": (nn.TransformerDecoderLayer(6, 2, **OPTIONS, norm_first=True), (X, MEMORY)),
    "Sequential": (nn.Sequential(nn.Linear(6, 6, rng=0), nn.SelfAttention(6, 4, rng=0)), (X,)),
}  # fmt: skip


def flat(found):
    """All arrays of nested tuples and dicts."""
    if isinstance(found, tuple | dict):
        parts = found.values() if isinstance(found, dict) else found
        return [array for part in parts for array in flat(part)]
    return [found]


def gradient_for(y):
    y = flat(y)[0]
    return np.cos(np.arange(np.size(y))).reshape(np.shape(y))


def results(layer, arguments):
    y, pullback = layer.vjp(*arguments)
    return [layer(*arguments), y, *flat(pullback(gradient_for(y)))]


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


@pytest.mark.parametrize("name", LAYERS | MORE)
def test_a_pullback_may_be_called_again_for_one_state_of_the_parameters(name):
    """All that was returned may be written to: `y -= target` is how the gradient of a squared error is often written."""
    layer, arguments = (LAYERS | MORE)[name]
    layer, before = copy.deepcopy(layer), copy.deepcopy(arguments)
    y, pullback = layer.vjp(*arguments)
    dy = gradient_for(y)
    expected = [array.copy() for array in flat(pullback(dy))]
    for array in [*flat(y), *flat(pullback(dy))]:
        if np.ndim(array):
            array[...] = np.nan
    for got, wanted in zip(flat(pullback(dy)), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)
    for x, kept in zip(arguments, before, strict=True):
        assert not isinstance(x, np.ndarray) or np.array_equal(x, kept)
    parameters = layer.parameters()
    if parameters and name != "LearnedPositions":  # whose gradient needs no parameter
        for key, array in parameters.items():
            if key.endswith(("weight", "W_query")):
                _, pullback = layer.vjp(*arguments)
                array[...] += 1
                with pytest.raises(RuntimeError, match="call vjp again"):
                    pullback(dy)
