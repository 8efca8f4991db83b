"""PyTorch's own samples (OpInfo) of attention: results and gradients in all four dtypes.

The samples are taken in the dtype under test and widened: PyTorch's float64 is the truth.
"""

import numpy as np
import pytest
from gradients import bounds
from inputs import BFLOAT16, FLOAT_IDS, FLOATS
from tolerances import assert_within, rounding, truth

import selfattn as sa
from selfattn import reference

torch = pytest.importorskip("torch", reason="comparing with PyTorch needs the package torch")
pytest.importorskip("expecttest", reason="PyTorch's samples need the package expecttest")
invocations = pytest.importorskip(
    "torch.testing._internal.common_methods_invocations",
    reason="this PyTorch has no samples there",
    exc_type=ImportError,
)

OP = next(op for op in invocations.op_db if op.name == "nn.functional.scaled_dot_product_attention")
TORCH_DTYPES = dict(zip(FLOATS, (torch.float16, torch.bfloat16, torch.float32, torch.float64), strict=True))
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)


def to_numpy(x):
    """Tensors as arrays of the same numbers; everything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.float().numpy().astype(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy().copy()


def wide(x):
    """Return a float64 tensor of the same numbers that records gradients."""
    floating = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    return x.detach().double().requires_grad_() if floating else x


def random_like(shape, dtype):
    return np.asarray(np.random.default_rng(1).standard_normal(shape)).astype(dtype)


def autograd(function, inputs, grad):
    """The truth: the result and the gradients of the inputs, as arrays."""
    result = function()
    gradients = torch.autograd.grad(result, inputs, torch.from_numpy(np.asarray(grad, np.float64)))
    return result.detach().numpy(), [x.numpy() for x in gradients]


@dtypes
def test_scaled_dot_product_attention(dtype):
    torch.manual_seed(0)
    for sample in OP.sample_inputs("cpu", TORCH_DTYPES[dtype]):
        options = {name: to_numpy(x) for name, x in sample.kwargs.items()}
        enable_gqa = options.get("enable_gqa", False)
        arrays = [to_numpy(x) for x in (sample.input, *sample.args)]
        tensors, mask = [wide(x) for x in (sample.input, *sample.args)], wide(sample.kwargs.get("attn_mask"))
        names, inputs = ["query", "key", "value"], list(tensors)
        if mask is not None and mask.dtype == torch.float64:
            names, inputs = [*names, "attn_mask"], [*inputs, mask]
        p = options.get("dropout_p", 0.0)

        def attend(tensors=tensors, mask=mask, options=options, p=p, enable_gqa=enable_gqa):
            if p == 0:
                return torch.nn.functional.scaled_dot_product_attention(
                    *tensors, mask, is_causal=options["is_causal"], enable_gqa=enable_gqa
                )
            # PyTorch drops other weights, so it gets the weights that selfattn keeps
            query, key, value = tensors
            scores = query @ key.mT / query.shape[-1] ** 0.5
            if options["is_causal"]:
                scores = scores.masked_fill(
                    ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf
                )
            keep = reference.dropout.dropout_keep_mask(7, p, scores.shape[:-2], *scores.shape[-2:])
            return (scores.softmax(-1) * torch.from_numpy(keep) / (1 - p)) @ value

        out, pullback = sa.scaled_dot_product_attention_vjp(*arrays, **options, rng=7, wrt=names)
        grad_out = random_like(out.shape, dtype)
        exact, gradients = autograd(attend, inputs, grad_out)
        limit = truth(*arrays, **options, rng=7).out_bound
        assert out.dtype == dtype
        assert_within(out, exact, limit)
        limits = bounds(
            arrays, options | {"rng": 7}, grad_out.astype(np.float64), np.zeros(out.shape[:-1]), dtype, 0.0
        )
        for name, got, expected in zip(names, pullback(grad_out), gradients, strict=False):
            limit = reference.arguments.sum_to_shape(limits[name], got.shape)
            assert_within(got, expected, limit + rounding(dtype, expected), name)
