"""What compare_builds.py computes: cases drawn with a seed, and calls that are timed.

A case holds its arguments as plain arrays, the same for both builds, and says how to compute them with a package
`sa` of that build. Options are drawn independently of each other, so that all pairs of them meet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Options = dict[str, Any]

DTYPES = ["float32"] * 4 + ["float64"] * 2 + ["float16", "bfloat16"]
ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 130)
KEYS = (1, 2, 3, 4, 5, 63, 64, 65, 128, 200, 1030)
WIDTHS = (1, 3, 16, 20, 32, 33, 64, 80, 128)
HEADS = ((1, 1), (2, 2), (3, 3), (4, 1), (6, 2), (8, 2))  # of queries, of keys


def as_dtype(name: str) -> np.dtype[Any]:
    """Give NumPy's dtype, or that of ml_dtypes."""
    return np.dtype(import_module("ml_dtypes").bfloat16 if name == "bfloat16" else name)


@dataclass
class Case:
    """One drawn case."""

    dtype: str
    title: str
    compute: Callable[[Any], dict[str, Any]]  # package -> named results

    def __str__(self) -> str:
        return f"{self.dtype} {self.title}"


class Draw:
    """The choices of one case."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = np.random.default_rng([seed, number])
        self.name = self.one_of(DTYPES)
        self.dtype = as_dtype(self.name)
        self.words: list[str] = []  # of the title

    def one_of(self, choices: Any) -> Any:
        """Choose one, each as likely."""
        return choices[int(self.rng.integers(len(choices)))]

    def chance(self, p: float, word: str = "") -> bool:
        """Say yes with probability p; the title then has the word."""
        yes = bool(self.rng.random() < p)
        if yes and word:
            self.words.append(word)
        return yes

    def normal(self, *shape: int, dtype: Any = None) -> Array:
        """Draw numbers."""
        x = self.rng.standard_normal(shape)
        return x.astype(self.dtype if dtype is None else dtype)

    @property
    def wide(self) -> np.dtype[Any]:
        """What is computed in."""
        return np.dtype(np.float64 if self.name == "float64" else np.float32)


def draw(seed: int, number: int) -> Case:
    """Make the case of that number."""
    d = Draw(seed, number)
    kinds = [attention] * 10 + [decode] * 2 + [cached, varlen, varlen, rows, rows, model, merge, encoder]
    compute = d.one_of(kinds)(d)
    return Case(d.name, " ".join(d.words), compute)


# -------------------------------------------------------------------------------------------- attention


def laid_out(d: Draw, x: Array) -> Array:
    """Put the same numbers in another order in memory."""
    layout = d.one_of(["plain"] * 6 + ["heads last", "columns first", "gaps", "backwards", "swapped bytes"])
    if layout == "plain" or (layout == "swapped bytes" and d.name == "bfloat16"):
        return x
    d.words.append(f"({layout})")
    if layout == "heads last":
        return np.ascontiguousarray(x.swapaxes(-3, -2)).swapaxes(-3, -2)
    if layout == "columns first":
        return np.ascontiguousarray(x.swapaxes(-2, -1)).swapaxes(-2, -1)
    if layout == "gaps":
        gaps = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)
        gaps[..., ::2] = x
        return gaps[..., ::2]
    if layout == "backwards":
        return np.ascontiguousarray(x[..., ::-1, :])[..., ::-1, :]
    return x.astype(x.dtype.newbyteorder())


def positions(d: Draw, options: Options) -> None:
    """Draw what depends on where a query and a key stand."""
    if d.chance(0.3):
        options["causal"] = d.one_of(["upper_left", "lower_right"])
        d.words.append(options["causal"])
    if d.chance(0.2, "window"):
        options["window"] = (d.one_of([None, 0, 5, 70]), d.one_of([None, 0, 3, 64]))
    if d.chance(0.15, "softcap"):
        options["softcap"] = 2.0
    if d.chance(0.1, "scale"):
        options["scale"] = d.one_of([0.0, -0.5, 3.0])


def mask_of(d: Draw, lead: tuple[int, int], n: int, s: int) -> Array | None:
    """Draw a mask or none."""
    kind = d.one_of([None] * 5 + ["bool", "float", "float with -inf"])
    if kind is None:
        return None
    shape = d.one_of([(n, s), (n, s), (*lead, n, s), (lead[0], 1, n, s), (1, s), (n, 1), (lead[1], 1, s)])
    d.words.append(f"{kind} mask {shape}")
    if kind == "bool":
        return np.asarray(d.rng.random(shape) < 0.7)
    mask = d.normal(*shape)
    if kind == "float with -inf":
        mask[d.rng.random(shape) < 0.3] = -np.inf
    return mask


def poisoned(d: Draw, arrays: list[Array]) -> None:
    """Put NaN or inf into a row of one of the arrays."""
    if d.chance(0.06, "poison"):
        x = d.one_of(arrays)
        if x.size:
            x[..., int(d.rng.integers(x.shape[-2])), :] = d.one_of([np.nan, np.inf, -np.inf, 1e30])


def attention(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw forward, backward, log-sum-exp and weights, with any options."""
    n, s, width = d.one_of(ROWS), d.one_of(KEYS), d.one_of(WIDTHS)
    if d.chance(0.25):
        s = n
    value_width = d.one_of(WIDTHS) if d.chance(0.2) else width
    batch, (heads, key_heads) = d.one_of((1, 1, 2)), d.one_of(HEADS)
    return attention_of(d, (batch, heads, key_heads), n, s, width, value_width)


def decode(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw a few queries over many keys, with grouped heads."""
    n, s, width = d.one_of(range(1, 9)), d.one_of((200, 1030, 2500, 5000)), d.one_of((33, 64, 128))
    return attention_of(
        d, d.one_of([(1, 8, 2), (1, 8, 1), (1, 4, 4), (2, 6, 2), (1, 1, 1)]), n, s, width, width
    )


def attention_of(
    d: Draw, lead: tuple[int, int, int], n: int, s: int, width: int, value_width: int
) -> Callable[[Any], dict[str, Any]]:
    """Draw the arrays and options of a call of that shape."""
    batch, heads, key_heads = lead
    d.words.append(f"attention {lead} {n}x{s}x{width}" + (f"/{value_width}" if value_width != width else ""))
    q, k, v = (
        d.normal(batch, heads, n, width),
        d.normal(batch, key_heads, s, width),
        d.normal(batch, key_heads, s, value_width),
    )
    options: Options = {"num_threads": d.one_of([1, 1, 2]), "enable_gqa": heads != key_heads}
    positions(d, options)
    options["attn_mask"] = mask = mask_of(d, (batch, heads), n, s)
    if d.chance(0.15, "key_lengths"):
        options["key_lengths"] = lengths = d.rng.integers(0, s + 1, (batch, 1))
        if d.chance(0.3, "NaN behind"):
            for b, length in enumerate(lengths[:, 0]):
                k[b, :, length:], v[b, :, length:] = np.nan, np.inf
    if (
        mask is not None
        and mask.dtype == np.bool_
        and mask.shape == (n, s)
        and d.chance(0.3, "NaN in a closed key")
    ):
        mask[:, s // 2] = False
        k[..., s // 2, :], v[..., s // 2, :] = np.nan, np.inf
    poisoned(d, [q, k, v])
    if d.chance(0.12, "alibi"):
        options["alibi_slopes"] = np.abs(d.normal(heads)).astype(d.wide)
    if d.chance(0.12, "sinks"):
        options["sinks"] = d.normal(heads).astype(d.wide)
    if d.chance(0.15, "dropout"):
        options.update(dropout_p=d.one_of([0.1, 0.5]), rng=7)
    blocks = d.one_of([None] * 7 + ["documents", "prefix", "blocks"])
    if blocks is not None:
        d.words.append(blocks)
    ids = [np.sort(d.rng.integers(0, 3, size)) for size in (n, s)]
    pattern = d.rng.random((-(-n // 16), -(-s // 32))) < 0.6
    q, k, v = (laid_out(d, x) for x in (q, k, v))
    lse, weights = d.chance(0.3, "lse"), d.chance(0.15, "weights")
    grad_out, grad_lse = (
        laid_out(d, d.normal(batch, heads, n, value_width)),
        d.normal(batch, heads, n, dtype=d.wide),
    )
    wrt = ["query", "key", "value"]
    if mask is not None and mask.dtype != np.bool_ and d.chance(0.5, "d mask"):
        wrt.append("attn_mask")
    wrt += [name for name in ("alibi_slopes", "sinks") if name in options and d.chance(0.7, f"d {name}")]
    if d.chance(0.2):
        wrt = [d.one_of(wrt)]
        d.words.append(f"d {wrt[0]} alone")

    def compute(sa: Any) -> dict[str, Any]:
        given = dict(options)
        if blocks == "documents":
            given["block_mask"] = sa.BlockMask.from_documents(*ids)
        elif blocks == "prefix":
            given["block_mask"] = sa.BlockMask.prefix_lm(max(1, s // 3))
        elif blocks == "blocks":
            given["block_mask"] = sa.BlockMask.from_blocks(pattern, (16, 32))
        found = {}
        out = sa.scaled_dot_product_attention(q, k, v, **given, return_lse=lse, return_weights=weights)
        for place, x in enumerate(out if lse or weights else [out]):
            found[f"result {place}"] = x
        result, pullback = sa.scaled_dot_product_attention_vjp(q, k, v, **given, return_lse=lse, wrt=wrt)
        found["vjp's out"] = result[0] if lse else result
        found |= pullback(grad_out, *([grad_lse] if lse else []))._asdict()
        return found

    return compute


def cached(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw a cache that grows by a prompt and by tokens."""
    batch, (heads, key_heads), width = d.one_of((1, 2)), d.one_of(HEADS), d.one_of((16, 33, 64))
    prompt, tokens = d.one_of((3, 64, 300)), d.one_of((1, 2, 5))
    d.words.append(f"cache {(batch, heads, key_heads)} {prompt}+{tokens} x{width}")
    parts = [
        [d.normal(batch, h, n, width) for h in (heads, key_heads, key_heads)] for n in (prompt, tokens, 1)
    ]
    lengths = np.maximum(1, d.rng.integers(0, prompt + 1, batch))
    options: Options = {}
    positions(d, options)
    options.pop("causal", None)

    def compute(sa: Any) -> dict[str, Any]:
        cache = sa.KVCache(batch, key_heads, width, dtype=d.dtype)
        found = {"prompt": cache.attend(*parts[0], lengths=lengths)}
        for place in (1, 2):
            found[f"token {place}"] = cache.attend(*parts[place], **options)
        for b, length in enumerate(lengths):  # padding is undefined
            found["prompt"][b, :, length:] = 0
        return found

    return compute


def varlen(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw packed sequences, forward and backward."""
    (heads, key_heads), width, count = d.one_of(HEADS), d.one_of(WIDTHS), d.one_of((1, 2, 5))
    lengths = [[d.one_of((0, 1, 5, 33, 65, 130)) for _ in range(count)] for _ in range(2)]
    if d.chance(0.6):
        lengths[1] = lengths[0]
    offsets = [np.cumsum([0, *x]) for x in lengths]
    rows, keys = (int(x[-1]) for x in offsets)
    d.words.append(f"varlen {lengths} heads {heads}/{key_heads} x{width}")
    q, k, v = d.normal(rows, heads, width), d.normal(keys, key_heads, width), d.normal(keys, key_heads, width)
    options: Options = {"num_threads": d.one_of([1, 2]), "enable_gqa": heads != key_heads}
    positions(d, options)
    wrt = ["query", "key", "value"]
    if d.chance(0.2, "masks"):
        options["attn_mask"] = [d.normal(*pair) for pair in zip(*lengths, strict=True)]
        wrt += ["attn_mask"] if d.chance(0.5, "d masks") else []
    if d.chance(0.15, "alibi"):
        options["alibi_slopes"] = np.abs(d.normal(heads)).astype(d.wide)
        wrt.append("alibi_slopes")
    if d.chance(0.15, "sinks"):
        options["sinks"] = d.normal(heads).astype(d.wide)
        wrt.append("sinks")
    if d.chance(0.15, "dropout"):
        options.update(dropout_p=0.3, rng=7)
    grad_out, grad_lse = d.normal(rows, heads, width), d.normal(heads, rows, dtype=d.wide)

    def compute(sa: Any) -> dict[str, Any]:
        out, lse = sa.varlen_attention(q, k, v, *offsets, **options, return_lse=True)
        _, pullback = sa.varlen_attention_vjp(q, k, v, *offsets, **options, return_lse=True, wrt=wrt)
        found: dict[str, Any] = {"out": out, "lse": lse, **pullback(grad_out, grad_lse)._asdict()}
        for place, x in enumerate(found.pop("attn_mask", None) or []):
            found[f"d mask {place}"] = x
        return found

    return compute


# --------------------------------------------------------------------------------------- everything else


def named(prefix: str, found: Any) -> dict[str, Any]:
    """Give names to an array, or to a named tuple of them."""
    if hasattr(found, "_asdict"):
        return {f"{prefix} {name}": x for name, x in found._asdict().items()}
    return {prefix: found}


def rows(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw a row operation and its gradient."""
    operation = d.one_of(["softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "apply_rotary_emb"])
    shape = (d.one_of((1, 2, 3)), d.one_of((1, 7, 33, 300)), d.one_of((2, 4, 16, 34, 64, 768)))
    d.words.append(f"{operation} {shape}")
    x = d.normal(*shape)
    poisoned(d, [x])
    x, dy = laid_out(d, x), laid_out(d, d.normal(*shape))
    arguments: list[Any] = []
    if operation in ("softmax", "log_softmax"):
        arguments = [d.one_of([-1, -1, 0, 1])]
    elif operation.endswith("norm"):
        arguments = [shape[-1], d.normal(shape[-1]) if d.chance(0.7, "weight") else None]
        if operation == "layer_norm":
            arguments.append(d.normal(shape[-1]) if d.chance(0.7, "bias") else None)
    elif operation == "gelu":
        arguments = [d.one_of(["none", "tanh"])]
    else:
        angles = d.rng.random((shape[1], shape[2] // 2))
        arguments = [*(f(angles).astype(d.dtype) for f in (np.cos, np.sin)), d.chance(0.5, "interleaved")]

    def compute(sa: Any) -> dict[str, Any]:
        y, pullback = getattr(sa, f"{operation}_vjp")(x, *arguments)
        return {"y": getattr(sa, operation)(x, *arguments), "vjp's y": y} | named("d", pullback(dy))

    return compute


def merge(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw attention over keys in two calls, merged, and additive attention."""
    n, s, width = d.one_of(ROWS[:12]), d.one_of(KEYS[:9]), d.one_of(WIDTHS[:6])
    d.words.append(f"merge, additive {n}x{s}x{width}")
    q, k, v = d.normal(2, n, width), d.normal(2, 2 * s, width), d.normal(2, 2 * s, width)
    weights = d.normal(width, 5), d.normal(width, 5), d.normal(5)

    def compute(sa: Any) -> dict[str, Any]:
        halves = [(k[:, part], v[:, part]) for part in (slice(0, s), slice(s, None))]
        outs, lses = zip(
            *(sa.scaled_dot_product_attention(q, *h, return_lse=True) for h in halves), strict=True
        )
        out, lse = sa.merge_attention(outs, lses)
        return {"out": out, "lse": lse, "additive": sa.additive_attention(q, k, v, *weights)}

    return compute


def model(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw the embedding model, its gradients, the proxy task and an optimiser's steps."""
    width, heads = d.one_of([(2, 1), (8, 2), (20, 1), (32, 4), (64, 1), (66, 3), (128, 2)])
    layers = d.one_of((0, 1, 2))
    d.words.append(f"model x{width}, {heads} heads, {layers} layers")
    batch = 3 * d.one_of((1, 2, 10))
    sentences = [d.rng.integers(0, 50, d.one_of((1, 2, 7, 16, 33, 70))).tolist() for _ in range(batch)]
    third = batch // 3
    dy = d.normal(batch, width)
    optimizer = d.one_of(["SGD", "Adam", "AdamW"])

    def compute(sa: Any) -> dict[str, Any]:
        m = sa.nn.EmbeddingModel(
            str.split, 50, width, max_seq_len=64, num_layers=layers, num_heads=heads, dtype=d.dtype, rng=3
        )
        y, pullback = m.vjp(sentences)
        found = {"y": y, "forward": m(sentences)} | {f"d {name}": g for name, g in pullback(dy).items()}
        task = sa.nn.ProxyTask(m)
        chosen = getattr(sa.optim, optimizer)(task.parameters(), lr=0.01)
        parts = [sentences[third * i : third * (i + 1)] for i in range(3)]
        for place in range(2):
            found[f"confidence {place}"], task_pullback = task.vjp(*parts)
            chosen.step(task_pullback(np.ones(third, d.wide)))
        return found | {f"trained {name}": p for name, p in m.state_dict().items()}

    return compute


def encoder(d: Draw) -> Callable[[Any], dict[str, Any]]:
    """Draw an encoder layer and its gradients."""
    width, heads = d.one_of([(8, 2), (32, 4), (64, 2)])
    n, norm_first = d.one_of((1, 5, 33)), d.chance(0.5, "norm first")
    d.words.append(f"encoder layer {n}x{width}, {heads} heads")
    x, dy = d.normal(2, n, width), d.normal(2, n, width)

    def compute(sa: Any) -> dict[str, Any]:
        layer = sa.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, norm_first=norm_first, dtype=d.dtype, rng=1
        )
        y, pullback = layer.vjp(x)
        gradients = pullback(dy)
        dx, more = gradients if isinstance(gradients, tuple) else (None, gradients)
        return {"y": y, "dx": dx} | {f"d {name}": g for name, g in more.items()}

    return compute


# ------------------------------------------------------------------------------------------------ speed

Timed = Callable[[Any, int], tuple[str, dict[str, Any]]]


def speed_cases() -> dict[str, Timed]:
    """List calls to time: the benchmark's quick suite, and what it lacks. Each gives a statement and its names."""
    return benchmark_cases() | own_cases()


def benchmark_cases() -> dict[str, Timed]:
    """Take the benchmark's own cases and spellings."""
    attention = import_module("selfattn.benchmarks.attention")
    names = [name for name in attention.SUITES if name != "isa"]
    listed = {
        row.label: row.contestants[0].case
        for row in attention.rows_of(names, attention.Choice(peers=(), quick=True))
    }

    def timed(case: Any) -> Timed:
        made: list[Any] = []  # shared by both builds

        def make(sa: Any, threads: int) -> tuple[str, dict[str, Any]]:
            made[:] = made or [case.inputs()]
            spelling = attention.ENGINES["selfattn"].spell(case, made[0], threads)[0]
            return spelling.statement, dict(spelling.names)

        return make

    return {label: timed(case) for label, case in listed.items()}


def own_cases() -> dict[str, Timed]:
    """Row operations, the model, and attention with options that the benchmark does not time."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 8, 512, 64), dtype=np.float32)
    packed = np.ascontiguousarray(q[0].swapaxes(0, 1))
    x = rng.standard_normal((512, 768), dtype=np.float32)
    one = rng.standard_normal((768,), dtype=np.float32)
    sentence = rng.integers(0, 50, 24).tolist()

    def options(**given: Any) -> Timed:
        return lambda sa, threads: (
            "f(q, q, q, **o)",
            {"f": sa.scaled_dot_product_attention, "q": q, "o": given | {"num_threads": threads}},
        )

    def call(name: str, *arguments: Any) -> Timed:
        return lambda sa, _: ("f(*a)", {"f": getattr(sa, name), "a": arguments})

    def model(method: str) -> Timed:
        def make(sa: Any, _: int) -> tuple[str, dict[str, Any]]:
            m = sa.nn.EmbeddingModel(str.split, 50, 64, max_seq_len=64, rng=0)
            if method == "vjp":
                return "m.vjp(s)[1](dy)", {"m": m, "s": sentence, "dy": np.ones(64, np.float32)}
            return "m(s)", {"m": m, "s": sentence}

        return make

    return {
        "dropout 512 x 64": options(dropout_p=0.1, rng=1),
        "softcap 512 x 64": options(softcap=20.0),
        "alibi 512 x 64": options(alibi_slopes=np.full(8, 0.1, np.float32)),
        "window 512 x 64": options(window=(64, 0)),
        "prefix 512 x 64": lambda sa, threads: options(block_mask=sa.BlockMask.prefix_lm(128))(sa, threads),
        "packed 512 x 64": call("varlen_attention", packed, packed, packed, [0, 100, 512], [0, 100, 512]),
        "key lengths 512 x 64": options(key_lengths=np.array([300])),
        "weights 512 x 64": options(return_weights=True),
        "softmax 512 x 768": call("softmax", x),
        "layer_norm 512 x 768": call("layer_norm", x, 768, one, one),
        "gelu 512 x 768": call("gelu", x),
        "softmax 1 x 4": call("softmax", x[0, :4]),
        "model 24 x 64": model("forward"),
        "model's gradients 24 x 64": model("vjp"),
    }
