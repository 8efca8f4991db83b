"""Modules of modules: a list of them, and a chain."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Self, SupportsIndex

from selfattn._docs import copy_doc
from selfattn.nn.module import Module, Pullback


class ModuleList(Module):
    """A list of modules, whose parameters' names begin with ``0.``, ``1.`` and so on.

    Parameters
    ----------
    modules : iterable of Module, optional

    Examples
    --------
    >>> from selfattn import nn
    >>> layers = nn.ModuleList([nn.Linear(2, 3, rng=0), nn.Linear(3, 1, rng=1)])
    >>> list(layers.parameters())
    ['0.weight', '0.bias', '1.weight', '1.bias']
    >>> layers[-1]
    Linear(in_features=3, out_features=1, weight=(1, 3), bias=(1,), dtype=float32)
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        self._modules: list[Module] = []
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> ModuleList:
        """Add a module at the end.

        Parameters
        ----------
        module : Module

        Returns
        -------
        ModuleList
            The list itself.

        Raises
        ------
        TypeError
            ``module`` is not a Module.
        """
        if not isinstance(module, Module):
            raise TypeError(f"only modules can be in a {type(self).__name__}, not {type(module).__name__}")
        self._modules.append(module)
        return self

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules with their numbers."""
        return ((str(n), module) for n, module in enumerate(self._modules))

    def __copy__(self) -> Self:
        """Copy the list, not the modules, as ``copy`` does for a list."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), _modules=list(self._modules))
        return made

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules)

    def __getitem__(self, index: SupportsIndex) -> Module:
        return self._modules[operator.index(index)]


class Sequential(ModuleList):
    """A chain: each module gets the output of the one before it.

    Parameters
    ----------
    *modules : Module
        The input of the first may have no gradient, such as the ids of an :class:`Embedding`; the pullback of the
        chain, like that of the first module, then returns only the gradients of parameters.

    Notes
    -----
    Each module gets the keyword arguments of a call that its ``forward`` takes: ``model(ids, is_causal=True)``.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn
    >>> model = nn.Sequential(nn.Embedding(10, 4, rng=0), nn.Linear(4, 2, rng=1))
    >>> y, pullback = model.vjp([3, 7])
    >>> {name: grad.shape for name, grad in pullback(np.ones_like(y)).items()}
    {'0.weight': (10, 4), '1.weight': (2, 4), '1.bias': (2,)}
    >>> model = nn.Sequential(nn.Embedding(10, 4, rng=0), nn.SelfAttention(4, 4, rng=1))
    >>> model([3, 7], is_causal=True).shape
    (2, 4)
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any, **options: Any) -> Any:
        """Call one module after the other.

        Parameters
        ----------
        x : object
            The input of the first module.
        **options
            For the modules that take them.

        Returns
        -------
        object
            The output of the last module; ``x`` itself without a module.

        Raises
        ------
        TypeError
            No module takes one of the options.
        """
        for module, own in zip(self, self._shared(options), strict=True):
            x = module._from_arrays(x, **own)
        return x

    @copy_doc(forward)
    def vjp(self, x: Any, **options: Any) -> tuple[Any, Pullback]:
        """Call one module after the other; the pullback calls their pullbacks in reverse order.

        Returns
        -------
        pullback : callable
            ``dx, grads = pullback(dy)``, as :class:`Module` says, or ``grads = pullback(dy)`` if the first module's
            pullback returns only these.
        """
        pullbacks = []
        for module, own in zip(self, self._shared(options), strict=True):
            x, module_pullback = module.vjp(x, **own)
            pullbacks.append(module_pullback)

        def pullback(dy: Any) -> Any:
            dx: Any = dy
            found: dict[str, Any] = {}
            for n, module_pullback in reversed(list(enumerate(pullbacks))):
                result = module_pullback(dx)
                dx, grads = (None, result) if isinstance(result, dict) else result
                found[str(n)] = grads
            gathered = self.gather_gradients(dict(reversed(found.items())))
            return gathered if dx is None else (dx, gathered)

        return x, pullback

    def _shared(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the options of each module."""
        shared = [{name: value for name, value in options.items() if _takes(module, name)} for module in self]
        for name in options:
            if not any(name in own for own in shared):
                kinds = ", ".join(dict.fromkeys(type(module).__name__ for module in self))
                raise TypeError(f"no module of this Sequential takes {name!r}; it has {kinds or 'none'}")
        return shared


def _takes(module: Module, name: str) -> bool:
    if isinstance(module, Sequential):
        return any(_takes(each, name) for each in module)
    kind: Any = type(module)
    names = _options_of(kind)
    if "**" in names and module._call_options is not None:
        names = names.union(module._call_options) - {"**"}
    return name in names or "**" in names


@functools.cache
def _options_of(kind: Any) -> frozenset[str]:
    """Return the names of the arguments of ``forward`` after the input; "**" means any."""
    function = kind.vjp if kind.forward is Module.forward else kind.forward
    _, *parameters = inspect.signature(function).parameters.values()  # without self
    named = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if named and named[0].kind is named[0].POSITIONAL_OR_KEYWORD:
        named = named[1:]  # the input
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return frozenset([p.name for p in named] + ["**"] * anything)
