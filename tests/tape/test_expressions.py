"""Expressions that texts write, one line each: the tape gives what PyTorch gives, as its text."""

import numpy as np
import pytest

from selfattn import tape

EXPRESSIONS = """
torch.full((2, 3), 7), torch.full((2,), 1.5), torch.full_like(x, 2), torch.empty(0), torch.eye(2, 3)
torch.arange(2, 8, 2), torch.arange(0.0, 1.0, 0.25), torch.arange(5, 0, -2), torch.arange(start=1, end=4)
torch.arange(n[1])
torch.linspace(-1, 1, 5), torch.zeros(size=(2,)), torch.ones_like(n), x.new_zeros(2), x.new_ones(1, 2)
x.new_full((2,), 3.0)
x.new_tensor([1, 2]), torch.as_tensor(np.arange(3)), torch.as_tensor([1.0]), torch.as_tensor(x, dtype=torch.float64)
torch.is_tensor(x), torch.is_tensor(1), torch.numel(x), torch.is_floating_point(n), torch.equal(x, x)
torch.allclose(x, x + 1e-9)
torch.rand(2, 3), torch.rand_like(x), torch.randn_like(x[:1]), torch.randint_like(n, 5), torch.randint(3, 9, (4,))
torch.randperm(6)
torch.normal(0.0, 1.0, (3,)), torch.normal(torch.zeros(3), torch.ones(3)), torch.empty(3).uniform_(1, 2)
torch.empty(3).normal_(1, 2)
torch.tensor(3), torch.tensor([True, False]), torch.tensor([[1, 2.5]]), torch.tensor([x[0, 0], x[0, 1]])
torch.tensor([])
torch.Tensor([1, 2]), torch.FloatTensor([1, 2]), torch.LongTensor([[1]]), torch.Tensor(2, 0)
isinstance(n, torch.LongTensor)
x.shape, x.size(0), x.shape[1:] + (3,), x.shape.numel(), x.stride(), x.stride(0), x.element_size(), x.is_contiguous()
x.T.is_contiguous()
x.dtype, n.dtype, x.device, str(x.device), torch.device("cpu"), torch.finfo(torch.float16).max
torch.finfo(x.dtype).eps, torch.iinfo(torch.int8).min
x.type(), n.type(), x.type(torch.int64), x.type("torch.DoubleTensor"), x.long(), n.float(), x.half(), n.bool()
x.to(n), x.int(), n.short()
float(x[0, 0]), int(n[0]), bool(n[1]), len(x), list(n), 3 in n, n.tolist(), x[0, 0].item(), f"{x[0, 0]:.2f}", f"{n}"
[*x[0]]
x.sum(), x.sum(0), x.sum((0, 1), keepdim=True), x.mean(-1), x.std(), x.var(0, unbiased=False), x.prod(), x.norm()
x.cumsum(1)
x.max(), x.max(1), x.max(1, keepdim=True).values, x.min(0).indices, x.amax(0), x.argmax(), x.argmax(1), x.argmin(0)
torch.max(x, -x), n.max()
x.sort(), x.sort(0, descending=True).values, x.argsort(), x.topk(2), x.topk(1, dim=0, largest=False)
torch.bincount(n, minlength=6)
(x > 0).all(), (x > 0).any(1), x.count_nonzero(), torch.nonzero(x > 0), x.isnan(), x.isfinite()
torch.logical_and(x > 0, n > 1), ~(x > 0)
x + n, x * 2, 1 - x, 2 / (x + 9), x // 0.5, x % 0.7, 2**n, n**2, -x, abs(x), x @ x.T, n // 2, n % 2, n / 2, n & 1
n | 4, n ^ 3, x > n, x == x, x != 0
x.clamp(-0.5, 0.5), x.clamp(min=0), torch.clip(n, 1, 2), x.round(), x.round(decimals=1), x.floor(), x.ceil()
x.trunc(), x.sign(), n.sign()
torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, 0.3, rounding_mode="trunc"), torch.lerp(x, x + 1, 0.5)
torch.addcmul(x, x, x, value=2)
x.view(-1), x.reshape(3, 2), x.flatten(), x.t(), x.permute(1, 0), x.unsqueeze(0).shape, x[None, :, 0]
x.expand(2, 2, 3).shape, x.repeat(1, 2), x.tile(2)
x.split(2, dim=1), x.chunk(2, 1), x.unbind(), torch.cat([x, x]), torch.stack([x, x], 2).shape, torch.hstack([x, x])
torch.vstack([x, x]), x.movedim(0, 1)
x.tril(), x.triu(1), torch.tril_indices(2, 3), x[:, :2].diag(), torch.diag(n), x.diagonal(1), x.roll(1, 1), x.flip(0)
x.narrow(1, 0, 2), x.select(1, 1)
x.gather(1, n[None] % 3), x.index_select(1, n % 3), x.masked_fill(x > 0, -1), x.masked_select(x > 0)
torch.where(x > 0, x, 0.0), x.scatter(1, n[None] % 3, 9.0)
torch.meshgrid(n, n[:2], indexing="xy"), torch.repeat_interleave(n, 2), n.repeat_interleave(n), n.unique()
torch.outer(n, n), torch.einsum("ij,kj->ik", x, x)
F.softmax(x, dim=-1), F.log_softmax(x, 0), torch.softmax(x, 1), x.softmax(-1), F.relu(x), F.gelu(x)
F.gelu(x, approximate="tanh"), F.silu(x), torch.sigmoid(x)
F.one_hot(n), F.one_hot(n, 5), F.pad(x, (1, 0), value=2.0), F.normalize(x), F.layer_norm(x, (3,)), F.rms_norm(x, (3,))
F.embedding(n[:1], x + 0) if n[0] < 2 else 0
F.mse_loss(x, x + 1), F.l1_loss(x, x * 2, reduction="sum"), F.smooth_l1_loss(x, x * 3)
F.nll_loss(F.log_softmax(x, 1), n[:2] % 3), F.kl_div(x.log_softmax(1), (-x).softmax(1), reduction="batchmean")
F.cross_entropy(x, n[:2] % 3, label_smoothing=0.1), F.cross_entropy(x, n[:2] % 3, ignore_index=1, reduction="none")
F.cross_entropy(x, x.softmax(1))
F.binary_cross_entropy(x.sigmoid(), (x > 0).float())
F.binary_cross_entropy_with_logits(x, (x > 0).float(), pos_weight=torch.tensor([1.0, 2.0, 3.0]))
F.dropout(x, 0.5, training=False), F.dropout(x, 1.0), torch.nn.utils.parameters_to_vector([x, x])
torch.nn.utils.rnn.pad_sequence([n, n[:1]], batch_first=True)
torch.nn.Linear(3, 2).weight, torch.nn.Embedding.from_pretrained(x)(torch.tensor([1])), torch.nn.Identity()(x)
torch.nn.PReLU()(x), torch.nn.Flatten()(x[None])
torch.is_grad_enabled(), torch.get_default_dtype(), torch.inf, torch.pi, torch.cuda.is_available()
torch.result_type(n, 1.0), torch.initial_seed()
""".strip().splitlines()


def shown(value):
    """Return a value's text; a named tuple of tensors is a tuple here."""
    return repr(tuple(value)) if isinstance(value, tuple) and hasattr(value, "values") else repr(value)


def answers(torch, line):
    torch.manual_seed(0)
    x = torch.tensor([[0.4, -1.25, 2.0], [-0.3, 0.6, -0.8]])
    names = {"torch": torch, "F": torch.nn.functional, "np": np, "x": x, "n": torch.tensor([0, 3, 2])}
    return [shown(each) for each in eval(f"[{line}]", names)]


@pytest.mark.parametrize("line", EXPRESSIONS)
def test_expressions_are_pytorchs(line):
    torch = pytest.importorskip("torch")
    for mine, theirs in zip(answers(tape, line), answers(torch, line), strict=True):
        assert mine == theirs


def test_places_are_drawn_by_their_weights():
    tape.manual_seed(0)
    weights = tape.tensor([[1.0, 0.0, 3.0], [0.0, 2.0, 2.0]])
    many = tape.multinomial(weights, 4000, replacement=True).numpy()
    shares = [[np.mean(row == n) for n in range(3)] for row in many]
    np.testing.assert_allclose(shares, weights.numpy() / 4, atol=4 * (0.25 / 4000) ** 0.5)
    both = tape.multinomial(weights, 2).numpy()
    assert [sorted(row) for row in both.tolist()] == [[0, 2], [1, 2]]
    assert abs(tape.bernoulli(tape.full((4000,), 0.3)).mean().item() - 0.3) < 4 * (0.21 / 4000) ** 0.5
    with pytest.raises(RuntimeError, match="without replacement"):
        weights.multinomial(3)


def test_a_state_of_random_numbers_continues():
    tape.manual_seed(3)
    state = tape.get_rng_state()
    first = tape.rand(3), tape.nn.functional.dropout(tape.ones(9))
    tape.set_rng_state(state)
    again = tape.rand(3), tape.nn.functional.dropout(tape.ones(9))
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def test_a_gradient_on_the_way_can_be_kept():
    x = tape.ones(2, requires_grad=True)
    y = x * 3
    y.retain_grad()
    (y * y).sum().backward()
    assert y.grad.tolist() == [6.0, 6.0] and x.grad.tolist() == [18.0, 18.0]
    tape.nn.utils.clip_grad_value_([x], 4.0)
    assert x.grad.tolist() == [4.0, 4.0]
    assert not y.detach_().requires_grad
