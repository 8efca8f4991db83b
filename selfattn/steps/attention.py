"""Attention step by step: every intermediate result, named, for notebooks and for finding mistakes.

The steps are the functions of :mod:`selfattn.reference`, called one after the other: the definition that the fast core is
tested against. All results are kept, so memory grows with L times S.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, Unpack

import numpy as np
import numpy.typing as npt

import selfattn
from selfattn import reference
from selfattn._check import Array, as_array
from selfattn.functional._options import StepsOptions, takes

__all__ = ["AttentionSteps", "attention_steps"]


STEPS = {
    "scores": "query @ key.T",
    "scaled_scores": "scale * scores, soft-capped",
    "masked_scores": "+ ALiBi + float mask; -inf where masked",
    "weights": "softmax(masked_scores)",
    "dropped_weights": "dropout(weights)",
    "weighted_values": "dropped_weights[i, j] * value[j]",
    "output": "weighted_values.sum over j",
}


class Shown:
    """The base of objects that a notebook shows as a page."""

    def _repr_html_(self) -> str | None:
        return selfattn._render("html", self)

    def _repr_svg_(self) -> str | None:
        return selfattn._render("svg", self)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionSteps(Shown):
    """The intermediate results of one call of attention, as :func:`attention_steps` returns them.

    An immutable record: attributes cannot be set, and the arrays are read-only; a ``.copy()`` can be changed. ``...``
    are the leading dims, L the queries, S the keys, Ev the width of a value. The scores have the precision of the
    computation (float64 for float64 and integer input, else float32); the others have the dtype of the result.

    Attributes
    ----------
    scores : ndarray, shape (..., L, S)
        ``query @ key.T``, before masks: a masked key has its score, NaN included.
    scaled_scores : ndarray, shape (..., L, S)
        Times ``scale``; with a ``softcap``, ``softcap * tanh(scale * scores / softcap)``.
    masked_scores : ndarray, shape (..., L, S)
        Plus ALiBi, plus a float mask; then -inf where a mask, ``is_causal``, ``window``, ``key_lengths`` or
        ``block_mask`` forbids a key.
    weights : ndarray, shape (..., L, S)
        The softmax of each row, with the sink in the denominator if there is one; before dropout. A row that may
        attend to no key has zeros.
    dropped_weights : ndarray, shape (..., L, S)
        After dropout; without dropout the same as ``weights``.
    weighted_values : ndarray, shape (..., L, S, Ev)
        ``dropped_weights[..., i, j] * value[..., j, :]``, the contribution of key j to query i. Computed at each
        access, since it is Ev times larger than the others.
    output : ndarray, shape (..., L, Ev)
        The sum of ``weighted_values`` over the keys.
    query, key, value : ndarray
        The inputs, one for every head: (..., L, E), (..., S, E) and (..., S, Ev), in the precision of the computation.
        They are given, not computed, so they are not among the steps of :meth:`to_dict`.
    tokens : tuple of str or None
        The words of the queries, if a model has made the steps from a text; pages label rows with them.
    """

    _formulas: ClassVar[Mapping[str, str]] = STEPS

    scores: Array
    scaled_scores: Array
    masked_scores: Array
    weights: Array
    dropped_weights: Array
    output: Array
    _call: reference.arguments.Call  # the checked arguments
    _replaced: bool = False  # True: with_weights gave the weights after dropout
    tokens: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for array in (*vars(self).values(), *vars(self._call).values()):
            if isinstance(array, np.ndarray):
                array.flags.writeable = False

    @property
    def query(self) -> Array:
        """The queries, (..., L, E)."""
        return self._call.query

    @property
    def key(self) -> Array:
        """The keys, (..., S, E), one for every query head."""
        return self._call.key

    @property
    def value(self) -> Array:
        """The values, (..., S, Ev), one for every query head."""
        return self._call.value

    @property
    def weighted_values(self) -> Array:
        """The contribution of each key to each query, (..., L, S, Ev); computed at each access."""
        call = self._call
        with np.errstate(all="ignore"):
            weights = self.dropped_weights.astype(call.value.dtype)
            terms = reference.attention.weighted_values(weights, call.value, call.allowed)
            terms = terms.astype(self.output.dtype)
        terms.flags.writeable = False
        return terms

    def with_weights(self, weights: npt.ArrayLike) -> Self:
        """Return the steps with other weights: the steps after the weights are computed from these.

        This shows, for example, the effect of rounding, or of using only the best key.

        Parameters
        ----------
        weights : array_like, broadcastable to (..., L, S)
            They replace the weights after dropout, ``dropped_weights``. Their sum need not be 1.

        Returns
        -------
        AttentionSteps
            Of the class of these steps.

        Raises
        ------
        TypeError, ValueError
            A dtype that is not a number's, or a shape that does not fit.

        Examples
        --------
        >>> query, key = [[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
        >>> value = [[10.0], [20.0]]
        >>> steps = attention_steps(query, key, value)
        >>> steps.output.round(2)
        array([[13.3]])
        >>> steps.with_weights(steps.weights == steps.weights.max(axis=-1, keepdims=True)).output
        array([[10.]])
        """
        given = as_array("weights", weights)
        if given.dtype != np.bool_:
            reference.arguments.float_dtype("weights", given)
        call, dtype = self._call, self.output.dtype
        try:
            given = np.broadcast_to(given, self.weights.shape).astype(call.value.dtype)
        except ValueError:
            shapes = f"weights {given.shape} do not broadcast to (..., L, S) = {self.weights.shape}"
            raise ValueError(shapes) from None
        with np.errstate(all="ignore"):
            output = reference.attention.weighted_sum(given, call.value, call.allowed).astype(dtype)
        after: dict[str, Any] = self._after(output)
        return replace(self, dropped_weights=given.astype(dtype), output=output, _replaced=True, **after)

    def _after(self, output: Array) -> dict[str, Array]:
        """Return the steps after the weighted sum by name; attention alone has no such steps."""
        return {}

    def to_dict(self, *, weighted_values: bool = True) -> dict[str, Array]:
        """Return the steps by name.

        Parameters
        ----------
        weighted_values : bool, default True
            False leaves out ``weighted_values``, the largest, which are computed at each access.

        Returns
        -------
        dict of str to ndarray
            In the order of the computation, read-only; without those that are None.

        Examples
        --------
        >>> steps = attention_steps([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[10.0], [20.0]])
        >>> list(steps.to_dict(weighted_values=False))[:3]
        ['scores', 'scaled_scores', 'masked_scores']
        """
        return {
            name: getattr(self, name)
            for name in self._formulas
            if (weighted_values or name != "weighted_values") and getattr(self, name, None) is not None
        }

    def _head(self) -> str:
        *lead, n_queries, n_keys = self.scores.shape
        return f"AttentionSteps: {n_queries} queries, {n_keys} keys, leading dims {tuple(lead)}"

    def __repr__(self) -> str:
        shapes = {name: array.shape for name, array in self.to_dict(weighted_values=False).items()}
        shapes["weighted_values"] = (*self.scores.shape, self.output.shape[-1])
        columns = [max(len(name) for name in shapes), max(len(str(shape)) for shape in shapes.values())]
        rows = [
            f"  {name:{columns[0]}}  {shapes[name]!s:{columns[1]}}  {text}"
            for name, text in self._formulas.items()
            if name in shapes
        ]
        return "\n".join([self._head(), *rows])


@takes(StepsOptions)
@np.errstate(all="ignore")
def attention_steps(
    query: npt.ArrayLike,
    key: npt.ArrayLike | None = None,
    value: npt.ArrayLike | None = None,
    attn_mask: npt.ArrayLike | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Unpack[StepsOptions],
) -> AttentionSteps:
    """Compute attention and keep every intermediate result.

    Without ``key`` and ``value`` the first array is all three: words that take from each other. With the same ``rng``, dropout drops the weights that :func:`~selfattn.reference.scaled_dot_product_attention`
    drops. All key and value heads are shown as the query heads see them: with ``enable_gqa``, repeated.

    Returns
    -------
    AttentionSteps

    Raises
    ------
    TypeError, ValueError
        As :func:`~selfattn.reference.scaled_dot_product_attention`; key or value alone is a TypeError.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, equation 1 and figure 2 (left).

    Examples
    --------
    >>> query, key = [[1, 0, 2], [2, 2, 2]], [[0, 1, 1], [4, 4, 0]]
    >>> value = [[1, 2, 3], [2, 8, 0]]
    >>> steps = attention_steps(query, key, value, scale=1.0, is_causal=True)
    >>> steps.scores
    array([[ 2.,  4.],
           [ 4., 16.]])
    >>> steps.masked_scores
    array([[  2., -inf],
           [  4.,  16.]])
    >>> steps.weights.round(4)
    array([[1., 0.],
           [0., 1.]])
    >>> steps
    AttentionSteps: 2 queries, 2 keys, leading dims ()
      scores           (2, 2)     query @ key.T
      scaled_scores    (2, 2)     scale * scores, soft-capped
      masked_scores    (2, 2)     + ALiBi + float mask; -inf where masked
      weights          (2, 2)     softmax(masked_scores)
      dropped_weights  (2, 2)     dropout(weights)
      weighted_values  (2, 2, 3)  dropped_weights[i, j] * value[j]
      output           (2, 3)     weighted_values.sum over j
    """
    if key is None and value is None:
        key = value = query
    elif key is None or value is None:
        raise TypeError(
            f"{'key' if key is None else 'value'} is missing; leave out key and value, or give both"
        )
    call = reference.arguments.prepare(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return steps_from_scores(call, reference.attention.dot_products(call.query, call.key))


def steps_from_scores(call: reference.arguments.Call, scores: Array) -> AttentionSteps:
    """Compute all steps after the scores of a call; any function may have made the scores."""
    found = reference.attention.attend(call, scores)
    return AttentionSteps(
        scores=scores, scaled_scores=found.scaled, masked_scores=found.scores,
        weights=found.weights.astype(call.result_dtype),
        dropped_weights=found.dropped.astype(call.result_dtype),
        output=found.output.astype(call.result_dtype), _call=call,
    )  # fmt: skip
