"""A stack of transformer layers over packed sequences in plain NumPy, and its gradients.

``selfattn.engine.transformer.Transformer`` describes the fields of a model. The lines compute forward; a
:class:`Tape` remembers for each how a gradient goes back. A :class:`Watch` receives the intermediate values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.reference.arrays import Array
from selfattn.reference.dropout import philox4x32
from selfattn.reference.rows import apply_rotary_emb
from selfattn.reference.rows_vjp import gelu_vjp, layer_norm_vjp, rms_norm_vjp
from selfattn.reference.varlen import varlen_attention_vjp

# The place of a parameter: its layer, its field in PARAMETERS, 0 for a weight or 1 for a bias.
Place: TypeAlias = tuple[int, ...]

PARAMETERS = (
    "query",
    "key",
    "value",
    "output",
    "attention_norm",
    "up",
    "gate",
    "down",
    "feed_forward_norm",
    "query_norm",
    "key_norm",
    "attention_post_norm",
    "feed_forward_post_norm",
)
MASK = len(PARAMETERS)  # the place of the mask's gradient
WEIGHTS, OUTPUT, WIDE, DOWN = range(4)  # what may be dropped, in the order of a `Dropout`
GOLDEN = 0x9E3779B97F4A7C15  # the seeds of these four kinds of dropout are this far apart


class Tape:
    """Remembers from which arrays every array was computed."""

    def __init__(self) -> None:
        self.made: list[tuple[Array, Sequence[Array | Place], Callable[[Array], Iterable[Any]]]] = []

    def put(
        self, y: Array, sources: Sequence[Array | Place], pull: Callable[[Array], Iterable[Any]]
    ) -> Array:
        """Remember that y was computed from arrays and parameters.

        ``pull`` computes their gradients from y's gradient.
        """
        self.made.append((y, sources, pull))
        return y

    def back(self, y: Array, dy: Array) -> dict[int | Place, Array]:
        """Return the gradients of everything that y was computed from: arrays by id, parameters by place."""
        found: dict[int | Place, Array] = {id(y): dy}
        for made, sources, pull in reversed(self.made):
            for source, gradient in zip(sources, pull(found[id(made)]), strict=False):
                key = source if isinstance(source, tuple) else id(source)
                found[key] = found[key] + gradient if key in found else gradient
        return found


class Watch:
    """Receives the intermediate values of a layer, which it may replace, and computes its attention."""

    def keep(self, name: str, x: Array) -> Array:
        """Receive a value, and return it; `selfattn.steps.records.TransformerLayerSteps` explains the names."""
        return x

    def attend(
        self, query: Array, key: Array, value: Array, cu_seqlens: Array, **options: Any
    ) -> tuple[Array, Any]:
        """Compute attention of packed sequences, (tokens, heads, width), and its pullback."""
        return varlen_attention_vjp(query, key, value, cu_seqlens, cu_seqlens, **options)


NO_WATCH = Watch()
# What a call adds to a model, as :class:`selfattn.engine.transformer.Call` names it; here nothing.
PLAIN = SimpleNamespace(mask=None, key_bias=None, dropout=(), pooling=None)
NO_DROPOUT = (0.0, 0.0, 0.0, 0.0, 0)


def transformer(
    model: Any,
    inputs: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    compute_dtype: npt.DTypeLike | None = None,
    *,
    call: Any = PLAIN,
) -> Array:
    """Compute a row for each token, (tokens, d), or with pooling for each sequence, (sequences, d).

    ::

        x = embedding_norm(table[ids] + positions)    x = one_layer(x), layer after layer    y = pool(final_norm(x))

    ``inputs`` are ids (tokens,), or without a table rows (tokens, d). Sequence s has the rows ``cu_seqlens[s]`` to
    ``cu_seqlens[s + 1] - 1``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3; norms first: Xiong et al., "On Layer Normalization
    in the Transformer Architecture", 2020, table 1; gated: Shazeer, "GLU Variants Improve Transformer", 2020,
    equation 6.
    """
    return transformer_vjp(model, inputs, cu_seqlens, compute_dtype, call=call)[0]


def transformer_vjp(
    model: Any,
    inputs: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    compute_dtype: npt.DTypeLike | None = None,
    *,
    call: Any = PLAIN,
) -> tuple[Array, Callable[[npt.ArrayLike], tuple[Array, list[Array], Array | None]]]:
    """Compute what :func:`transformer` does, and ``dy -> (dx, grads, dmask)``, from the last line to the first.

    ``dx`` (tokens, d) is the gradient of the rows that enter the first norm or layer. ``grads`` are in the order of the
    model's fields, the table first; ``dmask`` (heads, longest, longest) is that of the position_bias, or of a float
    mask that all sequences share, else None.
    """
    cu_seqlens, given = np.asarray(cu_seqlens), np.asarray(inputs)
    compute = np.dtype(compute_dtype or (given if model.table is None else model.table).dtype)
    tape = Tape()
    x = rows = _embed(model, given, cu_seqlens, compute)
    x = normalise(tape, model.embedding_norm, x, (-1, 0))
    for n in range(len(model.layers)):
        x = one_layer(tape, model, n, x, cu_seqlens, call=call)
    x = normalise(tape, model.final_norm, x, (len(model.layers), 0))
    y = _pool(tape, call.pooling, x, cu_seqlens)

    def pullback(dy: npt.ArrayLike) -> tuple[Array, list[Array], Array | None]:
        found = tape.back(y, np.asarray(dy, compute))
        dx = found.pop(id(rows))
        places = sorted(place for place in found if isinstance(place, tuple))
        grads = [found[place] for place in places if place[1] != MASK]
        d_masks = [found[place] for place in places if place[1] == MASK]
        if model.table is not None:
            grads.insert(0, np.zeros(model.table.shape, compute))
            np.add.at(grads[0], given, dx if model.table_factor is None else dx * model.table_factor)
        alike = len({d_mask.shape for d_mask in d_masks}) == 1  # all layers have the same number of heads
        return dx, grads, np.sum(d_masks, axis=0) if alike else None

    return y, pullback


def _embed(model: Any, given: Array, cu_seqlens: Array, compute: np.dtype[Any]) -> Array:
    """Look ids up, times the table's factor, and add ``token_type_row`` and the positions.

    Without a table, return the rows as they are.
    """
    if model.table is None:
        return given.astype(compute)
    x: Array = model.table[given].astype(compute)
    if model.table_factor is not None:
        x = x * compute.type(model.table_factor)
    if model.token_type_row is not None:
        x = x + model.token_type_row.astype(compute)
    if model.positions is not None:
        x = x + model.positions[_places(cu_seqlens)].astype(compute)
    return x


def _places(cu_seqlens: Array) -> Array:
    """Return the position of every token in its sequence."""
    lengths = np.diff(cu_seqlens)
    places: Array = np.arange(cu_seqlens[-1]) - np.repeat(cu_seqlens[:-1], lengths)
    return places


def _pool(tape: Tape, kind: str | None, x: Array, cu_seqlens: Array) -> Array:
    if kind is None:
        return x
    lengths = np.diff(cu_seqlens)
    share = np.zeros((len(lengths), len(x)), x.dtype)  # the weight of each row in each mean
    for s, (begin, end) in enumerate(pairwise(cu_seqlens)):
        rows = {"mean": slice(begin, end), "first": begin, "last": end - 1}[kind]
        share[s, rows] = 1 / lengths[s] if kind == "mean" else 1
    return tape.put(share @ x, [x], lambda dy: [share.T @ dy])


# ------------------------------------------------------------------------------------------------------- a layer


def one_layer(
    tape: Tape,
    model: Any,
    n: int,
    x: Array,
    cu_seqlens: Array,
    watch: Watch = NO_WATCH,
    call: Any = PLAIN,
) -> Array:
    """Compute layer n of a model.

    ::

        norm first:   s = x + post(attend(norm(x)))    y = s + post(feed_forward(norm(s)))
        norm after:   s = norm(x + attend(x))          y = norm(s + feed_forward(s))

    ``post`` is a norm, or nothing; a layer without a feed-forward network returns s.
    """
    x = watch.keep("inputs", x)
    layer = _Layer(tape, model, n, cu_seqlens, watch, call)
    s = layer.residual(x, layer.attend, "attention", ("attention_inputs", "residual", "norm"))
    if model.layers[n].up is None:
        return s
    names = "feed_forward_inputs", "feed_forward_residual", "feed_forward_norm"
    return layer.residual(s, layer.feed_forward, "feed_forward", names)


class _Layer:
    """One layer of a model in a call."""

    def __init__(self, tape: Tape, model: Any, n: int, cu_seqlens: Array, watch: Watch, call: Any) -> None:
        self.tape, self.n, self.cu_seqlens, self.watch = tape, n, cu_seqlens, watch
        self.layer = model.layers[n]
        self.mask = model.position_bias if call.mask is None else call.mask
        self.key_bias = call.key_bias
        of_layer: Any = call.dropout[n] if call.dropout else NO_DROPOUT
        self.dropout, self.seed = of_layer[:-1], of_layer[-1]

    def residual(
        self, x: Array, part: Callable[[Array], Array], what: str, names: tuple[str, str, str]
    ) -> Array:
        """Add to x the output of ``part``, attention or feed-forward network.

        A norm comes before it or after the sum, and a post norm after its output.
        """
        tape, norm, post = self.tape, f"{what}_norm", f"{what}_post_norm"
        place, given = (self.n, PARAMETERS.index(norm)), getattr(self.layer, norm)
        first, last = (given, None) if self.layer.norm_first else (None, given)
        inside = normalise(tape, first, x, place)
        if first is not None:
            inside = self.watch.keep(names[0], inside)
        added = self.own_norm(post, part(inside))
        s = tape.put(x + added, [x, added], lambda dy: [dy, dy])
        s = self.watch.keep(names[1], s)
        y = normalise(tape, last, s, place)
        if last is not None:
            y = self.watch.keep(names[2], y)
        return y

    def own_norm(self, name: str, x: Array) -> Array:
        """Normalise rows, or heads, by a norm that is a step of its own, if the layer has it."""
        norm = getattr(self.layer, name)
        y = normalise(self.tape, norm, x, (self.n, PARAMETERS.index(name)))
        return y if norm is None else self.watch.keep(name, y)

    def attend(self, x: Array) -> Array:
        """Project to queries, keys and values, and attend within sequences.

        Queries and keys are normalised and rotated first, and the output is projected last.
        """
        layer, cu_seqlens = self.layer, self.cu_seqlens
        heads = layer.num_heads
        key_heads = heads if layer.num_key_heads is None else layer.num_key_heads
        if layer.key is None:  # one projection for all three
            joint = self.project("query", x)
            width = joint.shape[1] // (heads + 2 * key_heads)
            cuts = [0, heads * width, (heads + key_heads) * width, joint.shape[1]]
            parts = [_heads(self.tape, joint, slice(*pair), width) for pair in pairwise(cuts)]
        else:
            flat = [self.project(name, x) for name in ("query", "key", "value")]
            parts = [_heads(self.tape, one, slice(None), flat[0].shape[1] // heads) for one in flat]
        names = ("query", "key", "value")
        parts = [self.watch.keep(name, part) for name, part in zip(names, parts, strict=True)]
        normed = [
            self.own_norm(f"{name}_norm", part) for name, part in zip(names[:2], parts[:2], strict=True)
        ]
        query, key = (_rotate(self.tape, layer.rotary, part, _places(cu_seqlens)) for part in normed)
        attended, pull = self.watch.attend(
            query,
            key,
            parts[2],
            cu_seqlens,
            scale=layer.scale,
            enable_gqa=key_heads != heads,
            is_causal=layer.causal,
            window=layer.window,
            softcap=layer.softcap or None,
            dropout_p=self.dropout[WEIGHTS],
            rng=self.seed,
            attn_mask=_masks(self.mask, self.key_bias, cu_seqlens, heads, x.dtype),
        )
        mask = self.mask
        has_gradient = mask is not None and mask.dtype != np.bool_ and len(mask) == 1  # a shared mask

        def back(dy: Array) -> list[Array]:
            found = pull(dy.reshape(attended.shape))
            if not has_gradient:
                return [found.query, found.key, found.value]
            d_mask = np.zeros((heads, *mask.shape[-2:]), dy.dtype)
            for one in found.attn_mask:
                d_mask[:, : one.shape[-2], : one.shape[-1]] += one
            return [found.query, found.key, found.value, d_mask]

        sources: list[Array | Place] = [query, key, parts[2], (self.n, MASK)]
        joined = self.tape.put(attended.reshape(len(x), -1), sources, back)
        joined = self.watch.keep("concatenated", joined)
        y = self.project("output", joined)
        if layer.output is not None:
            y = self.watch.keep("projected_output", y)
        return self.drop(OUTPUT, y)

    def feed_forward(self, x: Array) -> Array:
        """Compute ``down(activation(up(x)))``, or gated ``down(activation(gate(x)) * up(x))``."""
        up = self.watch.keep("up", self.project("up", x))
        if self.layer.gate is None:
            wide = _activate(self.tape, self.layer.activation, up)
        else:
            gate = self.watch.keep("gate", self.project("gate", x))
            active = _activate(self.tape, self.layer.activation, gate)
            wide = self.tape.put(active * up, [active, up], lambda dy: [dy * up, dy * active])
        wide = self.watch.keep("activated", wide)
        y = self.watch.keep("down", self.project("down", self.drop(WIDE, wide)))
        return self.drop(DOWN, y)

    def project(self, name: str, x: Array) -> Array:
        """Compute ``y = x @ weight.T + bias``: ``dx = dy @ weight``, ``dweight = dy.T @ x``, ``dbias = sum(dy)``."""
        part, place = getattr(self.layer, name), (self.n, PARAMETERS.index(name))
        if part is None:
            return x
        weight = np.asarray(part.weight, x.dtype)
        y: Array = x @ weight.T
        sources: list[Array | Place] = [x, (*place, 0)]
        if part.bias is not None:
            y = y + part.bias.astype(x.dtype)
            sources.append((*place, 1))
        return self.tape.put(y, sources, lambda dy: [dy @ weight, dy.T @ x, dy.sum(axis=0)])

    def drop(self, kind: int, x: Array) -> Array:
        """Set elements to 0 with the layer's probability p for ``kind``, and divide the others by 1 − p."""
        p = self.dropout[kind]
        if p == 0:
            return x
        keep = _words(self.seed + kind * GOLDEN, *x.shape) >= round(p * 2**32)
        factor = (keep / (1 - p) if p < 1 else np.zeros(x.shape)).astype(x.dtype)
        return self.tape.put(x * factor, [x], lambda dy: [dy * factor])


def normalise(tape: Tape, norm: Any, x: Array, place: Place) -> Array:
    """Normalise rows; without a norm, return them as they are."""
    if norm is None:
        return x
    weight = norm.weight.astype(x.dtype)
    bias = None if norm.bias is None else norm.bias.astype(x.dtype)
    y, pull = (
        rms_norm_vjp(x, len(weight), weight, norm.eps)
        if norm.kind == "rms"
        else layer_norm_vjp(x, len(weight), weight, bias, norm.eps)
    )
    return tape.put(y, [x, (*place, 0)] if bias is None else [x, (*place, 0), (*place, 1)], pull)


def _words(seed: int, rows: int, width: int) -> Array:
    """Return a random 32-bit word for every element.

    Of 64 columns each, the four words of a counter are 16 columns apart: it is word ``column % 64 // 16`` of
    Philox4x32 with 7 rounds, key ``(seed, seed >> 32)`` and counter ``(row, column // 64 * 16 + column % 16, row >>
    32, 0)``.
    """
    low = 2**32 - 1
    row, column = np.arange(rows)[:, None], np.arange(width)
    counter = np.stack(np.broadcast_arrays(row & low, column // 64 * 16 + column % 16, row >> 32, 0), axis=-1)
    words = philox4x32([seed & low, seed >> 32 & low], counter)
    return np.take_along_axis(words, np.broadcast_to(column % 64 // 16, (rows, width))[..., None], -1)[..., 0]


def _heads(tape: Tape, x: Array, columns: slice, width: int) -> Array:
    """Split columns into heads, (tokens, heads, width)."""

    def back(dy: Array) -> list[Array]:
        dx = np.zeros(x.shape, dy.dtype)
        dx[:, columns] = dy.reshape(len(x), -1)
        return [dx]

    return tape.put(x[:, columns].reshape(len(x), -1, width), [x], back)


def _masks(
    mask: Array | None, bias: Array | None, cu_seqlens: Array, heads: int, dtype: np.dtype[Any]
) -> list[Array] | None:
    """Return a mask for each sequence, (heads, length, length), with the bias of its keys in it."""
    if mask is None and bias is None:
        return None
    found = []
    for s, length in enumerate(np.diff(cu_seqlens)):
        own = np.True_ if mask is None else mask[s if len(mask) > 1 else 0, :, :length, :length]
        own = np.broadcast_to(own, (heads, length, length))
        if bias is not None:
            of_keys = bias[s if len(bias) > 1 else 0, :length]
            own = np.where(own, of_keys, -np.inf) if own.dtype == np.bool_ else own + of_keys
        found.append(own if own.dtype == np.bool_ else own.astype(dtype))
    return found


def _rotate(tape: Tape, rotary: Any, x: Array, places: Array) -> Array:
    """Rotate the first elements of every head, (tokens, heads, width), by its position's angles; the rest stays."""
    if rotary is None:
        return x
    cos, sin = (table[places].astype(x.dtype) for table in (rotary.cos, rotary.sin))
    rotated = 2 * cos.shape[1]

    def turn(x: Array, sin: Array) -> Array:
        first = apply_rotary_emb(x[..., :rotated].swapaxes(0, 1), cos, sin, rotary.interleaved).swapaxes(0, 1)
        return np.concatenate([first, x[..., rotated:]], axis=-1)

    return tape.put(turn(x, sin), [x], lambda dy: [turn(dy, -sin)])


def _activate(tape: Tape, kind: str, x: Array) -> Array:
    if kind == "relu":
        return tape.put(np.maximum(x, 0), [x], lambda dy: [np.where(x > 0, dy, 0)])
    if kind == "silu":  # x·σ(x), with the derivative σ(x)(1 + x(1 − σ(x)))
        with np.errstate(over="ignore"):
            inverse = 1 + np.exp(-x)  # the inverse of σ(x)
        return tape.put(x / inverse, [x], lambda dy: [dy / inverse * (1 + x * (1 - 1 / inverse))])
    y, pull = gelu_vjp(x, {"gelu": "none", "gelu_tanh": "tanh"}[kind])
    return tape.put(y, [x], lambda dy: [pull(dy)])
