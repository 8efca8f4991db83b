"""The way back without a browser: gradients to the last bits, its tour, errors."""

import numpy as np
import pytest
from pages import data_of, pairs
from refusals import refusals

import selfattn as sa
from selfattn import reference, views
from selfattn.steps.layers import layer_steps

TOKENS = ["stream", "bank", "mud"]


def layer():
    rng = np.random.default_rng(0)
    x, (query, key), value = (rng.standard_normal(shape) for shape in ((3, 4), (2, 4, 2), (4, 3)))
    return layer_steps(x, query, key, value, b_query=rng.standard_normal(2), b_value=rng.standard_normal(3))


def test_gradients_are_those_of_the_reference():
    steps = layer()
    wish = np.random.default_rng(1).standard_normal((3, 3))
    found = pairs(views.way_back_page(steps, TOKENS, grad_output=wish))
    _, pullback = reference.scaled_dot_product_attention_vjp(steps.query, steps.key, steps.value)
    truth = dict(zip(("dQ", "dK", "dV"), pullback(wish)[:3], strict=True))
    p, delta = steps.parameters, (wish * steps.output).sum(axis=1, keepdims=True)
    truth["dx"] = truth["dQ"] @ p.W_query.T + truth["dK"] @ p.W_key.T + truth["dV"] @ p.W_value.T
    truth |= {"dO": wish, "dP": wish @ steps.value.T, "P": steps.weights}
    truth["dS"] = steps.weights * (truth["dP"] - delta)
    for name, expected in truth.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-12, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(found["dS"].sum(axis=1), 0, atol=1e-12)


def test_stops_are_computed():
    steps = layer()
    page = views.way_back_page(steps, TOKENS)
    revealed = " ".join(stop["reveal"] for stop in data_of(page.body)["stops"])
    largest = TOKENS[int((steps.value[:, 0]).argmax())]
    assert f"The weight of *{largest}*: its dP is the largest" in revealed
    mean = steps.weights[2] @ steps.value[:, 0]
    assert f"above the mean, {mean:.3f}".replace("-", "−") in revealed
    assert data_of(views.way_back_page(steps, TOKENS, grad_output=np.zeros((3, 3))).body)["stops"] == []


@pytest.mark.parametrize("name", views.TUTORIAL_PAGES)
def test_a_tutorials_page_ends_with_it(name):
    page = views.tutorial_page(name)
    (back,) = page.below
    assert page.html.count('class="sa-view sa-way-back"') == 1 and back.body in page.html
    assert "sa-way-back" not in page.fragment  # in a notebook the way back is a page of its own
    assert not views.tutorial_page(name, exercise=True).below  # its numbers would reveal answers


X = np.random.default_rng(0).standard_normal((3, 2))
STEPS = sa.attention_steps(X, X, X)
test_bad_calls = refusals(
    (("x", {}), TypeError, "scaled dot products: pass what attention_steps or .*steps returned, not str"),
    ((sa.attention_steps(X, X, X, softcap=2.0), {}), ValueError, "not shown with a softcap"),
    ((sa.attention_steps(X, X, X, sinks=[0.0]), {}), ValueError, "not shown with sinks"),
    ((sa.attention_steps(X, X, X, dropout_p=0.5, rng=0), {}), ValueError, "not shown with dropout"),
    ((STEPS, {"grad_output": np.ones(3)}), ValueError, r"of shape \(3, 2\), not \(3,\)"),
    ((STEPS, {"grad_output": X * np.nan}), ValueError, "must be finite"),
    ((STEPS, {"head": 1}), ValueError, "head must be from 0 to 0, not 1"),
    ((sa.attention_steps(*np.zeros((3, 13, 2))), {}), ValueError, "at most 12 rows and 12 columns; Q is"),
    ((STEPS, {"tokens": ["a"]}), ValueError, "1 tokens do not fit"),
    call=lambda given: views.way_back_page(given[0], **given[1]),
)
