"""Implementations as students write them, each with one step that is wrong: `diagnose` names it."""

import re
import time

import numpy as np
import pytest

import selfattn as sa

SOFTMAX = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""
ONE = """
def attention(Q, K, V, mask=None):
    S = Q @ K.T / np.sqrt(Q.shape[1])
    if mask is not None:
        S = np.where(mask, S, -1e9)
    P = softmax(S)
    return P @ V, P
"""
CAUSAL = """
def attention(query, key, value, causal=False):
    scores = query @ key.transpose(0, 2, 1) * query.shape[2] ** -0.5
    if causal:
        scores += np.triu(np.full(scores.shape[1:], -1e9), 1)
    return softmax(scores) @ value
"""
HEADS = """
def attention(q, k, v, padding=None):
    scores = np.einsum("blhd,bshd->bhls", q, k) / np.sqrt(q.shape[3])
    if padding is not None:
        scores = np.where(padding[:, None, None, :], -1e9, scores)
    return np.einsum("bhls,bshd->blhd", softmax(scores), v)
"""
ADDED = """
def attention(q, k, v, bias=None):
    scores = q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3])
    if bias is not None:
        scores = scores + bias
    return softmax(scores) @ v
"""
LOOPS = """
def attention(q, k, v, padding_mask=None):
    out = np.zeros(q.shape)
    for b in range(len(q)):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                s = k[b, h] @ q[b, h, i] / np.sqrt(q.shape[3])
                if padding_mask is not None:
                    s[padding_mask[b]] = -1e9
                out[b, h, i] = softmax(s) @ v[b, h]
    return out
"""
LAYER = """
class Layer:
    def __init__(self, d_model, num_heads, W_q, W_k, W_v, W_o):
        self.heads, self.weights = num_heads, (W_q, W_k, W_v, W_o)
    def split(self, y):
        return y.reshape(*y.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)
    def forward(self, x):
        W_q, W_k, W_v, W_o = self.weights
        q, k, v = self.split(x @ W_q), self.split(x @ W_k), self.split(x @ W_v)
        P = softmax(q @ k.swapaxes(2, 3) / np.sqrt(q.shape[3]))
        return (P @ v).transpose(0, 2, 1, 3).reshape(x.shape) @ W_o
"""
GROUPS = """
def attention(q, k, v):
    n = q.shape[1] // k.shape[1]
    P = softmax(q @ np.repeat(k, n, 1).swapaxes(2, 3) / np.sqrt(q.shape[3]))
    return P @ np.repeat(v, n, 1)
"""
TORCH = """
import torch
def attention(q, k, v, mask=None, dropout=0.0):
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    P = torch.dropout(torch.softmax(scores, dim=-1), dropout, True)
    return P @ v
"""
BACK = """
def attention(q, k, v, mask=None):
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    return softmax(s if mask is None else np.where(mask, s, -1e9)) @ v
def attention_vjp(q, k, v, grad_out, mask=None):
    scale = 1 / np.sqrt(q.shape[-1])
    S = q @ k.swapaxes(-1, -2) * scale
    S = S if mask is None else np.where(mask, S, -1e9)
    P = softmax(S)
    dV = P.swapaxes(-1, -2) @ grad_out
    dP = grad_out @ v.swapaxes(-1, -2)
    dS = P * (dP - (dP * P).sum(-1, keepdims=True))
    return dS @ k * scale, dS.swapaxes(-1, -2) @ q * scale, dV
"""
KEPT = """
def attention_vjp(q, k, v, keep, p, g):
    P, drop = softmax(q @ k.T / np.sqrt(q.shape[1])), keep / (1 - p)
    dP = g @ v.T * drop
    dS = P * (dP - (dP * P).sum(1, keepdims=True)) / np.sqrt(q.shape[1])
    return dS @ k, dS.T @ q, (P * drop).T @ g
"""
LAYER_BACK = """
def layer_vjp(x, W_q, W_k, W_v, g):
    q, k, v = x @ W_q, x @ W_k, x @ W_v
    P = softmax(q @ k.T / np.sqrt(q.shape[1]))
    dP = g @ v.T
    dS = P * (dP - (dP * P).sum(1, keepdims=True)) / np.sqrt(q.shape[1])
    dq, dk, dv = dS @ k, dS.T @ q, P.T @ g
    return dq @ W_q.T + dk @ W_k.T + dv @ W_v.T, x.T @ dq, x.T @ dk, x.T @ dv
"""
GROUPS_BACK = """
def attention_vjp(q, k, v, g):
    n, r = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    K, V = np.repeat(k, n, 1), np.repeat(v, n, 1)
    P = softmax(q @ K.swapaxes(2, 3) * r)
    dP = g @ V.swapaxes(2, 3)
    dS = P * (dP - (dP * P).sum(-1, keepdims=True)) * r
    def gather(d):
        return d.reshape(len(d), -1, n, *d.shape[2:]).sum(2)
    return dS @ K, gather(dS.swapaxes(2, 3) @ q), gather(P.swapaxes(2, 3) @ g)
"""
CAUSAL_BACK = """
def attend(q, k, v):
    s = q @ k.T / np.sqrt(q.shape[1])
    return softmax(np.where(np.tri(*s.shape) > 0, s, -1e9)) @ v
def attend_backward(q, k, v, d_out):
    s = q @ k.T / np.sqrt(q.shape[1])
    P = softmax(np.where(np.tri(*s.shape) > 0, s, -1e9))
    dP = d_out @ v.T
    dS = P * (dP - (dP * P).sum(1, keepdims=True)) / np.sqrt(q.shape[1])
    return {"dk": dS.T @ q, "dq": dS @ k, "dv": P.T @ d_out}
"""
MASKED = "S if mask is None else np.where(mask, S, -1e9)"
FAULTS = [
    (ONE, "np.where(mask, S, -1e9)", "np.where(mask, -1e9, S)", "mask-inverted"),
    (ONE, "Q.shape[1]", "K.shape[0]", "scale-length"),
    (ONE, "/ np.sqrt(Q.shape[1])", "", "scale-none"),
    (ONE, "np.sqrt(Q.shape[1])", "Q.shape[1]", "scale-d"),
    (ONE, "-1, keepdims", "0, keepdims", "softmax-queries"),
    (ONE, "e.sum(-1, keepdims=True)", "e.sum()", "softmax-all"),
    (ONE, "Q @ K.T", "K @ Q.T", "qk-swapped"),
    (ONE, "Q @ K.T", "Q.astype('e') @ K.T.astype('e')", "float16"),
    (ONE, "-1e9", "0", "mask-zero"),
    (ONE, "-1e9", "-np.inf", "dead-row"),
    (ONE, "(mask,", "(mask.T,", "mask-transposed"),
    (ONE, "P @ V", "P.T @ V", "weights-transposed"),
    (CAUSAL, "-1e9), 1)", "-1e9), 2)", "causal-ahead"),
    (CAUSAL, "-1e9), 1)", "-1e9), 0)", "causal-behind"),
    (CAUSAL, "np.triu(np.full(scores.shape[1:], -1e9), 1)", "np.tril(np.full(scores.shape[1:], -1e9), -1)",
     "causal-inverted"),
    (ONE, "S = np.where(mask, S, -1e9)\n    P = softmax(S)", "pass\n    P = softmax(S) * (1 if mask is None else mask)",
     "mask-after-softmax"),
    (HEADS, "[:, None, None, :]", "[None, :, None, :]", "mask-broadcast"),
    (HEADS, "[:, None, None, :]", "[:, None, :, None]", "mask-queries"),
    (HEADS, "-1, keepdims", "1, keepdims", "softmax-heads"),
    (HEADS, 'return np.einsum("bhls,bshd->blhd", softmax(scores), v)',
     'return np.einsum("bhls,bshd->bhld", softmax(scores), v).reshape(q.shape)', "heads-merge"),
    (ADDED, "/ np.sqrt(q.shape[3])\n    if bias is not None:\n        scores = scores + bias",
     "\n    if bias is not None:\n        scores = scores + bias\n    scores = scores / np.sqrt(q.shape[3])",
     "scale-after-mask"),
    (LOOPS, "padding_mask[b]", "padding_mask[h]", "mask-broadcast"),
    (LAYER, "x @ W_k", "x @ W_k.T", "projection-transposed"),
    (LAYER, "reshape(*y.shape[:2], self.heads, -1).transpose(0, 2, 1, 3)",
     "reshape(len(y), self.heads, y.shape[1], -1)", "heads-split"),
    (LAYER, "np.sqrt(q.shape[3])", "np.sqrt(x.shape[2])", "scale-model"),
    (GROUPS, "np.repeat(v, n, 1)", "np.tile(v, (1, n, 1, 1))", "groups-order"),
    (TORCH, "P = torch.dropout(torch.softmax(scores, dim=-1), dropout, True)\n    return P @ v",
     "return torch.dropout(torch.softmax(scores, dim=-1) @ v, dropout, True)", "dropout-output"),
    (TORCH, "mask == 0", "mask == 1", "mask-inverted"),
    (BACK, "(dP - (dP * P).sum(-1, keepdims=True))", "dP", "ds-row-term"),
    (BACK, "dS.swapaxes(-1, -2) @ q", "dS @ q", "dk-untransposed"),
    (BACK, "P.swapaxes(-1, -2) @ grad_out", "P @ grad_out", "dv-untransposed"),
    (BACK, MASKED, "S", "mask-gradient"),
    (BACK, "dS @ k * scale", "dS @ k", "scale-gradient"),
    (KEPT, "g @ v.T * drop", "g @ v.T", "dropout-backward"),
    (LAYER_BACK, " + dv @ W_v.T", "", "dx-path"),
    (LAYER_BACK, "x.T @ dk", "dk.T @ x", "weight-gradient-transposed"),
    (GROUPS_BACK, "d.reshape(len(d), -1, n, *d.shape[2:]).sum(2)", "d[:, ::n]", "groups-not-summed"),
    (CAUSAL_BACK, "P = softmax(np.where(np.tri(*s.shape) > 0, s, -1e9))", "P = softmax(s)", "mask-gradient"),
]  # fmt: skip
SOURCES = (
    ONE,
    CAUSAL,
    HEADS,
    ADDED,
    LOOPS,
    LAYER,
    GROUPS,
    TORCH,
    BACK,
    KEPT,
    LAYER_BACK,
    GROUPS_BACK,
    CAUSAL_BACK,
)


def verdict(source, **options):
    if source.startswith(TORCH[:15]):
        pytest.importorskip("torch")
    names = {}
    exec(SOFTMAX + source, names)
    last = re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)[-1]
    diagnose = sa.diagnose_vjp if re.search("vjp|backward", last) else sa.diagnose
    return diagnose(names[last], **options)


@pytest.mark.parametrize(
    "number", range(len(FAULTS)), ids=[f"{n}-{fault[-1]}" for n, fault in enumerate(FAULTS)]
)
def test_the_step_that_is_wrong_is_named(number):
    source, right, wrong, name = FAULTS[number]
    both = SOFTMAX + source if right not in source else source
    assert right in both
    start = time.process_time()
    found = verdict(both.replace(right, wrong), mask="open" if name == "mask-inverted" else None)
    assert time.process_time() - start < 2
    assert found.names == [name]
    assert len(found.faults) == 1
    assert found.faults[0] in str(found)
    assert "nothing differs" not in str(found)


@pytest.mark.parametrize("source", SOURCES, ids=[f"source-{n}" for n in range(len(SOURCES))])
def test_nothing_differs_without_the_fault(source):
    found = verdict(source)
    assert not found.faults
    assert "nothing differs" in str(found)


def test_two_faults_are_both_named():
    found = verdict(CAUSAL.replace("query.shape[2] ** -0.5", "1").replace("-1e9), 1)", "-1e9), 2)"))
    assert found.names == ["scale-none", "causal-ahead"]


def test_what_no_rule_explains_is_not_guessed():
    found = verdict(ONE.replace("P = softmax(S)", "P = softmax(S) ** 3"))
    assert not found.faults
    assert not found.right
    assert "nothing differs" not in str(found)
    assert "first difference: output[0, 0]" in str(found)


def test_the_evidence_is_small_and_shows_both_numbers():
    text = str(verdict(ONE.replace("Q @ K.T", "K @ Q.T")))
    assert re.search(r"first difference: output\[0, 0\] must be (-?[\d.]+), and is (?!\1)-?[\d.]+", text)
    assert "expected [[" in text and "got [[" in text


def test_the_page_compares_the_steps():
    found = verdict(HEADS.replace("/ np.sqrt(q.shape[3])", ""))
    page = found.page().html
    assert found.faults[0] in page
    assert f'"name":"{found.stage}"' in page
    assert "yours 0" in page
    assert found._repr_html_().startswith("<div><pre>attention")
    assert "<svg" in verdict(BACK.replace("(dP - (dP * P).sum(-1, keepdims=True))", "dP")).page().svg


def test_a_call_that_is_not_clear_is_refused():
    def attention(q, k, v, eta):
        return q

    with pytest.raises(ValueError, match="what eta of attention means"):
        sa.diagnose(attention)
    with pytest.raises(ValueError, match="could not be called: ZeroDivisionError"):
        sa.diagnose(lambda q, k, v: 1 / 0)
    with pytest.raises(TypeError, match="has no forward"):
        sa.diagnose(3)
    with pytest.raises(ValueError, match="mask"):
        sa.diagnose(attention, mask="inverted")


def test_arguments_say_what_names_do_not():
    names = {}
    exec(
        SOFTMAX + "def f(one, two, three, four, five): return five * softmax(one @ two.T * four) @ three",
        names,
    )
    roles = {"one": "q", "two": "k", "three": "v", "four": "scale", "five": 1.0}
    assert sa.diagnose(names["f"], arguments=roles).right
    assert sa.diagnose(names["f"], arguments=roles | {"five": 2.0}).names == []


def test_the_layout_can_be_said():
    names = {}
    exec(SOFTMAX + "def f(q, k, v): return softmax(q @ k.swapaxes(2, 3) / q.shape[3] ** 0.5) @ v", names)
    assert sa.diagnose(names["f"], layout="B, H, L, E").right
    assert sa.diagnose(names["f"], layout="BLHE").names == ["heads-layout"]


def test_the_command_prints_the_verdict_and_writes_a_page(tmp_path, capsys):
    from selfattn.cli.app import main

    file = tmp_path / "homework_of_one.py"
    file.write_text(SOFTMAX + BACK.replace("dS @ k * scale", "dS @ k"), encoding="utf-8")
    assert main(["diagnose", f"{file}:attention"]) == 0
    assert "nothing differs" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["diagnose", f"{file}:attention_vjp", "--out", str(page)]) == 1
    assert "lack the scale" in capsys.readouterr().out
    assert page.exists()
    assert main(["diagnose", f"{file}:other"]) == 1
    assert "has no 'other'; it has softmax, attention, attention_vjp" in capsys.readouterr().err
    assert main(["diagnose", str(file)]) == 2


def test_large_evidence_is_one_row():
    """Where no small input shows a fault, as for dropout, the text still fits on a screen."""

    def attention(q, k, v, dropout_p=0.0):
        weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        out = weights / weights.sum(axis=-1, keepdims=True) @ v
        keep = np.random.default_rng().random(out.shape) >= dropout_p
        return out * keep / (1 - dropout_p)

    verdict = sa.diagnose(attention)
    assert verdict.names == ["dropout-output"]
    text = str(verdict)
    assert len(text.splitlines()) < 25 and "q: drawn, " in text and "first difference" in text
