"""Forward mode and products with the Hessian: every option, dtype and instruction set against the definition."""

import numpy as np
import pytest
from gradients import everything
from inputs import (
    BFLOAT16,
    BLOCK_MASKS,
    FLOAT_IDS,
    FLOATS,
    LAYOUTS,
    SETS_OF_OPTIONS,
    options_together,
    random_inputs,
)
from instruction_sets import ISAS, using
from ml_dtypes import finfo
from refusals import refusals

import selfattn as sa
from selfattn import reference
from selfattn.functional import scaled_dot_product_attention_hvp as hvp
from selfattn.functional import scaled_dot_product_attention_jvp as jvp

NAMES = sa.AttentionGradients._fields
# Around the rows and keys of a tile; sizes 0 and 1 have a test of their own.
SIZES = [(3, 170), (70, 97), (130, 67), (17, 33), (64, 64), (1, 300)]


def problem(names, n, dtype, *, gqa=2, block_mask=None):
    """Return a call's inputs that have tangents, its other options, tangents, and gradients with theirs."""
    rng = np.random.default_rng(n)
    (L, S), lead = SIZES[n % len(SIZES)], (2, 4)
    arrays = random_inputs((*lead, L, 20), S, dtype=dtype, key_heads=4 // gqa, v_width=12, seed=n)
    options = options_together(names, lead, L, S, rng)
    if block_mask is not None:
        options["block_mask"] = BLOCK_MASKS[block_mask]((4,), L, S, rng)
    given = dict(zip(NAMES, arrays, strict=False)) | options
    wrt = everything(options)
    inputs = {name: given[name] for name in wrt}
    others = {name: x for name, x in options.items() if name not in inputs} | {"enable_gqa": gqa > 1}
    tangents = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in inputs.items()}
    compute = np.float64 if dtype == np.float64 else np.float32
    rows = {"grad_out": ((*lead, L, 12), dtype), "grad_lse": ((*lead, L), compute)}
    rows |= {f"{name}_tangent": row for name, row in rows.items()}
    return inputs, others, tangents, {x: rng.standard_normal(s).astype(t) for x, (s, t) in rows.items()}


def compared(got, exact, what, eps):
    """Compare numbers with those in float64: a few hundred roundings of the largest, then the last one."""
    assert got.shape == exact.shape, what
    size = np.abs(exact[np.isfinite(exact)]).max(initial=1e-3)
    bound = 300 * eps * size + finfo(got.dtype).eps * np.where(np.isfinite(exact), np.abs(exact), 0)
    with np.errstate(invalid="ignore"):
        wrong = ~(np.abs(got.astype(np.float64) - exact) <= bound) & (got.astype(np.float64) != exact)
    assert not wrong.any(), f"{what}: {np.abs(got.astype(np.float64) - exact).max() / size / eps} eps"


def check(inputs, others, tangents, rows, *, num_threads=None, clean=None):
    """Compare both functions with the definition, of `clean` inputs and tangents if these differ in closed pairs."""
    wide, wide_tangents = clean or (inputs, tangents)
    lists = [{n: x.astype(np.float64) for n, x in each.items()} for each in (wide, wide_tangents, rows)]
    exact = reference.scaled_dot_product_attention_jvp(
        **lists[0], tangents=lists[1], return_lse=True, **others, compute_dtype=np.float64
    )
    wanted = reference.scaled_dot_product_attention_hvp(
        **lists[0], tangents=lists[1], **lists[2], **others, compute_dtype=np.float64
    )
    call = inputs | others | {"tangents": tangents, "num_threads": num_threads}
    found = jvp(**call, return_lse=True)
    grads = hvp(**call, **rows, wrt=tuple(inputs))
    eps = np.finfo(found[0][1].dtype).eps
    for n, what in enumerate(("", "'")):
        for name, x, y in zip(("out", "lse"), found[n], exact[n], strict=True):
            assert x.flags.c_contiguous
            compared(x, y, name + what, eps)
        assert grads[n]._fields == tuple(inputs)
        for name, x in inputs.items():
            gradient = getattr(grads[n], name)
            assert gradient.dtype == x.dtype and gradient.shape == x.shape and gradient.flags.c_contiguous
            compared(gradient, getattr(wanted[n], name), name + what, eps)
    return found, grads


@pytest.mark.parametrize("names", SETS_OF_OPTIONS, ids="+".join)
def test_every_option_agrees_with_the_definition(names):
    n = SETS_OF_OPTIONS.index(names)
    for k, dtype in enumerate((np.float64, np.float32)):
        with using(ISAS[(n + k) % len(ISAS)]):
            check(*problem(names, n + 5 * k, np.dtype(dtype), gqa=1 + n % 2), num_threads=1 + k)


@pytest.mark.parametrize("kind", BLOCK_MASKS)
def test_block_masks(kind):
    for n, names in enumerate([("plain",), ("bias", "softcap", "dropout"), ("sinks", "is_causal")]):
        check(*problem(names, n, np.dtype(np.float64), block_mask=kind))


@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
def test_dtypes(dtype):
    for n, names in enumerate([("plain",), ("bias", "sinks", "is_causal")]):
        inputs, others, tangents, rows = problem(names, n, dtype)
        for name in ("query", "key", "value"):  # scores of a few units, whose exponentials 16 bits hold
            inputs[name] = (inputs[name] / dtype.type(2)).astype(dtype)
        (_, (out_tangent, _)), _ = check(inputs, others, tangents, rows)
        assert out_tangent.dtype == dtype


def test_instruction_sets_and_threads_and_other_names_in_wrt():
    inputs, others, tangents, rows = problem(
        ("alibi_slopes", "offset_bias", "softcap"), 1, np.dtype(np.float32)
    )
    call = inputs | others | {"tangents": tangents}
    for isa in ISAS:
        with using(isa):
            (out, _), dots = jvp(**call, return_lse=True, num_threads=1)
            grads = hvp(**call, **rows, wrt=tuple(inputs), num_threads=1)
            for threads in (2, 5):
                again, dots_again = jvp(**call, num_threads=threads)
                np.testing.assert_array_equal(again, out)
                np.testing.assert_array_equal(dots_again, dots[0])
                for name in inputs:
                    one = hvp(**call, **rows, wrt=name, num_threads=threads)
                    for whole, (alone,) in zip(grads, one, strict=True):
                        np.testing.assert_array_equal(getattr(whole, name), alone, err_msg=name)


@pytest.mark.parametrize(
    "names", [("bool_mask",), ("bias", "offset_bias"), ("lower_right", "window"), ("key_lengths",)]
)
def test_nan_in_closed_keys_adds_nothing(names):
    for n, dtype in enumerate((np.float64, np.float32)):
        inputs, others, tangents, rows = problem(names, n, np.dtype(dtype), gqa=1)
        seen = reference.call.attention_call(**inputs, **others).allowed.any(-2)
        dirty, dirty_tangents = dict(inputs), dict(tangents)
        for name in ("key", "value"):
            dirty[name] = np.where(seen[..., None], inputs[name], dtype(np.nan))
            dirty_tangents[name] = np.where(seen[..., None], tangents[name], dtype(np.inf))
        check(dirty, others, dirty_tangents, rows, clean=(inputs, tangents))


@pytest.mark.parametrize(("L", "S", "width"), [(0, 3, 2), (3, 0, 2), (3, 4, 0), (1, 1, 1), (0, 0, 0)])
def test_the_smallest_sizes(L, S, width):
    rng = np.random.default_rng(0)
    inputs = dict(zip(NAMES, rng.standard_normal((3, 2, max(L, S), width)), strict=False))
    inputs = {name: x[:, : L if name == "query" else S] for name, x in inputs.items()}
    inputs |= {"sinks": rng.standard_normal(2), "bias": rng.standard_normal((L, 1))}
    inputs["offset_bias"] = rng.standard_normal((2, L + S - 1 if L and S else 0))
    tangents = {name: rng.standard_normal(x.shape) for name, x in inputs.items()}
    rows = {name: rng.standard_normal((2, L, width)) for name in ("grad_out", "grad_out_tangent")}
    rows |= {name: rng.standard_normal((2, L)) for name in ("grad_lse", "grad_lse_tangent")}
    check(inputs, {}, tangents, rows)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_of_tangents_and_gradients(layout):
    inputs, others, tangents, rows = problem(("bias", "sinks"), 1, np.dtype(np.float32))
    laid = ({name: layout(x) for name, x in each.items()} for each in (inputs, tangents, rows))
    a, b, c = laid
    expected = hvp(**inputs, **others, tangents=tangents, **rows)
    for x, y in zip(hvp(**a, **others, tangents=b, **c), expected, strict=True):
        for one, other in zip(x, y, strict=True):
            np.testing.assert_array_equal(one, other)


def test_shared_heads_have_gradients_of_their_own():
    inputs, others, tangents, rows = problem(("plain",), 1, np.dtype(np.float64), gqa=1)
    for name in ("key", "value"):
        inputs[name] = np.broadcast_to(inputs[name][:1], inputs[name].shape)
        tangents[name] = np.broadcast_to(tangents[name][:, :1], tangents[name].shape)
    check(inputs, others, tangents, rows)


def test_what_is_left_out_does_not_move():
    inputs, others, tangents, rows = problem(("sinks", "float_mask"), 1, np.dtype(np.float64))
    call = inputs | others
    for names in (("key",), ("sinks", "attn_mask"), ()):
        some = {name: tangents[name] for name in names}
        zeros = {name: tangents[name] if name in names else np.zeros_like(x) for name, x in inputs.items()}
        for rest in (rows, {"grad_out": rows["grad_out"]}):
            a, b = (hvp(**call, tangents=t, **rest, wrt=tuple(inputs)) for t in (some, zeros))
            for x, y in zip(a[1], b[1], strict=True):
                np.testing.assert_array_equal(x, y)
    listed = jvp(**call, tangents=(None, tangents["key"], None))
    np.testing.assert_array_equal(listed[1], jvp(**call, tangents={"key": tangents["key"]})[1])
    grads, dots = hvp(**call, tangents={}, grad_out=None, grad_lse=rows["grad_lse"])
    _, again = hvp(**call, tangents=grads, **rows)  # a tuple of gradients is one of tangents by name
    assert again._fields == ("query", "key", "value") and not any(x.any() for x in dots)


def test_the_hessian_is_symmetric_at_a_larger_size():
    rng = np.random.default_rng(0)
    q, k, v, a, b, d = rng.standard_normal((6, 3, 400, 16))
    _, along_a = hvp(q, k, v, d, (a, None, None), is_causal=True)
    _, along_b = hvp(q, k, v, d, (None, b, None), is_causal=True)
    np.testing.assert_allclose((along_a.key * b).sum(), (along_b.query * a).sum(), rtol=1e-11)


# ---------------------------------------------------------------------------- biases as programs give them


def plain(q, k, v, added, scale=None):
    scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.swapaxes(-1, -2) + added
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def test_bias_and_mask_of_alphafold_swin_keras_and_t5():
    rng = np.random.default_rng(0)

    def drawn(*shape):
        return rng.standard_normal(shape)

    def both(q, k, v, bias, mask, **options):
        """Compare with a mask of -1e9, and the bias's gradient with that of a mask that is multiplied out."""
        out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, mask, bias=bias, wrt="bias", **options)
        added = np.where(mask, bias, -1e9)
        np.testing.assert_allclose(out, plain(q, k, v, added), atol=1e-13)
        whole = np.where(mask, bias, -np.inf)
        d = drawn(*out.shape)
        _, of_whole = sa.scaled_dot_product_attention_vjp(q, k, v, whole, wrt="attn_mask", **options)
        summed = reference.arrays.sum_to_shape(of_whole(d).attn_mask, bias.shape)
        np.testing.assert_allclose(pullback(d).bias, summed, atol=1e-12)

    # AlphaFold: a mask of keys and a pair bias, heads of width 8.
    mask = rng.random((5, 1, 1, 30)) < 0.8
    both(drawn(5, 4, 20, 8), drawn(5, 4, 30, 8), drawn(5, 4, 30, 8), drawn(4, 20, 30), mask)
    # Swin: windows are the batch, and shifted ones have masks of their own.
    mask = (rng.random((6, 1, 49, 49)) < 0.8) | np.eye(49, dtype=bool)
    both(drawn(6, 3, 49, 32), drawn(6, 3, 49, 32), drawn(6, 3, 49, 32), drawn(3, 49, 49), mask)
    # Keras: (B, T, N, H), a bias of any shape that broadcasts, then causality.
    q, k, v = drawn(3, 2, 17, 4, 16).swapaxes(-2, -3)
    bias, causal = drawn(2, 1, 17, 17), np.tri(17, dtype=bool)
    out = sa.scaled_dot_product_attention(q, k, v, bias=bias, is_causal=True)
    np.testing.assert_allclose(out, plain(q, k, v, np.where(causal, bias, -1e9)), atol=1e-13)
    # T5: no scale, a table by offset that layers share, padding.
    table, mask = drawn(32, 4), np.arange(40) < [[[[31]]], [[[40]]]]
    q, k, v = drawn(3, 2, 4, 40, 8)
    bias, to_table = sa.functional.relative_position_bias_vjp(table, 40, 40)
    out, pullback = sa.scaled_dot_product_attention_vjp(
        q, k, v, mask, offset_bias=bias, scale=1.0, wrt="offset_bias"
    )
    pairs = bias[:, np.arange(40) - np.arange(40)[:, None] + 39]
    np.testing.assert_allclose(out, plain(q, k, v, np.where(mask, pairs, -1e9), 1.0), atol=1e-13)
    assert to_table(pullback(out).offset_bias).shape == table.shape


@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 9), (9, 1), (70, 40), (40, 70), (0, 4), (4, 0)])
def test_a_bias_by_offset_is_that_bias_of_pairs(causal, L, S):
    rng = np.random.default_rng(0)
    q, k, v = random_inputs((2, 3, L, 8), S, dtype=np.float64)
    offsets = rng.standard_normal((3, L + S - 1 if L and S else 0))
    bias = reference.call.of_pairs(offsets, L, S)
    calls = ({"offset_bias": offsets}, {"bias": bias})
    found = [sa.scaled_dot_product_attention_vjp(q, k, v, causal=causal, **x, wrt=[*x]) for x in calls]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-13)
    d = rng.standard_normal(found[0][0].shape)
    (by_offset,), (of_pairs,) = (pullback(d) for _, pullback in found)
    np.testing.assert_allclose(by_offset, reference.attention_vjp.sum_by_offset(of_pairs), atol=1e-12)


# -------------------------------------------------------------------------------------------- refusals

Q, K, V = random_inputs((2, 5, 4), 6, dtype=np.float32)
BOOL, FLOAT = np.ones((5, 6), bool), np.zeros((5, 6), np.float32)
test_refusals_of_tangents = refusals(
    (lambda: jvp(Q, K, V, (Q, K)), TypeError, "those of query, key, value .* not 2"),
    (lambda: jvp(Q, K, V, Q), TypeError, "or a mapping, not ndarray"),
    (lambda: jvp(Q, K, V, {"scale": 1.0}), r"tangents may name query, .*offset_bias; it has 'scale'"),
    (lambda: jvp(Q, K, V, {"bias": FLOAT}), "tangents has bias, which was not given"),
    (lambda: jvp(Q, K, V, {"attn_mask": FLOAT}, BOOL), "has attn_mask, which is boolean and has no tangent"),
    (
        lambda: jvp(Q, K, V, (Q[:1], None, None)),
        r"the tangent of query has shape \(1, 5, 4\); query has \(2, 5, 4\)",
    ),
    (lambda: jvp(Q, K, V, (Q > 0, None, None)), TypeError, "the tangent of query has dtype bool"),
    (lambda: jvp(Q, K, V, (Q.astype("f8"), None, None)), TypeError, "float64, but the result has float32"),
    (lambda: jvp(Q, K, V, (None,) * 3, bias=BOOL), TypeError, "bias must be float"),
    (lambda: jvp(Q, K, V, (None,) * 3, FLOAT, bias=FLOAT), "attn_mask and bias are both float"),
    (lambda: jvp(Q, K[..., 1:], V, (None,) * 3), ("key", "(2, 6, 3)")),
    (lambda: jvp(Q, K, V, (None,) * 3, return_weights=True), TypeError, "unexpected .* 'return_weights'"),
    (lambda: jvp(Q, K, V, (None,) * 3, out=Q), TypeError, "unexpected .* 'out'"),
    (lambda: hvp(Q, K, V, Q, (None,) * 3, cu_seqlens_q=[0]), TypeError, "unexpected .* 'cu_seqlens_q'"),
    (lambda: hvp(Q, K, V, None, (None,) * 3), TypeError, "grad_out must be an array, not None"),
    (lambda: hvp(Q, K, V, Q[:1], (None,) * 3), r"grad_out has shape \(1, 5, 4\)"),
    (
        lambda: hvp(Q, K, V, Q, (None,) * 3, grad_out_tangent=Q.astype("f8")),
        TypeError,
        "grad_out_tangent has dtype",
    ),
    (lambda: hvp(Q, K, V, Q, (None,) * 3, wrt="bias"), "wrt names bias, which was not given"),
    (lambda: hvp(Q, K, V, Q, (None,) * 3, BOOL, wrt="attn_mask"), "attn_mask is boolean and has no gradient"),
)
test_refusals_of_biases = refusals(
    (lambda: sa.scaled_dot_product_attention(Q, K, V, bias=FLOAT[:, :5]), "bias must broadcast"),
    (
        lambda: sa.scaled_dot_product_attention(Q, K, V, bias=FLOAT.astype(int)),
        TypeError,
        "bias must be float",
    ),
    (lambda: sa.scaled_dot_product_attention(Q, K, V, offset_bias=FLOAT), r"L \+ S - 1\) = \(2, 10\)"),
    (lambda: sa.attention_steps(Q, K, V, bias=FLOAT[:, :5]), "bias .* does not broadcast"),
    (lambda: sa.attention_steps(Q, K, V, bias=BOOL), TypeError, "bias has dtype bool"),
    (lambda: sa.attention_steps(Q, K, V, FLOAT, bias=FLOAT), "attn_mask and bias are both float"),
    (lambda: sa.attention_steps(Q, K, V, offset_bias=FLOAT), "does not end with .* = 10"),
)


def test_bfloat16_is_computed_in_float32():
    q, k, v = (x.astype(BFLOAT16) for x in (Q, K, V))
    t = q[:, ::-1]
    out, dot = jvp(q, k, v, (t, None, None))
    wide = jvp(*(x.astype(np.float32) for x in (q, k, v)), (t.astype(np.float32), None, None))
    np.testing.assert_array_equal(out, wide[0].astype(BFLOAT16))
    np.testing.assert_array_equal(dot, wide[1].astype(BFLOAT16))
