"""The reference of the transformer: its gradients against finite differences, and its forms against each other."""

import numpy as np
import pytest
from drawn_transformers import drawn

from selfattn import reference
from selfattn.engine import transformer
from selfattn.engine.transformer import Layer, Projection, Transformer

STEP = 1e-6


def slope(value, array):
    """The derivative of value() along a drawn direction, by central differences; and the direction."""
    direction = np.random.default_rng(0).standard_normal(array.shape)
    before = array.copy()
    array += STEP * direction
    up = value()
    array[...] = before - STEP * direction
    down = value()
    array[...] = before
    return (up - down) / (2 * STEP), direction


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dropout", [False, True])
def test_gradients_by_finite_differences(seed, dropout):
    model, inputs, ends = drawn(seed, np.float64, dropout=dropout)
    y, pullback = reference.transformer_vjp(model, inputs, ends)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    dx, grads, d_mask = pullback(dy)

    def value():
        return float((reference.transformer(model, inputs, ends) * dy).sum())

    arrays = transformer.arrays(model)
    assert [grad.shape for grad in grads] == [array.shape for array in arrays]
    checked = dict(zip(map(str, range(len(arrays))), zip(arrays, grads, strict=True), strict=True))
    if model.table is None:
        checked["rows"] = (inputs, dx)
    if model.always is not None:
        checked["always"] = (model.always, dx.sum(axis=0))
    if d_mask is not None:
        # If heads share the mask too, its gradient is the sum over heads.
        checked["mask"] = (
            model.mask,
            d_mask[None] if model.mask.shape[1] > 1 else d_mask.sum(axis=0)[None, None],
        )
    # Central differences are off by STEP² times a third derivative and by eps/STEP times the value's size.
    size = np.abs(y * dy).sum() + 1
    for name, (array, gradient) in checked.items():
        expected, direction = slope(value, array)
        found = (gradient * direction).sum()
        assert abs(found - expected) <= 1e-8 * (size + np.abs(gradient * direction).sum()), name


def test_compute_dtype_is_the_truth_for_float32():
    model, inputs, ends = drawn(3, np.float32)
    y = reference.transformer(model, inputs, ends)
    truth = reference.transformer(model, inputs, ends, np.float64)
    assert (y.dtype, truth.dtype) == (np.float32, np.float64)
    # A few layers of sums of at most 12 terms.
    np.testing.assert_allclose(y, truth, rtol=0, atol=100 * np.finfo(np.float32).eps * np.abs(truth).max())


def test_one_layer_by_hand():
    """Attention over two tokens, with projections that are numbers: x + o·Σ w·v."""
    one = [Projection(np.array([[factor]])) for factor in (1.0, 2.0, 3.0, 5.0)]
    model = Transformer((Layer(1, *one),))
    y = reference.transformer(model, np.array([[1.0], [2.0]]), [0, 2])
    for i, x in enumerate((1.0, 2.0)):
        terms = np.exp([x * 2.0 * key for key in (1.0, 2.0)])
        np.testing.assert_allclose(y[i], x + 5 * 3 * (terms @ [1.0, 2.0]) / terms.sum(), rtol=1e-14)
