"""Optimisers, as ``torch.optim``: each holds the one of :mod:`selfattn.optim`, whose steps are in C."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from selfattn import optim as arrays
from selfattn.tape.missing import missing
from selfattn.tape.nn.module import forget_gradients
from selfattn.tape.optim import lr_scheduler
from selfattn.tape.tensors import Tensor, enable_grad, wrap

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "lr_scheduler"]


class Optimizer:
    """The base of optimisers: groups of parameters with their options. A subclass defines ``step``.

    Parameters
    ----------
    params : iterable of Tensor, or of dict
        A dict is a group: ``"params"``, and options that differ from the defaults.
    defaults : dict
        The options.

    Attributes
    ----------
    param_groups : list of dict
    state : dict
        What a subclass keeps for each parameter.
    """

    stepped = True  # whether step has been called; a schedule warns if it has not

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        if isinstance(params, Tensor):
            raise TypeError(
                "params must be an iterable of tensors or of dicts, such as model.parameters(), not a tensor"
            )
        groups = list(params)
        if not groups:
            raise ValueError("optimizer got an empty parameter list")
        self.defaults = dict(defaults)
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)
        self.param_groups: list[dict[str, Any]] = []
        for group in groups if isinstance(groups[0], Mapping) else [{"params": groups}]:
            self.add_param_group(dict(group))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        params = param_group["params"]
        found = (
            [params]
            if isinstance(params, Tensor)
            else [each[1] if isinstance(each, tuple) else each for each in params]
        )
        seen = {id(p) for group in self.param_groups for p in group["params"]}
        for p in found:
            if not isinstance(p, Tensor):
                raise TypeError(
                    f"optimizer can only optimize Tensors, but one of the params is {type(p).__name__}"
                )
            if not p.is_leaf:
                raise ValueError("can't optimize a non-leaf Tensor")
            if id(p) in seen:
                raise ValueError("some parameters appear in more than one parameter group")
            seen.add(id(p))
        self.param_groups.append({**self.defaults, **param_group, "params": found})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters."""
        for group in self.param_groups:
            forget_gradients(group["params"], set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters; a subclass defines it."""
        raise NotImplementedError

    def _numbered(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, by their numbers, and the groups."""
        numbers = {id(p): n for n, p in enumerate(self._numbered())}
        groups = [
            {**group, "params": [numbers[id(p)] for p in group["params"]]} for group in self.param_groups
        ]
        state = {numbers[id(p)]: own for p, own in self._states().items() if own}
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in self.param_groups]
        if [len(group["params"]) for group in groups] != sizes:
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group"
            )
        for own, group in zip(self.param_groups, groups, strict=True):
            own.update({name: value for name, value in group.items() if name != "params"})
        params = self._numbered()
        self._set_states({params[n]: dict(own) for n, own in state_dict["state"].items()})

    def _states(self) -> Mapping[Any, dict[str, Any]]:
        return self.state

    def _set_states(self, states: dict[Any, dict[str, Any]]) -> None:
        self.state = defaultdict(dict, states)

    def __repr__(self) -> str:
        lines = []
        for n, group in enumerate(self.param_groups):
            lines.append(f"Parameter Group {n}")
            lines += [f"    {name}: {group[name]}" for name in sorted(group) if name != "params"]
        return f"{type(self).__name__} (\n" + "\n".join(lines) + "\n)"


class _InC(Optimizer):
    """An optimiser whose steps are those of selfattn.optim."""

    _kind: type[arrays.Optimizer]
    stepped = False

    def __init__(self, params: Iterable[Any], defaults: Mapping[str, Any]) -> None:
        super().__init__(params, defaults)
        self._make()

    def _make(self, names: Mapping[int, str] | None = None) -> None:
        """Make the optimiser of arrays, in which a parameter has a name by its array, or its number."""
        params = self._numbered()
        self._names = {id(p): str(n) if names is None else names[id(p._array)] for n, p in enumerate(params)}
        groups = [
            {**self._options(group), "params": {self._names[id(p)]: p._array for p in group["params"]}}
            for group in self.param_groups
        ]
        kind: Any = self._kind
        self._inner: Any = kind(groups)

    def for_arrays(self, arrays: Mapping[str, Any]) -> Any:
        """Return the optimiser of :mod:`selfattn.optim` that moves the same memory, by the names of arrays.

        Parameters
        ----------
        arrays : mapping of str to ndarray
            The parameters of a module, as the array side sees them.
        """
        names = {id(array): name for name, array in arrays.items()}
        if any(id(p._array) not in names for p in self._numbered()):
            raise ValueError(
                "optimizer must be made of the parameters() of this model; it moves other arrays"
            )
        states = dict(self._states())
        self._make(names)
        self._set_states(states)
        return self._inner

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        super().add_param_group(param_group)
        if hasattr(self, "_inner"):
            states = self._states()
            self._make()
            self._set_states(dict(states))

    def _options(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _number(group[name]) for name in self._kind._options}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters along their gradients; one without a gradient stays.

        Parameters
        ----------
        closure : callable, optional
            Computes the loss and its gradients; its result is returned.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        params = self._numbered()
        inner = self._inner
        for group, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update(self._options(group))
        moved = {}
        for p in params:
            name = self._names[id(p)]
            if inner.params[name] is not p._array:  # p.data was set
                inner.params[name] = p._array
                for group in inner.param_groups:
                    if name in group["params"]:
                        group["params"][name] = p._array
            if p._grad is not None:
                moved[name] = p._grad._array
        if moved:
            inner.step(moved)
        for p in params:
            if p._grad is not None:
                p._versions[0] += 1
        self.stepped = True
        return loss

    def _states(self) -> Mapping[Any, dict[str, Any]]:
        state = self._inner.state_dict()["state"]
        return {
            p: {key: _saved(key, value) for key, value in state.get(self._names[id(p)], {}).items()}
            for p in self._numbered()
        }

    def _set_states(self, states: dict[Any, dict[str, Any]]) -> None:
        saved = self._inner.state_dict()
        saved["state"] = {
            self._names[id(p)]: {
                k: int(value) if k == "step" else np.asarray(value) for k, value in own.items()
            }
            for p, own in states.items()
            if own
        }
        for own, group in zip(saved["param_groups"], self.param_groups, strict=True):
            own.update(self._options(group))
        self._inner.load_state_dict(saved)


def _saved(key: str, value: Any) -> Any:
    return wrap(np.asarray(float(value), np.float32)) if key == "step" else wrap(value)


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _refuse(kind: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if value not in (None, False):
            raise TypeError(f"{kind} has no {name} here; leave it out")


class SGD(_InC):
    """Stochastic gradient descent, as ``torch.optim.SGD``: see :class:`selfattn.optim.SGD`.

    Parameters
    ----------
    params : iterable of Tensor, or of groups
    lr : float, default 1e-3
    momentum, dampening, weight_decay : float, default 0
    nesterov : bool, default False
    """

    _kind = arrays.SGD

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        _refuse("SGD", {"maximize": maximize})
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
        )


class Adam(_InC):
    """Adam, as ``torch.optim.Adam``: see :class:`selfattn.optim.Adam`.

    Parameters
    ----------
    params : iterable of Tensor, or of groups
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
    eps : float, default 1e-8
    weight_decay : float, default 0
    amsgrad : bool, default False
    """

    _kind: type[arrays.Optimizer] = arrays.Adam

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        _refuse(type(self).__name__, {"maximize": maximize, "capturable": capturable})
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        )


class AdamW(Adam):
    """AdamW, as ``torch.optim.AdamW``: see :class:`selfattn.optim.AdamW`.

    Parameters
    ----------
    params, lr, betas, eps, amsgrad : as for :class:`Adam`
    weight_decay : float, default 1e-2
    """

    _kind = arrays.AdamW

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
        )


def __getattr__(name: str) -> Any:
    raise missing("torch.optim", name)
