"""Arguments that the core's functions refuse, and that no public call passes; checksums, which show any change of any
array."""

import functools
import re
import sys
import tracemalloc

import numpy as np
import pytest
from inputs import read_only
from refusals import refusals

from selfattn import _core
from selfattn.engine.weights import Quants
from selfattn.nn.module import checked_pullback
from selfattn.optim.optimizers import Update

X = np.arange(6, dtype=np.float32).reshape(2, 3)
WIDE = np.zeros((0, 2**45), np.float32)
BLOCKS = Quants(np.zeros((4, 34), np.uint8), "Q8_0", (4, 32)).packed
BYTES = np.zeros((4, 34), np.uint8)
INT8, SCALE = np.zeros((3, 200), np.int8), np.ones((3, 2), np.float32)
PACKED, ROWS = _core._int8_panels(INT8, SCALE), np.zeros((2, 200), np.float32)
FIXED = read_only(X.copy())


def cases(function, error, *calls):
    """Calls of a function of the core: arguments, and the message last."""
    return [(functools.partial(function, *arguments), error, message) for *arguments, message in calls]


test_products = refusals(
    *cases(
        _core._linear_forward,
        TypeError,
        (X, X[:, :2], None, "as many columns"),
        (X, X.astype(np.float64), None, "contiguous 2-D arrays of float32 or float64"),
        (X.astype(np.float16), X, None, "contiguous 2-D arrays"),
        (X.tolist(), X, None, "contiguous 2-D arrays"),
        (X, X, np.zeros(3, np.float32), "bias must be"),
        (X, X, np.zeros(2), "bias must be"),
        (X, BLOCKS, None, "32 columns"),
        (X, "_linear_forward"),
        *(
            (rows, PACKED, None, "columns")
            for rows in (ROWS.astype(float), ROWS[:, :199], ROWS[0], ROWS.T.copy().T)
        ),
        (ROWS, PACKED, np.zeros(4, np.float32), "bias"),
    ),
    *cases(_core._linear_forward, ValueError, (WIDE, WIDE, None, "address space")),
    *cases(
        _core._linear_backward,
        TypeError,
        (np.zeros((3, 2), np.float32), X, X, ""),
        (np.zeros((2, 3), np.float32), X, X, ""),
        (np.zeros((2, 2)), X, X, ""),
        (X, X, X[:, :2], ""),
        (X, X, ""),
    ),
)

test_weights_that_are_packed = refusals(
    *cases(_core._bfloat16_panels, ValueError, (np.zeros((0, 2**45), np.uint16), "too large")),
    *cases(_core._bfloat16_panels, TypeError, (INT8, "uint16")),
    *cases(
        _core._int8_panels,
        TypeError,
        (INT8.astype(np.int16), SCALE, "int8"),
        (INT8[:, ::2], SCALE, "int8"),
        (INT8[0], SCALE, "int8"),
        (None, SCALE, "int8"),
        (INT8, SCALE[:, :1], "int8"),
        (INT8, SCALE[:2], "int8"),
        (INT8, SCALE.astype(float), "int8"),
        (INT8, SCALE[:, 0], "int8"),
    ),
    *cases(
        _core._quants,
        ValueError,
        ((BYTES, "Q8_0", 33), "no rows of 33 columns in quants of Q8_0"),
        ((BYTES, "Q8_0", -32), "no rows of -32 columns"),
        ((BYTES, "Q8_0", 2**60), "no rows of"),
        ((BYTES, "Q9", 32), "in quants of Q9"),
    ),
    *cases(
        _core._quants,
        TypeError,
        ((BYTES, "Q8_0", 64), "with 68 columns"),
        ((BYTES[:, ::2], "Q8_0", 32), "contiguous"),
        ((BYTES,), "_quants"),
        (BYTES, "tuples"),
        ((BYTES, "Q8_0", 32), (BYTES, "Q8_0", 64), "with 68 columns"),
        *(
            ((BYTES, "Q8_0", 32, strips), "strips of Q8_0")
            for strips in (BYTES[0], read_only(BYTES.ravel()), np.zeros(136))
        ),
    ),
    *cases(
        _core._expand_quants,
        IndexError,
        (BLOCKS, np.array([4]), "row 4 is out of bounds for 4 rows"),
        (BLOCKS, np.array([-1]), "row -1"),
    ),
    *cases(
        _core._expand_quants,
        TypeError,
        (BLOCKS, np.array([0], np.int32), "int64"),
        (_core._bfloat16_panels(np.zeros((2, 32), np.uint16)), np.array([0]), "what _quants made"),
        (None, np.array([0]), "what _quants made"),
        (BLOCKS, "_expand_quants"),
    ),
)


def sgd(**changed):
    given = {
        "parameters": [X.copy()],
        "gradients": [X],
        "means": None,
        "squares": None,
        "peaks": None,
        "steps": [1],
        "targets": None,
    }
    numbers = {name: changed.pop(name) for name in ("lr", "weight_decay", "kind") if name in changed}
    _core._update((Update("sgd", 0.1, 0.0)._replace(**numbers), *(given | changed).values()))


test_steps_of_optimisers = refusals(
    (lambda: sgd(parameters=(X,)), TypeError, "must come in lists"),
    (lambda: sgd(gradients=None), TypeError, "must come in lists"),
    (lambda: sgd(parameters=[X.tolist()]), TypeError, r"parameters\[0\] must be an array"),
    (lambda: sgd(gradients=[]), TypeError, r"gradients\[0\] must be an array"),
    (lambda: sgd(gradients=[X[:1]]), TypeError, r"gradients\[0\] must be a contiguous"),
    (lambda: sgd(gradients=[X.T.copy().T]), TypeError, r"gradients\[0\] must be a contiguous"),
    (lambda: sgd(gradients=[X.astype(np.float64)]), TypeError, "of the parameter's dtype and size"),
    (lambda: sgd(parameters=[X.astype(np.float16)]), TypeError, r"parameters\[0\] must be a contiguous"),
    (lambda: sgd(parameters=[FIXED]), ValueError, r"parameters\[0\] is read-only"),
    (lambda: sgd(means=[FIXED]), ValueError, r"means\[0\] is read-only"),
    *(
        (lambda steps=steps: sgd(steps=steps), ValueError, r"steps\[0\] must be an int of at least 1")
        for steps in ([0], [], [1.0], [np.int64(1)])
    ),
    (lambda: sgd(steps=[2**70]), OverflowError, "int"),
    (lambda: sgd(lr=-1.0), ValueError, r"at least 0 and finite, not \(-1.0, 0.0\)"),
    (lambda: sgd(lr=np.inf), ValueError, r"at least 0 and finite, not \(inf, 0.0\)"),
    (lambda: sgd(weight_decay=np.nan), ValueError, r"at least 0 and finite, not \(0.1, nan\)"),
    (lambda: sgd(lr="fast"), TypeError, "lr must be a real number"),
    (lambda: sgd(kind="adam"), TypeError, "adam needs lists of means and of squares"),
    (lambda: sgd(kind="lion"), ValueError, "kind must be one of sgd adam, not 'lion'"),
    (
        lambda: _core._update((None, [X], [X], None, None, None, [1], None)),
        TypeError,
        "an update must be a Update",
    ),
    (lambda: _core._update([X]), TypeError, "a group must be a tuple of settings and 7 lists"),
)


@pytest.mark.parametrize(
    "targets", [(1,), [np.ones(4, np.float16)], [np.ones(3)], [1], [np.ones(3, np.int16)]]
)
def test_targets_of_steps(targets):
    lists = [[np.ones(3, np.float32)] for _ in range(4)]
    with pytest.raises(TypeError):
        update = Update("adam", 0.1, 0.0, beta1=0.9, beta2=0.999, eps=1e-8)
        _core._update((update, *lists, None, [1], targets))
    np.testing.assert_array_equal(lists, 1)


@pytest.mark.parametrize(
    ("second", "factors"),
    [
        ([np.ones(3, np.int32)], [0.5, 0.5]),
        ([1.0], [0.5, 0.5]),
        ([], []),
        ([np.ones(3)], [0.5, 1]),
        ([FIXED], [0.5, 0.5]),
    ],
)
def test_all_arrays_are_scaled_or_none(second, factors):
    first = np.ones(3)
    with pytest.raises((TypeError, ValueError)):
        _core._scale((first, *second), tuple(factors))
    np.testing.assert_array_equal(first, 1)
    assert (FIXED == X).all()


def test_arrays_that_are_plain():
    other = X.reshape(3, 2)
    assert _core._are_plain([X, X], [X, X])
    wrong = ([X], []), ([X], [other]), ([FIXED], [X]), ([X], [np.ma.array(X)]), ([1], [X])
    for parameters, gradients in wrong:
        assert not _core._are_plain(parameters, gradients)
    with pytest.raises(TypeError):
        _core._are_plain((X,), [X])


def test_what_a_machine_can_do():
    """Benchmarks call this; the figures themselves are tested elsewhere."""
    for dtype in ("float32", "float64"):
        assert _core._fma_peak(dtype, 2, 1) > 0
    for dtype, int8 in (("int8", True), ("bfloat16", False)):
        assert (_core._fma_peak(dtype, 1, 1) > 0) == (_core._compact_unit(int8) is not None)
    assert _core._read_bandwidth(4096, 2, 1) > 0


FMA, BANDWIDTH = "_fma_peak takes 'float32'", "_read_bandwidth takes bytes >= 1"
test_what_no_machine_can_do = refusals(
    *cases(
        _core._fma_peak,
        ValueError,
        ("float16", 1, 1, FMA),
        ("float32", 0, 1, FMA),
        ("float32", 1025, 1, FMA),
        ("float32", 1, 0, FMA),
    ),
    *cases(
        _core._read_bandwidth,
        ValueError,
        (0, 1, 1, BANDWIDTH),
        (1, 0, 1, BANDWIDTH),
        (1, 1025, 1, BANDWIDTH),
        (1, 1, 0, BANDWIDTH),
    ),
    *cases(_core._fma_peak, TypeError, (None, "")),
    *cases(_core._read_bandwidth, TypeError, (None, "")),
    *cases(_core._set_isa, TypeError, (3, "must be a str, got int")),
    *cases(
        _core._set_isa,
        ValueError,
        (
            "sse",
            rf"'sse': this build on this CPU and operating system can run {re.escape(repr(_core.available_isas()))}",
        ),
    ),
)


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
