"""What BERT, DistilBERT and MPNet share: layers of attention and feed-forward, each with its norm behind the sum."""

from __future__ import annotations

from typing import Any, ClassVar

from selfattn.engine.transformer import Layer
from selfattn.models._encoder import Parameters, Shapes, TextEncoder, linear, norm


class PostNormEncoder(TextEncoder):
    """An encoder of such layers. Subclasses name the parts of a layer."""

    layer_name: ClassVar[str]  # of all layers, before their numbers
    projections: ClassVar[tuple[str, str, str, str]]  # of query, key, value and output
    feed_forward: ClassVar[tuple[str, str]]
    norms: ClassVar[tuple[str, str]]  # behind attention and behind feed-forward
    word_table = "embeddings.word_embeddings.weight"
    position_table = "embeddings.position_embeddings.weight"
    num_heads: int
    intermediate_size: int
    activation: Any
    eps: float

    def _layer_shapes(self) -> Shapes:
        """Return the shapes of all layers' parameters."""
        d, wide = self.hidden_size, self.intermediate_size
        up, down = self.feed_forward
        shapes: Shapes = {}
        for n in range(self.num_layers):
            name = f"{self.layer_name}{n}."
            for part in self.projections:
                shapes |= linear(name + part, d, d)
            shapes |= norm(name + self.norms[0], d)
            shapes |= linear(name + up, wide, d) | linear(name + down, d, wide)
            shapes |= norm(name + self.norms[1], d)
        return shapes

    def _layers(self, p: Parameters) -> tuple[Layer, ...]:
        return tuple(self._layer(p, f"{self.layer_name}{n}.") for n in range(self.num_layers))

    def _layer(self, p: Parameters, name: str) -> Layer:
        query, key, value, output = (p.projection(name + part) for part in self.projections)
        return Layer(
            self.num_heads,
            query,
            key,
            value,
            output,
            p.norm(name + self.norms[0], self.eps),
            up=p.projection(name + self.feed_forward[0]),
            down=p.projection(name + self.feed_forward[1]),
            feed_forward_norm=p.norm(name + self.norms[1], self.eps),
            activation=self.activation,
        )
