"""The options of attention, for all functions that take them.

Names, defaults, order and descriptions are those of `scaled_dot_product_attention` in the C core, which also checks them.
A function takes ``**options: Unpack[...]`` of one of the classes here and is decorated with `takes`: its signature and its
docstring then show every option, and it refuses all others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._docs import repeats
from selfattn.functional.block_mask import BlockMask
from selfattn.random import TorchGenerator

Function = TypeVar("Function", bound=Callable[..., Any])


class ScoreOptions(TypedDict, total=False):
    """The options of scores in every form of attention by dot products."""

    scale: float | None
    window: Sequence[int | None] | None
    softcap: float | None
    alibi_slopes: npt.ArrayLike | None
    sinks: npt.ArrayLike | None


class CacheOptions(ScoreOptions, total=False):
    """The options of attention over a cache, which is always causal, with as many key heads as the cache."""

    num_threads: int | None


class PairOptions(ScoreOptions, total=False):
    """The options that decide which pairs attend, and which of them dropout drops."""

    enable_gqa: bool
    causal: Literal["upper_left", "lower_right"] | None
    rng: int | np.random.Generator | TorchGenerator | None


class VarlenOptions(PairOptions, total=False):
    """The options of attention over packed sequences."""

    dropout_p: float
    is_causal: bool
    num_threads: int | None


class StepsOptions(PairOptions, total=False):
    """The options of `attention_steps`, in NumPy."""

    key_lengths: npt.ArrayLike | None
    block_mask: BlockMask | None


class AttentionOptions(StepsOptions, total=False):
    """The options of `scaled_dot_product_attention` and of its halves."""

    num_threads: int | None


class AdditiveOptions(TypedDict, total=False):
    """The options of additive attention."""

    attn_mask: npt.ArrayLike | None
    is_causal: bool
    causal: Literal["upper_left", "lower_right"] | None
    key_lengths: npt.ArrayLike | None


_PARAMETERS = inspect.signature(_core.scaled_dot_product_attention).parameters
_PLACES = {name: place for place, name in enumerate(_PARAMETERS)}


def takes(
    options: type[Any], other: Callable[..., Any] = _core.scaled_dot_product_attention
) -> Callable[[Function], Function]:
    """Add the options of a class above to the signature of a function, which then refuses others; the docs repeat ``other``.

    The check is here because the called functions may take more options, and their errors would name them instead.
    """
    types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in options.__annotations__.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    taken = [_PARAMETERS[name].replace(kind=keyword, annotation=kind) for name, kind in types.items()]

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # Options that two classes share have one order.
        shared = [p.name in _PLACES and p.kind is keyword for p in own]
        first = shared.index(True) if any(shared) else sum(p.kind is not keyword for p in own)
        rest = sorted([*own[first:], *taken], key=lambda p: _PLACES.get(p.name, len(_PLACES)))
        function.__signature__ = signature.replace(parameters=own[:first] + rest)  # type: ignore[attr-defined]
        known = {p.name for p in own} | types.keys()

        @functools.wraps(repeats(other)(function))
        def checked(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in known:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*arguments, **named)

        return cast("Function", checked)

    return shown
