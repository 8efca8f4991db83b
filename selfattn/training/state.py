"""The state of a training: its settings, its place in the data, its losses, and what callbacks get of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from selfattn._check import Array
from selfattn.nn.init import Generator
from selfattn.optim import Optimizer
from selfattn.optim.lr_scheduler import LRScheduler
from selfattn.training.batches import Source
from selfattn.training.objectives import Objective


class Step(NamedTuple):
    """The argument of callbacks after each step.

    Attributes
    ----------
    epoch, step : int
        Counted from 1; ``step`` within the epoch.
    epochs, steps : int or None
        The number of epochs, and of steps of each; None if it is not known.
    loss : float
        The mean over the step's batches; for triplets of −confidence.
    average_loss : float or None
        After the last step of an epoch, the mean over its items.
    number : int
        The number of the step, counted from 1 over all epochs.
    lr : float
        The learning rate of the step.
    grad_norm : float or None
        The norm of the gradients before they were clipped, with ``max_norm``.
    validation_loss : float or None
        The mean over the validation batches, if it was computed after this step.
    score : float or None
        What the evaluator returned, if it was called after this step.
    """

    epoch: int
    epochs: int | None
    step: int
    steps: int | None
    loss: float
    average_loss: float | None
    number: int = 0
    lr: float = 0.0
    grad_norm: float | None = None
    validation_loss: float | None = None
    score: float | None = None


Callback: TypeAlias = Callable[[Step], Any]


@dataclass
class History:
    """The losses of a training.

    Attributes
    ----------
    step_losses : list of float
        The loss of each step, of all epochs, in order.
    epoch_losses : list of float
        The mean over the items of each completed epoch.
    validation_losses : list of (int, float)
        The numbers of the steps with a validation after them, and its loss.
    evaluations : list of (int, float)
        The numbers of the steps with an evaluation after them, the first 0, and its score.
    """

    step_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training after a whole step.

    Attributes
    ----------
    history : History
        The losses up to that step.
    """

    def __init__(self, history: History) -> None:
        super().__init__("training was interrupted after a whole step")
        self.history = history


@dataclass
class TrainingState:
    """A training and its place: the completed epochs, and in ``source`` the items taken from the current epoch."""

    model: Any
    objective: Objective
    source: Source
    generator: Generator
    optimizer: Optimizer
    scheduler: LRScheduler | None
    max_norm: float | None
    accumulate: int
    validation: Source | None
    validate_every: int | None
    file: Path | None
    checkpoint_every: int | None
    callbacks: list[Callback]
    epochs: int | None  # the epochs in all, also before resuming
    total_steps: int | None  # the steps in all
    evaluator: Callable[[Any], float] | None = None
    best: dict[str, Array] | None = None  # the parameters of the best evaluation
    # The properties that a checkpoint must share with the training.
    fixed: dict[str, Any] = field(default_factory=dict)
    epoch: int = 0
    total_loss: float = 0.0  # the loss of the epoch so far, summed over items
    history: History = field(default_factory=History)

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of an epoch, if it is known."""
        batches = self.source.batches
        return None if batches is None else -(-batches // self.accumulate)

    @property
    def steps_of_epoch(self) -> int:
        """The number of completed steps of this epoch."""
        return -(-self.source.done // ((self.source.batch_size or 1) * self.accumulate))

    @property
    def finished(self) -> bool:
        """Whether all epochs or all steps are completed."""
        of_steps = self.total_steps is not None and len(self.history.step_losses) >= self.total_steps
        return of_steps or (self.epochs is not None and self.epoch >= self.epochs)
