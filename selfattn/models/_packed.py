"""Encoders of token ids: packed sequences to the rows of their last layer and to logits, and the way back to gradients of parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from selfattn._check import Array
from selfattn.engine import transformer
from selfattn.engine.transformer import Transformer, check_ids, without_table
from selfattn.functional._products import linear as multiply
from selfattn.models._folder import Config
from selfattn.models._pretrained import Pretrained, Pulled, Shapes, linear
from selfattn.nn.module import Gradients


class PackedEncoder(Pretrained):
    """An encoder of packed ids. Subclasses name its tables: of words, of which text a token belongs to, of positions."""

    vocab_size: int
    max_positions: int
    word_table: ClassVar[str]
    type_table: ClassVar[str | None] = None
    position_table: ClassVar[str | None] = None
    first_position = 0
    pad: int | None = None  # an id that positions do not count; its position is the one before the first
    has_fixed_settings = True  # they depend on no lengths or parameters' values, so they are made once
    # In a classifier: the first layer, the activation and the second layer, on the first token's last hidden state.
    head: ClassVar[tuple[str, str, str] | None] = None
    has_pooler: ClassVar[bool] = False  # files may hold a pooler, which classifiers use
    num_labels: int

    def _inputs(
        self, settings: Transformer, ids: Array, cu_seqlens: Array, types: Array | None
    ) -> tuple[Transformer, Array]:
        """Return the ids, or the rows of a table's sums if the core would look up other ones."""
        if self._are_plain(ids, types):
            return settings, ids
        assert settings.table is not None
        rows = settings.table[ids]
        if self.type_table is not None:
            rows = rows + self.arrays[self.type_table][0 if types is None else types]
        if self.position_table is not None:
            rows = rows + self.arrays[self.position_table][self._places(ids, cu_seqlens)]
        return without_table(settings), rows

    def _are_plain(self, ids: Array, types: Array | None) -> bool:
        """Tell whether the core looks up the right rows: all types are 0, and no position is left out."""
        of_one_text = types is None or self.type_table is None or not types.any()
        return of_one_text and (self.pad is None or not np.any(ids == self.pad))

    def _places(self, ids: Array, cu_seqlens: Array) -> Array:
        """Return each token's row of the table of positions."""
        counted = np.ones(len(ids), bool) if self.pad is None else ids != self.pad
        before = np.cumsum(np.append(0, counted))
        places = before[:-1] - np.repeat(before[cu_seqlens[:-1]], np.diff(cu_seqlens))
        found: Array = self.first_position + np.where(counted, places, -1)
        return found

    def _check_ids(self, ids: Array, cu_seqlens: Array) -> None:
        longest = int(np.diff(cu_seqlens).max(initial=0))
        if longest > (most := self.max_positions):
            raise ValueError(f"a sequence has {longest} tokens; this model takes {most} at most")
        check_ids(ids, self.vocab_size, "the vocabulary of this model; one is")

    def _rows(self, ids: Array, cu_seqlens: Array, pooling: Any = None, types: Array | None = None) -> Array:
        """Compute the last hidden states of packed sequences, or one row for each."""
        self._check_ids(ids, cu_seqlens)
        if self.has_fixed_settings and self._are_plain(ids, types):  # views: changed weights show through
            if pooling not in self._prepared:
                settings, _ = self._built(self.max_positions)
                self._prepared[pooling] = transformer.as_core(settings._replace(pooling=pooling))
            return transformer.compute(self._prepared[pooling], ids, cu_seqlens)
        settings, _ = self._built(int(np.diff(cu_seqlens).max(initial=1)))
        settings, inputs = self._inputs(settings, ids, cu_seqlens, types)
        return transformer.forward(settings._replace(pooling=pooling), inputs, cu_seqlens)

    def _rows_vjp(
        self, ids: Array, cu_seqlens: Array, pooling: Any = None, types: Array | None = None
    ) -> tuple[Array, Pulled]:
        """Compute what :meth:`_rows` does, and ``dy -> grads`` of all parameters that took part."""
        self._check_ids(ids, cu_seqlens)
        settings, parameters = self._built(int(np.diff(cu_seqlens).max(initial=1)))
        settings, inputs = self._inputs(settings._replace(pooling=pooling), ids, cu_seqlens, types)
        y, pullback = transformer.vjp(settings, inputs, cu_seqlens, wants_mask=settings.mask is not None)

        def pulled(dy: Array) -> Gradients:
            dx, grads, dmask = pullback(dy)
            found = parameters.gradients(transformer.arrays(settings), grads)
            self._table_gradients(found, dx, ids, cu_seqlens, types)
            if dmask is not None:
                self._mask_gradient(found, dmask)
            return found

        return y, pulled

    def _table_gradients(
        self, found: Gradients, dx: Array, ids: Array, cu_seqlens: Array, types: Array | None
    ) -> None:
        """Add the gradients of the tables that are added to the words, and of those where rows went in."""
        tables: dict[str | None, Array] = {} if self.word_table in found else {self.word_table: ids}
        tables[self.type_table] = np.zeros_like(ids) if types is None else types
        tables[self.position_table] = self._places(ids, cu_seqlens)
        for name, rows in tables.items():
            if name is not None:
                np.add.at(found.setdefault(name, np.zeros_like(self.arrays[name])), rows, dx)

    def _mask_gradient(self, found: Gradients, dmask: Array) -> None:
        """Add the gradient of the parameters of the mask."""

    # ------------------------------------------------------------------------------------------------- a classifier

    def _read_head(self, config: Config) -> None:
        if self.head is None:
            return
        labels = config.raw("id2label")
        if labels is not None and not isinstance(labels, dict):
            raise config.error(f"id2label must be names by number, not {labels!r:.80}")
        self.num_labels = config.size("num_labels", len(labels) if labels else 2)

    def _more_shapes(self) -> tuple[Shapes, bool]:
        d = self.hidden_size
        if self.head is None:
            return linear("pooler.dense", d, d) if self.has_pooler else {}, True
        first, _, second = self.head
        return linear(first, d, d) | linear(second, self.num_labels, d), False

    def _name(self, name: str) -> str:
        return name if self.head is None or "classifier" in name else self.prefix + name

    def _logits(self, ids: Array, cu_seqlens: Array, types: Array | None = None) -> Array:
        """Compute (sequences, num_labels)."""
        return self._head_vjp(self._rows(ids, cu_seqlens, "first", types))[0]

    def _head_vjp(self, rows: Array) -> tuple[Array, Callable[[Array], tuple[Array, Gradients]]]:
        """Compute logits of the first tokens' rows, and from their gradients those of the rows and of the head's parameters."""
        (first, activation, second), arrays = self._classifier(), self.arrays
        w, v = arrays[f"{first}.weight"], arrays[f"{second}.weight"]
        x = multiply(rows, w, arrays[f"{first}.bias"])
        active = np.tanh(x) if activation == "tanh" else np.maximum(x, 0)

        def pulled(dy: Array) -> tuple[Array, Gradients]:
            dx = dy @ v * (1 - active * active if activation == "tanh" else active > 0)
            of_weights = {f"{first}.weight": dx.T @ rows, f"{second}.weight": dy.T @ active}
            return dx @ w, of_weights | {f"{first}.bias": dx.sum(axis=0), f"{second}.bias": dy.sum(axis=0)}

        return multiply(active, v, arrays[f"{second}.bias"]), pulled

    def _classifier(self) -> tuple[str, str, str]:
        if self.head is None:
            one = "the folders of …ForSequenceClassification have one"
            raise TypeError(f"{type(self).__name__} has no classifier; {one}")
        return self.head
