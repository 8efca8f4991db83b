"""What is refused has changed nothing: a checkpoint, or the state of a module, an optimiser or a schedule."""

import copy
import random

import numpy as np
import pytest

from selfattn import nn, optim
from selfattn.optim import lr_scheduler
from selfattn.training import checkpoint, fit
from selfattn.training.generators import generator_state

X = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
BATCHES = [(X[i : i + 4], X[i : i + 4, :2]) for i in range(0, 12, 4)]
WRONG = [None, "x", -1, 2.5, True, [], {}, [1, 2, 3], np.zeros((1, 7)), 2**80]


class Parts:
    """A model, an optimiser, a schedule of several and a generator, each with a state."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.model = nn.Sequential(
            nn.Linear(3, 4, rng=seed),
            nn.Dropout(0.5, rng=np.random.default_rng(seed)),
            nn.Linear(4, 2, rng=seed),
        )
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.1)
        each = [lr_scheduler.LinearLR(self.optimizer), lr_scheduler.CosineAnnealingLR(self.optimizer, 9)]
        self.scheduler = lr_scheduler.SequentialLR(self.optimizer, each, [2])

    def fit(self, epochs, **options):
        more = {"optimizer": self.optimizer, "scheduler": self.scheduler, "rng": self.rng, "progress": False}
        fit(self.model, BATCHES, nn.MSELoss(), epochs=epochs, **more, **options)

    def state(self):
        states = [each.state_dict() for each in (self.model, self.optimizer, self.scheduler)]
        return checkpoint.digest([*states, generator_state(self.rng), generator_state(self.model[1].rng)])


def damaged(tree, draw):
    """A copy of a tree of dicts and lists in which one node is missing or has a value of another kind."""
    tree = node = copy.deepcopy(tree)
    while True:
        key = draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node))
        if not isinstance(node[key], dict | list) or not node[key] or draw.random() < 0.2:
            break
        node = node[key]
    if draw.random() < 0.3:
        del node[key]
    else:
        node[key] = draw.choice(WRONG)
    return tree


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler"])
def test_a_refused_state_changes_nothing(kind):
    parts, other, draw, refused = Parts(0), Parts(1), random.Random(0), 0
    parts.fit(1), other.fit(2)
    saved = getattr(other, kind).state_dict()
    for _ in range(100):
        before = parts.state()
        try:
            getattr(parts, kind).load_state_dict(damaged(saved, draw))
        except (TypeError, ValueError):
            refused += 1
            assert parts.state() == before
    assert refused > 50


def test_a_refused_checkpoint_changes_nothing(tmp_path):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    file, draw, refused = tmp_path / "c", random.Random(0), 0
    Parts(0).fit(2, checkpoint=file)
    saved = checkpoint.load(file)
    parts = Parts(1)
    parts.fit(1)
    for _ in range(200):
        before = parts.state()
        checkpoint.save(file, damaged(saved, draw))
        try:
            parts.fit(2, checkpoint=file, resume=True)
        except ValueError:
            refused += 1
            assert parts.state() == before
    assert refused > 100


def test_every_bit_of_a_checkpoint_counts(tmp_path):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    file, draw = tmp_path / "c", random.Random(0)
    Parts(0).fit(1, checkpoint=file)
    content = file.read_bytes()
    for _ in range(300):
        wrong = bytearray(content)
        wrong[draw.randrange(len(wrong))] ^= 1 << draw.randrange(8)
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"c(' | )(is|holds|has|:)"):
            checkpoint.load(file)


def test_a_checkpoint_of_an_older_version_says_that_it_has_no_checksum(tmp_path):
    pytest.importorskip("safetensors", reason="the extra 'text' is not installed")
    from selfattn import _disk

    file, parts = tmp_path / "c", Parts(0)
    parts.fit(1, checkpoint=file)
    arrays, metadata = _disk.read_safetensors(file)
    old = {"format": checkpoint.WITHOUT_DIGEST, "tree": metadata["tree"]}
    file.write_bytes(_disk.to_safetensors(arrays, old))
    with pytest.warns(UserWarning, match="without a checksum"):
        Parts(1).fit(1, checkpoint=file, resume=True)
