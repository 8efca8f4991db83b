"""The activations: their formulas, PyTorch's special numbers, dtypes."""

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
def test_they_are_those_of_pytorch(kind):
    torch = pytest.importorskip("torch")
    layer = KINDS[kind][0]()
    options = {"approximate": "tanh"} if kind.endswith("tanh") else {}
    theirs = getattr(torch.nn, kind.split()[0])(**options)
    special = [0.0, -0.0, 1e-30, 88.0, -88.0, 200.0, -200.0, np.nan]
    if not isinstance(layer, nn.GELU):  # PyTorch's GELU differs within one array
        special += [np.inf, -np.inf]
    x = np.concatenate([X.reshape(-1), special]).astype(np.float32)
    tensor = torch.tensor(x, requires_grad=True)
    expected = theirs(tensor)
    y, pullback = layer.vjp(x)
    dy = np.cos(np.arange(len(x), dtype=np.float32))
    expected.backward(torch.tensor(dy))
    dx, grads = pullback(dy)
    assert grads == {} and y.dtype == dx.dtype == np.float32
    eps = float(np.finfo(np.float32).eps)  # the sum of a few numbers of the size of x, up to 10
    np.testing.assert_allclose(y, expected.detach(), rtol=8 * eps, atol=10 * eps)
    np.testing.assert_allclose(dx, tensor.grad, rtol=8 * eps, atol=20 * eps)


def test_errors_say_what_was_given():
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", not \'erf\''):
        nn.GELU("erf")
    with pytest.raises(TypeError, match="x must hold floats or integers, not complex"):
        nn.ReLU()(1j)
    with pytest.raises(ValueError, match=r"dy must have the shape of the result, \(2,\)"):
        nn.SiLU().vjp([1.0, 2.0])[1](1.0)
