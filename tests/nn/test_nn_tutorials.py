"""Every tensor that the tutorials print, from the layers of selfattn.nn alone."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn
from selfattn.steps import tutorials

F64 = {"dtype": np.float64}
SENTENCES = ("river", "finance")


def assert_printed(got, printed, decimals):
    """Half a unit in the last printed decimal, and the roundings of a few sums of at most ten terms."""
    slack = 16 * float(np.finfo(got.dtype).eps) * (1 + np.abs(got))
    np.testing.assert_array_less(np.abs(got - np.array(printed)), 0.5 * 10.0**-decimals + slack)
    assert got.shape == np.shape(printed)


def assert_digits(got, printed, digits):
    """Half a unit in the last of so many significant digits; zero is zero."""
    wanted = np.array(printed, np.float64)
    size = np.where(wanted == 0, 1, np.abs(wanted))
    unit = np.where(wanted == 0, 0, 10.0 ** (np.floor(np.log10(size)) - digits + 1))
    assert got.shape == wanted.shape
    assert (np.abs(got - wanted) <= 0.5 * unit + 16 * np.finfo(np.float64).eps * size).all()


# ------------------------------------------------------------------------------------------ 1, first principles


@pytest.fixture
def first():
    return tutorials.load("first_principles")


def embedded(data, sentence):
    words = list(data["vocab"])
    layer = nn.Embedding(len(words), 4, **F64)
    layer.weight = list(data["vocab"].values())
    return layer([words.index(token) for token in data["tokens"][sentence]])


@pytest.mark.parametrize("sentence", SENTENCES)
def test_embedding_and_linear_layer(first, sentence):
    x = embedded(first, sentence)
    assert_printed(x, first["embed"]["printed"][sentence], 3)
    linear = nn.Linear(4, 3, bias=False, **F64)
    linear.weight = np.transpose(first["linear_layer"]["W"])
    assert_printed(linear(x), first["linear_layer"]["printed"][sentence], 3)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_attention_on_raw_embeddings(first, sentence):
    x = embedded(first, sentence)
    layer = nn.SelfAttention(4, 4, score="dot", **F64)
    layer.load_state_dict({f"W_{name}": np.eye(4) for name in ("query", "key", "value")})
    assert_printed(layer.steps(x).scores, first["raw_dot_product_scores"]["printed"][sentence], 3)
    assert_printed(layer(x), first["attention_on_raw_embeddings"]["printed"][sentence], 3)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_projected_attention_has_values_of_another_width(first, sentence):
    data = first["projected_attention"]
    layer = nn.SelfAttention(4, 2, d_v=3, **F64)
    layer.load_state_dict({name: data[name] for name in ("W_query", "W_key", "W_value")})
    x = embedded(first, sentence)
    for output in (layer(x), layer.vjp(x)[0], layer.steps(x).result):
        assert_printed(output, data["printed"][sentence], 3)


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_class_from_its_seed(first, sentence):
    layer = nn.SelfAttention(d_in=4, d_out=3, rng=sa.torch_rng(0))
    x = embedded(first, sentence).astype(np.float32)
    assert_printed(layer.forward(x), first["self_attention_class"]["printed"][sentence], 3)


# ------------------------------------------------------------------------------------------------- 3, basics


def test_basics_notebook():
    data = tutorials.load("basics_notebook")
    x, printed = np.array(data["embedded_tokens"]), data["printed"]
    layer = nn.SelfAttention(2, 2, **F64)
    layer.load_state_dict({"W_query": data["WQ"], "W_key": data["WK"], "W_value": data["WV"]})
    steps = layer.steps(x)
    stages = {
        "Q": steps.query, "K": steps.key, "V": steps.value, "attn_logits": steps.scores,
        "scaled_attention_logits": steps.scaled_scores, "attention_weights": steps.weights,
        "row_sums": steps.weights.sum(-1), "output": layer(x),
    }  # fmt: skip
    assert set(stages) == set(printed)
    for name, computed in stages.items():
        assert_printed(computed, printed[name], 4)
    values, weights = nn.ScaledDotProductAttention()(steps.query, steps.key, steps.value)
    assert_printed(weights, printed["attention_weights"], 4)
    assert_printed(values, printed["output"], 4)


# --------------------------------------------------------------------------------------------- 4, illustrated


def test_illustrated():
    data = tutorials.load("illustrated")
    printed, digits = data["printed"], data["printed_significant_digits"]
    layer = nn.SelfAttention(4, 3, scale=False, **F64)
    layer.load_state_dict({f"W_{name}": data[f"w_{name}"] for name in ("query", "key", "value")})
    steps = layer.steps(data["x"])
    rounded = steps.with_weights(printed["attn_scores_softmax_rounded"])
    stages = {
        "keys": steps.key, "querys": steps.query, "values": steps.value, "attn_scores": steps.scores,
        "attn_scores_softmax": steps.weights,
        "attn_scores_softmax_rounded": rounded.dropped_weights,
        "weighted_values_rounded": rounded.weighted_values.swapaxes(0, 1),  # [key][query] there
        "output_1_rounded": rounded.output[0],
    }  # fmt: skip
    assert set(stages) == set(printed)
    for name, computed in stages.items():
        assert_digits(computed, printed[name], digits)
    assert_digits(rounded.output[1:], data["computed_not_printed"]["outputs_2_and_3_rounded"], digits)
    np.testing.assert_allclose(layer(data["x"]), steps.result, rtol=1e-14)


# ----------------------------------------------------------------------------------- 2 and 5 print no tensors


def test_sentence_embedding_block_has_the_keys_of_the_tutorial():
    block = nn.SelfAttentionBlock(4)
    names = [f"{name}.{part}" for name in ("query", "key", "value", "ln") for part in ("weight", "bias")]
    assert list(block.state_dict()) == names


def test_the_module_attends_to_every_word_but_the_masked():
    """ "Hello I love you": the mask of one closed word, in its shape (batch, 1, 1, len)."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 2, 4, 3))
    values, weights = nn.ScaledDotProductAttention().forward(
        query, key, value, mask=np.array([1, 1, 1, 0]).reshape(1, 1, 1, 4), dropout=nn.Dropout(0.0)
    )
    np.testing.assert_array_equal(weights[..., 3], 0)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-15)
    np.testing.assert_allclose(values, weights @ value, rtol=1e-13)
