"""nn.EmbeddingModel and nn.ProxyTask: the same model in PyTorch, finite differences, extremes, errors."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn

SHAPES = [(1, 1), (3, 1), (1, 4), (3, 4), (0, 1)]  # layers, heads
VOCABULARY, WIDTH, LONGEST = 50, 16, 12
TRIPLET = [5, 3, 3, 49, 0, 7], [7, 5, 3], list(range(20))  # the last one is cut to LONGEST


def model_of(layers=1, heads=1, dtype=np.float32, rng=0, tokenizer=str.split):
    return nn.EmbeddingModel(
        tokenizer, VOCABULARY, WIDTH,
        max_seq_len=LONGEST, num_layers=layers, num_heads=heads, dtype=dtype, rng=rng,
    )  # fmt: skip


def torch_model(layers, heads, dtype=np.float32, seed=1):
    torch = pytest.importorskip("torch")
    from torch_embedding import TorchEmbeddingModel

    torch.manual_seed(seed)
    theirs = TorchEmbeddingModel(VOCABULARY, WIDTH, LONGEST, layers, heads)
    return theirs.to(torch.float64 if dtype == np.float64 else torch.float32)


# -------------------------------------------------------------------------------------------------- PyTorch


@pytest.mark.parametrize(("layers", "heads"), SHAPES)
def test_the_same_seed_gives_the_weights_of_pytorch(layers, heads):
    expected = torch_model(layers, heads, seed=3).numpy_state()
    got = model_of(layers, heads, rng=sa.torch_rng(3)).state_dict()
    assert list(got) == list(expected)
    for name, array in got.items():
        assert array.dtype == np.float32
        if name == "embedding_layer.weight":  # a long draw of normal numbers: 3 ulp
            np.testing.assert_allclose(array, expected[name], rtol=4 * np.finfo(np.float32).eps)
        else:
            np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize(("layers", "heads"), SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_confidence_and_gradients_are_those_of_pytorch(layers, heads, dtype):
    theirs = torch_model(layers, heads, dtype)
    ours = model_of(layers, heads, dtype)
    assert ours.load_state_dict(theirs.numpy_state()) == ([], [])
    # sums of 16 products of numbers of about 1, three blocks of three in a row; a LayerNorm divides by about 1
    close = 64 * np.finfo(dtype).eps
    for ids in TRIPLET:
        np.testing.assert_allclose(ours(ids), theirs(ids).detach().numpy(), rtol=0, atol=close)

    loss = -theirs.confidence(*TRIPLET)
    loss.backward()
    confidence, pullback = nn.ProxyTask(ours).vjp(*TRIPLET)
    assert confidence.dtype == dtype
    # dot products of 16 numbers, here up to 30
    np.testing.assert_allclose(-confidence, loss.item(), rtol=0, atol=16 * close)
    grads = pullback(-1.0)
    assert list(grads) == list(ours.parameters())
    for name, tensor in theirs.named_parameters():
        expected = tensor.grad.numpy()
        assert grads[name].dtype == dtype
        np.testing.assert_allclose(
            grads[name], expected, rtol=0, atol=close * max(1, np.abs(expected).max()), err_msg=name
        )
