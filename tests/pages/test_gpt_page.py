"""The page of a GPT: the model that ships, its size, bad input."""

import numpy as np
import pytest
from refusals import refusals

from selfattn import nn, views
from selfattn.views import live_pages


def test_the_model_that_ships_spells_words():
    model, alphabet = views.page_gpt()
    ids = [alphabet.index(letter) for letter in "and the lord said to "]
    words = "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=40)).split()
    known = {"the", "and", "of", "to", "he", "son", "his", "house", "lord", "children", "israel", "king"}
    assert len(known & set(words)) >= 2
    # The loss of a model that knows only the frequency of each letter is about 2.8 nats.
    text = "in the beginning god created the heavens and the earth"
    assert model.loss([alphabet.index(letter) for letter in text]) < 1.8
    other, _ = views.page_gpt()
    model.head.weight[:] = 0
    assert other.head.weight.any()  # a new copy


def test_the_page_holds_the_weights_and_the_core(tmp_path, kernels, monkeypatch):
    monkeypatch.setattr(live_pages, "KERNELS", kernels)
    page = views.gpt_page(prompt="the ")
    assert len(page.html) < 1_000_000
    assert "what follows “the ”" in page.svg
    with pytest.raises(FileNotFoundError) as caught:
        page.save(tmp_path / "no" / "page.html")
    assert caught.value.filename == str(tmp_path / "no")  # not a new file in it
    monkeypatch.setattr(live_pages, "KERNELS", tmp_path / "not built")
    with pytest.raises(FileNotFoundError, match=r"needs the core in WebAssembly: .* install clang-14"):
        views.gpt_page()


def gpt(d_model=8, **options):
    return nn.GPT(3, d_model, 1, 2, 8, rng=0, **options)


test_bad_calls_of_the_gpt_page = refusals(
    ((None, "abc"), ValueError, "alphabet needs model"),
    ((object(), "abc"), TypeError, "model must be an nn.GPT or the folder of one, not object"),
    ((gpt(),), ValueError, "a text for each of the model's 3 ids, not none"),
    ((gpt(), "ab"), ValueError, "a text for each of the model's 3 ids, not 2"),
    ((gpt(), ["a", "b", ""]), ValueError, "a text for each of the model's 3 ids"),
    ((gpt(), "abc", "abd"), ValueError, "the prompt has 'd', which .* does not know; it knows 'abc'"),
    ((gpt(), "abc", ""), ValueError, "the prompt is empty"),
    ((gpt(), "abc", None), TypeError, "prompt must be a str, not NoneType"),
    ((gpt(), "abc", [0, 1]), TypeError, "prompt must be a str, not list"),
    ((gpt(dtype=np.float64), "abc", "a"), ValueError, "with weights of float32, not float64"),
    ((gpt(512), "abc", "a"), ValueError, "at most 1,000,000 parameters, not 3,15"),
    call=lambda given: views.gpt_page(*given),
)
