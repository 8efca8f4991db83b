"""The way back in Chromium: gradients are those of the kernels, before and after edits; sums and finite differences agree."""

import re

import numpy as np
import pytest
from page_driver import numbers_of

import selfattn as sa
from selfattn import views
from selfattn.steps.layers import layer_steps

TOKENS = ["stream", "bank", "mud"]
STAGES = ["x", "Q", "K", "V", "scores", "weights", "output"]


def matrix(page, name):
    return numbers_of(page.get_by_role("grid", name=name, exact=True))


def gradients(page):
    return {name: matrix(page, name) for name in ("dx", "dQ", "dK", "dV", "dS", "dP")}


def pulled_back(x, weights, wish, scale):
    query, key, value = (x @ w for w in weights)
    output, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, scale=scale)
    found = dict(zip(("dQ", "dK", "dV"), pullback(wish)[:3], strict=True))
    found["dx"] = sum(found[name] @ w.T for name, w in zip(("dQ", "dK", "dV"), weights, strict=True))
    found["dP"] = wish @ value.T
    scores = scale * query @ key.T
    share = np.exp(scores - scores.max(axis=1, keepdims=True))
    share /= share.sum(axis=1, keepdims=True)
    found["dS"] = share * (found["dP"] - (wish * output).sum(axis=1, keepdims=True))
    return found


@pytest.fixture
def way(visit):
    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((3, 4)).round(2), [rng.standard_normal((4, 2)) for _ in range(3)]
    page = visit(views.way_back_page(layer_steps(x, *weights), TOKENS).html)
    return page, x, weights


def assert_same(page, x, weights, wish, scale=2**-0.5):
    for name, expected in pulled_back(x, weights, wish, scale).items():  # three decimals
        np.testing.assert_allclose(gradients(page)[name], expected, rtol=0, atol=0.000501, err_msg=name)


def test_gradients_edits_and_finite_differences(way):
    page, x, weights = way
    wish = np.zeros((3, 2))
    wish[2, 0] = 1
    assert_same(page, x, weights, wish)
    # The written sum and a finite difference equal every number of every gradient.
    spelled = 0
    for name in ("x", "Q", "K", "V", "scores", "weights"):
        for cell in page.get_by_role("grid", name=name, exact=True).locator("td.sa-tinted").all():
            cell.hover()
            gradient, _, check = page.locator(".sa-check dd").all_inner_texts()
            assert check.endswith("✓ the same"), (name, check)
            value, formula = gradient.replace("−", "-").split(" = ", 1)
            result = eval(re.sub(r" \(through .*", "", formula).replace("·", "*").replace("×", "*"))
            assert abs(float(value) - result) <= 0.02  # figures of two and three decimals
            spelled += 1
    assert spelled == 12 + 3 * 6 + 2 * 9
    # Another wish, another input, another scale.
    page.get_by_role("grid", name="dO", exact=True).locator("td.sa-tinted").nth(1).dblclick()
    page.keyboard.type("2.5")
    page.keyboard.press("Enter")
    wish[0, 1] = 2.5
    assert_same(page, x, weights, wish)
    page.get_by_role("grid", name="x", exact=True).locator("td.sa-tinted").nth(5).dblclick()
    page.keyboard.type("-1.5")
    page.keyboard.press("Enter")
    x[1, 1] = -1.5
    assert_same(page, x, weights, wish)
    slider = page.get_by_label("scale")
    slider.evaluate("s => { s.value = 12; s.dispatchEvent(new Event('input')); }")
    assert_same(page, x, weights, wish, 12.0)
    assert page.locator(".sa-balance").get_attribute("aria-label").startswith("stream: ")
    page.get_by_role("button", name="Reset").click()
    assert page.locator(".sa-balance").get_attribute("aria-label").startswith("mud: ")


def test_the_tour_hides_and_reveals(way):
    page, *_ = way
    page.get_by_role("button", name="Start the tour").click()
    hidden = page.locator(".sa-gradient[data-later]")
    assert hidden.count() == 6  # all but dO
    for left in (5, 4, 3, 1, 0):
        page.locator(".sa-guesses button").first.click()
        assert hidden.count() == left
        assert page.locator(".sa-guesses .sa-yes").count() == 1
        page.locator("[data-do='tour next']").click()
    assert "Read from right to left" in page.locator(".sa-tour-at").inner_text()
    assert hidden.count() == 0


def test_masked_scores_of_given_matrices(visit):
    rng = np.random.default_rng(3)
    query, key, value = rng.standard_normal((3, 4, 2))
    wish = rng.standard_normal((4, 2))
    steps = sa.attention_steps(query, key, value, is_causal=True)
    page = visit(views.way_back_page(steps, list("abcd"), grad_output=wish).html, width=400)
    _, pullback = sa.scaled_dot_product_attention_vjp(query, key, value, is_causal=True)
    for name, expected in zip(("dQ", "dK", "dV"), pullback(wish), strict=False):
        np.testing.assert_allclose(matrix(page, name), expected, rtol=0, atol=0.000501, err_msg=name)
    assert np.isneginf(matrix(page, "scores")[0, 1:]).all()
    cell = page.get_by_role("grid", name="scores", exact=True).locator("td.sa-tinted").nth(1)
    cell.focus()
    assert "masked" in page.locator(".sa-check").inner_text()
    page.keyboard.press("ArrowLeft")
    assert "✓ the same" in page.locator(".sa-check").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
