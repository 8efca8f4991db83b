"""Does the build work? Two seconds: attention both ways on each instruction set, a row operation, a layer, a training
step.

Against a few lines of NumPy. What this leaves to the other tests is everything else.
"""

import numpy as np

import selfattn as sa
from selfattn import nn, optim

RNG = np.random.default_rng(0)


def softmax(scores):
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def assert_close(got, expected):
    """Compare float32 sums of at most 70 terms of size 1 to 10."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)


def test_attention_and_its_gradients(isa):
    q, k, v, dy = RNG.standard_normal((4, 2, 70, 24)).astype(np.float32)
    closed = np.where(np.tri(70, dtype=bool), 0, -np.inf)
    weights = softmax(q @ k.swapaxes(-1, -2) / np.sqrt(24) + closed)
    d_weights = dy @ v.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True)) / np.sqrt(24)
    out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, is_causal=True)
    grads = pullback(dy)
    assert_close(out, weights @ v)
    assert_close(sa.scaled_dot_product_attention(q, k, v, is_causal=True), weights @ v)
    assert_close(grads.query, d_scores @ k)
    assert_close(grads.key, d_scores.swapaxes(-1, -2) @ q)
    assert_close(grads.value, weights.swapaxes(-1, -2) @ dy)


def test_a_row_operation(isa):
    x, dy = RNG.standard_normal((2, 5, 70)).astype(np.float32)
    y, pullback = sa.softmax_vjp(x)
    assert_close(y, softmax(x))
    assert_close(pullback(dy), softmax(x) * (dy - (softmax(x) * dy).sum(-1, keepdims=True)))


def test_a_layer_learns():
    layer = nn.SelfAttentionBlock(8, 2, rng=0)
    optimizer = optim.Adam(layer.parameters(), lr=0.01)
    x, target = RNG.standard_normal((2, 3, 5, 8)).astype(np.float32)
    losses = []
    for _ in range(20):
        y, pullback = layer.vjp(x)
        losses.append(float(((y - target) ** 2).mean()))
        optimizer.step(pullback(2 * (y - target) / y.size)[1])
    assert losses[-1] < 0.9 * losses[0]


def test_a_model_embeds_sentences():
    model = nn.EmbeddingModel(str.split, 10, 4, max_seq_len=8, num_layers=0, rng=0)
    places = np.arange(3)[:, None] / [1, 100]
    waves = np.stack([np.sin(places), np.cos(places)], axis=-1).reshape(3, 4)
    assert_close(model([3, 1, 4]), (model.embedding_layer.weight[[3, 1, 4]] + waves).mean(0))
