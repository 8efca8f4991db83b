"""What a head does is named by live pages, under node, as Python names it: encoders' heads and causal ones."""

from itertools import chain

import numpy as np
import pytest
from live import run

from selfattn.functional import softmax
from selfattn_models.pages import heads

SCRIPTS = ("live/habits.js",)
HABITS = """return given.map(([tokens, weights, heads, isCausal]) =>
    habitsOf([{ tokens, weights: Float32Array.from(weights.flat(3)) }], heads, isCausal));"""
TEXTS = (
    ["[CLS]", "he", "sat", "on", "the", "bank", ".", "[SEP]"],
    [*"in the beginning", "."],
    ["one", "two", ",", "three", "four", "five", "six", "."],
)


@pytest.mark.parametrize("sharp", [0.01, 1.0, 4.0])  # nearly equal weights, and weights that choose
def test_habits_are_those_of_python(sharp):
    rng = np.random.default_rng(int(sharp))
    given, expected = [], []
    for causal in (False, True):
        for tokens in TEXTS:
            n = len(tokens)
            closed = np.triu(np.ones((n, n), bool), 1) if causal else None
            scores = sharp * rng.standard_normal((2, 3, n, n))
            layers = softmax(np.where(closed, -np.inf, scores) if causal else scores).astype(np.float32)
            text = heads.TextHeads(tokens, tokens, tuple(layers), (closed,) * 2, (None,) * 2, False)
            expected.append(heads.habits([text]))
            given.append([tokens, layers.tolist(), [3, 3], causal])
    for found, of_python in zip(run(SCRIPTS, HABITS, given), expected, strict=True):
        for one, other in zip(chain(*found), chain(*of_python), strict=True):
            assert (one["kind"], one["clear"]) == (other.kind, other.clear)
            assert one["entropy"] == pytest.approx(other.entropy, abs=1e-5)
            np.testing.assert_allclose(one["shares"], [*other.shares.values()], atol=1e-5)
            assert sharp > 0.1 or one["kind"] == "broad"
