"""PyTorch's own samples (OpInfo) of the functions that this package has too: results and gradients in all four dtypes.

The samples are taken in the dtype under test and widened: PyTorch's float64 is the truth. What rounding may do
is in units of u, eps of the precision that is computed in, times the terms of each formula without their signs.
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

OF_NN = ("layer_norm", "rms_norm", "gelu", "scaled_dot_product_attention")
NAMES = {"softmax", "log_softmax", *(f"nn.functional.{name}" for name in OF_NN)}
OPS = {op.name: op for op in invocations.op_db if op.variant_test_name == "" and op.name in NAMES}
TORCH_DTYPES = dict(zip(FLOATS, (torch.float16, torch.bfloat16, torch.float32, torch.float64), strict=True))
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)


def samples(name, dtype):
    torch.manual_seed(0)
    found = list(OPS[name].sample_inputs("cpu", TORCH_DTYPES[dtype]))
    assert found
    return found


def to_numpy(x):
    """Tensors as arrays of the same numbers; everything else as it is."""
    if not isinstance(x, torch.Tensor):
        return x
    return x.float().numpy().astype(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy().copy()


def wide(x):
    """The same in float64, ready to be differentiated."""
    floating = isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    return x.detach().double().requires_grad_() if floating else x


def unit_of(dtype):
    return float(np.finfo(np.float64 if dtype == np.float64 else np.float32).eps)


def random_like(shape, dtype):
    return np.asarray(np.random.default_rng(1).standard_normal(shape)).astype(dtype)


def autograd(function, inputs, grad):
    """The truth: the result and the gradients of the inputs, as arrays."""
    result = function()
    gradients = torch.autograd.grad(result, inputs, torch.from_numpy(np.asarray(grad, np.float64)))
    return result.detach().numpy(), [x.numpy() for x in gradients]


def check(got, exact, terms, dtype):
    """`terms` is what the roundings of the formula may add up to, in units of u."""
    assert got.dtype == dtype
    assert_within(got, exact, unit_of(dtype) * terms + rounding(dtype, exact))


# A dozen roundings of terms, and exp: its argument, of size 18 at most, is off by 9 u, or 20 u for x²/2.
ROUNDINGS = 64


@dtypes
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax(name, dtype):
    for sample in samples(name, dtype):
        x, axis = to_numpy(sample.input), sample.args[0]
        dy, tensor = random_like(x.shape, dtype), wide(sample.input)
        y, (dx,) = autograd(lambda t=tensor, a=axis: getattr(torch, name)(t, a), [tensor], dy)
        got, pullback = getattr(sa, f"{name}_vjp")(x, axis)
        p, size = (np.exp(y) if name == "log_softmax" else y), np.abs(dy.astype(np.float64))
        if name == "softmax":
            check(got, y, ROUNDINGS * p, dtype)
            check(pullback(dy), dx, ROUNDINGS * p * (size + (p * size).sum(axis, keepdims=True)), dtype)
        else:
            largest = np.abs(x.astype(np.float64)).max(initial=0.0)
            check(got, y, 4 * (largest + np.abs(y)), dtype)
            check(pullback(dy), dx, ROUNDINGS * (size + p * size.sum(axis, keepdims=True)), dtype)


@dtypes
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_norms(name, dtype):
    for sample in samples(f"nn.functional.{name}", dtype):
        shape, *given = sample.args
        eps = sample.kwargs.get("eps", 1e-5 if name == "layer_norm" else unit_of(dtype))
        x, parameters = to_numpy(sample.input), [to_numpy(p) for p in given]
        tensors = [wide(sample.input), *(wide(p) for p in given)]
        function = getattr(torch.nn.functional, name)
        dy = random_like(x.shape, dtype)
        y, exact = autograd(
            lambda f=function, t=tensors, s=shape, e=eps: f(t[0], s, *t[1:], eps=e), tensors, dy
        )
        got, pullback = getattr(sa, f"{name}_vjp")(x, shape, *parameters, eps=eps)

        axes, lead = tuple(range(-len(shape), 0)), tuple(range(x.ndim - len(shape)))
        x64, size = x.astype(np.float64), np.abs(dy.astype(np.float64))
        weight = np.abs(parameters[0].astype(np.float64)) if parameters else np.ones(shape)
        bias = np.abs(parameters[1].astype(np.float64)) if len(parameters) > 1 else 0.0
        centred = x64 - x64.mean(axes, keepdims=True) if name == "layer_norm" and x.size else x64
        with np.errstate(invalid="ignore"):  # eps is negative in one sample: rows of NaN, as PyTorch has them
            r = 1 / np.sqrt((centred**2).sum(axes, keepdims=True) / max(np.prod(shape), 1) + eps)
        # PyTorch's float64 takes the mean off with an error of its own, which is all there is in a row of one element
        unit = np.abs(centred * r) + unit_of(np.float64) / unit_of(dtype) * np.abs(x64 * r)
        dunit = size * weight
        # a variance less 0.5 is off by more than its share
        worse = np.nan_to_num(1 + np.abs(eps) * r * r)
        check(got, y, ROUNDINGS * worse * (np.nan_to_num(unit) * weight + bias), dtype)
        means = [(z.sum(axes, keepdims=True) / max(np.prod(shape), 1)) for z in (dunit, dunit * unit)]
        grads = [g for g in pullback(dy) if g is not None]
        terms = np.nan_to_num(r * (dunit + means[0] + unit * means[1]))
        check(grads[0], exact[0], ROUNDINGS * worse * terms, dtype)
        sums = [np.nan_to_num(worse * unit * size).sum(lead), size.sum(lead)]
        for gradient, value, limit in zip(grads[1:], exact[1:], sums, strict=False):
            check(gradient, value, ROUNDINGS * limit, dtype)


@dtypes
def test_gelu(dtype):
    for sample in samples("nn.functional.gelu", dtype):
        x, tensor, approximate = to_numpy(sample.input), wide(sample.input), sample.kwargs["approximate"]
        dy = random_like(x.shape, dtype)
        y, (dx,) = autograd(
            lambda t=tensor, a=approximate: torch.nn.functional.gelu(t, approximate=a), [tensor], dy
        )
        got, pullback = sa.gelu_vjp(x, approximate)
        x64 = x.astype(np.float64)
        slope = np.abs(y / np.where(x64 == 0, 1, x64)) + (1 + np.abs(x64)) ** 3 * np.exp(-(x64**2) / 2)
        check(got, y, ROUNDINGS * (np.abs(y) + np.abs(x64) * np.exp(-(x64**2) / 2)), dtype)
        check(pullback(dy), dx, ROUNDINGS * np.abs(dy.astype(np.float64)) * slope, dtype)


@dtypes
def test_scaled_dot_product_attention(dtype):
    for sample in samples("nn.functional.scaled_dot_product_attention", dtype):
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
            # which weights PyTorch drops is not promised, nor could it be: it gets those that are dropped here
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
