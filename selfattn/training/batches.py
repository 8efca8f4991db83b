"""The sources of batches: items in an order, a stream of batches, or a function that draws them.

Each source counts the items that it has returned in this epoch, ``done``, and can begin again at such a place.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn._check import as_array
from selfattn.nn.init import Generator


class Batch(NamedTuple):
    """A batch, which goes through the model at once, and its number of items."""

    content: Any
    items: int


class Items:
    """Items of a sequence: each epoch takes them all, ``batch_size`` at a time, with ``shuffle`` in a new order.

    Without ``batch_size`` the items are batches.
    """

    endless = False

    def __init__(
        self,
        items: Sequence[Any] | npt.NDArray[Any],
        batch_size: int | None,
        shuffle: bool,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.items, self.batch_size, self.shuffle, self.collate = items, batch_size, shuffle, collate
        self.done = 0
        self.order: npt.NDArray[np.int64] | None = None  # None before an epoch's first item

    @property
    def batches(self) -> int | None:
        """The number of batches of an epoch."""
        return -(-len(self.items) // (self.batch_size or 1))

    def begin(self, generator: Generator) -> None:
        """Draw the order of an epoch, if there is none yet."""
        if self.order is None:
            n = len(self.items)
            self.order = np.asarray(generator.permutation(n) if self.shuffle else np.arange(n), np.int64)

    def take(self, generator: Generator) -> Batch:
        """Return the next batch."""
        self.begin(generator)
        assert self.order is not None
        chosen = self.order[self.done : self.done + (self.batch_size or 1)].tolist()
        found = [self.items[i] for i in chosen]
        self.done += len(found)
        return Batch(found[0] if self.batch_size is None else self.collate(found), len(found))

    @property
    def ended(self) -> bool:
        """Whether the epoch has no more items."""
        return self.done == len(self.items)

    def reset(self) -> None:
        """Go to the beginning of the next epoch."""
        self.done, self.order = 0, None

    def restore(self, done: Any, order: Any) -> None:
        """Set the place in the epoch; an impossible place is a ValueError."""
        n = len(self.items)
        if order is None:
            valid = done == 0
        else:
            valid = type(done) is int and 0 < done < n and done % (self.batch_size or 1) == 0
            valid = valid and np.array_equal(np.sort(order), np.arange(n))
        if not valid:
            raise ValueError(f"its place is item {done!r} in an order that is not one of {n} items")
        self.done, self.order = done, order


class CountedBatches:
    """Batches without an order to save: their place is a count."""

    batch_size: int | None = None
    shuffle = endless = False
    order = None

    def __init__(self) -> None:
        self.done = 0

    def restore(self, done: Any, order: Any) -> None:
        """Set the place in the epoch; an impossible place is a ValueError."""
        if type(done) is not int or done < 0 or order is not None:
            raise ValueError(f"its place is batch {done!r}")
        self.done = done


class Stream(CountedBatches):
    """An iterable of batches: each epoch iterates over it again."""

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__()
        self.source = batches
        self.iterator: Iterator[Any] | None = None
        self.ahead: list[Any] = []  # the next batch, or nothing at the end

    @property
    def once(self) -> bool:
        """Whether the batches are an iterator, which ends after one epoch."""
        return isinstance(self.source, Iterator)

    @property
    def batches(self) -> int | None:
        """The number of batches of an epoch, if it is known."""
        return len(self.source) if isinstance(self.source, Sized) else None

    def begin(self, generator: Generator) -> None:
        """Begin an epoch, if it has not begun."""
        if self.iterator is None:
            self.iterator = itertools.islice(self.source, self.done, None)
            self.ahead = list(itertools.islice(self.iterator, 1))
            if not self.ahead:
                raise ValueError(f"batches has ended after {self.done}; at least one more is needed")

    def take(self, generator: Generator) -> Batch:
        """Return the next batch."""
        self.begin(generator)
        assert self.iterator is not None
        (batch,) = self.ahead
        self.ahead = list(itertools.islice(self.iterator, 1))
        self.done += 1
        return Batch(batch, 1)

    @property
    def ended(self) -> bool:
        """Whether the epoch has no more batches."""
        return not self.ahead

    def reset(self) -> None:
        """Go to the beginning of the next epoch."""
        self.done, self.iterator, self.ahead = 0, None, []


class Draws(CountedBatches):
    """Batches that a function draws with a random generator, without epochs."""

    batches: int | None = None
    endless, ended = True, False

    def __init__(self, draw: Callable[[Generator], Any]) -> None:
        super().__init__()
        self.draw = draw

    def begin(self, generator: Generator) -> None:
        """Do nothing: every batch is drawn when it is taken."""

    def take(self, generator: Generator) -> Batch:
        """Draw a batch."""
        batch = self.draw(generator)
        self.done += 1
        return Batch(batch, 1)

    def reset(self) -> None:
        """Do nothing: there is no end."""


Source = Items | Stream | Draws


def source_of(batches: Any, batch_size: int | None, shuffle: bool | None) -> Source:
    """Return the source of batches; a wrong type, an empty sequence and options that need a sequence are errors."""
    if isinstance(batches, np.ndarray) and batches.ndim == 0:
        raise TypeError("batches is an array without dimensions; one batch for each row is needed")
    if is_sequence(batches):
        if not len(batches):
            raise ValueError("batches is empty; at least one is needed")
        return Items(batches, batch_size, shuffle is None or shuffle, stacked)
    kind = "a function" if inspect.isroutine(batches) else type(batches).__name__
    for name, given in {"batch_size": batch_size, "shuffle": shuffle or None}.items():
        if given is not None:
            raise ValueError(f"{name}={given} needs batches in a sequence, such as a list; not {kind}")
    if callable(batches):
        try:
            inspect.signature(batches).bind("rng")
        except TypeError:
            raise TypeError(
                "a function as batches must take one argument, the generator that it draws with: its "
                "state is part of a checkpoint"
            ) from None
        except ValueError:
            pass  # a function without a signature
        return Draws(batches)
    if isinstance(batches, Iterable) and not isinstance(batches, str | bytes | Mapping):
        return Stream(batches)
    raise TypeError(
        f"batches must be a sequence or an iterable of batches, or a function that draws one, not {kind}"
    )


def is_sequence(batches: Any) -> bool:
    """Return whether items can be taken in any order."""
    is_indexed = hasattr(batches, "__getitem__") and hasattr(batches, "__len__")
    return is_indexed and not isinstance(batches, str | bytes | Mapping)


def is_example(item: Any) -> bool:
    """Return whether an item of a sequence is an example of texts, not a batch."""
    return isinstance(item, tuple | list) and bool(item) and isinstance(item[0], str)


def stacked(examples: list[Any]) -> Any:
    """Stack examples to a batch: arrays get one more axis, tuples become a tuple, dicts a dict, texts a list."""
    first = examples[0]
    if isinstance(first, str):
        return examples
    if isinstance(first, Mapping):
        return {key: stacked([example[key] for example in examples]) for key in first}
    if isinstance(first, tuple) or is_example(first):
        return tuple(stacked(list(column)) for column in zip(*examples, strict=True))
    arrays = [np.asarray(as_array("an example", example)) for example in examples]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise ValueError(
            f"examples of one batch differ in shape: {shapes}; pad them, or make the batches yourself"
        )
    return np.stack(arrays)
