"""Training whose batches are computed in shares, by the workers of a client."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

import selfattn
from selfattn._check import Array, check_size, seed_from_rng
from selfattn._extras import import_extra
from selfattn.interop.dask._workers import on_worker
from selfattn.nn import add_gradients
from selfattn.random import TorchGenerator
from selfattn.training.checkpoint import generators
from selfattn.training.loop import objective_of


class reducer:  # noqa: N801 # a function for users
    """Compute the loss of a batch and its gradients in shares: the argument ``reduce`` of :func:`selfattn.training.fit`.

    A batch is cut along the first axis of each array (layers need ``batch_first=True``) into ``shares`` pieces, whatever the number
    of workers. Each is computed by some worker, and their gradients are summed in the order of the pieces, so the weights have
    the same bits for any number of workers, also if one dies.

    Parameters
    ----------
    client : distributed.Client
    shares : int, default 8
        A batch of fewer items has fewer pieces. The loss is the mean over the items: a loss that is a mean over something else, such
        as the tokens that are not ignored, weights each piece by its items.

    Notes
    -----
    With each batch a worker receives the model, and sends the gradients of a piece; it holds both, and what the backward pass
    of one piece keeps, once for each of its threads. Layers that drop draw from generators of their own for each piece, whose seeds
    come from the model's generators.

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
        """Return the mean loss over the items of a batch, and its gradients."""
        items = _items(batch)
        cuts = np.linspace(0, items, min(self.shares, items) + 1).astype(int).tolist()
        drops = generators(None, model)
        seed = seed_from_rng(drops[0]) if drops else 0
        pickled = import_extra("cloudpickle", "dask").dumps((model, loss))  # also what a notebook defines
        # Without a place of their own pieces would wait for the worker that has the model first.
        workers = sorted(self.client.nthreads()) or [None]
        sent = [self._submit(each, held, pickled) for each in workers]
        futures = [
            self._submit(
                workers[n % len(workers)], share, sent[n % len(workers)], [seed, n], _piece(batch, *ends)
            )
            for n, ends in enumerate(itertools.pairwise(cuts))
        ]
        total: float = 0.0
        grads: dict[str, Array] = {}
        for (value, found), (begin, end) in zip(
            self.client.gather(futures), itertools.pairwise(cuts), strict=True
        ):
            factor = (end - begin) / items
            total += value * factor
            add_gradients(grads, {name: x * x.dtype.type(factor) for name, x in found.items()})
        return total, grads

    def _submit(self, worker: str | None, function: Any, *arguments: Any) -> Any:
        """Submit a task to a worker, or to another if that one dies."""
        where: dict[str, Any] = {"workers": [worker], "allow_other_workers": True} if worker else {}
        return self.client.submit(function, selfattn.__version__, *arguments, pure=False, **where)


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
def held(pickled: bytes) -> bytes:
    """Return the model and the loss: a task, so that a worker receives them once, and again if another one dies."""
    return pickled


@on_worker
def share(pickled: bytes, seed: list[int], piece: Any) -> tuple[float, dict[str, Array]]:
    """Return the loss and the gradients of a piece, by a model of this task's own."""
    model, loss = pickle.loads(pickled)
    fresh: dict[int, np.random.Generator] = {}
    for module in model.modules() if hasattr(model, "modules") else ():
        for name, each in vars(module).items():
            if isinstance(each, np.random.Generator | TorchGenerator):
                vars(module)[name] = fresh.setdefault(id(each), np.random.default_rng([*seed, len(fresh)]))
    return objective_of(model, loss).gradients(piece)
