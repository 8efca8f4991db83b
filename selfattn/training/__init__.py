"""Training: the loop for any model, checkpoints, and the triplets of sentence-embedding models.

>>> from selfattn import nn, training
>>> sentences = ["tom chases jerry", "jerry runs", "tom is tired", "harry reads", "harry sleeps", "it snows"]
>>> triplets = training.make_triplets(sentences, rng=0)
>>> words = sorted(set(" ".join(sentences).split()))
>>> def tokenize(sentence):
...     return [words.index(word) for word in sentence.split()]
>>> model = nn.EmbeddingModel(tokenize, len(words), 8, max_seq_len=8, rng=0)
>>> history = training.fit(nn.ProxyTask(model), triplets, epochs=20, lr=0.01, rng=0, log_every=None)
>>> history.epoch_losses[-1] < history.epoch_losses[0]
True
"""

from selfattn.training.fitting import fit
from selfattn.training.objectives import Task
from selfattn.training.state import Callback, EarlyStopping, History, Interrupted, Step
from selfattn.training.triplets import (
    SPLITS,
    Triplet,
    make_triplets,
    read_lines,
    read_pairs,
    read_sentences,
    read_triplets,
    split_sentences,
)

__all__ = [
    "SPLITS",
    "Callback",
    "EarlyStopping",
    "History",
    "Interrupted",
    "Step",
    "Task",
    "Triplet",
    "fit",
    "make_triplets",
    "read_lines",
    "read_pairs",
    "read_sentences",
    "read_triplets",
    "split_sentences",
]
