"""The C core of the transformer against the reference: every setting, drawn, on every instruction set; and what it
refuses."""

import tracemalloc

import numpy as np
import pytest
from drawn_transformers import bad_calls, drawn, good_call
from inputs import LAYOUTS
from instruction_sets import ISAS, using

import selfattn as sa
from selfattn import _core, nn, reference
from selfattn.engine import transformer
from selfattn.engine.transformer import Layer, Norm, Projection, Transformer

# Sizes around vectors, panels and tiles of the instruction sets, the rows of a product (240) and of a thread's share
# (384); the width is small and drawn, or given.
LENGTHS = {
    "short": ((3, 1, 5), None), "tiles": ((17, 1, 40, 33), 24), "wide": ((130, 2), 130),
    "shares": ((19, 23, 1, 40, 7) * 6, 32), "long": ((300,), 66),
}  # fmt: skip
SIZES = [("short", "short", "tiles", "wide")[seed % 4] for seed in range(40)] + ["shares", "long"] * 3


def close(got, expected, dtype, what):
    assert (got.shape, got.dtype) == (expected.shape, dtype), what
    # Sums of up to 300 terms, in up to eight products one after the other, relative to the largest element.
    atol = 2048 * np.finfo(dtype).eps * max(1.0, np.abs(expected).max(initial=0))
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=what)


@pytest.mark.parametrize(("seed", "size"), [*enumerate(SIZES)])
def test_results_and_gradients(seed, size, threads_restored):
    lengths, width = LENGTHS[size]
    dtype = (np.float32, np.float64)[seed % 2]
    model, inputs, ends, call = drawn(seed, dtype, d=width, lengths=lengths, dropout=seed % 3 == 0)
    # The core returns a mask's gradient for each head; here no two heads share a key head.
    heads = {number for layer in model.layers for number in (layer.num_heads, layer.num_key_heads)}
    mask = call.mask if model.position_bias is None else model.position_bias
    has_numbers = mask is not None and mask.dtype != bool
    shared = has_numbers and {(1, n) for n in heads} == {mask.shape[:2]}
    truth, true_pullback = reference.transformer_vjp(model, inputs, ends, np.float64, call=call)
    dy = np.random.default_rng(1).standard_normal(truth.shape).astype(dtype)
    expected = truth, *true_pullback(dy)
    for isa in ISAS:
        with using(isa):
            assert_results_and_gradients((model, inputs, ends, call), shared, dy, expected, isa)


def assert_results_and_gradients(given, shared, dy, expected, isa):
    """Compare the core on one instruction set with the reference, and its bits for several numbers of threads."""
    truth, true_dx, true_grads, true_mask = expected
    sa.set_num_threads(None)
    y, pullback = transformer.vjp(*given, wants_mask=shared)
    close(y, truth, dy.dtype, f"y, {isa}")
    np.testing.assert_array_equal(transformer.forward(*given), y)
    dx, grads, d_mask = pullback(dy)
    close(dx, true_dx, dy.dtype, f"dx, {isa}")
    assert len(grads) == len(true_grads)
    for n, (grad, true_grad) in enumerate(zip(grads, true_grads, strict=True)):
        close(grad, true_grad, dy.dtype, f"gradient {n}, {isa}")
    if shared:
        close(d_mask, true_mask, dy.dtype, f"dmask, {isa}")
    alone, none, _ = transformer.vjp(*given, wants_parameters=False)[1](dy)
    np.testing.assert_array_equal(alone, dx)
    assert none == []
    for threads in (1, 2, 7):
        sa.set_num_threads(threads)
        np.testing.assert_array_equal(transformer.forward(*given), y)
        for grad, again in zip(grads, pullback(dy)[1], strict=True):  # new arrays of the same bits
            assert not np.shares_memory(grad, again)
            np.testing.assert_array_equal(grad, again)


def test_without_sequences_the_gradients_are_zero():
    for seed in range(4):
        model, inputs, _, call = drawn(seed, np.float64)
        call = call._replace(mask=None, key_bias=None)
        y, pullback = transformer.vjp(model._replace(position_bias=None), inputs[:0], np.array([0]), call)
        assert y.shape[0] == 0
        assert not any(grad.any() for grad in pullback(y)[1])


def test_a_sequence_does_not_depend_on_its_company(isa):
    """A single sentence may be split between two threads, and few queries do not use the matrix unit."""
    rng = np.random.default_rng(0)
    model = nn.EmbeddingModel(str.split, 50, 64, max_seq_len=100, rng=0)
    other = rng.integers(0, 50, 100).tolist()
    for length in (1, 16, 17, 32, 33, 40, 48, 49, 63, 64, 65, 97):
        sentence = rng.integers(0, 50, length).tolist()
        for company in ([sentence, other], [other, [1], sentence], [sentence] * 20):
            np.testing.assert_array_equal(model(company)[company.index(sentence)], model(sentence))


def test_masks_of_any_dtype_and_layout(isa):
    """The core reads masks without a copy, which would be as large as the mask."""
    model, inputs, ends, call = drawn(1, np.float32, lengths=(40, 33))
    model = model._replace(position_bias=None)
    # Integers, which are the same in every dtype.
    mask = np.random.default_rng(0).integers(-8, 8, (2, 1, 40, 40)).astype(np.float32)
    mask[mask == -8] = -np.inf
    mask[..., 0] = 0
    expected = transformer.forward(model, inputs, ends, call._replace(mask=mask))
    others = [mask.astype(dtype) for dtype in (np.float64, np.float16, ">f4", ">f8")]
    for other in (*(layout(mask) for layout in LAYOUTS.values()), *others):
        found = transformer.forward(model, inputs, ends, call._replace(mask=other))
        np.testing.assert_array_equal(found, expected)


def test_a_window_wider_than_any_sequence_closes_nothing():
    rng = np.random.default_rng(0)
    table, query = rng.standard_normal((5, 4)), rng.standard_normal((12, 4))
    layer = transformer.Layer(2, transformer.Projection(query), output=transformer.Projection(np.eye(4)))
    inputs, ends = np.arange(5), np.array([0, 5])
    expected = transformer.forward(transformer.Transformer((layer,), table), inputs, ends)
    wide = transformer.Transformer((layer._replace(window=(2**63 - 2, 2**63 - 2)),), table)
    np.testing.assert_array_equal(transformer.forward(wide, inputs, ends), expected)


@pytest.mark.parametrize("tokens", [1, 3, 7, 48])
def test_weights_that_do_not_stay_in_a_cache(tokens, isa):
    """With few rows and more than 1 MB of weights, kernels prefetch weights. A token's bits do not depend on other
    tokens."""
    rng = np.random.default_rng(0)
    d, wide = 200, 300

    def linear(out, into):
        return Projection((rng.standard_normal((out, into)) * into**-0.5).astype(np.float32))

    def norm():
        return Norm(np.ones(d, np.float32), np.zeros(d, np.float32))

    layer = Layer(
        4,
        linear(3 * d, d),
        None,
        None,
        output=linear(d, d),
        attention_norm=norm(),
        up=linear(wide, d),
        down=linear(d, wide),
        feed_forward_norm=norm(),
    )
    model = Transformer((layer,))
    x = rng.standard_normal((60, d)).astype(np.float32)
    among_many = transformer.forward(model, x, np.arange(61))
    close(among_many, reference.transformer_vjp(model, x, np.arange(61), np.float64)[0], np.float32, "y")
    alone = transformer.forward(model, x[:tokens], np.arange(tokens + 1))
    np.testing.assert_array_equal(alone, among_many[:tokens])


@pytest.mark.parametrize("arguments", bad_calls().values(), ids=bad_calls())
def test_bad_calls_are_refused(arguments):
    for keep in (False, True):
        with pytest.raises((TypeError, ValueError)):
            _core._transformer_forward(*arguments, keep)


def test_a_record_has_the_fields_that_the_core_knows():
    """`_core._record` compares names once, when a class is made; a class that it refuses changes nothing."""

    def made(name, fields, base=Norm):
        return type(name, (tuple,), {"_fields": fields})

    known = Norm._fields
    for fields, message in (
        (known[:-1], "Norm lacks the field kind"),
        ((*known, "gain"), "the core knows no field 'gain' of Norm"),
        ((*known[:-1], 3), "the core knows no field 3 of Norm"),
        (list(known), "no tuple of _fields"),
    ):
        with pytest.raises(TypeError, match=message):
            _core._record(made("Norm", fields))
    with pytest.raises(TypeError, match="knows no record Nrom"):
        _core._record(made("Nrom", Norm._fields))
    for other in (Norm(np.ones(2)), int, None):
        with pytest.raises(TypeError, match="subclass of tuple"):
            _core._record(other)
    model, *arguments = good_call()
    _core._transformer_forward(model._replace(final_norm=Norm(np.ones(24))), *arguments, False)


def test_a_record_may_have_its_fields_in_any_order():
    turned = type("Norm", (tuple,), {"_fields": Norm._fields[::-1]})
    model, *arguments = good_call()
    norm = Norm(np.full(24, 2.0), np.ones(24), 1e-3, "rms")
    expected = _core._transformer_forward(model._replace(layers=(), final_norm=norm), *arguments, False)
    try:
        _core._record(turned)
        found = model._replace(layers=(), final_norm=turned(norm[::-1]))
        np.testing.assert_array_equal(_core._transformer_forward(found, *arguments, False), expected)
        with pytest.raises(
            TypeError, match=r"final_norm must be a Norm, not selfattn\.engine\.transformer\.Norm"
        ):
            _core._transformer_forward(model._replace(layers=(), final_norm=norm), *arguments, False)
    finally:
        _core._record(Norm)


def test_messages_name_the_field():
    model, *arguments = good_call()
    layer = model.layers[0]
    for changed, message in (
        ({"query_norm": Norm(np.ones(5))}, r"query_norm must have shape \(6,\), not \(5,\)"),
        (
            {"output": Projection(np.ones((24, 24)), np.ones(3))},
            r"the bias of output must have shape \(24,\)",
        ),
        ({"softcap": "2"}, "softcap must be a float, not str"),
        ({"activation": "swish"}, "activation must be one of None relu gelu gelu_tanh silu, not 'swish'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            _core._transformer_forward(model._replace(layers=(layer._replace(**changed),)), *arguments, False)


def test_bad_gradients_are_refused():
    y, saved = _core._transformer_forward(*good_call(), True)
    for wrong in (y[:2], y[:, :-1], y.astype(np.float32), y.T, np.asfortranarray(y), y[0]):
        with pytest.raises(ValueError, match=r"float64 with shape \(3, 24\)"):
            _core._transformer_backward(saved, wrong, True, False)
    for arguments in ((None, y), (saved, None), (saved,), (y, y)):
        with pytest.raises((TypeError, ValueError)):
            _core._transformer_backward(*arguments, True, False)
    with pytest.raises(ValueError, match="float mask"):
        _core._transformer_backward(saved, y, True, True)


def test_memory_of_past_sizes_makes_room():
    """Memory that small models left must not prevent a larger model from reusing its own."""
    # More blocks at once than the core keeps.
    held = [_core._transformer_forward(*good_call(6, 3), True) for _ in range(20)]
    del held
    arguments = good_call(130, 2, 2, [12] * 20)
    tracemalloc.start()
    try:
        for _ in range(10):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            y, saved = _core._transformer_forward(*arguments, True)
            _core._transformer_backward(saved, y, False, False)
            del y, saved
            peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak < 2**15  # scratch memory and gradients take some MiB


def test_ids_are_packed_or_left_to_python():
    ids, starts = _core._pack_ids([[3, 1], [0], [9, 9, 9]], 10)
    assert (ids.dtype, starts.dtype) == (np.int64, np.int64)
    assert (ids.tolist(), starts.tolist()) == ([3, 1, 0, 9, 9, 9], [0, 2, 3, 6])
    assert [array.tolist() for array in _core._pack_ids([], 10)] == [[], [0]]
    numbers = ([10], [-1], [2**63], [-(2**80)], [True], [1.0], ["1"], [np.int64(1)])
    for odd in ([], None, (1,), np.array([1]), *numbers):
        assert _core._pack_ids([[1], odd], 10) is None
    with pytest.raises(TypeError):
        _core._pack_ids(([1],), 10)
