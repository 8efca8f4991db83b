"""The training loop: batches in order, steps of the optimiser, when to validate and to save, and Ctrl-C.

What a checkpoint holds is decided here; `checkpoint` writes and reads the file, `batches` knows the place in the data,
`objectives` computes losses and gradients, `progress` shows how far it is, and `fitting` checks what users pass.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from selfattn._check import Array
from selfattn._interrupt import DelayedInterrupt
from selfattn.functional._products import widened
from selfattn.nn import init
from selfattn.nn.module import Gradients, add_gradients
from selfattn.optim import Optimizer, clip_grad_norm_
from selfattn.optim.lr_scheduler import LRScheduler
from selfattn.training import checkpoint as checkpoints
from selfattn.training.batches import Source
from selfattn.training.objectives import Objective, evaluating, scaled
from selfattn.training.progress import Progress


class Task(Protocol):
    """What can be trained: :class:`selfattn.nn.ProxyTask`, or a class of one's own with these two methods."""

    def parameters(self) -> dict[str, Array]:
        """Return the live arrays by name."""

    def vjp(self, main: Any, similar: Any, non_similar: Any) -> tuple[Any, Callable[..., Gradients]]:
        """Compute the confidence and its pullback, ``d_confidence -> grads``.

        Parameters
        ----------
        main, similar, non_similar : object
            The parts of one triplet; of a batch of n > 1, three lists of n.

        Returns
        -------
        confidence : float, or array_like of shape (n,)
        pullback : callable
            ``grads = pullback(d_confidence)``, a dict keyed like :meth:`parameters`. ``d_confidence`` is one
            number: −1, or −1/n for all of a batch.
        """


class Step(NamedTuple):
    """What a callback is told after each step.

    Attributes
    ----------
    epoch, step : int
        Counted from 1; ``step`` within the epoch.
    epochs, steps : int or None
        How many there are, if that is known: epochs, and steps of each.
    loss : float
        Of the step's batches, the mean; of triplets that of −confidence.
    average_loss : float or None
        After the last step of an epoch, the mean over its items.
    number : int
        Of the step, counted from 1 over all epochs.
    lr : float
        The learning rate of the step.
    grad_norm : float or None
        The norm of the gradients before they were clipped, with ``max_norm``.
    validation_loss : float or None
        The mean over the validation batches, if it was computed after this step.
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


Callback: TypeAlias = Callable[[Step], Any]


@dataclass
class History:
    """What came of a training.

    Attributes
    ----------
    step_losses : list of float
        The loss of each step, of all epochs, in order.
    epoch_losses : list of float
        The mean over the items of each epoch that was completed.
    validation_losses : list of (int, float)
        The numbers of the steps after which there was a validation, and its loss.
    """

    step_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)
    validation_losses: list[tuple[int, float]] = field(default_factory=list)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a training after a whole step.

    Attributes
    ----------
    history : History
        Until then.
    """

    def __init__(self, history: History) -> None:
        super().__init__("training was interrupted after a whole step")
        self.history = history


@dataclass
class Training:
    """A training and its place: how many epochs are over, and how many items of the next one, which ``source`` counts."""

    model: Any
    objective: Objective
    source: Source
    generator: init.Generator
    optimizer: Optimizer
    scheduler: LRScheduler | None
    max_norm: float | None
    accumulate: int
    validation: Source | None
    validate_every: int | None
    file: Path | None
    callbacks: list[Callback]
    fixed: dict[str, Any]  # what has to be the same for a place in the training to mean anything
    epoch: int = 0
    total_loss: float = 0.0  # of the epoch, over items
    history: History = field(default_factory=History)

    @property
    def steps(self) -> int | None:
        """The number of steps of an epoch, if it is known."""
        batches = self.source.batches
        return None if batches is None else -(-batches // self.accumulate)

    @property
    def step_of_epoch(self) -> int:
        """How many steps of the epoch are done."""
        return -(-self.source.done // ((self.source.batch_size or 1) * self.accumulate))

    def over(self, epochs: int | None, steps: int | None) -> bool:
        """Tell whether there is nothing left to do."""
        done = steps is not None and len(self.history.step_losses) >= steps
        return done or (epochs is not None and self.epoch >= epochs)

    def run(
        self, epochs: int | None, steps: int | None, shown: Progress, checkpoint_every: int | None
    ) -> None:
        """Go on until these epochs or steps are done, a callback ends the training, or Ctrl-C does.

        Raises
        ------
        Interrupted
            Ctrl-C did.
        """
        # The loss is checked, and shows overflow.
        with DelayedInterrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            while not self.over(epochs, steps):
                told = self.step(epochs)
                ends = told.average_loss is not None or self.over(epochs, steps)
                told = self.validated(told, ends)
                stop = [_is_true(callback(told)) for callback in self.callbacks]
                shown.step(told)
                stopping = interrupt.requested or any(stop)
                due = checkpoint_every is not None and told.step % checkpoint_every == 0
                if self.file is not None and (ends or stopping or due):
                    self.save()
                if stopping:
                    break
        if interrupt.requested:
            raise Interrupted(self.history)

    def step(self, epochs: int | None) -> Step:
        """Move the parameters along the gradient of one batch, or of some."""
        self.source.begin(self.generator)
        step = self.step_of_epoch + 1
        loss, grads, items = self._gradients()
        norm = None if self.max_norm is None else clip_grad_norm_(grads, self.max_norm)
        for name, number in {"loss": loss, "norm of the gradients": norm}.items():
            if number is not None and not math.isfinite(number):
                raise FloatingPointError(
                    f"the {name} is {number} in epoch {self.epoch + 1}, step {step}, with a learning rate of {self.optimizer.lr}; "
                    "the parameters are those before this step"
                )
        lr = self.optimizer.lr
        self.optimizer.step(grads)
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.step_losses.append(loss)
        self.total_loss += loss * items
        average = self.total_loss / self.source.done if self.source.ended else None
        number = len(self.history.step_losses)
        told = Step(self.epoch + 1, epochs, step, self.steps, loss, average, number, lr, norm)
        if average is not None:
            self.history.epoch_losses.append(average)
            self.epoch, self.total_loss = self.epoch + 1, 0.0
            self.source.reset()
        return told

    def _gradients(self) -> tuple[float, Gradients, int]:
        """Return the mean loss of the next batches, its gradients, and of how many items it is."""
        batch = self.source.take(self.generator)
        loss, grads = self.objective.gradients(batch.content)
        if self.accumulate > 1:  # a sum of float16 may be beyond it
            grads = {name: widened(array) for name, array in grads.items()}
        items, count = batch.items, 1
        total = loss * items
        while count < self.accumulate and not self.source.ended:
            batch = self.source.take(self.generator)
            more, more_grads = self.objective.gradients(batch.content)
            add_gradients(grads, more_grads)
            items, count, total = items + batch.items, count + 1, total + more * batch.items
        if count > 1:
            loss, grads = total / items, scaled(grads, 1 / count)
        elif self.max_norm is not None:  # clipping is in place, and the arrays may be the user's
            grads = {name: array.copy() for name, array in grads.items()}
        return loss, grads, items

    def validated(self, told: Step, ends: bool) -> Step:
        """Compute the loss of the validation batches, if it is time."""
        due = ends if self.validate_every is None else told.number % self.validate_every == 0
        if self.validation is None or not due:
            return told
        total, items = 0.0, 0
        with evaluating(self.model):
            while not (items and self.validation.ended):
                batch = self.validation.take(self.generator)
                total += self.objective.value(batch.content) * batch.items
                items += batch.items
        self.validation.reset()
        self.history.validation_losses.append((told.number, total / items))
        return told._replace(validation_loss=total / items)

    # -------------------------------------------------------------------------------------------- checkpoints

    def save(self) -> None:
        """Write the checkpoint."""
        assert self.file is not None
        checkpoints.save(self.file, self._state())

    def check_saving(self) -> None:
        """Find out before the first step whether a checkpoint can hold the state."""
        checkpoints.parts(self._state())

    def _state(self) -> dict[str, Any]:
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler.state_dict()}
        return {
            "fixed": self.fixed,
            "parameters": self.model.parameters(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [
                checkpoints.generator_state(each)
                for each in checkpoints.generators(self.generator, self.model)
            ],
            "place": [self.epoch, self.source.done, self.source.order, self.total_loss],
            "step_losses": np.array(self.history.step_losses, np.float64),
            "epoch_losses": np.array(self.history.epoch_losses, np.float64),
            "validation_losses": np.array(self.history.validation_losses, np.float64).reshape(-1, 2),
            **scheduler,
        }

    def restore(self) -> None:
        """Take over what a checkpoint holds, once all of it has been found to fit."""
        assert self.file is not None
        state = checkpoints.load(self.file)
        try:
            _compare("", self.fixed, state["fixed"])
            parameters = self.model.parameters()
            saved = state["parameters"]
            _compare("shapes of ", _shapes(parameters), _shapes(saved))
            epoch, done, order, total_loss = state["place"]
            if type(epoch) is not int or epoch < 0 or type(total_loss) is not float:
                raise ValueError(f"its place is epoch {epoch!r} with a loss of {total_loss!r}")
            generators = checkpoints.generators(self.generator, self.model)
            if len(state["generators"]) != len(generators):
                raise ValueError(
                    f"it has {len(state['generators'])} generators, this training {len(generators)}"
                )
            history = _history(state)
            for generator, generator_state in zip(generators, state["generators"], strict=True):
                checkpoints.set_generator_state(copy.deepcopy(generator), generator_state)  # raises
            self.source.restore(done, order)
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{error!r}" if isinstance(error, KeyError | AttributeError) else str(error)
            raise ValueError(f"{self.file} does not fit this training: {reason}") from error
        for generator, generator_state in zip(generators, state["generators"], strict=True):
            checkpoints.set_generator_state(generator, generator_state)
        for name, array in parameters.items():
            array[...] = saved[name]
        self.epoch, self.total_loss, self.history = epoch, total_loss, history


def _is_true(answer: Any) -> bool:
    """Tell True from what a callback happens to return, such as 1 or an array."""
    return isinstance(answer, bool | np.bool_) and bool(answer)


def _history(state: Mapping[str, Any]) -> History:
    steps, epochs = (_losses(state[name], 1) for name in ("step_losses", "epoch_losses"))
    pairs = _losses(state["validation_losses"], 2) if "validation_losses" in state else []
    return History(steps, epochs, [(int(n), loss) for n, loss in pairs])


def _losses(saved: Any, ndim: int) -> list[Any]:
    if not isinstance(saved, np.ndarray) or (saved.ndim, saved.dtype) != (ndim, np.float64):
        raise ValueError(f"it has losses of another shape or dtype: {saved!r:.80}")
    return list(saved.tolist())


def _compare(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{what}{name}: {found.get(name)} in the checkpoint, {expected.get(name)} in this training"
            )


def _shapes(arrays: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{array.shape} of {array.dtype}" for name, array in arrays.items()}
