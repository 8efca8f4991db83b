"""The training loop: steps of the optimiser, validation, saving, and Ctrl-C.

`objectives` has the losses of batches, `batches` knows the place in the data, `state` has all of a training,
`checkpoint` writes and reads it, `progress` shows it, and `fitting` checks what users pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from selfattn._interrupt import DelayedInterrupt
from selfattn.functional._products import widened
from selfattn.nn.module import Gradients, Module, add_gradients, arrays_of
from selfattn.optim import clip_grad_norm_
from selfattn.training import checkpoint as checkpoints
from selfattn.training.progress import Progress
from selfattn.training.state import Interrupted, Step, TrainingState


class Training(TrainingState):
    """A training: its state, and the loop."""

    def run(self, progress: Progress) -> None:
        """Train until the end, until a callback returns True, or until Ctrl-C, which raises Interrupted."""
        # NumPy need not warn: overflow shows in the loss, which is checked.
        with DelayedInterrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            if self.evaluator is not None and not self.history.evaluations:
                self._evaluate(len(self.history.step_losses))
            while not self.finished:
                step = self.advance()
                ends = step.average_loss is not None or self.finished
                step = self._validate(step, ends)
                if self.evaluator is not None and self._is_due(step, ends):
                    step = step._replace(score=self._evaluate(step.number))
                # Only True ends the training, not 1 or an array, which a callback may return by accident.
                answers = [callback(step) for callback in self.callbacks]
                stop = any(isinstance(answer, bool | np.bool_) and answer for answer in answers)
                progress.show(step)
                stop = interrupt.requested or stop
                due = self.checkpoint_every is not None and step.step % self.checkpoint_every == 0
                if self.file is not None and (ends or stop or due):
                    checkpoints.save(self.file, checkpoints.state_of(self))
                if stop:
                    break
        for name, array in (self.best or {}).items():
            arrays_of(self.model)[name][...] = array
        if interrupt.requested:
            raise Interrupted(self.history)

    def advance(self) -> Step:
        """Make a step of the optimiser with the gradients of one batch, or with their mean over several batches."""
        self.source.begin(self.generator)
        step = self.steps_of_epoch + 1
        loss, grads, count = self._gradients()
        norm = None if self.max_norm is None else clip_grad_norm_(grads, self.max_norm)
        for name, number in {"loss": loss, "norm of the gradients": norm}.items():
            if number is not None and not math.isfinite(number):
                raise FloatingPointError(
                    f"the {name} is {number} in epoch {self.epoch + 1}, step {step}, with a learning rate of "
                    f"{self._lr}; the parameters are those before this step"
                )
        lr = self._lr
        self.optimizer.step(grads)
        if self.scheduler is not None:
            self.scheduler.step()
        self.history.step_losses.append(loss)
        self.total_loss, self.total_count = self.total_loss + loss * count, self.total_count + count
        average = self.total_loss / self.total_count if self.source.ended else None
        number = len(self.history.step_losses)
        steps = self.steps_per_epoch
        done = Step(self.epoch + 1, self.epochs, step, steps, loss, average, number, lr, norm)
        if average is not None:
            self.history.epoch_losses.append(average)
            self.epoch, self.total_loss, self.total_count = self.epoch + 1, 0.0, 0.0
            self.source.reset()
        return done

    @property
    def _lr(self) -> float:
        """The learning rate, of the first group of parameters."""
        lr: float = self.optimizer.param_groups[0]["lr"]
        return lr

    def _gradients(self) -> tuple[float, Gradients, float]:
        """Take the next batches; return the loss of all of them, its gradients, and their weight.

        A batch without a target weighs nothing, and its mean is NaN.
        """
        loss, grads, first = self._of_one_batch()
        count, total, adds = first, loss * first, self.objective.adds
        for _ in range(1, self.accumulate):
            if self.source.ended:
                break
            more, more_grads, weight = self._of_one_batch()
            if count == 0:
                loss, grads, first, count, total = more, more_grads, weight, weight, more * weight
            elif weight:
                add_gradients(grads, more_grads if weight == first else _times(more_grads, weight / first))
                count, total = count + weight, total + more * weight
        if count != first:
            loss, grads = (total, grads) if adds else (total / count, _times(grads, first / count))
        elif self.max_norm is not None:  # clipping is in place, and the arrays may be the user's
            grads = {name: array.copy() for name, array in grads.items()}
        return loss, grads, count

    def _of_one_batch(self) -> tuple[float, Gradients, float]:
        """Take a batch; return its loss, the gradients, and its weight."""
        batch = self.source.take(self.generator)
        loss, grads, count = self.objective.gradients(batch.content)
        if self.accumulate > 1:  # a sum of float16 may overflow
            grads = {name: widened(array) for name, array in grads.items()}
        return loss, grads, self._weight(count, batch.items)

    def _weight(self, count: float | None, items: int) -> float:
        return 1.0 if self.objective.adds else float(items if count is None else count)

    def _validate(self, step: Step, ends: bool) -> Step:
        """Return the step with the loss of the validation batches, if validation is due."""
        if self.validation is None or not self._is_due(step, ends):
            return step
        total, weights = 0.0, 0.0
        with evaluation_mode(self.model):
            while True:
                batch = self.validation.take(self.generator)
                value, count = self.objective.value(batch.content)
                if weight := self._weight(count, batch.items):
                    total, weights = total + value * weight, weights + weight
                if self.validation.ended:
                    break
        self.validation.reset()
        mean = total / weights if weights else math.nan
        self.history.validation_losses.append((step.number, mean))
        return step._replace(validation_loss=mean)

    def _is_due(self, step: Step, ends: bool) -> bool:
        return ends if self.validate_every is None else step.number % self.validate_every == 0

    def _evaluate(self, number: int) -> float:
        """Note the evaluator's score of the model, and keep the parameters if no score was higher."""
        assert self.evaluator is not None
        with evaluation_mode(self.model):
            score = float(self.evaluator(self.model))
        if score > max((own for _, own in self.history.evaluations), default=-math.inf):
            self.best = {name: array.copy() for name, array in arrays_of(self.model).items()}
        self.history.evaluations.append((number, score))
        return score


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Leave training mode within the block; after it, every module returns to its previous mode."""
    modules = list(model.modules()) if isinstance(model, Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _times(grads: Gradients, factor: float) -> Gradients:
    return {name: np.asarray(x * x.dtype.type(factor)) for name, x in grads.items()}
