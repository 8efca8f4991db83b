"""The call of attention, and its options for all functions that take them.

An option is a row of C's table (``SA_ATTENTION_PARAMETERS``), which has its name, its place, its default and the calls
that take it; a type in one of the classes here; and an entry in the docstring of `scaled_dot_product_attention`. The
core checks its value. A function takes ``**options: Unpack[...]`` of one of the classes and is decorated with
`accept_options`: its signature and its docstring then show every option, and it refuses all others.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array
from selfattn._docs import copy_doc, in_core
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
    bias: npt.ArrayLike | None
    offset_bias: npt.ArrayLike | None


class AttentionOptions(StepsOptions, total=False):
    """The options of `scaled_dot_product_attention`."""

    num_threads: int | None


class AdditiveOptions(TypedDict, total=False):
    """The options of additive attention."""

    attn_mask: npt.ArrayLike | None
    is_causal: bool
    causal: Literal["upper_left", "lower_right"] | None
    key_lengths: npt.ArrayLike | None


# The parameters of attention in the order of C's table, with their defaults.
_DEFAULTS = {
    name: ast.literal_eval(default[1:]) if default else inspect.Parameter.empty
    for name, default in _core._attention_parameters().items()
}
_PLACES = {name: place for place, name in enumerate(_DEFAULTS)}


def names_of(options: type[Any]) -> tuple[str, ...]:
    """Return the names of the options of a class above, in the order of the signature."""
    return tuple(sorted(options.__annotations__, key=_PLACES.__getitem__))


def _show(options: type[Any]) -> Callable[[Function], Function]:
    """Show the options of a class above in a function's signature, in place of ``**options``."""
    types = {name: getattr(kind, "__forward_arg__", kind) for name, kind in options.__annotations__.items()}
    keyword = inspect.Parameter.KEYWORD_ONLY
    taken = [
        inspect.Parameter(name, keyword, default=_DEFAULTS[name], annotation=kind)
        for name, kind in types.items()
    ]

    def shown(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        # Options that two classes share have one order.
        shared = [p.name in _PLACES and p.kind is keyword for p in own]
        first = shared.index(True) if any(shared) else sum(p.kind is not keyword for p in own)
        rest = sorted([*own[first:], *taken], key=lambda p: _PLACES.get(p.name, len(_PLACES)))
        function.__signature__ = signature.replace(parameters=own[:first] + rest)  # type: ignore[attr-defined]
        return function

    return shown


@in_core
@_show(AttentionOptions)
def scaled_dot_product_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    return_lse: bool = False,
    return_weights: bool = False,
    out: Array | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Exact attention, softmax(scale * query @ key.T + mask) @ value, in memory linear in L and S.

    The scores are never stored: keys are taken in tiles with a running maximum and sum [2]_, [3]_. The
    arguments up to `enable_gqa` are those of ``torch.nn.functional.scaled_dot_product_attention``.

    Parameters
    ----------
    query : array_like, shape (..., L, E)
        Queries. ``...`` are any leading dimensions (batches, then heads), which broadcast between `query`,
        `key` and `value`; none is one head. Any strides, alignment and byte order.
    key : array_like, shape (..., S, E)
        Keys.
    value : array_like, shape (..., S, Ev)
        Values; Ev may differ from E.
    attn_mask : array_like of bool or float, optional
        Broadcastable to (..., L, S) without enlarging it. Boolean: True = attend. Float: added to the
        scores, -inf closes a pair as False does; its dtype does not affect the result's.
    dropout_p : float, default 0.0
        Probability with which a weight is set to 0; the others are divided by ``1 - dropout_p``. As in
        PyTorch's function it applies whenever it is given: there is no training mode.
    is_causal : bool, default False
        Query i attends to keys j <= i (upper-left diagonal). Combines with `attn_mask`.
    scale : float, optional
        Factor of the scores, 1/sqrt(E) by default.
    enable_gqa : bool, default False
        Let each head of `key` and `value` serve H/H_kv heads of `query` in a row.
    causal : {None, 'upper_left', 'lower_right'}, optional
        The causal rule with its diagonal: j <= i, or j <= i + S - L.
    window : (left, right), optional
        Keys from i + o - left to i + o + right are open, where o is the offset of the causal rule's diagonal:
        0 or S - L. Each is an int >= 0, or None for no bound. Costs the width of the window, not S.
    softcap : float, optional
        Scaled scores s become softcap * tanh(s / softcap); > 0.
    alibi_slopes : array_like, optional
        (H,) or broadcastable to the leading dimensions; adds -slope * abs(i + o - j), with the o of `window`.
    sinks : array_like, optional
        (H,) or broadcastable likewise: a logit per head that takes part in the denominator only.
    key_lengths : array_like of int, optional
        Broadcastable to the leading dimensions, each in 0...S: keys from there on do not exist.
    block_mask : BlockMask, optional
        Closes pairs by documents, by a prefix or by a pattern of blocks, without an array of (L, S); what is
        closed in blocks is skipped. See `BlockMask`.
    rng : int, numpy.random.Generator or TorchGenerator (`torch_rng`), optional
        Where the dropout mask comes from: an int >= 0 is the seed (modulo 2**64), a generator draws one
        uint64 per call. None takes fresh entropy. The mask does not depend on the number of threads.
    return_lse : bool, default False
        Append the log-sum-exp of the scores of each row, natural log, `sinks` included, before dropout.
    return_weights : bool, default False
        Append the weights after dropout. They take (..., L, S) of memory.
    out : ndarray, optional
        Where to put the output: exact shape and dtype, native byte order, writable, without overlap
        with an input. Returned.
    num_threads : int, optional
        Threads of this call, at most; see `set_num_threads`. Small calls use fewer. The bits of the
        result do not depend on it.
    bias : array_like of float, optional
        Broadcastable to (..., L, S) without enlarging it, added to the scores: beside a boolean `attn_mask`, which
        need not be multiplied out with it. -inf closes a pair.
    offset_bias : array_like of float, optional
        (..., H, L + S - 1), added by relative position: query i and key j get element j - i + L - 1, so the first is
        for the last query and the first key. Empty if L or S is 0. See `relative_position_bias`.

    Returns
    -------
    out : ndarray, shape (..., L, Ev)
        The promoted dtype of the three inputs; integers count as float64. 16-bit inputs accumulate in
        float32. New and C-contiguous, unless `out` was given. A row with nothing to attend to is 0.
    lse : ndarray, shape (..., L)
        Only with `return_lse`: float64 for float64, else float32; -inf for a row with nothing to attend to.
    weights : ndarray, shape (..., L, S)
        Only with `return_weights`.

    Raises
    ------
    ValueError
        Shapes that do not fit, or an argument out of its range.
    TypeError
        A dtype or type that is refused: boolean, complex and object arrays, masked arrays, integer masks.
    MemoryError
        There is no memory for the output or the scratch.
    KeyboardInterrupt
        Ctrl-C during the call, in Python's main thread. `out` then holds some new rows and some old ones.

    Notes
    -----
    A score is ``scale * q @ k``, then softcap, ALiBi, float mask, biases, boolean mask, causal, window, key
    lengths and block mask, softmax (with sinks), dropout. A closed pair contributes exactly nothing, whatever its
    key or value holds, NaN included; NaN or inf in an open pair propagates.

    References
    ----------
    .. [1] A. Vaswani et al., "Attention is all you need", 2017, equation 1.
    .. [2] M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    .. [3] T. Dao et al., "FlashAttention", 2022, algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> k = np.array([[1.0, 0.0], [0.0, 1.0]])
    >>> v = np.array([[1.0, 2.0], [3.0, 4.0]])
    >>> sa.scaled_dot_product_attention(q, k, v).round(4)
    array([[1.6605, 2.6605],
           [2.3395, 3.3395]])
    >>> out, weights = sa.scaled_dot_product_attention(q, k, v, is_causal=True, return_weights=True)
    >>> weights.round(4)
    array([[1.    , 0.    ],
           [0.3302, 0.6698]])
    """
    # For type checkers. It never runs: in_core returns the core's function, with this signature and text.
    return _core.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        return_lse=return_lse,
        return_weights=return_weights,
        out=out,
        **options,
    )


def accept_options(
    options: type[Any], other: Callable[..., Any] = scaled_dot_product_attention
) -> Callable[[Function], Function]:
    """Add the options of a class above to the signature of a function, which then refuses others.

    The docs repeat ``other``.

    The check is here because the called functions may take more options, and their errors would name them instead.
    """

    def accepting(function: Function) -> Function:
        described = copy_doc(other)(_show(options)(function))
        known = inspect.signature(described).parameters.keys()

        @functools.wraps(described)
        def checked(*arguments: Any, **named: Any) -> Any:
            for name in named:
                if name not in known:
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}")
            return function(*arguments, **named)

        return cast("Function", checked)

    return accepting
