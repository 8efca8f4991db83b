"""Tangents and second derivatives in the definition: against finite differences, and against JAX's of the formula."""

import numpy as np
import pytest
from before_tests import examples
from drawn_attention import problems
from hypothesis import given

from selfattn import reference

FIELDS = reference.AttentionGradients._fields
STEP = 1e-6


def with_tangents(problem):
    """Return a drawn call's inputs that have tangents, random tangents of them, its other options, and a seed."""
    arrays, options, dropout_p, seed = problem
    rng = np.random.default_rng(seed)
    inputs = dict(zip(FIELDS, arrays, strict=False)) | options
    inputs = {name: inputs[name] for name in FIELDS if name in inputs and inputs[name].dtype != bool}
    others = {name: x for name, x in options.items() if name not in inputs}
    tangents = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}
    return inputs, tangents, others | {"dropout_p": dropout_p, "rng": seed}, rng


def along(inputs, tangents, step):
    return {name: x + step * tangents[name] for name, x in inputs.items()}


def difference(up, down):
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(up), (up - down) / (2 * STEP), 0)


@examples(150)
@given(problems())
def test_tangents_are_finite_differences(problem):
    inputs, tangents, options, rng = with_tangents(problem)
    got, got_dot = reference.scaled_dot_product_attention_jvp(
        **inputs, tangents=tangents, return_lse=True, **options
    )
    ends, pulled = [], []
    d = [rng.standard_normal((2, *x.shape)) for x in got]  # gradients of both results, and their tangents
    for step in (STEP, -STEP):
        result, pullback = reference.scaled_dot_product_attention_vjp(
            **along(inputs, tangents, step), return_lse=True, **options
        )
        ends.append(result)
        pulled.append(pullback(*(x[0] + step * x[1] for x in d)))
    plain = reference.scaled_dot_product_attention(**inputs, return_lse=True, **options)
    for x, same in zip(got, plain, strict=True):
        np.testing.assert_array_equal(x, same)
    (d_out, d_out_dot), (d_lse, d_lse_dot) = d
    grads, grads_dot = reference.scaled_dot_product_attention_hvp(
        **inputs,
        grad_out=d_out,
        tangents=tangents,
        grad_out_tangent=d_out_dot,
        grad_lse=d_lse,
        grad_lse_tangent=d_lse_dot,
        **options,
    )
    _, pullback = reference.scaled_dot_product_attention_vjp(**inputs, return_lse=True, **options)
    for name, x, same in zip(inputs, grads, pullback(d_out, d_lse), strict=True):
        np.testing.assert_allclose(x, same, rtol=1e-12, atol=1e-12, err_msg=name)
    # Central differences are off by STEP² times a third derivative, and by eps / STEP times the size of the numbers.
    for up, down, x in zip(*ends, got_dot, strict=True):
        np.testing.assert_allclose(x, difference(up, down), rtol=1e-6, atol=1e-6)
    for name, up, down, x in zip(inputs, *pulled, grads_dot, strict=True):
        assert x.shape == inputs[name].shape
        np.testing.assert_allclose(x, difference(up, down), rtol=1e-6, atol=2e-6, err_msg=name)


def formula(np, inputs, call, enable_gqa):
    """The plain formula in another library's NumPy, for the open pairs and kept weights of a call: (out, lse)."""
    q, k, v = (inputs[name] for name in FIELDS[:3])
    lead = call.query.shape[:-2]
    if enable_gqa:
        k, v = (np.repeat(x, q.shape[-3] // max(x.shape[-3], 1), axis=-3) for x in (k, v))
    scores = call.scale * q @ np.swapaxes(k, -1, -2)
    if call.softcap is not None:
        scores = call.softcap * np.tanh(scores / call.softcap)
    i, j = np.arange(q.shape[-2])[:, None], np.arange(k.shape[-2])

    def per_head(name):
        return np.broadcast_to(inputs[name], lead)[..., None, None]

    if "alibi_slopes" in inputs:
        scores = scores - per_head("alibi_slopes") * np.abs(i + call.offset - j)
    for name in ("attn_mask", "bias"):
        if name in inputs:
            scores = scores + np.where(np.isfinite(inputs[name]), inputs[name], 0)
    if "offset_bias" in inputs:
        numbers = np.where(np.isfinite(inputs["offset_bias"]), inputs["offset_bias"], 0)
        scores = scores + numbers[..., j - i + q.shape[-2] - 1]
    scores = np.broadcast_to(scores, call.allowed.shape)
    exps = np.where(call.allowed, np.exp(np.where(call.allowed, scores, 0)), 0)
    total = exps.sum(-1, keepdims=True)
    if "sinks" in inputs:
        total = total + np.exp(per_head("sinks"))
    alive = total > 0
    weights = exps / np.where(alive, total, 1)
    if call.keep is not None:
        weights = np.where(call.keep, weights / max(1 - call.dropout_p, 1e-9), 0)
    return weights @ v, np.log(np.where(alive, total, 1))[..., 0]


@examples(4)
@given(problems())
def test_second_derivatives_are_those_of_jax(problem):
    jax = pytest.importorskip("jax")
    inputs, tangents, options, rng = with_tangents(problem)
    with jax.enable_x64(True):
        check_with_jax(jax, inputs, tangents, options, rng)


def check_with_jax(jax, inputs, tangents, options, rng):
    call = reference.call.attention_call(**inputs, **options)
    arrays, dots = ({n: jax.numpy.asarray(x) for n, x in each.items()} for each in (inputs, tangents))

    def attend(arrays):
        return formula(jax.numpy, arrays, call, options.get("enable_gqa"))

    (out, lse), (out_dot, lse_dot) = jax.jvp(attend, (arrays,), (dots,))
    d_out, d_out_dot = rng.standard_normal((2, *out.shape))
    d_lse, d_lse_dot = rng.standard_normal((2, *lse.shape))

    def loss(arrays, d_out, d_lse):
        out, lse = attend(arrays)
        return (out * d_out).sum() + (lse * d_lse).sum()

    grads, grads_dot = jax.jvp(jax.grad(loss), (arrays, d_out, d_lse), (dots, d_out_dot, d_lse_dot))
    got, got_dot = reference.scaled_dot_product_attention_jvp(
        **inputs, tangents=tangents, return_lse=True, **options
    )
    found, found_dot = reference.scaled_dot_product_attention_hvp(
        **inputs,
        grad_out=d_out,
        tangents=tangents,
        grad_out_tangent=d_out_dot,
        grad_lse=d_lse,
        grad_lse_tangent=d_lse_dot,
        **options,
    )
    alive = np.isfinite(got[1])
    pairs = {"out": (got[0], out), "lse": (np.where(alive, got[1], 0), lse)}
    pairs |= {"out'": (got_dot[0], out_dot), "lse'": (got_dot[1], lse_dot)}
    for name in inputs:
        pairs |= {
            name: (getattr(found, name), grads[name]),
            name + "'": (getattr(found_dot, name), grads_dot[name]),
        }
    for name, (x, expected) in pairs.items():
        largest = max(1.0, np.abs(expected).max(initial=0))
        np.testing.assert_allclose(x, expected, rtol=1e-11, atol=1e-11 * largest, err_msg=name)
