"""The transformer of the C core: its settings, its forward and backward calls, and the ids that it takes.

A layer of `nn` or a model of `selfattn_models` describes itself with these tuples of arrays; a :class:`Call` says what
one call adds. The core reads both by the names of their fields, which ``csrc/python/transformer_model.c`` lists, and
computes with the arrays as they are. Sequences are packed: their rows come one after the other, without padding, and
attention stays within each. ``cu_seqlens``, int64 (sequences + 1,), has the first row of each sequence, and at the end
the number of all rows. No sequence is empty.

A layer computes, with d the width of the model::

    s = x + output(attention(query(n), key(n), value(n)))          n = attention_norm(x) if norm_first, else x
    y = s + down(activation(gate(m)) * up(m))                      m = feed_forward_norm(s) if norm_first, else s

Without ``norm_first`` the norms come after the sums instead: ``s = attention_norm(x + …)``, ``y =
feed_forward_norm(s + …)``. Post norms, with ``norm_first`` alone, come before the sums: ``s = x +
attention_post_norm(output(…))``, ``y = s + feed_forward_post_norm(down(…))``. ``query_norm`` and ``key_norm``
normalise each head, before rotary positions. Without ``gate`` the feed-forward network is
``down(activation(up(m)))``. Parts that are None are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from selfattn import _core
from selfattn._check import Array, as_integers
from selfattn.engine.weights import Rounded, Weight, no_gradients

Ids = npt.NDArray[np.int64]
CorePullback = Callable[[Array], tuple[Any, list[Array], Array | None]]


@_core._record
class Projection(NamedTuple):
    """``x @ weight.T + bias``."""

    # (out, in), contiguous. A layer's weights are all Rounded or none is; Rounded query, key and value are separate.
    weight: Weight
    bias: Array | None = None  # (out,)


@_core._record
class Norm(NamedTuple):
    """LayerNorm, or RMSNorm, of rows of d elements."""

    weight: Array
    bias: Array | None = None
    eps: float = 1e-5
    kind: Literal["layer", "rms"] = "layer"


@_core._record
class Rotary(NamedTuple):
    """Rotary positions: the angles of position p are row p."""

    cos: Array  # (positions, rotated width / 2)
    sin: Array
    interleaved: bool = False  # True: pairs are neighbours; else elements i and i + half


@_core._record
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


@_core._record
class Transformer(NamedTuple):
    """A stack of layers with its embeddings and its final norm.

    All arrays have one dtype, float32 or float64; with Rounded ones float32.
    """

    layers: tuple[Layer, ...]
    table: Weight | None = None  # (vocabulary, d): inputs are ids; None: inputs are rows (tokens, d)
    # Multiplies the rows of the table, which then has neither token_type_row nor positions.
    table_factor: float | None = None
    token_type_row: Array | None = None  # (d,), added to every row of the table
    positions: Array | None = None  # (longest, d), added to the rows of the table
    # Added to the scores, (1, 1 or heads, longest, longest): a bias of relative positions.
    position_bias: Array | None = None
    embedding_norm: Norm | None = None
    final_norm: Norm | None = None


@_core._record
class Dropout(NamedTuple):
    """The dropout of a layer in one call: probabilities, and the seed of what is dropped."""

    weights: float = 0.0  # of attention
    output: float = 0.0  # the result of `output`
    wide: float = 0.0  # the input of `down`
    down: float = 0.0  # the result of `down`
    seed: int = 0  # 64 bits


@_core._record
class Call(NamedTuple):
    """What a call adds to a model."""

    # Added to the scores, (1 or sequences, 1 or heads, longest, longest), any strides; or boolean, True where a query
    # may attend. A model with a position_bias takes none.
    mask: Array | None = None
    key_bias: Array | None = None  # added to all scores of a key, (1 or sequences, longest), contiguous
    dropout: tuple[Dropout, ...] = ()  # one for each layer; empty: nothing is dropped
    pooling: Literal["mean", "first", "last"] | None = None  # None: a row for each token
    # Of rows of prompts that multiply quants: how many integers of 8 bits make a number; 0: rows are float32, and
    # quants are expanded.
    prompt_precision: int = 0


PLAIN = Call()  # adds nothing


def arrays(model: Transformer) -> list[Weight]:
    """Return the parameters in the order of their gradients: the table, then field by field, weights before biases.

    The other arrays have no gradient of their own: a caller sums ``dx`` for positions.
    """
    fields: list[Any] = [model.embedding_norm]
    for layer in model.layers:
        fields += tuple(layer)[PARAMETERS]
    fields.append(model.final_norm)
    given = [field for field in fields if field is not None]
    found = [model.table, *(array for field in given for array in (field.weight, field.bias))]
    return [array for array in found if array is not None]


# The fields of a layer that have parameters, in the order of their gradients.
PARAMETERS = slice(Layer._fields.index("query"), Layer._fields.index("feed_forward_post_norm") + 1)


def forward(model: Transformer, inputs: Array, cu_seqlens: Array, call: Call = PLAIN) -> Array:
    """Compute a row for each token, (tokens, d), or with pooling for each sequence, (sequences, d).

    ``inputs`` are ids (tokens,) of int64, or rows (tokens, d).
    """
    y: Array = _core._transformer_forward(model, inputs, cu_seqlens, call, False)
    return y


def vjp(
    model: Transformer,
    inputs: Array,
    cu_seqlens: Array,
    call: Call = PLAIN,
    *,
    wants_rows: bool = True,
    wants_mask: bool = False,
    wants_parameters: bool = True,
) -> tuple[Array, CorePullback]:
    """Compute what :func:`forward` does, and ``dy -> (dx, grads, dmask)``.

    ``dx`` (tokens, d) is the gradient of the rows that enter the first norm or layer, or None if it is not wanted.
    ``grads`` are new arrays in the order of :func:`arrays`, or none if parameters are not wanted. ``dmask`` (heads,
    longest, longest) is the gradient of the position_bias, or of a float mask that all sequences share, if it is
    wanted. Rounded weights are a ValueError, unless only ``dx`` is wanted.
    """
    for weight in arrays(model):
        if isinstance(weight, Rounded):
            if wants_parameters or wants_mask:
                raise no_gradients(weight.kind)
            return _vjp_by_layer(model, inputs, cu_seqlens, call)
    y, saved = _core._transformer_forward(model, inputs, cu_seqlens, call, True)

    def pullback(dy: Array) -> tuple[Any, list[Array], Array | None]:
        wanted = wants_rows, wants_mask, wants_parameters
        grads, dx, dmask = _core._transformer_backward(saved, np.ascontiguousarray(dy), *wanted)
        return dx, grads, dmask

    return y, pullback


def _vjp_by_layer(
    model: Transformer, inputs: Array, cu_seqlens: Array, call: Call
) -> tuple[Array, CorePullback]:
    """Compute what :func:`vjp` does, with the rounded weights of one layer at a time as float32.

    The rows between layers are those of :func:`forward`. The gradient is that of the expanded weights there, as if
    nothing rounded the rows that enter a product.
    """
    bare = without_table(model)
    entry = model._replace(layers=(), embedding_norm=None, final_norm=None, position_bias=None)
    rows = inputs if model.table is None else forward(entry, inputs, cu_seqlens)
    last, given = len(model.layers) - 1, []
    parts = [
        (
            bare._replace(
                layers=(layer,),
                embedding_norm=model.embedding_norm if n == 0 else None,
                final_norm=model.final_norm if n == last else None,
            ),
            call._replace(dropout=call.dropout[n : n + 1], pooling=call.pooling if n == last else None),
        )
        for n, layer in enumerate(model.layers)
    ] or [(bare, call)]
    for part, of_call in parts:
        given.append(rows)
        rows = forward(part, rows, cu_seqlens, of_call)

    def pullback(dy: Array) -> tuple[Array, list[Array], None]:
        for (part, of_call), x in zip(reversed(parts), reversed(given), strict=True):
            dy = vjp(expanded(part), x, cu_seqlens, of_call, wants_parameters=False)[1](dy)[0]
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
    return model._replace(table=None, table_factor=None, token_type_row=None, positions=None)


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
