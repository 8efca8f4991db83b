"""The activations: their formulas, special numbers, errors; test_every_layer.py has PyTorch's numbers and gradients."""

import math

import numpy as np
import pytest

from selfattn import nn

F64 = {"dtype": np.float64}
KINDS = {
    "ReLU": (nn.ReLU, lambda x: max(x, 0)),
    "Tanh": (nn.Tanh, math.tanh),
    "SiLU": (nn.SiLU, lambda x: x / (1 + math.exp(-x))),
    "GELU": (nn.GELU, lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "GELU by tanh": (
        lambda **more: nn.GELU("tanh", **more),
        lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    ),
}
X = 3 * np.random.default_rng(0).standard_normal((3, 4, 5))


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind):
    make, formula = KINDS[kind]
    layer = make(**F64)
    # x·Φ(x) loses a few eps of x where Φ is small
    np.testing.assert_allclose(layer(X), np.vectorize(formula)(X), rtol=1e-14, atol=1e-15)
    assert layer.parameters() == {}


@pytest.mark.parametrize("kind", KINDS)
def test_special_numbers(kind):
    """Far from 0 the slope is 1 or 0, also where exponentials overflow; NaN stays."""
    x = np.float32([200, 1e30, -200, -1e30, 0, np.nan])
    ends = [1, 1, -1, -1] if kind == "Tanh" else [200, 1e30, 0, 0]
    y, pullback = KINDS[kind][0]().vjp(x)
    dx, grads = pullback(np.ones_like(x))
    np.testing.assert_allclose(y, [*ends, 0, np.nan], atol=1e-30)
    slopes = {"Tanh": [0, 0, 0, 0, 1, np.nan], "ReLU": [1, 1, 0, 0, 0, 1]}  # as PyTorch has them
    np.testing.assert_allclose(dx, slopes.get(kind, [1, 1, 0, 0, 0.5, np.nan]), atol=1e-30)
    assert grads == {} and y.dtype == dx.dtype == np.float32


def test_errors_say_what_was_given():
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", not \'erf\''):
        nn.GELU("erf")
    with pytest.raises(TypeError, match="x must hold floats or integers, not complex"):
        nn.ReLU()(1j)
    with pytest.raises(ValueError, match=r"dy must have the shape of the result, \(2,\)"):
        nn.SiLU().vjp([1.0, 2.0])[1](1.0)
