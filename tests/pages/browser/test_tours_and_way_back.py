"""Tours and the way back in Chromium: answers are hidden before the guess; gradients are those of the kernels, also
after edits."""

import re

import numpy as np
import pytest
from page_driver import VISIBLE, numbers_of, settle
from pages import UNFOLD, data_of, matrices, pairs

import selfattn as sa
from selfattn import views
from selfattn.steps.layers import layer_steps

TOKENS = ["stream", "bank", "mud"]
STAGES = ["x", "Q", "K", "V", "scores", "weights", "output"]


def matrix(page, name):
    return numbers_of(page.get_by_role("grid", name=name, exact=True))


def gradients(page):
    return {name: matrix(page, name) for name in ("dx", "dQ", "dK", "dV", "dS", "dP")}


@pytest.fixture
def way(visit):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 4)).round(2), [rng.standard_normal((4, 2)) for _ in range(3)]
    page = visit(views.way_back_page(layer_steps(x, *weights), TOKENS).html)
    return page, x, weights


def assert_same(page, x, weights, wish, **more):
    """An edited page has the numbers of the page that Python makes of the edited inputs, to three decimals."""
    expected = pairs(views.way_back_page(layer_steps(x, *weights, **more), TOKENS, grad_output=wish))
    for name, found in gradients(page).items():
        np.testing.assert_allclose(found, expected[name], rtol=0, atol=0.000501, err_msg=name)


def test_gradients_edits_and_finite_differences(way):
    page, x, weights = way
    wish = np.zeros((3, 2))
    wish[2, 0] = 1
    assert_same(page, x, weights, wish)
    # The written sum and a finite difference equal every number of every gradient.
    spelled = 0
    for name in ("x", "Q", "K", "V", "scores", "weights"):
        for cell in page.get_by_role("grid", name=name, exact=True).locator("td.sa-tinted").all():
            cell.hover()
            gradient, _, check = page.locator(".sa-check dd").all_inner_texts()
            assert check.endswith("✓ the same"), (name, check)
            value, formula = gradient.replace("−", "-").split(" = ", 1)
            result = eval(re.sub(r" \(through .*", "", formula).replace("·", "*").replace("×", "*"))
            assert abs(float(value) - result) <= 0.02  # figures of two and three decimals
            spelled += 1
    assert spelled == 12 + 3 * 6 + 2 * 9
    # Another wish, another input, another scale.
    page.get_by_role("grid", name="dO", exact=True).locator("td.sa-tinted").nth(1).dblclick()
    page.keyboard.type("2.5")
    page.keyboard.press("Enter")
    wish[0, 1] = 2.5
    assert_same(page, x, weights, wish)
    page.get_by_role("grid", name="x", exact=True).locator("td.sa-tinted").nth(5).dblclick()
    page.keyboard.type("-1.5")
    page.keyboard.press("Enter")
    x[1, 1] = -1.5
    assert_same(page, x, weights, wish)
    slider = page.get_by_label("scale")
    slider.evaluate("s => { s.value = 12; s.dispatchEvent(new Event('input')); }")
    assert_same(page, x, weights, wish, scale=12.0)
    assert page.locator(".sa-balance").get_attribute("aria-label").startswith("stream: ")
    page.get_by_role("button", name="Reset").click()
    assert page.locator(".sa-balance").get_attribute("aria-label").startswith("mud: ")


def test_masked_scores_of_given_matrices(visit):
    rng = np.random.default_rng(3)
    query, key, value = rng.standard_normal((3, 2, 4, 2))
    wish = rng.standard_normal((4, 2))
    steps = sa.attention_steps(query, key, value, is_causal=True)
    made = views.way_back_page(steps, list("abcd"), grad_output=wish, head=1)
    page = visit(made.html, width=400)
    _, pullback = sa.scaled_dot_product_attention_vjp(query[1], key[1], value[1], is_causal=True)
    for name, expected in zip(("dQ", "dK", "dV"), pullback(wish), strict=False):
        np.testing.assert_allclose(matrix(page, name), expected, rtol=0, atol=0.000501, err_msg=name)
    assert "dx" not in pairs(made) and pairs(made)["dS"][0, 1] == 0
    assert np.isneginf(matrix(page, "scores")[0, 1:]).all()
    cell = page.get_by_role("grid", name="scores", exact=True).locator("td.sa-tinted").nth(1)
    cell.focus()
    assert "masked" in page.locator(".sa-check").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "✓ the same" in page.locator(".sa-check").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


NUMBERS = """() => [...document.querySelectorAll(".sa-steps")].flatMap((e) =>
    [...e.querySelectorAll(".sa-strip, .sa-figures, figcaption, .sa-m")].map((part) => part.textContent)).join(" ")"""
DERIVED = {"Two banks", "Without training", "Same going in"}  # stops with numbers that the page does not show

NAMED = {  # what a sentence names: what must be on the screen
    "the strip": ".sa-strip",
    "the scale to": ".sa-knobs input[type=range]",
    "of W_value": "table[data-node=W_value]",
    "stage Masked scores": "table[data-node=mask]",
    "a number of x": ".sa-strip table[aria-label^='x,']",
    "the switch is at": ".sa-knobs button[data-value]",
}


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_every_stop_asks_hides_and_reveals(visit, name):
    made = views.tutorial_page(name)
    page = visit(made.html, unfold=False)
    hidden = ".sa-view-tabs, .sa-dots, .sa-knobs, .sa-strip, .sa-sums, .sa-details, .sa-way-back"
    first = page.locator(".sa-steps:not([data-hidden])")  # at first there are the tour and one picture
    kept = first.locator(".sa-see path[d]:not([d=''])")
    assert kept.evaluate_all("all => all.every((e) => getComputedStyle(e).display !== 'none')")
    assert first.locator(".sa-see").is_visible() and page.locator(hidden).filter(visible=True).count() == 0
    page.keyboard.press("n")  # keys act on a fresh page, and the focus is where the next key is
    for answered in (False, True):
        assert page.evaluate("document.activeElement.closest('.sa-guesses, .sa-tour-go')?.className") == (
            "sa-tour-go" if answered else "sa-guesses"
        )
        page.keyboard.press("n" if answered else "Enter")
    assert page.locator(".sa-lesson .sa-tour-at").inner_text().startswith("2/")
    page.keyboard.press("b")
    page.keyboard.press("b")
    go, place = page.locator(".sa-lesson [data-do='tour next']"), page.locator(".sa-lesson .sa-tour-at")
    before, opening = page.locator(".sa-screen >> visible=true").inner_text(), page.evaluate(NUMBERS)
    details = " ".join(f"{x:.2f}" for view in made.views for m in matrices(view).values() for x in m.ravel())
    for n, stop in enumerate(made.tour, 1):
        go.click()
        assert place.inner_text() == f"{n}/{len(made.tour)} {stop.name}"
        said = page.locator(".sa-lesson .sa-tour-say").inner_text()
        assert said == stop.ask.replace("*", "")
        visible = page.locator(".sa-steps:not([data-hidden])")
        assert visible.count() == 1
        shown, answer = page.evaluate(VISIBLE), stop.options[stop.right].replace("*", "")
        # "0.39 became 0.43": what was before is on the screen.
        for number in re.findall(r"\d\.\d\d+(?! became| was|\d)", answer + stop.reveal):
            assert number in said or number not in shown, (stop.name, number)
        if " " in answer and answer not in visible.locator(".sa-token").all_text_contents():
            assert answer not in shown, stop.name
        assert "Look for this" not in shown and "gives weight" not in shown, stop.name
        asked = page.evaluate(NUMBERS)
        guess = (stop.right + n) % len(stop.options)
        page.locator(".sa-lesson .sa-guesses button").nth(guess).click()
        assert page.locator(".sa-lesson .sa-guesses .sa-yes").inner_text() == f"✓ {answer}"
        assert page.locator(".sa-lesson .sa-guesses .sa-no").count() == (guess != stop.right)
        assert page.locator(".sa-lesson .sa-tour-say").inner_text() == stop.reveal.replace("*", "")
        assert "Look for this" in page.evaluate(VISIBLE)
        for later in made.tour[n : n + 1]:
            if (later.view, later.hide, stop.hide) == (stop.view, "output", "weights"):
                assert not visible.locator(".sa-out > *").filter(visible=True).count(), later.name
        for words, selector in NAMED.items():
            if words in f"{stop.ask} {stop.reveal}".replace("*", ""):
                assert visible.locator(selector).first.is_visible(), (stop.name, words)
        written = opening + asked + page.evaluate(NUMBERS) + details
        if stop.name not in DERIVED:
            for number in re.findall(r"\d\.\d\d(?!\d)", stop.reveal):
                assert number in written, (stop.name, number)
    go.click()  # after the end the page is as at first
    assert place.inner_text() == "Point at a word"
    assert page.locator(".sa-screen >> visible=true").inner_text() == before
    page.locator("[data-do=everything]").click()
    for stop in made.tour:  # with everything on the screen too
        go.click()
        for role in ("output", "weights", "scores")[: ["", "output", "weights", "scores"].index(stop.hide)]:
            cells = page.locator(f".sa-steps:not([data-hidden]) .sa-is-{role} td.sa-tinted")
            assert cells.filter(visible=True).count() == 0, (stop.name, role)
        page.locator(".sa-lesson .sa-guesses button").first.click()


def test_tours_have_the_words_that_are_looked_for():
    stops = [stop for name in views.TUTORIAL_PAGES for stop in views.tutorial_page(name).tour]
    said = "".join(stop.ask + stop.reveal for stop in stops).replace("*", "")
    assert [words for words in NAMED if words not in said] == []


def test_no_stop_of_the_way_back_shows_its_answer_before_it_is_given(visit):
    for name in views.TUTORIAL_PAGES:
        (back,) = views.tutorial_page(name).below
        page, data = visit(back.html, width=390), data_of(back.body)
        stops, known = data["stops"], ""  # what earlier stops have told
        hidden, check = page.locator(".sa-gradient[data-later]"), page.locator(".sa-check")
        assert hidden.count() == 0 and len(stops) == (4 if name == "attention_module" else 5)
        for stop in stops:
            page.locator("[data-do='tour next']").click()
            for letter in hidden.evaluate_all("all => all.map((each) => each.dataset.stage)"):
                above = page.get_by_role("grid", name=STAGES["xQKVSPO".index(letter)], exact=True)
                above.locator("td.sa-tinted").first.focus()  # whose gradient is not told either
                assert not check.is_visible()
            shown, answer = page.evaluate(VISIBLE), stop["options"][stop["right"]].replace("*", "")
            for number in re.findall(r"\d\.\d\d+", stop["reveal"]):
                assert number in known or number not in shown, (name, stop["name"], number)
            known += stop["reveal"]
            told = " " in answer and answer not in data["labels"]["k0"] and answer in shown
            assert not told, (name, stop["name"])
            assert ("Look for this" in shown) == page.locator(".sa-balance").is_visible()
            assert len(set(stop["options"])) == len(stop["options"])
            assert page.locator("[data-later] small").filter(visible=True).count() == 0
            page.locator(".sa-guesses button").first.click()
            assert page.locator(".sa-guesses .sa-yes").count() == 1
            for letter in set(re.findall(r"\bd([xQKVSPO])\b", f"{stop['ask']} {stop['reveal']}")):
                cells = page.locator(f".sa-gradient[data-stage={letter}] td.sa-tinted")
                assert cells.first.is_visible(), (name, stop["name"], letter)
            box = page.locator(".sa-now").first.bounding_box()
            assert box["x"] >= 0 and box["x"] + box["width"] <= 390, (name, stop["name"])
        assert hidden.count() == 0
        page.set_viewport_size({"width": 1280, "height": 800})
        strip = page.locator(".sa-strip")
        assert name == "sentence_embeddings" or strip.evaluate(
            "strip => strip.scrollWidth <= strip.clientWidth"
        )


FIRST_SCREEN = """() => {
    const screen = document.querySelector(".sa-steps:not([data-hidden]) .sa-screen");
    const words = [...screen.querySelectorAll(".sa-token")];
    return {
        filled: screen.getBoundingClientRect().bottom / innerHeight,
        type: parseFloat(getComputedStyle(words[0].parentElement).fontSize),
        cut: words.filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent),
        widths: [...screen.querySelectorAll(".sa-see .sa-field")].map((e) => e.clientWidth),
        buttons: Math.min(...[...document.querySelectorAll("button, select")]
            .filter((e) => e.checkVisibility()).map((e) => e.offsetHeight)),
        scrolls: document.documentElement.scrollWidth > innerWidth,
    };
}"""


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_the_picture_fills_a_screen_and_no_word_is_cut(visit, name):
    page = visit(views.tutorial_page(name).html, unfold=False)
    for width, height in ((390, 844), (760, 1000), (820, 1180), (1020, 700), (1280, 800), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_timeout(100)  # observers of sizes draw again
        found = page.evaluate(FIRST_SCREEN)
        assert not found["cut"] and not found["scrolls"] and min(found["widths"]) > 330, (width, found)
        assert width > 640 or found["buttons"] >= 32, found
        if width >= 1280:
            assert 0.8 <= found["filled"] <= 1 and found["type"] >= 0.019 * height, (width, found)


def test_keys_play_and_speed(visit):
    page = visit(views.tutorial_page("illustrated").html, unfold=False)
    page.clock.install()
    page.locator("[data-do=everything]").click()
    place = page.locator(".sa-lesson .sa-tour-at")
    page.locator(".sa-see .sa-token").first.focus()
    for key, expected in zip("nnnb", ("By hand", "By hand", "Four more", "By hand"), strict=True):
        page.keyboard.press(key)
        assert place.inner_text().endswith(expected)
    page.locator(".sa-lesson .sa-tour select").select_option("fast")
    page.locator(".sa-see .sa-token").first.focus()
    page.keyboard.press("p")
    assert page.locator(".sa-lesson [data-do='tour play']").inner_text() == "Pause"
    page.clock.run_for(3_100)
    assert place.inner_text() == "2/6 Four more"
    page.clock.run_for(60_000)
    assert place.inner_text() == "6/6 The switch"
    assert page.locator(".sa-lesson [data-do='tour play']").inner_text() == "Play"
    assert page.locator(".sa-lesson .sa-guesses .sa-yes").count() == 1
    page.locator(".sa-lesson [data-do='open all']").click()
    page.locator("[data-stage=scores] table[data-node=scores] td[tabindex='0']").focus()
    at = page.locator(".sa-count").inner_text()
    page.keyboard.press("n")  # in the details: number by number
    assert page.locator(".sa-count").inner_text() != at and place.inner_text() == "6/6 The switch"


def tables_of(page, n):
    """All tables of a view: what they show, their labels, their cells."""
    page.locator("[role=tab]").nth(n).evaluate("tab => tab.click()")
    page.evaluate(UNFOLD)
    settle(page)
    return page.locator(".sa-steps:not([data-hidden]) .sa-stage table").evaluate_all(
        """all => all.map((t) => [t.caption.textContent, ...Object.values(t.dataset), t.tHead.textContent,
            [...t.querySelectorAll("tbody th")].map((e) => e.textContent).join(" "),
            [...t.querySelectorAll("td.sa-tinted")].map((e) => e.textContent)])"""
    )


@pytest.mark.parametrize(
    ("name", "exercise", "words"),
    [
        ("first_principles", False, ["I love mud", "money rains"]),
        ("basics_notebook", True, ["sky is the limit for all of us today"]),
        ("illustrated", False, ["one two three four"]),
        ("attention_module", False, ["you hate"]),
    ],
)
def test_own_words_make_the_page_that_python_makes(visit, name, exercise, words):
    made = views.tutorial_page(name, exercise=exercise)
    page = visit(made.html)
    fields = page.locator(".sa-reader input")
    opening = page.locator(".sa-steps:not([data-hidden]) .sa-see").all_text_contents()
    of_the_page = page.locator(".sa-steps:not([data-hidden]) .sa-see .sa-from").all_text_contents()
    for n, text in enumerate(words):
        fields.nth(n).fill(text.replace(" ", ", ") if name == "illustrated" else text)
    fields.first.press("Enter")
    more = {"compare": words[1]} if len(words) > 1 else {}
    theirs = visit(views.tutorial_page(name, text=words[0], exercise=exercise, **more).html)
    for n in range(page.locator("[role=tab]").count()):
        found, expected = (tables_of(each, n) for each in (page, theirs))
        assert [table[:-1] for table in found] == [table[:-1] for table in expected]
        for (*names, ours), (*_, cells) in zip(found, expected, strict=True):
            # The blanks of an exercise are in other places.
            pairs = [pair for pair in zip(ours, cells, strict=True) if "____" not in pair]
            both = np.array(pairs, float).reshape(-1, 2).T
            np.testing.assert_allclose(*both, rtol=5e-3, atol=1.1e-3, err_msg=names[0])
    opens = page.locator(".sa-lesson").get_attribute("data-opens")
    page.locator("[role=tab]").nth(int(opens)).evaluate("tab => tab.click()")
    says = "The numbers for "
    assert says + {"attention_module": "hate"}.get(name, "") in page.locator(".sa-look").inner_text()
    page.locator(".sa-reader button").last.click()
    assert page.locator(".sa-steps:not([data-hidden]) .sa-see").all_text_contents() == opening
    if not exercise:  # the tour is there for own words too, and goes back to those of which it speaks
        fields.first.fill("mud")
        fields.first.press("Enter")
        assert (
            page.locator(".sa-steps:not([data-hidden]) .sa-see .sa-from").all_text_contents() != of_the_page
        )
        page.locator(".sa-lesson [data-do='tour next']").click()
        assert page.locator(".sa-lesson .sa-tour-at").inner_text().startswith("1/")
        assert fields.first.input_value() != "mud"
        assert (
            page.locator(".sa-steps:not([data-hidden]) .sa-see .sa-from").all_text_contents() == of_the_page
        )


def test_an_address_is_a_lesson(visit):
    page = visit(
        views.tutorial_page("sentence_embeddings").html, fragment="#view=3&head=1&word=3", unfold=False
    )
    shown = page.locator(".sa-steps:not([data-hidden])")
    # The second "the".
    assert shown.locator(".sa-see figcaption").first.inner_text().startswith("the (3) gives weight 0.22")
    for element, address in (
        (shown.locator(".sa-see .sa-to").nth(1), "#view=3&head=1&word=bank"),
        (shown.locator(".sa-knobs .sa-tabs button").first, "#view=3&head=0&word=bank"),
        (page.locator("[role=tab]").first, "#view=1&word=bank"),
    ):
        element.evaluate("element => element.click()")
        page.wait_for_function("address => location.hash === address", arg=address)
    page.evaluate("location.hash = '#text=the bank and mud&compare=a loan&word=mud'")
    page.wait_for_function("document.querySelector('.sa-see .sa-on bdi').textContent === 'mud'")
    assert shown.locator(".sa-see .sa-from").all_text_contents() == ["the", "bank", "and", "mud", "a", "loan"]
    page.evaluate("location.hash = '#stop=4'")
    page.wait_for_function("document.querySelector('.sa-tour-at').textContent.startsWith('4/7')")
