"""Layers and training: encoders, linear layers, a training step of a GPT.

Encoders have 2 layers, a feed-forward network four times as wide, heads of 32 columns, and ``batch_first``, without
which PyTorch does not use its fast path. "train" is forward and backward with dropout 0.1, the default of both; "eval"
the same without dropout; "forward" without gradients. "gpt" is loss, gradients and AdamW of 4 layers and 4 heads on 65
letters; PyTorch's is written like nanoGPT, and "door" is the same with selfattn's attention of tensors. PyTorch gets
selfattn's weights. ``vs 1 thread`` is selfattn's time on one thread.

The other suites are the attention of programs, in their shapes, with its gradients: of d2l and ESM with padding; of
Whisper's decoder, 32 tokens over 1500 frames; and of a small call. selfattn's is the call of arrays, by hand; "door" is
PyTorch's autograd with selfattn's attention, "torch" with its own function, which takes padding as a mask.

"tutorial", "lecture" and "block" are programs of PyTorch's names (`programs.py`), which selfattn.tape runs.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import NamedTuple

import numpy as np

import selfattn as sa
from benchmarks import programs
from benchmarks.attention import joined
from benchmarks.peers import Peer, Row, calling, largest_difference
from selfattn import nn, optim

LETTERS = 65
TOLERANCE = 2e-4  # the largest difference of float32 results of size 1, sums of up to 3072 terms
PEERS = ("torch",)
ENCODERS = ((64, 64, 16), (128, 128, 32), (384, 64, 32), (768, 128, 8))
# The sizes of each suite: width, tokens, sequences.
SUITES = {
    **dict.fromkeys(("train", "eval", "forward"), ENCODERS),
    "linear": ((64, 1024), (384, 1), (384, 26), (384, 1024)),
    "gpt": ((64, 64, 16), (128, 128, 32)),
    "d2l": ((256, 9, 128),),
    "ESM": ((320, 128, 4),),
    "Whisper": ((384, 1500, 1),),
    "call": ((32, 8, 1),),
    "tutorial": ((32, 7, 3),),
    "lecture": ((64, 32, 16),),
    "block": ((768, 256, 12),),
}
PROGRAMS = {"tutorial": programs.tutorial, "lecture": programs.lecture, "block": programs.block}
COLUMNS = {"d2l": 64, "ESM": 16, "Whisper": 64, "call": 16}  # of a head
OWNERS = {"torch": "torch.nn.functional", "door": "selfattn.interop.torch"}  # of attention


class Case(NamedTuple):
    """A layer or a model, and what it takes; a linear layer is four times as wide at its end."""

    kind: str
    width: int
    tokens: int
    batch: int = 1

    @property
    def work(self):
        """The operations of the products, each with two more for its gradients."""
        rows = float(self.batch * self.tokens)
        if self.kind == "linear":
            return 8 * rows * self.width**2
        layers, pairs = {"gpt": (4, 2), "lecture": (4, 4), "block": (1, 2)}.get(
            self.kind, (2, 4)
        )  # a GPT is causal; its head is not counted
        forward = layers * rows * self.width * (24 * self.width + pairs * self.tokens)
        return forward * (1 if self.kind == "forward" else 3)

    def draw(self):
        """Draw rows, and their gradient."""
        drawn = np.random.default_rng(0).standard_normal((2, self.batch, self.tokens, self.width), np.float32)
        return drawn[0], drawn[1]

    def heads(self):
        """Draw queries, keys, values and the gradient, views with heads first, and the option of padding."""
        shape = (4, self.batch, self.tokens, -1, COLUMNS[self.kind])
        q, k, v, grad = np.concatenate([self.draw()] * 2).reshape(shape).swapaxes(2, 3)
        n = 32 if self.kind == "Whisper" else None
        padding = {"key_lengths": np.arange(self.batch)[:, None] % self.tokens + 1} if self.batch > 1 else {}
        return q[:, :, :n], k, v, grad[:, :, :n], padding

    def ids(self):
        """Draw contexts with the letter after each."""
        return np.random.default_rng(0).integers(0, LETTERS, (self.batch, self.tokens + 1))

    def model(self):
        """Make selfattn's model, whose weights all libraries get."""
        if self.kind == "gpt":
            return nn.GPT(LETTERS, self.width, 4, 4, self.tokens, rng=0)
        if self.kind == "linear":
            return nn.Linear(self.width, 4 * self.width, rng=0)
        layer = nn.TransformerEncoderLayer(
            self.width, self.width // 32, 4 * self.width, batch_first=True, rng=0
        )
        return nn.TransformerEncoder(layer, 2).eval()


def _stepping(step):
    """Return a training step; the losses of the second and the third are compared."""
    return calling(step, lambda _: np.array([step(), step()]))


def _both(both, model, kind):
    """Return a pass with its gradient, which are compared without dropout."""
    result = np.stack([np.asarray(each) for each in both()])
    model.train(kind == "train")
    return calling(both, lambda _: result)


def output_and_gradient(result, own):
    """Compare outputs by the greatest difference, and gradients by the median one.

    Where an input of ReLU is 0 up to rounding, its gradient may be 0 in only one library; then all gradients of that
    sequence differ, by 1e-3 to 5e-2, also from float64's.
    """
    outputs, gradients = np.split(np.abs(result - own), 2)
    return float(max(np.max(outputs), np.median(gradients)))


def selfattn(case, threads):
    """Prepare selfattn's layer or model."""
    sa.set_num_threads(threads)
    if case.kind in PROGRAMS:
        return _stepping(PROGRAMS[case.kind](sa.tape))
    if case.kind in COLUMNS:
        *qkv, grad, padding = case.heads()
        return calling(lambda: sa.scaled_dot_product_attention_vjp(*qkv, **padding)[1](grad), joined)
    x, dy = case.draw()
    model, ids = case.model(), case.ids()
    if case.kind in ("forward", "linear"):
        return calling(partial(model, x))
    if case.kind in ("train", "eval"):

        def both():
            y, pullback = model.vjp(x)
            return y, pullback(dy)[0]

        return _both(both, model, case.kind)
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)

    def step():
        loss, pullback = model.loss_vjp(ids)
        optimizer.step(pullback(1.0))
        return float(loss)

    return _stepping(step)


def torch(case, threads, way):
    """Prepare PyTorch's; functions of tensors, which are faster than modules, but for encoders."""
    library, sdpa = import_module("torch"), import_module(OWNERS[way]).scaled_dot_product_attention
    library.set_num_threads(threads)
    if case.kind in PROGRAMS:
        return _stepping(PROGRAMS[case.kind](library))
    if case.kind in COLUMNS:
        *arrays, padding = case.heads()
        *qkv, grad = (library.from_numpy(x).requires_grad_() for x in arrays)
        if padding and way == "torch":  # its own function takes a mask
            mask = np.arange(case.tokens) < padding["key_lengths"][..., None, None]
            padding = {"attn_mask": library.from_numpy(mask)}
        return calling(lambda: library.autograd.grad(sdpa(*qkv, **padding), qkv, grad), joined)
    f, alone = library.nn.functional, library.inference_mode()
    x, dy = map(library.from_numpy, case.draw())
    own = case.model()
    p = {name: library.from_numpy(array) for name, array in own.state_dict().items()}
    if case.kind == "linear":
        return calling(alone(partial(f.linear, x, **p)))
    if case.kind in ("train", "eval", "forward"):
        layer = library.nn.TransformerEncoderLayer(
            case.width, case.width // 32, 4 * case.width, batch_first=True
        )
        model = library.nn.TransformerEncoder(layer, 2).eval()
        model.load_state_dict(p)
        if case.kind == "forward":
            return calling(alone(partial(model, x)))
        wrt = [x.requires_grad_(), *model.parameters()]  # selfattn returns the input's gradient too

        def both():
            y = model(x)
            return y.detach(), library.autograd.grad(y, wrt, dy)[0]

        return _both(both, model, case.kind)

    def linear(x, name, form="{}.{}"):
        return f.linear(x, p[form.format(name, "weight")], p[form.format(name, "bias")])

    def norm(x, name):
        return f.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"])

    p = {name: tensor.requires_grad_() for name, tensor in p.items()}
    ids, optimizer = library.from_numpy(case.ids()), library.optim.AdamW(p.values(), lr=1e-3, fused=True)

    def loss_of_gpt():
        x = p["token_embedding.weight"][ids[:, :-1]] + p["position_embedding.weight"]
        for i in range(4):
            name = f"layers.{i}"
            joint = linear(norm(x, f"{name}.norm1"), f"{name}.self_attn.in_proj", "{}_{}")
            qkv = joint.unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            y = sdpa(*qkv, is_causal=True).transpose(1, 2).flatten(2)
            x = x + linear(y, f"{name}.self_attn.out_proj")
            x = x + linear(f.gelu(linear(norm(x, f"{name}.norm2"), f"{name}.linear1")), f"{name}.linear2")
        logits = f.linear(norm(x, "norm"), p["token_embedding.weight"])
        return f.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    def step():
        optimizer.zero_grad()
        loss = loss_of_gpt()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return _stepping(step)


def _size(text):
    return tuple(map(int, text.split("x")))


def add_options(parser):
    """Add the options of this program."""
    what = "width (a multiple of 64), tokens, sequences, such as 64x64x16"
    parser.add_argument("--sizes", type=_size, nargs="+", metavar="WxTxB", help=what)


def rows(options):
    """Return the rows of the suites."""
    found = []
    for kind in options.suite:
        for case in (Case(kind, *size) for size in options.sizes or SUITES[kind]):
            ways = OWNERS if kind in ("gpt", *COLUMNS) else ["torch"]
            peers = {"selfattn": Peer(selfattn, case)}
            peers |= {way: Peer(partial(torch, way=way), case) for way in ways if "torch" in options.peers}
            peers |= {"1 thread": Peer(selfattn, case, threads=1)} if options.threads > 1 else {}
            distance = output_and_gradient if kind in ("train", "eval") else largest_difference
            label = f"{kind} {case.width} wide, {case.batch} x {case.tokens}"
            limit = "" if kind in (*COLUMNS, *PROGRAMS) else "float32"
            found.append(Row(label, peers, limit, case.work, tolerance=TOLERANCE, distance=distance))
    return found
