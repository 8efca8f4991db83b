"""Operations of tensors: :data:`TABLE` has all of them by name, and the places where PyTorch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from selfattn.tape.operations import (
    casts,
    elementwise,
    indices,
    joins,
    layers,
    masks,
    products,
    reductions,
    views,
)
from selfattn.tape.operations.table import NUMBERS, TABLE, Composite, Operation, in_place
from selfattn.tape.tensors import Tensor

__all__ = [
    "TABLE",
    "Composite",
    "Operation",
    "casts",
    "elementwise",
    "indices",
    "joins",
    "layers",
    "masks",
    "named",
    "products",
    "reductions",
    "views",
]

OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "truediv": "true_divide",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
}
OPERANDS = (Tensor, *NUMBERS, np.ndarray)
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# Other names that PyTorch has for an operation.
ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "less": "lt",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
}


def called(found: Operation | Composite) -> Callable[..., Any]:
    """Return the function of an operation."""
    if isinstance(found, Composite):
        return found.function
    function: Callable[..., Any] = found.call
    return function


def named(place: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of one place by name, "t" for ``torch`` and "f" for ``torch.nn.functional``."""
    found = {name: called(op) for name, op in TABLE.items() if place in op.places}
    return found | {alias: found[name] for alias, name in ALIASES.items() if name in found}


def _operators(name: str, op: Operation) -> None:
    """Give tensors the operator of an operation, with a number on either side, and in place."""
    call = op.call

    def forward(self: Tensor, other: Any) -> Any:
        try:
            return call(self, other)
        except TypeError:
            if isinstance(other, OPERANDS):
                raise
            return NotImplemented

    def reflected(self: Tensor, other: Any) -> Any:
        return call(other, self) if isinstance(other, OPERANDS) else NotImplemented

    setattr(Tensor, f"__{name}__", forward)
    if name not in COMPARISONS:
        setattr(Tensor, f"__r{name}__", reflected)
        setattr(Tensor, f"__i{name}__", in_place(op))


def _install() -> None:
    for name, op in TABLE.items():
        if "m" in op.places:
            method = getattr(op, "method", None) or called(op)
            setattr(Tensor, name, method)
        if "i" in op.places:
            setattr(Tensor, f"{name}_", in_place(op))
    for alias, name in ALIASES.items():
        if hasattr(Tensor, name):
            setattr(Tensor, alias, getattr(Tensor, name))
    for operator, name in OPERATORS.items():
        _operators(operator, TABLE[name])
    for name in COMPARISONS:
        _operators(name, TABLE[name])
    t: Any = Tensor
    t.__neg__, t.__abs__, t.__invert__ = (called(TABLE[name]) for name in ("neg", "abs", "bitwise_not"))
    t.__getitem__, t.__setitem__ = indices.getitem, indices.setitem
    t.__iter__ = lambda self: iter(self.unbind(0))
    t.T = property(lambda self: views.permute(self, *range(self.ndim)[::-1]))
    t.mT = property(lambda self: self.transpose(-2, -1))
    t.H = t.T


_install()
