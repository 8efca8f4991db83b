"""selfattn.optim: the algorithms as papers write them, schedules of the learning rate, clipping, PyTorch's numbers,
16 bits, errors."""

import copy
import decimal
import fractions
import json
import math
import warnings

import numpy as np
import pytest
from inputs import laid_out
from instruction_sets import ISAS, using
from refusals import refusals

import selfattn as sa
from selfattn import nn, optim, training
from selfattn.optim import lr_scheduler

CASES = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.3}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("Adam", {}),
    ("Adam", {"lr": 0.1, "betas": (0.5, 0.8), "eps": 1e-3, "weight_decay": 0.3}),
    ("AdamW", {"lr": 0.1}),
    ("AdamW", {"lr": 0.1, "betas": (0.5, 0.8), "weight_decay": 0.3}),
    ("AdamW", {"lr": 0.1, "betas": (0.5, 0.8), "amsgrad": True}),
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
    m, v, peak = np.zeros_like(theta), np.zeros_like(theta), np.zeros_like(theta)
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
        peak = np.maximum(peak, v) if o.get("amsgrad") else v
        theta = theta - o["lr"] * (m / (1 - b**t)) / (np.sqrt(peak / (1 - c**t)) + o["eps"])
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


@pytest.mark.parametrize(("name", "options"), [CASES[1], CASES[4], CASES[6], CASES[7]])
def test_bits_depend_on_neither_threads_nor_instruction_set(name, options, threads_restored):
    """The arrays are long enough for seven threads; no operation is fused."""

    def after(threads):
        sa.set_num_threads(threads)
        rng = np.random.default_rng(0)
        params = {"a": rng.standard_normal((1000, 701)).astype(np.float32), "b": rng.standard_normal(7)}
        optimizer = getattr(optim, name)(params, **options)
        for _ in range(2):
            optimizer.step({key: rng.standard_normal(array.shape) for key, array in params.items()})
        return params

    with using("generic"):
        expected = after(1)
    before = np.random.default_rng(0).standard_normal((1000, 701)).astype(np.float32)
    assert np.count_nonzero(expected["a"] == before) < 20  # two steps may cancel each other
    for isa in ISAS:
        with using(isa):
            for threads in (1, 7):
                np.testing.assert_equal(after(threads), expected, err_msg=f"{isa}, {threads} threads")


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
    with pytest.raises(ValueError, match="the parameter b is read-only"):
        optimizer.step({"a": np.ones(3), "b": np.ones(3)})
    np.testing.assert_array_equal(params["a"], 1)
    assert optimizer.state_dict()["state"] == {} and not optimizer.stepped


def test_parameters_that_share_memory_are_refused():
    whole = np.ones((4, 6))
    apart = {"left": whole[:, :3], "right": whole[:, 3:], "other": np.ones(2), "none": whole[:0]}
    optim.SGD(apart)  # their columns alternate in memory
    for name, shared in (("last", whole[3:]), ("turned", whole[:, 4:].T), ("number", whole[2, 5:])):
        with pytest.raises(ValueError, match=f"the parameters .*{name}.* share memory"):
            optim.SGD(apart | {name: shared})


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


def two_groups(name="AdamW", **options):
    params = {"a": np.ones((2, 3)), "b": np.ones(3, np.float16), "c": np.ones(2)}
    groups = [
        {"params": {"a": params["a"]}, "weight_decay": 0.5},
        {"params": {"b": params["b"], "c": params["c"]}, "lr": 0.01},
    ]
    return params, getattr(optim, name)(groups, lr=0.1, **options)


@pytest.mark.parametrize(("name", "options"), [("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9})])
def test_a_group_moves_as_an_optimizer_of_its_own(name, options):
    params, both = two_groups(name, **options)
    other, _ = two_groups(name)
    make = getattr(optim, name)
    rest = {key: other[key] for key in "bc"}
    apart = make({"a": other["a"]}, 0.1, weight_decay=0.5, **options), make(rest, 0.01, **options)
    for step in range(4):
        grads = {key: np.full(x.shape, 0.3 * step - 0.1) for key, x in params.items()}
        if step == 2:
            both.load_state_dict(json.loads(json.dumps(both.state_dict(), default=repr)) | both.state_dict())
        both.step(grads)
        for each in apart:  # takes its part
            each.step(grads)
        np.testing.assert_equal(params, other)


def test_options_of_groups():
    params, optimizer = two_groups()
    assert optimizer.params.keys() == params.keys() and optimizer.eps == 1e-8
    optimizer.betas = (0.5, 0.5)
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.5)] * 2
    for differs in (lambda: optimizer.lr, lambda: setattr(optimizer, "lr", 1.0)):
        with pytest.raises(AttributeError, match=r"differ in lr: \[0.1, 0.01\]; param_groups\[i\]\['lr'\]"):
            differs()
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr and weight_decay"):
        optimizer.step({"a": np.ones((2, 3)), "b": np.ones(3)})
    np.testing.assert_array_equal(params["a"], 1)
    assert optimizer.state["a"] == {}
    short = optim.AdamW(params, weight_decay=0.5, decay_only_matrices=True)
    found = [(list(group["params"]), group["weight_decay"]) for group in short.param_groups]
    assert found == [(["a"], 0.5), (["b", "c"], 0.0)]
    assert len(optim.SGD({"b": params["b"]}, decay_only_matrices=True).param_groups) == 1
    group = {"params": {"a": np.ones(2)}}
    for groups, error, message in (
        ([], TypeError, "or a list of groups"),
        ([np.ones(2)], TypeError, "or a list of groups"),
        ([{"params": [np.ones(2)]}], TypeError, "or a list of groups"),
        ([group, group], ValueError, "a is in two groups"),
        ([group, {"params": {"b": group["params"]["a"]}}], ValueError, "a and b share memory"),
        ([group | {"decay": 1.0}], TypeError, "Adam has no option 'decay'"),
        ([group | {"eps": -1.0}], ValueError, "eps must be at least 0"),
    ):
        with pytest.raises(error, match=message):
            optim.Adam(groups)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="a dict for each group, here 2"):
        optimizer.load_state_dict(state | {"param_groups": state["param_groups"][:1]})
    old = short.state_dict()
    for each in old["param_groups"]:  # as an older selfattn wrote it
        del each["amsgrad"]
    short.load_state_dict(old)


@pytest.mark.parametrize("name", ["linear", "sequence", "three phases"])
def test_schedules_of_groups_have_the_bits_of_pytorch(name):
    torch = pytest.importorskip("torch")
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    theirs = torch.optim.SGD(
        [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.7}], lr=0.3, momentum=0.9
    )
    own = [{"params": {"a": np.zeros(1)}}, {"params": {"b": np.zeros(1)}, "lr": 0.7}]
    mine = optim.SGD(own, lr=0.3, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = course(
            theirs, SCHEDULES[name](torch.optim.lr_scheduler, theirs), lambda: None, theirs.step
        )
    scheduler = SCHEDULES[name](lr_scheduler, mine)
    assert course(mine, scheduler, lambda: None, lambda: mine.step({"a": [1.0], "b": [1.0]})) == expected
    scheduler.load_state_dict(scheduler.state_dict())


def test_lists_of_a_schedule_have_an_entry_for_each_group():
    _, optimizer = two_groups()
    with pytest.raises(TypeError, match="for each group of parameters, here 2"):
        lr_scheduler.LambdaLR(optimizer, [math.cosh])
    with pytest.raises(ValueError, match="max_lr has 1 numbers for 2 groups"):
        lr_scheduler.OneCycleLR(optimizer, [0.1], 5)
    assert lr_scheduler.LambdaLR(optimizer, [lambda _: 2.0, lambda _: 3.0]).get_last_lr() == [0.2, 0.03]
    assert lr_scheduler.OneCycleLR(optimizer, [0.5, 0.25], 5).get_last_lr() == pytest.approx([0.02, 0.01])


@pytest.mark.parametrize("floor", [{"min_lr": 0.02}, {"min_lr_rate": 0.3}])
def test_warm_up_and_cosine_to_a_floor(floor):
    """By Transformers' formula, and flat after its end."""
    optimizer = sgd(lr=0.1)
    make = lr_scheduler.get_cosine_with_min_lr_schedule_with_warmup
    scheduler, least = make(optimizer, 3, 11, **floor), floor.get("min_lr", 0.03)
    found = [
        rate for rate, _ in course(optimizer, scheduler, lambda: 0, lambda: optimizer.step({"w": [0.0]}))
    ]
    steps = np.minimum(np.arange(STEPS), 11)
    cosine = (1 + np.cos(np.pi * (steps - 3) / 8)) / 2
    expected = np.where(steps < 3, steps / 3 * 0.1, least + (0.1 - least) * cosine)
    np.testing.assert_allclose(found, expected, rtol=1e-14)
    with pytest.raises(ValueError, match="one of min_lr and min_lr_rate"):
        make(optimizer, 3, 11)


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
        ({"state": {}, "param_groups": []}, ValueError, "a dict for each group, here 1"),
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
    (
        lambda: adam(W).step({"w": MASKED}),
        TypeError,
        "the gradient of w is a MaskedArray; pass a plain array",
    ),
    (lambda: adam(W).step({"u": np.ones(2)}), ValueError, "'u', which is not .*, and has none for 'w'"),
    (lambda: adam(W).step((np.ones(2), W)), TypeError, "grads must be a mapping .*, not tuple"),
    (lambda: adam(W).step({"w": np.ones(2, complex)}), TypeError, "complex128"),
    (lambda: adam(W).step({"w": np.ones(2, "m8[s]")}), TypeError, "timedelta64"),
    (lambda: adam(W).step({"w": np.ones(3)}), ValueError, r"shape \(3,\), the parameter \(2,\)"),
    *(
        (lambda make=make, number=number: make(number), TypeError, f"{name} must be a real number, not")
        for name, make in (("lr", lambda number: adam(lr=number)), ("p", sa.nn.Dropout))
        for number in (
            "0.1",
            b"1",
            None,
            1j,
            np.complex64(1),
            np.array([0.1]),
            np.bool_(True),
            True,
            np.array("0.1"),
            [0.1],
        )
    ),
)


def test_wrong_calls_write_nothing():
    np.testing.assert_array_equal(W["w"], 1)


class Integer:
    """An integer class of another library."""

    def __init__(self, n):
        self.n = n

    def __index__(self):
        return self.n


NUMBERS = [
    decimal.Decimal("0.5"),
    fractions.Fraction(1, 2),
    np.float16(0.5),
    np.float64(0.5),
    np.array(0.5, np.float32),
    np.int8(1),
    np.array(1),
    Integer(1),
    1,
    True + 0.5,
]


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


STEPS = 23


def lambda_lr(module, optimizer):
    return module.LambdaLR(optimizer, lambda step: 0.9**step)


def linear(module, optimizer):
    return module.LinearLR(optimizer, 0.1, 0.7, total_iters=7)


def cosine(module, optimizer):
    return module.CosineAnnealingLR(optimizer, 6, eta_min=0.01)


def one_cycle(module, optimizer, **more):
    return module.OneCycleLR(optimizer, 0.4, STEPS, **more)


def sequence(module, optimizer):
    schedules = [linear, cosine, lambda_lr, one_cycle, linear]
    return module.SequentialLR(optimizer, [each(module, optimizer) for each in schedules], [5, 12, 13, 18])


SCHEDULES = {
    "lambda": lambda_lr,
    "a list of one lambda": lambda module, optimizer: module.LambdaLR(optimizer, [math.cosh]),
    "linear": linear,
    "linear by default": lambda module, optimizer: module.LinearLR(optimizer),
    "cosine": cosine,
    "cosine of one step": lambda module, optimizer: module.CosineAnnealingLR(optimizer, 1),
    "one cycle": one_cycle,
    "three phases": lambda *args: one_cycle(*args, three_phase=True, pct_start=0.25, div_factor=10),
    "one cycle, linear": lambda *args: one_cycle(*args, anneal_strategy="linear", final_div_factor=3),
    "all falling": lambda *args: one_cycle(*args, pct_start=0.0, cycle_momentum=False),
    "epochs": lambda module, optimizer: module.OneCycleLR(optimizer, 0.4, epochs=8, steps_per_epoch=3),
    "warm-up and cosine": lambda module, optimizer: module.SequentialLR(
        optimizer,
        [module.LinearLR(optimizer, 0.01, 1.0, 4), module.CosineAnnealingLR(optimizer, STEPS - 4)],
        [4],
    ),
    "sequence": sequence,
    "two at once": lambda module, optimizer: (linear(module, optimizer), cosine(module, optimizer))[1],
}


def sgd(**options):
    return optim.SGD({"w": np.zeros(1)}, **options)


OPTIMIZERS = {"SGD": {"lr": 0.3}, "Adam": {"lr": 0.3, "betas": (0.8, 0.99)}}


def course(optimizer, scheduler, momentum, step):
    """Return the learning rate and the momentum of each step."""
    found = []
    for _ in range(STEPS):
        found.append((*scheduler.get_last_lr(), momentum()))
        step()
        scheduler.step()
    return found


def ours(name, kind):
    optimizer = getattr(optim, kind)({"w": np.zeros(1)}, **OPTIMIZERS[kind])
    scheduler = SCHEDULES[name](lr_scheduler, optimizer)

    def momentum():
        assert scheduler.get_last_lr() == [optimizer.lr]
        return optimizer.momentum if kind == "SGD" else optimizer.betas[0]

    return course(optimizer, scheduler, momentum, lambda: optimizer.step({"w": np.ones(1)}))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_step_has_the_bits_of_pytorch(name, kind):
    torch = pytest.importorskip("torch")
    optimizer = getattr(torch.optim, kind)([torch.zeros(1, requires_grad=True)], **OPTIMIZERS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = SCHEDULES[name](torch.optim.lr_scheduler, optimizer)
        group = optimizer.param_groups[0]
        momentum = (lambda: group["momentum"]) if kind == "SGD" else (lambda: group["betas"][0])
        expected = course(optimizer, scheduler, momentum, optimizer.step)
    assert ours(name, kind) == expected


def test_linear_and_cosine_and_one_cycle_by_their_formulas():
    """Rates that are computed from the previous rate are off by a few eps for each step."""
    steps = np.arange(STEPS)
    up = np.minimum(steps, 7) / 7
    half = (1 + np.cos(np.pi * steps / 6)) / 2
    top = 0.3 * STEPS - 1
    rise = np.where(steps <= top, steps / top, 1 - (steps - top) / (STEPS - 1 - top))
    swing = (1 - np.cos(np.pi * rise)) / 2
    ends = np.where(steps <= top, 0.4 / 25, 0.4 / 25e4)
    for name, expected in [
        ("linear", 0.3 * (0.1 + 0.6 * up)),
        ("cosine", 0.01 + 0.29 * half),
        ("one cycle", ends + (0.4 - ends) * swing),
    ]:
        np.testing.assert_allclose([lr for lr, _ in ours(name, "SGD")], expected, rtol=STEPS * 1e-14)


@pytest.mark.parametrize("name", ["lambda", "linear", "cosine", "one cycle", "sequence"])
@pytest.mark.parametrize("after", [1, 4, 5, 6, 12, 14])
def test_a_schedule_continues_from_its_state(name, after):
    """The state goes through JSON, as in a file; the optimiser's state has the learning rate."""

    def made():
        optimizer = optim.Adam({"w": np.zeros(1)}, **OPTIMIZERS["Adam"])
        return optimizer, SCHEDULES[name](lr_scheduler, optimizer)

    def go(optimizer, scheduler, steps):
        found = []
        for _ in range(steps):
            optimizer.step({"w": np.ones(1)})
            scheduler.step()
            found.append((optimizer.lr, optimizer.betas))
        return found

    whole = go(*made(), STEPS)
    optimizer, scheduler = made()
    go(optimizer, scheduler, after)
    again, scheduler_again = made()
    again.load_state_dict(optimizer.state_dict())
    scheduler_again.load_state_dict(json.loads(json.dumps(scheduler.state_dict())))
    assert go(again, scheduler_again, STEPS - after) == whole[after:]
    assert scheduler_again.last_epoch == STEPS


def test_a_state_is_a_copy_and_that_of_another_kind_is_refused():
    optimizer = sgd(lr=0.3)
    schedulers = [make(lr_scheduler, optimizer) for make in (linear, cosine, sequence, one_cycle)]
    states = [scheduler.state_dict() for scheduler in schedulers]
    for i, scheduler in enumerate(schedulers):
        for j, state in enumerate(states):
            if i != j:
                with pytest.raises(ValueError, match="the state of"):
                    scheduler.load_state_dict(state)
        wrong = {"last_epoch": "1"}, {"_last_lr": [1.0, 2.0]}
        for damaged in (None, [], {}, *(states[i] | change for change in wrong)):
            with pytest.raises(ValueError, match="state of"):
                scheduler.load_state_dict(damaged)
        assert scheduler.state_dict() == states[i]
    states[0]["base_lrs"].append(1.0)
    assert len(schedulers[0].base_lrs) == 1


@pytest.mark.parametrize(
    "kind", [iter, lambda given: dict(enumerate(given)).values(), lambda given: np.array(given, object)]
)
def test_schedulers_of_a_sequence_may_be_any_iterable(kind):
    found = []
    for form in (list, kind):
        optimizer = sgd(lr=0.3)
        schedulers = [linear(lr_scheduler, optimizer), cosine(lr_scheduler, optimizer)]
        scheduler = lr_scheduler.SequentialLR(optimizer, form(schedulers), form([5]))
        found.append(course(optimizer, scheduler, float, lambda own=optimizer: own.step({"w": [1.0]})))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_shallow_copy_counts_its_own_steps(name):
    """The optimiser is the same, and has the learning rate that was set last."""
    optimizer = sgd(lr=0.3)
    scheduler = SCHEDULES[name](lr_scheduler, optimizer)
    optimizer.step({"w": np.ones(1)})
    before = scheduler.state_dict()
    copied = copy.copy(scheduler)
    copied.step()
    assert scheduler.state_dict() == before != copied.state_dict()


def test_last_epoch_continues_with_an_optimizer_that_had_a_scheduler():
    torch = pytest.importorskip("torch")
    theirs = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    mine = sgd(lr=0.3)
    for module, optimizer in ((torch.optim.lr_scheduler, theirs), (lr_scheduler, mine)):
        with pytest.raises((KeyError, ValueError), match="scheduler"):
            module.LambdaLR(optimizer, math.cosh, last_epoch=3)
    rates = []
    for module, optimizer in ((torch.optim.lr_scheduler, theirs), (lr_scheduler, mine)):
        linear(module, optimizer)
        rates.append(
            [
                make(module, optimizer).get_last_lr()
                for make in (
                    lambda m, o: m.LambdaLR(o, math.cosh, last_epoch=3),
                    lambda m, o: m.LinearLR(o, last_epoch=2),
                    lambda m, o: m.CosineAnnealingLR(o, 5, last_epoch=2),
                )
            ]
        )
    assert rates[0] == rates[1]


def test_a_schedule_before_the_first_step_is_a_warning():
    optimizer = sgd(lr=0.3)
    scheduler = cosine(lr_scheduler, optimizer)
    with pytest.warns(UserWarning, match=r"call optimizer.step\(grads\) first"):
        scheduler.step()


def test_a_step_without_gradients_is_a_warning():
    params = {"w": np.ones(2)}
    optimizer = optim.AdamW(params)
    with pytest.warns(UserWarning, match="no gradients, so nothing moves; give it the dict") as caught:
        optimizer.step({})
    assert caught[0].filename == __file__
    np.testing.assert_array_equal(params["w"], 1)


OPTIMIZER = sgd()
test_errors_say_what_was_given = refusals(
    (lambda: linear(lr_scheduler, {}), TypeError, "optimizer must be one of selfattn.optim, not dict"),
    (lambda: one_cycle(lr_scheduler, {}), TypeError, "optimizer must be one of selfattn.optim, not dict"),
    (lambda: lr_scheduler.LinearLR(sgd(), 0), ValueError, "start_factor must be above 0"),
    (lambda: lr_scheduler.LinearLR(sgd(), 1, 2), ValueError, "end_factor must be from 0 to 1, not 2"),
    (lambda: lr_scheduler.CosineAnnealingLR(sgd(), 0), ValueError, "T_max must be at least 1, not 0"),
    (lambda: lr_scheduler.LambdaLR(sgd(), 0.5), TypeError, "lr_lambda must be a function"),
    (lambda: lr_scheduler.LambdaLR(sgd(), [abs, abs]), TypeError, "lr_lambda must be a function"),
    (
        lambda: lr_scheduler.LambdaLR(sgd(lr=1), lambda step: -1),
        ValueError,
        "lr must be at least 0 and finite, not -1",
    ),
    (lambda: lr_scheduler.OneCycleLR(sgd(), 1, epochs=3), ValueError, "needs total_steps, or epochs and"),
    (lambda: one_cycle(lr_scheduler, sgd(), pct_start=1.5), ValueError, "pct_start must be from 0 to 1"),
    (lambda: one_cycle(lr_scheduler, sgd(), anneal_strategy="sin"), ValueError, 'must be "cos" or "linear"'),
    (lambda: one_cycle(lr_scheduler, sgd(), div_factor=0), ValueError, "div_factor .* above 0"),
    (lambda: lr_scheduler.SequentialLR(sgd(), [], []), ValueError, "schedulers is empty"),
    (
        lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)], [3]),
        ValueError,
        "1 schedulers need 0 milestones, not 1",
    ),
    (
        lambda: lr_scheduler.SequentialLR(sgd(), [linear(lr_scheduler, sgd())], []),
        ValueError,
        r"schedulers\[0\] is of another optimizer",
    ),
    (
        lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)], 3),
        TypeError,
        "schedulers and milestones must be lists, not .* and 3",
    ),
    (
        lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)] * 3, [3, 3]),
        ValueError,
        "milestones must rise",
    ),
    (
        lambda: lr_scheduler.SequentialLR(OPTIMIZER, [sequence(lr_scheduler, OPTIMIZER)], []),
        TypeError,
        r"schedulers\[0\] must be a scheduler other than a SequentialLR",
    ),
)


def test_a_step_beyond_a_cycle_is_an_error():
    optimizer = sgd()
    scheduler = lr_scheduler.OneCycleLR(optimizer, 0.4, 2)
    optimizer.step({"w": [1.0]})
    for _ in range(2):
        scheduler.step()
    with pytest.raises(ValueError, match="step 3 is beyond total_steps=2"):
        scheduler.step()


def drawn(dtype, scale=1.0):
    rng = np.random.default_rng(0)
    shapes = {"a": (300, 41), "b": (), "c": (0, 3), "d": (7,)}
    return {name: np.array(scale * rng.standard_normal(shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("norm_type", [2.0, 1, 3, 0.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.0, 1.0, 1e9])
def test_clipping_by_its_definition(norm_type, max_norm):
    grads = drawn(np.float32)
    before = {name: gradient.copy() for name, gradient in grads.items()}
    p = float(norm_type)
    every = np.concatenate([gradient.reshape(-1) for gradient in before.values()]).astype(np.float64)
    expected = np.abs(every).max() if p == math.inf else (np.abs(every) ** p).sum() ** (1 / p)
    norm = optim.clip_grad_norm_(grads, max_norm, norm_type)
    eps = float(np.finfo(np.float32).eps)
    # The errors of chunks add up like a random walk.
    assert type(norm) is float and norm == pytest.approx(expected, rel=4 * eps)
    factor = min(1.0, max_norm / (expected + 1e-6))
    for name, gradient in grads.items():
        np.testing.assert_allclose(gradient, before[name] * factor, rtol=8 * eps)
        if max_norm == 1e9:
            np.testing.assert_array_equal(gradient, before[name])


@pytest.mark.parametrize(
    ("dtype", "scale"), [("float32", 1e25), ("float32", 1e-25), ("float64", 1e200), ("float16", 100)]
)
def test_squares_that_leave_the_range_still_have_a_norm(dtype, scale):
    grads = drawn(dtype, scale)
    every = np.concatenate([gradient.reshape(-1) for gradient in grads.values()]).astype(np.longdouble)
    expected = float(np.sqrt((every**2).sum()))
    assert optim.clip_grad_norm_(grads, 1.0) == pytest.approx(expected, rel=1e-6)
    assert optim.clip_grad_norm_(grads, 1.0) == pytest.approx(min(expected, 1.0), rel=2e-3)


def test_gradients_of_any_layout():
    """The results equal NumPy's products with the factor, in each gradient's dtype."""
    grads = laid_out()
    before = {name: gradient.copy() for name, gradient in grads.items()}
    norm = optim.clip_grad_norm_(grads, 2.0)
    for name, gradient in grads.items():
        expected = before[name] * gradient.dtype.type(2.0 / (norm + 1e-6))
        np.testing.assert_array_equal(gradient, expected, err_msg=name)


def test_a_gradient_under_two_names_is_scaled_once():
    gradient = np.array([3.0, 4.0])
    assert optim.clip_grad_norm_({"a": gradient, "b": gradient}, 1.0) == 5.0
    np.testing.assert_allclose(gradient, [0.6, 0.8], rtol=1e-6)


def test_norms_that_are_not_finite():
    grads = {"w": np.ones(3)}
    assert optim.clip_grad_norm_(grads, 1.0, norm_type=1e-3) == math.inf  # 3^1000
    np.testing.assert_array_equal(grads["w"], 0)
    for value in (np.inf, np.nan):
        grads = {"a": np.array([value, 1.0]), "b": np.ones(2)}
        with pytest.raises(RuntimeError, match="the norm of the gradients is"):
            optim.clip_grad_norm_(grads, 1.0, error_if_nonfinite=True)
        assert grads["b"][0] == 1
        norm = optim.clip_grad_norm_(grads, 1.0)
        np.testing.assert_equal(norm, value)
        np.testing.assert_equal(grads["b"], [0 / value] * 2)
    assert optim.clip_grad_norm_({}, 1.0) == 0
    assert optim.clip_grad_norm_({"a": np.zeros(3)}, 1.0) == 0


def clip(grads, max_norm=1.0, **options):
    return lambda: optim.clip_grad_norm_(grads, max_norm, **options)


A = {"a": np.ones(2)}
test_wrong_gradients = refusals(
    (clip(np.ones(2)), TypeError, "grads must be a mapping .* as a pullback returns them, not ndarray"),
    (clip({"a": [1.0]}), TypeError, "the gradient of a must be an ndarray of floats"),
    (clip({"a": np.ones(2, int)}), TypeError, "the gradient of a must be an ndarray of floats"),
    (clip({"a": np.ma.ones(2)}), TypeError, "the gradient of a must be an ndarray of floats"),
    (clip({"a": np.broadcast_to(1.0, 3)}), ValueError, "the gradient of a is read-only"),
    (clip(A, -1), ValueError, "max_norm must be at least 0, not -1"),
    (clip(A, math.nan), ValueError, "max_norm must be at least 0, not nan"),
    (clip(A, norm_type=0), ValueError, "norm_type must be above 0, not 0"),
    (clip(A, norm_type="inf"), TypeError, "norm_type must be a real number"),
)


@pytest.mark.parametrize(
    "half", [fractions.Fraction(1, 2), decimal.Decimal("0.5"), np.float16(0.5), np.array(0.5)]
)
def test_factors_may_be_numbers_of_any_kind(half):
    for factor, lr in ((half, 0.05), (True, 0.1)):
        optimizer = sgd(lr=0.1)
        lr_scheduler.LambdaLR(optimizer, lambda step, factor=factor: factor)
        assert optimizer.lr == lr


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0, decimal.Decimal("nan")])
@pytest.mark.parametrize(
    "name", ["max_lr", "div_factor", "final_div_factor", "base_momentum", "max_momentum", "eta_min"]
)
def test_numbers_that_no_schedule_can_have(name, wrong):
    """Otherwise NaN would count as 0, or end the training later."""
    optimizer = sgd(lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=f"{name}.* must be"):
        if name == "eta_min":
            lr_scheduler.CosineAnnealingLR(optimizer, 5, eta_min=wrong)
        else:
            lr_scheduler.OneCycleLR(optimizer, **{"max_lr": 0.1, "total_steps": 5, name: wrong})
    assert (optimizer.lr, optimizer.momentum) == (0.1, 0.9)
