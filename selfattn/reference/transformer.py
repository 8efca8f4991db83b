"""A stack of transformer layers over packed sequences in plain NumPy: what the C core computes, and its gradients.

A model is described by an object with the fields of ``selfattn.engine.transformer.Transformer``; what the fields mean is said
there. Every part is computed as a pair: its result, and a function that takes the gradient of that result back. A
:class:`Watch` is told what is computed on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.reference.dropout import Array, philox4x32
from selfattn.reference.rows import apply_rotary_emb
from selfattn.reference.rows_vjp import gelu_vjp, layer_norm_vjp, rms_norm_vjp
from selfattn.reference.varlen import varlen_attention_vjp

# Gives the gradient of what a step took, and those of its parameters, weights before biases.
Back: TypeAlias = Callable[[Array], tuple[Array, list[Array]]]

WEIGHTS, OUTPUT, WIDE, DOWN = range(4)  # what may be dropped, in the order of a layer's ``dropout``
GOLDEN = 0x9E3779B97F4A7C15  # what seeds of the four differ by


class Watch:
    """Is told the intermediates of a layer, and computes its attention."""

    def keep(self, name: str, x: Array) -> None:
        """Take notice of an intermediate; `selfattn.steps.transformer.TransformerLayerSteps` explains the names."""

    def attend(
        self, query: Array, key: Array, value: Array, ends: Array, **options: Any
    ) -> tuple[Array, Any]:
        """Compute attention of packed sequences, (tokens, heads, width), and what takes a gradient back."""
        return varlen_attention_vjp(query, key, value, ends, ends, **options)


UNSEEN = Watch()


def transformer(
    model: Any, inputs: npt.ArrayLike, cu_seqlens: npt.ArrayLike, compute_dtype: npt.DTypeLike | None = None
) -> Array:
    """Compute a row for each token, (tokens, d), or with pooling for each sequence, (sequences, d).

    ``inputs`` are ids (tokens,), or without a table rows (tokens, d). Sequence s has the rows ``cu_seqlens[s]`` to
    ``cu_seqlens[s + 1] - 1``.

    References
    ----------
    Vaswani et al., "Attention Is All You Need", 2017, section 3; norms first: Xiong et al., "On Layer Normalization in the
    Transformer Architecture", 2020, table 1; gated: Shazeer, "GLU Variants Improve Transformer", 2020, equation 6.
    """
    return transformer_vjp(model, inputs, cu_seqlens, compute_dtype)[0]


def transformer_vjp(
    model: Any, inputs: npt.ArrayLike, cu_seqlens: npt.ArrayLike, compute_dtype: npt.DTypeLike | None = None
) -> tuple[Array, Callable[[npt.ArrayLike], tuple[Array, list[Array], Array | None]]]:
    """Compute what :func:`transformer` does, and ``dy -> (dx, grads, dmask)``.

    ``dx`` (tokens, d) is the gradient of the rows that enter the first norm or layer. ``grads`` are in the order of the
    model's fields, the table first; ``dmask`` (heads, longest, longest) is that of a float mask that all sequences share,
    else None.
    """
    ends, given = np.asarray(cu_seqlens), np.asarray(inputs)
    compute = np.dtype(compute_dtype or (given if model.table is None else model.table).dtype)
    x, first_back = normalised(model.embedding_norm, _enter(model, given, ends, compute))
    backs: list[Back] = []
    d_masks: list[Array] = []  # the last layer's first
    for one in model.layers:
        x, back = one_layer(model, one, x, ends, d_masks)
        backs.append(back)
    x, last_back = normalised(model.final_norm, x)
    y, pool_back = _pool(model.pooling, x, ends)

    def pullback(dy: npt.ArrayLike) -> tuple[Array, list[Array], Array | None]:
        d_masks.clear()
        dx, final_grads = last_back(pool_back(np.asarray(dy, compute)))
        layer_grads: list[Array] = []
        for back in reversed(backs):
            dx, grads = back(dx)
            layer_grads = grads + layer_grads
        dx, first_grads = first_back(dx)
        table_grads: list[Array] = []
        if model.table is not None:
            table_grads = [np.zeros(model.table.shape, compute)]
            np.add.at(table_grads[0], given, dx)
        alike = len({one.shape for one in d_masks}) == 1  # layers have as many heads
        d_shared: Array | None = np.sum(d_masks[::-1], axis=0) if alike else None
        return dx, table_grads + first_grads + layer_grads + final_grads, d_shared

    return y, pullback


def _enter(model: Any, given: Array, ends: Array, compute: np.dtype[Any]) -> Array:
    """Look ids up, and add what is always added and the positions; given rows stay as they are."""
    if model.table is None:
        return given.astype(compute)
    x: Array = model.table[given].astype(compute)
    if model.always is not None:
        x = x + model.always.astype(compute)
    if model.positions is not None:
        x = x + model.positions[_places(ends)].astype(compute)
    return x


def _places(ends: Array) -> Array:
    """Return the place of every token in its sequence."""
    lengths = np.diff(ends)
    places: Array = np.arange(ends[-1]) - np.repeat(ends[:-1], lengths)
    return places


def _pool(kind: str | None, x: Array, ends: Array) -> tuple[Array, Callable[[Array], Array]]:
    if kind is None:
        return x, lambda dy: dy
    lengths = np.diff(ends)
    share = np.zeros((len(lengths), len(x)), x.dtype)  # of each row in each result
    for s, (begin, end) in enumerate(pairwise(ends)):
        rows = {"mean": slice(begin, end), "first": begin, "last": end - 1}[kind]
        share[s, rows] = 1 / lengths[s] if kind == "mean" else 1
    return share @ x, lambda dy: share.T @ dy


# ------------------------------------------------------------------------------------------------------- a layer


def one_layer(
    model: Any, one: Any, x: Array, ends: Array, d_masks: list[Array] | None = None, watch: Watch = UNSEEN
) -> tuple[Array, Back]:
    """Compute one layer of a model.

    ::

        norm first:   s = x + attend(norm(x))      y = s + feed_forward(norm(s))
        norm after:   s = norm(x + attend(x))      y = norm(s + feed_forward(s))

    Going back appends the gradient of a float mask that all sequences share to ``d_masks``.
    """
    watch.keep("inputs", x)
    names = "attention_inputs", "residual", "norm"
    s, attention_back = _residual(
        one, one.attention_norm, x, lambda n: _attend(model, one, n, ends, d_masks, watch), watch, names
    )
    if one.up is None:
        return s, attention_back
    names = "feed_forward_inputs", "feed_forward_residual", "feed_forward_norm"
    y, feed_back = _residual(
        one, one.feed_forward_norm, s, lambda n: _feed_forward(one, n, watch), watch, names
    )

    def back(dy: Array) -> tuple[Array, list[Array]]:
        ds, feed_grads = feed_back(dy)
        dx, attention_grads = attention_back(ds)
        return dx, attention_grads + feed_grads

    return y, back


def _residual(
    one: Any,
    norm: Any,
    x: Array,
    part: Callable[[Array], tuple[Array, Back]],
    watch: Watch,
    names: tuple[str, str, str],
) -> tuple[Array, Back]:
    """Add to x what a part of a layer makes of it, with a norm before the part or after the sum."""
    before, after = (norm, None) if one.norm_first else (None, norm)
    n, before_back = normalised(before, x)
    if before is not None:
        watch.keep(names[0], n)
    added, part_back = part(n)
    s = x + added
    watch.keep(names[1], s)
    y, after_back = normalised(after, s)
    if after is not None:
        watch.keep(names[2], y)

    def back(dy: Array) -> tuple[Array, list[Array]]:
        ds, after_grads = after_back(dy)
        dn, part_grads = part_back(ds)
        dx, before_grads = before_back(dn)
        return ds + dx, part_grads + before_grads + after_grads

    return y, back


def normalised(norm: Any, x: Array) -> tuple[Array, Back]:
    """Normalise rows; without a norm they stay as they are."""
    if norm is None:
        return x, lambda dy: (dy, [])
    weight = norm.weight.astype(x.dtype)
    bias = None if norm.bias is None else norm.bias.astype(x.dtype)
    y, pull = (
        rms_norm_vjp(x, len(weight), weight, norm.eps)
        if norm.kind == "rms"
        else layer_norm_vjp(x, len(weight), weight, bias, norm.eps)
    )

    def back(dy: Array) -> tuple[Array, list[Array]]:
        dx, *grads = pull(dy)
        return dx, [grad for grad in grads if grad is not None]

    return y, back


def _project(part: Any, x: Array) -> tuple[Array, Back]:
    """Compute ``y = x @ weight.T + bias``: ``dx = dy @ weight``, ``dweight = dy.T @ x``, ``dbias = sum(dy)``."""
    if part is None:
        return x, lambda dy: (dy, [])
    weight = np.asarray(part.weight, x.dtype)
    y = x @ weight.T
    if part.bias is not None:
        y = y + part.bias.astype(x.dtype)

    def back(dy: Array) -> tuple[Array, list[Array]]:
        return dy @ weight, [dy.T @ x] + ([] if part.bias is None else [dy.sum(axis=0)])

    return y, back


def _drop(layer: Any, kind: int, x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Set elements to 0 with a layer's probability of that kind, and divide the others by 1 − p."""
    p = layer.dropout[kind]
    if p == 0:
        return x, lambda dy: dy
    keep = _words(layer.seed + kind * GOLDEN, *x.shape) >= round(p * 2**32)
    factor = (keep / (1 - p) if p < 1 else np.zeros(x.shape)).astype(x.dtype)
    return x * factor, lambda dy: dy * factor


def _words(seed: int, rows: int, width: int) -> Array:
    """Return the random 32-bit word of every element.

    Of 64 columns each, the four words of a counter are 16 columns apart: it is word ``column % 64 // 16`` of Philox4x32 with
    7 rounds, key ``(seed, seed >> 32)`` and counter ``(row, column // 64 * 16 + column % 16, row >> 32, 0)``.
    """
    low = 2**32 - 1
    row, column = np.arange(rows)[:, None], np.arange(width)
    counter = np.stack(np.broadcast_arrays(row & low, column // 64 * 16 + column % 16, row >> 32, 0), axis=-1)
    words = philox4x32([seed & low, seed >> 32 & low], counter)
    return np.take_along_axis(words, np.broadcast_to(column % 64 // 16, (rows, width))[..., None], -1)[..., 0]


# ----------------------------------------------------------------------------------------------------- attention


def _attend(
    model: Any, layer: Any, x: Array, ends: Array, d_masks: list[Array] | None, watch: Watch
) -> tuple[Array, Back]:
    """Project to queries, keys and values, turn them, let every sequence attend to itself, and project what comes out."""
    heads = layer.num_heads
    key_heads = heads if layer.num_key_heads is None else layer.num_key_heads
    if layer.key is None:  # one projection for all three
        joint, joint_back = _project(layer.query, x)
        width = joint.shape[1] // (heads + 2 * key_heads)
        cuts = np.array([heads, heads + key_heads]) * width
        flat = np.split(joint, cuts, axis=1)
    else:
        made = [_project(part, x) for part in (layer.query, layer.key, layer.value)]
        flat = [one for one, _ in made]
        width = flat[0].shape[1] // heads
    query, key, value = (one.reshape(len(x), -1, width) for one in flat)
    for name, part in (("query", query), ("key", key), ("value", value)):
        watch.keep(name, part)

    places = _places(ends)
    query, query_back = _rotate(layer.rotary, query, places)
    key, key_back = _rotate(layer.rotary, key, places)
    attended, attention_back = watch.attend(
        query, key, value, ends,
        scale=layer.scale,
        enable_gqa=key_heads != heads,
        is_causal=layer.causal,
        window=layer.window,
        softcap=layer.softcap or None,
        dropout_p=layer.dropout[WEIGHTS],
        rng=layer.seed,
        attn_mask=_masks(model, ends, heads, x.dtype),
    )  # fmt: skip
    joined = attended.reshape(len(x), -1)
    watch.keep("concatenated", joined)
    y, output_back = _project(layer.output, joined)
    if layer.output is not None:
        watch.keep("projected_output", y)
    y, drop_back = _drop(layer, OUTPUT, y)

    def back(dy: Array) -> tuple[Array, list[Array]]:
        d_attended, output_grads = output_back(drop_back(dy))
        found = attention_back(d_attended.reshape(attended.shape))
        if d_masks is not None and _shares_float_mask(model):
            longest = model.mask.shape[-1]
            d_masks.append(total := np.zeros((heads, longest, longest), dy.dtype))
            for d_mask in found.attn_mask:
                total[:, : d_mask.shape[-2], : d_mask.shape[-1]] += d_mask
        assert found.query is not None and found.key is not None and found.value is not None
        rows = [query_back(found.query), key_back(found.key), found.value]
        flat = [one.reshape(len(x), -1) for one in rows]
        if layer.key is None:
            dx, grads = joint_back(np.concatenate(flat, axis=1))
        else:
            each = [own_back(one) for (_, own_back), one in zip(made, flat, strict=True)]
            dx = each[0][0] + each[1][0] + each[2][0]
            grads = [grad for _, own in each for grad in own]
        return dx, grads + output_grads

    return y, back


def _shares_float_mask(model: Any) -> bool:
    return model.mask is not None and model.mask.dtype != np.bool_ and len(model.mask) == 1


def _masks(model: Any, ends: Array, heads: int, dtype: np.dtype[Any]) -> list[Array] | None:
    """Return a mask for each sequence, (heads, length, length), with the bias of its keys in it."""
    mask, bias = model.mask, model.key_bias
    if mask is None and bias is None:
        return None
    found = []
    for s, length in enumerate(np.diff(ends)):
        own = np.True_ if mask is None else mask[s if len(mask) > 1 else 0, :, :length, :length]
        own = np.broadcast_to(own, (heads, length, length))
        if bias is not None:
            of_keys = bias[s if len(bias) > 1 else 0, :length]
            own = np.where(own, of_keys, -np.inf) if own.dtype == np.bool_ else own + of_keys
        found.append(own if own.dtype == np.bool_ else own.astype(dtype))
    return found


def _rotate(rotary: Any, x: Array, places: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Turn the first elements of every head, (tokens, heads, width), by the angles of its place; the rest stays."""
    if rotary is None:
        return x, lambda dy: dy
    cos, sin = (table[places].astype(x.dtype) for table in (rotary.cos, rotary.sin))
    rotated = 2 * cos.shape[1]

    def turned(x: Array, sin: Array) -> Array:
        first = apply_rotary_emb(x[..., :rotated].swapaxes(0, 1), cos, sin, rotary.interleaved).swapaxes(0, 1)
        return np.concatenate([first, x[..., rotated:]], axis=-1)

    return turned(x, sin), lambda dy: turned(dy, -sin)


# -------------------------------------------------------------------------------------------------- feed-forward


def _feed_forward(layer: Any, x: Array, watch: Watch) -> tuple[Array, Back]:
    """Compute ``down(activation(up(x)))``, or gated ``down(activation(gate(x)) * up(x))``."""
    up, up_back = _project(layer.up, x)
    watch.keep("up", up)
    if layer.gate is None:
        wide, active_back = _activate(layer.activation, up)
    else:
        gate, gate_back = _project(layer.gate, x)
        watch.keep("gate", gate)
        active, active_back = _activate(layer.activation, gate)
        wide = active * up
    watch.keep("activated", wide)
    kept, wide_back = _drop(layer, WIDE, wide)
    y, down_back = _project(layer.down, kept)
    watch.keep("down", y)
    y, drop_back = _drop(layer, DOWN, y)

    def back(dy: Array) -> tuple[Array, list[Array]]:
        d_kept, down_grads = down_back(drop_back(dy))
        d_wide = wide_back(d_kept)
        if layer.gate is None:
            dx, up_grads = up_back(active_back(d_wide))
            return dx, up_grads + down_grads
        d_up, up_grads = up_back(d_wide * active)
        d_gate, gate_grads = gate_back(active_back(d_wide * up))
        return d_up + d_gate, up_grads + gate_grads + down_grads

    return y, back


def _activate(kind: str, x: Array) -> tuple[Array, Callable[[Array], Array]]:
    if kind == "relu":
        return np.maximum(x, 0), lambda dy: np.where(x > 0, dy, 0)
    if kind == "silu":  # x·σ(x), with the derivative σ(x)(1 + x(1 − σ(x)))
        with np.errstate(over="ignore"):
            inverse = 1 + np.exp(-x)  # of σ(x)
        return x / inverse, lambda dy: dy / inverse * (1 + x * (1 - 1 / inverse))
    return gelu_vjp(x, {"gelu": "none", "gelu_tanh": "tanh"}[kind])
