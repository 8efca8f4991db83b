"""The door to PyTorch: the bits of the plain call, gradients, the operators' contracts, layers, and what is refused."""

import numpy as np
import pytest

import selfattn as sa

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")
from torch import nn  # noqa: E402

from selfattn import interop  # noqa: E402
from selfattn.interop._torch_function import Call  # noqa: E402
from selfattn.interop._torch_operators import TENSORS, memory  # noqa: E402
from selfattn.interop.torch import from_torch, scaled_dot_product_attention  # noqa: E402

OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"causal": "lower_right", "window": (3, None)},
    "scores": {"scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
    "lengths": {"key_lengths": torch.tensor([[5], [9]]), "alibi_slopes": [0.5, 0.25, 0.1, 0.0]},
    "dropout": {"dropout_p": 0.3, "rng": 2**64 - 5},
    "grouped": {"enable_gqa": True},
    "documents": {"block_mask": sa.BlockMask.from_documents([0] * 3 + [1] * 4, [0] * 4 + [1] * 5)},
}


def inputs(dtype=torch.float32, key_heads=4, grad=True):
    """Queries (2, 4, 7, 8), keys and values of length 9, each in another layout."""
    generator, sizes = torch.Generator().manual_seed(0), ((7, 4), (9, key_heads), (9, key_heads))
    q, k, v = (torch.randn(2, *size, 8, generator=generator).to(dtype).transpose(1, 2) for size in sizes)
    return [x.requires_grad_(grad) for x in (q, k[:1].expand(2, -1, -1, -1), v.contiguous())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_bits_are_those_of_the_plain_call(name, dtype):
    options, (q, k, v) = OPTIONS[name], inputs(dtype, 2 if name == "grouped" else 4)
    arrays = [memory(x) for x in (q, k, v)]
    assert [x.ctypes.data for x in arrays] == [x.data_ptr() for x in (q, k, v)]  # no copies
    plain = {key: np.asarray(x) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    out = scaled_dot_product_attention(q, k, v, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected, pullback = sa.scaled_dot_product_attention_vjp(*arrays, **plain)
    assert memory(out).tobytes() == expected.tobytes()
    grads = pullback(memory(grad))
    for x, mine in zip(torch.autograd.grad(out, (q, k, v), grad), grads, strict=False):
        assert memory(x).tobytes() == mine.tobytes()
    with torch.inference_mode():
        out = scaled_dot_product_attention(q, k, v, **options)
        results = scaled_dot_product_attention(q, k, v, **options, return_lse=True, return_weights=True)
    expected = sa.scaled_dot_product_attention(*arrays, **plain, return_lse=True, return_weights=True)
    assert [memory(x).tobytes() for x in (out, *results)] == [x.tobytes() for x in (expected[0], *expected)]


def double_inputs():
    """Float64, with a mask, sinks and slopes, all of which have gradients, and the call."""
    shapes, options = ((4, 7, 9), (4,), (4,)), {"softcap": 3.0, "window": (5, 3), "return_lse": True}
    every = (*inputs(torch.float64), *(torch.rand(shape, dtype=torch.float64) for shape in shapes))

    def call(*x):
        return scaled_dot_product_attention(*x[:4], sinks=x[4], alibi_slopes=x[5], **options)

    return call, [x.detach().contiguous().requires_grad_() for x in every]


SECOND = {
    "plain": ((), {}),
    "grouped": ((), {"is_causal": True, "enable_gqa": True, "return_lse": True}),
    "scores": (("attn_mask", "sinks", "alibi_slopes"), {"softcap": 2.0, "return_lse": True}),
    "biases": (("bias", "offset_bias"), {"attn_mask": torch.tensor([[True, False, True], [True] * 3])}),
    "dropout": ((), {"dropout_p": 0.3, "rng": 3, "key_lengths": torch.tensor([2, 3])}),
    "documents": ((), {"block_mask": sa.BlockMask.from_documents([0, 1], [0, 1, 1]), "window": (1, 1)}),
}


@pytest.mark.parametrize("name", SECOND)
def test_first_and_second_derivatives(name):
    """In both modes, of each over reverse mode, and of batches."""
    named, options = SECOND[name]
    sizes = {"attn_mask": (2, 3), "bias": (2, 3), "offset_bias": (2, 4), "sinks": (2,), "alibi_slopes": (2,)}
    heads, generator = 1 if name == "grouped" else 2, torch.Generator().manual_seed(0)
    shapes = (2, 2, 2), (heads, 3, 2), (heads, 3, 1), *(sizes[each] for each in named)
    every = [torch.randn(x, generator=generator, dtype=torch.float64).requires_grad_() for x in shapes]

    def call(q, k, v, *others):
        return scaled_dot_product_attention(q, k, v, **dict(zip(named, others, strict=True)), **options)

    check = torch.autograd
    assert check.gradcheck(call, every, check_forward_ad=True, check_batched_grad=True)
    assert check.gradgradcheck(call, every, check_fwd_over_rev=True, check_batched_grad=name == "scores")


def test_functions_of_derivatives():
    """`torch.func` finds the Hessian in each order of modes, for examples too, and says what there is not."""
    q, k, v = (x[0].detach().double() for x in inputs())

    def mine(q):
        return scaled_dot_product_attention(q, k, v, scale=0.5).sin().sum()

    def plain(q):
        return (torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v).sin().sum()

    f, q, direction = torch.func, q[:1], torch.randn(2, *q[:1].shape, dtype=torch.float64)
    k, v = k[:1], v[:1]
    expected = f.hessian(plain)(q)
    for first, second in ((f.jacrev, f.jacfwd), (f.jacrev, f.jacrev), (f.jacfwd, f.jacrev)):
        assert torch.allclose(second(first(mine))(q), expected)
    products = f.vmap(lambda d: f.jvp(f.grad(mine), (q,), (d,))[1])(direction)
    assert torch.allclose(products, torch.einsum("...ijk,nijk->n...", expected, direction))
    with pytest.raises(RuntimeError, match="no forward mode of forward mode"):
        f.jacfwd(f.jacfwd(mine))(q)
    with pytest.raises(RuntimeError, match="no third ones"):
        f.grad(lambda q: f.hessian(mine)(q).sum())(q)
    with pytest.raises(RuntimeError, match="of nested tensors has first derivatives"):
        Call(("cu_seqlens_q",), {}).read_moving(())


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}])
def test_vmap_is_a_loop(options):
    """Over any argument, and over gradients: each example has the numbers that it would have alone."""
    q, k, v, mask, sinks, slopes = double_inputs()[1]
    lengths, batch = torch.tensor([[[5], [9]], [[9], [0]]]), torch.stack([mask, -mask]).detach()

    def f(q, mask, lengths, sinks):
        seed = {"rng": 3} if options else {}
        given = {"sinks": sinks, "alibi_slopes": slopes, "key_lengths": lengths, **options, **seed}
        return scaled_dot_product_attention(q, k, v, mask, **given).square().sum()

    def both(*x):
        return torch.func.grad_and_value(f, (0, 1, 3))(*x)

    examples = torch.stack([q, 2 * q], 1).detach(), batch, lengths, sinks
    axes = (1, 0, 0, None)
    found, values = torch.func.vmap(both, axes)(*examples)
    later = torch.func.vjp(lambda q: f(q, batch[0], lengths[0], sinks), q.detach())[1](
        torch.ones(()).double()
    )
    assert torch.allclose(later[0], both(q, batch[0], lengths[0], sinks)[0][0])
    for n in range(2):
        each = [x if axis is None else x.select(axis, n) for x, axis in zip(examples, axes, strict=True)]
        expected, value = both(*each)
        assert torch.allclose(value, values[n])
        assert all(torch.allclose(x[n], y, atol=1e-12) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_keep_their_contracts(dtype):
    ops, check = torch.ops.selfattn, torch.library.opcheck
    trained, mask = inputs(dtype, key_heads=2), torch.randn(7, 9, requires_grad=True)
    plain = [x.detach() for x in trained]
    options = {"enable_gqa": True, "left": 3, "return_lse": True, "return_weights": True}
    check(ops.attention.default, (*trained, mask), {**options, "keep": True})
    check(ops.attention.default, (*plain, mask.detach()), options)
    check(ops.plain_attention.default, (*(x[:, :2] for x in plain), True))
    rows, offsets = [trained[0][0].transpose(0, 1).detach() for _ in range(3)], torch.tensor([0, 3, 7])
    nothing = [None] * (TENSORS.index("cu_seqlens_q") - 3)
    packed = (*(x.requires_grad_() for x in rows), *nothing, offsets, offsets)
    check(ops.attention.default, packed, {"return_lse": True, "keep": True})
    out, statistics, *_ = kept = ops.attention(*plain, enable_gqa=True, keep=True)
    inner = (torch.ones_like(out), None, kept[-1] if len(kept) > 2 else out, statistics, *plain)
    check(ops.attention_backward.default, inner, {"enable_gqa": True, "wrt": [0, 2]})


def test_compile_and_export():
    class Model(nn.Module):
        def forward(self, *tensors):
            options = {"key_lengths": [[5], [9]], "window": (4, None), "dropout_p": 0.1}
            return scaled_dot_product_attention(*tensors, **options, return_weights=True)

    arguments, model, found = (*inputs(), torch.randn(7, 9, requires_grad=True)), Model(), []
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")  # others run a C++ compiler
    for each in (model, compiled, torch.export.export(model, arguments).module()):
        torch.manual_seed(0)  # dropout's
        out, weights = each(*arguments)
        found.append([out, weights, *torch.autograd.grad(out.square().sum(), arguments)])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_jagged_tensors_are_packed_sequences():
    lengths, generator = [3, 7, 1], torch.Generator().manual_seed(0)
    rows = torch.randn(3, 11, 4, 8, generator=generator, requires_grad=True)
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    nested = [torch.nested.nested_tensor_from_jagged(x, offsets).transpose(1, 2) for x in rows]
    out, lse = scaled_dot_product_attention(*nested, is_causal=True, return_lse=True)
    parts = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in rows), strict=True)
    alone = [scaled_dot_product_attention(*each, is_causal=True, return_lse=True) for each in parts]
    assert all(torch.equal(x, y) for x, (y, _) in zip(out.unbind(), alone, strict=True))
    (grad,) = torch.autograd.grad((out.values() ** 3).sum() + lse.values().sum(), rows)
    (expected,) = torch.autograd.grad(sum((y**3).sum() + z.sum() for y, z in alone), rows)
    assert torch.equal(grad, expected)
    with pytest.raises(TypeError, match="nested tensors take no return_weights"):
        scaled_dot_product_attention(*nested, return_weights=True)


def test_seeds_and_threads_are_pytorchs(monkeypatch):
    tensors, asked, plain = inputs(grad=False), [], sa._core.scaled_dot_product_attention
    kept = lambda *x, **options: asked.append(options) or plain(*x, **options)  # noqa: E731
    monkeypatch.setattr(sa._core, "scaled_dot_product_attention", kept)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for seed in (3, 3, 4):
        scaled_dot_product_attention(*tensors, dropout_p=0.5, rng=torch.Generator().manual_seed(seed))
    seeds = [options["rng"] for options in asked]
    assert (seeds[0] == seeds[1] != seeds[2], asked[0]["num_threads"]) == (True, 1)


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
MODULES = {
    "chain": lambda: nn.Sequential(
        nn.Linear(8, 6, bias=False), nn.SiLU(), nn.LayerNorm(6, 0.1), nn.Sequential(nn.Linear(6, 2))
    ),
    "layer": lambda: nn.TransformerEncoderLayer(**LAYER, activation=nn.GELU(), norm_first=True, bias=False),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**LAYER, batch_first=True), 2, nn.LayerNorm(8)
    ),
    "decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, layer_norm_eps=0.1), 2),
    "attention": lambda: nn.MultiheadAttention(8, 2, vdim=8, batch_first=True),
}


@pytest.mark.parametrize("name", MODULES)
def test_layers_compute_what_pytorchs_do(name):
    torch.manual_seed(0)
    module, x = MODULES[name]().eval(), torch.randn(3, 3, 5, 8)[: {"decoder": 2, "attention": 3}.get(name, 1)]
    layer = from_torch(module)
    y, expected = (each[0] if isinstance(each, tuple) else each for each in (layer(*x.numpy()), module(*x)))
    np.testing.assert_allclose(y, expected.detach(), atol=1e-5)
    assert list(layer.parameters()) == [each for each, _ in module.named_parameters()]


def test_shared_parameters_stay_shared_and_modes_are_kept():
    table, head = nn.Embedding(10, 4, padding_idx=2), nn.Linear(4, 10, bias=False)
    head.weight = table.weight
    layer = from_torch(nn.Sequential(table, nn.Dropout(0.25).eval(), head).bfloat16())
    assert layer[0].weight is layer[2].weight and layer[0].weight.dtype.name == "bfloat16"
    assert (layer[1].p, layer[1].training, layer.training, layer[0].padding_idx) == (0.25, False, True, 2)


@pytest.mark.parametrize(
    ("change", "options", "text"),
    [
        (lambda k: k.to("meta"), {}, "key is on meta; selfattn computes on the CPU: give key.cpu()"),
        (
            torch.clone,
            {"sinks": torch.zeros(4, device="meta")},
            "sinks is on meta; selfattn computes on the CPU",
        ),
        (lambda k: k.to_sparse(), {}, "key is torch.sparse_coo; give all three dense"),
        (
            lambda k: k.double(),
            {},
            "query is torch.float32, but key is torch.float64: give key.to(query.dtype)",
        ),
        (lambda k: k.numpy(), {}, "key is a ndarray, not a Tensor"),
        (
            torch.clone,
            {"attn_mask": torch.ones(7, 9).to_sparse()},
            "attn_mask is torch.sparse_coo; give attn_mask.to_dense()",
        ),
        (torch.clone, {"window": 3}, "window must be (left, right)"),
        (torch.clone, {"block_mask": 3}, "must be a selfattn.BlockMask"),
        (torch.clone, {"out": 3}, "unexpected keyword argument 'out'"),
        (torch.ones(2), None, "no layer for a torch.Tensor"),
        (nn.Linear(2, 2, device="meta"), None, "on meta; selfattn computes"),
        (nn.Transformer(8, 2, 1, 1, batch_first=True), None, "convert its encoder and its decoder"),
        (nn.Sequential(nn.Conv1d(2, 2, 1)), None, "no layer for a torch.nn.modules.conv.Conv1d"),
        (nn.Embedding(3, 2, max_norm=1.0), None, "Embedding has no max_norm, which is 1.0 here"),
        (
            nn.TransformerEncoderLayer(**LAYER, activation=nn.GELU("tanh")),
            None,
            "activation of a TransformerEncoderLayer must be",
        ),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), None, "ParametrizedLinear"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, options, text):
    q, k, v = inputs(grad=False)
    with pytest.raises((TypeError, ValueError)) as caught:
        from_torch(change) if options is None else scaled_dot_product_attention(q, change(k), v, **options)
    assert text in str(caught.value)


def test_defaults_of_pytorch_around_a_call():
    """Another default device changes nothing of what is on the CPU; autocast casts as PyTorch's function does."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    lists = {"alibi_slopes": [0.1, 0.2], "key_lengths": [[3]], "attn_mask": np.tri(6, dtype=bool)}
    for options in (*({name: x} for name, x in lists.items()), {"dropout_p": 0.5, "rng": 2**63 + 7}):
        want = scaled_dot_product_attention(q, k, v, **options)
        with torch.device("meta"):
            assert torch.equal(scaled_dot_product_attention(q, k, v, **options), want)
    with torch.device("meta"):
        drawn = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert drawn.is_cpu and drawn.abs().max() > 0.1
    theirs = nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for given in ((q, k, v), (q, k, v.bfloat16()), (q.double(), k.double(), v.double())):
            found, expected = scaled_dot_product_attention(*given), theirs(*given)
            assert found.dtype is expected.dtype
            torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # bfloat16 has 8 bits


def test_what_would_be_lost_or_mixed_up_is_refused():
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    for name in ("scale", "softcap", "dropout_p"):
        with pytest.raises(TypeError, match=f"{name} must be a number, not a Tensor that requires grad"):
            scaled_dot_product_attention(q, k, v, **{name: torch.tensor(0.5, requires_grad=True)})

    def nest(*lengths):
        rows = [torch.randn(n, 2, 4) for n in lengths]
        return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)

    with pytest.raises(ValueError, match=r"sequences of the same lengths, not \[2, 5\] and \[5, 2\]"):
        scaled_dot_product_attention(nest(3, 1), nest(2, 5), nest(5, 2))
    scaled_dot_product_attention(nest(3, 1), nest(2, 5), nest(2, 5))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("learns", [False, True])
def test_a_trace_of_jit(learns):
    given = tuple(torch.randn(1, 2, 6, 4, requires_grad=learns) for _ in range(3))
    attend = lambda *tensors: scaled_dot_product_attention(*tensors, window=(2, 0))  # noqa: E731
    traced = torch.jit.trace(attend, given)  # which compares graphs
    assert torch.equal(traced(*given), attend(*given))


def test_the_door_loads_by_name(monkeypatch):
    monkeypatch.delattr(interop, "torch")  # as before its first import
    assert interop.torch.scaled_dot_product_attention is scaled_dot_product_attention
    assert "torch" in dir(interop)
    with pytest.raises(AttributeError, match=r"no attribute 'tensorflow'; it has autograd, .*, torch$"):
        interop.tensorflow  # noqa: B018
