"""selfattn.optim: the algorithms as their papers write them, PyTorch's numbers, 16 bits, errors."""

import copy
import decimal
import fractions
import json

import numpy as np
import pytest
from inputs import laid_out
from refusals import refusals

import selfattn as sa
from selfattn import _core, nn, optim, training

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.3}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "betas": (0.5, 0.8), "weight_decay": 0.3}),
]


def adam(w=None, **options):
    return optim.Adam({"w": np.ones(2)} if w is None else w, **options)


def trajectory(name, options, dtype):
    """Take ten steps with fixed gradients; the third step has no gradient of b."""
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal((3, 2)).astype(dtype), "b": rng.standard_normal(4).astype(dtype)}
    live, start = dict(params), {key: array.copy() for key, array in params.items()}
    steps = [
        {key: rng.standard_normal(a.shape).astype(dtype) for key, a in params.items()} for _ in range(10)
    ]
    del steps[2]["b"]
    optimizer = getattr(optim, name)(params, **options)
    for grads in steps:
        given = {key: grad.copy() for key, grad in grads.items()}
        assert optimizer.step(grads) is None
        np.testing.assert_equal(grads, given)
    return start, steps, live


def by_hand(name, options, theta, grads):
    """The algorithms as their papers and PyTorch's documentation write them, for one parameter."""
    o = {"lr": 1e-3, "momentum": 0, "dampening": 0, "nesterov": False, "betas": (0.9, 0.999), "eps": 1e-8}
    o |= {"weight_decay": 0.01 if name == "AdamW" else 0} | options
    m, v = np.zeros_like(theta), np.zeros_like(theta)
    for t, grad in enumerate(grads, 1):
        decay = o["weight_decay"] * theta
        g = grad if name == "AdamW" else grad + decay
        if name == "AdamW":
            theta = theta - o["lr"] * decay
        if name == "SGD":
            m = o["momentum"] * m + (g if t == 1 else (1 - o["dampening"]) * g)
            theta = theta - o["lr"] * (g + o["momentum"] * m if o["nesterov"] else m)
            continue
        (b, c) = o["betas"]
        m, v = b * m + (1 - b) * g, c * v + (1 - c) * g * g
        theta = theta - o["lr"] * (m / (1 - b**t)) / (np.sqrt(v / (1 - c**t)) + o["eps"])
    return theta


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ten_steps_are_those_of_the_algorithm(name, options, dtype):
    start, steps, live = trajectory(name, options, dtype)
    for key, theta in start.items():
        grads = [grads[key].astype(np.float64) for grads in steps if key in grads]
        expected = by_hand(name, options, theta.astype(np.float64), grads)
        # ten steps of a few roundings of numbers below 8; 1 - 0.999 has an error of 1e-13
        close = max(64 * np.finfo(dtype).eps, 1e-12)
        np.testing.assert_allclose(live[key], expected, rtol=0, atol=close)


@pytest.mark.parametrize(("name", "options"), [CASES[1], CASES[4], CASES[6]])
def test_bits_depend_on_neither_threads_nor_instruction_set(name, options, isa):
    """The arrays are long enough for seven threads; no operation is fused."""

    def after(threads, kernels):
        _core._set_isa(kernels)
        sa.set_num_threads(threads)
        rng = np.random.default_rng(0)
        params = {"a": rng.standard_normal((1000, 701)).astype(np.float32), "b": rng.standard_normal(7)}
        optimizer = getattr(optim, name)(params, **options)
        for _ in range(2):
            optimizer.step({key: rng.standard_normal(array.shape) for key, array in params.items()})
        return params

    try:
        expected = after(1, "generic")
        for threads in (1, 2, 7):
            np.testing.assert_equal(after(threads, isa), expected)
    finally:
        sa.set_num_threads(None)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_a_bad_rate_writes_nothing(name):
    params = {"w": np.ones(3)}
    optimizer = getattr(optim, name)(params, **({"momentum": 0.9} if name == "SGD" else {}))
    optimizer.weight_decay = float("nan")
    with pytest.raises(ValueError, match="lr and weight_decay must be at least 0 and finite"):
        optimizer.step({"w": np.ones(3)})
    np.testing.assert_array_equal(params["w"], 1)
    assert optimizer.state == {"w": {}}
    params["w"].flags.writeable = False
    optimizer.weight_decay = 0.1
    with pytest.raises(ValueError, match="read-only"):
        optimizer.step({"w": np.ones(3)})


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_parameters_of_any_layout(name):
    """The parameters equal plain copies after the same steps, rounded by NumPy."""
    params, rng = laid_out(), np.random.default_rng(1)
    wide = {key: x.astype(np.float64 if "64" in key else np.float32, order="C") for key, x in params.items()}
    ours, theirs = (getattr(optim, name)(own, lr=0.1) for own in (params, wide))
    for _ in range(2):
        grads = {key: rng.standard_normal(x.shape) for key, x in wide.items()}
        ours.step(grads)
        theirs.step(grads)
        for key, x in params.items():
            np.testing.assert_array_equal(x, wide[key].astype(x.dtype), err_msg=key)
            wide[key][...] = x


def test_read_only_parameters_stop_the_whole_step():
    params = {"a": np.ones(3, np.float16), "b": np.ones(3, np.float16)}
    optimizer = optim.Adam(params)
    params["b"].flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        optimizer.step({"a": np.ones(3), "b": np.ones(3)})
    np.testing.assert_array_equal(params["a"], 1)
    assert optimizer.state_dict()["state"] == {} and not optimizer.stepped


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_loaded_state_goes_on_to_the_same_bits(name, options, dtype):
    rng = np.random.default_rng(0)
    params = {"a": np.ones((3, 2), dtype), "b": np.ones(4, dtype)}
    first = getattr(optim, name)(params, **options)
    first.step({"a": rng.standard_normal((3, 2))})  # the parameter b has no state yet
    first.step({key: rng.standard_normal(array.shape) for key, array in params.items()})

    saved = first.state_dict()
    copies = {key: array.copy() for key, array in params.items()}
    second = getattr(optim, name)(copies, lr=7.0)
    second.load_state_dict(saved)
    for group in saved["param_groups"]:  # neither the saved arrays nor the first optimiser's are shared
        assert group["params"] == ["a", "b"]
    for entries in saved["state"].values():
        for slot, array in entries.items():
            if slot != "step":
                array[...] = np.nan
    for _ in range(3):
        grads = {key: rng.standard_normal(array.shape) for key, array in params.items()}
        first.step(grads)
        second.step(grads)
    assert second.lr == first.lr
    for key, array in params.items():
        assert np.isfinite(array).all()
        np.testing.assert_array_equal(copies[key], array)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_state_is_laid_out_as_that_of_pytorch(name, options):
    torch = pytest.importorskip("torch")
    theirs = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = getattr(torch.optim, name)([theirs], **options)
    theirs.grad = torch.arange(3.0, dtype=torch.float64)
    optimizer.step()
    ours = getattr(optim, name)({"w": np.ones(3)}, **options)
    ours.step({"w": np.arange(3.0)})
    expected, got = optimizer.state_dict(), ours.state_dict()
    group, theirs_group = (each["param_groups"][0] | {"params": None} for each in (got, expected))
    assert {key: theirs_group[key] for key in group} == group
    their_state = {key: value for key, value in expected["state"].get(0, {}).items() if value is not None}
    our_state = got["state"].get("w", {})
    assert set(our_state) == set(their_state)
    for key, value in their_state.items():  # each is one product
        np.testing.assert_allclose(our_state[key], value.numpy(), rtol=4 * np.finfo(float).eps)


def adam_state(**changes):
    """Make the state of an Adam for "w" of two numbers, some entries changed."""
    optimizer = adam()
    optimizer.step({"w": [1.0, 2.0]})
    state = optimizer.state_dict()
    for key, value in changes.items():
        (state["state"]["w"] if key in state["state"]["w"] else state["param_groups"][0])[key] = value
    return state


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (None, ValueError, "'state' and 'param_groups', not None"),
        ({"state": {}, "param_groups": []}, ValueError, "list of one dict"),
        (optim.SGD({"w": np.ones(2)}).state_dict(), ValueError, "must have .*'betas'.* for Adam"),
        (optim.AdamW({"w": np.ones(2)}).state_dict(), ValueError, "decoupled_weight_decay=False, not True"),
        (adam_state(params=["v"]), ValueError, r"of the parameters \['v'\], not \['w'\]"),
        (adam_state(lr=float("nan")), ValueError, "lr must be at least 0"),
        (adam_state(betas=(1.0, 0.5)), ValueError, r"betas must be .* not \(1.0, 0.5\)"),
        (adam_state(step=0), ValueError, "from 1 to .*, not 0"),
        (adam_state(step=1.5), ValueError, "not 1.5"),
        (adam_state(exp_avg=np.ones(3)), ValueError, r"\(2,\) of float64, not \(3,\) of float64"),
        (adam_state(exp_avg=np.ones(2, np.float32)), ValueError, "of float64, not .* of float32"),
        (adam_state(exp_avg_sq=[1.0, 2.0]), TypeError, r"not \[1.0, 2.0\]"),
        (adam_state() | {"state": {"v": {}}}, ValueError, "'v', which is not one of"),
        (adam_state() | {"state": {"w": {"step": 1}}}, ValueError, "must have .*'exp_avg'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, error, message):
    optimizer = adam(lr=0.25)
    optimizer.step({"w": [1.0, 1.0]})
    before = optimizer.state_dict()
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(state)
    np.testing.assert_equal(optimizer.state_dict(), before)


W, MASKED = {"w": np.ones(2)}, np.ma.masked_array([1.0, 2.0], [False, True])
test_wrong_calls_say_what_is_wrong = refusals(
    (lambda: optim.SGD(W, lr=-1), ValueError, "lr must be at least 0 and finite, not -1"),
    (lambda: optim.SGD(W, lr=float("nan")), ValueError, "nan"),
    (lambda: setattr(adam(), "lr", -1.0), ValueError, "at least 0 and finite, not -1.0"),
    (lambda: optim.SGD(W, lr="0.1"), TypeError, "lr must be a real number, not '0.1'"),
    (lambda: adam(lr=10**400), ValueError, "lr is too large for a float: 1000"),
    (lambda: optim.SGD(W, nesterov=True), ValueError, "momentum > 0"),
    (lambda: adam(betas=(1.0, 0.9)), ValueError, r"\[0, 1\)"),
    (lambda: adam([*W.values()]), TypeError, "params must be a dict"),
    (lambda: adam({"w": [1.0]}), TypeError, "ndarray of floats"),
    (lambda: adam({"w": np.ones(2, int)}), TypeError, "ndarray of floats"),
    (lambda: optim.SGD({"w": MASKED}, 0.1), TypeError, r"params\['w'\] must be an ndarray of floats"),
    (lambda: adam(W).step({"w": MASKED}), TypeError, "the gradient of w is a MaskedArray; pass a plain array"),
    (lambda: adam(W).step({"w": np.ones(2), "u": np.ones(2)}), ValueError, "'u', which is not"),
    (lambda: adam(W).step((np.ones(2), W)), TypeError, "grads must be a mapping .*, not tuple"),
    (lambda: adam(W).step({"w": np.ones(2, complex)}), TypeError, "complex128"),
    (lambda: adam(W).step({"w": np.ones(2, "m8[s]")}), TypeError, "timedelta64"),
    (lambda: adam(W).step({"w": np.ones(3)}), ValueError, r"shape \(3,\), the parameter \(2,\)"),
    *((lambda make=make, number=number: make(number), TypeError, f"{name} must be a real number, not")
      for name, make in (("lr", lambda number: adam(lr=number)), ("p", sa.nn.Dropout)) for number in (
          "0.1", b"1", None, 1j, np.complex64(1), np.array([0.1]), np.bool_(True), True, np.array("0.1"), [0.1],
      )),
)  # fmt: skip


def test_wrong_calls_write_nothing():
    np.testing.assert_array_equal(W["w"], 1)


class Integer:
    """An integer class of another library."""

    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n


NUMBERS = [
    decimal.Decimal("0.5"), fractions.Fraction(1, 2), np.float16(0.5), np.float64(0.5), np.array(0.5, np.float32),
    np.int8(1), np.array(1), Integer(1), 1, True + 0.5,
]  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numbers_of_every_kind_are_floats_from_the_call_on(number):
    """Options become floats, also if they are set later, so that they can be saved."""
    small = number if float(number) < 1 else 0.5
    made = [
        optim.Adam({"w": np.ones(2)}, lr=number, betas=(small, small), eps=number, weight_decay=number),
        optim.SGD({"w": np.ones(2)}, lr=number, momentum=number, dampening=number, weight_decay=number),
    ]
    for optimizer in made:
        optimizer.lr = optimizer.weight_decay = number
        optimizer.step({"w": np.ones(2)})
        state = optimizer.state_dict()
        group = state["param_groups"][0]
        assert json.loads(json.dumps(group))["lr"] == float(number)
        options = [option if isinstance(option, tuple) else [option] for option in group.values()]
        kinds = {type(x) for option in options for x in option}
        assert kinds <= {float, bool, list}
        type(optimizer)({"w": np.ones(2)}).load_state_dict(state)
    assert sa.nn.LayerNorm(2, eps=number).eps == float(number)
    assert sa.nn.RMSNorm(2, eps=number).eps == float(number)
    assert sa.nn.Dropout(small).p == 0.5
    filled = [sa.nn.init.constant_(np.empty(2), x) for x in (number, float(number))]
    filled += [sa.nn.init.uniform_(np.empty(2), -x, x, rng=0) for x in (float(number), float(number))]
    assert (filled[0] == filled[1]).all()


INTEGERS = [np.int8(2), np.uint64(2), np.array(2), Integer(2)]


@pytest.mark.parametrize("two", INTEGERS, ids=lambda number: type(number).__name__)
def test_integers_of_every_kind_are_sizes_and_seeds(two):
    x = np.random.default_rng(0).standard_normal((4, 2))
    for make in (
        lambda n: nn.Linear(n, n, rng=n),
        lambda n: nn.MultiheadAttention(n, n, rng=n),
        nn.LayerNorm,
        lambda n: nn.Embedding(n, n, rng=n),
        lambda n: nn.TransformerEncoderLayer(n, n, n, dropout=0.0, rng=n),
        lambda n: nn.SinusoidalPositions(n, n),
        lambda n: nn.Embedding(n, n, padding_idx=1, rng=n),
        lambda n: nn.SelfAttention(n, n, rng=n),
        lambda n: nn.SelfAttentionBlock(n, n, rng=n),
        lambda n: nn.TransformerDecoderLayer(n, n, n, dropout=0.0, rng=n),
        lambda n: nn.GPT(n, n, n, n, n, rng=n),
        lambda n: nn.EmbeddingModel(lambda s: [1], n, n, max_seq_len=n, num_layers=n, num_heads=n, rng=n),
        lambda n: nn.TransformerEncoder(nn.TransformerEncoderLayer(2, 1, 2, dropout=0.0, rng=0), n),
    ):
        ours, plain = make(two), make(2)
        assert repr(ours) == repr(plain)
        np.testing.assert_equal(dict(ours.state_dict()), dict(plain.state_dict()))
    task = nn.ProxyTask(nn.EmbeddingModel(lambda s: [len(s)], 8, 2, max_seq_len=2, rng=0))
    triplets = [("a", "bb", "ccc")] * 5
    history = training.fit(task, triplets, epochs=two, batch_size=two, rng=two, log_every=None)
    assert len(history.step_losses) == 6
    assert task.model.encode(["a", "bb", "ccc"], batch_size=two).shape == (3, 2)
    steps = sa.attention_steps(x, x, x, scale=decimal.Decimal("0.5"), softcap=fractions.Fraction(3))
    assert sa.views.steps_page(steps, precision=two).html == sa.views.steps_page(steps, precision=2).html
    np.testing.assert_allclose(steps.scaled_scores, 3 * np.tanh(0.5 * (x @ x.T) / 3), rtol=1e-14)


def test_a_width_made_of_a_small_integer_is_not_of_its_range():
    """4 · 64 overflows int8, and is 0 as a uint8."""
    plain = nn.GPT(5, 64, 1, 2, 4, rng=0)
    for small in (np.int8(64), np.uint8(64), np.array(64, np.uint8)):
        assert repr(nn.GPT(5, small, 1, 2, 4, rng=0)) == repr(plain)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_gradients_may_be_other_parameters(name, dtype):
    """The gradients of u·v are v and u; a transposed one is a view."""
    u, v = np.array([[1.0, 2.0], [3.0, 4.0]], dtype), np.array([[5.0, 6.0], [7.0, 8.0]], dtype)
    expected = {"u": u.copy(), "v": v.copy(), "w": np.ones((2, 2), dtype)}
    grads = {"u": v.copy(), "v": u.copy(), "w": u.T.copy()}
    params = {"u": u, "v": v, "w": np.ones((2, 2), dtype)}
    getattr(optim, name)(expected, lr=0.5).step(grads)
    getattr(optim, name)(params, lr=0.5).step({"u": v, "v": u, "w": u.T})
    np.testing.assert_equal(params, expected)


def test_betas_may_be_set_to_an_array_and_are_saved_as_numbers():
    optimizer = optim.Adam({"w": np.ones(2)})
    optimizer.betas = np.array([0.5, 0.75])
    optimizer.step({"w": np.ones(2)})
    assert optimizer.state_dict()["param_groups"][0]["betas"] == (0.5, 0.75)


@pytest.mark.parametrize(("name", "options"), [("Adam", {}), ("AdamW", {}), ("SGD", {"momentum": 0.9})])
def test_a_shallow_copy_has_a_state_of_its_own(name, options):
    """A copy shares the parameters, but not the state: steps of the copy must not change the original's."""
    params, grads = {"w": np.ones(3)}, {"w": np.array([1.0, -2.0, 0.5])}
    optimizer = getattr(optim, name)(params, **options)
    optimizer.step(grads)
    before = optimizer.state_dict()
    copied = copy.copy(optimizer)
    copied.lr = 0.5
    copied.step(grads)
    np.testing.assert_equal(optimizer.state_dict(), before)
    assert copied.params["w"] is params["w"]
    twice = getattr(optim, name)({"w": np.ones(3)}, **options)
    for _ in range(2):
        twice.step(grads)
    np.testing.assert_equal(copied.state_dict()["state"], twice.state_dict()["state"])


@pytest.mark.parametrize("kind", [nn.Sequential, lambda *modules: nn.ModuleList(modules)])
def test_a_shallow_copy_of_a_list_of_modules_is_a_list_of_its_own(kind):
    modules = kind(nn.Linear(2, 2, rng=0))
    copied = copy.copy(modules)
    copied.append(nn.ReLU())
    assert (len(modules), len(copied)) == (1, 2)
    assert copied[0] is modules[0]
