"""Tests of every layer and loss: gradients, PyTorch's numbers, arrays in any layout, changes of results and
parameters."""

from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from inputs import LAYOUTS, covering
from nn_checks import assert_close, check_gradients, perturbed, torch_state

import selfattn as sa
from selfattn import nn

RNG = np.random.default_rng(0)
X, MEMORY, KEYS, VALUES = (
    RNG.standard_normal(shape) for shape in ((3, 4, 6), (3, 5, 6), (3, 5, 4), (3, 5, 2))
)
TURNED = [x.swapaxes(0, 1) for x in (X, MEMORY)]  # for layers whose batch is not first
CLASSES, SHARES = RNG.integers(0, 4, (3, 6)), RNG.random((3, 4, 6))
TRIANGLE = ~np.tri(4, dtype=bool)
PADDING = np.arange(4) >= np.array([[3], [4], [1]])  # True = ignore
KEY_PADDING = np.arange(5) >= np.array([[4], [5], [2]])
PAIRS, HEADS = RNG.random((4, 5)) < 0.3, RNG.random((6, 4, 5)) < 0.3
PAIRS[:, 0] = HEADS[..., 0] = False  # no row ignores everything: PyTorch returns NaN there
FLOATS, HEADS_FLOATS = RNG.standard_normal((4, 5)), RNG.standard_normal((6, 4, 5))
LENGTHS = {"is_causal": True, "key_lengths": [4, 3, 4]}


class Case(NamedTuple):
    """A layer, its inputs and options, and PyTorch's layer."""

    make: Any  # options, among them dtype and rng -> a layer
    inputs: tuple = (X,)
    options: dict = MappingProxyType({})
    theirs: Any = None  # torch -> a module
    random: bool = False  # each call drops other numbers


def unseeded(make, *arguments, inputs=(X,), options=None, theirs=None, **more):
    """A layer that draws no parameters."""
    return Case(lambda rng=None, **own: make(*arguments, **more, **own), inputs, options or {}, theirs)


def seeded(make, *arguments, inputs=(X,), options=None, theirs=None, **more):
    return Case(lambda **own: make(*arguments, **more, **own), inputs, options or {}, theirs)


def activation(name, **more):
    return unseeded(getattr(nn, name), **more, theirs=lambda torch: getattr(torch.nn, name)(**more))


def attention(inputs=TURNED[:1] + TURNED[1:] * 2, options=None, **more):
    """nn.MultiheadAttention with two heads."""
    options, given = options or {}, {"embed_dim": 6, "num_heads": 2} | more
    return Case(
        lambda **own: nn.MultiheadAttention(**given, **own),
        tuple(inputs),
        options,
        lambda torch: torch.nn.MultiheadAttention(**given),
    )


def masked(**masks):
    return attention((X, MEMORY, MEMORY), masks, batch_first=True)


def encoder(x=X, options=None, layers=0, norm=False, **more):
    """A layer of an encoder, or an encoder."""
    given = {"d_model": 6, "nhead": 2, "dim_feedforward": 10, "dropout": 0.0, "batch_first": True} | more

    def make(**own):
        layer = nn.TransformerEncoderLayer(**given, **own)
        last = nn.LayerNorm(6, dtype=own["dtype"]) if norm else None
        return nn.TransformerEncoder(layer, layers, last) if layers else layer

    def theirs(torch):
        layer, last = torch.nn.TransformerEncoderLayer(**given), torch.nn.LayerNorm(6) if norm else None
        whole = torch.nn.TransformerEncoder
        return whole(layer, layers, last, enable_nested_tensor=False) if layers else layer

    return Case(make, (x,), options or {}, theirs)


def decoder(layers=0, batched=True, options=None, masks=True, **more):
    """A layer of a decoder, or a decoder."""
    given = {"d_model": 6, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "batch_first": True} | more
    options = {name: x for name, x in (options or {}).items() if x is not None}

    def make(**own):
        layer = nn.TransformerDecoderLayer(**given, **own)
        return nn.TransformerDecoder(layer, layers, nn.LayerNorm(6, dtype=own["dtype"])) if layers else layer

    def theirs(torch):
        layer = torch.nn.TransformerDecoderLayer(**given)
        return torch.nn.TransformerDecoder(layer, layers, torch.nn.LayerNorm(6)) if layers else layer

    inputs = (X, MEMORY) if given["batch_first"] else TURNED
    if not batched:
        inputs = X[0], MEMORY[0]
        options |= {name: x[0] for name, x in options.items() if name.endswith("padding_mask")}
    return Case(make, tuple(inputs), options, theirs if masks else None)


DECODERS = covering(
    activation=["relu", "gelu"],
    norm_first=[False, True],
    batch_first=[False, True],
    bias=[True, False],
    layers=[0, 2],
    tgt_mask=[None, TRIANGLE, np.where(TRIANGLE, -np.inf, 0.25)],
    memory_mask=[None, PAIRS, 0.5 * PAIRS],
    tgt_key_padding_mask=[None, PADDING],
    memory_key_padding_mask=[None, KEY_PADDING],
    batched=[True, False],
)
for case in DECODERS:
    case["options"] = {name: case.pop(name) for name in list(case) if name.endswith("mask")}
LAYERS = {
    "CrossEntropyLoss": unseeded(
        nn.CrossEntropyLoss, inputs=(X, CLASSES), weight=[1.0, 2.0, 3.0, 0.5], label_smoothing=0.1
    ),
    "CrossEntropyLoss of probabilities": unseeded(nn.CrossEntropyLoss, inputs=(X, SHARES)),
    "MSELoss": unseeded(nn.MSELoss, inputs=(X, SHARES)),
    "BCEWithLogitsLoss": unseeded(nn.BCEWithLogitsLoss, inputs=(X, SHARES), pos_weight=np.arange(6.0)),
    **{name: activation(name) for name in ("ReLU", "Tanh", "SiLU", "GELU")},
    "GELU by tanh": activation("GELU", approximate="tanh"),
    "SwiGLU": seeded(nn.SwiGLU, 6, 5),
    "SwiGLU with biases": seeded(nn.SwiGLU, 6, 5, bias=True),
    "Linear": seeded(nn.Linear, 6, 3, theirs=lambda torch: torch.nn.Linear(6, 3)),
    "Linear without bias": seeded(
        nn.Linear, 6, 3, bias=False, theirs=lambda torch: torch.nn.Linear(6, 3, bias=False)
    ),
    "LayerNorm": unseeded(nn.LayerNorm, 6, theirs=lambda torch: torch.nn.LayerNorm(6)),
    "LayerNorm of two axes": unseeded(nn.LayerNorm, (4, 6)),
    "LayerNorm without bias": unseeded(nn.LayerNorm, 6, bias=False),
    "LayerNorm without parameters": unseeded(nn.LayerNorm, 6, elementwise_affine=False),
    "RMSNorm": unseeded(nn.RMSNorm, 6),
    "SinusoidalPositions": unseeded(nn.SinusoidalPositions, 6),
    "LearnedPositions": seeded(nn.LearnedPositions, 6, 9),
    "LearnedPositions without a batch": seeded(nn.LearnedPositions, 6, 9, inputs=(X[0],)),
    "LearnedPositions of nothing": seeded(nn.LearnedPositions, 6, 9, inputs=(X[:0],)),
    "RotaryEmbedding": unseeded(nn.RotaryEmbedding, 6, 9, inputs=(X, np.array([3, 1, 8, 0]))),
    "RotaryEmbedding, interleaved": unseeded(nn.RotaryEmbedding, 6, 9, 50, interleaved=True),
    "SelfAttention": seeded(nn.SelfAttention, 6, 4),
    "SelfAttention, other width": seeded(nn.SelfAttention, 6, 4, d_v=3, options=LENGTHS),
    "SelfAttention, other width, bias": seeded(nn.SelfAttention, 6, 4, d_v=7, bias=True, options=LENGTHS),
    "SelfAttention, dot": seeded(nn.SelfAttention, 6, 4, score="dot", options=LENGTHS),
    "SelfAttention, unscaled": seeded(nn.SelfAttention, 6, 4, scale=False, d_v=2, bias=True),
    "SelfAttention, additive": seeded(nn.SelfAttention, 6, 4, score="additive", d_v=3, options=LENGTHS),
    "SelfAttention, additive, bias": seeded(
        nn.SelfAttention, 6, 4, score="additive", bias=True, options=LENGTHS
    ),
    "SelfAttentionBlock": seeded(nn.SelfAttentionBlock, 6),
    "SelfAttentionBlock, causal": seeded(nn.SelfAttentionBlock, 6, options={"is_causal": True}),
    "SelfAttentionBlock of 3 heads": seeded(nn.SelfAttentionBlock, 6, 3),
    "SelfAttentionBlock of 2 heads": seeded(
        nn.SelfAttentionBlock, 6, 2, options={"window": (1, 0), "key_lengths": [4, 3, 4]}
    ),
    "ScaledDotProductAttention": unseeded(
        lambda dtype=None: nn.ScaledDotProductAttention(), inputs=(X, X, X)
    ),
    "MultiheadAttention": attention(),
    "MultiheadAttention without a batch": attention((X[0], MEMORY[0], MEMORY[0])),
    "MultiheadAttention of one head": attention(num_heads=1),
    "MultiheadAttention of other widths": attention((X, KEYS, VALUES), kdim=4, vdim=2, batch_first=True),
    "MultiheadAttention of other values": attention(
        (X, MEMORY, VALUES), vdim=2, bias=False, batch_first=True
    ),
    "MultiheadAttention, padding": masked(key_padding_mask=KEY_PADDING),
    "MultiheadAttention, float padding": masked(key_padding_mask=np.where(KEY_PADDING, -np.inf, 0.5)),
    "MultiheadAttention, pairs": masked(attn_mask=PAIRS),
    "MultiheadAttention, float pairs": masked(attn_mask=FLOATS),
    "MultiheadAttention, pairs of each head": masked(attn_mask=HEADS),
    "MultiheadAttention, pairs and padding": masked(attn_mask=PAIRS, key_padding_mask=KEY_PADDING),
    "MultiheadAttention, floats": masked(
        attn_mask=HEADS_FLOATS, key_padding_mask=np.where(KEY_PADDING, -np.inf, 0.5)
    ),
    "TransformerEncoderLayer": encoder(TURNED[0], batch_first=False),
    "TransformerEncoderLayer without a batch": encoder(X[0], batch_first=False),
    "TransformerEncoderLayer, gelu": encoder(activation="gelu"),
    "TransformerEncoderLayer, norm first": encoder(norm_first=True),
    "TransformerEncoderLayer, norm first, gelu, no bias": encoder(
        norm_first=True, activation="gelu", bias=False
    ),
    "TransformerEncoderLayer, another eps": encoder(layer_norm_eps=0.1),
    "TransformerEncoderLayer, causal": encoder(options={"src_mask": TRIANGLE}, activation="gelu"),
    "TransformerEncoderLayer, padding": encoder(options={"src_key_padding_mask": PADDING}, activation="gelu"),
    "TransformerEncoderLayer, floats": encoder(options={"src_mask": np.where(TRIANGLE, -np.inf, 0.25)}),
    "TransformerEncoder": encoder(options={"src_key_padding_mask": PADDING}, layers=2, activation="gelu"),
    "TransformerEncoder, norm first": encoder(
        options={"mask": TRIANGLE, "src_key_padding_mask": PADDING}, layers=3, norm=True, norm_first=True
    ),
    "TransformerDecoder of lengths": decoder(
        2,
        options={"tgt_is_causal": True, "memory_key_lengths": [5, 2, 4], "memory_mask": 0.5 * PAIRS},
        masks=False,
    ),
    **{f"TransformerDecoder {n}": decoder(**case) for n, case in enumerate(DECODERS)},
    "Sequential": Case(
        lambda **own: nn.Sequential(
            nn.Linear(6, 4, **own), nn.SelfAttentionBlock(4, **own), nn.Linear(4, 6, **own)
        )
    ),
    **{
        f"{name} with dropout": case._replace(theirs=None, random=True)
        for name, case in {
            "MultiheadAttention": attention(dropout=0.5),
            "TransformerEncoderLayer": encoder(dropout=0.3),
            "TransformerEncoderLayer, norm first,": encoder(dropout=0.3, norm_first=True, batch_first=False),
            "TransformerDecoder": decoder(2, dropout=0.4),
        }.items()
    },
    "Dropout": Case(lambda rng=None, dtype=None: nn.Dropout(0.5, rng=0), random=True),
    "ScaledDotProductAttention with dropout": Case(
        lambda rng=None, dtype=None: nn.ScaledDotProductAttention(),
        (X, X, X, None, nn.Dropout(0.5, rng=0)),
        random=True,
    ),
}
IDS = (np.array([[1, 4, 0], [2, 3, 1]]),)
MODELS = {
    "EmbeddingModel": Case(
        lambda **own: nn.EmbeddingModel(str.split, 5, 4, max_seq_len=4, num_layers=2, **own), IDS
    ),
    "GPT": Case(lambda **own: nn.GPT(5, 6, 1, 3, 4, **own), IDS),
}
STEADY = {name: case for name, case in LAYERS.items() if not case.random}
every_layer = pytest.mark.parametrize("case", STEADY.values(), ids=STEADY)
THEIRS = {name: case for name, case in LAYERS.items() if case.theirs}


def flat(found):
    """All arrays of nested tuples and dicts."""
    if isinstance(found, tuple | dict):
        parts = found.values() if isinstance(found, dict) else found
        return [array for part in parts for array in flat(part)]
    return [found]


def gradient_for(y):
    y = flat(y)[0]
    return np.cos(np.arange(np.size(y))).reshape(np.shape(y))


def is_float(x):
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"


def seed(*layers):
    """Seed dropout, so that it drops the same numbers again."""
    for module in (module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()):
        if isinstance(module, nn.Dropout | nn.MultiheadAttention):
            module.rng = np.random.default_rng(7)


def as_function(layer, case):
    """Return ``vjp`` as arrays -> y, dy -> (the arrays' gradients, the parameters'); check that forward has the same
    bits."""

    def vjp(*arrays):
        arguments = (*arrays, *case.inputs[len(arrays) :])
        seed(layer, *case.inputs)
        y, pullback = layer.vjp(*arguments, **case.options)
        seed(layer, *case.inputs)
        np.testing.assert_equal(flat(layer(*arguments, **case.options)), flat(y))

        def back(dy):
            found = pullback(dy)
            d_inputs, grads = found if isinstance(found, tuple) else (found, {})
            return d_inputs if isinstance(d_inputs, tuple) else (d_inputs,), grads

        return flat(y)[0], back

    return vjp


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_those_of_finite_differences(name):
    case = LAYERS[name]
    layer = perturbed(case.make(dtype=np.float64, rng=0))
    inputs = case.inputs[:1] if name.split()[0].endswith("Loss") else [x for x in case.inputs if is_float(x)]
    check_gradients(layer, as_function(layer, case), *inputs)


@pytest.mark.parametrize("case", THEIRS.values(), ids=THEIRS)
def test_numbers_and_gradients_are_those_of_pytorch(case):
    torch = pytest.importorskip("torch")
    for dtype in ("float64", "float32"):
        assert_numbers_of_pytorch(torch, case, dtype)


def assert_numbers_of_pytorch(torch, case, dtype):
    torch.manual_seed(5)
    theirs, ours = case.theirs(torch).to(getattr(torch, dtype)), case.make(dtype=np.dtype(dtype), rng=0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    assert list(ours.state_dict()) == list(torch_state(theirs))
    assert ours.load_state_dict(torch_state(theirs)) == ([], [])
    masks = case.options
    # PyTorch warns where one mask is boolean and another is not.
    if masks.keys() & {"memory_mask", "tgt_mask"}:
        masks = {name: np.where(x, -np.inf, 0.0) if x.dtype == bool else x for name, x in masks.items()}
    masks = {name: torch.tensor(x if x.dtype == bool else x.astype(dtype)) for name, x in masks.items()}

    # The longest sums are over the tokens of a batch; in each layer five sums follow one another.
    n = 30 * 12
    inputs = [x.astype(dtype) for x in case.inputs]
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(*tensors, **masks)
    expected = expected[0] if isinstance(expected, tuple) else expected
    dy = np.cos(np.arange(expected.numel())).reshape(expected.shape).astype(dtype)
    expected.backward(torch.tensor(dy))
    y, pullback = as_function(ours, case)(*inputs)
    assert_close(y, expected.detach().numpy(), dtype, n, "output")
    d_inputs, grads = pullback(dy)
    for k, (dx, tensor) in enumerate(zip(d_inputs, tensors, strict=True)):
        assert_close(dx, tensor.grad.numpy(), dtype, n, f"gradient of input {k}")
    assert list(grads) == [name for name, _ in theirs.named_parameters()]
    for name, parameter in theirs.named_parameters():
        assert_close(grads[name], parameter.grad.numpy(), dtype, n, name)
    if isinstance(ours, nn.MultiheadAttention):
        for average in (True, False):
            expected = theirs(*map(torch.tensor, inputs), **masks, average_attn_weights=average)[1]
            got = ours(*inputs, **case.options, average_attn_weights=average)[1]
            assert_close(got, expected.detach().numpy(), dtype, n)


@pytest.mark.parametrize("name", [name for name in THEIRS if LAYERS[name].make(dtype="f4").parameters()])
def test_initial_numbers_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch")
    torch.manual_seed(11)
    expected = torch_state(LAYERS[name].theirs(torch))
    got = LAYERS[name].make(dtype=np.float32, rng=sa.torch_rng(11)).state_dict()
    assert list(got) == list(expected)
    np.testing.assert_equal(dict(got), expected)


@every_layer
def test_dtypes_and_lists(case):
    pairs = (("float32", "float64"), ("float32", "float16"), ("float16", "float16"), ("float64", "float64"))
    for weights, inputs in pairs:
        assert_dtypes(case, weights, inputs)


def assert_dtypes(case, weights, inputs):
    """A result has the widest dtype, a gradient the dtype of its array; 16 bits are computed in float32."""
    layer, wide = (case.make(dtype=dtype, rng=0) for dtype in (weights, np.float64))
    wide.load_state_dict({name: x.astype(float) for name, x in layer.state_dict().items()})
    given = [x.astype(inputs) if is_float(x) else x for x in case.inputs]
    results = []
    for own, arguments in ((layer, given), (wide, [x.astype(float) if is_float(x) else x for x in given])):
        y, pullback = own.vjp(*arguments, **case.options)
        y = y[0] if isinstance(y, tuple) else y
        results.append((y, pullback(gradient_for(y).astype(y.dtype))))
    (y, found), (true_y, truth) = results
    has_numbers = layer.parameters() or isinstance(layer, nn.SinusoidalPositions | nn.RotaryEmbedding)
    assert y.dtype == (np.result_type(weights, inputs) if has_numbers else inputs)
    d_inputs, grads = found if isinstance(found, tuple) else (found, {})
    # The gradient of a target may be wider.
    if not isinstance(layer, nn.TransformerDecoderLayer | nn.TransformerDecoder):
        assert {dx.dtype for dx in flat(d_inputs)} == {np.dtype(inputs)}
    assert {grad.dtype for grad in grads.values()} <= {np.dtype(weights)}
    few = 64 if layer.parameters() else 1  # without parameters there is one rounding
    eps = max(np.finfo(dtype).eps for dtype in (weights, inputs, y.dtype))
    for got, expected in zip([y, *flat(found)], [true_y, *flat(truth)], strict=True):
        error = np.linalg.norm((got - expected).astype(float))
        assert error <= few * eps * max(1.0, np.linalg.norm(expected))
    if case.inputs[0].size:
        listed = layer(*(x.tolist() for x in given), **case.options)
        assert flat(listed)[0].dtype == (
            "float32" if isinstance(layer, nn.ScaledDotProductAttention) else weights
        )


@every_layer
def test_arrays_in_any_layout(case):
    layer = case.make(dtype=np.float32, rng=0)
    for dtype in (np.float64, np.float32):
        arguments = [x.astype(dtype) if is_float(x) else x for x in case.inputs]
        before = [x.copy() for x in arguments]

        def found(given, options):
            y, pullback = layer.vjp(*given, **options)
            return [*flat(layer(*given, **options)), *flat(y), *flat(pullback(gradient_for(y)))]

        expected = found(arguments, case.options)
        for layout in LAYOUTS.values():
            options = {
                name: layout(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()
            }
            for got, same in zip(found([layout(x) for x in arguments], options), expected, strict=True):
                np.testing.assert_array_equal(got, same)
                assert np.asarray(got).dtype.isnative and np.asarray(got).dtype == np.asarray(same).dtype
        np.testing.assert_equal(arguments, before)


@pytest.mark.parametrize("case", (LAYERS | MODELS).values(), ids=LAYERS | MODELS)
def test_a_pullback_may_be_called_again_for_one_state_of_the_parameters(case):
    """All returned arrays may be changed: the gradient of a squared error is often computed by `y -= target`."""
    layer = case.make(dtype=np.float32, rng=0)
    before = [x.copy() if isinstance(x, np.ndarray) else x for x in case.inputs]
    y, pullback = layer.vjp(*case.inputs, **case.options)
    dy = gradient_for(y)
    expected = [array.copy() for array in flat(pullback(dy))]
    for array in [*flat(y), *flat(pullback(dy))]:
        if np.ndim(array):
            array[...] = np.nan
    np.testing.assert_equal(flat(pullback(dy)), expected)
    for x, kept in zip(case.inputs, before, strict=True):
        assert not isinstance(x, np.ndarray) or np.array_equal(x, kept)
    if isinstance(layer, nn.LearnedPositions):  # its gradient needs no parameter
        return
    for key, array in layer.parameters().items():
        # Gradients do not read the other parameters.
        if key.endswith(("weight", "W_query")) and key != "embedding_layer.weight":
            _, pullback = layer.vjp(*case.inputs, **case.options)
            array[...] += 1
            with pytest.raises(RuntimeError, match="call vjp again"):
                pullback(dy)
