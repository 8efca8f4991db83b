"""Training whose batches are computed in shares, by the workers of a client."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from selfattn._check import Array, check_size, seed_from_rng
from selfattn._extras import import_extra
from selfattn._version import __version__
from selfattn.functional._products import widened
from selfattn.interop.dask.workers import on_worker, tree
from selfattn.nn import add_gradients
from selfattn.random import TorchGenerator
from selfattn.training.generators import generators
from selfattn.training.objectives import gradients_in, objective_of

Shared: TypeAlias = tuple[float, dict[str, Array], float]  # a loss, gradients, and what counts


class reducer:  # noqa: N801 # a function for users
    """Compute the loss of a batch and its gradients in shares.

    It is the argument ``reduce`` of :func:`selfattn.training.fit`.

    A batch is cut along the first axis of each array (layers need ``batch_first=True``) into ``shares`` pieces,
    whatever the number of workers. Each is computed by some worker, and workers sum their gradients in a tree over
    the pieces, so the weights have the same bits for any number of workers, also if one dies.

    Parameters
    ----------
    client : distributed.Client
    shares : int, default 8
        A batch of fewer items has fewer pieces. The loss of a batch is the mean over all that counts in it, such as
        the tokens that are not ignored, whatever piece they are in.

    Notes
    -----
    With each batch a worker receives the model, and holds gradients of up to four pieces, and what the backward pass
    of one piece keeps, once for each of its threads; the client receives one sum. Layers that drop draw from
    generators of their own for each piece, whose seeds come from the model's generators. A loss whose wrong answers
    are the texts of other examples gets the embeddings of the whole batch, on the client, and pieces then take their
    gradients: texts are computed twice, and the loss is that without pieces.

    Examples
    --------
    >>> import numpy as np
    >>> from distributed import Client
    >>> from selfattn import nn, training
    >>> from selfattn.interop.dask import reducer
    >>> x = np.random.default_rng(0).standard_normal((64, 3), dtype=np.float32)
    >>> model = nn.Linear(3, 1, rng=0)
    >>> with Client(n_workers=2, threads_per_worker=1) as client:  # doctest: +SKIP
    ...     history = training.fit(model, list(zip(x, x[:, :1])), nn.MSELoss(), batch_size=16, reduce=reducer(client))
    """

    def __init__(self, client: Any, shares: int = 8) -> None:
        if not callable(getattr(client, "submit", None)):
            raise TypeError(f"client must be a distributed.Client, got {type(client).__name__}")
        self.client, self.shares = client, check_size("shares", shares)

    def __call__(self, model: Any, loss: Any, batch: Any) -> tuple[float, dict[str, Array]]:
        """Return the loss of a batch, and its gradients."""
        return self.counted(model, loss, batch)[:2]

    def counted(self, model: Any, loss: Any, batch: Any) -> tuple[float, dict[str, Array], float]:
        """Return the loss of a batch, its gradients, and what the mean divides by, which ``fit`` asks for.

        Parameters
        ----------
        model, loss, batch : object
            As ``fit`` has them.

        Returns
        -------
        tuple of (float, dict of str to ndarray, float)
        """
        items = _items(batch)
        cuts = np.linspace(0, items, min(self.shares, items) + 1).astype(int).tolist()
        drops = generators(None, model)
        seed = seed_from_rng(drops[0]) if drops else 0
        pickled = import_extra("cloudpickle", "dask").dumps((model, loss))  # also what a notebook defines
        how = cuts, seed, pickled
        if getattr(loss, "in_batch", False):  # the texts of all pieces are wrong answers
            value, slopes = loss.vjp(self._combined(embed, joined, batch, *how))
            return float(value), self._combined(pull, add, (*batch, *slopes(1.0)), *how)[1], items
        value, grads, count = self._combined(share, add, batch, *how)
        if getattr(loss, "reduction", None) == "sum":
            return value, grads, count
        with np.errstate(all="ignore"):  # nothing counts: NaN, as without pieces
            each = np.float64(1) / count
            return float(value * each), {name: x * x.dtype.type(each) for name, x in grads.items()}, count

    def _combined(self, function: Any, combine: Any, *given: Any) -> Any:
        """Return what a function computes of each piece of a batch, combined."""
        while True:
            workers = sorted(self.client.nthreads())
            total, lost = self._submitted(function, combine, workers or [None], *given), False
            while not lost and not total.done():
                try:
                    total.result(2)
                except TimeoutError:
                    # If all workers died at once, Dask keeps tasks for their addresses for ever, though others may
                    # have them.
                    alive = self.client.nthreads().keys()
                    lost = bool(workers and alive) and alive.isdisjoint(workers)
            if total.done():
                return total.result()

    def _submitted(
        self,
        function: Any,
        combine: Any,
        workers: Sequence[str | None],
        batch: Any,
        cuts: list[int],
        seed: int,
        pickled: bytes,
    ) -> Any:
        """Submit the tasks of a batch, and return the future of what is combined."""
        # Dask copies bytes, but no arrays.
        sent = self._submit(workers[0], held, np.frombuffer(pickled, np.uint8))
        parts = []
        for n, (begin, end) in enumerate(itertools.pairwise(cuts)):
            # Neighbours have one worker, which sums them; without a place all would wait for the one that has the
            # model.
            worker = workers[n * len(workers) // (len(cuts) - 1)]
            piece = _piece(batch, begin, end)
            parts.append(self._submit(worker, function, sent, [seed, n], end - begin, piece))
        return tree(lambda few: self._submit(None, combine, few), parts)

    def _submit(self, worker: str | None, function: Any, *arguments: Any) -> Any:
        """Submit a task to a worker, or to another if that one dies."""
        where: dict[str, Any] = {"workers": [worker], "allow_other_workers": True} if worker else {}
        return self.client.submit(function, __version__, *arguments, pure=False, **where)


def _items(batch: Any) -> int:
    """Return the number of items of a batch: the length of its arrays, or of its list."""
    if isinstance(batch, Mapping):
        batch = tuple(batch.values())
    if isinstance(batch, tuple):
        lengths = sorted({_items(x) for x in batch if not (isinstance(x, Mapping) and not x)})
        if len(lengths) != 1:
            raise ValueError(
                f"a batch is cut along the first axis of its arrays, whose lengths differ: {lengths}"
            )
        return lengths[0]
    if not hasattr(batch, "__len__") or isinstance(batch, str) or len(batch) == 0:
        raise TypeError(f"a batch must have arrays or lists of items, to be cut; got {type(batch).__name__}")
    return len(batch)


def _piece(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _piece(x, begin, end) for name, x in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_piece(x, begin, end) for x in batch)
    return batch[begin:end]


@on_worker
def held(pickled: Any) -> Any:
    """Return the model and the loss: a task, so that the client sends them once, and again if a worker dies."""
    return pickled


def _loaded(pickled: Any, seed: list[int]) -> tuple[Any, Any]:
    """Return a model and a loss of a task's own; for a piece, layers drop the same each time."""
    model, loss = pickle.loads(pickled)
    fresh: dict[int, np.random.Generator] = {}
    for module in model.modules() if hasattr(model, "modules") else ():
        for name, each in vars(module).items():
            if isinstance(each, np.random.Generator | TorchGenerator):
                vars(module)[name] = fresh.setdefault(id(each), np.random.default_rng([*seed, len(fresh)]))
    return model, loss


@on_worker
def embed(pickled: Any, seed: list[int], items: int, piece: tuple[list[str], ...]) -> list[Array]:
    """Return the embeddings of a piece, by columns of texts."""
    model, _ = _loaded(pickled, seed)
    return np.split(model([text for column in piece for text in column]), len(piece))


@on_worker
def joined(parts: list[list[Array]]) -> list[Array]:
    """Return the columns of neighbours as one each."""
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


@on_worker
def pull(pickled: Any, seed: list[int], items: int, piece: tuple[Any, ...]) -> Shared:
    """Return the gradients of a piece: columns of texts, and the gradients of their embeddings."""
    model, _ = _loaded(pickled, seed)
    columns, slopes = piece[: len(piece) // 2], piece[len(piece) // 2 :]
    y, pullback = model.vjp([text for column in columns for text in column])
    grads = gradients_in(pullback(np.concatenate(slopes).astype(y.dtype)))
    return 0.0, {name: widened(x) for name, x in grads.items()}, 0.0


@on_worker
def share(pickled: Any, seed: list[int], items: int, piece: Any) -> Shared:
    """Return what a piece adds to the loss, to the gradients and to what counts, by a model of this task's own."""
    model, loss = _loaded(pickled, seed)
    objective = objective_of(model, loss)
    value, grads, count = objective.gradients(piece)
    count = 1.0 if objective.adds else float(items if count is None else count)
    if count == 0:  # the mean of nothing is NaN
        return 0.0, {name: np.zeros_like(x) for name, x in grads.items()}, 0.0
    wide = {name: widened(x) for name, x in grads.items()}  # a sum of float16 may overflow
    return value * count, {name: x * x.dtype.type(count) for name, x in wide.items()}, count


@on_worker
def add(parts: list[Shared]) -> Shared:
    """Sum losses, gradients and counts of neighbours."""
    grads: dict[str, Array] = {}
    for _, found, _ in parts:
        add_gradients(grads, found)
    return sum(value for value, _, _ in parts), grads, sum(count for _, _, count in parts)
