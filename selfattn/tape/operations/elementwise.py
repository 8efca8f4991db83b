"""Operations on each number: arithmetic, functions, comparisons, activations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from selfattn import _core
from selfattn._check import Array
from selfattn.tape.operations.table import TABLE, composite, fit, operation, quiet, shape_of
from selfattn.tape.tensors import Tensor

# ---------------------------------------------------------------------------------------------------------- arithmetic


@operation("tmi", 2, promotes="same")
def add(input: Any, other: Any, alpha: float = 1) -> Any:
    """Return input + alpha·other."""
    if other.__class__ is not np.ndarray:
        return input + other * alpha, (lambda dy: dy, None)
    left, right = shape_of(input), other.shape
    if alpha != 1:
        return input + other * alpha, (lambda dy: fit(dy, left), lambda dy: fit(dy * alpha, right))
    return input + other, (lambda dy: fit(dy, left), lambda dy: fit(dy, right))


@operation("tmi", 2, promotes="same")
def sub(input: Any, other: Any, alpha: float = 1) -> Any:
    """Return input − alpha·other."""
    if other.__class__ is not np.ndarray:
        return input - other * alpha, (lambda dy: dy, None)
    left, right = shape_of(input), other.shape
    if alpha != 1:
        return input - other * alpha, (lambda dy: fit(dy, left), lambda dy: fit(dy * -alpha, right))
    return input - other, (lambda dy: fit(dy, left), lambda dy: fit(-dy, right))


@operation("tmi", 2, promotes="same", keeps=("1", "0"))
def mul(input: Any, other: Any) -> Any:
    """Return input·other."""
    if other.__class__ is not np.ndarray:
        return input * other, (lambda dy: dy * other, None)
    left, right = shape_of(input), other.shape
    return input * other, (lambda dy: fit(dy * other, left), lambda dy: fit(dy * input, right))


@operation("tmi", 2, promotes="float", keeps=("1", "01"), label="Div")
def true_divide(input: Any, other: Any) -> Any:
    """Return input / other."""
    if other.__class__ is float and other:
        return input / other, (lambda dy: dy / other, None)
    return _quotient(input, other)


@quiet
def _quotient(input: Any, other: Any) -> Any:
    left = shape_of(input)
    return input / other, (
        lambda dy: fit(dy / other, left),
        lambda dy: fit(-dy * (input / other) / other, other.shape),
    )


@operation("", 2, promotes="same", label="Div")
@quiet
def rounded_division(input: Any, other: Any, floor: bool) -> Any:
    """Return input / other, rounded to an integer, whose gradient is 0."""
    y = np.floor_divide(input, other) if floor else np.trunc(np.true_divide(input, other))
    kind = np.result_type(input, other)
    return np.asarray(y).astype(kind), (lambda dy: np.zeros_like(input), lambda dy: np.zeros_like(other))


@composite("tmi")
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Any:
    """Return input / other, perhaps rounded to an integer by "floor" or "trunc"."""
    if rounding_mode is None:
        return true_divide(input, other)
    if rounding_mode not in ("floor", "trunc"):
        raise ValueError(f"rounding_mode must be None, 'floor' or 'trunc', not {rounding_mode!r}")
    return rounded_division(input, other, rounding_mode == "floor")


@operation("tmi", 2, promotes="same")
@quiet
def floor_divide(input: Any, other: Any) -> Any:
    """Return input / other, rounded down."""
    return np.floor_divide(input, other), None


@operation("tmi", 2, promotes="same", keeps=("", "01"))
@quiet
def remainder(input: Any, other: Any) -> Any:
    """Return the remainder of input / other, with the sign of other."""
    left = shape_of(input)
    return np.mod(input, other), (
        lambda dy: fit(dy, left),
        lambda dy: fit(-dy * np.floor_divide(input, other), other.shape),
    )


@operation("tmi", 2, promotes="same", keeps=("01", "0o"))
@quiet
def pow(input: Any, exponent: Any) -> Any:
    """Return input to the power of exponent."""
    whole = np.asarray(exponent).dtype.kind in "iu" and np.asarray(input).dtype.kind in "iu"
    if whole and np.any(np.asarray(exponent) < 0):
        raise ValueError("integers to negative integer powers are not allowed")
    y = (
        np.square(input)
        if exponent.__class__ in (int, float) and exponent == 2
        else np.power(input, exponent)
    )

    def of_input(dy: Array) -> Array:
        if exponent.__class__ in (int, float):
            slope = 2 * input if exponent == 2 else exponent * np.power(input, exponent - 1)
            return dy * (slope if exponent != 0 else np.zeros_like(input))
        slope = np.where(exponent == 0, 0, exponent * np.power(input, exponent - 1))
        return fit((dy * slope).astype(dy.dtype), input.shape)

    def of_exponent(dy: Array) -> Array:
        base = np.asarray(input)
        slope = np.where((base == 0) & (exponent >= 0), 0, y * np.log(base))
        return fit((dy * slope).astype(dy.dtype), exponent.shape)

    return y, (of_input, of_exponent)


@composite("tmi")
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    """Return input + value·tensor1·tensor2."""
    return input + (tensor1 * tensor2) * value


@composite("tmi")
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> Any:
    """Return input + value·tensor1 / tensor2."""
    return input + (tensor1 / tensor2) * value


@composite("tmi")
def lerp(input: Any, end: Any, weight: Any) -> Any:
    """Return the numbers between input, at the weight 0, and end, at 1."""
    return input + (end - input) * weight


@operation("tmi")
def neg(input: Array) -> Any:
    """Return −input."""
    if input.dtype == bool:
        raise TypeError("a tensor of bool has no negative; use the operator ~")
    return -input, (lambda dy: -dy,)


@operation("tmi", keeps=("0",))
def abs(input: Array) -> Any:
    """Return the absolute value."""
    return np.abs(input), (lambda dy: dy * np.sign(input),)


def _two(name: str, numpy: Any, wins: Any) -> None:
    """Add the larger or the smaller of two tensors; equal numbers share the gradient."""

    def rule(input: Any, other: Any) -> Any:
        def of(x: Any, y: Any) -> Any:
            return lambda dy: fit(
                np.where(wins(x, y), dy, np.where(x == y, dy / 2, 0)).astype(dy.dtype), x.shape
            )

        return numpy(input, other), (of(input, other), of(other, input))

    rule.__name__, rule.__doc__ = name, f"Return the {name} of each two numbers."
    operation("tm", 2, promotes="same", keeps=("01", "01"))(rule)


_two("maximum", np.maximum, np.greater)
_two("minimum", np.minimum, np.less)

# ----------------------------------------------------------------------------------------------------------- functions


def _function(
    name: str,
    numpy: Any,
    slope: Any,
    keeps: str,
    places: str = "tmi",
    label: str | None = None,
    floats: bool = True,
) -> None:
    """Add a function of one number; ``slope(x, y)`` is its derivative, ``keeps`` which of x (0) and y (o) it needs.

    With ``floats`` integers are converted to floats.
    """

    @quiet
    def rule(input: Array) -> Any:
        y = numpy(input)
        return y, (lambda dy: dy * slope(input, y),)

    rule.__name__, rule.__doc__ = name, f"Return {name} of each number."
    operation(places, promotes="float" if floats else "", keeps=(keeps,), label=label)(rule)


def logistic(x: Array) -> Array:
    """Return σ(x) = 1 / (1 + exp(−x)), without overflow."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, np.ones_like(decay), decay) / (1 + decay)


def softplus_of(x: Array) -> Array:
    """Return log(1 + exp(x)), without overflow."""
    found: Array = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return found


def _where(condition: Any, yes: Any, no: Any, like: Array) -> Array:
    return np.where(condition, yes, no).astype(like.dtype, copy=False)


def erf_of(x: Array) -> Array:
    """Return the error function, by Python's own."""
    return np.array([math.erf(t) for t in x.reshape(-1).tolist()], x.dtype).reshape(x.shape)


_function("exp", np.exp, lambda x, y: y, "o")
_function("expm1", np.expm1, lambda x, y: y + 1, "o", label="Expm1Backward0")
_function("log", np.log, lambda x, y: 1 / x, "0")
_function("log2", np.log2, lambda x, y: 1 / (x * x.dtype.type(math.log(2))), "0", label="Log2Backward0")
_function("log10", np.log10, lambda x, y: 1 / (x * x.dtype.type(math.log(10))), "0", label="Log10Backward0")
_function("log1p", np.log1p, lambda x, y: 1 / (1 + x), "0", label="Log1PBackward0")
_function("sqrt", np.sqrt, lambda x, y: 1 / (2 * y), "o")
_function("rsqrt", lambda x: 1 / np.sqrt(x), lambda x, y: y * y * y / -2, "o")
_function(
    "square",
    lambda x: x * x if x.dtype != bool else x.astype(np.int64),
    lambda x, y: 2 * x,
    "0",
    label="Pow",
    floats=False,
)
_function("reciprocal", lambda x: 1 / x, lambda x, y: -y * y, "o")
_function("sin", np.sin, lambda x, y: np.cos(x), "0")
_function("cos", np.cos, lambda x, y: -np.sin(x), "0")
_function("tan", np.tan, lambda x, y: 1 + y * y, "o")
_function("atan", np.arctan, lambda x, y: 1 / (1 + x * x), "0")
_function("sinh", np.sinh, lambda x, y: np.cosh(x), "0")
_function("cosh", np.cosh, lambda x, y: np.sinh(x), "0")
_function("erf", erf_of, lambda x, y: x.dtype.type(2 / math.sqrt(math.pi)) * np.exp(-x * x), "0")
_function("tanh", np.tanh, lambda x, y: 1 - y * y, "o", "tmif")
_function("sigmoid", logistic, lambda x, y: y * (1 - y), "o", "tmif")


def _whole(name: str, numpy: Any) -> None:
    """Add a function with steps, whose gradient is 0."""

    def rule(input: Array) -> Any:
        return numpy(input), (np.zeros_like,)

    rule.__name__, rule.__doc__ = name, f"Return {name} of each number."
    operation("tmi")(rule)


_STEPS: dict[str, Any] = {"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "sign": np.sign}
for _name, _numpy in _STEPS.items():
    _whole(_name, _numpy)


@operation("tmi")
def round(input: Array, *, decimals: int = 0) -> Any:
    """Round to a number of decimals, halves to even."""
    return np.round(input, decimals), (np.zeros_like,)


@operation("", keeps=("0",), label="Clamp")
def _clamp(input: Array, low: Any, high: Any) -> Any:
    y = np.clip(input, low, high).astype(input.dtype, copy=False)
    inside = (True if low is None else input >= low) & (True if high is None else input <= high)
    return y, (lambda dy: dy * inside,)


@composite("tmi")
def clamp(input: Any, min: Any = None, max: Any = None) -> Any:
    """Keep numbers between two bounds, which are numbers or tensors."""
    if min is None and max is None:
        raise ValueError("clamp(): at least one of min and max is needed")
    if not isinstance(min, Tensor) and not isinstance(max, Tensor):
        if input.is_floating_point() or not any(isinstance(bound, float) for bound in (min, max)):
            return _clamp(input, min, max)
        return _clamp(input.float(), min, max)
    where: Any = TABLE["where"].function
    if min is not None:
        input = where(input < min, min, input)
    return input if max is None else where(input > max, max, input)


@composite("tmi")
def clamp_min(input: Tensor, min: Any) -> Any:
    """Keep numbers at or above a bound."""
    return clamp(input, min)


@composite("tmi")
def clamp_max(input: Tensor, max: Any) -> Any:
    """Keep numbers at or below a bound."""
    return clamp(input, None, max)


# --------------------------------------------------------------------------------------------------------- comparisons


def _comparison(name: str, numpy: Any, places: str = "tm") -> None:
    def rule(input: Any, other: Any) -> Any:
        return numpy(input, other), None

    rule.__name__, rule.__doc__ = name, f"Return whether each number of input is {name} to that of other."
    operation(places, 2, promotes="same")(rule)


for _name, _numpy in {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}.items():
    _comparison(_name, _numpy, "tmi" if "_" in _name else "tm")


def _test(name: str, numpy: Any) -> None:
    def rule(input: Array) -> Any:
        return numpy(input), None

    rule.__name__, rule.__doc__ = name, f"Return {name} of each number."
    operation("tm")(rule)


for _name, _numpy in {
    "isnan": np.isnan,
    "isinf": np.isinf,
    "isfinite": np.isfinite,
    "logical_not": np.logical_not,
    "bitwise_not": np.invert,
}.items():
    _test(_name, _numpy)


@operation("tm", 2, promotes="same")
def isclose(input: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """Return whether the numbers are close: abs(input − other) ≤ atol + rtol·abs(other)."""
    return np.isclose(input, other, rtol, atol, equal_nan), None


# --------------------------------------------------------------------------------------------------------- activations


@operation("tmif", keeps=("o",))
def relu(input: Array) -> Any:
    """Return max(input, 0)."""
    y = np.maximum(input, input.dtype.type(0))
    return y, (lambda dy: dy * (y > 0),)


@operation("f", keeps=("0",))
def gelu(input: Array, approximate: str = "none") -> Any:
    """Return x·Φ(x), where Φ is the standard normal distribution function."""
    return _core.gelu(input, approximate), (lambda dy: _core._gelu_backward(input, dy, approximate),)


def _silu_slope(x: Array, y: Array) -> Array:
    s = logistic(x)
    return s * (1 + x * (1 - s))


def _mish_slope(x: Array, y: Array) -> Array:
    t = np.tanh(softplus_of(x))
    return t + x * logistic(x) * (1 - t * t)


_function("silu", lambda x: x * logistic(x), _silu_slope, "0", "f")
_function("mish", lambda x: x * np.tanh(softplus_of(x)), _mish_slope, "0", "f")
_function("logsigmoid", lambda x: -softplus_of(-x), lambda x, y: logistic(-x), "0", "f", "LogSigmoid")
_function(
    "relu6",
    lambda x: np.clip(x, 0, 6),
    lambda x, y: ((x > 0) & (x < 6)).astype(x.dtype),
    "0",
    "f",
    "Hardtanh",
)
_function("softsign", lambda x: x / (1 + np.abs(x)), lambda x, y: 1 / (1 + np.abs(x)) ** 2, "0", "f")
_function("tanhshrink", lambda x: x - np.tanh(x), lambda x, y: np.tanh(x) ** 2, "0", "f")
_function(
    "hardsigmoid",
    lambda x: np.clip(x / 6 + 0.5, 0, 1).astype(x.dtype),
    lambda x, y: _where(np.abs(x) < 3, 1 / 6, 0, x),
    "0",
    "f",
)
_function(
    "hardswish",
    lambda x: (x * np.clip(x / 6 + 0.5, 0, 1)).astype(x.dtype),
    lambda x, y: _where(np.abs(x) <= 3, x / 3 + 0.5, x > 3, x),
    "0",
    "f",
)
_SCALE, _ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _elu(x: Array, alpha: float, scale: float, speed: float = 1.0) -> Any:
    bent = np.expm1(np.minimum(x, 0) * speed)
    y = _where(x > 0, scale * x, scale * alpha * bent, x)
    return y, (lambda dy: dy * _where(x > 0, scale, scale * alpha * speed * (bent + 1), x),)


@operation("f", keeps=("0",))
def elu(input: Array, alpha: float = 1.0) -> Any:
    """Return x where it is above 0, else alpha·(exp(x) − 1)."""
    return _elu(input, alpha, 1.0)


@operation("f", keeps=("0",), label="Elu")
def selu(input: Array) -> Any:
    """Return the ELU that keeps mean 0 and variance 1 from layer to layer; Klambauer et al., 2017."""
    return _elu(input, _ALPHA, _SCALE)


@operation("f", keeps=("0",), label="Elu")
def celu(input: Array, alpha: float = 1.0) -> Any:
    """Return x where it is above 0, else alpha·(exp(x / alpha) − 1)."""
    return _elu(input, alpha, 1.0, 1 / alpha)


@operation("f", keeps=("0",))
def leaky_relu(input: Array, negative_slope: float = 0.01) -> Any:
    """Return x where it is above 0, else negative_slope·x."""
    slope = _where(input > 0, 1, negative_slope, input)
    return input * slope, (lambda dy: dy * slope,)


@operation("f", 2, keeps=("01", "0"), label="PreluKernel")
def prelu(input: Array, weight: Array) -> Any:
    """Return x where it is above 0, else weight·x; weight has one number, or one for each index of axis 1."""
    per = weight.reshape(()) if weight.size == 1 else weight.reshape(-1, *(1,) * (input.ndim - 2))
    return np.where(input > 0, input, per * input), (
        lambda dy: dy * np.where(input > 0, input.dtype.type(1), per),
        lambda dy: fit(dy * np.minimum(input, 0), per.shape).reshape(weight.shape),
    )


@operation("f", keeps=("0",))
@quiet
def softplus(input: Array, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """Return log(1 + exp(beta·x)) / beta, and x where beta·x is above the threshold."""
    z = input * beta
    y = _where(z > threshold, input, softplus_of(z) / beta, input)
    return y, (lambda dy: dy * _where(z > threshold, 1, logistic(z), input),)


@operation("f", keeps=("0",))
def hardtanh(input: Array, min_val: float = -1.0, max_val: float = 1.0) -> Any:
    """Keep numbers between two bounds, with no gradient at and beyond them."""
    inside = (input > min_val) & (input < max_val)
    return np.clip(input, min_val, max_val).astype(input.dtype), (lambda dy: dy * inside,)


@operation("f", keeps=("0",))
def hardshrink(input: Array, lambd: float = 0.5) -> Any:
    """Return x, and 0 where it is between −lambd and lambd."""
    far = np.abs(input) > lambd
    return input * far, (lambda dy: dy * far,)


@operation("f", keeps=("0",))
def softshrink(input: Array, lambd: float = 0.5) -> Any:
    """Move x by lambd towards 0, which it does not cross."""
    far = np.abs(input) > lambd
    return _where(far, input - np.sign(input) * lambd, 0, input), (lambda dy: dy * far,)


@operation("f", keeps=("0",))
def threshold(input: Array, threshold: float, value: float) -> Any:
    """Return x where it is above the threshold, else value."""
    above = input > threshold
    return _where(above, input, value, input), (lambda dy: dy * above,)


@operation("f", keeps=("0",))
def glu(input: Array, dim: int = -1) -> Any:
    """Return a·σ(b) of the two halves a and b of an axis; Dauphin et al., 2016."""
    if input.shape[dim] % 2:
        raise ValueError(f"Halving dimension must be even, but dimension {dim} is size {input.shape[dim]}")
    a, b = np.split(input, 2, dim)
    s = logistic(b)
    return a * s, (lambda dy: np.concatenate([dy * s, dy * a * s * (1 - s)], dim),)


def _fill(name: str, number: float) -> None:
    def rule(input: Array) -> Any:
        return np.full_like(input, number), (np.zeros_like,)

    rule.__name__, rule.__doc__ = name, f"Fill the tensor with {number}."
    operation("i", label=name.capitalize())(rule)


_fill("zero", 0)
