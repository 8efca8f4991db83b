"""The steps page in Chromium: sources, sums, keys, links; changed numbers, exercises; contrast, screen readers,
sizes, hostile text."""

import re

import numpy as np
import pytest
from page_driver import (
    CONTRASTS,
    assert_nothing_runs,
    assert_spelled,
    cell,
    change,
    figures,
    lit,
    numbers_of,
    said,
    settle,
    stages,
    table,
    then,
)
from pages import NASTY, PAGES, additive, bank, everything, illustrated, large, model, numbers_by_node

from selfattn import attention_steps, views
from selfattn.steps.layers import layer_steps
from selfattn.views.writing import number


def test_pointing_highlights_the_sources_and_writes_the_sum(small):
    cell(small, "scores", "scores", 0, 1).hover()
    assert said(small, "scores") == "scores[one, two] = 1·4 + 0·4 + 2·0 = 4"
    assert sorted(lit(small, "b", "scores")) == ["key[1,0]", "key[1,1]", "key[1,2]"]
    # the sources of these numbers, back to the inputs: the first row for the query, the second for the key
    assert set(lit(small, "far", "inputs")) == {f"inputs[{i},{m}]" for i in (0, 1) for m in range(4)}
    assert lit(small, "far", "output") == []
    # the same numbers in the stages before and after
    assert sorted(lit(small, "a", "query")) == ["query[0,0]", "query[0,1]", "query[0,2]"]
    assert lit(small, "to", "scaled_scores") == ["scores[0,1]"]


LIT = {
    ("query", "query", 2, 1): ({"inputs[2,*4]"}, {"W_query[*4,1]"}, set()),
    ("scaled_scores", "scaled_scores", 1, 2): ({"scores[1,2]"}, {"scale[0,0]"}, set()),
    ("masked_scores", "masked_scores", 1, 2): ({"scaled_scores[1,2]"}, {"mask[1,2]"}, set()),
    ("weights", "weights", 0, 1): ({"masked_scores[0,*3]"}, {"masked_scores[0,1]"}, set()),
    ("weights", "row_sums", 2, 0): ({"weights[2,*3]"}, set(), set()),
    ("weighted_values", "weighted_values[1]", 2, 0): ({"weights[1,2]"}, {"value[2,0]"}, set()),
    ("output", "output", 2, 0): ({"weights[2,*3]"}, {"value[*3,0]"}, {"weighted_values[2][*3,0]"}),
}


def assert_lit(page, sources):
    for (stage, node, i, j), expected in sources.items():
        page.mouse.move(0, 0)  # if the page scrolls under a resting pointer, nothing new is highlighted
        cell(page, stage, node, i, j).hover()
        for colour, names in zip("abc", expected, strict=True):
            every = {
                re.sub(r"\*\d", str(k), name)
                for name in names
                for k in range(int((re.findall(r"\*(\d)", name) or [1])[0]))
            }
            assert set(lit(page, colour)) == every, (node, colour)
        assert set(lit(page, "to")) == {f"{node}[{i},{j}]"}


def test_sources_of_every_kind_have_their_colours(small, visit):
    assert_lit(small, LIT)
    page = visit(views.steps_page(*additive()).html)
    assert_lit(page, {("scores", "scores", 1, 2): ({"query[1,*5]"}, {"key[2,*5]"}, {"v[0,*5]"})})


NAMES = ["illustrated", "bank", "everything", "additive", "model"]


@pytest.mark.parametrize("make", [illustrated, lambda: bank("river"), everything, additive, model], ids=NAMES)
def test_every_written_sum_equals_its_number(visit, make):
    assert_spelled(visit(views.steps_page(*make(), precision=12).html), 60)


def test_the_browser_writes_numbers_as_the_page_does(visit):
    """The numbers include ties, which JavaScript rounds away from zero and Python to the even digit."""
    rng = np.random.default_rng(5)
    values = [0.0, -0.0, 0.5, 1.5, 2.5, -0.375, 0.03125, 12345000.0, 9999999.5, 1e300, -1e-300, 999.99995]
    values += [
        *(rng.standard_normal(400) * 10.0 ** rng.integers(-12, 12, 400)),
        *rng.integers(-500, 500, 100) / 64,
    ]
    cases = [[float(x), d, p] for x in values for p in (1, 2, 4, 12) for d in {0, p // 2, p}]
    page = visit("<!DOCTYPE html><title>empty</title>")
    page.add_script_tag(content=then(["compute.js"], "globalThis.writeNumber = write;"))
    written = page.evaluate("cases => cases.map((c) => writeNumber(...c))", cases)
    assert written == [number(*case) for case in cases]
    special = page.evaluate("[NaN, Infinity, -Infinity].map((x) => writeNumber(x, 2, 4))")
    assert special == [number(x, 2, 4) for x in (np.nan, np.inf, -np.inf)]


def test_keys_act_on_a_fresh_page_and_inside_a_view(small):
    small.evaluate(
        "document.addEventListener('keydown', e => (window.heard ??= []).push([e.key, e.defaultPrevented]))"
    )
    small.keyboard.press("n")
    assert small.evaluate("window.heard") == [["n", True]]
    assert small.locator(".sa-count").inner_text().startswith("1 /")
    cell(small, "scores", "scores", 0, 0).click()
    before = small.locator(".sa-count").inner_text()
    small.keyboard.press("n")
    assert small.locator(".sa-count").inner_text() != before
    small.keyboard.press("d")  # "d" would delete a cell of a notebook
    small.keyboard.press("Shift+Enter")
    small.keyboard.press("Control+k")
    heard = [event for event in small.evaluate("window.heard") if event[0] not in ("Shift", "Control")]
    assert heard == [["n", True], ["Enter", False], ["k", False]]


def test_stepping_forward_and_back(small):
    forward, back = small.locator("[data-do=next]"), small.locator("[data-do=previous]")
    total = int(small.locator(".sa-count").inner_text().split("/")[1])
    forward.click()
    assert small.locator(".sa-count").inner_text() == f"1 / {total}"
    seen = small.evaluate(
        """() => {
        const button = document.querySelector("[data-do=next]"), seen = [];
        do {
            seen.push(document.querySelector(".sa-now").dataset.stage);
            button.click();
        } while (document.querySelector(".sa-count").textContent.split(" / ").some((x, _, [y]) => x !== y));
        return seen;
    }"""
    )
    assert len(seen) == total - 1
    assert list(dict.fromkeys(seen)) == stages(small)
    assert lit(small, "to", "output")[-1] == "output[2,2]"
    small.wait_for_url("**#stage=output&row=2")
    back.click()
    assert lit(small, "to", "output")[-1] == "output[2,1]"


def test_play_continues_by_itself_and_pauses(visit):
    page = visit(views.steps_page(*illustrated()).html)
    page.clock.install()
    play = page.locator("[data-do=play]")
    play.click()
    assert play.inner_text() == "Pause"
    page.clock.run_for(5000)
    play.click()
    assert play.inner_text() == "Play"
    at = int(page.locator(".sa-count").inner_text().split("/")[0])
    assert at >= 3
    page.clock.run_for(5000)
    assert int(page.locator(".sa-count").inner_text().split("/")[0]) == at


def test_following_a_token_shows_its_numbers_alone(small):
    small.get_by_label("Follow").select_option(index=2)
    rows = small.locator("[data-stage='scores'] table[data-node='scores'] tr.sa-on th").all_inner_texts()
    assert rows == ["two"]
    names = small.evaluate(
        """() => {
        const steps = Number(document.querySelector(".sa-count").textContent.split("/")[1]), names = [];
        for (let n = 0; n < steps; n++) {
            document.querySelector("[data-do=next]").click();
            names.push(document.querySelector(".sa-now .sa-say b")?.textContent);
        }
        return names;
    }"""
    )
    assert len(names) > 20
    for name in names[1:]:  # the first is the stage of the inputs
        assert re.match(r"\w+\[two[,\]]|weighted_values\[1\]\[", name)


def test_a_link_leads_to_a_stage_and_a_row(visit):
    page = visit(views.steps_page(*illustrated()).html, fragment="#stage=scores&row=2")
    assert page.locator(".sa-stage.sa-now").get_attribute("data-stage") == "scores"
    assert lit(page, "to", "scores") == ["scores[2,0]"]
    page.evaluate("location.hash = '#stage=weights&row=1'")
    page.wait_for_selector("[data-stage=weights].sa-now")
    assert lit(page, "to", "weights") == ["weights[1,0]"]
    page.evaluate("location.hash = '#stage=nonsense'")
    assert lit(page, "to", "weights") == ["weights[1,0]"]
    # the page writes its place into the address just after a click on a link
    page.evaluate(
        "location.hash = '#stage=scores&row=1'; history.replaceState(null, '', '#stage=weights&row=1')"
    )
    page.wait_for_selector("[data-stage=scores].sa-now", timeout=20_000)
    assert lit(page, "to", "scores") == ["scores[1,0]"]
    page.locator("[data-stage=value] h3 a").click()
    page.wait_for_url("**#stage=value&row=0")


def test_a_changed_input_changes_the_steps_after_it_and_reset_undoes_it(small):
    change(small, "inputs", "inputs", 0, 1, "2.5")
    assert re.match(r"Numbers that changed: \d+\. Most of all \w+.*, from .* to ", said(small, "inputs"))
    count = int(re.search(r"\d+", said(small, "inputs"))[0])
    assert count == len(set(lit(small, "moved")) - {"inputs[0,1]"})  # the typed number does not count
    cell(small, "scores", "scores", 0, 0).hover()
    assert said(small, "scores").endswith("was 2")
    small.locator("[data-do=reset]").click()
    assert lit(small, "moved") == [] and small.locator("[data-do=reset]").is_disabled()


def test_a_mask_cell_closes_and_opens(small):
    cell(small, "masked_scores", "mask", 0, 1).click()
    assert table(small, "masked_scores", "masked_scores")[0, 1] == -np.inf
    exps = np.exp([2, -np.inf, 4])
    np.testing.assert_allclose(table(small, "weights", "weights")[0], exps / exps.sum(), atol=5e-5)
    cell(small, "masked_scores", "masked_scores", 0, 1).hover()
    assert said(small, "masked_scores") == "masked_scores[one, two] = masked = -inf was 4"
    for j in (0, 2):
        cell(small, "masked_scores", "mask", 0, j).click()
    assert not table(small, "weights", "weights")[0].any()  # a row without keys is zeros, not NaN
    assert not table(small, "output", "output")[0].any()
    cell(small, "masked_scores", "mask", 0, 2).focus()
    small.keyboard.press(" ")
    assert table(small, "weights", "weights")[0].tolist() == [0, 0, 1]


def test_typed_numbers(small):
    for typed in ("abc", "1e999", " ", "0x10", "1,000.5", "1 2", "--1", "infinity"):
        change(small, "inputs", "inputs", 0, 0, typed)
        assert said(small, "inputs").startswith(f'"{typed}" is not a number; ')
        assert cell(small, "inputs", "inputs", 0, 0).inner_text() == "1"
        assert small.locator("td.sa-moved").count() == 0 and small.locator("[data-do=reset]").is_disabled()
    steps, p = illustrated()[0], illustrated()[0].parameters
    for typed, shown in (
        ("nan", "nan"),
        ("0,84", "0.84"),
        ("-inf", "-inf"),
        ("−2", "-2"),
        ("1e200", "1.000e+200"),
    ):
        change(small, "inputs", "inputs", 0, 0, typed)
        assert cell(small, "inputs", "inputs", 0, 0).inner_text() == shown
        x = steps.inputs.copy()
        x[0, 0] = float(typed.replace("−", "-").replace(",", "."))
        with np.errstate(all="ignore"):
            expected = layer_steps(x, p.W_query, p.W_key, p.W_value, scale=1.0)
        for name in ("scores", "output"):  # four decimals or four digits
            np.testing.assert_allclose(
                table(small, name, name), getattr(expected, name), rtol=5.1e-4, atol=5.1e-5
            )
        small.locator("[data-do=reset]").click()
        assert lit(small, "moved") == []


def all_numbers(page):
    """Every matrix of the page, from the DOM."""
    settle(page)
    found = page.eval_on_selector_all(
        "table[data-node]",
        """tables => tables.map(t => [
            t.dataset.node,
            "t" in t.dataset,
            [...t.tBodies[0].rows].map(r =>
                [...r.cells].slice(1).map(c => Number(c.textContent.replace("inf", "Infinity")))),
        ])""",
    )
    return {name: np.array(rows).T if transposed else np.array(rows) for name, transposed, rows in found}


@pytest.mark.parametrize(
    ("make", "eps"),
    [
        (everything, 1e-9),
        (model, 1e-9),
        (additive, 1e-9),
        (lambda **add: everything(np.float32, **add), 1e-4),
    ],
    ids=["everything", "model", "additive", "float32"],
)
def test_the_browser_computes_what_python_computes(visit, make, eps):
    """Change an input in the browser and in Python: every number of every step agrees. Reset undoes it.

    The page shows 12 decimals, and sums have a dozen terms of size 10; what float32 kernels computed differs
    by their rounding from what the browser computes in float64.
    """
    steps, tokens = make()
    page = visit(views.steps_page(steps, tokens, precision=12).html)
    stage = stages(page)[0]
    before = all_numbers(page)
    change(page, stage, stage, 0, 0, str(before[stage][0, 0] + 1))
    expected, got = numbers_by_node(make(add=1)[0]), all_numbers(page)
    assert expected.keys() <= got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=eps, atol=eps, err_msg=name)
    page.locator("[data-do=reset]").click()
    np.testing.assert_equal(all_numbers(page), before)


def test_numbers_that_do_not_depend_on_an_edit_stay_those_of_the_kernel(visit):
    """The kernel's float32 differs from the browser's float64; under a causal mask an edit changes only the last
    row."""
    steps, tokens = everything(np.float32)
    page = visit(views.steps_page(steps, tokens, precision=12).html)
    before = all_numbers(page)
    change(page, "inputs", "inputs", 4, 0, "9")
    moved = set(lit(page, "moved"))
    for node in ("weights.0", "weights.1", "output.0", "concatenated", "projected_output", "norm"):
        rows = {int(name.split("[")[1].split(",")[0]) for name in moved if name.startswith(f"{node}[")}
        assert rows == {4}, node
        np.testing.assert_array_equal(all_numbers(page)[node][:4], before[node][:4])


def test_two_sentences_and_their_difference(visit):
    page = visit(views.steps_page(*bank("river"), compare=bank("finance")).html)
    river, finance = bank("river")[0], bank("finance")[0]
    np.testing.assert_allclose(table(page, "output", "output~1"), finance.output, atol=5e-5)
    difference = page.locator("[data-stage='output'] table[data-a]")
    difference.locator("tbody td").nth(3).hover()
    a, b = (number(steps.output[1, 0], 4, 4) for steps in (river, finance))
    assert said(page, "output").startswith(f"second minus first: output[bank, 0] = {b} - {a} ≈ ")
    assert lit(page, "a", "output") == ["output[1,0]"]
    assert lit(page, "b", "output") == ["output~1[1,0]"]
    change(page, "query", "W_query", 0, 0, "9")  # shared: both sentences move
    weights = [w.copy() for w in (river.parameters.W_query, river.parameters.W_key, river.parameters.W_value)]
    weights[0][0, 0] = 9
    moved = layer_steps(finance.inputs, *weights).output - layer_steps(river.inputs, *weights).output
    np.testing.assert_allclose(numbers_of(difference), moved, rtol=5e-4, atol=5e-5)


def test_sentences_of_different_lengths_are_compared_where_both_have_rows(visit):
    rng = np.random.default_rng(2)
    a, b = (attention_steps(*rng.standard_normal((3, n, 3))) for n in (2, 4))
    page = visit(views.steps_page(a, ["a", "b"], compare=(b, ["a", "c", "d", "e"])).html)
    difference = page.locator("table[data-a=weights]")
    np.testing.assert_allclose(numbers_of(difference), b.weights[:2, :2] - a.weights, atol=0.51e-4)
    assert difference.locator("tbody th").all_inner_texts() == ["a", "b → c"]
    assert page.locator("table[data-node='weighted_values[3]~1']").count() == 1


def test_a_large_matrix_is_abridged_and_an_open_mask_is_noted(visit):
    page = visit(views.steps_page(*large()).html)
    table_of = page.locator("[data-stage=scores] table[data-node=scores]")
    shown = [*range(11), *range(59, 64)]
    heads = table_of.locator("thead th").all_inner_texts()
    assert [head for head in heads if head != "…"] == [f"token{n}" for n in shown] and heads[11] == "…"
    numbers = table_of.evaluate(
        "t => [...t.tBodies[0].rows].map((r) => [...r.querySelectorAll('td')].map((c) => Number(c.textContent)))"
    )
    expected = large()[0].scores[np.ix_(shown, shown)]
    np.testing.assert_allclose([row for row in numbers if row], expected, atol=5.1e-5)
    notes = page.locator(".sa-note").all_inner_texts()
    assert "Abridged: 16 of 64 rows and columns are shown; all are used to compute." in notes
    assert any(note.startswith("Abridged: shown for 8 of 64 queries") for note in notes)
    assert views.CAPTIONS["open mask"] in notes
    x = np.eye(3)
    closed, opened = (attention_steps(x, x, x, is_causal=causal) for causal in (True, False))
    page = visit(views.steps_page(opened, compare=(closed, None)).html)
    assert page.locator(".sa-note").count() == 0


def test_what_a_closed_stage_has_is_drawn_when_it_is_searched_for(visit):
    page = visit(views.steps_page(*illustrated()).html, unfold=False)
    assert page.locator("[data-stage=scores] table").count() == 0  # until the stage is opened
    assert page.locator("[data-stage=scores] > div").get_attribute("hidden") == "until-found"
    page.keyboard.press("Control+f")
    np.testing.assert_array_equal(table(page, "scores", "scores"), illustrated()[0].scores)
    page.locator("[data-stage=scores] > div").dispatch_event("beforematch")
    assert page.locator("[data-stage=scores] table").first.is_visible()


def test_predicting_and_revealing(visit):
    page = visit(views.steps_page(*illustrated(), exercise=True).html)
    hidden, left = page.locator(".sa-strip td.sa-tinted", has_text="?"), page.locator(".sa-left")
    assert "?" in figures(page) and hidden.count() > 10 and page.locator(".sa-lines circle").count() == 0
    page.locator(".sa-strip .sa-is-query td.sa-tinted", has_text="?").first.click()
    for guess, answer in (
        ("7", "7 is not right. "),
        ("0", "Right: 1·0 + 0·0 + 1·0 + 0·1 = 0 32 of 33 blanks left."),
    ):
        page.keyboard.type(guess)
        page.keyboard.press("Enter")
        assert left.inner_text().startswith(answer)
        page.keyboard.press("Enter")  # opens the field again while the number is hidden
    blank = cell(page, "scores", "scores", 0, 1)
    assert blank.inner_text() == "____"
    blank.hover()
    assert said(page, "scores").startswith("scores[one, two] = ")
    assert said(page, "scores").endswith("= ?")
    for guess, start, end in (
        ("5", "5 is not right. Try again, or reveal the answer.", ""),
        ("4,0", "Right: ", " = 4"),  # a comma is a point
    ):
        blank.click()
        page.keyboard.type(guess)
        page.keyboard.press("Enter")
        settle(page)
        assert said(page, "scores").startswith(start) and said(page, "scores").endswith(end)
    assert blank.inner_text() == "4"
    assert cell(page, "scaled_scores", "scores", 0, 1).inner_text() == "4"
    assert cell(page, "scores", "scores", 1, 0).inner_text() == "____"
    page.locator("[data-stage='scores'] [data-do=reveal]").click()
    np.testing.assert_array_equal(table(page, "scores", "scores"), illustrated()[0].scores)
    assert page.locator("[data-stage='weights'] table[data-node=weights]", has_text="____").count() == 1
    page.locator("[data-do='reveal all']").click()
    settle(page)
    assert page.locator("td", has_text="____").count() == hidden.count() == figures(page).count("?") == 0
    assert left.inner_text() == "All blanks are filled."
    np.testing.assert_allclose(table(page, "weights", "weights"), illustrated()[0].weights, atol=5e-5)


LOOK = "(e) => (({ fontSize, backgroundColor }) => [fontSize, backgroundColor])(getComputedStyle(e))"


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
        page.locator(".sa-lesson [data-do=projector]").click()
        size, colour = page.locator(".sa-view").first.evaluate(LOOK)
        page.locator(".sa-lesson [data-do=theme]").click()
        assert size == "21px" and page.locator(".sa-view").first.evaluate(LOOK)[1] != colour
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
    assert {"Play", "Next", "Back", "Reset", "Reveal all"} <= set(named["button"])
    assert [name.strip() for name in named["combobox"]] == ["Go to", "Follow"]
    assert set(named["slider"]) == {"scale"}
    assert {"x, one two three", "key.T 3 × 3", "weighted_values[0] (query one) 3 × 3"} <= set(named["grid"])
    assert "Attention weights of all words: one two three" in named["figure"]
    assert any(name.startswith("one two three: ") for name in named["image"])  # the outputs
    assert "inputs 3 × 4, one, 0" in named["textbox"]
    assert {"one", "two", "three"} <= set(named["rowheader"]) and "columnheader" in named
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
            if (e === document.body) return null;
            const table = e.closest("table");
            return e.dataset.do ?? table?.caption?.textContent ?? table?.ariaLabel
                ?? (e.matches(".sa-token") ? "word" : e.type ?? e.tagName);
        }"""
        )
        if here is None:
            break
        reached.append(here)
    controls = ["theme", "projector", "word", "open all", "previous", "play", "next", *["select-one"] * 2]
    assert [name for name in reached if name in controls] == controls
    captions = small.locator(".sa-stage caption").all_text_contents()
    assert [name for name in reached if name in captions] == captions
    assert reached.count("range") == 1
    assert [name for name in reached if name.endswith(", one two three")] == [
        f"{name}, one two three" for name in ("x", "Q", "K", "V", "scores", "weights", "output")
    ]
    cell(small, "inputs", "inputs", 0, 0).focus()
    for key in ("ArrowRight", "Enter", "7", "Enter"):
        small.keyboard.press(key)
    assert cell(small, "inputs", "inputs", 0, 1).inner_text() == "7"
    assert small.evaluate("document.activeElement.textContent") == "7"  # the focus has not moved
    small.keyboard.press("ArrowDown")
    assert said(small, "inputs").startswith("inputs[two, 1] = ")
    small.keyboard.press("ArrowUp")
    small.keyboard.press("F2")
    small.keyboard.type("8")
    small.keyboard.press("Escape")
    assert cell(small, "inputs", "inputs", 0, 1).inner_text() == "7"


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_a_narrow_page_scrolls_in_its_equations_only_and_a_tutorial_is_printed_on_one_sheet(visit, name):
    page = visit(views.tutorial_page(name).html, width=360, height=640, unfold=False)
    margins = dict.fromkeys(("top", "right", "bottom", "left"), "1cm")
    assert len(re.findall(rb"/Type /Page\b(?!s)", page.pdf(format="A4", margin=margins))) == 1
    page.locator("[data-do='open all']").first.evaluate("button => button.click()")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".sa-lesson").evaluate("root => root.dataset.projector = ''")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.locator(".sa-lesson").evaluate("root => delete root.dataset.projector")
    page.set_viewport_size({"width": 718, "height": 900})  # A4, less the margins that Chromium leaves
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    right = page.evaluate(
        "Math.max(...[...document.querySelectorAll('table, pre, p, h3')].map((e) => e.getBoundingClientRect().right))"
    )
    assert right <= 718


@pytest.mark.parametrize("name", PAGES)
def test_nasty_tokens_run_nothing(visit, name):
    assert_nothing_runs(visit(PAGES[name](NASTY).html), NASTY[0])


def test_nasty_captions_titles_and_pictures_run_nothing(visit):
    captions = {name: NASTY[n % len(NASTY)] for n, name in enumerate(views.CAPTIONS)}
    made = views.steps_page(*illustrated(), captions=captions, exercise=True)
    page = visit(views.join_pages([made, made], "".join(NASTY)).html.replace("</body>", f"{made.svg}</body>"))
    cell(page, "scores", "scores", 0, 0).first.hover()
    change(page, "inputs", "inputs", 0, 0, "2")
    page.locator(".sa-lesson [data-do='reveal all']").first.click()
    assert page.locator("script").count() == 4  # three scripts of data, and one of code
    attributes = page.evaluate(
        "[...document.querySelectorAll(':not(.sa-still img)')].flatMap(e => [...e.attributes].map(a => a.name))"
    )
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "action")]
