"""Attention and its gradients as a table: a formula for each step, in the order of computation.

Shapes are those of :mod:`selfattn.reference`, with a batch and heads: (B, H, L, E). Inputs of a layer, ``xq``, ``xk``
and ``xv``, are (B, L, D). A fault replaces formulas by others, so the table is NumPy that anyone can read and change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

from selfattn._check import Array

Formula: TypeAlias = Callable[[Any], Any]


class Values(dict[str, Any]):
    """Steps by name, which are attributes too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def transpose(x: Array) -> Array:
    """Swap the last two axes."""
    return x.swapaxes(-1, -2)


def softmax(x: Array, axis: int | tuple[int, ...] = -1) -> Array:
    """Return weights that sum to 1 along the axis; NaN where nothing is open."""
    exp = np.exp(x - x.max(axis, keepdims=True))
    weights: Array = exp / exp.sum(axis, keepdims=True)
    return weights


def groups(s: Values) -> int:
    """Return how many heads share a head of keys."""
    return int(s.q.shape[1] // s.k.shape[1])


def shared(s: Values, x: Array) -> Array:
    """Sum the gradients of heads that share a head of keys: (B, H, S, E) to (B, G, S, E)."""
    summed: Array = x.reshape(len(x), -1, groups(s), *x.shape[2:]).sum(2)
    return summed


def outer(x: Array, dy: Array) -> Array:
    """Return the gradient of w for y = x @ w: (B, L, D) and (B, L, E) give (D, E)."""
    found: Array = np.einsum("bld,ble->de", x, dy)
    return found


def weight_gradient(c: str) -> Formula:
    """Return the formula of the gradient of a projection's weights."""
    return lambda s: outer(s.merged, s.grad) if c == "o" else outer(s["x" + c], s.merge(s["d" + c]))


def bias_gradient(c: str) -> Formula:
    """Return the formula of the gradient of a projection's bias."""
    return lambda s: (s.grad if c == "o" else s.merge(s["d" + c])).sum((0, 1))


def input_gradient(c: str) -> Formula:
    """Return the formula of the gradient of the inputs through queries, keys or values."""
    return lambda s: s.merge(s["d" + c]) @ s["w" + c].T


def each(prefix: str, several: str, make: Callable[[str], Formula]) -> dict[str, Formula]:
    """Return a formula for each of several letters."""
    return {prefix + c: make(c) for c in several}


FORWARD: Mapping[str, Formula] = {
    "split": lambda s: lambda y: y.reshape(*y.shape[:2], s.H, -1).swapaxes(1, 2),
    "merge": lambda s: lambda y: y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1),
    "q": lambda s: s.split(s.xq @ s.wq + s.bq),
    "k": lambda s: s.split(s.xk @ s.wk + s.bk),
    "v": lambda s: s.split(s.xv @ s.wv + s.bv),
    "keys": lambda s: np.repeat(s.k, groups(s), 1),
    "values": lambda s: np.repeat(s.v, groups(s), 1),
    "scores": lambda s: s.q @ transpose(s["keys"]),
    "scale": lambda s: s.q.shape[-1] ** -0.5,
    "scaled": lambda s: s.scores * s.scale,
    "given": lambda s: np.ones((1, 1, 1, 1), bool),
    "causal": lambda s: np.ones((1, 1), bool),
    "open": lambda s: np.broadcast_to(s.given & s.causal, s.scores.shape),
    "biased": lambda s: s.scaled + s.bias if "bias" in s else s.scaled,
    "masked": lambda s: np.where(s.open, s.biased, -np.inf),
    "weights": lambda s: softmax(s.masked),
    "drop": lambda s: s.keep / (1 - s.p) if "keep" in s else 1.0,
    "dropped": lambda s: s.weights * s.drop,
    "output": lambda s: s.dropped @ s["values"],
    "merged": lambda s: s.merge(s.output),
    "projected": lambda s: s.merged @ s.wo + s.bo if "wo" in s else s.merged,
}
BACKWARD: Mapping[str, Formula] = {
    "d_merged": lambda s: s.grad @ s.wo.T if "wo" in s else s.grad,
    "d_output": lambda s: s.split(s.d_merged) if s.d_merged.ndim == 3 else s.d_merged,
    "p_back": lambda s: s.weights,
    "d_values": lambda s: transpose(s.p_back * s.drop) @ s.d_output,
    "d_dropped": lambda s: s.d_output @ transpose(s["values"]),
    "d_weights": lambda s: s.d_dropped * s.drop,
    "row_term": lambda s: (s.d_weights * s.p_back).sum(-1, keepdims=True),
    "d_masked": lambda s: s.p_back * (s.d_weights - s.row_term),
    "d_scores": lambda s: s.d_masked * s.scale,
    "d_queries": lambda s: s.d_scores @ s["keys"],
    "d_keys": lambda s: transpose(s.d_scores) @ s.q,
    "dq": lambda s: s.d_queries,
    "dk": lambda s: shared(s, s.d_keys),
    "dv": lambda s: shared(s, s.d_values),
}
LAYER: Mapping[str, Formula] = {
    **each("dw", "qkvo", weight_gradient),
    **each("db", "qkvo", bias_gradient),
    **each("dx", "qkv", input_gradient),
    "dx": lambda s: s.dxq + s.dxk + s.dxv,
}

ONE_INPUT: Mapping[str, Formula] = {"dx": lambda s: s.dq + s.dk + s.dv if "one" in s else None}


def compute(inputs: Mapping[str, Any], changes: Mapping[str, Formula]) -> Values:
    """Compute all steps that are not given, with changed formulas.

    Examples
    --------
    >>> one = np.ones((1, 1, 2, 4))
    >>> compute({"q": one, "k": one, "v": one}, {"scale": lambda s: 1.0}).scaled.max()
    np.float64(4.0)
    """
    s = Values(inputs)
    table = dict(FORWARD)
    if "grad" in s:
        table |= {**BACKWARD, **(LAYER if "wq" in s else ONE_INPUT)}
    for name, formula in table.items():
        if name in changes or name not in s:
            s[name] = changes.get(name, formula)(s)
    return s
