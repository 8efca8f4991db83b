"""Layers, optimisers and data sets: the same numbers and texts as PyTorch's for a seed."""

import numpy as np
import pytest

from selfattn import nn as layers
from selfattn import tape, training
from selfattn.tape import nn
from selfattn.tape.utils import data


def drawn(t, data):
    """Draw from everything that draws, after one seed."""
    t.manual_seed(0)
    loader = data.DataLoader([10, 20, 30, 40, 50], batch_size=2, shuffle=True)
    yield [[batch.tolist() for batch in loader] for _ in range(3)]
    yield [list(part.indices) for part in data.random_split(list(range(10)), [7, 3])]
    own = t.Generator()
    own.manual_seed(5)
    yield [list(part.indices) for part in data.random_split(list(range(10)), [0.5, 0.5], generator=own)]
    rows = data.TensorDataset(t.arange(10).view(5, 2), t.arange(5))
    yield [
        [x.tolist() for x in pair]
        for pair in data.DataLoader(rows, 2, shuffle=True, drop_last=True, generator=own)
    ]
    yield t.randint(0, 9, (3,)).tolist(), t.rand(2).tolist(), t.randperm(5).tolist(), t.randn(7).tolist()
    for layer in (t.nn.Linear(3, 2), t.nn.Embedding(3, 2, padding_idx=0), t.nn.MultiheadAttention(4, 2)):
        yield [(name, x.tolist()) for name, x in layer.state_dict().items()]
    weight = t.empty(3, 4)
    for fill in (t.nn.init.xavier_uniform_, t.nn.init.kaiming_uniform_, t.nn.init.uniform_, t.nn.init.ones_):
        yield fill(weight).tolist()


def test_a_seed_draws_what_it_draws_in_pytorch():
    torch = pytest.importorskip("torch")
    from torch.utils import data as torch_data

    for mine, theirs in zip(drawn(tape, data), drawn(torch, torch_data), strict=True):
        assert mine == theirs


def shown(nn):
    return nn.Sequential(
        nn.Embedding(3, 4, padding_idx=1),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.Dropout(0.1),
        nn.Sequential(
            nn.GELU(), nn.ReLU(inplace=True), nn.Softmax(dim=-1), nn.LeakyReLU(), nn.ELU(), nn.SiLU()
        ),
        nn.ModuleList([nn.Linear(2, 2) for _ in range(3)] + [nn.Linear(2, 3, bias=False)]),
        nn.ModuleDict({"a": nn.Identity(), "b": nn.Flatten()}),
        nn.CrossEntropyLoss(),
        nn.Softplus(),
    )


def test_reprs_and_names_are_pytorchs():
    torch = pytest.importorskip("torch")
    mine, theirs = shown(nn), shown(torch.nn)
    assert repr(mine) == repr(theirs)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert [name for name, _ in mine.named_modules()] == [name for name, _ in theirs.named_modules()]


@pytest.mark.parametrize("batch_first", [False, True])
def test_multihead_attention(batch_first):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 3, 8), dtype=np.float32)
    padding, closed = np.zeros((3, 3), bool), np.triu(np.ones((3, 3), bool), 1)
    padding[0, -1] = True
    settings = [
        {},
        {"need_weights": False, "attn_mask": closed},
        {"key_padding_mask": padding, "attn_mask": closed, "average_attn_weights": False},
        {"attn_mask": rng.standard_normal((6, 3, 3), dtype=np.float32)},
    ]
    made = [module.nn.MultiheadAttention(8, 2, batch_first=batch_first) for module in (tape, torch)]
    made[0].load_state_dict(made[1].state_dict())
    for options in settings:
        found = []
        for module, layer in zip((tape, torch), made, strict=True):
            t = module.tensor(x, requires_grad=True)
            own = {name: module.tensor(o) if isinstance(o, np.ndarray) else o for name, o in options.items()}
            out, weights = layer(t, t, t, **own)
            out.square().sum().backward()
            found.append([out.detach(), t.grad, *([] if weights is None else [weights.detach()])])
        for mine, theirs in zip(*found, strict=True):
            np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------- the array side


class Scale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(4, width)
        self.factor = nn.Parameter(tape.ones(width))
        self.register_buffer("shift", tape.zeros(width))

    def forward(self, x):
        return tape.tanh(self.inner(x)) * self.factor + self.shift


def test_fit_trains_a_module_with_a_forward_alone():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 20, 4), dtype=np.float32)
    tape.manual_seed(0)
    model = Scale(4)
    training.fit(model, [(x, y)] * 4, layers.MSELoss(), 1, lr=1e-2, log_every=None, progress=False)
    tape.manual_seed(0)
    model = Scale(4)
    optimizer = tape.optim.Adam(model.parameters(), lr=1e-2)
    history = training.fit(
        model, [(x, y)] * 4, layers.MSELoss(), 5, optimizer=optimizer, log_every=None, progress=False
    )
    tape.manual_seed(0)
    model = Scale(4)
    optimizer = tape.optim.Adam(model.parameters(), lr=1e-2)
    for expected in history.step_losses:
        loss = nn.functional.mse_loss(model(tape.tensor(x)), tape.tensor(y))
        assert abs(loss.item() - expected) <= 1e-6
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def test_a_module_is_a_layer_of_arrays():
    from selfattn.functional import check_vjp

    chain = layers.Sequential(Scale(4).double(), layers.Linear(4, 2, dtype=np.float64, rng=0))
    x = np.random.default_rng(0).standard_normal((3, 4))
    check_vjp(lambda x: (lambda y, pullback: (y, lambda dy: pullback(dy)[0]))(*chain.vjp(x)), x)
    y, pullback = chain.vjp(x)
    assert list(pullback(y)[1]) == list(chain.parameters())
    np.testing.assert_array_equal(pullback(y)[0], pullback(y)[0])  # it may be called again
    ids = nn.Embedding(5, 3)
    y, pullback = ids.vjp([1, 1, 2])
    assert pullback(np.ones_like(y))["weight"][:, 0].tolist() == [0, 2, 1, 0, 0]
    with pytest.raises(NotImplementedError, match=r"selfattn\.tape\.nn"):
        type("Plain", (layers.Module,), {"forward": lambda self, x: x})().vjp(x)


def test_tied_parameters_are_one():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    assert len(list(model.parameters())) == 1
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    model(tape.tensor([1])).sum().backward()
    optimizer = tape.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert model[0].weight.equal(before - 0.1 * model[0].weight.grad)


def test_steps_of_the_attention_in_a_module():
    class Causal(nn.Module):
        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    (steps,) = Causal().steps(np.ones((3, 4), np.float32))
    np.testing.assert_allclose(
        steps.weights, [[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]], rtol=1e-6
    )


def test_groups_schedules_and_clipping():
    model = nn.Linear(3, 2)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "lr": 1.0}]
    optimizer = tape.optim.AdamW(groups, lr=0.5, weight_decay=0.0)
    schedule = tape.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model(tape.ones(1, 3)).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert abs(norm.item() - 8**0.5) < 1e-6
    assert abs(sum((p.grad**2).sum().item() for p in model.parameters()) - 0.25) < 1e-5
    before = model(tape.ones(1, 3, requires_grad=True)).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.backward()
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.5]
    optimizer.zero_grad()
    assert model.weight.grad is None


def test_refused_assignments():
    layer = nn.Linear(3, 2)
    with pytest.raises(TypeError, match="cannot assign Tensor as parameter 'weight'"):
        layer.weight = tape.ones(2, 3)
    with pytest.raises(RuntimeError, match=r"Missing key.*bias.*\n.*size mismatch for weight"):
        layer.load_state_dict({"weight": tape.ones(3, 3)})
    with pytest.raises(ValueError, match="empty parameter list"):
        tape.optim.SGD([])
    with pytest.raises(TypeError, match="Tensors"):
        tape.optim.SGD([1.0])
