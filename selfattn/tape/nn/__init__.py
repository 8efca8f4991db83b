"""Modules and layers, as ``torch.nn``."""

from typing import Any

from selfattn.tape.missing import missing
from selfattn.tape.nn import functional, init, layers, module, utils
from selfattn.tape.nn.attention import MultiheadAttention
from selfattn.tape.nn.layers import (
    Dropout,
    Embedding,
    Flatten,
    Identity,
    LayerNorm,
    LazyLinear,
    Linear,
    PReLU,
    RMSNorm,
)
from selfattn.tape.nn.module import Module, ModuleDict, ModuleList, ParameterList, Sequential
from selfattn.tape.tensors import Parameter

_FUNCTIONS = {name: getattr(layers, name) for name in layers.FUNCTIONS}
globals().update(_FUNCTIONS)

__all__ = [
    "Dropout",
    "Embedding",
    "Flatten",
    "Identity",
    "LayerNorm",
    "LazyLinear",
    "Linear",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "PReLU",
    "Parameter",
    "ParameterList",
    "RMSNorm",
    "Sequential",
    "functional",
    "init",
    "module",
    "utils",
]
__all__ += list(_FUNCTIONS)


def __getattr__(name: str) -> Any:
    raise missing("torch.nn", name)
