"""Readings of a model: what heads, layers and words do for its answer.

A reading takes a model of ``selfattn_models`` or an ``nn.GPT``, whatever its weights are, a text as ``steps`` takes
it, and the target that is read: a :class:`Logit`, a :class:`Similarity` or a :class:`Label`. N are the layers, H the
heads, L the tokens, d the width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from selfattn.engine import Array, check_size, copy_doc, import_extra, quoted, transformer, warn
from selfattn.engine.transformer import Transformer
from selfattn.nn.gpt import GPT
from selfattn.steps.changes import Change
from selfattn.steps.transformer import (
    TransformerSteps,
    changed_layer,
    check_change,
    compute_layers,
    states,
    transformer_steps,
    weights_gradients,
)
from selfattn_models._causal import CausalModel
from selfattn_models._classifier import TextClassifier
from selfattn_models._pipeline import IN_CORE, pool
from selfattn_models._text_encoder import TextEncoder
from selfattn_models.vit import ViTModel

__all__ = [
    "Contributions",
    "Label",
    "Logit",
    "Similarity",
    "attention_flow",
    "attention_rollout",
    "contributions",
    "effects",
    "gradient_times_attention",
    "gradient_times_input",
    "head_effects",
    "heads_off",
    "integrated_gradients",
    "logit_lens",
    "runs",
    "value",
]

MOST_TOKENS = 8192  # of changed runs that are computed at once
MOST_RESIDUE = 0.05  # of the change of a target, by which the sum of integrated gradients may differ from it
FLOW = 2**30  # SciPy's flows are integers


class Reading(NamedTuple):
    """A target, read from the last rows: its value, its gradient (L, d), and the linear part of it (L, d)."""

    value: float
    gradient: Array
    direction: Array


Reader: TypeAlias = Callable[[Array], Reading]


@dataclass(frozen=True)
class Logit:
    """The logit of a token after a place, or how far it is above that of another token.

    Both are ids, or texts that are one token, mostly with a space before a word. Place −1 is the last token.
    """

    token: str | int
    than: str | int | None = None
    place: int = -1

    def _bind(self, model: Any) -> Reader:
        head = _head(model)
        row = head[[self._id(model, self.token)]][0]
        if self.than is not None:
            row = row - head[[self._id(model, self.than)]][0]

        def read(rows: Array) -> Reading:
            dy = np.zeros_like(rows)
            dy[_place(self.place, len(rows))] = row
            return Reading(float(rows[self.place] @ row), dy, dy)

        return read

    def _id(self, model: Any, token: str | int) -> int:
        if not isinstance(token, str):
            if (found := check_size("token", token, 0)) >= model.vocab_size:
                raise ValueError(f"token {found} is out of range: the vocabulary has {model.vocab_size}")
            return found
        if getattr(model, "tokenizer", None) is None:
            raise ValueError(f"token must be an id, not {token!r}: the model has no tokenizer")
        ids = model._encoded(token, special=False)
        if len(ids) != 1:
            raise ValueError(f"{token!r} is {len(ids)} tokens, not one; give the id of one of them")
        return int(ids[0])


@dataclass(frozen=True)
class Similarity:
    """The cosine similarity to another sentence, or of ViT's first row to that of another image.

    Prompts of a folder are not put before texts.
    """

    other: Any

    def _bind(self, model: Any) -> Reader:
        if (found := pooling(model)) is None:
            need = "an encoder with a pooling of mean, cls or last token and no Dense"
            raise ValueError(f"a similarity needs {need}, not {type(model).__name__}")
        pooled, mode = found
        settings, inputs = _one(model, self.other)
        other = pooled(states(settings, inputs)[-1])
        other = other / np.linalg.norm(other)

        def read(rows: Array) -> Reading:
            a = pooled(rows)
            length = np.linalg.norm(a)
            cosine = float(a @ other / length)
            share = np.full((len(rows), 1), 1 / len(rows), rows.dtype)
            if mode != "mean":
                share[:] = np.arange(len(rows))[:, None] == (0 if mode == "cls" else len(rows) - 1)
            return Reading(cosine, share * (other - cosine * a / length) / length, share * other / length)

        return read


@dataclass(frozen=True)
class Label:
    """The logit of a classifier's label, or a cross-encoder's score before its activation."""

    number: int = 0

    def _bind(self, model: Any) -> Reader:
        labels = model.num_labels if isinstance(model, TextClassifier) else 0
        if labels == 0:
            raise ValueError(
                f"a label needs a classifier or a cross-encoder, and {type(model).__name__} has no such head"
            )
        if check_size("number", self.number, 0) >= labels:
            raise ValueError(
                f"label {self.number} is out of range: {type(model).__name__} has {labels} labels"
            )

        def read(rows: Array) -> Reading:
            logits, pulled = model._head_vjp(rows[:1])
            dy = np.zeros_like(rows)
            dy[:1] = pulled(np.eye(labels, dtype=rows.dtype)[None, self.number])[0]
            return Reading(float(logits[0, self.number]), dy, dy)

        return read


Target: TypeAlias = Logit | Similarity | Label


def _reader(target: Target, model: Any) -> Reader:
    if not isinstance(target, Target):
        raise TypeError(f"target must be a Logit, Similarity or Label, not {quoted(target)}")
    return target._bind(model)


def value(model: Any, text: Any, target: Target) -> float:
    """Return what a target is for a text: a logit or a difference of two, a similarity, a label's logit."""
    settings, inputs = _one(model, text)
    return _reader(target, model)(states(settings, inputs)[-1]).value


def runs(model: Any, text: Any, changes: Iterable[Change]) -> list[tuple[Array, Array]]:
    """Compute the last rows of many runs, for each change (L, d) without it and (L, d) with it.

    The layers below a change are computed once. Both are computed in the same way: layers that are changed in NumPy,
    those after them in the core. A change that does not fit the model or the text is a ValueError.
    """
    given = [] if isinstance(changes, Change) else list(changes)
    if isinstance(changes, Change) or not all(isinstance(each, Change) for each in given):
        raise TypeError(f"changes must be a list of Change, not {quoted(changes)}")
    settings, inputs = _one(model, text)
    kept = states(settings, inputs)
    count, most = len(settings.layers), max(1, MOST_TOKENS // max(1, len(kept[0])))
    for change in given:
        check_change(change, settings, len(kept[0]))
    first = [min((edit.layer or 0 for edit in change.edits), default=count - 1) for change in given]
    found: list[Any] = [None] * len(given)
    for n in set(first):
        numbers = [k for k, own in enumerate(first) if own == n]
        for some in (numbers[at : at + most] for at in range(0, len(numbers), most)):
            plain, *rows = _run(settings, n, kept[n], [Change(), *(given[each] for each in some)])
            for each, own in zip(some, rows, strict=True):
                found[each] = plain, own
    return found


def _run(settings: Transformer, n: int, x: Array, changes: Sequence[Change]) -> Array:
    """Compute layers from n on from one input with each of several changes, (changes, L, d)."""
    rows, count = np.concatenate([x] * len(changes)), len(settings.layers)
    touched = [any(change.of_layer(m) for change in changes) for m in range(count)]
    while n < count:
        if touched[n]:
            own = transformer.expanded(settings._replace(layers=settings.layers[n : n + 1], table=None))
            one = settings._replace(layers=settings.layers[:n] + own.layers)
            rows, n = changed_layer(one, n, rows, changes)[0], n + 1
        end = next((m for m in range(n, count) if touched[m]), count)
        rows, n = compute_layers(settings, n, end, rows, len(changes)), end
    return rows.reshape(len(changes), -1, rows.shape[1])


def effects(model: Any, text: Any, target: Target, changes: Iterable[Change]) -> npt.NDArray[np.float64]:
    """Compute by how much each of many changes raises a target; below 0 it lowers it.

    Parameters
    ----------
    model, text
        As ``model.steps(text)`` takes them.
    target : Logit, Similarity or Label
    changes : iterable of Change

    Returns
    -------
    ndarray of float64, shape (changes,)

    Raises
    ------
    TypeError, ValueError
        A change or the target does not fit the model or the text.

    References
    ----------
    With ``Change.patch`` this is activation patching: Vig et al., "Investigating Gender Bias in Language Models Using
    Causal Mediation Analysis", 2020, equation 4; Meng et al., "Locating and Editing Factual Associations in GPT",
    2022, section 2.1.

    Examples
    --------
    >>> from selfattn import nn
    >>> from selfattn_models import readings
    >>> from selfattn.steps import Change
    >>> model = nn.GPT(11, 8, 2, 2, 16, rng=0)
    >>> readings.effects(model, [1, 2, 3], readings.Logit(4, than=5), [Change.off(0), Change.hide(1)]).shape
    (2,)
    """
    read = _reader(target, model)
    return np.array([read(own).value - read(plain).value for plain, own in runs(model, text, changes)])


@copy_doc(effects)
def head_effects(model: Any, text: Any, target: Target) -> npt.NDArray[np.float64]:
    """Compute by how much a target rises with each head off; below 0 the head speaks for it.

    Returns
    -------
    ndarray of float64, shape (N, H)

    References
    ----------
    Michel et al., "Are Sixteen Heads Really Better than One?", 2019, section 3.2.
    """
    found = effects(model, text, target, heads_off(model, text))
    return found.reshape(len(_one(model, text)[0].layers), -1)


def heads_off(model: Any, text: Any) -> list[Change]:
    """Return a change for each head of a model that is off."""
    layers = _one(model, text)[0].layers
    return [Change.off(n, h) for n, layer in enumerate(layers) for h in range(layer.num_heads)]


@copy_doc(effects)
def logit_lens(model: Any, text: Any, place: int = -1) -> Array:
    """Compute what a language model would say after each layer: its final norm and head on each layer's result.

    Parameters
    ----------
    place : int, default -1
        The token after which it is read.

    Returns
    -------
    ndarray, shape (N + 1, vocabulary)
        Logits; the first row is of what enters the first layer, the last is what the model says.

    References
    ----------
    nostalgebraist, "Interpreting GPT: the logit lens", 2020, whose figures are this for all places.
    """
    settings, inputs = _one(model, text)
    *inner, last = [state[[_place(place, len(state))]] for state in states(settings, inputs)]
    count = len(settings.layers)
    return logits(model, np.concatenate([*(compute_layers(settings, count, count, x) for x in inner), last]))


def logits(model: Any, rows: Array) -> Array:
    """Compute the logits of a language model from its last rows."""
    _head(model)
    decoder = model._decoder() if isinstance(model, GPT) else model._decoder(1)
    found: Array = decoder.head(np.ascontiguousarray(rows))
    return found


@dataclass(frozen=True, eq=False)
class Contributions:
    """What :func:`contributions` returns: numbers that add up to ``value``, the target.

    ``heads`` (N, H); ``biases`` of output projections (N,); ``feed_forward`` (N,); ``inputs``, what enters the first
    layer, by token (L,); ``norms``, the biases of norms and of a classifier's head.
    """

    heads: Array
    biases: Array
    feed_forward: Array
    inputs: Array
    norms: float
    value: float


@copy_doc(effects)
def contributions(model: Any, text: Any, target: Target) -> Contributions:
    """Split a target into what heads, feed-forward networks and inputs add to it directly.

    Rows are sums: a layer adds what its heads and its feed-forward network make. A norm divides a row by a deviation,
    which depends on all of the row; the deviation of this run is kept fixed, as is the length of the embedding for a
    similarity, and the slope of a classifier's activation. What a head adds is then a product with the target's
    direction. What later layers make of it is not in it: that is in :func:`head_effects`.

    References
    ----------
    Elhage et al., "A Mathematical Framework for Transformer Circuits", 2021, "Residual stream", for norms first; with
    norms after the sums, the direction goes back through each of them.
    """
    settings, inputs = _one(model, text)
    steps = transformer_steps(settings, inputs)
    read = _reader(target, model)(steps.output)
    share, g = read.value - _dot(read.direction, steps.output), read.direction
    last = steps.layers[-1].result if steps.layers else steps.inputs
    g, bias = _through(settings.final_norm, last, g)
    share += bias
    count = len(steps.layers)
    heads, biases, fed = [np.zeros(0)] * count, np.zeros(count), np.zeros(count)
    for n in reversed(range(count)):
        layer, own = settings.layers[n], steps.layers[n]
        if own.down is not None and own.feed_forward_residual is not None:
            if not layer.norm_first:
                g, bias = _through(layer.feed_forward_norm, own.feed_forward_residual, g)
                share += bias
            through, bias = _through(layer.feed_forward_post_norm, own.down, g)
            fed[n] = _dot(through, own.down) + bias
        if not layer.norm_first:
            g, bias = _through(layer.attention_norm, own.residual, g)
            share += bias
        back = g
        if layer.output is not None and own.projected_output is not None:
            through, biases[n] = _through(layer.attention_post_norm, own.projected_output, g)
            back = through @ np.asarray(layer.output.weight)
            biases[n] += 0 if layer.output.bias is None else through.sum(axis=0) @ layer.output.bias
        back = back.reshape(len(g), layer.num_heads, -1)
        heads[n] = np.einsum("lhd,hld->h", back, own.output, dtype=np.float64)
    words = np.einsum("ld,ld->l", g, steps.inputs, dtype=np.float64)
    return Contributions(np.array(heads), biases, fed, words, share, read.value)


def _through(norm: transformer.Norm | None, x: Array, g: Array) -> tuple[Array, float]:
    """Take a direction back through a norm whose deviations are fixed; return it, and the share of the norm's bias."""
    if norm is None:
        return g, 0.0
    centred = x if norm.kind == "rms" else x - x.mean(axis=-1, keepdims=True)
    scaled = g * norm.weight / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + norm.eps)
    bias = 0.0 if norm.bias is None else float(g.sum(axis=0) @ norm.bias)
    return scaled if norm.kind == "rms" else scaled - scaled.mean(axis=-1, keepdims=True), bias


@copy_doc(effects)
def gradient_times_input(model: Any, text: Any, target: Target) -> Array:
    """Compute for each token the product of its input with the target's gradient: how much the target rises along it.

    The input of a token is what enters the first norm or layer, position included.

    Returns
    -------
    ndarray, shape (L,)

    References
    ----------
    Shrikumar et al., "Not Just a Black Box: Learning Important Features Through Propagating Activation Differences",
    2016, section 2.2.
    """
    settings, rows = _rows(*_one(model, text))
    found: Array = np.einsum("ld,ld->l", rows, _gradients(settings, rows[None], _reader(target, model))[0])
    return found


@copy_doc(gradient_times_input)
def integrated_gradients(
    model: Any, text: Any, target: Target, *, baseline: Array | None = None, n_steps: int = 32
) -> Array:
    """Compute for each token its share of the change of a target from a baseline to the text.

    The sum of ``n_steps`` gradients has an error.

    Parameters
    ----------
    baseline : ndarray, shape (L, d) or (d,), optional
        Inputs that say nothing; by default zeros. Norms of the root mean square do not change on the way to zeros
        until its very end, so models with these need another one: the inputs of a similar text of as many tokens,
        which for a language model are ``model.hidden_states(other)[0]``. A sum that is off by more than 5 % is a
        RuntimeWarning.
    n_steps : int, default 32
        The gradients are taken in the middle of as many steps of the way.

    References
    ----------
    Sundararajan et al., "Axiomatic Attribution for Deep Networks", 2017, equations 1 and 3.
    """
    settings, rows = _rows(*_one(model, text))
    count = check_size("n_steps", n_steps)
    away = rows - (0 if baseline is None else np.broadcast_to(np.asarray(baseline, rows.dtype), rows.shape))
    places = (1 - (np.arange(count) + 0.5) / count).astype(rows.dtype)
    total, read = np.zeros(rows.shape), _reader(target, model)
    most = max(1, MOST_TOKENS // len(rows))
    for some in (places[at : at + most] for at in range(0, count, most)):
        total += _gradients(settings, rows - some[:, None, None] * away, read).sum(axis=0)
    found: Array = np.einsum("ld,ld->l", away, total / count)
    both = np.concatenate([rows, rows - away])
    ends = np.split(transformer.forward(settings, both, np.array([0, 1, 2]) * len(rows)), 2)
    risen = read(ends[0]).value - read(ends[1]).value
    if abs(found.sum() - risen) > MOST_RESIDUE * abs(risen):
        far = (
            f"the shares add up to {found.sum():.3g}, and the target changes by {risen:.3g} from the baseline"
        )
        warn(RuntimeWarning(f"{far}: take more n_steps, or as baseline the inputs of a similar text"))
    return found


@copy_doc(effects)
def gradient_times_attention(model: Any, text: Any, target: Target) -> list[Array]:
    """Compute weights of attention times the target's gradient with respect to them.

    Returns
    -------
    list of ndarray, shape (H, L, L)
        Of each layer. Above 0, the target would rise if the query saw more of the key.

    References
    ----------
    Chefer et al., "Generic Attention-Model Explainability for Interpreting Bi-Modal and Encoder-Decoder
    Transformers", 2021, equation 5, before its positive part and its mean over heads.
    """
    settings, inputs = _one(model, text)
    steps = transformer_steps(settings, inputs)
    found = weights_gradients(settings, steps, _reader(target, model)(steps.output).gradient)
    return [layer.weights * gradient for layer, gradient in zip(steps.layers, found, strict=True)]


def _rows(settings: Transformer, inputs: Array) -> tuple[Transformer, Array]:
    """Return what enters the first norm or layer, and settings that take it."""
    if settings.table is None:
        return settings, inputs
    alone = settings._replace(layers=(), embedding_norm=None, final_norm=None)
    rows = transformer.forward(alone, inputs, np.array([0, len(inputs)]))
    return transformer.without_table(settings), rows


def _gradients(settings: Transformer, rows: Array, read: Reader) -> Array:
    """Return the gradients of a target for inputs (runs, L, d), of the same shape."""
    count, length, d = rows.shape
    flat = np.ascontiguousarray(rows.reshape(-1, d))
    y, pullback = transformer.vjp(settings, flat, np.arange(count + 1) * length, wants_parameters=False)
    dy = np.concatenate([read(own).gradient for own in np.split(y, count)])
    dx: Array = pullback(dy.astype(flat.dtype))[0]
    return dx.reshape(rows.shape)


def attention_rollout(steps: TransformerSteps) -> Array:
    """Multiply the mean weights of all layers, half of each row its own: where a row's content comes from.

    Returns
    -------
    ndarray, shape (N, L, L)
        Up to each layer; row i has the share of each input token, and sums to 1.

    References
    ----------
    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, equation 1.
    """
    return np.array(list(accumulate(_shares(steps), lambda below, share: share @ below)))


def attention_flow(steps: TransformerSteps, token: int = -1) -> Array:
    """Compute the largest flow from a token after the last layer to each input, with weights as capacities.

    Returns
    -------
    ndarray, shape (L,)
        This needs SciPy.

    References
    ----------
    Abnar and Zuidema, "Quantifying Attention Flow in Transformers", 2020, section 3, "attention flow".
    """
    graphs, sparse = (import_extra(name) for name in ("scipy.sparse.csgraph", "scipy.sparse"))
    shares = _shares(steps)
    length = len(steps.inputs)
    edges = np.zeros((length * (len(shares) + 1),) * 2, np.int32)
    for n, share in enumerate(shares):  # from the rows after layer n to those before it
        begin = n * length
        edges[begin + length : begin + 2 * length, begin : begin + length] = np.round(share * FLOW)
    graph, source = sparse.csr_array(edges), len(shares) * length + _place(token, length)
    return np.array([graphs.maximum_flow(graph, source, j).flow_value / FLOW for j in range(length)])


def _shares(steps: TransformerSteps) -> list[Array]:
    if not isinstance(steps, TransformerSteps):
        raise TypeError(f"steps must be what model.steps(text) returns, not {type(steps).__name__}")
    own = np.eye(len(steps.inputs)) / 2
    return [own + layer.weights.mean(axis=0, dtype=np.float64) / 2 for layer in steps.layers]


def _one(model: Any, text: Any) -> tuple[Transformer, Array]:
    """Return the core's settings for one text, and what goes into the core."""
    if not isinstance(model, CausalModel | TextEncoder | ViTModel | GPT):
        raise TypeError(f"readings are of selfattn_models and of nn.GPT, not of {type(model).__name__}")
    return model._one(text)[:2]


def _head(model: Any) -> Any:
    """Return what makes logits of rows, (vocabulary, d)."""
    if isinstance(model, GPT):
        return model.head.weight
    if not isinstance(model, CausalModel):
        raise TypeError(f"{type(model).__name__} is not a language model")
    return model._head(model._built(1)[1])


def pooling(model: Any) -> tuple[Callable[[Array], Array], str] | None:
    """Return what makes an embedding of last rows, not normalised, and its mode.

    It is None for a model without one pooling.
    """
    pipeline = getattr(model, "pipeline", None)
    modes = ("cls",) if isinstance(model, ViTModel) else () if pipeline is None else tuple(pipeline.modes)
    if len(modes) != 1 or modes[0] not in IN_CORE or any(x for _, x in getattr(pipeline, "after", ())):
        return None
    kept = None if pipeline is None else pipeline.truncate_dim

    def pooled(rows: Array) -> Array:
        found: Array = pool(rows, np.array([0, len(rows)]), modes, [0])[0]
        if kept is not None:
            found[kept:] = 0  # as many numbers as the rows, and the folder's cosine
        return found

    return pooled, modes[0]


def _place(place: int, length: int) -> int:
    if not -length <= place < length:
        raise ValueError(f"place {place} is out of range: the text has {length} tokens")
    return place % length


def _dot(a: Array, b: Array) -> float:
    return float(np.einsum("ld,ld->", a, b, dtype=np.float64))
