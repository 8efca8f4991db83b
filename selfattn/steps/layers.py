"""Attention layers step by step: projections, attention and the steps after it, with a name for each array.

The layers of :mod:`selfattn.nn` give their arrays to :func:`layer_steps`, and a sentence-embedding model its blocks to
:func:`model_steps`; attention itself is :func:`selfattn.attention_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn import reference
from selfattn._check import Array, as_array, compute_dtype, float_dtype, promoted
from selfattn.steps.attention import attention_steps, steps_from_scores
from selfattn.steps.records import AdditiveSteps, AttentionSteps, LayerParameters, LayerSteps, ModelSteps

__all__ = ["AdditiveSteps", "LayerParameters", "LayerSteps", "ModelSteps", "layer_steps", "model_steps"]


def layer_steps(
    inputs: npt.ArrayLike,
    W_query: npt.ArrayLike,
    W_key: npt.ArrayLike,
    W_value: npt.ArrayLike,
    *,
    b_query: npt.ArrayLike | None = None,
    b_key: npt.ArrayLike | None = None,
    b_value: npt.ArrayLike | None = None,
    key_inputs: npt.ArrayLike | None = None,
    value_inputs: npt.ArrayLike | None = None,
    num_heads: int = 1,
    v: npt.ArrayLike | None = None,
    W_out: npt.ArrayLike | None = None,
    b_out: npt.ArrayLike | None = None,
    residual: bool = False,
    norm: tuple[npt.ArrayLike | None, npt.ArrayLike | None, float] | None = None,
    **options: Any,
) -> LayerSteps:
    """Compute a layer of attention with its projections, and keep every intermediate result.

    Inputs are projected, and the columns split into heads; attention; then the heads are concatenated, followed by an
    output projection, the residual and a LayerNorm, if they are given.

    Parameters
    ----------
    inputs : array_like, shape (..., L, d_in)
    W_query, W_key, W_value : array_like, shape (d_in, d_k), (d_in, d_k) and (d_in, d_v)
        For a Linear, whose weight is (out, in), its ``weight.T``.
    b_query, b_key, b_value : array_like, shape (d_k,), (d_k,) and (d_v,), optional
    key_inputs : array_like, shape (..., S, d_in), optional
        The inputs of keys; by default ``inputs``.
    value_inputs : array_like, shape (..., S, d_in), optional
        The inputs of values; by default ``key_inputs``.
    num_heads : int, default 1
        Must divide d_k and d_v.
    v : array_like, shape (d_k,), optional
        The score is ``v @ tanh(query[i] + key[j])`` instead of a dot product; for one head, with scale 1.
    W_out, b_out : array_like, shape (d_v, d_out) and (d_out,), optional
    residual : bool, default False
        Add the inputs to the result.
    norm : (weight, bias, eps), optional
        A LayerNorm at the end; weight and bias (d,) may be None.
    **options
        The other arguments of :func:`attention_steps`: ``attn_mask``, ``is_causal``, ``scale``, …

    Returns
    -------
    LayerSteps
        With ``v``, AdditiveSteps.

    Raises
    ------
    TypeError, ValueError
        Dtypes and shapes that do not fit; the message quotes them.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, sections 3.1 and 3.2.2. Bahdanau, Cho and Bengio,
    "Neural machine translation by jointly learning to align and translate", 2015, appendix A.1.2.

    Examples
    --------
    >>> x, eye = np.eye(2), np.eye(2)
    >>> steps = layer_steps(x, eye, eye, [[1, 2], [3, 4]], b_value=[0, 1], scale=1.0, residual=True)
    >>> steps.value
    array([[1., 3.],
           [3., 5.]])
    >>> steps.residual.round(3)
    array([[2.538, 3.538],
           [2.462, 5.462]])
    >>> steps.result is steps.residual
    True
    """
    weight, bias, eps = norm if norm is not None else (None, None, 1e-5)
    names = {
        "inputs": inputs,
        "key_inputs": key_inputs,
        "value_inputs": value_inputs,
        "W_query": W_query,
        "W_key": W_key,
        "W_value": W_value,
        "b_query": b_query,
        "b_key": b_key,
        "b_value": b_value,
        "W_out": W_out,
        "b_out": b_out,
        "v": v,
        "norm weight": weight,
        "norm bias": bias,
    }
    given = {name: as_array(name, a) for name, a in names.items() if a is not None}
    result = promoted(float_dtype(name, array) for name, array in given.items())
    arrays = {name: array.astype(compute_dtype(*given.values())) for name, array in given.items()}
    x = arrays["inputs"]
    key_x = arrays.get("key_inputs", x)
    value_x = arrays.get("value_inputs", key_x)
    parameters = LayerParameters(
        **{name: arrays.get(name) for name in names if name[:2] in ("W_", "b_")},  # type: ignore[arg-type]
        num_heads=num_heads,
        v=arrays.get("v"),
        residual=bool(residual),
        norm=None if norm is None else (arrays.get("norm weight"), arrays.get("norm bias"), float(eps)),
    )
    inputs_of = {"query": x, "key": key_x, "value": value_x}
    query, key, value = (parameters._heads(name, y).astype(result) for name, y in inputs_of.items())
    if parameters.v is None:
        steps, kind = attention_steps(query, key, value, **options), LayerSteps
    else:
        steps, kind = _additive_steps(query, key, value, parameters, options), AdditiveSteps
    after = parameters._after(steps.output, x)
    for array in (*arrays.values(), *after.values()):
        array.flags.writeable = False
    computed: dict[str, Any] = vars(steps) | after
    return kind(**computed, inputs=x, key_inputs=key_x, value_inputs=value_x, parameters=parameters)


def _additive_steps(
    query: Array, key: Array, value: Array, parameters: LayerParameters, options: dict[str, Any]
) -> AttentionSteps:
    """Compute attention with an additive score, from projected queries and keys."""
    v = np.asarray(parameters.v)
    if parameters.num_heads != 1:
        raise ValueError(f"an additive score has one head, not num_heads={parameters.num_heads}")
    if v.shape != query.shape[-1:]:
        raise ValueError(f"v has shape {v.shape}, not (d_k,) of the queries {query.shape}")
    call = attention_steps(query, key, value, scale=1.0, **options)._call
    with np.errstate(all="ignore"):
        scores, _ = reference.additive.additive_scores(call.query, call.key, v.astype(call.query.dtype))
        return steps_from_scores(call, scores)


def model_steps(
    embeddings: npt.ArrayLike,
    positions: npt.ArrayLike,
    blocks: Sequence[LayerSteps],
    tokens: Sequence[str] | None = None,
) -> ModelSteps:
    """Put the steps of an embedding model together: embeddings, positions, blocks of attention, mean.

    Parameters
    ----------
    embeddings, positions : array_like, shape (L, d)
    blocks : sequence of LayerSteps
        The input of the first must be the sum of embeddings and positions, the input of each other block the result
        of the block before it.
    tokens : sequence of str, optional
        One for each row.

    Returns
    -------
    ModelSteps

    Raises
    ------
    ValueError
        Shapes that differ, or a block whose input is not the result before it.

    Examples
    --------
    >>> embeddings, positions, eye = np.eye(2), [[0.0, 1.0], [0.5, 0.5]], np.eye(2)
    >>> block = layer_steps(embeddings + positions, eye, eye, eye)
    >>> model_steps(embeddings, positions, [block]).output.round(3)
    array([0.728, 1.272])
    """
    rows, places = as_array("embeddings", embeddings), as_array("positions", positions)
    if rows.ndim != 2 or rows.shape != places.shape:
        raise ValueError(f"embeddings {rows.shape} and positions {places.shape} are not both (L, d)")
    inputs = x = rows + places
    for n, block in enumerate(blocks):
        if not np.array_equal(block.inputs, x, equal_nan=True):
            raise ValueError(f"the input of blocks[{n}] is not the result before it")
        x = block.result
    if tokens is not None and len(tokens) != len(rows):
        raise ValueError(f"{len(tokens)} tokens do not fit the {len(rows)} rows of the embeddings")
    return ModelSteps(
        embeddings=rows,
        positions=places,
        inputs=inputs,
        blocks=tuple(blocks),
        output=x.mean(axis=0),
        tokens=None if tokens is None else tuple(tokens),
    )
