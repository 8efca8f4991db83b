"""The tensors that the tutorials print, recomputed with the functional API to the printed number of decimals.

What a tutorial gets by a plain matrix product, such as projections, is computed with NumPy here. Tutorials 2
and 5 print no tensors.
"""

import json
from importlib import resources

import numpy as np
import pytest

import selfattn as sa
from selfattn import reference

functions = pytest.mark.parametrize("function", [reference, sa], ids=["reference", "selfattn"])
sentences = pytest.mark.parametrize("sentence", ["river", "finance"])


def load(name):
    return json.loads((resources.files("selfattn.steps") / "data" / f"{name}.json").read_text("utf-8"))


def assert_printed(got, printed, *, decimals=None, digits=None):
    """Check that `got` prints as `printed`: within half a unit of the last decimal or significant digit."""
    got, printed = np.asarray(got, np.float64), np.asarray(printed, np.float64)
    assert got.shape == printed.shape
    if digits is not None:
        size = np.where(printed == 0, 1.0, np.abs(printed))
        unit = 10.0 ** (np.floor(np.log10(size)) - (digits - 1))
    else:
        unit = 10.0**-decimals
    # the last term forgives a tie, which the float64 nearest to a decimal number cannot meet exactly
    assert np.all(np.abs(got - printed) <= 0.5 * unit + 4 * np.spacing(np.abs(printed) + 1.0))


# ----------------------------------------------------------------------------------- 1. from first principles

FIRST = load("first_principles")
DECIMALS = FIRST["printed_decimals"]


def embed(sentence):
    return np.array([FIRST["vocab"][token] for token in FIRST["tokens"][sentence]])


@sentences
def test_embeddings_and_linear_layer(sentence):
    assert_printed(embed(sentence), FIRST["embed"]["printed"][sentence], decimals=DECIMALS)
    layer = FIRST["linear_layer"]
    assert_printed(embed(sentence) @ np.array(layer["W"]), layer["printed"][sentence], decimals=DECIMALS)


@sentences
def test_raw_scores(sentence):
    x = embed(sentence)
    assert_printed(
        sa.attention_steps(x, x, x, scale=1.0).scores,
        FIRST["raw_dot_product_scores"]["printed"][sentence],
        decimals=DECIMALS,
    )


@functions
@sentences
def test_attention_on_raw_embeddings(function, sentence):
    x = embed(sentence)
    assert_printed(
        function.scaled_dot_product_attention(x, x, x, scale=1.0),
        FIRST["attention_on_raw_embeddings"]["printed"][sentence],
        decimals=DECIMALS,
    )


def projections(sentence, section):
    return [embed(sentence) @ np.array(section[name]) for name in ("W_query", "W_key", "W_value")]


@functions
@sentences
def test_projected_attention(function, sentence):
    section = FIRST["projected_attention"]
    out = function.scaled_dot_product_attention(
        *projections(sentence, section)
    )  # the scale is 1/sqrt(d_k) by itself
    assert_printed(out, section["printed"][sentence], decimals=DECIMALS)


@functions
@sentences
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_self_attention_class(function, sentence, dtype):
    """The weights are those of PyTorch's generator after manual_seed(0): MT19937, 24 bits of each word."""
    section = FIRST["self_attention_class"]
    words = np.random.RandomState(0).randint(0, 2**32, size=(3, 4, 3), dtype=np.uint32)
    weights = ((words & 0xFFFFFF) * 2.0**-24).astype(np.float32)
    x = embed(sentence).astype(dtype)
    query, key, value = (x @ w.astype(dtype) for w in weights)
    out = function.scaled_dot_product_attention(query, key, value)
    assert out.dtype == dtype
    assert_printed(out, section["printed"][sentence], decimals=DECIMALS)


# -------------------------------------------------------------------------------------------------- 3. basics

BASICS = load("basics_notebook")


def basics_projections():
    x = np.array(BASICS["embedded_tokens"])
    return [x @ np.array(BASICS[name]) for name in ("WQ", "WK", "WV")]


def test_basics_stages():
    query, key, value = basics_projections()
    steps = sa.attention_steps(query, key, value)
    stages = {
        "Q": query,
        "K": key,
        "V": value,
        "attn_logits": steps.scores,
        "scaled_attention_logits": steps.scaled_scores,
        "attention_weights": steps.weights,
        "row_sums": steps.weights.sum(axis=-1),
        "output": steps.output,
    }
    assert stages.keys() == BASICS["printed"].keys()
    for name, array in stages.items():
        assert_printed(array, BASICS["printed"][name], decimals=BASICS["printed_decimals"])


@functions
def test_basics_output_by_both_spellings(function):
    out, weights = function.scaled_dot_product_attention(*basics_projections(), return_weights=True)
    decimals = BASICS["printed_decimals"]
    assert_printed(weights, BASICS["printed"]["attention_weights"], decimals=decimals)
    assert_printed(out, BASICS["printed"]["output"], decimals=decimals)
    assert_printed(weights @ basics_projections()[2], BASICS["printed"]["output"], decimals=decimals)


# --------------------------------------------------------------------------------------------- 4. illustrated

ILLUSTRATED = load("illustrated")
DIGITS = ILLUSTRATED["printed_significant_digits"]


def illustrated_projections():
    x = np.array(ILLUSTRATED["x"])  # integers, and so are the projections
    return [x @ np.array(ILLUSTRATED[name]) for name in ("w_query", "w_key", "w_value")]


def test_illustrated_projections_and_scores():
    printed = ILLUSTRATED["printed"]
    query, key, value = illustrated_projections()
    np.testing.assert_array_equal(query, printed["querys"])
    np.testing.assert_array_equal(key, printed["keys"])
    np.testing.assert_array_equal(value, printed["values"])
    steps = sa.attention_steps(query, key, value, scale=1.0)
    assert steps.scores.dtype == np.float64
    np.testing.assert_array_equal(steps.scores, printed["attn_scores"])
    assert_printed(steps.weights, printed["attn_scores_softmax"], digits=DIGITS)


@functions
def test_illustrated_softmax(function):
    printed = ILLUSTRATED["printed"]
    scores = np.array(printed["attn_scores"])
    assert_printed(function.softmax(scores), printed["attn_scores_softmax"], digits=DIGITS)
    query, key, value = illustrated_projections()
    weights = function.scaled_dot_product_attention(query, key, value, scale=1.0, return_weights=True)[1]
    assert_printed(weights, printed["attn_scores_softmax"], digits=DIGITS)


def given_weights():
    """Arguments that make attention use the author's rounded weights.

    All products are 0 and the mask is the logarithm of the weights, so the softmax gives them back.
    """
    weights = np.array(ILLUSTRATED["printed"]["attn_scores_softmax_rounded"])
    with np.errstate(divide="ignore"):
        mask = np.log(weights)
    nothing = np.zeros((3, 1))
    return nothing, nothing, illustrated_projections()[2], mask


@functions
def test_illustrated_outputs_of_the_rounded_weights(function):
    out = function.scaled_dot_product_attention(*given_weights())
    assert_printed(out[0], ILLUSTRATED["printed"]["output_1_rounded"], digits=DIGITS)
    assert_printed(out[1:], ILLUSTRATED["computed_not_printed"]["outputs_2_and_3_rounded"], digits=DIGITS)


def test_illustrated_weighted_values_of_the_rounded_weights():
    steps = sa.attention_steps(*given_weights())
    by_key = steps.weighted_values.swapaxes(0, 1)  # the tutorial has the key first
    assert_printed(by_key, ILLUSTRATED["printed"]["weighted_values_rounded"], digits=DIGITS)
    assert_printed(steps.weighted_values.sum(axis=1), steps.output, decimals=14)
