"""JAX through selfattn.interop.jax: gradients by its own differences, bits in every dtype, vmap by a loop, refusals."""

from functools import partial

import numpy as np
import pytest

import selfattn as sa

jax = pytest.importorskip("jax")
door = pytest.importorskip("selfattn.interop.jax")
sdpa, dot_product_attention = door.scaled_dot_product_attention, door.dot_product_attention
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


SMALL = Q[0, :, :2, :2], K[0, :, :3, :2], V[0, :, :3, :1]
SECOND = {
    "scores": (
        {"softcap": 2.0, "window": [1, None]},
        {"attn_mask": MASK[:2, :3], "sinks": SINKS, "alibi_slopes": SINKS},
    ),
    "biases": (
        {"return_lse": True, "is_causal": True},
        {"bias": MASK[:2, :3], "offset_bias": MASK[:3, :4]},
    ),
    "dropout": ({"dropout_p": 0.3, "rng": 3, "key_lengths": [2]}, {}),
}


@pytest.mark.parametrize("name", SECOND)
def test_forward_mode_and_second_derivatives(name):
    options, named = SECOND[name]

    def f(q, k, v, named):
        found = sdpa(q, k, v, **named, **options)
        return jnp.sin(found[0]) * found[1][..., None] if "return_lse" in options else jnp.sin(found)

    check_grads(f, (*SMALL, named), order=1, modes=["fwd", "rev"])
    loss = jax.jit(lambda *x: jnp.sum(f(*x)))
    check_grads(
        jax.grad(loss, range(4)), (*SMALL, named), order=1, modes=["fwd", "rev"], atol=1e-4, rtol=1e-4
    )

    def product(direction):
        return jax.jvp(jax.grad(lambda q: loss(q, *SMALL[1:], named)), SMALL[:1], (direction,))[1]

    found = jax.vmap(product)(Q[:, :, :2, :2])
    np.testing.assert_allclose(found[1], product(Q[1, :, :2, :2]), rtol=1e-11, atol=1e-13)


def test_hessian_and_linearize():
    q, k, v = SMALL

    def plain(q):
        return jax.nn.softmax(q @ k.swapaxes(-1, -2) / 2**0.5) @ v

    def mine(q):
        return sdpa(q, k, v)

    for hessian in jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)):
        found, expected = (hessian(lambda q, f=f: jnp.sum(jnp.sin(f(q))))(q) for f in (mine, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)
    out, along = jax.linearize(mine, q)
    expected = jax.jvp(plain, (q,), (q,))
    np.testing.assert_allclose([out, along(q)], expected, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(jax.jvp(along, (q,), (q,))[1], expected[1], rtol=1e-11, atol=1e-14)


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
        (NotImplementedError, "nothing of forward mode", jax.jacfwd(jax.jacfwd(lambda q: sdpa(q, K, V)))),
        (NotImplementedError, "no third", jax.jacfwd(jax.hessian(lambda q: jnp.sum(sdpa(q, K, V))))),
    ):
        with pytest.raises(error, match=said):
            f(Q)
    with jax.enable_x64(False):
        assert sdpa([[1, 2]], [[1, 2]], [[3, 4]]).dtype == np.float32


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "local_window_size": (3, 1)},
        {"bias": (1, 4, 5, 6), "mask": (3, 1, 1, 6), "scale": 0.3},
        {"mask": (1, 4, 5, 6), "local_window_size": 4},
        {"bias": (3, 1, 5, 6), "key_value_seq_lengths": [6, 1, 4], "query_seq_lengths": [5, 2, 3]},
    ],
    ids=str,
)
@pytest.mark.parametrize("batched", [True, False])
def test_the_call_of_jax_nn(options, batched):
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape)) for shape in ((3, 5, 4, 8), (3, 6, 2, 8), (3, 6, 2, 8))
    )
    options = {name: jnp.int32(x) if name.endswith("lengths") else x for name, x in options.items()}
    if "bias" in options:
        options["bias"] = jnp.asarray(rng.standard_normal(options["bias"]))
    if "mask" in options:
        options["mask"] = jnp.asarray(rng.random(options["mask"]) < 0.7).at[..., 0].set(True)
    if not batched:
        q, k, v = q[:1][0], k[:1][0], v[:1][0]
        options = {name: x[0] if name in ("bias", "mask") else x for name, x in options.items()}
        options = {name: x[:1] if name.endswith("lengths") else x for name, x in options.items()}
    ours, theirs = (
        partial(f, return_residual=True, **options)
        for f in (dot_product_attention, jax.nn.dot_product_attention)
    )
    for found, expected in zip(ours(q, k, v), theirs(q, k, v), strict=True):
        assert found.shape == expected.shape
        if "query_seq_lengths" not in options or found.ndim > 3:  # the rest of lse is unspecified there
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)  # JAX weighs in float32
    if "bias" in options and "query_seq_lengths" not in options:
        gradients = [
            jax.grad(lambda b, f=f: f(q, k, v, **(options | {"bias": b})).sum())(options["bias"])
            for f in (dot_product_attention, jax.nn.dot_product_attention)
        ]
        np.testing.assert_allclose(*gradients, rtol=0, atol=1e-5)


def test_refusals_of_the_call_of_jax_nn():
    x = jnp.ones((2, 3, 1, 4))
    for wrong, error, message in (
        ({"mask": jnp.ones((3, 3))}, TypeError, "mask must be of bool, not float64; floats are a bias"),
        ({"implementation": "cudnn"}, ValueError, "implementation must be None or 'xla'"),
    ):
        with pytest.raises(error, match=message):
            dot_product_attention(x, x, x, **wrong)
    with pytest.raises(ValueError, match="3 axes or 4"):
        dot_product_attention(x[0, 0], x[0, 0], x[0, 0])


def test_shard_map_outside_jit():
    mesh = jax.make_mesh((1,), ("x",))
    spec = jax.sharding.PartitionSpec("x")
    given = [jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)) for x in (Q, K, V)]
    sharded = jax.shard_map(partial(sdpa, is_causal=True), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(sharded(*given), sdpa(Q, K, V, is_causal=True))
