"""The parts of the kit in Chromium, each alone on a page, and on the first screen, where they show the numbers of the
steps."""

import re

import numpy as np
import pytest
from page_driver import cell, change, figures, strip, table, then
from pages import bank, everything, illustrated, model

from selfattn import attention_steps, views
from selfattn.steps.layers import layer_steps
from selfattn.views import document

SCRIPT = """
const root = document.querySelector(".sa-view"), heard = (window.heard = []);
const weights = Matrix.of(3, 3, (i, j) => [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0, 0, 0]][i][j]);
const words = ["<b>river</b>", "bank", "mud"];
const ribbons = new Ribbons({
  keys: words, queries: words, side: 0, name: "weights", ends: { from: "in", to: "out" },
  point: (chosen, pin) => heard.push([chosen && `${chosen.kind} ${chosen.index}`, pin]),
});
root.append(ribbons.node);
const choose = (kind, index) => ribbons.update({ weights, selected: { kind, index }, now: true });
choose("to", 1);
window.choose = choose;
const matrix = Matrix.of(2, 3, (i, j) => i - j);
const show = () => heat.update({ matrix, size: 2, write: (x) => fixed(x, 1), row: 1 });
const heat = new Heat({
  name: "x", rows: 2, columns: 3, rowLabels: ["a", "b"], columnLabels: ["0", "1", "2"],
  point: (place) => heard.push(place && [place.i, place.j]),
  edit: (i, j, value) => { matrix.data[3 * i + j] = value; show(); },
});
root.append(heat.node);
show();
heat.mark({ i: 0, j: 1 }, [{ i: 1, j: 2 }]);
const map = new HeatMap({
  name: "map", rows: 2, columns: 3, point: (place) => heard.push(place && [place.i, place.j]),
});
root.append(map.node);
map.update({ matrix, size: 2, row: 1, colours: pixelColours(root) });
const lines = new NumberLines();
root.append(lines.node);
const marks = [{ value: 1, look: "sa-mark-0", text: "1.0" }, { value: 3, look: "sa-mark-1", text: "3.0" }];
lines.update([{ name: "0", marks }], "from 1 to 3");
"""


@pytest.fixture
def kit(visit):
    code = then(("kit/heat.js", "kit/pictures.js", "kit/ribbons.js"), SCRIPT)
    return visit(
        f"<!DOCTYPE html><html lang=en><title>kit</title>{document.style()}<link rel=icon href='data:,'>"
        f"<body class=sa-page><div class=sa-view></div><script>{code}</script>"
    )


def heard(page):
    return page.evaluate("window.heard.splice(0)")


def test_ribbons_are_as_thick_as_weights_and_fill_their_bars(kit):
    def boxes(name):
        return kit.locator(f".sa-ribbons path.{name}").evaluate_all(
            """paths => paths.flatMap(p => (p.getAttribute("d").match(/M[^Z]*Z/g) ?? []).map(d => {
            const [, left, from] = /^M([\\d.]+),([\\d.]+)/.exec(d), [, high] = /v([\\d.]+)/.exec(d);
            return [Number(left), Number(from), Number(high)];
        }))"""
        )

    bars = boxes("sa-bars")
    unit = bars[3][2]  # the bars at the right come last, each of weight 1
    assert [high for *_, high in bars[3:]] == [unit] * 3
    np.testing.assert_allclose([high for *_, high in bars[:3]], np.array([0.6, 1.1, 0.3]) * unit, atol=0.06)
    strong = boxes("sa-strong")
    np.testing.assert_allclose(sorted(high / unit for *_, high in strong), [0.1, 0.1, 0.8], atol=0.002)
    assert len(boxes("sa-others")) == 2 and len(boxes("sa-own")) == 2  # no weight, no ribbon
    assert kit.locator(".sa-figures text").all_text_contents() == ["0.10", "0.80", "0.10"]
    kit.evaluate("choose('from', 0)")
    assert kit.locator(".sa-figures text").all_text_contents() == ["0.50", "0.10", "0.00"]
    assert kit.locator(".sa-token b").count() == 0  # tokens are text
    assert kit.locator(".sa-token[aria-pressed=true]").all_text_contents() == ["<b>river</b>"]


def test_words_are_chosen_by_mouse_and_keys(kit):
    words = kit.locator(".sa-token")
    words.nth(0).hover()
    assert heard(kit)[-1] == ["from 0", False]
    words.nth(5).click()
    assert heard(kit)[-1] == ["to 2", True]
    for key, expected in {"Up": "to 1", "Left": "from 1", "Down": "from 2", "Right": "to 2"}.items():
        kit.keyboard.press(f"Arrow{key}")
        assert heard(kit)[-1][0] == expected
    assert kit.locator(".sa-token[tabindex='0']").count() == 1


def test_a_small_matrix_is_read_and_changed(kit):
    cells = kit.locator(".sa-heat td.sa-tinted")
    assert cells.all_text_contents() == ["0.0", "-1.0", "-2.0", "1.0", "0.0", "-1.0"]
    assert [cells.nth(n).get_attribute("data-tone") for n in (1, 3)] == ["minus", "plus"]
    assert kit.locator(".sa-heat .sa-is").all_text_contents() == ["-1.0"]
    assert kit.locator(".sa-heat .sa-from").all_text_contents() == ["-1.0"]
    cells.nth(0).focus()
    kit.keyboard.press("ArrowRight")
    kit.keyboard.press("ArrowDown")
    assert heard(kit)[-1] == [1, 1]
    for key in ("+", "+", "-"):
        kit.keyboard.press(key)
    assert cells.nth(4).inner_text() == "0.1"
    for typed, shown in (("−2.5", "-2.5"), ("nonsense", "-2.5")):
        kit.keyboard.press("Enter")
        kit.keyboard.type(typed)
        kit.keyboard.press("Enter")
        assert cells.nth(4).inner_text() == shown
    box = cells.nth(3).bounding_box()
    kit.mouse.move(box["x"] + 5, box["y"] + 5)
    kit.mouse.down()
    kit.mouse.move(box["x"] + 85, box["y"] + 5)
    kit.mouse.up()
    assert cells.nth(3).inner_text() == "2.0"
    kit.mouse.move(box["x"], box["y"] + 5)  # let go: no more dragging
    assert cells.nth(3).inner_text() == "2.0"


def test_a_map_has_a_pixel_for_a_number_and_lines_have_marks(kit):
    pixels = kit.locator(".sa-map canvas").evaluate(
        """c => {
            const all = [...c.getContext("2d").getImageData(0, 0, 3, 2).data];
            return Array.from({ length: 6 }, (_, n) => all.slice(4 * n, 4 * n + 4).join());
        }"""
    )
    assert pixels[0] == pixels[4] and pixels[1] == pixels[5]  # equal numbers
    assert len(set(pixels)) == 4
    kit.locator(".sa-map canvas").hover(position={"x": 94, "y": 60})
    assert heard(kit)[-1] == [1, 2]
    assert kit.locator(".sa-lines").get_attribute("aria-label") == "from 1 to 3"
    assert kit.locator(".sa-lines :is(.sa-mark-0, .sa-mark-1)").count() == 2


def two(x):
    return [f"{w:.2f}" for w in x]


def test_what_attends_to_what_how_strongly_and_what_differs(visit):
    """Check the first screen of two sentences, then with another word, number and scale."""
    page = visit(views.steps_page(*bank("river"), compare=bank("finance")).html)
    steps = [bank(name)[0] for name in ("river", "finance")]
    for side in (0, 1):
        assert figures(page, side) == two(steps[side].weights[1])  # bank, which both have, is marked
        for role in ("query", "key", "value", "weights", "output"):
            np.testing.assert_allclose(strip(page, role, side), getattr(steps[side], role), atol=0.0051)
        np.testing.assert_allclose(strip(page, "scores", side), steps[side].masked_scores, atol=0.0051)
    caption = page.locator(".sa-see figcaption").first
    assert caption.inner_text() == "bank gives weight 0.39 to itself, 0.32 to stream and 0.29 to mud."
    lines = page.locator(".sa-out .sa-lines")
    assert lines.get_attribute("aria-label") == (
        "stream bank mud: 0.96, 0.31, 0.26; money bank loan: 0.30, 1.09, 0.18"
    )
    assert "Most different: number 1, by 0.78." in page.locator(".sa-out-text").inner_text()
    words = page.locator(".sa-see .sa-ribbons[data-side='0'] .sa-token")
    words.nth(5).click()  # mud, at the right
    assert figures(page) == two(steps[0].weights[2])
    words.nth(0).hover()  # stream, at the left: which words attend to it
    assert figures(page) == two(steps[0].weights[:, 0])
    taken = "To stream: 0.40 from stream, 0.38 from mud and 0.32 from bank."
    assert caption.inner_text().startswith(taken)
    page.locator(".sa-strip .sa-is-output[data-side='1'] td.sa-tinted").nth(4).hover()
    name, formula, result = re.split(" = | ≈ ", page.locator(".sa-sums").inner_text())
    assert name == "output[bank, 1]" and formula.count("·") == 3
    # three products of numbers below 1.5, each written with four decimals
    assert eval(formula.replace("·", "*")) == pytest.approx(steps[1].output[1, 1], abs=5e-4)
    assert float(result) == pytest.approx(steps[1].output[1, 1], abs=5.1e-5)
    assert page.locator(".sa-strip .sa-is-weights[data-side='1'] td.sa-from").count() == 3
    assert page.locator(".sa-strip .sa-is-value[data-side='1'] td.sa-from").count() == 3
    words.nth(4).click()
    page.mouse.move(0, 0)
    for value, button in ((1.0, "1"), (0.0, "0")):
        page.locator(".sa-knobs").get_by_role("button", name=button, exact=True).click()
        exps = np.exp(steps[0].scores[1] * value)
        assert figures(page) == two(exps / exps.sum())
    page.locator("[data-do=reset]").click()
    assert figures(page) == two(steps[0].weights[1])
    page.locator(".sa-strip .sa-is-inputs[data-side='0'] td.sa-tinted").nth(0).focus()
    page.keyboard.press("-")
    assert cell(page, "inputs", "inputs", 0, 0).inner_text() == "1.1"  # and in the details
    for name in ("weights", "output"):
        np.testing.assert_allclose(strip(page, name), table(page, name, name), atol=0.0051)
    assert figures(page) != two(steps[0].weights[1])
    # The ribbons of the row before the change are still there.
    assert page.locator(".sa-see .sa-ribbons[data-side='0'] .sa-ghost").get_attribute("d")


def test_the_dock_shows_an_edit_while_details_scroll_and_a_matrix_opens_its_stage(visit):
    page = visit(views.steps_page(*illustrated()).html, unfold=False, height=500)
    assert page.locator(".sa-stage[data-closed]").count() == page.locator(".sa-stage").count()
    assert not page.locator(".sa-dock-inside").is_visible()
    page.locator(".sa-strip-head").nth(4).click()
    stage = page.locator("[data-stage=scores]")
    assert stage.get_attribute("data-closed") is None
    page.wait_for_selector(".sa-dock-inside", state="visible")
    assert stage.locator(".sa-fold").evaluate("b => b === document.activeElement && b.ariaExpanded") == "true"
    page.locator("[data-stage=masked_scores] .sa-fold").click()
    cell(page, "masked_scores", "mask", 0, 1).click()
    exps = np.exp(illustrated()[0].scores[0]) * [1, 0, 1]
    page.locator(".sa-dock .sa-token.sa-to").nth(0).click()
    assert figures(page, where=".sa-dock") == two(exps / exps.sum())
    assert page.locator(".sa-dock-inside").bounding_box()["height"] < 125
    dock, row = (page.locator(name).bounding_box() for name in (".sa-dock-inside", ".sa-bar"))
    assert dock["y"] == 0 and abs(row["y"] - dock["height"]) <= 2  # no element covers another


def test_heads_and_blocks_have_tabs_and_pages_have_tabs(visit):
    steps, tokens = everything()
    page = visit(views.steps_page(steps, tokens).html)
    for h in (1, 0):
        page.locator(".sa-knobs .sa-tabs button").nth(h).click()
        np.testing.assert_allclose(strip(page, "weights"), steps.dropped_weights[h], atol=0.0051)
        np.testing.assert_array_equal(strip(page, "mask"), steps._call.allowed[h])
    np.testing.assert_allclose(strip(page, "result"), steps.norm, atol=0.0051)
    made, words = model()
    page = visit(
        views.join_pages([views.steps_page(*illustrated()), views.steps_page(made, words)], "Two").html,
        fragment="#view=2&stage=block1.scores&row=2",
    )
    tabs = page.locator("[role=tab]")
    assert [tabs.nth(n).get_attribute("aria-selected") for n in (0, 1)] == ["false", "true"]
    shown = page.locator(".sa-steps:not([data-hidden])")
    assert shown.count() == 1
    for n in (1, 0):
        shown.locator(".sa-knobs .sa-tabs button").nth(n).click()
        np.testing.assert_allclose(strip(shown, "weights"), made.blocks[n].weights, atol=0.0051)
    tabs.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert tabs.nth(0).get_attribute("aria-selected") == "true"
    page.emulate_media(media="print")
    assert page.locator(".sa-steps >> visible=true").count() == 1


@pytest.mark.parametrize("scripts", [True, False])
def test_without_scripts_there_is_a_still_picture_alone(visit, scripts):
    html = views.steps_page(*bank("river"), compare=bank("finance")).html
    page = visit(html, java_script_enabled=scripts, unfold=scripts)
    assert page.locator(".sa-still").is_visible() is not scripts
    if not scripts:
        assert page.locator("body").inner_text().startswith("This is a still picture.")
        assert page.locator("img").bounding_box()["width"] > 400


def test_rows_without_keys_and_crossed_texts(visit):
    """Two queries, three keys; the second query sees none of them."""
    mask = np.array([[True, True, False], [False, False, False]])
    steps = attention_steps(
        np.eye(2), np.array([[1.0, 2.0], [0.0, 0.0], [9.0, 1.0]]), np.arange(6.0).reshape(3, 2), mask
    )
    page = visit(views.steps_page(steps, ["a", "b"], key_tokens=["x", "y", "z"]).html)
    words = page.locator(".sa-see .sa-token")
    assert words.all_text_contents() == ["x", "y", "z", "a", "b"]
    caption = page.locator(".sa-see figcaption")
    assert re.fullmatch(r"a gives weight 0\.\d\d to x and 0\.\d\d to y\.", caption.inner_text())
    words.nth(4).click()
    assert caption.inner_text() == "b sees no word: its output is zeros."


def test_page_4_switches_between_rounded_and_real_weights(visit):
    page = visit(views.tutorial_page("illustrated").html)
    steps = illustrated()[0]
    np.testing.assert_allclose(strip(page, "output")[0], [2, 7, 1.5], atol=1e-9)  # as the tutorial prints
    change(page, "inputs", "inputs", 0, 0, "2")
    np.testing.assert_allclose(strip(page, "weights"), [[0, 0.5, 0.5], [0, 1, 0], [0, 0.9, 0.1]])
    page.get_by_role("button", name="real softmax").click()
    x = steps.inputs.copy()
    x[0, 0] = 2
    p = steps.parameters
    moved = layer_steps(x, p.W_query, p.W_key, p.W_value, scale=1.0)
    np.testing.assert_allclose(strip(page, "weights"), moved.weights, atol=0.0051)
    np.testing.assert_allclose(strip(page, "output"), moved.output, atol=0.0051)
    page.get_by_role("button", name="rounded as printed").click()
    page.locator("[data-do=reset]").click()
    np.testing.assert_allclose(strip(page, "output")[0], [2, 7, 1.5], atol=1e-9)
