"""nn.GPT: the numbers of plain NumPy, gradients, generation. test_cli_language.py loads one as GPT-2; drawn folders
compare GPT-2."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
from nn_checks import check_gradients, perturbed
from refusals import refusals

from selfattn import nn, reference

V, D, HEADS, LONGEST = 11, 12, 3, 9
KINDS = {
    "GPT-2": {},
    "rotary": {"positions": "rotary"},
    "norms last, relu, a head of its own": {
        "norm_first": False,
        "activation": "relu",
        "tie_word_embeddings": False,
        "dim_feedforward": 5,
    },
    "rotary, no bias": {"positions": "rotary", "bias": False, "layer_norm_eps": 0.1, "rope_theta": 100.0},
}
ALONE, BATCH = np.arange(7) % V, np.random.default_rng(0).integers(0, V, (3, 8))
LISTS = [[3, 1, 4, 1, 5], [9], list(range(9))]


def make(kind="GPT-2", dtype=np.float64, **more):
    return perturbed(nn.GPT(V, D, 2, HEADS, LONGEST, **(KINDS[kind] | {"dtype": dtype, "rng": 0} | more)))


def plain_logits(model, ids):
    """Compute the logits of one sequence step by step, as the docstring describes."""
    p, n, width = model.state_dict(), len(ids), D // HEADS
    angles = np.arange(n)[:, None] * model.rope_theta ** (-2 * np.arange(width // 2) / width)
    x = p["token_embedding.weight"][ids]
    if model.positions == "learned":
        x = x + p["position_embedding.weight"][:n]

    def linear(x, name, weight=".weight", bias=".bias"):
        return x @ p[name + weight].T + p.get(name + bias, 0)

    def norm(x, name, eps):
        return reference.layer_norm(x, x.shape[-1], p[f"{name}.weight"], p.get(f"{name}.bias"), eps)

    def attend(x, name):
        joint = linear(x, f"{name}.self_attn.in_proj", "_weight", "_bias")
        q, k, v = joint.reshape(n, 3, HEADS, width).transpose(1, 2, 0, 3)
        if model.positions == "rotary":
            q, k = (reference.apply_rotary_emb(each, np.cos(angles), np.sin(angles)) for each in (q, k))
        y = reference.scaled_dot_product_attention(q, k, v, is_causal=True)
        return linear(y.swapaxes(0, 1).reshape(n, D), f"{name}.self_attn.out_proj")

    def feed_forward(x, name):
        wide = linear(x, f"{name}.linear1")
        active = np.maximum(wide, 0) if activation == "relu" else reference.gelu(wide)
        return linear(active, f"{name}.linear2")

    for i, layer in enumerate(model.layers):
        name, eps, activation = f"layers.{i}", layer.norm1.eps, layer.activation
        for number, add in ((1, attend), (2, feed_forward)):
            own = f"{name}.norm{number}"
            x = x + add(norm(x, own, eps), name) if layer.norm_first else norm(x + add(x, name), own, eps)
    return (x if model.norm is None else norm(x, "norm", model.norm.eps)) @ p["head.weight"].T


def plain_loss(model, pairs):
    """Compute the mean cross-entropy over pairs of ids and targets."""
    losses = []
    for ids, targets in pairs:
        logs = reference.log_softmax(plain_logits(model, np.asarray(ids)))
        losses += [-logs[i, t] for i, t in enumerate(targets) if t != -100]
    return np.mean(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_plain_numpy(kind):
    model = make(kind)
    expected = plain_logits(model, ALONE)
    # Sums of up to 48 terms, ten after one another.
    np.testing.assert_allclose(model(ALONE), expected, rtol=0, atol=1e-13 * max(1, np.abs(expected).max()))
    y = model(BATCH)
    assert y.shape == (3, 8, V)
    np.testing.assert_array_equal(y, list(map(model, BATCH)))
    y = model(LISTS)
    assert [own.shape for own in y] == [(5, V), (1, V), (9, V)]
    np.testing.assert_equal(y, list(map(model, LISTS)))


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_that_of_plain_numpy(kind):
    model = make(kind)
    whole = [own for own in LISTS if len(own) > 1]
    for ids in ([ALONE], BATCH, whole):
        expected = plain_loss(model, [(own[:-1], own[1:]) for own in ids])
        assert model.loss(ids) == pytest.approx(expected, abs=1e-13)
    targets = [[1, -100, 2, 3, 4], [-100], [5] * 9]
    expected = plain_loss(model, zip(LISTS, targets, strict=True))
    assert model.loss(LISTS, targets) == pytest.approx(expected, abs=1e-13)
    assert model.loss_vjp(LISTS, targets)[0] == model.loss(LISTS, targets)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_finite_differences(kind):
    """The gradients are those of tiny models: of the loss, and of the logits of sequences of different lengths."""
    heads = 1 if KINDS[kind].get("positions") == "rotary" else HEADS
    model = perturbed(nn.GPT(5, 6, 1, heads, 4, **KINDS[kind], dtype=float, rng=0))
    ids = [[1, 4, 0, 1], [2, 3]]
    load = functools.partial(model.load_state_dict, strict=False)
    loose = SimpleNamespace(parameters=model.parameters, load_state_dict=load)

    def loss():
        value, pullback = model.loss_vjp(ids)
        return np.float64(value), lambda d_value: ((), pullback(d_value))

    check_gradients(loose, loss)

    def logits():
        y, pullback = model.vjp(ids)
        ends = np.cumsum([len(own) for own in y])[:-1]
        return np.concatenate(y), lambda dy: ((), pullback(np.split(dy, ends)))

    check_gradients(loose, logits)


def greedy(model, prompt, count):
    """Take the likeliest token, and compute everything again."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache_is_that_without(kind, isa):
    model = make(kind, dtype=np.float32)
    prompts = [[3, 1], [5], [1, 2, 3, 4, 5]]
    written = model.generate(prompts, 4)
    for own, prompt in zip(written, prompts, strict=True):
        assert own.dtype == np.int64
        assert own.tolist() == greedy(model, prompt, 4) == model.generate(prompt, 4).tolist()
    assert [own.tolist() for own in model.generate(np.array([[3, 1], [1, 3]]), 2)] == [
        greedy(model, [3, 1], 2),
        greedy(model, [1, 3], 2),
    ]


def test_streams_and_stops():
    model = make(dtype=np.float32)
    whole = greedy(model, [3, 1], 6)
    assert list(model.generate([3, 1], 6, stream=True)) == whole
    steps = list(model.generate([[3, 1], [5]], 6, stream=True))
    assert [step[0] for step in steps] == whole
    stop = whole[2]
    expected = whole[: whole.index(stop) + 1]
    assert model.generate([3, 1], 6, stop=stop).tolist() == expected
    assert model.generate([3, 1], 6, stop=[stop]).tolist() == expected
    for form in (np.array(stop), np.array([stop], np.uint8), iter([stop]), [np.array(stop)], {np.int8(stop)}):
        assert model.generate([3, 1], 6, stop=form).tolist() == expected


def test_the_context_ends_generation():
    model = make(dtype=np.float32)
    with pytest.warns(UserWarning, match="the context of 9 tokens is full"):
        written = model.generate([1, 2, 3], 50)
    assert len(written) == LONGEST - 3 + 1  # the last token is computed from a full context


def test_generation_drops_nothing():
    model = make(dtype=np.float32, dropout=0.5)
    assert model.training
    expected = model.generate([1, 2], 5).tolist()
    assert model.generate([1, 2], 5).tolist() == expected
    assert model.eval().generate([1, 2], 5).tolist() == expected
    assert model.loss(ALONE) == model.loss(ALONE)
    assert model.train().loss(ALONE) != model.loss(ALONE)


def test_new_weights_are_gpt2s():
    model = nn.GPT(200, 64, 8, 4, 100, rng=0)
    stds = {name: array.std() for name, array in model.parameters().items() if array.ndim == 2}
    for name, std in stds.items():
        added = name.endswith(("out_proj.weight", "linear2.weight"))
        # The standard deviation of 4096 numbers or more is off by 1.1 %; four times that is allowed.
        assert std == pytest.approx(0.02 / (4 if added else 1), rel=0.045), name
    biases = [array for name, array in model.parameters().items() if name.endswith("bias")]
    assert len(biases) == 8 * 6 + 1
    assert not any(array.any() for array in biases)
    again = nn.GPT(200, 64, 8, 4, 100, rng=0).parameters()
    assert all((array == again[name]).all() for name, array in model.parameters().items())


def test_a_tied_head_is_one_parameter():
    model = make()
    assert model.head.weight is model.token_embedding.weight
    assert "head.weight" in model.state_dict()
    assert "head.weight" not in model.parameters()
    own = copy.deepcopy(model)
    assert own.head.weight is own.token_embedding.weight is not model.head.weight
    for name in ("head.weight", "token_embedding.weight"):  # each is enough, as in files of Transformers
        own.token_embedding.weight[...] = 0
        state = model.state_dict()
        del state[name]
        own.load_state_dict(state)
        np.testing.assert_array_equal(own.head.weight, model.head.weight)
    with pytest.raises(ValueError, match="missing: token_embedding"):
        own.load_state_dict(
            {name: x for name, x in state.items() if "head" not in name and "token" not in name}
        )
    assert "head.weight" in make(tie_word_embeddings=False).parameters()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_parameters_compute_in_float32(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    model = make(dtype=np.float32)
    narrow = make(dtype=dtype)
    narrow.load_state_dict(model.state_dict(), strict=False)
    model.load_state_dict(narrow.state_dict(), strict=False)
    np.testing.assert_array_equal(narrow(ALONE), model(ALONE))
    assert narrow.generate([1, 2], 5).tolist() == model.generate([1, 2], 5).tolist()
    grads, wide = narrow.loss_vjp(ALONE)[1](1.0), model.loss_vjp(ALONE)[1](1.0)
    np.testing.assert_equal(grads, {name: grad.astype(dtype) for name, grad in wide.items()})


def test_rounded_weights():
    model = make(dtype=np.float32)
    before, wide = model.generate([1, 2], 5), model(ALONE)
    model.quantize("int8")
    # 8 bits give errors of 0.4 % of a group's largest number, in ten products one after the other.
    assert np.abs(model(ALONE) - wide).max() < 0.1 * np.abs(wide).max()
    assert len(model.generate([1, 2], 5)) == len(before)
    assert model.loss(ALONE) > 0
    with pytest.raises(ValueError, match="int8 have no gradients"):
        model.loss_vjp(ALONE)


def test_no_layers_and_no_sequences():
    model = nn.GPT(V, D, 0, 1, 3, dtype=np.float64, rng=0)
    np.testing.assert_allclose(model([1, 2]), plain_logits(model, [1, 2]), rtol=1e-12)
    assert model.generate([1], 2).shape == (2,)
    assert model(np.zeros((0, 3), int)).shape == (0, 3, V)


test_bad_calls = refusals(
    (lambda m: m([]), ValueError, "sequence 0 has 0 tokens; there must be 1 to 9, max_seq_len"),
    (lambda m: m([[1], []]), ValueError, "sequence 1 has 0 tokens"),
    (lambda m: m([1] * 10), ValueError, "sequence 0 has 10 tokens"),
    (lambda m: m([11]), ValueError, r"ids must be in 0\.\.\.10, not 11"),
    (lambda m: m([-1]), ValueError, r"ids must be in 0\.\.\.10, not -1"),
    (lambda m: m([1.5]), TypeError, "ids must be integers, got float64"),
    (lambda m: m([[1], [1.5]]), TypeError, "ids of sequence 1 must be integers"),
    (lambda m: m([[1], [[2]]]), ValueError, r"ids of sequence 1 must have shape \(L,\)"),
    (lambda m: m(np.zeros((1, 1, 1), int)), ValueError, r"ids must have shape \(L,\) or \(N, L\)"),
    (lambda m: m.loss([[1, 2], [3]]), ValueError, "sequence 1 has 1 tokens; there must be 2"),
    (lambda m: m.loss([1, 2], [1]), ValueError, r"targets must have the lengths of ids, \[2\], not \[1\]"),
    (lambda m: m.loss([1, 2], [1, 11]), ValueError, r"target must be in 0\.\.\.10, or -100"),
    (lambda m: m.generate([]), ValueError, "prompt 0 is empty"),
    (lambda m: m.generate([1] * 10), ValueError, "prompt 0 has 10 tokens; the context of this model has 9"),
    (lambda m: m.generate([[1], [11]]), ValueError, r"ids must be in 0\.\.\.10, prompt 1 has 11"),
    (lambda m: m.generate([1], temperature=np.inf), ValueError, "temperature must be"),
    (lambda m: m.generate([1], stop="."), TypeError, r"stop must be an int, not '\.'"),
    (lambda m: m.generate([1], stop=[1.5]), TypeError, "stop must be an int, not 1.5"),
    (lambda m: nn.GPT(5, 6, 1, 4, 3), ValueError, "num_heads must divide d_model; 4 does not divide 6"),
    (lambda m: nn.GPT(5, 6, 1, 3, 3, "absolute"), ValueError, 'positions must be "learned" or "rotary"'),
    (lambda m: nn.GPT(5, 6, 1, 2, 3, "rotary"), ValueError, "heads must have an even width"),
    (lambda m: nn.GPT(5, 6, 1, 2, 3, activation="tanh"), ValueError, "activation must be"),
    (
        lambda m: m.vjp([1, 2])[1](np.zeros((3, V))),
        ValueError,
        r"dy must have the shape of the result, \(2, 11\)",
    ),
    (lambda m: m.vjp([[1], [2]])[1](1.0), ValueError, r"dy must have a gradient for each of 2 .* not 1\.0"),
    (lambda m: m.vjp([[1], [2]])[1]([np.zeros((1, V))]), ValueError, "dy must have a gradient for each of 2"),
    given=make,
)
