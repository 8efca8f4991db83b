"""The map of a corpus: its points, neighbours and fields are those of the embeddings; bad input is an error."""

import base64
import re
import zlib

import numpy as np
import pytest
from pages import data_of
from refusals import refusals

from selfattn import views

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((30, 6)) * [5, 3, 1, 1, 1, 1] + 7
ROWS[20] = ROWS[4]
TEXTS = [f"text {n}" for n in range(30)]


def stored(page, fields):
    """Points, scores, neighbours and codes, read as the script reads them."""
    packed = zlib.decompress(base64.b64decode(re.search(r'class="sa-bytes">(.*?)</script>', page.html)[1]))
    n, k = len(data_of(page.html)["texts"]), data_of(page.html)["nearest"]
    shapes = [("<f4", (n, 2)), ("<f4", (n, k)), ("<u2", (n, k)), ("<u2", (fields, n))]
    for dtype, shape in shapes:
        count = int(np.prod(shape))
        yield np.frombuffer(packed, dtype, count).reshape(shape)
        packed = packed[count * np.dtype(dtype).itemsize :]
    assert not packed


def test_points_neighbours_and_values_are_those_of_the_rows():
    values = [None, *(f"v{n % 9}" for n in range(29))]
    page = views.corpus_map(ROWS, TEXTS, {"n": range(30), "v": values}, colour="v", name="corpus")
    data, (points, scores, nearest, codes) = data_of(page.html), stored(page, 2)
    assert (page.title, data["field"], data["nearest"]) == ("A map of 30 texts: corpus", 1, 8)
    centred = ROWS - ROWS.mean(axis=0)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    for axis in (0, 1):  # an axis may be turned, and the middle is that of the drawing
        assert abs(np.corrcoef(points[:, axis], u[:, axis])[0, 1]) == pytest.approx(1, abs=1e-5)
    assert np.ptp(points, axis=0).max() == pytest.approx(2)
    assert points.max(axis=0) + points.min(axis=0) == pytest.approx([0, 0], abs=1e-6)
    assert np.std(points[:, 0]) / np.std(points[:, 1]) == pytest.approx(s[0] / s[1], rel=1e-4)
    assert data["captions"]["share"] == f"{100 * np.square(s[:2]).sum() / np.square(s).sum():.0f}"
    unit = ROWS / np.linalg.norm(ROWS, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.testing.assert_allclose(scores, np.take_along_axis(cosines, nearest.astype(int), 1), atol=1e-6)
    np.fill_diagonal(cosines, -np.inf)
    np.testing.assert_allclose(scores, -np.sort(-cosines, axis=1)[:, :8], atol=1e-6)
    assert (nearest[4, 0], nearest[20, 0]) == (20, 4)
    for row, field, given in zip(codes, data["fields"], (range(30), values), strict=True):
        assert [field["values"][code] for code in row] == ["∅" if x is None else str(x) for x in given]
    assert data["fields"][1]["values"][0] in ("v0", "v1")  # the most frequent


def test_small_maps_and_copies():
    (points, scores, nearest, _) = stored(views.corpus_map(np.ones((12, 1)), ["a"] * 12), 1)
    assert not points.any()
    np.testing.assert_allclose(scores, 1, rtol=1e-6)
    assert all(n not in row and len({*row}) == 8 for n, row in enumerate(nearest.tolist()))
    assert views.corpus_map([[2.0, 1.0]], ["a"]).svg.count("<circle") == 1


test_what_is_no_map = refusals(
    ((ROWS, TEXTS[1:]), "equally many, not 30, 29"),
    ((ROWS, TEXTS, {"a": [1]}), "30, 'a' 1"),
    ((ROWS[:0], []), "1 to 50,000 texts; there are 0"),
    ((ROWS * 1e300, TEXTS), "embedding 0 is not finite in float32"),
    ((ROWS * 1j, TEXTS), r"must be real numbers of shape \(n, d\), not complex128 of \(30, 6\)"),
    ((ROWS[0], TEXTS), r"not float64 of \(6,\)"),
    ((ROWS[:1], "a"), TypeError, "texts must be a sequence of texts, not 'a'"),
    ((ROWS[:2], TEXTS[:2], {"a": "xy"}), TypeError, "fields must be a mapping of names to sequences"),
    ((ROWS, TEXTS, None, "a"), "no field is named 'a'; the fields are none at all"),
    call=lambda given: views.corpus_map(*given[:3], **({"colour": given[3]} if given[3:] else {})),
)
