"""Weights in the blocks of a GGUF file: their numbers, and their products."""

import copy
import pickle

import numpy as np
import pytest
from instruction_sets import using
from refusals import refusals

import selfattn as sa
from selfattn import _core
from selfattn.engine import transformer as core
from selfattn.engine.decoder import Decoder
from selfattn.engine.weights import QUANTS, Quants, multiply
from tests.support.blocks import HALVES, drawn, expected

pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", QUANTS)
def test_numbers_of_blocks(kind, isa):
    """Every number, to the bit: products of few bits are exact, and sums are rounded once."""
    blocks = drawn(np.random.default_rng(0), kind, 9, 768)
    want = expected(blocks)
    assert np.array_equal(blocks[:], want)
    assert np.array_equal(np.asarray(blocks), want)
    assert np.array_equal(blocks[3], want[3])
    assert np.array_equal(blocks[2:5], want[2:5])
    assert np.array_equal(blocks[[[-1, 0], [4, 4]]], want[[[-1, 0], [4, 4]]])
    with pytest.raises(IndexError):
        blocks[9]


@pytest.mark.parametrize("kind", [kind for kind, (numbers, _) in QUANTS.items() if numbers > 1] + ["F16"])
def test_scales_that_are_no_numbers(kind, isa):
    """Infinities and NaN propagate as in floats."""
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (40, 2 * QUANTS[kind][1]), np.uint8)  # one scale in 32 is not finite
    blocks = Quants(raw, kind, (40, 2 * QUANTS[kind][0]))
    for at in HALVES[kind]:
        raw[at % 5, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
        raw[9 + at % 5, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    with np.errstate(all="ignore"):
        want = expected(blocks)
        assert not np.isfinite(want).all()
        assert np.array_equal(blocks[:], want, equal_nan=True)
        x = rng.standard_normal((7, want.shape[1])).astype(np.float32)
        y, floats = multiply(x, blocks, None), multiply(x, want, None)
    assert np.array_equal(np.isnan(y), np.isnan(floats))
    assert np.array_equal(y[~np.isnan(y)], floats[~np.isnan(y)])


# Columns around the vector width and a panel; rows where the kernels for few rows end, and where tasks are cut.
@pytest.mark.parametrize("kind", QUANTS)
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 256, 1), (3, 768, 33), (5, 256, 130), (100, 1280, 65), (300, 256, 15)]
)
def test_products(kind, rows, width, out, isa, threads_restored):
    """The sums equal those of float32 weights, in the same order; a row's bits do not depend on other rows."""
    rng = np.random.default_rng(rows)
    blocks = drawn(rng, kind, out, width)
    x, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, width), out))
    want = multiply(x, expected(blocks), bias)
    for threads in (1, 2, 3):
        sa.set_num_threads(threads)
        assert np.array_equal(multiply(x, blocks, bias), want)
    assert np.array_equal(multiply(x[:1], blocks, bias)[0], want[0])


# ---- rows of decoding
# ----------------------------------------------------------------------------------------------------

QUANTIZED = {kind: numbers for kind, (numbers, _) in QUANTS.items() if numbers > 1}
# The largest factors by which a block multiplies its scale d, and m with it: 15 + 1, 128, 63 times as many, 127 times
# 32.
LARGEST = {
    "Q4_0": 8,
    "Q4_1": 16,
    "Q5_0": 16,
    "Q5_1": 32,
    "Q8_0": 128,
    "IQ4_NL": 127,
    "Q2_K": 15 * 4,
    "Q3_K": 32 * 4,
    "Q4_K": 63 * 16,
    "Q5_K": 63 * 32,
    "Q6_K": 128 * 32,
    "IQ4_XS": 32 * 127,
}


def bound_of_steps(x, out_of, kind):
    """Bound the error of a product of decoding.

    A number of 32 is off by two units at most: half of one each as it is scaled and rounded, and as its scale and the
    inverse of that are; a unit is the largest by 8355000, below 2⁻²². A product adds three roundings, and one for the
    sum so far.
    """
    pieces = np.abs(x.astype(np.float64)).reshape(len(x), -1, 32)
    rounded = 2.0**-21 * 32 * pieces.max(-1).sum(-1)
    added = (pieces.shape[1] + 8) * 2.0**-24 * pieces.sum((1, 2))
    return ((rounded + added) * LARGEST[kind] * 0.01)[:, None] + np.zeros(out_of)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(
    ("rows", "width", "out"), [(1, 256, 1), (1, 1280, 47), (3, 768, 16), (5, 512, 130), (2, 2560, 33)]
)
def test_rows_of_decoding(kind, rows, width, out, isa, threads_restored):
    rng = np.random.default_rng(width)
    blocks = drawn(rng, kind, out, width)
    x = (rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-3, 3, (rows, 1))).astype(np.float32)
    x[0, 7], x[:, 32:64] = 300, 0
    want = x.astype(np.float64) @ expected(blocks).T.astype(np.float64)
    y = multiply(x, blocks, None, decoding=True)
    assert (np.abs(y - want) <= bound_of_steps(x, out, kind)).all()
    for threads in (1, 2, 3):
        sa.set_num_threads(threads)
        assert np.array_equal(multiply(x, blocks, None, decoding=True), y)
    alone = [multiply(row[None], blocks, None, decoding=True)[0] for row in x]
    assert np.array_equal(alone, y)
    bias = rng.standard_normal(out).astype(np.float32)
    error = np.abs(multiply(x, blocks, bias, decoding=True) - (want + bias))
    assert (error <= bound_of_steps(x, out, kind) + 2.0**-23 * np.abs(want + bias)).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_of_decoding_that_are_no_numbers(kind, isa):
    """Rows with NaN or infinities give what other products give, and affect no other row; finite rows are right."""
    rng = np.random.default_rng(4)
    blocks = drawn(rng, kind, 37, 512)
    x = rng.standard_normal((8, 512)).astype(np.float32)
    clean = multiply(x, blocks, None, decoding=True)
    x[1, 3], x[4, 500], x[6] = np.nan, np.inf, -np.inf
    with np.errstate(all="ignore"):
        y, other = multiply(x, blocks, None, decoding=True), multiply(x, blocks, None)
    for row in range(8):
        assert np.array_equal(y[row], other[row] if row in (1, 4, 6) else clean[row], equal_nan=True)
    small = np.zeros((3, 512), np.float32)
    small[0], small[1], small[2, ::7] = 1e-38, 1e33, 1e-44
    want = small.astype(np.float64) @ expected(blocks).T.astype(np.float64)
    error = np.abs(multiply(small, blocks, None, decoding=True) - want)
    # Results of numbers below 1e-30 have an absolute error too: two units for each of 512 terms.
    assert (error <= bound_of_steps(small, 37, kind) + 512 * 2e-37 * LARGEST[kind] * 0.01).all()


@pytest.mark.parametrize("kind", QUANTIZED)
def test_scales_of_decoding_that_are_no_numbers(kind, isa):
    rng = np.random.default_rng(5)
    blocks = drawn(rng, kind, 40, 512)
    raw = blocks.raw.reshape(40, -1, QUANTS[kind][1])
    at = HALVES[kind][0]
    raw[5, 0, at : at + 2] = np.array([np.inf], np.float16).view(np.uint8)
    raw[20, 1, at : at + 2] = np.array([np.nan], np.float16).view(np.uint8)
    x = rng.standard_normal((3, 512)).astype(np.float32)
    with np.errstate(all="ignore"):
        finite = np.isfinite(multiply(x, Quants(raw.reshape(40, -1), kind, (40, 512)), None, decoding=True))
    assert not finite[:, [5, 20]].any()
    assert np.delete(finite, [5, 20], axis=1).all()


# ---- rows of one and two digits
# ------------------------------------------------------------------------------------------

MOST = {1: 127, 2: 32639}


def rounded_rows(x, digits):
    """Round each 32 numbers to integers of that many digits, as the core does; return what they stand for."""
    pieces = x.reshape(len(x), -1, 32)
    most = np.abs(pieces).max(-1, keepdims=True)
    scaled = pieces * (np.float32(MOST[digits]) / most)
    whole = np.trunc(scaled + np.where(scaled < 0, np.float32(-0.5), np.float32(0.5)))
    assert np.abs(whole).max() == MOST[digits]
    return (whole * (most / np.float32(MOST[digits])).astype(np.float64)).reshape(x.shape)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_rows_of_digits(kind, isa, threads_restored):
    """Sums of 32 are exact, so that only their scales and additions round; rows that are not finite multiply as
    float32."""
    rng = np.random.default_rng(7)
    for digits, rows, width, out in ((1, 101, 1280, 35), (2, 6, 1536, 49), (1, 1, 256, 16), (2, 130, 256, 1)):
        blocks = drawn(rng, kind, out, width)
        x = (rng.standard_normal((rows, width)) * 10.0 ** rng.integers(-3, 3, (rows, 1))).astype(np.float32)
        want = rounded_rows(x, digits) @ expected(blocks).T.astype(np.float64)
        # Products and sums of width / 32 pieces: each rounds a few times, as large as all terms together.
        bound = (width // 32 + 8) * 2.0**-24 * LARGEST[kind] * 0.01 * np.abs(x.astype(np.float64)).sum(1)
        y = multiply(x, blocks, None, digits=digits)
        assert (np.abs(y - want) <= bound[:, None] + 1e-30).all()
        x[-1, 5] = np.nan
        with np.errstate(all="ignore"):
            spoiled, other = multiply(x, blocks, None, digits=digits), multiply(x, blocks, None)
        assert np.array_equal(spoiled[:-1], y[:-1])
        assert np.array_equal(spoiled[-1], other[-1], equal_nan=True)
        for threads in (1, 3):
            sa.set_num_threads(threads)
            assert np.array_equal(multiply(x[:-1], blocks, None, digits=digits), y[:-1])
            assert np.array_equal(multiply(x[:1], blocks, None, digits=digits)[0], spoiled[0], equal_nan=True)


@pytest.mark.skipif("avx2" not in _core.available_isas(), reason="one instruction set fuses multiply-adds")
def test_digits_have_the_same_bits_on_all_that_fuse():
    rng = np.random.default_rng(8)
    for kind in QUANTIZED:
        blocks, x = drawn(rng, kind, 40, 768), rng.standard_normal((9, 768)).astype(np.float32)
        for digits in (1, 2):
            want = multiply(x, blocks, None, digits=digits)
            with using("avx2"):
                assert np.array_equal(multiply(x, blocks, None, digits=digits), want)
    with pytest.raises(ValueError, match="digits must be 0 to 3, not 4"):
        multiply(x, blocks, None, digits=4)


def layer_of(rng, kinds, d, heads, hidden, make):
    """Describe a layer of Llama's, with projections that `make` makes of a kind and a shape."""

    def projection(i, out, width):
        return core.Projection(make(kinds[i % len(kinds)], out, width))

    norm = core.Norm(rng.uniform(0.5, 1.5, d).astype(np.float32), kind="rms")
    angles = np.outer(np.arange(40), 10.0 ** -np.arange(0, 4, 4 / (d // heads // 2)))
    return core.Layer(
        num_heads=heads,
        num_key_heads=heads // 2,
        query=projection(0, d, d),
        key=projection(1, d // 2, d),
        value=projection(2, d // 2, d),
        output=projection(3, d, d),
        attention_norm=norm,
        up=projection(4, hidden, d),
        gate=projection(5, hidden, d),
        down=projection(6, d, hidden),
        feed_forward_norm=norm,
        norm_first=True,
        activation="silu",
        causal=True,
        rotary=core.Rotary(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)),
    )


@pytest.mark.parametrize(
    "kinds", [("Q4_1",), ("Q4_0", "Q8_0"), ("Q4_K", "Q6_K", "BF16", "F16", "F32"), ("Q5_0", "IQ4_XS")]
)
def test_a_transformer(kinds, isa):
    """Weights and a table of several kinds of quants give the bits of float32 weights."""
    rng = np.random.default_rng(2)
    made = []

    def make(kind, out, width):
        made.append(drawn(rng, kind, out, width, 0.001))
        return made[-1]

    table = make(kinds[-1], 50, 256)
    layers = tuple(layer_of(rng, kinds, 256, 4, 512, make) for _ in range(2))
    final = core.Norm(rng.uniform(0.5, 1.5, 256).astype(np.float32), kind="rms")
    positions = rng.standard_normal((40, 256)).astype(np.float32)
    model = core.Transformer(
        layers, table=table, positions=positions, token_type_row=positions[3], final_norm=final
    )
    whole = {id(blocks): expected(blocks) for blocks in made}

    def as_floats(part):
        return part._replace(weight=whole[id(part.weight)]) if isinstance(part, core.Projection) else part

    floats = model._replace(
        table=whole[id(table)], layers=tuple(core.Layer(*map(as_floats, layer)) for layer in layers)
    )
    ids, starts = rng.integers(0, 50, 61), np.array([0, 1, 30, 61])
    y = core.forward(model, ids, starts)
    assert np.array_equal(y, core.forward(floats, ids, starts))
    assert np.array_equal(y[1:30], core.forward(model, ids[1:30], np.array([0, 29])))
    with pytest.raises(ValueError, match="no gradients"):
        core.vjp(model, ids, starts)


@pytest.mark.parametrize("kinds", [("Q4_1",), ("Q4_0", "Q8_0"), ("Q4_K", "Q6_K"), ("Q4_1", "F16")])
def test_decoding(kinds, isa, threads_restored):
    """Decoding token by token equals a whole prompt to a few eps; the bits do not depend on other sequences."""
    rng = np.random.default_rng(6)
    layers = tuple(
        layer_of(rng, kinds, 256, 4, 512, lambda *shape: drawn(rng, *shape, 0.01)) for _ in range(2)
    )
    table = drawn(rng, kinds[-1], 50, 256)
    final = core.Norm(np.ones(256, np.float32), kind="rms")
    model = Decoder(core.Transformer(layers, table=table, final_norm=final), table, max_seq_len=40)
    prompts = [rng.integers(0, 50, n) for n in (5, 1, 17)]
    new = rng.integers(0, 50, (3, 6))

    def decode(chosen):
        cache = model.new_cache(len(chosen))
        found = [model.next_logits([prompts[i] for i in chosen], cache)]
        return [*found, *(model.next_logits(list(new[chosen, i, None]), cache) for i in range(6))]

    together = np.array(decode([0, 1, 2]))
    for i, prompt in enumerate(prompts):
        sa.set_num_threads(1 + i)
        assert np.array_equal(np.array(decode([i]))[:, 0], together[:, i])
        whole = model.logits(np.concatenate([prompt, new[i]]))[len(prompt) - 1 :]
        # Up to 512 terms, in five products one after the other, in each of two layers; norms keep rows at a size of 1.
        size = np.abs(expected(table)).sum(1).max()
        np.testing.assert_allclose(together[:, i], whole, rtol=0, atol=2 * 5 * 64 * 2.0**-24 * size)


def test_rows_of_a_mapped_file(tmp_path):
    """The bytes that rows are expanded from stay in the mapped file."""
    blocks = drawn(np.random.default_rng(3), "Q4_1", 64, 1024)
    (tmp_path / "weights").write_bytes(b"x" * 3 + blocks.raw.tobytes())
    mapped = np.memmap(tmp_path / "weights", np.uint8, "r", 3, blocks.raw.shape)  # not aligned
    own = Quants(mapped, "Q4_1", blocks.shape)
    assert own.raw is mapped
    x, ways = np.ones((2, 1024), np.float32), (False, True)
    results = [[multiply(x, w, None, decoding=way) for way in ways] for w in (own, blocks)]
    assert np.array_equal(*results) and own.nbytes == 64 * 1024 // 32 * 20
    for made in (copy.deepcopy(blocks), pickle.loads(pickle.dumps(blocks))):
        assert np.array_equal(made[5], blocks[5])


def test_empty():
    blocks = Quants(np.zeros((0, 20), np.uint8), "Q4_1", (0, 32))
    assert blocks[:].shape == (0, 32)
    assert multiply(np.ones((3, 32), np.float32), blocks, None).shape == (3, 0)
    narrow, bias = Quants(np.zeros((4, 0), np.uint8), "Q4_1", (4, 0)), np.arange(4, dtype=np.float32)
    assert np.array_equal(multiply(np.ones((3, 0), np.float32), narrow, bias)[2], [0, 1, 2, 3])


RAW = np.zeros((4, 40), np.uint8)
test_bad_blocks = refusals(
    (lambda: Quants(RAW, "IQ1_S", (4, 64)), ValueError, r"one of F32, .*, not 'IQ1_S'"),
    (lambda: Quants(RAW, "Q4_1", (4, 65)), ValueError, "multiple of 32 columns, not 65"),
    (
        lambda: Quants(RAW, "Q4_1", (4, 96)),
        ValueError,
        r"Q4_1 of shape \(4, 96\) must be bytes of shape \(4, 60\), not \(4, 40\)",
    ),
    *(
        (
            lambda wrong=wrong: Quants(wrong, "Q4_1", (4, 64)),
            TypeError,
            "raw must be a contiguous array of uint8, not",
        )
        for wrong in (RAW.astype(np.int8), RAW[:, ::2], [1], RAW.T)
    ),
    (
        lambda: multiply(np.ones((2, 32), np.float32), Quants(RAW, "Q4_1", (4, 64)), None),
        TypeError,
        "64 columns",
    ),
    (lambda: multiply(np.ones((2, 64)), Quants(RAW, "Q4_1", (4, 64)), None), TypeError, "float64"),
)
