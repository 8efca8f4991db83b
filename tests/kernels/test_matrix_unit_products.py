"""Products with weights on the matrix unit, where the CPU has one: the embedding model from d = 96 on.

Operands are split into three bfloat16 there (docs/decisions/0003). The tests that go through all instruction sets run here as
well; these ones look at the seams: widths around a panel, numbers that three parts cannot hold, and who shares a tile with them.
"""

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn

EPS = 2.0**-24

pytestmark = pytest.mark.usefixtures("on_the_matrix_unit", "threads_restored")


def model_of(width, dtype=np.float32, layers=2):
    return nn.EmbeddingModel(
        str.split, 50, width, max_seq_len=90, num_layers=layers, num_heads=2, dtype=dtype, rng=3
    )


def sentences_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 49, length).tolist() for length in lengths]


def in_double(model):
    """Return the same model in float64."""
    wide = model_of(model.embedding_dim, np.float64, model.num_layers)
    for name, array in wide.parameters().items():
        array[...] = model.parameters()[name]
    return wide


@pytest.mark.parametrize("width", [94, 96, 98, 126, 128, 130, 160])
def test_embeddings_and_gradients_are_those_of_float64(width):
    """Sums of `width` and of 150 terms, and LayerNorms between them: relative to the largest element."""
    model, sentences = model_of(width), sentences_of([1, 2, 33, 17, 90, 7])
    wide = in_double(model)
    wide.positions.table[...] = model.positions.table
    y, pullback = model.vjp(sentences)
    expected, wide_pullback = wide.vjp(sentences)
    np.testing.assert_allclose(y, expected, rtol=0, atol=128 * EPS)
    dy = np.random.default_rng(1).standard_normal(y.shape)
    exact = wide_pullback(dy)
    for name, gradient in pullback(dy.astype(np.float32)).items():
        # the gradient of key.bias, zero except for rounding, is compared with its neighbours' size
        size = max(np.abs(exact[name]).max(), np.abs(exact[name.replace("key", "query")]).max())
        np.testing.assert_allclose(gradient, exact[name], rtol=0, atol=512 * EPS * size, err_msg=name)


@pytest.mark.parametrize("lengths", [[1], [16, 17], [90] * 7, [3] * 100])
def test_bits_do_not_depend_on_company_or_threads(lengths):
    model, sentences = model_of(100), sentences_of(lengths)
    together = model(sentences)
    alone = np.stack([model(sentence) for sentence in sentences])
    np.testing.assert_array_equal(alone, together)
    for threads in (1, 2, 3):
        sa.set_num_threads(threads)
        np.testing.assert_array_equal(model(sentences), together)
        np.testing.assert_array_equal(model.vjp(sentences)[0], together)


@pytest.mark.parametrize("odd", [np.nan, np.inf, 3.4e38])
def test_a_number_that_does_not_fit_harms_its_own_sentence_only(odd):
    """All sentences share tiles of rows; multiply-adds compute the row with the odd number."""
    model, sentences = model_of(128), sentences_of([5, 6, 7, 8])
    before = model(sentences)
    model.embedding_layer.weight[49, 70] = odd
    sentences[2] = [*sentences[2], 49]
    with np.errstate(all="ignore"):
        after = model(sentences)
    np.testing.assert_array_equal(np.delete(after, 2, 0), np.delete(before, 2, 0))
    np.testing.assert_array_equal(after[2], model(sentences[2]))
    assert not np.isfinite(after[2]).any()


def test_a_weight_that_does_not_fit_shows():
    model, sentences = model_of(128, layers=1), sentences_of([5, 40])
    model.attention_layers[0].value.weight[3, 70] = np.nan
    with np.errstate(all="ignore"):
        assert np.isnan(model(sentences)).all()
    y, pullback = model.vjp(sentences)
    assert np.isnan(pullback(np.ones_like(y))["embedding_layer.weight"][sentences[1]]).all()
