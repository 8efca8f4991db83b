"""300 steps of nn.GPT by training.fit and by PyTorch's modules: same weights, batches, schedule, clipping."""

import numpy as np
import pytest
from nn_checks import torch_gpt

from selfattn import nn, training
from selfattn.optim import lr_scheduler

torch = pytest.importorskip("torch")

VOCABULARY, WIDTH, LENGTH, HEADS, LAYERS, STEPS = 11, 16, 12, 2, 2, 300
TEXT = np.random.default_rng(0).integers(0, VOCABULARY, 500)
TEXT[1::2] = (3 * TEXT[:-1:2] + 1) % VOCABULARY  # every other token follows from the one before


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
    """The products are too small for more threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-5)])
def test_three_hundred_steps_in_step_with_pytorch(dtype, tolerance):
    """A loss is a mean of 96 numbers; errors of a few eps were seen, 100 times that is allowed, since errors grow slowly."""
    torch.manual_seed(0)
    theirs = torch_gpt(VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH).to(getattr(torch, dtype))
    model = nn.GPT(VOCABULARY, WIDTH, LAYERS, HEADS, LENGTH, dtype=dtype, rng=0)
    model.load_state_dict({name: t.detach().numpy().copy() for name, t in theirs.state_dict().items()})
    history = training.fit(
        model, draw, steps=STEPS, lr=3e-3, rng=1, max_norm=1.0, log_every=None,
        scheduler=lambda optimizer: schedule(lr_scheduler, optimizer),
    )  # fmt: skip
    expected = losses_of(theirs)
    np.testing.assert_allclose(history.step_losses, expected, rtol=tolerance)
    assert history.step_losses[-1] < 0.75 * history.step_losses[0]
