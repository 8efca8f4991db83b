"""Generators of a training, and their states."""

from __future__ import annotations

from typing import Any

from selfattn.nn.init import Generator
from selfattn.random import TorchGenerator


def generators(rng: Generator | None, task: Any) -> list[Generator]:
    """Return each generator of a training once.

    These are the training's own if it is given, and generators in layers such as Dropout.
    """
    found = [] if rng is None else [rng]
    for module in task.modules() if hasattr(task, "modules") else ():
        found += [each for each in vars(module).values() if isinstance(each, Generator)]
    return list({id(generator): generator for generator in found}.values())


def generator_state(generator: Generator) -> Any:
    """Return the state of a generator, with the cached normal number of a torch_rng."""
    return generator.get_state() if isinstance(generator, TorchGenerator) else generator.bit_generator.state


def set_generator_state(generator: Generator, state: Any) -> None:
    """Set the state that :func:`generator_state` returned; the state of another kind of generator is a ValueError."""
    if isinstance(generator, TorchGenerator):
        generator.set_state(state)
        return
    kind = type(generator.bit_generator).__name__
    if not isinstance(state, dict) or state.get("bit_generator") != kind:
        kept = state.get("bit_generator", state.get("generator")) if isinstance(state, dict) else state
        raise ValueError(f"the checkpoint holds the state of a generator {kept}, rng is a {kind}")
    try:
        generator.bit_generator.state = state
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"the state of the generator in the checkpoint is damaged: {error!r}") from None
