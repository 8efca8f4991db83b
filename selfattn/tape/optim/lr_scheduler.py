"""Schedules of the learning rate, as ``torch.optim.lr_scheduler``: those of selfattn.optim, and those with a get_lr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from selfattn.optim import lr_scheduler as arrays
from selfattn.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR
from selfattn.tape.missing import missing

__all__ = [
    "CosineAnnealingLR",
    "ExponentialLR",
    "LRScheduler",
    "LambdaLR",
    "LinearLR",
    "OneCycleLR",
    "SequentialLR",
    "StepLR",
]


class LRScheduler(arrays.LRScheduler):
    """The base of schedules whose ``get_lr`` returns the learning rates, as those of PyTorch have it."""

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group after ``last_epoch`` steps; a subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} does not define get_lr")

    def _set(self, rate: Callable[[int, float], float]) -> None:
        rates = self.get_lr()
        super()._set(lambda n, lr: rates[n])


_LRScheduler = LRScheduler  # the name in texts before PyTorch 2


class StepLR(LRScheduler):
    """The learning rate times ``gamma`` after each ``step_size`` steps.

    Parameters
    ----------
    optimizer : Optimizer
    step_size : int
    gamma : float, default 0.1
    last_epoch : int, default -1
    """

    def __init__(self, optimizer: Any, step_size: int, gamma: float = 0.1, last_epoch: int = -1) -> None:
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the learning rate of each group."""
        now = self.last_epoch > 0 and self.last_epoch % self.step_size == 0
        return [group["lr"] * (self.gamma if now else 1) for group in self.optimizer.param_groups]


class ExponentialLR(StepLR):
    """The learning rate times ``gamma`` after each step.

    Parameters
    ----------
    optimizer : Optimizer
    gamma : float
    last_epoch : int, default -1
    """

    def __init__(self, optimizer: Any, gamma: float, last_epoch: int = -1) -> None:
        super().__init__(optimizer, 1, gamma, last_epoch)


def __getattr__(name: str) -> Any:
    raise missing("torch.optim.lr_scheduler", name)
