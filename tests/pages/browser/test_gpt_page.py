"""The page of a GPT in Chromium: logits are the model's, also with heads off or weights changed; what its tour asks."""

import base64
import re

import numpy as np
import pytest
from instruction_sets import using
from page_driver import VISIBLE, bars, compute, in_a_cell, in_base64

from selfattn import nn, views
from selfattn.engine.sampling import probabilities, sampling
from selfattn.views import live_pages
from selfattn.views.packs import gpt_pack

wait = pytest.importorskip("playwright.sync_api").expect
LOGITS = """return Promise.all(given.map(async ([pack, ids]) => {
    const of = new LanguageModel(kernel, await readPack(bytes(pack), ""), ({ letters }) => lettersOf(letters));
    const greedy = of.writing(of.trained, ids, 4, { temperature: 0, topP: 1 });
    return [text(of.trained.logits(of.trained.forward(ids).rows, false)), [...greedy].map(({ id }) => id)];
}));"""


@pytest.fixture(autouse=True)
def core(kernels, monkeypatch):
    monkeypatch.setattr(live_pages, "KERNELS", kernels)


def looked(page):
    """Wait until the page shows what was asked last."""
    page.wait_for_selector("[data-looked]")
    return page


def assert_next(page, model, alphabet, ids, **how):
    """The bars are the probabilities of the model's next letter after these ids."""
    looked(page)
    shares = probabilities(model(np.array(ids))[-1], sampling(how.pop("temperature", 1.0), **how))
    for name, share in bars(page):
        letter = {"␣": " ", "⏎": "\n"}.get(name, name)
        # Three decimals are shown; a float32 sum of d terms is off by far less.
        np.testing.assert_allclose(share, shares[alphabet.index(letter)], rtol=0, atol=0.00051)
    assert [share for _, share in bars(page)] == sorted((share for _, share in bars(page)), reverse=True)
    assert bars(page)[0][1] == pytest.approx(shares.max(), abs=0.00051)


def written(page, which, expected):
    """Wait until a model, the trained one or the changed one, has written this after the prompt."""
    wait(page.locator(".sa-output").nth(which)).to_have_text(expected)


def slide(page, name, value):
    page.get_by_role("slider", name=name).evaluate(
        f"e => {{ e.value = {value}; e.dispatchEvent(new Event('input')); }}"
    )


def test_drawn_models_have_the_bits_of_baseline(browser, kernels):
    rng, packs, wanted = np.random.default_rng(53), [], []
    for n in range(12):
        heads, width = int(rng.integers(1, 4)), int(rng.choice([2, 4, 8]))
        model = nn.GPT(
            7,
            heads * width,
            int(rng.integers(1, 4)),
            heads,
            16,
            rng=n,
            positions=str(rng.choice(["learned", "rotary"])),
            norm_first=bool(rng.integers(2)),
            activation=str(rng.choice(["gelu", "relu"])),
            bias=bool(rng.integers(2)),
            tie_word_embeddings=bool(rng.integers(2)),
        )
        for array in model.parameters().values():
            array[...] *= 10  # so that logits differ
        ids = rng.integers(0, 7, int(rng.choice([1, 2, 9])))
        with using("baseline"):
            wanted.append((model(ids), model.generate(ids, max_new_tokens=4).tolist()))
        packs.append([in_base64(gpt_pack(model, "abcdefg")), ids.tolist()])
    scripts = ("live/kernel.js", "live/letters.js", "live/pack.js", "live/gpt_model.js")
    names = "LanguageModel, lettersOf, readPack"
    found = compute(browser, kernels, scripts, names, LOGITS, packs)
    for (logits, greedy), (own, answer) in zip(found, wanted, strict=True):
        assert base64.b64decode(logits) == own.tobytes() and greedy == answer


def test_the_model_that_ships(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="the lord "))
    ids = [alphabet.index(letter) for letter in "the lord "]
    assert_next(page, model, alphabet, ids)
    answer = "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60))
    written(page, 0, "the lord " + answer)
    written(page, 1, "the lord " + answer)
    for n in range(3):
        page.get_by_role("button", name="Step").click()
        wait(page.locator(".sa-added")).to_have_count(n + 1)
    ids += [alphabet.index(letter) for letter in answer[:3]]
    assert_next(page, model, alphabet, ids)
    weights = model.steps(ids).layers[2].weights[1]
    page.get_by_role("button", name="layer 2, head 1", exact=False).first.click()
    best = weights[-1].argmax()
    assert f"gives weight {weights[-1, best]:.2f} to " in page.locator(".sa-line").inner_text()
    slide(page, "temperature", 0.6)
    slide(page, "top-p", 0.5)
    wait(page.locator(".sa-bars-list li:not(.sa-rest)")).to_have_count(1)
    assert_next(page, model, alphabet, ids, temperature=0.6, top_p=0.5)
    slide(page, "temperature", 0)
    slide(page, "top-p", 1)
    page.get_by_role("button", name="Back").click()
    assert_next(page, model, alphabet, ids[:-1])
    page.locator(".sa-written button").nth(4).click()
    page.get_by_role("heading", name="What comes after l").wait_for()
    assert_next(page, model, alphabet, ids[:5])
    page.keyboard.press("ArrowRight")
    page.get_by_role("heading", name="What comes after o").wait_for()
    assert_next(page, model, alphabet, ids[:6])
    page.get_by_label("Prompt").fill("ωjerusalem")
    looked(page)
    assert "Unknown: ω." in page.locator("[role=status]").inner_text()
    assert_next(page, model, alphabet, [alphabet.index(letter) for letter in " jerusalem"])
    page.get_by_role("button", name="Continue").click()
    page.get_by_text("a second").wait_for()
    assert page.locator(".sa-written .sa-added").count() == 96 - len(" jerusalem")


def test_the_tour_and_the_exercise_of_a_gpt_ask_what_the_model_computes(opened):
    model, alphabet = views.page_gpt()
    page = opened(views.gpt_page(prompt="the lord "))
    page.wait_for_selector("[data-toured]")
    ids = [alphabet.index(letter) for letter in "the lord "]
    tour, quiz = page.locator(".sa-tour").all()

    def answers(tour, count):
        for _ in range(count):
            tour.locator("[data-do='tour next']").click()
            shown, asked = looked(page).evaluate(VISIBLE), tour.locator(".sa-tour-say").inner_text()
            hidden = page.locator("[data-hide=next], [data-quiz]").count()
            assert page.locator(".sa-output").filter(visible=True).count() == (0 if hidden else 2)
            tour.locator(".sa-guesses button").last.click()
            looked(page)
            said = tour.locator(".sa-tour-say").inner_text()
            for number in re.findall(r"\d\.\d\d(?!\d)", said):
                assert number in asked or not re.search(rf"{number}(?!\d)", shown), (asked, number)
            yield tour.locator(".sa-yes").inner_text().removeprefix("✓ "), said

    def shares(temperature=1.0):
        return probabilities(model(np.array(ids))[-1], sampling(temperature))

    best = shares().argmax()
    first, head, off, warm = answers(tour, 4)
    assert first[0] == alphabet[best] and f"of {shares()[best]:.2f}" in first[1]
    assert f"becomes {shares(1.5)[best]:.2f}" in warm[1] and warm[0] == "it falls"
    assert re.search(r": [01]\.\d\d\.", head[1])
    tour.locator(".sa-dots button").nth(2).click()
    layer, which = map(int, re.findall(r"\d+", tour.locator(".sa-tour-say").inner_text())[:2])
    kept = shares()[best]
    switch_off(model, layer, which)
    assert f"of {kept:.2f}, and now has {shares()[best]:.2f}" in off[1]
    assert off[0] == ("yes" if shares().argmax() == best else "no")
    answer = views.page_gpt()[0].generate(ids, max_new_tokens=8)
    assert [letter.replace("␣", " ") for letter, _ in answers(quiz, 8)] == [alphabet[n] for n in answer]


def switch_off(model, layer, head):
    """Switching a head off equals zero columns in the next product."""
    width = model.d_model // model.num_heads
    model.layers[layer].self_attn.out_proj.weight[:, head * width : (head + 1) * width] = 0


def test_heads_off_and_weights_changed(opened):
    model, alphabet = views.page_gpt()
    prompt = "in the beginning "
    page = opened(views.gpt_page(prompt=prompt))
    ids = [alphabet.index(letter) for letter in prompt]
    trained = prompt + "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60))
    written(page, 0, trained)
    page.get_by_role("button", name="switch layer 1, head 2 on or off").click()
    switch_off(model, 1, 2)
    assert_next(page, model, alphabet, ids)
    page.get_by_label("matrix").select_option("layers.2.down")
    page.get_by_label("row", exact=True).fill("7")
    page.get_by_label("column", exact=True).fill("11")
    page.get_by_label("new value").fill("9,5")  # a comma is a point
    page.get_by_role("button", name="Set", exact=True).click()
    model.layers[2].linear2.weight[7, 11] = 9.5
    assert_next(page, model, alphabet, ids)
    page.get_by_role("button", name="Zero the row").click()
    model.layers[2].linear2.weight[7] = 0
    assert_next(page, model, alphabet, ids)
    written(page, 1, prompt + "".join(alphabet[n] for n in model.generate(ids, max_new_tokens=60)))
    written(page, 0, trained)
    assert page.locator(".sa-bar .sa-soft").inner_text() == "256 weights changed, 1 head off"
    page.get_by_role("button", name="Reset all").click()
    written(page, 1, trained)


def test_a_model_of_ones_own(opened, tmp_path):
    alphabet = ["<b>a</b>", "b", "ab", " ", "</script>"]
    model = nn.GPT(5, 8, 1, 2, 12, activation="relu", bias=False, tie_word_embeddings=False, rng=0)
    for array in model.parameters().values():
        array[...] *= 20  # so that logits differ
    page = opened(views.gpt_page(model, alphabet, "ab b"), width=400)
    assert_next(page, model, alphabet, [2, 3, 1])  # the longest piece first
    for n in range(9):
        page.get_by_role("button", name="Step").click()
        wait(page.locator(".sa-added")).to_have_count(n + 1)
        looked(page)
    assert page.get_by_role("button", name="Step").is_disabled()  # the context is full
    assert page.locator(".sa-gpt b").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    (tmp_path / "letters.sapack").write_bytes(gpt_pack(*views.page_gpt(), "letters"))
    page.locator("input[type=file]").set_input_files(tmp_path / "letters.sapack")
    page.get_by_text("12 heads: computed").wait_for()
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    page.locator("input[type=file]").set_input_files(tmp_path / "model.gguf")
    page.get_by_text("selfattn pages DIR --model model.gguf").wait_for()


def test_the_widget_reports_what_is_chosen(visit):
    pytest.importorskip("anywidget", reason="the extra viz brings anywidget")
    widget = views.gpt_page(prompt="the lord ").widget()
    assert widget.chosen == {}
    page = visit(in_a_cell(widget), unfold=False)
    looked(page).locator(".sa-written button").nth(4).click()
    assert page.evaluate("window.saved") == {"place": 4, "token": "l"}
    assert page.locator("[data-alone]").count() == 0
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "chosen")
    widget.chosen = {"place": 1, "token": "h"}
    assert seen == [{"place": 1, "token": "h"}]
