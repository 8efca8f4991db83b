"""The training loop: batches in order, steps of the optimiser, when to save, and Ctrl-C.

What a checkpoint holds is decided here; `checkpoint` writes and reads the file, `progress` shows how far it is.
"""

from __future__ import annotations

import inspect
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn._extras import import_extra
from selfattn.functional._arguments import check_number, check_size
from selfattn.nn import init
from selfattn.nn._arrays import Array, Gradients
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.proxy_task import ProxyTask
from selfattn.optim import Adam, Optimizer
from selfattn.training import checkpoint as checkpoints
from selfattn.training.progress import Progress

LR = 1e-4


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
    epochs, steps : int
        How many there are: epochs, and steps of each.
    loss : float
        The mean over the batch of −confidence.
    average_loss : float or None
        After the last step of an epoch, the mean over its triplets.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    loss: float
    average_loss: float | None


Callback: TypeAlias = Callable[[Step], Any]


@dataclass
class History:
    """What came of a training.

    Attributes
    ----------
    step_losses : list of float
        The loss of each step, of all epochs, in order.
    epoch_losses : list of float
        The mean over the triplets of each epoch that was completed.
    """

    step_losses: list[float] = field(default_factory=list)
    epoch_losses: list[float] = field(default_factory=list)


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


def fit(
    task: Task,
    triplets: Iterable[Sequence[Any]],
    epochs: int = 100,
    lr: float = LR,
    batch_size: int = 1,
    shuffle: bool = True,
    rng: init.Rng = None,
    optimizer: Optimizer | None = None,
    log_every: int | None = 100,
    checkpoint: str | os.PathLike[str] | None = None,
    callbacks: Iterable[Callback] = (),
    *,
    resume: bool = False,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
) -> History:
    """Train a task on triplets: minimise −confidence.

    Parameters
    ----------
    task : ProxyTask
        Or anything with its ``vjp`` and ``parameters``, which are moved in place.
    triplets : iterable of (main, similar, non_similar)
        Sentences, as the task takes them; see :func:`read_triplets` and :func:`make_triplets`.
    epochs : int, default 100
    lr : float, default 1e-4
        The learning rate of the :class:`~selfattn.optim.Adam` that is made when there is no ``optimizer``.
    batch_size : int, default 1
        The loss of a batch is the mean over its triplets. The last batch of an epoch may be shorter.
    shuffle : bool, default True
        Whether each epoch has an order of its own.
    rng : int, Generator or torch_rng, optional
        Where the orders come from. With :func:`selfattn.torch_rng` they are those of PyTorch's
        ``DataLoader(shuffle=True)`` after ``torch.manual_seed``.
    optimizer : Optimizer, optional
        One that moves the task's parameters.
    log_every : int or None, default 100
        Print the loss of every so many steps, and the average of each epoch; None prints nothing.
    checkpoint : path, optional
        A file that holds, after each epoch, everything that the rest of the training depends on: weights, optimiser,
        generators, the order of the epoch and the place in it. Needs the extra ``text``.
    callbacks : iterable of callable
        Each is called with a :class:`Step` after every step. One that returns True ends the training.
    resume : bool, default False
        Go on from the checkpoint if it is there; its options of the optimiser count, and its history is continued.
        Without ``resume`` a checkpoint that is there is an error, not lost.
    checkpoint_every : int, optional
        Write the checkpoint after every so many steps of an epoch too.
    progress : bool, optional
        Whether to show a bar with the loss and the rate, which needs ``tqdm`` of the extra ``text``. By default it is
        shown in a notebook or on a terminal if tqdm is installed.

    Returns
    -------
    History
        The losses of all steps and epochs, those before a resumption included.

    Raises
    ------
    TypeError, ValueError
        An argument is wrong: no triplets, a learning rate of nan, a sentence of a :class:`ProxyTask` that has no
        tokens. Nothing has changed then. With ``resume``: the
        checkpoint is damaged or belongs to other triplets, parameters or options.
    FileExistsError
        ``checkpoint`` is there, and ``resume`` is False.
    FloatingPointError
        The loss is not finite. The parameters are those before that step.
    OSError
        The checkpoint could not be written; the one before is as it was.
    Interrupted
        Ctrl-C, as a KeyboardInterrupt with the ``history``: the step is completed and the checkpoint written before
        it is raised, so both are those after a whole step. A second Ctrl-C does not wait.
    ImportError
        An extra is missing.

    Notes
    -----
    Resumed training gives the bits of uninterrupted training on the same machine. The order of an epoch is drawn when
    it begins, and is the only thing drawn from ``rng``.

    Examples
    --------
    >>> from selfattn import nn, training
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
    _check_task(task)
    triplets = _checked_triplets(triplets)
    if isinstance(task, ProxyTask):
        task.check(triplets)
    epochs, batch_size = check_size("epochs", epochs, 0), check_size("batch_size", batch_size)
    if log_every is not None:
        log_every = check_size("log_every", log_every)
    if checkpoint_every is not None:
        checkpoint_every = check_size("checkpoint_every", checkpoint_every)
    if checkpoint is None and (resume or checkpoint_every is not None):
        raise ValueError("resume and checkpoint_every need checkpoint=, the file")
    if not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list of functions, not {type(callbacks).__name__}")
    training = _Training(
        task=task,
        triplets=triplets,
        batch_size=batch_size,
        shuffle=bool(shuffle),
        generator=init.as_generator(rng),
        optimizer=_checked_optimizer(task, optimizer, lr),
        file=None if checkpoint is None else Path(checkpoint),
        callbacks=list(callbacks),
    )
    if training.file is not None:
        import_extra("safetensors", "text")  # before the first epoch, not after
        if not training.file.parent.is_dir():
            raise FileNotFoundError(f"the folder of checkpoint={training.file} does not exist")
        if training.file.exists():
            if not resume:
                raise FileExistsError(f"{training.file} is there already: resume=True goes on from it")
            training.restore()
        training.check_saving()
    with Progress(
        progress, log_every, epochs, training.steps, training.epoch, training.done // batch_size
    ) as shown:
        training.run(epochs, shown, checkpoint_every)
    return training.history


@dataclass
class _Training:
    """A training and its place: ``done`` triplets of epoch number ``epoch``, in ``order``."""

    task: Task
    triplets: list[tuple[Any, ...]]
    batch_size: int
    shuffle: bool
    generator: init.Generator
    optimizer: Optimizer
    file: Path | None
    callbacks: list[Callback]
    epoch: int = 0
    done: int = 0
    order: npt.NDArray[np.int64] | None = None  # None before an epoch's first step
    total_loss: float = 0.0  # of the epoch
    history: History = field(default_factory=History)

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        return -(-len(self.triplets) // self.batch_size)

    def run(self, epochs: int, shown: Progress, checkpoint_every: int | None) -> None:
        # The loss is checked, and shows overflow.
        with _DelayedInterrupt() as interrupt, np.errstate(over="ignore", invalid="ignore"):
            while self.epoch < epochs:
                told = self.step(epochs)
                stop = [callback(told) for callback in self.callbacks]
                shown.step(told)
                ends = told.average_loss is not None
                stopping = interrupt.requested or True in stop
                due = checkpoint_every is not None and told.step % checkpoint_every == 0
                if self.file is not None and (ends or stopping or due):
                    self.save()
                if stopping:
                    break
        if interrupt.requested:
            raise Interrupted(self.history)

    def step(self, epochs: int) -> Step:
        """Move the parameters along the gradient of one batch."""
        n = len(self.triplets)
        if self.order is None:
            self.order = np.asarray(self.generator.permutation(n) if self.shuffle else np.arange(n), np.int64)
        batch = [self.triplets[i] for i in self.order[self.done : self.done + self.batch_size].tolist()]
        loss, grads = loss_and_gradients(self.task, batch)
        step = self.done // self.batch_size + 1
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss is {loss} in epoch {self.epoch + 1}, step {step}, with a learning rate of {self.optimizer.lr}; "
                "the parameters are those before this step"
            )
        self.optimizer.step(grads)
        self.history.step_losses.append(loss)
        self.total_loss += loss * len(batch)
        self.done += len(batch)
        average = self.total_loss / n if self.done == n else None
        told = Step(self.epoch + 1, epochs, step, self.steps, loss, average)
        if average is not None:
            self.history.epoch_losses.append(average)
            self.epoch, self.done, self.order, self.total_loss = self.epoch + 1, 0, None, 0.0
        return told

    # -------------------------------------------------------------------------------------------- checkpoints

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """Return what has to be the same for a place in the training to mean anything."""
        return {
            "triplets": len(self.triplets),
            "digest of the triplets": checkpoints.fingerprint(self.triplets),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "optimizer": type(self.optimizer).__name__,
        }

    def save(self) -> None:
        assert self.file is not None
        checkpoints.save(self.file, self._state())

    def check_saving(self) -> None:
        """Find out before the first step whether a checkpoint can hold the state."""
        checkpoints.check(self._state())

    def _state(self) -> dict[str, Any]:
        return {
            "fixed": self._fixed,
            "parameters": self.task.parameters(),
            "optimizer": self.optimizer.state_dict(),
            "generators": [
                checkpoints.generator_state(each)
                for each in checkpoints.generators(self.generator, self.task)
            ],
            "place": [self.epoch, self.done, self.order, self.total_loss],
            "step_losses": np.array(self.history.step_losses, np.float64),
            "epoch_losses": np.array(self.history.epoch_losses, np.float64),
        }

    def restore(self) -> None:
        """Take over what a checkpoint holds, once all of it has been found to fit."""
        assert self.file is not None
        state = checkpoints.load(self.file)
        try:
            _compare("", self._fixed, state["fixed"])
            parameters = self.task.parameters()
            saved = state["parameters"]
            _compare("shapes of ", _shapes(parameters), _shapes(saved))
            epoch, done, order, total_loss = state["place"]
            self._check_place(epoch, done, order, total_loss)
            generators = checkpoints.generators(self.generator, self.task)
            if len(state["generators"]) != len(generators):
                raise ValueError(
                    f"it has {len(state['generators'])} generators, this training {len(generators)}"
                )
            history = History(state["step_losses"].tolist(), state["epoch_losses"].tolist())
            self.optimizer.load_state_dict(state["optimizer"])
            for generator, generator_state in zip(generators, state["generators"], strict=True):
                checkpoints.set_generator_state(generator, generator_state)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            reason = f"{error!r}" if isinstance(error, KeyError | AttributeError) else str(error)
            raise ValueError(f"{self.file} does not fit this training: {reason}") from error
        for name, array in parameters.items():
            array[...] = saved[name]
        self.epoch, self.done, self.order, self.total_loss = epoch, done, order, total_loss
        self.history = history

    def _check_place(self, epoch: Any, done: Any, order: Any, total_loss: Any) -> None:
        n = len(self.triplets)
        if type(epoch) is not int or epoch < 0 or type(total_loss) is not float:
            raise ValueError(f"its place is epoch {epoch!r} with a loss of {total_loss!r}")
        if order is None:
            valid = done == 0
        else:
            valid = type(done) is int and 0 < done < n and done % self.batch_size == 0
            valid = valid and np.array_equal(np.sort(order), np.arange(n))
        if not valid:
            raise ValueError(f"its place is triplet {done!r} in an order that is none of {n} triplets")


def loss_and_gradients(task: Any, batch: Sequence[Sequence[Any]]) -> tuple[float, Gradients]:
    """Return the mean of −confidence over a batch, and its gradients."""
    if len(batch) == 1:
        confidence, pullback = task.vjp(*batch[0])
        return -float(confidence), pullback(-1.0)
    confidences, pullback = task.vjp(*map(list, zip(*batch, strict=True)))
    return -float(np.mean(confidences, dtype=np.float64)), pullback(-1.0 / len(batch))


def _check_task(task: Any) -> None:
    wants = "task must be a ProxyTask, or have its parameters() and vjp(main, similar, non_similar)"
    kind = type(task).__name__
    if not (callable(getattr(task, "parameters", None)) and callable(getattr(task, "vjp", None))):
        raise TypeError(f"{wants}, which {kind} has not")
    try:
        inspect.signature(task.vjp).bind("main", "similar", "non_similar")
    except TypeError:
        hint = "; wrap the model: nn.ProxyTask(model)" if isinstance(task, EmbeddingModel) else ""
        raise TypeError(f"{wants}; that of {kind} takes other arguments{hint}") from None


def _checked_triplets(triplets: Iterable[Sequence[Any]]) -> list[tuple[Any, ...]]:
    if isinstance(triplets, str):
        raise TypeError("triplets must be an iterable of (main, similar, non_similar), not a str")
    checked = []
    for i, triplet in enumerate(triplets):
        if isinstance(triplet, str) or not hasattr(triplet, "__len__") or len(triplet) != 3:
            raise ValueError(f"triplets[{i}] must be (main, similar, non_similar), not {triplet!r:.200}")
        for sentence in triplet:
            if isinstance(sentence, str) and not sentence.strip():
                raise ValueError(f"triplets[{i}] has an empty sentence: {triplet!r:.200}")
        checked.append(tuple(triplet))
    if not checked:
        raise ValueError("triplets is empty; at least one is needed")
    return checked


def _checked_optimizer(task: Task, optimizer: Optimizer | None, lr: float) -> Optimizer:
    parameters, lr = task.parameters(), check_number("lr", lr)
    if optimizer is None:
        return Adam(parameters, lr=lr)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be one of selfattn.optim, not {type(optimizer).__name__}")
    if lr not in (LR, optimizer.lr):
        raise ValueError(f"lr={lr} and an optimizer with lr={optimizer.lr} were given: which one is meant?")
    if {name: id(array) for name, array in optimizer.params.items()} != {
        n: id(a) for n, a in parameters.items()
    }:
        raise ValueError("optimizer must be made of the parameters() of this task; it moves other arrays")
    return optimizer


def _compare(what: str, expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    for name in {**expected, **found}:
        if expected.get(name) != found.get(name):
            raise ValueError(
                f"{what}{name}: {found.get(name)} in the checkpoint, {expected.get(name)} in this training"
            )


def _shapes(arrays: Mapping[str, Array]) -> dict[str, str]:
    return {name: f"{array.shape} of {array.dtype}" for name, array in arrays.items()}


class _DelayedInterrupt:
    """Within it the first Ctrl-C only asks: a step of the optimiser must not be left half done."""

    def __init__(self) -> None:
        self.requested = False
        self._before: Any = None

    def __enter__(self) -> _DelayedInterrupt:
        # Signals reach the main thread alone. Others' handlers stay.
        if (
            threading.current_thread() is threading.main_thread()
            and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
