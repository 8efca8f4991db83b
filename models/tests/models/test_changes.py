"""Changes of intermediate values, against Transformers with hooks at the same places."""

import numpy as np
import pytest
from architectures import CONFIGS, LANGUAGE, PICTURES, TEXTS, VOCABULARY, their_name

import selfattn_models as models
from selfattn import nn
from selfattn.steps import Change

EPS = np.finfo(np.float32).eps
# The modules of a layer in Transformers whose results are the steps projected_output and down; the first one's input
# are the heads' outputs.
PLACES = dict.fromkeys(("Bert", "Roberta", "XLMRoberta"), ("attention.output.dense", "output.dense")) | {
    "DistilBert": ("attention.out_lin", "ffn.lin2"),
    "MPNet": ("attention.attn.o", "output.dense"),
    "ModernBert": ("attn.Wo", "mlp.Wo"),
    "ViT": ("attention.o_proj", "mlp.fc2"),
    "Dinov2": ("attention.o_proj", "mlp.fc2"),
    "GPT2": ("attn.c_proj", "mlp.c_proj"),
    **dict.fromkeys(
        ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma3", "SmolLM3", "Phi3"),
        ("self_attn.o_proj", "mlp.down_proj"),
    ),
}


def their_run(theirs, family, given, edit=lambda step, n, x, own: x):
    """Their last hidden states, (L, d); ``edit`` gets and returns each layer's scores, weights, output, …, as NumPy
    arrays.
    """
    import torch

    layers = next(each for each in theirs.modules() if isinstance(each, torch.nn.ModuleList))
    heads = theirs.config.num_attention_heads
    handles, softmax, calls, inputs = [], torch.nn.functional.softmax, [], {}

    def edited(step, n, x):
        array = x.detach().numpy()[0]
        return torch.tensor(np.array(edit(step, n, array, inputs.get(n)))[None])

    def soft(x, *args, **kwargs):
        n = len(calls)
        calls.append(n)
        return edited("weights", n, softmax(edited("scores", n, x), *args, **kwargs))

    def enters(module, args, kwargs, n):
        inputs[n] = (args[0] if args else kwargs["hidden_states"]).detach().numpy()[0]

    def by_head(module, args, n):
        x = args[0].reshape(1, -1, heads, args[0].shape[-1] // heads).transpose(1, 2)
        return (edited("output", n, x).transpose(1, 2).reshape(args[0].shape),)

    def leaves(step):
        return lambda module, args, y, n: (
            (edited(step, n, y[0]), *y[1:]) if isinstance(y, tuple) else edited(step, n, y)
        )

    def hook(module, n, function, before=False, **kwargs):
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        handles.append(register(lambda *args: function(*args, n), **kwargs))

    first, last = PLACES[family]
    for n, layer in enumerate(layers):
        hook(layer, n, enters, before=True, with_kwargs=True)
        hook(layer.get_submodule(first), n, by_head, before=True)
        scaled = family == "Dinov2"
        hook(layer.layer_scale1 if scaled else layer.get_submodule(first), n, leaves("projected_output"))
        hook(layer.layer_scale2 if scaled else layer.get_submodule(last), n, leaves("down"))
        hook(layer, n, leaves("result"))
    torch.nn.functional.softmax = soft
    try:
        return theirs(torch.tensor(np.asarray(given)[None])).last_hidden_state.detach().numpy()[0]
    finally:
        torch.nn.functional.softmax = softmax
        for each in handles:
            each.remove()


def drawn_change(rng, ours, theirs, family, given, other):
    """A change, and what does the same in `their_run`."""
    layer = int(rng.integers(ours.num_layers))
    kind = str(rng.choice(["off", "patch", "mean", "apply", "hide"]))
    step = str(rng.choice(["output", "weights", "projected_output", "down", "result"]))
    length, own, n_heads = *(len(ours.hidden_states(text)[0]) for text in (given, other)), ours.num_heads
    if step == "weights" and (kind == "mean" or own != length):
        step = "output"
    tokens = (
        None if rng.integers(2) and own == length else sorted(rng.choice(min(own, length), 2, False).tolist())
    )
    by_head = step in ("output", "weights") or kind == "hide"
    heads = sorted(rng.choice(n_heads, 2, replace=False).tolist()) if by_head and rng.integers(3) else None
    every = range(n_heads) if heads is None else heads
    all_tokens = range(length) if tokens is None else tokens
    at, kept = np.ix_(*([every] if by_head else []), all_tokens), {}
    their_run(theirs, family, other, lambda name, n, x, _: kept.setdefault((name, n), x))
    if kind == "hide":
        hidden, everywhere = int(rng.integers(length)), bool(rng.integers(2))
        rows = [i for i in range(length) if i != hidden] if tokens is None else tokens

        def unseen(name, n, x, _):
            if name == "weights":
                return np.nan_to_num(x)  # rows without keys
            if name == "scores" and (everywhere or n == layer):
                x = np.where(x < -1e30, -np.inf, x)
                x[np.ix_(every, rows, [hidden])] = -np.inf
            return x

        return Change.hide(hidden, None if everywhere else layer, heads, queries=tokens), unseen
    where, source, whole = {"step": step, "tokens": tokens}, ours.steps(other), kept[step, layer]
    change, value = {
        "off": lambda: (
            Change.off(layer, heads, **where),
            lambda x, own: own[at] if step == "result" else 0 * x[at],
        ),
        "apply": lambda: (
            Change.apply(layer, lambda x: 0.5 * x + 0.25, heads, **where),
            lambda x, own: 0.5 * x[at] + 0.25,
        ),
        "patch": lambda: (Change.patch(layer, source, heads, **where), lambda x, own: whole[at]),
        "mean": lambda: (
            Change.mean(layer, source, heads, **where),
            lambda x, own: np.broadcast_to(whole.mean(-2, keepdims=True), x.shape)[at],
        ),
    }[kind]()

    def edit(name, n, x, own):
        if (name, n) != (step, layer):
            return x
        y = x.copy()
        y[at] = value(x, own)
        return y

    return change, edit


@pytest.mark.parametrize("name", [*CONFIGS, *LANGUAGE])
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_changes_are_those_of_hooks(name, tmp_path):
    pytest.importorskip("torch", reason="the expected values come from PyTorch and Transformers")
    transformers = pytest.importorskip("transformers", reason="the expected values come from Transformers")
    from text_folders import with_drawn_parameters

    family, values = (CONFIGS | LANGUAGE)[name]
    tokens = dict.fromkeys((f"{each}_token_id" for each in ("bos", "eos", "cls", "sep")), 0)
    config = getattr(transformers, their_name(family, "Config"))(
        **((tokens if name in TEXTS else {}) | values)
    )
    config._attn_implementation = "eager"
    theirs = with_drawn_parameters(getattr(transformers, their_name(family, "Model"))(config))
    kind = {"GPT2": "GPT2LMHeadModel"}.get(family, f"{family}ForCausalLM")
    theirs.save_pretrained(tmp_path)
    if name in LANGUAGE:
        full = getattr(transformers, kind)(config)
        full.base_model.load_state_dict(theirs.state_dict())
        full.save_pretrained(tmp_path)
    ours, theirs = models.load(tmp_path), theirs.double()
    rng = np.random.default_rng(len(name))
    for trial in range(16):
        if name in PICTURES:
            given, other = rng.standard_normal((2, 2, 12, 12)).astype(np.float32)
        else:
            given, other = (rng.integers(2, VOCABULARY, n) for n in ((7, 7) if trial % 4 else (5, 8)))
        change, edit = drawn_change(rng, ours, theirs, family, given, other)
        if trial % 3 == 0:
            more, also = drawn_change(rng, ours, theirs, family, given, given)
            change, edit = change + more, lambda *a, one=edit, two=also: two(*a[:2], one(*a), a[3])
        truth = their_run(theirs, family, np.asarray(given, float if name in PICTURES else int), edit)
        # Sums of up to 40 terms, in some twenty products one after the other.
        atol = 128 * EPS * max(1.0, np.abs(truth).max())
        steps = ours.steps(given, change=change)
        np.testing.assert_allclose(steps.output, truth, rtol=0, atol=atol, err_msg=f"{trial} {change}")
        if name not in PICTURES:  # their last hidden state is before the final norm
            np.testing.assert_allclose(ours.hidden_states(given, change=change)[-1], truth, rtol=0, atol=atol)
        for layer, state in zip(steps.layers, ours.hidden_states(given, change=change)[1:-1], strict=False):
            np.testing.assert_allclose(layer.result, state, rtol=0, atol=atol)


SIZES = dict(
    zip(("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"), (2, 4, 16, 9), strict=True)
)
SIZES["intermediate_size"] = 32


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda other: Change.off(2), "layer 2 is out of range: the model has 2 layers, 0 to 1"),
        (lambda other: Change.off(0, head=4), "head 4 is out of range: output of layer 0 has 4 heads"),
        (lambda other: Change.off(0, head=1, step="down"), "down has no heads"),
        (lambda other: Change.off(0, step="gate"), "layer 0 has no step 'gate'; it has inputs, query"),
        (lambda other: Change.off(0, step="mlp"), "step must be .inputs., .* not 'mlp'"),
        (lambda other: Change.off(0, tokens=[0, 3]), "tokens 3 is out of range: the text has 3 tokens"),
        (lambda other: Change.hide(-1), "tokens -1 is out of range"),
        (lambda other: Change.patch(0, other), "name as many tokens of both texts"),
        (lambda other: Change.patch(0, other, tokens=1, source_tokens=[2, 3]), "differ in number"),
        (lambda other: Change.patch(0, other, tokens=1, source_tokens=4), "the other text has 4 tokens"),
        (lambda other: Change.apply(1, lambda x: x[:1], head=[0, 1]), None),
        (
            lambda other: Change.apply(1, lambda x: x[:, :2]),
            r"result of layer 1 .*\(3, 16\).* float32 .*\(3, 2\)",
        ),
        (lambda other: Change.mean(0, other, step="weights"), "lengths have no mean"),
        (lambda other: Change.mean(0, []), "at least one"),
        (lambda other: Change.apply(1, lambda x: None), "what takes its place is object"),
        (lambda other: Change.apply(1, lambda x: x * 1j), "what takes its place is complex"),
    ],
)
def test_what_does_not_fit_is_named(wrong, says):
    model = models.BertModel(SIZES, rng=0)
    other = model.steps([1, 2, 3, 4])
    if says is None:  # it broadcasts
        model.steps([1, 2, 3], change=wrong(other))
        return
    with pytest.raises(ValueError, match=says):
        model.hidden_states([1, 2, 3], change=wrong(other))
    with pytest.raises(TypeError, match=r"change must be a selfattn\.steps\.Change, not int"):
        model.steps([1, 2, 3], change=1)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_of_a_gpt_and_of_rounded_weights(dtype):
    gpt = nn.GPT(11, 16, 2, 4, 8, dropout=0.5, rng=0)
    model = gpt if dtype == "float32" else models.BertModel(SIZES, rng=0).quantize(dtype)
    change = Change.off(0, head=[1, 2]) + Change.off(1, step="down")
    steps, states = model.steps([1, 2, 3], change=change), model.hidden_states([1, 2, 3], change=change)
    atol = 64 * EPS if dtype == "float32" else 0.1  # the core rounds int8's inputs to 8 bits too
    np.testing.assert_allclose(steps.output, states[-1], atol=atol)
    np.testing.assert_allclose(model.steps([1, 2, 3]).output, model.hidden_states([1, 2, 3])[-1], atol=atol)
    assert not np.allclose(steps.output, model.steps([1, 2, 3]).output, atol=1e-3)
    assert not steps.layers[0].concatenated[:, 4:12].any()
