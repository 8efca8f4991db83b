"""BERT (MiniLM, BGE, E5, GTE and many others), RoBERTa and XLM-R, whose positions begin at 2, DistilBERT and MPNet.

All have BERT's layers, each norm after its sum. Devlin et al., "BERT", 2019; Liu et al., "RoBERTa", 2019; Conneau et
al., "Unsupervised Cross-lingual Representation Learning at Scale", 2020; Sanh et al., "DistilBERT", 2019; Song et
al., "MPNet", 2020.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from selfattn.engine import Array
from selfattn.engine.transformer import Transformer
from selfattn.functional import relative_position_bias, relative_position_bias_vjp
from selfattn.nn.module import Gradients
from selfattn_models._classifier import TextClassifier
from selfattn_models._folder import Config
from selfattn_models._pretrained import Parameters
from selfattn_models._text_encoder import TextEncoder

BUCKETS = 32  # MPNet's


class BertModel(TextEncoder):
    """BERT's encoder, under the names of ``transformers.BertModel``. See :func:`selfattn_models.load`.

    Examples
    --------
    >>> import selfattn_models as models
    >>> config = {
    ...     "vocab_size": 50, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    ...     "intermediate_size": 16,
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
    word_table = "embeddings.word_embeddings.weight"
    type_table: ClassVar[str | None] = "embeddings.token_type_embeddings.weight"
    position_table: ClassVar[str] = "embeddings.position_embeddings.weight"
    # Width, number of layers, number of heads, width of the feed-forward network, its activation.
    keys: ClassVar[tuple[str, str, str, str, str]] = (
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "hidden_act",
    )
    layer_name = "encoder.layer."
    fields: ClassVar[dict[str, str]] = {
        "query": "attention.self.query",
        "key": "attention.self.key",
        "value": "attention.self.value",
        "output": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    }
    has_pooler = True
    has_eps: ClassVar[bool] = True  # configurations may say the norms' eps

    def _read(self, config: Config) -> None:
        width, layers, heads, wide, activation = self.keys
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size(width)
        self.num_layers = config.size(layers, least=0)
        self.num_heads = config.size(heads)
        self.intermediate_size = config.size(wide)
        self.wide = self.intermediate_size
        self.activation = config.activation(activation)
        self.positions = config.size("max_position_embeddings", 512)
        self.max_positions = self.positions - self.first_position
        self.eps = config.number("layer_norm_eps", 1e-12) if self.has_eps else 1e-12
        self.types = config.size("type_vocab_size", 2) if self.type_table else 1
        config.check_multiple(width, self.hidden_size, heads, self.num_heads)
        if self.max_positions < 1:
            least = f"more than {self.first_position}"
            raise config.error(f"max_position_embeddings must be {least}, not {self.positions}")

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        d = self.hidden_size
        return Transformer(
            table=p.weight(self.word_table, self.vocab_size, d),
            positions=p.array(self.position_table, self.positions, d)[self.first_position :],
            token_type_row=None if self.type_table is None else p.array(self.type_table, self.types, d)[0],
            embedding_norm=self._norm(p, "embeddings.LayerNorm", self.hidden_size),
            layers=self._layers(p, longest),
        )


class RobertaModel(BertModel):
    """RoBERTa's and XLM-R's encoder, named as in ``transformers.RobertaModel``: BERT, but for its first position."""

    kinds: ClassVar[dict[str, str]] = {
        "roberta": "Roberta",
        "xlm-roberta": "XLMRoberta",
        "camembert": "Camembert",
    }
    prefix = "roberta."

    def _read(self, config: Config) -> None:
        # MPNet's is 1 in Transformers, too, whatever pad_token_id is.
        self.pad = 1 if "mpnet" in self.kinds else config.size("pad_token_id", 1, least=0)
        self.first_position = 1 + self.pad
        super()._read(config)


class DistilBertModel(BertModel):
    """DistilBERT's encoder, named as in ``transformers.DistilBertModel``: BERT without token types and pooler."""

    kinds: ClassVar[dict[str, str]] = {"distilbert": "DistilBert"}
    prefix = "distilbert."
    type_table = None
    keys = ("dim", "n_layers", "n_heads", "hidden_dim", "activation")
    layer_name = "transformer.layer."
    fields: ClassVar[dict[str, str]] = {
        "query": "attention.q_lin",
        "key": "attention.k_lin",
        "value": "attention.v_lin",
        "output": "attention.out_lin",
        "attention_norm": "sa_layer_norm",
        "up": "ffn.lin1",
        "down": "ffn.lin2",
        "feed_forward_norm": "output_layer_norm",
    }
    has_pooler = has_eps = False


class MPNetModel(RobertaModel):
    """MPNet's encoder, under the names of ``transformers.MPNetModel``.

    It is RoBERTa without token types, with a bias that depends on the distance of two tokens, in buckets; all layers
    share it.
    """

    kinds: ClassVar[dict[str, str]] = {"mpnet": "MPNet"}
    prefix = "mpnet."
    has_fixed_settings = False
    type_table = None
    fields: ClassVar[dict[str, str]] = BertModel.fields | {
        "query": "attention.attn.q",
        "key": "attention.attn.k",
        "value": "attention.attn.v",
        "output": "attention.attn.o",
        "attention_norm": "attention.LayerNorm",
    }
    bias_table = "encoder.relative_attention_bias.weight"

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        settings, table = super()._settings(p, longest), p.array(self.bias_table, BUCKETS, self.num_heads)
        # Each head has a number for every distance from 1 − longest to longest − 1; row i of the mask begins at −i.
        line = relative_position_bias(table, longest, longest)
        shape = (1, self.num_heads, longest, longest)
        strides = (0, line.strides[0], -line.itemsize, line.itemsize)
        mask = as_strided(line[:, longest - 1 :], shape, strides, writeable=False)
        return settings._replace(position_bias=mask)

    def _mask_gradient(self, found: Gradients, dmask: Array) -> None:
        heads, longest, _ = dmask.shape
        table = self.arrays[self.bias_table]
        _, pullback = relative_position_bias_vjp(table, longest, longest)
        line = np.zeros((heads, 2 * longest - 1), dmask.dtype)
        for i in range(longest):
            line[:, longest - 1 - i : 2 * longest - 1 - i] += dmask[:, i]
        grad = found.setdefault(self.bias_table, np.zeros_like(table))
        grad += pullback(line)


class BertForSequenceClassification(TextClassifier, BertModel):
    """BERT with a classifier on the pooled first token: ``classifier(tanh(pooler(x[0])))``."""

    head = ("pooler.dense", "tanh", "classifier")


class RobertaForSequenceClassification(TextClassifier, RobertaModel):
    """RoBERTa with a classifier on the first token: ``out_proj(tanh(dense(x[0])))``."""

    head = ("classifier.dense", "tanh", "classifier.out_proj")


class DistilBertForSequenceClassification(TextClassifier, DistilBertModel):
    """DistilBERT with a classifier on the first token: ``classifier(relu(pre_classifier(x[0])))``."""

    head = ("pre_classifier", "relu", "classifier")
