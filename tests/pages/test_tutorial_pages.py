"""The pages of the five tutorials: every tensor that a tutorial prints, or that is compared in its place, is in a table."""

import numpy as np
import pytest
from pages import Reader

from selfattn import tutorials, views


def holds(table, matrix):
    """Whether rows of a table, one after the other, are this matrix to the three decimals that every page shows."""
    starts = range(len(table) - len(matrix) + 1) if table.shape[1:] == matrix.shape[1:] else ()
    return any(
        np.allclose(table[i : i + len(matrix)], matrix, rtol=5e-3, atol=0.51e-3) for i in starts
    )  # numbers below a thousandth have two digits


@pytest.mark.parametrize("compute", tutorials.TUTORIALS, ids=lambda compute: compute.__name__)
def test_what_is_compared_is_on_the_page(compute):
    """The kernels compute these tensors, head by head."""
    tables = [table.numbers for table in Reader(views.tutorial_page(compute.__name__).html).tables]
    tables += [table.T for table in tables]
    for comparison in compute(np.float64).comparisons:
        if comparison.name.startswith("sentence embedding"):
            continue  # the mean of a block's output: only a model has it
        computed = np.atleast_2d(comparison.computed)
        if "[key][query]" in comparison.name:
            computed = computed.swapaxes(0, 1)
        for matrix in computed.reshape(-1, *computed.shape[-2:]):
            assert any(holds(table, matrix) for table in tables), comparison.name
