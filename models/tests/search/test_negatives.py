"""search.mine_negatives: the most similar texts that are no answers, in the order of a model whose similarities are
plain.
"""

import numpy as np
import pytest

from selfattn_models import search


def at(texts):
    """Each text is an angle in degrees."""
    return np.array([[np.cos(np.radians(float(text))), np.sin(np.radians(float(text)))] for text in texts])


def test_mined(tmp_path):
    index = search.Index.create(tmp_path / "index", at)
    index.add(["0", "10", "20", "30", "30", "90", "180"])
    pairs = [("0", "20"), ("0", "10"), ("80", "90")]
    found = search.mine_negatives(index, pairs, 2)
    # "0" itself and both of its answers are no wrong ones, and a text counts once
    assert found == [("0", "20", "30", "90"), ("0", "10", "30", "90"), ("80", "90", "30", "20")]
    assert search.mine_negatives(index, pairs[2:], 1, range_min=2) == [("80", "90", "10")]  # "30" counts once
    # cos 10° = 0.985: with a margin of 0.5, 0.49 is left, below cos 50° of "30" and not cos 70° of "10"
    with pytest.warns(UserWarning, match="1 of 2 pairs were left out: fewer than 2 wrong texts"):
        found = search.mine_negatives(index, [("80", "90"), ("180", "0")], 2, relative_margin=0.5)
    assert found == [("80", "90", "10", "0")]
    assert search.mine_negatives(index, []) == []
    for wrong, message in (((pairs, 0), "num_negatives"), ((["ab"],), r"pair 0 must be \(query, answer\)")):
        with pytest.raises(ValueError, match=message):
            search.mine_negatives(index, *wrong)
