"""The catalogue of operations: what is tried for leaks, in many threads, with memory that fails, and with two builds.

An operation draws its inputs with a `Draw` and returns a call and its inputs: the same ones for the same seed.
`OPERATIONS` names small operations; `drawn` makes new ones without end, whose options are drawn independently of each
other, so that all pairs of them meet. Only public names are used here, so that `tools/compare_builds.py` computes the
same with an older package; `core_operations.py` adds what calls the core itself, and `model_operations.py`, among the
tests of models, pretrained models.
"""

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from inputs import BFLOAT16, BLOCK_MASKS, LAYOUTS, OTHERS, options_together, random_mask

import selfattn as sa
from selfattn import nn, optim, training

DTYPES = ["float32"] * 4 + ["float64"] * 2 + ["float16", "bfloat16"]
ROWS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 100, 130)
KEYS = (1, 2, 3, 4, 5, 63, 64, 65, 128, 200, 1030)
WIDTHS = (1, 3, 16, 20, 32, 33, 64, 80, 128)
HEADS = ((1, 1), (2, 2), (3, 3), (4, 1), (6, 2), (8, 2))  # heads of queries and of keys
PER_HEAD = ("alibi_slopes", "sinks")
SMALL = 65  # the longest sequence of a named operation


class Draw:
    """The choices of one operation."""

    def __init__(self, *seed, dtype=None, most=np.inf):
        self.rng = np.random.default_rng(seed)
        self.name = self.one_of(DTYPES) if dtype is None else dtype
        self.dtype = BFLOAT16 if self.name == "bfloat16" else np.dtype(self.name)
        self.wide = np.dtype(np.float64 if self.name == "float64" else np.float32)  # of the computation
        self.most = most
        self.words = []  # words of the title

    def one_of(self, choices):
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, choices):
        return self.one_of([n for n in choices if n <= self.most])

    def chance(self, p, word=""):
        """Return True with probability p; the title then has the word."""
        yes = bool(self.rng.random() < p)
        if yes and word:
            self.words.append(word)
        return yes

    def normal(self, *shape, dtype=None):
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        x = self.rng.integers(-3, 4, shape) if dtype.kind == "i" else self.rng.standard_normal(shape)
        return np.asarray(x).astype(dtype)

    def ids(self, shape, vocabulary=300):
        return self.rng.integers(3, vocabulary, shape)

    def laid_out(self, x):
        """Return the same numbers in another order in memory."""
        layout = self.one_of([None] * 10 + ["columns_first", *LAYOUTS])
        if layout is None or (layout == "byte_swapped" and self.name == "bfloat16"):
            return x
        self.words.append(f"({layout})")
        if layout == "columns_first":
            return np.ascontiguousarray(x.swapaxes(-2, -1)).swapaxes(-2, -1)
        return LAYOUTS[layout](x)


class Operation(NamedTuple):
    """An operation: a function that prepares its call, and the properties of the call."""

    make: Any  # Draw -> call, arrays that a failing call must not change, and functions as checks
    options: dict
    seed: tuple = (0,)
    dtype: str | None = "float32"  # None: drawn
    threads: int = 1  # threads of the process
    in_place: bool = False  # the call changes its arrays, in the same way each time except for optimizers
    random: bool = False  # each call has another result
    alone: bool = False  # the call changes settings of the whole process
    long: bool = False  # takes much longer than others that call the same functions of the core

    def draw(self):
        return Draw(*self.seed, dtype=self.dtype, most=SMALL)

    def prepare(self):
        return self.make(self.draw(), **self.options)


MARKS = set(Operation._fields) - {"make", "options"}


def operation(make, /, **given):
    """Make an operation from its properties and the options of ``make``."""
    marks = {name: given.pop(name) for name in MARKS & given.keys()}
    return Operation(make, given, **marks)


def some(make, title, times, /, **given):
    """Operations in which nearly everything is drawn."""
    return {f"{title} {n}": operation(make, seed=(n, 1), **({"dtype": None} | given)) for n in range(times)}


def made_of(d, options):
    """Return options, with the results of callables in place of the callables."""
    return {name: x(d) if callable(x) else x for name, x in options.items()}


@functools.cache
def made(make, *arguments, **options):
    """A module, or a model: the same one each time."""
    return make(*arguments, **options)


def same(a, b):
    """Return whether results are equal: arrays to the bit; of objects without data only the type."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, int | float | str | bytes | bool | np.generic | None):
        return a == b
    return True


def raised(function, arguments):
    """Return the name of the error that a call raises, None for huge sizes. (pytest.raises would keep more objects.)"""
    named = isinstance(arguments, dict)
    try:
        function(**arguments) if named else function(*arguments)
    except Exception as error:
        huge = named and getattr(arguments.get("query"), "size", 0) >= 2**30
        if isinstance(error, MemoryError | SystemError) and not huge:  # SystemError: see memory_fails.py
            raise
        return None if huge else type(error).__name__  # for PiB, the MemoryError may be NumPy's or selfattn's
    raise AssertionError(f"no error: {function.__name__}, {arguments}")


def refused(d, calls):
    """Return an operation that makes wrong calls, pairs of a function and arguments: each call raises the same
    error."""
    calls = calls(d)
    things = [list(given.values() if isinstance(given, dict) else given) for _, given in calls]
    return lambda: [raised(function, given) for function, given in calls], [*calls, *things]


# ----------------------------------------------------------------------------------------------------- attention


def attended(given, options, wrt, grads=None):
    """Attention, and its gradients where ``wrt`` names some."""
    differentiable = {name: x for name, x in options.items() if name not in ("out", "return_weights")}

    def call():
        found = {"result": sa.scaled_dot_product_attention(*given, **options)}
        if wrt:
            out, pullback = sa.scaled_dot_product_attention_vjp(*given, **differentiable, wrt=wrt)
            pulled = grads or (out if options.get("return_lse") else (out,))
            found |= {"vjp's result": out, "d": pullback(*pulled)}
        return found

    return call, [*given, *options.values(), *(grads or ())]


def attention(d, shape=(2, 3, 40, 16), keys=48, wrt=None, layout=None, **options):
    """Attention with these options, on arrays larger than the blocks that NumPy caches."""
    *lead, _, width = shape
    given = [d.normal(*shape), d.normal(*lead, keys, width), d.normal(*lead, keys, width)]
    return attended([layout(x) for x in given] if layout else given, made_of(d, options), wrt)


def tangents(d, shape=(2, 3, 40, 16), keys=48, wrt=(), **options):
    """Tangents of attention and of its gradients, of all arrays."""
    *lead, _, width = shape
    given = [d.normal(*shape), d.normal(*lead, keys, width), d.normal(*lead, keys, width)]
    options, grad_out = made_of(d, options), d.normal(*shape)
    moved = dict(zip(QKV, given, strict=True)) | {name: options[name] for name in wrt}

    def call():
        return {
            "jvp": sa.functional.scaled_dot_product_attention_jvp(*given, moved, **options, return_lse=True),
            "hvp": sa.functional.scaled_dot_product_attention_hvp(
                *given, grad_out, moved, **options, grad_out_tangent=grad_out, wrt=(*QKV, *wrt)
            ),
        }

    return call, [*given, *options.values(), grad_out]


def positions(d, options):
    """Draw options that depend on the positions of a query and a key."""
    if d.chance(0.3):
        options["causal"] = d.one_of(["upper_left", "lower_right"])
        d.words.append(options["causal"])
    if d.chance(0.2, "window"):
        options["window"] = (d.one_of([None, 0, 5, 70]), d.one_of([None, 0, 3, 64]))
    if d.chance(0.15, "softcap"):
        options["softcap"] = 2.0
    if d.chance(0.1, "scale"):
        options["scale"] = d.one_of([0.0, -0.5, 3.0])


def of_heads(d, options, heads):
    if d.chance(0.15, "alibi_slopes"):
        options["alibi_slopes"] = np.abs(d.normal(heads)).astype(d.wide)
    if d.chance(0.15, "sinks"):
        options["sinks"] = d.normal(heads).astype(d.wide)
    if d.chance(0.15, "dropout"):
        options.update(dropout_p=d.one_of([0.1, 0.5]), rng=7)


def mask_of(d, lead, n, s):
    kind = d.one_of([None] * 5 + ["bool", "float", "float with -inf"])
    if kind is None:
        return None
    shape = d.one_of([(n, s), (n, s), (*lead, n, s), (lead[0], 1, n, s), (1, s), (n, 1), (lead[1], 1, s)])
    d.words.append(f"{kind} mask {shape}")
    if kind == "float":
        return d.normal(*shape)
    return random_mask(d.rng, shape, bool if kind == "bool" else d.dtype)


def block_mask_of(d, n, s):
    if d.chance(0.7):
        return {}
    kind = d.one_of([*BLOCK_MASKS])
    d.words.append(kind)
    return {"block_mask": BLOCK_MASKS[kind]((), n, s, d.rng)}


def poison(d, arrays):
    """Put NaN or inf into a row of one of the arrays."""
    if d.chance(0.06, "poison"):
        x = d.one_of(arrays)
        with np.errstate(over="ignore"):  # float16
            x[..., int(d.rng.integers(x.shape[-2])), :] = d.one_of([np.nan, np.inf, -np.inf, 1e30])


def any_attention(d):
    """Forward, backward, log-sum-exp and weights, with any options."""
    n, s, width = d.size(ROWS), d.size(KEYS), d.size(WIDTHS)
    if d.chance(0.25):
        s = n
    value_width = d.size(WIDTHS) if d.chance(0.2) else width
    return attention_of(d, (d.one_of((1, 1, 2)), *d.one_of(HEADS)), n, s, width, value_width)


def decode(d):
    """A few queries over many keys, with grouped heads."""
    n, s, width = d.one_of(range(1, 9)), d.one_of((200, 1030, 2500, 5000)), d.one_of((33, 64, 128))
    lead = d.one_of([(1, 8, 2), (1, 8, 1), (1, 4, 4), (2, 6, 2), (1, 1, 1)])
    return attention_of(d, lead, n, s, width, width)


def attention_of(d, lead, n, s, width, value_width):
    batch, heads, key_heads = lead
    d.words.append(f"attention {lead} {n}x{s}x{width}/{value_width}")
    q, k = d.normal(batch, heads, n, width), d.normal(batch, key_heads, s, width)
    v = d.normal(batch, key_heads, s, value_width)
    options = {"num_threads": d.one_of([1, 1, 2]), "enable_gqa": heads != key_heads}
    positions(d, options)
    options["attn_mask"] = mask = mask_of(d, (batch, heads), n, s)
    if d.chance(0.15, "key_lengths"):
        options["key_lengths"] = lengths = d.rng.integers(0, s + 1, (batch, 1))
        if d.chance(0.3, "NaN after the last key"):
            for b, length in enumerate(lengths[:, 0]):
                k[b, :, length:], v[b, :, length:] = np.nan, np.inf
    boolean = mask is not None and mask.dtype == bool
    if boolean and mask.shape == (n, s) and d.chance(0.3, "NaN in a closed key"):
        mask[:, s // 2] = False
        k[..., s // 2, :], v[..., s // 2, :] = np.nan, np.inf
    poison(d, [q, k, v])
    of_heads(d, options, heads)
    options |= block_mask_of(d, n, s)
    options |= {"return_lse": d.chance(0.3, "lse"), "return_weights": d.chance(0.15, "weights")}
    grads = [d.laid_out(d.normal(batch, heads, n, value_width))]
    grads += [d.normal(batch, heads, n, dtype=d.wide)] * options["return_lse"]
    wrt = ["query", "key", "value"]
    if mask is not None and not boolean and d.chance(0.5, "d mask"):
        wrt.append("attn_mask")
    if (mask is None or boolean) and d.chance(0.1, "bias"):
        options["bias"] = d.normal(heads, n, s)
    if n and s and d.chance(0.1, "offset_bias"):
        options["offset_bias"] = d.normal(heads, n + s - 1)
    of_options = (*PER_HEAD, "bias", "offset_bias")
    wrt += [name for name in of_options if name in options and d.chance(0.7, f"d {name}")]
    if d.chance(0.2):
        wrt = [d.one_of(wrt)]
        d.words.append(f"d {wrt[0]} alone")
    return attended([d.laid_out(x) for x in (q, k, v)], options, wrt, grads)


def varlen(d):
    """Packed sequences, forward and backward."""
    (heads, key_heads), width, count = d.one_of(HEADS), d.size(WIDTHS), d.one_of((1, 2, 5))
    lengths = [[d.size((0, 1, 5, 33, 65, 130)) for _ in range(count)] for _ in range(2)]
    if d.chance(0.6):
        lengths[1] = lengths[0]
    offsets = [np.cumsum([0, *x]) for x in lengths]
    rows, keys = (int(x[-1]) for x in offsets)
    d.words.append(f"varlen {lengths} heads {heads}/{key_heads} x{width}")
    shapes = (rows, heads, width), (keys, key_heads, width), (keys, key_heads, width)
    given = [*(d.normal(*shape) for shape in shapes), *offsets]
    options = {"num_threads": d.one_of([1, 2]), "enable_gqa": heads != key_heads, "return_lse": True}
    positions(d, options)
    of_heads(d, options, heads)
    wrt = ["query", "key", "value", *(name for name in PER_HEAD if name in options)]
    if d.chance(0.3, "masks"):
        options["attn_mask"] = [d.normal(*pair) for pair in zip(*lengths, strict=True)]
        wrt += ["attn_mask"] * d.chance(0.6, "d masks")
        if d.chance(0.3, "one of them None"):
            options["attn_mask"][0] = None
    grads = d.normal(rows, heads, width), d.normal(heads, rows, dtype=d.wide)

    def call():
        found = sa.varlen_attention(*given, **options)
        again, pullback = sa.varlen_attention_vjp(*given, **options, wrt=wrt)
        return {"result": found, "vjp's result": again, "d": pullback(*grads)}

    return call, [*given, *options.values(), *grads]


def cached(d):
    """A cache that grows by a prompt and by tokens."""
    batch, (heads, key_heads), width = d.one_of((1, 2)), d.one_of(HEADS), d.one_of((16, 33, 64))
    prompt, tokens = d.size((3, 64, 300)), d.one_of((1, 2, 5))
    d.words.append(f"cache {(batch, heads, key_heads)} {prompt}+{tokens} x{width}")
    of_qkv = (heads, key_heads, key_heads)
    turns = [[d.normal(batch, h, n, width) for h in of_qkv] for n in (prompt, tokens, 1)]
    lengths = np.maximum(1, d.rng.integers(0, prompt + 1, batch))
    options = {}
    positions(d, options)
    options.pop("causal", None)

    def call():
        cache = sa.KVCache(batch, key_heads, width, dtype=d.dtype)
        found = cache.attend(*turns[0], lengths=lengths)
        for b, length in enumerate(lengths):  # padding is undefined
            found[b, :, length:] = 0
        return [found, *(cache.attend(*turn, **options) for turn in turns[1:])]

    return call, [*itertools.chain(*turns), lengths]


def cache(d):
    q, k, v = (d.normal(1, 2, 20, 64) for _ in range(3))
    kept = sa.KVCache(1, 2, 64)
    kept.append(k[:, :, :10], v[:, :, :10])
    before = kept.key.copy(), kept.value.copy()

    def call():
        kept.truncate(10)
        return kept.attend(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:])

    def unchanged():
        assert kept.lengths.tolist() == [10], "the cache grew"
        assert same(before, (kept.key.copy(), kept.value.copy())), "the past changed"

    return call, [q, k, v, unchanged]


def merge(d):
    """Attention over keys in two calls, merged, and additive attention."""
    n, s, width = d.size(ROWS[:12]), d.size(KEYS[:9]), d.size(WIDTHS[:6])
    d.words.append(f"merge, additive {n}x{s}x{width}")
    q, k, v = d.normal(2, n, width), d.normal(2, 2 * s, width), d.normal(2, 2 * s, width)
    weights = d.normal(width, 5), d.normal(width, 5), d.normal(5)

    def call():
        halves = [(k[:, half], v[:, half]) for half in (slice(0, s), slice(s, None))]
        halves = [sa.scaled_dot_product_attention(q, *half, return_lse=True) for half in halves]
        merged, pullback = sa.merge_attention_vjp(*zip(*halves, strict=True))
        added, added_pullback = sa.additive_attention_vjp(q, k, v, *weights)
        alone = sa.merge_attention(*zip(*halves, strict=True)), sa.additive_attention(q, k, v, *weights)
        return alone, merged, added, pullback(*merged), added_pullback(added)

    return call, [q, k, v, *weights]


# --------------------------------------------------------------------------------------------------- row operations

ROW_OPERATIONS = ["softmax", "log_softmax", "layer_norm", "rms_norm", "gelu", "apply_rotary_emb"]


def rows(d, name=None):
    """A row operation and its gradient."""
    name = name or d.one_of(ROW_OPERATIONS)
    shape = (d.one_of((1, 2, 3)), d.size((1, 7, 33, 300)), d.size((2, 4, 16, 34, 64, 768)))
    d.words.append(f"{name} {shape}")
    x = d.normal(*shape)
    if d.dtype.kind != "i":
        poison(d, [x])
    x, dy = d.laid_out(x), d.laid_out(d.normal(*shape, dtype=np.float64 if d.dtype.kind == "i" else None))
    arguments = []
    if name in ("softmax", "log_softmax"):
        arguments = [d.one_of([-1, -1, 0, 1])]
    elif name.endswith("norm"):
        own = d.one_of([shape[-1:], shape[-1:], shape[-2:]])
        arguments = [own, d.normal(*own) if d.chance(0.7, "weight") else None]
        arguments += [d.normal(*own) if d.chance(0.7, "bias") else None] * (name == "layer_norm")
    elif name == "gelu":
        arguments = [d.one_of(["none", "tanh"])]
    else:
        angles = d.rng.random((shape[1], shape[2] // 2))
        arguments = [*(f(angles).astype(d.dtype) for f in (np.cos, np.sin)), d.chance(0.5, "interleaved")]

    def call():
        y, pullback = getattr(sa, f"{name}_vjp")(x, *arguments)
        return {"y": getattr(sa, name)(x, *arguments), "vjp's y": y, "d": pullback(dy)}

    return call, [x, dy, *arguments]


def parameters_of(d, plain=True):
    grown = {"w": d.normal(40, 20), "v": d.normal(300)}
    return grown if plain else {name: x[::-1] for name, x in grown.items()}


def step(d, make, plain=True, first=False):
    parameters, grads = parameters_of(d, plain), parameters_of(d)
    optimizer = make(parameters)
    if not first:
        optimizer.step(grads)
    before = optimizer.state_dict()

    def call():
        optimizer.step(grads)
        return parameters

    def unchanged():
        assert same(optimizer.state_dict(), before), "the optimiser's state changed"

    return call, [*parameters.values(), *grads.values(), unchanged]


def clipping(d, plain=True):
    grads = parameters_of(d, plain)
    return lambda: (optim.clip_grad_norm_(grads, 0.5), grads), list(grads.values())


def fitted(d):
    x, y = d.normal(20, 16), d.normal(20, 8)

    def call():
        model = nn.Linear(16, 8, rng=0)
        adam = optim.Adam(model.parameters(), 1e-2)
        training.fit(model, [(x, y)] * 3, nn.MSELoss(), 1, optimizer=adam, log_every=None, progress=False)
        return model.parameters()

    return call, [x, y]


# ------------------------------------------------------------------------------------------------------------ layers


def layer(d, make, arguments=(), shape=(40, 32), inputs=None, given=None, **options):
    """Forward and backward of a layer; `given` makes options of the call."""
    module = made(make, *arguments, **options)
    x = [d.normal(*own) if isinstance(own, tuple) else own(d) for own in inputs or [shape]]
    more = made_of(d, given or {})

    def call():
        y, pullback = module.vjp(*x, **more)
        return module(*x, **more), y, pullback(y[0] if isinstance(y, tuple) else y)

    return call, [*x, *more.values(), *module.parameters().values()]


TRIANGLE = ~np.tri(20, dtype=bool)
FLOAT_MASK = np.where(TRIANGLE, -np.inf, 0.25).astype(np.float32)
MASKS = {
    "no mask": {},
    "a float mask": {"mask": FLOAT_MASK},
    "causal": {"mask": TRIANGLE, "is_causal": True},
    "padding": {"src_key_padding_mask": np.arange(20) >= np.array([[20], [13]])},
    "lengths and a mask of each head": {
        "mask": np.random.default_rng(0).standard_normal((4, 20, 20)).astype(np.float32),
        "key_lengths": np.array([20, 7]),
    },
}


def encoder(norm_first):
    options = {"norm_first": norm_first, "activation": "gelu" if norm_first else "relu", "batch_first": True}
    one = nn.TransformerEncoderLayer(32, 2, 64, 0.0, rng=0, **options)
    return nn.TransformerEncoder(one, 2, norm=nn.LayerNorm(32) if norm_first else None)


def decoder():
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, 0.0, batch_first=True, rng=0), 2)


def any_encoder(d):
    """A layer of an encoder, and its gradients."""
    width, heads = d.one_of([(8, 2), (32, 4), (64, 2)])
    n, norm_first = d.one_of((1, 5, 33)), d.chance(0.5, "norm first")
    d.words.append(f"encoder layer {n}x{width}, {heads} heads")
    options = {"dropout": 0.0, "norm_first": norm_first, "dtype": d.dtype, "rng": 1}
    return layer(d, nn.TransformerEncoderLayer, (width, heads, 4 * width), (2, n, width), **options)


def model(d):
    """An embedding model, its gradients, the proxy task and an optimiser's steps."""
    width, heads = d.one_of([(2, 1), (8, 2), (20, 1), (32, 4), (64, 1), (66, 3), (128, 2)])
    layers = d.one_of((0, 1, 2))
    d.words.append(f"model x{width}, {heads} heads, {layers} layers")
    third = d.one_of((1, 2, 10)[: None if d.most > SMALL else 2])
    sentences = [d.rng.integers(0, 50, d.one_of((1, 2, 7, 16, 33, 70))).tolist() for _ in range(3 * third)]
    dy, optimizer = d.normal(3 * third, width), d.one_of([optim.SGD, optim.Adam, optim.AdamW])

    def call():
        m = nn.EmbeddingModel(
            str.split, 50, width, max_seq_len=64, num_layers=layers, num_heads=heads, dtype=d.dtype, rng=3
        )
        y, pullback = m.vjp(sentences)
        found = {"y": y, "forward": m(sentences), "d": pullback(dy)}
        task = nn.ProxyTask(m)
        chosen = optimizer(task.parameters(), lr=0.01)
        for turn in range(2):
            thirds = (sentences[third * i : third * (i + 1)] for i in range(3))
            found[f"confidence {turn}"], pullback = task.vjp(*thirds)
            chosen.step(pullback(np.ones(third, d.wide)))
        return found | {"trained": m.state_dict()}

    return call, [dy]


GPT = functools.partial(made, nn.GPT, 300, 32, 2, 2, 64, rng=0)


def learning(d, positions):
    model, ids = GPT(positions=positions), [d.ids(n) for n in (50, 2, 31)]

    def call():
        value, pullback = model.loss_vjp(ids)
        y, logits_pullback = model.vjp(ids[:1])
        return model.loss(ids), value, pullback(1.0), logits_pullback(y)

    return call, [*ids, *model.parameters().values()]


def writing(d, positions, **options):
    """Generate from prompts that end at different steps, with a cache that grows."""
    model, prompts = GPT(positions=positions), [d.ids(n, 50) for n in (60, 3)]
    return lambda: model.generate(prompts, 6, **options), [*prompts, *model.parameters().values()]


# ---------------------------------------------------------------------------------------------------- the catalogue


class Generator:
    """A generator of another library: any object that draws integers."""

    def integers(self, low, high, size=None, dtype=None):
        return high // 3


OUT = {"out": lambda d: np.full((2, 3, 40, 16), 7, d.dtype)}
QKV = ("query", "key", "value")
KINDS = ["int8"] + ["bfloat16"] * (sa.get_isa() in ("avx512bf16", "amx"))
OPERATIONS = {
    **some(any_attention, "any attention", 30),
    "attention": operation(attention),
    "attention of two threads": operation(attention, keys=5000, num_threads=2),
    "attention into out": operation(attention, **OUT),
    "attention into out, with weights and lse": operation(
        attention, **OUT, return_weights=True, return_lse=True
    ),
    "attention of float16 with weights and lse": operation(
        attention, dtype="float16", return_weights=True, return_lse=True
    ),
    "attention of bfloat16": operation(attention, dtype="bfloat16", is_causal=True),
    "attention of integers": operation(attention, dtype="int8", wrt=QKV),
    "attention of nothing": operation(attention, shape=(0, 3, 40, 16), wrt=QKV, return_weights=True),
    "every option": operation(
        attention,
        **{
            **options_together(OTHERS, (2, 3), 40, 48, np.random.default_rng(0)),
            "attn_mask": lambda d: d.normal(40, 48) > -1,
            "bias": lambda d: d.normal(3, 1, 48),
            "offset_bias": lambda d: d.normal(3, 87),
            "window": (9, 9),
            "alibi_slopes": lambda d: d.normal(3),
            "sinks": lambda d: d.normal(3),
            "key_lengths": np.array([[40], [48]]),
        },
        num_threads=3,
        wrt=(*QKV, "alibi_slopes", "sinks", "bias", "offset_bias"),
    ),
    "tangents": operation(tangents, is_causal=True, num_threads=2),
    "tangents of bfloat16": operation(tangents, dtype="bfloat16", shape=(2, 3, 5, 16)),
    "tangents of every option": operation(
        tangents,
        softcap=2.0,
        dropout_p=0.2,
        rng=1,
        attn_mask=lambda d: d.normal(40, 48) > -1,
        bias=lambda d: d.normal(3, 1, 48),
        offset_bias=lambda d: d.normal(3, 87),
        alibi_slopes=lambda d: d.normal(3),
        sinks=lambda d: d.normal(3),
        num_threads=3,
        wrt=("alibi_slopes", "sinks", "bias", "offset_bias"),
    ),
    "blocks": operation(
        attention,
        block_mask=lambda d: sa.BlockMask.from_blocks(d.rng.random((5, 6)) < 0.6, (8, 8)),
        wrt=QKV,
    ),
    "lists": operation(
        attention,
        layout=np.ndarray.tolist,
        key_lengths=[[40], [48]],
        window=[9, 9],
        sinks=[0.5, 0.25, 0.125],
        wrt=QKV,
    ),
    "huge numbers": operation(
        attention, window=(2**70, np.int64(3)), dropout_p=0.5, rng=2**100, num_threads=2, wrt=QKV
    ),
    "dropout of another generator": operation(attention, dropout_p=0.2, rng=lambda d: Generator(), wrt=QKV),
    "dropout of NumPy's generator": operation(
        attention, dropout_p=0.2, rng=lambda d: d.rng, wrt=QKV, in_place=True
    ),
    "dropout of the system's entropy": operation(attention, dropout_p=0.5, wrt=QKV, random=True),
    "gradients": operation(attention, wrt=QKV),
    "gradients of two threads": operation(attention, keys=2000, num_threads=2, wrt=QKV),
    **some(varlen, "varlen", 5),
    **some(merge, "merged and additive attention", 2),
    **some(cached, "cached", 3),
    "cache": operation(cache, in_place=True),
    **{name: x for kind in ROW_OPERATIONS for name, x in some(rows, kind, 3, name=kind).items()},
    "gelu of integers": operation(rows, name="gelu", dtype="int8"),
    # steps
    "SGD": operation(step, make=lambda p: optim.SGD(p, momentum=0.9), in_place=True),
    "SGD of bfloat16": operation(
        step, make=lambda p: optim.SGD(p, momentum=0.9), dtype="bfloat16", in_place=True
    ),
    "Adam": operation(step, make=optim.Adam, in_place=True),
    "Adam of strides": operation(step, make=optim.Adam, plain=False, in_place=True),
    "AdamW of float16": operation(step, make=optim.AdamW, dtype="float16", in_place=True),
    "first step": operation(step, make=optim.Adam, first=True, in_place=True),
    "first step of float16": operation(
        step, make=optim.Adam, dtype="float16", plain=False, first=True, in_place=True
    ),
    "clipping": operation(clipping, in_place=True),
    "clipping of strides": operation(clipping, plain=False, in_place=True),
    "clipping of float16": operation(clipping, dtype="float16", in_place=True),
    "clipping of bfloat16, strided": operation(clipping, dtype="bfloat16", plain=False, in_place=True),
    "fit": operation(fitted),
    # layers
    "linear": operation(layer, make=nn.Linear, arguments=(32, 48), rng=0),
    "linear of two threads": operation(
        layer, make=nn.Linear, arguments=(256, 256), rng=0, shape=(300, 256), threads=2
    ),
    "linear of float64": operation(
        layer, make=functools.partial(nn.Linear, dtype=np.float64), arguments=(32, 48), rng=0
    ),
    "linear of float16": operation(
        layer, make=functools.partial(nn.Linear, dtype=np.float16), arguments=(32, 48), rng=0
    ),
    "GELU": operation(layer, make=nn.GELU),
    "SiLU": operation(layer, make=nn.SiLU),
    "LayerNorm": operation(layer, make=nn.LayerNorm, arguments=(32,)),
    "RMSNorm": operation(layer, make=nn.RMSNorm, arguments=(32,)),
    "Embedding": operation(
        layer, make=nn.Embedding, arguments=(300, 32), rng=0, inputs=[lambda d: d.ids(50)]
    ),
    "LearnedPositions": operation(layer, make=nn.LearnedPositions, arguments=(32, 64), rng=0),
    "RotaryEmbedding": operation(layer, make=nn.RotaryEmbedding, arguments=(32,), shape=(2, 3, 40, 32)),
    "SelfAttention": operation(layer, make=nn.SelfAttention, arguments=(32, 32), rng=0),
    "SelfAttentionBlock": operation(
        layer, make=nn.SelfAttentionBlock, arguments=(32, 2), rng=0, shape=(2, 40, 32)
    ),
    "MultiheadAttention": operation(
        layer,
        make=nn.MultiheadAttention,
        arguments=(32, 2),
        rng=0,
        inputs=[(40, 32), (50, 32), (50, 32)],
    ),
    "cross entropy": operation(
        layer,
        make=nn.CrossEntropyLoss,
        inputs=[(40, 64), lambda d: d.ids(40, 64)],
        label_smoothing=0.1,
    ),
    "mean squares": operation(layer, make=nn.MSELoss, inputs=[(40, 64), (40, 64)]),
    "logits": operation(
        layer,
        make=nn.BCEWithLogitsLoss,
        inputs=[(40, 64), lambda d: d.rng.random((40, 64), np.float32)],
    ),
    **some(any_encoder, "any encoder", 3),
    **{
        f"encoder, {name}{', two threads' * (threads - 1)}": operation(
            layer, make=encoder, arguments=(norm_first,), shape=(2, 20, 32), given=masks, threads=threads
        )
        for n, (name, masks) in enumerate(MASKS.items())
        for threads, norm_first in ((1, n % 2 == 0), (2, n % 2 == 1))
    },
    "decoder": operation(
        layer,
        make=decoder,
        long=True,
        inputs=((2, 20, 32), (2, 30, 32)),
        given={"tgt_mask": TRIANGLE, "tgt_is_causal": True},
    ),
    "decoder with masks, two threads": operation(
        layer,
        make=decoder,
        inputs=((2, 20, 32), (2, 30, 32)),
        threads=2,
        given={"tgt_mask": FLOAT_MASK, "memory_key_padding_mask": np.arange(30) >= np.array([[30], [13]])},
    ),
    # models
    **some(model, "model", 4, long=True),
    "GPT": operation(learning, positions="learned"),
    "GPT of two threads": operation(learning, positions="rotary", threads=2),
    "GPT writes": operation(writing, positions="learned"),
    "GPT draws": operation(writing, positions="rotary", temperature=1.0, top_k=9, rng=0),
}


def drawn(d):
    """Prepare an operation of any kind and any size."""
    others = [decode, decode, cached, varlen, varlen, rows, rows, model, merge, any_encoder]
    return d.one_of([any_attention] * 10 + others)(d)
