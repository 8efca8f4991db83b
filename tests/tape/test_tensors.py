"""Tensors: the graph, views and writes into memory, indices, dtypes; drawn programs are compared with PyTorch's."""

import copy
import pickle
import random

import numpy as np
import pytest

from selfattn import tape
from selfattn.tape import nn


def leaf(*shape):
    return (tape.arange(float(np.prod(shape))) / 7 - 1).view(*shape).clone().requires_grad_()


# ------------------------------------------------------------------------------------------------------------ the graph


def test_leaves_accumulate_and_the_graph_is_freed():
    x = leaf(3)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    np.testing.assert_allclose(x.grad.numpy(), 4 * x.detach().numpy())
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()
    (x + 1).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), 4 * x.detach().numpy() + 1)


def test_a_gradient_is_the_tensors_own_array():
    x, y = leaf(3), leaf(3)
    (x + y).sum().backward()
    x.grad.mul_(2)
    assert y.grad.tolist() == [1.0, 1.0, 1.0]


def test_what_has_no_gradient_says_so():
    x = leaf(3)
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        (x * 2).backward()
    with pytest.raises(RuntimeError, match="does not require grad"):
        x.detach().sum().backward()
    with pytest.raises(RuntimeError, match=r"detach\(\)\.numpy\(\)"):
        np.asarray(x * 2)
    with tape.no_grad():
        assert not (x * 2).requires_grad

    @tape.no_grad()
    def inside():
        return x * 2

    assert inside().is_leaf
    assert (x * 2).requires_grad
    with pytest.raises(RuntimeError, match="floats"):
        tape.arange(3).requires_grad_()


def test_a_change_of_what_a_gradient_needs_is_an_error():
    for change in (lambda x, y: y.add_(1), lambda x, y: y[0:1].zero_(), lambda x, y: y.__setitem__(0, 5.0)):
        x = leaf(3)
        y = x.exp()
        change(x, y)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*ExpBackward0"):
            y.sum().backward()
    x = leaf(3)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        x += 1
    with pytest.raises(RuntimeError, match="a leaf Variable"):
        x[0] = 1.0
    with tape.no_grad():
        x += 1


def test_gradients_without_backward():
    x, w = leaf(3), leaf(3)
    y = (x * w).sum()
    middle = x * 2
    of_x, of_middle = tape.autograd.grad([y, middle.sum()], [x, middle], retain_graph=True)
    np.testing.assert_allclose(of_x.numpy(), w.detach().numpy() + 2)
    assert of_middle.tolist() == [1.0, 1.0, 1.0]
    assert x.grad is None
    with pytest.raises(RuntimeError, match="not used"):
        tape.autograd.grad(y, leaf(2))


def test_copies_of_tensors():
    layer = nn.Linear(2, 3)
    layer(tape.ones(1, 2)).sum().backward()
    other = copy.deepcopy(layer)
    assert other.weight is not layer.weight
    assert other.weight.grad.equal(layer.weight.grad)
    again = pickle.loads(pickle.dumps(layer))
    assert again.weight.equal(layer.weight)
    assert isinstance(again.weight, nn.Parameter)
    with pytest.raises(RuntimeError, match="leaves"):
        copy.deepcopy(layer.weight * 2)


# --------------------------------------------------------------------------------------------- programs that are drawn


def a_step(n, v, views, w):
    """Make a view of a tensor, or write into it."""
    steps = [
        lambda: views.append(v.transpose(-1, -2)),
        lambda: views.append(v.reshape(-1)),
        lambda: views.append(v.view(v.shape[0], -1)),
        lambda: views.append(v[0]),
        lambda: views.append(v[..., 1:]),
        lambda: views.append(v[..., ::2]),
        lambda: views.append(v.unsqueeze(1)),
        lambda: views.append(v.squeeze()),
        lambda: views.append(v * 1.5),
        lambda: v.mul_(w[0]),
        lambda: v.add_(1),
        lambda: v.copy_(v.detach() * w[2]),
        lambda: v.masked_fill_(v.detach() > 1, 0.5),
        lambda: v.__setitem__((..., 0), w[1] * 3),
        lambda: v.__setitem__(v.detach() > 0.3, w[3]),
    ]
    steps[n]()


def views_and_writes(module, seed):
    """Run a drawn program of views and operations in place; return all values and gradients."""
    draw = random.Random(seed)
    x = (module.arange(24.0) / 7 - 1).view(2, 3, 4).clone().requires_grad_()
    w = (module.arange(4.0) / 3 + 0.5).clone().requires_grad_()
    views, found = [x * 2], []
    for _ in range(draw.randint(3, 9)):
        try:
            a_step(draw.randrange(15), draw.choice(views), views, w)
        except (RuntimeError, IndexError):
            found.append("error")
    total = sum((v * v).sum() * (n + 1) for n, v in enumerate(views))
    found += [v.detach().numpy().copy() for v in views]
    try:
        total.backward()
        found += [None if each.grad is None else each.grad.numpy() for each in (x, w)]
    except RuntimeError as error:
        found.append("inplace" in str(error))
    return found


def indices(module, seed):
    """Read and write at drawn indices; return the values and gradients."""
    draw = random.Random(seed)
    x = (module.arange(60.0) / 7 - 1).view(3, 4, 5).clone().requires_grad_()
    keys = [
        lambda n: draw.randint(-n, n - 1),
        lambda n: slice(draw.randint(0, n - 1), None),
        lambda n: slice(None, None, 2),
        lambda n: None,
        lambda n: ...,
        lambda n: module.tensor([draw.randint(0, n - 1) for _ in range(2)]),
        lambda n: [draw.randint(0, n - 1) for _ in range(2)],
        lambda n: module.tensor([draw.random() < 0.5 for _ in range(n)]),
    ]
    key = tuple(draw.choice(keys)(n) for n in draw.sample((3, 4, 5), draw.randint(1, 3)))
    if sum(one is ... for one in key) > 1:  # PyTorch takes a second one for nothing, NumPy refuses it
        return []
    found = []
    for act in ("read", "write"):
        y = x * 1
        try:
            if act == "read":
                z = y[key]
            else:
                y[key] = x[0, 0, 0] * 2
                z = y
        except (IndexError, RuntimeError, TypeError, ValueError):
            found.append("error")
            continue
        x.grad = None
        (z * z).sum().backward()
        found += [z.detach().numpy(), x.grad.numpy()]
    return found


def same(a, b):
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.shape == b.shape and np.allclose(a, b, rtol=1e-5, atol=1e-5)
    return type(a) is type(b) and (a is None or a == b)


@pytest.mark.parametrize(("program", "times"), [(views_and_writes, 300), (indices, 300)])
def test_drawn_programs_do_what_pytorch_does(program, times):
    torch = pytest.importorskip("torch")
    for seed in range(times):
        mine, theirs = program(tape, seed), program(torch, seed)
        assert len(mine) == len(theirs) and all(map(same, mine, theirs)), seed


def test_writes_through_views_have_gradients():
    x, w = tape.zeros(3, 4), leaf(4)
    x[1] = w * 2
    x[:, 0::2] += w[0]
    row = x[2]
    row.mul_(3)
    x.sum().backward()
    assert w.grad.tolist() == [2 + 2 * 2 + 3 * 2, 2, 2, 2]


# --------------------------------------------------------------------------------------------------------------- dtypes

VALUES = {
    "float32": (np.float32, 2), "float64": (np.float64, 2), "float16": (np.float16, 2), "int64": (np.int64, 2),
    "int32": (np.int32, 2), "uint8": (np.uint8, 2), "bool": (np.bool_, 2),
    "float64 of no axes": (np.float64, 0), "float32 of no axes": (np.float32, 0), "int64 of no axes": (np.int64, 0),
    "a float": (float, None), "an int": (int, None), "a bool": (bool, None),
}  # fmt: skip


def operand(module, kind):
    dtype, axes = VALUES[kind]
    return dtype(True) if axes is None else module.tensor(np.ones((2,) * (axes // 2), dtype))


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "true_divide", "floor_divide", "pow", "lt", "where", "maximum"]
)
def test_dtypes_of_results_are_those_of_pytorch(name):
    torch = pytest.importorskip("torch")
    for left in VALUES:
        for right in VALUES:
            found = []
            for module in (tape, torch):
                x, y = operand(module, left), operand(module, right)
                try:
                    if name == "where":
                        z = module.where(module.tensor([True, False]), x, y)
                    elif isinstance(x, module.Tensor):
                        z = getattr(x, name)(y)
                    else:
                        z = getattr(module, name)(x, y)
                    found.append(str(z.dtype))
                except (RuntimeError, TypeError):
                    found.append("error")
            if found[1] not in ("error", "torch.bool"):  # PyTorch refuses numbers in some places
                assert found[0] == found[1], (left, right)


def test_numbers_of_python_keep_the_dtype():
    assert (tape.ones(2, dtype=tape.float64) * 2.5).dtype is tape.float64
    assert (tape.arange(3) * 0.5).dtype is tape.float32
    assert (tape.arange(3) / 2).dtype is tape.float32
    assert (2.0 ** tape.arange(3)).tolist() == [1.0, 2.0, 4.0]
    assert (np.float64(2.0) * tape.ones(2)).dtype is tape.float32
    x = tape.arange(3)
    with pytest.raises(RuntimeError, match="can't be cast"):
        x += 0.5
    assert tape.tensor([[1, 2], [3, 4]]).dtype is tape.int64
    assert tape.tensor(np.ones(2)).dtype is tape.float64
    assert tape.ones(2).double().to(tape.float16).dtype is tape.float16


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        (lambda: tape.ones(2, 3) + tape.ones(4), RuntimeError, r"add.*\[2, 3\], \[4\]"),
        (lambda: tape.ones(2, 3) @ tape.ones(4, 2), RuntimeError, r"matmul.*\[2, 3\], \[4, 2\]"),
        (lambda: tape.ones(2, 3).sum(5), IndexError, "sum"),
        (lambda: tape.ones(6).view(4, -1), RuntimeError, "invalid for input of size 6"),
        (lambda: tape.ones(2, 3).t().view(6), RuntimeError, r"Use \.reshape"),
        (lambda: tape.ones(2).expand(3, 2).add_(1), RuntimeError, "clone"),
        (lambda: tape.ones(2)[::-1], ValueError, "step must be greater than zero"),
        (lambda: bool(tape.ones(2)), RuntimeError, "ambiguous"),
        (lambda: tape.ones(2).item(), RuntimeError, "2 elements"),
        (lambda: tape.ones(2).cuda(), RuntimeError, "CPU alone"),
        (lambda: tape.ones(2).to("cuda"), RuntimeError, "CPU alone"),
        (lambda: tape.fft, AttributeError, "from_scratch"),
        (lambda: nn.Conv2d, AttributeError, "from_scratch"),
        (lambda: tape.ones(2).register_hook, AttributeError, "from_scratch"),
        (lambda: nn.functional.conv1d, AttributeError, "from_scratch"),
        (lambda: tape.ones(2) + "a", TypeError, "unsupported operand"),
        (lambda: tape.tensor([[1.0], [2.0, 3.0]]), ValueError, "cannot become|inhomogeneous"),
        (lambda: tape.tensor(["a"]), TypeError, "no tensors of"),
        (lambda: nn.Embedding(3, 2)(tape.tensor([3])), IndexError, "3 is not in 0 … 2"),
        (lambda: nn.Linear(3, 2)(tape.ones(2)), RuntimeError, r"\[2\], \[2, 3\]"),
        (
            lambda: nn.functional.cross_entropy(tape.ones(2, 3), tape.tensor([0, 3])),
            (RuntimeError, ValueError),
            "3",
        ),
        (lambda: nn.functional.relu(1.0), (TypeError, AttributeError), "relu|float"),
        (lambda: tape.ones(2, 3).masked_fill(tape.ones(2, 3), 0), RuntimeError, "boolean masks"),
        (lambda: tape.ones(4).split([1, 2]), RuntimeError, "sum exactly to 4"),
        (lambda: tape.multinomial(tape.zeros(3), 1), RuntimeError, "sum of probabilities"),
    ],
)
def test_bad_input_is_named(act, error, words):
    with pytest.raises(error, match=words):
        act()


# --------------------------------------------------------------------------------------------------------------- files


def test_files_of_tensors(tmp_path):
    layer = nn.Linear(3, 2)
    optimizer = tape.optim.AdamW(layer.parameters())
    layer(tape.ones(1, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "sizes": (2, [3.5, None]),
    }
    tape.save(saved, tmp_path / "a.pt")
    found = tape.load(tmp_path / "a.pt", map_location="cpu")
    assert found["sizes"] == (2, [3.5, None])
    tape.save([layer.weight, leaf(2), tape.ones(2, dtype=tape.float16)], tmp_path / "d.pt")
    kinds = [(type(x), x.requires_grad, x.dtype) for x in tape.load(tmp_path / "d.pt")]
    assert kinds == [
        (nn.Parameter, True, tape.float32),
        (tape.Tensor, True, tape.float32),
        (tape.Tensor, False, tape.float16),
    ]
    other = nn.Linear(3, 2)
    other.load_state_dict(found["model"])
    again = tape.optim.AdamW(other.parameters())
    again.load_state_dict(found["optimizer"])
    for model, steps in ((layer, optimizer), (other, again)):
        steps.zero_grad()
        model(tape.ones(1, 3)).sum().backward()
        steps.step()
    assert other.weight.equal(layer.weight)
    with pytest.raises(TypeError, match=r"obj\['m'\] is a Linear.*state_dict"):
        tape.save({"m": layer}, tmp_path / "b.pt")
    (tmp_path / "c.pt").write_bytes(pickle.dumps([1]))
    with pytest.raises(ValueError, match="is not read"):
        tape.load(tmp_path / "c.pt")
