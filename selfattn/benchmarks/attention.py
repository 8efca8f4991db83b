"""The calls that are timed: a case is one call of attention, an engine calls it in a library, a suite is a list of cases.

An engine returns every reasonable spelling, of which the fastest counts, so that no library is called in a slow way. Work that
a library does once, such as compiling or converting inputs, is done here, outside the timing. Libraries are imported by name
when they are needed, so that type checkers need none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from selfattn import _core
from selfattn._timing import attention_flops, numpy_attention

from .turns import Array, Contestant, Prepare, Row, Spelling

LENGTHS, WIDTHS = (128, 197, 512, 777, 1000, 1024, 4096), (32, 64, 80, 128)
FEW = (128, 512, 1024), (32, 64, 128)
MASKS = {"float": "float mask", "float per head": "float mask per head", "bool": "boolean mask"}
# The largest difference of outputs, which are averages of numbers of size 1.
AGREEMENT = {"float32": 1e-4, "float64": 1e-10, "float16": 4e-3, "bfloat16": 3e-2}

# The pullback alone, or with the forward call.
BACKWARD, BOTH = "backward", "forward + backward"


@dataclass(frozen=True)
class Case:
    """One call: L queries of width D over S keys."""

    length: int
    width: int
    keys: int = 0  # 0: as many as queries
    batch: int = 1
    heads: int = 8
    kv_heads: int = 0  # 0: as many as query heads
    dtype: str = "float32"
    causal: bool = False
    mask: str = ""  # "", "float" or "bool": (1, 1, L, S); "float per head": (B, H, L, S)
    layout: str = "BHLD"  # order in memory: "BHLD", "BLHD", or "LD" for 2-D
    gradients: str = ""  # "", BACKWARD or BOTH

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", self.keys or self.length)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def label(self) -> str:
        """The name of the case in a table."""
        shape = f"{self.length} x {self.width}"
        dtype = "" if self.dtype == "float32" else self.dtype
        if self.layout == "LD":
            return f"2-D call {shape}, {self.dtype}"
        if self.keys != self.length:
            keys = f"{self.length} query, {self.keys} keys, {self.heads}/{self.kv_heads} heads"
            return f"{keys}, {dtype}" if dtype else keys
        words = [dtype, self.gradients, "causal" * self.causal, MASKS.get(self.mask)]
        words += ["one head" * (self.heads == 1), "(B, L, H, D)" * (self.layout == "BLHD")]
        return f"{', '.join(filter(None, words))} {shape}".lstrip()

    @property
    def limit(self) -> str:
        """The limit of the call: "flops", "bytes", or "" if it is too small for one."""
        return "" if self.layout == "LD" else "bytes" if self.keys != self.length else "flops"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of NumPy or ml_dtypes."""
        return np.dtype(import_module("ml_dtypes").bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def facts(self) -> dict[str, Any]:
        """Return the saved properties: case, operations (two products forward, five backward), the bytes of keys and values."""
        forward = attention_flops(self.batch, self.heads, self.length, self.keys, self.width, self.causal)
        numbers = self.batch * self.kv_heads * self.keys * self.width
        return {
            "case": asdict(self),
            "limit_dtype": "float64" if self.dtype == "float64" else "float32",
            "flops": forward * {"": 1.0, BACKWARD: 2.5, BOTH: 3.5}[self.gradients],
            "key_value_bytes": 2 * numbers * self.numpy_dtype.itemsize,
        }

    def inputs(self) -> dict[str, Array]:
        """Make q, k, v and, if there is one, the mask: the same numbers in every process."""
        rng = np.random.default_rng(0)
        found, keys = {}, (self.kv_heads, self.keys)
        for name, heads, length in (("q", self.heads, self.length), ("k", *keys), ("v", *keys)):
            array = found[name] = self.draw(rng, (self.batch, heads, length, self.width))
            if self.layout == "BLHD":
                found[name] = np.ascontiguousarray(array.swapaxes(1, 2)).swapaxes(1, 2)
            elif self.layout == "LD":
                found[name] = array[0, 0]
        axes = (self.batch, self.heads) if self.mask == "float per head" else (1, 1)
        if self.mask == "bool":
            found["mask"] = rng.random((*axes, self.length, self.keys)) < 0.75
            found["mask"][..., 0] = True  # libraries differ on rows without keys
        elif self.mask:
            found["mask"] = self.draw(rng, (*axes, self.length, self.keys))
        return found

    def grad_out(self) -> Array:
        """Make the gradient with respect to the output, contiguous."""
        return self.draw(np.random.default_rng(1), (self.batch, self.heads, self.length, self.width))

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Draw numbers of the case's dtype."""
        drawn: Any = np.float64 if self.dtype == "float64" else np.float32
        return rng.standard_normal(shape, drawn).astype(self.numpy_dtype, copy=False)


Inputs = dict[str, Array]


def one_array(arrays: Any) -> Array:
    """Concatenate arrays, such as gradients; skip None."""
    return np.concatenate([np.asarray(array).reshape(-1) for array in arrays if array is not None])


def _arguments(case: Case) -> str:
    mask, causal = ", attn_mask=mask" * bool(case.mask), ", is_causal=True" * case.causal
    return f"q, k, v{mask}{causal}" + ", enable_gqa=True" * (case.kv_heads != case.heads)


def _selfattn(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    import selfattn as sa

    sa.set_num_threads(threads)
    names: dict[str, Any] = {"sdpa": sa.scaled_dot_product_attention, **inputs}
    if not case.gradients:
        return [Spelling(f"sdpa({_arguments(case)})", names)]
    wrt = ("query", "key", "value", *(["attn_mask"] if case.mask.startswith("float") else []))
    names |= {"vjp": sa.scaled_dot_product_attention_vjp, "wrt": wrt, "grad_out": case.grad_out()}
    call = f"vjp({_arguments(case)}, wrt=wrt)[1]"
    if case.gradients == BACKWARD:
        names["pullback"], call = eval(call, names), "pullback"
    return [Spelling(f"{call}(grad_out)", names, one_array)]


def _numpy(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    q, mask = inputs["q"], inputs.get("mask")
    if case.kv_heads != case.heads:  # the queries of several heads share the keys of one head
        q = q.reshape(case.batch, case.kv_heads, -1, case.width)
    if case.causal:
        mask = np.tri(case.length, case.keys, dtype=np.bool_)
    if mask is not None and mask.dtype == np.bool_:
        mask = np.where(mask, 0, -np.inf).astype(case.dtype)
    names = {**inputs, "attention": numpy_attention, "q": q, "mask": mask}
    return [Spelling("attention(q, k, v)" if mask is None else "attention(q, k, v, mask)", names)]


def _torch(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    torch: Any = import_module("torch")
    torch.set_num_threads(threads)

    def tensor(array: Array) -> Any:
        if array.dtype.name == "bfloat16":  # from_numpy does not accept bfloat16
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def to_array(*tensors: Any) -> Array:
        return one_array(each.detach().double() for each in tensors)

    names: dict[str, Any] = {name: tensor(array) for name, array in inputs.items()}
    names["sdpa"] = torch.nn.functional.scaled_dot_product_attention
    call = f"sdpa({_arguments(case)})"
    if case.gradients:
        names["wrt"] = [names[name].requires_grad_() for name in inputs if names[name].is_floating_point()]
        names |= {"grad": torch.autograd.grad, "grad_out": tensor(case.grad_out())}
        if case.gradients == BACKWARD:
            names["out"], call = eval(call, names), "out"
        keep = ", retain_graph=True" * (call == "out")
        return [Spelling(f"grad({call}, wrt, grad_out{keep})", names, lambda found: to_array(*found))]
    spellings = [Spelling(call, names, to_array)]
    if case.kv_heads != case.heads:
        names["rows"] = names["q"].view(case.batch, case.kv_heads, -1, case.width)
        spellings.append(Spelling("sdpa(rows, k, v)", names, to_array))
    if case.layout == "LD":
        names |= {f"{name}4": names[name][None, None] for name in inputs}
        spellings.append(Spelling("sdpa(q4, k4, v4)", names, to_array))
    return spellings


def _onnxruntime(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    onnxruntime: Any = import_module("onnxruntime")
    onnx: Any = import_module("onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads

    def to_heads(results: list[Array]) -> Array:
        out = results[0]
        return out if out.ndim == 4 else out.reshape(case.batch, -1, case.heads, case.width).swapaxes(1, 2)

    def session(operation: str, feeds: Inputs, names: list[str], **attributes: Any) -> Spelling:
        helper, types = onnx.helper, {"float32": onnx.TensorProto.FLOAT, "bool": onnx.TensorProto.BOOL}
        graph = helper.make_graph(
            [helper.make_node(operation, names, ["out"], **attributes)],
            "attention",
            [helper.make_tensor_value_info(name, types[a.dtype.name], a.shape) for name, a in feeds.items()],
            [helper.make_tensor_value_info("out", types["float32"], feeds["q"].shape)],
        )
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=11).SerializeToString()
        run = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run
        return Spelling(f"run(None, feeds)  # {operation}", {"run": run, "feeds": feeds}, to_heads)

    spellings = [session("Attention", inputs, list(inputs), is_causal=int(case.causal))]
    if case.kv_heads == case.heads and case.mask != "bool":
        flat = np.ascontiguousarray(inputs["q"].swapaxes(1, 2)).reshape(case.batch, case.length, -1)
        names = ["q", "k", "v", *(["", "", "mask"] if case.mask else [])]
        attributes = {"domain": "com.microsoft", "num_heads": case.heads, "unidirectional": int(case.causal)}
        spellings.append(session("MultiHeadAttention", {**inputs, "q": flat}, names, **attributes))
    return spellings


def _openvino(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    openvino: Any = import_module("openvino")
    opset13: Any = import_module("openvino.opset13")
    precision = {"float32": "f32", "bfloat16": "bf16"}[case.dtype]
    feeds = list(inputs.values())
    if case.kv_heads != case.heads:
        feeds[0] = feeds[0].reshape(case.batch, case.kv_heads, -1, case.width)
    if precision == "bf16":  # float32 arrays and a hint
        feeds = [array.astype(np.float32) for array in feeds]
    parameters = [opset13.parameter(list(a.shape), a.dtype) for a in feeds]
    node = opset13.scaled_dot_product_attention(*parameters, causal=case.causal)
    hints = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
    model = openvino.Model([node], parameters, "attention")
    request = openvino.Core().compile_model(model, "CPU", hints).create_infer_request()
    for i, array in enumerate(feeds):
        request.set_input_tensor(i, openvino.Tensor(np.ascontiguousarray(array), shared_memory=True))
    out = request.get_output_tensor(0)
    return [Spelling("infer()", {"infer": request.infer, "feeds": feeds}, lambda _: np.array(out.data))]


def _jax(case: Case, inputs: Inputs, threads: int) -> list[Spelling]:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    jax: Any = import_module("jax")
    arrays = {n: a if n == "mask" else np.ascontiguousarray(a.swapaxes(1, 2)) for n, a in inputs.items()}
    names: dict[str, Any] = {name: jax.device_put(array) for name, array in arrays.items()}
    keyword = {"": "", "bool": ", mask=mask"}.get(case.mask, ", bias=mask")
    names["attention"] = jax.jit(partial(jax.nn.dot_product_attention, is_causal=case.causal))
    statement = f"attention(q, k, v{keyword}).block_until_ready()"
    return [Spelling(statement, names, lambda out: np.asarray(out).swapaxes(1, 2))]


class Engine(NamedTuple):
    """A library: its name in tables, the packages it needs (the first has the version), and its spellings."""

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
PEERS = {name: engine.packages for name, engine in ENGINES.items() if name != "selfattn"}


def open_engine(engine: str, threads: int) -> Prepare:
    """Import a library in a worker, by name: "torch", or "selfattn avx2" for one instruction set."""
    name, _, isa = engine.partition(" ")
    _core._set_isa(isa or _core.get_isa())
    return lambda case: ENGINES[name].spell(case, case.inputs(), threads)


@dataclass(frozen=True)
class Choice:
    """The options of the command line; None where a suite chooses."""

    peers: Sequence[str]
    lengths: Sequence[int] | None = None
    widths: Sequence[int] | None = None
    other_isas: Sequence[str] = ()
    quick: bool = False
    full: bool = False

    def sizes(self, lengths: Sequence[int]) -> Sequence[int]:
        """Return the lengths of the command line, else the suite's lengths; with --quick only the first."""
        return self.lengths or (lengths[:1] if self.quick else lengths)

    def cases(self, lengths: Sequence[int], widths: Sequence[int], **options: Any) -> list[Case]:
        """Pair the lengths and widths of the command line, else of the suite; with --quick only a few."""
        if self.quick:
            lengths, widths = [n for n in lengths if n in (128, 1024)], (64,)
        return [Case(*n, **options) for n in product(self.lengths or lengths, self.widths or widths)]


def _16bit(choice: Choice) -> Iterator[Case]:
    for dtype in ("bfloat16", "float16") if find_spec("ml_dtypes") else ("float16",):
        yield from choice.cases((512, 1024, 4096), (64, 128), dtype=dtype)
        yield from choice.cases((1024,), (64, 128), dtype=dtype, causal=True)
        yield from choice.cases((1024,), (64, 128), dtype=dtype, gradients=BACKWARD)
        yield from _decode(choice, (4096, 32768), dtype)


def _decode(choice: Choice, sizes: Sequence[int], dtype: str = "float32") -> Iterator[Case]:
    for keys in choice.sizes(sizes):
        yield Case(1, 128, keys=keys, heads=32, kv_heads=8, dtype=dtype)


def _small(choice: Choice) -> Iterator[Case]:
    sizes = [(3, 4)] + [(n, n) for n in choice.sizes((1, 2, 4, 8, 16, 32, 64, 128))]
    for dtype, size in product(("float32", "float64"), sizes):
        yield Case(*size, heads=1, dtype=dtype, layout="LD")


def _backward(choice: Choice) -> Iterator[Case]:
    lengths, widths = (LENGTHS, WIDTHS) if choice.full else ((128, 512, 1024, 4096), (64,))
    for kind in (BACKWARD, BOTH):
        plain = choice.cases(lengths, widths, gradients=kind)
        yield from plain
        yield from (replace(case, causal=True) for case in plain)
        yield from (replace(case, mask="float") for case in plain if case.length <= 1024)
        yield from (replace(case, heads=1, kv_heads=1) for case in plain if case.length == max(lengths))


SUITES: dict[str, Callable[[Choice], Iterable[Case]]] = {
    "forward": lambda choice: choice.cases(LENGTHS, WIDTHS),
    "causal": lambda choice: choice.cases(LENGTHS, WIDTHS, causal=True),
    "mask": lambda choice: [case for mask in MASKS for case in choice.cases(*FEW, mask=mask)],
    "float64": lambda choice: choice.cases(*FEW, dtype="float64"),
    "16bit": _16bit,
    "decode": lambda choice: _decode(choice, (4096, 8192, 16384, 32768)),
    "small": _small,
    "strided": lambda choice: choice.cases((128, 512, 1024, 4096), (64, 128), layout="BLHD"),
    "isa": lambda choice: choice.cases(*FEW),
    "backward": _backward,
}


def _row(suite: str, case: Case, peers: Sequence[str], engine: str) -> Row:
    """Return a row with the contestants of a case; peers that cannot compute it are left out."""
    able = peers
    if case.gradients:
        able = ("torch",)
    elif case.dtype in ("bfloat16", "float16"):
        able = ("torch", "openvino")
    elif case.layout != "BHLD" or case.dtype == "float64":  # JAX's softmax of float64 is in float32
        able = ("numpy", "torch")
    contestants = [Contestant("selfattn", engine, case)]
    if case.layout == "BLHD":
        contestants.append(Contestant("contiguous", "selfattn", replace(case, layout="BHLD")))
    contestants += [Contestant(peer, peer, case) for peer in peers if peer in able]
    label = f"{engine.removeprefix('selfattn')} {case.label}".strip()
    return Row(suite, label, tuple(contestants), case.limit, AGREEMENT[case.dtype])


def _rows(suite: str, choice: Choice) -> list[Row]:
    engines = [f"selfattn {isa}" for isa in choice.other_isas] if suite == "isa" else ["selfattn"]
    return [_row(suite, case, choice.peers, engine) for engine in engines for case in SUITES[suite](choice)]


def _summary(choice: Choice) -> Iterator[Row]:
    """Return one or two rows of each suite: the table of docs/guide/benchmarks.md."""
    shapes = [(128, 64), (512, 64), (1024, 32), (1024, 64), (1024, 128), (4096, 64)]
    if choice.quick or choice.lengths or choice.widths:
        shapes = [(case.length, case.width) for case in choice.cases((128, 1024), (64,))]
    for length, width in shapes:
        yield from _rows("forward", replace(choice, lengths=[length], widths=[width]))
    one = replace(choice, lengths=choice.lengths or [1024], widths=choice.widths or [64])
    for suite in ("causal", "mask", "float64", "strided"):
        yield from _rows(suite, one)
    yield from _rows("decode", replace(choice, lengths=choice.sizes((4096, 32768))))
    backward = _rows("backward", one)
    yield from backward[: len(backward) // 2]  # the pullback alone
    yield from _rows("small", choice)[:1]


def rows_of(suites: Sequence[str], choice: Choice) -> list[Row]:
    """Return the rows of the named suites; "all" is every suite except the summary, which repeats some rows."""
    names = [name for suite in suites for name in (SUITES if suite == "all" else [suite])]
    rows = [_summary(choice) if name == "summary" else _rows(name, choice) for name in dict.fromkeys(names)]
    return [row for found in rows for row in found]
