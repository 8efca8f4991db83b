"""The parts of the kit in Chromium, each alone on a page: drawings of numbers, keys, mouse, guesses."""

import numpy as np
import pytest

from selfattn.views import document

SCRIPT = """
const root = document.querySelector(".sa-view"), heard = (window.heard = []);
const weights = Matrix.of(3, 3, (i, j) => [[0.5, 0.3, 0.2], [0.1, 0.8, 0.1], [0, 0, 0]][i][j]);
const words = ["<b>river</b>", "bank", "mud"];
const ribbons = new Ribbons({ keys: words, queries: words, side: 0, name: "weights", ends: { from: "in", to: "out" }, point: (chosen, pin) => heard.push([chosen && `${chosen.kind} ${chosen.index}`, pin]) });
root.append(ribbons.node);
const choose = (kind, index) => ribbons.update({ weights, selected: { kind, index }, now: true });
choose("to", 1);
window.choose = choose;
const matrix = Matrix.of(2, 3, (i, j) => i - j), show = () => heat.update({ matrix, size: 2, write: (x) => fixed(x, 1), row: 1 });
const heat = new Heat({ name: "x", rows: 2, columns: 3, rowLabels: ["a", "b"], columnLabels: ["0", "1", "2"],
  point: (place) => heard.push(place && [place.i, place.j]), edit: (i, j, value) => { matrix.data[3 * i + j] = value; show(); } });
root.append(heat.node);
show();
heat.mark({ i: 0, j: 1 }, [{ i: 1, j: 2 }]);
const map = new HeatMap({ name: "map", rows: 2, columns: 3, point: (place) => heard.push(place && [place.i, place.j]) });
root.append(map.node);
map.update({ matrix, size: 2, row: 1 });
const lines = new NumberLines();
root.append(lines.node);
lines.update([{ name: "0", marks: [{ value: 1, look: "sa-mark-0", text: "1.0" }, { value: 3, look: "sa-mark-1", text: "3.0" }] }], "from 1 to 3");
const texts = new Proxy({}, { get: (_, name) => `{${String(name)}}` });
const tour = new Tour({ stops: ["one", "two"].map((name) => ({ name, ask: `*Who* ${name}?`, options: ["he", "she"], right: 1, reveal: "She." })), texts,
  show: (stop, open) => heard.push([stop?.name ?? null, open]) });
root.append(tour.node, tools(root, texts, () => heard.push("changed")));
"""


@pytest.fixture
def kit(visit):
    code = document.script(*document.KIT, "kit/heat.js", "kit/ribbons.js", "kit/tour.js")
    code = code.removesuffix("})();</script>")
    return visit(
        f"<!DOCTYPE html><html lang=en><title>kit</title>{document.style()}<link rel=icon href='data:,'><body class=sa-page>"
        f"<div class=sa-view></div>{code}{SCRIPT}}})();</script>"
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
        "c => (([...all]) => Array.from({length: 6}, (_, n) => all.slice(4 * n, 4 * n + 4).join()))(c.getContext('2d').getImageData(0, 0, 3, 2).data)"
    )
    assert pixels[0] == pixels[4] and pixels[1] == pixels[5]  # equal numbers
    assert len(set(pixels)) == 4
    kit.locator(".sa-map canvas").hover(position={"x": 94, "y": 60})
    assert heard(kit)[-1] == [1, 2]
    assert kit.locator(".sa-lines").get_attribute("aria-label") == "from 1 to 3"
    assert kit.locator(".sa-lines :is(.sa-mark-0, .sa-mark-1)").count() == 2


def test_a_tour_asks_then_answers(kit):
    kit.clock.install()
    next_button, place = kit.locator("[data-do='tour next']"), kit.locator(".sa-tour-at")
    assert place.inner_text() == "{tour start name}"
    next_button.click()
    assert heard(kit) == [["one", False]]
    assert kit.locator(".sa-tour-say").inner_html() == "<strong>Who</strong> one?"
    kit.locator(".sa-guesses button").nth(0).click()
    assert heard(kit) == [["one", True]]
    assert kit.locator(".sa-tour-say").inner_text() == "She."
    assert kit.locator(".sa-guesses .sa-yes").inner_text() == "✓ she"
    assert kit.locator(".sa-guesses .sa-no").inner_text() == "he"
    kit.locator("[data-do='tour play']").click()  # the second stop, then its answer, then it ends
    kit.locator(".sa-tour select").select_option("fast")
    kit.clock.run_for(60_000)
    assert heard(kit) == [["two", False], ["two", True]]
    assert kit.locator("[data-do='tour play']").get_attribute("aria-pressed") == "false"
    kit.locator("[data-do='tour back']").click()
    assert place.inner_text() == "1/2 one"


def test_light_dark_and_larger(kit):
    looks = set()
    for name in ("theme", "projector", "theme"):
        kit.locator(f"[data-do={name}]").click()
        assert heard(kit)[-1] == "changed"
        looks.add(
            kit.evaluate(
                "(({backgroundColor, fontSize}) => backgroundColor + fontSize)(getComputedStyle(document.querySelector('.sa-view')))"
            )
        )
    assert len(looks) == 3
