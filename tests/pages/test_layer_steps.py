"""layer_steps and model_steps: the definitions in plain NumPy, and errors."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import reference
from selfattn.steps.layers import layer_steps, model_steps

EPS = float(np.finfo(np.float64).eps)
CLOSE = {"rtol": 0, "atol": 4096 * EPS}  # sums of at most 16 products of numbers below 16, a few in a row


@pytest.fixture
def layer():
    """Inputs (5, 8), three projections (8, 8) with biases, an output projection, a LayerNorm."""
    rng = np.random.default_rng(3)
    shapes = {"W_query": (8, 8), "W_key": (8, 8), "W_value": (8, 8), "W_out": (8, 8)}
    shapes |= {"b_query": (8,), "b_key": (8,), "b_value": (8,), "b_out": (8,)}
    arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return rng.normal(size=(5, 8)), arrays, (rng.normal(size=8), rng.normal(size=8), 1e-5)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_every_step_of_a_layer_follows_from_the_one_before(layer, heads):
    x, w, norm = layer
    steps = layer_steps(x, **w, num_heads=heads, residual=True, norm=norm, is_causal=True)
    outputs = []
    for h, part in enumerate(np.split(np.arange(8), heads)):
        at = h if heads > 1 else ...
        q, k, v = (x @ w[f"W_{n}"][:, part] + w[f"b_{n}"][part] for n in ("query", "key", "value"))
        for computed, expected in ((steps.query, q), (steps.key, k), (steps.value, v)):
            np.testing.assert_allclose(computed[at], expected, **CLOSE)
        out, weights = reference.scaled_dot_product_attention(q, k, v, is_causal=True, return_weights=True)
        np.testing.assert_allclose(steps.weights[at], weights, **CLOSE)
        np.testing.assert_allclose(steps.output[at], out, **CLOSE)
        outputs.append(out)
    merged = np.concatenate(outputs, axis=-1)
    assert (steps.concatenated is None) == (heads == 1)
    if heads > 1:
        np.testing.assert_allclose(steps.concatenated, merged, **CLOSE)
    np.testing.assert_allclose(steps.projected_output, merged @ w["W_out"] + w["b_out"], **CLOSE)
    np.testing.assert_allclose(steps.residual, steps.projected_output + x, **CLOSE)
    r = steps.residual
    expected = (r - r.mean(-1, keepdims=True)) / np.sqrt(r.var(-1, keepdims=True) + 1e-5) * norm[0] + norm[1]
    np.testing.assert_allclose(steps.norm, expected, **CLOSE)
    assert steps.result is steps.norm


def test_keys_and_values_may_come_from_elsewhere(layer):
    x, w, _ = layer
    other, third = np.ones((3, 8)), np.full((3, 8), 2.0)
    names = ("W_query", "W_key", "W_value")
    steps = layer_steps(x, *(w[n] for n in names), key_inputs=other, value_inputs=third)
    assert steps.scores.shape == (5, 3)
    np.testing.assert_array_equal(steps.key, other @ w["W_key"])
    np.testing.assert_array_equal(steps.value, third @ w["W_value"])
    steps = layer_steps(x, *(w[n] for n in names), key_inputs=other)
    np.testing.assert_array_equal(steps.value, other @ w["W_value"])


def test_what_follows_other_weights_is_computed_from_them(layer):
    x, w, norm = layer
    steps = layer_steps(x, **w, num_heads=2, residual=True, norm=norm)
    best = steps.weights == steps.weights.max(axis=-1, keepdims=True)
    changed = steps.with_weights(best)
    picked = np.take_along_axis(steps.value, steps.weights.argmax(-1)[..., None], axis=-2)
    np.testing.assert_allclose(changed.output, picked, **CLOSE)
    merged = np.concatenate(list(picked), axis=-1) @ w["W_out"] + w["b_out"] + x
    np.testing.assert_allclose(changed.residual, merged, **CLOSE)
    with pytest.raises(ValueError, match=r"\(4,\).*\(2, 5, 5\)"):
        steps.with_weights(np.ones(4))
    with pytest.raises(TypeError, match="complex"):
        steps.with_weights(np.ones((5, 5), complex))


def test_names_repr_dtypes_and_no_writing(layer):
    x, w, norm = layer
    w32 = {name: array.astype(np.float32) for name, array in w.items()}
    norm32 = (norm[0].astype(np.float32), None, 1e-5)
    steps = layer_steps(x.astype(np.float32), **w32, num_heads=2, residual=True, norm=norm32)
    names = [
        "inputs", "query", "key", "value", "scores", "scaled_scores", "masked_scores", "weights",
        "dropped_weights", "weighted_values", "output", "concatenated", "projected_output", "residual", "norm",
    ]  # fmt: skip
    assert list(steps.to_dict()) == names
    lines = repr(steps).splitlines()
    assert lines[0] == "LayerSteps: 5 queries, 5 keys, 2 heads"
    assert [line.split()[0] for line in lines[1:]] == names
    for name, array in steps.to_dict().items():
        assert array.dtype == np.float32, name
        assert not array.flags.writeable, name
    assert not steps.parameters.W_query.flags.writeable
    assert all(array.flags.writeable for array in (x, *w32.values()))
    short = layer_steps(x, w["W_query"], w["W_key"], w["W_value"])
    assert list(short.to_dict()) == names[:11]


def test_a_model_is_embeddings_positions_blocks_and_a_mean(layer):
    x, w, norm = layer
    positions = np.linspace(-1, 1, 40).reshape(5, 8)
    arguments = {**w, "residual": True, "norm": norm}
    first = layer_steps(x + positions, **arguments)
    second = layer_steps(first.result, **arguments, num_heads=2)
    steps = model_steps(x, positions, [first, second])
    np.testing.assert_allclose(steps.output, second.norm.mean(axis=0), **CLOSE)
    names = list(steps.to_dict())
    assert names[:4] == ["embeddings", "positions", "inputs", "blocks.0.inputs"]
    assert names[-2:] == ["blocks.1.norm", "output"]
    assert "blocks.1.weighted_values" in names
    assert not any("weighted_values" in name for name in steps.to_dict(weighted_values=False))
    assert repr(steps).startswith("ModelSteps: 5 tokens, width 8, 2 blocks\nblocks[0] LayerSteps")
    with pytest.raises(ValueError, match=r"blocks\[1\]"):
        model_steps(x, positions, [first, first])
    with pytest.raises(ValueError, match=r"\(5, 8\).*\(4, 8\)"):
        model_steps(x, positions[:4], [first])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"W_key": np.ones((7, 8))}, r"inputs \(5, 8\) and W_key \(7, 8\)"),
        ({"b_value": np.ones(7)}, r"b_value has shape \(7,\), not \(8,\)"),
        ({"num_heads": 3}, "num_heads=3 does not divide .* 8"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"W_out": np.ones((7, 8))}, r"W_out \(7, 8\)"),
        ({"W_out": np.ones((8, 3)), "b_out": None, "residual": True}, r"\(5, 3\).*\(5, 8\)"),
        ({"norm": (np.ones(3), None, 1e-5)}, r"\(3,\)"),
        ({"v": np.ones(8), "num_heads": 2}, "one head, not of num_heads=2"),
        ({"v": np.ones(7), "num_heads": 1}, r"v has shape \(7,\), not \(d_k,\) of the queries \(5, 8\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(layer, changes, message):
    x, w, _ = layer
    with pytest.raises(ValueError, match=message):
        layer_steps(x, **(w | changes))


def test_options_are_those_of_attention(layer):
    x, w, _ = layer
    names = ("W_query", "W_key", "W_value")
    q, k, v = (x @ w[name] for name in names)
    mask = np.tri(5, dtype=bool)
    steps = layer_steps(x, *(w[name] for name in names), attn_mask=mask, scale=0.1, dropout_p=0.5, rng=4)
    plain = sa.attention_steps(q, k, v, mask, 0.5, scale=0.1, rng=4)
    np.testing.assert_array_equal(steps.dropped_weights, plain.dropped_weights)
    with pytest.raises(TypeError, match="bogus"):
        layer_steps(x, *(w[name] for name in names), bogus=1)
