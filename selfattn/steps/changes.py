"""Changes of what a transformer computes.

A head is off, a step of another text is in place of its own, or a word is not seen.

A :class:`Change` says what is changed and where; `selfattn.steps.transformer` obeys it. `selfattn_models.readings`
says what a change does to a model's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from selfattn._check import Array, as_array, as_integers, check_size, one_of
from selfattn.engine.transformer import Layer, Transformer
from selfattn.steps.records import AFTER_ATTENTION, BEFORE_ATTENTION, TransformerSteps

__all__ = ["Change"]

Numbers = int | Sequence[int] | None
Value = Callable[[Array, Array], Any]

# Steps with an axis of heads. Those that are not among them have one row for each token.
BY_HEAD = ("query", "key", "value", "query_norm", "key_norm", "weights", "output")
STEPS = (*BEFORE_ATTENTION, "weights", "output", *AFTER_ATTENTION, "result")
VISIBILITY = "which keys are seen"  # the step that `Change.hide` changes


@dataclass(frozen=True)
class Edit:
    """One step that is changed: what ``value`` makes of it and of the layer's inputs takes its place.

    ``layer`` None means all layers, ``heads`` and ``tokens`` None all of them. Of the step VISIBILITY, ``value``
    returns the hidden keys.
    """

    layer: int | None
    step: str
    heads: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    value: Value = field(repr=False)

    def perform(self, x: Array, inputs: Array) -> Array:
        """Return a copy of a step with what takes the place of its heads and tokens."""
        heads = () if x.ndim == 2 else (range(len(x)) if self.heads is None else self.heads,)
        rows = range(x.shape[-2]) if self.tokens is None else self.tokens
        at: Any = (*np.ix_(*heads, rows), slice(None))
        own = inputs[rows,] if self.step == "result" else inputs
        given = as_array(self.where, self.value(x[at], own))
        y = x.copy()
        try:
            found = np.broadcast_to(given.astype(x.dtype, casting="same_kind"), x[at].shape)
        except (TypeError, ValueError):
            got = f"{given.dtype} of shape {given.shape}"
            raise ValueError(f"{self.where} has shape {x[at].shape}; what takes its place is {got}") from None
        y[at] = found
        return y

    @property
    def where(self) -> str:
        """What is changed, for messages."""
        return f"{self.step} of layer {self.layer}" + (f", heads {self.heads}" if self.heads else "")


@dataclass(frozen=True)
class Change:
    """A change of what a transformer computes, for ``steps`` and ``hidden_states`` of a model.

    Its methods make changes; ``layer``, ``head`` and ``**at`` are the same in all, as in :meth:`off`. ``+`` joins
    two, of which the second is applied to what the first makes. ``Change()`` changes nothing. Layers, heads and
    tokens are counted from 0. A model checks a change when it computes with it.

    A step is named as in :class:`selfattn.steps.records.TransformerLayerSteps`: ``"output"`` of the heads (H, L,
    D), their ``"weights"`` (H, L, L), what attention adds ``"projected_output"`` (L, d), what the feed-forward
    network adds ``"down"`` (L, d), and so on. ``"result"`` (L, d) is what leaves the layer, whichever step is its
    last.

    References
    ----------
    Michel et al., "Are Sixteen Heads Really Better than One?", 2019, equation 2, for heads that are off; Vig et al.,
    "Investigating Gender Bias in Language Models Using Causal Mediation Analysis", 2020, section 3, for steps of
    another text; Geva et al., "Dissecting Recall of Factual Associations in Auto-Regressive Language Models", 2023,
    section 5, for words that are not seen.

    Examples
    --------
    >>> from selfattn import nn
    >>> model = nn.GPT(9, d_model=16, num_layers=2, num_heads=4, max_seq_len=8, rng=0)
    >>> off = Change.off(0, head=1)
    >>> model.steps([1, 2, 3], change=off).layers[0].output[1].any()
    np.False_
    >>> other = model.steps([4, 5, 6])
    >>> both = off + Change.patch(1, other, step="down", tokens=2)
    >>> model.hidden_states([1, 2, 3], change=both)[-1].shape
    (3, 16)
    """

    edits: tuple[Edit, ...] = ()

    def __add__(self, other: Change) -> Change:
        """Return a change that does what both do."""
        return Change(self.edits + other.edits) if isinstance(other, Change) else NotImplemented

    @classmethod
    def off(cls, layer: int, head: Numbers = None, **at: Any) -> Change:
        """Return a change that switches a head off, a step, or a whole layer: what it adds is 0.

        Parameters
        ----------
        layer : int
        head : int or sequence of int, optional
            These heads give 0 to the output projection.
        **at
            ``step``: ``"projected_output"`` switches attention off, ``"down"`` the feed-forward network, biases
            included; by default ``"output"`` with heads, else ``"result"``: the layer is left out, and what enters it
            leaves it. ``tokens``, an int or a sequence of int: only there.
        """
        skips = head is None and at.get("step", "result") == "result"
        return cls._edit(layer, head, at, lambda x, own: own if skips else np.zeros_like(x))

    @classmethod
    def patch(
        cls,
        layer: int,
        source: TransformerSteps,
        head: Numbers = None,
        *,
        source_tokens: Numbers = None,
        **at: Any,
    ) -> Change:
        """Return a change that puts a step of another run in the place of this one's.

        Parameters
        ----------
        source : TransformerSteps
            What ``steps`` of the same model has returned, of another text or of a changed run.
        source_tokens : int or sequence of int, optional
            The tokens of the other text, as many as ``tokens``; by default the same ones. Texts of different lengths
            need one or both.
        """
        if not isinstance(source, TransformerSteps):
            raise TypeError(
                f"source must be what steps() of a model returns, not {type(source).__name__}: "
                "patch(layer, source, head)"
            )
        edit, whole = cls._edit_of(layer, [source], head, at)
        rows = edit.tokens if source_tokens is None else _numbers("source_tokens", source_tokens)
        if rows is not None and edit.tokens is not None and len(rows) != len(edit.tokens):
            raise ValueError(f"tokens {edit.tokens} and source_tokens {rows} differ in number")
        length = whole.shape[-2]
        _check("source_tokens", rows or (), length, f"the other text has {length} tokens")
        value = whole if rows is None else whole[..., rows, :]

        def patched(x: Array, _: Array) -> Array:
            if value.shape != x.shape:
                shapes = f"{edit.where} has shape {x.shape}, and that of the other run {value.shape}"
                raise ValueError(f"{shapes}; name as many tokens of both texts: tokens=, source_tokens=")
            return value

        return cls((replace(edit, value=patched),))

    @classmethod
    def mean(
        cls,
        layer: int,
        sources: TransformerSteps | Iterable[TransformerSteps],
        head: Numbers = None,
        **at: Any,
    ) -> Change:
        """Return a change that puts a mean in the place of each row of a step.

        It is the mean over all tokens of some runs, of any texts.

        Parameters
        ----------
        sources : TransformerSteps or iterable of them
            Weights have no mean.
        """
        if at.get("step") == "weights":
            raise ValueError("weights of texts of different lengths have no mean; change the step output")
        edit, rows = cls._edit_of(
            layer, [sources] if isinstance(sources, TransformerSteps) else sources, head, at
        )
        value = rows.mean(axis=-2, keepdims=True, dtype=np.float64).astype(rows.dtype)
        return cls((replace(edit, value=lambda x, _: np.broadcast_to(value, x.shape)),))

    @classmethod
    def apply(
        cls, layer: int, function: Callable[[Array], npt.ArrayLike], head: Numbers = None, **at: Any
    ) -> Change:
        """Return a change that puts what a function makes of a step in its place.

        Parameters
        ----------
        function : callable
            Takes a copy of the chosen heads and tokens, such as (heads, tokens, D) of ``"output"``; returns an array
            that broadcasts to it, which is converted to its dtype.
        """
        if not callable(function):
            raise TypeError(f"function must be callable, not {type(function).__name__}")
        return cls._edit(layer, head, at, lambda x, _: function(x))

    @classmethod
    def hide(
        cls, tokens: Numbers, layer: int | None = None, head: Numbers = None, *, queries: Numbers = None
    ) -> Change:
        """Return a change by which tokens are not seen; the weights of the others then sum to 1.

        Parameters
        ----------
        tokens : int or sequence of int
        layer, head : int, optional
            By default all layers and heads.
        queries : int or sequence of int, optional
            The tokens that do not see them. By default all others: a hidden token still sees itself.
        """
        if not (keys := _numbers("tokens", tokens)):
            raise ValueError("tokens must be the tokens to hide, not None or none")
        change = cls._edit(
            layer or 0, head, {"step": VISIBILITY, "tokens": queries}, lambda x, _: np.array(keys)
        )
        return change if layer is not None else cls((replace(change.edits[0], layer=None),))

    @classmethod
    def _edit(cls, layer: int, head: Numbers, at: dict[str, Any], value: Value) -> Change:
        if unknown := at.keys() - {"step", "tokens"}:
            raise TypeError(f"a change takes step and tokens, not {', '.join(sorted(unknown))}")
        step = at.get("step") or ("result" if head is None else "output")
        if step != VISIBILITY:
            one_of("step", step, STEPS)
        if head is not None and step not in (*BY_HEAD, VISIBILITY):
            raise ValueError(f"{step} has no heads; {', '.join(BY_HEAD)} have")
        number = check_size("layer", layer, 0)
        return cls((Edit(number, step, _numbers("head", head), _numbers("tokens", at.get("tokens")), value),))

    @classmethod
    def _edit_of(cls, layer: int, sources: Any, head: Numbers, at: dict[str, Any]) -> tuple[Edit, Array]:
        """Return what is changed, and the rows of that step in other runs."""
        edit = cls._edit(layer, head, at, lambda x, _: x).edits[0]
        found = [_step_of(each, edit) for each in sources]
        if not found:
            raise ValueError("sources must have at least one run")
        rows = np.concatenate(found, axis=-2)
        return edit, rows if edit.heads is None else rows[edit.heads,]

    # --------------------------------------------------------------------------------------------- for a model

    def of_layer(self, n: int) -> tuple[Edit, ...]:
        """Return the edits of a layer."""
        return tuple(edit for edit in self.edits if edit.layer in (None, n))

    def check(self, model: Transformer, length: int) -> None:
        """Refuse layers, heads and tokens that a model or its text does not have."""
        count = len(model.layers)
        for edit in self.edits:
            if edit.layer is not None:
                _check("layer", (edit.layer,), count, f"the model has {count} layers")
            for layer in model.layers if edit.layer is None else [model.layers[edit.layer]]:
                heads = _heads(layer, edit.step)
                _check(
                    "head", edit.heads or (), heads, f"{edit.step} of layer {edit.layer} has {heads} heads"
                )
            hidden = edit.value(*[np.empty(0)] * 2).tolist() if edit.step == VISIBILITY else ()
            _check("tokens", (*(edit.tokens or ()), *hidden), length, f"the text has {length} tokens")


def hide_keys(edits: Sequence[Edit], heads: int, length: int, mask: Array | None) -> Array | None:
    """Return a mask, boolean or added to scores, that also hides what edits hide."""
    open_, hides = np.ones((heads, length, length), bool), [edit for edit in edits if edit.step == VISIBILITY]
    for edit in hides:
        keys, every = edit.value(open_, open_), range(length)
        for h in range(heads) if edit.heads is None else edit.heads:
            for i in every if edit.tokens is None else edit.tokens:
                open_[h, i, keys if edit.tokens is not None else keys[keys != i]] = False
    if not hides or mask is None:
        return open_ if hides else mask
    return mask & open_ if mask.dtype == np.bool_ else np.where(open_, mask, mask.dtype.type(-np.inf))


def check_steps(edits: Sequence[Edit], n: int, has: Iterable[str]) -> None:
    """Refuse edits of steps that a layer does not have."""
    known = (*has, "weights", "output", "result", VISIBILITY)
    for edit in edits:
        if edit.step not in known:
            raise ValueError(f"layer {n} has no step {edit.step!r}; it has {', '.join(known[:-1])}")


def _heads(layer: Layer, step: str) -> int:
    key_heads = layer.num_heads if layer.num_key_heads is None else layer.num_key_heads
    return key_heads if step in ("key", "value", "key_norm") else layer.num_heads


def _numbers(name: str, given: Numbers) -> tuple[int, ...] | None:
    return None if given is None else tuple(np.atleast_1d(as_integers(name, given)).tolist())


def _check(name: str, given: Sequence[int], count: int, says: str) -> None:
    for n in given:
        if not 0 <= n < count:
            raise ValueError(f"{name} {n} is out of range: {says}, 0 to {count - 1}")


def _step_of(source: TransformerSteps, edit: Edit) -> Array:
    """Return a step of another run."""
    if not isinstance(source, TransformerSteps):
        raise TypeError(f"a source must be what steps() of a model returns, not {type(source).__name__}")
    _check("layer", (edit.layer or 0,), len(source.layers), f"the other run has {len(source.layers)} layers")
    layer = source.layers[edit.layer or 0]
    check_steps([edit], edit.layer or 0, layer.to_dict(weighted_values=False))
    found: Array = getattr(layer, edit.step)
    if edit.heads:
        count = len(found)
        _check("head", edit.heads, count, f"{edit.step} of layer {edit.layer} has {count} heads")
    return found
