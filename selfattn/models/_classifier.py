"""The head of a classifier or cross-encoder: two linear layers on the last hidden state of the first token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from selfattn._check import Array
from selfattn.functional._products import linear as multiply
from selfattn.models._folder import Config
from selfattn.models._pretrained import Shapes, linear
from selfattn.nn.module import Gradients


class Classifier(NamedTuple):
    """The names of both layers, and the activation between them: ``"tanh"`` or ``"relu"``."""

    first: str
    activation: str
    second: str

    def shapes(self, d: int, labels: int) -> Shapes:
        """Return the shapes of the parameters."""
        return linear(self.first, d, d) | linear(self.second, labels, d)

    def vjp(
        self, arrays: Mapping[str, Array], rows: Array
    ) -> tuple[Array, Callable[[Array], tuple[Array, Gradients]]]:
        """Compute logits (n, labels) of rows (n, d), and from their gradients those of the rows and of the parameters."""
        w, v = arrays[f"{self.first}.weight"], arrays[f"{self.second}.weight"]
        x = multiply(rows, w, arrays[f"{self.first}.bias"])
        tanh = self.activation == "tanh"
        active = np.tanh(x) if tanh else np.maximum(x, 0)

        def pulled(dy: Array) -> tuple[Array, Gradients]:
            dx = dy @ v * (1 - active * active if tanh else active > 0)
            of_weights = {f"{self.first}.weight": dx.T @ rows, f"{self.second}.weight": dy.T @ active}
            of_biases = {f"{self.first}.bias": dx.sum(axis=0), f"{self.second}.bias": dy.sum(axis=0)}
            return dx @ w, of_weights | of_biases

        return multiply(active, v, arrays[f"{self.second}.bias"]), pulled


def number_of_labels(config: Config) -> int:
    """Read how many labels a classifier has."""
    labels = config.raw("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise config.error(f"id2label must be names by number, not {labels!r:.80}")
    return config.size("num_labels", len(labels) if labels else 2)
