"""Operations that call the core itself or private modules of the package, and calls that it refuses.

`ALL` is the whole catalogue; together it must call every function of the extension, in all its ways.
"""

import functools

import numpy as np
from bad_calls import BAD, BAD_PACKED, PACKED
from blocks import drawn as drawn_blocks
from capsules import Library
from drawn_transformers import bad_calls, good_call
from drawn_transformers import drawn as drawn_transformer
from inputs import BFLOAT16, OPTIONS, options_together, random_inputs
from operations import KINDS, OPERATIONS, QKV, encoder, made, operation, raised, refused

import selfattn as sa
from selfattn import _core
from selfattn.engine import transformer as engine
from selfattn.engine.decoder import Decoder, DecoderCache
from selfattn.engine.weights import QUANTS, Compact, multiply, to_kind
from selfattn.optim.optimizers import Update


def changed(function, good, *wrong):
    return [(function, good | change) for change in wrong]


def everything():
    arrays = random_inputs((2, 3, 8), 70, dtype=BFLOAT16)
    options = options_together(OPTIONS, (2,), 3, 70, np.random.default_rng(0))
    return arrays, options | dict(zip(QKV, arrays, strict=True))


def late(d):
    """Calls that fail late, when they already hold all arrays."""
    arrays, good = everything()
    out = np.zeros((2, 3, 8), np.float32)
    return changed(
        sa.scaled_dot_product_attention,
        good | {"return_lse": True, "return_weights": True},
        {"rng": "x"},
        {"out": out},
        {"out": arrays[0]},
        {"key_lengths": 71},
        {"window": (1, "x")},
    )


def wrong_tangents(d):
    """Tangents that do not fit, and results of the forward part that are not its own."""
    x, wide = d.normal(2, 5, 8), {"num_threads": 1}
    good = wide | {
        "query": x,
        "key": x,
        "value": x,
        "query_tangent": x,
        "sinks": x[:, 0, 0],
        "sink_tangents": x[:, 0, 0],
    }
    out, statistics, lse = _core._attention_jvp(**good)
    back = good | {"out": out, "statistics": statistics, "grad_out": out[0], "grad_lse": lse[0]}
    wrong = ({"key_tangent": x[:, :3]}, {"query_tangent": x > 0}, {"sink_tangents": x}, {"mask_tangent": x})
    return [
        *changed(_core._attention_jvp, good, *wrong, {"rng": "x"}),
        *changed(
            _core._attention_hvp,
            back,
            *wrong,
            {"out": out[0]},
            {"statistics": statistics[..., :2]},
            {"grad_out": out},
            {"grad_out_tangent": out},
            {"grad_lse_tangent": lse},
            {"wrt": 8},
            {"wrt": 64},
        ),
    ]


def wrong_gradients(d):
    """Calls with one wrong argument each; the last arguments of the list are read when all else is allocated."""
    arrays, good = everything()
    out, statistics, lse = _core._attention_forward(**good, return_lse=True)
    good |= {"grad_out": out, "out": out, "statistics": statistics, "grad_lse": lse}
    bools = np.ones((2, 3, 70), bool)
    without = dict.fromkeys(("alibi_slopes", "sinks", "attn_mask", "bias", "offset_bias"))
    return changed(
        _core._attention_backward,
        good,
        {"query": arrays[0][:, :2]},
        {"key": arrays[1][..., 1:]},
        {"window": (1, "x")},
        {"key_lengths": 71},
        {"out": out[:1]},
        {"out": out.astype(np.float64)},
        {"out": None},
        {"grad_out": out[:, 1:]},
        {"grad_out": out.astype(np.float64)},
        {"grad_out": bools},
        {"grad_lse": out},
        {"grad_lse": lse.astype(np.float64)},
        {"statistics": statistics[..., :1]},
        {"statistics": statistics.astype(np.float64)},
        {"attn_mask": bools, "wrt": 15},
        *(without | {"wrt": wrt} for wrt in (8, 16, 32, 64, 128)),
        {"rng": None},
        {"rng": np.random.default_rng(0)},
        {"rng": "x"},
        {"wrt": "x"},
        {"wrt": 2**80},
    )


def wrong_rows(d):
    x, weight, bias, dy = d.normal(3, 40, 8), d.normal(8), d.normal(8), np.ones((3, 40, 8), np.float32)
    wrong = {
        "softmax": [(x, dy[..., :3], 1), (x, dy, 3), (x, dy > 0, 1), (x, dy)],
        "log_softmax": [(x, dy, "x")],
        "layer_norm": [
            (x, dy, 8, weight, bias, "x"),
            (x, dy, 7, weight, bias, 0.1),
            (x, dy, (8,), weight[1:], bias, 0.1),
            (x, dy, 8, weight, bias > 0, 0.1),
        ],
        "rms_norm": [(x, dy, 8, weight, None, True)],
        "gelu": [(x, dy, "soft"), (x, dy[0], "none"), (x, dy, None)],
    }
    return [(getattr(_core, f"_{name}_backward"), given) for name, calls in wrong.items() for given in calls]


def wrong_steps(d):
    w, grad = d.normal(100, 100), d.normal(100, 100)
    step = Update("adam", 0.1, 0.1, beta1=0.9, beta2=0.9, eps=0.1)
    calls = [(step, [w], wrong, [w], [w], [0]) for wrong in ([w], [grad, None], [w[::2]], 3)]
    calls.append((step._replace(lr=np.nan), [w], [grad], [w], [w], [1]))
    calls.append((tuple(step), [w], [grad], [w], [w], [1]))
    return [(_core._update, given) for given in calls]


def wrong_packed(d):
    out, pullback = sa.varlen_attention_vjp(**PACKED)
    boolean = PACKED | {"attn_mask": [np.zeros((2, 3)), np.ones((3, 4), bool)]}
    out, statistics = _core._varlen_forward(**boolean)
    boolean |= {"out": out, "grad_out": out, "statistics": statistics, "wrt": 15}
    return [
        *changed(sa.varlen_attention, PACKED, *(change for change, *_ in BAD_PACKED.values())),
        (pullback, (out[:2],)),
        (_core._varlen_backward, boolean),
    ]


def wrong_layers(d):
    """Wrong calls of encoders and their pullbacks: arrays of other shapes, a mask."""
    one, x, mask = made(encoder, True), d.normal(2, 20, 32), np.zeros((20, 20), np.float32)
    y, pullback = one.vjp(x)
    return [(one.vjp, (x[..., :7],)), (pullback, (y[:, :4],)), (one, {"src": x, "mask": mask[:4]})]


def wrong_transformers(d):
    """Wrong calls of the core: forward, backward, and for the proxy task."""
    y, saved = _core._transformer_forward(*good_call(), True)
    triplets = np.stack([y] * 3)
    _, slopes = _core._proxy_confidences(triplets)
    return [
        *((_core._transformer_forward, (*given, True)) for given in bad_calls().values()),
        (_core._transformer_backward, (saved, y[:2], True, True)),
        (_core._proxy_confidences, (y,)),
        (_core._proxy_gradients, (triplets, slopes[0])),
    ]


def rounding(d):
    x, whole, strided = d.normal(40, 64), np.zeros((40, 64), BFLOAT16), d.normal(64, 40).T

    def call():
        _core._narrow(x, whole, 0)
        return _core._checksum((x, whole, strided)), _core._checksum((strided[::2, ::3],))

    return call, [x, strided]


def capsule(d):
    x = d.normal(3, 40)
    given = Library(x)
    return lambda: sa.softmax(given), [x]


def triplets(d):
    y, products = d.normal(3, 70, 16), d.normal(2, 70)
    return lambda: (_core._proxy_confidences(y), _core._proxy_gradients(y, products)), [y, products]


def search(d, kind, queries=5):
    query, vectors = d.normal(queries, 20), (30 * d.normal(700, 20)).astype(kind)
    keep = d.rng.random(700) < 0.5
    scales = d.normal(700) if kind == "int8" else None
    calls = ((3, None), (400, keep))
    return lambda: [_core._search(query, vectors, k, scales=scales, keep=only) for k, only in calls], [
        query,
        vectors,
        keep,
    ]


def wrong_searches(d):
    query, vectors, numbers = d.normal(2, 20), d.normal(90, 20), d.normal(90)
    q, x, whole, few = query, vectors, vectors.astype(np.int8), numbers[1:].copy()
    places = [
        (q, x),
        (q, x, 1.0),
        (q, x, -1),
        (q, x, 2**70),
        (q[0], x, 1),
        ([1.0], x, 1),
        (q, x[:, :19].copy(), 1),
        (q, x[::2], 1),
        (q, whole, 1),
        (q.astype(np.float64), x, 1),
        (q, x.astype(np.float64), 1),
        (q, x, 1, numbers),
        (q, np.zeros((1, 2**18), np.int8), 1),
    ]
    names = [
        (x, {"scales": numbers}),
        (whole, {"scales": few}),
        (whole, {"scales": numbers[::2]}),
        (x, {"keep": numbers}),
        (x, {"keep": few > 0}),
        (x, {"keep": np.ones((90, 1), bool)}),
        (x, {"kept": None}),
    ]
    return [(_core._search, given) for given in places] + [
        (functools.partial(_core._search, q, x, 1), named) for x, named in names
    ]


def machine(d):
    wrong = [
        (_core._set_isa, ("none",)),
        (_core.set_num_threads, (0,)),
        (_core.set_num_threads, ("one",)),
        (_core._fma_peak, ("none", 1, 1)),
    ]

    def call():
        errors = [raised(*each) for each in wrong]
        _core._set_isa(_core.get_isa())
        _core.set_num_threads(1)
        _core._fma_peak("float32", 1, 1)
        _core._read_bandwidth(10000, 1, 1)
        _core._keep_arena(False)
        _core._keep_arena(True)
        asked = _core.available_isas(), _core.build_info(), _core.get_num_threads(), _core._quant_shapes()
        asked += tuple(_core._attention_parameters().items())
        return errors, asked, [_core._compact_unit(int8) for int8 in (True, False)]

    return call, []


def transformer(d, number, dropout=False):
    """A drawn transformer: different numbers give different settings (drawn_transformers.py)."""
    model, inputs, ends, added = drawn_transformer(
        number, d.dtype, d=24, lengths=(30, 1, 50), dropout=dropout
    )

    def call():
        y, pullback = engine.vjp(model, inputs, ends, added)
        return engine.forward(model, inputs, ends, added), pullback(y)

    return call, [inputs, ends, *(x for x in engine.arrays(model) if x is not None)]


def compact(d, weight, kind):
    if kind in QUANTS:
        return drawn_blocks(d.rng, kind, *weight.shape)
    return Compact(*to_kind("w", weight, kind))


def product(d, kind, rows=40, **options):
    x, bias = d.normal(rows, 256), d.normal(130)
    weight = compact(d, d.normal(130, 256), kind)

    def call():
        weight.__dict__.pop("_packed", None)  # so that the call packs again
        return multiply(x, weight, bias, **options), weight[[0, 3, 129]], np.asarray(weight[5:9])

    return call, [x, bias, weight.raw if kind in QUANTS else weight.values]


def panels(d):
    """Weights of bfloat16, packed as on a CPU that multiplies them."""
    weight = d.rng.integers(0, 2**16, (130, 256), np.uint16)
    return lambda: _core._bfloat16_panels(weight) is None, [weight]  # the object cannot be compared


def decoding(d, kind=None):
    """Append tokens to a cache that some sequences leave, with float weights or with quants."""
    size, width, heads = 256, 64, 2

    def of(weight):
        return compact(d, weight, kind) if kind else weight

    def projection(out, into):
        return engine.Projection(of(d.normal(out, into) * into**-0.5), d.normal(out))

    one = engine.Layer(
        2 * heads,
        projection(2 * heads * width, size),
        projection(heads * width, size),
        projection(heads * width, size),
        output=projection(size, 2 * heads * width),
        attention_norm=engine.Norm(d.normal(size), kind="rms"),
        up=projection(256, size),
        gate=projection(256, size),
        down=projection(size, 256),
        num_key_heads=heads,
        feed_forward_norm=engine.Norm(d.normal(size), d.normal(size)),
        norm_first=True,
        activation="silu",
        causal=True,
    )
    table = of(d.normal(300, size))
    model = Decoder(engine.Transformer((one, one), table), table, max_seq_len=90)
    ids = [d.ids(n) for n in (62, 1, 20)]
    kept = model.new_cache(3)
    model.next_logits(ids, kept)
    more = [d.ids(n) for n in (3, 9, 5)]
    before = kept.lengths, kept.keys[..., :62, :].copy(), kept.values[..., :62, :].copy()

    def call():  # the cache grows beyond 64 tokens
        kept.lengths = before[0].copy()
        first = model.logits(ids[0]), model.hidden(ids[:2])
        return first, model.next_logits(more, kept)

    def unchanged():
        assert np.array_equal(kept.lengths, before[0]), "the lengths changed"
        for now, then in ((kept.keys, before[1]), (kept.values, before[2])):
            for n, used in enumerate(kept.lengths):
                assert np.array_equal(now[:, n, :, :used], then[:, n, :, :used]), "the past changed"

    return call, [*ids, unchanged]


def leaving(d):
    """Sequences leave a cache, and it grows."""
    kept = DecoderCache(2, 3, 2, 64, 500, np.dtype(np.float32))
    kept.reserve(100)
    kept.lengths = np.array([80, 3, 40])
    kept.keys[...], kept.values[...] = d.normal(*kept.keys.shape), d.normal(*kept.keys.shape)
    lengths, keys, values = kept.lengths.copy(), kept.keys, kept.values

    def call():
        kept.lengths, kept.keys, kept.values = lengths.copy(), keys, values
        kept.keep([2, 0])
        return kept.lengths

    def unchanged():
        assert np.array_equal(kept.lengths, lengths), "the lengths changed"
        assert kept.keys is keys and kept.values is values, "an array was replaced"

    return call, [keys, values, unchanged]


ALL = OPERATIONS | {
    "refused: attention": operation(
        refused, calls=lambda d: [(sa.scaled_dot_product_attention, bad.arguments()) for bad in BAD]
    ),
    **{
        f"refused: {name}": operation(refused, calls=calls)
        for name, calls in {
            "late": late,
            "gradients": wrong_gradients,
            "tangents": wrong_tangents,
            "packed": wrong_packed,
            "steps": wrong_steps,
            "searches": wrong_searches,
            "layers": wrong_layers,
            "transformers": wrong_transformers,
        }.items()
    },
    **{
        f"refused: rows of {dtype}": operation(refused, calls=wrong_rows, dtype=dtype)
        for dtype in ("bfloat16", "float64", "int8")
    },
    "rounding and checksums": operation(rounding),
    "capsule of another library": operation(capsule, dtype="bfloat16"),
    "triplets": operation(triplets),
    "search": operation(search, kind="float32", threads=2),
    "search of int8": operation(search, kind="int8", queries=70, threads=2),
    "search of int8 with few queries": operation(search, kind="int8", queries=2),
    "triplets of float64": operation(triplets, dtype="float64"),
    "machine": operation(machine, alone=True),
    **{
        f"transformer {n}": operation(
            transformer, number=n, dtype=("float32", "float64")[n % 2], threads=1 + n // 2 % 2
        )
        for n in range(12)
    },
    "transformer with dropout": operation(transformer, number=12, dropout=True, threads=2),
    **{f"product of {kind}": operation(product, kind=kind) for kind in [*KINDS, *QUANTS]},
    **{f"row of {kind}": operation(product, kind=kind, rows=1, decoding=True) for kind in QUANTS},
    "panels of bfloat16": operation(panels),
    "decoding": operation(decoding, in_place=True),
    **{
        f"decoding with {kind}": operation(decoding, kind=kind, in_place=True)
        for kind in [*KINDS, "Q4_0", "Q4_K", "Q6_K", "F16"]
    },
    "sequences leave": operation(leaving, in_place=True),
}
