"""Language models: rounded weights, perplexity, old folders, refusals; drawn folders have Transformers' logits and
answers.
"""

import json
import math

import numpy as np
import pytest
import safetensors.numpy as safetensors
from architectures import CONTEXT, GPT2, LANGUAGE, LLAMA, VOCABULARY
from nn_checks import perturbed
from refusals import refusals

import selfattn_models as models
from selfattn import _core
from selfattn.engine.rope import KINDS, read_rope
from selfattn.engine.weights import to_float32
from selfattn_models import loading
from selfattn_models._folder import Config

PHI3 = {"model_type": "phi3"}
GEMMA3 = {"model_type": "gemma3_text", "head_dim": 8}
families = pytest.mark.parametrize("name", LANGUAGE)


def make(name):
    config = LANGUAGE[name][1] | {"model_type": name.split()[0], "initializer_range": 0.3}
    return perturbed(loading.MODELS[config["model_type"]](config, rng=0))


def drawn(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCABULARY, length) for length in lengths]


def test_the_first_gpt2_folders_have_no_prefix_and_hold_masks(tmp_path):
    ours = make("gpt2")
    state = {name.removeprefix("transformer."): array for name, array in ours.state_dict().items()}
    state["h.0.attn.bias"] = np.tril(np.ones((1, 1, 4, 4), np.float32))
    config = dict(ours.config)
    for name in ("tie_word_embeddings", "n_inner"):
        config.pop(name, None)
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_ctx": CONTEXT}))
    np.testing.assert_array_equal(models.load(tmp_path).logits([3, 4, 5]), ours.logits([3, 4, 5]))


@families
def test_rounded_weights_stay_near(name, tmp_path):
    """int8 has 7 bits, of weights and of what enters a product: the answers of a small random model differ by some
    percent.
    """
    ours = make(name)
    models.save(ours, tmp_path)
    ids = drawn(20)[0]
    exact = ours.logits(ids)
    rounded = models.load(tmp_path, dtype="int8")
    assert rounded.dtype == "int8"
    error = np.abs(rounded.logits(ids) - exact).mean() / np.abs(exact).mean()
    assert 1e-4 < error < 0.2
    prompts = drawn(4, 9)
    np.testing.assert_equal(rounded.generate(prompts, 8), [rounded.generate(prompt, 8) for prompt in prompts])
    if name == "gpt2":
        with pytest.raises(ValueError, match="GPT-2 is not saved in int8"):
            models.save(rounded, tmp_path / "int8")
        return
    models.save(rounded, tmp_path / "int8")
    again = models.load(tmp_path / "int8")
    assert again.dtype == "int8"
    np.testing.assert_array_equal(again.logits(ids), rounded.logits(ids))


@families
def test_gradients_are_those_of_finite_differences(name):
    """In float64: of all parameters along a drawn direction, and of rows in place of a text."""
    small = make(name)
    kind, wide = type(small), {key: array.astype(np.float64) for key, array in small.state_dict().items()}
    ours, ids, rng = kind(small.config, wide), drawn(20)[0], np.random.default_rng(1)
    logits, pullback = ours.vjp(ids)
    dy, rows = rng.standard_normal(logits.shape), ours.hidden_states(ids)[0]
    grads, h = pullback(dy), 1e-6
    assert list(grads) == list(ours.parameters())
    along = {key: rng.standard_normal(array.shape) for key, array in wide.items()}

    def moved(step):
        return (
            kind(small.config, {key: wide[key] + step * along[key] for key in wide}).logits(ids) * dy
        ).sum()

    slope = sum(float((grads[key] * along[key]).sum()) for key in wide)
    size = sum(float(np.linalg.norm(grads[key])) for key in wide)  # the slope may be near 0
    assert abs((moved(h) - moved(-h)) / (2 * h) - slope) < 1e-7 * size

    dx, others = ours.vjp(rows)[1](dy)
    way = rng.standard_normal(rows.shape)
    difference = ours.vjp(rows + h * way)[0] - ours.vjp(rows - h * way)[0]
    assert abs((difference * dy).sum() / (2 * h) - (dx * way).sum()) < 1e-7 * np.linalg.norm(dx)
    others.pop(ours.word_table, None)  # of a tied head alone
    for key, grad in others.items():
        np.testing.assert_allclose(grad, grads[key], atol=1e-12 * np.abs(grad).max(), err_msg=key)
    assert set(grads) - set(others) <= {ours.word_table, "transformer.wpe.weight"}


@families
def test_gradients_of_int8(name):
    """Those of the expanded weights, at other rows: products of int8 round them too."""
    exact, rounded, ids = make(name), make(name).quantize("int8"), drawn(20)[0]
    with pytest.raises(ValueError, match="weights of int8 have no gradients"):
        rounded.vjp(ids)
    rows = rounded.hidden_states(ids)[0]
    y, pullback = rounded.vjp(rows)
    np.testing.assert_array_equal(y, rounded.logits(ids))
    dy = np.random.default_rng(1).standard_normal(y.shape, np.float32)
    dx, expected = pullback(dy)[0], exact.vjp(rows)[1](dy)[0]
    assert np.linalg.norm(dx - expected) < 0.3 * np.linalg.norm(expected)


@families
def test_gradients_of_bfloat16(name):
    if _core._compact_unit(False) is None:
        pytest.skip("this CPU does not multiply bfloat16")
    rounded, ids = make(name).quantize("bfloat16"), drawn(20)[0]
    state = rounded.state_dict()
    wide = {key: to_float32(x, None) if x.dtype == np.uint16 else x for key, x in state.items()}
    (y, pullback), (_, expected) = rounded.vjp(ids), type(rounded)(rounded.config, wide).vjp(ids)
    np.testing.assert_equal(pullback(y), expected(y))


@families
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")
def test_perplexity(name, tmp_path):
    ours, ids = make(name), drawn(40)[0]

    def logp(begin, end, first):
        """−log p of the tokens first … end − 1 in a window, straight from logits."""
        x = ours.logits(ids[begin:end]).astype(np.float64)
        x = x - np.log(np.exp(x).sum(-1, keepdims=True))
        return -x[np.arange(first - begin - 1, end - begin - 1), ids[first:end]]

    # Windows of 16 with stride 10: 0…16, 10…26, 20…36, 24…40, of which the last has 4 new tokens.
    expected = np.concatenate([logp(0, 16, 1), logp(10, 26, 16), logp(20, 36, 26), logp(24, 40, 36)]).mean()
    assert np.log(ours.perplexity(ids, window=16, stride=10)) == pytest.approx(expected, abs=1e-6)
    long = np.tile(ids, 5)
    assert np.log(ours.perplexity(long)) == pytest.approx(np.log(ours.perplexity(long, window=64, stride=32)))
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    models.save(ours, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        loss = theirs.double()(torch.tensor(ids)[None], labels=torch.tensor(ids)[None]).loss
    assert np.log(ours.perplexity(ids)) == pytest.approx(float(loss), abs=1e-5)


test_configurations_that_would_change_results_are_errors = refusals(
    ({"num_key_value_heads": 3}, "num_attention_heads 4 must be a multiple of num_key_value_heads 3"),
    ({"hidden_size": 26}, "hidden_size 26 must be a multiple of num_attention_heads 4"),
    ({"head_dim": 7}, "even width, not 7"),
    ({"head_dim": 10**8}, "heads of a width of 100000000; more than 65536"),
    ({"rope_scaling": {"type": "su", "factor": 2}}, "the type 'su' of rotary positions is not supported"),
    ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
    ({"rope_scaling": [2]}, "must be an object"),
    ({"rope_theta": 1.0}, "rope_theta must be above 1"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1, 2, 3]}},
        "long_factor differs from short_factor",
    ),
    (
        {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1]}},
        "must be 3 positive numbers",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "must be below",
    ),
    ({"hidden_act": "tanh"}, "hidden_act must be one of"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be an int of at least 1"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types must name"),
    ({"model_type": "qwen2", "layer_types": [{}] * 3}, "layer_types must name"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "with a sliding_window"),
    ({"model_type": "gemma"}, "is of type 'gemma'"),
    (
        GEMMA3 | {"final_logit_softcapping": 30.0},
        "final_logit_softcapping=30.0 is not supported; only a model without it is",
    ),
    (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    (
        GEMMA3 | {"rope_parameters": {"rope_theta": 1e6}},
        "rope_parameters must have full_attention and sliding_attention alone",
    ),
    (
        GEMMA3 | {"rope_parameters": {"full_attention": {"rope_type": "linear"}}},
        "full_attention: rope_parameters lacks factor",
    ),
    (PHI3 | {"partial_rotary_factor": 0.2}, "rotates 1 elements of heads of a width of 6"),
    (PHI3 | {"rope_scaling": {"type": "linear", "factor": 2}}, "Phi-3 has default and longrope"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "no_rope_layers must have 1, or 0"),
    (
        GEMMA3 | {"sliding_window": None},
        "layer_types must name full_attention or sliding_attention, with a sliding_window",
    ),
    (GPT2 | {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    (GPT2 | {"n_head": 5}, "n_embd 24 must be a multiple of n_head 5"),
    call=lambda more: loading.MODELS.get(
        more.get("model_type", "gpt2" if "n_embd" in more else ""), models.LlamaForCausalLM
    )(more if "n_embd" in more else LLAMA | more, rng=0),
)


def test_llama3_divides_the_frequencies_of_long_waves():
    """Llama 3.1 with 16 numbers a head and 32 positions before; one frequency at a time, as Meta's code has it."""
    own = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 32}
    found = read_rope(Config({"rope_scaling": own | {"rope_type": "llama3"}}), 16, 256).frequencies
    expected = []
    for n in range(8):
        frequency = 10000 ** (-n / 8)
        turns = 32 * frequency / (2 * math.pi)
        part = min(max((turns - 1) / (4 - 1), 0), 1)  # 1: the wave is short and stays
        expected.append(part * frequency + (1 - part) * frequency / 8)
    np.testing.assert_allclose(found, expected, rtol=8 * np.finfo(np.float32).eps)


@pytest.mark.parametrize("factor", [float("inf"), 1e-300])
@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"default"}))
def test_frequencies_that_are_no_numbers_are_errors(kind, factor):
    given = {
        "llama3": {"low_freq_factor": 1, "high_freq_factor": 4},
        "longrope": {"short_factor": [1] * 4, "long_factor": [1] * 4},
    }.get(kind, {})
    try:
        found = read_rope(Config({"rope_scaling": given | {"rope_type": kind, "factor": factor}}), 8, 1)
    except ValueError:
        return
    assert np.isfinite(found.frequencies).all()


def test_gemma3_obeys_its_changed_norms_and_the_dtype_of_its_folder():
    """A decoder holds copies of the norms' weights, plus 1; rows of the table are times √24 in the folder's dtype."""
    ours, ids = make("gemma3_text"), drawn(9)[0]
    before = ours.logits(ids)
    ours.parameters()["model.layers.1.self_attn.q_norm.weight"][...] += 0.5
    after = ours.logits(ids)
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(after, type(ours)(ours.config, ours.state_dict()).logits(ids))
    roots = {"float32": np.sqrt(np.float32(24)), "bfloat16": 4.90625, "float16": 4.8984375}
    for dtype, root in roots.items():
        rounded = type(ours)(ours.config | {"dtype": dtype}, ours.state_dict())
        expected = ours.parameters()[ours.word_table][ids] * np.float32(root)
        np.testing.assert_array_equal(rounded.hidden_states(ids)[0], expected)
        np.testing.assert_array_equal(rounded.steps(ids).embeddings, expected)


def with_nan(model):
    model.arrays["model.norm.weight"][...] = np.nan
    return model


test_bad_calls = refusals(
    *(
        (
            lambda m, name=name, ids=ids: getattr(m, name)([ids] if name == "generate" else ids),
            ValueError,
            message,
        )
        for name in ("logits", "hidden_states", "steps", "generate")
        for ids, message in (
            ([], "text 0 has no ids"),
            ([VOCABULARY], f"ids must be in 0...{VOCABULARY - 1}"),
            (np.zeros(CONTEXT + 1, int), "text 0 has 65 ids; the model has 64 positions"),
        )
    ),
    *(
        (lambda m, value=value: m.generate([1], temperature=value), ValueError, "temperature must be")
        for value in (-1, float("inf"), float("nan"))
    ),
    (
        lambda m: m.vjp(np.zeros((3, 24))),
        TypeError,
        "rows must be float32, as the model computes, not float64",
    ),
    (
        lambda m: m.vjp(np.zeros((3, 25), "f")),
        ValueError,
        r"shape \(L, 24\) with L in 1\.\.\.64, not \(3, 25\)",
    ),
    (lambda m: m.vjp(np.zeros((65, 24), "f")), ValueError, r"not \(65, 24\)"),
    (lambda m: m.vjp([[0.5] * 24]), TypeError, "text 0 must be a str or a sequence of ids"),
    (lambda m: m.generate([]), ValueError, "there are no prompts"),
    (lambda m: m.generate([[1, 2], [1.5]]), TypeError, "text 1 must be a str or a sequence of ids"),
    (lambda m: m.generate("text"), ValueError, r"has no tokenizer\.json"),
    (lambda m: m.generate([1, 2], stop="x"), ValueError, "stop needs text"),
    (
        lambda m: with_nan(m).generate([1, 2]),
        ValueError,
        "prompt 0, new token 1: no token can be drawn from these logits: one is nan",
    ),
    (lambda m: m.chat("hello"), ValueError, "has no chat template"),
    (lambda m: m.perplexity([1]), ValueError, "at least two tokens"),
    (
        lambda m: m.perplexity([1, 2, 3], window=65),
        ValueError,
        "window must be at most the context of 64 tokens",
    ),
    (lambda m: m.perplexity([1, 2, 3], window=1), ValueError, "window must be at least 2"),
    (
        lambda m: m.perplexity([1, 2, 3], window=8, stride=8),
        ValueError,
        "stride must be below the window of 8, not 8",
    ),
    given=lambda: models.LlamaForCausalLM(LLAMA, rng=0),
)


def test_a_full_context_ends_an_answer_with_a_warning():
    model = models.LlamaForCausalLM(LLAMA | {"max_position_embeddings": 12}, rng=0)
    model.stop_ids = frozenset()
    with pytest.warns(UserWarning, match="the context of 12 tokens is full"):
        assert len(model.generate([2] * 10, 50)) == 3
