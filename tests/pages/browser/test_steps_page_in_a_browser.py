"""The steps page in Chromium: highlighted sources, written sums, keys, steps and links."""

import re
from importlib import resources

import numpy as np
import pytest
from page_driver import assert_spelled, cell, lit, said, stages
from pages import additive, bank, everything, illustrated, model

from selfattn import views
from selfattn.views.draw import shade
from selfattn.views.writing import number


def test_pointing_highlights_the_sources_and_writes_the_sum(small):
    cell(small, "scores", "scores", 0, 1).hover()
    assert said(small, "scores") == "scores[one, two] = 1·4 + 0·4 + 2·0 = 4"
    assert sorted(lit(small, "a", "scores")) == ["query[0,0]", "query[0,1]", "query[0,2]"]
    assert sorted(lit(small, "b", "scores")) == ["key[1,0]", "key[1,1]", "key[1,2]"]
    assert lit(small, "to", "scores") == ["scores[0,1]"]
    # the sources of these numbers, back to the inputs: the first row for the query, the second for the key
    assert set(lit(small, "far", "inputs")) == {f"inputs[{i},{m}]" for i in (0, 1) for m in range(4)}
    assert lit(small, "far", "output") == []
    # the same numbers in the stages before and after
    assert sorted(lit(small, "a", "query")) == ["query[0,0]", "query[0,1]", "query[0,2]"]
    assert lit(small, "to", "scaled_scores") == ["scores[0,1]"]
    cell(small, "scores", "scores", 1, 0).hover()
    assert said(small, "scores") == "scores[two, one] = 2·0 + 2·1 + 2·1 = 4"
    assert lit(small, "to", "scores") == ["scores[1,0]"]


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


def test_sources_of_every_kind_have_their_colours(small):
    assert_lit(small, LIT)


def test_the_sources_of_an_additive_score_are_query_key_and_v(visit):
    page = visit(views.steps_page(*additive()).html)
    assert_lit(page, {("scores", "scores", 1, 2): ({"query[1,*5]"}, {"key[2,*5]"}, {"v[0,*5]"})})


@pytest.mark.parametrize("make", [illustrated, lambda: bank("river"), everything, additive, model], ids=str)
def test_every_written_sum_equals_its_number(visit, make):
    assert_spelled(visit(views.steps_page(*make(), precision=12).html), 60)


def test_the_browser_writes_numbers_as_the_page_does(visit):
    """The numbers include ties, which JavaScript rounds away from zero and Python to the even digit."""
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


def test_keys_act_only_inside_a_view(small):
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
    small.keyboard.press("d")  # "d" would delete a cell of a notebook
    small.keyboard.press("Shift+Enter")
    small.keyboard.press("Control+k")
    heard = [event for event in small.evaluate("window.heard") if event[0] not in ("Shift", "Control")]
    assert heard == [["n", False], ["Enter", False], ["k", False]]


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
    # the page writes its place into the address just after a click on a link
    page.evaluate(
        "location.hash = '#stage=scores&row=1'; history.replaceState(null, '', '#stage=weights&row=1')"
    )
    page.wait_for_selector("[data-stage=scores].sa-now", timeout=20_000)
    assert lit(page, "to", "scores") == ["scores[1,0]"]
    page.locator("[data-stage=value] h3 a").click()
    page.wait_for_url("**#stage=value&row=0")
