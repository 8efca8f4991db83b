"""The optimisers SGD, Adam and AdamW, and clipping, which scales gradients down to a largest norm."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.array_utils import byte_bounds

from selfattn import _core
from selfattn._check import Array, as_array, check_number, warn
from selfattn.functional._products import FLOAT32, FLOAT64, plain

Arrays: TypeAlias = list[Array]
Targets: TypeAlias = list[Array | None] | None
Parameters: TypeAlias = Mapping[str, Array] | Sequence[Mapping[str, Any]]

CHUNK = 4096  # a chunk of this many elements is summed in their dtype; chunks are added in float64
# From the dtype of a parameter to the dtype in which its updates are computed.
COMPUTED_IN = {"float16": FLOAT32, "bfloat16": FLOAT32, "float32": FLOAT32, "float64": FLOAT64}
ADDED = {"amsgrad"}  # options, False by default, that states of an older selfattn lack


@_core._record
class Update(NamedTuple):
    """What a step of the core does; the core reads it by the names of its fields (csrc/python/optimizer.c)."""

    kind: Literal["sgd", "adam"]
    lr: float
    weight_decay: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    decoupled: bool = False  # the decay shrinks the parameter and is not added to the gradient


class Move(NamedTuple):
    """A step of one group of parameters: its settings, and for each parameter what the core reads and writes."""

    update: Update
    means: Arrays | None
    squares: Arrays | None
    peaks: Arrays | None
    steps: list[int]


class Option:
    """An option of an optimiser as its attribute: the value that all groups of parameters share, or an error."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, optimizer: Optimizer | None, owner: type) -> Any:
        if optimizer is None:
            return self
        first, *others = (group[self.name] for group in optimizer.param_groups)
        if any(other != first for other in others):
            raise AttributeError(
                f"the groups of parameters differ in {self.name}: {[first, *others]}; "
                f"param_groups[i][{self.name!r}] is that of one"
            )
        return first

    def __set__(self, optimizer: Optimizer, value: Any) -> None:
        self.__get__(
            optimizer, type(optimizer)
        )  # or other groups would silently lose what they were made with
        if self.name == "lr":
            value = not_negative("lr", value)
        for group in optimizer.param_groups:
            group[self.name] = value


class Optimizer:
    """The base of the optimisers: the parameters, checks of gradients, and the state of each parameter.

    Parameters
    ----------
    params : mapping of str to ndarray, or list of groups
        The live arrays, as from ``module.parameters()``; :meth:`step` writes into them. A group is a dict of
        ``"params"``, such a mapping, and of options that differ from those of the other groups.
    lr : float
        The learning rate.
    weight_decay : float, default 0
    decay_only_matrices : bool, default False
        Whether arrays with less than two axes, which are biases and the weights of norms, are in a group of their own
        with ``weight_decay`` 0.
    **options
        Of the subclass.

    Attributes
    ----------
    param_groups : list of dict
        The groups with all their options, which may be changed at any time. Each option is also an attribute, such
        as ``lr``, as long as all groups agree.
    params : dict of str to ndarray
        The parameters of all groups.

    Notes
    -----
    float16 and bfloat16 parameters are updated in float32 and rounded; their state is float32.
    """

    stepped: bool  # whether step has been called

    _options: tuple[str, ...] = ("lr", "weight_decay")  # saved arguments
    _slots: tuple[str, ...] = ()  # state per parameter: "step", and arrays of its shape
    _fixed: Mapping[str, Any] = {}  # constants that are saved: they distinguish classes

    lr, weight_decay = Option(), Option()

    def __init__(
        self,
        params: Parameters,
        lr: float,
        weight_decay: float = 0.0,
        decay_only_matrices: bool = False,
        **options: Any,
    ) -> None:
        groups = [{"params": params}] if isinstance(params, Mapping) else params
        are_groups = isinstance(groups, list | tuple) and all(isinstance(group, Mapping) for group in groups)
        if (
            not are_groups
            or not groups
            or not all(isinstance(group.get("params"), Mapping) for group in groups)
        ):
            raise TypeError(
                "params must be a dict, as from parameters(), or a list of groups, each a dict with such a dict as "
                f"'params', not {type(params).__name__}"
            )
        if decay_only_matrices:
            groups = _apart(groups)
        defaults = {"lr": lr, "weight_decay": weight_decay, **options}
        self.param_groups: list[dict[str, Any]] = []
        self.params: dict[str, Array] = {}
        for group in groups:
            self._add(defaults, group)
        _check_apart(self.params)
        self.stepped = False
        self.state: dict[str, dict[str, Any]] = {name: {} for name in self.params}
        self._computed_in = {name: COMPUTED_IN[array.dtype.name] for name, array in self.params.items()}

    def _add(self, defaults: Mapping[str, Any], group: Mapping[str, Any]) -> None:
        """Check a group of parameters, and add it."""
        unknown = sorted(set(group) - {*defaults, "params"})
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {unknown[0]!r}; it has {list(defaults)}")
        for name, array in group["params"].items():
            if not _is_writable_kind(array):
                raise TypeError(
                    f"params[{name!r}] must be an ndarray of floats (float16 to float64), not {array!r}"
                )
            if name in self.params:
                raise ValueError(f"the parameter {name} is in two groups")
            self.params[name] = array
        checked = self._checked({name: group.get(name, default) for name, default in defaults.items()})
        self.param_groups.append({"params": dict(group["params"]), **checked})

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        """Check the options of a group, and return them."""
        return options | {name: not_negative(name, options[name]) for name in ("lr", "weight_decay")}

    def __copy__(self) -> Self:
        """Return an optimiser of the same parameters with its own copy of the state."""
        made = object.__new__(type(self))
        groups = [dict(group) for group in self.param_groups]
        vars(made).update(
            vars(self), params=dict(self.params), param_groups=groups, state=copy.deepcopy(self.state)
        )
        return made

    def step(self, grads: Mapping[str, npt.ArrayLike]) -> None:
        """Move the parameters by one step.

        Parameters
        ----------
        grads : mapping of str to array_like
            By name. A parameter without a gradient does not change, nor does its state. No gradients at all are a
            warning. If all parameters have one, others are left out: an optimizer of some of a model's parameters
            takes its part of the model's gradients.

        Raises
        ------
        TypeError
            A gradient does not hold real numbers. Nothing has been written then.
        ValueError
            A name is not one of a parameter, while a parameter lacks a gradient; or a shape differs; ``lr`` or
            ``weight_decay`` was set to a number below 0, an infinite one or NaN. Nothing has been written then.
        """
        if not isinstance(grads, Mapping):
            raise TypeError(
                f"grads must be a mapping of names to gradients, as a pullback returns them, not "
                f"{type(grads).__name__}"
            )
        if not grads:
            give = "give it the dict that the pullback of vjp returned"
            warn(f"optimizer.step was given no gradients, so nothing moves; {give}")
        if not grads.keys() <= self.params.keys() <= grads.keys():
            self._check_names(grads)
        # A gradient may be another parameter's array, which a step would change before it is read.
        live = set(map(id, self.params.values()))
        moved: dict[str, dict[str, Any]] = {}
        calls: list[tuple[Any, ...]] = []
        for group in self.param_groups:
            names = [name for name in group["params"] if name in grads]
            parameters: list[Any] = [self.params[name] for name in names]
            gradients: list[Any] = [
                np.array(g, subok=True) if id(g) in live or id(getattr(g, "base", None)) in live else g
                for g in map(grads.__getitem__, names)
            ]
            targets: Targets = None
            if not _core._are_plain(parameters, gradients):  # checks all arrays quickly
                targets = self._made_plain(names, parameters, gradients)
            states, call = self._move(group, names, parameters)
            moved |= zip(names, states, strict=True)
            calls.append((call.update, parameters, gradients, *call[1:], targets))
        state = self.state | moved  # it may lack memory, and must do so before an array changes
        _core._update(*calls)
        self.state = state
        self.stepped = True

    def _check_names(self, grads: Mapping[str, Any]) -> None:
        """Refuse names that may be misspelt, if a parameter has no gradient."""
        lacking = [name for name in self.params if name not in grads]
        for name in grads if lacking else ():
            if name not in self.params:
                raise ValueError(
                    f"grads has {name!r}, which is not one of the parameters {list(self.params)}, and has none for "
                    f"{lacking[0]!r}"
                )

    def _made_plain(self, names: list[str], parameters: list[Any], gradients: list[Any]) -> Targets:
        """Check arrays, copy arrays that the core cannot read, and return the arrays to write the copies back to."""
        targets: list[Array | None] = []
        for i, (name, gradient) in enumerate(zip(names, gradients, strict=True)):
            parameter = self.params[name]
            array = as_array(f"the gradient of {name}", gradient)
            if array.shape != parameter.shape:
                raise ValueError(
                    f"the gradient of {name} has shape {array.shape}, the parameter {parameter.shape}"
                )
            if array.dtype.kind in "bcOSTUmM":
                raise TypeError(f"the gradient of {name} must hold floats, not {array.dtype}")
            if not parameter.flags.writeable:
                raise ValueError(
                    f"the parameter {name} is read-only; give the optimizer a copy, which can be written"
                )
            gradients[i] = plain(array, self._computed_in[name])
            parameters[i] = plain(parameter, self._computed_in[name])
            targets.append(None if parameters[i] is parameter else np.asarray(parameter))
        return targets

    def state_dict(self) -> dict[str, Any]:
        """Return copies of everything that the next steps depend on, except for the parameters.

        Returns
        -------
        dict
            As PyTorch's, with names in place of numbers: ``"state"``, for each parameter that has taken a
            step, holds ``"step"``, ``"exp_avg"`` and ``"exp_avg_sq"`` (Adam, AdamW) or ``"momentum_buffer"`` (SGD);
            ``"param_groups"`` is a list of a dict for each group, of the options and ``"params"``, the names.

        Examples
        --------
        >>> import numpy as np
        >>> from selfattn import optim
        >>> optimizer = optim.Adam({"w": np.zeros(2)})
        >>> optimizer.step({"w": [1.0, 2.0]})
        >>> optimizer.state_dict()["state"]["w"]["exp_avg"]
        array([0.1, 0.2])
        """
        state = {
            name: self._copied(group, name, self.state[name])
            for group in self.param_groups
            for name in group["params"]
            if self.state[name]
        }
        groups = [
            {name: _as_saved(name, group[name]) for name in self._options}
            | {**self._fixed, "params": list(group["params"])}
            for group in self.param_groups
        ]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state_dict` returned. Everything is checked before anything is changed.

        Parameters
        ----------
        state_dict : mapping
            Its arrays are copied.

        Raises
        ------
        ValueError
            It has another layout than :meth:`state_dict`, belongs to another optimiser or other parameters, or a
            shape, dtype or option is wrong.
        TypeError
            A value in it has a wrong type.
        """
        groups, saved = _parts(state_dict, len(self.param_groups))
        options, state = [], {name: dict[str, Any]() for name in self.params}
        for n, (own, group) in enumerate(zip(self.param_groups, groups, strict=True)):
            given = {name: False for name in self._options if name in ADDED} | dict(group)
            expected = {*self._options, *self._fixed, "params"}
            if set(given) != expected:
                raise ValueError(
                    f"param_groups[{n}] must have {sorted(expected)} for {type(self).__name__}, not {sorted(given)}"
                )
            for name, value in self._fixed.items():
                if given[name] != value:
                    raise ValueError(f"{type(self).__name__} has {name}={value}, not {given[name]}")
            names = given["params"]
            if set(names) != set(own["params"]) or len(names) != len(own["params"]):
                raise ValueError(f"the state is of the parameters {names}, not {list(own['params'])}")
            options.append(self._checked({name: given[name] for name in self._options}))
            for name in own["params"]:
                if name in saved:
                    state[name] = self._copied(options[n], name, saved[name])
        for name in saved:
            if name not in self.params:
                raise ValueError(
                    f"state has {name!r}, which is not one of the parameters {list(self.params)}"
                )
        for own, checked in zip(self.param_groups, options, strict=True):
            own.update(checked)
        self.state = state

    def _slots_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state that each parameter of a group has."""
        return self._slots

    def _copied(self, options: Mapping[str, Any], name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Check and copy the state of one parameter."""
        slots = self._slots_of(options)
        if not isinstance(entries, Mapping) or set(entries) != set(slots):
            raise ValueError(f"state[{name!r}] must have {list(slots)}, not {entries!r:.200}")
        copied: dict[str, Any] = {}
        for slot in slots:
            entry, parameter = entries[slot], self.params[name]
            if slot == "step":
                if isinstance(entry, bool) or not hasattr(entry, "__index__") or not 1 <= entry < 2**62:
                    raise ValueError(
                        f"state[{name!r}]['step'] must be an int from 1 to 2**62 - 1, not {entry!r:.80}"
                    )
                copied[slot] = int(entry)
                continue
            dtype = self._computed_in[name]
            expected = f"state[{name!r}][{slot!r}] must be an array {parameter.shape} of {dtype}"
            if not hasattr(entry, "__dlpack__"):
                raise TypeError(f"{expected}, not {entry!r:.80}")
            array = as_array(f"state[{name!r}][{slot!r}]", entry)
            if (array.shape, array.dtype) != (parameter.shape, dtype):
                raise ValueError(f"{expected}, not {array.shape} of {array.dtype}")
            copied[slot] = array.copy()
        return copied

    def _move(self, group: dict[str, Any], names: list[str], parameters: Arrays) -> tuple[list[Any], Move]:
        """Return the parameters' states after a step, which the core will write, and the settings of the step.

        The parameters are contiguous, float32 or float64. A step is taken as a whole or, without memory, not at all:
        all that it needs is allocated here.
        """
        raise NotImplementedError

    def _states(self, key: str, names: list[str], parameters: Arrays) -> Arrays:
        """Return one array of each parameter's state, zeros before its first step."""
        found = ((self.state[name].get(key), x) for name, x in zip(names, parameters, strict=True))
        return [np.zeros(x.shape, x.dtype) if array is None else array for array, x in found]


class SGD(Optimizer):
    """Stochastic gradient descent, with optional momentum.

    Parameters
    ----------
    params : mapping of str to ndarray, or list of groups
        The live arrays, as from ``module.parameters()``; see :class:`Optimizer` for groups.
    lr : float, default 1e-3
    momentum : float, default 0
        v ← momentum·v + (1 − dampening)·g, and the first v is g.
    dampening : float, default 0
    weight_decay : float, default 0
        Adds weight_decay·parameter to the gradient.
    nesterov : bool, default False
        Step along g + momentum·v in place of v.
    decay_only_matrices : bool, default False
        Whether arrays with less than two axes have a ``weight_decay`` of 0.

    References
    ----------
    Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, section 2; with
    the learning rate applied to v, as PyTorch does.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> params = {"w": np.array([1.0, 2.0])}
    >>> optim.SGD(params, lr=0.5).step({"w": [1.0, 0.0]})
    >>> params["w"]
    array([0.5, 2. ])
    """

    _options = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    _slots = ("momentum_buffer",)

    momentum, dampening, nesterov = Option(), Option(), Option()

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        decay_only_matrices: bool = False,
    ) -> None:
        own = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__(params, lr, weight_decay, decay_only_matrices, **own)

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        momentum = not_negative("momentum", options["momentum"])
        dampening, nesterov = check_number("dampening", options["dampening"]), bool(options["nesterov"])
        if nesterov and (momentum == 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs momentum > 0 and dampening 0, not momentum={momentum}, dampening={dampening}"
            )
        return super()._checked(options) | {
            "momentum": momentum,
            "dampening": dampening,
            "nesterov": nesterov,
        }

    def _move(self, group: dict[str, Any], names: list[str], parameters: Arrays) -> tuple[list[Any], Move]:
        steps = [2 if "momentum_buffer" in self.state[name] else 1 for name in names]
        velocities = self._states("momentum_buffer", names, parameters) if group["momentum"] else None
        states = [self.state[name] for name in names]
        if velocities is not None:
            states = [{"momentum_buffer": velocity} for velocity in velocities]
        update = Update(
            "sgd",
            group["lr"],
            group["weight_decay"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
        )
        return states, Move(update, velocities, None, None, steps)


class Adam(Optimizer):
    """Adam: each coordinate moves by about ``lr`` along a running mean of its gradient.

    Parameters
    ----------
    params : mapping of str to ndarray, or list of groups
        The live arrays, as from ``module.parameters()``; see :class:`Optimizer` for groups.
    lr : float, default 1e-3
    betas : (float, float), default (0.9, 0.999)
        The shares of the mean of the gradient, and of its square, that each step keeps.
    eps : float, default 1e-8
    weight_decay : float, default 0
        Adds weight_decay·parameter to the gradient; :class:`AdamW` leaves it out of the means.
    amsgrad : bool, default False
        Whether the step divides by the root of the largest mean of squares so far.
    decay_only_matrices : bool, default False
        Whether arrays with less than two axes have a ``weight_decay`` of 0.

    References
    ----------
    Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015, algorithm 1; Reddi, Kale and Kumar, "On the
    Convergence of Adam and Beyond", 2018, algorithm 2, for ``amsgrad``.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> params = {"w": np.array([1.0, 2.0])}
    >>> optim.Adam(params, lr=0.5).step({"w": [3.0, -0.01]})
    >>> params["w"].round(4)
    array([0.5, 2.5])
    """

    _options = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    _slots = ("step", "exp_avg", "exp_avg_sq")
    _fixed: Mapping[str, Any] = {"decoupled_weight_decay": False}

    betas, eps, amsgrad = Option(), Option(), Option()

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decay_only_matrices: bool = False,
    ) -> None:
        own = {"betas": betas, "eps": eps, "amsgrad": amsgrad}
        super().__init__(params, lr, weight_decay, decay_only_matrices, **own)

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        betas = options["betas"]
        numbers = tuple(check_number("each of betas", beta) for beta in betas)
        if len(numbers) != 2 or not all(0 <= beta < 1 for beta in numbers):
            raise ValueError(f"betas must be two numbers in [0, 1), not {betas}")
        eps, amsgrad = not_negative("eps", options["eps"]), bool(options["amsgrad"])
        return super()._checked(options) | {"betas": numbers, "eps": eps, "amsgrad": amsgrad}

    def _slots_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        return (*self._slots, "max_exp_avg_sq") if options["amsgrad"] else self._slots

    def _move(self, group: dict[str, Any], names: list[str], parameters: Arrays) -> tuple[list[Any], Move]:
        steps = [self.state[name].get("step", 0) + 1 for name in names]
        slots = self._slots_of(group)
        kept = [self._states(slot, names, parameters) for slot in slots[1:]]
        states = [dict(zip(slots, each, strict=True)) for each in zip(steps, *kept, strict=True)]
        update = Update(
            "adam",
            group["lr"],
            group["weight_decay"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            decoupled=self._fixed["decoupled_weight_decay"],
        )
        return states, Move(update, kept[0], kept[1], kept[2] if group["amsgrad"] else None, steps)


class AdamW(Adam):
    """Adam with decoupled weight decay: each step shrinks parameters by lr·weight_decay, whatever the gradients are.

    Parameters
    ----------
    params, lr, betas, eps, amsgrad, decay_only_matrices : as for :class:`Adam`
    weight_decay : float, default 0.01

    References
    ----------
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019, algorithm 2.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> params = {"w": np.array([1.0, 2.0])}
    >>> optim.AdamW(params, lr=0.5, weight_decay=0.1).step({"w": [0.0, 0.0]})
    >>> params["w"]
    array([0.95, 1.9 ])

    Two groups with a decay of their own, and the same in short:

    >>> w, b = np.ones((1, 2)), np.ones(2)
    >>> groups = [{"params": {"w": w}}, {"params": {"b": b}, "weight_decay": 0.0}]
    >>> optim.AdamW(groups, lr=0.5, weight_decay=0.1).step({"w": [[0.0, 0.0]], "b": [0.0, 0.0]})
    >>> w, b
    (array([[0.95, 0.95]]), array([1., 1.]))
    >>> optimizer = optim.AdamW({"w": w, "b": b}, lr=0.5, weight_decay=0.1, decay_only_matrices=True)
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.1, 0.0]
    """

    _fixed: Mapping[str, Any] = {"decoupled_weight_decay": True}

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        decay_only_matrices: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decay_only_matrices=decay_only_matrices
        )


def clip_grad_norm_(
    grads: Mapping[str, Array], max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> float:
    """Scale gradients, in place, so that the norm of all of them together is at most ``max_norm``.

    Like ``torch.nn.utils.clip_grad_norm_``, it multiplies them by min(1, max_norm / (norm + 10⁻⁶)), but it takes the
    gradients, not the parameters.

    Parameters
    ----------
    grads : mapping of str to ndarray
        The dict that a pullback returned. Its arrays are changed.
    max_norm : float
    norm_type : float, default 2.0
        p of the p-norm, above 0; with ``math.inf`` the norm is the largest magnitude.
    error_if_nonfinite : bool, default False
        Whether a norm that is infinite or NaN is an error. Otherwise the gradients become 0 or NaN, as in PyTorch.

    Returns
    -------
    float
        The norm before clipping: (Σ abs(g)ᵖ)^(1/p) over all elements of all gradients.

    Raises
    ------
    TypeError, ValueError
        An argument has a wrong type or is not above 0, or a gradient is read-only. Nothing has been changed then.
    RuntimeError
        The norm is not finite, and ``error_if_nonfinite``.

    References
    ----------
    Pascanu, Mikolov and Bengio, "On the difficulty of training recurrent neural networks", 2013, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> grads = {"weight": np.array([3.0, 0.0]), "bias": np.array([4.0])}
    >>> optim.clip_grad_norm_(grads, max_norm=1.0)
    5.0
    >>> grads["weight"].round(5), grads["bias"].round(5)
    (array([0.6, 0. ]), array([0.8]))
    """
    if not isinstance(grads, Mapping):
        raise TypeError(
            f"grads must be a mapping of names to gradients, as a pullback returns them, not {type(grads).__name__}"
        )
    for name, gradient in grads.items():
        if not _is_writable_kind(gradient):
            raise TypeError(
                f"the gradient of {name} must be an ndarray of floats, as it is changed, not {gradient!r:.80}"
            )
        if not gradient.flags.writeable:
            raise ValueError(f"the gradient of {name} is read-only, and clipping changes it")
    max_norm, power = check_number("max_norm", max_norm), check_number("norm_type", norm_type)
    if not max_norm >= 0:
        raise ValueError(f"max_norm must be at least 0, not {max_norm}")
    if not power > 0:
        raise ValueError(f"norm_type must be above 0, not {norm_type}")
    arrays = [np.asarray(gradient) for gradient in {id(each): each for each in grads.values()}.values()]
    norm = _norm(arrays, power)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm}; they cannot be clipped")
    factor = max_norm / (norm + 1e-6)
    if not factor >= 1:  # NaN too
        _core._scale(tuple(arrays), tuple(float(array.dtype.type(factor)) for array in arrays))
    return norm


def _check_apart(params: Mapping[str, Array]) -> None:
    """Raise if two parameters share memory: each step would move the same numbers twice."""
    bounds = sorted((*byte_bounds(array), name) for name, array in params.items() if array.size)
    before: list[tuple[int, str]] = []  # the ends and names of those that may reach into the next one
    for low, high, name in bounds:
        before = [(end, other) for end, other in before if end > low]
        for _, other in before:
            if np.shares_memory(params[other], params[name]):
                raise ValueError(
                    f"the parameters {other} and {name} share memory, so a step would move the same numbers twice; "
                    "register one array in both places, or a copy"
                )
        before.append((high, name))


def _is_writable_kind(array: Any) -> bool:
    """Return whether an array is an ndarray of floats, which can be changed in place."""
    is_array = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)
    return is_array and array.dtype.name in COMPUTED_IN


def _apart(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Split groups into matrices, and all else without decay."""
    found: list[Mapping[str, Any]] = []
    for group in groups:
        matrices = {name: x for name, x in group["params"].items() if np.ndim(x) >= 2}
        others = {name: x for name, x in group["params"].items() if name not in matrices}
        parts = {**group, "params": matrices}, {**group, "params": others, "weight_decay": 0.0}
        found += [part for part in parts if part["params"]]
    return found or list(groups)


def _parts(state_dict: Any, count: int) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
    """Check the layout of a state, and return its groups and the state of parameters."""
    if not isinstance(state_dict, Mapping) or set(state_dict) != {"state", "param_groups"}:
        raise ValueError(
            f"an optimiser's state must be a dict of 'state' and 'param_groups', not {state_dict!r:.80}"
        )
    groups, state = state_dict["param_groups"], state_dict["state"]
    is_list = isinstance(groups, Sequence) and all(isinstance(group, Mapping) for group in groups)
    if not is_list or len(groups) != count:
        raise ValueError(
            f"param_groups must be a list of a dict for each group, here {count}; not {groups!r:.80}"
        )
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a dict, not {state!r:.80}")
    return groups, state


def _as_saved(name: str, option: Any) -> Any:
    """Return an option, a number of any kind, in a type that a file can hold."""
    if isinstance(option, bool | np.bool_):
        return bool(option)
    if isinstance(option, Sequence | np.ndarray) and np.ndim(option):
        return tuple(check_number(name, each) for each in option)
    return check_number(name, option)


def not_negative(name: str, value: Any) -> float:
    """Check that a number is at least 0 and finite, and return it."""
    number = check_number(name, value)
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} must be at least 0 and finite, not {value}")
    return number


@np.errstate(all="ignore")
def _norm(arrays: list[Array], power: float) -> float:
    wide = [array.astype(np.float32) if array.dtype.itemsize == 2 else array for array in arrays]
    if power == 2:
        total = sum((_square_sum(array) for array in wide), 0.0)
        if 1e-30 < total < math.inf:
            return math.sqrt(total)
    largest = float(np.max([0.0, *(np.abs(array).max() for array in wide if array.size)]))  # or NaN
    if math.isinf(power) or not 0 < largest < math.inf:
        return largest
    total = sum(float(((np.abs(array).astype(np.float64) / largest) ** power).sum()) for array in wide)
    # For a tiny p the norm overflows: the power of a float64 is then inf, that of a Python float an OverflowError.
    return float(largest * np.float64(total) ** (1 / power))


def _square_sum(array: Array) -> float:
    flat = array.reshape(-1)
    if flat.size <= CHUNK:
        return float(np.dot(flat, flat))
    whole = flat.size // CHUNK * CHUNK
    chunks, rest = flat[:whole].reshape(-1, CHUNK), flat[whole:]
    return float(np.vecdot(chunks, chunks).sum(dtype=np.float64)) + float(np.dot(rest, rest))
