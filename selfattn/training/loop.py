"""The training loop: losses of batches, steps of the optimiser, validation, saving, and Ctrl-C.

`batches` knows the place in the data, `checkpoint` writes and reads the state, `progress` shows it, and `fitting` checks what
users pass.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from selfattn._check import Array, as_array, quoted, warn
from selfattn._interrupt import DelayedInterrupt
from selfattn.functional._products import widened
from selfattn.nn import init
from selfattn.nn.embedding_losses import EmbeddingLoss
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.module import Gradients, Module, add_gradients
from selfattn.optim import Optimizer, clip_grad_norm_
from selfattn.optim.lr_scheduler import LRScheduler
from selfattn.training import checkpoint as checkpoints
from selfattn.training.batches import Source
from selfattn.training.progress import Progress


class Task(Protocol):
    """A task, which is trained without a loss: :class:`selfattn.nn.ProxyTask`, or a class with these two methods."""

    def parameters(self) -> dict[str, Array]:
        """Return the parameters by name, not copies."""

    def vjp(self, main: Any, similar: Any, non_similar: Any) -> tuple[Any, Callable[..., Gradients]]:
        """Compute the confidence and its pullback, ``d_confidence -> grads``.

        Parameters
        ----------
        main, similar, non_similar : object
            The parts of one triplet; for a batch of n > 1, three lists of n.

        Returns
        -------
        confidence : float, or array_like of shape (n,)
        pullback : callable
            ``grads = pullback(d_confidence)``, a dict with the names of :meth:`parameters`. ``d_confidence`` is one
            number: −1, or −1/n for all of a batch.
        """


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


# ------------------------------------------------------------------------------------------------------ objectives


class Objective(NamedTuple):
    """A loss, as two functions of a batch."""

    gradients: Callable[[Any], tuple[float, Gradients]]  # the loss, and the gradients of the parameters
    value: Callable[[Any], float]  # the loss alone
    of_triplets: bool = False


def of_triplets(task: Any) -> Objective:
    """Return the objective −confidence of a task; a batch is a list of triplets, and its loss is their mean."""

    def forward(batch: Sequence[Sequence[Any]]) -> tuple[float, Callable[[float], Any]]:
        if len(batch) == 1:
            confidence, pullback = task.vjp(*batch[0])
            return -float(confidence), pullback
        confidences, pullback = task.vjp(*map(list, zip(*batch, strict=True)))
        return -float(np.mean(confidences, dtype=np.float64)), pullback

    def gradients(batch: Sequence[Sequence[Any]]) -> tuple[float, Gradients]:
        loss, pullback = forward(batch)
        return loss, gradients_in(pullback(-1.0 / len(batch)))

    return Objective(gradients, lambda batch: forward(batch)[0], of_triplets=True)


def of_output(model: Any, loss: Any) -> Objective:
    """Return the objective of a loss of output and target; a batch is inputs, target, and perhaps the model's options."""

    def gradients(batch: Any) -> tuple[float, Gradients]:
        inputs, target, options = _split(batch)
        y, pullback = model.vjp(*inputs, **options)
        value, loss_pullback = loss.vjp(y, _of_one_label(y, inputs, target))
        return one_number(value), gradients_in(pullback(loss_pullback(1.0)))

    def value(batch: Any) -> float:
        inputs, target, options = _split(batch)
        y = model(*inputs, **options)
        return one_number(loss(y, _of_one_label(y, inputs, target)))

    return Objective(gradients, value)


def of_embeddings(model: Any, loss: EmbeddingLoss) -> Objective:
    """Return the objective of a loss of embeddings; a batch is columns of texts, and at last labels if the loss takes them."""
    warned: list[str] = []

    def split(batch: Any) -> tuple[list[str], int, Any]:
        columns, labels = (batch[:-1], batch[-1]) if loss.labelled else (batch, None)
        if not isinstance(batch, tuple) or not all(map(_are_texts, columns)):
            wants = "texts and a number" if loss.labelled else "texts"
            raise TypeError(f"an example of {type(loss).__name__} must be a tuple of {wants}; see fit")
        texts = [text for column in columns for text in column]
        ((text, times),) = Counter(texts).most_common(1)
        if loss.in_batch and times > 1 and not warned:
            warned.append(text)
            warn(
                f"a batch holds {quoted(text)} {times} times, and each is a wrong answer to the others; this is told once"
            )
        return texts, len(columns), labels

    def gradients(batch: Any) -> tuple[float, Gradients]:
        texts, count, labels = split(batch)
        size = loss.mini_batch_size or len(texts)
        pieces = [texts[n : n + size] for n in range(0, len(texts), size)]
        if len(pieces) == 1:
            y, pullback = model.vjp(texts)
            value, slopes = loss.vjp(np.split(y, count), labels)
            return one_number(value), gradients_in(pullback(np.concatenate(slopes(1.0)).astype(y.dtype)))
        drawn, states, rows = checkpoints.generators(None, model), [], []
        for piece in pieces:
            states.append([checkpoints.generator_state(each) for each in drawn])
            rows.append(model(piece))
        value, slopes = loss.vjp(np.split(np.concatenate(rows), count), labels)
        dy = np.split(np.concatenate(slopes(1.0)).astype(rows[0].dtype), range(size, len(texts), size))
        grads: Gradients = {}
        for piece, d, state in zip(pieces, dy, states, strict=True):
            for each, before in zip(drawn, state, strict=True):  # what drops, drops the same again
                checkpoints.set_generator_state(each, before)
            add_gradients(grads, gradients_in(model.vjp(piece)[1](d)))
        return one_number(value), grads

    def value(batch: Any) -> float:
        texts, count, labels = split(batch)
        return one_number(loss(np.split(model(texts), count), labels))

    return Objective(gradients, value)


def of_model(model: Any) -> Objective:
    """Return the objective of a model with ``loss_vjp``; a batch is its argument, or a tuple of its arguments."""

    def gradients(batch: Any) -> tuple[float, Gradients]:
        value, pullback = model.loss_vjp(*_tuple(batch))
        return one_number(value), gradients_in(pullback(1.0))

    def value(batch: Any) -> float:
        forward, arguments = getattr(model, "loss", None), _tuple(batch)
        return one_number(forward(*arguments) if callable(forward) else model.loss_vjp(*arguments)[0])

    return Objective(gradients, value)


def of_function(model: Any, function: Callable[[Any, Any], Any]) -> Objective:
    """Return the objective of a function of model and batch that returns loss and gradients."""

    def gradients(batch: Any) -> tuple[float, Gradients]:
        found = function(model, batch)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise TypeError(
                "a function as loss must return the loss and the dict of gradients, of a model and a batch; "
                f"not {type(found).__name__}"
            )
        return one_number(found[0]), gradients_in(found[1])

    return Objective(gradients, lambda batch: gradients(batch)[0])


def objective_of(model: Any, loss: Any) -> Objective:
    """Return the objective of a model and a loss; it is a TypeError if they lack a method that it needs."""
    if loss is None and callable(getattr(model, "loss_vjp", None)):
        return of_model(model)
    if loss is None:
        _check_task(model)
        return of_triplets(model)
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(f"model must be a Module, or have parameters(), which {type(model).__name__} lacks")
    if callable(getattr(loss, "vjp", None)):
        if isinstance(loss, type):
            raise TypeError(f"loss is a class; make one: {loss.__name__}()")
        if not callable(getattr(model, "vjp", None)):
            raise TypeError(f"model must have vjp, which {type(model).__name__} lacks")
        return (of_embeddings if isinstance(loss, EmbeddingLoss) else of_output)(model, loss)
    if callable(loss):
        return of_function(model, loss)
    raise TypeError(
        f"loss must be one of selfattn.nn, such as nn.CrossEntropyLoss(), or a function of model and batch, not {loss!r:.80}"
    )


def _check_task(task: Any) -> None:
    wants = "without a loss, task must be a ProxyTask, or have its parameters() and vjp(main, similar, non_similar)"
    kind = type(task).__name__
    if not (callable(getattr(task, "parameters", None)) and callable(getattr(task, "vjp", None))):
        raise TypeError(f"{wants}, which {kind} lacks")
    try:
        inspect.signature(task.vjp).bind("main", "similar", "non_similar")
    except TypeError:
        wrap = "; wrap the model: nn.ProxyTask(model), and train on triplets"
        hint = wrap if isinstance(task, EmbeddingModel) else ""
        raise TypeError(f"{wants}; that of {kind} takes other arguments{hint}") from None


def one_number(value: Any) -> float:
    """Return a loss, an array or a number, as a float."""
    if np.shape(value) != ():
        raise TypeError(f"the loss must be one number, not an array of shape {np.shape(value)}")
    return float(value)


def gradients_in(result: Any) -> Gradients:
    """Return the parameters' gradients from a pullback's result, after gradients of inputs, as arrays in a new dict."""
    grads = result[-1] if isinstance(result, tuple) else result
    if not isinstance(grads, Mapping):
        raise TypeError(
            f"the pullback must return the dict of gradients, or inputs' gradients and the dict, not {type(result).__name__}"
        )
    arrays = {name: as_array(f"the gradient of {name}", gradient) for name, gradient in grads.items()}
    # Integers become floats, which can be added up and scaled.
    return {name: x.astype(np.float64) if x.dtype.kind in "iu" else x for name, x in arrays.items()}


def _times(grads: Gradients, factor: float) -> Gradients:
    return {name: np.asarray(x * x.dtype.type(factor)) for name, x in grads.items()}


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _split(batch: Any) -> tuple[tuple[Any, ...], Any, Mapping[str, Any]]:
    """Return the model's arguments, the target and the model's options; two columns of texts are pairs."""
    is_list = isinstance(batch, tuple | list)
    if is_list and len(batch) == 3 and _are_texts(batch[0]) and _are_texts(batch[1]):
        batch = (list(zip(batch[0], batch[1], strict=True)), batch[2])
    if not is_list or len(batch) not in (2, 3):
        raise TypeError(
            "a batch must be (inputs, target), or (inputs, target, options of the model), for this loss; not "
            + (f"{len(batch)} things" if is_list else type(batch).__name__)
        )
    inputs, target, options = batch if len(batch) == 3 else (*batch, {})
    if not isinstance(options, Mapping):
        raise TypeError(
            f"the third part of a batch must be a dict of the model's options, not {type(options).__name__}"
        )
    return _tuple(inputs), target, options


def _are_texts(column: Any) -> bool:
    return isinstance(column, list) and bool(column) and isinstance(column[0], str)


def _of_one_label(y: Any, inputs: tuple[Any, ...], target: Any) -> Any:
    """Return the target of texts; a number for each fits the one logit of each."""
    of_texts = isinstance(inputs[0], list) and bool(inputs[0]) and isinstance(inputs[0][0], str | tuple)
    return np.reshape(target, y.shape) if of_texts and (*np.shape(target), 1) == np.shape(y) else target


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
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


# -------------------------------------------------------------------------------------------------------- the loop


@dataclass
class Training:
    """A training and its place: the completed epochs, and in ``source`` the items taken from the current epoch."""

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

    def run(self, progress: Progress) -> None:
        """Train until the end, until a callback returns True, or until Ctrl-C, which raises Interrupted."""
        # NumPy need not warn: overflow shows in the loss, which is checked.
        with DelayedInterrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            if self.evaluator is not None and not self.history.evaluations:
                self._evaluate(len(self.history.step_losses))
            while not self.finished:
                step = self.advance()
                ends = step.average_loss is not None or self.finished
                step = self.validated(step, ends)
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
            self.model.parameters()[name][...] = array
        if interrupt.requested:
            raise Interrupted(self.history)

    def advance(self) -> Step:
        """Make a step of the optimiser with the gradients of one batch, or with their mean over several batches."""
        self.source.begin(self.generator)
        step = self.steps_of_epoch + 1
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
        steps = self.steps_per_epoch
        done = Step(self.epoch + 1, self.epochs, step, steps, loss, average, number, lr, norm)
        if average is not None:
            self.history.epoch_losses.append(average)
            self.epoch, self.total_loss = self.epoch + 1, 0.0
            self.source.reset()
        return done

    def _gradients(self) -> tuple[float, Gradients, int]:
        """Take the next batches; return the mean loss over their items, its gradients, and the number of items."""
        batch = self.source.take(self.generator)
        loss, grads = self.objective.gradients(batch.content)
        if self.accumulate > 1:  # a sum of float16 may overflow
            grads = {name: widened(array) for name, array in grads.items()}
        first, items, count = batch.items, batch.items, 1
        total = loss * items
        while count < self.accumulate and not self.source.ended:
            batch = self.source.take(self.generator)
            more, more_grads = self.objective.gradients(batch.content)
            if batch.items != first:
                more_grads = _times({name: widened(x) for name, x in more_grads.items()}, batch.items / first)
            add_gradients(grads, more_grads)
            items, count, total = items + batch.items, count + 1, total + more * batch.items
        if count > 1:
            loss, grads = total / items, _times(grads, first / items)
        elif self.max_norm is not None:  # clipping is in place, and the arrays may be the user's
            grads = {name: array.copy() for name, array in grads.items()}
        return loss, grads, items

    def validated(self, step: Step, ends: bool) -> Step:
        """Return the step with the loss of the validation batches, if validation is due."""
        if self.validation is None or not self._is_due(step, ends):
            return step
        total, items = 0.0, 0
        with evaluating(self.model):
            while not (items and self.validation.ended):
                batch = self.validation.take(self.generator)
                total += self.objective.value(batch.content) * batch.items
                items += batch.items
        self.validation.reset()
        self.history.validation_losses.append((step.number, total / items))
        return step._replace(validation_loss=total / items)

    def _is_due(self, step: Step, ends: bool) -> bool:
        return ends if self.validate_every is None else step.number % self.validate_every == 0

    def _evaluate(self, number: int) -> float:
        """Note the evaluator's score of the model, and keep the parameters if no score was higher."""
        assert self.evaluator is not None
        with evaluating(self.model):
            score = float(self.evaluator(self.model))
        if score > max((own for _, own in self.history.evaluations), default=-math.inf):
            self.best = {name: array.copy() for name, array in self.model.parameters().items()}
        self.history.evaluations.append((number, score))
        return score
