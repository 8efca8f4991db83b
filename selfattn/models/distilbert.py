"""DistilBERT: BERT's layers under other names, without token types and pooler. Sanh et al., 2019."""

from __future__ import annotations

from typing import ClassVar

from selfattn.models._classifier import Classifier
from selfattn.models._config import Config
from selfattn.models._encoder import Parameters, Shapes, TextEncoder, linear, norm
from selfattn.nn._transformer import Layer, Transformer


class DistilBertModel(TextEncoder):
    """DistilBERT's encoder, under the names of ``transformers.DistilBertModel``. See :func:`selfattn.models.load`."""

    kinds: ClassVar[dict[str, str]] = {"distilbert": "DistilBert"}
    prefix = "distilbert."
    word_table = "embeddings.word_embeddings.weight"
    position_table = "embeddings.position_embeddings.weight"
    eps = 1e-12

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("dim")
        self.num_layers = config.size("n_layers", least=0)
        self.num_heads = config.size("n_heads")
        self.wide = config.size("hidden_dim")
        self.activation = config.activation("activation")
        self.max_positions = config.size("max_position_embeddings", 512)
        config.raw("sinusoidal_pos_embds")  # how the table began; it is stored
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"{config.where}: dim {self.hidden_size} must be a multiple of n_heads {self.num_heads}"
            )

    def _shapes(self) -> tuple[Shapes, set[str]]:
        d = self.hidden_size
        shapes: Shapes = {
            self.word_table: (self.vocab_size, d),
            "embeddings.position_embeddings.weight": (self.max_positions, d),
        }
        shapes |= norm("embeddings.LayerNorm", d)
        for n in range(self.num_layers):
            name = f"transformer.layer.{n}."
            for part in ("q_lin", "k_lin", "v_lin", "out_lin"):
                shapes |= linear(f"{name}attention.{part}", d, d)
            shapes |= norm(f"{name}sa_layer_norm", d) | linear(f"{name}ffn.lin1", self.wide, d)
            shapes |= linear(f"{name}ffn.lin2", d, self.wide) | norm(f"{name}output_layer_norm", d)
        return shapes, set()

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            tuple(self._layer(p, f"transformer.layer.{n}.") for n in range(self.num_layers)),
            table=p.array(self.word_table),
            positions=self.arrays["embeddings.position_embeddings.weight"],
            embedding_norm=p.norm("embeddings.LayerNorm", self.eps),
        )

    def _layer(self, p: Parameters, name: str) -> Layer:
        lins = ("q_lin", "k_lin", "v_lin", "out_lin")
        query, key, value, output = (p.projection(f"{name}attention.{part}") for part in lins)
        return Layer(
            self.num_heads,
            query,
            key,
            value,
            output,
            p.norm(f"{name}sa_layer_norm", self.eps),
            up=p.projection(f"{name}ffn.lin1"),
            down=p.projection(f"{name}ffn.lin2"),
            feed_forward_norm=p.norm(f"{name}output_layer_norm", self.eps),
            activation=self.activation,
        )


class DistilBertForSequenceClassification(Classifier, DistilBertModel):
    """DistilBERT with a classifier on the first token: ``classifier(relu(pre_classifier(x[0])))``."""

    head = ("pre_classifier", "relu", "classifier")
