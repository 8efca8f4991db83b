"""Layers, activations, positions, states, dtypes, reprs, options of a Sequential, errors; test_every_layer.py has
numbers and gradients."""

import math
import re
import warnings

import numpy as np
import pytest
from nn_checks import check_gradients, perturbed
from refusals import refusals

import selfattn as sa
from selfattn import nn, reference
from selfattn._check import Entries
from selfattn.engine.rope import read_rope

EPS32 = float(np.finfo(np.float32).eps)
ROWS = np.random.default_rng(5).standard_normal((2, 5, 6))
F64 = {"dtype": np.float64}


def test_linear_by_its_definition_for_any_leading_shape():
    layer = nn.Linear(6, 3, rng=0, dtype=np.float64)
    for shape in [(6,), (0, 6), (1, 6), (2, 0, 6), (2, 3, 6)]:
        x = np.random.default_rng(0).standard_normal(shape)
        y, pullback = layer.vjp(x)
        np.testing.assert_allclose(y, np.einsum("...i,oi->...o", x, layer.weight) + layer.bias, atol=1e-14)
        dx, grads = pullback(y)
        assert dx.shape == shape and grads["weight"].shape == (3, 6)


@pytest.mark.parametrize("rows", [300, 1100])
def test_linear_of_many_rows(rows, isa):
    """Many rows are split into several tasks, and so are their sums in the weights' gradients."""
    rng = np.random.default_rng(rows)
    layer = nn.Linear(37, 70, rng=0)
    x, dy = (rng.standard_normal((rows, n)).astype(np.float32) for n in (37, 70))
    y, pullback = layer.vjp(x)
    dx, grads = pullback(dy)
    wide = [array.astype(np.float64) for array in (x, dy, layer.weight, layer.bias)]
    x64, dy64, weight, bias = wide
    for got, expected, terms in (
        (y, x64 @ weight.T + bias, 37),
        (dx, dy64 @ weight, 70),
        (grads["weight"], dy64.T @ x64, rows),
        (grads["bias"], dy64.sum(axis=0), rows),
    ):
        atol = 4 * EPS32 * terms**0.5 * np.abs(expected).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)
    np.testing.assert_array_equal(layer(x[rows - 1 :]), y[rows - 1 :])


def test_half_precision_adds_up_in_float32():
    layer = nn.Linear(4096, 1, bias=False, rng=0, dtype=np.float16)
    layer.weight[...] = 1
    x = np.full((1, 4096), 0.25, np.float16)
    y = layer(x)
    assert y.dtype == np.float16 and y[0, 0] == 1024
    ones = np.ones((4096, 4096), np.float16)
    assert layer.vjp(ones)[1](np.full((4096, 1), 0.25, np.float16))[1]["weight"][0, 0] == 1024


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_a_norm_with_one_more_parameter_computes_the_same(norm):
    plain, more = norm(6), norm(6)
    more.register_parameter("gain", np.ones(6, np.float32))
    (y, pullback), (expected, plain_pullback) = more.vjp(ROWS), plain.vjp(ROWS)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_equal(pullback(ROWS), plain_pullback(ROWS))


def test_embedding_looks_up_and_adds_up():
    table = nn.Embedding(5, 2, padding_idx=-1, rng=0, dtype=np.float64)
    np.testing.assert_array_equal(table.weight[4], 0)
    ids = np.array([[1, 1, 4], [0, 1, 3]])
    y, pullback = table.vjp(ids)
    np.testing.assert_array_equal(y, table.weight[ids])
    dy = np.arange(12.0).reshape(2, 3, 2)
    expected = np.zeros((5, 2))
    for row, grad in zip(ids.ravel(), dy.reshape(-1, 2), strict=True):
        expected[row] += grad if row != 4 else 0
    np.testing.assert_array_equal(pullback(dy)["weight"], expected)
    y, pullback = table.vjp([])
    assert y.shape == (0, 2) and not pullback(y)["weight"].any()


def test_dropout_keeps_a_share_and_only_in_training():
    layer = nn.Dropout(0.25, rng=0)
    x = np.ones(20000)
    y, pullback = layer.vjp(x)
    assert set(np.unique(y)) == {0, 1 / 0.75}
    # five standard deviations of a mean of 20000
    assert abs((y == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 20000)
    np.testing.assert_array_equal(pullback(x)[0], y)
    assert pullback(x)[1] == {}
    assert (layer(x) != y).any()
    np.testing.assert_array_equal(nn.Dropout(0.25, rng=0)(x), y)
    np.testing.assert_array_equal(layer.eval()(x), x)
    np.testing.assert_array_equal(nn.Dropout(1.0)(x), 0 * x)
    np.testing.assert_array_equal(nn.Dropout(0.0)(x), x)
    endless = np.full(64, np.inf)
    with np.errstate(all="raise"):  # infinity times 0 gives no warning
        y, pullback = nn.Dropout(0.25, rng=0).vjp(endless)
        assert np.isnan(y).any() and np.isnan(pullback(endless)[0]).any()
        assert np.isnan(nn.Dropout(1.0)(endless)).all()


def test_state_dicts_go_round_and_are_checked_first():
    a, b = (nn.SelfAttentionBlock(4, rng=seed) for seed in (0, 1))
    names = [f"{n}.{p}" for n in ("query", "key", "value", "ln") for p in ("weight", "bias")]
    assert list(a.state_dict()) == list(a.parameters()) == names
    live = b.parameters()["query.weight"]
    assert b.load_state_dict(a.state_dict()) == ([], [])
    np.testing.assert_array_equal(live, a.query.weight)
    state = a.state_dict() | {"query.bias": np.zeros(3, np.float32), "more": np.zeros(1)}
    state["query.weight"] += 1
    del state["ln.bias"]
    with pytest.raises(
        ValueError, match=r"missing: ln.bias(.|\n)*unexpected: more(.|\n)*query.bias has shape"
    ):
        b.load_state_dict(state)
    np.testing.assert_array_equal(live, a.query.weight)
    del state["query.bias"]
    assert b.load_state_dict(state, strict=False) == (["query.bias", "ln.bias"], ["more"])
    with pytest.raises(ValueError, match="lose precision"):
        b.load_state_dict({name: array.astype(np.float64) for name, array in a.state_dict().items()})


@pytest.mark.parametrize("swapped", [">f8", ">f4", ">f2"])
def test_the_byte_order_of_a_dtype_does_not_count(swapped):
    native = np.dtype(swapped).newbyteorder("=")
    for make in (
        lambda **options: nn.Linear(2, 3, **options),
        lambda **options: nn.GPT(5, 4, 1, 2, 4, **options),
        lambda **options: nn.EmbeddingModel(len, 5, 4, max_seq_len=4, **options),
    ):
        ours, plain = make(dtype=swapped, rng=0), make(dtype=native, rng=0)
        assert {array.dtype for array in ours.parameters().values()} == {native}
        assert all(array.dtype.isnative for array in ours.parameters().values())
        np.testing.assert_equal(ours.parameters(), plain.parameters())


def test_a_weight_in_another_byte_order_is_as_wide():
    layer, x = nn.Linear(2, 3, bias=False, dtype=np.float64, rng=0), np.ones((1, 2), np.float32)
    expected = layer(x)
    layer.register_parameter("weight", layer.weight.astype(">f8"))
    assert layer(x).dtype == np.float64
    np.testing.assert_array_equal(layer(x), expected)
    filled = [nn.init.normal_(np.empty(3, dtype), rng=0) for dtype in (">f8", "=f8")]
    np.testing.assert_array_equal(*filled)


def test_a_state_may_be_made_of_the_parameters_themselves():
    """Layers swap their parameters, and a weight is transposed: loading reads all arrays before it writes."""
    model = nn.Sequential(nn.Linear(2, 2, rng=0), nn.Linear(2, 2, rng=1))
    before, live = model.state_dict(), model.parameters()

    def swapped(x):
        first = {"0.weight": x["1.weight"].T, "0.bias": x["1.bias"][::-1]}
        return first | {"1.weight": x["0.weight"], "1.bias": x["0.weight"][1]}

    model.load_state_dict(swapped(live))
    np.testing.assert_equal(model.state_dict(), swapped(before))


def test_a_state_is_loaded_whole_or_not_at_all():
    """A parameter may be an array that its owner has made read-only."""
    layer = nn.Linear(2, 2, rng=0)
    layer.bias.flags.writeable = False
    before = layer.state_dict()
    with pytest.raises(ValueError, match="the state does not fit Linear:\n  bias is read-only"):
        layer.load_state_dict(nn.Linear(2, 2, rng=1).state_dict())
    np.testing.assert_equal(layer.state_dict(), before)


def test_a_shared_layer_has_one_gradient_the_sum():
    shared = nn.Linear(3, 3, rng=0, dtype=np.float64)
    model = nn.Sequential(shared, shared)
    assert list(model.parameters()) == ["0.weight", "0.bias"]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]

    def f(x, weight, bias):
        shared.weight, shared.bias = weight, bias
        y, pullback = model.vjp(x)
        return y, lambda dy: (lambda dx, grads: (dx, *grads.values()))(*pullback(dy))

    sa.check_vjp(f, np.eye(3), shared.weight, shared.bias)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.GELU("tanh"), "GELU(approximate='tanh')"),
        (nn.Dropout(0.25), "Dropout(p=0.25)"),
        (nn.MSELoss(reduction="sum"), "MSELoss(reduction='sum')"),
        (
            nn.CrossEntropyLoss(np.ones(3), label_smoothing=0.1),
            "CrossEntropyLoss(ignore_index=-100, weight=(3,), label_smoothing=0.1, reduction='mean')",
        ),
        (
            nn.RotaryEmbedding(8, max_len=16, interleaved=True),
            "RotaryEmbedding(dim=8, max_len=16, theta=10000.0, interleaved=True)",
        ),
        (
            nn.MultiheadAttention(8, 2, batch_first=True),
            "MultiheadAttention(embed_dim=8, num_heads=2, dropout=0.0, batch_first=True",
        ),
        (
            nn.TransformerEncoderLayer(8, 2, 16),
            "TransformerEncoderLayer(d_model=8, activation='relu', norm_first=False",
        ),
        (
            nn.TransformerDecoderLayer(8, 2, 16),
            "TransformerDecoderLayer(d_model=8, activation='relu', norm_first=False",
        ),
        (nn.GPT(5, 8, 1, 2, 4, rng=0), "GPT("),
    ],
)
def test_texts(module, text):
    assert "".join(repr(module).split()).startswith("".join(text.split()).rstrip(")"))


ACTIVATIONS = {
    "ReLU": (nn.ReLU, lambda x: max(x, 0)),
    "Tanh": (nn.Tanh, math.tanh),
    "SiLU": (nn.SiLU, lambda x: x / (1 + math.exp(-x))),
    "GELU": (nn.GELU, lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2),
    "GELU by tanh": (
        lambda **more: nn.GELU("tanh", **more),
        lambda x: x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    ),
}


def test_swiglu_by_its_formula():
    layer, x = nn.SwiGLU(4, 3, rng=0, **F64), np.random.default_rng(0).standard_normal((2, 4))
    w1, w2, w3 = (layer.parameters()[f"w{n}.weight"] for n in (1, 2, 3))
    gate = x @ w1.T
    np.testing.assert_allclose(layer(x), (gate / (1 + np.exp(-gate)) * (x @ w3.T)) @ w2.T, rtol=1e-13)


NUMBERS = 3 * np.random.default_rng(0).standard_normal((3, 4, 5))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_values_of_activations(kind):
    make, formula = ACTIVATIONS[kind]
    layer = make(**F64)
    # x·Φ(x) loses a few eps of x where Φ is small
    np.testing.assert_allclose(layer(NUMBERS), np.vectorize(formula)(NUMBERS), rtol=1e-14, atol=1e-15)
    assert layer.parameters() == {}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_of_special_numbers(kind):
    """Far from 0 the slope is 1 or 0, also where exponentials overflow; NaN stays."""
    x = np.float32([200, 1e30, -200, -1e30, 0, np.nan])
    ends = [1, 1, -1, -1] if kind == "Tanh" else [200, 1e30, 0, 0]
    y, pullback = ACTIVATIONS[kind][0]().vjp(x)
    dx, grads = pullback(np.ones_like(x))
    np.testing.assert_allclose(y, [*ends, 0, np.nan], atol=1e-30)
    slopes = {"Tanh": [0, 0, 0, 0, 1, np.nan], "ReLU": [1, 1, 0, 0, 0, 1]}  # as PyTorch has them
    np.testing.assert_allclose(dx, slopes.get(kind, [1, 1, 0, 0, 0.5, np.nan]), atol=1e-30)
    assert grads == {} and y.dtype == dx.dtype == np.float32


ARRAY = np.zeros((2, 3), np.float32)


def test_ones():
    assert (nn.init.ones_(np.zeros((2, 3))) == 1).all()


@pytest.mark.parametrize("name", ["xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"])
def test_init_agrees_with_pytorch(name):
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    expected = getattr(torch.nn.init, name)(torch.empty(7, 5)).numpy()
    got = getattr(nn.init, name)(np.empty((7, 5), np.float32), rng=sa.torch_rng(3))
    np.testing.assert_allclose(got, expected, rtol=8 * EPS32)


class Gain(nn.Module):
    """Multiplies by an option."""

    def forward(self, x, gain=1.0):
        return gain * x

    def vjp(self, x, gain=1.0):
        return gain * x, lambda dy: (gain * dy, {})


class Anything(nn.Module):
    """A layer that records the options of its calls."""

    def __init__(self):
        self.seen = []

    def vjp(self, x, **options):
        self.seen.append(options)
        return x, lambda dy: (dy, {})


def test_sequential_hands_options_to_the_modules_that_take_them():
    encoder = nn.TransformerEncoderLayer(6, 2, 8, 0.0, batch_first=True, rng=0, **F64)
    attention = nn.SelfAttention(6, 6, rng=1, **F64)
    inner = nn.Sequential(nn.LayerNorm(6, **F64), attention)
    chain = nn.Sequential(encoder, Gain(), inner, nn.Linear(6, 3, rng=2, **F64))
    options = {"key_lengths": [4, 5], "is_causal": True, "gain": 3.0}
    y = chain(ROWS, **options)
    expected = encoder(ROWS, is_causal=True, key_lengths=[4, 5])
    expected = attention(inner[0](3 * expected), is_causal=True, key_lengths=[4, 5])
    np.testing.assert_array_equal(y, chain[3](expected))
    np.testing.assert_array_equal(y, chain.vjp(ROWS, **options)[0])
    assert not np.array_equal(chain(ROWS, is_causal=True), chain(ROWS))
    # Padding reaches the parameters of the last layer, but its gradient must not reach the parameters of others.
    check_gradients(perturbed(chain), lambda x: chain.vjp(x, **options), ROWS)
    recorder = Anything()
    nn.Sequential(recorder, Gain()).vjp(ROWS, gain=2.0, extra=1)
    assert recorder.seen == [{"gain": 2.0, "extra": 1}]


@pytest.mark.parametrize("name", ["causal", "x", "self", "**"])
def test_sequential_refuses_options_that_no_module_takes(name):
    chain = nn.Sequential(nn.Linear(6, 6, rng=0), nn.LayerNorm(6), nn.Linear(6, 3, rng=0))
    for call in (chain, chain.vjp):
        if name in ("x", "self"):
            with pytest.raises(TypeError, match="multiple values"):
                call(ROWS, **{name: 1})
            continue
        with pytest.raises(TypeError, match=rf"takes '{re.escape(name)}'; it has Linear, LayerNorm$"):
            call(ROWS, **{name: 1})
    with pytest.raises(TypeError, match="it has none"):
        nn.Sequential()(ROWS, a=1)


RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 5, 6))


def test_learned_positions():
    layer = nn.LearnedPositions(6, 7, rng=0, **F64)
    np.testing.assert_array_equal(layer.weight, nn.Embedding(7, 6, rng=0, **F64).weight)
    np.testing.assert_array_equal(layer(X), X + layer.weight[:5])
    _, grads = layer.vjp(X)[1](np.ones_like(X))
    np.testing.assert_array_equal(grads["weight"][:, 0], [6] * 5 + [0] * 2)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("theta", [10000.0, 50])
@pytest.mark.parametrize("positions", [None, [3, 3, 0, 9, 1]])
def test_rotary_by_its_angles(theta, interleaved, positions):
    layer = nn.RotaryEmbedding(6, 10, theta, interleaved=interleaved, **F64)
    places = np.arange(5) if positions is None else np.array(positions)
    angles = places[:, None] * theta ** (-np.arange(3) / 3)
    expected = reference.apply_rotary_emb(X, np.cos(angles), np.sin(angles), interleaved)
    # The layer computes angles, here below 10, in float32, with an error of a few roundings.
    np.testing.assert_allclose(layer(X, positions), expected, atol=10 * 8 * 6e-8)
    assert layer.parameters() == {} and layer.state_dict() == {}


def test_what_is_written_into_one_layers_angles_stays_there():
    one, other = nn.RotaryEmbedding(6, 10), nn.RotaryEmbedding(6, 10)
    before = other(X)
    one.cos[...] = one.sin[...] = 0
    np.testing.assert_array_equal(other(X), before)
    np.testing.assert_array_equal(nn.RotaryEmbedding(6, 10)(X), before)


def test_positions_of_each_sequence():
    layer = nn.RotaryEmbedding(6, 20, **F64)
    positions = np.arange(5) + np.array([[0], [7]])
    y = layer(X, positions)
    for n in range(2):
        np.testing.assert_array_equal(y[n], layer(X[n], positions[n]))
    y, pullback = layer.vjp(X, positions)
    np.testing.assert_allclose(pullback(y)[0], X, atol=1e-14)  # a rotation is undone by its transpose


def test_scaled_angles_are_those_of_language_models():
    """Drawn folders compare these with Transformers'."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    turns = read_rope(Entries({"rope_parameters": scaling | {"rope_theta": 500.0}}, "the test"), 6, 64)
    angles, x = np.arange(5, dtype=np.float32)[:, None] * np.float32(turns.frequencies), X.astype(np.float32)
    expected = reference.apply_rotary_emb(x, np.cos(angles) * turns.factor, np.sin(angles) * turns.factor)
    np.testing.assert_allclose(nn.RotaryEmbedding(6, 64, 500.0, scaling=scaling)(x), expected, atol=1e-5)
    assert turns.factor > 1


def masked_calls():
    """Every way to give a layer a mask that says what to ignore."""
    x = RNG.standard_normal((2, 5, 6))
    attention = nn.MultiheadAttention(6, 2, batch_first=True, rng=0, **F64)
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, rng=0, **F64)
    decoder = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True, rng=0, **F64)
    return {
        "MultiheadAttention": lambda mask: attention(x, x, x, attn_mask=mask),
        "its vjp": lambda mask: attention.vjp(x, x, x, attn_mask=mask),
        "TransformerEncoderLayer": lambda mask: layer(x, mask),
        "TransformerEncoder": lambda mask: nn.TransformerEncoder(layer, 2).vjp(x, mask),
        "TransformerDecoder": lambda mask: nn.TransformerDecoder(decoder, 1)(x, x, tgt_mask=mask),
    }


@pytest.mark.parametrize("name", masked_calls())
def test_a_mask_that_looks_inverted_is_a_warning_that_says_what_to_do(name):
    call = masked_calls()[name]
    hidden = np.where(np.tri(5), -np.inf, 0.0)
    for mask in (np.tri(5, dtype=bool), np.tri(5), hidden, np.tile(np.tri(5, dtype=bool), (4, 1, 1))):
        with pytest.warns(
            UserWarning, match=r"attn_mask is a lower triangle .* pass is_causal=True"
        ) as caught:
            call(mask)
        assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mask in (
            ~np.tri(5, dtype=bool),
            np.zeros((5, 5), bool),
            np.tri(5, k=1, dtype=bool),
            np.eye(5) == 1,
            np.where(np.tri(5), 0, -np.inf),
            np.tri(5) * -1,
            np.tri(5, k=-1, dtype=bool),
        ):
            call(mask)


def test_an_array_that_is_no_parameter_is_a_warning():
    class Own(nn.Module):
        def __init__(self):
            self._constant, self.ids = np.ones(3), np.arange(3)
            self.register_parameter("factor", np.ones(3))

        def forward(self, x):
            self.seen = x * self.factor
            return self.seen

    module = Own()
    module(np.ones(3))
    module.factor = np.zeros(3)
    with pytest.warns(UserWarning, match=r"weight of this Own .* self.register_parameter\('weight', array\)"):
        module.weight = np.ones(3)


test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: nn.Linear(0, 1), ValueError, "in_features must be at least 1, not 0"),
    (lambda: nn.Linear(2.0, 1), TypeError, "in_features must be an int"),
    (lambda: nn.Linear(2, 1, dtype=int), TypeError, "dtype must be one of"),
    (lambda: nn.Linear(2, 1, dtype=None), TypeError, "dtype must be one of .*, not None"),
    (lambda: nn.Linear(2, 1, rng="0"), TypeError, "rng must be"),
    (lambda: nn.Linear(2, 1)(np.ones(3)), ValueError, r"\(..., 2\), not \(3,\)"),
    (lambda: nn.Linear(2, 1)(np.ones(2, bool)), TypeError, "not bool"),
    (lambda: nn.Linear(2, 1).vjp([[1, 2]])[1]([1.0]), ValueError, r"\(1, 1\), not \(1,\)"),
    (lambda: nn.SelfAttention(2, 1)(np.ones(2)), ValueError, r"\(..., L, 2\)"),
    (lambda: nn.SelfAttention(2, 1)(np.ones((1, 2)), return_lse=True), TypeError, "return_lse"),
    (lambda: nn.SelfAttentionBlock(4, 3), ValueError, "3 does not divide 4"),
    (lambda: nn.SinusoidalPositions(3), ValueError, "even"),
    (lambda: nn.SinusoidalPositions(2, 1)(np.ones((2, 2))), ValueError, "max_len=1"),
    (lambda: nn.Dropout(1.5), ValueError, "between 0 and 1, not 1.5"),
    (lambda: nn.Dropout(True), TypeError, "p must be a real number, not True"),
    (lambda: nn.LayerNorm(4, "1e-5"), TypeError, "eps must be a real number"),
    (lambda: nn.RMSNorm(4, True), TypeError, "eps must be a real number"),
    (lambda: nn.Embedding(5, 2)([5]), ValueError, "0...4, not 5"),
    (lambda: nn.Embedding(5, 2)([-1]), ValueError, "not -1"),
    (lambda: nn.Embedding(5, 2)([1.0]), TypeError, "float64"),
    (lambda: nn.Embedding(5, 2)(np.ma.array([1, 2], mask=[0, 1])), TypeError, "MaskedArray"),
    (lambda: nn.Dropout(0.5).train("no"), TypeError, "mode must be True or False"),
    (lambda: nn.Module().register_parameter(1, np.ones(2)), TypeError, "must be a str, not int"),
    (lambda: nn.Module().register_parameter("a b", np.ones(2)), ValueError, "an identifier, not 'a b'"),
    (lambda: nn.Module().register_parameter("vjp", np.ones(2)), ValueError, "vjp is a method of Module"),
    (lambda: nn.Embedding(3, 2, padding_idx=3), ValueError, "below 3"),
    (lambda: nn.ModuleList([1]), TypeError, "only modules"),
    (lambda: setattr(nn.Linear(2, 1), "weight", np.ma.ones((1, 2))), TypeError, "weight is a MaskedArray"),
    (
        lambda: nn.RMSNorm(2).load_state_dict({"weight": np.ma.ones(2)}),
        ValueError,
        "weight is a MaskedArray; pass a plain array",
    ),
    (lambda: setattr(nn.Linear(2, 1), "weight", np.ones(3)), ValueError, r"\(1, 2\), not \(3,\)"),
    (lambda: setattr(nn.Linear(2, 1, bias=False), "bias", [1.0]), AttributeError, "without bias"),
    (lambda: nn.Module()(1), NotImplementedError, "forward"),
    (lambda: nn.init.kaiming_normal_(np.ones(3)), ValueError, "at least 2 dims"),
    (lambda: nn.init.normal_(np.ones(3, int)), TypeError, "tensor must be an ndarray of floats"),
    (lambda: nn.init.constant_(np.ones(3, bool), 0.5), TypeError, "tensor must be an ndarray of floats"),
    (
        lambda: nn.init.uniform_([1.0, 2.0]),
        TypeError,
        r"tensor must be .*, which is filled, not \[1.0, 2.0\]",
    ),
    (lambda: nn.init.xavier_uniform_([[1.0]]), TypeError, r"tensor must be .*, not \[\[1.0\]\]"),
    (lambda: nn.init.calculate_gain("cube"), ValueError, "cube"),
    (lambda: nn.Linear(2, 2).register_parameter("w", [1.0]), TypeError, "parameter"),
    (
        lambda: nn.Linear(2, 2).load_state_dict(
            {"weight": np.ones((2, 2), bool), "bias": np.zeros(2, np.float32)}
        ),
        ValueError,
        "weight must hold floats or integers, not bool",
    ),
    (
        lambda: nn.init.kaiming_uniform_(ARRAY, mode="fan"),
        ValueError,
        'mode must be "fan_in" or "fan_out", not \'fan\'',
    ),
    (lambda: nn.init.normal_(ARRAY, rng=-1), ValueError, "rng must not be negative, not -1"),
    (lambda: nn.GELU("erf"), ValueError, 'approximate must be "none" or "tanh", not \'erf\''),
    (lambda: nn.ReLU()(1j), TypeError, "x must hold floats or integers, not complex"),
    (lambda: nn.SiLU().vjp([1.0, 2.0])[1](1.0), ValueError, r"dy must have the shape of the result, \(2,\)"),
    (lambda: nn.RotaryEmbedding(3), ValueError, "dim must be even"),
    (lambda: nn.RotaryEmbedding(4, theta=1.0), ValueError, "theta must be above 1"),
    (
        lambda: nn.RotaryEmbedding(4, scaling={"rope_type": "x"}),
        ValueError,
        "the type 'x' of rotary positions is not supported",
    ),
    (
        lambda: nn.RotaryEmbedding(4, scaling={"rope_theta": 3.0}),
        ValueError,
        "scaling must not have rope_theta: pass it as theta",
    ),
    (lambda: nn.RotaryEmbedding(4)(np.ones(4)), ValueError, r"x must have shape \(..., L, 4\)"),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((5, 4))), ValueError, "x has 5 positions, more than max_len=3"),
    (
        lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [1, 3]),
        ValueError,
        "positions must be in 0...2, not 1 to 3",
    ),
    (
        lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [0, 1, 2]),
        ValueError,
        r"positions must have shape \(..., L\) with L = 2, not \(3,\)",
    ),
    (lambda: nn.RotaryEmbedding(4, 3)(np.ones((2, 4)), [0.0, 1.0]), TypeError, "positions must be integers"),
    (
        lambda: nn.LearnedPositions(4, 3)(np.ones((5, 4))),
        ValueError,
        "x has 5 positions, more than max_len=3",
    ),
    (
        lambda: nn.SinusoidalPositions(4, 3)(np.ones((5, 4))),
        ValueError,
        "x has 5 positions, more than max_len=3",
    ),
)
