"""What the core's own functions refuse that no public call gives them: wrong kinds, shapes and numbers, each with its message."""

import numpy as np
import pytest

from selfattn import _core
from selfattn.engine.weights import Quants

X = np.arange(6, dtype=np.float32).reshape(2, 3)
BLOCKS = Quants(np.zeros((4, 34), np.uint8), "Q8_0", (4, 32)).packed
FIXED = X.copy()
FIXED.flags.writeable = False


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, X[:, :2], None), TypeError, "as many columns"),
        ((X, X.astype(np.float64), None), TypeError, "contiguous 2-D arrays of float32 or float64"),
        ((X.astype(np.float16), X, None), TypeError, "contiguous 2-D arrays"),
        ((X.tolist(), X, None), TypeError, "contiguous 2-D arrays"),
        ((X, X, np.zeros(3, np.float32)), TypeError, "bias must be"),
        ((X, X, np.zeros(2)), TypeError, "bias must be"),
        ((X, BLOCKS, None), TypeError, "32 columns"),
        ((X,), TypeError, "_linear_forward"),
    ],
)
def test_products(arguments, error, message):
    with pytest.raises(error, match=message):
        _core._linear_forward(*arguments)


def test_products_that_are_too_large():
    wide = np.zeros((0, 2**45), np.float32)
    with pytest.raises(ValueError, match="address space"):
        _core._linear_forward(wide, wide, None)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros((3, 2), np.float32), X, X),
        (np.zeros((2, 3), np.float32), X, X),
        (np.zeros((2, 2)), X, X),
        (X, X, X[:, :2]),
        (X, X),
    ],
)
def test_gradients_of_products(arguments):
    with pytest.raises(TypeError):
        _core._linear_backward(*arguments)


def test_weights_that_are_packed():
    with pytest.raises(ValueError, match="too large"):
        _core._bfloat16_panels(np.zeros((0, 2**45), np.uint16))
    rows = np.zeros((4, 34), np.uint8)
    for arguments, error, message in (
        ((rows, "Q8_0", 33), ValueError, "no rows of 33 columns in blocks of Q8_0"),
        ((rows, "Q8_0", -32), ValueError, "no rows of -32 columns"),
        ((rows, "Q8_0", 2**60), ValueError, "no rows of"),
        ((rows, "Q9", 32), ValueError, "in blocks of Q9"),
        ((rows, "Q8_0", 64), TypeError, "with 68 columns"),
        ((rows[:, ::2], "Q8_0", 32), TypeError, "contiguous"),
        ((rows,), TypeError, "_quants"),
    ):
        with pytest.raises(error, match=message):
            _core._quants(*arguments)
    for arguments, error, message in (
        ((BLOCKS, np.array([4])), IndexError, "row 4 is out of bounds for 4 rows"),
        ((BLOCKS, np.array([-1])), IndexError, "row -1"),
        ((BLOCKS, np.array([0], np.int32)), TypeError, "int64"),
        (
            (_core._bfloat16_panels(np.zeros((2, 32), np.uint16)), np.array([0])),
            TypeError,
            "what _quants made",
        ),
        ((None, np.array([0])), TypeError, "what _quants made"),
        ((BLOCKS,), TypeError, "_expand_quants"),
    ):
        with pytest.raises(error, match=message):
            _core._expand_quants(*arguments)


def sgd(**changed):
    given = {
        "parameters": [X.copy()], "gradients": [X], "means": None, "steps": [1], "lr": 0.1, "momentum": 0.0, "dampening": 0.0,
        "weight_decay": 0.0, "nesterov": False,
    }  # fmt: skip
    return (given | changed).values()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"parameters": (X,)}, TypeError, "must come in lists"),
        ({"gradients": None}, TypeError, "must come in lists"),
        ({"parameters": [X.tolist()]}, TypeError, r"parameters\[0\] must be an array"),
        ({"gradients": []}, TypeError, r"gradients\[0\] must be an array"),
        ({"gradients": [X[:1]]}, TypeError, r"gradients\[0\] must be a contiguous"),
        ({"gradients": [X.T.copy().T]}, TypeError, r"gradients\[0\] must be a contiguous"),
        ({"gradients": [X.astype(np.float64)]}, TypeError, "of the parameter's dtype and size"),
        ({"parameters": [X.astype(np.float16)]}, TypeError, r"parameters\[0\] must be a contiguous"),
        ({"parameters": [FIXED]}, ValueError, r"parameters\[0\] is read-only"),
        ({"means": [FIXED]}, ValueError, r"means\[0\] is read-only"),
        ({"steps": [0]}, ValueError, r"steps\[0\] must be an int of at least 1"),
        ({"steps": []}, ValueError, r"steps\[0\] must be an int of at least 1"),
        ({"steps": [1.0]}, ValueError, r"steps\[0\] must be an int of at least 1"),
        ({"steps": [np.int64(1)]}, ValueError, r"steps\[0\] must be an int of at least 1"),
        ({"steps": [2**70]}, OverflowError, "int"),
        ({"lr": -1.0}, ValueError, r"at least 0 and finite, not \(-1.0, 0.0\)"),
        ({"lr": np.inf}, ValueError, r"at least 0 and finite, not \(inf, 0.0\)"),
        ({"weight_decay": np.nan}, ValueError, r"at least 0 and finite, not \(0.1, nan\)"),
        ({"lr": "fast"}, TypeError, "real number"),
    ],
)
def test_steps_of_optimisers(changed, error, message):
    with pytest.raises(error, match=message):
        _core._sgd_step(*sgd(**changed))
    assert (FIXED == X).all()


def test_arrays_that_are_plain():
    other = X.reshape(3, 2)
    assert _core._are_plain([X, X], [X, X])
    for parameters, gradients in (
        ([X], []),
        ([X], [other]),
        ([FIXED], [X]),
        ([X], [np.ma.array(X)]),
        ([1], [X]),
    ):
        assert not _core._are_plain(parameters, gradients)
    with pytest.raises(TypeError):
        _core._are_plain((X,), [X])


def test_what_a_machine_can_do():
    """Benchmarks ask; the figures themselves are measured elsewhere."""
    for dtype in ("float32", "float64"):
        assert _core._fma_peak(dtype, 2, 1) > 0
    for dtype, int8 in (("int8", True), ("bfloat16", False)):
        assert (_core._fma_peak(dtype, 1, 1) > 0) == (_core._compact_unit(int8) is not None)
    assert _core._read_bandwidth(4096, 2, 1) > 0
    for arguments in (("float16", 1, 1), ("float32", 0, 1), ("float32", 1025, 1), ("float32", 1, 0)):
        with pytest.raises(ValueError, match="_fma_peak takes 'float32'"):
            _core._fma_peak(*arguments)
    for arguments in ((0, 1, 1), (1, 0, 1), (1, 1025, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="_read_bandwidth takes bytes >= 1"):
            _core._read_bandwidth(*arguments)
    for function in (_core._fma_peak, _core._read_bandwidth):
        with pytest.raises(TypeError):
            function(None)


def test_names_of_instruction_sets():
    with pytest.raises(TypeError, match="must be a str, got int"):
        _core._set_isa(3)
    with pytest.raises(ValueError, match=r"'sse'.*can run"):
        _core._set_isa("sse")
