"""The steps page in Chromium: contrast, screen readers, keys, sizes, speed, hostile text."""

import pytest
from page_driver import CONTRASTS, cell, change
from pages import NASTY, PAGES, bank, everything, illustrated, large

from selfattn import views


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast(visit, scheme):
    """WCAG 2.1, 1.4.3: the luminances of text and background are 4.5 to 1 at least, in every state."""
    pages = {
        "options": views.steps_page(*everything()),
        "two sentences": views.steps_page(*bank("river"), compare=bank("finance")),
        "exercise": views.steps_page(*illustrated(), exercise=True),
    }
    for title, made in pages.items():
        page = visit(made.html, color_scheme=scheme)
        page.get_by_label("Follow").select_option(index=2)
        cell(page, "inputs", "inputs", 0, 0).hover()
        found = page.evaluate(CONTRASTS)
        change(page, "inputs", "inputs", 0, 0, "-2")
        if title == "exercise":
            page.locator(".sa-lesson [data-do='reveal all']").click()
            page.locator("summary").click()
        found += page.evaluate(CONTRASTS)
        page.locator(".sa-lesson [data-do=theme]").click()
        found += page.evaluate(CONTRASTS)
        assert len(found) > 30
        poor = [(name, ratio) for name, ratio in found if ratio < 4.5]
        assert not poor, (title, poor)
    page = visit(views.tutorial_page("attention_module").html, color_scheme=scheme, unfold=False)
    found = page.evaluate(CONTRASTS)
    for _ in range(2):  # a question, and its answer
        page.locator(".sa-lesson [data-do='tour next']").click()
        found += page.evaluate(CONTRASTS)
    poor = [(name, ratio) for name, ratio in found if ratio < 4.5]
    assert not poor, poor


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_dark_and_projector(visit, scheme):
    """The page follows the system's colours, then the button's; another button enlarges letters."""
    pages = [views.steps_page(*illustrated()), views.steps_page(*bank("river"))]
    page = visit(views.join_pages(pages, "Two").html, color_scheme=scheme)

    def look():
        return page.evaluate(
            "(({backgroundColor, fontSize}) => [backgroundColor, fontSize])(getComputedStyle(document.querySelector('.sa-view')))"
        )

    other = {"light": "rgb(18, 22, 27)", "dark": "rgb(255, 255, 255)"}
    own = other["dark" if scheme == "light" else "light"]
    assert look() == [own, "16px"]
    page.locator(".sa-lesson [data-do=theme]").click()
    assert look() == [other[scheme], "16px"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == other[scheme]
    page.locator(".sa-lesson [data-do=theme]").click()
    assert look() == [own, "16px"]
    button = page.locator(".sa-lesson [data-do=projector]")
    for size in ("21px", "16px"):
        button.click()
        assert look() == [own, size]
        assert button.get_attribute("aria-pressed") == str(size == "21px").lower()


def test_a_screen_reader_finds_names_and_headers(visit):
    """Chromium's own tree: controls and tables have names, numbers have the headers of their row and column."""
    page = visit(views.steps_page(*illustrated(), exercise=True).html)
    cell(page, "inputs", "inputs", 0, 0).dblclick()
    tree = page.context.new_cdp_session(page).send("Accessibility.getFullAXTree")["nodes"]
    named = {}
    for node in tree:
        if not node["ignored"]:
            named.setdefault(node["role"]["value"], []).append(node.get("name", {}).get("value", ""))
    for role in ("button", "combobox", "slider", "textbox", "grid", "link"):
        assert all(name.strip() for name in named.get(role, [])), role
    assert "Attention, step by step" in named["group"]
    assert {"Play", "Next", "Back", "Reset", "Reveal all"} <= set(named["button"])
    assert named["combobox"] == ["Go to", "Follow"]
    assert named["slider"] == ["scale", "scale"]  # on the first screen, and in its stage
    assert "x, one two three" in named["grid"]
    assert "Attention weights of all words: one two three" in named["figure"]
    assert any(name.startswith("one two three: ") for name in named["image"])  # the outputs
    assert {"scores 3 × 3", "key.T 3 × 3", "weighted_values[0] (query one) 3 × 3"} <= set(named["grid"])
    assert {"inputs[one, 0]", "Predict scores[one, two]"} <= set(named["textbox"])
    assert {"one", "two", "three"} <= set(named["rowheader"])
    assert "columnheader" in named
    live = [node for node in tree for p in node.get("properties", []) if p["name"] == "live"]
    assert len(live) >= page.locator(".sa-stage").count()


def test_all_can_be_done_with_keys(small):
    """Tab reaches every control once and every table once; keys can change a number."""
    reached = []
    for _ in range(200):
        small.keyboard.press("Tab")
        here = small.evaluate(
            """() => {
            const e = document.activeElement;
            return e === document.body ? null : e.dataset.do ?? e.closest("table")?.caption?.textContent ?? e.closest("table")?.ariaLabel
                ?? (e.matches(".sa-token") ? "word" : e.type ?? e.tagName);
        }"""
        )
        if here is None:
            break
        reached.append(here)
    controls = ["theme", "projector", "word", "open all", "previous", "play", "next", *["select-one"] * 2]
    assert [name for name in reached if name in controls] == controls
    captions = small.locator("table.sa-m caption").all_text_contents()
    assert [name for name in reached if name in captions] == captions
    assert reached.count("range") == 2
    assert [name for name in reached if name.endswith(", one two three")] == [
        f"{name}, one two three" for name in ("x", "Q", "K", "V", "scores", "weights", "output")
    ]
    cell(small, "inputs", "inputs", 0, 0).focus()
    for key in ("ArrowRight", "Enter", "7", "Enter"):
        small.keyboard.press(key)
    assert cell(small, "inputs", "inputs", 0, 1).inner_text() == "7"
    assert small.evaluate("document.activeElement.textContent") == "7"  # the focus has not moved
    small.keyboard.press("F2")
    small.keyboard.type("8")
    small.keyboard.press("Escape")
    assert cell(small, "inputs", "inputs", 0, 1).inner_text() == "7"


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_a_narrow_page_scrolls_in_its_equations_only_and_print_cuts_nothing_off(visit, name):
    page = visit(views.tutorial_page(name).html, width=360, height=640)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".sa-lesson").evaluate("root => root.dataset.projector = ''")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".sa-lesson").evaluate("root => delete root.dataset.projector")
    page.set_viewport_size({"width": 718, "height": 900})  # A4, less the margins that Chromium leaves
    page.emulate_media(media="print")
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('table, pre, p, h3')].map((e) => e.getBoundingClientRect().right))"
    )
    assert right <= 718


@pytest.mark.parametrize("name", PAGES)
def test_nasty_tokens_run_nothing(visit, name):
    page = visit(PAGES[name](NASTY).html)
    page.wait_for_selector("[data-live]")
    page.locator("button:visible").last.click()
    page.wait_for_function("token => document.body.innerText.includes(token)", arg=NASTY[0])
    assert page.locator("img").count() == 0


def test_nasty_captions_titles_and_pictures_run_nothing(visit):
    captions = {name: NASTY[n % len(NASTY)] for n, name in enumerate(views.CAPTIONS)}
    made = views.steps_page(*illustrated(), captions=captions, exercise=True)
    page = visit(views.join_pages([made, made], "".join(NASTY)).html.replace("</body>", f"{made.svg}</body>"))
    for _ in range(2):
        page.locator(".sa-lesson [data-do=next]").first.click()
    cell(page, "scores", "scores", 0, 0).first.hover()
    page.locator(".sa-lesson [data-do='reveal all']").first.click()
    page.locator(".sa-steps").first.locator("[data-stage=inputs] tbody td").first.dblclick()
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    page.locator(".sa-lesson [data-do=reset]").first.click()
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3  # two scripts of data, and one of code
    attributes = page.evaluate(
        "[...document.querySelectorAll('*')].flatMap(e => [...e.attributes].map(a => a.name))"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]


def test_a_large_page_answers_a_hover_at_once(visit):
    """With 64 tokens and dims, highlighting, writing and layout after an event take under 50 ms, for two dozen numbers.

    The best of five tries each, without the wait for the next frame: other processes may hold the processor.
    """
    page = visit(views.steps_page(*large()).html)
    ms = page.evaluate(
        """() => {
        let n = 0;
        const hover = (td) => {
            const start = performance.now();
            td.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, screenX: ++n}));
            document.body.getBoundingClientRect();
            if (!td.classList.contains("sa-here")) throw new Error("not lit");
            return performance.now() - start;
        };
        const cells = [...document.querySelectorAll(".sa-result tbody td:not(.sa-gap)")];
        const away = cells.pop();
        return cells.filter((_, k) => k % Math.ceil(cells.length / 24) === 0).map((td) => {
            td.scrollIntoView({block: "center"});
            return Math.min(...Array.from({length: 5}, () => (hover(away), hover(td))));
        });
    }"""
    )
    assert len(ms) >= 20
    assert max(ms) < 50, ms
    change(page, "inputs", "inputs", 0, 0, "5")
    assert page.locator("td.sa-moved").count() > 500
