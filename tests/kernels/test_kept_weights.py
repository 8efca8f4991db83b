"""Weights that stay split for the matrix unit from call to call (docs/decisions/0003): every change of them shows.

The forward pass of `vjp` never reads what was kept, so it says what the embeddings are, to the bit.
"""

import threading

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn, optim

pytestmark = pytest.mark.usefixtures("on_the_matrix_unit", "threads_restored")


def model_of(width, layers=2, rng=3):
    return nn.EmbeddingModel(str.split, 50, width, max_seq_len=90, num_layers=layers, num_heads=2, rng=rng)


def sentences_of(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 50, length).tolist() for length in lengths]


def check(model, sentences):
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(model(sentences), model.vjp(sentences)[0])


def negate(weight, *places):
    for place in places:
        weight[place] = -weight[place]


CHANGES = {
    "one number": lambda w: negate(w, (5, 7)),
    "the first": lambda w: negate(w, (0, 0)),
    "the last": lambda w: negate(w, (-1, -1)),
    "two of one lane of the checksum": lambda w: negate(w.reshape(-1), 7, 7 + 128),
    "rows that change places": lambda w: w.__setitem__(slice(0, 2), w[[1, 0]].copy()),
    "not a number": lambda w: w.__setitem__((40, 3), np.nan),
    "zeros": lambda w: w.fill(0),
    "all": lambda w: w.__imul__(1.5),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("lengths", [[24], [90] * 20], ids=["one sentence", "many"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_shows(change, lengths, threads):
    """Also one back to what was before, and in the second block."""
    sa.set_num_threads(threads)
    model, sentences = model_of(100), sentences_of(lengths)
    check(model, sentences)
    for block in model.attention_layers:
        for layer in (block.query, block.key, block.value):
            before = layer.weight.copy()
            CHANGES[change](layer.weight)
            check(model, sentences)
            layer.weight[...] = before
            check(model, sentences)


def test_steps_of_an_optimiser_show():
    model, sentences = model_of(128), sentences_of([20, 30, 40])
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(4):
        y, pullback = model.vjp(sentences)
        np.testing.assert_array_equal(model(sentences), y)
        optimizer.step(pullback(y))
        check(model, sentences)


def test_models_in_turn():
    """More of them than are kept, alike and of other sizes."""
    models = [model_of(width, rng=rng) for rng in range(3) for width in (96, 128)]
    sentences = sentences_of([24])
    expected = [model.vjp(sentences)[0] for model in models]
    for _ in range(3):
        for model, y in zip(models, expected, strict=True):
            np.testing.assert_array_equal(model(sentences), y)


def test_threads_that_call_at_once():
    model, other, sentences = model_of(128), model_of(128, rng=4), sentences_of([60])
    expected = {id(each): each.vjp(sentences)[0] for each in (model, other)}
    wrong = []

    def call(each):
        for _ in range(100):
            if not np.array_equal(each(sentences), expected[id(each)]):
                wrong.append(each)

    callers = [threading.Thread(target=call, args=(each,)) for each in (model, other, model)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_model_too_large_to_keep():
    """Beyond 8 MB of split weights."""
    model, sentences = model_of(512, layers=3), sentences_of([10])
    check(model, sentences)
    negate(model.attention_layers[2].value.weight, (0, 0))
    check(model, sentences)
