"""Records of steps: every intermediate value of a call of attention, of a layer, or of a stack of layers, by name.

They are one hierarchy: :class:`Steps` names the values, in the order of the computation. `attention`, `layers` and
`transformer` compute them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from selfattn import _drawing, reference
from selfattn._check import Array, as_array, float_dtype
from selfattn.reference.call import Call

__all__ = [
    "AdditiveSteps",
    "AttentionSteps",
    "LayerParameters",
    "LayerSteps",
    "ModelSteps",
    "StackSteps",
    "Steps",
    "TransformerLayerSteps",
    "TransformerSteps",
]

FORMULAS = {
    "scores": "query @ key.T",
    "scaled_scores": "scale * scores, soft-capped",
    "masked_scores": "+ ALiBi + float mask; -inf where masked",
    "weights": "softmax(masked_scores)",
    "dropped_weights": "dropout(weights)",
    "weighted_values": "dropped_weights[i, j] * value[j]",
    "output": "weighted_values.sum over j",
}
# What tutorials 3 and 4 call them. Tutorial 4's weighted_values have the axis of keys first.
ALSO_CALLED = {
    "scores": "attn_logits, attn_scores",
    "scaled_scores": "scaled_attention_logits",
    "weights": "attention_weights, attn_scores_softmax",
}
LAYER_FORMULAS = {
    "inputs": "x",
    "query": "x @ W_query + b_query, split into heads",
    "key": "x @ W_key + b_key, split into heads",
    "value": "x @ W_value + b_value, split into heads",
    **FORMULAS,
    "concatenated": "the outputs of the heads, side by side",
    "projected_output": "concatenated @ W_out + b_out",
    "residual": "+ inputs",
    "norm": "LayerNorm(residual)",
}
# The steps of a layer of a transformer.
BEFORE_ATTENTION = ("inputs", "attention_inputs", "query", "key", "value", "query_norm", "key_norm")
AFTER_ATTENTION = (
    "concatenated",
    "projected_output",
    "attention_post_norm",
    "residual",
    "norm",
    "feed_forward_inputs",
    "gate",
    "up",
    "activated",
    "down",
    "feed_forward_post_norm",
    "feed_forward_residual",
    "feed_forward_norm",
)


class Steps:
    """The base of records of steps.

    A step is an array, a record of steps, or a tuple of records, one for each layer. It is None where a layer has no
    such step.
    """

    _names: ClassVar[Iterable[str]]  # in the order of the computation

    def to_dict(self, *, weighted_values: bool = True) -> dict[str, Array]:
        """Return the steps by name.

        Parameters
        ----------
        weighted_values : bool, default True
            False leaves out ``weighted_values``, the largest, which are computed at each access.

        Returns
        -------
        dict of str to ndarray
            In the order of the computation, read-only; without those that are None. A step of layer n of a stack is
            called ``layers.n.scores`` (``blocks.n.…``), for example.

        Examples
        --------
        >>> import selfattn as sa
        >>> steps = sa.attention_steps([[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]], [[10.0], [20.0]])
        >>> list(steps.to_dict(weighted_values=False))[:3]
        ['scores', 'scaled_scores', 'masked_scores']
        """
        found: dict[str, Array] = {}
        for name in self._names:
            if name == "weighted_values" and not weighted_values:
                continue
            value = getattr(self, name)
            if isinstance(value, Steps):
                found |= value.to_dict(weighted_values=weighted_values)
            elif isinstance(value, tuple):
                for n, layer in enumerate(value):
                    inner = layer.to_dict(weighted_values=weighted_values)
                    found |= {f"{name}.{n}.{each}": array for each, array in inner.items()}
            elif value is not None:
                found[name] = value
        return found

    @property
    def result(self) -> Array:
        """The result: the last of the steps."""
        return list(self.to_dict(weighted_values=False).values())[-1]


class NotebookPage:
    """The base of steps that a notebook shows as a page."""

    def _repr_html_(self) -> str | None:
        return _drawing.draw("html", self)

    def _repr_svg_(self) -> str | None:
        return _drawing.draw("svg", self)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AttentionSteps(Steps, NotebookPage):
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
        Plus ALiBi, a float mask or ``bias``, and ``offset_bias``; then -inf where a mask, ``is_causal``, ``window``,
        ``key_lengths`` or ``block_mask`` forbids a key.
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

    _names: ClassVar[Mapping[str, str]] = FORMULAS

    scores: Array
    scaled_scores: Array
    masked_scores: Array
    weights: Array
    dropped_weights: Array
    output: Array
    _call: Call
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
        >>> import selfattn as sa
        >>> query, key = [[1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
        >>> value = [[10.0], [20.0]]
        >>> steps = sa.attention_steps(query, key, value)
        >>> steps.output.round(2)
        array([[13.3]])
        >>> steps.with_weights(steps.weights == steps.weights.max(axis=-1, keepdims=True)).output
        array([[10.]])
        """
        given = as_array("weights", weights)
        if given.dtype != np.bool_:
            float_dtype("weights", given)
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

    def _head(self) -> str:
        *lead, n_queries, n_keys = self.scores.shape
        return f"AttentionSteps: {n_queries} queries, {n_keys} keys, leading dims {tuple(lead)}"

    def __repr__(self) -> str:
        shapes = {name: array.shape for name, array in self.to_dict(weighted_values=False).items()}
        shapes["weighted_values"] = (*self.scores.shape, self.output.shape[-1])
        columns = [max(len(name) for name in shapes), max(len(str(shape)) for shape in shapes.values())]
        rows = [
            f"  {name:{columns[0]}}  {shapes[name]!s:{columns[1]}}  {text}"
            + (f"; also {ALSO_CALLED[name]}" if name in ALSO_CALLED else "")
            for name, text in self._names.items()
            if name in shapes
        ]
        return "\n".join([self._head(), *rows])


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

    def _project(self, name: str, x: Array) -> Array:
        """Return ``x @ W_name + b_name``, if the shapes fit."""
        weight, bias = getattr(self, f"W_{name}"), getattr(self, f"b_{name}")
        if x.ndim < 2 or weight.ndim != 2 or x.shape[-1] != weight.shape[0]:
            given = f"inputs {x.shape} and W_{name} {weight.shape}"
            raise ValueError(f"{given} are not (..., L, d_in) and (d_in, d_out)")
        if bias is not None and bias.shape != weight.shape[1:]:
            raise ValueError(f"b_{name} has shape {bias.shape}, not {weight.shape[1:]}")
        y: Array = x @ weight
        return y if bias is None else y + bias

    def _heads(self, name: str, x: Array) -> Array:
        """Project (..., L, d_in), and split into (..., num_heads, L, d / num_heads); one head needs no axis."""
        y, count = self._project(name, x), self.num_heads
        if isinstance(count, bool) or count < 1 or y.shape[-1] % count:
            raise ValueError(f"num_heads={count!r} does not divide the width of the {name}, {y.shape[-1]}")
        return y if count == 1 else y.reshape(*y.shape[:-1], count, -1).swapaxes(-2, -3)

    def _after(self, output: Array, inputs: Array) -> dict[str, Array]:
        """Concatenate the heads, project, add the inputs, normalise; return the steps of this layer by name."""
        after, y = {}, output
        if self.num_heads > 1:
            merged = y.swapaxes(-2, -3)
            after["concatenated"] = y = merged.reshape(*merged.shape[:-2], -1)
        if self.W_out is not None:
            after["projected_output"] = y = self._project("out", y).astype(output.dtype)
        if self.residual:
            if y.shape != inputs.shape:
                raise ValueError(
                    f"residual=True needs a result {y.shape} of the inputs' shape {inputs.shape}"
                )
            after["residual"] = y = (y + inputs).astype(output.dtype)
        if self.norm is not None:
            weight, bias, eps = self.norm
            for name, x in (("weight", weight), ("bias", bias)):
                if x is not None and x.shape != y.shape[-1:]:
                    raise ValueError(f"{name} has shape {x.shape}, not normalized_shape {y.shape[-1:]}")
            after["norm"] = reference.layer_norm(y, y.shape[-1], weight, bias, eps).astype(output.dtype)
        return after


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

    _names: ClassVar[Mapping[str, str]] = LAYER_FORMULAS

    inputs: Array
    key_inputs: Array
    value_inputs: Array
    parameters: LayerParameters
    concatenated: Array | None = None
    projected_output: Array | None = None
    residual: Array | None = None
    norm: Array | None = None

    def _after(self, output: Array) -> dict[str, Array]:
        return self.parameters._after(output, self.inputs)

    def _head(self) -> str:
        n_queries, n_keys = self.scores.shape[-2:]
        heads = self.parameters.num_heads
        return f"{type(self).__name__}: {n_queries} queries, {n_keys} keys, {heads} head{'s' * (heads > 1)}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class AdditiveSteps(LayerSteps):
    """The steps of a layer whose score is Bahdanau's: ``scores[i, j]`` is ``v @ tanh(query[i] + key[j])``."""

    _names: ClassVar[Mapping[str, str]] = LAYER_FORMULAS | {"scores": "tanh(query[i] + key[j]) @ v"}


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TransformerLayerSteps(Steps):
    """The intermediate results of one layer of a transformer, with H heads of width D.

    In the order of the computation; those that a layer does not have are None.

    Attributes
    ----------
    inputs : ndarray, shape (L, d)
    attention_inputs : ndarray or None, shape (L, d)
        Normalised, where the norm comes first.
    query, key, value : ndarray, shape (H, L, D)
        The projections, split into heads, before norms of heads and rotary positions.
    query_norm, key_norm : ndarray or None, shape (H, L, D)
        Each head normalised, where the layer has these norms.
    attention : AttentionSteps
        Of all heads; :attr:`scores`, :attr:`weights` and :attr:`output` are its own. Rotary positions have rotated its
        query and key.
    concatenated : ndarray, shape (L, H * D)
        The concatenated outputs of the heads.
    projected_output : ndarray or None, shape (L, d)
    attention_post_norm : ndarray or None, shape (L, d)
        Normalised before the sum, where the layer has this norm.
    residual : ndarray, shape (L, d)
        Plus ``inputs``.
    norm : ndarray or None, shape (L, d)
        The residual normalised, where the norm comes after.
    feed_forward_inputs : ndarray or None, shape (L, d)
        The residual normalised, where the norm comes first.
    gate, up : ndarray or None, shape (L, f)
        The projections to the inner width.
    activated : ndarray or None, shape (L, f)
        ``activation(up)``, or ``activation(gate) * up``.
    down : ndarray or None, shape (L, d)
    feed_forward_post_norm : ndarray or None, shape (L, d)
        Normalised before the sum, where the layer has this norm.
    feed_forward_residual : ndarray or None, shape (L, d)
        Plus the residual or norm before the feed-forward network.
    feed_forward_norm : ndarray or None, shape (L, d)
    """

    _names = (*BEFORE_ATTENTION, "attention", *AFTER_ATTENTION)

    inputs: Array
    attention_inputs: Array | None = None
    query: Array
    key: Array
    value: Array
    query_norm: Array | None = None
    key_norm: Array | None = None
    attention: AttentionSteps
    concatenated: Array
    projected_output: Array | None = None
    attention_post_norm: Array | None = None
    residual: Array
    norm: Array | None = None
    feed_forward_inputs: Array | None = None
    gate: Array | None = None
    up: Array | None = None
    activated: Array | None = None
    down: Array | None = None
    feed_forward_post_norm: Array | None = None
    feed_forward_residual: Array | None = None
    feed_forward_norm: Array | None = None

    @property
    def scores(self) -> Array:
        """``query @ key.T``, (H, L, L)."""
        return self.attention.scores

    @property
    def weights(self) -> Array:
        """The softmax of the scaled and masked scores, (H, L, L)."""
        return self.attention.weights

    @property
    def output(self) -> Array:
        """The output of each head, (H, L, D)."""
        return self.attention.output

    def __repr__(self) -> str:
        heads, length, width = self.query.shape
        steps = self.to_dict(weighted_values=False).items()
        shapes = ", ".join(f"{name} {array.shape}" for name, array in steps)
        return f"{type(self).__name__}: {length} tokens, {heads} heads of {width}; {shapes}"


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StackSteps(Steps):
    """The base of the steps of models that are a stack of layers."""

    embeddings: Array
    positions: Array | None
    inputs: Array
    output: Array
    tokens: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        *_, name, _ = self._names  # the layers, before the output
        (length, width), layers = self.inputs.shape, getattr(self, name)
        head = f"{type(self).__name__}: {length} tokens, width {width}, {len(layers)} {name}"
        return "\n".join([head, *(f"{name}[{n}] {layer!r}" for n, layer in enumerate(layers))])


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class ModelSteps(StackSteps, NotebookPage):
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

    _names = ("embeddings", "positions", "inputs", "blocks", "output")

    positions: Array
    blocks: tuple[LayerSteps, ...]


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class TransformerSteps(StackSteps):
    """The intermediate results of a transformer, as :func:`transformer_steps` returns them.

    Attributes
    ----------
    embeddings : ndarray, shape (L, d)
        Rows of the table, times its factor, plus the row that is added to all of them.
    positions : ndarray or None, shape (L, d)
        The encodings of positions that are added.
    inputs : ndarray, shape (L, d)
        The input of the first layer: their sum, normalised if the model has a norm there.
    layers : tuple of TransformerLayerSteps
        The result of each is the input of the next.
    output : ndarray, shape (L, d)
        The result of the model, after its last norm.
    tokens : tuple of str or None
        The pieces of the text.
    """

    _names = ("embeddings", "positions", "inputs", "layers", "output")

    layers: tuple[TransformerLayerSteps, ...]
