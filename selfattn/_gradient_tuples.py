"""The named tuples that pullbacks return, of the core's functions and of the definitions in NumPy.

The names in ``wrt`` are here, too.
"""

from __future__ import annotations

import functools
from collections import namedtuple
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]  # not that of _check, which imports the core: the reference does without


class SelectedGradients(tuple[Array, ...]):
    """A named tuple of some of a function's gradients: those that ``wrt`` names, in its order.

    The fields of the class, ``_fields``, are all names that ``wrt`` may have, those of an instance its own. Each
    selection of names has a class of its own, so that tools for named tuples rebuild it with the same names.
    """

    __slots__ = ()
    _fields: tuple[str, ...] = ()

    def __new__(cls, **gradients: Any) -> Self:
        """Make a tuple of these gradients, in this order."""
        selected: Self = _selection(cls, tuple(gradients))._make(gradients.values())
        return selected

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self._kind, self._asdict())

    if TYPE_CHECKING:
        _kind: type[Self]

        def _asdict(self) -> dict[str, Any]: ...
        def _replace(self, **changes: Any) -> Self: ...
    else:

        def __getattr__(self, name):
            if name in type(self)._kind._fields:  # wrt does not name it
                return None
            has = ", ".join(self._fields)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has {has}")


@functools.cache
def _selection(kind: type[SelectedGradients], names: tuple[str, ...]) -> Any:
    """Return the named tuple that has some of the fields of a class above, in this order."""
    for name in names:
        if name not in kind._fields:
            raise TypeError(f"{kind.__name__} has {', '.join(kind._fields)}, not {name}")
    fields = namedtuple(kind.__name__, names)  # type: ignore[misc]
    own = {"__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__, "_kind": kind}
    return type(kind.__name__, (fields, kind), own)


def _restored(kind: type[SelectedGradients], gradients: dict[str, Any]) -> SelectedGradients:
    """Return a tuple that was pickled, or copied."""
    return kind(**gradients)


class AttentionGradients(SelectedGradients):
    """The gradients that a pullback of attention returns: a tuple of those that ``wrt`` names, in its order.

    By default ``dq, dk, dv = pullback(grad_out)``. Every gradient is also an attribute, None if ``wrt`` does not name
    it. ``_fields``, ``_asdict`` and ``_replace`` are those of named tuples.

    Attributes
    ----------
    query, key, value, attn_mask, alibi_slopes, sinks, bias, offset_bias : ndarray or None
        Each has the shape and the dtype of the argument of that name (float64 for integers). With packed sequences
        ``attn_mask`` is a list.

    Examples
    --------
    >>> import numpy as np
    >>> import selfattn as sa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 5, 4))
    >>> out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, wrt=("value", "query"))
    >>> grads = pullback(np.ones_like(out))
    >>> dv, dq = grads
    >>> grads._fields, dv is grads.value, grads.key
    (('value', 'query'), True, None)
    """

    __slots__ = ()
    _fields = ("query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "bias", "offset_bias")

    query: Array
    key: Array
    value: Array
    attn_mask: Any  # packed sequences have a list
    alibi_slopes: Array
    sinks: Array
    bias: Array
    offset_bias: Array


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


class RotaryGradients(SelectedGradients):
    """What the pullback of `apply_rotary_emb_vjp` returns: a tuple of those that ``wrt`` names, in its order.

    Attributes
    ----------
    x, cos, sin : ndarray or None
        The gradients with respect to each; None for those that ``wrt`` does not name.
    """

    __slots__ = ()
    _fields = ("x", "cos", "sin")

    x: Array
    cos: Array
    sin: Array


def check_wrt(wrt: str | Iterable[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ``wrt`` as a tuple of different names that have gradients; those of a set in the order of ``known``."""
    if not isinstance(wrt, Iterable):
        raise TypeError(f"wrt must be a name or a sequence of names, got {type(wrt).__name__}")
    names = (wrt,) if isinstance(wrt, str) else tuple(wrt)
    for n, name in enumerate(names):
        if name not in known:
            raise ValueError(f"wrt may name {', '.join(known)}; it has {name!r}")
        if name in names[:n]:
            raise ValueError(f"wrt names {name} twice, got {names}")
    return tuple(sorted(names, key=known.index)) if isinstance(wrt, set | frozenset) else names
