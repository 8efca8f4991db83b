"""Functions and layers for autograd (HIPS): its ``grad`` differentiates NumPy programs that call them.

Every function of `selfattn.functional` that has a ``_vjp`` is here under its name, and :func:`functional_call` calls
a layer. A call that autograd traces runs the ``_vjp`` once: the pullback is an argument of the primitive that
autograd records. Other calls are plain. Reverse mode, first order; attention's derivatives are also of the second order
and in forward mode, as ``hessian_vector_product`` and ``make_jvp`` ask.

>>> import autograd
>>> from selfattn.interop.autograd import softmax
>>> autograd.grad(lambda x: softmax(x)[0])(np.zeros(2))
array([ 0.25, -0.25])
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import functional, nn
from selfattn._check import as_array, seed_from_rng
from selfattn._extras import import_extra

_builtins, _extend, _tracer = (
    import_extra(f"autograd.{name}", "autograd") for name in ("builtins", "extend", "tracer")
)
_NAMES = [name for name in functional.__all__ if f"{name}_vjp" in functional.__all__]
__all__ = ["functional_call", *_NAMES]  # noqa: PLE0604


def functional_call(
    module: nn.Module,
    parameters: dict[str, npt.ArrayLike],
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a layer with these parameters in place of its own, as ``torch.func.functional_call`` does.

    Parameters
    ----------
    module : Module
        It is not changed. Parameters that are not given, and the generators of dropout, are its own.
    parameters : dict of str to array_like
        By the names of ``module.parameters()``, in their shapes.
    args, kwargs : tuple, or one argument; dict, optional
        The arguments of ``module(*args, **kwargs)``.
    """
    bound = inspect.signature(module.forward).bind(
        *(args if type(args) is tuple else (args,)), **(kwargs or {})
    )
    own = module.parameters()

    def run(values: dict[str, Any], traced: list[str]) -> Any:
        # A copy of the modules, and of lists of modules, shares all but these parameters.
        every = [x for each in module.modules() for x in vars(each).values()]
        memo = {id(x): x for x in every if not isinstance(x, nn.Module | list)}
        for name, x in values["parameters"].items():
            array = as_array(name, x)
            if name not in own or array.shape != own[name].shape:
                wrong = f"has shape {own[name].shape}, not {array.shape}" if name in own else "does not exist"
                raise ValueError(f"parameter {name} of {type(module).__name__} {wrong}")
            memo[id(own[name])] = array
        changed = copy.deepcopy(module, memo)
        bound.arguments.update({name: values[name] for name in bound.arguments})
        return (changed.vjp if traced else changed)(*bound.args, **bound.kwargs)

    return _call(type(module).__name__, bound.signature, {**bound.arguments, "parameters": parameters}, run)


class _MoreDerivatives:
    """Forward mode and second derivatives of one call of attention, whose arguments ``traced`` names."""

    def __init__(self, values: dict[str, Any], traced: list[str]) -> None:
        self.traced, self.returns_lse = traced, bool(values.get("return_lse"))
        self.others = {name: x for name, x in values.items() if name not in (*traced, "return_lse")}

    def tangents(self, inputs: tuple[Any, ...], along: dict[str, Any]) -> Any:
        """Return the tangent of the result along tangents of inputs by name."""
        given = self.others | dict(zip(self.traced, inputs, strict=True))
        found = functional.scaled_dot_product_attention_jvp(
            **given, tangents=along, return_lse=self.returns_lse
        )
        return found[1]

    def products(self, inputs: tuple[Any, ...], gradient: Any, along: dict[str, Any]) -> Any:
        """Return the tangents of the gradients of the inputs, along tangents of inputs by name."""
        given = self.others | dict(zip(self.traced, inputs, strict=True))
        given |= zip(("grad_out", "grad_lse"), gradient if self.returns_lse else (gradient,), strict=False)
        hvp = functional.scaled_dot_product_attention_hvp
        return hvp(**given, tangents=along, wrt=self.traced)[1]


def _function(name: str) -> Callable[..., Any]:
    """Return a function of `selfattn.functional` that autograd differentiates."""
    plain, with_pullback = getattr(functional, name), getattr(functional, f"{name}_vjp")
    signature, selects = inspect.signature(plain), "wrt" in inspect.signature(with_pullback).parameters

    def run(values: dict[str, Any], traced: list[str]) -> Any:
        return with_pullback(**values, **({"wrt": traced} if selects else {})) if traced else plain(**values)

    more = _MoreDerivatives if name == "scaled_dot_product_attention" else None

    @functools.wraps(plain, ("__name__", "__qualname__", "__doc__"))  # pickles find it in this module
    def function(*args: Any, **kwargs: Any) -> Any:
        return _call(name, signature, signature.bind(*args, **kwargs).arguments, run, more)

    return function


globals().update({name: _function(name) for name in _NAMES})


def _call(
    owner: str,
    signature: inspect.Signature,
    arguments: dict[str, Any],
    run: Callable[..., Any],
    more: type[_MoreDerivatives] | None = None,
) -> Any:
    """Call ``run(values, traced)``: if autograd traces arguments, it returns the result and the pullback."""
    given = {name: _in_one_box(x) for name, x in arguments.items()}
    values = {name: _tracer.getval(x) for name, x in given.items()}
    traced = [name for name, x in given.items() if _tracer.isbox(x)]
    if not traced:
        return run(values, traced)
    if (
        values.get("dropout_p") and "rng" in signature.parameters
    ):  # every derivative drops what the result drops
        values["rng"] = seed_from_rng(values.get("rng"))
    result, pullback = run(values, traced)
    # A layer may return more than has a gradient, such as weights.
    takes = len(inspect.signature(pullback).parameters) if isinstance(result, tuple) else 1
    parts = result[:takes] if isinstance(result, tuple) else (result,)
    # autograd may compute gradients in another dtype than the result's; a list of logits has none.
    fit = [functools.partial(np.asarray, dtype=x.dtype) if hasattr(x, "dtype") else list for x in parts]

    def pull(gradient: Any) -> list[Any]:
        gradients = gradient if takes > 1 else (gradient,)
        found = pullback(*[fitted(x) for fitted, x in zip(fit, gradients, strict=True)])
        named = _by_name(found, signature.parameters)
        if lacking := [name for name in traced if named.get(name) is None]:
            raise TypeError(f"{owner} has no gradient with respect to {', '.join(lacking)}")
        return [_like(named[name], values[name]) for name in traced]

    call = parts if takes > 1 else parts[0], pull, more and more(values, traced)
    recorded = _forward(call, *(given[name] for name in traced))
    return (recorded, *result[1:]) if isinstance(result, tuple) and takes == 1 else recorded


def _in_one_box(x: Any) -> Any:
    """Return a list, tuple or dict with entries that autograd traces as one object that it traces."""
    entries = x.values() if type(x) is dict else x if type(x) in (list, tuple) else ()
    return getattr(_builtins, type(x).__name__)(x) if any(map(_tracer.isbox, entries)) else x


def _by_name(found: Any, names: Iterable[str]) -> dict[str, Any]:
    """Name what a pullback returns: a named tuple; gradients of inputs, those of parameters, or both."""
    if hasattr(found, "_asdict"):
        return dict(found._asdict())
    inputs, own = (
        found if isinstance(found, tuple) else ((), found) if isinstance(found, dict) else (found, {})
    )
    inputs = inputs if isinstance(inputs, tuple) else (inputs,)
    return {**dict(zip(names, inputs, strict=False)), "parameters": own}


def _like(gradient: Any, value: Any) -> Any:
    """Return a gradient in the container of its argument."""
    if isinstance(value, dict):
        return {name: gradient[name] for name in value}
    return type(value)(gradient) if isinstance(value, list | tuple) else gradient


def selfattn_forward(call: tuple[Any, ...], *inputs: Any) -> Any:
    """Return the result of a call, which is computed already; the inputs are for autograd."""
    return call[0]


def selfattn_backward(call: tuple[Any, ...], places: tuple[int, ...], *inputs: Any) -> list[Any]:
    """Pull back the last of the inputs. Through the others autograd sees a second derivative."""
    found = call[1](inputs[-1])
    return [found[place - 1] for place in places]


def _tangent(places: tuple[int, ...], tangents: Any, _: Any, given: Any, __: Any) -> Any:
    more = given[0][2]
    if more is None:
        raise NotImplementedError(
            "JVP of selfattn_forward wrt its arguments is not defined but for attention"
        )
    return more.tangents(given[1:], {more.traced[n - 1]: x for n, x in zip(places, tangents, strict=True)})


def _second(wanted: tuple[int, ...], _: Any, given: Any, __: Any) -> Callable[[Any], list[Any]]:
    """Return the pullback of gradients: the Hessian is symmetric, so it is a product with it."""
    (_result, _pull, more), places, *inputs, gradient = given
    if more is None:
        raise NotImplementedError(
            "VJP of selfattn_backward wrt its arguments is not defined but for attention"
        )

    def pull(directions: Any) -> list[Any]:
        along = {more.traced[n - 1]: x for n, x in zip(places, directions, strict=True)}
        last = 2 + len(inputs)
        products = more.products(inputs, gradient, along) if min(wanted) < last else ()
        return [more.tangents(inputs, along) if n == last else products[n - 2] for n in wanted]

    return pull


_forward, _backward = _extend.primitive(selfattn_forward), _extend.primitive(selfattn_backward)
_extend.defvjp_argnums(
    _forward, lambda places, _, given, __: functools.partial(_backward, given[0], places, *given[1:])
)
_extend.defjvp_argnums(_forward, _tangent)
_extend.defvjp_argnums(_backward, _second)
