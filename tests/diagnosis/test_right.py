"""Right implementations of all layouts, masks and options: no verdict says that something is wrong."""

import numpy as np
import pytest

import selfattn as sa
from selfattn import nn

LAYOUTS = {
    "LE": ("ld,sd->ls", "ls,sd->ld"),
    "BLE": ("bld,bsd->bls", "bls,bsd->bld"),
    "LBE": ("lbd,sbd->bls", "bls,sbd->lbd"),
    "BHLE": ("bhld,bhsd->bhls", "bhls,bhsd->bhld"),
    "BLHE": ("blhd,bshd->bhls", "bhls,bshd->blhd"),
}


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def right(layout, kind):
    """Return attention in a layout, with one kind of mask or option."""
    first, second = LAYOUTS[layout]

    def attend(q, k, v, change=lambda s: s, after=lambda w: w, scale=None):
        scores = np.einsum(first, q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        return np.einsum(second, after(softmax(change(scores))), v)

    def seen(s, diagonal=0):
        return np.where(np.tri(*s.shape[-2:], diagonal) > 0, s, -1e30)

    def padded(s, mask):
        return mask if s.ndim == 2 else mask.reshape(len(mask), *[1] * (s.ndim - 2), -1)

    def masked(change):
        return lambda q, k, v, mask=None: attend(
            q, k, v, (lambda s: s) if mask is None else lambda s: change(s, mask)
        )

    def weighted(q, k, v):
        scores = np.einsum(first, q, k) * q.shape[-1] ** -0.5
        return softmax(scores), np.einsum(second, softmax(scores), v)

    def cautious(q, k, v, mask=None):
        def weights(s):
            exp = np.exp(s) if mask is None else np.exp(s) * mask
            return exp / np.maximum(exp.sum(-1, keepdims=True), 1e-30)

        return np.einsum(second, weights(np.einsum(first, q, k) * q.shape[-1] ** -0.5), v)

    return {
        "plain": lambda query, key, value: 1.0 * attend(query, key, value),
        "nameless": lambda a, b, c: 1.0 * attend(a, b, c),
        "reordered": lambda values, keys, queries: attend(queries, keys, values),
        "single precision": lambda q, k, v: attend(*(x.astype(np.float32) for x in (q, k, v))),
        "weights": weighted,
        "named": lambda q, k, v: {"output": attend(q, k, v), "scores": np.zeros(3)},
        "scale": lambda q, k, v, scale: attend(q, k, v, scale=scale),
        "causal": lambda q, k, v: attend(q, k, v, seen),
        "flag": lambda q, k, v, is_causal=True: attend(q, k, v, seen if is_causal else lambda s: s),
        "lower right": lambda q, k, v: attend(q, k, v, lambda s: seen(s, s.shape[-1] - s.shape[-2])),
        "open": masked(lambda s, mask: np.where(mask, s, -1e9)),
        "closed": masked(lambda s, mask: np.where(mask, np.finfo(float).min, s)),
        "numbers": masked(lambda s, mask: s + (1.0 - mask) * -1e9),
        "added": masked(lambda s, mask: s + mask),
        "scaled after": lambda q, k, v, mask=None: attend(
            q,
            k,
            v,
            lambda s: (s if mask is None else np.where(mask, s * 2, -1e9)) / (1 if mask is None else 2),
        ),
        "needed": lambda q, k, v, mask: attend(q, k, v, lambda s: np.where(mask, s, -1e9)),
        "zero": cautious,
        "padding": lambda q, k, v, key_padding_mask=None: attend(
            q,
            k,
            v,
            lambda s: s if key_padding_mask is None else np.where(padded(s, key_padding_mask), -1e9, s),
        ),
        "kept": lambda q, k, v, keep, p: attend(q, k, v, after=lambda w: w * keep / (1 - p)),
        "dropout": lambda q, k, v, rng, dropout_p=0.0: attend(
            q, k, v, after=lambda w: w * (rng.random(w.shape) >= dropout_p) / (1 - dropout_p)
        ),
    }[kind]


KINDS = (
    *("plain", "nameless", "reordered", "single precision", "weights", "named", "scale", "causal", "flag"),
    *(
        "lower right",
        "open",
        "closed",
        "numbers",
        "added",
        "scaled after",
        "needed",
        "zero",
        "padding",
        "kept",
    ),
    "dropout",
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_differs(layout, kind):
    found = sa.diagnose(right(layout, kind))
    assert found.right, str(found)


class OwnWeights:
    def __init__(self, d_model, heads):
        rng = np.random.default_rng(1)
        self.heads = heads
        self.parameters = {
            name: rng.standard_normal((d_model, d_model)) / 3 for name in ("Wq", "Wk", "Wv", "Wo")
        }

    def __call__(self, x, mask=None):
        def split(y):
            return y.reshape(*y.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)

        q, k, v = (split(x @ self.parameters[name].T) for name in ("Wq", "Wk", "Wv"))
        scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])
        weights = softmax(scores if mask is None else np.where(mask, -1e9, scores))
        return (weights @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ self.parameters["Wo"].T


def fused(x, W_qkv, W_out, num_heads):
    q, k, v = (y.reshape(*y.shape[:2], num_heads, -1).swapaxes(1, 2) for y in np.split(x @ W_qkv, 3, -1))
    y = softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])) @ v
    return y.swapaxes(1, 2).reshape(x.shape) @ W_out


def cross(x, context, W_q, W_k, W_v, b_v):
    q, k, v = x @ W_q, context @ W_k, context @ W_v + b_v
    return softmax(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])) @ v


def split_inside(q, k, v, num_heads):
    q, k, v = (y.reshape(*y.shape[:2], num_heads, -1).swapaxes(1, 2) for y in (q, k, v))
    y = softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[-1])) @ v
    return y.swapaxes(1, 2).reshape(len(y), y.shape[2], -1)


class Tempered:
    def __init__(self, temperature):
        self.temperature = temperature

    def forward(self, q, k, v):
        return softmax(q @ k.swapaxes(-1, -2) / self.temperature) @ v


def sized(q, k, v, d, mask=None, mask_value=-1e9, d_k=None):
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d if d_k is None else d_k)
    return softmax(scores if mask is None else np.where(mask, scores, mask_value)) @ v


def itself(x):
    return softmax(x @ x.swapaxes(-1, -2) / np.sqrt(x.shape[-1])) @ x


@pytest.mark.parametrize(
    "function",
    (
        *(
            sa.scaled_dot_product_attention,
            sa.reference.scaled_dot_product_attention,
            OwnWeights,
            OwnWeights(6, 3),
        ),
        *(fused, cross, itself, nn.MultiheadAttention(8, 2), nn.SelfAttention(6, 4)),
        *(nn.ScaledDotProductAttention(), split_inside, Tempered, Tempered(8.0), sized),
    ),
)
def test_nothing_differs_in_layers_and_in_selfattn(function):
    found = sa.diagnose(function)
    assert found.right, str(found)


def test_nothing_differs_in_a_backward_pass():
    assert sa.diagnose_vjp(sa.scaled_dot_product_attention_vjp).right


def test_nothing_differs_in_pytorch():
    torch = pytest.importorskip("torch")
    functional = torch.nn.functional

    def by_autograd(q, k, v, grad):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        functional.scaled_dot_product_attention(*given).backward(grad)
        return [x.grad for x in given]

    assert sa.diagnose(functional.scaled_dot_product_attention).right
    assert sa.diagnose(torch.nn.MultiheadAttention(8, 2, batch_first=True)).names == [
        "dead-row"
    ]  # as PyTorch says
    assert sa.diagnose_vjp(by_autograd).right


def test_nothing_differs_on_the_tape():
    names = {}
    exec(
        """
import selfattn.tape as torch
class Attention(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(d_model, d_model) for _ in range(3))
    def forward(self, x):
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / x.shape[-1] ** 0.5
        return torch.softmax(scores, dim=-1) @ self.value(x)
def attention(q, k, v):
    return torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1) @ v
""",
        names,
    )
    assert sa.diagnose(names["attention"]).right
    assert sa.diagnose(names["Attention"]).right
