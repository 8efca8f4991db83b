"""Doors to other libraries: one small module for each, which imports its library and is loaded when it is first named.

``selfattn.interop.torch`` needs ``pip install 'selfattn[torch]'``, ``selfattn.interop.jax`` needs ``selfattn[jax]``,
and so on. Doors for texts are in the package selfattn-models, and keep their names here.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = [
    "autograd",
    "bertopic",
    "dask",
    "huggingface",
    "jax",
    "langchain",
    "sentence_transformers",
    "sklearn",
    "torch",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return import_module(f"selfattn.interop.{name}")
        raise AttributeError(
            f"module 'selfattn.interop' has no attribute {name!r}; it has {', '.join(__all__)}"
        )


def __dir__() -> list[str]:
    return __all__
