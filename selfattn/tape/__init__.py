"""PyTorch's names on NumPy alone: tensors with gradients, modules, optimisers.

A tutorial's imports change, and its code runs:

>>> import selfattn.tape as torch
>>> import selfattn.tape.nn as nn
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
>>> optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
>>> x = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
>>> target = torch.tensor([[1.0], [2.0], [3.0]])
>>> for _ in range(300):
...     loss = nn.functional.mse_loss(model(x), target)
...     optimizer.zero_grad()
...     loss.backward()
...     optimizer.step()
>>> loss.item() < 0.01
True

The guide's page "From scratch" lists which names are here. Layers call the same C as :mod:`selfattn.nn`.
"""

import math as _math
import sys as _sys
from importlib.util import find_spec as _find_spec
from typing import Any as _Any

from selfattn.tape import autograd as autograd
from selfattn.tape import dtypes, operations
from selfattn.tape import nn as nn
from selfattn.tape import optim as optim
from selfattn.tape import utils as utils
from selfattn.tape.creation import *  # noqa: F403
from selfattn.tape.devices import amp as amp
from selfattn.tape.devices import (
    autocast,
    compile,
    set_float32_matmul_precision,
    set_num_threads,
    use_deterministic_algorithms,
)
from selfattn.tape.devices import backends as backends
from selfattn.tape.devices import checkpoints as _checkpoints
from selfattn.tape.devices import cuda as cuda
from selfattn.tape.devices import distributed as distributed
from selfattn.tape.devices import mps as mps
from selfattn.tape.devices import multiprocessing as multiprocessing
from selfattn.tape.devices import parallel as _parallel
from selfattn.tape.devices import samplers as _samplers
from selfattn.tape.dtypes import (
    Size,
    bfloat16,
    device,
    dtype,
    finfo,
    float16,
    float32,
    float64,
    get_default_dtype,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    result_dtype,
    set_default_dtype,
    uint8,
)
from selfattn.tape.generator import Generator, get_rng_state, initial_seed, manual_seed, seed, set_rng_state
from selfattn.tape.missing import missing as _missing
from selfattn.tape.printing import set_printoptions
from selfattn.tape.serialization import load, save
from selfattn.tape.tensors import (
    Tensor,
    enable_grad,
    inference_mode,
    is_grad_enabled,
    no_grad,
    set_grad_enabled,
)

globals().update(operations.named("t"))
bool, half, float, double = dtypes.bool_, float16, float32, float64
short, int, long = int16, int32, int64
inf, nan, pi, e = _math.inf, _math.nan, _math.pi, _math.e
strided, contiguous_format, preserve_format, channels_last = (
    "strided",
    "contiguous_format",
    "preserve_format",
    "channels_last",
)
__version__ = "2.13.0+selfattn"  # the version of PyTorch whose behaviour this is
result_type = result_dtype

__all__ = [
    "Generator",
    "Size",
    "Tensor",
    "autocast",
    "bfloat16",
    "compile",
    "device",
    "dtype",
    "enable_grad",
    "finfo",
    "get_default_dtype",
    "get_rng_state",
    "iinfo",
    "inference_mode",
    "initial_seed",
    "int8",
    "is_grad_enabled",
    "load",
    "manual_seed",
    "no_grad",
    "save",
    "seed",
    "set_default_dtype",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_num_threads",
    "set_printoptions",
    "set_rng_state",
    "uint8",
    "use_deterministic_algorithms",
]


def allclose(
    input: Tensor, other: Tensor, rtol: _Any = 1e-5, atol: _Any = 1e-8, equal_nan: _Any = False
) -> _Any:
    """Return whether all numbers are close; see :func:`isclose`."""
    return input.isclose(other, rtol, atol, equal_nan).all().item()


def equal(input: Tensor, other: Tensor) -> _Any:
    """Return whether two tensors have the same shape and numbers."""
    return input.shape == other.shape and input.eq(other).all().item()


def numel(input: Tensor) -> _Any:
    """Return the number of elements."""
    return input.numel()


def is_floating_point(input: Tensor) -> _Any:
    """Return whether the numbers are floats."""
    return input.is_floating_point()


setattr(Tensor, "allclose", allclose)  # noqa: B010
setattr(Tensor, "equal", equal)  # noqa: B010


class _KindOfTensor(type):
    """The kind of a class such as FloatTensor, of which tensors of a dtype are instances."""

    dtype: dtypes.dtype

    def __instancecheck__(cls, instance: object) -> _Any:
        return isinstance(instance, Tensor) and instance.dtype is cls.dtype

    def __call__(cls, *data: _Any) -> _Any:
        return Tensor(*data).to(cls.dtype)


globals().update({name: _KindOfTensor(name, (), {"dtype": kind}) for name, kind in dtypes.KINDS.items()})

# Modules of PyTorch that texts import from, and where their names are here.
for _place, _module in {
    "amp": amp,
    "backends": backends,
    "cuda": cuda,
    "cuda.amp": amp,
    "distributed": distributed,
    "multiprocessing": multiprocessing,
    "nn.modules": nn,
    "nn.parallel": _parallel,
    "nn.parameter": nn,
    "nn.utils.clip_grad": nn.utils,
    "nn.utils.rnn": nn.utils,
    "optim.optimizer": optim,
    "utils.checkpoint": _checkpoints,
    "utils.data.dataloader": utils.data,
    "utils.data.dataset": utils.data,
    "utils.data.distributed": _samplers,
    "utils.data.sampler": utils.data,
}.items():
    _sys.modules[f"{__name__}.{_place}"] = _module
    _parent, _, _name = f"{__name__}.{_place}".rpartition(".")
    setattr(_sys.modules[_parent], _name, _module)

if _find_spec("einops"):
    from selfattn.tape import einops  # noqa: F401


def __getattr__(name: str) -> _Any:
    raise _missing("torch", name)
