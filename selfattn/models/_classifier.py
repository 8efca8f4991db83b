"""Sequence classifiers and cross-encoders: two linear layers on the first token of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from selfattn._check import Array
from selfattn.functional._products import linear as multiply
from selfattn.functional._products import linear_backward
from selfattn.models._config import Config
from selfattn.models._encoder import Pulled, Shapes, add, linear
from selfattn.nn.module import Gradients


class Classifier:
    """A head ``second(activation(first(x)))`` on the first token's last hidden state x; mixed into an encoder.

    Attributes
    ----------
    num_labels : int
        How many logits there are.
    """

    suffix: ClassVar[str] = "ForSequenceClassification"
    head: ClassVar[tuple[str, str, str]]  # first layer, activation, second layer
    num_labels: int

    def _read(self: Any, config: Config) -> None:
        super()._read(config)  # type: ignore[misc]
        labels = config.raw("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise ValueError(f"{config.where}: id2label must be names by number, not {labels!r:.80}")
        self.num_labels = len(labels) if labels else config.size("num_labels", 2)
        config.raw("num_labels")
        config.only("seq_classif_activation", None)

    def _shapes(self: Any) -> tuple[Shapes, set[str]]:
        shapes, optional = super()._shapes()  # type: ignore[misc]
        first, _, second = self.head
        shapes = {name: shape for name, shape in shapes.items() if name not in optional}
        return shapes | linear(first, self.hidden_size, self.hidden_size) | linear(
            second, self.num_labels, self.hidden_size
        ), set()

    def _name(self: Any, name: str) -> str:
        return name if "classifier" in name else self.prefix + name

    def _parts(self: Any) -> tuple[Array, Array, Array, Array]:
        first, _, second = self.head
        return tuple(
            self.arrays[f"{layer}.{kind}"] for layer in (first, second) for kind in ("weight", "bias")
        )

    def _logits(self: Any, ids: Array, cu_seqlens: Array, types: Array | None = None) -> Array:
        """Compute (sequences, num_labels)."""
        w1, b1, w2, b2 = self._parts()
        x = self._rows(ids, cu_seqlens, "first", types)
        return multiply(_activate(multiply(x, w1, b1), self.head[1])[0], w2, b2)

    def _logits_vjp(
        self: Any, ids: Array, cu_seqlens: Array, types: Array | None = None
    ) -> tuple[Array, Pulled]:
        """Compute what :meth:`_logits` does, and ``dy -> grads`` of all parameters."""
        w1, b1, w2, b2 = self._parts()
        first, activation, second = self.head
        x, rows_pulled = self._rows_vjp(ids, cu_seqlens, "first", types)
        active, back = _activate(multiply(x, w1, b1), activation)

        def pulled(dy: Array) -> Gradients:
            d_active, d_w2, d_b2 = linear_backward(dy, active, w2)
            dx, d_w1, d_b1 = linear_backward(back(d_active), x, w1)
            found: Gradients = rows_pulled(dx)
            for name, grad in (
                (f"{first}.weight", d_w1), (f"{first}.bias", d_b1), (f"{second}.weight", d_w2), (f"{second}.bias", d_b2),
            ):  # fmt: skip
                add(found, name, grad)
            return found

        return multiply(active, w2, b2), pulled


def _activate(x: Array, kind: str) -> tuple[Array, Callable[[Array], Array]]:
    if kind == "tanh":
        y = np.tanh(x)
        return y, lambda dy: dy * (1 - y * y)
    return np.maximum(x, 0), lambda dy: np.where(x > 0, dy, 0)
