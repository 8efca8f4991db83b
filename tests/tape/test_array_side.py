"""Modules of the tape among those of arrays: in a Sequential, in training.fit, in check_vjp."""

import numpy as np
import pytest

import selfattn.tape as torch
from selfattn import nn as layers
from selfattn import optim, training
from selfattn.functional import check_vjp
from selfattn.tape import nn


class Tokens(nn.Module):
    def __init__(self, num, length, width):
        super().__init__()
        self.words, self.places = nn.Embedding(num, width), nn.Embedding(length, width)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.size(-1)))


class First(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.head = nn.Linear(width, 1)

    def forward(self, rows):
        B, _, width = rows.size()
        return self.head(rows[:, 0].view(B, width))


@pytest.fixture
def model():
    torch.manual_seed(0)
    attention = layers.SelfAttentionBlock(8, 2, rng=0)
    return layers.Sequential(Tokens(5, 4, 8), attention, First(8))


IDS = np.random.default_rng(0).integers(0, 5, (16, 4))


def test_a_sequential_of_arrays_calls_them_with_tensors(model):
    lengths = np.arange(16) % 4 + 1
    y, pullback = model.vjp(IDS, key_lengths=lengths)
    assert isinstance(model(IDS), np.ndarray)
    np.testing.assert_array_equal(model(IDS, key_lengths=lengths), y)
    assert pullback(np.ones_like(y)).keys() == model.parameters().keys()


@pytest.mark.parametrize("make", [torch.optim.Adam, None])
def test_fit_trains_and_validates_them(model, make):
    """With an optimiser of the tape for a module of it, and for a Sequential with the default one."""
    one = nn.Sequential(model[0], nn.Flatten(), nn.Linear(32, 1))
    trained = one if make else model
    target = (IDS[:, :1] > 2).astype(np.float32)
    batches, loss = [(IDS, target)], layers.BCEWithLogitsLoss()
    history = training.fit(
        trained,
        batches,
        loss,
        30,
        optimizer=make(one.parameters(), lr=0.05) if make else optim.AdamW(model.parameters(), lr=0.05),
        validation=batches,
        log_every=None,
    )
    scores = [score for _, score in history.validation_losses]
    assert scores[-1] < 0.2 < scores[0]


def test_the_gradients_of_the_array_side_are_those_of_differences():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def of_input(x):
        y, pullback = module.vjp(x)
        return y, lambda dy: pullback(dy)[0]

    check_vjp(of_input, np.random.default_rng(0).standard_normal((5, 3)))
