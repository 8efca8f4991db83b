"""PyTorch's random stream: stored numbers of PyTorch 2.13, and PyTorch itself where it is installed."""

import copy
import json
import pickle

import numpy as np
import pytest
from refusals import refusals

import selfattn as sa


def test_stored_numbers():
    """One stream after manual_seed(0), as PyTorch 2.13 printed it: every kind of draw, and the cached normal."""
    rng, f64 = sa.torch_rng(0), np.float64
    third = 1 / 3
    assert rng.random(3).tolist() == [0.49625658988952637, 0.7682217955589294, 0.08847743272781372]
    assert rng.random(2, f64).tolist() == [0.0562441839043476, 0.07262971157225484]
    expected = [0.2642965018749237, -0.029581349343061447, 0.08820419013500214]
    assert rng.uniform(-third, third, 3).tolist() == expected
    expected = [0.1940985947868691, -0.21426254986616602, -0.09926158373738106]
    assert rng.uniform(-third, third, 3, f64).tolist() == expected
    # log1p and sin are libm's, or NumPy's for 16 numbers or more, and may differ by an ulp between systems
    expected = [-0.7192575784693592, -0.40334352493217457, -0.5966353626151273]
    np.testing.assert_allclose(rng.standard_normal(3, f64), expected, rtol=1e-15)
    assert rng.randperm(8).tolist() == [0, 5, 3, 7, 1, 4, 2, 6]
    np.testing.assert_allclose(rng.standard_normal(1, f64), [0.18203648506130554], rtol=1e-15)
    expected = [-0.6218697538470708, 0.3622373453062042, 2.282426997133331, -1.0846963401732275]
    np.testing.assert_allclose(rng.standard_normal(18, f64)[[0, 1, 2, 17]], expected, rtol=1e-15)
    assert rng.integers(0, 1000, 4).tolist() == [212, 505, 946, 156]
    assert rng.integers(0, 2**40, 2).tolist() == [876123394372, 26208082884]
    assert [rng.permutation(6).tolist() for _ in range(2)] == [[0, 2, 3, 5, 4, 1], [5, 0, 2, 1, 3, 4]]
    assert rng.random(1).tolist() == [0.07835853099822998]


@pytest.mark.parametrize("seed", [0, 42, 2**32 + 3, -5])
def test_the_same_as_torch(seed):
    torch = pytest.importorskip("torch")
    torch.manual_seed(seed)
    rng = sa.torch_rng(seed)

    def equal(got, expected):
        expected = expected.numpy()
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)

    for dtype, there in ((np.float32, torch.float32), (np.float64, torch.float64)):
        for low, high in ((-1 / 3, 1 / 3), (0.0, 2.7), (1e-9, 1e9)):  # here multiply, then add would fail
            equal(rng.uniform(low, high, 10000, dtype), torch.empty(10000, dtype=there).uniform_(low, high))
        for n in (0, 1, 3, 15):
            equal(rng.standard_normal(n, dtype), torch.randn(n, dtype=there))
        equal(rng.random((2, 3), dtype), torch.rand(2, 3, dtype=there))
        for n in (16, 17, 31, 32, 1000):
            ulps = 3 if dtype == np.float32 else 2
            got, expected = rng.normal(0.5, 2.0, n, dtype), torch.empty(n, dtype=there).normal_(0.5, 2.0)
            # an ulp of the largest intermediate: normals stay below 6, times 2
            np.testing.assert_allclose(got, expected.numpy(), rtol=0, atol=ulps * np.finfo(dtype).eps * 12)
    for n in (3, 15, 16, 17, 31, 32, 1000):  # the values of float32, rounded, but another number of draws
        expected = torch.empty(n, dtype=torch.float16).normal_(0.5, 2.0).numpy()
        np.testing.assert_allclose(
            rng.normal(0.5, 2.0, n, np.float16), expected, rtol=0, atol=2 * np.finfo(np.float16).eps * 8
        )
    equal(rng.randperm(100), torch.randperm(100))
    for bound in (17, 2**28 - 1, 2**28, 2**62 + 1):
        equal(rng.integers(bound, size=20), torch.randint(bound, (20,)))
    loader = torch.utils.data.DataLoader(list(range(37)), batch_size=1, shuffle=True)
    for _ in range(2):
        equal(rng.permutation(37), torch.tensor([int(n) for n in loader]))


def test_it_seeds_the_dropout_of_attention():
    x = np.ones((4, 3))
    results = [
        sa.scaled_dot_product_attention(x, x, x, dropout_p=0.5, rng=sa.torch_rng(seed)) for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    assert (results[0] != results[2]).any()


test_bad_input = refusals(
    (lambda rng: sa.torch_rng(1.5), TypeError, "int, not float"),
    (lambda rng: sa.torch_rng(2**64), ValueError, "64 bits"),
    (lambda rng: rng.random(3, np.float16), TypeError, "float16"),
    (lambda rng: rng.random(-1), ValueError, "negative"),
    (lambda rng: rng.uniform(1.0, 0.0), ValueError, "low=1.0, high=0.0"),
    (lambda rng: rng.uniform(0.0, np.nan), ValueError, "nan"),
    (lambda rng: rng.normal(0.0, -1.0), ValueError, "std=-1.0"),
    (lambda rng: rng.randperm(-1), ValueError, "-1"),
    (lambda rng: rng.integers(3, 3), ValueError, "low=3, high=3"),
    (lambda rng: rng.integers(300, dtype=np.uint8), ValueError, "uint8"),
    (lambda rng: rng.set_state({}), ValueError, "get_state"),
    given=lambda: sa.torch_rng(0),
)


def through_json(rng):
    other = sa.torch_rng(4)
    other.set_state(json.loads(json.dumps(rng.get_state())))
    return other


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda rng: pickle.loads(pickle.dumps(rng)), through_json]
)
def test_a_copy_continues_alone(again):
    """This holds even between the two normal numbers that one pair of words makes."""
    rng = sa.torch_rng(3)
    rng.random(5), rng.standard_normal(1)
    other = again(rng)
    first, second = ((x.standard_normal(3), x.random(700), x.randperm(9)) for x in (rng, other))
    np.testing.assert_equal(second, first)


@pytest.mark.parametrize("wrong", [True, "0.5", b"0.5", np.complex64(0.5), np.array("0.5"), np.ones(1)])
def test_bounds_and_moments_are_real_numbers(wrong):
    rng = sa.torch_rng(0)
    for draw in (
        lambda: rng.uniform(0, wrong, 3),
        lambda: rng.normal(wrong, 1, 3),
        lambda: rng.normal(0, wrong, 3),
    ):
        with pytest.raises(TypeError, match="must be a real number"):
            draw()
    with pytest.raises(ValueError, match="high is too large for a float"):
        rng.uniform(0, 10**400, 3)
    assert rng.random().tolist() == sa.torch_rng(0).random().tolist()
