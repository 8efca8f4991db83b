"""Whole models as texts write them: the same module on selfattn.tape and on PyTorch gives the same numbers.

Each function takes the namespace, and returns the module, its data, its loss and its optimiser.
"""

import copy
import gc
import math
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from selfattn import nn as layers
from selfattn import optim, tape


class Written(NamedTuple):
    model: Any
    data: dict[str, np.ndarray]
    loss: Callable[..., Any]
    optimizer: Any
    move: Callable[[], None]


def tokens(*shape, last=20):
    return np.random.default_rng(0).integers(1, last, shape)


def decoder(torch):
    """A GPT with tied weights, groups of an optimiser and a mask in a buffer."""
    nn, F = torch.nn, torch.nn.functional

    class Attention(nn.Module):
        def __init__(self, width, heads, length):
            super().__init__()
            self.heads, self.width = heads, width
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
            self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

        def forward(self, x):
            b, n, c = x.size()
            q, k, v = self.qkv(x).split(self.width, dim=2)
            q, k, v = (t.view(b, n, self.heads, c // self.heads).transpose(1, 2) for t in (q, k, v))
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :n, :n] == 0, float("-inf"))
            return self.proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, n, c))

    class Block(nn.Module):
        def __init__(self, *sizes):
            super().__init__()
            width = sizes[0]
            self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
            self.attention = Attention(*sizes)
            self.mlp = nn.ModuleDict(
                {"fc": nn.Linear(width, 32), "act": nn.GELU(), "proj": nn.Linear(32, width)}
            )

        def forward(self, x):
            x = x + self.attention(self.norms[0](x))
            return x + self.mlp["proj"](self.mlp.act(self.mlp.fc(self.norms[1](x))))

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(8, 16)
            self.blocks = nn.Sequential(*[Block(16, 4, 8) for _ in range(2)])
            self.head = nn.Linear(16, 20, bias=False)
            self.wte.weight = self.head.weight
            self.apply(self.draw)

        def draw(self, module):
            if isinstance(module, nn.Linear | nn.Embedding):
                torch.nn.init.normal_(module.weight, mean=0.0, std=0.1)

        def forward(self, x, y):
            h = self.blocks(self.wte(x) + self.wpe(torch.arange(0, x.size(1), dtype=torch.long)))
            return F.cross_entropy(self.head(h).view(-1, 20), y.view(-1), ignore_index=1)

    model = Decoder()
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))

    def move():
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()

    return Written(model, {"x": tokens(3, 8), "y": tokens(3, 8)[::-1].copy()}, model, optimizer, move)


def translator(torch):
    """An encoder and a decoder of copied layers, label smoothing by KLDivLoss, and a warmup."""
    nn, F = torch.nn, torch.nn.functional

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.maps = nn.ModuleList([copy.deepcopy(nn.Linear(16, 16)) for _ in range(4)])

        def forward(self, q, k, v, mask):
            pairs = zip(self.maps, (q, k, v), strict=False)
            q, k, v = [m(x).view(len(x), -1, 2, 8).transpose(1, 2) for m, x in pairs]
            scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8)
            weights = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9).softmax(dim=-1)
            return self.maps[-1](torch.matmul(weights, v).transpose(1, 2).reshape(len(q), -1, 16))

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

        def forward(self, x):
            mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
            return self.a * (x - mean) / (std + 1e-6) + self.b

    class Translator(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(20, 16, padding_idx=0)
            table = torch.zeros(9, 16)
            at = torch.arange(0, 9).unsqueeze(1) * torch.exp(
                torch.arange(0, 16, 2) * -(math.log(10000.0) / 16)
            )
            table[:, 0::2], table[:, 1::2] = torch.sin(at), torch.cos(at)
            self.register_buffer("table", table.unsqueeze(0), persistent=False)
            self.source, self.self_, norm = Attention(), Attention(), Norm()
            self.cross, self.norms = Attention(), nn.ModuleList([copy.deepcopy(norm) for _ in range(3)])
            self.out = nn.Linear(16, 20)
            for p in self.parameters():
                if p.dim() > 1:
                    nn.init.xavier_uniform_(p)

        def at(self, x):
            return self.embed(x) * math.sqrt(16) + self.table[:, : x.size(1)]

        def forward(self, s, t):
            open_s, x, y = (s != 0).unsqueeze(-2), self.at(s), self.at(t)
            past = torch.triu(torch.ones((1, t.size(1), t.size(1))), diagonal=1).type(torch.uint8) == 0
            open_t = (t != 0).unsqueeze(-2) & past.type_as(open_s.data)
            x = x + self.source(*[self.norms[0](x)] * 3, open_s)
            y = y + self.self_(*[self.norms[1](y)] * 3, open_t)
            y = y + self.cross(self.norms[2](y), x, x, open_s)
            return F.log_softmax(self.out(y), dim=-1)

    model, criterion = Translator(), nn.KLDivLoss(reduction="sum")

    def loss(s, t):
        logs = model(s, t[:, :-1]).contiguous().view(-1, 20)
        target = t[:, 1:].reshape(-1)
        smooth = logs.data.clone().fill_(0.1 / 18).scatter_(1, target.data.unsqueeze(1), 0.9)
        smooth[:, 0] = 0
        smooth.index_fill_(0, torch.nonzero(target.data == 0).squeeze(), 0.0)
        return criterion(logs, smooth.clone().detach()) / (target != 0).data.sum()

    optimizer = torch.optim.Adam(model.parameters(), lr=0.5, betas=(0.9, 0.98), eps=1e-9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25 * (step + 1) * 400**-1.5)

    def move():
        optimizer.step()
        schedule.step()

    s, t = tokens(3, 9), tokens(3, 8)
    s[0, 6:] = t[1, 5:] = 0
    return Written(model, {"s": s, "t": t}, loss, optimizer, move)


def assignment(torch):
    """All by hand: layers, rotary positions written into slices, softmax, loss, and an optimiser with a state."""
    nn = torch.nn

    class Linear(nn.Module):
        def __init__(self, d_in, d_out):
            super().__init__()
            self.weight = nn.Parameter(torch.empty((d_out, d_in)))
            nn.init.trunc_normal_(self.weight, mean=0.0, std=0.3, a=-0.9, b=0.9)

        def forward(self, x):
            return torch.einsum("...i,oi->...o", x, self.weight)

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight

    def softmax(x):
        e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
        return e / e.sum(dim=-1, keepdim=True)

    def rotated(x):
        n, half = x.shape[-2], x.shape[-1] // 2
        angle = torch.outer(torch.arange(n), 1.0 / 100 ** (torch.arange(half) / half))
        cos, sin, y = angle.cos(), angle.sin(), torch.empty_like(x)
        y[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        y[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return y

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(20, 16))
            self.q, self.kv, self.out = Linear(16, 16), Linear(16, 16), Linear(16, 16)
            self.norm, self.w1, self.w2, self.w3 = RMSNorm(), Linear(16, 24), Linear(24, 16), Linear(16, 24)

        def forward(self, x):
            h = self.table[x]
            q = self.q(h).unflatten(-1, (4, 4)).transpose(1, 2)
            k, v = self.kv(h).view(*x.shape, 2, 2, 4).permute(2, 0, 3, 1, 4)
            k, v = rotated(k).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
            closed = ~torch.tril(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool))
            scores = (rotated(q) @ k.mT / 2).masked_fill(closed, -torch.inf)
            h = h + self.out((softmax(scores) @ v).transpose(1, 2).flatten(2))
            gate = self.w1(self.norm(h))
            return (h + self.w2(gate * torch.sigmoid(gate) * self.w3(self.norm(h)))) @ self.table.T

    class AdamW(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        def step(self):
            for group in self.param_groups:
                for p in (p for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    t, m, v = state.get("is", (1, torch.zeros_like(p.data), torch.zeros_like(p.data)))
                    m.mul_(0.9).add_(p.grad.data, alpha=0.1)
                    v = 0.99 * v + 0.01 * p.grad.data**2
                    p.data -= group["lr"] * math.sqrt(1 - 0.99**t) / (1 - 0.9**t) * m / (v.sqrt() + 1e-8)
                    p.data.mul_(1 - group["lr"] * 0.01)
                    state["is"] = t + 1, m, v

    model = Model()
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def loss(x, y):
        logits = model(x)
        picked = torch.gather(logits, -1, y.unsqueeze(-1)).squeeze(-1)
        return (torch.logsumexp(logits, dim=-1) - picked).mean()

    def move():
        total = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        for p in model.parameters():
            p.grad *= min(1.0, 1.0 / (total.item() + 1e-6))
        optimizer.step()

    return Written(model, {"x": tokens(3, 6), "y": tokens(3, 6)[::-1].copy()}, loss, optimizer, move)


def scorer(torch):
    """Additive attention of lazy layers, lengths as masks that are written in place, blocks by add_module."""
    nn, F = torch.nn, torch.nn.functional

    def masked_softmax(x, lengths):
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        lengths = torch.repeat_interleave(lengths, shape[1])
        x[~(torch.arange(shape[-1], dtype=torch.float32)[None, :] < lengths[:, None])] = -1e6
        return F.softmax(x.reshape(shape), dim=-1)

    class Additive(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.w_q, self.w_k = nn.LazyLinear(width, bias=False), nn.LazyLinear(width, bias=False)
            self.w_v = nn.LazyLinear(1, bias=False)

        def forward(self, x, lengths):
            features = torch.tanh(self.w_q(x).unsqueeze(2) + self.w_k(x).unsqueeze(1))
            self.attention_weights = masked_softmax(self.w_v(features).squeeze(-1), lengths)
            return torch.bmm(self.attention_weights, x)

    class Scorer(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.gates = nn.Sequential(), nn.ParameterList([torch.zeros(5) for _ in range(2)])
            for i in range(2):
                self.blocks.add_module(f"block{i}", Additive(12))
            self.bias = nn.Embedding(7, 5)

        def forward(self, x, lengths):
            for block, gate in zip(self.blocks, self.gates, strict=True):
                x = torch.where(gate > 0, x, x + torch.sigmoid(gate) * block(x, lengths))
            far = (torch.arange(4)[None, :] - torch.arange(4)[:, None]).clamp(-3, 3) + 3
            x += self.bias(far).mean(dim=0)
            return x.amax(dim=1) + x.std(1)

    model = Scorer()
    x = np.random.default_rng(1).normal(size=(3, 4, 5)).astype(np.float32)
    model(torch.zeros(3, 4, 5), torch.tensor([1, 2, 3]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    data = {"x": x, "n": np.array([4, 2, 3])}
    return Written(
        model, data, lambda x, n: F.smooth_l1_loss(model(x, n), x[:, 0]), optimizer, optimizer.step
    )


def run(written, torch, dtype):
    """Return the losses of ten steps and the gradients of the first."""
    arrays = [a.astype(dtype) if a.dtype.kind == "f" else a for a in written.data.values()]
    losses, grads = [], {}
    for _ in range(10):
        loss = written.loss(*map(torch.from_numpy, arrays))
        written.optimizer.zero_grad()
        loss.backward()
        grads = grads or {n: p.grad.numpy().copy() for n, p in written.model.named_parameters()}
        written.move()
        losses.append(loss.item())
    return losses, grads


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-12)])
@pytest.mark.parametrize("write", [decoder, translator, assignment, scorer])
def test_a_model_trains_in_step_with_pytorch(write, dtype, tolerance):
    torch = pytest.importorskip("torch")
    made = []
    for t in (tape, torch):
        t.set_default_dtype(getattr(t, dtype))
        t.manual_seed(0)
        made.append(write(t))
    try:
        mine, theirs = made
        state = theirs.model.state_dict()
        assert list(mine.model.state_dict()) == list(state)
        assert repr(mine.model) == repr(theirs.model)
        for name, drawn in mine.model.state_dict().items():  # the seed alone gives the same model
            np.testing.assert_allclose(drawn.numpy(), state[name].numpy(), 1e-5, 1e-6)
        keys = mine.model.load_state_dict({name: tape.tensor(x.numpy()) for name, x in state.items()})
        assert str(keys) == str(theirs.model.load_state_dict(state))
        part = dict(list(state.items())[1:])
        assert str(mine.model.load_state_dict(part, False)) == str(theirs.model.load_state_dict(part, False))
        results = [run(written, t, dtype) for written, t in ((mine, tape), (theirs, torch))]
    finally:
        tape.set_default_dtype(tape.float32)
        torch.set_default_dtype(torch.float32)
    (losses, grads), (their_losses, their_grads) = results
    np.testing.assert_allclose(losses, their_losses, tolerance)
    largest = max(np.abs(g).max() for g in their_grads.values())
    for name, gradient in their_grads.items():
        scale = max(np.abs(gradient).max(), 1e-2 * largest)
        np.testing.assert_allclose(grads[name], gradient, 0, tolerance * scale, err_msg=name)
    assert abs(losses[-1] - losses[0]) > 1e-3


def test_a_model_equals_the_layers_of_arrays():
    tape.manual_seed(0)
    model = tape.nn.Sequential(
        tape.nn.Linear(6, 8), tape.nn.LayerNorm(8), tape.nn.GELU(), tape.nn.Linear(8, 3)
    )
    kind = np.float32
    own = layers.Sequential(
        layers.Linear(6, 8, dtype=kind),
        layers.LayerNorm(8, dtype=kind),
        layers.GELU(),
        layers.Linear(8, 3, dtype=kind),
    )
    own.load_state_dict({name: x.numpy() for name, x in model.state_dict().items()})
    optimizer, own_optimizer = (
        tape.optim.Adam(model.parameters(), lr=0.1),
        optim.Adam(own.parameters(), lr=0.1),
    )
    x, y = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32), np.arange(5) % 3
    for _ in range(3):
        loss = tape.nn.functional.cross_entropy(model(tape.from_numpy(x)), tape.from_numpy(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logits, pullback = own.vjp(x)
        value, of_loss = layers.CrossEntropyLoss().vjp(logits, y)
        own_optimizer.step(pullback(of_loss(1.0))[1])
        np.testing.assert_allclose(loss.item(), value, 1e-6)
    for name, parameter in own.parameters().items():
        np.testing.assert_allclose(model.get_parameter(name).detach(), parameter, 1e-5, 1e-6)


def test_training_grows_by_nothing():
    tape.manual_seed(0)
    written = scorer(tape)
    data = [tape.from_numpy(array) for array in written.data.values()]

    def train(steps):
        for _ in range(steps):
            written.loss(*data).backward()
            written.move()
            written.optimizer.zero_grad()

    def sizes():
        gc.collect()  # also empties what Python keeps of freed tuples and lists
        arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
        traces = tracemalloc.take_snapshot().filter_traces([arrays]).traces
        return sum(trace.size for trace in traces), tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        train(100)
        before = sizes()
        loss = written.loss(*data)
        held = sizes()
        loss.backward()
        written.optimizer.zero_grad()
        kept = sizes()
        del loss
        train(200)
        after = sizes()
    finally:
        tracemalloc.stop()
    assert held[0] > before[0] + 5000  # bytes of arrays
    assert kept[0] < before[0] + 100  # the loss itself
    assert after[0] == before[0]
    assert after[1] < before[1] + 200 * 100  # less than a node of the graph for each step


IMPORTS = """
import torch.optim.lr_scheduler as schedules
from torch import Tensor, einsum, nn, optim
from torch.autograd import Variable
from torch.cuda.amp import GradScaler, autocast
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import Module, functional as F
from torch.nn.functional import log_softmax, pad
from torch.nn.modules import Linear
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parameter import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, _LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.dataset import Dataset
from torch.utils.data.distributed import DistributedSampler
"""


def small_parts(torch, names):
    """What the smaller functions of these modules return, as lists."""
    a, b = torch.arange(6.0).view(3, 2), torch.tensor([[7.0, 8.0]])
    yield names["pad_sequence"]([a, b], padding_value=-1.0), names["pad_sequence"]([a, b], batch_first=True)
    yield torch.unique(torch.tensor([3, 1, 3]), return_inverse=True, return_counts=True)
    yield (
        torch.tril_indices(3, 4, -1),
        torch.triu_indices(2, 3),
        torch.vstack([a[0], b[0]]),
        torch.hstack([a, a]),
    )
    yield a.index_add_(0, torch.tensor([1, 1]), torch.ones(2, 2), alpha=2), torch.lerp(b, b + 1, 0.5)
    torch.manual_seed(0)
    yield list(names["RandomSampler"](range(40), replacement=True, num_samples=50))
    yield torch.nn.init.trunc_normal_(torch.empty(3, 50), std=2.0)

    class Halved(names["_LRScheduler"]):
        def get_lr(self):
            return [lr / 2**self.last_epoch for lr in self.base_lrs]

    schedules = names["schedules"]
    for schedule in (
        Halved,
        lambda o: schedules.StepLR(o, 2, 0.3),
        lambda o: schedules.ExponentialLR(o, 0.9),
    ):
        optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(a)]}, {"params": [b], "lr": 3.0}], lr=1.0)
        made = schedule(optimizer)
        for _ in range(5):
            optimizer.step()
            made.step()
            yield made.get_last_lr()


def test_what_texts_import_is_there():
    torch = pytest.importorskip("torch")
    results = []
    for t, lines in ((tape, IMPORTS.replace("torch", "selfattn.tape")), (torch, IMPORTS)):
        names: dict[str, Any] = {}
        exec(lines, names)
        results.append(list(small_parts(t, names)))
    as_lists = [
        [
            x.tolist() if hasattr(x, "tolist") else [getattr(y, "tolist", lambda y=y: y)() for y in x]
            for x in each
        ]
        for each in results
    ]
    for mine, theirs in zip(*as_lists, strict=True):
        np.testing.assert_allclose(
            np.hstack([np.ravel(x) for x in mine]), np.hstack([np.ravel(x) for x in theirs]), 1e-6
        )
    with pytest.raises(RuntimeError, match="one process"):
        tape.nn.parallel.DistributedDataParallel(tape.nn.Identity())
    with pytest.raises(RuntimeError, match="mixed precision"):
        tape.autocast("cpu", dtype=tape.bfloat16)


def test_layers_of_einops():
    pytest.importorskip("einops")
    from selfattn.tape.einops import Rearrange, Reduce

    model = tape.nn.Sequential(Rearrange("b (h w) -> b h w", h=2), Reduce("b h w -> b w", "max"))
    x = tape.tensor([[1.0, 5.0, 3.0, 4.0]], requires_grad=True)
    assert model(x).tolist() == [[3.0, 5.0]]
    model(x).sum().backward()
    assert x.grad.tolist() == [[0.0, 1.0, 1.0, 0.0]]
    pytest.importorskip("torch")
    from einops.layers import torch as theirs

    foreign = tape.nn.Sequential(
        theirs.Rearrange("b (h w) -> b h w", h=2), theirs.Reduce("b h w -> b w", "max")
    )
    assert foreign(x).tolist() == [[3.0, 5.0]]
    assert repr(foreign) == repr(model)
