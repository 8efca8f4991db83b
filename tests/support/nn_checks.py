"""Helpers for tests of layers: finite differences through a layer, parameters from PyTorch."""

import math

import numpy as np

import selfattn as sa


def perturbed(layer):
    """Change every parameter, so that none is 0 or 1 as after initialisation."""
    rng = np.random.default_rng(1)
    for array in layer.parameters().values():
        array[...] += 0.1 * rng.standard_normal(array.shape)
    return layer


def check_gradients(layer, vjp, *inputs):
    """Compare all gradients with finite differences; ``vjp(*inputs)`` -> (y, dy -> (dx or a tuple of them, grads))."""
    names = list(layer.parameters())

    def f(*arrays):
        layer.load_state_dict(dict(zip(names, arrays[len(inputs) :], strict=True)))
        y, pullback = vjp(*arrays[: len(inputs)])

        def flat(dy):
            d_inputs, grads = pullback(dy)
            assert list(grads) == names
            return *(d_inputs if isinstance(d_inputs, tuple) else (d_inputs,)), *grads.values()

        return y, flat

    sa.check_vjp(f, *inputs, *layer.parameters().values())


def torch_state(module):
    """Copy the parameters of a PyTorch module into arrays."""
    return {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}


def assert_close(got, expected, dtype, n, what=""):
    """Check agreement to 1e-12 of the largest element in float64, in float32 to a few eps times sqrt(n).

    ``n`` is the number of terms in the longest sum.
    """
    assert got.dtype == dtype and got.shape == expected.shape, what
    tolerance = 1e-12 if dtype == "float64" else 8 * math.sqrt(n) * float(np.finfo(np.float32).eps)
    size = max(1.0, float(np.abs(expected).max(initial=0)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * size, err_msg=what)
