"""The search of the core: the best k by dot products, against float64 and against integers."""

import numpy as np
import pytest

from selfattn import _core

pytestmark = pytest.mark.usefixtures("threads_restored")
EPS = 2.0**-24
FEW, TILE, GROUP = 2, 64, 64  # queries row by row, rows of a tile, queries of a group


def numbers(rng, n, d, kind):
    """Return vectors and their scales; the last vector is the first one again."""
    vectors, scales = rng.standard_normal((n, d)).astype(np.float32), None
    if kind == "int8":
        vectors = rng.integers(-128, 128, (n, d)).astype(np.int8)
        scales = rng.random(n).astype(np.float32) - 0.2
        scales[-1:] = scales[:1]
    vectors[-1:] = vectors[:1]
    return vectors, scales


def in_order(scores, positions, k):
    """Return the k best positions of each row: descending, equal ones by position, NaN last."""
    keys = ((positions, -row, np.isnan(row)) for row in scores[:, positions])
    return np.array([positions[np.lexsort(key)][:k] for key in keys], np.int64).reshape(len(scores), k)


def check(query, vectors, scales, k, keep=None):
    """Compare a search with its definition."""
    found, positions = _core._search(query, vectors, k, scales=scales, keep=keep)
    kept = np.arange(len(vectors)) if keep is None else np.flatnonzero(keep)
    k = min(k, len(kept))
    assert found.shape == positions.shape == (len(query), k)
    assert found.dtype == np.float32 and positions.dtype == np.int64
    if scales is not None:  # every operation is known: the same bits
        scale = np.abs(query).max(1, initial=0) / np.float32(127)
        whole = np.rint(query / np.where(scale > 0, scale, 1)[:, None].astype(float)).astype(np.int64)
        truth = (whole @ vectors.T.astype(np.int64)).astype(np.float32) * (scale[:, None] * scales)
        assert np.array_equal(positions, in_order(truth, kept, k))
        assert np.array_equal(found, np.take_along_axis(truth, positions, 1))
        return
    truth = query.astype(float) @ vectors.T.astype(float)
    size = np.linalg.norm(query, axis=1)[:, None] * np.linalg.norm(vectors, axis=1)
    error = vectors.shape[1] * EPS * size  # of a sum of d products, in any order
    at = np.take_along_axis
    assert np.all(np.abs(found - at(truth, positions, 1)) <= at(error, positions, 1))
    ties = found[:, 1:] == found[:, :-1]
    assert np.all((found[:, 1:] < found[:, :-1]) | (ties & (positions[:, 1:] > positions[:, :-1])))
    for row, wrong, chosen in zip(truth, error, positions, strict=True):
        assert len(set(chosen)) == k and np.isin(chosen, kept).all()
        left = np.setdiff1d(kept, chosen)
        if k and len(left):  # what was left out is not better than what was found, beyond both errors
            assert np.max(row[left] - wrong[left]) <= np.min(row[chosen] + wrong[chosen])


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_best_of_float64_or_of_integers_on_every_instruction_set(isa, kind):
    """Sizes around a vector, a panel of 128, a tile, the few queries and a group, drawn together."""
    rng = np.random.default_rng(sorted(_core.available_isas()).index(isa))
    widths = 1, 2, 15, 17, 31, 33, 64, 127, 130, 260
    lengths = 0, 1, 2, 15, 17, TILE - 1, TILE, TILE + 1, 200, 1000
    counts = 0, 1, 2, 3, FEW, FEW + 1, 16, 17, 32, 33, GROUP - 1, GROUP, GROUP + 1
    most = 0, 1, 2, 10, 64, 5000
    for turn in range(80):
        d, n, queries, k = (int(rng.choice(sizes)) for sizes in (widths, lengths, counts, most))
        _core.set_num_threads(1 + turn % 3)
        query = rng.standard_normal((queries, d)).astype(np.float32)
        share = rng.choice([None, 0, 0.03, 0.5, 1])
        keep = None if share is None else rng.random(n) < share
        keep = keep if turn % 2 or keep is None else keep.astype(np.uint8) * 255
        check(query, *numbers(rng, n, d, kind), k, keep)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_bits_depend_neither_on_threads_nor_on_other_queries_nor_on_other_rows(isa, kind):
    rng = np.random.default_rng(1)
    vectors, scales = numbers(rng, 5000, 300, kind)
    query, keep = rng.standard_normal((70, 300)).astype(np.float32), rng.random(5000) < 0.3
    _core.set_num_threads(1)
    scores, positions = _core._search(query, vectors, 5000, scales=scales)
    assert np.array_equal(np.sort(positions), np.broadcast_to(np.arange(5000), (70, 5000)))
    calls = (2, 0, 70, 5000), (4, 3, 1, 9), (3, 6, 4, 100), (1, 8, 5, 9), (2, 30, 33, 9)
    for threads, first, count, k in calls:
        _core.set_num_threads(threads)
        some = np.ascontiguousarray(query[first : first + count])
        found, places = _core._search(some, vectors, k, scales=scales)
        assert np.array_equal(found, scores[first : first + count, :k])
        assert np.array_equal(places, positions[first : first + count, :k])
        for i, row in enumerate(_core._search(some, vectors, k, scales=scales, keep=keep)[1]):
            every = positions[first + i]
            assert np.array_equal(row, every[keep[every]][:k])


@pytest.mark.parametrize("queries", [2, 40])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_ties_are_in_the_order_of_positions_also_across_tasks(kind, queries):
    rng = np.random.default_rng(2)
    vectors = rng.integers(-1, 2, (20_000, 3)).astype(kind)
    scales = np.ones(len(vectors), np.float32) if kind == "int8" else None
    query = rng.integers(-1, 2, (queries, 3)).astype(np.float32) * 127  # exact in both kinds
    _core.set_num_threads(3)
    scores, positions = _core._search(query, vectors, 3000, scales=scales)
    truth = query @ vectors.T.astype(np.float32)
    assert np.array_equal(positions, in_order(truth, np.arange(len(vectors)), 3000))
    assert np.array_equal(scores, np.take_along_axis(truth, positions, 1))


@pytest.mark.parametrize("queries", [1, 20])
def test_nan_comes_last_and_infinity_has_its_place(queries):
    vectors = np.random.default_rng(3).standard_normal((150, 20)).astype(np.float32)
    vectors[[7, 100], 3] = np.nan
    vectors[50, 0], vectors[120, 0] = np.inf, -np.inf
    query = np.ones((queries, 20), np.float32)
    scores, positions = _core._search(query, vectors, 150)
    assert np.all(positions[:, [0, 147, 148, 149]] == [50, 120, 7, 100])
    assert np.isnan(scores[:, 148:]).all() and not np.isnan(scores[:, :148]).any()
    keep = np.isnan(vectors).any(1)
    assert np.all(_core._search(query, vectors, 1, keep=keep)[1] == 7)
    whole, scales = np.ones((150, 20), np.int8), np.ones(150, np.float32)
    query[0, 5], scales[9] = np.inf, np.nan
    scores, positions = _core._search(query, whole, 150, scales=scales)
    assert np.isnan(scores[0]).all() and np.array_equal(positions[0], np.arange(150))
    assert np.all(positions[1:, -1] == 9) and not np.isnan(scores[1:, :-1]).any()


def test_a_mapped_file_that_is_not_aligned_and_queries_of_zeros_and_tiny_numbers(tmp_path):
    rng = np.random.default_rng(4)
    vectors, scales = numbers(rng, 300, 40, "int8")
    (tmp_path / "vectors").write_bytes(b"?" + vectors.tobytes())
    mapped = np.memmap(tmp_path / "vectors", np.int8, "r", offset=1, shape=(300, 40))
    query = rng.standard_normal((3, 40)).astype(np.float32) * np.float32([[0], [1e-44], [1e30]])
    scores, positions = _core._search(query, mapped, 300, scales=scales)
    assert np.isfinite(scores).all() and not scores[0].any()
    assert np.array_equal(positions[0], np.arange(300))
    check(query[2:], mapped, scales, 7)
