"""The named tuples that pullbacks return, of the core's functions and of the definitions in NumPy; and the names in ``wrt``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from selfattn._check import Array


class AttentionGradients(NamedTuple):
    """The gradients that a pullback of attention returns; None for an argument that was not given, or that ``wrt`` does not name.

    Attributes
    ----------
    query, key, value, attn_mask, alibi_slopes, sinks : ndarray or None
        Each has the shape and the dtype of the argument of that name (float64 for integers).
    """

    query: Array | None
    key: Array | None
    value: Array | None
    attn_mask: Any = None  # packed sequences have a list
    alibi_slopes: Array | None = None
    sinks: Array | None = None


class AdditiveGradients(NamedTuple):
    """What a pullback of additive attention returns.

    Attributes
    ----------
    query, key, value, w_query, w_key, v : ndarray
        Each has the shape and the dtype of the argument of that name (float64 for integers).
    """

    query: Array
    key: Array
    value: Array
    w_query: Array
    w_key: Array
    v: Array


class MergeGradients(NamedTuple):
    """What the pullback of `merge_attention_vjp` returns.

    Attributes
    ----------
    outs, lses : list of ndarray
        The gradients with respect to the outputs and the log-sum-exps, one array for each part.
    """

    outs: list[Array]
    lses: list[Array]


class LayerNormGradients(NamedTuple):
    """What the pullback of `layer_norm_vjp` returns.

    Attributes
    ----------
    x : ndarray
        The gradient with respect to ``x``.
    weight, bias : ndarray or None
        The gradient of each parameter; None if it was not given.
    """

    x: Array
    weight: Array | None
    bias: Array | None


class RMSNormGradients(NamedTuple):
    """What the pullback of `rms_norm_vjp` returns.

    Attributes
    ----------
    x : ndarray
        The gradient with respect to ``x``.
    weight : ndarray or None
        The weight's gradient; None if there is no weight.
    """

    x: Array
    weight: Array | None


class RotaryGradients(NamedTuple):
    """What the pullback of `apply_rotary_emb_vjp` returns.

    Attributes
    ----------
    x, cos, sin : ndarray or None
        The gradients with respect to each; None for those that ``wrt`` does not name.
    """

    x: Array | None
    cos: Array | None
    sin: Array | None


def check_wrt(wrt: str | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``wrt`` as a tuple of names that have gradients."""
    if not isinstance(wrt, Iterable):
        raise TypeError(f"wrt must be a name or a sequence of names, got {type(wrt).__name__}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for name in names:
        if name not in known:
            raise ValueError(f"wrt may name {', '.join(known)}; it has {name!r}")
    return names
