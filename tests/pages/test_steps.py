"""attention_steps: every intermediate result is the one that the finished product is made of."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import reference

EPS = float(np.finfo(np.float64).eps)
NAMES = [
    "scores", "scaled_scores", "masked_scores", "weights", "dropped_weights", "weighted_values", "output",
]  # fmt: skip

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "lower right": {"causal": "lower_right", "window": (2, None)},
    "bool mask": {"attn_mask": np.random.default_rng(0).random((2, 1, 3, 5)) < 0.5},
    "float mask": {"attn_mask": np.random.default_rng(0).normal(size=(3, 5))},
    "dead rows": {"attn_mask": np.arange(3)[:, None] > 0},
    "softcap": {"softcap": 0.5},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": [0.5, 0.0, -np.inf, 1.0]},
    "key lengths": {"key_lengths": [[3], [0]]},
    "dropout": {"dropout_p": 0.5, "rng": 5},
    "all": {
        "attn_mask": np.random.default_rng(1).normal(size=(1, 4, 3, 5)), "is_causal": True, "window": (1, 1),
        "softcap": 2.0, "alibi_slopes": 0.5, "sinks": 0.1, "key_lengths": 4, "dropout_p": 0.25, "rng": 2,
    },
}  # fmt: skip


@pytest.fixture
def qkv():
    """4 query heads and 2 key heads: (2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(2, 4, 3, 8)), rng.normal(size=(2, 2, 5, 8)), rng.normal(size=(2, 2, 5, 6))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_last_steps_are_what_attention_returns(options, qkv):
    out, weights = reference.scaled_dot_product_attention(
        *qkv, enable_gqa=True, return_weights=True, **options
    )
    steps = sa.attention_steps(*qkv, enable_gqa=True, **options)
    # Scores are sums of E = 8 products, below 32 in size, with a few roundings; exp makes their error
    # relative, in the weight and in the sum of S = 5 terms. Dropout at most doubles; values are below 4.
    atol = 2 * (2 * (8 + 8) * 32 + 5 + 9) * EPS
    np.testing.assert_allclose(steps.dropped_weights, weights, rtol=0, atol=atol)
    np.testing.assert_allclose(steps.output, out, rtol=0, atol=4 * atol)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_step_follows_from_the_one_before(options, qkv):
    query, key, value = qkv
    steps = sa.attention_steps(*qkv, enable_gqa=True, **options)
    key, value = np.repeat(key, 2, axis=1), np.repeat(value, 2, axis=1)
    close = {"rtol": 0, "atol": 64 * 32 * EPS}  # a few roundings of numbers below 32, sums of up to 8 terms
    np.testing.assert_allclose(steps.scores, np.einsum("bhie,bhje->bhij", query, key), **close)
    scaled = steps.scores * options.get("scale", 8**-0.5)
    if "softcap" in options:
        scaled = options["softcap"] * np.tanh(scaled / options["softcap"])
    np.testing.assert_allclose(steps.scaled_scores, scaled, **close)
    seen = steps.masked_scores != -np.inf
    if not {"attn_mask", "alibi_slopes"} & set(options):
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


def test_masked_nan_shows_in_the_scores_only(qkv):
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
    for dtype, scores, rest in [
        ("f2", "f4", "f2"),
        ("f4", "f4", "f4"),
        ("f8", "f8", "f8"),
        ("i8", "f8", "f8"),
    ]:
        steps = sa.attention_steps(*((4 * x).astype(dtype) for x in qkv), enable_gqa=True)
        for name, array in steps.to_dict().items():
            assert array.shape == shapes[name]
            assert array.dtype == (scores if name.endswith("scores") else rest), name
