"""The map of a corpus in Chromium: pointer and keys choose texts, words and values leave some, colours follow the
theme."""

import numpy as np
import pytest
from page_driver import CONTRASTS

from selfattn import views

TEXTS = [f"{'tea' if n % 2 else 'storm'} number {n}" for n in range(40)]

# The place on the canvas at which a pointer finds a text.
POINTED = """text => {
    const canvas = document.querySelector("canvas"), {left, top, width, height} = canvas.getBoundingClientRect();
    for (let x = 0; x < width; x += 16) for (let y = 0; y < height; y += 16) {
        canvas.dispatchEvent(new PointerEvent("pointermove", {clientX: left + x, clientY: top + y}));
        if (document.querySelector(".sa-line").textContent === text) return [x, y];
    }
}"""


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_map_in_use(opened, width, scheme):
    rows = np.random.default_rng(0).standard_normal((40, 5))
    made = views.corpus_map(
        rows, TEXTS, {"kind": [text.split()[0] for text in TEXTS], "n": range(40)}, name="x"
    )
    page = opened(made, width=width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert min(ratio for _, ratio in page.evaluate(CONTRASTS)) >= 4.5
    chosen = page.locator("section strong")
    assert chosen.inner_text() == TEXTS[0]
    page.locator("section li button").first.click()
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    nearest = np.argsort(-unit @ unit[0])[1]
    assert chosen.inner_text() == TEXTS[nearest]
    canvas, before = page.locator("canvas"), chosen.inner_text()
    canvas.focus()
    for key in ("ArrowLeft", "ArrowRight", "+", "ArrowUp", "ArrowDown", "0"):
        page.keyboard.press(key)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    assert chosen.inner_text() in TEXTS
    assert len({before, chosen.inner_text()}) == 2
    pixels = canvas.evaluate("c => c.toDataURL()")
    page.locator("[data-do=theme]").click()
    assert canvas.evaluate("c => c.toDataURL()") != pixels
    page.locator(".sa-legend button").first.click()
    assert page.locator(".sa-line").inner_text() == "20 of 40 texts"
    page.locator("input").fill("number 1")
    assert (
        page.locator(".sa-line").inner_text()
        == f"{sum('number 1' in text for text in TEXTS[::2])} of 40 texts"
    )
    page.locator("select").select_option("n")
    assert page.locator(".sa-legend button").last.inner_text() == "others 34"
    page.locator("input").fill("number 17")
    found = page.evaluate(POINTED, TEXTS[17])
    canvas.click(position={"x": found[0], "y": found[1]})
    assert chosen.inner_text() == TEXTS[17]
