"""The losses: their definitions in plain Python, finite differences, special numbers, errors."""

import math

import numpy as np
import pytest
from inputs import covering
from refusals import refusals

import selfattn as sa
from selfattn import nn

RNG = np.random.default_rng(0)
SHAPES = [(4,), (5, 4), (3, 4, 2), (2, 4, 3, 2), (0, 4)]
WEIGHT = np.array([0.5, 2.0, 0.0, 1.5])
CASES = covering(
    shape=SHAPES,
    kind=["classes", "probabilities"],
    weight=[None, WEIGHT],
    label_smoothing=[0.0, 0.3, 1.0],
    reduction=["mean", "sum", "none"],
    ignore_index=[-100, 1],
)
for case in CASES:
    if case["kind"] == "probabilities":
        case["ignore_index"] = -100


def drawn(shape, kind):
    """Scores, and classes (one is 1, one is 2 if there are two) or probabilities."""
    rng = np.random.default_rng(len(shape))
    x = 3 * rng.standard_normal(shape)
    axis = min(1, len(shape) - 1)
    if kind == "classes":
        target = rng.integers(0, 4, (*shape[:axis], *shape[axis + 1 :]))
        target.reshape(-1)[:2] = [1, 2][: target.size]
        return x, target
    shares = rng.random(shape)
    return x, shares / shares.sum(axis=axis, keepdims=True)


def cross_entropy(x, target, weight, ignore_index, reduction, label_smoothing):
    """Cross-entropy as PyTorch's documentation writes it, element by element."""
    axis = min(1, x.ndim - 1)
    number = x.shape[axis]
    weight = [1.0] * number if weight is None else weight
    rows = np.moveaxis(x, axis, -1)
    shape = rows.shape[:-1]
    losses, counted = np.zeros(shape), 0.0
    for at in np.ndindex(shape):
        scores = [float(s) for s in rows[at]]
        log_sum = max(scores) + math.log(sum(math.exp(s - max(scores)) for s in scores))
        if target.dtype.kind == "f":
            wanted = list(np.moveaxis(target, axis, -1)[at])
            counted += 1
        else:
            if target[at] == ignore_index:
                continue
            wanted = [float(c == target[at]) for c in range(number)]
            counted += weight[target[at]]
        for c in range(number):
            share = wanted[c] * (1 - label_smoothing) + label_smoothing / number
            losses[at] -= weight[c] * share * (scores[c] - log_sum)
    if reduction == "none":
        return losses
    with np.errstate(invalid="ignore", divide="ignore"):
        return losses.sum() / (np.float64(counted) if reduction == "mean" else 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value)[:13] for value in case.values()))
def test_cross_entropy_by_its_definition(case):
    case = dict(case)
    x, target = drawn(case.pop("shape"), case.pop("kind"))
    loss = nn.CrossEntropyLoss(**case, dtype=np.float64)
    expected = cross_entropy(x, target, **case)
    value, _ = loss.vjp(x, target)
    # a sum of at most 48 terms of about 10 is added in another order
    np.testing.assert_allclose(value, expected, rtol=0, atol=1e-13)
    np.testing.assert_array_equal(loss(x, target), value)
    assert value.dtype == np.float64 and np.shape(value) == expected.shape
    if x.size and np.isfinite(value).all():
        sa.check_vjp(lambda x: loss.vjp(x, target), x)


def test_cross_entropy_of_special_numbers_is_that_of_pytorch():
    torch = pytest.importorskip("torch")
    inf = np.inf
    x = np.float32([[-inf, 1, 2], [inf, 0, 1], [np.nan, 0, 1], [1e30, -1e30, 0], [300, -300, 0]])
    target = np.array([1, 1, 0, 1, 1])
    tensor = torch.tensor(x, requires_grad=True)
    expected = torch.nn.CrossEntropyLoss(reduction="none")(tensor, torch.tensor(target))
    value, pullback = nn.CrossEntropyLoss(reduction="none").vjp(x, target)
    np.testing.assert_allclose(value, expected.detach(), rtol=1e-6)
    expected.sum().backward()
    np.testing.assert_allclose(pullback(1.0), tensor.grad, rtol=1e-6, atol=1e-7)


def test_the_mean_of_nothing_is_nan_and_its_gradient_zero_or_nan():
    for x, target in [(np.ones((2, 3), np.float32), [-100, -100]), (np.ones((0, 3), np.float32), [])]:
        value, pullback = nn.CrossEntropyLoss().vjp(x, target)
        assert np.isnan(value) and pullback(1.0).shape == x.shape
        assert nn.CrossEntropyLoss(reduction="sum")(x, target) == 0


def test_an_ignored_row_has_no_gradient_whatever_it_holds():
    x = np.float32([[np.nan, 0], [np.inf, 0], [1, 2]])
    value, pullback = nn.CrossEntropyLoss(label_smoothing=0.1).vjp(x, [-100, -100, 0])
    assert np.isfinite(value)
    np.testing.assert_array_equal(pullback(1.0)[:2], 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_class_that_should_not_be_adds_nothing_though_its_score_be_minus_infinity(dtype):
    top = np.finfo(dtype).max  # the difference of two such scores is infinite, too
    for x in ([0, -np.inf], [top, -top]):
        value, pullback = nn.CrossEntropyLoss().vjp(np.array([x], dtype), np.array([[1, 0]], dtype))
        assert value == 0
        np.testing.assert_array_equal(pullback(1.0), 0)
    scores = np.array([[-np.inf, 0], [0, 0]], dtype)
    assert nn.CrossEntropyLoss(weight=[0, 1])(scores, [0, 1]) == dtype(np.log(2))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_binary_cross_entropy_far_from_0(dtype):
    """Both tails are e^−abs(x), without cancellation; the loss of infinite scores is 0 or infinite."""
    x = np.array([-40, 40, -40, 40, -np.inf, np.inf, -np.inf, np.inf], dtype)
    target = np.array([0, 1, 1, 0, 0, 1, 1, 0], dtype)
    value, pullback = nn.BCEWithLogitsLoss(reduction="none").vjp(x, target)
    tail, inf = np.exp(-40.0), np.inf
    np.testing.assert_allclose(value, [tail, tail, 40, 40, 0, 0, inf, inf], rtol=1e-6)
    np.testing.assert_allclose(pullback(1.0), [tail, -tail, -1, 1, 0, 0, -1, 1], rtol=1e-6)


def test_cross_entropy_of_a_large_vocabulary_sums_up_in_float64():
    """The mean of a million equal losses is that loss."""
    x = np.zeros((2**20, 3), np.float32)
    value = nn.CrossEntropyLoss()(x, np.zeros(2**20, np.int32))
    assert value == np.float32(-sa.log_softmax(np.zeros(3, np.float32))[0])


def bce(x, t, weight, pos_weight):
    """Element by element; exact where 1 − σ(x) is σ(−x)."""

    def log_sigmoid(x):
        return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))

    return -weight * (pos_weight * t * log_sigmoid(x) + (1 - t) * log_sigmoid(-x))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    ("weight", "pos_weight"), [(None, None), (np.array([[2.0], [0.5]]), np.array([1.0, 3.0, 0.5]))]
)
def test_bce_by_its_definition(weight, pos_weight, reduction):
    x, t = 4 * RNG.standard_normal((2, 3)), RNG.random((2, 3))
    t[0, :2] = 0, 1
    loss = nn.BCEWithLogitsLoss(weight, pos_weight=pos_weight, reduction=reduction, dtype=np.float64)
    factors = [np.broadcast_to(1.0 if f is None else f, x.shape) for f in (weight, pos_weight)]
    expected = np.vectorize(bce)(x, t, *factors)
    expected = {"mean": expected.mean(), "sum": expected.sum(), "none": expected}[reduction]
    np.testing.assert_allclose(loss(x, t), expected, rtol=1e-14)
    sa.check_vjp(lambda x: loss.vjp(x, t), x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_mse_by_its_definition(reduction):
    x, t = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((2, 3, 4))
    loss = nn.MSELoss(reduction=reduction, dtype=np.float64)
    expected = {"mean": ((x - t) ** 2).mean(), "sum": ((x - t) ** 2).sum(), "none": (x - t) ** 2}[reduction]
    np.testing.assert_allclose(loss(x, t), expected, rtol=1e-14)
    sa.check_vjp(lambda x: loss.vjp(x, t), x)


test_errors_say_what_was_given = refusals(
    (
        lambda: nn.CrossEntropyLoss()(np.ones((2, 4)), [0, 1, 2]),
        ValueError,
        r"classes, integers of shape \(2,\), or probabilities.*\(2, 4\); not int64 of shape \(3,\)",
    ),
    (
        lambda: nn.CrossEntropyLoss()(np.ones((2, 3, 5)), np.ones((2, 3), int)),
        ValueError,
        r"classes are axis 1 of x: .* x.reshape\(-1, 5\)",
    ),
    (lambda: nn.CrossEntropyLoss()(np.ones((2, 4)), [True, False]), TypeError, "not bool"),
    (
        lambda: nn.CrossEntropyLoss()(np.ones((2, 4)), [0, 4]),
        ValueError,
        r"target must be in 0...3, or -100, which is ignored; not 4",
    ),
    (lambda: nn.CrossEntropyLoss()(np.ones((2, 4)), [0, -1]), ValueError, "not -1"),
    (lambda: nn.CrossEntropyLoss()(1.0, 0), ValueError, r"not \(\)"),
    (
        lambda: nn.CrossEntropyLoss(ignore_index=1)(np.ones((2, 4)), np.ones((2, 4))),
        ValueError,
        "ignore_index=1 is for targets that are classes",
    ),
    (
        lambda: nn.CrossEntropyLoss([1, 2, 3])(np.ones((2, 4)), [0, 1]),
        ValueError,
        "weight has 3 numbers, .* has 4 classes",
    ),
    (lambda: nn.CrossEntropyLoss([[1.0]]), ValueError, r"weight must have shape \(C,\)"),
    (lambda: nn.CrossEntropyLoss(label_smoothing=1.5), ValueError, "label_smoothing must be between 0 and 1"),
    (lambda: nn.CrossEntropyLoss(ignore_index=0.5), TypeError, "ignore_index must be an int"),
    (lambda: nn.CrossEntropyLoss(ignore_index=True), TypeError, "ignore_index must be an int"),
    (lambda: nn.MSELoss(reduction="average"), ValueError, 'reduction must be "mean"'),
    (lambda: nn.MSELoss()(np.ones(2), np.ones((2, 1))), ValueError, r"same shape, not \(2,\) and \(2, 1\)"),
    (
        lambda: nn.MSELoss()(np.ones(2, complex), np.ones(2)),
        TypeError,
        "x must hold floats or integers, not complex128",
    ),
    (
        lambda: nn.BCEWithLogitsLoss(pos_weight=np.ones(3))(np.ones(2), np.ones(2)),
        ValueError,
        r"pos_weight \(3,\) cannot be broadcast to the shape of x, \(2,\)",
    ),
    (
        lambda: nn.BCEWithLogitsLoss(np.ones((2, 2)))(np.ones(2), np.ones(2)),
        ValueError,
        r"weight \(2, 2\) cannot",
    ),
    (
        lambda: nn.MSELoss().vjp(np.ones(2), np.ones(2))[1]([1.0, 1.0]),
        ValueError,
        r"d_value must have the shape of the loss, \(\), not \(2,\)",
    ),
)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_gradient_that_fits_is_finite(dtype):
    """The gradient 2·error/n is finite for errors near the end of the range, although 2·error is not."""
    most = np.finfo(dtype).max
    x = np.array([most, -most / 2, 1.0, 0.0], dtype)
    _, pullback = nn.MSELoss().vjp(x, np.zeros_like(x))
    np.testing.assert_allclose(pullback(1.0), x / 2, rtol=4 * np.finfo(dtype).eps)


def test_weights_are_kept_as_they_were_given():
    """If the caller changes its array later, the loss must not change silently."""
    given = np.array([1.0, 2.0])
    losses = [
        (nn.CrossEntropyLoss(weight=given), [0, 1]),
        (nn.BCEWithLogitsLoss(weight=given), np.eye(2)),
        (nn.BCEWithLogitsLoss(pos_weight=given), np.eye(2)),
    ]
    x = [[0.5, 1.0], [2.0, 0.0]]
    before = [loss(x, target) for loss, target in losses]
    given[...] = 7
    assert [loss(x, target) for loss, target in losses] == before
