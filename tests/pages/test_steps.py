"""attention_steps, layer_steps and model_steps: each step follows from the one before, the last is the result."""

import numpy as np
import pytest
from bad_calls import BAD
from refusals import refusals

import selfattn as sa
from selfattn import nn, reference
from selfattn.steps.layers import layer_steps, model_steps
from selfattn.steps.records import Steps

EPS = float(np.finfo(np.float64).eps)
CLOSE = {"rtol": 0, "atol": 4096 * EPS}  # sums of at most 16 products of numbers below 16, a few in a row
NAMES = [
    "scores",
    "scaled_scores",
    "masked_scores",
    "weights",
    "dropped_weights",
    "weighted_values",
    "output",
]

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "lower right": {"causal": "lower_right", "window": (2, None)},
    "bool mask": {"attn_mask": np.random.default_rng(0).random((2, 1, 3, 5)) < 0.5},
    "float mask": {"attn_mask": np.random.default_rng(0).normal(size=(3, 5))},
    "bias": {"bias": np.linspace(-1, 1, 5), "attn_mask": np.arange(5) != 2},
    "offset bias": {"offset_bias": np.linspace(-1, 1, 28).reshape(4, 7), "causal": "lower_right"},
    "dead rows": {"attn_mask": np.arange(3)[:, None] > 0},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [0.5, 0.0, -np.inf, 1.0]},
    "block mask": {"block_mask": sa.BlockMask.from_documents([0, 0, 1], [0, 1, 1, 0, 1])},
    "key lengths": {"key_lengths": [[3], [0]]},
    "dropout": {"dropout_p": 0.5, "rng": 5},
    "all": {
        "attn_mask": np.random.default_rng(1).normal(size=(1, 4, 3, 5)),
        "is_causal": True,
        "window": (1, 1),
        "softcap": 2.0,
        "alibi_slopes": 0.5,
        "sinks": 0.1,
        "key_lengths": 4,
        "dropout_p": 0.25,
        "rng": 2,
    },
}


@pytest.fixture
def qkv():
    """4 query heads and 2 key heads: (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(2, 4, 3, 8)), rng.normal(size=(2, 2, 5, 8)), rng.normal(size=(2, 2, 5, 6))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_step_follows_from_the_one_before_and_the_last_is_what_attention_returns(options, qkv):
    query, key, value = qkv
    steps = sa.attention_steps(*qkv, enable_gqa=True, **options)
    out = reference.scaled_dot_product_attention(*qkv, enable_gqa=True, **options)
    # Scores are sums of E = 8 products below 32, with a few roundings; dropout at most doubles; values are below 4.
    np.testing.assert_allclose(steps.output, out, rtol=0, atol=8 * 1038 * EPS)
    key, value = np.repeat(key, 2, axis=1), np.repeat(value, 2, axis=1)
    close = {"rtol": 0, "atol": 64 * 32 * EPS}  # a few roundings of numbers below 32, sums of up to 8 terms
    np.testing.assert_allclose(steps.scores, np.einsum("bhie,bhje->bhij", query, key), **close)
    scaled = steps.scores * options.get("scale", 8**-0.5)
    if "softcap" in options:
        scaled = options["softcap"] * np.tanh(scaled / options["softcap"])
    np.testing.assert_allclose(steps.scaled_scores, scaled, **close)
    seen = steps.masked_scores != -np.inf
    if not {"attn_mask", "alibi_slopes", "bias", "offset_bias"} & set(options):
        np.testing.assert_array_equal(steps.masked_scores[seen], steps.scaled_scores[seen])
    sink = np.broadcast_to(options.get("sinks", -np.inf), (2, 4))[..., None, None]
    exps = np.exp(steps.masked_scores)
    total = exps.sum(-1, keepdims=True) + np.exp(sink)
    np.testing.assert_allclose(steps.weights, exps / np.where(total == 0, 1, total), **close)
    np.testing.assert_array_equal(steps.weights == 0, ~seen)
    if "dropout_p" in options:
        keep = reference.dropout_keep_mask(options["rng"], options["dropout_p"], (2, 4), 3, 5)
        expected = np.where(keep, steps.weights / (1 - options["dropout_p"]), 0)
        np.testing.assert_array_equal(steps.dropped_weights, expected)
    else:
        np.testing.assert_array_equal(steps.dropped_weights, steps.weights)
    np.testing.assert_array_equal(
        steps.weighted_values, steps.dropped_weights[..., None] * value[..., None, :, :]
    )
    np.testing.assert_allclose(steps.output, steps.weighted_values.sum(axis=-2), **close)


def test_one_array_is_query_key_and_value(qkv):
    x = qkv[0]
    np.testing.assert_array_equal(
        sa.attention_steps(x, scale=1.0).output, sa.attention_steps(x, x, x, scale=1.0).output
    )
    for given in ({"key": x}, {"value": x}):
        with pytest.raises(TypeError, match="is missing; leave out key and value, or give both"):
            sa.attention_steps(x, **given)


NO_OPTIONS_HERE = {"out", "num_threads", "return_lse", "return_weights"}
LENIENT = ("window {1: 2, 3: 4}", "window {1, 2}")  # two bounds, in an order


def is_refused(bad):
    is_small = all(np.size(x) < 1000 for x in bad.change.values() if isinstance(x, np.ndarray))
    return is_small and bad.name not in LENIENT and not set(bad.change) & NO_OPTIONS_HERE and not bad.without


@pytest.mark.parametrize("bad", [*filter(is_refused, BAD)], ids=lambda bad: bad.name)
def test_what_the_kernels_refuse_is_refused(bad):
    """The message names the argument, or is the kernels', or Python's for values that are not numbers."""
    no_number = "not supported between|interpreted as an integer"
    message = "|".join([bad.match, *filter(None, bad.change), no_number])
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        sa.attention_steps(**bad.arguments())


def test_a_masked_nan_is_in_the_scores_alone(qkv):
    query, key, value = (x.copy() for x in qkv)
    key[..., 4, :], value[..., 4, :] = np.nan, np.inf
    steps = sa.attention_steps(query, key, value, enable_gqa=True, key_lengths=4)
    assert np.isnan(steps.scores[..., 4]).all()
    assert np.isnan(steps.scaled_scores[..., 4]).all()
    assert np.all(steps.masked_scores[..., 4] == -np.inf)
    for name in ("weights", "dropped_weights", "weighted_values", "output"):
        assert np.isfinite(getattr(steps, name)).all(), name


def test_shapes_and_dtypes(qkv):
    pairs = (2, 4, 3, 5)
    shapes = dict.fromkeys(NAMES, pairs) | {"weighted_values": (*pairs, 6), "output": (2, 4, 3, 6)}
    for dtypes in ("f2 f4 f2", "f4 f4 f4", "f8 f8 f8", "i8 f8 f8"):
        dtype, scores, rest = dtypes.split()
        steps = sa.attention_steps(*((4 * x).astype(dtype) for x in qkv), enable_gqa=True)
        for name, array in steps.to_dict().items():
            assert array.shape == shapes[name]
            assert array.dtype == (scores if name.endswith("scores") else rest), name


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


def test_keys_and_values_of_other_inputs(layer):
    x, w, _ = layer
    other, third = np.ones((3, 8)), np.full((3, 8), 2.0)
    names = ("W_query", "W_key", "W_value")
    steps = layer_steps(x, *(w[n] for n in names), key_inputs=other, value_inputs=third)
    assert steps.scores.shape == (5, 3)
    np.testing.assert_array_equal(steps.key, other @ w["W_key"])
    np.testing.assert_array_equal(steps.value, third @ w["W_value"])
    steps = layer_steps(x, *(w[n] for n in names), key_inputs=other)
    np.testing.assert_array_equal(steps.value, other @ w["W_value"])


def test_given_weights_change_the_steps_after_them(layer):
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
    names = ["inputs", "query", "key", "value", *NAMES]
    names += ["concatenated", "projected_output", "residual", "norm"]
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


def test_steps_of_every_kind_have_names_in_order_and_a_result(layer):
    x, w, _ = layer
    stack = nn.GPT(9, d_model=16, num_layers=2, num_heads=4, max_seq_len=8, rng=0).steps([1, 2, 3])
    for steps in (sa.attention_steps(x), layer_steps(x, **w), stack, stack.layers[0]):
        assert isinstance(steps, Steps)
        assert list(steps.to_dict().values())[-1] is steps.result
        least = steps.to_dict(weighted_values=False)
        assert [name for name in steps.to_dict() if not name.endswith("weighted_values")] == list(least)
    inner = [f"layers.1.{name}" for name in stack.layers[1].to_dict()]
    assert [name for name in stack.to_dict() if name.startswith("layers.1")] == inner
    first, *_, last = stack.layers[0].to_dict()
    assert (first, last) == ("inputs", "feed_forward_residual")
    np.testing.assert_array_equal(stack.layers[0].result, stack.layers[1].inputs)


test_errors_name_shapes_that_do_not_fit = refusals(
    ({"W_key": np.ones((7, 8))}, r"inputs \(5, 8\) and W_key \(7, 8\)"),
    ({"b_value": np.ones(7)}, r"b_value has shape \(7,\), not \(8,\)"),
    ({"num_heads": 3}, "num_heads=3 does not divide .* 8"),
    ({"num_heads": 0}, "num_heads=0"),
    ({"W_out": np.ones((7, 8))}, r"W_out \(7, 8\)"),
    ({"W_out": np.ones((8, 3)), "b_out": None, "residual": True}, r"\(5, 3\).*\(5, 8\)"),
    ({"norm": (np.ones(3), None, 1e-5)}, r"weight has shape \(3,\), not normalized_shape \(8,\)"),
    ({"norm": (None, np.ones(1), 1e-5)}, r"bias has shape \(1,\), not normalized_shape \(8,\)"),
    ({"norm": (np.ones(8, bool), None, 1e-5)}, TypeError, "norm weight has dtype bool"),
    ({"W_key": np.ones((8, 8), bool)}, TypeError, "W_key has dtype bool"),
    ({"v": np.ones(8), "num_heads": 2}, "one head, not num_heads=2"),
    ({"v": np.ones(7), "num_heads": 1}, r"v has shape \(7,\), not \(d_k,\) of the queries \(5, 8\)"),
    given="layer",
    call=lambda layer, changes: layer_steps(layer[0], **(layer[1] | changes)),
)
