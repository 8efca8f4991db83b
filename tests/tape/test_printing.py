"""The text of tensors is PyTorch 2.13's, in texts that it has printed and in drawn comparisons with it."""

import numpy as np
import pytest

from selfattn.tape.printing import format_number, format_tensor, set_printoptions

FLOATS, INTEGERS = ("float16", "bfloat16", "float32", "float64"), ("int8", "uint8", "int16", "int32", "int64")
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0)
NO_OPTIONS = {}

# Numbers, dtype, suffix, print options, and what PyTorch 2.13 prints.
PRINTED = (
    (3.14159, "float32", "", NO_OPTIONS, "tensor(3.1416)"),
    ([1, 2, -30], "float32", "", NO_OPTIONS, "tensor([  1.,   2., -30.])"),
    ([0.0, -0.0], "float32", "", {"sci_mode": True}, "tensor([0., -0.])"),
    ([np.nan, 1, -np.inf], "float32", "", NO_OPTIONS, "tensor([nan, 1., -inf])"),
    ([1e-5, 1], "float32", "", NO_OPTIONS, "tensor([1.0000e-05, 1.0000e+00])"),
    ([1e-4], "float32", "", NO_OPTIONS, "tensor([1.0000e-04])"),  # which is less than 1e-4
    ([1e-4], "float64", "", NO_OPTIONS, "tensor([0.0001], dtype=torch.float64)"),
    ([1e8], "float32", "", NO_OPTIONS, "tensor([100000000.])"),
    ([1, 1000], "float64", "", NO_OPTIONS, "tensor([   1., 1000.], dtype=torch.float64)"),
    ([1, 1001], "float64", "", NO_OPTIONS, "tensor([1.0000e+00, 1.0010e+03], dtype=torch.float64)"),
    ([1.5, 2e8, np.nan], "float32", "", NO_OPTIONS, "tensor([1.5000e+00, 2.0000e+08,        nan])"),
    ([1, 2.5], "float32", "", {"precision": 1, "sci_mode": True}, "tensor([1.0e+00, 2.5e+00])"),
    ([[True, False]], "bool", "", NO_OPTIONS, "tensor([[ True, False]])"),
    (
        [[1, 2], [-30, 4]],
        "int32",
        "",
        NO_OPTIONS,
        "tensor([[  1,   2],\n        [-30,   4]], dtype=torch.int32)",
    ),
    (np.zeros(0), "float32", "", NO_OPTIONS, "tensor([])"),
    (np.zeros((0, 3)), "int64", "", NO_OPTIONS, "tensor([], size=(0, 3), dtype=torch.int64)"),
    (np.arange(1001), "int64", "", NO_OPTIONS, "tensor([   0,    1,    2,  ...,  998,  999, 1000])"),
    (range(7), "int64", "", {"threshold": 7}, "tensor([0, 1, 2, 3, 4, 5, 6])"),
    ([7, 8], "int64", "", {"threshold": 1, "edgeitems": 0}, "tensor([...], size=(2,))"),
    (
        np.zeros((3, 9)),
        "float16",
        "",
        {"profile": "short", "threshold": 1, "edgeitems": 1},
        "tensor([[0.,  ..., 0.],\n        ...,\n        [0.,  ..., 0.]], dtype=torch.float16)",
    ),
    (
        np.arange(15) * 1000,
        "int64",
        "",
        NO_OPTIONS,
        "tensor([    0,  1000,  2000,  3000,  4000,  5000,  6000,  7000,  8000,  9000,\n"
        "        10000, 11000, 12000, 13000, 14000])",
    ),
    (
        np.arange(8).reshape(1, 2, 2, 2) / 8,
        "float32",
        "",
        NO_OPTIONS,
        "tensor([[[[0.0000, 0.1250],\n          [0.2500, 0.3750]],\n\n"
        "         [[0.5000, 0.6250],\n          [0.7500, 0.8750]]]])",
    ),
    (
        np.arange(8) / 7,
        "float32",
        ", grad_fn=<MulBackward0>",
        NO_OPTIONS,
        "tensor([0.0000, 0.1429, 0.2857, 0.4286, 0.5714, 0.7143, 0.8571, 1.0000],\n       grad_fn=<MulBackward0>)",
    ),
)


@pytest.fixture(autouse=True)
def default_options():
    yield
    set_printoptions(profile="default")


@pytest.fixture
def torch():
    torch = pytest.importorskip("torch")
    yield torch
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize(("numbers", "dtype", "suffix", "options", "expected"), PRINTED)
def test_printed(numbers, dtype, suffix, options, expected):
    set_printoptions(**options)
    assert format_tensor(np.array(numbers, dtype), dtype, suffix=suffix) == expected


def test_a_parameter():
    text = format_tensor(np.float32([[0.25]]), "float32", suffix=", requires_grad=True", parameter=True)
    assert text == "Parameter containing:\ntensor([[0.2500]], requires_grad=True)"


def drawn_numbers(rng, dtype):
    """Return an array of 0 to 5 dimensions; of floats, some are integers, some special, some far from 1."""
    sizes = [0, 1, 2, 3, 7, 9, 30, 1200] if (dims := rng.integers(6)) < 2 else [1, 2, 3, 7, 8]
    shape = tuple(rng.choice(sizes, size=dims))
    if dims > 1 and rng.random() < 0.1:
        shape = (*shape[1:], 0)
    if dtype == "bool":
        return rng.random(shape) < rng.choice([0, 0.5])
    if dtype in INTEGERS:
        bits = np.iinfo(dtype)
        most = min(bits.max, 10 ** int(rng.integers(1, 19)))
        return np.asarray(rng.integers(max(bits.min, -most), most, shape)).astype(dtype)
    wide = np.exp(rng.normal(size=shape) * rng.choice([0.1, 1, 6])) * 10.0 ** rng.integers(-7, 11)
    whole = rng.integers(-30, 30, shape) * 10.0 ** rng.integers(0, 9)
    limits = rng.choice([1e-4, 0.1, 1e8, 1e8 + 1e3, -1e5], size=shape)
    found = (rng.normal(size=shape), wide, whole, limits, np.zeros(shape))[rng.integers(5)]
    if rng.random() < 0.4:
        found = np.where(rng.random(shape) < 0.3, rng.choice(SPECIAL, size=shape), found)
    with np.errstate(over="ignore"):
        return np.asarray(found, "float32" if dtype == "bfloat16" else dtype)


def drawn_options(rng):
    """Return some print options, and often none."""
    drawn = {
        "precision": int(rng.integers(9)),
        "threshold": rng.choice([0, 10, 100, np.inf]),
        "edgeitems": int(rng.integers(5)),
        "linewidth": int(rng.integers(140)),
        "profile": str(rng.choice(["default", "short", "full"])),
        "sci_mode": bool(rng.integers(2)),
    }
    kept = rng.random(len(drawn)) < rng.choice([0, 0.4])
    return {name: value for (name, value), keep in zip(drawn.items(), kept, strict=True) if keep}


def outcome(function, *args, **kwargs):
    """Return what a call returns, or its error's type and words."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS, "bool"])
def test_equals_torch(torch, dtype):
    rng = np.random.default_rng(list(dtype.encode()))
    for _ in range(50 if dtype in FLOATS else 20):
        numbers, options = drawn_numbers(rng, dtype), drawn_options(rng)
        for set_options in (torch.set_printoptions, set_printoptions):
            set_options(profile="default")
            set_options(**options)
        tensor, keywords = torch.tensor(numbers, dtype=getattr(torch, dtype)), {}
        if dtype == "bfloat16":
            numbers = tensor.float().numpy()
        way = rng.integers(4) if dtype in FLOATS else 0
        if way:
            tensor = torch.nn.Parameter(tensor) if way == 1 else tensor.requires_grad_()
            keywords = {"suffix": ", requires_grad=True", "parameter": way == 1}
        if way == 3:
            tensor, keywords["suffix"] = tensor * 1, ", grad_fn=<MulBackward0>"
        assert format_tensor(numbers, dtype, **keywords) == repr(tensor), options
        for spec in ("", ".3f", ">9"):
            expected = outcome(format, tensor, spec)
            assert outcome(format_number, numbers, dtype, spec, **keywords) == expected


def test_options_that_cannot_be_are_refused():
    for options, words in (
        ({"profile": "long"}, 'profile must be "default", "short" or "full"'),
        ({"precision": -1}, "precision must be at least 0"),
        ({"edgeitems": 1.5}, "edgeitems must be an int"),
        ({"linewidth": "80", "precision": 2}, "linewidth must be a real number"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            set_printoptions(**options)
    assert format_tensor(np.float32([0.5]), "float32") == "tensor([0.5000])"  # nothing was set
    set_printoptions(linewidth=np.inf)
    assert "\n" not in format_tensor(np.zeros(500), "float64")


def test_numbers_in_an_f_string():
    assert format_number(np.array(2.5, "float32"), "float32", ".3f") == "2.500"
    assert format_number(np.array(0.1, "float32"), "float32", "") == "0.10000000149011612"
    with pytest.raises(TypeError, match=r"unsupported format string passed to Tensor.__format__"):
        format_number(np.zeros(1), "float64", ".3f")
