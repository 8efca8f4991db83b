"""The tours in Chromium, stop by stop: answers are hidden before the guess, and their numbers are on the page after it."""

import re

import pytest

from selfattn import views

NUMBERS = """() => [...document.querySelectorAll(".sa-steps")].flatMap((e) =>
    [...e.querySelectorAll(".sa-strip, .sa-figures, figcaption, .sa-m")].map((part) => part.textContent)).join(" ")"""
DERIVED = {"Two banks", "Nobody taught it", "Same going in"}  # stops with numbers that the page does not show


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_every_stop_asks_hides_and_reveals(visit, name):
    made = views.tutorial_page(name)
    page = visit(made.html, unfold=False)
    go, place = page.locator(".sa-lesson [data-do='tour next']"), page.locator(".sa-lesson .sa-tour-at")
    before, opening = page.locator(".sa-screen >> visible=true").inner_text(), page.evaluate(NUMBERS)
    for n, stop in enumerate(made.tour, 1):
        go.click()
        assert place.inner_text() == f"{n}/{len(made.tour)} {stop.name}"
        said = page.locator(".sa-lesson .sa-tour-say").inner_text()
        assert said == stop.ask.replace("*", "")
        visible = page.locator(".sa-steps:not([data-hidden])")
        assert visible.count() == 1
        hidden = {"scores": 3, "weights": 2, "output": 1, "": 0}[stop.hide]
        for role in ("output", "weights", "scores")[:hidden]:
            cells = visible.locator(f".sa-is-{role} td.sa-tinted")
            assert cells.count() == 0 or not cells.first.is_visible(), (stop.name, role)
        if hidden:
            assert not visible.locator(".sa-out .sa-lines").is_visible()
            assert not visible.locator(".sa-details").is_visible()
            assert visible.locator(".sa-sums").inner_text() == ""
        if hidden > 1:
            assert not visible.locator(".sa-see .sa-strong").first.is_visible()
            assert visible.locator(".sa-see figcaption").first.inner_text() == ""
        asked = page.evaluate(NUMBERS)
        guess = (stop.right + n) % len(stop.options)
        page.locator(".sa-lesson .sa-guesses button").nth(guess).click()
        answer = "✓ " + stop.options[stop.right].replace("*", "")
        assert page.locator(".sa-lesson .sa-guesses .sa-yes").inner_text() == answer
        assert page.locator(".sa-lesson .sa-guesses .sa-no").count() == (guess != stop.right)
        assert page.locator(".sa-lesson .sa-tour-say").inner_text() == stop.reveal.replace("*", "")
        assert visible.locator(".sa-out .sa-lines").is_visible()
        written = opening + asked + page.evaluate(NUMBERS)
        if stop.name not in DERIVED:
            for number in re.findall(r"\d\.\d\d(?!\d)", stop.reveal):
                assert number in written, (stop.name, number)
    go.click()  # after the end the page is as at first
    assert place.inner_text() == "Point at a word"
    assert page.locator(".sa-screen >> visible=true").inner_text() == before


def test_keys_play_and_speed(visit):
    page = visit(views.tutorial_page("illustrated").html, unfold=False)
    page.clock.install()
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
