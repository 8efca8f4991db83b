"""Functions of ``torch.nn.functional``, from the table of operations."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from selfattn.tape.operations import TABLE, named
from selfattn.tape.operations.table import in_place

# Those that write into their input with inplace=True, and do not have that option in the table.
INPLACE = (
    "relu",
    "relu6",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "silu",
    "mish",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
)


def _with_inplace(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    written = in_place(TABLE[name])

    @wraps(plain)
    def function(input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Any:
        return written(input, *args, **kwargs) if inplace else plain(input, *args, **kwargs)

    return function


globals().update(named("f"))
globals().update({name: _with_inplace(name, named("f")[name]) for name in INPLACE})
__all__ = sorted(named("f"))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    from selfattn.tape.missing import missing

    raise missing("torch.nn.functional", name)
