"""The known faults: a name, the sentence, and how the fault changes the formulas of `formula`.

A further one takes a few lines: ``Rule(name, sentence, {step: formula}, …)``, each dict one way to make it. If the
dicts of several rules give the same numbers, the first rule is named. Sentences may hold ``{low}`` and ``{high}``, the
smallest and the largest sum of a row of weights. `languages/` has them in the other languages of pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from selfattn.diagnosis.formula import (
    FORWARD,
    Formula,
    Values,
    each,
    groups,
    outer,
    shared,
    softmax,
    transpose,
    weight_gradient,
)


class Rule:
    """A fault: ``changes`` are its ways to change formulas, and ``place`` is the first step that it changes."""

    def __init__(self, name: str, sentence: str, *changes: Mapping[str, Formula], place: str = "") -> None:
        self.name, self.sentence, self.changes = name, sentence, changes
        self.place = place or next(iter(changes[0]), "")


def scale(formula: Formula) -> Mapping[str, Formula]:
    """Return the change that gives another scale."""
    return {"scale": formula}


def weights(formula: Formula) -> Mapping[str, Formula]:
    """Return the change that gives other weights."""
    return {"weights": formula}


def masked(formula: Formula) -> Mapping[str, Formula]:
    """Return the change that masks in another way, whether the scores or the weights."""
    return {"masked": formula}


def causal(shift: int, past: bool = True) -> Mapping[str, Formula]:
    """Return the change that lets query i see the keys up to i + shift, or from there on."""

    def formula(s: Values) -> Any:
        seen = np.tri(s.L, s.S, s.offset + shift, dtype=bool)
        return (seen if past else ~seen) if s.is_causal else s.causal

    return {"causal": formula}


def given(formula: Formula) -> Mapping[str, Formula]:
    """Return the change that reads the given mask in another way."""
    return {"given": formula}


def reshaped(s: Values) -> Any:
    """Return how heads are split by a reshape alone."""
    return lambda y: y.reshape(len(y), s.H, y.shape[1], -1)


def glued(s: Values) -> Any:
    """Return how heads are merged by a reshape alone."""
    return lambda y: y.reshape(len(y), y.shape[2], -1)


def per(x: Any, axis: int) -> Any:
    """Return the maximum along an axis."""
    return x.max(axis, keepdims=True)


def exp(s: Values) -> Any:
    """Return the numerator of the softmax."""
    return np.exp(s.masked - per(s.masked, -1))


def along(s: Values, axis: int) -> Any:
    """Return a mask of one row a text, (B, 1, 1, S), with the rows along another axis."""
    if s.given.shape[1] != 1 or len(s.given) < s.scores.shape[axis] or len(s.given) == 1:
        raise ValueError("no row a text")
    return s.given[: s.scores.shape[axis]].swapaxes(0, axis)


def unmasked(s: Values) -> Any:
    """Return the weights without masks."""
    return softmax(s.biased)


def padded(s: Values) -> Any:
    """Return the mask if it is one of padding, (…, 1, S)."""
    if s.given.shape[-2] != 1 or s.given.size == 1:
        raise ValueError("no mask of padding")
    return s.given


def other(c: str, *instead: str) -> list[Mapping[str, Formula]]:
    """Return the changes that project with the weights of another projection, and with its bias."""

    def formula(w: str, b: str) -> Formula:
        return lambda s: s.split(s["x" + c] @ s["w" + w] + s["b" + b])

    return [{c: formula(w, b)} for w in instead for b in (c, w)]


def unbiased(c: str) -> Formula:
    """Return the projection without its bias."""
    return lambda s: s.split(s["x" + c] @ s["w" + c])


def mixed(c: str) -> Formula:
    """Return queries, keys or values (B, L, H, E) that are reshaped to (B, H, L, E)."""
    return lambda s: s[c].swapaxes(1, 2).reshape(s[c].shape)


def set_to(c: float) -> Mapping[str, Formula]:
    """Return the change that sets closed scores to a number."""
    return masked(lambda s: np.where(s.open, s.biased, c))


def adding(c: float) -> Mapping[str, Formula]:
    """Return the change that adds a number to closed scores."""
    return masked(lambda s: s.biased + c * ~s.open)


def over(n: int) -> Mapping[str, Formula]:
    """Return the change that divides by a sum over the last n axes."""
    return weights(lambda s: exp(s) / exp(s).sum(tuple(range(-n, 0)), keepdims=True))


def grouped(c: str, formula: Callable[[Any, Any], Any]) -> Formula:
    """Return a gradient of keys or values that gathers the heads of a group in another way."""
    return lambda s: formula(s, s["d_keys" if c == "k" else "d_values"])


def glued_weight(c: str) -> Formula:
    """Return the gradient of a projection's weights with heads that are merged by a reshape."""
    return lambda s: outer(s["x" + c], glued(s)(s["d" + c]))


def glued_input(c: str) -> Formula:
    """Return the gradient of the inputs with heads that are merged by a reshape."""
    return lambda s: glued(s)(s["d" + c]) @ s["w" + c].T


def flipped(c: str) -> Formula:
    """Return the gradient of a projection's weights, transposed."""
    return lambda s: weight_gradient(c)(s).T


def averaged(c: str) -> Formula:
    """Return the gradient of a projection's weights, divided by the number of texts."""
    return lambda s: weight_gradient(c)(s) / len(s.xq)


def untransposed(c: str) -> Formula:
    """Return the gradient of the inputs with weights that are not transposed."""
    return lambda s: s.merge(s["d" + c]) @ s["w" + c]


def paths(several: str) -> Mapping[str, Formula]:
    """Return the change that adds up some of the ways to the inputs."""
    return {"dx": lambda s: sum(s[("dx" if "wq" in s else "d") + c] for c in several)}


def transposed(c: str) -> Mapping[str, Formula]:
    """Return the change that projects with x @ w.T."""
    if c == "o":
        return {"projected": lambda s: s.merged @ s.wo.T + s.bo, "d_merged": lambda s: s.grad @ s.wo}
    return {c: lambda s: s.split(s[f"x{c}"] @ s[f"w{c}"].T + s[f"b{c}"])}


NAMES = {"q": "queries", "k": "keys", "v": "values", "o": "output"}

RULES = [
    # ---- projections and heads
    *(
        Rule(
            "projection-transposed",
            f"The projection of the {what} is transposed: x @ W.T, where the others are x @ W.",
            transposed(c),
            place="projected" if c == "o" else c,
        )
        for c, what in NAMES.items()
    ),
    *(
        Rule(
            "projection-wrong",
            f"The {NAMES[c]} are projected with the weights of another projection.",
            *other(c, *(d for d in "qkv" if d != c)),
        )
        for c in "qk"
    ),
    Rule(
        "value-wrong",
        "The values are those of the keys, or are projected with the weights of the keys.",
        *other("v", "k"),
        {"values": lambda s: s["keys"]},
    ),
    Rule("projection-wrong", "The values are projected with the weights of the queries.", *other("v", "q")),
    Rule(
        "projection-bias",
        "A projection lacks its bias.",
        *(each("", c, unbiased) for c in "qkv"),
        {"projected": lambda s: s.merged @ s.wo},
    ),
    Rule(
        "projection-missing",
        "The output projection is missing: the heads, next to each other, must be multiplied by Wo.",
        {"projected": lambda s: s.merged if "wo" in s else 1 / 0},
    ),
    Rule(
        "heads-merge",
        "The heads are merged by a reshape alone: a transpose to (B, L, H, d) must come before it.",
        {"merge": glued},
    ),
    Rule(
        "heads-split",
        "The heads are made by a reshape alone: reshape (B, L, H, d) and then a transpose to (B, H, L, d) are needed.",
        {"split": reshaped},
        {"split": reshaped, "merge": glued},
        {
            "split": lambda s: lambda y: y.reshape(*y.shape[:2], s.H, -1),
            "merge": lambda s: lambda y: y.reshape(*y.shape[:2], -1),
        },
        each("", "qkv", mixed),
        each("", "qkv", mixed) | {"merge": glued},
    ),
    Rule(
        "groups-order",
        "The shared heads of keys are repeated in the wrong order: query head h must use key head h // (H / G).",
        {
            "keys": lambda s: np.tile(s.k, (1, groups(s), 1, 1)),
            "values": lambda s: np.tile(s.v, (1, groups(s), 1, 1)),
        },
        {"keys": lambda s: np.tile(s.k, (1, groups(s), 1, 1))},
        {"values": lambda s: np.tile(s.v, (1, groups(s), 1, 1))},
    ),
    # ---- scores and scale
    Rule(
        "qk-swapped",
        "Queries and keys are swapped: the scores are K Qᵀ, and must be Q Kᵀ.",
        {"scores": lambda s: s["keys"] @ transpose(s.q)},
    ),
    Rule(
        "keys-reshaped",
        "The keys are reshaped to (d, L), which mixes their numbers; they must be transposed.",
        {"scores": lambda s: s.q @ s["keys"].reshape(*s["keys"].shape[:2], s.q.shape[-1], -1)},
    ),
    Rule(
        "scale-none",
        "The scores are not scaled: 1/√d is missing, d being the width of a head.",
        scale(lambda s: 1.0),
    ),
    Rule("scale-d", "The scale is 1/d, and must be 1/√d.", scale(lambda s: 1 / s.q.shape[-1])),
    Rule(
        "scale-inverse",
        "The scores are multiplied by √d; they must be divided by it.",
        scale(lambda s: s.q.shape[-1] ** 0.5),
        scale(lambda s: s.q.shape[-1]),
    ),
    Rule(
        "scale-length",
        "The scale takes the wrong axis: it is 1/√(number of keys or queries), and must be 1/√d, "
        "d being the width of a head.",
        scale(lambda s: s.scores.shape[-1] ** -0.5),
        scale(lambda s: s.scores.shape[-2] ** -0.5),
    ),
    Rule(
        "scale-model",
        "The scale is 1/√(width of all heads, or of the model), and must be 1/√d, d being the width of one head.",
        scale(lambda s: (s.q.shape[-1] * s.H) ** -0.5),
        scale(lambda s: s.xq.shape[-1] ** -0.5),
    ),
    Rule(
        "scale-axis",
        "The scale takes the wrong axis: it is 1/√(number of heads or texts), and must be 1/√d.",
        scale(lambda s: s.H**-0.5),
        scale(lambda s: len(s.q) ** -0.5),
    ),
    Rule(
        "scale-root",
        "The scale is d to the power −1/4, and must be 1/√d.",
        scale(lambda s: s.q.shape[-1] ** -0.25),
    ),
    Rule(
        "scale-after-softmax",
        "The scale comes after the softmax: it must divide the scores, not the weights.",
        {"scaled": lambda s: s.scores, "weights": lambda s: softmax(s.masked) * s.scale},
    ),
    Rule(
        "scale-after-mask",
        "The scale comes after the mask: (scores + mask) / √d divides the mask too; it must be scores / √d + mask.",
        {"biased": lambda s: (s.scores + s.bias) * s.scale},
    ),
    # ---- masks
    Rule(
        "mask-inverted",
        "The mask is inverted: it closes the keys that it should open, and opens those that it should close.",
        given(lambda s: ~s.given),
        {"biased": lambda s: s.scaled - s.bias},
    ),
    Rule(
        "mask-ignored",
        "The mask is not used: the result is the same with and without it.",
        {"given": lambda s: np.ones_like(s.given), "biased": lambda s: s.scaled},
    ),
    Rule(
        "mask-broadcast",
        "The mask goes along the wrong axis: head h takes row h of the mask, and must take the row of its text.",
        given(lambda s: along(s, 1)),
    ),
    Rule(
        "mask-broadcast",
        "The mask goes along the wrong axis: query i takes row i of the mask, and must take the row of its text.",
        given(lambda s: along(s, 2) if s.given.shape[-2] == 1 else 1 / 0),
    ),
    Rule(
        "mask-first",
        "The mask of the first text is used for all texts.",
        given(lambda s: s.given[:1]),
    ),
    Rule(
        "mask-queries",
        "The mask of padding closes queries, the rows of the scores; it must close keys, their columns.",
        given(lambda s: transpose(padded(s))),
    ),
    Rule(
        "mask-transposed",
        "The mask is transposed: query i takes column i, and must take row i.",
        given(lambda s: transpose(s.given) if s.given.shape[-2] > 1 else 1 / 0),
        {"biased": lambda s: s.scaled + transpose(s.bias) if s.bias.shape[-2] > 1 else 1 / 0},
    ),
    Rule(
        "mask-heads",
        "The mask is used for the first head only.",
        given(lambda s: s.given | (np.arange(s.scores.shape[1]) > 0)[:, None, None]),
    ),
    Rule("causal-ahead", "The causal mask is off by one: query i sees key i + 1.", causal(1)),
    Rule("causal-behind", "The causal mask is off by one: query i does not see key i, its own.", causal(-1)),
    Rule(
        "causal-inverted",
        "The causal mask is the wrong way round: query i sees the keys after it, and not those before it.",
        causal(-1, past=False),
        causal(0, past=False),
    ),
    Rule("causal-ignored", "The causal mask is not used: every query sees the keys after it.", causal(10**6)),
    Rule(
        "masks-either",
        "The causal mask and the given mask are joined by or: a key is open only if both open it.",
        {"open": lambda s: np.broadcast_to(s.given | s.causal if s.is_causal else s.given, s.scores.shape)},
    ),
    Rule(
        "mask-zero",
        "The mask sets closed scores to 0 or nearly, whose exponential is 1; they must be −∞ (or −1e9).",
        masked(lambda s: np.where(s.open, s.biased, 0.0)),
    ),
    Rule(
        "mask-added",
        "The mask is added as a number: True adds 1 to a score. A boolean mask must close scores, with −∞.",
        masked(lambda s: s.biased + s.given),
        masked(lambda s: s.biased + ~s.given),
    ),
    Rule(
        "mask-weak",
        "The mask adds or sets a number that is too small, so closed keys keep weight; it must be −∞ (or −1e9).",
        *(make(c) for make in (set_to, adding) for c in (-1.0, -2.0, -5.0, -10.0)),
    ),
    Rule(
        "mask-after-softmax",
        "The mask comes after the softmax: rows of weights sum to {low} … {high}, and not to 1 again.",
        weights(lambda s: unmasked(s) * s.open),
    ),
    # ---- softmax
    Rule(
        "softmax-queries",
        "The softmax is over the queries (axis −2), and must be over the keys (axis −1)"
        ": rows of weights sum to {low} … {high}.",
        weights(lambda s: softmax(s.masked, -2)),
        weights(lambda s: exp(s) / exp(s).sum(-2, keepdims=True)),
        weights(lambda s: np.exp(s.masked) / np.exp(s.masked).sum(-1)[..., None, :]),
        weights(lambda s: exp(s) / exp(s).sum(-1)[..., None, :]),
    ),
    Rule(
        "softmax-max",
        "The softmax subtracts a maximum that differs between the keys of a row: it must be the maximum of the row.",
        weights(lambda s: softmax(s.masked - per(s.masked, -2))),
        weights(lambda s: softmax(s.masked - transpose(per(s.masked, -1)))),
        weights(lambda s: np.exp(s.masked) / exp(s).sum(-1, keepdims=True)),
        weights(lambda s: exp(s) / np.exp(s.masked).sum(-1, keepdims=True)),
    ),
    Rule(
        "softmax-heads",
        "The softmax is over the heads (axis 1), and must be over the keys (axis −1)"
        ": rows of weights sum to {low} … {high}.",
        weights(lambda s: softmax(s.masked, 1)),
    ),
    Rule(
        "softmax-batch",
        "The softmax is over the texts (axis 0), and must be over the keys (axis −1)"
        ": rows of weights sum to {low} … {high}.",
        weights(lambda s: softmax(s.masked, 0)),
    ),
    Rule(
        "softmax-all",
        "The softmax is over a whole matrix, or more; it must be over the keys"
        ": rows of weights sum to {low} … {high}.",
        weights(lambda s: softmax(s.masked, (-2, -1))),
        weights(lambda s: softmax(s.masked, (-3, -2, -1))),
        weights(lambda s: softmax(s.masked, (-4, -3, -2, -1))),
        *(over(n) for n in (2, 3, 4)),
    ),
    Rule(
        "softmax-none",
        "The softmax is missing: the scores themselves are the weights.",
        weights(lambda s: np.where(s.open, s.masked, 0)),
    ),
    Rule(
        "softmax-sum",
        "The softmax does not divide by the sum: rows of weights sum to {low} … {high}.",
        weights(lambda s: np.exp(s.masked)),
        weights(exp),
    ),
    Rule(
        "softmax-exp",
        "The softmax lacks its exponential: the scores are divided by their sum.",
        weights(
            lambda s: np.where(s.open, s.masked, 0) / np.where(s.open, s.masked, 0).sum(-1, keepdims=True)
        ),
    ),
    Rule(
        "softmax-sigmoid",
        "The weights are a sigmoid of each score, and must be the softmax of each row"
        ": rows of weights sum to {low} … {high}.",
        weights(lambda s: 1 / (1 + np.exp(-s.masked))),
    ),
    Rule(
        "softmax-base",
        "The softmax takes powers of 2, and must take powers of e.",
        weights(lambda s: softmax(s.masked * np.log(2))),
    ),
    Rule("softmax-twice", "The softmax is taken twice.", weights(lambda s: softmax(softmax(s.masked)))),
    Rule(
        "softmax-log",
        "The weights are the logarithm of the softmax.",
        weights(lambda s: np.log(softmax(s.masked))),
    ),
    # ---- dropout with a mask that is given
    Rule(
        "dropout-scale",
        "The weights that dropout keeps are not divided by 1 − p.",
        {"drop": lambda s: 1.0 * s.keep},
    ),
    Rule(
        "dropout-inverted",
        "Dropout drops the weights that it should keep.",
        {"drop": lambda s: ~s.keep / (1 - s.p)},
    ),
    Rule("dropout-ignored", "The dropout mask is not used.", {"drop": lambda s: 1.0}),
    Rule(
        "dropout-scores",
        "Dropout comes before the softmax: it zeroes scores, and must zero weights.",
        {"weights": lambda s: softmax(s.masked * FORWARD["drop"](s)), "drop": lambda s: 1.0},
    ),
    # ---- the output
    Rule(
        "weights-transposed",
        "The output is Pᵀ V with the weights transposed, and must be P V.",
        {"output": lambda s: transpose(s.dropped) @ s["values"]},
    ),
    Rule(
        "value-wrong",
        "The output multiplies the weights by the queries, not by the values.",
        {"output": lambda s: s.dropped @ s.q},
    ),
    # ---- the backward pass
    Rule(
        "mask-gradient",
        "The backward pass forgets the mask: it takes weights without it, so closed keys get gradients that are not 0.",
        {"p_back": unmasked},
        {"p_back": lambda s: softmax(np.where(s.given, s.biased, -np.inf))},
        {"p_back": lambda s: softmax(np.where(np.broadcast_to(s.causal, s.scores.shape), s.biased, -np.inf))},
        {
            "d_masked": lambda s: (
                unmasked(s) * (s.d_weights - (s.d_weights * unmasked(s)).sum(-1, keepdims=True))
            )
        },
    ),
    Rule(
        "dv-untransposed",
        "dV is P dO with the weights as they are, and must be Pᵀ dO.",
        {"d_values": lambda s: (s.p_back * s.drop) @ s.d_output},
    ),
    Rule(
        "dropout-backward",
        "The backward pass does not apply the dropout mask: dP must be (dO Vᵀ) ∘ keep / (1 − p), "
        "and dV takes dropped weights.",
        {"d_weights": lambda s: s.d_dropped},
        {"d_values": lambda s: transpose(s.p_back) @ s.d_output},
        {"d_values": lambda s: transpose(s.p_back) @ s.d_output, "d_weights": lambda s: s.d_dropped},
        {"d_weights": lambda s: s.d_dropped * s.keep},
        {"d_values": lambda s: transpose(s.p_back * s.keep) @ s.d_output},
        {"row_term": lambda s: (s.d_dropped * s.p_back).sum(-1, keepdims=True)},
    ),
    Rule(
        "dp-wrong",
        "dP is dO times the keys, and must be dO Vᵀ.",
        {"d_dropped": lambda s: s.d_output @ transpose(s["keys"])},
    ),
    Rule(
        "ds-row-term",
        "dS lacks its row term: it must be P ∘ (dP − rowsum(dP ∘ P)), not P ∘ dP.",
        {"row_term": lambda s: 0.0},
    ),
    Rule(
        "ds-row-term",
        "The row term of dS is wrong: it must be rowsum(dP ∘ P), the sum over the keys of a query.",
        {"row_term": lambda s: (s.d_weights * s.p_back).sum(-2, keepdims=True)},
        {"row_term": lambda s: s.d_weights.sum(-1, keepdims=True)},
        {"row_term": lambda s: s.d_weights.mean(-1, keepdims=True)},
        {"row_term": lambda s: (s.d_weights * s.p_back).sum(-1)[..., None, :]},
        {"row_term": lambda s: (s.d_weights * s.p_back).sum((-2, -1), keepdims=True)},
        {"row_term": lambda s: (s.d_weights * s.p_back).mean(-1, keepdims=True)},
        {"row_term": lambda s: s.d_weights * s.p_back},
        {"row_term": lambda s: -(s.d_weights * s.p_back).sum(-1, keepdims=True)},
        {"d_masked": lambda s: s.p_back * s.d_weights - s.row_term},
    ),
    Rule(
        "ds-weights",
        "dS lacks the weights before its bracket: it must be P ∘ (dP − rowsum(dP ∘ P)).",
        {"d_masked": lambda s: s.d_weights - s.row_term},
        {"d_masked": lambda s: s.d_weights},
    ),
    Rule("ds-sign", "dS has the wrong sign.", {"d_masked": lambda s: -s.p_back * (s.d_weights - s.row_term)}),
    Rule(
        "scale-gradient",
        "The gradients lack the scale: dQ and dK must be multiplied by 1/√d, as the scores are.",
        {"d_scores": lambda s: s.d_masked},
        {"d_queries": lambda s: s.d_masked @ s["keys"]},
        {"d_keys": lambda s: transpose(s.d_masked) @ s.q},
    ),
    Rule(
        "scale-gradient",
        "The scale of the gradients is wrong: dQ and dK must be multiplied by 1/√d, once.",
        {"d_scores": lambda s: s.d_masked * s.scale**2},
        {"d_queries": lambda s: s.d_scores @ s["keys"] * s.scale},
        {"d_keys": lambda s: transpose(s.d_scores) @ s.q * s.scale},
        {"d_scores": lambda s: s.d_masked / s.scale},
        {"d_values": lambda s: transpose(s.p_back * s.drop) @ s.d_output * s.scale},
    ),
    Rule(
        "scale-none",
        "The weights of the backward pass are not scaled: 1/√d is missing before its softmax.",
        {"p_back": lambda s: softmax(np.where(s.open, s.scores, -np.inf))},
    ),
    Rule(
        "softmax-queries",
        "The softmax of the backward pass is over the queries (axis −2), and must be over the keys (axis −1).",
        {"p_back": lambda s: softmax(s.masked, -2)},
    ),
    Rule(
        "dq-transposed",
        "dQ is dSᵀ K, and must be dS K.",
        {"d_queries": lambda s: transpose(s.d_scores) @ s["keys"]},
    ),
    Rule(
        "dq-wrong",
        "dQ multiplies dS by the queries, and must be dS K.",
        {"d_queries": lambda s: s.d_scores @ s.q},
    ),
    Rule("dk-untransposed", "dK is dS Q, and must be dSᵀ Q.", {"d_keys": lambda s: s.d_scores @ s.q}),
    Rule(
        "dk-wrong",
        "dK multiplies dSᵀ by the keys, and must be dSᵀ Q.",
        {"d_keys": lambda s: transpose(s.d_scores) @ s["keys"]},
    ),
    Rule(
        "dqdk-swapped",
        "dQ and dK are swapped.",
        {"d_queries": lambda s: transpose(s.d_scores) @ s.q, "d_keys": lambda s: s.d_scores @ s["keys"]},
    ),
    Rule(
        "groups-not-summed",
        "dK and dV must be the sums over all query heads that share a head of keys: heads are left out or averaged.",
        *(
            {"d" + c: grouped(c, formula) for c in several}
            for formula in (
                lambda s, x: x[:, :: groups(s)],
                lambda s, x: x[:, groups(s) - 1 :: groups(s)],
                lambda s, x: shared(s, x) / groups(s),
                lambda s, x: x[:, : s.k.shape[1]],
                lambda s, x: x.reshape(len(x), groups(s), -1, *x.shape[2:]).sum(1),
            )
            for several in ("kv", "k", "v")
        ),
    ),
    # ---- gradients of projections
    Rule(
        "heads-split",
        "The backward pass splits or merges the heads by a reshape alone: a transpose belongs to it.",
        {"d_output": lambda s: reshaped(s)(s.d_merged) if "wq" in s else 1 / 0},
        {"dwo": lambda s: outer(glued(s)(s.output), s.grad)},
        *(
            each("dw", several, glued_weight) | each("dx", several, glued_input)
            for several in ("qkv", "q", "k", "v")
        ),
    ),
    Rule(
        "weight-gradient-transposed",
        "The gradient of a projection's weights is transposed: for y = x @ W it must be xᵀ dy.",
        *(each("dw", several, flipped) for several in ("q", "k", "v", "qkv", "o", "qkvo")),
    ),
    Rule(
        "weight-gradient-batch",
        "The gradients of the weights are averages over the texts, and must be sums.",
        *(each("dw", several, averaged) for several in ("qkv", "qkvo", "o")),
    ),
    Rule(
        "dx-untransposed",
        "The gradient of the inputs takes weights that are not transposed: for y = x @ W it must be dy Wᵀ.",
        *(each("dx", several, untransposed) for several in ("qkv", "q", "k", "v")),
        {"d_merged": lambda s: s.grad @ s.wo},
    ),
    Rule(
        "dx-path",
        "The gradient of the inputs lacks a path: it is the sum of those through queries, keys and values.",
        *(paths(several) for several in ("q", "k", "v", "qk", "qv", "kv")),
    ),
]
