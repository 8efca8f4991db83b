"""Tensors as one of the frameworks of einops, and its layers, as ``einops.layers.torch``.

einops finds :class:`TapeBackend` among the subclasses of its base when it first sees a tensor.
"""

from __future__ import annotations

from typing import Any

from einops._backends import AbstractBackend
from einops.layers import RearrangeMixin, ReduceMixin

from selfattn.tape import creation
from selfattn.tape.nn.module import ADOPTED, Module
from selfattn.tape.operations import joins
from selfattn.tape.tensors import Tensor


class TapeBackend(AbstractBackend):
    """What einops calls of a framework."""

    framework_name = "selfattn.tape"

    def is_appropriate_type(self, tensor: Any) -> bool:
        """Return whether an object is a tensor."""
        return isinstance(tensor, Tensor)

    def from_numpy(self, x: Any) -> Any:
        """Make a tensor of an array."""
        return creation.from_numpy(x)

    def to_numpy(self, x: Any) -> Any:
        """Return a tensor's array."""
        return x.detach().numpy()

    def arange(self, start: int, stop: int) -> Any:
        """Return the integers from start to stop."""
        return creation.arange(start, stop)

    def reduce(self, x: Any, operation: str, axes: Any) -> Any:
        """Reduce axes by an operation."""
        if operation in ("min", "max"):
            return getattr(x, f"a{operation}")(tuple(axes))
        if operation in ("sum", "mean", "any", "all"):
            return getattr(x, operation)(tuple(axes))
        if operation == "prod":
            for axis in sorted(axes, reverse=True):
                x = x.prod(axis)
            return x
        raise NotImplementedError(f"einops has no reduction {operation} of tensors here")

    def transpose(self, x: Any, axes: Any) -> Any:
        """Put the axes in another order."""
        return x.permute(*axes)

    def stack_on_zeroth_dimension(self, tensors: list[Any]) -> Any:
        """Join tensors along a new first axis."""
        return joins.stack(tensors)

    def add_axis(self, x: Any, new_position: int) -> Any:
        """Add an axis of size 1."""
        return x.unsqueeze(new_position)

    def add_axes(self, x: Any, n_axes: int, pos2len: dict[int, int]) -> Any:
        """Add axes, and repeat the tensor along them."""
        sizes = [-1] * n_axes
        for position, length in pos2len.items():
            x = x.unsqueeze(position)
            sizes[position] = length
        return x.expand(*sizes)

    def tile(self, x: Any, repeats: Any) -> Any:
        """Repeat the whole tensor along axes."""
        return x.repeat(*repeats)

    def concat(self, tensors: list[Any], axis: int) -> Any:
        """Join tensors along an axis."""
        return joins.cat(tensors, axis)

    def is_float_type(self, x: Any) -> bool:
        """Return whether the numbers are floats."""
        return bool(x.is_floating_point())

    def einsum(self, pattern: str, *x: Any) -> Any:
        """Return a sum of products."""
        from selfattn.tape.operations.products import einsum

        return einsum(pattern, *x)


class _Layer(Module):
    def forward(self, input: Any) -> Any:
        """Rearrange or reduce the axes, as the pattern says."""
        return self._apply_recipe(input)


class Rearrange(RearrangeMixin, _Layer):
    """The layer of ``einops.rearrange``."""


class Reduce(ReduceMixin, _Layer):
    """The layer of ``einops.reduce``."""


def _adopted(layer: Any) -> Any:
    """Return the layer of this module in place of PyTorch's of the same name."""
    if type(layer).__name__ == "Rearrange":
        return Rearrange(layer.pattern, **layer.axes_lengths)
    if type(layer).__name__ == "Reduce":
        return Reduce(layer.pattern, layer.reduction, **layer.axes_lengths)
    return layer


ADOPTED["einops.layers.torch"] = _adopted
