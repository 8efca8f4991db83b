"""A check of hand-written gradients: it compares a pullback with finite differences."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, check_number, float_dtype

EPS = float(np.finfo(np.float64).eps)


def check_vjp(
    f: Callable[..., tuple[Any, Callable[..., Any]]],
    *args: npt.ArrayLike,
    rng: int | np.random.Generator = 0,
    eps: float | None = None,
    rtol: float | None = None,
) -> None:
    """Check a pullback against central differences along one random direction for each argument.

    With random ``dy``, the number ``sum(dy * y)`` changes by ``sum(gradient * direction)`` for each unit that
    an argument moves along a direction; two calls of ``f`` measure this change. Arrays may have any size.

    Parameters
    ----------
    f : callable
        ``f(*args)`` returns ``(y, pullback)``, y being an array or a tuple of arrays, like the functions of
        selfattn with names that end in ``_vjp``. The same arguments must give the same result: dropout needs a
        seed. ``pullback(dy)``, or ``pullback(dy_1, dy_2, ...)``, returns the gradients: an array, or a tuple of
        arrays and of lists of them.
    *args : array_like
        Arrays of floats or integers; ``f`` gets them in float64. A lambda gives other arguments:
        ``lambda x: layer_norm_vjp(x, 64)``. If the number of gradients that are not None is that of the arguments, they
        belong to the arguments in order; else a gradient belongs to the argument at its place, and an argument whose
        gradient is None is not checked.
    rng : int or numpy.random.Generator, default 0
        Chooses ``dy`` and the directions.
    eps : float, optional
        The step along the direction, whose elements are standard normal. By default 6.1e-6, the cube root of
        float64's machine epsilon, which suits functions that curve on a scale of about 1.
    rtol : float, optional
        How far the two numbers may differ, relative to the norm of ``gradient * direction``; 1e-6 by default.
        A difference that rounding in ``f`` explains is also allowed.

    Raises
    ------
    AssertionError
        A gradient is off: the message names its argument, and both numbers. Or a gradient or a result has a wrong
        shape or dtype.
    ValueError
        It is not clear to which arguments the gradients belong, or there are none to check; ``eps`` or ``rtol`` is
        not above 0.
    TypeError
        An argument holds neither floats nor integers, or ``f`` does not return a pair.

    References
    ----------
    Griewank and Walther, "Evaluating Derivatives", 2008, section 3.2, for the products with one direction.

    Examples
    --------
    >>> import numpy as np
    >>> def square(x):
    ...     return x * x, lambda dy: 2 * x * dy
    >>> check_vjp(square, np.arange(5.0))

    >>> def wrong(x):
    ...     return x * x, lambda dy: x * dy
    >>> check_vjp(wrong, [2.0])
    Traceback (most recent call last):
    AssertionError: the gradient of argument 0 (x) is off along a random direction:
    -0.0332191473 by the pullback, -0.0664382947 by finite differences
    """
    step = EPS ** (1 / 3) if eps is None else check_number("eps", eps)
    tolerance = 1e-6 if rtol is None else check_number("rtol", rtol)
    if not (step > 0 and tolerance > 0):
        raise ValueError(f"eps and rtol must be above 0, not {eps!r} and {rtol!r}")
    rng = np.random.default_rng(rng)
    arrays = []
    for k, arg in enumerate(args):
        array = as_array(f"argument {k}", arg)
        float_dtype(f"argument {k}", array)
        arrays.append(array.astype(np.float64))

    names = argument_names(f, len(arrays))
    ys, pullback = results(f, arrays)
    dys = [rng.standard_normal(y.shape) for y in ys]
    grads = match(pullback(*(dy.copy() for dy in dys)), len(arrays))
    finite = [dy * np.where(np.isfinite(y), y, 0) for dy, y in zip(dys, ys, strict=True)]
    noise = 32 * EPS * math.sqrt(sum(np.square(products).sum() for products in finite))

    faults = []
    for k, (array, grad) in enumerate(zip(arrays, grads, strict=True)):
        if grad is None:
            continue
        direction = rng.standard_normal(array.shape)
        if grad.shape != array.shape or grad.dtype != np.float64:
            faults.append(
                f"the gradient of {names[k]} has shape {grad.shape} and dtype {grad.dtype}, but the argument "
                f"{array.shape} and float64"
            )
            continue
        ends = [array + step * direction, array - step * direction]
        after, before = (results(f, [*arrays[:k], end, *arrays[k + 1 :]])[0] for end in ends)
        change = sum(np.sum(dy * difference(a, b)) for dy, a, b in zip(dys, after, before, strict=True))
        # The step as it is after rounding.
        products = grad * (difference(*ends) / (2 * step))
        expected, got = float(change / (2 * step)), float(products.sum())
        allowed = tolerance * math.sqrt(np.square(products).sum()) + noise / step
        if not abs(got - expected) <= allowed:  # NaN fails too
            faults.append(
                f"the gradient of {names[k]} is off along a random direction:\n"
                f"{got:.9g} by the pullback, {expected:.9g} by finite differences"
            )
    if faults:
        raise AssertionError("\n".join(faults))


def difference(a: Array, b: Array) -> Array:
    """Return a - b, and 0 where both are the same infinity, such as the lse of a row without keys."""
    change: Array = np.subtract(a, b, out=np.zeros_like(a), where=a != b)
    return change


def argument_names(f: Callable[..., Any], n: int) -> list[str]:
    """Return the arguments' names in messages: the place, and the parameter's name if ``f`` has a signature."""
    try:
        parameters = list(inspect.signature(f).parameters.values())
    except (TypeError, ValueError):  # some built-in functions
        parameters = []
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [f"argument {k}" + (f" ({positional[k]})" if k < len(positional) else "") for k in range(n)]


def results(f: Callable[..., Any], arrays: list[Array]) -> tuple[list[Array], Callable[..., Any]]:
    """Call ``f``; return its outputs as a list, and the pullback."""
    pair = f(*(array.copy() for array in arrays))
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[1])):
        raise TypeError(f"f must return (y, pullback), not {type(pair).__name__}; functions named ..._vjp do")
    ys = [np.asarray(y) for y in (pair[0] if isinstance(pair[0], tuple) else (pair[0],))]
    for y in ys:
        if y.dtype != np.float64:
            raise AssertionError(f"f returns {y.dtype} for float64; finite differences need float64")
    return ys, pair[1]


def match(grads: Any, n: int) -> list[Array | None]:
    """Return one gradient, or None, for each of n arguments."""
    given: list[Any] = []
    for grad in grads if isinstance(grads, tuple) else [grads]:
        given += grad if isinstance(grad, list) else [grad]  # lists: parts, or packed masks
    found = [grad for grad in given if grad is not None]
    if not found:
        raise ValueError("the pullback returns no gradient, so there is nothing to check")
    if len(found) == n:
        given = found
    elif len(given) < n or any(grad is not None for grad in given[n:]):
        raise ValueError(f"the pullback returns {len(found)} gradients of {len(given)}, f has {n} arguments")
    return [None if grad is None else np.asarray(grad) for grad in given[:n]]
