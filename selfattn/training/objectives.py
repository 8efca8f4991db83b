"""What a training minimises: a number of a model and a batch, and its gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from selfattn._check import Array, as_array
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.module import Gradients, Module


class Objective:
    """A loss of batches."""

    def gradients(self, batch: Any) -> tuple[float, Gradients]:
        """Compute the loss of a batch and the gradients of the model's parameters."""
        raise NotImplementedError

    def value(self, batch: Any) -> float:
        """Compute the loss alone."""
        return self.gradients(batch)[0]


class OfTriplets(Objective):
    """−confidence of a task; a batch is a list of triplets, and its loss the mean."""

    def __init__(self, task: Any) -> None:
        self.task = task

    def gradients(self, batch: Sequence[Sequence[Any]]) -> tuple[float, Gradients]:
        """Compute the mean of −confidence over a batch, and its gradients."""
        loss, pullback = self._forward(batch)
        return loss, gradients_in(pullback(-1.0 / len(batch)))

    def value(self, batch: Sequence[Sequence[Any]]) -> float:
        """Compute the mean of −confidence over a batch."""
        return self._forward(batch)[0]

    def _forward(self, batch: Sequence[Sequence[Any]]) -> tuple[float, Callable[[float], Any]]:
        if len(batch) == 1:
            confidence, pullback = self.task.vjp(*batch[0])
            return -float(confidence), pullback
        confidences, pullback = self.task.vjp(*map(list, zip(*batch, strict=True)))
        return -float(np.mean(confidences, dtype=np.float64)), pullback


class OfOutput(Objective):
    """A loss of what the model makes of inputs, and a target; a batch is both, and perhaps options of the model."""

    def __init__(self, model: Any, loss: Any) -> None:
        self.model, self.loss = model, loss

    def gradients(self, batch: Any) -> tuple[float, Gradients]:
        """Go forward through model and loss, and back."""
        inputs, target, options = _split(batch)
        y, pullback = self.model.vjp(*inputs, **options)
        value, loss_pullback = self.loss.vjp(y, target)
        return one_number(value), gradients_in(pullback(loss_pullback(1.0)))

    def value(self, batch: Any) -> float:
        """Go forward."""
        inputs, target, options = _split(batch)
        return one_number(self.loss(self.model(*inputs, **options), target))


class OfModel(Objective):
    """The model's own loss, ``loss_vjp``; a batch is its argument, or a tuple of them."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def gradients(self, batch: Any) -> tuple[float, Gradients]:
        """Go forward, and back."""
        value, pullback = self.model.loss_vjp(*_tuple(batch))
        return one_number(value), gradients_in(pullback(1.0))

    def value(self, batch: Any) -> float:
        """Go forward."""
        forward, arguments = getattr(self.model, "loss", None), _tuple(batch)
        return one_number(forward(*arguments) if callable(forward) else self.model.loss_vjp(*arguments)[0])


class OfFunction(Objective):
    """What a function of model and batch returns: loss and gradients."""

    def __init__(self, model: Any, function: Callable[[Any, Any], Any]) -> None:
        self.model, self.function = model, function

    def gradients(self, batch: Any) -> tuple[float, Gradients]:
        """Call the function."""
        found = self.function(self.model, batch)
        if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], Mapping):
            raise TypeError(
                "a function as loss must return the loss and the dict of gradients, of a model and a batch; "
                f"not {type(found).__name__}"
            )
        return one_number(found[0]), gradients_in(found[1])


def objective_of(model: Any, loss: Any) -> Objective:
    """Tell which objective this is.

    Raises
    ------
    TypeError
        The model or the loss lacks what it needs.
    """
    if loss is None and callable(getattr(model, "loss_vjp", None)):
        return OfModel(model)
    if loss is None:
        _check_task(model)
        return OfTriplets(model)
    if not callable(getattr(model, "parameters", None)):
        raise TypeError(f"model must be a Module, or have parameters(), which {type(model).__name__} has not")
    if callable(getattr(loss, "vjp", None)):
        if isinstance(loss, type):
            raise TypeError(f"loss is a class; make one: {loss.__name__}()")
        if not callable(getattr(model, "vjp", None)):
            raise TypeError(f"model must have vjp, which {type(model).__name__} has not")
        return OfOutput(model, loss)
    if callable(loss):
        return OfFunction(model, loss)
    raise TypeError(
        f"loss must be one of selfattn.nn, such as nn.CrossEntropyLoss(), or a function of model and batch, not {loss!r:.80}"
    )


def _check_task(task: Any) -> None:
    wants = "without a loss, task must be a ProxyTask, or have its parameters() and vjp(main, similar, non_similar)"
    kind = type(task).__name__
    if not (callable(getattr(task, "parameters", None)) and callable(getattr(task, "vjp", None))):
        raise TypeError(f"{wants}, which {kind} has not")
    try:
        inspect.signature(task.vjp).bind("main", "similar", "non_similar")
    except TypeError:
        hint = "; wrap the model: nn.ProxyTask(model)" if isinstance(task, EmbeddingModel) else ""
        raise TypeError(f"{wants}; that of {kind} takes other arguments{hint}") from None


def one_number(value: Any) -> float:
    """Take a loss as a float."""
    if np.shape(value) != ():
        raise TypeError(f"the loss must be one number, not an array of shape {np.shape(value)}")
    return float(value)


def gradients_in(result: Any) -> Gradients:
    """Take what a pullback returned: the gradients, after those of the inputs if there are such, as arrays in a new dict."""
    grads = result[-1] if isinstance(result, tuple) else result
    if not isinstance(grads, Mapping):
        raise TypeError(
            f"the pullback must return the dict of gradients, or inputs' gradients and the dict, not {type(result).__name__}"
        )
    return {name: _as_gradient(name, gradient) for name, gradient in grads.items()}


def _as_gradient(name: str, gradient: Any) -> Array:
    """Take lists and integers as floats: they are added up and scaled. The array may be the user's, and is not written to."""
    array = as_array(f"the gradient of {name}", gradient)
    return array.astype(np.float64) if array.dtype.kind in "iu" else array


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return inputs if isinstance(inputs, tuple) else (inputs,)


def _split(batch: Any) -> tuple[tuple[Any, ...], Any, Mapping[str, Any]]:
    """Return the model's arguments, the target and the model's options."""
    is_list = isinstance(batch, tuple | list)
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


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Leave training mode for a while; every module comes back to its own."""
    modules = list(model.modules()) if isinstance(model, Module) else []
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def scaled(grads: Gradients, factor: float) -> Gradients:
    """Multiply gradients by a number, in new arrays."""
    return {name: np.asarray(array * array.dtype.type(factor)) for name, array in grads.items()}
