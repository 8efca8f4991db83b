"""Data sets, and batches of them in PyTorch's order for a seed, as ``torch.utils.data``."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import numpy as np

from selfattn.random import TorchGenerator
from selfattn.tape.creation import source, tensor
from selfattn.tape.operations.joins import stack
from selfattn.tape.tensors import Tensor, wrap

__all__ = [
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "IterableDataset",
    "RandomSampler",
    "SequentialSampler",
    "Subset",
    "TensorDataset",
    "default_collate",
    "random_split",
]


class Dataset:
    """The base of data sets: a subclass defines ``__getitem__`` and ``__len__``."""

    def __class_getitem__(cls, item: Any) -> type[Dataset]:
        return cls

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} does not define __getitem__")

    def __add__(self, other: Dataset) -> ConcatDataset:
        return ConcatDataset([self, other])


class IterableDataset(Dataset):
    """The base of data sets that are iterated over alone: a subclass defines ``__iter__``."""


class TensorDataset(Dataset):
    """Tensors whose rows belong together.

    Parameters
    ----------
    *tensors : Tensor
        Of the same length.
    """

    def __init__(self, *tensors: Tensor) -> None:
        if len({len(t) for t in tensors}) > 1:
            raise AssertionError(
                f"Size mismatch between tensors: their lengths are {[len(t) for t in tensors]}"
            )
        self.tensors = tensors

    def __getitem__(self, index: Any) -> tuple[Any, ...]:
        return tuple(t[index] for t in self.tensors)

    def __len__(self) -> int:
        return len(self.tensors[0])


class Subset(Dataset):
    """Some items of a data set.

    Parameters
    ----------
    dataset : Dataset
    indices : sequence of int
    """

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.indices[index]]

    def __len__(self) -> int:
        return len(self.indices)


class ConcatDataset(Dataset):
    """Data sets one after the other.

    Parameters
    ----------
    datasets : iterable of Dataset
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self.datasets = list(datasets)
        self.cumulative_sizes = list(accumulate(len(d) for d in self.datasets))

    def __getitem__(self, index: int) -> Any:
        index = index + len(self) if index < 0 else index
        n = bisect.bisect_right(self.cumulative_sizes, index)
        return self.datasets[n][index - (self.cumulative_sizes[n - 1] if n else 0)]

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]


def random_split(
    dataset: Any, lengths: Sequence[float], generator: TorchGenerator | None = None
) -> list[Subset]:
    """Split a data set at random into parts of some lengths, or of some fractions."""
    n = len(dataset)
    if math.isclose(sum(lengths), 1) and sum(lengths) <= 1:
        sizes = [math.floor(n * fraction) for fraction in lengths]
        for i in range(n - sum(sizes)):
            sizes[i % len(sizes)] += 1
    else:
        sizes = [int(length) for length in lengths]
    if sum(sizes) != n:
        raise ValueError(f"the lengths {list(lengths)} do not add up to the length of the data set, {n}")
    order = source(generator).randperm(n).tolist()
    return [
        Subset(dataset, order[end - size : end]) for end, size in zip(accumulate(sizes), sizes, strict=True)
    ]


class SequentialSampler:
    """The items in order.

    Parameters
    ----------
    data_source : Dataset
    """

    def __init__(self, data_source: Any) -> None:
        self.data_source = data_source

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source)))

    def __len__(self) -> int:
        return len(self.data_source)


class RandomSampler(SequentialSampler):
    """The items in an order that is drawn for each epoch, or drawn with replacement.

    Parameters
    ----------
    data_source : Dataset
    replacement : bool, default False
    num_samples : int, optional
        How many are drawn; by default as many as there are items.
    generator : Generator, optional
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: TorchGenerator | None = None,
    ) -> None:
        super().__init__(data_source)
        self.replacement, self.generator = replacement, generator
        self.num_samples = len(data_source) if num_samples is None else num_samples

    def __iter__(self) -> Iterator[int]:
        own, n = self.generator, len(self.data_source)
        if own is None:
            own = TorchGenerator(source(None).random_int64())

        def drawn() -> Iterator[list[int]]:
            while True:  # 32 at a time, as in PyTorch
                yield own.integers(0, n, (32,)).tolist() if self.replacement else own.randperm(n).tolist()

        return islice(chain.from_iterable(drawn()), self.num_samples)

    def __len__(self) -> int:
        return self.num_samples


class DataLoader:
    """Batches of a data set; with ``shuffle``, in PyTorch's order for a seed.

    Parameters
    ----------
    dataset : Dataset
    batch_size : int or None, default 1
        None gives single items.
    shuffle : bool, default False
    sampler : iterable of int, optional
        The order of the items.
    batch_sampler : iterable of sequences of int, optional
        The items of each batch.
    num_workers : int, default 0
        Taken, and of no effect: batches are made in this process.
    collate_fn : callable, optional
        From a list of items to a batch; by default :func:`default_collate`.
    drop_last : bool, default False
        Whether a last batch of fewer items is left out.
    generator : Generator, optional
    **options
        ``pin_memory``, ``timeout``, ``worker_init_fn``, ``prefetch_factor`` and ``persistent_workers``, which have no
        effect.

    Examples
    --------
    >>> import selfattn.tape as torch
    >>> from selfattn.tape.utils.data import DataLoader
    >>> torch.manual_seed(0)
    torch_rng(0)
    >>> [batch.tolist() for batch in DataLoader([10, 20, 30, 40], batch_size=2, shuffle=True)]
    [[30, 20], [40, 10]]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        *,
        generator: TorchGenerator | None = None,
        **options: Any,
    ) -> None:
        unknown = set(options) - {
            "timeout",
            "worker_init_fn",
            "prefetch_factor",
            "persistent_workers",
            "multiprocessing_context",
            "pin_memory_device",
        }
        if unknown:
            raise TypeError(f"DataLoader has no option {min(unknown)!r}")
        if sampler is not None and shuffle:
            raise ValueError("sampler option is mutually exclusive with shuffle")
        if batch_size is not None and batch_size < 1:
            raise ValueError(
                f"batch_size should be a positive integer value, but got batch_size={batch_size}"
            )
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        self.num_workers, self.generator = num_workers, generator
        self.batch_sampler = batch_sampler
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = RandomSampler(dataset, generator=generator) if shuffle else SequentialSampler(dataset)
        self.sampler = sampler
        self.collate_fn = collate_fn or (default_collate if batch_size is not None else lambda item: item)

    def __iter__(self) -> Iterator[Any]:
        source(self.generator).random_int64()  # PyTorch draws a seed for its workers
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        if self.batch_sampler is not None:
            for places in self.batch_sampler:
                yield self.collate_fn([self.dataset[i] for i in places])
            return
        items = iter(self.dataset) if self.sampler is None else (self.dataset[i] for i in self.sampler)
        if self.batch_size is None:
            yield from map(self.collate_fn, items)
            return
        while batch := list(islice(items, self.batch_size)):
            if len(batch) < self.batch_size and self.drop_last:
                return
            yield self.collate_fn(batch)

    def __len__(self) -> int:
        if self.batch_sampler is not None:
            return len(self.batch_sampler)
        n = len(self.sampler)
        if self.batch_size is None:
            return n
        return n // self.batch_size if self.drop_last else -(-n // self.batch_size)


def default_collate(batch: list[Any]) -> Any:
    """Make a batch of items: tensors are stacked, numbers become a tensor; so within tuples and dicts."""
    first = batch[0]
    if isinstance(first, Tensor):
        return stack(batch)
    if isinstance(first, np.ndarray | np.generic):
        return wrap(np.stack(batch))
    if isinstance(first, bool | int):
        return tensor(batch)
    if isinstance(first, float):
        return wrap(np.array(batch, np.float64))
    if isinstance(first, str | bytes):
        return batch
    if isinstance(first, Mapping):
        return {key: default_collate([item[key] for item in batch]) for key in first}
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(default_collate(list(group)) for group in zip(*batch, strict=True)))
    if isinstance(first, list | tuple):
        groups = [default_collate(list(group)) for group in zip(*batch, strict=True)]
        return groups
    raise TypeError(f"default_collate: a batch of {type(first).__name__} cannot be made; give a collate_fn")
