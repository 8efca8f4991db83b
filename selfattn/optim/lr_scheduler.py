"""Schedules of the learning rate, as ``torch.optim.lr_scheduler`` computes them, to the bit.

A scheduler sets the optimiser's learning rate when it is made, and again at each :meth:`LRScheduler.step`, which is
called after each step of the optimiser, or after each epoch if its numbers count epochs.
"""

from __future__ import annotations

import bisect
import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import numpy as np

from selfattn._check import check_number, check_size, one_of, warn
from selfattn.optim.optimizers import Optimizer, not_negative

__all__ = [
    "CosineAnnealingLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "OneCycleLR",
    "SequentialLR",
    "get_cosine_with_min_lr_schedule_with_warmup",
]


class LRScheduler:
    """The base of the schedulers. A subclass computes the learning rate of each step.

    Parameters
    ----------
    optimizer : Optimizer
        The schedule begins with its learning rate, and changes it.
    last_epoch : int, default -1
        The number of the step before the first. Numbers other than -1 need an optimizer that had a scheduler before;
        to continue a training, load the ``state_dict`` instead.

    Attributes
    ----------
    last_epoch : int
        The number of steps so far.
    base_lrs : list of float
        The learning rate at the beginning, of each group of parameters.
    """

    _saved: tuple[str, ...] = ("base_lrs", "last_epoch", "_step_count", "_last_lr")
    _schedulers: Sequence[LRScheduler] = ()  # the schedules that it calls

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        self.optimizer = _checked(optimizer)
        self.last_epoch = check_size("last_epoch", last_epoch, -1)
        groups = self.optimizer.param_groups
        if any("initial_lr" not in group for group in groups):
            if self.last_epoch != -1:
                raise ValueError(
                    f"last_epoch={last_epoch} is for an optimizer that had a scheduler before; this one had none. "
                    "To continue a training, call load_state_dict with the scheduler's state_dict"
                )
            for group in groups:
                group.setdefault("initial_lr", group["lr"])
        self.base_lrs: list[float] = [group["initial_lr"] for group in groups]
        self._begin()

    def _begin(self) -> None:
        """Set the learning rates of the first step."""
        self._step_count = 1
        self.last_epoch += 1
        self._set(self._first)

    def _set(self, rate: Callable[[int, float], float]) -> None:
        """Set each group's learning rate, a function of the group's number and its present rate."""
        groups = self.optimizer.param_groups
        self._last_lr = [not_negative("lr", rate(n, group["lr"])) for n, group in enumerate(groups)]
        for group, lr in zip(groups, self._last_lr, strict=True):
            group["lr"] = lr

    def _first(self, n: int, lr: float) -> float:
        """Return group n's learning rate of the first step; by default the present one, ``lr``."""
        return lr

    def _next(self, n: int, lr: float) -> float:
        """Return group n's learning rate after ``last_epoch`` steps; ``lr`` is the previous one."""
        raise NotImplementedError

    def _restarted(self, n: int, lr: float) -> float:
        """Return group n's learning rate of the first step if another schedule came before."""
        return self._first(n, lr)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates that were set last, of each group of parameters."""
        return list(self._last_lr)

    def step(self) -> None:
        """Set the next learning rate. Call it after ``optimizer.step``."""
        if self._step_count == 1 and not self.optimizer.stepped:
            so = "so the first learning rate is never used; call optimizer.step(grads) first"
            warn(f"scheduler.step() was called before optimizer.step(), {so}")
        self._step_count += 1
        self.last_epoch += 1
        self._set(self._next)

    def state_dict(self) -> dict[str, Any]:
        """Return all numbers that the schedule depends on, except for the optimiser's state and functions.

        Returns
        -------
        dict
            Its values are numbers, lists and dicts.
        """
        state = {name: _copied(getattr(self, name)) for name in self._saved}
        parts = [each.state_dict() for each in self._schedulers]
        return {**state, "_schedulers": parts} if parts else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the state that :meth:`state_dict` returned; the optimiser's state has the learning rate.

        Parameters
        ----------
        state_dict : mapping

        Raises
        ------
        ValueError
            It is the state of another kind of scheduler, or of one with other schedulers. Nothing is changed then.
        """
        self._check(state_dict)
        for name in self._saved:
            setattr(self, name, _copied(state_dict[name]))
        for scheduler, state in zip(self._schedulers, state_dict.get("_schedulers", ()), strict=True):
            scheduler.load_state_dict(state)

    def _check(self, state: Any) -> None:
        kind, count = type(self).__name__, len(self._schedulers)
        wanted = sorted([*self._saved, "_schedulers"] if count else self._saved)
        if not isinstance(state, Mapping) or set(state) != set(wanted):
            found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"the state of a {kind} must have {wanted}, not {found}")
        parts = state.get("_schedulers", [])
        if not isinstance(parts, list) or len(parts) != count:
            raise ValueError(f"the state of this {kind} must have the states of {count} schedulers")
        for name in self._saved:
            mine = getattr(self, name)
            if not _can_replace(state[name], mine):
                raise ValueError(
                    f"{name} in the state of a {kind} must be like {mine!r}, not {state[name]!r:.80}"
                )
        for scheduler, part in zip(self._schedulers, parts, strict=True):
            scheduler._check(part)


class LambdaLR(LRScheduler):
    """The initial learning rate times a function of the number of steps.

    Parameters
    ----------
    optimizer, last_epoch : as for :class:`LRScheduler`
    lr_lambda : callable, or list of callable
        ``lr_lambda(step)`` is the factor, of the steps 0, 1, 2 … A list has a function for each group of parameters.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> optimizer = optim.SGD({"w": np.zeros(1)}, lr=0.5)
    >>> scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    >>> optimizer.step({"w": [1.0]})
    >>> scheduler.step()
    >>> optimizer.lr
    0.25
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_lambda: Callable[[int], float] | Sequence[Callable[[int], float]],
        last_epoch: int = -1,
    ) -> None:
        given: Any = lr_lambda
        groups = len(_checked(optimizer).param_groups)
        functions = list(given) if isinstance(given, list | tuple) else [given] * groups
        if len(functions) != groups or not all(map(callable, functions)):
            raise TypeError(
                "lr_lambda must be a function, or a list of one for each group of parameters, here "
                f"{groups}; not {lr_lambda!r:.80}"
            )
        self.lr_lambdas: list[Callable[[int], float]] = functions
        super().__init__(optimizer, last_epoch)

    def _next(self, n: int, lr: float) -> float:
        factor: Any = self.lr_lambdas[n](self.last_epoch)
        if isinstance(factor, bool | np.bool_):  # of a comparison
            factor = float(factor)
        return self.base_lrs[n] * check_number("what lr_lambda returns", factor)

    _first = _next


class LinearLR(LRScheduler):
    """The learning rate times a factor that changes from one number to another in equal steps, then stays constant.

    Parameters
    ----------
    optimizer, last_epoch : as for :class:`LRScheduler`
    start_factor : float, default 1/3
        The factor of the learning rate at first, above 0 and at most 1.
    end_factor : float, default 1.0
        The factor after ``total_iters`` steps, from 0 to 1.
    total_iters : int, default 5

    Notes
    -----
    Each learning rate is computed from the previous one, so a change from outside persists, as in PyTorch.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> optimizer = optim.SGD({"w": np.zeros(1)}, lr=0.4)
    >>> scheduler = optim.lr_scheduler.LinearLR(optimizer, start_factor=0.5, total_iters=2)
    >>> rates = [optimizer.lr]
    >>> for _ in range(3):
    ...     optimizer.step({"w": [1.0]})
    ...     scheduler.step()
    ...     rates.append(round(optimizer.lr, 4))
    >>> rates
    [0.2, 0.3, 0.4, 0.4]
    """

    _saved = (*LRScheduler._saved, "start_factor", "end_factor", "total_iters")

    def __init__(
        self,
        optimizer: Optimizer,
        start_factor: float = 1 / 3,
        end_factor: float = 1.0,
        total_iters: int = 5,
        last_epoch: int = -1,
    ) -> None:
        self.start_factor = _checked_number(
            "start_factor", start_factor, lambda x: 0 < x <= 1, "above 0 and at most 1"
        )
        self.end_factor = _checked_number("end_factor", end_factor, lambda x: 0 <= x <= 1, "from 0 to 1")
        self.total_iters = check_size("total_iters", total_iters)
        super().__init__(optimizer, last_epoch)

    def _first(self, n: int, lr: float) -> float:
        return lr * (self.start_factor if self.last_epoch == 0 else 1)

    def _next(self, n: int, lr: float) -> float:
        if self.last_epoch > self.total_iters:
            return lr
        rise, done = self.end_factor - self.start_factor, self.last_epoch - 1
        return lr * (1.0 + rise / (self.total_iters * self.start_factor + done * rise))

    def _restarted(self, n: int, lr: float) -> float:
        return self.base_lrs[n] * self.start_factor


class CosineAnnealingLR(LRScheduler):
    """Half a cosine from the initial learning rate down to ``eta_min`` in ``T_max`` steps; then up again.

    Parameters
    ----------
    optimizer, last_epoch : as for :class:`LRScheduler`
    T_max : int
        The number of steps to the lowest learning rate.
    eta_min : float, default 0.0
        The lowest learning rate.

    Notes
    -----
    Each learning rate is computed from the previous one, so a change from outside persists, as in PyTorch.

    References
    ----------
    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, equation 5, without restarts.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> optimizer = optim.SGD({"w": np.zeros(1)}, lr=0.4)
    >>> scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2, eta_min=0.1)
    >>> rates = [optimizer.lr]
    >>> for _ in range(3):
    ...     optimizer.step({"w": [1.0]})
    ...     scheduler.step()
    ...     rates.append(round(optimizer.lr, 4))
    >>> rates
    [0.4, 0.25, 0.1, 0.25]
    """

    _saved = (*LRScheduler._saved, "T_max", "eta_min")

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, last_epoch: int = -1) -> None:
        self.T_max = check_size("T_max", T_max)
        self.eta_min = not_negative("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def _next(self, n: int, lr: float) -> float:
        step, length = self.last_epoch, self.T_max
        if (step - 1 - length) % (2 * length) == 0:  # after the lowest rate the ratio divides by 0
            return lr + (self.base_lrs[n] - self.eta_min) * (1 - math.cos(math.pi / length)) / 2
        ratio = (1 + math.cos(math.pi * step / length)) / (1 + math.cos(math.pi * (step - 1) / length))
        return ratio * (lr - self.eta_min) + self.eta_min

    def _restarted(self, n: int, lr: float) -> float:
        return self.eta_min + (self.base_lrs[n] - self.eta_min) * 2.0 / 2


class OneCycleLR(LRScheduler):
    """The learning rate rises to ``max_lr`` and falls to almost 0, while momentum falls and rises.

    Parameters
    ----------
    optimizer, last_epoch : as for :class:`LRScheduler`
    max_lr : float, or list of float
        A list has a number for each group of parameters.
    total_steps : int, optional
        The number of steps; a further step is an error.
    epochs, steps_per_epoch : int, optional
        In place of ``total_steps``, their product.
    pct_start : float, default 0.3
        The share of the steps in which the learning rate rises.
    anneal_strategy : {"cos", "linear"}, default "cos"
    cycle_momentum : bool, default True
        Whether momentum, or the first of ``betas``, changes between ``max_momentum`` and ``base_momentum``, falling
        while the learning rate rises.
    base_momentum : float, default 0.85
    max_momentum : float, default 0.95
    div_factor : float, default 25.0
        The first learning rate is max_lr / div_factor.
    final_div_factor : float, default 1e4
        The last one is max_lr / (div_factor·final_div_factor).
    three_phase : bool, default False
        First go down to the initial learning rate, as fast as up.

    References
    ----------
    Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates", 2019,
    section 4.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import optim
    >>> optimizer = optim.Adam({"w": np.zeros(1)})
    >>> scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=5, pct_start=0.4)
    >>> rates = [round(optimizer.lr, 4)]
    >>> for _ in range(4):
    ...     optimizer.step({"w": [1.0]})
    ...     scheduler.step()
    ...     rates.append(round(optimizer.lr, 4))
    >>> rates
    [0.02, 0.5, 0.375, 0.125, 0.0]
    """

    _saved = (*LRScheduler._saved, "total_steps", "anneal_strategy", "cycle_momentum", "_phases")

    def __init__(
        self,
        optimizer: Optimizer,
        max_lr: float | Sequence[float],
        total_steps: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        pct_start: float = 0.3,
        anneal_strategy: Literal["cos", "linear"] = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
        three_phase: bool = False,
        last_epoch: int = -1,
    ) -> None:
        _checked(optimizer)
        if total_steps is not None:
            self.total_steps = check_size("total_steps", total_steps)
        elif epochs is None or steps_per_epoch is None:
            raise ValueError("OneCycleLR needs total_steps, or epochs and steps_per_epoch")
        else:
            self.total_steps = check_size("epochs", epochs) * check_size("steps_per_epoch", steps_per_epoch)
        share = _checked_number("pct_start", pct_start, lambda x: 0 <= x <= 1, "from 0 to 1")
        self.anneal_strategy = one_of("anneal_strategy", anneal_strategy, ("cos", "linear"))
        self.cycle_momentum = bool(cycle_momentum)
        groups = optimizer.param_groups
        self._momentum = "betas" if "betas" in groups[0] else "momentum"
        if self.cycle_momentum and self._momentum not in groups[0]:
            raise ValueError("the optimizer has neither betas nor momentum; pass cycle_momentum=False")
        below_1: Any = (lambda x: 0 <= x < 1, "at least 0 and below 1")
        high = _checked_number("max_momentum", max_momentum, *below_1)
        low = _checked_number("base_momentum", base_momentum, *below_1)
        tops = list(max_lr) if isinstance(max_lr, Sequence | np.ndarray) else [max_lr] * len(groups)
        if len(tops) != len(groups):
            raise ValueError(f"max_lr has {len(tops)} numbers for {len(groups)} groups of parameters")
        factors = check_number("div_factor", div_factor), check_number("final_div_factor", final_div_factor)
        if not all(0 < factor < math.inf for factor in factors):
            raise ValueError(f"div_factor and final_div_factor must be above 0 and finite, not {factors}")
        # Of each group, one after the other: the last step of each phase, and the first and last learning rate and
        # momentum.
        self._phases: list[list[float]] = []
        rise, ends = float(share * self.total_steps) - 1, self.total_steps - 1
        for group, top in zip(groups, (not_negative("max_lr", top) for top in tops), strict=True):
            start = top / factors[0]
            end = start / factors[1]
            if last_epoch == -1:
                group["initial_lr"] = start
            down = [[2 * share * self.total_steps - 2, top, start, low, high], [ends, start, end, high, high]]
            last = down if three_phase else [[ends, top, end, low, high]]
            self._phases += [[rise, start, top, high, low], *last]
        super().__init__(optimizer, last_epoch)

    def _next(self, n: int, lr: float) -> float:
        if self.last_epoch > self.total_steps:
            raise ValueError(f"step {self.last_epoch} is beyond total_steps={self.total_steps}")
        before, count = 0.0, len(self._phases) // len(self.base_lrs)
        phases = self._phases[n * count : (n + 1) * count]
        for phase in phases[:-1]:
            if self.last_epoch <= phase[0]:
                break
            before = phase[0]
        else:
            phase = phases[-1]
        end, lr_from, lr_to, momentum_from, momentum_to = phase
        share = (self.last_epoch - before) / (end - before) if end > before else 1.0
        if self.cycle_momentum:
            self._set_momentum(n, self._between(momentum_from, momentum_to, share))
        return max(0.0, self._between(lr_from, lr_to, share))  # a line is below 0 after the last step

    _first = _next

    def _between(self, start: float, end: float, share: float) -> float:
        if self.anneal_strategy == "linear":
            return (end - start) * share + start
        return end + (start - end) / 2.0 * (math.cos(math.pi * share) + 1)

    def _set_momentum(self, n: int, momentum: float) -> None:
        group = self.optimizer.param_groups[n]
        if self._momentum == "betas":
            group["betas"] = (momentum, group["betas"][1])
        else:
            group["momentum"] = momentum


class SequentialLR(LRScheduler):
    """Several schedules, one after the other, such as a linear warm-up and a cosine.

    Parameters
    ----------
    optimizer : Optimizer
    schedulers : list of LRScheduler
        Schedulers of the same optimizer, made in this order; none is a SequentialLR.
    milestones : list of int
        The step at which each schedule but the first begins, in order.
    last_epoch : int, default -1
        The number of the step before the first.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.optim import SGD, lr_scheduler
    >>> optimizer = SGD({"w": np.zeros(1)}, lr=0.4)
    >>> parts = [lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, 2)]
    >>> scheduler = lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    >>> rates = [optimizer.lr]
    >>> for _ in range(4):
    ...     optimizer.step({"w": [1.0]})
    ...     scheduler.step()
    ...     rates.append(round(optimizer.lr, 4))
    >>> rates
    [0.2, 0.3, 0.4, 0.2, 0.0]
    """

    _saved = ("last_epoch", "_last_lr", "milestones")

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Iterable[LRScheduler],
        milestones: Iterable[int],
        last_epoch: int = -1,
    ) -> None:
        self.optimizer = _checked(optimizer)
        if not isinstance(schedulers, Iterable) or not isinstance(milestones, Iterable):
            raise TypeError(
                f"schedulers and milestones must be lists, not {schedulers!r:.80} and {milestones!r:.80}"
            )
        schedulers, milestones = list(schedulers), list(milestones)
        if not schedulers:
            raise ValueError("schedulers is empty; at least one is needed")
        for i, scheduler in enumerate(schedulers):
            if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, SequentialLR):
                kind = type(scheduler).__name__
                raise TypeError(f"schedulers[{i}] must be a scheduler other than a SequentialLR, not {kind}")
            if scheduler.optimizer is not optimizer:
                raise ValueError(f"schedulers[{i}] is of another optimizer")
        if len(schedulers) != len(milestones) + 1:
            raise ValueError(
                f"{len(schedulers)} schedulers need {len(schedulers) - 1} milestones, not {len(milestones)}"
            )
        self._schedulers = schedulers
        self.milestones = [check_size("each of milestones", milestone) for milestone in milestones]
        if sorted(set(self.milestones)) != self.milestones:
            raise ValueError(f"milestones must rise, not be {milestones}")
        self.last_epoch = check_size("last_epoch", last_epoch, -1) + 1
        # Each scheduler set a learning rate when it was made; only the first one's counts.
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"]
        for scheduler in schedulers:
            scheduler.last_epoch -= 1
        schedulers[0]._begin()
        self._last_lr = self._schedulers[0].get_last_lr()

    def __copy__(self) -> Self:
        """Return a copy for the same optimiser with its own count of steps."""
        made = object.__new__(type(self))
        vars(made).update(vars(self), _schedulers=[copy.copy(each) for each in self._schedulers])
        return made

    def step(self) -> None:
        """Set the next learning rate. Call it after ``optimizer.step``."""
        self.last_epoch += 1
        index = bisect.bisect_right(self.milestones, self.last_epoch)
        scheduler = self._schedulers[index]
        if index and self.milestones[index - 1] == self.last_epoch:
            scheduler.last_epoch = 0
            scheduler._set(scheduler._restarted)
        else:
            scheduler.step()
        self._last_lr = scheduler.get_last_lr()


def get_cosine_with_min_lr_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> LambdaLR:
    """Make a schedule of a linear warm-up from 0 and half a cosine down to a floor, as Transformers' function does.

    Parameters
    ----------
    optimizer : Optimizer
    num_warmup_steps, num_training_steps : int
        The first counts in the second. Later steps have the last learning rate; Transformers' rises again.
    num_cycles : float, default 0.5
        Of the cosine; by default half a one.
    last_epoch : int, default -1
    min_lr : float, optional
        The floor.
    min_lr_rate : float, optional
        In place of ``min_lr``: its share of the learning rate. Groups of parameters of other rates have other floors.

    Returns
    -------
    LambdaLR

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn.optim import AdamW, lr_scheduler
    >>> optimizer = AdamW({"w": np.zeros(1)}, lr=0.4)
    >>> scheduler = lr_scheduler.get_cosine_with_min_lr_schedule_with_warmup(optimizer, 2, 6, min_lr=0.1)
    >>> rates = [optimizer.lr]
    >>> for _ in range(7):
    ...     optimizer.step({"w": [1.0]})
    ...     scheduler.step()
    ...     rates.append(round(optimizer.lr, 3))
    >>> rates
    [0.0, 0.2, 0.4, 0.356, 0.25, 0.144, 0.1, 0.1]
    """
    warm = check_size("num_warmup_steps", num_warmup_steps, 0)
    total = check_size("num_training_steps", num_training_steps, warm)
    cycles = check_number("num_cycles", num_cycles)
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError("give the floor as one of min_lr and min_lr_rate")
    given: Any = min_lr if min_lr_rate is None else min_lr_rate
    floor = not_negative("min_lr" if min_lr_rate is None else "min_lr_rate", given)

    def factor(share: float) -> Callable[[int], float]:
        def at(step: int) -> float:
            if step < warm:
                return step / warm
            progress = min(1.0, (step - warm) / max(1, total - warm))
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * cycles * 2.0 * progress)) * (1 - share) + share)

        return at

    groups = _checked(optimizer).param_groups
    rates = [group.get("initial_lr", group["lr"]) for group in groups]
    shares = [floor if min_lr is None else (floor / rate if rate else 0.0) for rate in rates]
    return LambdaLR(optimizer, [factor(share) for share in shares], last_epoch)


def _checked(optimizer: Any) -> Optimizer:
    # An optimiser of selfattn.tape has the same groups, of tensors.
    if not isinstance(getattr(optimizer, "param_groups", None), list) or not hasattr(optimizer, "stepped"):
        raise TypeError(f"optimizer must be one of selfattn.optim, not {type(optimizer).__name__}")
    found: Optimizer = optimizer
    return found


def _checked_number(name: str, value: Any, fits: Callable[[float], bool], words: str) -> float:
    """Check the bounds of a number, and return it."""
    number = check_number(name, value)
    if not fits(number):
        raise ValueError(f"{name} must be {words}, not {value}")
    return number


def _copied(value: Any) -> Any:
    """Copy nested lists of numbers."""
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _can_replace(value: Any, example: Any) -> bool:
    """Return whether a saved value can replace a value: both are numbers, or lists of the same length."""
    if isinstance(example, list):
        return (
            isinstance(value, list) and len(value) == len(example) and all(map(_can_replace, value, example))
        )
    if isinstance(example, str | bool):
        return type(value) is type(example)
    return isinstance(value, int | float) and not isinstance(value, bool)
