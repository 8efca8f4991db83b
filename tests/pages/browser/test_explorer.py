"""The explorer in Chromium: numbers are those of the steps, mouse and keys choose heads and words. A GPT's page computes its logits."""

import json
import re
import time

import numpy as np
import pytest
from page_driver import bars

import selfattn as sa
from selfattn import models, nn, softmax, views
from selfattn.models import readings
from selfattn.steps import Change

FIRST = ["[CLS]", "he", "sat", "on", "the", "river", "bank", "[SEP]"]
SECOND = ["[CLS]", "a", "loan", "from", "the", "old", "bank", "[SEP]"]


class Model:
    """The methods of a language model that the explorer calls: steps, tokens, logits, generate."""

    vocabulary = ("<s>", "the", "river", "bank", "is", "<b>wide</b>")

    def __init__(self, layers=2, heads=3, width=4):
        rng = np.random.default_rng(5)
        self.parts = rng.standard_normal((layers, 3, heads, 16, width))
        self.table = rng.standard_normal((16, len(self.vocabulary))) * 2

    def _ids(self, text):
        return [self.vocabulary.index(word) for word in text.split()] if isinstance(text, str) else text

    def tokens(self, text):
        return [self.vocabulary[n] for n in self._ids(text)]

    def logits(self, ids):
        return self.table[: len(ids)]

    def generate(self, ids, count):
        return np.arange(count) % len(self.vocabulary)

    def steps(self, ids):
        layers = [
            sa.attention_steps(*(part[:, : len(ids)] for part in layer), is_causal=True)
            for layer in self.parts
        ]
        return type("Steps", (), {"layers": layers})()


def steps_of(rows, seed, heads=2, width=4, **options):
    rng = np.random.default_rng(seed)
    return sa.attention_steps(*rng.standard_normal((3, heads, rows, width)) * 2, **options)


def takes(page, side=0):
    """A caption as (word, [(weight, from), ...])."""
    word, rest = page.locator(".sa-takes").nth(side).inner_text().split(" takes ")
    return word, [
        (float(part.split(" from ", 1)[0]), part.split(" from ", 1)[1]) for part in rest.split(", ")
    ]


def test_two_texts(opened):
    steps = [steps_of(8, 0), steps_of(8, 1)]
    page = opened(views.explorer(steps[0], FIRST, compare=(steps[1], SECOND)))
    heads = page.locator(".sa-thumb")
    assert heads.count() == 2
    for n in (1, 0):
        heads.nth(n).click()
        assert f"Layer 1, head {n + 1}" in page.locator("section[aria-label='One head'] h2").inner_text()
        for side, words in ((0, FIRST), (1, SECOND)):
            word, found = takes(page, side)
            assert word == "bank"
            row = steps[side].weights[n, 6]
            best = [j for j in np.argsort(-row)[:3] if row[j] >= 0.005]  # 0.00 is nothing
            assert [name for _, name in found] == [words[j] for j in best]
            np.testing.assert_allclose([weight for weight, _ in found], row[best], rtol=0, atol=0.00501)
    # A cell of a map, and the same cell of the other text.
    box = page.locator(".sa-large-map canvas").nth(0).bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 8, box["y"] + box["height"] * 5.5 / 8)
    said = page.locator(".sa-line").first.inner_text()
    assert said.startswith("A river takes ") and "from sat" in said and "B old takes" in said
    numbers = [float(part.split(" takes ")[1].split(" ")[0]) for part in said.split(" · ")]
    np.testing.assert_allclose(numbers, [each.weights[0, 5, 2] for each in steps], rtol=0, atol=0.000515)
    # Another word: the other text follows where it has the word, else at the same place.
    page.locator(".sa-text").nth(0).get_by_role("button", name="the").click()
    assert [takes(page, side)[0] for side in (0, 1)] == ["the", "the"]
    page.locator(".sa-text").nth(1).get_by_role("button", name="loan").click()
    assert [takes(page, side)[0] for side in (0, 1)] == ["sat", "loan"]
    for name, pressed in (("B − A", "difference"), ("only", "word"), ("B", "1"), ("A", "0")):
        button = page.locator(".sa-tabs button").filter(has_text=name).first
        button.click()
        assert button.get_attribute("aria-pressed") == "true", pressed
    # Tab reaches one head, arrow keys the others.
    heads.nth(0).focus()
    page.keyboard.press("ArrowRight")
    assert heads.nth(1).evaluate("e => e === document.activeElement && e.ariaSelected") == "true"
    assert [heads.nth(n).get_attribute("tabindex") for n in (0, 1)] == ["-1", "0"]
    kind = page.locator(".sa-kinds button").first
    kind.click()
    assert page.locator(".sa-dim").count() == 2 - int(kind.inner_text().split()[1])
    page.get_by_role("button", name="light or dark").click()
    assert page.locator(".sa-explorer").get_attribute("data-theme") == "dark"


def test_the_way_through_all_layers(opened):
    model = Model()
    page = opened(views.explorer(model, "<s> the river bank", word="river"))
    ids = model._ids("<s> the river bank")
    share = np.eye(4)[2]
    for layer in reversed(model.steps(ids).layers):
        share = 0.5 * share + 0.5 * share @ layer.weights.mean(axis=0)
    page.locator(".sa-way").scroll_into_view_if_needed()
    box = page.locator(".sa-way canvas").bounding_box()
    for j in range(4):
        page.mouse.move(box["x"] + box["width"] * (j + 0.5) / 4, box["y"] + 2)
        said = page.locator(".sa-way .sa-line").inner_text()
        assert abs(float(said.split(": ")[1].split(" ")[0]) - share[j]) <= 0.00055


def test_what_a_language_model_expects_and_adds(opened):
    model = Model()
    page = opened(views.explorer(model, "<s> the river bank", new_tokens=2))

    def check(place, temperature=1.0, k=6):
        logits = model.table[place] / temperature
        best = np.argsort(-logits)[:k]
        truth = np.exp(logits[best]) / np.exp(logits[best]).sum()
        found = bars(page)
        assert [name for name, _ in found] == [model.vocabulary[n] for n in best]
        np.testing.assert_allclose([share for _, share in found], truth, rtol=0, atol=0.00051)

    page.locator(".sa-text button").nth(3).click()
    check(3)
    page.get_by_role("combobox", name="temperature").select_option("0.5")
    check(3, temperature=0.5)
    page.get_by_label("top-k").select_option("2")
    check(3, temperature=0.5, k=2)
    page.get_by_label("top-k").select_option("all")
    page.get_by_role("button", name="Step").click()
    check(4, temperature=0.5)
    assert page.locator(".sa-next .sa-soft").inner_text() == "1 of 2 added tokens"
    assert page.locator(".sa-text button.sa-added").all_inner_texts() == ["<s>", "the"]
    page.get_by_role("button", name="Step").click()
    assert page.get_by_role("button", name="Step").is_disabled()
    page.get_by_role("button", name="Back").click()
    check(4, temperature=0.5)


def test_a_long_text_is_quick_and_its_numbers_are_computed_in_the_page(opened):
    steps = steps_of(512, 2, heads=12, width=32, is_causal=True)  # most of a row's keys are closed
    six = type("Steps", (), {"layers": [steps] * 6})()
    words = [f"w{n}" for n in range(512)]
    page = views.explorer(six, words, word="w2")
    start = time.perf_counter()
    found = opened(page)
    ready = time.perf_counter() - start
    spent = found.evaluate(
        """() => { const heads = [...document.querySelectorAll(".sa-thumb")], start = performance.now();
        for (const n of [20, 45, 71]) heads[n].click();
        return (performance.now() - start) / 3; }"""
    )
    print(f"{len(page.html) / 1e6:.1f} MB; drawn after {ready:.2f} s; a head in {spent:.0f} ms")
    row = steps.weights[71 % 12, 2]
    best = np.argsort(-row)[:3]
    assert takes(found)[1] == [(round(float(row[j]), 2), words[j]) for j in best]
    assert found.locator(".sa-ribbons").count() == 0  # with too many words there are only maps
    # The bounds are wide, for busy machines.
    assert ready < 30 and spent < 2000


@pytest.mark.parametrize(("width", "scheme"), [(400, "light"), (1020, "dark"), (1920, "light")])
def test_it_fits(opened, width, scheme):
    page = opened(
        views.explorer(steps_of(8, 0, heads=12), FIRST, compare=(steps_of(8, 1, heads=12), SECOND)),
        width=width,
        color_scheme=scheme,
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    named = page.locator(".sa-explorer :is(button, canvas[role=img], [role=listbox], select)")
    assert named.evaluate_all(
        "all => all.every(e => e.ariaLabel || e.textContent.trim() || e.closest('label'))"
    )


def test_without_scripts_habits_are_there(visit):
    page = visit(views.explorer(steps_of(8, 0), FIRST).html, java_script_enabled=False)
    assert page.locator(".sa-habits td").count() == 2
    assert (
        page.locator("noscript").inner_text()
        == "Without scripts this page shows only the habit of each head."
    )


def test_the_widgets_module_in_a_page(visit):
    """It runs as anywidget runs it, draws the view and reports the choice."""
    pytest.importorskip("anywidget", reason="the extra viz brings anywidget")
    x = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]
    widget = views.explorer(sa.attention_steps(x, x, x), ["the", "river", "bank"]).widget()
    assert widget.chosen == {}
    data = json.dumps({"body": widget.body, "style_sheet": widget.style_sheet}).replace("<", "\\u003c")
    module = widget._esm.replace("export default", "const widget =").replace("</script", "<\\/script")
    page = visit(
        f"""<!DOCTYPE html><html lang=en><title>widget</title><link rel=icon href="data:,"><body class=sa-page><div class=cell></div>
        <script>{module}
        const data = {data};
        window.model = {{ get: (name) => data[name], set: (name, value) => (data[name] = value), save_changes: () => (window.saved = data.chosen) }};
        const el = document.createElement("div");
        widget.render({{ model, el }});
        setTimeout(() => document.querySelector(".cell").append(el), 50); // later, as notebooks do
        </script>"""
    )
    page.wait_for_selector("[data-ready]")
    page.locator(".sa-text button").nth(1).click()
    assert page.evaluate("window.saved") == {"text": 0, "layer": 0, "head": 0, "place": 1, "token": "river"}
    assert page.locator("[data-alone]").count() == 0
    widget.chosen = {"token": "bank"}
    seen = []
    widget.observe(lambda change: seen.append(change["new"]), "chosen")
    widget.chosen = {"token": "river"}
    assert seen == [{"token": "river"}]


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
    model.layers[layer - 1].self_attn.out_proj.weight[:, (which - 1) * width : which * width] = 0
    assert f"of {kept:.2f}, and now has {shares()[best]:.2f}" in off[1]
    assert off[0] == ("yes" if shares().argmax() == best else "no")
    written = views.page_gpt()[0].generate(ids, max_new_tokens=8)
    assert [letter.replace("␣", " ") for letter, _ in answers(quiz, 8)] == [alphabet[n] for n in written]


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


def test_a_head_is_switched_off(opened):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    model = models.LlamaForCausalLM(sizes | {"vocab_size": 11, "max_position_embeddings": 16}, rng=0)
    model.tokens = lambda ids: [f"w{n}" for n in ids]
    page = opened(views.explorer(model, [1, 2, 3, 4]))
    page.get_by_role("button", name="if off").click()
    heads, off = page.locator(".sa-thumb"), page.locator(".sa-off")
    off.get_by_role("button").click()
    for n in (3, 0):
        heads.nth(n).click()
        rows = model.hidden_states([1, 2, 3, 4], change=Change.off(n // 2, n % 2))[-1]
        chances, found = softmax(readings.logits(model, rows)[-1].astype(float)), bars(off)
        assert [name for name, *_ in found] == [f"w{k}" for k in np.argsort(-chances)[:5]]
        np.testing.assert_allclose([float(p) for _, p, *_ in found], np.sort(chances)[::-1][:5], atol=5.1e-4)
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save this map as PNG").click()
    assert saved.value.suggested_filename.endswith("layer 1, head 1.png")
