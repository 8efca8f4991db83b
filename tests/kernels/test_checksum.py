"""_core._checksum: any change of any array shows, whatever the layout."""

import sys
import tracemalloc

import numpy as np
import pytest

from selfattn import _core
from selfattn.nn.module import checked_pullback


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 63, 64, 65, 130])
def test_each_element_counts(size, dtype):
    """A lane has 8 bytes and a round 64: the sizes are just below and above both."""
    array = np.arange(size).astype(dtype)
    before = _core._checksum((array,))
    assert _core._checksum((array.copy(),)) == before
    for n in range(size):
        changed = array.copy()
        changed[n] += 1
        assert _core._checksum((changed,)) != before


def test_what_a_plain_sum_of_the_bits_does_not_see():
    array = np.arange(1.0, 17.0)
    before = _core._checksum((array,))
    for changed in (-array, array[::-1], np.roll(array, 8)):
        assert _core._checksum((changed,)) != before
    a, b = array[:8].copy(), array[8:].copy()
    assert _core._checksum((a, b)) != _core._checksum((b, a))
    assert _core._checksum((a,)) != _core._checksum((a, a))


def test_any_layout_is_read():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    unaligned = np.zeros(97, np.uint8)[1:].view(np.float32).reshape(4, 6)
    for view in (array, array.T, array[:, ::-2], unaligned, array.astype(">f4"), np.array(1.0)):
        before = _core._checksum((view,))
        assert _core._checksum((view,)) == before
        view[(-1,) * view.ndim] += 1
        assert _core._checksum((view,)) != before
    assert _core._checksum((array[1:1],)) == _core._checksum((array[2:2],))


def test_copies_of_strided_arrays_are_let_go():
    strided = np.ones((1000, 200), np.float32)[:, ::2]
    references = sys.getrefcount(strided)
    tracemalloc.start()
    for _ in range(20):
        _core._checksum((strided,))
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < strided.nbytes and sys.getrefcount(strided) == references


@pytest.mark.parametrize("wrong", [[np.ones(2)], (1.0,), (np.array([None]),), None])
def test_only_arrays_of_numbers_are_taken(wrong):
    with pytest.raises(TypeError, match="expected a"):
        _core._checksum(wrong)


def test_parameters_are_watched():
    weight, bias = np.ones((3, 2), np.float32), None
    dy = np.ones(2)
    pullback = checked_pullback(range(2), dy, (weight, bias), lambda dy: dy)
    pullback(dy)
    weight *= -1
    with pytest.raises(RuntimeError, match="parameters of range have changed"):
        pullback(dy)
    weight *= -1
    pullback(dy)
