"""Objectives of a training: what each kind of loss makes of a batch, and what it refuses."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from selfattn._check import Array, as_array, quoted, warn
from selfattn.nn.embedding_losses import EmbeddingLoss
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.module import Gradients, add_gradients, output_of
from selfattn.training.generators import generator_state, generators, set_generator_state


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


class Objective(NamedTuple):
    """A loss, as two functions of a batch.

    Both return what the loss, a mean, divides by, or None if that is not known. It is the weight of a batch among
    others: examples without a target count nothing.
    """

    gradients: Callable[
        [Any], tuple[float, Gradients, float | None]
    ]  # the loss, and the parameters' gradients
    value: Callable[[Any], tuple[float, float | None]]  # the loss alone
    of_triplets: bool = False
    adds: bool = False  # the loss is a sum, and that of several batches theirs


def of_triplets(task: Any) -> Objective:
    """Return the objective −confidence of a task; a batch is a list of triplets, and its loss is their mean."""

    def forward(batch: Sequence[Sequence[Any]]) -> tuple[float, Callable[[float], Any]]:
        if len(batch) == 1:
            confidence, pullback = task.vjp(*batch[0])
            return -float(confidence), pullback
        confidences, pullback = task.vjp(*map(list, zip(*batch, strict=True)))
        return -float(np.mean(confidences, dtype=np.float64)), pullback

    def gradients(batch: Sequence[Sequence[Any]]) -> tuple[float, Gradients, float]:
        loss, pullback = forward(batch)
        return loss, gradients_in(pullback(-1.0 / len(batch))), len(batch)

    return Objective(gradients, lambda batch: (forward(batch)[0], len(batch)), of_triplets=True)


def of_output(model: Any, loss: Any) -> Objective:
    """Return the objective of a loss of output and target.

    A batch is inputs, target, and perhaps the model's options.
    """

    def gradients(batch: Any) -> tuple[float, Gradients, float | None]:
        inputs, target, options = _split(batch)
        y, pullback = model.vjp(*inputs, **options)
        value, loss_pullback = loss.vjp(y, _of_one_label(y, inputs, target))
        return one_number(value), gradients_in(pullback(loss_pullback(1.0))), count_of(loss_pullback)

    def value(batch: Any) -> tuple[float, float | None]:
        inputs, target, options = _split(batch)
        y = output_of(model, *inputs, **options)
        value, loss_pullback = loss.vjp(y, _of_one_label(y, inputs, target))
        return one_number(value), count_of(loss_pullback)

    return Objective(gradients, value, adds=getattr(loss, "reduction", None) == "sum")


def of_embeddings(model: Any, loss: EmbeddingLoss) -> Objective:
    """Return the objective of a loss of embeddings.

    A batch is columns of texts, and at last labels if the loss takes them.
    """
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
                f"a batch holds {quoted(text)} {times} times, and each is a wrong answer to the others; "
                "this is told once"
            )
        return texts, len(columns), labels

    def gradients(batch: Any) -> tuple[float, Gradients, float]:
        texts, count, labels = split(batch)
        rows_each = len(texts) // count
        size = loss.mini_batch_size or len(texts)
        pieces = [texts[n : n + size] for n in range(0, len(texts), size)]
        if len(pieces) == 1:
            y, pullback = model.vjp(texts)
            value, slopes = loss.vjp(np.split(y, count), labels)
            grads = gradients_in(pullback(np.concatenate(slopes(1.0)).astype(y.dtype)))
            return one_number(value), grads, rows_each
        drawn, states, rows = generators(None, model), [], []
        for piece in pieces:
            states.append([generator_state(each) for each in drawn])
            rows.append(output_of(model, piece))
        value, slopes = loss.vjp(np.split(np.concatenate(rows), count), labels)
        dy = np.split(np.concatenate(slopes(1.0)).astype(rows[0].dtype), range(size, len(texts), size))
        grads = {}
        for piece, d, state in zip(pieces, dy, states, strict=True):
            for each, before in zip(drawn, state, strict=True):  # what drops, drops the same again
                set_generator_state(each, before)
            add_gradients(grads, gradients_in(model.vjp(piece)[1](d)))
        return one_number(value), grads, rows_each

    def value(batch: Any) -> tuple[float, float]:
        texts, count, labels = split(batch)
        return one_number(loss(np.split(output_of(model, texts), count), labels)), len(texts) // count

    return Objective(gradients, value)


def of_model(model: Any) -> Objective:
    """Return the objective of a model with ``loss_vjp``; a batch is its argument, or a tuple of its arguments."""
    counted = getattr(model, "loss_count", None)

    def count(arguments: tuple[Any, ...]) -> float | None:
        return counted(*arguments) if callable(counted) else None

    def gradients(batch: Any) -> tuple[float, Gradients, float | None]:
        arguments = _tuple(batch)
        value, pullback = model.loss_vjp(*arguments)
        return one_number(value), gradients_in(pullback(1.0)), count(arguments)

    def value(batch: Any) -> tuple[float, float | None]:
        forward, arguments = getattr(model, "loss", None), _tuple(batch)
        value = forward(*arguments) if callable(forward) else model.loss_vjp(*arguments)[0]
        return one_number(value), count(arguments)

    return Objective(gradients, value)


def of_function(model: Any, function: Callable[[Any, Any], Any]) -> Objective:
    """Return the objective of a function of model and batch.

    The function returns loss and gradients, and perhaps what the loss divides by.
    """

    def gradients(batch: Any) -> tuple[float, Gradients, float | None]:
        found = function(model, batch)
        if not isinstance(found, tuple) or len(found) not in (2, 3) or not isinstance(found[1], Mapping):
            raise TypeError(
                "a function as loss must return the loss and the dict of gradients, of a model and a batch; "
                f"not {type(found).__name__}"
            )
        return one_number(found[0]), gradients_in(found[1]), None if len(found) == 2 else one_number(found[2])

    return Objective(gradients, lambda batch: gradients(batch)[::2])


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
        "loss must be one of selfattn.nn, such as nn.CrossEntropyLoss(), or a function of model and "
        f"batch, not {loss!r:.80}"
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


def count_of(pullback: Any) -> float | None:
    """Return what the mean of a loss divides by, which its pullback has as an attribute."""
    count: float | None = getattr(pullback, "count", None)
    return count


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
            "the pullback must return the dict of gradients, or inputs' gradients and the dict, not "
            f"{type(result).__name__}"
        )
    arrays = {name: as_array(f"the gradient of {name}", gradient) for name, gradient in grads.items()}
    # Integers become floats, which can be added up and scaled.
    return {name: x.astype(np.float64) if x.dtype.kind in "iu" else x for name, x in arrays.items()}


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
