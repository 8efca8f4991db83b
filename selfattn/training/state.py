"""The state of a training: its settings, its place in the data, its losses, and what callbacks get of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from selfattn._check import Array, check_number, check_size
from selfattn._extras import import_extra
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


@dataclass(repr=False)
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

    def __repr__(self) -> str:
        last = {
            "loss": self.step_losses[-1:],
            "epoch_loss": self.epoch_losses[-1:],
            "validation_loss": [loss for _, loss in self.validation_losses[-1:]],
            "score": [score for _, score in self.evaluations[-1:]],
        }
        shown = [f"{name}={number:.4g}" for name, numbers in last.items() for number in numbers]
        return f"{type(self).__name__}({', '.join([f'{len(self.step_losses)} steps', *shown])})"

    def to_dict(self) -> dict[str, list[Any]]:
        """Return copies of the lists by name, as JSON and ``pandas.Series`` take them."""
        return {each.name: list(getattr(self, each.name)) for each in fields(self)}

    def plot(self, ax: Any = None) -> Any:
        """Plot the losses over the steps, with matplotlib of the extra ``viz``.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            By default a new one.

        Returns
        -------
        matplotlib.axes.Axes
        """
        if ax is None:
            ax = import_extra("matplotlib.pyplot", "viz").subplots()[1]
        ax.plot(range(1, len(self.step_losses) + 1), self.step_losses, label="training")
        if self.validation_losses:
            ax.plot(*zip(*self.validation_losses, strict=True), marker="o", label="validation")
        ax.set(xlabel="step", ylabel="loss")
        ax.legend()
        return ax


class EarlyStopping:
    """A callback that ends a training which no longer gets better.

    It looks at the score if there is an evaluator, else at the loss of validation.

    Parameters
    ----------
    patience : int
        The training ends after this number of evaluations in a row without a better one.
    min_delta : float, default 0.0
        What a better one has to be better by.

    Notes
    -----
    Each training begins anew, and one that continues from a checkpoint counts the evaluations before it. With an
    evaluator the parameters are at the end those of the best one; with validation alone the last ones.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn, training
    >>> data = [(np.ones(1, np.float32), np.ones(1, np.float32))]
    >>> history = training.fit(
    ...     nn.Linear(1, 1, rng=0), data, nn.MSELoss(), epochs=1000, lr=0.1, batch_size=1, log_every=None,
    ...     validation=data, callbacks=[training.EarlyStopping(patience=3)],
    ... )
    >>> len(history.step_losses) < 100
    True
    """

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        self.patience = check_size("patience", patience)
        self.min_delta = check_number("min_delta", min_delta)
        if not self.min_delta >= 0:
            raise ValueError(f"min_delta must be at least 0, not {min_delta}")
        self.begin(History())

    def begin(self, history: History) -> None:
        """Begin a training with a history, which is not empty if it continues another."""
        self.best, self.waited = -math.inf, 0
        for _, number in history.evaluations or [(n, -loss) for n, loss in history.validation_losses]:
            self._see(number)

    def _see(self, number: float) -> None:
        if number > self.best + (self.min_delta if math.isfinite(self.best) else 0):
            self.best, self.waited = number, 0
        else:
            self.waited += 1

    def __call__(self, step: Step) -> bool:
        """Return whether the training should end."""
        if step.score is not None:
            self._see(step.score)
        elif step.validation_loss is not None:
            self._see(-step.validation_loss)
        return self.waited >= self.patience


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
    total_loss: float = 0.0  # the loss of the epoch so far, summed over what its mean counts
    total_count: float = 0.0
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
