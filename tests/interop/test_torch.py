"""The door to PyTorch: the bits of the plain call, gradients, the operators' contracts, and what is refused."""

import numpy as np
import pytest

import selfattn as sa

torch = pytest.importorskip("torch")
from selfattn.interop.torch import _array, scaled_dot_product_attention  # noqa: E402

OPTIONS = {
    "plain": {}, "causal": {"is_causal": True}, "window": {"causal": "lower_right", "window": (3, None)},
    "scores": {"scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "lengths": {"key_lengths": torch.tensor([[5], [9]]), "alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "dropout": {"dropout_p": 0.3, "rng": 2**64 - 5},
    "documents": {"block_mask": sa.BlockMask.from_documents([0] * 3 + [1] * 4, [0] * 4 + [1] * 5)},
}  # fmt: skip


def inputs(dtype=torch.float32, key_heads=4):
    """Queries (2, 4, 7, 8), keys and values of length 9, each in another layout."""
    generator, sizes = torch.Generator().manual_seed(0), ((7, 4), (9, key_heads), (9, key_heads))
    q, k, v = (torch.randn(2, *size, 8, generator=generator).to(dtype).transpose(1, 2) for size in sizes)
    return [x.requires_grad_() for x in (q, k[:1].expand(2, -1, -1, -1), v.contiguous())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_the_plain_call(name, dtype):
    if dtype == torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    options, (q, k, v) = OPTIONS[name], inputs(dtype)
    arrays = [_array(x) for x in (q, k, v)]
    plain = {key: np.asarray(x) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    out = scaled_dot_product_attention(q, k, v, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, pullback = sa.scaled_dot_product_attention_vjp(*arrays, **plain)
    assert _array(out).tobytes() == expected.tobytes()
    grads = pullback(_array(grad))
    for x, mine in zip(torch.autograd.grad(out, (q, k, v), grad), grads, strict=False):
        assert _array(x).tobytes() == mine.tobytes()
    with torch.no_grad():
        results = scaled_dot_product_attention(q, k, v, **options, return_lse=True, return_weights=True)
    expected = sa.scaled_dot_product_attention(*arrays, **plain, return_lse=True, return_weights=True)
    assert [_array(x).tobytes() for x in results] == [x.tobytes() for x in expected]


def test_gradcheck():
    q, k, v = (x.double().detach().requires_grad_() for x in inputs())
    shapes = (4, 7, 9), (4,), (4,)
    mask, sinks, slopes = (torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)

    def call(q, k, v, mask, sinks, alibi_slopes):
        return scaled_dot_product_attention(
            q, k, v, mask, sinks=sinks, alibi_slopes=alibi_slopes, softcap=3.0, window=(5, 3), return_lse=True
        )

    assert torch.autograd.gradcheck(call, (q, k, v, mask, sinks, slopes))
