"""The steps page in Chromium: changed numbers, two sentences, exercises."""

import re

import numpy as np
import pytest
from page_driver import cell, change, lit, numbers_of, said, stages, table
from pages import additive, bank, everything, illustrated, model, numbers_by_node

from selfattn import views
from selfattn.steps.layers import layer_steps
from selfattn.views.writing import number


def test_a_changed_input_changes_the_steps_after_it_and_reset_undoes_it(small):
    text = "[...document.querySelectorAll('.sa-screen, .sa-details')].map((e) => e.innerText)"
    before = small.evaluate(text)
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
    assert re.match(r"Numbers that changed: \d+\. Most of all \w+.*, from .* to ", said(small, "inputs"))
    count = int(re.search(r"\d+", said(small, "inputs"))[0])
    assert count == len(set(lit(small, "moved")) - {"inputs[0,1]"})  # the typed number does not count
    cell(small, "scores", "scores", 0, 0).hover()
    assert said(small, "scores").endswith("was 2")
    small.locator("[data-do=reset]").click()
    assert small.locator("td.sa-moved").count() == 0
    assert small.locator("[data-do=reset]").is_disabled()
    cell(small, "scores", "scores", 0, 0).hover()
    small.dispatch_event(".sa-steps", "pointerleave")
    small.evaluate("document.querySelectorAll('.sa-say').forEach(e => e.replaceChildren())")
    assert small.evaluate(text) == before


def test_a_mask_cell_closes_and_opens(small):
    cell(small, "masked_scores", "mask", 0, 1).click()
    weights = table(small, "weights", "weights")
    assert table(small, "masked_scores", "masked_scores")[0, 1] == -np.inf
    np.testing.assert_allclose(weights[0], np.exp([2, -np.inf, 4]) / np.exp([2, -np.inf, 4]).sum(), atol=5e-5)
    cell(small, "masked_scores", "masked_scores", 0, 1).hover()
    assert said(small, "masked_scores") == "masked_scores[one, two] = masked = -inf was 4"
    cell(small, "weights", "weights", 0, 1).hover()
    assert re.match(r"weights\[one, two\] = masked (≈ 0\.0000|= 0)", said(small, "weights"))
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
    exps = np.exp(scores)
    np.testing.assert_allclose(
        table(small, "weights", "weights"), exps / exps.sum(1, keepdims=True), atol=5e-5
    )
    small.locator("[data-do=reset]").click()
    assert float(slider.input_value()) == 1


def test_text_that_is_not_a_number(small):
    for typed in ("abc", "1e999", "", " ", "0x10", "1,000.5", "1,2,3", "1 2", "--1", "infinity"):
        cell(small, "inputs", "inputs", 0, 0).dblclick()
        small.keyboard.press("Delete")
        small.keyboard.type(typed)
        small.keyboard.press("Enter")
        assert said(small, "inputs").startswith(f'"{typed}" is not a number; ')
        assert cell(small, "inputs", "inputs", 0, 0).inner_text() == "1"
        assert small.locator("td.sa-moved").count() == 0 and small.locator("[data-do=reset]").is_disabled()


def test_typed_numbers(small):
    steps, p = illustrated()[0], illustrated()[0].parameters
    for typed, shown in (
        ("nan", "nan"), ("0,84", "0.84"), ("-inf", "-inf"), ("−2", "-2"), (" 1e-3 ", "0.001"), (".5", "0.5"), ("1e200", "1.000e+200"),
    ):  # fmt: skip
        change(small, "inputs", "inputs", 0, 0, typed)
        assert cell(small, "inputs", "inputs", 0, 0).inner_text() == shown
        x = steps.inputs.copy()
        x[0, 0] = float(typed.replace("−", "-").replace(",", "."))
        with np.errstate(all="ignore"):
            expected = layer_steps(x, p.W_query, p.W_key, p.W_value, scale=1.0)
        for name in ("query", "scores", "weights", "output"):
            got, want = table(small, name, name), getattr(expected, name)
            np.testing.assert_allclose(got, want, rtol=5.1e-4, atol=5.1e-5)  # four decimals or four digits
        small.locator("[data-do=reset]").click()
        assert small.locator("td.sa-moved").count() == 0
        np.testing.assert_array_equal(table(small, "scores", "scores"), steps.scores)


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
    [(everything, 1e-9), (model, 1e-9), (additive, 1e-9), (lambda **add: everything(np.float32, **add), 1e-4)],
    ids=["everything", "model", "additive", "float32"],
)  # fmt: skip
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
    """The kernel's float32 differs from the browser's float64; under a causal mask an edit changes only the last row."""
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
    shown = numbers_of(page.locator("[data-stage='output'] table.sa-diff"))
    np.testing.assert_allclose(shown, moved, rtol=5e-4, atol=5e-5)


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
