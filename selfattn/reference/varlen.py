"""Attention over packed sequences in plain NumPy: a loop over them. See :mod:`selfattn.reference`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._gradient_tuples import AttentionGradients
from selfattn.reference.arrays import convert, sum_to_shape
from selfattn.reference.attention import scaled_dot_product_attention
from selfattn.reference.attention_vjp import scaled_dot_product_attention_vjp
from selfattn.reference.dropout import seed_of

PER_HEAD = ("alibi_slopes", "sinks")


def varlen_attention(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    return_lse: bool = False,
    compute_dtype: npt.DTypeLike | None = None,
    **options: Any,
) -> Any:
    """Compute attention within each of n packed sequences.

    Sequence s has the rows ``cu_seqlens_q[s]`` to ``cu_seqlens_q[s + 1] - 1`` of ``query`` (total_q, H, E), and those
    of key and value likewise. ``options`` are those of :func:`~selfattn.reference.scaled_dot_product_attention`: of
    ``attn_mask`` one for each sequence or None, in a list; ``alibi_slopes`` and ``sinks`` of shape (H,) or (n, H).
    Dropout counts heads over the whole batch, s · H + h, and rows and keys within a sequence.

    Examples
    --------
    Two sequences, of one and of two rows:

    >>> import numpy as np
    >>> x = np.array([[[1.0]], [[2.0]], [[4.0]]])
    >>> varlen_attention(x, x, x, [0, 1, 3], [0, 1, 3]).ravel().round(4)
    array([1.    , 3.964 , 3.9993])
    """
    (q, _, v), result = convert(compute_dtype, query, key, value)
    out = np.empty((*q.shape[:2], v.shape[2]), result)
    lse = np.empty(q.shape[1::-1], q.dtype)
    for rows, one in _sequences((query, key, value), cu_seqlens_q, cu_seqlens_k, options):
        out_s, lse[:, rows] = scaled_dot_product_attention(
            **one, return_lse=True, compute_dtype=compute_dtype
        )
        out[rows] = out_s.swapaxes(0, 1)
    return (out, lse) if return_lse else out


def varlen_attention_vjp(
    query: npt.ArrayLike,
    key: npt.ArrayLike,
    value: npt.ArrayLike,
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    *,
    return_lse: bool = False,
    compute_dtype: npt.DTypeLike | None = None,
    **options: Any,
) -> tuple[Any, Callable[..., AttentionGradients]]:
    """Compute attention over packed sequences, and a function that pulls gradients back through it.

    The gradients are those of :func:`~selfattn.reference.scaled_dot_product_attention_vjp`; that of ``attn_mask`` is a
    list.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.array([[[1.0]], [[2.0]], [[4.0]]])
    >>> out, pullback = varlen_attention_vjp(x, x, x, [0, 1, 3], [0, 1, 3])
    >>> pullback(np.ones_like(out)).value.sum().round(4)  # the weights of each of three rows sum to 1
    np.float64(3.0)
    """
    if options.get("dropout_p", 0) > 0:
        options["rng"] = seed_of(options.get("rng"))
    result = varlen_attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        return_lse=return_lse,
        compute_dtype=compute_dtype,
        **options,
    )

    def pullback(grad_out: npt.ArrayLike, grad_lse: npt.ArrayLike | None = None) -> AttentionGradients:
        d_out = np.asarray(grad_out)
        d_lse = None if grad_lse is None else np.asarray(grad_lse)
        found = []
        for rows, one in _sequences((query, key, value), cu_seqlens_q, cu_seqlens_k, options):
            _, pull = scaled_dot_product_attention_vjp(**one, return_lse=True, compute_dtype=compute_dtype)
            found.append(pull(d_out[rows].swapaxes(0, 1), None if d_lse is None else d_lse[:, rows]))
        fields: dict[str, Any] = {}
        for name, given in ("query", query), ("key", key), ("value", value):
            parts = [getattr(one, name).swapaxes(0, 1) for one in found]
            fields[name] = np.concatenate(parts) if parts else np.zeros_like(given)
        masks = [one.attn_mask for one in found]
        if any(mask is not None for mask in masks):
            fields["attn_mask"] = masks
        for name in PER_HEAD:
            if (scalars := options.get(name)) is not None:
                each = np.array([getattr(one, name) for one in found]).reshape(-1, d_out.shape[1])
                fields[name] = sum_to_shape(each, np.shape(scalars))
        return AttentionGradients(**fields)

    return result, pullback


def _sequences(
    given: tuple[npt.ArrayLike, ...],
    cu_seqlens_q: npt.ArrayLike,
    cu_seqlens_k: npt.ArrayLike,
    options: dict[str, Any],
) -> Iterator[tuple[slice, dict[str, Any]]]:
    """Yield each sequence's rows, and the arguments of its own call: (H, L, E), (H_kv, S, E), (H_kv, S, Ev)."""
    rows, keys = ([slice(a, b) for a, b in pairwise(np.asarray(x))] for x in (cu_seqlens_q, cu_seqlens_k))
    query, key, value = map(np.asarray, given)
    heads = query.shape[1]
    seed = seed_of(options.get("rng")) if options.get("dropout_p", 0) > 0 else None
    for s in range(len(rows)):
        own = dict(options, rng=seed, first_head=s * heads)
        if own.get("attn_mask") is not None:
            own["attn_mask"] = own["attn_mask"][s]
        for name in PER_HEAD:
            if (scalars := options.get(name)) is not None:
                own[name] = np.broadcast_to(scalars, (len(rows), heads))[s]
        for name, x in (("query", query[rows[s]]), ("key", key[keys[s]]), ("value", value[keys[s]])):
            own[name] = x.swapaxes(0, 1)
        yield rows[s], own
