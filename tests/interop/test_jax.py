"""JAX through selfattn.interop.jax: gradients by its own differences, bits in every dtype, vmap by a loop, refusals."""

from functools import partial

import numpy as np
import pytest

import selfattn as sa

jax = pytest.importorskip("jax")
sdpa = pytest.importorskip("selfattn.interop.jax").scaled_dot_product_attention
jnp, check_grads = jax.numpy, pytest.importorskip("jax.test_util").check_grads
RNG = np.random.default_rng(0)
Q, K, V = RNG.standard_normal((3, 2, 3, 5, 4))
MASK, SINKS = RNG.standard_normal((5, 5)), RNG.standard_normal(3)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_gradients(wrap):
    check = partial(check_grads, order=1, modes=["rev"])
    check(wrap(partial(sdpa, enable_gqa=True, is_causal=True)), (Q, K[:, :1], V[:, :1]))
    options = {"window": [2, None], "softcap": 2.0, "scale": 0.3}
    check(wrap(lambda *x: sdpa(*x[:4], sinks=x[4], **options)), (Q, K, V, MASK, SINKS))
    lengths = jnp.array([[3], [5]])
    check(wrap(lambda q, a: sdpa(q, K, V, key_lengths=lengths, alibi_slopes=a, return_lse=True)), (Q, SINKS))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("options", [{"causal": "lower_right"}, {"dropout_p": 0.3, "rng": 2**40 + 3}])
def test_bits(dtype, options):
    given = [jnp.asarray(x, dtype) for x in (Q, K, V)]
    plain, plain_pullback = sa.scaled_dot_product_attention_vjp(*map(np.asarray, given), **options)
    for wrap in (lambda f: f), jax.jit:
        out, pullback = jax.vjp(wrap(partial(sdpa, **options)), *given)
        results = wrap(partial(sdpa, **options))(*given), out, *pullback(out)
        for x, expected in zip(results, (plain, plain, *plain_pullback(plain)), strict=False):
            assert x.dtype == dtype
            np.testing.assert_array_equal(np.asarray(x).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.3, "rng": jax.random.key(7)}])
@pytest.mark.parametrize(
    "axes", [(0, 0, 0, None, None), (None, None, None, 0, None), (None, None, 0, None, 0)]
)
def test_vmap_is_a_loop(axes, options):
    arrays = Q, K, V, np.stack([MASK, -MASK]), np.stack([SINKS, -SINKS])
    given = [x[0] if axis is None else x for axis, x in zip(axes, arrays, strict=True)]

    @partial(jax.grad, argnums=range(5), has_aux=True)
    def f(q, k, v, mask, sinks):
        out = sdpa(q, k, v, mask, sinks=sinks, **options)
        return jnp.sum(out * K[0]), out

    each = [f(*(x if axis is None else x[n] for axis, x in zip(axes, given, strict=True))) for n in range(2)]
    found = jax.jit(jax.vmap(f, axes))(*given)
    jax.tree.map(np.testing.assert_array_equal, found, jax.tree.map(lambda *x: np.stack(x), *each))


def test_vmap_of_the_backward_pass():
    jacobian = jax.jacrev(partial(sdpa, key=K, value=V))(Q)
    expected = jax.grad(lambda q: jnp.sum(sdpa(q, K, V)))(Q)
    np.testing.assert_allclose(jnp.sum(jacobian, range(4)), expected, rtol=1e-12, atol=1e-15)


def test_refusals_and_default_floats():
    for error, said, f in (
        (ValueError, r"key has shape \(2, 3, 5, 3\)", jax.jit(lambda q: sdpa(q, K[..., :3], V))),
        (TypeError, "dropout needs an int, a key of jax.random or", lambda q: sdpa(q, K, V, dropout_p=0.5)),
        (TypeError, "a key of jax.random or its uint32 as rng, not 'x'", lambda q: sdpa(q, K, V, rng="x")),
        (TypeError, "unexpected keyword argument 'out'", lambda q: sdpa(q, K, V, out=V)),
        (TypeError, "forward-mode", lambda q: jax.jvp(lambda q: sdpa(q, K, V), (q,), (q,))),
        (ValueError, "Buffer callbacks do not support JVP", jax.hessian(lambda q: jnp.sum(sdpa(q, K, V)))),
    ):
        with pytest.raises(error, match=said):
            f(Q)
    with jax.enable_x64(False):
        assert sdpa([[1, 2]], [[1, 2]], [[3, 4]]).dtype == np.float32
