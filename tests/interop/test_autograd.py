"""autograd through selfattn.interop.autograd: gradients by its own differences, bits, a training run, refusals."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import functional, nn, optim

autograd = pytest.importorskip("autograd")
door = pytest.importorskip("selfattn.interop.autograd")
anp, check_grads = autograd.numpy, pytest.importorskip("autograd.test_util").check_grads

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 5, 4))
MASK, ROWS, W = RNG.standard_normal((5, 5)), RNG.standard_normal((5, 2, 4)), RNG.standard_normal((3, 4, 4))
COS, SIN = np.cos(Q[0, :, :2]), np.sin(Q[0, :, :2])
# The arguments of each function: those that are differentiated, and the others.
CALLS = {
    "scaled_dot_product_attention": ((Q, K, V, MASK), {"is_causal": True, "softcap": 2.0}),
    "additive_attention": ((Q, K, V, W[0], W[1], W[2, 0]), {}),
    "varlen_attention": ((ROWS, ROWS, ROWS), {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 5]}),
    "merge_attention": (([Q, K], (Q[..., 0], K[..., 0])), {}),
    "apply_rotary_emb": ((Q, COS, SIN), {}), "layer_norm": ((Q, 4), {}), "rms_norm": ((Q, 4), {"eps": 1e-3}),
    "softmax": ((Q,), {"axis": 1}), "log_softmax": ((Q,), {}), "gelu": ((Q,), {"approximate": "tanh"}),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in functional.__all__ if f"{name}_vjp" in functional.__all__])
def test_functions(name):
    arguments, options = CALLS[name]
    traced = [x for x in arguments if not isinstance(x, int)]
    call = getattr(door, name)

    def f(*given):
        return call(*given, *arguments[len(given) :], **options)

    check_grads(f, modes=["rev"], order=1)(*traced)
    plain = getattr(functional, name)(*arguments, **options)
    for result in f(*arguments), autograd.make_vjp(f, 0)(*arguments)[1]:
        for own, expected in zip(
            *([x] if isinstance(x, np.ndarray) else x for x in (result, plain)), strict=True
        ):
            np.testing.assert_array_equal(own, expected)


def test_parameters_lists_and_other_results():
    x, weight, bias, sinks = Q, RNG.standard_normal(4), RNG.standard_normal(4), np.ones(2)
    check_grads(lambda w, b: door.layer_norm(x, 4, w, bias=b), modes=["rev"], order=1)(weight, bias)
    check_grads(lambda a, b: door.softmax([a, b * b]), modes=["rev"], order=1)(0.5, 2.0)
    check_grads(
        lambda q, s: door.scaled_dot_product_attention(q, K, V, sinks=s, return_lse=True),
        modes=["rev"],
        order=1,
    )(Q, sinks)
    loss = autograd.grad(
        lambda q: anp.sum(door.scaled_dot_product_attention(q, K, V, return_lse=True)[1] ** 2)
    )
    out, pullback = sa.scaled_dot_product_attention_vjp(Q, K, V, return_lse=True)
    np.testing.assert_array_equal(loss(Q), pullback(np.zeros_like(Q), 2 * out[1]).query)
    assert autograd.grad(lambda q: anp.sum(door.gelu(q) * Q))(Q.astype(np.float32)).dtype == np.float32


def test_layers():
    """Inputs, parameters, all or some, tied or nested, and results that have no gradient."""
    x = RNG.standard_normal((2, 5, 8))
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=np.float64, rng=0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=np.float64, rng=0)
    twice = nn.Sequential(layer, layer)
    call, embedding, loss = door.functional_call, nn.Embedding(5, 4, dtype=np.float64), nn.CrossEntropyLoss()
    for f, module, inputs in (
        (lambda p, x: call(attention, p, (x, x), {"value": x * x})[0], attention, (x,)),
        (lambda p, x: call(twice, p, x), twice, (x,)),
        (lambda p: call(embedding, p, ([0, 1, 1],)), embedding, ()),
        (lambda p, x: call(loss, p, (x[0], [0, 1, 2, 3, 7])), loss, (x,)),
        (lambda p, x: call(nn.ScaledDotProductAttention(), p, (x, x, x)), loss, (x,)),
    ):
        check_grads(f, modes=["rev"], order=1)(module.parameters(), *inputs)
    part = autograd.grad(lambda p: anp.sum(door.functional_call(layer, {"norm1.bias": p["b"]}, x) ** 2))
    assert list(part({"b": np.zeros(8)})) == ["b"]
    np.testing.assert_array_equal(door.functional_call(layer, {}, x), layer(x))


def test_a_training_run_takes_the_steps_of_one_by_hand():
    x, results = RNG.standard_normal((3, 5, 8)).astype(np.float32), []
    for by_hand in True, False:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, rng=0)
        optimizer = optim.Adam(layer.parameters())
        loss = autograd.grad(lambda p, of: anp.sum(door.functional_call(of, p, x)))
        for _ in range(3):
            if by_hand:
                y, pullback = layer.vjp(x)
                optimizer.step(pullback(np.ones_like(y))[1])
            else:
                optimizer.step(loss(layer.parameters(), layer))
        results.append(layer(x))
    np.testing.assert_array_equal(*results)


def test_refusals():
    layer = nn.Linear(2, 3)
    for parameters, said in (
        ({"weigth": Q}, "weigth of Linear does not exist"),
        ({"bias": Q}, r"shape \(3,\), not \(2,"),
    ):
        with pytest.raises(ValueError, match=said):
            door.functional_call(layer, parameters, Q[..., :2])
    with pytest.raises(TypeError, match="layer_norm has no gradient with respect to eps"):
        autograd.grad(lambda eps: anp.sum(door.layer_norm(Q, 4, eps=eps)))(1e-5)
    with pytest.raises(NotImplementedError, match="VJP of selfattn_backward"):
        autograd.hessian(lambda x: door.softmax(x)[0])(np.zeros(2))
    with pytest.raises(NotImplementedError, match="JVP of selfattn_forward"):
        autograd.make_jvp(door.softmax)(np.zeros(2))(np.ones(2))
