"""Attention: forward, backward, decoding, masks, packed sequences of many lengths, long ones and their memory.

B = 1, H = 8 and float32 unless a case says otherwise; a case is L x D. Operations of masked halves, closed blocks and
padding do not count. Memory is that of a call beyond inputs and results. PyTorch gets a call for each packed sequence.
``SELFATTN_ISA=avx2 python -m benchmarks attention`` measures other kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from itertools import product

import numpy as np

import selfattn as sa
from benchmarks.peers import Peer, Row, Spelling, calling
from selfattn.cli.parser import count

BLOCKS = ("documents", "window")
# The pullback alone, or with the forward call.
BACKWARD, BOTH = "backward", "forward + backward"
# The largest difference of outputs, which are averages of numbers of size 1.
AGREEMENT = {"float32": 1e-4, "float64": 1e-10, "float16": 4e-3, "bfloat16": 3e-2}
DENSE = 8192  # the longest call that peers compute


@dataclass(frozen=True)
class Case:
    """One call: L queries of width D over S keys."""

    length: int
    width: int
    keys: int = 0  # 0: as many as queries
    heads: int = 8
    kv_heads: int = 0  # 0: as many as query heads
    dtype: str = "float32"
    causal: bool = False
    mask: str = ""  # "float", "boolean": (1, 1, L, S); "float per head": (1, H, L, S); one of BLOCKS
    gradients: str = ""  # "", BACKWARD or BOTH

    def __post_init__(self):
        object.__setattr__(self, "keys", self.keys or self.length)
        object.__setattr__(self, "kv_heads", self.kv_heads or self.heads)

    @property
    def label(self):
        """The name of the case in a table."""
        words = [self.dtype, self.gradients, "causal" * self.causal, self.mask]
        words += [f"{self.heads}/{self.kv_heads} heads", f"{self.keys} keys" * (self.keys != self.length)]
        usual = ("", "float32", "8/8 heads")
        return " ".join([*(word for word in words if word not in usual), f"{self.length} x {self.width}"])

    @property
    def limit(self):
        """What limits the call."""
        return "bytes" if self.keys != self.length else "float64" if self.dtype == "float64" else "float32"

    @property
    def part(self):
        """The tokens of a document, or a query's window before it."""
        return self.length // 8 if self.mask == "documents" else min(255, self.length - 1)

    @property
    def work(self):
        """The operations of open pairs, two products forward and five backward; or the bytes of keys and values."""
        if self.limit == "bytes":
            size = 2 if "16" in self.dtype else 4
            return 2.0 * self.kv_heads * self.keys * self.width * size
        opened = {"documents": self.part, "window": np.arange(1, self.length + 1).clip(0, self.part + 1)}
        keys = float(np.mean(opened.get(self.mask, self.keys * (0.5 if self.causal else 1.0))))
        products = {"": 4.0, BACKWARD: 10.0, BOTH: 14.0}[self.gradients]
        return products * self.heads * self.length * keys * self.width

    def draw(self, seed, *shape):
        """Draw numbers of the case's dtype, the same in every process."""
        drawn = np.random.default_rng(seed).standard_normal(
            shape, np.float64 if self.dtype == "float64" else np.float32
        )
        return drawn.astype(
            import_module("ml_dtypes").bfloat16 if self.dtype == "bfloat16" else self.dtype, copy=False
        )

    def inputs(self):
        """Make q, k and v, and the mask if it is an array of numbers."""
        shapes = {
            "q": (self.heads, self.length),
            "k": (self.kv_heads, self.keys),
            "v": (self.kv_heads, self.keys),
        }
        found = {name: self.draw(i, 1, *shape, self.width) for i, (name, shape) in enumerate(shapes.items())}
        if self.mask and self.mask not in BLOCKS:
            mask = self.draw(3, 1, self.heads if "head" in self.mask else 1, self.length, self.keys)
            mask[..., 0] = 0  # libraries differ on rows without keys
            found["mask"] = mask < 0.7 if self.mask == "boolean" else mask
        return found

    def dense(self):
        """Make q, k, v and any mask, as an array."""
        i, j = np.ogrid[: self.length, : self.keys]
        n, found = self.part, self.inputs()
        if self.mask in BLOCKS:
            mask = i // n == j // n if self.mask == "documents" else (j <= i) & (j >= i - n)
            found["mask"] = mask[None, None]
        return found

    def grad_out(self):
        """Make the gradient with respect to the output, contiguous."""
        return self.draw(4, 1, self.heads, self.length, self.width)


def joined(arrays):
    """Concatenate arrays, such as gradients; skip None."""
    return np.concatenate([np.asarray(array).reshape(-1) for array in arrays if array is not None])


def _arguments(case, option):
    grouped = "enable_gqa=True" * (case.kv_heads != case.heads)
    return ", ".join(filter(None, ["q, k, v", option, "is_causal=True" * case.causal, grouped]))


def selfattn(case, threads):
    """Prepare selfattn's call."""
    sa.set_num_threads(threads)
    names = {**case.inputs(), "sdpa": sa.scaled_dot_product_attention}
    option = {"": "", "documents": "block_mask=mask", "window": f"window=({case.part}, 0)"}.get(
        case.mask, "attn_mask=mask"
    )
    if case.mask == "documents":
        names["mask"] = sa.BlockMask.from_documents(np.arange(case.length) // case.part)
    if not case.gradients:
        return [Spelling(f"sdpa({_arguments(case, option)})", names)]
    names["wrt"] = ["query", "key", "value", *["attn_mask"] * case.mask.startswith("float")]
    names |= {"vjp": sa.scaled_dot_product_attention_vjp, "grad_out": case.grad_out()}
    call = f"vjp({_arguments(case, option)}, wrt=wrt)[1]"
    if case.gradients == BACKWARD:
        names["pullback"], call = eval(call, {**names}), "pullback"
    return [Spelling(f"{call}(grad_out)", names, joined)]


def numpy_attention(q, k, v, mask=None):
    """Compute attention in five lines."""
    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores + mask
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ v


def numpy(case, threads):
    """Prepare five lines of NumPy."""
    names = {**case.dense(), "attention": numpy_attention}
    if case.kv_heads != case.heads:  # the queries of several heads share the keys of one head
        names["q"] = names["q"].reshape(1, case.kv_heads, -1, case.width)
    mask = np.tri(case.length, case.keys, dtype=np.bool_) if case.causal else names.get("mask")
    if mask is None:
        return [Spelling("attention(q, k, v)", names)]
    names["mask"] = np.where(mask, 0, -np.inf).astype(case.dtype) if mask.dtype == np.bool_ else mask
    return [Spelling("attention(q, k, v, mask)", names)]


def torch(case, threads):
    """Prepare PyTorch's function."""
    library = import_module("torch")
    library.set_num_threads(threads)

    def tensor(array):
        if case.dtype == "bfloat16" and array.dtype != np.bool_:  # from_numpy does not accept bfloat16
            return library.from_numpy(array.view(np.int16)).view(library.bfloat16)
        return library.from_numpy(array)

    names = {name: tensor(array) for name, array in case.dense().items()}
    wrt = [each for each in names.values() if each.is_floating_point()]
    call = f"sdpa({_arguments(case, 'attn_mask=mask' * bool(case.mask))})"
    spellings = [call]
    if case.kv_heads != case.heads:
        names["rows"] = names["q"].view(1, case.kv_heads, -1, case.width)
        spellings.append("sdpa(rows, k, v)")
    names |= {"sdpa": library.nn.functional.scaled_dot_product_attention, "grad": library.autograd.grad}
    if not case.gradients:
        return [Spelling(each, names, lambda out: out.double().numpy()) for each in spellings]
    names |= {"wrt": [each.requires_grad_() for each in wrt], "grad_out": tensor(case.grad_out())}
    if case.gradients == BACKWARD:
        names["out"], call = eval(call, {**names}), "out"
    call = f"grad({call}, wrt, grad_out{', retain_graph=True' * (call == 'out')})"
    return [Spelling(call, names, lambda found: joined(each.double() for each in found))]


def onnxruntime(case, threads):
    """Prepare ONNX's operation and ONNX Runtime's own, which takes queries of (B, L, H * D)."""
    library = import_module("onnxruntime")
    inputs, options = case.dense(), library.SessionOptions()
    options.intra_op_num_threads = threads

    def session(operation, feeds):
        kinds = {"float32": "float", "bool": "bool"}
        given = ", ".join(f"{kinds[a.dtype.name]}{list(a.shape)} {name}" for name, a in feeds.items())
        graph = f"attention ({given}) => (float{list(feeds['q'].shape)} out) {{ out = {operation} }}"
        text = f'<ir_version: 11, opset_import: ["": 23, "com.microsoft": 1]> {graph}'
        model = import_module("onnx.parser").parse_model(text).SerializeToString()
        return library.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def to_heads(found):
        return found[0].reshape(1, case.length, case.heads, case.width).swapaxes(1, 2)

    own = session(f"Attention <is_causal = {int(case.causal)}> ({', '.join(inputs)})", inputs)
    spellings = calling(partial(own.run, None, inputs), lambda found: found[0])
    if case.kv_heads == case.heads and inputs.get("mask", inputs["q"]).dtype != np.bool_:
        flat = np.ascontiguousarray(inputs["q"].swapaxes(1, 2)).reshape(1, case.length, -1)
        options_of = f"num_heads = {case.heads}, unidirectional = {int(case.causal)}"
        names = ["q", "k", "v", *["", "", "mask"] * bool(case.mask)]
        feeds = {**inputs, "q": flat}
        own = session(f"com.microsoft.MultiHeadAttention <{options_of}> ({', '.join(names)})", feeds)
        spellings += calling(partial(own.run, None, feeds), to_heads)
    return spellings


def openvino(case, threads):
    """Prepare OpenVINO; bfloat16 is float32 arrays and a hint to compute in it."""
    library = import_module("openvino")
    operations = import_module("openvino.opset13")
    feeds = [a if a.dtype == np.bool_ else a.astype(np.float32) for a in case.dense().values()]
    feeds[0] = feeds[0].reshape(1, case.kv_heads, -1, case.width)
    parameters = [operations.parameter(list(a.shape), a.dtype) for a in feeds]
    node = operations.scaled_dot_product_attention(*parameters, causal=case.causal)
    hints = {"INFERENCE_PRECISION_HINT": "bf16" if case.dtype == "bfloat16" else "f32"}
    hints["INFERENCE_NUM_THREADS"] = str(threads)
    model = library.Core().compile_model(library.Model([node], parameters, "attention"), "CPU", hints)
    request = model.create_infer_request()
    for i, array in enumerate(feeds):
        request.set_input_tensor(i, library.Tensor(np.ascontiguousarray(array), shared_memory=True))
    out = request.get_output_tensor(0)
    return [Spelling("infer()", {"infer": request.infer, "feeds": feeds}, lambda _: np.array(out.data))]


LIBRARIES = {each.__name__: each for each in (numpy, torch, onnxruntime, openvino)}
PEERS = [*LIBRARIES]


def row_of(suite, case, peers):
    """Return the row of a case, with the peers that can compute it."""
    able = {"float64": ["numpy", "torch"], "bfloat16": ["torch", "openvino"], "float16": ["torch"]}
    able = ["torch"] if case.gradients else able.get(case.dtype, PEERS)
    found = {"selfattn": Peer(selfattn, case)}
    found |= {name: Peer(LIBRARIES[name], case) for name in peers if name in able and case.length <= DENSE}
    how = {"tolerance": AGREEMENT[case.dtype], "fresh": suite == "long"}
    return Row(case.label, found, case.limit, case.work, **how)


# ------------------------------------------------------------------------------------------------ many lengths


@dataclass(frozen=True)
class Ragged(Case):
    """64 packed sequences, whose lengths are log-uniform in 16 to L."""

    @property
    def lengths(self):
        """The lengths."""
        drawn = np.random.default_rng(0).uniform(np.log(min(16, self.length)), np.log(self.length), 64)
        return np.rint(np.exp(drawn)).astype(int)

    @property
    def work(self):
        """The operations, without those of padding."""
        return float(Case.work.fget(self) * np.sum((self.lengths / self.length) ** 2))  # type: ignore[attr-defined]

    def packed(self):
        """Make query, key, value and the output's gradient, each (total, H, D)."""
        return [self.draw(seed, int(self.lengths.sum()), self.heads, self.width) for seed in range(4)]


def selfattn_ragged(case, threads):
    """Prepare selfattn's function of packed sequences."""
    sa.set_num_threads(threads)
    *qkv, grad_out = case.packed()
    ends = np.cumsum([0, *case.lengths])
    given = (*qkv, ends, ends)
    if case.gradients:
        return calling(partial(sa.varlen_attention_vjp(*given, is_causal=case.causal)[1], grad_out), joined)
    return calling(partial(sa.varlen_attention, *given, is_causal=case.causal))


def torch_ragged(case, threads):
    """Prepare PyTorch's call for each sequence."""
    library = import_module("torch")
    library.set_num_threads(threads)
    sdpa, calls = library.nn.functional.scaled_dot_product_attention, []
    for parts in zip(
        *(np.split(x.swapaxes(0, 1), np.cumsum(case.lengths)[:-1], axis=1) for x in case.packed()),
        strict=True,
    ):
        *qkv, grad_out = (library.from_numpy(np.ascontiguousarray(part[None])) for part in parts)
        wrt = [x.requires_grad_(bool(case.gradients)) for x in qkv]
        call = partial(sdpa, *wrt, is_causal=case.causal)
        if case.gradients:
            call = partial(library.autograd.grad, call(), wrt, grad_out, retain_graph=True)
        calls.append(call)

    def to_array(found):
        results = zip(*found, strict=True) if case.gradients else [found]
        return joined(np.asarray(part)[0].swapaxes(0, 1) for result in results for part in result)

    return calling(lambda: [call() for call in calls], to_array)


def ragged_row(case, peers):
    """Return the row of packed sequences."""
    found = {"selfattn": Peer(selfattn_ragged, case)}
    found |= {"torch": Peer(torch_ragged, case)} if "torch" in peers else {}
    return Row(f"64 sequences {case.label}", found, case.limit, case.work)


# ------------------------------------------------------------------------------------------------- the program

LONG = ({}, {"causal": True}, {"mask": "window"})
GRADIENTS = ({}, {"causal": True}, {"mask": "float"})
SOME = ({}, {"causal": True}, {"gradients": BACKWARD})
# The options of each suite's cases.
SUITES = {
    "forward": ({},),
    "causal": ({"causal": True},),
    "masks": [{"mask": mask} for mask in ("float", "float per head", "boolean", *BLOCKS)],
    "float64": ({"dtype": "float64"},),
    "16bit": [{"dtype": dtype, **more} for dtype in ("bfloat16", "float16") for more in SOME],
    "backward": [{"gradients": half, **more} for half in (BACKWARD, BOTH) for more in GRADIENTS],
    "decoding": [{"dtype": dtype} for dtype in ("float32", "bfloat16")],
    "ragged": [{"gradients": half, "causal": causal} for half in ("", BACKWARD) for causal in (False, True)],
    "long": [{"gradients": half, "heads": 4, **more} for half in ("", BOTH) for more in LONG],
}
SHAPES = {
    "decoding": ((4096, 32768), (128,)),
    "ragged": ((2048,), (64,)),
    "long": (tuple(2**n for n in range(12, 18)), (64,)),
}


def _decoding(keys, width, dtype):
    return Case(1, width, keys=keys, heads=32, kv_heads=8, dtype=dtype)


def cases_of(suite, lengths, dims):
    """Return a suite's cases, with other lengths and dims than its own if they are given."""
    own = SHAPES.get(suite, ((128, 1024), (64,)))
    make = {"decoding": _decoding, "ragged": Ragged}.get(suite, Case)
    return [
        make(*shape, **more) for more in SUITES[suite] for shape in product(lengths or own[0], dims or own[1])
    ]


def add_options(parser):
    """Add the options of this program."""
    add = parser.add_argument
    add(
        "--lengths",
        type=count,
        nargs="+",
        metavar="N",
        help="lengths (of keys for decoding), not the suite's",
    )
    add("--head-dims", type=count, nargs="+", metavar="N", help="widths of a head, not the suite's")


def rows(options):
    """Return the rows of the suites."""
    cases = [
        (suite, case)
        for suite in options.suite
        for case in cases_of(suite, options.lengths, options.head_dims)
    ]
    return [
        ragged_row(case, options.peers) if isinstance(case, Ragged) else row_of(suite, case, options.peers)
        for suite, case in cases
    ]
