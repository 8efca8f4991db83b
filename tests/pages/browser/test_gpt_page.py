"""The GPT page in Chromium: the script computes what the kernels compute, with and without changes."""

import numpy as np
import pytest
from page_driver import bars

from selfattn import nn, views


def assert_next(page, model, alphabet, ids, temperature=1.0):
    """The bars are the softmax of the model's logits after these ids."""
    logits = model(np.array(ids))[-1].astype(np.float64) / temperature
    shares = np.exp(logits - logits.max())
    shares /= shares.sum()
    for name, share in bars(page):
        letter = {"␣": " ", "\\n": "\n"}.get(name, name)
        # Three decimals are shown; a float32 sum of d terms is off by far less.
        np.testing.assert_allclose(share, shares[alphabet.index(letter)], rtol=0, atol=0.00051)
    assert [share for _, share in bars(page)] == sorted((share for _, share in bars(page)), reverse=True)
    assert bars(page)[0][1] == pytest.approx(shares.max(), abs=0.00051)


def written(page, which):
    return page.locator(".sa-output").nth(which).inner_text()


def test_the_model_that_ships(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="the lord "))
    ids = [alphabet.index(letter) for letter in "the lord "]
    assert_next(page, model, alphabet, ids)
    answer = "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60))
    assert written(page, 0) == written(page, 1) == "the lord " + answer
    for _ in range(3):
        page.get_by_role("button", name="Step").click()
    ids += [alphabet.index(letter) for letter in answer[:3]]
    assert_next(page, model, alphabet, ids)
    assert page.locator(".sa-written .sa-added").count() == 3
    page.get_by_label("temperature").select_option("0.6")
    assert_next(page, model, alphabet, ids, 0.6)
    page.get_by_label("temperature").select_option("0")
    page.get_by_role("button", name="Back").click()
    assert_next(page, model, alphabet, ids[:-1])
    page.locator(".sa-written button").nth(4).click()
    assert_next(page, model, alphabet, ids[:5])
    page.keyboard.press("ArrowRight")
    assert_next(page, model, alphabet, ids[:6])
    page.get_by_label("Prompt").fill("ω: jerusalem")
    assert "Unknown: ω." in page.locator("[role=status]").inner_text()
    assert_next(page, model, alphabet, [alphabet.index(letter) for letter in ": jerusalem"])


def test_heads_off_and_weights_changed(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="in the beginning "))
    ids = [alphabet.index(letter) for letter in "in the beginning "]
    trained = written(page, 0)
    page.get_by_role("button", name="switch layer 2, head 3 on or off").click()
    # Switching a head off equals zero columns in the next product.
    width = model.d_model // model.num_heads
    model.layers[1].self_attn.out_proj.weight[:, 2 * width : 3 * width] = 0
    assert_next(page, model, alphabet, ids)
    page.get_by_label("matrix").select_option("layers.2.linear2.weight")
    page.get_by_label("row", exact=True).fill("7")
    page.get_by_label("column", exact=True).fill("11")
    page.get_by_label("new value").fill("9.5")
    page.get_by_role("button", name="Set", exact=True).click()
    model.layers[2].linear2.weight[7, 11] = 9.5
    assert_next(page, model, alphabet, ids)
    page.get_by_role("button", name="Zero the row").click()
    model.layers[2].linear2.weight[7] = 0
    assert_next(page, model, alphabet, ids)
    answer = "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60))
    assert written(page, 1) == "in the beginning " + answer and written(page, 0) == trained
    assert "heads off" in page.locator(".sa-bar .sa-soft").inner_text()
    page.get_by_role("button", name="Reset all").click()
    assert written(page, 1) == trained
    page.get_by_role("button", name="light or dark").click()
    assert page.locator(".sa-gpt").get_attribute("data-theme") == "dark"


def test_a_model_of_ones_own(opened):
    alphabet = ["<b>a</b>", "b", "ab", " ", "</script>"]
    model = nn.GPT(5, 8, 1, 2, 12, activation="relu", bias=False, tie_word_embeddings=False, rng=0)
    for array in model.parameters().values():
        array[...] *= 20  # so that logits differ
    page = opened(views.gpt_page(model, alphabet, "ab b"), width=400)
    assert_next(page, model, alphabet, [2, 3, 1])  # the longest piece first
    for _ in range(9):
        page.get_by_role("button", name="Step").click()
    assert page.get_by_role("button", name="Step").is_disabled()  # the context is full
    assert page.locator(".sa-gpt b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
