"""Exercises as they are printed: every blank is asked once and answered once, by the names of the picture."""

import re

import pytest

from selfattn import views

LINES = "all => all.map((e) => [e.closest('ul').previousElementSibling.textContent, e.textContent])"
# Each cell of the strip: its side, its name[row, column], its text. A word that is there twice has its place.
STRIP = """() => [...document.querySelectorAll(".sa-steps:not([data-hidden]) .sa-strip table")].flatMap((table) => {
    const placed = (word, n, all) => all.indexOf(word) === all.lastIndexOf(word) ? word : `${word} (${n})`;
    const all = [...table.closest(".sa-strip").querySelectorAll("table")];
    const labels = [...all.find((e) => e.dataset.side === table.dataset.side).tBodies[0].rows]
        .map((row) => row.querySelector("th").textContent).map(placed);
    const [name, side] = table.ariaLabel.split(/, (.*)/);
    const columns = [...table.tHead.querySelectorAll("th")].map((e) => e.textContent).map(placed);
    return [...table.tBodies[0].rows].flatMap((row, i) => [...row.querySelectorAll("td")]
        .map((td, j) => [side, `${name}[${labels[i]}, ${columns[j]}]`, td.textContent]));
})"""
PRINTED = "document.querySelector('.sa-steps:not([data-hidden])').innerText"


def printed(page):
    """Print; return what the sheet asks, what its answers say, and the text that is on paper."""
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    shown = page.locator(".sa-steps:not([data-hidden])")
    assert not shown.locator(".sa-out").is_visible()  # it would have nothing but its title
    lists = [
        [(side, re.sub(r"^(block \d+, |head \d+: )+", "", line)) for side, line in lines]
        for lines in (shown.locator(f".sa-{part} li").evaluate_all(LINES) for part in ("sheet", "answers"))
    ]
    return *lists, page.evaluate(PRINTED)


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_each_blank_on_paper_has_its_answer(visit, name):
    plain = visit(views.tutorial_page(name).html).evaluate(STRIP)
    page = visit(views.tutorial_page(name, exercise=True).html, width=718, unfold=False)
    asked, given, text = printed(page)
    blanks = [cell for cell in page.evaluate(STRIP) if cell[2] == "?"]
    assert len(blanks) > 10
    assert "undefined" not in text and "NaN" not in text
    assert sorted(asked) == sorted((side, f"{cell} = ") for side, cell, _ in blanks)
    answers = {(side, cell): value for side, cell, value in plain}
    assert sorted(given) == sorted((side, f"{cell} = {answers[side, cell]}") for side, cell, _ in blanks)
    boxes = page.locator(".sa-steps:not([data-hidden]) .sa-sheet li").evaluate_all(
        "all => all.map((e) => [e.scrollWidth, e.clientWidth])"
    )
    assert all(inside <= room for inside, room in boxes)
