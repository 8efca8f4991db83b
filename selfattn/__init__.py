"""Exact self-attention for NumPy arrays, in C.

>>> import numpy as np
>>> import selfattn as sa
>>> q = k = v = np.random.default_rng(0).standard_normal((2, 8, 128, 64), dtype=np.float32)
>>> sa.scaled_dot_product_attention(q, k, v, is_causal=True).shape
(2, 8, 128, 64)

Start with :func:`scaled_dot_product_attention`; with ``_vjp`` at the end of its name it also returns the function for
its gradients. ``sa.functional`` has all functions and their gradients, and ``sa.reference`` has them in plain NumPy
lines: read it to see what they compute. Layers are in ``sa.nn``. A module is loaded when it is first used.
``sa.models`` and ``sa.search`` load the package selfattn-models.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from selfattn._interrupt import DelayedInterrupt

with DelayedInterrupt(raises=True):
    # NumPy's C code turns a KeyboardInterrupt into an ImportError, and then cannot be imported again.
    import_module("selfattn._core")

from selfattn import _drawing, functional
from selfattn._core import get_isa, get_num_threads, set_num_threads
from selfattn._version import __version__ as __version__
from selfattn.config import show_config
from selfattn.functional import (
    BlockMask,
    KVCache,
    apply_rotary_emb,
    gelu,
    layer_norm,
    log_softmax,
    rms_norm,
    scaled_dot_product_attention,
    scaled_dot_product_attention_vjp,
    softmax,
    varlen_attention,
)
from selfattn.random import torch_rng

_STEPS = ("AttentionSteps", "attention_steps")
_DIAGNOSIS = ("diagnose", "diagnose_vjp")
_MODULES = (
    "files",
    "functional",
    "interop",
    "nn",
    "optim",
    "reference",
    "tape",
    "text",
    "training",
    "tutorials",
    "views",
)
_IN_MODELS = ("models", "search")  # of the package selfattn-models
# Attributes that `dir` does not list.
_INNER_MODULES = ("cli", "config", "diagnosis", "engine", "random", "steps")

__all__ = [
    "BlockMask",
    "KVCache",
    "apply_rotary_emb",
    "attention_steps",
    "diagnose",
    "diagnose_vjp",
    "gelu",
    "get_isa",
    "get_num_threads",
    "layer_norm",
    "log_softmax",
    "rms_norm",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_vjp",
    "set_num_threads",
    "show_config",
    "softmax",
    "torch_rng",
    "varlen_attention",
]


if TYPE_CHECKING:
    from selfattn import (  # noqa: F401
        engine,
        files,
        models,
        nn,
        optim,
        reference,
        search,
        steps,
        tape,
        text,
        training,
        tutorials,
        views,
    )
    from selfattn.diagnosis import diagnose, diagnose_vjp
    from selfattn.functional import *  # noqa: F403
    from selfattn.steps import AttentionSteps as AttentionSteps
    from selfattn.steps import attention_steps
else:

    def __getattr__(name):
        if name in _MODULES or name in _IN_MODELS or name in _INNER_MODULES:
            return import_module(f"selfattn.{name}")
        if name in _STEPS:
            return getattr(import_module("selfattn.steps"), name)
        if name in _DIAGNOSIS:
            return getattr(import_module("selfattn.diagnosis"), name)
        if name in functional.__all__:
            return getattr(functional, name)
        raise AttributeError(f"module 'selfattn' has no attribute {name!r}")


def _draw(kind: str, steps: object) -> str | None:
    """Draw steps for a notebook; pages are imported when a notebook shows some."""
    shown: str | None = getattr(import_module("selfattn.views"), f"notebook_{kind}")(steps)
    return shown


_drawing.draw = _draw


def __dir__() -> list[str]:
    further = _IN_MODELS if find_spec("selfattn_models") else ()
    return sorted({"__version__", *__all__, *_MODULES, *further})
