"""Functions of ``torch.nn.functional``, from the table of operations."""

from typing import Any

from selfattn.tape.operations import named

globals().update(named("f"))
__all__ = sorted(named("f"))  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    from selfattn.tape.missing import missing

    raise missing("torch.nn.functional", name)
