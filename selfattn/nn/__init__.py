"""Layers with parameters and gradients, named as in PyTorch; a ``state_dict`` saved there loads here.

>>> from selfattn import nn
>>> layer = nn.SelfAttentionBlock(8, num_heads=2, rng=0)
>>> x = [[0.0] * 8] * 5
>>> y, pullback = layer.vjp(x)
>>> dx, grads = pullback(y)
>>> grads["query.weight"].shape
(8, 8)

:class:`Module` describes what all layers take, return and refuse.
"""

from selfattn.nn import init
from selfattn.nn.containers import ModuleList, Sequential
from selfattn.nn.embedding_losses import CosineSimilarityLoss, MultipleNegativesRankingLoss, TripletLoss
from selfattn.nn.embedding_model import EmbeddingModel
from selfattn.nn.gpt import GPT
from selfattn.nn.layers import Dropout, Embedding, Linear
from selfattn.nn.losses import BCEWithLogitsLoss, CrossEntropyLoss, MSELoss
from selfattn.nn.module import IncompatibleKeys, Module, add_gradients
from selfattn.nn.multihead_attention import MultiheadAttention
from selfattn.nn.positions import LearnedPositions, RotaryEmbedding, SinusoidalPositions
from selfattn.nn.proxy_task import ProxyTask
from selfattn.nn.rows import GELU, LayerNorm, ReLU, RMSNorm, SiLU, Tanh
from selfattn.nn.scaled_dot_product_attention import ScaledDotProductAttention
from selfattn.nn.self_attention import SelfAttention, SelfAttentionBlock
from selfattn.nn.swiglu import SwiGLU
from selfattn.nn.transformer_decoder import TransformerDecoder, TransformerDecoderLayer
from selfattn.nn.transformer_encoder import TransformerEncoder, TransformerEncoderLayer

__all__ = [
    "GELU",
    "GPT",
    "BCEWithLogitsLoss",
    "CosineSimilarityLoss",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "EmbeddingModel",
    "IncompatibleKeys",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "MSELoss",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "MultipleNegativesRankingLoss",
    "ProxyTask",
    "RMSNorm",
    "ReLU",
    "RotaryEmbedding",
    "ScaledDotProductAttention",
    "SelfAttention",
    "SelfAttentionBlock",
    "Sequential",
    "SiLU",
    "SinusoidalPositions",
    "SwiGLU",
    "Tanh",
    "TransformerDecoder",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "TripletLoss",
    "add_gradients",
    "init",
]
