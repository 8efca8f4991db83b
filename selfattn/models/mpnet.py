"""MPNet: BERT's layers, and a bias for the distance of two tokens in buckets, which all layers share. Song et al., 2020."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.lib.stride_tricks import as_strided

from selfattn._check import Array
from selfattn.engine.transformer import Transformer
from selfattn.models._config import Config
from selfattn.models._encoder import Parameters, Shapes, linear, norm
from selfattn.models._post_norm import PostNormEncoder
from selfattn.nn.module import Gradients

BUCKETS, MOST_DISTANCE = 32, 128


class MPNetModel(PostNormEncoder):
    """MPNet's encoder, under the names of ``transformers.MPNetModel``. See :func:`selfattn.models.load`."""

    kinds: ClassVar[dict[str, str]] = {"mpnet": "MPNet"}
    prefix = "mpnet."
    has_fixed_settings = False
    layer_name = "encoder.layer."
    projections = ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o")
    feed_forward = ("intermediate.dense", "output.dense")
    norms = ("attention.LayerNorm", "output.LayerNorm")
    bias_table = "encoder.relative_attention_bias.weight"

    def _read(self, config: Config) -> None:
        self.vocab_size = config.size("vocab_size")
        self.hidden_size = config.size("hidden_size")
        self.num_layers = config.size("num_hidden_layers", least=0)
        self.num_heads = config.size("num_attention_heads")
        self.intermediate_size = config.size("intermediate_size")
        self.activation = config.activation("hidden_act")
        self.positions = config.size("max_position_embeddings", 512)
        config.only("relative_attention_num_buckets", 32)  # as Transformers computes
        self.eps = config.number("layer_norm_eps", 1e-12)
        self.first_position = 1 + config.size("pad_token_id", 1, least=0)
        self.max_positions = self.positions - self.first_position
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
        }
        shapes |= norm("embeddings.LayerNorm", d)
        shapes |= self._layer_shapes()
        pooler = linear("pooler.dense", d, d)
        return shapes | {self.bias_table: (BUCKETS, self.num_heads)} | pooler, set(pooler)

    def _settings(self, p: Parameters, longest: int) -> Transformer:
        # Of each head a number for every distance from 1 − longest to longest − 1; row i of the mask begins at −i.
        line = np.ascontiguousarray(self.arrays[self.bias_table][self._buckets(longest)].T)
        step = line.itemsize
        mask = as_strided(
            line[:, longest - 1 :],
            (1, self.num_heads, longest, longest),
            (0, line.strides[0], -step, step),
            writeable=False,
        )
        return Transformer(
            self._layers(p),
            table=p.weight(self.word_table),
            positions=self.arrays["embeddings.position_embeddings.weight"][self.first_position :],
            embedding_norm=p.norm("embeddings.LayerNorm", self.eps),
            mask=mask,
        )

    def _buckets(self, longest: int) -> Array:
        """Return the bucket of every distance key − query, from 1 − longest on.

        T5's, both ways: half of the buckets are for keys behind the query; of those the first half are exact
        distances, the rest logarithmic up to 128 (Raffel et al., 2020, section 2.1). As there, in float32.
        """
        distance = np.arange(1 - longest, longest)
        half = BUCKETS // 2
        exact, far = half // 2, np.abs(distance)
        with np.errstate(divide="ignore"):
            ratio = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(
                np.log(MOST_DISTANCE / exact)
            )
        large = exact + np.nan_to_num(ratio * np.float32(half - exact), neginf=0).astype(np.int64)
        found: Array = np.where(distance > 0, half, 0) + np.where(
            far < exact, far, np.minimum(large, half - 1)
        )
        return found

    def _mask_gradient(self, found: Gradients, dmask: Array) -> None:
        heads, longest, _ = dmask.shape
        line = np.zeros((2 * longest - 1, heads), dmask.dtype)
        for i in range(longest):
            line[longest - 1 - i : 2 * longest - 1 - i] += dmask[:, i].T
        np.add.at(
            found.setdefault(self.bias_table, np.zeros_like(self.arrays[self.bias_table])),
            self._buckets(longest),
            line,
        )
