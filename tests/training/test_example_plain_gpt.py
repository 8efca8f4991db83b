"""The example `plain_gpt` has the gradients of `nn.GPT`, learns as well as it does, and writes verses of its text."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from selfattn import nn, optim

PATH = Path(__file__).parents[2] / "examples" / "plain_gpt.py"
NAMES = {
    "norm1": "norm1.weight", "qkv": "self_attn.in_proj_weight", "merge": "self_attn.out_proj.weight",
    "norm2": "norm2.weight", "widen": "linear1.weight", "narrow": "linear2.weight",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    """NumPy's and selfattn's threads would wait for each other on a busy machine."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("plain_gpt", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_state_dict(arrays):
    """Give the example's arrays the names of `nn.GPT`, whose matrices are (out, in)."""
    found = {"token_embedding.weight": arrays["letters"], "position_embedding.weight": arrays["places"]}
    for name, array in arrays.items():
        layer, _, rest = name.partition(".")
        if rest:
            found[f"layers.{layer}.{NAMES[rest]}"] = array.T
    return found | {"norm.weight": arrays["norm"]}


def same_model(example, p):
    model = nn.GPT(example.V, example.D, example.LAYERS, example.H, example.CONTEXT, bias=False, rng=0)
    model.load_state_dict(as_state_dict(p) | {"head.weight": p["letters"]})
    return model


def test_gradients_are_those_of_the_model(example):
    p = example.new_parameters(np.random.default_rng(1))
    ids = np.random.default_rng(2).integers(0, example.V, (3, 21))
    loss, pullback = example.loss_vjp(p, ids)
    expected, expected_pullback = same_model(example, p).loss_vjp(ids)
    assert abs(loss - expected) < 1e-6 * expected
    grads, expected = as_state_dict(pullback()), expected_pullback(1.0)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        # Sums of at most 60 products in float32, through some twenty operations.
        bound = 60 * 20 * np.finfo(np.float32).eps * np.abs(expected[name]).max()
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=bound, err_msg=name)


def test_it_learns_as_well_as_the_model_and_writes(example, capsys, monkeypatch):
    """Both reach the lowest possible loss: only letters where several verses could continue stay uncertain."""
    monkeypatch.setattr(example, "STEPS", 300)  # by then it knows the verses
    rng = np.random.default_rng(0)
    p = example.new_parameters(rng)
    model, batches = same_model(example, p), np.random.default_rng()
    batches.bit_generator.state = rng.bit_generator.state
    example.train(p, rng)
    assert capsys.readouterr().out.count("loss") == 4
    optimizer = optim.Adam(model.parameters())
    for step in range(1, example.STEPS + 1):
        starts = batches.integers(0, len(example.IDS) - example.CONTEXT, example.N)
        _, pullback = model.loss_vjp(example.IDS[starts[:, None] + np.arange(example.CONTEXT + 1)])
        optimizer.lr = example.LEARNING_RATE * min(1, step / 20) * (1 - step / example.STEPS)
        optimizer.step(pullback(1.0))
    starts = np.arange(0, len(example.IDS) - example.CONTEXT, 3)
    whole = example.IDS[starts[:, None] + np.arange(example.CONTEXT + 1)]
    expected = model.loss(whole)
    assert expected < 0.1
    assert abs(example.loss_vjp(p, whole)[0] - expected) < 0.02 * expected
    written = example.write(p, "This is the rat", 120, rng)
    assert written.startswith("This is the rat that ate the malt that lay in the house that Jack built.\n")
