"""check_vjp: it lets right pullbacks pass, catches wrong ones, and says what is wrong."""

import re
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from refusals import refusals

import selfattn as sa


def product(a, b):
    return a * b, lambda dy: (dy * b, dy * a)


def both(a, b):
    """Two outputs and two arguments."""
    return (a * b, np.sin(a)), lambda dp, ds: (dp * b + ds * np.cos(a), dp * a)


A, B = np.linspace(-2, 3, 12).reshape(3, 4), np.linspace(1, 2, 12).reshape(3, 4)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (4, 5), (1000, 100)])
def test_right_pullbacks_pass_at_any_size(shape):
    x = np.random.default_rng(0).standard_normal(shape)
    sa.check_vjp(lambda x: (np.sin(x), lambda dy: dy * np.cos(x)), x)
    sa.check_vjp(product, x, x + 1)
    sa.check_vjp(both, x, x + 1)


def test_lists_integers_and_float32_are_taken_in_float64():
    seen = []

    def f(a, b):
        seen.extend([a.dtype, b.dtype])
        return product(a, b)

    sa.check_vjp(f, [1, 2, 3], A[0, :3].astype(np.float32))
    assert set(seen) == {np.dtype(np.float64)}


def test_arguments_are_left_alone():
    a, b = A.copy(), B.copy()

    def f(x, y):
        result = product(x.copy(), y.copy())
        x[:] = 0
        y[:] = 0
        return result

    sa.check_vjp(f, a, b)
    np.testing.assert_array_equal(a, A)
    np.testing.assert_array_equal(b, B)


@pytest.mark.parametrize("rng", [0, 1, 2, np.random.default_rng(5)])
def test_a_wrong_gradient_is_caught_and_its_argument_named(rng):
    def f(a, b):
        return a * b, lambda dy: (dy * b, dy * a * (1 + 1e-4))

    with pytest.raises(AssertionError, match=r"argument 1 \(b\) is off") as caught:
        sa.check_vjp(f, A, B, rng=rng)
    assert "argument 0" not in str(caught.value)
    numbers = re.search(r"(\S+) by the pullback, (\S+) by finite differences", str(caught.value))
    assert float(numbers[1]) == pytest.approx(float(numbers[2]) * (1 + 1e-4), rel=1e-7)
    sa.check_vjp(f, A, B, rng=rng, rtol=1e-2)


def test_one_wrong_element_in_many_is_caught():
    x = np.random.default_rng(0).standard_normal(300_000)

    def f(x):
        def pullback(dy):
            dx = dy * np.cos(x)
            dx[1234] += 1
            return dx

        return np.sin(x), pullback

    with pytest.raises(AssertionError, match="argument 0"):
        sa.check_vjp(f, x)


@pytest.mark.parametrize(
    "wrong", [lambda dx: 0 * dx, lambda dx: np.nan * dx, lambda dx: -dx, lambda dx: 2 * dx]
)
def test_kinds_of_wrong(wrong):
    with pytest.raises(AssertionError, match="argument 0"):
        sa.check_vjp(lambda x: (np.sin(x), lambda dy: wrong(dy * np.cos(x))), A)
    with pytest.raises(AssertionError, match=r"(?s)argument 0 \(a\) is off.*argument 1 \(b\) is off"):
        sa.check_vjp(lambda a, b: (a * b, lambda dy: (wrong(dy * b), wrong(dy * a))), A, B)
    with pytest.raises(AssertionError, match=r"argument 0 \(a\)"):  # the pullback ignores an output
        sa.check_vjp(lambda a, b: (both(a, b)[0], lambda dp, ds: (dp * b, dp * a)), A, B)


def test_gradients_that_are_none():
    x, weight, bias = A, B[0], B[1]
    sa.check_vjp(lambda x: sa.layer_norm_vjp(x, 4), x)
    sa.check_vjp(lambda x, bias: sa.layer_norm_vjp(x, 4, None, bias), x, bias)
    sa.check_vjp(lambda x, weight, bias: sa.layer_norm_vjp(x, 4, weight, bias), x, weight, bias)
    # gradients that wrt leaves out are not checked; here the first of two is None
    sa.check_vjp(lambda a, b: (a * b, lambda dy: (None, dy * a)), A, B)
    with pytest.raises(AssertionError, match=r"argument 1 \(b\)"):
        sa.check_vjp(lambda a, b: (a * b, lambda dy: (None, dy * b)), A, B)


def test_infinities_that_stay_do_not_hide_errors():
    lse = np.array([-np.inf, 1.0])
    sa.check_vjp(lambda lse: (2 * lse, lambda dy: np.where(np.isinf(lse), 0, 2 * dy)), lse)
    with pytest.raises(AssertionError, match="argument 0"):
        sa.check_vjp(lambda lse: (2 * lse, lambda dy: np.where(np.isinf(lse), 0, 3 * dy)), lse)


test_what_does_not_fit_is_named = refusals(
    (
        lambda: sa.check_vjp(lambda x: (2 * x, lambda dy: 2 * dy[0]), A),
        AssertionError,
        r"argument 0 \(x\) has shape \(4,\).*\(3, 4\)",
    ),
    (
        lambda: sa.check_vjp(lambda x: (2 * x, lambda dy: (2 * dy).astype(np.float32)), A),
        AssertionError,
        "dtype float32",
    ),
    (
        lambda: sa.check_vjp(lambda x: (x.astype(np.float32), lambda dy: dy), A),
        AssertionError,
        "f returns float32 for float64",
    ),
    # a function without names for its arguments
    (
        lambda: sa.check_vjp(lambda *x: (x[0] * x[1], lambda dy: (dy * x[1], dy)), A, B),
        AssertionError,
        "the gradient of argument 1 is off",
    ),
    (lambda: sa.check_vjp(np.sin, A), TypeError, r"f must return \(y, pullback\), not ndarray"),
    (lambda: sa.check_vjp(product, A, A > 0), TypeError, "argument 1 has dtype bool"),
    (
        lambda: sa.check_vjp(lambda x: (x, lambda dy: (None, None)), A),
        ValueError,
        "no gradient, so there is nothing to check",
    ),
    (
        lambda: sa.check_vjp(lambda a, b: (a * b, lambda dy: dy * b), A, B),
        ValueError,
        "returns 1 gradients of 1, f has 2 arguments",
    ),
    (lambda: sa.check_vjp(product, A, B, eps="small"), TypeError, "eps must be a real number, not 'small'"),
    (lambda: sa.check_vjp(product, A, B, eps=0), ValueError, "eps and rtol must be above 0"),
    (lambda: sa.check_vjp(product, A, B, rtol=-1.0), ValueError, "eps and rtol must be above 0"),
    (lambda: sa.check_vjp(product, A, B, eps=np.nan), ValueError, "eps and rtol must be above 0"),
)


def test_the_step_can_be_chosen():
    """A function that is curved at a scale of 1e-6 needs a smaller step than the default."""

    def f(x):
        return np.sin(1e6 * x), lambda dy: 1e6 * np.cos(1e6 * x) * dy

    with pytest.raises(AssertionError):
        sa.check_vjp(f, A)
    sa.check_vjp(f, A, eps=1e-10, rtol=1e-3)
    sa.check_vjp(f, A, eps=Fraction(1, 10**10), rtol=Decimal("1e-3"))


def test_gradients_in_lists_belong_to_arguments_in_order():
    """Examples are the gradients of merged parts, and of the masks of packed sequences."""
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3))
    sa.check_vjp(lambda a, b, c, d: sa.merge_attention_vjp([a, b], [c, d]), *outs, *lses)
    q, k, v = rng.normal(size=(3, 5, 2, 4))
    mask = rng.normal(size=(5, 5))
    sa.check_vjp(
        lambda m: sa.varlen_attention_vjp(q, k, v, [0, 5], [0, 5], attn_mask=[m], wrt="attn_mask"), mask
    )
    with pytest.raises(AssertionError, match="argument 1"):
        sa.check_vjp(lambda x, y: (x * y, lambda dy: ([dy * y, 2 * dy * x],)), np.ones(3), np.ones(3))
