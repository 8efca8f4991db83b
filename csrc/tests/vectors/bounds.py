"""Magnitudes of numbers with the sizes of their errors."""

from __future__ import annotations

import numpy as np
from case import reference


def clean(x):
    """Return 0 for what is not finite: it reaches no result that is."""
    return np.where(np.isfinite(x), x, 0)


def finite(x):
    """Return magnitudes, with 0 for what is not finite."""
    return np.abs(clean(x))


def transposed(x):
    """Return matrices with rows for columns."""
    return x.swapaxes(-1, -2)


def folded(x, shape):
    """Sum over query heads that share a key head, and over axes along which an array of ``shape`` is broadcast."""
    if len(shape) > 2:
        *lead, heads, rows, columns = x.shape
        x = x.reshape(*lead, shape[-3], heads // shape[-3], rows, columns).sum(-3)
    return reference.arrays.sum_to_shape(x, shape)


class Bound:
    """Magnitudes of an array, and the sizes of its errors, which sums and products carry on.

    A product's error is each factor's error times the other's magnitude, and one rounding; a sum has a rounding for
    each of its terms. What is given has no error, or a rounding if it is converted.
    """

    def __init__(self, x, error=0.0):
        self.x, self.error = finite(x), error

    def __add__(self, other):
        return Bound(self.x + other.x, self.error + other.error + self.x + other.x)

    def __mul__(self, other):
        other = other if isinstance(other, Bound) else Bound(other)
        return Bound(self.x * other.x, self.x * other.error + self.error * other.x + self.x * other.x)

    def __matmul__(self, other):
        error = self.x @ _full(other) + _full(self) @ other.x
        return Bound(self.x @ other.x, error + (self.x.shape[-1] + 4) * (self.x @ other.x))

    def map(self, function, terms=0):
        """Apply a sum of this many terms, or a change of the shape."""
        return Bound(function(self.x), function(_full(self) + terms * self.x))

    def sum(self, axis=-1):
        """Sum over an axis."""
        return self.map(lambda x: x.sum(axis), self.x.shape[axis])

    @property
    def T(self):  # noqa: N802
        """Matrices with rows for columns."""
        return self.map(transposed)

    @property
    def columns(self):
        """Numbers of rows as columns."""
        return self.map(lambda x: x[..., None])


def _full(bound):
    """Return the sizes of errors, of the magnitudes' shape."""
    return np.broadcast_to(bound.error, bound.x.shape)
