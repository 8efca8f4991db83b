"""The sentence-embedding model in PyTorch, to compare with: the same parameters, drawn in the same order."""

import math

import torch
from torch import nn
from torch.nn import functional


class TorchBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.ln = nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for layer in (self.query, self.key, self.value)
        )
        weights = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1)
        return self.ln((weights @ v).transpose(0, 1).flatten(1) + x)


class TorchEmbeddingModel(nn.Module):
    def __init__(self, vocab_size, width, max_seq_len, num_layers=1, num_heads=1):
        super().__init__()
        self.embedding_layer = nn.Embedding(vocab_size, width)
        self.attention_layers = nn.ModuleList(TorchBlock(width, num_heads) for _ in range(num_layers))
        place = torch.arange(max_seq_len, dtype=torch.float64)[:, None]
        rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
        self.table = torch.stack([torch.sin(place * rate), torch.cos(place * rate)], dim=-1).flatten(1)

    def forward(self, ids):
        ids = torch.as_tensor(ids[: len(self.table)])
        x = self.embedding_layer(ids)
        x = x + self.table[: len(ids)].to(x.dtype)
        for block in self.attention_layers:
            x = block(x)
        return x.mean(0)

    def confidence(self, main, similar, non_similar):
        main, similar, non_similar = (self(ids) for ids in (main, similar, non_similar))
        return functional.logsigmoid(main @ similar) + functional.logsigmoid(-(main @ non_similar))
