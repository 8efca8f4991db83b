"""The pages of the five tutorials in Chromium: every printed tensor is there, every sum is right."""

import numpy as np
import pytest

from selfattn import views
from selfattn.steps import tutorials
from selfattn.steps.tutorials import load


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
