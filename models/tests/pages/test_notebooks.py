"""The notebooks of models, executed: they show what is saved, and find in a language model what their text says."""

from pathlib import Path

import numpy as np
import pytest
from notebook_checks import Notebooks
from pretrained_data import DATA

# What is compared of each notebook, with names of its cells. Tolerances are here, so that the lessons need none.
RESULTS = {
    "8_heads": """{"losses": losses, "whole": whole, "off": off, "before": before, "after": after,
        "alone": after_without} | (
        {"layers": of_layers, "heads": of_heads, "lead": lead, "look": look, "add": add, "without": without}
        if "smol" in globals() else {})""",
}
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
HAS_SMOLLM2 = (DATA / SMOLLM2).exists()  # other tests fetch it


def runnable(cells):
    """Leave out the cells from those on that need a model that is not on the disk."""
    needing = [] if HAS_SMOLLM2 else [n for n, cell in enumerate(cells) if "models.load(" in cell.source]
    return cells[: min(needing, default=len(cells))]


FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = Notebooks(FOLDER, RESULTS, within=DATA if HAS_SMOLLM2 else None, runnable=runnable)
notebooks = pytest.mark.parametrize("name", NOTEBOOKS.names)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Execute a notebook once: the notebook with fresh outputs, and its dictionary `results`."""
    yield from NOTEBOOKS.executing(tmp_path_factory)


def test_each_is_tested():
    assert [*RESULTS] == NOTEBOOKS.names
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(RESULTS)


@notebooks
def test_cells_links_and_imports(name):
    NOTEBOOKS.assert_saved(name)
    NOTEBOOKS.assert_links(name)
    assert NOTEBOOKS.imported(name) <= {"numpy", "selfattn", "selfattn_models"}


@notebooks
def test_the_outputs_are_those_saved_and_begin_with_ribbons(executed, name):
    NOTEBOOKS.assert_outputs(name)
    NOTEBOOKS.assert_lesson(name)


def test_two_heads_carry_on_a_row_and_two_know_a_name(executed):
    """The notebook's text claims this."""
    results = {name: np.array(found) for name, found in executed("8_heads")[1].items()}
    assert results["losses"][60] > 2 and results["losses"][-1] < 0.05
    off, before, after = results["off"], results["before"][0], results["after"][1]
    assert results["whole"] > 0.99 and off[0, before.argmax()] < 0.3 and off[1, after.argmax()] < 0.3
    assert before.max() > 0.5 and after.max() > 0.9
    assert results["alone"][1, after.argmax()] < 0.2
    if not HAS_SMOLLM2:
        return
    lead, look, add = results["lead"], results["look"], results["add"]
    layers, heads = lead + results["layers"], lead + results["heads"]  # how far Mary is ahead
    assert lead > 5 and layers.argmin() == 23 and heads.argmin() == 3
    assert max(layers[23], heads[3]) < 0 < 3 * lead / 5 < min(*np.delete(layers, 23), *np.delete(heads, 3))
    (once, twice), (copied, _) = look[3], look[0]
    assert once < 0.1 and twice > 0.6 and copied > 0.5
    np.testing.assert_allclose(add[[3, 0]], [[0.4, -2.5], [1.1, 0.3]], atol=0.1)
    assert abs(results["without"] - [lead / 2, lead, lead / 2]).max() < 0.3
