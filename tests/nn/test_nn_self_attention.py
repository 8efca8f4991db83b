"""nn.SelfAttention and the steps of the attention layers: d_v, scores, every intermediate result."""

import numpy as np
import pytest
from nn_checks import assert_close, perturbed
from refusals import refusals

import selfattn as sa
from selfattn import nn

F64 = {"dtype": np.float64}
X = np.random.default_rng(5).standard_normal((2, 5, 6))
LENGTHS = [5, 3]
KINDS = {
    "plain": {}, "other width of values": {"d_v": 3}, "other width of values, bias": {"d_v": 7, "bias": True},
    "dot": {"score": "dot"}, "unscaled": {"scale": False, "d_v": 2}, "additive": {"score": "additive", "d_v": 3},
    "additive, bias": {"score": "additive", "bias": True},
}  # fmt: skip


def layer_of(kind, **more):
    return nn.SelfAttention(6, 4, **KINDS[kind], **({"rng": 0} | F64 | more))


def test_weights_and_biases_are_drawn_one_after_the_other():
    layer = nn.SelfAttention(4, 2, bias=True, d_v=3, rng=sa.torch_rng(7))
    torch_like = sa.torch_rng(7)
    for name, shape in {
        "W_query": (4, 2), "W_key": (4, 2), "W_value": (4, 3), "b_query": (2,), "b_key": (2,), "b_value": (3,),
    }.items():  # fmt: skip
        np.testing.assert_array_equal(layer.parameters()[name], torch_like.random(shape, np.float32))


def test_scores_have_two_names_for_unscaled():
    assert layer_of("unscaled").score == layer_of("dot").score == "dot"
    same = layer_of("plain")
    np.testing.assert_array_equal(nn.SelfAttention(6, 4, scale=False, rng=0, **F64)(X), layer_of("dot")(X))
    assert (same(X) != layer_of("dot")(X)).any()
    text = "SelfAttention(d_in=6, d_out=4, d_v=3, score='scaled_dot', W_query=(6, 4)"
    assert repr(layer_of("other width of values")).startswith(text)


MASK = np.random.default_rng(1).random((2, 5, 5)) < 0.5
OPTIONS = {
    "none": {}, "mask": {"attn_mask": MASK}, "float mask": {"attn_mask": np.where(MASK[0], 0.5, -np.inf)},
    "lengths": {"key_lengths": LENGTHS, "num_threads": 1}, "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.5, "rng": 3},
}  # fmt: skip
BLOCKS = {
    "SelfAttention": lambda: layer_of("other width of values, bias"),
    "SelfAttention, dot": lambda: layer_of("dot"),
    "SelfAttentionBlock": lambda: nn.SelfAttentionBlock(6, rng=0, **F64),
    "SelfAttentionBlock of 3 heads": lambda: nn.SelfAttentionBlock(6, 3, rng=0, **F64),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_last_step_is_the_output(name, options):
    layer = perturbed(BLOCKS[name]())
    steps = layer.steps(X, **OPTIONS[options])
    assert_close(steps.result, layer(X, **OPTIONS[options]), "float64", n=6)
    heads = getattr(layer, "num_heads", 1)
    assert steps.weights.shape == ((2, heads, 5, 5) if heads > 1 else (2, 5, 5))
    for array in layer.parameters().values():
        assert array.flags.writeable


@pytest.mark.parametrize("options", ["none", "mask", "float mask", "lengths", "causal"])
@pytest.mark.parametrize("kind", ["additive", "additive, bias"])
def test_the_last_step_of_an_additive_score_is_the_output(kind, options):
    layer = perturbed(layer_of(kind, dtype=np.float64))
    steps = layer.steps(X, **OPTIONS[options])
    assert_close(steps.result, layer(X, **OPTIONS[options]), "float64", n=6)
    q, k = (X @ getattr(layer, f"W_{name}") for name in ("query", "key"))
    if "bias" in kind:
        q, k = q + layer.b_query, k + layer.b_key
    scores = np.tanh(q[:, :, None] + k[:, None]) @ layer.v
    assert_close(steps.scores, scores, "float64", n=6)
    np.testing.assert_array_equal(steps.scaled_scores, steps.scores)
    assert "tanh(query[i] + key[j]) @ v" in repr(steps)


@pytest.mark.parametrize(("heads", "batch_first"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"key_padding_mask": np.arange(5) >= np.array([[3], [5]])}, {"attn_mask": ~np.tri(4, 5, dtype=bool)},
        {"key_lengths": LENGTHS, "is_causal": True},
    ],
    ids=["none", "padding", "mask", "lengths"],
)  # fmt: skip
def test_the_steps_of_several_heads_end_in_the_output(options, batch_first, heads):
    layer = nn.MultiheadAttention(6, heads, kdim=4, batch_first=batch_first, rng=0, **F64)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, n, width)) for n, width in ((4, 6), (5, 4), (5, 6))]
    given = inputs if batch_first else [x.swapaxes(0, 1) for x in inputs]
    steps = layer.steps(*given, **options)
    output, weights = layer(*given, **options, average_attn_weights=False)
    assert_close(steps.result, output if batch_first else output.swapaxes(0, 1), "float64", n=6)
    assert_close(steps.weights if heads > 1 else steps.weights[:, None], weights, "float64", n=6)
    one = layer.steps(*(x[0] for x in inputs))
    assert_close(one.result, layer(*(x[0] for x in inputs))[0], "float64", n=6)


def test_the_steps_of_a_layer_that_drops_are_those_of_its_next_call():
    x = X[0]
    layers = [nn.MultiheadAttention(6, 2, dropout=0.5, rng=4, **F64) for _ in range(2)]
    assert_close(layers[0].steps(x, x, x).result, layers[1](x, x, x)[0], "float64", n=6)


ENCODER = nn.TransformerEncoderLayer(2, 1, 2, batch_first=True)
test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: nn.SelfAttention(2, 3, d_v=0), ValueError, "d_v must be at least 1, not 0"),
    (lambda: nn.SelfAttention(2, 3, score="cosine"), ValueError, "additive, not 'cosine'"),
    (lambda: nn.SelfAttention(2, 3, scale=False, score="additive"), ValueError, "scale=False means"),
    (lambda: layer_of("additive")(X, window=(1, 1)), TypeError, "window"),
    (lambda: layer_of("additive").steps(X, window=(1, 1)), TypeError, "window"),
    (lambda: nn.SelfAttention(2, 3).steps(np.ones((2, 4))), ValueError, r"\(..., 2\), not \(2, 4\)"),
    (lambda: nn.SelfAttention(2, 3).steps(np.ones((2, 2)), return_lse=True), TypeError, "return_lse"),
    (lambda: nn.SelfAttentionBlock(2)(np.ones((2, 2)), np.ma.ones((2, 2))), TypeError, "MaskedArray"),
    *((lambda layer=layer: layer(np.ones((1, 2, 2)), key_lengths=np.ma.ones(1, int)), TypeError, "key_lengths is a Mask")
      for layer in (nn.SelfAttentionBlock(2), ENCODER, nn.TransformerEncoder(ENCODER, 1))),
)  # fmt: skip
