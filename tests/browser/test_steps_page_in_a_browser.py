"""The steps page in Chromium: what lights up, what is spelled, what an edit moves."""

import re
from importlib import resources

import numpy as np
import pytest
from pages import NASTY, Reader, bank, everything, illustrated, large, model, numbers_by_node

from selfattn import tutorials, views
from selfattn.layer_steps import layer_steps
from selfattn.tutorials import load
from selfattn.views.draw import shade
from selfattn.views.writing import number, visible

TOKENS = ["one", "two", "three"]


@pytest.fixture
def small(visit):
    return visit(views.steps_page(*illustrated()).html)


def cell(page, stage, node, i, j, *, transposed=False):
    """A cell of a table of a stage, by its row and column as they stand there."""
    t = "[data-t]" if transposed else ":not([data-t])"
    return (
        page.locator(f"[data-stage='{stage}'] table[data-node='{node}']{t} tbody tr")
        .nth(i)
        .locator("td")
        .nth(j)
    )


def table(page, stage, node):
    """The numbers of a table, from the DOM."""
    found = page.locator(f"[data-stage='{stage}'] table[data-node='{node}']:not([data-t])").first
    rows = found.evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].slice(1).map(c => c.textContent))"
    )
    return np.array([[float(x) for x in row] for row in rows])


def lit(page, colour, stage=None):
    """The numbers that are lit, as node[row,column] in the table that shows them."""
    where = f"[data-stage='{stage}'] " if stage else ""
    return page.eval_on_selector_all(
        f"{where}td.sa-{colour}",
        """cells => cells.map(c => {
            const table = c.closest("table"), i = c.parentElement.sectionRowIndex, j = c.cellIndex - 1;
            const [row, column] = "t" in table.dataset ? [j, i] : [i, j];
            return `${table.dataset.node ?? "difference"}[${row},${column}]`;
        })""",
    )


def said(page, stage):
    return page.locator(f"[data-stage='{stage}'] .sa-say").inner_text()


# -------------------------------------------------------------------------------------- where numbers come from


def test_hovering_lights_up_what_made_a_number_and_spells_the_sum(small):
    cell(small, "scores", "scores", 0, 1).hover()
    assert said(small, "scores") == "scores[one, two] = 1·4 + 0·4 + 2·0 = 4"
    assert sorted(lit(small, "a", "scores")) == ["query[0,0]", "query[0,1]", "query[0,2]"]
    assert sorted(lit(small, "b", "scores")) == ["key[1,0]", "key[1,1]", "key[1,2]"]
    assert lit(small, "to", "scores") == ["scores[0,1]"]
    # what those are made of, back to the inputs: the first row for the query, the second for the key
    assert set(lit(small, "far", "inputs")) == {f"inputs[{i},{m}]" for i in (0, 1) for m in range(4)}
    assert lit(small, "far", "output") == []
    # the same numbers in the stages before and after
    assert sorted(lit(small, "a", "query")) == ["query[0,0]", "query[0,1]", "query[0,2]"]
    assert lit(small, "to", "scaled_scores") == ["scores[0,1]"]
    cell(small, "scores", "scores", 1, 0).hover()
    assert said(small, "scores") == "scores[two, one] = 2·0 + 2·1 + 2·1 = 4"
    assert lit(small, "to", "scores") == ["scores[1,0]"]


SPELLED = {
    ("query", "query", 0, 2): "query[one, 2] = 1·1 + 0·0 + 1·1 + 0·1 = 2",
    ("scaled_scores", "scaled_scores", 1, 1): "scaled_scores[two, two] = 16·1 = 16",
    ("masked_scores", "masked_scores", 1, 1): "masked_scores[two, two] = 16 = 16",
    ("weights", "weights", 0, 0): "weights[one, one] = exp(2) / (exp(2) + exp(4) + exp(4)) ≈ 0.0634",
    ("weighted_values", "weighted_values[0]", 1, 1): "weighted_values[0][two, 1] = 0.4683·8 ≈ 3.7465",
    ("output", "output", 0, 0): "output[one, 0] = 0.0634·1 + 0.4683·2 + 0.4683·2 ≈ 1.9366",
}


def test_every_kind_of_number_is_spelled(small):
    for (stage, node, i, j), text in SPELLED.items():
        cell(small, stage, node, i, j).hover()
        assert said(small, stage) == text
    cell(small, "inputs", "inputs", 1, 1).hover()
    assert said(small, "inputs").startswith("inputs[two, 1] = 2 is given")


def all_spelled(page):
    """Light every cell of every table: the text before and after the sign, and the text of the cell."""
    return page.evaluate(
        """() => {
        const found = [];
        let n = 0;
        for (const td of document.querySelectorAll(".sa-result tbody td, .sa-diff tbody td")) {
            td.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, screenX: ++n}));
            const sum = td.closest(".sa-stage").querySelector(".sa-sum");
            if (sum) found.push([sum.textContent, td.textContent]);
        }
        return found;
    }"""
    )


@pytest.mark.parametrize("make", [illustrated, lambda: bank("river"), everything, model], ids=str)
def test_every_sum_that_is_spelled_gives_the_number_it_is_for(visit, make):
    """Evaluate what is spelled, with 12 decimals: it is the number in the cell, to rounding."""
    page = visit(views.steps_page(*make(), precision=12).html)
    names = {"exp": np.exp, "tanh": np.tanh, "inf": np.inf, "nan": np.nan, "sqrt": np.sqrt}
    spelled = all_spelled(page)
    assert len(spelled) > 60
    for text, shown in spelled:
        formula, result = re.split(" [=≈] ", text)
        assert result == shown
        if formula in ("masked", "nothing to attend to"):
            assert result in ("-inf", "0", "0.000000000000")
            continue
        computed = eval(formula.replace("·", "*").replace("√", "sqrt"), names)
        # 8 terms or so, each figure rounded to 12 decimals and weighed by numbers below 100
        assert np.isclose(computed, float(result), rtol=1e-9, atol=1e-9), text


def test_leaving_and_coming_back(small):
    cell(small, "scores", "scores", 0, 1).click()
    cell(small, "scores", "scores", 1, 0).hover()
    assert lit(small, "to", "scores") == ["scores[1,0]"]
    small.locator("h2.sa-head").hover()
    small.mouse.move(1279, 1)
    small.dispatch_event(".sa-steps", "pointerleave")
    assert lit(small, "to", "scores") == ["scores[0,1]"]  # the one that has the focus


def test_the_browser_writes_numbers_as_the_page_does(visit):
    """Ties included, which JavaScript alone rounds away from zero and Python to the even digit."""
    rng = np.random.default_rng(5)
    values = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, 0.125, -0.375, 1.0625, 0.03125, 12345000.0, 12335000.0, 9999999.5, 1e300,
              -1e-300, 999.99995, 0.00099999999, 0.001, 1e-13, 2.0**-11, *rng.standard_normal(200),
              *(rng.standard_normal(200) * 10.0 ** rng.integers(-12, 12, 200)), *(rng.integers(-500, 500, 100) / 64)]  # fmt: skip
    cases = [[float(x), d, p] for x in values for p in (1, 2, 4, 12) for d in {0, p // 2, p}]
    code = (resources.files("selfattn.views") / "compute.js").read_text("utf-8")
    page = visit("<!DOCTYPE html><title>empty</title>")
    written = page.evaluate(f"cases => {{ {code} return cases.map((c) => write(...c)) }}", cases)
    assert written == [number(*case) for case in cases]
    special = page.evaluate(
        f"() => {{ {code} return [NaN, Infinity, -Infinity].map((x) => write(x, 2, 4)) }}"
    )
    assert special == [number(x, 2, 4) for x in (np.nan, np.inf, -np.inf)]
    shades = page.evaluate(f"cases => {{ {code} return cases.map(([x]) => shade(x, 2.0)) }}", cases)
    # JavaScript rounds half up and Python half to even, so of the levels only ties may differ
    assert all(
        a == shade(x, 2.0) or (4 * abs(x)) % 1 == 0.5 for a, (x, _, _) in zip(shades, cases, strict=True)
    )


# ------------------------------------------------------------------------------------------------- the keyboard


def test_the_keyboard_reaches_every_number(small):
    small.locator("[data-stage='scores'] table[data-node='scores'] td[tabindex='0']").focus()
    assert lit(small, "to", "scores") == ["scores[0,0]"]
    for key, expected in [
        ("ArrowRight", "scores[0,1]"), ("ArrowDown", "scores[1,1]"), ("End", "scores[1,2]"),
        ("ArrowRight", "scores[1,2]"), ("Home", "scores[1,0]"), ("ArrowUp", "scores[0,0]"),
        ("ArrowLeft", "scores[0,0]"),
    ]:  # fmt: skip
        small.keyboard.press(key)
        assert lit(small, "to", "scores") == [expected]
    assert said(small, "scores") == "scores[one, one] = 1·0 + 0·1 + 2·1 = 2"
    assert small.locator("[data-stage='scores'] table[data-node='scores'] td[tabindex='0']").count() == 1


def test_keys_are_taken_only_inside(small):
    small.evaluate(
        "document.addEventListener('keydown', e => (window.heard ??= []).push([e.key, e.defaultPrevented]))"
    )
    small.keyboard.press("n")
    assert small.evaluate("window.heard") == [["n", False]]
    assert small.locator(".sa-count").inner_text().startswith("0 /")
    cell(small, "scores", "scores", 0, 0).click()
    before = small.locator(".sa-count").inner_text()
    small.keyboard.press("n")
    assert small.locator(".sa-count").inner_text() != before
    small.keyboard.press("d")  # would delete a cell of a notebook
    small.keyboard.press("Shift+Enter")
    small.keyboard.press("Control+k")
    heard = [event for event in small.evaluate("window.heard") if event[0] not in ("Shift", "Control")]
    assert heard == [["n", False], ["Enter", False], ["k", False]]


# ------------------------------------------------------------------------------------------ stepping and links


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
    assert list(dict.fromkeys(seen)) == list(Reader(small.content()).stages)
    assert lit(small, "to", "output")[-1] == "output[2,2]"
    assert small.url.endswith("#stage=output&row=2")
    back.click()
    assert lit(small, "to", "output")[-1] == "output[2,1]"


def test_play_goes_on_by_itself_and_pauses(visit):
    page = visit(views.steps_page(*illustrated()).html)
    page.clock.install()
    play = page.locator("[data-do=play]")
    play.click()
    assert play.inner_text() == "Pause"
    page.clock.run_for(5000)
    at = int(page.locator(".sa-count").inner_text().split("/")[0])
    assert at >= 3
    play.click()
    assert play.inner_text() == "Play"
    page.clock.run_for(5000)
    assert int(page.locator(".sa-count").inner_text().split("/")[0]) == at


def test_following_a_token_shows_its_numbers_alone(small):
    small.get_by_label("Follow").select_option("1")
    rows = small.locator("[data-stage='scores'] table[data-node='scores'] tr.sa-row th").all_inner_texts()
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
    page.locator("[data-stage=value] h3 a").click()
    assert page.url.endswith("#stage=value&row=0")


def test_the_list_of_stages_leads_to_one(small):
    small.get_by_label("Go to").select_option("Weights")
    assert small.locator(".sa-stage.sa-now").get_attribute("data-stage") == "weights"
    assert lit(small, "to", "weights") == ["weights[0,0]"]


def test_a_link_leads_into_the_second_of_two_views(visit):
    pages = [views.steps_page(*illustrated()), views.steps_page(*bank("river"))]
    page = visit(views.join_pages(pages, "Two").html, fragment="#view=2&stage=scores&row=1")
    assert page.locator(".sa-stage.sa-now").count() == 1
    assert (
        page.locator(".sa-steps").nth(1).locator(".sa-now .sa-say b").inner_text() == "scores[bank, stream]"
    )


# ------------------------------------------------------------------------------------------- changing a number


def change(page, stage, node, i, j, text):
    cell(page, stage, node, i, j).dblclick()
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def test_an_input_that_changes_moves_what_follows_from_it_and_reset_brings_it_back(small):
    before = small.evaluate("document.body.innerText")
    (steps, _), x = illustrated(), illustrated()[0].inputs.copy()
    change(small, "inputs", "inputs", 0, 1, "2.5")
    x[0, 1] = 2.5
    p = steps.parameters
    expected = layer_steps(x, p.W_query, p.W_key, p.W_value, scale=1.0)
    for stage in ("query", "key", "value", "scores", "weights", "output"):
        got = table(small, stage, stage)
        want = getattr(expected, stage)
        assert np.allclose(got, want, rtol=5e-4, atol=5e-5), stage
    assert table(small, "inputs", "inputs")[0, 1] == 2.5
    moved = small.locator("[data-stage='scores'] table[data-node='scores'] td.sa-moved").count()
    assert moved == np.sum(expected.scores != steps.scores)
    assert re.match(r"\d+ numbers moved; most of all \w+.*: .* became ", said(small, "inputs"))
    cell(small, "scores", "scores", 0, 0).hover()
    assert said(small, "scores").endswith("was 2")
    small.locator("[data-do=reset]").click()
    assert small.locator("td.sa-moved").count() == 0
    assert small.locator("[data-do=reset]").is_disabled()
    cell(small, "scores", "scores", 0, 0).hover()
    small.dispatch_event(".sa-steps", "pointerleave")
    small.evaluate("document.querySelectorAll('.sa-say').forEach(e => e.replaceChildren())")
    assert small.evaluate("document.body.innerText") == before


def test_a_mask_cell_closes_and_opens(small):
    cell(small, "masked_scores", "mask", 0, 1).click()
    weights = table(small, "weights", "weights")
    assert table(small, "masked_scores", "masked_scores")[0, 1] == -np.inf
    np.testing.assert_allclose(weights[0], np.exp([2, -np.inf, 4]) / np.exp([2, -np.inf, 4]).sum(), atol=5e-5)
    cell(small, "masked_scores", "masked_scores", 0, 1).hover()
    assert said(small, "masked_scores") == "masked_scores[one, two] = masked = -inf was 4"
    cell(small, "weights", "weights", 0, 1).hover()
    assert said(small, "weights").startswith(
        "weights[one, two] = masked ≈ 0.0000 was"
    ) or "masked = 0" in said(small, "weights")
    for j in (0, 2):
        cell(small, "masked_scores", "mask", 0, j).click()
    assert not table(small, "weights", "weights")[0].any()  # a row without keys is zeros, not NaN
    assert not table(small, "output", "output")[0].any()
    cell(small, "masked_scores", "mask", 0, 2).focus()
    small.keyboard.press(" ")
    assert table(small, "weights", "weights")[0].tolist() == [0, 0, 1]


def test_the_scale_moves_with_its_slider(small):
    slider = small.locator("[data-stage='scaled_scores'] .sa-scale input")
    slider.evaluate("e => { e.value = '0.5'; e.dispatchEvent(new Event('input')) }")
    assert table(small, "scaled_scores", "scale").tolist() == [[0.5]]
    scores = illustrated()[0].scores / 2
    np.testing.assert_array_equal(table(small, "scaled_scores", "scaled_scores"), scores)
    exps = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(
        table(small, "weights", "weights"), exps / exps.sum(1, keepdims=True), atol=5e-5
    )
    small.locator("[data-do=reset]").click()
    assert float(slider.input_value()) == 1


def test_what_is_no_number_is_refused_and_escape_leaves_all_as_it_was(small):
    change(small, "inputs", "inputs", 0, 0, "<b>one</b>")
    assert said(small, "inputs") == '"<b>one</b>" is not a number.'
    assert small.locator("[data-stage='inputs'] .sa-say b").count() == 0
    cell(small, "inputs", "inputs", 0, 0).dblclick()
    small.keyboard.type("7")
    small.keyboard.press("Escape")
    assert small.locator("td.sa-moved").count() == 0
    assert cell(small, "inputs", "inputs", 0, 0).inner_text() == "1"
    cell(small, "scores", "scores", 0, 0).dblclick()  # computed: cannot be changed
    assert small.locator("td input").count() == 0


def all_numbers(page):
    """Every matrix of the page, from the DOM."""
    found = page.eval_on_selector_all(
        "table[data-node]",
        """tables => tables.map(t => [t.dataset.node, "t" in t.dataset,
            [...t.tBodies[0].rows].map(r => [...r.cells].slice(1).map(c => Number(c.textContent.replace("inf", "Infinity"))))])""",
    )
    return {name: np.array(rows).T if transposed else np.array(rows) for name, transposed, rows in found}


@pytest.mark.parametrize(
    ("make", "eps"),
    [(everything, 1e-9), (model, 1e-9), (lambda **add: everything(np.float32, **add), 1e-4)],
    ids=["everything", "model", "float32"],
)
def test_the_browser_computes_what_python_computes(visit, make, eps):
    """Change an input in the browser and in Python: every number of every step agrees. And reset brings all back.

    The page shows 12 decimals, and sums have a dozen terms of size 10; what float32 kernels computed differs
    by their rounding from what the browser computes in float64.
    """
    steps, tokens = make()
    page = visit(views.steps_page(steps, tokens, precision=12).html)
    stage = next(iter(Reader(page.content()).stages))
    before = all_numbers(page)
    change(page, stage, stage, 0, 0, str(before[stage][0, 0] + 1))
    expected, got = numbers_by_node(make(add=1)[0]), all_numbers(page)
    assert expected.keys() <= got.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, rtol=eps, atol=eps, err_msg=name)
    page.locator("[data-do=reset]").click()
    after = all_numbers(page)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


# ------------------------------------------------------------------------------------------- two sentences


def test_two_sentences_and_their_difference(visit):
    page = visit(views.steps_page(*bank("river"), compare=bank("finance")).html)
    river, finance = bank("river")[0], bank("finance")[0]
    np.testing.assert_allclose(table(page, "output", "output"), river.output, atol=5e-5)
    np.testing.assert_allclose(table(page, "output", "output~1"), finance.output, atol=5e-5)
    difference = page.locator("[data-stage='output'] table.sa-diff tbody tr").nth(1).locator("td").nth(0)
    difference.hover()
    a, b = river.output[1, 0], finance.output[1, 0]
    assert said(page, "output") == (
        f"second minus first: output[bank, 0] = {number(b, 4, 4)} - {number(a, 4, 4)} ≈ {number(b - a, 4, 4)}"
    )
    assert lit(page, "a", "output") == ["output[1,0]"]
    assert lit(page, "b", "output") == ["output~1[1,0]"]
    change(page, "query", "W_query", 0, 0, "9")  # shared: both sentences move
    for node in ("query", "query~1"):
        assert page.locator(f"table[data-node='{node}'] td.sa-moved").count()
    weights = [w.copy() for w in (river.parameters.W_query, river.parameters.W_key, river.parameters.W_value)]
    weights[0][0, 0] = 9
    moved = layer_steps(finance.inputs, *weights).output - layer_steps(river.inputs, *weights).output
    shown = page.locator("[data-stage='output'] table.sa-diff").evaluate(
        "t => [...t.tBodies[0].rows].map(r => [...r.cells].slice(1).map(c => Number(c.textContent)))"
    )
    np.testing.assert_allclose(shown, moved, rtol=5e-4, atol=5e-5)


# ------------------------------------------------------------------------------------------------- exercise


def test_predicting_and_revealing(visit):
    page = visit(views.steps_page(*illustrated(), exercise=True).html)
    field = page.locator("[data-stage='scores'] table[data-node='scores'] td input").first
    assert field.get_attribute("aria-label") == "Predict scores[one, two]"
    cell(page, "scores", "scores", 0, 1).hover()
    assert said(page, "scores").startswith("scores[one, two] = ")
    assert said(page, "scores").endswith("= ?")
    field.fill("5")
    field.press("Enter")
    assert said(page, "scores") == "Not 5. Try again, or reveal."
    field.fill("4")
    field.press("Enter")
    assert said(page, "scores").startswith("Right: ")
    assert said(page, "scores").endswith(" = 4")
    assert cell(page, "scores", "scores", 0, 1).inner_text() == "4"
    assert cell(page, "scaled_scores", "scores", 0, 1).inner_text() == "4"
    assert cell(page, "scores", "scores", 1, 0).locator("input").count() == 1
    page.locator("[data-stage='scores'] [data-do=reveal]").click()
    np.testing.assert_array_equal(table(page, "scores", "scores"), illustrated()[0].scores)
    assert page.locator("[data-stage='weights'] td input").count() == 3
    page.locator("[data-do='reveal all']").click()
    assert page.locator("td input, .sa-blank").count() == 0
    np.testing.assert_allclose(table(page, "weights", "weights"), illustrated()[0].weights, atol=5e-5)


def test_the_printed_sheet_has_its_answers(visit):
    page = visit(views.steps_page(*illustrated(), exercise=True).html)
    page.emulate_media(media="print")
    assert page.locator(".sa-answers li").first.is_visible()
    assert not page.locator(".sa-bar").is_visible()
    assert "\nscores[one, two] = 4\n" in page.locator(".sa-answers").inner_text()


# ----------------------------------------------------------------------------------- where it stands, and safety


def test_without_scripts_every_number_is_there(visit):
    page = visit(views.steps_page(*bank("river")).html, java_script_enabled=False)
    steps = bank("river")[0]
    for name in ("query", "key", "value", "scores", "weights", "output"):
        text = page.locator(f"[data-stage='{name}'] table[data-node='{name}']").inner_text()
        for value in getattr(steps, name).ravel():
            assert number(value, 4, 4) in text or number(value, 2, 4) in text or number(value, 3, 4) in text
    assert page.locator(".sa-bar").count() == 0


def test_two_views_in_one_document_leave_each_other_alone(visit):
    first, second = views.steps_page(*illustrated()).fragment, views.steps_page(*bank("river")).fragment
    page = visit(f"<!DOCTYPE html><meta charset=utf-8><title>two</title>{first}<p>between</p>{second}{first}")
    roots = page.locator(".sa-steps")
    assert roots.count() == 3
    assert page.locator(".sa-bar").count() == 3
    roots.nth(2).locator("[data-do=next]").click()
    assert roots.nth(0).locator(".sa-now").count() == 0
    assert "#" not in page.url
    cell(roots.nth(0), "inputs", "inputs", 0, 0).dblclick()
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    assert roots.nth(0).locator("td.sa-moved").count() > 3
    assert roots.nth(2).locator("td.sa-moved").count() == 0
    assert page.locator("[id]").count() == 0


def test_nasty_tokens_are_shown_and_run_nothing(visit):
    steps, _ = model(len(NASTY))
    page = visit(views.steps_page(steps, NASTY, exercise=True).html)
    shown = page.locator("[data-stage='block0.scores'] .sa-result tbody th").all_inner_texts()
    assert [text.strip() for text in shown] == [" ".join(visible(token).split()) for token in NASTY]
    for _ in range(3):
        page.locator("[data-do=next]").click()
    cell(page, "block0.scores", "block0.scores", 0, 1).hover()
    assert "<script>alert(1)</script>" in said(page, "block0.scores")
    assert page.locator("img").count() == 0


def test_a_large_page_answers_a_hover_at_once(visit):
    page = visit(views.steps_page(*large()).html)
    ms = page.evaluate(
        """() => {
        const times = [];
        let n = 0;
        for (const td of [...document.querySelectorAll(".sa-result tbody td")].filter((_, k) => k % 37 === 0)) {
            const start = performance.now();
            td.dispatchEvent(new PointerEvent("pointerover", {bubbles: true, screenX: ++n}));
            td.closest(".sa-stage").getBoundingClientRect();
            times.push(performance.now() - start);
        }
        return times.sort((a, b) => a - b);
    }"""
    )
    assert len(ms) > 30
    assert ms[len(ms) // 2] < 50
    assert page.locator("td.sa-to").count() >= 1
    change(page, "inputs", "inputs", 0, 0, "5")
    assert page.locator("td.sa-moved").count() > 500


# ------------------------------------------------------------------------------------------------ the tutorials


def tables_of(page):
    """Every table of the page, from the DOM: name of the node, side -> matrices in order."""
    found = page.eval_on_selector_all(
        "table.sa-result[data-node]",
        "tables => tables.map(t => [t.dataset.node, [...t.tBodies[0].rows].map(r => [...r.cells].slice(1).map(c => c.textContent))])",
    )
    tables = {}
    for name, cells in found:
        tables.setdefault(name, []).append(np.array([[float(x) for x in row] for row in cells]))
    return tables


def assert_printed(got, printed, unit):
    printed = np.asarray(printed, np.float64)
    assert got.shape == printed.shape
    # half a unit in which it was printed, and half a unit in which the page shows it
    assert np.all(np.abs(got - printed) <= 0.5 * unit + 0.5 * unit + 1e-12)


def test_tutorial_1_is_on_its_page(visit):
    data = load("first_principles")
    tables = tables_of(visit(views.tutorial_page("first_principles").html))
    for side, sentence in enumerate(("river", "finance")):
        end = "~1" if side else ""
        for step, node, n in [
            ("embed", "inputs", 0), ("linear_layer", "linear", 0), ("raw_dot_product_scores", "scores", 0),
            ("attention_on_raw_embeddings", "output", 0), ("projected_attention", "output", 1),
            ("self_attention_class", "output", 2),
        ]:  # fmt: skip
            assert_printed(tables[node + end][n], data[step]["printed"][sentence], 1e-3)


def test_tutorial_3_is_on_its_page(visit):
    data = load("basics_notebook")
    tables = tables_of(visit(views.tutorial_page("basics_notebook").html))
    names = {"Q": "query", "K": "key", "V": "value", "attn_logits": "scores", "row_sums": "row_sums",
             "scaled_attention_logits": "scaled_scores", "attention_weights": "weights", "output": "output"}  # fmt: skip
    assert names.keys() == data["printed"].keys()
    for printed, node in names.items():
        got = tables[node][0]
        assert_printed(got[:, 0] if node == "row_sums" else got, data["printed"][printed], 1e-4)


def test_tutorial_4_is_on_its_page(visit):
    data = load("illustrated")
    printed = data["printed"]
    tables = tables_of(visit(views.tutorial_page("illustrated").html))
    for name, node in [("keys", "key"), ("querys", "query"), ("values", "value"), ("attn_scores", "scores"),
                       ("attn_scores_softmax_rounded", "replaced_weights")]:  # fmt: skip
        np.testing.assert_array_equal(tables[node][0], printed[name])
    softmax = np.array(printed["attn_scores_softmax"])
    assert_printed(tables["weights"][0], softmax, 10.0 ** (np.floor(np.log10(softmax)) - 4))
    by_query = np.array([tables[f"weighted_values[{i}]"][0] for i in range(3)])
    assert_printed(by_query.swapaxes(0, 1), printed["weighted_values_rounded"], 1e-5)
    assert_printed(tables["output"][0][0], printed["output_1_rounded"], 1e-5)
    assert_printed(tables["output"][0][1:], data["computed_not_printed"]["outputs_2_and_3_rounded"], 1e-5)


@pytest.mark.parametrize(("name", "number"), [("sentence_embeddings", 2), ("attention_module", 5)])
def test_tutorials_that_print_nothing_show_what_is_computed(visit, name, number):
    """Against the numbers that `selfattn.tutorials` computes with the kernels, head by head."""
    page = visit(views.tutorial_page(name).html)
    shown = [t for found in tables_of(page).values() for t in found]
    comparisons = getattr(tutorials, name)().comparisons
    assert tutorials.TUTORIALS[number - 1].__name__ == name
    for comparison in comparisons:
        if comparison.name.startswith("sentence embedding"):
            continue  # the mean of a block's output: a model has it, a block has not
        matrices = comparison.computed.reshape(-1, *comparison.computed.shape[-2:])
        for matrix in matrices:
            assert any(t.shape == matrix.shape and np.allclose(t, matrix, atol=0.51e-4) for t in shown), (
                comparison.name
            )
