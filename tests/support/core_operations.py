"""Operations whose memory fails in `memory_fails.py`: together they call every function of the extension, in all its ways.

Each is a function that prepares: it returns a call, and the arrays that the call may not change when it fails; functions among
them check what is no array. Inputs are drawn anew each time, the same ones.
"""

import contextlib
import functools

import ml_dtypes
import numpy as np
from bad_calls import BAD
from blocks import drawn as drawn_blocks
from drawn_transformers import drawn as drawn_transformer

import selfattn as sa
from selfattn import _core, models, nn, optim
from selfattn.engine import transformer as engine
from selfattn.engine.decoder import Decoder, DecoderCache
from selfattn.engine.weights import QUANTS, Compact, multiply, rounded

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
KINDS = ["int8"] + ["bfloat16"] * (_core._compact_unit(False) is not None)
RNG = np.random.default_rng(0)
AT_FIRST = RNG.bit_generator.state


def start_again():
    """Draw the same numbers again."""
    RNG.bit_generator.state = AT_FIRST


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape, dtype=np.float32).astype(dtype)


def arrays(dtype=np.float32, length=40, keys=48):
    """Larger than the blocks that NumPy keeps for itself."""
    return (
        normal(2, 3, length, 16, dtype=dtype),
        normal(2, 3, keys, 16, dtype=dtype),
        normal(2, 3, keys, 16, dtype=dtype),
    )


class Generator:
    """One of another library, as any object that draws integers."""

    def integers(self, low, high, size, dtype):
        return high // 3


# ----------------------------------------------------------------------------------------------------- attention


def attention(dtype=np.float32, keys=48, **options):
    def prepare():
        given = arrays(dtype, keys=keys)
        more = {name: make() if callable(make) else make for name, make in options.items()}
        if more.pop("into", False):
            more["out"] = np.full((2, 3, 40, 16), 7, dtype)
        return lambda: sa.scaled_dot_product_attention(*given, **more), [*given, *more.values()]

    return prepare


def gradients(dtype=np.float32, keys=48, wrt=("query", "key", "value"), **options):
    def prepare():
        given = arrays(dtype, keys=keys)
        more = {name: make() if callable(make) else make for name, make in options.items()}

        def call():
            out, pullback = sa.scaled_dot_product_attention_vjp(*given, wrt=wrt, **more)
            return out, pullback(out)

        return call, [*given, *more.values()]

    return prepare


def into_gradients(dtype=np.float32):
    def prepare():
        given = arrays(dtype)
        out, statistics = sa.scaled_dot_product_attention_forward(*given)
        kept = sa.AttentionGradients(*(np.full_like(x, 7) for x in given))

        def call():
            return sa.scaled_dot_product_attention_backward(out, out, statistics, *given, gradients=kept)

        return call, [*given, out, statistics, *(x for x in kept if x is not None)]

    return prepare


def packed(masks=False):
    def prepare():
        q, k, v = (x[0].swapaxes(0, 1) for x in arrays())
        rows, keys = np.array([0, 10, 40]), np.array([0, 20, 48])
        options = {"attn_mask": [normal(10, 20), None]} if masks else {"is_causal": True}
        wrt = {"wrt": ("query", "key", "value", "attn_mask")} if masks else {}

        def call():
            out = sa.varlen_attention(q, k, v, rows, keys, **options)
            y, pullback = sa.varlen_attention_vjp(q, k, v, rows, keys, **options, **wrt)
            return out, y, pullback(y)

        return call, [q, k, v, rows, keys]

    return prepare


def additive():
    given = *(x[0] for x in arrays()), normal(16, 20), normal(16, 20), normal(20)

    def call():
        out, pullback = sa.additive_attention_vjp(*given)
        return out, pullback(out)

    return call, given


def merged():
    outs, lses = [normal(2, 3, 40, 16) for _ in range(2)], [normal(2, 3, 40) for _ in range(2)]
    given = [*outs, *lses]

    def call():
        results, pullback = sa.merge_attention_vjp(outs, lses)
        return results, pullback(*results)

    return call, given


def cache():
    q, k, v = (normal(1, 2, 20, 64) for _ in range(3))
    kept = sa.KVCache(1, 2, 64)
    kept.append(k[:, :, :10], v[:, :, :10])
    before = kept.key.copy(), kept.value.copy()

    def call():
        return kept.attend(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:])

    def unchanged():
        assert kept.lengths.tolist() == [10], "the cache grew"
        assert all(np.array_equal(a, b) for a, b in zip(before, (kept.key, kept.value), strict=True))

    return call, [q, k, v, unchanged]


def refused():
    """Every bad call: what is raised, unless there is no memory to say it."""
    given = [bad.arguments() for bad in BAD]

    def call():
        messages = []
        for arguments in given:
            try:
                sa.scaled_dot_product_attention(**arguments)
            except Exception as error:
                if getattr(arguments.get("query"), "size", 0) >= 2**30:
                    continue  # of PiB: a MemoryError may be NumPy's or ours
                if isinstance(error, MemoryError):
                    raise
                messages.append(type(error).__name__)  # what it says may be shorter
        return messages

    return call, []


# --------------------------------------------------------------------------------------------------- row operations


def rows(name, *arguments, dtype=np.float32, x=None):
    def prepare():
        given = normal(30, 64, dtype=dtype) if x is None else x()
        more = [make() if callable(make) else make for make in arguments]

        def call():
            y, pullback = getattr(sa, f"{name}_vjp")(given, *more)
            return getattr(sa, name)(given, *more), y, pullback(y)

        return call, [given, *more]

    return prepare


def rounding():
    x, whole, strided = normal(40, 64), np.zeros((40, 64), BFLOAT16), normal(64, 40).T

    def call():
        _core._narrow(x, whole, 0)
        return _core._checksum((x, whole, strided)), _core._checksum((strided[::2, ::3],))

    return call, [x, strided]


def triplets(dtype):
    def prepare():
        y, products = normal(3, 70, 16, dtype=dtype), normal(2, 70, dtype=dtype)
        return lambda: (_core._proxy_confidences(y), _core._proxy_gradients(y, products)), [y, products]

    return prepare


def machine():
    def call():
        with contextlib.suppress(ValueError):
            _core._set_isa("none")
        with contextlib.suppress(ValueError):
            _core.set_num_threads(0)
        with contextlib.suppress(TypeError):
            _core.set_num_threads("one")
        with contextlib.suppress(ValueError):
            _core._fma_peak("none", 1, 1)
        _core._set_isa(_core.get_isa())
        _core.set_num_threads(1)
        _core._keep_arena(False)
        _core._fma_peak("float32", 1, 1)
        _core._read_bandwidth(10000, 1, 1)
        return _core.available_isas(), _core.build_info(), _core.get_num_threads(), _core._quant_shapes()

    return call, []


# ------------------------------------------------------------------------------------------------------------- steps


def step(make, dtype=np.float32, plain=True, first=False):
    def prepare():
        grown = {"w": normal(40, 20, dtype=dtype), "v": normal(300, dtype=dtype)}
        parameters = {name: x if plain else x[::-1] for name, x in grown.items()}
        grads = {name: normal(*x.shape, dtype=dtype) for name, x in parameters.items()}
        optimizer = make(parameters)
        if not first:
            optimizer.step(grads)
        before = optimizer.state_dict()

        def unchanged():
            from memory_fails import same

            assert same(optimizer.state_dict(), before), "the optimiser's state changed"

        return lambda: optimizer.step(grads), [*parameters.values(), *grads.values(), unchanged]

    return prepare


def clipping(dtype=np.float32, plain=True):
    def prepare():
        grown = {"w": normal(40, 20, dtype=dtype), "v": normal(300, dtype=dtype)}
        grads = {name: x if plain else x[::-1] for name, x in grown.items()}
        return lambda: optim.clip_grad_norm_(grads, 0.5), list(grads.values())

    return prepare


# ------------------------------------------------------------------------------------------------------------ layers


@functools.cache
def made(make, *arguments, **options):
    return make(*arguments, **options)


def layer(make, *arguments, inputs=((40, 32),), given=None, threads=1, **options):
    """Forward and backward of a layer; `given` makes options of the call."""

    def prepare():
        module = made(make, *arguments, **options)
        x = [normal(*own) if isinstance(own, tuple) else own() for own in inputs]
        more = {name: value() if callable(value) else value for name, value in (given or {}).items()}

        def call():
            sa.set_num_threads(threads)
            try:
                y, pullback = module.vjp(*x, **more)
                dy = y[0] if isinstance(y, tuple) else y
                return module(*x, **more), y, pullback(dy)
            finally:
                sa.set_num_threads(1)

        return call, [*x, *more.values(), *module.parameters().values()]

    return prepare


def loss(make, inputs, **options):
    def prepare():
        x, target = inputs()

        def call():
            value, pullback = make(**options).vjp(x, target)
            return value, pullback(np.ones_like(value))

        return call, [x, target]

    return prepare


def transformer(seed, dtype, threads=1, dropout=False):
    """A drawn one: seeds differ in every setting (drawn_transformers.py)."""

    def prepare():
        model, inputs, ends = drawn_transformer(seed, dtype, d=24, lengths=(30, 1, 50), dropout=dropout)
        parameters = [x for x in engine.arrays(model) if x is not None]

        def call():
            sa.set_num_threads(threads)
            try:
                y, pullback = engine.vjp(model, inputs, ends)
                return engine.forward(model, inputs, ends), pullback(y)
            finally:
                sa.set_num_threads(1)

        return call, [inputs, ends, *parameters]

    return prepare


TRIANGLE = ~np.tri(20, dtype=bool)
MASKS = {
    "no mask": {},
    "a float mask": {"mask": np.where(TRIANGLE, -np.inf, 0.25).astype(np.float32)},
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


def language_model(positions, dropout=0.0):
    return nn.GPT(300, 32, 2, 2, 64, positions, dropout=dropout, rng=0)


def learning(positions, threads=1):
    def prepare():
        model, ids = made(language_model, positions), [RNG.integers(0, 300, n) for n in (50, 2, 31)]

        def call():
            sa.set_num_threads(threads)
            try:
                value, pullback = model.loss_vjp(ids)
                y, logits_pullback = model.vjp(ids[:1])
                return model.loss(ids), value, pullback(1.0), logits_pullback(y)
            finally:
                sa.set_num_threads(1)

        return call, [*ids, *model.parameters().values()]

    return prepare


def writing(make, *arguments, **options):
    """Generation, with a cache that grows, of prompts that end at different steps."""

    def prepare():
        model, prompts = made(make, *arguments), [RNG.integers(0, 50, n) for n in (60, 3)]

        def call():
            return model.generate(prompts, 6, **options)

        return call, [*prompts, *model.parameters().values()]

    return prepare


def task(dtype):
    words = [f"w{n}" for n in range(300)]
    model = nn.EmbeddingModel(
        lambda sentence: [words.index(word) for word in sentence.split()], 300, 32, max_seq_len=40, num_layers=2,
        num_heads=2, dtype=dtype, rng=0,
    )  # fmt: skip
    return nn.ProxyTask(model)


def proxy(dtype=np.float32):
    def prepare():
        whole = made(task, dtype)
        given = [[" ".join(f"w{n}" for n in RNG.integers(0, 300, m)) for m in (3, 30)] for _ in range(3)]

        def call():
            value, pullback = whole.vjp(*given)
            return whole.execute(*given), value, pullback(-0.5)

        return call, list(whole.parameters().values())

    return prepare


# ------------------------------------------------------------------------------------- weights of few bits, and models


def compact(weight, kind):
    return drawn_blocks(RNG, kind, *weight.shape) if kind in QUANTS else Compact(*rounded("w", weight, kind))


def product(kind, rows_of_x=40, **options):
    def prepare():
        x, bias = normal(rows_of_x, 256), normal(130)
        weight = compact(normal(130, 256), kind)
        values = weight.raw if kind in QUANTS else weight.values

        def call():
            weight.__dict__.pop("packed", None)  # packs again
            return multiply(x, weight, bias, **options), weight[[0, 3, 129]], np.asarray(weight[5:9])

        return call, [x, bias, values]

    return prepare


def decoding(kind=None):
    """Tokens behind those in a cache, of which some sequences go: with whole weights, or with ones of few bits."""

    def of(weight):
        return None if weight is None else compact(weight, kind) if kind else weight

    def prepare():
        d, width, heads = 256, 64, 2

        def projection(out, into):
            return engine.Projection(of(normal(out, into) * into**-0.5), normal(out))

        one = engine.Layer(
            2 * heads, projection(2 * heads * width, d), projection(heads * width, d), projection(heads * width, d),
            output=projection(d, 2 * heads * width), attention_norm=engine.Norm(normal(d), kind="rms"),
            up=projection(256, d), gate=projection(256, d), down=projection(d, 256), num_key_heads=heads,
            feed_forward_norm=engine.Norm(normal(d), normal(d)), norm_first=True, activation="silu", causal=True,
        )  # fmt: skip
        table = of(normal(300, d))
        model = Decoder(engine.Transformer((one, one), table), table, max_seq_len=90)
        ids = [RNG.integers(0, 300, n) for n in (62, 1, 20)]
        kept = model.new_cache(3)
        model.next_logits(ids, kept)
        more = [RNG.integers(0, 300, n) for n in (3, 9, 5)]
        before = kept.lengths, kept.keys[..., :62, :].copy(), kept.values[..., :62, :].copy()

        def call():  # the cache grows beyond 64 tokens
            first = model.logits(ids[0]), model.hidden(ids[:2])
            return first, model.next_logits(more, kept)

        def unchanged():
            assert np.array_equal(kept.lengths, before[0]), "the lengths changed"
            for now, then in ((kept.keys, before[1]), (kept.values, before[2])):
                for n, used in enumerate(kept.lengths):
                    assert np.array_equal(now[:, n, :, :used], then[:, n, :, :used]), "the past changed"

        return call, [*ids, unchanged]

    return prepare


def leaving():
    """Sequences leave a cache, and it grows."""
    kept = DecoderCache(2, 3, 2, 64, 500, np.dtype(np.float32))
    kept.reserve(100)
    kept.lengths = np.array([80, 3, 40])
    kept.keys[...], kept.values[...] = normal(*kept.keys.shape), normal(*kept.keys.shape)
    lengths, keys, values = kept.lengths.copy(), kept.keys, kept.values

    def call():
        kept.keep([2, 0])

    def unchanged():
        assert np.array_equal(kept.lengths, lengths), "the lengths changed"
        assert kept.keys is keys and kept.values is values, "an array was replaced"

    return call, [keys, values, unchanged]


CONFIG = {
    "vocab_size": 300, "max_position_embeddings": 64, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
    "intermediate_size": 96,
}  # fmt: skip
LLAMA = CONFIG | {"num_key_value_heads": 1}
DISTILBERT = {
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "n_layers": 1,
    "dim": 64,
    "n_heads": 2,
    "hidden_dim": 96,
}
GPT2 = {"vocab_size": 300, "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
VIT = {
    "model_type": "vit", "image_size": 12, "patch_size": 4, "num_channels": 2, "num_hidden_layers": 2, "hidden_size": 64,
    "num_attention_heads": 2, "intermediate_size": 96,
}  # fmt: skip
ENCODERS = {
    "BertModel": CONFIG,
    "RobertaModel": CONFIG | {"type_vocab_size": 1},
    "DistilBertModel": DISTILBERT,
    "MPNetModel": CONFIG,
    "ModernBertModel": CONFIG | {"local_attention": 8},
    "BertForSequenceClassification": CONFIG | {"num_labels": 3},
}


@functools.cache
def model_of(name, kind=None):
    config = ENCODERS.get(name) or {"LlamaForCausalLM": LLAMA, "GPT2LMHeadModel": GPT2, "ViTModel": VIT}[name]
    model = getattr(models, name)(config, rng=0)
    return model if kind is None else model.quantize(kind)


def encoding(name, kind=None):
    def prepare():
        model = model_of(name, kind)
        ids, ends = RNG.integers(3, 300, 60), np.array([0, 1, 50, 60])

        def call():
            run = model._logits if "Classification" in name else model._rows
            return run(ids, ends), model.hidden_states(ids[:20])

        return call, [ids, ends, *model.parameters().values()]

    return prepare


def encoder_gradients(name):
    def prepare():
        model = model_of(name)
        ids, ends = RNG.integers(3, 300, 60), np.array([0, 1, 50, 60])

        def call():
            y, pullback = model._rows_vjp(ids, ends)
            return y, pullback(y)

        return call, [ids, ends, *model.parameters().values()]

    return prepare


def pictures():
    model, pixels = model_of("ViTModel"), normal(3, 2, 12, 12)
    return lambda: (model(pixels), model.hidden_states(pixels[0])), [pixels, *model.parameters().values()]


def quantizing(kind):
    """A model that is rounded, and packed at its first use."""

    def prepare():
        model = models.BertModel(CONFIG, model_of("BertModel").state_dict())
        ids, ends = RNG.integers(3, 300, 60), np.array([0, 1, 50, 60])
        return lambda: model.quantize(kind)._rows(ids, ends), [ids, ends]

    return prepare


def answering(name, kind=None):
    def prepare():
        model, ids = model_of(name, kind), RNG.integers(3, 300, 40)

        def call():
            return model.logits(ids), model.hidden_states(ids), model.generate(ids, 4)

        return call, [ids, *model.parameters().values()]

    return prepare


OPERATIONS = {
    # attention
    "attention": attention(),
    "attention of two threads": attention(keys=5000, num_threads=2),
    "attention into out": attention(into=True),
    "attention into out, with weights and lse": attention(into=True, return_weights=True, return_lse=True),
    "float16 with weights and lse": attention(np.float16, return_weights=True, return_lse=True),
    "bfloat16": attention(BFLOAT16, is_causal=True),
    "every option": attention(
        attn_mask=lambda: normal(40, 48), window=(9, 9), softcap=5.0, alibi_slopes=lambda: normal(3), sinks=lambda: normal(3),
        key_lengths=lambda: np.array([[40], [48]]), dropout_p=0.2, rng=3,
    ),
    "lists": attention(key_lengths=[[40], [48]], window=[9, 9]),
    "dropout of a generator": attention(dropout_p=0.2, rng=Generator),
    "dropout of NumPy's generator": attention(dropout_p=0.2, rng=lambda: RNG),
    "blocks": attention(block_mask=lambda: sa.BlockMask.from_blocks(RNG.random((5, 6)) < 0.6, (8, 8))),
    "documents": attention(keys=40, block_mask=lambda: sa.BlockMask.from_documents(np.sort(RNG.integers(0, 3, 40)))),
    "prefix": attention(block_mask=lambda: sa.BlockMask.prefix_lm(np.array([7]))),
    "gradients": gradients(),
    "gradients of two threads": gradients(keys=2000, num_threads=2),
    "gradients of a mask": gradients(attn_mask=lambda: normal(2, 1, 40, 48), wrt=("query", "key", "value", "attn_mask")),
    "gradients of slopes and sinks": gradients(
        alibi_slopes=lambda: normal(3), sinks=lambda: normal(3), wrt=("query", "alibi_slopes", "sinks")
    ),
    "gradients of bfloat16": gradients(BFLOAT16, is_causal=True),
    "gradients into arrays": into_gradients(),
    "gradients into arrays of float16": into_gradients(np.float16),
    "packed": packed(),
    "packed with masks": packed(masks=True),
    "additive attention": additive,
    "merged": merged,
    "in place: cache": cache,
    "bad calls": refused,
    # row operations, sums, the machine
    "softmax": rows("softmax"),
    "softmax of an earlier axis": rows("softmax", 0, x=lambda: normal(3, 30, 64)[::-1]),
    "log_softmax": rows("log_softmax", dtype=np.float16),
    "layer_norm": rows("layer_norm", 64, lambda: normal(64), lambda: normal(64)),
    "layer_norm of bfloat16": rows("layer_norm", (30, 64), dtype=BFLOAT16),
    "rms_norm": rows("rms_norm", 64, lambda: normal(64)),
    "gelu": rows("gelu"),
    "gelu with tanh": rows("gelu", "tanh"),
    "gelu of integers": rows("gelu", x=lambda: RNG.integers(-3, 3, (30, 64))),
    "rotary": rows("apply_rotary_emb", lambda: normal(20, 8), lambda: normal(20, 8), x=lambda: normal(2, 3, 20, 16)),
    "rounding and checksums": rounding,
    "triplets": triplets(np.float32),
    "triplets of float64": triplets(np.float64),
    "machine": machine,
    # steps
    "in place: SGD": step(lambda p: optim.SGD(p, momentum=0.9)),
    "in place: Adam": step(optim.Adam),
    "in place: AdamW of float16": step(optim.AdamW, np.float16),
    "in place: SGD of bfloat16": step(lambda p: optim.SGD(p, momentum=0.9), BFLOAT16),
    "in place: Adam of strides": step(optim.Adam, plain=False),
    "in place: first step": step(optim.Adam, first=True),
    "in place: first step of float16": step(optim.Adam, np.float16, plain=False, first=True),
    "in place: clipping": clipping(),
    "in place: clipping of strides": clipping(plain=False),
    "in place: clipping of float16": clipping(np.float16),
    "in place: clipping of bfloat16, strided": clipping(BFLOAT16, plain=False),
    # layers
    "linear": layer(nn.Linear, 32, 48, rng=0),
    "linear of two threads": layer(nn.Linear, 256, 256, rng=0, inputs=((300, 256),), threads=2),
    "linear of float64": layer(nn.Linear, 32, 48, rng=0, dtype=np.float64),
    "linear of float16": layer(nn.Linear, 32, 48, rng=0, dtype=np.float16),
    "GELU": layer(nn.GELU),
    "SiLU": layer(nn.SiLU),
    "LayerNorm": layer(nn.LayerNorm, 32),
    "RMSNorm": layer(nn.RMSNorm, 32),
    "Embedding": layer(nn.Embedding, 300, 32, rng=0, inputs=(lambda: RNG.integers(0, 300, 50),)),
    "LearnedPositions": layer(nn.LearnedPositions, 32, 64, rng=0),
    "RotaryEmbedding": layer(nn.RotaryEmbedding, 32, inputs=((2, 3, 40, 32),)),
    "SelfAttention": layer(nn.SelfAttention, 32, 32, rng=0),
    "SelfAttentionBlock": layer(nn.SelfAttentionBlock, 32, 2, rng=0, inputs=((2, 40, 32),)),
    "MultiheadAttention": layer(nn.MultiheadAttention, 32, 2, rng=0, inputs=((40, 32), (50, 32), (50, 32))),
    "cross entropy": loss(nn.CrossEntropyLoss, lambda: (normal(40, 64), RNG.integers(0, 64, 40)), label_smoothing=0.1),
    "mean squares": loss(nn.MSELoss, lambda: (normal(40, 64), normal(40, 64))),
    "logits": loss(nn.BCEWithLogitsLoss, lambda: (normal(40, 64), RNG.random((40, 64), np.float32))),
    # the transformer
    **{f"transformer {seed}": transformer(seed, (np.float32, np.float64)[seed % 2], 1 + seed // 2 % 2) for seed in range(12)},
    "transformer with dropout": transformer(12, np.float32, 2, dropout=True),
    **{
        f"encoder, {name}{', two threads' * (threads - 1)}": layer(
            encoder, norm_first, inputs=((2, 20, 32),), given=masks, threads=threads
        )
        for n, (name, masks) in enumerate(MASKS.items())
        for threads, norm_first in ((1, n % 2 == 0), (2, n % 2 == 1))
    },
    "decoder": layer(decoder, inputs=((2, 20, 32), (2, 30, 32)), given={"tgt_mask": TRIANGLE, "tgt_is_causal": True}),
    "decoder with masks, two threads": layer(
        decoder, inputs=((2, 20, 32), (2, 30, 32)), threads=2,
        given={
            "tgt_mask": np.where(TRIANGLE, -np.inf, 0.25).astype(np.float32),
            "memory_key_padding_mask": np.arange(30) >= np.array([[30], [13]]),
        },
    ),
    "GPT": learning("learned"),
    "GPT of two threads": learning("rotary", 2),
    "GPT writes": writing(language_model, "learned"),
    "GPT draws": writing(language_model, "rotary", temperature=1.0, top_k=9, rng=0),
    "proxy task": proxy(),
    "proxy task of float16": proxy(np.float16),
    # weights of few bits
    **{f"product of {kind}": product(kind) for kind in [*KINDS, *QUANTS]},
    **{f"row of {kind}": product(kind, 1, steps=True) for kind in QUANTS},
    "decoding": decoding(),
    **{f"decoding with {kind}": decoding(kind) for kind in [*KINDS, "Q4_0", "Q4_K", "Q6_K", "F16"]},
    "in place: sequences leave": leaving,
    # models
    **{f"{name}": encoding(name) for name in ENCODERS},
    **{f"{name} of {kind}": encoding(name, kind) for name in ("BertModel", "ModernBertModel") for kind in KINDS},
    "gradients of BertModel": encoder_gradients("BertModel"),
    "gradients of ModernBertModel": encoder_gradients("ModernBertModel"),
    **{f"rounding to {kind}": quantizing(kind) for kind in KINDS},
    "pictures": pictures,
    "GPT2LMHeadModel": answering("GPT2LMHeadModel"),
    **{f"LlamaForCausalLM of {kind}": answering("LlamaForCausalLM", kind) for kind in [None, *KINDS]},
}  # fmt: skip
