"""Attention layers step by step: projections, attention and the steps after it, with a name for each array.

The layers of :mod:`selfattn.nn` give their arrays to :func:`layer_steps`, and a sentence-embedding model its blocks to
:func:`model_steps`; attention itself is :func:`selfattn.attention_steps`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from selfattn import reference
from selfattn._check import Array, as_array
from selfattn.steps.attention import STEPS, AttentionSteps, Shown, attention_steps, steps_from_scores

__all__ = ["AdditiveSteps", "LayerParameters", "LayerSteps", "ModelSteps", "layer_steps", "model_steps"]


LAYER_STEPS = {
    "inputs": "x",
    "query": "x @ W_query + b_query, split into heads",
    "key": "x @ W_key + b_key, split into heads",
    "value": "x @ W_value + b_value, split into heads",
    **STEPS,
    "concatenated": "the outputs of the heads, side by side",
    "projected_output": "concatenated @ W_out + b_out",
    "residual": "+ inputs",
    "norm": "LayerNorm(residual)",
}


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerParameters:
    """The parameters of a layer: the projections of :func:`layer_steps`, and the parameters after attention.

    Attributes
    ----------
    W_query, W_key, W_value, b_query, b_key, b_value, num_heads, v, W_out, b_out, residual, norm
        As for :func:`layer_steps`, lists as arrays; None if the layer does not have it.
    """

    W_query: Array
    W_key: Array
    W_value: Array
    b_query: Array | None = None
    b_key: Array | None = None
    b_value: Array | None = None
    num_heads: int = 1
    v: Array | None = None
    W_out: Array | None = None
    b_out: Array | None = None
    residual: bool = False
    norm: tuple[Array | None, Array | None, float] | None = None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class LayerSteps(AttentionSteps):
    """The intermediate results of a layer with projections, as :func:`layer_steps` returns them.

    The attributes of :class:`AttentionSteps` and, in the order of the computation:

    Attributes
    ----------
    inputs : ndarray, shape (..., L, d_in)
    key_inputs, value_inputs : ndarray, shape (..., S, d_in)
        The same array as ``inputs`` in self-attention.
    query, key, value : ndarray, shape (..., L, d_k), (..., S, d_k) and (..., S, d_v)
        The projections. With several heads (..., num_heads, L, d_k / num_heads) and so on; all steps up to ``output``
        then have that axis.
    concatenated : ndarray or None, shape (..., L, d_v)
        With several heads, their concatenated outputs.
    projected_output : ndarray or None, shape (..., L, d_out)
        ``concatenated @ W_out + b_out``.
    residual : ndarray or None, shape (..., L, d_in)
        Plus ``inputs``.
    norm : ndarray or None, shape (..., L, d_in)
        Its LayerNorm.
    parameters : LayerParameters
    """

    _formulas: ClassVar[Mapping[str, str]] = LAYER_STEPS

    inputs: Array
    key_inputs: Array
    value_inputs: Array
    parameters: LayerParameters
    concatenated: Array | None = None
    projected_output: Array | None = None
    residual: Array | None = None
    norm: Array | None = None

    @property
    def result(self) -> Array:
        """The result of the layer: the last of the steps."""
        return list(self.to_dict(weighted_values=False).values())[-1]

    def _after(self, output: Array) -> dict[str, Array]:
        return _after_attention(output, self.inputs, self.parameters)

    def _head(self) -> str:
        n_queries, n_keys = self.scores.shape[-2:]
        heads = self.parameters.num_heads
        return f"{type(self).__name__}: {n_queries} queries, {n_keys} keys, {heads} head{'s' * (heads > 1)}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AdditiveSteps(LayerSteps):
    """The steps of a layer whose score is Bahdanau's: ``scores[i, j]`` is ``v @ tanh(query[i] + key[j])``."""

    _formulas: ClassVar[Mapping[str, str]] = LAYER_STEPS | {"scores": "tanh(query[i] + key[j]) @ v"}


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
    names = {
        "inputs": inputs, "key_inputs": key_inputs, "value_inputs": value_inputs,
        "W_query": W_query, "W_key": W_key, "W_value": W_value,
        "b_query": b_query, "b_key": b_key, "b_value": b_value, "W_out": W_out, "b_out": b_out, "v": v,
    }  # fmt: skip
    weight, bias, eps = norm if norm is not None else (None, None, 1e-5)
    names |= {"norm weight": weight, "norm bias": bias}
    given = {name: as_array(name, a) for name, a in names.items() if a is not None}
    compute, result = reference.arguments.dtypes(None, given)
    arrays = {name: array.astype(compute) for name, array in given.items()}
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
    projected = (
        (name, _project(name, y, arrays[f"W_{name}"], arrays.get(f"b_{name}")))
        for name, y in (("query", x), ("key", key_x), ("value", value_x))
    )
    query, key, value = (_split_heads(name, y, num_heads).astype(result) for name, y in projected)
    if parameters.v is None:
        steps, kind = attention_steps(query, key, value, **options), LayerSteps
    else:
        steps, kind = _additive_steps(query, key, value, parameters.v, num_heads, options), AdditiveSteps
    after = _after_attention(steps.output, x, parameters)
    for array in (*arrays.values(), *after.values()):
        array.flags.writeable = False
    computed: dict[str, Any] = vars(steps) | after
    return kind(**computed, inputs=x, key_inputs=key_x, value_inputs=value_x, parameters=parameters)


def _additive_steps(
    query: Array, key: Array, value: Array, v: Array, num_heads: int, options: dict[str, Any]
) -> AttentionSteps:
    """Compute attention with an additive score, from projected queries and keys."""
    if num_heads != 1:
        raise ValueError(f"an additive score has one head, not num_heads={num_heads}")
    if v.shape != query.shape[-1:]:
        raise ValueError(f"v has shape {v.shape}, not (d_k,) of the queries {query.shape}")
    call = attention_steps(query, key, value, scale=1.0, **options)._call
    with np.errstate(all="ignore"):
        scores, _ = reference.additive.additive_scores(call.query, call.key, v.astype(call.query.dtype))
        return steps_from_scores(call, scores)


def _project(name: str, x: Array, weight: Array, bias: Array | None) -> Array:
    """Return ``x @ W_name + b_name``, if the shapes fit."""
    if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
        given = f"inputs {x.shape} and W_{name} {weight.shape}"
        raise ValueError(f"{given} are not (..., L, d_in) and (d_in, d_out)")
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(f"b_{name} has shape {bias.shape}, not {weight.shape[1:]}")
    y: Array = x @ weight
    return y if bias is None else y + bias


def _split_heads(name: str, x: Array, num_heads: int) -> Array:
    """Split (..., L, d) into (..., num_heads, L, d / num_heads); one head needs no axis."""
    if isinstance(num_heads, bool) or num_heads < 1 or x.shape[-1] % num_heads:
        raise ValueError(f"num_heads={num_heads!r} does not divide the width of the {name}, {x.shape[-1]}")
    if num_heads == 1:
        return x
    return x.reshape(*x.shape[:-1], num_heads, -1).swapaxes(-2, -3)


def _after_attention(output: Array, inputs: Array, parameters: LayerParameters) -> dict[str, Array]:
    """Concatenate the heads, project, add the inputs, normalise; return the steps of this layer by name."""
    after, y = {}, output
    if parameters.num_heads > 1:
        merged = y.swapaxes(-2, -3)
        after["concatenated"] = y = merged.reshape(*merged.shape[:-2], -1)
    if parameters.W_out is not None:
        y = _project("out", y, parameters.W_out, parameters.b_out)
        after["projected_output"] = y = y.astype(output.dtype)
    if parameters.residual:
        if y.shape != inputs.shape:
            raise ValueError(f"residual=True needs a result {y.shape} of the inputs' shape {inputs.shape}")
        after["residual"] = y = (y + inputs).astype(output.dtype)
    if parameters.norm is not None:
        weight, bias, eps = parameters.norm
        after["norm"] = reference.layer_norm(y, y.shape[-1], weight, bias, eps).astype(output.dtype)
    return after


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StackSteps:
    """The base of the steps of models that are a stack of layers."""

    _layers_are: ClassVar[str] = "layers"  # the name of the attribute with the layers

    embeddings: Array
    positions: Array | None
    inputs: Array
    output: Array
    tokens: tuple[str, ...] | None = None

    def to_dict(self, *, weighted_values: bool = True) -> dict[str, Array]:
        """Return all steps by name, in order; a step of layer n is called ``layers.n.scores`` (``blocks.n.…``), for example."""
        first = {name: getattr(self, name) for name in ("embeddings", "positions", "inputs")}
        steps: dict[str, Array] = {name: array for name, array in first.items() if array is not None}
        for n, layer in enumerate(getattr(self, self._layers_are)):
            inner = layer.to_dict(weighted_values=weighted_values)
            steps |= {f"{self._layers_are}.{n}.{name}": array for name, array in inner.items()}
        return {**steps, "output": self.output}

    def __repr__(self) -> str:
        (length, width), layers = self.inputs.shape, getattr(self, self._layers_are)
        head = f"{type(self).__name__}: {length} tokens, width {width}, {len(layers)} {self._layers_are}"
        return "\n".join([head, *(f"{self._layers_are}[{n}] {layer!r}" for n, layer in enumerate(layers))])


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelSteps(StackSteps, Shown):
    """The intermediate results of an embedding model, as :func:`model_steps` returns them.

    Attributes
    ----------
    embeddings, positions : ndarray, shape (L, d)
        Rows of the embedding table, and the encodings of their positions.
    inputs : ndarray, shape (L, d)
        Their sum, the input of the first block.
    blocks : tuple of LayerSteps
        One after the other: the result of each is the input of the next.
    output : ndarray, shape (d,)
        The mean over the tokens: the embedding of the sentence.
    tokens : tuple of str or None
        The words or pieces, if the model's tokenizer has them; pages label rows with them.
    """

    _layers_are: ClassVar[str] = "blocks"

    positions: Array
    blocks: tuple[LayerSteps, ...]


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
        The input of the first must be the sum of embeddings and positions, the input of each other block the result of the
        block before it.
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
        embeddings=rows, positions=places, inputs=inputs, blocks=tuple(blocks), output=x.mean(axis=0),
        tokens=None if tokens is None else tuple(tokens),
    )  # fmt: skip
