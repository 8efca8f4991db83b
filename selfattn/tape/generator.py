"""The generator that all random numbers come from: PyTorch's stream for a seed."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

from selfattn.random import TorchGenerator

_default = [TorchGenerator(secrets.randbits(63))]
_dropout = [np.random.default_rng()]


class Generator(TorchGenerator):
    """A source of random numbers of its own, as ``torch.Generator``; give it as ``generator=``."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__(secrets.randbits(63))

    def seed(self) -> int:
        """Restart from a drawn seed, and return it."""
        return self.manual_seed(secrets.randbits(63)).initial_seed


def default_generator() -> TorchGenerator:
    """Return the generator that functions without ``generator=`` draw from."""
    return _default[0]


def dropout_generator() -> np.random.Generator:
    """Return the source of dropout's masks, which are not PyTorch's."""
    return _dropout[0]


def manual_seed(seed: int) -> TorchGenerator:
    """Restart all random numbers from a seed: those of PyTorch, but for dropout's masks."""
    _default[0].manual_seed(seed)
    _dropout[0] = np.random.default_rng(seed % 2**64)
    return _default[0]


def seed() -> int:
    """Restart all random numbers from a drawn seed, and return it."""
    found = secrets.randbits(63)
    manual_seed(found)
    return found


def initial_seed() -> int:
    """Return the seed of the present stream."""
    return int(_default[0].initial_seed)


def get_rng_state() -> dict[str, Any]:
    """Return the state of all random numbers, for :func:`set_rng_state`."""
    return {"stream": _default[0].get_state(), "dropout": _dropout[0].bit_generator.state}


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from a state of :func:`get_rng_state`."""
    _default[0].set_state(state["stream"])
    _dropout[0].bit_generator.state = state["dropout"]
