"""Vectors of transformers."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from attention import drawn_mask
from case import EPS, FLOATS, UNBOUNDED, Case, reference, rounded
from products import ACTIVATIONS, compact_weight

from selfattn.reference.transformer import PARAMETERS


class Model:
    """A model of a kind: the tutorial's ("plain"), BERT's, a gated one, GPT's, or one with dropout.

    Parameters are written to ``case`` as they are drawn; ``names`` has those with a gradient.
    """

    def __init__(self, case, kind, rng, sizes, lengths, real, compact, alone):
        self.case, self.rng, self.real, self.compact, self.names = case, rng, real, compact, []
        self.plain, self.bert, self.gated, self.drops = (
            kind == x for x in ("plain", "bert", "gated", "drops")
        )
        self.first, self.alone = kind in ("gated", "gpt", "drops"), alone
        (self.d, self.heads, layers, vocabulary), tokens = sizes, sum(lengths)
        d, self.longest = self.d, max(lengths, default=1)
        parts = ("table", "positions", "token_type_row", "embedding_norm", "final_norm")
        model = self.described = SimpleNamespace(
            table_factor=None, position_bias=None, **dict.fromkeys(parts)
        )
        if alone:
            # Attention without a norm after it, whose output replaces its input; two rows are too small to be rounded.
            rows = rng.uniform(-1, 1, (tokens, d))
            rows[7:9] *= [[1e-33], [1e-42]]
            self.inputs = case.given("rows", rows)
        else:
            self.inputs = case.given("ids", rng.integers(0, vocabulary, tokens), "i64").astype(int)
            model.table = self.weight("table", vocabulary, d, 1.0)
            model.positions = None if self.gated else self.drawn("positions", self.longest, d)
            model.token_type_row = self.drawn("token_type_row", d) if self.bert else None
            model.embedding_norm = self.norm("embedding_norm", d, False, True) if self.bert else None
        model.layers = [self.layer(n) for n in range(layers)]
        if self.first and not alone:
            model.final_norm = self.norm("final_norm", d, True, False)

    def drawn(self, name, *shape):
        """Draw a parameter; those of tables, norms and products have a gradient."""
        if name.endswith(("weight", "bias")):
            self.names.append(name)
        return self.case.given(name, rounded(self.rng.uniform(-1, 1, shape), "f32"), self.real)

    def weight(self, name, out, width, size):
        """Draw a weight, compact if the model's are."""
        if not self.compact:
            return self.drawn(f"{name}.weight", out, width)
        raw, dtype, w, scale = compact_weight(self.rng, self.compact, out, width, size)
        self.case.given(f"{name}.weight", raw, dtype)
        if scale is not None:
            self.case.given(f"{name}.scale", scale)
        return w

    def norm(self, name, n, rms, has_bias):
        """Draw a norm."""
        eps = 1e-6 if "feed_forward" in name else 1e-5
        self.case.numbers(**{f"{name}.eps": eps, f"{name}.rms": rms})
        weight = self.drawn(f"{name}.weight", n)
        bias = self.drawn(f"{name}.bias", n) if has_bias else None
        return SimpleNamespace(weight=weight, bias=bias, eps=eps, kind="rms" if rms else "layer")

    def layer(self, n):
        """Draw a layer."""
        d, heads, gated, alone = self.d, self.heads, self.gated, self.alone
        key_heads, width, hidden = 1 if gated else heads, d // heads, 0 if self.plain or alone else d + 3
        keys, half, causal, norm_first = (
            key_heads * width,
            width // 2,
            self.first and not self.drops,
            self.first,
        )
        activation = "gelu" if self.bert else "silu" if gated else "relu"
        dropout = [0.1 * (n + 1) * self.drops for n in range(4)]
        window = 20 if self.bert or (causal and not gated) else None
        numbers = {
            "heads": heads,
            "causal": causal,
            "scale": width**-0.5,
            "norm_first": norm_first and not alone,
        }
        layer = SimpleNamespace(num_heads=heads, num_key_heads=key_heads, rotary=None, softcap=0.0)
        layer.activation, layer.window, layer.dropout = activation, (window, None), (*dropout, 7)
        layer.causal, layer.scale, layer.norm_first = (numbers[x] for x in ("causal", "scale", "norm_first"))
        numbers |= {
            "key_heads": key_heads,
            "width": width,
            "hidden": hidden,
            "window_left": window or UNBOUNDED,
        }
        numbers |= {"seed": 7, "activation": ACTIVATIONS.index(activation), "weights": self.compact}
        numbers |= {f"dropout[{i}]": p for i, p in enumerate(dropout)}
        sizes = (d, keys, keys, d, d, hidden, hidden, d, d, width, width, d, d)
        for which, size in zip(PARAMETERS, sizes, strict=True):
            feed_forward, name = (
                which in ("up", "gate", "down") or which.startswith("feed_forward"),
                f"{n}.{which}",
            )
            absent = (which == "output" and self.plain) or (feed_forward and not hidden)
            absent |= (which in ("gate", *PARAMETERS[9:]) and not gated) or (alone and "norm" in which)
            made = None
            if not absent and "norm" in which:
                made = self.norm(name, size, gated, not gated)
            elif not absent:
                columns = hidden if which == "down" else d
                weight = self.weight(name, size, columns, 2 / np.sqrt(columns))
                made = SimpleNamespace(
                    weight=weight, bias=None if gated else self.drawn(f"{name}.bias", size)
                )
            setattr(layer, which, made)
        if gated and half:  # numbers that are no sines and cosines suffice
            cos, sin = (self.drawn(f"{n}.rotary.{x}", self.longest, half) for x in ("cos", "sin"))
            layer.rotary = SimpleNamespace(cos=cos, sin=sin, interleaved=n % 2 == 1)
            numbers |= {"rotary.rotated": 2 * half, "rotary.interleaved": n % 2 == 1}
        self.case.numbers(**{f"{n}.{x}": y for x, y in numbers.items()})
        return layer


def transformer_case(
    file, name, kind, sizes, lengths, real, *, compact=0, cached=None, masked="", alone=False, quick=True
):
    """Write a call of a model, of sizes d, heads, layers, vocabulary; ``cached``: as a prompt, in 16 bits.

    A layer has sums of d terms, a softmax and a network; norms keep size 1. So an error is a few hundred eps of the
    largest result, and twice as many of the largest gradient, a sum over all tokens.
    """
    (d, _, layers, vocabulary), tokens, longest = sizes, sum(lengths), max(lengths, default=1)
    rng, backward = np.random.default_rng([d, layers]), cached is None and not compact
    tolerance = 512 if cached else 256
    case = Case(file, f"{kind} {d} {real} {name}", tolerance, quick, wide=real == "f64")
    pooling = 0 if kind in ("gated", "gpt") or alone else 3 if kind == "drops" else 1
    numbers = {"f64": real == "f64", "d": d, "vocabulary": vocabulary, "tokens": tokens, "layers": layers}
    numbers |= {"sequences": len(lengths), "longest": longest, "pooling": pooling, "drops": kind == "drops"}
    case.numbers(**numbers, table_kind=compact)
    starts = case.given("starts", np.cumsum([0, *lengths]), "i64").astype(int)
    model = Model(case, kind, rng, sizes, lengths, real, compact, alone)
    call = SimpleNamespace(mask=None, key_bias=None, pooling=(None, "mean", "first", "last")[pooling])
    call.dropout = [layer.dropout for layer in model.described.layers]
    if masked:
        mask = drawn_mask(rng, (1, sizes[1], longest, longest), masked, 0.2, 2)
        mask[..., ::5] = 1  # every query sees some key
        call.mask = case.given("mask", mask, masked)
    if masked == "bool":
        call.mask, shape = call.mask != 0, (len(lengths), 1, longest)
        bias = np.where(rng.random(shape) < 0.1, -np.inf, rng.uniform(-1, 1, shape))
        bias[..., ::5] = 0
        call.key_bias = case.given("key_bias", bias, real)[:, 0]
    if cached is not None:
        case.numbers(cached=True, prompt=cached[0], narrow=cached[1])
    one = (
        (model.inputs, starts) if tokens else (np.zeros(1, int), np.array([0, 1]))
    )  # of no tokens gradients are 0
    y, pull = reference.transformer_vjp(model.described, *one, compute_dtype=np.float64, call=call)
    y = y if tokens else y[:0]
    size = max(1, np.abs(y).max(initial=0))
    if cached and cached[1]:
        size *= 2.0**-11 / (EPS["f32"] / 2)
    if compact:
        # A product rounds its rows to 1/255 of 8 times the size of a number, or to 8 bits: 6 such errors.
        rounding = 8 / 255 / np.sqrt(12) if compact == 1 else 2.0**-9
        size = 6 * np.sqrt(np.square(y).mean()) * np.sqrt(7 * layers) * rounding / (tolerance * EPS["f32"])
    case.output("out", y, size, dtype=real)
    if not backward:
        return
    dy = case.given("d.grad_out", rounded(rng.uniform(-1, 1, y.shape), "f32"), real)
    dx, grads, d_mask = pull(dy if tokens else np.zeros((1, d)))
    size = 1.0
    for parameter, gradient in zip(model.names, grads, strict=True):
        if not parameter.endswith(
            "key_bias"
        ):  # 0 but for rounding, at the scale of the gradient of the weights
            size = max(1.0, np.abs(gradient).max(initial=0))
        case.output(f"d.{parameter}", gradient, 2 * size, dtype=real)
    of_mask = [("d.mask", d_mask, "z")] if masked in FLOATS else []
    for x, gradient, role in (("d.rows", dx[:tokens], "o"), *of_mask):
        case.output(x, gradient, 2 * max(1.0, np.abs(gradient).max(initial=0)), dtype=real, role=role)


FEW, MANY = (5, 66, 1, 30), (40, 3, 60, 70, 1, 80, 30, 50)
MODELS = (  # kind, sizes, lengths
    ("plain", (2, 1, 1, 3), (1,)),
    ("plain", (4, 2, 3, 5), (3, 1, 4)),
    ("plain", (6, 3, 1, 40), (17, 9)),
    ("plain", (8, 1, 0, 7), (2, 3)),
    ("plain", (34, 1, 1, 9), MANY),
    ("plain", (66, 3, 1, 11), (12, 20)),
    ("plain", (128, 1, 1, 9), MANY),
    ("bert", (2, 1, 1, 3), (1,)),
    ("bert", (18, 2, 2, 9), FEW),
    ("bert", (100, 4, 2, 9), (70, 3, 20)),
    ("bert", (100, 4, 2, 9), ()),
    ("gated", (6, 3, 1, 40), (17, 9)),
    ("gated", (40, 2, 3, 7), (30, 1, 67, 4)),
    ("gated", (100, 2, 1, 9), (12, 20)),
    ("gpt", (12, 3, 2, 7), (3, 40)),
    ("drops", (8, 2, 2, 7), (2, 3)),
    ("drops", (72, 3, 2, 9), (5, 66, 30)),
)
CACHED = (
    ("gated", (6, 3, 1, 40), (17, 9)),
    ("gated", (40, 2, 3, 7), (30, 3, 150, 4)),
    ("gpt", (12, 2, 2, 7), (3, 4, 40)),
    ("gpt", (100, 4, 2, 9), (70, 3, 20)),
    ("gated", (4, 1, 1, 5), (2100, 40)),
)


def transformer(file):
    """Write models of all kinds and their gradients; with a cache; with compact weights."""
    for n, real in enumerate(FLOATS[:2]):
        for kind, sizes, lengths in MODELS:
            quick = n == 0 or sizes[0] * sum(lengths) < 7000
            transformer_case(file, "", kind, sizes, lengths, real, quick=quick)
        for masked, kind in ((real, "bert"), ("bool", "gpt")):
            transformer_case(file, masked, kind, (18, 2, 2, 9), (5, 40, 1), real, masked=masked)
        for prompt in (False, True):
            for narrow in (False, True)[: 2 - n]:
                for kind, sizes, lengths in CACHED:
                    quick, name = (
                        sum(lengths) < 1000 or (n == 0 and prompt == narrow),
                        f"cached {prompt} {narrow}",
                    )
                    transformer_case(
                        file, name, kind, sizes, lengths, real, cached=(prompt, narrow), quick=quick
                    )
    for compact in (1, 2):
        for kind, d, alone in (
            ("bert", 144, 0),
            ("drops", 144, 0),
            ("gated", 48, 0),
            ("bert", 144, 1),
            ("drops", 144, 1),
        ):
            for quick, lengths in ((True, FEW), (False, (*FEW, 150))):
                sizes, name = (d, 3, 2, 11), f"compact {compact} alone {alone}"
                options = {"compact": compact, "alone": bool(alone), "quick": quick}
                transformer_case(file, name, kind, sizes, lengths, "f32", **options)
