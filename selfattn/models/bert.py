"""BERT (MiniLM, BGE, E5, GTE and many others), and RoBERTa and XLM-R, whose positions begin at 2.

Devlin et al., "BERT", 2019; Liu et al., "RoBERTa", 2019; Conneau et al., "Unsupervised Cross-lingual Representation Learning
at Scale", 2020.
"""

from __future__ import annotations

from typing import ClassVar

from selfattn.engine.transformer import Transformer
from selfattn.models._classifier import Classifier
from selfattn.models._config import Config
from selfattn.models._encoder import Parameters, Shapes, linear, norm
from selfattn.models._post_norm import PostNormEncoder


class BertModel(PostNormEncoder):
    """BERT's encoder, under the names of ``transformers.BertModel``. See :func:`selfattn.models.load`.

    Examples
    --------
    >>> from selfattn import models
    >>> config = {
    ...     "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
    ... }
    >>> model = models.BertModel(config, rng=0)
    >>> model.encode([[1, 2, 3], [4, 5]]).shape
    (2, 8)
    >>> [state.shape for state in model.hidden_states([1, 2, 3])]
    [(3, 8), (3, 8), (3, 8)]
    >>> list(model.parameters())[5]
    'encoder.layer.0.attention.self.query.weight'
    """

    kinds: ClassVar[dict[str, str]] = {"bert": "Bert"}
    prefix = "bert."
    type_table = "embeddings.token_type_embeddings.weight"
    layer_name = "encoder.layer."
    projections = (
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
    )
    feed_forward = ("intermediate.dense", "output.dense")
    norms = ("attention.output.LayerNorm", "output.LayerNorm")

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("hidden_size")
        self.num_layers = config.size("num_hidden_layers", least=0)
        self.num_heads = config.size("num_attention_heads")
        self.intermediate_size = config.size("intermediate_size")
        self.activation = config.activation("hidden_act")
        self.positions = config.size("max_position_embeddings", 512)
        self.max_positions = self.positions - self.first_position
        self.types = config.size("type_vocab_size", 2)
        self.eps = config.number("layer_norm_eps", 1e-12)
        config.only("position_embedding_type", "absolute")
        config.only("is_decoder", False)
        config.only("add_cross_attention", False)
        if self.hidden_size % self.num_heads or self.max_positions < 1:
            raise ValueError(
                f"{config.where}: hidden_size {self.hidden_size} must be a multiple of num_attention_heads {self.num_heads}, and "
                f"max_position_embeddings more than {self.first_position}, not {self.positions}"
            )

    def _shapes(self) -> tuple[Shapes, set[str]]:
        d = self.hidden_size
        shapes: Shapes = {
            self.word_table: (self.vocab_size, d),
            "embeddings.position_embeddings.weight": (self.positions, d),
            "embeddings.token_type_embeddings.weight": (self.types, d),
        } | norm("embeddings.LayerNorm", d)
        shapes |= self._layer_shapes()
        pooler = linear("pooler.dense", d, d)
        return shapes | pooler, set(pooler)

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        positions = self.arrays["embeddings.position_embeddings.weight"][self.first_position :]
        types = self.arrays["embeddings.token_type_embeddings.weight"]
        return Transformer(
            self._layers(p),
            table=p.weight(self.word_table),
            always=types[0],
            positions=positions,
            embedding_norm=p.norm("embeddings.LayerNorm", self.eps),
        )


class RobertaModel(BertModel):
    """RoBERTa's and XLM-R's encoder, under the names of ``transformers.RobertaModel``: BERT, but for its first position."""

    kinds: ClassVar[dict[str, str]] = {
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "camembert": "Camembert",
    }
    prefix = "roberta."

    def _read(self, config: Config) -> None:
        self.first_position = 1 + config.size("pad_token_id", 1, least=0)
        super()._read(config)


class BertForSequenceClassification(Classifier, BertModel):
    """BERT with a classifier on the pooled first token: ``classifier(tanh(pooler(x[0])))``."""

    head = ("pooler.dense", "tanh", "classifier")


class RobertaForSequenceClassification(Classifier, RobertaModel):
    """RoBERTa with a classifier on the first token: ``out_proj(tanh(dense(x[0])))``."""

    head = ("classifier.dense", "tanh", "classifier.out_proj")
