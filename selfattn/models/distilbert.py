"""DistilBERT: BERT's layers under other names, without token types and pooler. Sanh et al., 2019."""

from __future__ import annotations

from typing import ClassVar

from selfattn.engine.transformer import Transformer
from selfattn.models._classifier import Classifier
from selfattn.models._config import Config
from selfattn.models._encoder import Parameters, Shapes, norm
from selfattn.models._post_norm import PostNormEncoder


class DistilBertModel(PostNormEncoder):
    """DistilBERT's encoder, under the names of ``transformers.DistilBertModel``. See :func:`selfattn.models.load`."""

    kinds: ClassVar[dict[str, str]] = {"distilbert": "DistilBert"}
    prefix = "distilbert."
    layer_name = "transformer.layer."
    projections = ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin")
    feed_forward = ("ffn.lin1", "ffn.lin2")
    norms = ("sa_layer_norm", "output_layer_norm")
    eps = 1e-12

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("dim")
        self.num_layers = config.size("n_layers", least=0)
        self.num_heads = config.size("n_heads")
        self.intermediate_size = config.size("hidden_dim")
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
        shapes |= self._layer_shapes()
        return shapes, set()

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        return Transformer(
            self._layers(p),
            table=p.weight(self.word_table),
            positions=self.arrays["embeddings.position_embeddings.weight"],
            embedding_norm=p.norm("embeddings.LayerNorm", self.eps),
        )


class DistilBertForSequenceClassification(Classifier, DistilBertModel):
    """DistilBERT with a classifier on the first token: ``classifier(relu(pre_classifier(x[0])))``."""

    head = ("pre_classifier", "relu", "classifier")
