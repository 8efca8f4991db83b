"""Schedules of the learning rate: PyTorch's numbers to the bit, closed forms, saved states; clipping; warnings."""

import copy
import decimal
import fractions
import json
import math
import warnings

import numpy as np
import pytest
from inputs import laid_out
from refusals import refusals

from selfattn import optim
from selfattn.optim import lr_scheduler

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
        rates.append([make(module, optimizer).get_last_lr() for make in (
            lambda m, o: m.LambdaLR(o, math.cosh, last_epoch=3), lambda m, o: m.LinearLR(o, last_epoch=2),
            lambda m, o: m.CosineAnnealingLR(o, 5, last_epoch=2),
        )])  # fmt: skip
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
    (lambda: lr_scheduler.LambdaLR(sgd(lr=1), lambda step: -1),
     ValueError, "lr must be at least 0 and finite, not -1"),
    (lambda: lr_scheduler.OneCycleLR(sgd(), 1, epochs=3), ValueError, "needs total_steps, or epochs and"),
    (lambda: one_cycle(lr_scheduler, sgd(), pct_start=1.5), ValueError, "pct_start must be from 0 to 1"),
    (lambda: one_cycle(lr_scheduler, sgd(), anneal_strategy="sin"), ValueError, 'must be "cos" or "linear"'),
    (lambda: one_cycle(lr_scheduler, sgd(), div_factor=0), ValueError, "div_factor .* above 0"),
    (lambda: lr_scheduler.SequentialLR(sgd(), [], []), ValueError, "schedulers is empty"),
    (lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)], [3]),
     ValueError, "1 schedulers need 0 milestones, not 1"),
    (lambda: lr_scheduler.SequentialLR(sgd(), [linear(lr_scheduler, sgd())], []),
     ValueError, r"schedulers\[0\] is of another optimizer"),
    (lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)], 3),
     TypeError, "schedulers and milestones must be lists, not .* and 3"),
    (lambda: lr_scheduler.SequentialLR(OPTIMIZER, [linear(lr_scheduler, OPTIMIZER)] * 3, [3, 3]),
     ValueError, "milestones must rise"),
    (lambda: lr_scheduler.SequentialLR(OPTIMIZER, [sequence(lr_scheduler, OPTIMIZER)], []),
     TypeError, r"schedulers\[0\] must be a scheduler other than a SequentialLR"),
)  # fmt: skip


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
    assert type(norm) is float and norm == pytest.approx(
        expected, rel=4 * eps
    )  # the errors of chunks add up like a random walk
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
