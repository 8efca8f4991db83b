"""How each library is asked for a case: the statements that are timed, and how to read their result.

An engine returns every reasonable spelling; the fastest counts, so that nobody loses by being asked the wrong
way. What a library needs once (compiling, converting the inputs) is done here, outside the timing. Libraries
are imported when they are asked for, and by name, so that type checkers need none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from .cases import BACKWARD, Array, Case, Inputs
from .ragged import selfattn_ragged, torch_ragged
from .spelling import Spelling, UnsupportedError, one_array


def _arguments(case: Case, gqa: bool = False) -> str:
    text = "q, k, v"
    if case.mask:
        text += ", attn_mask=mask"
    if case.causal:
        text += ", is_causal=True"
    if case.blocks:
        text += f", window=({case.block_length}, 0)" if case.blocks == "window" else ", block_mask=blocks"
    return text + ", enable_gqa=True" if gqa else text


def _plain_only(case: Case) -> None:
    if case.ragged:
        raise UnsupportedError("ragged batches")
    if case.gradients:
        raise UnsupportedError("gradients")


def _queries_as_rows(case: Case, query: Array) -> Array:
    """View one query per head as a few queries of each key head: (B, H, 1, D) to (B, Hkv, H / Hkv, D)."""
    if case.length != 1:
        raise UnsupportedError("grouped heads with more than one query")
    return query.reshape(case.batch, case.kv_heads, -1, case.width)


def _selfattn(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    import selfattn as sa

    sa.set_num_threads(threads)
    if case.ragged:
        return selfattn_ragged(case, inputs)
    names = dict(sdpa=sa.scaled_dot_product_attention, **inputs._asdict())
    names.update(q=inputs.query, k=inputs.key, v=inputs.value)
    if case.blocks == "documents":
        names["blocks"] = sa.BlockMask.from_documents(np.arange(case.length) // case.block_length)
    elif case.blocks == "prefix":
        names["blocks"] = sa.BlockMask.prefix_lm(case.block_length)
    if case.gradients:
        wrt = ("query", "key", "value", *(["attn_mask"] if case.mask.startswith("float") else []))
        names.update(vjp=sa.scaled_dot_product_attention_vjp, wrt=wrt, grad_out=case.grad_out())
        call = f"vjp({_arguments(case, case.kv_heads != case.heads)}, wrt=wrt)"
        if case.gradients == BACKWARD:
            names["pullback"] = eval(call, names)[1]
            return [Spelling("pullback(grad_out)", names, one_array)]
        return [Spelling(f"{call}[1](grad_out)", names, one_array)]
    return [Spelling(f"sdpa({_arguments(case, case.kv_heads != case.heads)})", names)]


def _numpy(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    _plain_only(case)
    from selfattn._timing import numpy_attention

    query, key, value, mask = inputs
    if case.kv_heads != case.heads:
        query = _queries_as_rows(case, query)
    if case.causal:
        mask = np.tri(case.length, case.keys, dtype=np.bool_)
    if mask is not None and mask.dtype == np.bool_:
        mask = np.where(mask, 0, -np.inf).astype(case.dtype)
    names = {"attention": numpy_attention, "q": query, "k": key, "v": value, "mask": mask}
    return [Spelling("attention(q, k, v)" if mask is None else "attention(q, k, v, mask)", names)]


def _tensor(torch: Any, array: Array) -> Any:
    """Give PyTorch the memory of an array; of bfloat16 it takes no NumPy array as such."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Any) -> Array:
    return np.asarray(tensor.double())


def _arrays(tensors: Any) -> Array:
    return one_array([_array(tensor) for tensor in tensors])


def _torch(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    torch: Any = import_module("torch")

    torch.set_num_threads(threads)
    if case.ragged:
        return torch_ragged(case, inputs, torch)
    query, key, value = (_tensor(torch, t) for t in inputs[:3])
    names = {"sdpa": torch.nn.functional.scaled_dot_product_attention, "q": query, "k": key, "v": value}
    if inputs.mask is not None:
        names["mask"] = _tensor(torch, inputs.mask)
    if case.gradients:
        return [_torch_gradients(torch, case, names)]
    if case.kv_heads != case.heads:
        spellings = [Spelling(f"sdpa({_arguments(case, gqa=True)})", names, _array)]
        if case.length == 1 and not case.mask and not case.causal:
            rows = query.view(case.batch, case.kv_heads, -1, case.width)
            spellings.append(Spelling("sdpa(rows, k, v)", {**names, "rows": rows}, _array))
        return spellings
    spellings = [Spelling(f"sdpa({_arguments(case)})", names, _array)]
    if case.layout == "LD":
        four = {**names, "q4": query[None, None], "k4": key[None, None], "v4": value[None, None]}
        spellings.append(Spelling("sdpa(q4, k4, v4)", four))
    return spellings


def _torch_gradients(torch: Any, case: Case, names: dict[str, Any]) -> Spelling:
    wanted = [name for name in ("q", "k", "v", "mask") if name in names and names[name].is_floating_point()]
    names = names | {name: names[name].detach().requires_grad_() for name in wanted}
    names["wrt"] = [names[name] for name in wanted]
    names.update(grad=torch.autograd.grad, grad_out=_tensor(torch, case.grad_out()))
    call = f"sdpa({_arguments(case, case.kv_heads != case.heads)})"
    if case.gradients == BACKWARD:
        names["out"] = eval(call, names)
        return Spelling("grad(out, wrt, grad_out, retain_graph=True)", names, _arrays)
    return Spelling(f"grad({call}, wrt, grad_out)", names, _arrays)


def _onnxruntime(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    _plain_only(case)
    onnxruntime: Any = import_module("onnxruntime")
    onnx: Any = import_module("onnx")
    helper, numbers = onnx.helper, onnx.TensorProto

    query, key, value, mask = inputs
    if query.ndim != 4:
        raise UnsupportedError("2-D inputs")
    if case.dtype != "float32":
        raise UnsupportedError(case.dtype)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads

    def session(
        node: Any, feeds: dict[str, Array], output_shape: list[int], domain: str, opset: int
    ) -> Spelling:
        types = {np.dtype(np.float32): numbers.FLOAT, np.dtype(np.bool_): numbers.BOOL}
        graph = helper.make_graph(
            [node],
            "attention",
            [helper.make_tensor_value_info(name, types[a.dtype], a.shape) for name, a in feeds.items()],
            [helper.make_tensor_value_info("out", numbers.FLOAT, output_shape)],
        )
        opsets = [helper.make_opsetid("", 23)] + ([helper.make_opsetid(domain, opset)] if domain else [])
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
        run = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        ).run
        return Spelling(f"run(None, feeds)  # {node.op_type}", {"run": run, "feeds": feeds}, to_heads)

    def to_heads(results: list[Array]) -> Array:
        out = results[0]
        return out if out.ndim == 4 else out.reshape(case.batch, -1, case.heads, case.width).swapaxes(1, 2)

    feeds = {"q": query, "k": key, "v": value}
    standard = helper.make_node(
        "Attention", ["q", "k", "v"] + (["mask"] if case.mask else []), ["out"], is_causal=int(case.causal)
    )
    makers = [
        lambda: session(
            standard, feeds | ({"mask": mask} if mask is not None else {}), list(query.shape), "", 0
        )
    ]
    if case.kv_heads == case.heads and (mask is None or mask.dtype != np.bool_):
        flat = np.ascontiguousarray(query.swapaxes(1, 2)).reshape(case.batch, case.length, -1)
        bias = {} if mask is None else {"mask": mask.reshape((1,) * (4 - mask.ndim) + mask.shape)}
        contrib = helper.make_node(
            "MultiHeadAttention",
            ["q", "k", "v"] + (["", "", "mask"] if bias else []),
            ["out"],
            domain="com.microsoft",
            num_heads=case.heads,
            unidirectional=int(case.causal),
        )
        makers.append(
            lambda: session(contrib, feeds | {"q": flat} | bias, list(flat.shape), "com.microsoft", 1)
        )
    return _those_that_work(makers)


def _those_that_work(makers: list[Callable[[], Spelling]]) -> list[Spelling]:
    spellings, reasons = [], []
    for make in makers:
        try:
            spellings.append(make())
        except Exception as error:
            reasons.append(str(error).partition("\n")[0])
    if not spellings:
        raise UnsupportedError("; ".join(reasons))
    return spellings


def _openvino(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    _plain_only(case)
    openvino: Any = import_module("openvino")
    opset13: Any = import_module("openvino.opset13")

    query, key, value, mask = inputs
    if query.ndim != 4:
        raise UnsupportedError("2-D inputs")
    if case.dtype not in ("float32", "bfloat16"):
        raise UnsupportedError(case.dtype)
    if case.kv_heads != case.heads:
        query = _queries_as_rows(case, query)
    feeds = [query, key, value] + ([mask] if mask is not None else [])
    if case.dtype == "bfloat16":  # float32 arrays and a hint
        feeds = [array.astype(np.float32) for array in feeds]
    parameters = [opset13.parameter(list(a.shape), a.dtype) for a in feeds]
    node = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
    hints = {
        "INFERENCE_PRECISION_HINT": {"float32": "f32", "bfloat16": "bf16"}[case.dtype],
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(openvino.Model([node], parameters, "attention"), "CPU", hints)
    request = compiled.create_infer_request()
    for i, array in enumerate(feeds):
        request.set_input_tensor(i, openvino.Tensor(np.ascontiguousarray(array), shared_memory=True))
    out = request.get_output_tensor(0)
    return [Spelling("infer()", {"infer": request.infer, "feeds": feeds}, lambda _: np.array(out.data))]


def _jax(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    _plain_only(case)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax: Any = import_module("jax")

    if inputs.query.ndim != 4:
        raise UnsupportedError("2-D inputs")
    if case.dtype != "float32":
        raise UnsupportedError("float64, whose softmax it computes in float32")
    query, key, value = (jax.device_put(np.ascontiguousarray(t.swapaxes(1, 2))) for t in inputs[:3])
    names = {"q": query, "k": key, "v": value}
    options: dict[str, Any] = {"is_causal": case.causal}
    mask = inputs.mask
    statement = "attention(q, k, v).block_until_ready()"
    if mask is not None:
        names["mask"] = jax.device_put(mask.reshape((1,) * (4 - mask.ndim) + mask.shape))
        keyword = "mask" if mask.dtype == np.bool_ else "bias"
        statement = f"attention(q, k, v, {keyword}=mask).block_until_ready()"
    attention = jax.jit(lambda q, k, v, **more: jax.nn.dot_product_attention(q, k, v, **more, **options))
    return [
        Spelling(statement, {**names, "attention": attention}, lambda out: np.asarray(out).swapaxes(1, 2))
    ]


class Engine(NamedTuple):
    """A library: its name in tables, the packages it needs, and how to ask it.

    The version that is reported is that of the first package.
    """

    title: str
    packages: tuple[str, ...]
    spell: Callable[[Case, Inputs, int], list[Spelling]]


ENGINES = {
    "selfattn": Engine("selfattn", ("selfattn",), _selfattn),
    "numpy": Engine("NumPy", ("numpy",), _numpy),
    "torch": Engine("PyTorch", ("torch",), _torch),
    "onnxruntime": Engine("ONNX Runtime", ("onnxruntime", "onnx"), _onnxruntime),
    "openvino": Engine("OpenVINO", ("openvino",), _openvino),
    "jax": Engine("JAX", ("jax", "jaxlib"), _jax),
}
PEERS = tuple(name for name in ENGINES if name != "selfattn")


def is_installed(name: str) -> bool:
    """Tell whether all packages of an engine can be found, without importing them."""
    return all(find_spec(package) is not None for package in ENGINES[name].packages)


def version(name: str) -> str:
    """Return the version of an engine's package."""
    try:
        return metadata.version(ENGINES[name].packages[0])
    except metadata.PackageNotFoundError:
        return "unknown"
