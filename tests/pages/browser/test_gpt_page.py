"""The page of a GPT in Chromium: logits are the model's, also with heads off or weights changed; what its tour asks."""

import re

import numpy as np
import pytest
from page_driver import bars, in_a_cell

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
    page.get_by_role("combobox", name="temperature").select_option("0.6")
    assert_next(page, model, alphabet, ids, 0.6)
    page.get_by_role("combobox", name="temperature").select_option("0")
    page.get_by_role("button", name="Back").click()
    assert_next(page, model, alphabet, ids[:-1])
    page.locator(".sa-written button").nth(4).click()
    assert_next(page, model, alphabet, ids[:5])
    page.keyboard.press("ArrowRight")
    assert_next(page, model, alphabet, ids[:6])
    page.get_by_label("Prompt").fill("ω: jerusalem")
    assert "Unknown: ω." in page.locator("[role=status]").inner_text()
    assert_next(page, model, alphabet, [alphabet.index(letter) for letter in ": jerusalem"])


def test_the_tour_and_the_exercise_of_a_gpt_ask_what_the_model_computes(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="the lord "))
    ids = [alphabet.index(letter) for letter in "the lord "]
    tour, quiz = page.locator(".sa-tour").all()

    def answers(tour, count):
        for _ in range(count):
            tour.locator("[data-do='tour next']").click()
            hidden = page.locator("[data-hide=next], [data-quiz]").count()
            assert page.locator(".sa-output:visible").count() == (0 if hidden else 2)
            tour.locator(".sa-guesses button").last.click()
            yield (
                tour.locator(".sa-yes").inner_text().removeprefix("✓ "),
                tour.locator(".sa-tour-say").inner_text(),
            )

    def shares(temperature=1.0):
        scores = np.float64(model(np.array(ids))[-1]) / temperature
        return np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()

    best = shares().argmax()
    first, head, off, warm = answers(tour, 4)
    assert first[0] == alphabet[best] and f"of {shares()[best]:.2f}" in first[1]
    assert f"becomes {shares(1.5)[best]:.2f}" in warm[1] and warm[0] == "it falls"
    assert re.search(r": [01]\.\d\d\.", head[1])
    tour.locator(".sa-dots button").nth(2).click()
    layer, which = map(int, re.findall(r"\d+", tour.locator(".sa-tour-say").inner_text())[:2])
    kept, width = shares()[best], model.d_model // model.num_heads
    # Switching a head off equals zero columns in the next product.
    model.layers[layer].self_attn.out_proj.weight[:, which * width : (which + 1) * width] = 0
    assert f"of {kept:.2f}, and now has {shares()[best]:.2f}" in off[1]
    assert off[0] == ("yes" if shares().argmax() == best else "no")
    written = views.page_gpt()[0].generate(ids, max_new_tokens=8)
    assert [letter.replace("␣", " ") for letter, _ in answers(quiz, 8)] == [alphabet[n] for n in written]


def test_heads_off_and_weights_changed(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="in the beginning "))
    ids = [alphabet.index(letter) for letter in "in the beginning "]
    trained = written(page, 0)
    page.get_by_role("button", name="switch layer 1, head 2 on or off").click()
    # Switching a head off equals zero columns in the next product.
    width = model.d_model // model.num_heads
    model.layers[1].self_attn.out_proj.weight[:, 2 * width : 3 * width] = 0
    assert_next(page, model, alphabet, ids)
    page.get_by_label("matrix").select_option("layers.2.linear2.weight")
    page.get_by_label("row", exact=True).fill("7")
    page.get_by_label("column", exact=True).fill("11")
    page.get_by_label("new value").fill("9,5")  # a comma is a point
    page.get_by_role("button", name="Set", exact=True).click()
    model.layers[2].linear2.weight[7, 11] = 9.5
    assert_next(page, model, alphabet, ids)
    page.get_by_role("button", name="Zero the row").click()
    model.layers[2].linear2.weight[7] = 0
    assert_next(page, model, alphabet, ids)
    answer = "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60))
    assert written(page, 1) == "in the beginning " + answer and written(page, 0) == trained
    assert page.locator(".sa-bar .sa-soft").inner_text() == "256 weights changed, 1 head off"
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


def test_the_widget_reports_what_is_chosen(visit):
    pytest.importorskip("anywidget", reason="the extra viz brings anywidget")
    widget = views.gpt_page(prompt="the lord ").widget()
    assert widget.chosen == {}
    page = visit(in_a_cell(widget), unfold=False)
    page.wait_for_selector("[data-ready]")
    page.locator(".sa-written button").nth(4).click()
    assert page.evaluate("window.saved") == {"place": 4, "token": "l"}
    assert page.locator("[data-alone]").count() == 0
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "chosen")
    widget.chosen = {"place": 1, "token": "h"}
    assert seen == [{"place": 1, "token": "h"}]
