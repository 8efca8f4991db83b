"""nn.MultiheadAttention, nn.SelfAttention, nn.ScaledDotProductAttention: masks, dropout, every step;
test_every_layer.py has gradients."""

import math

import numpy as np
import pytest
from nn_checks import assert_close, perturbed
from refusals import refusals

import selfattn as sa
from selfattn import nn

N, L, S, E, HEADS = 2, 5, 7, 8, 2
RNG = np.random.default_rng(9)
PADDING = np.arange(S) >= np.array([[4], [7]])  # True = ignore
PAIRS = RNG.random((L, S)) < 0.3
PAIRS[:, 0] = False  # no row ignores everything: PyTorch has NaN there
PER_HEAD = RNG.random((N * HEADS, L, S)) < 0.3
PER_HEAD[..., 0] = False


def make(arguments, **more):
    arguments = {"embed_dim": E, "num_heads": HEADS} | arguments
    return nn.MultiheadAttention(**arguments, **more)


def inputs_for(layer):
    """Query, key and value in the layer's order of axes."""
    rng = np.random.default_rng(3)
    shapes = [(N, L, E), (N, S, layer.kdim), (N, S, layer.vdim)]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    return arrays if layer.batch_first else [x.swapaxes(0, 1) for x in arrays]


def test_lengths_are_padding_at_the_end():
    for batch_first in (True, False):
        layer = make({"batch_first": batch_first}, dtype=np.float64, rng=0)
        inputs = inputs_for(layer)
        output, weights = layer(*inputs, key_lengths=[4, 7])
        expected, expected_weights = layer(*inputs, key_padding_mask=PADDING)
        assert_close(output, expected, "float64", n=E)
        assert_close(weights, expected_weights, "float64", n=E)
    one = [x[:, 0] for x in inputs]
    assert_close(layer(*one, key_lengths=4)[0], output[:, 0], "float64", n=E)


@pytest.mark.parametrize("masks", [{"key_padding_mask": PADDING}, {"key_lengths": [4, 7]}])
def test_padding_may_hold_anything(masks):
    layer = make({"batch_first": True}, dtype=np.float64, rng=0)
    query, *others = inputs_for(layer)
    results = []
    for filler in (0.0, np.nan, np.inf):
        filled = (np.where(PADDING[..., None], filler, x) for x in others)
        (output, weights), pullback = layer.vjp(query, *filled, **masks)
        (dq, dk, dv), grads = pullback(np.ones_like(output))
        np.testing.assert_array_equal(dv[PADDING], 0)
        results.append([output, weights, dq, dk, dv, *grads.values()])
        for got, expected in zip(results[-1], results[0], strict=True):
            assert_close(got, expected, "float64", n=2 * N * S)


def test_a_row_that_ignores_everything_is_zero_before_the_output_projection():
    layer = perturbed(make({"batch_first": True}, dtype=np.float64, rng=0))
    inputs = inputs_for(layer)
    mask = np.zeros((L, S), bool)
    mask[2] = True
    (output, weights), pullback = layer.vjp(*inputs, attn_mask=mask)
    np.testing.assert_array_equal(output[:, 2], np.broadcast_to(layer.out_proj.bias, (N, E)))
    np.testing.assert_array_equal(weights[:, 2], 0)
    (dq, _, _), grads = pullback(np.ones_like(output))
    np.testing.assert_array_equal(dq[:, 2], 0)
    assert all(np.isfinite(grad).all() for grad in grads.values())
    everything = layer(*inputs, key_padding_mask=np.ones((N, S), bool))
    np.testing.assert_array_equal(everything[1], 0)


def test_two_float_masks_of_the_least_numbers_leave_a_uniform_row():
    layer = make({"batch_first": True}, rng=0)
    inputs = [x.astype(np.float32) for x in inputs_for(layer)]
    least = float(np.finfo(np.float32).min)
    pairs, padding = (np.full((n, S), least, np.float32) for n in (L, N))
    weights = layer(*inputs, attn_mask=pairs, key_padding_mask=padding)[1]
    np.testing.assert_allclose(weights, 1 / S, rtol=4 * np.finfo(np.float32).eps)


NAN, INF, MOST = np.nan, np.inf, float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("pair", "padding", "weights"),
    [
        # key 0 gets both numbers, key 1 the padding's alone, key 2 gets 0
        (-MOST, -MOST, [0, 0, 1]),
        (-MOST, MOST, [0, 1, 0]),
        (MOST, MOST, [1, 0, 0]),
        (INF, -INF, [0, 0, 1]),
        (-INF, NAN, [0, NAN, NAN]),
        (NAN, -INF, [0, 0, 1]),
    ],
)
def test_a_pair_that_one_mask_closes_is_closed_and_finite_numbers_stay_finite(pair, padding, weights):
    layer = nn.MultiheadAttention(2, 1, rng=0)
    pairs, paddings = np.float32([[pair, 0, 0]]), np.float32([padding, padding, 0])
    query, key = np.zeros((1, 2), np.float32), np.zeros((3, 2), np.float32)
    found = layer(query, key, key, attn_mask=pairs, key_padding_mask=paddings)[1]
    np.testing.assert_array_equal(found, [weights])


def test_numbers_of_a_wide_mask_stay_finite_in_a_narrow_layer():
    """Keys whose masks are all float64's lowest number are open; converted to -inf they would be closed."""
    layer, x = nn.MultiheadAttention(2, 1, rng=0), np.zeros((3, 2), np.float32)
    least = np.full(3, np.finfo(np.float64).min)
    _, weights = layer(x, x, x, attn_mask=np.zeros((3, 3), bool), key_padding_mask=least)
    np.testing.assert_allclose(weights, 1 / 3, rtol=1e-6)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 3), (3, 0), (1, 1)])
def test_lengths_of_0_and_1(n_queries, n_keys):
    layer = make({}, rng=0)
    query, key = np.ones((n_queries, 2, E), np.float32), np.ones((n_keys, 2, E), np.float32)
    (output, weights), pullback = layer.vjp(query, key, key)
    assert output.shape == (n_queries, 2, E) and weights.shape == (2, n_queries, n_keys)
    (dq, dk, dv), _ = pullback(output)
    assert dq.shape == query.shape and dk.shape == dv.shape == key.shape


def test_dropout_acts_on_the_weights_while_training():
    layer = make({"dropout": 0.5, "batch_first": True}, dtype=np.float64, rng=0)
    inputs = inputs_for(layer)
    assert layer.training
    (_, weights), _ = layer.vjp(*inputs, average_attn_weights=False)
    assert 0.3 < (weights == 0).mean() < 0.7  # 140 weights: more than four deviations either way
    assert (layer(*inputs)[1] != weights.mean(axis=1)).any()
    layer.eval()
    kept = layer(*inputs, average_attn_weights=False)[1]
    np.testing.assert_allclose(weights, np.where(weights == 0, 0, 2 * kept), rtol=1e-14)


def ones(*shape):
    return np.ones(shape, np.float32)


F64 = {"dtype": np.float64}
X = np.random.default_rng(5).standard_normal((2, 5, 6))
LENGTHS = [5, 3]
KINDS = {
    "plain": {},
    "other width of values": {"d_v": 3},
    "other width of values, bias": {"d_v": 7, "bias": True},
    "dot": {"score": "dot"},
    "unscaled": {"scale": False, "d_v": 2},
    "additive": {"score": "additive", "d_v": 3},
    "additive, bias": {"score": "additive", "bias": True},
}


def layer_of(kind, **more):
    return nn.SelfAttention(6, 4, **KINDS[kind], **({"rng": 0} | F64 | more))


def test_weights_and_biases_are_drawn_one_after_the_other():
    layer = nn.SelfAttention(4, 2, bias=True, d_v=3, rng=sa.torch_rng(7))
    torch_like = sa.torch_rng(7)
    for name, shape in {
        "W_query": (4, 2),
        "W_key": (4, 2),
        "W_value": (4, 3),
        "b_query": (2,),
        "b_key": (2,),
        "b_value": (3,),
    }.items():
        np.testing.assert_array_equal(layer.parameters()[name], torch_like.random(shape, np.float32))


def test_scores_have_two_names_for_unscaled():
    assert layer_of("unscaled").score == layer_of("dot").score == "dot"
    same = layer_of("plain")
    np.testing.assert_array_equal(nn.SelfAttention(6, 4, scale=False, rng=0, **F64)(X), layer_of("dot")(X))
    assert (same(X) != layer_of("dot")(X)).any()
    text = "SelfAttention(d_in=6, d_out=4, d_v=3, score='scaled_dot', W_query=(6, 4)"
    assert repr(layer_of("other width of values")).startswith(text)


MASK = np.random.default_rng(1).random((2, 5, 5)) < 0.5
OPTIONS = {
    "none": {},
    "mask": {"attn_mask": MASK},
    "float mask": {"attn_mask": np.where(MASK[0], 0.5, -np.inf)},
    "lengths": {"key_lengths": LENGTHS, "num_threads": 1},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.5, "rng": 3},
}
BLOCKS = {
    "SelfAttention": lambda: layer_of("other width of values, bias"),
    "SelfAttention, dot": lambda: layer_of("dot"),
    "SelfAttentionBlock": lambda: nn.SelfAttentionBlock(6, rng=0, **F64),
    "SelfAttentionBlock of 3 heads": lambda: nn.SelfAttentionBlock(6, 3, rng=0, **F64),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_the_last_step_is_the_output(name, options):
    layer = perturbed(BLOCKS[name]())
    steps = layer.steps(X, **OPTIONS[options])
    assert_close(steps.result, layer(X, **OPTIONS[options]), "float64", n=6)
    heads = getattr(layer, "num_heads", 1)
    assert steps.weights.shape == ((2, heads, 5, 5) if heads > 1 else (2, 5, 5))
    for array in layer.parameters().values():
        assert array.flags.writeable


@pytest.mark.parametrize("options", ["none", "mask", "float mask", "lengths", "causal"])
@pytest.mark.parametrize("kind", ["additive", "additive, bias"])
def test_the_last_step_of_an_additive_score_is_the_output(kind, options):
    layer = perturbed(layer_of(kind, dtype=np.float64))
    steps = layer.steps(X, **OPTIONS[options])
    assert_close(steps.result, layer(X, **OPTIONS[options]), "float64", n=6)
    q, k = (X @ getattr(layer, f"W_{name}") for name in ("query", "key"))
    if "bias" in kind:
        q, k = q + layer.b_query, k + layer.b_key
    scores = np.tanh(q[:, :, None] + k[:, None]) @ layer.v
    assert_close(steps.scores, scores, "float64", n=6)
    np.testing.assert_array_equal(steps.scaled_scores, steps.scores)
    assert "tanh(query[i] + key[j]) @ v" in repr(steps)


@pytest.mark.parametrize(("heads", "batch_first"), [(1, True), (2, False)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"key_padding_mask": np.arange(5) >= np.array([[3], [5]])},
        {"attn_mask": ~np.tri(4, 5, dtype=bool)},
        {"key_lengths": LENGTHS, "is_causal": True},
    ],
    ids=["none", "padding", "mask", "lengths"],
)
def test_the_steps_of_several_heads_end_in_the_output(options, batch_first, heads):
    layer = nn.MultiheadAttention(6, heads, kdim=4, batch_first=batch_first, rng=0, **F64)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((2, n, width)) for n, width in ((4, 6), (5, 4), (5, 6))]
    given = inputs if batch_first else [x.swapaxes(0, 1) for x in inputs]
    steps = layer.steps(*given, **options)
    output, weights = layer(*given, **options, average_attn_weights=False)
    assert_close(steps.result, output if batch_first else output.swapaxes(0, 1), "float64", n=6)
    assert_close(steps.weights if heads > 1 else steps.weights[:, None], weights, "float64", n=6)
    one = layer.steps(*(x[0] for x in inputs))
    assert_close(one.result, layer(*(x[0] for x in inputs))[0], "float64", n=6)


def test_the_steps_of_a_layer_that_drops_are_those_of_its_next_call():
    x = X[0]
    layers = [nn.MultiheadAttention(6, 2, dropout=0.5, rng=4, **F64) for _ in range(2)]
    assert_close(layers[0].steps(x, x, x).result, layers[1](x, x, x)[0], "float64", n=6)


ENCODER = nn.TransformerEncoderLayer(2, 1, 2, batch_first=True)


B, H, ROWS, COLUMNS, D, DV = 2, 3, 4, 5, 6, 2
DRAW = np.random.default_rng(5)
Q, K, V = (
    DRAW.standard_normal(shape) for shape in ((B, H, ROWS, D), (B, H, COLUMNS, D), (B, H, COLUMNS, DV))
)
WORDS = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])[:, None, None, :]  # (batch, 1, 1, len)
NOTHING = np.array([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0]])[:, None, None, :]  # a sentence without words
PER_QUERY = (DRAW.random((ROWS, COLUMNS)) < 0.5) & (np.arange(ROWS) != 1)[:, None]
MASKS = {"none": None, "padding": WORDS, "booleans": WORDS == 1, "nothing": NOTHING, "per query": PER_QUERY}

attention = nn.ScaledDotProductAttention()


class Halve(nn.Module):
    """A dropout without randomness."""

    def forward(self, x):
        return x * x.dtype.type(0.5)

    def vjp(self, x):
        return self(x), lambda dy: (dy * dy.dtype.type(0.5), {})


def as_taught(query, key, value, mask=None, dropout=None):
    """Compute the tutorial's code in NumPy."""
    scores = query @ key.swapaxes(-1, -2) / math.sqrt(query.shape[-1])
    if mask is not None:
        scores = np.where(mask == 0, -1e9, scores)
    scores = scores - scores.max(-1, keepdims=True)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    weights = weights if dropout is None else dropout(weights)
    return weights @ value, weights


@pytest.mark.parametrize(("dropout", "dtype"), [(None, "float32"), (Halve(), "float64")])
@pytest.mark.parametrize("mask", MASKS)
def test_values_and_weights_are_those_of_the_tutorial(mask, dropout, dtype):
    expected = as_taught(Q, K, V, MASKS[mask], dropout)
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    for result in (
        attention(*arrays, MASKS[mask], dropout),
        attention.forward(*arrays, mask=MASKS[mask], dropout=dropout),
        attention.vjp(*arrays, MASKS[mask], dropout)[0],
    ):
        for got, wanted in zip(result, expected, strict=True):
            assert_close(got, wanted, dtype, n=D + COLUMNS)


@pytest.mark.parametrize("dropout", [None, Halve()], ids=["", "dropout"])
@pytest.mark.parametrize("mask", MASKS)
def test_gradients_are_those_of_finite_differences(mask, dropout):
    def f(query, key, value):
        results, pullback = attention.vjp(query, key, value, MASKS[mask], dropout)

        def both(d_values, d_weights):
            d_inputs, grads = pullback(d_values, d_weights)
            assert grads == {}
            return d_inputs

        return results, both

    sa.check_vjp(f, Q, K, V)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_row_that_the_mask_closes_is_uniform(dtype):
    arrays = [x.astype(dtype) for x in (Q, K, V)]
    (values, weights), pullback = attention.vjp(*arrays, NOTHING)
    assert values.dtype == weights.dtype == dtype
    eps = float(np.finfo(dtype).eps)
    np.testing.assert_allclose(weights[1].astype(float), 1 / COLUMNS, rtol=4 * eps)
    means = np.broadcast_to(V[1].mean(-2, keepdims=True), values[1].shape)
    np.testing.assert_allclose(values[1].astype(float), means, rtol=0, atol=8 * eps)
    (dq, dk, dv), _ = pullback(np.ones_like(values))
    np.testing.assert_array_equal(dq[1], 0)
    np.testing.assert_array_equal(dk[1], 0)
    np.testing.assert_allclose(dv[1].astype(float), ROWS / COLUMNS, rtol=8 * eps)
    # the function of the same name has zeros there
    zeros = sa.scaled_dot_product_attention(*arrays, NOTHING == 1)
    np.testing.assert_array_equal(zeros[1], 0)
    np.testing.assert_array_equal(zeros[0], values[0])


def test_uniform_rows_are_uniform_over_what_exists():
    lengths = np.array([[5], [2]])
    values, weights = attention(Q, K, V, NOTHING, key_lengths=lengths)
    np.testing.assert_allclose(weights[1, :, :, :2], 0.5, rtol=1e-15)
    np.testing.assert_array_equal(weights[1, :, :, 2:], 0)
    np.testing.assert_allclose(
        values[1], np.repeat(V[1, :, :2].mean(-2, keepdims=True), ROWS, -2), rtol=1e-13
    )
    np.testing.assert_array_equal(attention(Q, K, V, NOTHING, key_lengths=[[5], [0]])[0][1], 0)


def test_attn_mask_and_key_lengths_are_those_of_the_function():
    bias = DRAW.standard_normal((ROWS, COLUMNS))
    bias[0, 0] = -np.inf
    for options in ({"attn_mask": PER_QUERY}, {"attn_mask": bias}, {"key_lengths": [[3], [5]]}):
        expected = sa.scaled_dot_product_attention(Q, K, V, **options, return_weights=True)
        np.testing.assert_equal(attention(Q, K, V, **options), expected)
    both = attention(Q, K, V, WORDS, attn_mask=bias)[1]
    expected = sa.scaled_dot_product_attention(
        Q, K, V, np.where(WORDS == 1, bias, -np.inf), return_weights=True
    )[1]
    np.testing.assert_array_equal(both, expected)
    sa.check_vjp(
        lambda q, k, v: (lambda out, pullback: (out[0], lambda dy: pullback(dy)[0]))(
            *attention.vjp(q, k, v, WORDS, attn_mask=bias, key_lengths=[[3], [4]])
        ),
        *(Q, K, V),
    )


@pytest.mark.parametrize("dropout", [None, Halve()], ids=["", "dropout"])
def test_words_that_are_not_there_may_hold_anything(dropout):
    closed = np.broadcast_to(WORDS == 0, (B, H, 1, COLUMNS)).swapaxes(-1, -2)
    results = []
    for filler in (0.0, np.nan, np.inf):
        k, v = np.where(closed, filler, K), np.where(closed, filler, V)
        (values, weights), pullback = attention.vjp(Q, k, v, WORDS, dropout)
        results.append([values, weights, *pullback(np.ones_like(values))[0]])
    for others in results[1:]:
        for got, expected in zip(others, results[0], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-15)


def test_leading_dims_broadcast_and_may_be_missing():
    values, _ = attention(Q[0, 0], K[0, 0], V[0, 0])
    assert_close(values, as_taught(Q[0, 0], K[0, 0], V[0, 0])[0], "float64", n=COLUMNS)
    shared = K[:, :1]
    (values, weights), pullback = attention.vjp(Q, shared, V)
    assert_close(values, as_taught(Q, shared, V)[0], "float64", n=COLUMNS)
    assert pullback(values, weights)[0][1].shape == shared.shape
    for n_queries, n_keys in ((0, 3), (3, 0), (1, 1)):
        q, k = np.ones((1, 2, n_queries, 4)), np.ones((1, 2, n_keys, 4))
        for mask in (None, np.zeros((1, 1, 1, n_keys), int)):
            (values, weights), pullback = attention.vjp(q, k, k, mask)
            assert values.shape == q.shape and weights.shape == (1, 2, n_queries, n_keys)
            assert [d.shape for d in pullback(values)[0]] == [q.shape, k.shape, k.shape]


def test_the_dropout_of_the_call_is_applied_to_the_weights():
    plain = attention(Q, K, V, WORDS)[1]
    values, weights = attention(Q, K, V, WORDS, nn.Dropout(0.5, rng=3))
    np.testing.assert_array_equal(weights, nn.Dropout(0.5, rng=3)(plain))
    np.testing.assert_allclose(values, weights @ V, rtol=1e-13, atol=1e-15)
    np.testing.assert_array_equal(attention(Q, K, V, WORDS, nn.Dropout(0.5).eval())[1], plain)
    np.testing.assert_array_equal(attention(Q, K, V, dropout=lambda w: 0 * w)[0], 0)


test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: make({"num_heads": 3}), ValueError, "3 does not divide 8"),
    (lambda: make({"embed_dim": 0}), ValueError, "embed_dim must be at least 1"),
    (lambda: make({"add_bias_kv": True}), NotImplementedError, "add_bias_kv=True is not supported"),
    (lambda: make({"add_zero_attn": True}), NotImplementedError, "add_zero_attn=True is not supported"),
    (lambda: make({"dropout": 1.5}), ValueError, "dropout must be between 0 and 1, not 1.5"),
    (lambda: make({"dropout": "0.5"}), TypeError, "dropout must be a real number, not '0.5'"),
    (lambda: make({})(ones(3, 2, 7), ones(3, 2, 8), ones(3, 2, 8)), ValueError, r"query .* \(..., 8\)"),
    (lambda: make({"kdim": 5})(*3 * [ones(3, 2, 8)]), ValueError, r"key .* \(..., 5\)"),
    (lambda: make({})(ones(3, 8), *2 * [ones(3, 2, 8)]), ValueError, r"\(L, N, E\), not \(3, 8\)"),
    (lambda: make({})(*3 * [ones(1, 3, 2, 8)]), ValueError, r"not \(1, 3, 2, 8\)"),
    (lambda: make({})(ones(3, 2, 8), ones(4, 2, 8), ones(3, 2, 8)), ValueError, r"\(4, 2, 8\) and value"),
    (lambda: make({})(ones(2, 3, 8), ones(2, 4, 8), ones(2, 4, 8)), ValueError, "batch_first=False"),
    (lambda: make({})(*3 * [ones(3, 2, 8)], PADDING[:, :3].T), ValueError, r"\(2, 3\), not \(3, 2\)"),
    (lambda: make({})(*3 * [ones(3, 2, 8)], attn_mask=PER_HEAD[:2, :3, :3]), ValueError, r"\(4, 3, 3\), not"),
    (lambda: make({})(*3 * [ones(3, 8)], attn_mask=np.eye(3, dtype=int)), TypeError, "ignore .* int64"),
    (lambda: make({})(*3 * [ones(3, 2, 8)], key_lengths=[4, 1]), ValueError, "key_lengths"),
    (lambda: make({}).vjp(*3 * [ones(3, 8)])[1](ones(3, 7)), ValueError, r"d_output .* not \(3, 7\)"),
    (lambda: nn.SelfAttention(2, 3, d_v=0), ValueError, "d_v must be at least 1, not 0"),
    (lambda: nn.SelfAttention(2, 3, score="cosine"), ValueError, '"additive", not .cosine.'),
    (lambda: nn.SelfAttention(2, 3, scale=False, score="additive"), ValueError, "scale=False means"),
    (lambda: layer_of("additive")(X, window=(1, 1)), TypeError, "window"),
    (lambda: layer_of("additive").steps(X, window=(1, 1)), TypeError, "window"),
    (lambda: nn.SelfAttention(2, 3).steps(np.ones((2, 4))), ValueError, r"\(..., 2\), not \(2, 4\)"),
    (lambda: nn.SelfAttention(2, 3).steps(np.ones((2, 2)), return_lse=True), TypeError, "return_lse"),
    (lambda: nn.SelfAttentionBlock(2)(np.ones((2, 2)), np.ma.ones((2, 2))), TypeError, "MaskedArray"),
    *(
        (
            lambda layer=layer: layer(np.ones((1, 2, 2)), key_lengths=np.ma.ones(1, int)),
            TypeError,
            "key_lengths is a Mask",
        )
        for layer in (nn.SelfAttentionBlock(2), ENCODER, nn.TransformerEncoder(ENCODER, 1))
    ),
    (lambda: attention(Q, K, V, WORDS.astype(float)), TypeError, "mask .* not float64 .*attn_mask="),
    (lambda: attention(Q, K, V, np.ones((2, 5))), TypeError, "not float64"),
    (lambda: attention(Q, K, V, np.ones((2, 5), int)), ValueError, r"mask \(2, 5\) does not .*"),
    (lambda: attention(Q, K, V, np.ones((1, 2, 1, 1, 5), int)), ValueError, "does not broadcast"),
    (lambda: attention(Q, K, V, dropout=0.1), TypeError, r"nn.Dropout\(0.1\), not 0.1"),
    (lambda: attention.vjp(Q, K, V, dropout=lambda w: w), TypeError, "with a vjp"),
    (lambda: attention(Q, K, V, dropout=lambda w: w[0]), ValueError, r"not \(3, 4, 5\)"),
    (lambda: attention(Q, K[..., 1:], V), ValueError, r"\(2, 3, 4, 6\), key .* \(2, 3, 5, 5\)"),
    (lambda: attention(Q, K[..., 1:], V, WORDS), ValueError, "the same last dimension"),
    (lambda: attention(Q > 0, K, V), TypeError, "query must hold floats or integers, not bool"),
    (lambda: attention.vjp(Q, K, V)[1](np.ones(3)), ValueError, r"d_values .*, not \(3,\)"),
)


def biased_calls():
    """Layers that take biases: a call of a layer's vjp with both biases, (y, pullback), and arrays for it."""
    rng = np.random.default_rng(4)
    x, pair, offsets = rng.standard_normal((N, L, E)), rng.standard_normal((HEADS, L, L)), 2 * L - 1
    by_offset, mask = rng.standard_normal((N, HEADS, offsets)), PAIRS[:, :L]
    mha = make({"batch_first": True}, dtype=np.float64, rng=0)
    block = nn.SelfAttentionBlock(E, HEADS, dtype=np.float64, rng=0)
    single = nn.SelfAttention(E, E, dtype=np.float64, rng=0)
    attention = nn.ScaledDotProductAttention(dtype=np.float64)

    def of_one(layer, **options):
        def call(x, bias, offset_bias):
            y, pullback = layer.vjp(x, bias=bias, offset_bias=offset_bias, **options)
            return y, lambda dy: pullback(dy)[0]

        return call

    def of_three(layer, **options):
        def call(q, k, v, bias, offset_bias):
            (y, _), pullback = layer.vjp(q, k, v, bias=bias, offset_bias=offset_bias, **options)
            return y, lambda dy: pullback(dy)[0]

        return call

    heads = [rng.standard_normal((N, HEADS, L, 4)) for _ in range(3)]
    floats = np.where(PADDING[:, :L], -0.5, 0)
    return {
        "MultiheadAttention": (of_three(mha, attn_mask=mask), [x, x + 1, x - 1, pair, by_offset]),
        "with padding of floats": (of_three(mha, key_padding_mask=floats), [x, x, x, pair, by_offset]),
        "SelfAttentionBlock": (of_one(block, attn_mask=~mask), [x, pair, by_offset]),
        "SelfAttention": (of_one(single, is_causal=True), [x, pair[0], by_offset[:, 0]]),
        "ScaledDotProductAttention": (of_three(attention, mask=~mask), [*heads, pair, by_offset[0]]),
    }


@pytest.mark.parametrize("name", biased_calls())
def test_biases_have_gradients_that_follow_those_of_the_inputs(name):
    call, arrays = biased_calls()[name]
    sa.check_vjp(call, *arrays)
    y, pullback = call(*arrays)
    assert [d.shape for d in pullback(np.ones_like(y))] == [x.shape for x in arrays]
    without, _ = call(*arrays[:-2], 0 * arrays[-2], 0 * arrays[-1])
    assert np.abs(y - without).max() > 1e-3


@pytest.mark.parametrize("heads", [1, HEADS])
def test_steps_with_biases_end_in_the_output(heads):
    layer = make({"batch_first": True, "num_heads": heads}, dtype=np.float64, rng=0).eval()
    rng = np.random.default_rng(4)
    q, k, v = inputs_for(layer)
    options = {
        "bias": rng.standard_normal((1, heads, L, S)),
        "offset_bias": rng.standard_normal((heads, L + S - 1)),
    }
    for padding in (PADDING, np.where(PADDING, -0.5, 0)):
        steps = layer.steps(q, k, v, key_padding_mask=padding, attn_mask=PAIRS, **options)
        output, _ = layer(q, k, v, key_padding_mask=padding, attn_mask=PAIRS, **options)
        assert_close(steps.result, output, "float64", n=E)
