"""Readings: sums that must be whole, gradients against finite differences, effects against single changed runs."""

import itertools

import numpy as np
import pytest
from architectures import GPT2, IMAGES, LLAMA, SIZES, TEXT

import selfattn_models as models
from selfattn import nn
from selfattn.steps import Change
from selfattn_models import readings
from selfattn_models.readings import Label, Logit, Similarity

PIXELS = np.random.default_rng(0).standard_normal((2, 2, 12, 12))


def drawn(kind, config, dtype=np.float64):
    """A model in float64, whose parameters are large enough for its answers to depend on the words."""
    model, rng = kind(config, rng=0), np.random.default_rng(0)
    arrays = {
        name: (x + 0.3 * rng.standard_normal(x.shape)).astype(dtype) for name, x in model.parameters().items()
    }
    return kind(config, arrays)


def gpt():
    model = nn.GPT(11, 16, 2, 4, 8, dropout=0.5, dtype=np.float64, rng=0)
    for array in model.parameters().values():
        np.add(array, 0.3 * np.random.default_rng(1).standard_normal(array.shape), out=array)
    return model


def encoder(kind=models.BertModel):
    model = drawn(kind, SIZES | TEXT)
    model.pipeline.modes = ("mean",)
    return model


def shortened(model):
    model.pipeline.truncate_dim = 5
    return model


CASES = {
    "bert": lambda: (encoder(), [3, 9, 4, 20, 5], Similarity([7, 8, 30])),
    "matryoshka": lambda: (shortened(encoder()), [3, 9, 4, 20, 5], Similarity([7, 8, 30])),
    "classifier": lambda: (
        drawn(models.BertForSequenceClassification, SIZES | TEXT | {"num_labels": 3}),
        [3, 9, 4, 20],
        Label(2),
    ),
    "modernbert": lambda: (
        drawn(models.ModernBertModel, SIZES | TEXT | {"local_attention": 4}),
        [3, 9, 4, 20],
        Similarity([7]),
    ),
    "mpnet": lambda: (drawn(models.MPNetModel, SIZES | TEXT), [3, 9, 4, 20, 5], Similarity([7, 8, 30])),
    "vit": lambda: (
        drawn(models.ViTModel, IMAGES | {"intermediate_size": 24}),
        PIXELS[0],
        Similarity(PIXELS[1]),
    ),
    "gpt2": lambda: (drawn(models.GPT2LMHeadModel, GPT2), [3, 9, 4, 20], Logit(7)),
    "llama": lambda: (drawn(models.LlamaForCausalLM, LLAMA), [3, 9, 4, 20], Logit(7, than=8, place=2)),
    "gemma3": lambda: (
        drawn(models.Gemma3ForCausalLM, LLAMA | {"head_dim": 8}),
        [3, 9, 4, 20],
        Logit(7, than=8, place=2),
    ),
    "nn.GPT": lambda: (gpt(), [3, 9, 4, 2], Logit(7, than=8)),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]()


def value(model, text, target, change=None):
    """The target of one run, whose norm is the model's last one."""
    return target._bind(model)(model.steps(text, change=change).output).value


def test_contributions_are_the_whole(case):
    model, text, target = case
    found, steps = readings.contributions(model, text, target), model.steps(text)
    total = sum(
        np.sum(each) for each in (found.heads, found.biases, found.feed_forward, found.inputs, found.norms)
    )
    np.testing.assert_allclose([total, found.value], value(model, text, target), rtol=1e-9, atol=1e-9)
    assert found.heads.shape == (len(steps.layers), len(steps.layers[0].weights))
    # What a head of the last layer of a model with norms first adds is a product with the direction, after the last
    # norm.
    norm, layer, own = model._one(text)[0].final_norm, model._one(text)[0].layers[-1], steps.layers[-1]
    if norm is not None and norm.kind == "layer" and layer.norm_first:
        g = target._bind(model)(steps.output).direction
        head = own.output[1] @ layer.output.weight.reshape(g.shape[1], len(own.output), -1)[:, 1].T
        deviation = np.sqrt(own.result.var(axis=1, keepdims=True) + norm.eps)
        expected = (g * norm.weight * (head - head.mean(axis=1, keepdims=True)) / deviation).sum()
        np.testing.assert_allclose(found.heads[-1][1], expected, rtol=1e-9, atol=1e-12)


def test_effects_are_those_of_single_runs(case):
    model, text, target = case
    other = model.steps(text[::-1])
    alone = [Change.off(0, 0), Change.off(1, 1), Change.patch(0, other, 0), Change.hide(1), Change.off(0)]
    changes = [*alone, Change.off(0, 1) + Change.off(1, 0)]
    found = readings.effects(model, text, target, changes)
    expected = [value(model, text, target, each) - value(model, text, target) for each in changes]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    heads = readings.head_effects(model, text, target)
    np.testing.assert_allclose([heads[0, 0], heads[1, 1]], found[:2], rtol=1e-9, atol=1e-9)


def test_gradients_are_slopes(case):
    model, text, target = case
    weights, step = readings.gradient_times_attention(model, text, target), 1e-6

    def slope(change):
        return sum(sign * value(model, text, target, change(sign * step)) for sign in (1, -1)) / (2 * step)

    for n, h, i, j in [(0, 1, 2, 1), (1, 0, 2, 0), (1, 1, 1, 1), (0, 0, 0, 0)]:
        at = np.zeros(weights[n].shape)
        at[h, i, j] = 1
        expected = slope(lambda e, n=n, at=at: Change.apply(n, lambda w: w * (1 + e * at), step="weights"))
        np.testing.assert_allclose(weights[n][h, i, j], expected, rtol=1e-5, atol=1e-8)
    if model._one(text)[0].embedding_norm is None:  # else inputs are changed before that norm
        inputs = readings.gradient_times_input(model, text, target)
        for i in range(3):
            expected = slope(lambda e, i=i: Change.apply(0, lambda x: x * (1 + e), step="inputs", tokens=i))
            np.testing.assert_allclose(inputs[i], expected, rtol=1e-5, atol=1e-8)


def test_integrated_gradients_are_the_whole(case):
    model, text, target = case
    settings, rows = readings._rows(*readings._one(model, text))
    baseline = 0.5 * rows
    found = readings.integrated_gradients(model, text, target, baseline=baseline, n_steps=400)

    def at(x):
        return target._bind(model)(readings.transformer.forward(settings, x, np.array([0, len(x)]))).value

    # The midpoint rule.
    np.testing.assert_allclose(found.sum(), at(rows) - at(baseline), rtol=1e-3, atol=1e-4)
    assert found.shape == (len(rows),)


@pytest.mark.parametrize("name", ["gpt2", "llama", "nn.GPT"])
def test_the_lens_ends_with_what_the_model_says(name):
    model, text, _ = CASES[name]()
    lens = readings.logit_lens(model, text, place=1)
    np.testing.assert_allclose(lens[-1], model.eval()(text)[1], rtol=1e-12)
    states = model.hidden_states(text)
    off = model.hidden_states(text, change=Change.off(len(states) - 2))  # without the last layer
    np.testing.assert_allclose(lens[-2], readings.logits(model, off[-1])[1], rtol=1e-12)


def test_rounded_weights_have_readings():
    exact = drawn(models.LlamaForCausalLM, LLAMA, np.float32)
    rounded = drawn(models.LlamaForCausalLM, LLAMA, np.float32).quantize("int8")
    for reading in (readings.head_effects, readings.gradient_times_input):
        a, b = (reading(model, [3, 9, 4, 20], Logit(7)) for model in (exact, rounded))
        assert np.corrcoef(a.ravel(), b.ravel())[0, 1] > 0.95  # rounding to 127 levels, in three layers


def test_rollout_and_flow():
    pytest.importorskip("scipy")
    steps = nn.GPT(11, 16, 2, 4, 8, rng=0).steps([1, 2, 3])
    shares = [np.eye(3) / 2 + layer.weights.mean(axis=0) / 2 for layer in steps.layers]
    rollout = readings.attention_rollout(steps)
    np.testing.assert_allclose(rollout, [shares[0], shares[1] @ shares[0]], rtol=1e-6)
    for token, j in itertools.product(range(3), range(3)):
        # the largest flow is the smallest cut; nodes are (layer, token), and the source is on its side of each cut
        cuts = []
        for sides in itertools.product([0, 1], repeat=9):
            side = np.reshape(sides, (3, 3))
            if side[2, token] and not side[0, j]:
                cuts.append(sum((shares[n] * np.outer(side[n + 1], 1 - side[n])).sum() for n in range(2)))
        assert readings.attention_flow(steps, token)[j] == pytest.approx(min(cuts), abs=1e-7)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (Logit(" a"), "must be an id"),
        (Logit(11), "the vocabulary has 11"),
        (Similarity([1]), "needs an encoder"),
        (Label(), "GPT has no such head"),
        (Logit(1, place=4), "place 4 is out of range"),
    ],
)
def test_targets_that_a_model_does_not_have(target, says):
    with pytest.raises(ValueError, match=says):
        readings.contributions(nn.GPT(11, 16, 2, 4, 8, rng=0), [1, 2, 3], target)
    with pytest.raises(TypeError, match="not of Linear"):
        readings.head_effects(nn.Linear(1, 1), [1, 2, 3], target)


def test_what_is_no_target_no_change_and_no_steps_is_refused():
    model, ids = nn.GPT(11, 16, 2, 4, 8, rng=0), [1, 2, 3]
    with pytest.raises(TypeError, match="target must be a Logit, Similarity or Label, not ' Mary'"):
        readings.effects(model, ids, " Mary", [])
    for changes in (Change.off(0), [Change.off(0), 3]):
        with pytest.raises(TypeError, match="changes must be a list of Change, not"):
            readings.effects(model, ids, Logit(1), changes)
    with pytest.raises(TypeError, match=r"what model\.steps\(text\) returns, not GPT"):
        readings.attention_rollout(model)
    assert readings.value(model, ids, Logit(4)) == pytest.approx(float(model(np.array(ids))[-1, 4]), rel=1e-6)
    with pytest.warns(RuntimeWarning, match="the shares add up to"):
        readings.integrated_gradients(model, ids, Logit(4), n_steps=1)
