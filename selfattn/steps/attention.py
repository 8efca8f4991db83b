"""Attention step by step: every intermediate result, named, for notebooks and for finding mistakes.

The steps are the functions of :mod:`selfattn.reference`, called one after the other: the definition that the fast
core is tested against. All results are kept, so memory grows with L times S.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np
import numpy.typing as npt

from selfattn import reference
from selfattn._check import Array
from selfattn.functional._options import StepsOptions, accept_options
from selfattn.reference.call import Call
from selfattn.steps.arguments import check_call
from selfattn.steps.records import AttentionSteps

__all__ = ["AttentionSteps", "attention_steps"]


@accept_options(StepsOptions)
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

    Without ``key`` and ``value`` the first array is all three: words that attend to each other. With the same
    ``rng``, dropout drops the weights that :func:`~selfattn.reference.scaled_dot_product_attention` drops. All key
    and value heads are shown as the query heads see them: with ``enable_gqa``, repeated.

    Returns
    -------
    AttentionSteps

    Raises
    ------
    TypeError, ValueError
        As :func:`selfattn.scaled_dot_product_attention`; key or value alone is a TypeError.

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
      scores           (2, 2)     query @ key.T; also attn_logits, attn_scores
      scaled_scores    (2, 2)     scale * scores, soft-capped; also scaled_attention_logits
      masked_scores    (2, 2)     + ALiBi + float mask; -inf where masked
      weights          (2, 2)     softmax(masked_scores); also attention_weights, attn_scores_softmax
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
    call = check_call(query, key, value, attn_mask, dropout_p, is_causal, **options)
    return steps_from_scores(call, reference.attention.dot_products(call.query, call.key))


def steps_from_scores(call: Call, scores: Array) -> AttentionSteps:
    """Compute all steps after the scores of a call; any function may have made the scores."""
    found = reference.attention.attend(call, scores)
    return AttentionSteps(
        scores=scores,
        scaled_scores=found.scaled_scores,
        masked_scores=found.masked_scores,
        weights=found.weights.astype(call.result_dtype),
        dropped_weights=found.dropped_weights.astype(call.result_dtype),
        output=found.output.astype(call.result_dtype),
        _call=call,
    )
