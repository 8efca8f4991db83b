"""`fit`: it checks its arguments and makes a training, which `loop` runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from selfattn._check import check_number, check_rows, check_size
from selfattn._extras import import_extra
from selfattn.nn import init
from selfattn.nn.module import arrays_of
from selfattn.nn.proxy_task import ProxyTask
from selfattn.optim import Adam, AdamW, Optimizer
from selfattn.optim.lr_scheduler import LambdaLR, LRScheduler
from selfattn.training import checkpoint as checkpoints
from selfattn.training.batches import Draws, Items, Source, Stream, is_example, is_sequence, source_of
from selfattn.training.loop import Training
from selfattn.training.objectives import objective_of
from selfattn.training.progress import Progress
from selfattn.training.state import Callback, EarlyStopping, History


def fit(
    model: Any,
    batches: Any,
    loss: Any = None,
    epochs: int | None = None,
    lr: float | None = None,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    rng: init.Rng = None,
    optimizer: Optimizer | None = None,
    log_every: int | None = 100,
    checkpoint: str | os.PathLike[str] | None = None,
    callbacks: Iterable[Callback] = (),
    *,
    steps: int | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    warmup_steps: int | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
    validation: Any = None,
    validate_every: int | None = None,
    evaluator: Callable[[Any], float] | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
    reduce: Callable[[Any, Any, Any], tuple[Any, ...]] | None = None,
) -> History:
    """Train a model: minimise a loss of batches.

    Parameters
    ----------
    model : Module
        Or another object with ``vjp`` and ``parameters()``, which are moved in place. Its mode does not change: a new
        model, and one after ``train()``, drops.
    batches : sequence, iterable or callable
        A sequence of batches, or with ``batch_size`` of examples. An iterable of batches, over which each epoch
        iterates. Or a function ``batches(rng)`` that draws a batch with the given generator, for a training of
        ``steps`` steps. For a task, triplets of sentences; see :func:`read_triplets` and :func:`make_triplets`. For a
        model of texts examples: tuples of texts, with a label at the end if the loss needs one.
    loss : Loss, callable, or None
        - One of :mod:`selfattn.nn`, or an object with the same calls: a batch is ``(inputs, target)``, the loss
          ``loss(model(inputs), target)``. A tuple of inputs is several arguments, and a batch may have a dict of the
          model's options, such as ``key_lengths``, in third place. For texts an example is ``(text, label)``, or for
          a cross-encoder ``(text, text, label)``.
        - One of embeddings, such as :class:`~selfattn.nn.MultipleNegativesRankingLoss`: an example is the texts of
          its columns, a pair or a triplet, with the score at the end for
          :class:`~selfattn.nn.CosineSimilarityLoss`.
        - A function: ``value, grads = loss(model, batch)``; or ``value, grads, count``, if the value is a mean over
          other things than the batch's items: their number is its weight among other batches.
        - None, for a model with its own loss: ``value, pullback = model.loss_vjp(batch)``,
          ``grads = pullback(1.0)``. A tuple as batch is several arguments. ``model.loss_count(batch)``, if it has
          that, is the batch's weight.
        - None, for a :class:`~selfattn.nn.ProxyTask`, or another :class:`Task`: batches are triplets, the loss is
          −confidence.
    epochs : int, optional
        The number of passes through the batches. By default 1, or the number that ``steps`` need; for triplets 100.
    lr : float, optional
        The learning rate of the default optimizer: :class:`~selfattn.optim.AdamW` with 1e-3, for a model of
        :mod:`selfattn_models` 5e-5; for triplets :class:`~selfattn.optim.Adam` with 1e-4.
    batch_size : int, optional
        The number of examples of a batch: arrays are stacked, tuples become tuples of stacks. The last of an epoch
        may be shorter. By default 32 for examples of texts, 1 for the triplets of a task.
    shuffle : bool, optional
        Whether each epoch has its own order. By default True for a sequence.
    rng : int, Generator or torch_rng, optional
        The source of the orders. With :func:`selfattn.torch_rng` they are those of PyTorch's
        ``DataLoader(shuffle=True)`` after ``torch.manual_seed``.
    optimizer : Optimizer, optional
        An optimizer of the model's parameters.
    log_every : int or None, default 100
        Print the loss every ``log_every`` steps, with the rate and the time that remains, and the average of each
        epoch; None prints nothing. What is printed is also logged, as INFO of the logger ``selfattn.training``.
    checkpoint : path, optional
        A file that holds, after each epoch and at the end, everything that the rest of the training depends on:
        weights, optimiser, schedule, generators, the order of the epoch and the place in it. It needs the extra
        ``text``.
    callbacks : iterable of callable
        Each is called with a :class:`Step` after every step. One that returns True ends the training, as
        :class:`EarlyStopping` does.
    steps : int, optional
        The number of steps, of all epochs.
    scheduler : LRScheduler or callable, optional
        Its ``step`` is called after each step. A function of the optimizer returns the scheduler.
    warmup_steps : int, optional
        In place of a scheduler: the learning rate rises from 0 over these steps, and falls to 0 at the end, on two
        lines.
    max_norm : float, optional
        Clip the norm of the gradients, :func:`~selfattn.optim.clip_grad_norm_`.
    accumulate : int, default 1
        Make a step along the gradient of the mean loss over all that counts in ``accumulate`` batches: the step of
        one batch that holds them all. PyTorch's habit, the mean of the batches' gradients, counts the tokens of a
        batch of short texts more. Losses with ``reduction="sum"`` are added.
    validation : sequence or iterable, optional
        Batches, or examples, for a mean loss during the training, with the model as after ``eval()``.
    validate_every : int, optional
        The number of steps between validations, and evaluations; by default there is one after each epoch and at the
        end.
    evaluator : callable, optional
        A function of the model that returns a number, the higher the better. It is called before the first step too.
        At the end the parameters are those of the highest number; ``history.evaluations`` has all.
    resume : bool, default False
        Continue from the checkpoint if it exists, with its history and its options of the optimiser. Without
        ``resume`` an existing checkpoint is an error, and is not replaced.
    checkpoint_every : int, optional
        Also write the checkpoint every ``checkpoint_every`` steps of an epoch.
    progress : bool, optional
        Whether to show a bar with the loss and the rate, which needs ``tqdm`` of the extra ``text``. By default it is
        shown in a notebook or on a terminal if tqdm is installed.
    reduce : callable, optional
        A function ``reduce(model, loss, batch)`` that returns the loss of a batch, the gradients, and perhaps the
        batch's weight, such as
        :class:`selfattn.interop.dask.reducer`, which computes shares of the batch on several machines.

    Returns
    -------
    History
        The losses of all steps, epochs and validations, those before a resumption included.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong: no batches, a learning rate of nan, a sentence of a :class:`~selfattn.nn.ProxyTask`
        without tokens. Or with ``resume`` the checkpoint is damaged or belongs to other batches, parameters or
        options. Nothing has changed then.
    FileExistsError
        ``checkpoint`` exists, and ``resume`` is False.
    FloatingPointError
        The loss or the norm of the gradients is not finite. The parameters are those before that step.
    OSError
        The checkpoint could not be written; the old one is unchanged.
    Interrupted
        Ctrl-C, as a KeyboardInterrupt with the ``history``. The training first completes the step and writes the
        checkpoint. A second Ctrl-C does not wait.
    ImportError
        An extra is missing.

    Notes
    -----
    A resumed training has the bits of an uninterrupted one on the same machine, if the batches are the same: an
    iterable is skipped to its place, so it must yield the same batches again. The order of an epoch is drawn when it
    begins; ``rng`` is used for nothing else but a function of batches.

    Examples
    --------
    >>> import numpy as np
    >>> from selfattn import nn, training
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((64, 3)).astype(np.float32)
    >>> examples = list(zip(x, (x.sum(axis=1) > 0).astype(int)))
    >>> model = nn.Sequential(nn.Linear(3, 8, rng=0), nn.ReLU(), nn.Linear(8, 2, rng=1))
    >>> history = training.fit(
    ...     model, examples, nn.CrossEntropyLoss(), epochs=20, lr=0.01, batch_size=8, rng=0, log_every=None,
    ...     validation=examples,
    ... )
    >>> history.validation_losses[0][1] > 0.5, history.validation_losses[-1][1] < 0.1
    (True, True)

    Triplets:

    >>> words = "tom chase jerry likes cheese harry killed voldemort".split()
    >>> def tokenize(sentence):
    ...     return [words.index(word) for word in sentence.split()]
    >>> task = nn.ProxyTask(nn.EmbeddingModel(tokenize, len(words), 8, max_seq_len=8, rng=0))
    >>> triplets = [
    ...     ("tom chase jerry", "jerry likes cheese", "harry killed voldemort"),
    ...     ("jerry likes cheese", "tom chase jerry", "voldemort killed harry"),
    ... ]
    >>> history = training.fit(task, triplets, epochs=2, lr=0.01, rng=0, log_every=2)
    Epoch [1/2], Step [2/2], Loss: 0.7038
    --- Epoch 1 completed. Average Loss: 0.7384 ---
    Epoch [2/2], Step [2/2], Loss: 0.3598
    --- Epoch 2 completed. Average Loss: 0.3588 ---
    >>> len(history.step_losses)
    4
    """
    objective = objective_of(model, loss)
    of_triplets = objective.of_triplets
    if not (reduce is None or callable(reduce)):
        raise TypeError(f"reduce must be a function (model, loss, batch), not a {type(reduce).__name__}")
    if reduce is not None:
        counted = getattr(reduce, "counted", reduce)
        objective = objective._replace(gradients=lambda batch: (*counted(model, loss, batch), None)[:3])
    counts = {
        "batch_size": batch_size,
        "steps": steps,
        "validate_every": validate_every,
        "log_every": log_every,
        "checkpoint_every": checkpoint_every,
        "warmup_steps": warmup_steps,
    }
    accumulate = check_size("accumulate", accumulate)
    batch_size, steps, validate_every, log_every, checkpoint_every, warmup_steps = (
        None if count is None else check_size(name, count) for name, count in counts.items()
    )
    if epochs is not None:
        epochs = check_size("epochs", epochs, 0)
    source: Source
    checked: Source | None = None
    if of_triplets:
        batch_size = batch_size or 1
        source = _triplets(model, "triplets", batches, batch_size, shuffle is None or bool(shuffle))
        if validation is not None:
            checked = _triplets(model, "validation", validation, batch_size, False)
    else:
        of_texts = isinstance(batches, list | tuple) and bool(batches) and is_example(batches[0])
        if of_texts and batch_size is None and hasattr(loss, "vjp"):
            batch_size = 32
        source = source_of(batches, batch_size, shuffle)
        checked = None if validation is None else _validation(validation, batch_size)
    if validate_every is not None and validation is None and evaluator is None:
        raise ValueError("validate_every needs validation=, the batches, or evaluator=")
    if not (evaluator is None or callable(evaluator)):
        raise TypeError(f"evaluator must be a function of the model, not a {type(evaluator).__name__}")
    if checkpoint is None and (resume or checkpoint_every is not None):
        raise ValueError("resume and checkpoint_every need checkpoint=, the file")
    called = list(callbacks) if isinstance(callbacks, Iterable) else [None]
    if not all(map(callable, called)):
        raise TypeError(f"callbacks must be a list of functions, not {callbacks!r:.80}")
    epochs = _checked_epochs(source, epochs, steps, 100 if of_triplets else 1)
    kind, rate = (Adam, 1e-4) if of_triplets else (AdamW, getattr(model, "small_lr", 1e-3))
    if optimizer is None and isinstance(scheduler, LRScheduler):
        optimizer = scheduler.optimizer
    optimizer = _checked_optimizer(model, optimizer, lr, kind, rate)
    if warmup_steps is not None:
        scheduler = _warm_up(source, epochs, steps, accumulate, warmup_steps, scheduler)
    training = Training(
        model=model,
        objective=objective,
        source=source,
        generator=init.as_generator(rng),
        optimizer=optimizer,
        scheduler=_checked_scheduler(scheduler, optimizer),
        max_norm=None if max_norm is None else check_number("max_norm", max_norm),
        accumulate=accumulate,
        validation=checked,
        validate_every=validate_every,
        file=None if checkpoint is None else Path(checkpoint),
        checkpoint_every=checkpoint_every,
        callbacks=called,
        epochs=epochs,
        total_steps=steps,
        evaluator=evaluator,
    )
    if training.file is not None:
        training.fixed = _fixed(training)
        _open(training, training.file, resume)
    for callback in called:
        if isinstance(callback, EarlyStopping):
            if validation is None and evaluator is None:
                raise ValueError("EarlyStopping needs validation= or evaluator=")
            callback.begin(training.history)
    with Progress(training, progress, log_every) as shown:
        training.run(shown)
    return training.history


def _open(training: Training, file: Path, resume: bool) -> None:
    """Check, before training begins, that a checkpoint can be written, and continue from an old one."""
    import_extra("safetensors", "text")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the folder of checkpoint={file} does not exist")
    if file.exists():
        if not resume:
            raise FileExistsError(f"{file} exists already: resume=True continues from it")
        checkpoints.restore(training, file)
    checkpoints.parts(checkpoints.state_of(training))


def _fixed(training: Training) -> dict[str, Any]:
    """Return the properties that a checkpoint and a training that continues from it must share."""
    source, scheduler = training.source, training.scheduler
    if isinstance(source, Items):
        of_triplets = training.objective.of_triplets
        name = "triplets" if of_triplets else "batches"
        digest = checkpoints.fingerprint if of_triplets else checkpoints.digest
        fixed: dict[str, Any] = {name: len(source.items), f"digest of the {name}": digest(source.items)}
    else:
        fixed = {"batches": "a function" if isinstance(source, Draws) else "an iterable"}
    fixed |= {
        "batch_size": source.batch_size,
        "shuffle": source.shuffle,
        "optimizer": type(training.optimizer).__name__,
    }
    if training.accumulate > 1:
        fixed["accumulate"] = training.accumulate
    if scheduler is not None:
        fixed["scheduler"] = type(scheduler).__name__
    return fixed


def _checked_epochs(source: Source, epochs: int | None, steps: int | None, default: int) -> int | None:
    if isinstance(source, Draws):
        if steps is None or epochs is not None:
            raise ValueError("batches that a function draws have no end: give steps, not epochs")
        return None
    once = isinstance(source, Stream) and source.once
    if epochs is None:
        epochs = None if steps is not None and not once else default
    if once and epochs is not None and epochs > 1:
        raise ValueError(
            f"batches is an iterator, which ends after one epoch; epochs={epochs} need a list of them"
        )
    return epochs


def _validation(batches: Any, batch_size: int | None) -> Source:
    if isinstance(batches, Iterator):
        batches = list(batches)
    if not is_sequence(batches) and callable(batches):
        raise TypeError(
            "validation must be a sequence or an iterable of batches, which are the same each time, not a function"
        )
    try:
        return source_of(batches, batch_size if is_sequence(batches) else None, False)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("batches", "validation", 1)) from None


def _triplets(task: Any, name: str, triplets: Any, batch_size: int, shuffle: bool) -> Items:
    check_rows(name, triplets, "its rows, df.values.tolist()")
    if isinstance(triplets, str) or not isinstance(triplets, Iterable):
        kind = type(triplets).__name__
        raise TypeError(f"{name} must be an iterable of (main, similar, non_similar), not a {kind}")
    checked = []
    for i, triplet in enumerate(triplets):
        unfit = isinstance(triplet, str | Mapping | Set) or not isinstance(triplet, Iterable)
        parts = [] if unfit else list(triplet)
        if len(parts) != 3:
            raise ValueError(f"{name}[{i}] must be (main, similar, non_similar), not {triplet!r:.200}")
        for sentence in parts:
            if isinstance(sentence, str) and not sentence.strip():
                raise ValueError(f"{name}[{i}] has an empty sentence: {triplet!r:.200}")
        checked.append(tuple(list(each) if isinstance(each, Iterator) else each for each in parts))
    if not checked:
        raise ValueError(f"{name} is empty; at least one is needed")
    if isinstance(task, ProxyTask):
        task.check(checked)
    return Items(checked, batch_size, shuffle, lambda found: found)


def _checked_optimizer(
    model: Any, optimizer: Optimizer | None, lr: float | None, kind: type[Adam], rate: float
) -> Optimizer:
    parameters = arrays_of(model)
    lr = None if lr is None else check_number("lr", lr)
    if optimizer is None:
        return kind(parameters, lr=rate if lr is None else lr)
    if hasattr(optimizer, "for_arrays"):  # one of selfattn.tape
        optimizer = optimizer.for_arrays(parameters)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of selfattn.optim, not {type(optimizer).__name__}")
    rates = [group["lr"] for group in optimizer.param_groups]
    if lr is not None and rates != [lr] * len(rates):
        own = rates[0] if len(rates) == 1 else rates
        raise ValueError(f"lr={lr} and an optimizer with lr={own} were given: which one is meant?")
    moved, own = ({name: id(x) for name, x in of.items()} for of in (optimizer.params, parameters))
    if moved != own:
        raise ValueError("optimizer must be made of the parameters() of this model; it moves other arrays")
    return optimizer


def _checked_scheduler(scheduler: Any, optimizer: Optimizer) -> LRScheduler | None:
    if scheduler is None:
        return None
    made = scheduler(optimizer) if callable(scheduler) else scheduler
    if not isinstance(made, LRScheduler):
        wants = "scheduler must be one of selfattn.optim.lr_scheduler, or a function that makes one"
        raise TypeError(f"{wants}, not {type(made).__name__}")
    if made.optimizer is not optimizer:
        raise ValueError("scheduler is of another optimizer than the given one")
    return made


def _warm_up(
    source: Source, epochs: int | None, steps: int | None, accumulate: int, warmup: int, other: Any
) -> Callable[[Optimizer], LRScheduler]:
    """Return what makes Transformers' linear schedule, which needs the number of steps."""
    if other is not None:
        raise ValueError("warmup_steps and scheduler were given: which one is meant?")
    of_epochs = (
        None if epochs is None or source.batches is None else epochs * -(-source.batches // accumulate)
    )
    total = min((n for n in (steps, of_epochs) if n is not None), default=None)
    if total is None:
        raise ValueError("warmup_steps needs the number of steps: give steps=")

    def factor(step: int) -> float:
        return min(step / warmup, max(0.0, (total - step) / max(1, total - warmup)))

    return lambda optimizer: LambdaLR(optimizer, factor)
