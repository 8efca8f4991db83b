"""The transformer of the C core: its settings, its forward and backward calls, and the ids that it takes.

A layer of `nn` or a model of `selfattn.models` describes itself with these tuples of arrays. Sequences are packed: their
rows come one after the other, without padding, and attention stays within each. ``cu_seqlens``, int64 (sequences + 1,), has
the first row of each sequence, and at the end the number of all rows. No sequence is empty.

A layer computes, with d the width of the model::

    s = x + output(attention(query(n), key(n), value(n)))          n = attention_norm(x) if norm_first, else x
    y = s + down(activation(gate(m)) * up(m))                      m = feed_forward_norm(s) if norm_first, else s

Without ``norm_first`` the norms come after the sums instead: ``s = attention_norm(x + …)``, ``y =
feed_forward_norm(s + …)``. Post norms, with ``norm_first`` alone, come before the sums: ``s = x + attention_post_norm(output(…))``, ``y =
s + feed_forward_post_norm(down(…))``. ``query_norm`` and ``key_norm`` normalise each head, before rotary positions. Without ``gate`` the
feed-forward network is ``down(activation(up(m)))``. Parts that are None are left out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_integers
from selfattn.engine.weights import Rounded, Weight, no_gradients

Ids = npt.NDArray[np.int64]
Pullback = Callable[[Array], tuple[Array, list[Array], Array | None]]


class Projection(NamedTuple):
    """``x @ weight.T + bias``."""

    # (out, in), contiguous. A layer's weights are all Rounded or none is; Rounded query, key and value are separate.
    weight: Weight
    bias: Array | None = None  # (out,)


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm, of rows of d elements."""

    weight: Array
    bias: Array | None = None
    eps: float = 1e-5
    kind: Literal["layer", "rms"] = "layer"


class Rotary(NamedTuple):
    """Rotary positions: the angles of position p are row p."""

    cos: Array  # (positions, rotated width / 2)
    sin: Array
    interleaved: bool = False  # True: pairs are neighbours; else elements i and i + half


class Layer(NamedTuple):
    """One layer."""

    num_heads: int
    query: Projection  # if key is None, query, key and value in one matrix, (3·width, d)
    key: Projection | None = None
    value: Projection | None = None
    output: Projection | None = None
    attention_norm: Norm | None = None
    up: Projection | None = None
    gate: Projection | None = None
    down: Projection | None = None
    feed_forward_norm: Norm | None = None
    query_norm: Norm | None = None  # its weight has the width of a head
    key_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    feed_forward_post_norm: Norm | None = None
    num_key_heads: int | None = None  # None: num_heads
    norm_first: bool = False
    activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    causal: bool = False
    # How many keys to the left and to the right a query sees.
    window: tuple[int | None, int | None] = (None, None)
    rotary: Rotary | None = None
    scale: float | None = None  # None: 1/√(width of a head)
    softcap: float = 0.0
    # The probabilities of dropout: attention weights, output projection, input of `down`, output of `down`.
    dropout: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    seed: int = 0  # the seed of dropout, 64 bits


class Transformer(NamedTuple):
    """A stack of layers with its embeddings and its final norm.

    All arrays have one dtype, float32 or float64; with Rounded ones float32.
    """

    layers: tuple[Layer, ...]
    table: Weight | None = None  # (vocabulary, d): inputs are ids; None: inputs are rows (tokens, d)
    table_factor: float | None = (
        None  # multiplies the rows of the table, which then has neither `always` nor positions
    )
    always: Array | None = None  # (d,), added to every row of the table
    positions: Array | None = None  # (longest, d), added to the rows of the table
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None
    # Added to the scores, (1 or sequences, 1 or heads, longest, longest), any strides; or boolean, True where a query may attend.
    mask: Array | None = None
    # Added to all scores of a key, (1 or sequences, longest), contiguous.
    key_bias: Array | None = None
    pooling: Literal["mean", "first", "last"] | None = None  # None: a row for each token
    digits: int = 0  # of rows of prompts that multiply quants, each of 8 bits; 0: rows are float32, and quants are expanded


def arrays(model: Transformer) -> list[Weight]:
    """Return the parameters in the order of their gradients: the table, then field by field, weights before biases.

    ``always``, positions, mask and angles have no gradient of their own: a caller sums ``dx`` for positions.
    """
    of_layers = [field for layer in model.layers for field in _fields(layer)]
    fields = [field for field in (model.embedding_norm, *of_layers, model.final_norm) if field is not None]
    found = [model.table, *(array for field in fields for array in (field.weight, field.bias))]
    return [array for array in found if array is not None]


def _fields(layer: Layer) -> tuple[Projection | Norm | None, ...]:
    """Return the fields that have parameters, in the order of the core."""
    return (
        layer.query, layer.key, layer.value, layer.output, layer.attention_norm, layer.up, layer.gate, layer.down,
        layer.feed_forward_norm, layer.query_norm, layer.key_norm, layer.attention_post_norm, layer.feed_forward_post_norm,
    )  # fmt: skip


ACTIVATIONS = {"relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
POOLINGS = {None: 0, "mean": 1, "first": 2, "last": 3}
NONE = (None, None)


def forward(model: Transformer, inputs: Array, cu_seqlens: Array) -> Array:
    """Compute a row for each token, (tokens, d), or with pooling for each sequence, (sequences, d).

    ``inputs`` are ids (tokens,) of int64, or rows (tokens, d).
    """
    return compute(as_core(model), inputs, cu_seqlens)


def compute(model: tuple[Any, Any, Any], inputs: Array, cu_seqlens: Array) -> Array:
    """Compute what :func:`forward` does, from the tuples that :func:`as_core` returns."""
    y: Array = _core._transformer_forward(inputs, cu_seqlens, model, False)
    return y


def vjp(
    model: Transformer,
    inputs: Array,
    cu_seqlens: Array,
    *,
    wants_mask: bool = False,
    wants_parameters: bool = True,
) -> tuple[Array, Pullback]:
    """Compute what :func:`forward` does, and ``dy -> (dx, grads, dmask)``.

    ``dx`` (tokens, d) is the gradient of the rows that enter the first norm or layer. ``grads`` are new arrays in the order
    of :func:`arrays`, or none if parameters are not wanted. ``dmask`` (heads, longest, longest) is the gradient of a float mask that
    all sequences share, if it is wanted. Rounded weights are a ValueError, unless only ``dx`` is wanted.
    """
    for weight in arrays(model):
        if isinstance(weight, Rounded):
            if wants_parameters or wants_mask:
                raise no_gradients(weight.kind)
            return _vjp_by_layer(model, inputs, cu_seqlens)
    y, saved = _core._transformer_forward(inputs, cu_seqlens, as_core(model), True)

    def pullback(dy: Array) -> tuple[Array, list[Array], Array | None]:
        wanted = True, wants_mask, wants_parameters
        grads, dx, dmask = _core._transformer_backward(saved, np.ascontiguousarray(dy), *wanted)
        assert dx is not None
        return dx, grads, dmask

    return y, pullback


def _vjp_by_layer(model: Transformer, inputs: Array, cu_seqlens: Array) -> tuple[Array, Pullback]:
    """Compute what :func:`vjp` does, with the rounded weights of one layer at a time as float32.

    The rows between layers are those of :func:`forward`. The gradient is that of the expanded weights there, as if nothing rounded
    the rows that enter a product.
    """
    bare = without_table(model)
    entry = model._replace(layers=(), embedding_norm=None, final_norm=None, pooling=None)
    rows = inputs if model.table is None else forward(entry, inputs, cu_seqlens)
    last, given = len(model.layers) - 1, []
    parts = [
        bare._replace(
            layers=(layer,),
            embedding_norm=model.embedding_norm if n == 0 else None,
            final_norm=model.final_norm if n == last else None,
            pooling=model.pooling if n == last else None,
        )
        for n, layer in enumerate(model.layers)
    ] or [bare]
    for part in parts:
        given.append(rows)
        rows = forward(part, rows, cu_seqlens)

    def pullback(dy: Array) -> tuple[Array, list[Array], None]:
        for part, x in zip(reversed(parts), reversed(given), strict=True):
            dy = vjp(expanded(part), x, cu_seqlens, wants_parameters=False)[1](dy)[0]
        return dy, [], None

    return rows, pullback


def expanded(model: Transformer) -> Transformer:
    """Return a model with its rounded weights as arrays of float32."""

    def of_layer(layer: Layer) -> Layer:
        fields = layer._asdict()
        whole = {
            n: x._replace(weight=np.asarray(x.weight)) for n, x in fields.items() if isinstance(x, Projection)
        }
        return Layer(**fields | whole)

    table = None if model.table is None else np.asarray(model.table)
    return model._replace(table=table, layers=tuple(of_layer(layer) for layer in model.layers))


def without_table(model: Transformer) -> Transformer:
    """Return a model that takes the rows that enter its first norm or layer."""
    return model._replace(table=None, table_factor=None, always=None, positions=None)


def as_core(model: Transformer) -> tuple[Any, Any, Any]:
    """Return the tuples that ``csrc/python/transformer_model.c`` takes."""
    first, final = model.embedding_norm, model.final_norm
    some = next(array for array in arrays(model))
    table = model.table.table if isinstance(model.table, Rounded) else model.table
    own = (table, model.always, model.positions, model.mask, model.key_bias, *_both(first), *_both(final))
    if model.table is not None:
        d = model.table.shape[1]
    elif model.layers:
        d = model.layers[0].query.weight.shape[1]
    else:
        d = some.shape[0]
    numbers = (
        d, some.dtype == np.float64, first.eps if first else 0.0, final.eps if final else 0.0,
        first is not None and first.kind == "rms", final is not None and final.kind == "rms", POOLINGS[model.pooling],
        0.0 if model.table_factor is None else model.table_factor, model.digits,
    )  # fmt: skip
    return own, numbers, tuple([_layer(layer) for layer in model.layers])


def _both(own: Projection | Norm | None) -> tuple[Any, Array | None]:
    if own is None:
        return NONE
    return own.weight.packed if isinstance(own.weight, Rounded) else own.weight, own.bias


def _layer(layer: Layer) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    first, last, rotary = layer.attention_norm, layer.feed_forward_norm, layer.rotary
    others = _fields(layer)[9:]  # the norms of heads and the post norms
    found: list[Any] = [array for field in _fields(layer) for array in _both(field)]
    found += NONE if rotary is None else (rotary.cos, rotary.sin)
    key_heads = layer.num_heads if layer.num_key_heads is None else layer.num_key_heads
    heads_of_query = layer.num_heads + (2 * key_heads if layer.key is None else 0)
    width = layer.query.weight.shape[0] // heads_of_query
    left, right = (-1 if bound is None else bound for bound in layer.window)
    numbers = (
        layer.num_heads, key_heads, width, first.eps if first else 0.0, last.eps if last else 0.0,
        first is not None and first.kind == "rms", last is not None and last.kind == "rms", layer.norm_first, layer.causal,
        left, right, 1 / math.sqrt(width) if layer.scale is None else layer.scale, layer.softcap,
        0 if layer.up is None else ACTIVATIONS[layer.activation], rotary is not None and rotary.interleaved,
        *layer.dropout, layer.seed, *(norm.eps if isinstance(norm, Norm) else 0.0 for norm in others),
        *(isinstance(norm, Norm) and norm.kind == "rms" for norm in others),
    )  # fmt: skip
    return tuple(found), numbers


def attention_layer(
    arrays: tuple[Any, ...], num_heads: int, eps: float
) -> tuple[tuple[Array | None, ...], tuple[Any, ...]]:
    """Describe a layer of only attention and a norm; the core takes missing arrays at the end as None.

    ``arrays`` are weight and bias of query, key, value and the norm.
    """
    return arrays[:6] + NONE + arrays[6:], _attention_numbers(num_heads, len(arrays[0]) // num_heads, eps)


@functools.cache
def _attention_numbers(num_heads: int, width: int, eps: float) -> tuple[Any, ...]:
    return num_heads, num_heads, width, eps, 0.0, 0, 0, 0, 0, -1, -1, 1 / math.sqrt(width), 0.0, 0, 0


# ------------------------------------------------------------------------------------------------------------ ids


def vectors(name: str, sequences: Iterable[npt.ArrayLike]) -> list[Ids]:
    """Return the ids of each sequence as a vector of int64."""
    found = [as_integers(f"{name} of sequence {n}", own) for n, own in enumerate(sequences)]
    for n, own in enumerate(found):
        if own.ndim != 1:
            raise ValueError(f"{name} of sequence {n} must have shape (L,), not {own.shape}")
    return found


def pack(sequences: Sequence[Any]) -> tuple[Ids, Ids]:
    """Concatenate the ids of sequences, vectors or lists of int; also return ``cu_seqlens``."""
    cu_seqlens = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([len(own) for own in sequences], out=cu_seqlens[1:])
    if sequences and isinstance(sequences[0], np.ndarray):
        return np.concatenate(sequences, dtype=np.int64), cu_seqlens
    return np.fromiter(itertools.chain.from_iterable(sequences), np.int64, int(cu_seqlens[-1])), cu_seqlens


def check_ids(ids: Array, vocab_size: int, found: str = "not") -> None:
    """Refuse ids that are not in 0 … vocab_size − 1; the first of them ends the message, after ``found``."""
    if ids.size and not (ids.min() >= 0 and ids.max() < vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)].flat[0]
        raise ValueError(f"ids must be in 0...{vocab_size - 1}, {found} {wrong}")
