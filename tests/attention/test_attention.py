"""scaled_dot_product_attention, the C function: what its arguments and results are.

Its numbers, with any shapes, dtypes, layouts and options: test_fuzz.py. Sizes at which kernels change, on every instruction set:
tests/kernels/test_instruction_sets.py. Edges: test_edges.py. Bounds: tolerances.py.
"""

import numpy as np
import pytest
from inputs import FLOAT_IDS, FLOATS, LAYOUTS, random_inputs, random_mask
from tolerances import finfo

import selfattn as sa

pytestmark = pytest.mark.usefixtures("one_thread")
attend = sa.scaled_dot_product_attention
floats = pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def test_bytes_other_than_one_in_a_boolean_mask_mean_true(isa):
    arrays = random_inputs((5, 8), 70)
    mask = random_mask(np.random.default_rng(1), (5, 70), np.bool_)
    odd = (mask * np.uint8(0xFE)).view(np.bool_)
    assert bits(attend(*arrays, odd)) == bits(attend(*arrays, mask))


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_inputs_and_masks(isa, name):
    for kind in (np.dtype(np.bool_), *FLOATS):
        mask = random_mask(np.random.default_rng(6), (2, 3, 33, 150), kind)
        arrays = random_inputs((2, 3, 33, 8), 150)
        got = attend(*map(LAYOUTS[name], arrays), LAYOUTS[name](mask))
        np.testing.assert_array_equal(got, attend(*arrays, mask), err_msg=f"{kind}")


@floats
@pytest.mark.parametrize("kind", FLOATS, ids=FLOAT_IDS)
def test_a_row_of_the_least_float_is_uniform(isa, dtype, kind):
    query, key, value = random_inputs((4, 8), 70, dtype=dtype)
    least = float(finfo(kind).min)
    mask = np.zeros((4, 70), kind)
    mask[1:3] = least
    mask[2, 30:] = -np.inf
    out, lse, weights = attend(query, key, value, mask, return_lse=True, return_weights=True)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    if kind != np.float16:  # scores still count next to -65504
        step = 2e-2 if dtype.itemsize == 2 else 1e-6
        np.testing.assert_allclose(weights[1].astype(float), 1 / 70, rtol=step)
        np.testing.assert_allclose(weights[2, :30].astype(float), 1 / 30, rtol=step)
    assert not weights[2, 30:].any()
    # next to an ordinary score, the least float has no weight
    mask[0, 1:] = least
    weights = attend(query, key, value, mask, return_weights=True)[1]
    assert weights[0].astype(float).tolist() == [1.0] + [0.0] * 69


def test_lists_and_the_array_protocol():
    class Wrapped:
        def __init__(self, x):
            self.x = x

        def __array__(self, dtype=None, copy=None):
            return self.x

    arrays = [x.astype(np.float64) for x in random_inputs((3, 4))]
    plain = attend(*arrays)
    assert bits(attend(*(x.tolist() for x in arrays))) == bits(plain)
    assert bits(attend(*(Wrapped(x) for x in arrays))) == bits(plain)


def test_memory_maps(tmp_path):
    arrays = random_inputs((2, 9, 8), 70)
    mapped = []
    for n, x in enumerate(arrays):
        np.save(tmp_path / f"{n}.npy", x)
        mapped.append(np.load(tmp_path / f"{n}.npy", mmap_mode="r"))
    assert all(type(x) is np.memmap for x in mapped)
    plain = attend(*arrays)
    got = attend(*mapped)
    assert type(got) is np.ndarray and bits(got) == bits(plain)
    out = np.memmap(tmp_path / "out", np.float32, "w+", shape=plain.shape)
    assert attend(*mapped, out=out) is out
    assert bits(out) == bits(plain)


def test_what_is_returned_and_in_which_order():
    arrays = random_inputs((2, 9, 8), 20, v_width=5)
    out, lse, weights = attend(*arrays, return_lse=True, return_weights=True)
    assert (out.shape, lse.shape, weights.shape) == ((2, 9, 5), (2, 9), (2, 9, 20))
    assert bits(attend(*arrays)) == bits(out)
    pair = attend(*arrays, return_lse=True)
    assert type(pair) is tuple and [bits(x) for x in pair] == [bits(out), bits(lse)]
    pair = attend(*arrays, return_weights=True)
    assert type(pair) is tuple and [bits(x) for x in pair] == [bits(out), bits(weights)]
    for x in (out, lse, weights):
        x[...] = 0  # writable
    assert x.base is None


def test_outputs_without_elements_take_no_time():
    """The call has 2**40 queries whose outputs have no columns: its arrays have a few bytes."""
    query, key, value = (np.broadcast_to(np.float32(1), (2**40, 1)), np.ones((3, 1), "f4"), np.ones((3, 0), "f4"))  # fmt: skip
    assert attend(query, key, value).shape == (2**40, 0)
    assert attend(query, key[:0], value[:0], return_weights=True)[1].shape == (2**40, 0)


@floats
def test_nothing_around_out_is_written(dtype):
    arrays = random_inputs((2, 3, 20, 8), 70, dtype=dtype, v_width=17)
    plain = attend(*arrays)
    around = np.full((4, 5, 22, 40), 7, plain.dtype)
    out = around[1:3, 1:4, 1:21, 1:35:2]
    got, lse = attend(*arrays, out=out, return_lse=True)
    assert got is out and lse.shape == (2, 3, 20)
    np.testing.assert_array_equal(out, plain)
    around[1:3, 1:4, 1:21, 1:35:2] = 7
    assert (around == 7).all()


def test_out_may_be_between_the_inputs_in_memory():
    buffer = np.random.default_rng(0).standard_normal((4, 9, 8)).astype(np.float32)
    plain = attend(buffer[0], buffer[1], buffer[3])
    attend(buffer[0], buffer[1], buffer[3], out=buffer[2])
    assert bits(buffer[2]) == bits(plain)
    woven = np.random.default_rng(0).standard_normal((9, 8, 2)).astype(np.float32)
    plain = attend(*[woven[..., 0]] * 3)
    attend(*[woven[..., 0]] * 3, out=woven[..., 1])
    np.testing.assert_array_equal(woven[..., 1], plain)


def test_the_generator_is_asked_for_one_number():
    arrays = random_inputs((2, 9, 8), 70)
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    first = attend(*arrays, dropout_p=0.5, rng=one)
    seed = int(other.integers(0, 2**64, dtype=np.uint64))
    assert one.bit_generator.state == other.bit_generator.state
    assert bits(first) == bits(attend(*arrays, dropout_p=0.5, rng=seed))
    assert bits(attend(*arrays, dropout_p=0.5, rng=3)) == bits(
        attend(*arrays, dropout_p=0.5, rng=np.uint8(3))
    )
    assert bits(first) != bits(attend(*arrays, dropout_p=0.5, rng=one))
    state = one.bit_generator.state
    attend(*arrays, rng=one)  # no dropout, no number
    assert one.bit_generator.state == state
    assert bits(attend(*arrays, dropout_p=0.5)) != bits(attend(*arrays, dropout_p=0.5))  # fresh entropy
