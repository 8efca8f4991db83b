"""300 steps of a GPT made of layers, by training.fit and by PyTorch's modules: same weights, batches, schedule, clipping."""

import numpy as np
import pytest

from selfattn import nn, training
from selfattn.optim import lr_scheduler

torch = pytest.importorskip("torch")

VOCABULARY, WIDTH, LENGTH, HEADS, LAYERS, STEPS = 11, 16, 12, 2, 2, 300
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 500)
TEXT[1::2] = (3 * TEXT[:-1:2] + 1) % VOCABULARY  # every other token can be known


class GPT(nn.Module):
    def __init__(self, dtype):
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True, dtype=dtype
        )
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, dtype=dtype)
        self.positions = nn.LearnedPositions(WIDTH, LENGTH, dtype=dtype)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH, dtype=dtype))
        self.head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
        self.chain = [self.tokens, self.positions, self.blocks, self.head]

    def loss_vjp(self, ids):
        logits, pullback = nn.Sequential(*self.chain).vjp(ids[:, :-1], is_causal=True)
        value, loss_pullback = nn.CrossEntropyLoss().vjp(
            logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1)
        )

        def back(d):
            grads = pullback(loss_pullback(d).reshape(logits.shape))
            names = dict(zip("0123", ["tokens", "positions", "blocks", "head"], strict=True))
            return {names[name[0]] + name[1:]: gradient for name, gradient in grads.items()}

        return value, back


class Theirs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.tokens = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.positions = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.TransformerEncoder(
            layer, LAYERS, torch.nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(LENGTH))
        mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=x.dtype)
        return self.head(self.blocks(x, mask, is_causal=True))


def draw(rng):
    starts = rng.integers(0, len(TEXT) // 2 - LENGTH, 8) * 2
    return TEXT[starts[:, None] + np.arange(LENGTH + 1)]


def schedule(module, optimizer):
    warmup = module.LinearLR(optimizer, 0.1, total_iters=20)
    return module.SequentialLR(optimizer, [warmup, module.CosineAnnealingLR(optimizer, STEPS - 20)], [20])


def losses_of(theirs):
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=3e-3)
    scheduler = schedule(torch.optim.lr_scheduler, optimizer)
    rng, losses = np.random.default_rng(1), []
    for _ in range(STEPS):
        ids = torch.tensor(draw(rng))
        logits = theirs(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def _one_thread():
    """These products are too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-5)])
def test_three_hundred_steps_in_step_with_pytorch(dtype, tolerance):
    """A loss is the mean of 96; a few eps are seen, and a hundred times as many allowed: paths of trainings part slowly."""
    torch.manual_seed(0)
    theirs = Theirs().to(getattr(torch, dtype))
    model = GPT(np.dtype(dtype))
    assert list(model.state_dict()) == [name for name, _ in theirs.named_parameters()]
    model.load_state_dict({name: t.detach().numpy().copy() for name, t in theirs.state_dict().items()})
    history = training.fit(
        model, draw, steps=STEPS, lr=3e-3, rng=1, max_norm=1.0, log_every=None,
        scheduler=lambda optimizer: schedule(lr_scheduler, optimizer),
    )  # fmt: skip
    expected = losses_of(theirs)
    np.testing.assert_allclose(history.step_losses, expected, rtol=tolerance)
    assert history.step_losses[-1] < 0.75 * history.step_losses[0]
