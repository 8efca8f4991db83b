"""autograd through selfattn.interop.autograd: gradients by its own differences, bits, layers, refusals."""

import pickle

import numpy as np
import pytest

import selfattn as sa
from selfattn import functional, nn

autograd = pytest.importorskip("autograd")
door = pytest.importorskip("selfattn.interop.autograd")
differences = pytest.importorskip("autograd.test_util")

RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 5, 4))
MASK, ROWS, W = RNG.standard_normal((5, 5)), RNG.standard_normal((5, 2, 4)), RNG.standard_normal((3, 4, 4))
# The arguments of each function that are differentiated, and the others.
CALLS = {
    "scaled_dot_product_attention": ((Q, K, V, MASK), {"is_causal": True, "softcap": 2.0}),
    "additive_attention": ((Q, K, V, W[0], W[1], W[2, 0]), {}),
    "varlen_attention": (
        (ROWS, ROWS, ROWS),
        {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 2, 5], "return_lse": True},
    ),
    "merge_attention": (([Q, K], (Q[..., 0], K[..., 0])), {}),
    "relative_position_bias": ((MASK,), {"L": 3, "S": 4}),
    "softmax": ((Q,), {"axis": 1}),
    "apply_rotary_emb": ((Q, Q[0, :, :2], K[0, :, :2]), {}),
    "log_softmax": ((Q,), {}),
    "gelu": ((Q,), {"approximate": "tanh"}),
    "layer_norm": ((Q,), {"normalized_shape": 4}),
    "rms_norm": ((Q,), {"normalized_shape": 4, "eps": 1e-3}),
}


def check_grads(f, *arguments):
    """Check the gradients of all arguments; autograd's function checks those of one."""
    differences.check_grads(lambda given: f(*given), modes=["rev"], order=1)(arguments)


@pytest.mark.parametrize("name", [name for name in functional.__all__ if f"{name}_vjp" in functional.__all__])
def test_functions(name):
    arguments, options = CALLS[name]

    def f(*given):
        return getattr(door, name)(*given, **options)

    check_grads(f, *arguments)
    plain = getattr(functional, name)(*arguments, **options)
    np.testing.assert_equal(f(*arguments), plain)
    np.testing.assert_equal(autograd.make_vjp(f, 0)(*arguments)[1], plain)


def test_keywords_lists_and_dtypes():
    check_grads(lambda w, b: door.layer_norm(Q, 4, w, bias=b), W[0, 0], W[0, 1])
    check_grads(lambda a, b: door.softmax([a, b * b]), 0.5, 2.0)
    check_grads(
        lambda q, s: door.scaled_dot_product_attention(q, K, V, sinks=s, return_lse=True), Q, W[0, 0, :2]
    )
    attend = door.scaled_dot_product_attention  # of two traces, one inside the other
    outer = autograd.grad(lambda k: autograd.make_vjp(lambda q: attend(q, k, V))(Q)[1].sum())(K)
    np.testing.assert_array_equal(outer, sa.scaled_dot_product_attention_vjp(Q, K, V)[1](np.ones_like(Q)).key)
    gradient = autograd.grad(lambda q: (door.gelu(q) * Q).sum())(Q.astype(np.float32))
    np.testing.assert_array_equal(
        gradient, sa.functional.gelu_vjp(Q.astype(np.float32))[1](Q.astype(np.float32))
    )


@pytest.mark.parametrize("options", [{}, {"return_lse": True, "dropout_p": 0.4, "rng": 3}])
def test_attention_has_forward_mode_and_second_derivatives(options):
    def f(q, k, v, mask):
        return door.scaled_dot_product_attention(q, k, v, mask, softcap=2.0, **options)

    def loss(given):
        found = f(*given)
        out, lse = found if options else (found, np.zeros(1))
        return np.sum(np.sin(out)) + np.sum(lse**2)

    given = Q[0, :3], K[0], V[0], MASK[:3]
    differences.check_grads(lambda given: f(*given), modes=["fwd"], order=1)(given)
    differences.check_grads(loss, modes=["rev"], order=2)(given)
    product = autograd.hessian_vector_product(lambda q: loss((q, *given[1:])))(given[0], K[0, :3])
    hessian = autograd.hessian(lambda q: loss((q, *given[1:])))(given[0])
    np.testing.assert_allclose(product, np.tensordot(hessian, K[0, :3]), rtol=1e-12)


def test_layers():
    """Inputs by place and by name, layers that are used twice, some of the parameters, other results, plain calls."""
    x, call = RNG.standard_normal((2, 5, 8)), door.functional_call
    attention = nn.MultiheadAttention(8, 2, batch_first=True, dtype=np.float64, rng=0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=np.float64, rng=0)
    twice, embedding = nn.Sequential(layer, layer), nn.Embedding(5, 4, dtype=np.float64)
    check_grads(lambda p, x: call(attention, p, (x, x), {"value": x * x})[0], attention.parameters(), x)
    check_grads(lambda p, x: call(twice, p, x), twice.parameters(), x)
    check_grads(lambda p: call(embedding, p, ([0, 1, 1],)), embedding.parameters())
    check_grads(lambda x: call(nn.CrossEntropyLoss(), {}, (x[0], [0, 1, 2, 3, 7])), x)
    check_grads(lambda x: call(nn.ScaledDotProductAttention(), {}, (x, x, x)), x)
    some = autograd.grad(lambda p: (call(layer, p, x) * x).sum())({"norm1.bias": layer.norm1.bias})
    np.testing.assert_equal(some, {"norm1.bias": layer.vjp(x)[1](x)[1]["norm1.bias"]})
    np.testing.assert_array_equal(call(layer, {}, x), layer(x))


def test_dropout_draws_from_the_layer():
    by_hand, traced = (
        nn.Sequential(nn.Linear(4, 4, dtype=np.float64, rng=0), nn.Dropout(rng=1)) for _ in range(2)
    )
    for _ in range(2):
        gradient = autograd.grad(lambda p: (door.functional_call(traced, p, Q) * K).sum())
        np.testing.assert_equal(gradient(traced.parameters()), by_hand.vjp(Q)[1](K)[1])


def test_functions_are_pickled_by_name():
    assert pickle.loads(pickle.dumps(door.softmax)) is door.softmax


def test_refusals():
    wrong = {"weigth": "weigth of Linear does not exist", "bias": r"shape \(3,\), not \(2,"}
    for name, said in wrong.items():
        with pytest.raises(ValueError, match=said):
            door.functional_call(nn.Linear(4, 3), {name: Q}, Q)
    of_eps = "layer_norm has no gradient with respect to eps"
    for error, said, f in (
        (TypeError, of_eps, lambda x: door.layer_norm(Q, 4, eps=x[0])),
        (NotImplementedError, "VJP of selfattn_backward", autograd.jacobian(door.softmax)),
    ):
        with pytest.raises(error, match=said):
            autograd.jacobian(f)(np.ones(2))
    with pytest.raises(NotImplementedError, match="JVP of selfattn_forward"):
        autograd.make_jvp(door.softmax)(np.zeros(2))(np.ones(2))
