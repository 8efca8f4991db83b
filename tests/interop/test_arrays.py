"""Arrays of other libraries: the bits of the plain call, in their own memory, and errors that name the way; capsules
of DLPack."""

import gc
import re
import sys
from functools import partial

import numpy as np
import pytest
from capsules import Library
from inputs import BFLOAT16, FLOAT_IDS, FLOATS, normal, random_inputs
from leaks import peak_memory

import selfattn as sa
from selfattn import nn, reference
from selfattn._check import as_array
from selfattn._extras import import_extra
from selfattn.functional._similarity import similarities


@pytest.mark.parametrize("old", [False, True])
def test_capsules_of_bfloat16(old, monkeypatch):
    if old:
        monkeypatch.delattr(Library, "dtype")
    whole = normal(np.random.default_rng(0), (6, 5, 4), BFLOAT16)
    for x in (whole, whole[::2, ::-1].T, whole[0, 0, 0, ...], whole[:0]):
        given = Library(x, old, offset=2, data=x.ctypes.data - 2)
        found = as_array("x", given)
        assert (found.dtype, found.shape, found.tobytes()) == (BFLOAT16, x.shape, x.tobytes())
        assert x.size == 0 or (found.ctypes.data, found.strides) == (x.ctypes.data, x.strides)
        assert found.flags.writeable != old
        view = found[...]
        del found
        gc.collect()
        assert given.released == 0
        del view
        assert given.released == 1
    given = Library(whole, old, strides=None, flags=1)
    assert not as_array("x", given).flags.writeable
    assert sa.softmax(given).tobytes() == sa.softmax(whole).tobytes()
    assert given.released == 2


def test_hostile_capsules(monkeypatch):
    x, far = np.ones((2, 3, 4), BFLOAT16), (2**62, 1, 1)
    for change in (
        {"data": 0},
        {"major": 2},
        {"name": b"dltensor2"},
        {"name": b"used_dltensor"},
        {"device": 4},
        {"lanes": 4},
        {"bits": 8},
        {"code": 12},
        {"shape": None},
        {"ndim": 65, "shape": [1] * 65, "strides": [1] * 65},
        {"ndim": 2**31 - 1},
        {"ndim": -1},
        {"strides": far},
        {"offset": 2**64 - 1},
        {"strides": (-(2**63), 1, 1)},
        {"shape": far},
        {"shape": far, "strides": None},
        {"shape": (2, -1, 4)},
        {"shape": (2**31, 2**31, 2**31), "strides": None},
    ):
        given = Library(x, **change)
        with pytest.raises((TypeError, ValueError, BufferError)):
            sa.softmax(given)
        assert given.released == 0, change  # the capsule still belongs to its producer
    given = Library(x)
    capsule = given.__dlpack__()
    monkeypatch.setattr(Library, "__dlpack__", lambda self, **_: capsule)
    as_array("x", given)
    for answer in (capsule, None, x):
        monkeypatch.setattr(Library, "__dlpack__", lambda self, answer=answer, **_: answer)
        with pytest.raises(TypeError, match="must return a new capsule, not"):
            sa.softmax(given)


def test_devices_and_ml_dtypes_that_is_missing(monkeypatch):
    given = Library(np.ones((2, 3), BFLOAT16))
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match="ml_dtypes"):
        sa.softmax(given)
    with pytest.raises(ImportError, match=r"needs email.later, .* 'selfattn\[e\]'"):  # a newer Python's
        import_extra("email.later", "e")
    given.devices = (2, 0)
    with pytest.raises(TypeError, match=r"x is not in the CPU's memory.*jax.device_get\(x\)"):
        sa.softmax(given)


def to_library(module, x):
    if module.__name__ == "torch":
        if x.dtype == BFLOAT16:
            return module.from_numpy(x.view(np.int16)).view(module.bfloat16)
        return module.from_numpy(x)
    if module.__name__ in ("pandas", "polars"):
        return module.DataFrame(x) if x.ndim == 2 else x
    return module.numpy.asarray(x) if module.__name__ == "jax" else module.DataArray(x)


def results(to, dtype):
    """Yield what functions and layers return for arrays that ``to`` converts."""
    q, k, v = (to(x) for x in random_inputs((2, 4, 6, 8), 5, dtype=dtype))
    x, y, w = (to(normal(np.random.default_rng(n), (5, 8), dtype)) for n in range(3))
    slopes, lengths, offsets = to(np.ones(4, dtype)), to(np.array([[5], [3]])), to(np.array([0, 2, 5]))
    mask, bias = to(np.tri(6, 5, dtype=bool)), to(np.ones((6, 5), dtype))
    yield sa.scaled_dot_product_attention(q, k, v, mask, key_lengths=lengths, sinks=slopes)
    out, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, bias, wrt=("query", "attn_mask"))
    yield from (out, pullback(q).query, pullback(q).attn_mask)
    packed = [to(normal(np.random.default_rng(n), (5, 4, 8), dtype)) for n in range(3)]
    out, pullback = sa.varlen_attention_vjp(*packed, offsets, offsets)
    yield from (out, pullback(packed[0]).key)
    cache = sa.KVCache(2, 4, 8, dtype=dtype)
    cache.append(k, v, lengths=to(np.array([5, 3])))
    yield cache.attend(q)
    yield from (sa.layer_norm(x, 8), *sa.merge_attention([x, y], [to(np.ones(5, np.float32))] * 2))
    yield from (nn.Linear(8, 3, rng=0)(x), nn.LayerNorm(8)(x), nn.CrossEntropyLoss()(x, to(np.arange(5))))
    yield nn.Embedding(6, 2, rng=0)(lengths)
    layer = nn.Linear(8, 5, bias=False, dtype=dtype)
    layer.load_state_dict({"weight": x})
    sa.optim.SGD({"weight": layer.weight}, 0.1).step({"weight": y})
    yield layer.weight
    yield from (similarities("cosine", x, y), sa.attention_steps(x, y, w).output)
    if dtype != BFLOAT16:  # NumPy alone reads no bfloat16 of other libraries
        yield reference.softmax(x)
        yield from reference.scaled_dot_product_attention_vjp(x, y, w)[1](x)[:3]


@pytest.mark.parametrize("dtype", FLOATS, ids=FLOAT_IDS)
@pytest.mark.parametrize("door", ["torch", "jax", "xarray", "pandas", "polars"])
def test_the_bits_of_the_plain_call(door, dtype):
    to = partial(to_library, pytest.importorskip(door))
    frame = door in ("pandas", "polars")  # with a column after the other, as NumPy's sums of rows notice
    if dtype.name not in (FLOAT_IDS[2:] if frame else FLOAT_IDS[:3] if door == "jax" else FLOAT_IDS):
        pytest.skip(f"{door} has no {dtype}")
    expected = results(np.asfortranarray if frame else np.asarray, dtype)
    for n, (x, y) in enumerate(zip(results(to, dtype), expected, strict=True)):
        assert isinstance(x, np.ndarray | np.generic)
        np.testing.assert_array_equal(x, y, err_msg=str(n), strict=True)


def test_tensors_are_read_where_they_are():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        x = torch.ones(64, 1000, dtype=dtype)[::2, 1:]
        assert as_array("x", x).ctypes.data == x.data_ptr()
        assert peak_memory(lambda x=x: sa.softmax(x)) < 1.1 * x.nbytes  # the result's
    out = torch.empty(32, 8)
    with pytest.raises(TypeError, match=r"out must be a NumPy array, got torch.Tensor \(numpy.asarray"):
        sa.scaled_dot_product_attention(out, out, out, out=out)


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_numpy_cannot_read():
    torch = pytest.importorskip("torch")
    odd = type("Odd", (torch.Tensor,), {"numpy": lambda self: "text"})
    with pytest.raises(TypeError, match="x must be of dtype"):
        sa.softmax(torch.ones(2).as_subclass(odd))
    x, short = torch.ones(2, 3), torch.ones(2, 3).bfloat16()
    for tensor, way in (
        (x.clone().requires_grad_(), "x.detach()"),
        (short.clone().requires_grad_(), "x.detach()"),
        (x.to("meta"), "x.cpu()"),
        (short.to("meta"), "x.cpu()"),
        (x.to_sparse(), "x.to_dense()"),
        (torch._neg_view(x), "x.resolve_neg()"),
        (torch._neg_view(short), "x.resolve_neg()"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "resolve_conj()"),
        (torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), "x.dequantize()"),
        (x.to(torch.float8_e5m2), "x.float()"),
        (torch.nested.nested_tensor([x, x]), "x.to_padded_tensor(0.0)"),
    ):
        for function in (sa.softmax, nn.Linear(3, 2)):
            with pytest.raises((TypeError, RuntimeError), match=f"NumPy cannot read x, .*{re.escape(way)}"):
                function(tensor)
