"""What an engine answers with: statements to be timed, or the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .cases import Array


class Spelling(NamedTuple):
    """A statement, the names in it, and the step from its value to the array that is compared."""

    statement: str
    names: dict[str, Any]
    to_array: Callable[[Any], Array] = np.asarray


class UnsupportedError(Exception):
    """The library cannot do the case; the text says what."""


def one_array(gradients: Any) -> Array:
    """Put all gradients, one after the other, into one array."""
    return np.concatenate(
        [np.asarray(gradient).reshape(-1) for gradient in gradients if gradient is not None]
    )
