"""Transformers step by step: their inputs, and the named intermediate values of every layer and head.

The settings are those of the core, :class:`selfattn.engine.transformer.Transformer`; `selfattn.reference.transformer`
computes the steps, with the attention of :func:`selfattn.attention_steps`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from selfattn._check import Array, as_array
from selfattn.engine.transformer import Transformer, forward, without_table
from selfattn.reference.transformer import Tape, Watch, normalise, one_layer
from selfattn.steps.attention import attention_steps
from selfattn.steps.changes import BY_HEAD, Change, Edit, check_steps, hide_keys
from selfattn.steps.records import TransformerLayerSteps, TransformerSteps

__all__ = [
    "TransformerLayerSteps",
    "TransformerSteps",
    "changed_layer",
    "check_change",
    "compute_layers",
    "states",
    "transformer_steps",
    "weights_gradients",
]


def transformer_steps(
    model: Transformer,
    inputs: Sequence[int] | Array,
    tokens: Sequence[str] | None = None,
    change: Change | None = None,
) -> TransformerSteps:
    """Compute a transformer for one sequence, and keep every intermediate result.

    Parameters
    ----------
    model : Transformer
        The settings of the core.
    inputs : sequence of int, or ndarray (L, d)
        Ids, or rows where the model has no table.
    tokens : sequence of str, optional
        Their names.
    change : Change, optional
        What is changed on the way.

    Returns
    -------
    TransformerSteps
        Read-only, in the dtype of the parameters.
    """
    given = as_array("inputs", inputs)
    embeddings = given if model.table is None else model.table[given]
    if model.table_factor is not None:
        embeddings = embeddings * embeddings.dtype.type(model.table_factor)
    if model.token_type_row is not None:
        embeddings = embeddings + model.token_type_row
    positions = None if model.positions is None else model.positions[: len(embeddings)].copy()
    tape = Tape()  # records what gradients need; the steps have no gradients
    x = embeddings if positions is None else embeddings + positions
    x = normalise(tape, model.embedding_norm, x, ())
    first, layers, names = x, [], None if tokens is None else tuple(tokens)
    check_change(change, model, len(x))
    for n in range(len(model.layers)):
        x, kept = changed_layer(model, n, x, [change or Change()], names)
        layers += kept
    x = normalise(tape, model.final_norm, x, ())
    for array in (embeddings, positions, first, x):
        if array is not None and array.flags.owndata:
            array.flags.writeable = False
    return TransformerSteps(
        embeddings=embeddings, positions=positions, inputs=first, layers=tuple(layers), output=x, tokens=names
    )


def check_change(change: Any, model: Transformer, length: int) -> None:
    """Refuse what is not a change, or not one of this model and a text of this length."""
    if change is None:
        return
    if not isinstance(change, Change):
        raise TypeError(f"change must be a selfattn.steps.Change, not {type(change).__name__}")
    change.check(model, length)


def changed_layer(
    model: Transformer, n: int, x: Array, changes: Sequence[Change], tokens: tuple[str, ...] | None = None
) -> tuple[Array, list[TransformerLayerSteps]]:
    """Compute layer n for packed sequences of one length, one for each change.

    Return its rows, and the steps of each.
    """
    every = [KeptValues(change.of_layer(n), tokens) for change in changes]
    x = one_layer(
        Tape(), model, n, x, np.arange(len(every) + 1) * (len(x) // len(every)), CombinedWatch(every)
    )
    results = np.split(x, len(every))
    for k, watch in enumerate(every):
        check_steps(watch.edits, n, watch.steps)
        if any(edit.step == "result" for edit in watch.edits):
            last, results[k] = list(watch.steps)[-1], watch.keep("result", results[k])
            watch.steps[last] = watch.steps.pop("result")
    return np.concatenate(results), [TransformerLayerSteps(**watch.steps) for watch in every]


def states(model: Transformer, inputs: Array, change: Change | None = None) -> list[Array]:
    """Return the rows of one sequence that enter the first layer, and those that leave each layer.

    NumPy computes the layers that are changed, the core the others.
    """
    x = inputs
    if model.table is not None or model.embedding_norm is not None:
        x = forward(model._replace(layers=(), final_norm=None), inputs, np.array([0, len(inputs)]))
    check_change(change, model, len(x))
    found = [x]
    for n in range(len(model.layers)):
        is_changed = change is not None and bool(change.of_layer(n))
        if is_changed:
            x, _ = changed_layer(model, n, x, [change or Change()])
        x = compute_layers(model, n + is_changed, n + 1, x)
        found.append(x)
    return found


def compute_layers(model: Transformer, begin: int, end: int, x: Array, sequences: int = 1) -> Array:
    """Compute layers ``begin`` to ``end`` - 1 of packed sequences of one length.

    The final norm follows after the last layer.
    """
    layers, norm = model.layers[begin:end], model.final_norm if end == len(model.layers) else None
    if not layers and norm is None:
        return x
    bare = without_table(model)._replace(embedding_norm=None)
    ends = np.arange(sequences + 1) * (len(x) // sequences)
    return forward(bare._replace(layers=layers, final_norm=norm), x, ends)


class CombinedWatch(Watch):
    """Gives each of several sequences of one length to its own watch.

    So products are those of all rows at once.
    """

    def __init__(self, every: Sequence[Any]) -> None:
        self.every = every

    def keep(self, name: str, x: Array) -> Array:
        return np.concatenate([w.keep(name, own) for w, own in zip(self.every, self._split(x), strict=True)])

    def attend(
        self, query: Array, key: Array, value: Array, cu_seqlens: Array, **options: Any
    ) -> tuple[Array, Any]:
        masks = options.pop("attn_mask") or [None] * len(self.every)
        own = zip(self.every, *map(self._split, (query, key, value)), masks, strict=True)
        found = [w.attend(*x, cu_seqlens, attn_mask=mask, **options)[0] for w, *x, mask in own]
        return np.concatenate(found), None

    def _split(self, x: Array) -> list[Array]:
        return np.split(x, len(self.every))


class KeptValues(Watch):
    """Keeps the intermediate values of a layer and its attention, for one sequence, and changes them."""

    def __init__(self, edits: tuple[Edit, ...], tokens: tuple[str, ...] | None) -> None:
        self.edits, self.tokens, self.steps = edits, tokens, dict[str, Any]()

    def keep(self, name: str, x: Array) -> Array:
        first = x.swapaxes(0, 1) if name in BY_HEAD else x  # heads first
        self.steps[name] = kept = self._change(name, first)
        kept.flags.writeable = False
        return x if kept is first else kept.swapaxes(0, 1) if name in BY_HEAD else kept

    def _change(self, name: str, x: Array) -> Array:
        """Return a step as it is changed."""
        for edit in self.edits:
            if edit.step == name:
                x = edit.perform(x, self.steps.get("inputs", x))
        return x

    def attend(
        self, query: Array, key: Array, value: Array, cu_seqlens: Array, **options: Any
    ) -> tuple[Array, Any]:
        options["attn_mask"] = hide_keys(self.edits, query.shape[1], len(query), options["attn_mask"])
        by_head = [x.swapaxes(0, 1) for x in (query, key, value)]
        steps = attention_steps(by_head[0], by_head[1], by_head[2], **options)
        weights = self._change("weights", steps.weights)
        if weights is not steps.weights:
            steps = replace(steps.with_weights(weights), weights=weights)
        steps = replace(steps, output=self._change("output", steps.output), tokens=self.tokens)
        self.steps["attention"] = steps
        return steps.output.swapaxes(0, 1), None


def weights_gradients(model: Transformer, steps: TransformerSteps, dy: Array) -> list[Array]:
    """Return the gradient of the weights of each layer, (H, L, L), from that of the output, (L, d)."""
    found, tape, x = [], Tape(), steps.layers[-1].result if steps.layers else steps.inputs
    g = tape.back(normalise(tape, model.final_norm, x, (0, 0)), dy)[id(x)]
    for n in reversed(range(len(steps.layers))):
        tape, watch, x = Tape(), WeightsWatch(), steps.layers[n].inputs
        g = tape.back(one_layer(tape, model, n, x, np.array([0, len(x)]), watch), g)[id(x)]
        found.append(watch.gradient)
    return found[::-1]


class WeightsWatch(Watch):
    """Computes the gradient of attention's weights, (H, L, L), in the backward pass of a layer."""

    gradient: Array

    def attend(self, query: Array, key: Array, value: Array, *more: Any, **options: Any) -> tuple[Array, Any]:
        y, pull = super().attend(query, key, value, *more, **options)

        def pullback(dy: Array) -> Any:
            own = np.repeat(value, query.shape[1] // value.shape[1], axis=1)
            self.gradient = np.einsum("ihd,jhd->hij", dy, own)
            return pull(dy)

        return y, pullback
